/* Reading a range of a model file, past the page cache where that is asked for and possible. */
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moe_l2 {

/* A file of the model, open for reading. `direct` is a second descriptor with O_DIRECT, or -1. Owned by the caller. */
struct ModelFile {
    int fd = -1;
    int direct = -1;
};
using Files = std::vector<ModelFile>; /* by shard number */

/* Read the `bytes` bytes at `offset`; the result points to them, in `to` or in a buffer that this thread keeps until
 * its next read. nullptr: errno, 0 = the file ends too early. */
const uint8_t * read_range(const ModelFile & file, uint64_t offset, uint64_t bytes, uint8_t * to);

/* A buffer of this thread, aligned for O_DIRECT, that grows as needed and holds no promise beyond the next call. */
uint8_t * thread_buffer(uint64_t bytes);

} // namespace moe_l2
