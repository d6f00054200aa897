#include "settings.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "ggml-impl.h"

namespace moe_l2 {

namespace {

/* The number in `name`, or `otherwise` if it is unset or no number in [low, high]. */
int number(const char * name, int low, int high, int otherwise) {
    const char * text = getenv(name);
    if (text == nullptr) {
        return otherwise;
    }
    char * end = nullptr;
    errno = 0;
    const long value = strtol(text, &end, 10);
    if (errno != 0 || end == text || *end != '\0' || value < low || value > high) {
        GGML_LOG_WARN("moe-l2: cannot use %s='%s': not a number from %d to %d, taking %d\n", name, text, low, high, otherwise);
        return otherwise;
    }
    return (int) value;
}

Settings read() {
    Settings s;
    s.arena_fd = number("MOE_L2_ARENA_FD", 3, 1 << 20, -1);
    s.control_fd = number("MOE_L2_CONTROL_FD", 3, 1 << 20, -1);
    s.loaders = (unsigned) number("MOE_L2_LOADERS", 1, 64, (int) s.loaders);
    s.arena_bytes = (uint64_t) number("MOE_L2_ARENA_MIB", 0, 1 << 30, 0) << 20;
    s.direct = number("MOE_L2_DIRECT_IO", 0, 1, 0) == 1;
    s.preload = number("MOE_L2_PRELOAD", 0, 1, 0) == 1;
    s.repack = number("MOE_L2_REPACK", 0, 1, 1) == 1;
    return s;
}

} // namespace

const Settings & settings() {
    static const Settings s = read();
    return s;
}

void leave_experts_to_us() { setenv("LLAMA_MMAP_NO_PREFETCH", "\\.ffn_(gate|up|down|gate_up)_exps\\.weight$", 0); }

} // namespace moe_l2
