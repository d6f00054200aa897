/* Making, attaching and checking an arena: the two memfds and the layout of the control block. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "arena.h"

namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kCacheLine = 64;
constexpr uint64_t kStreamWindow = 8; /* tensors of a window that is read while the one before is computed */
constexpr uint32_t kMaxLayers = 4096;
constexpr uint32_t kMaxExperts = 65536;

uint64_t round_up(uint64_t value, uint64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

int sealed_memfd(const char * name, uint64_t bytes) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) {
        return -1;
    }
    if (ftruncate(fd, (off_t) bytes) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
        int saved = errno;
        close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

uint64_t size_of(int fd) {
    struct stat st;
    return fstat(fd, &st) == 0 ? (uint64_t) st.st_size : 0;
}

void * map_shared(int fd, uint64_t bytes) {
    void * p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return p == MAP_FAILED ? nullptr : p;
}

int map_both(moe_l2_arena & a, uint64_t control_bytes, uint64_t arena_bytes) {
    a.control = static_cast<moe_l2_control *>(map_shared(a.control_fd, control_bytes));
    a.bytes = static_cast<uint8_t *>(map_shared(a.arena_fd, arena_bytes));
    return a.control != nullptr && a.bytes != nullptr ? MOE_L2_OK : MOE_L2_E_SYSTEM;
}

bool init_robust_mutex(moe_l2_mutex & m) {
    static_assert(sizeof(pthread_mutex_t) <= sizeof(m.room), "the room for a mutex is too small on this platform");
    pthread_mutexattr_t attr;
    bool ok = pthread_mutexattr_init(&attr) == 0 && pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED) == 0 &&
              pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST) == 0 && pthread_mutex_init(&m.mutex, &attr) == 0;
    pthread_mutexattr_destroy(&attr);
    return ok;
}

using Blocks = std::map<uint32_t, std::vector<moe_l2_tensor_desc>>;

/* Group by block and refuse what cannot be an expert layer. */
bool group(const moe_l2_tensor_desc * tensors, size_t n, Blocks & blocks) {
    for (size_t i = 0; i < n; i++) {
        const moe_l2_tensor_desc & t = tensors[i];
        if (t.kind >= MOE_L2_KINDS || t.n_expert == 0 || t.n_expert > kMaxExperts || t.expert_bytes == 0) {
            return false;
        }
        auto & block = blocks[t.block];
        for (const auto & other : block) {
            if (other.kind == t.kind || other.n_expert != t.n_expert) {
                return false;
            }
        }
        block.push_back(t);
    }
    return !blocks.empty() && blocks.size() <= kMaxLayers;
}

uint64_t slot_bytes(const std::vector<moe_l2_tensor_desc> & tensors) {
    uint64_t bytes = 0;
    for (const auto & t : tensors) {
        bytes += round_up(t.expert_bytes, kCacheLine);
    }
    return bytes;
}

/* How a capacity is shared out. */
struct Shares {
    uint64_t staging = 0;         /* bytes; 0 = every expert has a slot */
    std::vector<uint32_t> slots;  /* per layer, in the order of the blocks */
    uint64_t least = 0;           /* bytes below which nothing works */
    uint64_t most = 0;            /* bytes with a slot for each expert */
};

/* Every layer gets the same share of its experts as slots, one at least. Without room for all experts, a part is kept
 * for streaming: two windows of kStreamWindow tensors, or less where that would be more than a quarter. */
