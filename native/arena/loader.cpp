#include "loader.h"

#include <cerrno>
#include <chrono>
#include <cstring>

#include "arena.h"

namespace moe_l2 {

namespace {

constexpr int kPreloadIdleMs = 100; /* how long an idle preloader sleeps before it looks again */
constexpr uint64_t kMiB = 1024 * 1024;

} // namespace

Loader::Loader(moe_l2_arena * arena, Files files, Arrange arrange, unsigned n_threads)
    : arena(arena), files(std::move(files)), arrange(std::move(arrange)), n_threads(n_threads) {
    for (unsigned i = 0; i < n_threads; i++) {
        threads.emplace_back([this, i] { work(i); });
    }
}

Loader::~Loader() {
    {
        std::lock_guard<std::mutex> lock(mutex);
        stopping = true;
    }
    wake.notify_all();
    for (auto & thread : threads) {
        thread.join();
    }
}

std::string Loader::error() const {
    std::lock_guard<std::mutex> lock(mutex);
    return last_error;
}

void Loader::fail(const std::string & text) {
    std::lock_guard<std::mutex> lock(mutex);
    last_error = text;
}

bool Loader::take(Item & item) {
    std::lock_guard<std::mutex> lock(mutex);
    if (demand.empty()) {
        return false;
    }
    item = demand.front();
    demand.pop_front();
    return true;
}

bool Loader::load(uint32_t layer, const std::vector<moe_l2_want> & wants) {
    Group group;
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (const moe_l2_want & want : wants) {
            if (want.action == MOE_L2_MUST_LOAD) {
                demand.push_back({layer, want.expert, want.slot, 0, nullptr, &group});
                group.pending++;
            }
        }
        demanded.fetch_add(group.pending);
    }
    wake.notify_all();
    bool ok = wait(group);
    for (const moe_l2_want & want : wants) {
        if (want.action == MOE_L2_MUST_WAIT) {
            ok = moe_l2_wait_ready(arena, layer, want.expert, want.slot) == MOE_L2_OK && ok;
        }
    }
    return ok;
}

void Loader::stream(uint32_t layer, uint32_t kind, const uint32_t * experts, size_t n, uint8_t * to, uint64_t stride, Group & group) {
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (size_t i = 0; i < n; i++) {
            demand.push_back({layer, experts[i], -1, kind, to + i * stride, &group});
        }
        group.pending += (int) n;
        demanded.fetch_add((int) n);
    }
    wake.notify_all();
}

bool Loader::wait(Group & group) {
    for (;;) {
        Item item;
        {
            std::unique_lock<std::mutex> lock(mutex);
            done.wait(lock, [&] { return group.pending == 0 || !demand.empty(); });
            if (group.pending == 0) {
                return group.ok;
            }
            item = demand.front();
            demand.pop_front();
        }
        run(item);
    }
}

void Loader::work(unsigned index) {
    for (;;) {
        Item item;
        if (take(item)) {
            run(item);
            continue;
        }
        if (preload_one(index)) {
            continue;
        }
        std::unique_lock<std::mutex> lock(mutex);
        if (stopping) {
            return;
        }
        if (demand.empty()) {
            wake.wait_for(lock, std::chrono::milliseconds(kPreloadIdleMs));
        }
    }
}

void Loader::run(const Item & item) {
    uint64_t bytes = 0;
    bool ok;
    if (item.slot >= 0) {
        ok = fill_slot(item.layer, item.expert, item.slot, bytes);
    } else {
        ok = read_tensor(item.layer, item.kind, item.expert, item.to, bytes);
        add64(moe_l2_layer_at(arena, item.layer)->counters.bytes_read, bytes);
    }
    demanded.fetch_sub(1);
    std::lock_guard<std::mutex> lock(mutex);
    item.group->ok = item.group->ok && ok;
    if (--item.group->pending == 0) {
        done.notify_all();
    }
}

bool Loader::fill_slot(uint32_t layer, uint32_t expert, int32_t slot, uint64_t & bytes) {
    const moe_l2_layer & l = *moe_l2_layer_at(arena, layer);
    bool ok = true;
    for (uint32_t kind = 0; ok && kind < MOE_L2_KINDS; kind++) {
        const moe_l2_tensor & t = l.tensors[kind];
        if (t.expert_bytes != 0) {
            uint8_t * to = moe_l2_arena_bytes(arena) + t.arena_offset + (uint64_t) slot * t.slot_stride;
            ok = read_tensor(layer, kind, expert, to, bytes);
        }
    }
    moe_l2_end_load(arena, layer, slot, ok ? 1 : 0, bytes);
    return ok;
}

bool Loader::read_tensor(uint32_t layer, uint32_t kind, uint32_t expert, uint8_t * to, uint64_t & bytes) {
    const moe_l2_tensor & t = moe_l2_layer_at(arena, layer)->tensors[kind];
    const bool as_in_file = t.layout == MOE_L2_LAYOUT_FILE;
    const ModelFile file = t.shard < files.size() ? files[t.shard] : ModelFile{};
    uint8_t * first = as_in_file || file.direct >= 0 ? to : thread_buffer(t.expert_bytes);
    errno = EBADF;
    const uint8_t * raw = file.fd < 0 ? nullptr : read_range(file, t.file_offset + expert * t.expert_bytes, t.expert_bytes, first);
    if (raw == nullptr) {
        const uint32_t block = moe_l2_layer_at(arena, layer)->block;
        fail("cannot read expert " + std::to_string(expert) + " of block " + std::to_string(block) + ": " +
             (errno == 0 ? std::string("the model file ends too early") : std::string(strerror(errno))));
        return false;
    }
    bytes += t.expert_bytes;
    if (!as_in_file) {
        arrange(layer, kind, raw, to);
    } else if (raw != to) {
        memcpy(to, raw, t.expert_bytes);
    }
    return true;
}

bool Loader::preload_one(unsigned index) {
    if (demanded.load(std::memory_order_relaxed) != 0 || (index != 0 && is_computing.load(std::memory_order_relaxed))) {
        return false;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (stopping) {
            return false;
        }
    }
    uint32_t layer = 0;
    moe_l2_want want{};
    if (moe_l2_preload_begin(arena, &layer, &want) != 1) {
        return false;
    }
    moe_l2_layer & l = *moe_l2_layer_at(arena, layer);
    slots_of(moe_l2_control_block(arena), l)[want.slot].preloaded = 1; /* ours while LOADING */
    uint64_t bytes = 0;
    if (fill_slot(layer, want.expert, want.slot, bytes)) {
        add64(l.counters.preloaded, 1);
    } else {
        moe_l2_preload_request(arena, layer, want.expert, 0); /* else it would be tried for ever */
    }
    moe_l2_release(arena, layer, &want, 1);
    pace(bytes);
    return true;
}

/* Keep preload under its bound; demand loads are never slowed down. */
void Loader::pace(uint64_t bytes) {
    const uint32_t mib_per_s = __atomic_load_n(&moe_l2_control_block(arena)->preload_mib_per_s, __ATOMIC_RELAXED);
    if (mib_per_s != 0) {
        /* `n_threads` preloaders share the bound */
        const double seconds = (double) bytes * (double) n_threads / ((double) mib_per_s * (double) kMiB);
        std::unique_lock<std::mutex> lock(mutex);
        wake.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stopping || !demand.empty(); });
    }
}

} // namespace moe_l2
