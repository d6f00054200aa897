/* Reads experts from the GGUF into the arena.
 *
 * Purpose: bring the missing experts of a layer in at once, with several reads in flight, and preload wanted
 * experts in the background.
 * Threads: load() is called by one thread at a time (the one that computes graphs), which helps with the work;
 * `threads` more threads do the rest. While load() has work, and while computing() says so, preload yields.
 * What blocks: load() until every expert it was given is resident or failed.
 * Correctness rests on moe_l2_begin_load(): an expert is read by exactly one thread.
 */
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "moe_l2_arena.h"

namespace moe_l2 {

/* Where the experts' bytes are, by shard number. The descriptors stay owned by the caller. */
using Files = std::vector<int>;

/* Called for tensors whose layout is not the file's: arrange the `expert_bytes` bytes at `raw` into `slot`. */
using Arrange = std::function<void(uint32_t layer, uint32_t kind, const uint8_t * raw, uint8_t * slot)>;

class Loader {
  public:
    Loader(moe_l2_arena * arena, Files files, Arrange arrange, unsigned threads);
    ~Loader();
    Loader(const Loader &) = delete;
    Loader & operator=(const Loader &) = delete;

    /* Make the `experts` of `layer` resident. Returns false and sets error() if one could not be read. */
    bool load(uint32_t layer, const std::vector<uint32_t> & experts);
    /* While true, at most one thread preloads. */
    void computing(bool on) { is_computing.store(on, std::memory_order_relaxed); }
    std::string error() const;

  private:
    struct Item {
        uint32_t layer;
        uint32_t expert;
    };
    void work(unsigned index);
    bool take(Item & item);
    void read_expert(const Item & item, bool preload);
    bool read_tensor(uint32_t layer, uint32_t kind, uint32_t expert, uint64_t & bytes);
    bool preload_one(unsigned index);
    void pace(uint64_t bytes);
    void fail(const std::string & text);

    moe_l2_arena * const arena;
    const Files files;
    const Arrange arrange;

    mutable std::mutex mutex; /* of all below */
    std::condition_variable wake;
    std::deque<Item> demand;
    std::string last_error;
    bool stopping = false;

    std::atomic<bool> is_computing{false};
    std::atomic<int> demand_running{0};
    std::vector<std::thread> threads;
};

} // namespace moe_l2
