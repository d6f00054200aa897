/* Reads experts from the GGUF into the arena.
 *
 * Purpose: bring the missing experts of a layer in at once, with several reads in flight; stream experts past the
 * slots for batches that need more than there are; preload wanted experts in the background.
 * Threads: load(), stream() and wait() are called by the one thread that computes graphs, which helps with the work;
 * `threads` more threads do the rest. Preload yields: no thread begins one while something is demanded, and at most
 * one thread preloads while computing() says so.
 * What blocks: load() and wait(), until all they were given is there or failed.
 * Correctness rests on the arena's tables: a slot is filled by exactly one thread, the one that was told MUST_LOAD.
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
#include "arena/reader.h"

namespace moe_l2 {

/* Called for tensors whose layout is not the file's: arrange the `expert_bytes` bytes at `raw` into `slot`. */
using Arrange = std::function<void(uint32_t layer, uint32_t kind, const uint8_t * raw, uint8_t * slot)>;

class Loader {
  public:
    Loader(moe_l2_arena * arena, Files files, Arrange arrange, unsigned threads);
    ~Loader();
    Loader(const Loader &) = delete;
    Loader & operator=(const Loader &) = delete;

    /* Reads that were asked for together. */
    class Group {
        friend class Loader;
        int pending = 0; /* under the loader's mutex */
        bool ok = true;
    };

    /* Load what acquire() said must be loaded, wait for what others load. False and error() if one could not be. */
    bool load(uint32_t layer, const std::vector<moe_l2_want> & wants);
    /* Begin to read one tensor of each expert to `to + i * stride`; the group must live until wait(). */
    void stream(uint32_t layer, uint32_t kind, const uint32_t * experts, size_t n, uint8_t * to, uint64_t stride, Group & group);
    bool wait(Group & group);

    /* While true, at most one thread preloads. */
    void computing(bool on) { is_computing.store(on, std::memory_order_relaxed); }
    std::string error() const;

  private:
    struct Item {
        uint32_t layer;
        uint32_t expert;
        int32_t slot;  /* all tensors into this slot, or -1: */
        uint32_t kind; /* this tensor */
        uint8_t * to;  /* to here */
        Group * group;
    };
    void work(unsigned index);
    bool take(Item & item);
    void run(const Item & item);
    bool fill_slot(uint32_t layer, uint32_t expert, int32_t slot, uint64_t & bytes);
    bool read_tensor(uint32_t layer, uint32_t kind, uint32_t expert, uint8_t * to, uint64_t & bytes);
    bool preload_one(unsigned index);
    void pace(uint64_t bytes);
    void fail(const std::string & text);

    moe_l2_arena * const arena;
    const Files files;
    const Arrange arrange;

    mutable std::mutex mutex; /* of all below */
    std::condition_variable wake; /* there is work */
    std::condition_variable done; /* a group may be complete */
    std::deque<Item> demand;
    std::string last_error;
    bool stopping = false;

    const unsigned n_threads;
    std::atomic<bool> is_computing{false};
    std::atomic<int> demanded{0}; /* items that are queued or being read */
    std::vector<std::thread> threads;
};

} // namespace moe_l2