bool share_out(const Blocks & blocks, uint64_t capacity, Shares & shares) {
    uint64_t one_each = 0;
    uint64_t largest = 0;
    uint64_t regions = 0;
    for (const auto & [block, tensors] : blocks) {
        for (const auto & t : tensors) {
            shares.most += round_up(round_up(t.expert_bytes, kCacheLine) * t.n_expert, kPage);
            largest = std::max(largest, round_up(t.expert_bytes, kCacheLine));
            regions++;
        }
        one_each += slot_bytes(tensors);
    }
    const uint64_t padding = regions * kPage; /* each region starts on a page */
    shares.least = one_each + padding + round_up(2 * largest, kPage);
    const bool all = capacity == 0 || capacity >= shares.most;
    if (!all && capacity < shares.least) {
        return false;
    }
    uint64_t left = shares.most;
    if (!all) {
        shares.staging = round_up(std::max(2 * largest, std::min(2 * kStreamWindow * largest, capacity / 4)), kPage);
        if (capacity - shares.staging < one_each + padding) {
            shares.staging = round_up(2 * largest, kPage);
        }
        left = capacity - shares.staging - padding;
    }
    uint64_t everything = 0;
    for (const auto & [block, tensors] : blocks) {
        everything += slot_bytes(tensors) * tensors.front().n_expert;
    }
    const double share = all ? 1.0 : (double) left / (double) everything;
    uint64_t used = 0;
    for (const auto & [block, tensors] : blocks) {
        const uint32_t n = tensors.front().n_expert;
        const auto slots = (uint32_t) std::min<double>(n, std::max(1.0, share * n));
        shares.slots.push_back(slots);
        used += slots * slot_bytes(tensors);
    }
    /* rounding up to one slot may have gone over: take from the layers that have most */
    for (size_t k = 0; !all && used > left;) {
        k = (size_t) (std::max_element(shares.slots.begin(), shares.slots.end()) - shares.slots.begin());
        used -= slot_bytes(std::next(blocks.begin(), (long) k)->second);
        shares.slots[k]--;
    }
    return true;
}

/* Lay the layers out; returns the sizes of both memfds. */
struct Sizes {
    uint64_t control;
    uint64_t arena;
    uint64_t staging_offset;
};

Sizes lay_out(const Blocks & blocks, const Shares & shares, std::vector<moe_l2_layer> & layers, uint64_t & expert_bytes_total) {
    uint64_t control = round_up(sizeof(moe_l2_control), kCacheLine);
    control += round_up(blocks.size() * sizeof(moe_l2_layer), kCacheLine);
    uint64_t arena = 0;
    expert_bytes_total = 0;
    for (const auto & [block, tensors] : blocks) {
        moe_l2_layer layer{};
        layer.block = block;
        layer.n_expert = tensors.front().n_expert;
        layer.n_slots = shares.slots[layers.size()];
        auto take = [&](uint64_t count, uint64_t word) {
            uint64_t offset = control;
            control += round_up(count * word, kCacheLine);
            return offset;
        };
        layer.slots_offset = take(layer.n_slots, sizeof(moe_l2_slot));
        layer.slot_of_offset = take(layer.n_expert, sizeof(int32_t));
        layer.uses_offset = take(layer.n_expert, sizeof(uint64_t));
        layer.preload_offset = take(layer.n_expert, sizeof(uint32_t));
        layer.pin_offset = take(layer.n_expert, sizeof(uint32_t));
        for (const auto & t : tensors) {
            moe_l2_tensor & slot = layer.tensors[t.kind];
            slot.file_offset = t.file_offset;
            slot.expert_bytes = t.expert_bytes;
            slot.slot_stride = round_up(t.expert_bytes, kCacheLine);
            slot.arena_offset = arena;
            slot.shard = t.shard;
            slot.ggml_type = t.ggml_type;
            arena += round_up(slot.slot_stride * layer.n_slots, kPage);
            expert_bytes_total += t.expert_bytes * layer.n_expert;
        }
        layers.push_back(layer);
    }
    return {round_up(control, kPage), arena + shares.staging, arena};
}

bool layer_is_sane(const moe_l2_control & c, const moe_l2_layer & l) {
    auto inside = [&](uint64_t offset, uint64_t count, uint64_t word) {
        return offset >= sizeof(moe_l2_control) && offset % 8 == 0 && offset <= c.control_bytes &&
               count * word <= c.control_bytes - offset;
    };
    if (l.n_expert == 0 || l.n_expert > kMaxExperts || l.n_slots == 0 || l.n_slots > l.n_expert ||
        !inside(l.slots_offset, l.n_slots, sizeof(moe_l2_slot)) || !inside(l.slot_of_offset, l.n_expert, 4) ||
        !inside(l.uses_offset, l.n_expert, 8) || !inside(l.preload_offset, l.n_expert, 4) ||
        !inside(l.pin_offset, l.n_expert, 4)) {
        return false;
    }
    return std::all_of(l.tensors, l.tensors + MOE_L2_KINDS, [&](const moe_l2_tensor & t) {
        return t.expert_bytes == 0 ||
               (t.slot_stride >= t.expert_bytes && t.arena_offset <= c.arena_bytes &&
                t.slot_stride <= (c.arena_bytes - t.arena_offset) / l.n_slots);
    });
}

