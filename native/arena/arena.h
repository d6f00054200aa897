/* Inside of libmoe_l2_arena.so: what its own files share. */
#pragma once

#include <atomic>

#include "moe_l2_arena.h"

struct moe_l2_arena {
    int arena_fd = -1;
    int control_fd = -1;
    int engine_fd = -1; /* a second open of the control memfd that carries the engine's lock */
    uint8_t * bytes = nullptr;
    moe_l2_control * control = nullptr;
};

namespace moe_l2 {

/* Counters and states are shared with other processes: always through these. */
inline uint64_t load64(const uint64_t & word) { return __atomic_load_n(&word, __ATOMIC_RELAXED); }
/* Of a layer's `resident`: who sees an expert counted sees its bytes, too. */
inline uint64_t load_resident(const moe_l2_layer & layer) { return __atomic_load_n(&layer.counters.resident, __ATOMIC_ACQUIRE); }
inline void count_resident(moe_l2_layer & layer) { __atomic_fetch_add(&layer.counters.resident, 1, __ATOMIC_RELEASE); }
inline void add64(uint64_t & word, uint64_t n) { __atomic_fetch_add(&word, n, __ATOMIC_RELAXED); }
inline void store64(uint64_t & word, uint64_t n) { __atomic_store_n(&word, n, __ATOMIC_RELAXED); }
inline uint32_t load_state(const uint32_t & word) { return __atomic_load_n(&word, __ATOMIC_ACQUIRE); }
inline void store_state(uint32_t & word, uint32_t state) { __atomic_store_n(&word, state, __ATOMIC_RELEASE); }

template <typename T> T * at(moe_l2_control * control, uint64_t offset) {
    return reinterpret_cast<T *>(reinterpret_cast<uint8_t *>(control) + offset);
}

inline moe_l2_slot * slots_of(moe_l2_control * c, const moe_l2_layer & layer) { return at<moe_l2_slot>(c, layer.slots_offset); }
inline int32_t * slot_map_of(moe_l2_control * c, const moe_l2_layer & layer) { return at<int32_t>(c, layer.slot_of_offset); }
inline uint64_t * uses_of(moe_l2_control * c, const moe_l2_layer & layer) { return at<uint64_t>(c, layer.uses_offset); }
inline uint32_t * pins_of(moe_l2_control * c, const moe_l2_layer & layer) { return at<uint32_t>(c, layer.pin_offset); }
inline uint32_t * preload_of(moe_l2_control * c, const moe_l2_layer & layer) { return at<uint32_t>(c, layer.preload_offset); }

/* Put a layer's lists right from its slots alone: after a death in the middle of a change. Under table_lock. */
void repair(moe_l2_control * control, moe_l2_layer & layer);

/* Holds table_lock; takes it over from a process that died with it, and repairs what that one was changing. */
class TableLock {
  public:
    explicit TableLock(moe_l2_control * control);
    ~TableLock();
    TableLock(const TableLock &) = delete;
    TableLock & operator=(const TableLock &) = delete;

  private:
    pthread_mutex_t * mutex;
};

void futex_wait(uint32_t * word, uint32_t expected, int timeout_ms);
void futex_wake_all(uint32_t * word);

} // namespace moe_l2
