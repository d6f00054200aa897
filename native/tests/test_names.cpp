/* Names of tensors and files, and pointers back to files. */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "check.h"
#include "moe_l2_control.h"
#include "plugin/mapped_file.h"
#include "plugin/names.h"

using namespace moe_l2;

namespace {

void expert_names() {
    ExpertName n{};
    CHECK(parse_expert_name("blk.47.ffn_gate_up_exps.weight", n) && n.block == 47 && n.kind == MOE_L2_GATE_UP);
    CHECK(parse_expert_name("blk.0.ffn_down_exps.weight", n) && n.block == 0 && n.kind == MOE_L2_DOWN);
    for (const char * other : {"blk.1.ffn_gate_exps.bias", "blk.1.ffn_gate_shexp.weight", "blk.1.ffn_up_chexps.weight", "ffn_up_exps.weight",
                               "blk.x.ffn_up_exps.weight", "blk.1.ffn_up_exps.weight.lora", "blk.-1.ffn_up_exps.weight", ""}) {
        CHECK(!parse_expert_name(other, n));
    }
}

void shards() {
    CHECK(shard_of_path("/m/qwen-00003-of-00005.gguf") == 2);
    CHECK(shard_of_path("/m/qwen-00001-of-00005.gguf") == 0);
    CHECK(shard_of_path("/m/qwen.gguf") == 0 && shard_of_path("x") == 0 && shard_of_path("-0000a-of-00005.gguf") == 0);
}

void mapped() {
    char path[] = "/tmp/moe-l2 map XXXXXX"; /* a blank in the name */
    int fd = mkstemp(path);
    CHECK(fd >= 0 && ftruncate(fd, 8 * 4096) == 0);
    auto * p = static_cast<uint8_t *>(mmap(nullptr, 8 * 4096, PROT_READ, MAP_SHARED, fd, 0));
    CHECK(p != MAP_FAILED && madvise(p + 4096, 4096, MADV_RANDOM) == 0); /* splits the mapping in the kernel's list */
    MappedFiles files;
    FileRange range;
    CHECK(files.find(p + 100, 3 * 4096, range) && range.path == path && range.offset == 100);
    CHECK(files.find(p + 5 * 4096 + 1, 10, range) && range.offset == 5 * 4096 + 1);
    CHECK(!files.find(p + 7 * 4096, 2 * 4096, range)); /* beyond the end */
    int local = 0;
    CHECK(!files.find(&local, sizeof(local), range));
    munmap(p, 8 * 4096);
    close(fd);
    unlink(path);
}

} // namespace

int main() {
    return run_all({
        {"exactly the expert weights are recognised", expert_names},
        {"the number of a shard comes from its name", shards},
        {"a pointer into a mapped file leads back to file and offset", mapped},
    });
}
