/* What the environment tells the plug-in; the only file of native/ that reads or writes it. */
#pragma once

#include <cstdint>

namespace moe_l2 {

struct Settings {
    int arena_fd = -1;     /* MOE_L2_ARENA_FD, MOE_L2_CONTROL_FD: memfds made by moe-l2d; both or none */
    int control_fd = -1;
    unsigned loaders = 4;  /* MOE_L2_LOADERS: threads that read experts */
    uint64_t arena_bytes = 0; /* MOE_L2_ARENA_MIB: capacity of an arena of our own; 0 = room for all experts */
    bool direct = false;   /* MOE_L2_DIRECT_IO=1: read experts past the page cache */
    bool preload = false;  /* MOE_L2_PRELOAD=1: an arena of our own is filled before the first graph */
    bool repack = true;    /* MOE_L2_REPACK=0: keep the file's layout, as llama.cpp's --no-repack does */
};

/* Read once; a value that cannot be used is reported and the default taken. */
const Settings & settings();

/* Ask llama.cpp (with our patch) not to fault the expert tensors in when it maps the model. */
void leave_experts_to_us();

} // namespace moe_l2
