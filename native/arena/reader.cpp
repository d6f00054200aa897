#include "reader.h"

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <memory>

namespace moe_l2 {

namespace {

constexpr uint64_t kBlock = 4096; /* no disk or file system asks for more alignment */

/* pread() until all is there. False: errno, or 0 = the file ends too early. `least` bytes are enough. */
bool read_fully(int fd, uint8_t * to, uint64_t bytes, uint64_t least, uint64_t offset) {
    uint64_t got = 0;
    while (got < least) {
        ssize_t n = pread(fd, to + got, bytes - got, (off_t) (offset + got));
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            errno = n == 0 ? 0 : errno;
            return false;
        }
        got += (uint64_t) n;
    }
    return true;
}

} // namespace

uint8_t * thread_buffer(uint64_t bytes) {
    struct Free {
        void operator()(uint8_t * p) const { free(p); }
    };
    thread_local std::unique_ptr<uint8_t, Free> buffer;
    thread_local uint64_t size = 0;
    if (size < bytes) {
        buffer.reset();
        buffer.reset(static_cast<uint8_t *>(aligned_alloc(kBlock, (bytes + kBlock - 1) / kBlock * kBlock)));
        size = buffer ? bytes : 0;
    }
    return buffer.get();
}

const uint8_t * read_range(const ModelFile & file, uint64_t offset, uint64_t bytes, uint8_t * to) {
    if (file.direct < 0) {
        return read_fully(file.fd, to, bytes, bytes, offset) ? to : nullptr;
    }
    const uint64_t start = offset / kBlock * kBlock;
    const uint64_t end = (offset + bytes + kBlock - 1) / kBlock * kBlock;
    uint8_t * buffer = thread_buffer(end - start);
    if (buffer == nullptr) {
        errno = ENOMEM;
        return nullptr;
    }
    /* the last block of the file may be cut off */
    if (!read_fully(file.direct, buffer, end - start, offset + bytes - start, start)) {
        return nullptr;
    }
    return buffer + (offset - start);
}

} // namespace moe_l2