int check(const moe_l2_control & c, uint64_t control_bytes, uint64_t arena_bytes) {
    if (c.magic != MOE_L2_CONTROL_MAGIC) {
        return MOE_L2_E_NOT_AN_ARENA;
    }
    if (c.layout_version != MOE_L2_LAYOUT_VERSION) {
        return MOE_L2_E_VERSION;
    }
    bool sizes = c.control_bytes == control_bytes && c.arena_bytes == arena_bytes && c.n_layers != 0 &&
                 c.n_layers <= kMaxLayers && c.layers_offset >= sizeof(moe_l2_control) && c.layers_offset % 8 == 0 &&
                 c.layers_offset + c.n_layers * sizeof(moe_l2_layer) <= control_bytes &&
                 c.staging_offset <= arena_bytes && c.staging_bytes <= arena_bytes - c.staging_offset;
    if (!sizes) {
        return MOE_L2_E_NOT_AN_ARENA;
    }
    auto * layers = reinterpret_cast<const moe_l2_layer *>(reinterpret_cast<const uint8_t *>(&c) + c.layers_offset);
    bool sane = std::all_of(layers, layers + c.n_layers, [&](const moe_l2_layer & l) { return layer_is_sane(c, l); });
    return sane ? MOE_L2_OK : MOE_L2_E_NOT_AN_ARENA;
}

} // namespace

