#include "loader.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <memory>

#include "arena.h"

namespace moe_l2 {

namespace {

constexpr int kPreloadIdleMs = 100;      /* how long an idle preloader sleeps before it looks again */
constexpr uint64_t kMiB = 1024 * 1024;

/* A buffer that grows to the largest expert tensor and is kept by its thread. */
uint8_t * scratch(uint64_t bytes) {
    thread_local std::unique_ptr<uint8_t[]> buffer;
    thread_local uint64_t size = 0;
    if (size < bytes) {
        buffer.reset(new uint8_t[bytes]);
        size = bytes;
    }
    return buffer.get();
}

/* pread() until all is there. False: errno, or 0 = the file ends too early. */
bool read_fully(int fd, uint8_t * to, uint64_t bytes, uint64_t offset) {
    while (bytes > 0) {
        ssize_t n = pread(fd, to, bytes, (off_t) offset);
        if (n < 0 && errno == EINTR) {
            continue;
        }
        if (n <= 0) {
            errno = n == 0 ? 0 : errno;
            return false;
        }
        to += n;
        bytes -= (uint64_t) n;
        offset += (uint64_t) n;
    }
    return true;
}

} // namespace

Loader::Loader(moe_l2_arena * arena, Files files, Arrange arrange, unsigned n_threads)
    : arena(arena), files(std::move(files)), arrange(std::move(arrange)) {
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

bool Loader::load(uint32_t layer, const std::vector<uint32_t> & experts) {
    demand_running.fetch_add(1);
    {
        std::lock_guard<std::mutex> lock(mutex);
        for (uint32_t expert : experts) {
            demand.push_back({layer, expert});
        }
    }
    if (experts.size() > 1) {
        wake.notify_all();
    }
    for (Item item; take(item);) {
        read_expert(item, false);
    }
    bool ok = true;
    for (uint32_t expert : experts) {
        /* A worker that took it from the queue may not have begun yet, so it would look ABSENT: begin it here then. */
        read_expert({layer, expert}, false);
        ok = moe_l2_wait_ready(arena, layer, expert) == MOE_L2_OK && ok;
    }
    demand_running.fetch_sub(1);
    return ok;
}

void Loader::work(unsigned index) {
    for (;;) {
        Item item;
        if (take(item)) {
            read_expert(item, false);
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

bool Loader::preload_one(unsigned index) {
    if (demand_running.load(std::memory_order_relaxed) != 0 || (index != 0 && is_computing.load(std::memory_order_relaxed))) {
        return false;
    }
    {
        std::lock_guard<std::mutex> lock(mutex);
        if (stopping) {
            return false;
        }
    }
    Item item;
    if (moe_l2_preload_next(arena, &item.layer, &item.expert) != 1) {
        return false;
    }
    read_expert(item, true);
    return true;
}

void Loader::read_expert(const Item & item, bool preload) {
    if (moe_l2_begin_load(arena, item.layer, item.expert) != 1) {
        return; /* resident, or another thread is at it */
    }
    moe_l2_layer & layer = *moe_l2_layer_at(arena, item.layer);
    uint64_t bytes = 0;
    bool ok = true;
    for (uint32_t kind = 0; ok && kind < MOE_L2_KINDS; kind++) {
        ok = layer.tensors[kind].expert_bytes == 0 || read_tensor(item.layer, kind, item.expert, bytes);
    }
    moe_l2_end_load(arena, item.layer, item.expert, ok ? 1 : 0, bytes);
    if (preload) {
        if (ok) {
            add64(layer.counters.preloaded, 1);
        } else {
            moe_l2_preload_request(arena, item.layer, item.expert, 0); /* else it would be tried for ever */
        }
        pace(bytes);
    }
}

bool Loader::read_tensor(uint32_t layer, uint32_t kind, uint32_t expert, uint64_t & bytes) {
    const moe_l2_tensor & t = moe_l2_layer_at(arena, layer)->tensors[kind];
    const bool as_in_file = t.layout == MOE_L2_LAYOUT_FILE;
    uint8_t * slot = moe_l2_arena_bytes(arena) + t.arena_offset + expert * t.slot_stride;
    uint8_t * to = as_in_file ? slot : scratch(t.expert_bytes);
    const int fd = t.shard < files.size() ? files[t.shard] : -1;
    errno = EBADF;
    if (fd < 0 || !read_fully(fd, to, t.expert_bytes, t.file_offset + expert * t.expert_bytes)) {
        const uint32_t block = moe_l2_layer_at(arena, layer)->block;
        fail("cannot read expert " + std::to_string(expert) + " of block " + std::to_string(block) + ": " +
             (errno == 0 ? std::string("the model file ends too early") : std::string(strerror(errno))));
        return false;
    }
    bytes += t.expert_bytes;
    if (!as_in_file) {
        arrange(layer, kind, to, slot);
    }
    return true;
}

/* Keep preload under its bound; demand loads are never slowed down. */
void Loader::pace(uint64_t bytes) {
    const uint32_t mib_per_s = __atomic_load_n(&moe_l2_control_block(arena)->preload_mib_per_s, __ATOMIC_RELAXED);
    if (mib_per_s != 0) {
        /* `threads.size()` preloaders share the bound */
        const double seconds = (double) bytes * (double) threads.size() / ((double) mib_per_s * (double) kMiB);
        std::unique_lock<std::mutex> lock(mutex);
        wake.wait_for(lock, std::chrono::duration<double>(seconds), [this] { return stopping || !demand.empty(); });
    }
}

} // namespace moe_l2
