#include "mapped_file.h"

#include <sys/sysmacros.h>

#include <cstdio>

namespace moe_l2 {

void MappedFiles::read() {
    maps.clear();
    FILE * f = fopen("/proc/self/maps", "re");
    if (f == nullptr) {
        return;
    }
    char line[4608];
    while (fgets(line, sizeof(line), f) != nullptr) {
        unsigned long long start, end, offset, inode;
        unsigned major_no, minor_no;
        int path_at = 0;
        if (sscanf(line, "%llx-%llx %*s %llx %x:%x %llu %n", &start, &end, &offset, &major_no, &minor_no, &inode, &path_at) == 6 &&
            path_at != 0 && line[path_at] == '/') {
            std::string path(line + path_at);
            if (path.back() == '\n') {
                path.pop_back();
            }
            maps.push_back({(uintptr_t) start, (uintptr_t) end, {path, offset, makedev(major_no, minor_no), inode}});
        }
    }
    fclose(f);
}

/* Adjoining mappings of one file count as one: advice on parts of a mapping splits it. */
bool MappedFiles::look_up(uintptr_t data, size_t bytes, FileRange & out) const {
    for (size_t i = 0; i < maps.size(); i++) {
        if (data < maps[i].start || data >= maps[i].end) {
            continue;
        }
        uintptr_t end = maps[i].end;
        for (size_t j = i + 1; end < data + bytes && j < maps.size(); j++) {
            if (maps[j].start != end || maps[j].file.inode != maps[i].file.inode || maps[j].file.device != maps[i].file.device) {
                return false;
            }
            end = maps[j].end;
        }
        out = maps[i].file;
        out.offset += data - maps[i].start;
        return end >= data + bytes;
    }
    return false;
}

bool MappedFiles::find(const void * data, size_t bytes, FileRange & out) {
    const auto address = reinterpret_cast<uintptr_t>(data);
    if (look_up(address, bytes, out)) {
        return true;
    }
    read();
    return look_up(address, bytes, out);
}

} // namespace moe_l2