extern "C" {

int moe_l2_arena_limits(const moe_l2_tensor_desc * tensors, size_t n, uint64_t * least, uint64_t * most) {
    Blocks blocks;
    Shares shares;
    if (tensors == nullptr || least == nullptr || most == nullptr || !group(tensors, n, blocks)) {
        return MOE_L2_E_ARGUMENT;
    }
    share_out(blocks, 0, shares);
    *least = std::min(shares.least, shares.most);
    *most = shares.most;
    return MOE_L2_OK;
}

int moe_l2_arena_create(const moe_l2_tensor_desc * tensors, size_t n, const uint8_t * fingerprint, uint64_t capacity,
                        moe_l2_arena ** out) {
    Blocks blocks;
    if (tensors == nullptr || fingerprint == nullptr || out == nullptr || !group(tensors, n, blocks)) {
        return MOE_L2_E_ARGUMENT;
    }
    std::vector<moe_l2_layer> layers;
    uint64_t expert_bytes_total = 0;
    Shares shares;
    if (!share_out(blocks, capacity, shares)) {
        return MOE_L2_E_CAPACITY;
    }
    const Sizes sizes = lay_out(blocks, shares, layers, expert_bytes_total);

    auto a = std::make_unique<moe_l2_arena>();
    a->arena_fd = sealed_memfd("moe-l2-arena", sizes.arena);
    a->control_fd = sealed_memfd("moe-l2-control", sizes.control);
    if (a->arena_fd < 0 || a->control_fd < 0 || map_both(*a, sizes.control, sizes.arena) != MOE_L2_OK) {
        int saved = errno;
        moe_l2_arena_close(a.release());
        errno = saved;
        return MOE_L2_E_SYSTEM;
    }
    moe_l2_control & c = *a->control;
    c.layout_version = MOE_L2_LAYOUT_VERSION;
    c.n_layers = (uint32_t) layers.size();
    c.control_bytes = sizes.control;
    c.arena_bytes = sizes.arena;
    c.layers_offset = round_up(sizeof(moe_l2_control), kCacheLine);
    c.expert_bytes_total = expert_bytes_total;
    c.staging_offset = sizes.staging_offset;
    c.staging_bytes = shares.staging;
    memcpy(c.fingerprint, fingerprint, sizeof(c.fingerprint));
    memcpy(moe_l2::at<moe_l2_layer>(&c, c.layers_offset), layers.data(), layers.size() * sizeof(moe_l2_layer));
    for (uint32_t i = 0; i < c.n_layers; i++) {
        moe_l2_layer & layer = *moe_l2_layer_at(a.get(), i);
        for (uint32_t k = 0; k < layer.n_slots; k++) {
            moe_l2::slots_of(&c, layer)[k].expert = -1;
        }
        moe_l2::repair(&c, layer);
    }
    if (!init_robust_mutex(c.table_lock)) {
        moe_l2_arena_close(a.release());
        return MOE_L2_E_SYSTEM;
    }
    __atomic_store_n(&c.magic, MOE_L2_CONTROL_MAGIC, __ATOMIC_RELEASE); /* last: an unfinished block has no magic */
    *out = a.release();
    return MOE_L2_OK;
}

int moe_l2_arena_attach(int arena_fd, int control_fd, moe_l2_arena ** out) {
    if (out == nullptr) {
        return MOE_L2_E_ARGUMENT;
    }
    const uint64_t arena_bytes = size_of(arena_fd);
    const uint64_t control_bytes = size_of(control_fd);
    if (arena_bytes == 0 || control_bytes < sizeof(moe_l2_control)) {
        return MOE_L2_E_NOT_AN_ARENA;
    }
    auto a = std::make_unique<moe_l2_arena>();
    a->arena_fd = fcntl(arena_fd, F_DUPFD_CLOEXEC, 3);
    a->control_fd = fcntl(control_fd, F_DUPFD_CLOEXEC, 3);
    int result = a->arena_fd < 0 || a->control_fd < 0 ? (int) MOE_L2_E_SYSTEM : map_both(*a, control_bytes, arena_bytes);
    if (result == MOE_L2_OK) {
        result = check(*a->control, control_bytes, arena_bytes);
    }
    if (result != MOE_L2_OK) {
        moe_l2_arena_close(a.release());
        return result;
    }
    *out = a.release();
    return MOE_L2_OK;
}

void moe_l2_arena_close(moe_l2_arena * a) {
    if (a == nullptr) {
        return;
    }
    if (a->bytes != nullptr) {
        munmap(a->bytes, size_of(a->arena_fd));
    }
    if (a->control != nullptr) {
        munmap(a->control, size_of(a->control_fd));
    }
    for (int fd : {a->arena_fd, a->control_fd, a->engine_fd}) {
        if (fd >= 0) {
            close(fd);
        }
    }
    delete a;
}

moe_l2_control * moe_l2_control_block(moe_l2_arena * a) { return a->control; }
uint8_t * moe_l2_arena_bytes(moe_l2_arena * a) { return a->bytes; }
int moe_l2_arena_fd(const moe_l2_arena * a) { return a->arena_fd; }
int moe_l2_control_fd(const moe_l2_arena * a) { return a->control_fd; }

moe_l2_layer * moe_l2_layer_at(moe_l2_arena * a, uint32_t layer) {
    return layer < a->control->n_layers ? moe_l2::at<moe_l2_layer>(a->control, a->control->layers_offset) + layer : nullptr;
}

int moe_l2_arena_matches(moe_l2_arena * a, const moe_l2_tensor_desc * tensors, size_t n) {
    Blocks blocks;
    if (tensors == nullptr || !group(tensors, n, blocks)) {
        return MOE_L2_E_ARGUMENT;
    }
    size_t present = 0;
    for (uint32_t i = 0; i < a->control->n_layers; i++) {
        const moe_l2_layer & layer = *moe_l2_layer_at(a, i);
        for (const moe_l2_tensor & t : layer.tensors) {
            present += t.expert_bytes != 0;
        }
        auto found = blocks.find(layer.block);
        if (found == blocks.end()) {
            return MOE_L2_E_MODEL;
        }
        for (const moe_l2_tensor_desc & want : found->second) {
            const moe_l2_tensor & have = layer.tensors[want.kind];
            if (layer.n_expert != want.n_expert || have.expert_bytes != want.expert_bytes || have.shard != want.shard ||
                have.file_offset != want.file_offset || have.ggml_type != want.ggml_type) {
                return MOE_L2_E_MODEL;
            }
        }
    }
    return present == n ? MOE_L2_OK : MOE_L2_E_MODEL;
}

const char * moe_l2_error_text(int error) {
    switch (error) {
        case MOE_L2_OK: return "ok";
        case MOE_L2_E_ARGUMENT: return "a layer, an expert or a description is out of range";
        case MOE_L2_E_SYSTEM: return "a system call failed";
        case MOE_L2_E_NOT_AN_ARENA: return "the descriptors do not hold an arena";
        case MOE_L2_E_VERSION: return "the arena was written by another version of moe-l2";
        case MOE_L2_E_MODEL: return "the arena was made for another model";
        case MOE_L2_E_BUSY: return "another engine uses the arena";
        case MOE_L2_E_LOAD: return "the expert could not be read";
        case MOE_L2_E_TIMEOUT: return "time ran out";
        case MOE_L2_E_FULL: return "more experts at once than there are slots";
        case MOE_L2_E_CAPACITY: return "the capacity is below what one expert of each layer needs";
        default: return "unknown error";
    }
}

const char * moe_l2_layout_text(void) {
#define FIELD(type, name) \
    std::string(#type "." #name " ") + std::to_string(offsetof(type, name)) + " " + std::to_string(sizeof(((type *) nullptr)->name)) + "\n"
    static const std::string text =
        FIELD(moe_l2_control, magic) + FIELD(moe_l2_control, layout_version) + FIELD(moe_l2_control, n_layers) +
        FIELD(moe_l2_control, control_bytes) + FIELD(moe_l2_control, arena_bytes) + FIELD(moe_l2_control, layers_offset) +
        FIELD(moe_l2_control, expert_bytes_total) + FIELD(moe_l2_control, staging_offset) + FIELD(moe_l2_control, staging_bytes) + FIELD(moe_l2_control, fingerprint) + FIELD(moe_l2_control, table_lock) +
        FIELD(moe_l2_control, engine_pid) + FIELD(moe_l2_control, engine_epoch) + FIELD(moe_l2_control, preload_generation) +
        FIELD(moe_l2_control, preload_mib_per_s) + FIELD(moe_l2_control, pin_generation) + FIELD(moe_l2_control, reserved) +
        FIELD(moe_l2_control, active) + FIELD(moe_l2_control, bypassed) +
        FIELD(moe_l2_control, graphs) + FIELD(moe_l2_control, tokens) + FIELD(moe_l2_control, graph_ns) +
        FIELD(moe_l2_control, cuts) +
        FIELD(moe_l2_layer, block) + FIELD(moe_l2_layer, n_expert) + FIELD(moe_l2_layer, n_slots) + FIELD(moe_l2_layer, reserved) +
        FIELD(moe_l2_layer, newest) + FIELD(moe_l2_layer, oldest) + FIELD(moe_l2_layer, first_empty) +
        FIELD(moe_l2_layer, reserved2) + FIELD(moe_l2_layer, tick) + FIELD(moe_l2_layer, slots_offset) +
        FIELD(moe_l2_layer, slot_of_offset) + FIELD(moe_l2_layer, uses_offset) + FIELD(moe_l2_layer, preload_offset) +
        FIELD(moe_l2_layer, pin_offset) +
        FIELD(moe_l2_layer, tensors) + FIELD(moe_l2_layer, counters) +
        FIELD(moe_l2_tensor, file_offset) + FIELD(moe_l2_tensor, expert_bytes) + FIELD(moe_l2_tensor, slot_stride) +
        FIELD(moe_l2_tensor, arena_offset) + FIELD(moe_l2_tensor, shard) + FIELD(moe_l2_tensor, ggml_type) +
        FIELD(moe_l2_tensor, layout) + FIELD(moe_l2_tensor, reserved) +
        FIELD(moe_l2_layer_counters, lookups) + FIELD(moe_l2_layer_counters, hits) + FIELD(moe_l2_layer_counters, misses) +
        FIELD(moe_l2_layer_counters, evictions) + FIELD(moe_l2_layer_counters, bytes_read) +
        FIELD(moe_l2_layer_counters, resident) + FIELD(moe_l2_layer_counters, preloaded) +
        FIELD(moe_l2_layer_counters, preloaded_used) + FIELD(moe_l2_layer_counters, preloaded_wasted) +
        FIELD(moe_l2_layer_counters, streamed) + FIELD(moe_l2_layer_counters, load_ns) +
        FIELD(moe_l2_slot, expert) + FIELD(moe_l2_slot, state) + FIELD(moe_l2_slot, owner) + FIELD(moe_l2_slot, in_use) +
        FIELD(moe_l2_slot, newer) + FIELD(moe_l2_slot, older) + FIELD(moe_l2_slot, list) + FIELD(moe_l2_slot, preloaded) +
        FIELD(moe_l2_slot, last_use) +
        "moe_l2_control size " + std::to_string(sizeof(moe_l2_control)) + "\nmoe_l2_layer size " + std::to_string(sizeof(moe_l2_layer)) +
        "\nmoe_l2_tensor size " + std::to_string(sizeof(moe_l2_tensor)) + "\nmoe_l2_slot size " + std::to_string(sizeof(moe_l2_slot)) + "\nmoe_l2_layer_counters size " +
        std::to_string(sizeof(moe_l2_layer_counters)) + "\n";
#undef FIELD
    return text.c_str();
}

} // extern "C"
