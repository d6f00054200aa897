/* From a pointer into a mapped file back to the file: llama.cpp hands over pointers, we need offsets. */
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace moe_l2 {

struct FileRange {
    std::string path;
    uint64_t offset; /* of the pointer, from the start of the file */
    uint64_t device; /* st_dev and st_ino of what is mapped, so that a file replaced meanwhile is noticed */
    uint64_t inode;
};

/* The files this process has mapped, as /proc/self/maps shows them. Made for the load of one model: it reads the
 * list once and again only for an address it does not know, so it must not outlive the mappings it was asked for. */
class MappedFiles {
  public:
    /* Where the `bytes` bytes at `data` come from. False if they are not all in one mapped file. */
    bool find(const void * data, size_t bytes, FileRange & out);

  private:
    struct Mapping {
        uintptr_t start;
        uintptr_t end;
        FileRange file; /* offset: of `start` */
    };
    void read();
    bool look_up(uintptr_t data, size_t bytes, FileRange & out) const;
    std::vector<Mapping> maps;
};

} // namespace moe_l2
