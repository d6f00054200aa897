/* Which tensors are expert tensors: by name, exactly, so that one we do not know stays with llama.cpp. */
#pragma once

#include <cstdint>

namespace moe_l2 {

struct ExpertName {
    uint32_t block;
    uint32_t kind; /* enum moe_l2_kind */
};

/* "blk.<N>.ffn_<gate|up|down|gate_up>_exps.weight"; false for every other name. */
bool parse_expert_name(const char * name, ExpertName & out);

/* The number of a shard from "...-00002-of-00005.gguf", counted from 0; 0 for a file that is no shard. */
uint32_t shard_of_path(const char * path);

} // namespace moe_l2
