#include "names.h"

#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "moe_l2_control.h"

namespace moe_l2 {

bool parse_expert_name(const char * name, ExpertName & out) {
    unsigned block = 0;
    int used = 0;
    if (sscanf(name, "blk.%5u.%n", &block, &used) != 1 || used == 0 || !isdigit((unsigned char) name[4])) {
        return false;
    }
    static const struct {
        const char * rest;
        uint32_t kind;
    } kinds[] = {
        {"ffn_gate_exps.weight", MOE_L2_GATE},
        {"ffn_up_exps.weight", MOE_L2_UP},
        {"ffn_down_exps.weight", MOE_L2_DOWN},
        {"ffn_gate_up_exps.weight", MOE_L2_GATE_UP},
    };
    for (const auto & k : kinds) {
        if (strcmp(name + used, k.rest) == 0) {
            out = {block, k.kind};
            return true;
        }
    }
    return false;
}

uint32_t shard_of_path(const char * path) {
    static const char shape[] = "-00000-of-00000.gguf";
    const size_t length = strlen(path);
    const size_t tail = sizeof(shape) - 1;
    if (length < tail) {
        return 0;
    }
    const char * end = path + length - tail;
    for (size_t i = 0; i < tail; i++) {
        if (shape[i] == '0' ? !isdigit((unsigned char) end[i]) : end[i] != shape[i]) {
            return 0;
        }
    }
    const int number = atoi(std::string(end + 1, 5).c_str());
    return number > 0 ? (uint32_t) number - 1 : 0;
}

} // namespace moe_l2
