/* The states of experts: who loads what, who waits, what is resident. */
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <ctime>

#include "arena.h"

namespace moe_l2 {

TableLock::TableLock(moe_l2_control * control) : mutex(&control->table_lock.mutex) {
    if (pthread_mutex_lock(mutex) == EOWNERDEAD) {
        /* Every change under this lock is one word, or is repaired by moe_l2_engine_attach(): nothing to undo. */
        pthread_mutex_consistent(mutex);
    }
}

TableLock::~TableLock() { pthread_mutex_unlock(mutex); }

void futex_wait(uint32_t * word, uint32_t expected, int timeout_ms) {
    timespec timeout{timeout_ms / 1000, (timeout_ms % 1000) * 1000000l};
    syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

void futex_wake_all(uint32_t * word) { syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

} // namespace moe_l2

using namespace moe_l2;

namespace {

constexpr int kWaitSliceMs = 200; /* a lost wake-up (the loader died) costs at most this much */

bool valid(moe_l2_arena * a, uint32_t layer, uint32_t expert) {
    moe_l2_layer * l = moe_l2_layer_at(a, layer);
    return l != nullptr && expert < l->n_expert;
}

void punch(moe_l2_arena * a, uint64_t offset, uint64_t bytes) {
    fallocate(a->arena_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t) offset, (off_t) bytes);
}

/* Under table_lock. */
void empty_layer(moe_l2_arena * a, moe_l2_layer & layer) {
    for (uint32_t e = 0; e < layer.n_expert; e++) {
        store_state(states_of(a->control, layer)[e], MOE_L2_ABSENT);
    }
    store64(layer.counters.resident, 0);
    for (moe_l2_tensor & t : layer.tensors) {
        if (t.expert_bytes != 0) {
            punch(a, t.arena_offset, t.slot_stride * layer.n_expert);
        }
    }
}

/* A lock that belongs to this opening of the memfd, not to descriptors that were inherited or duplicated. */
int lock_control(moe_l2_arena * a) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", a->control_fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) {
        return MOE_L2_E_SYSTEM;
    }
    struct flock lock {};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_len = 1;
    if (fcntl(fd, F_OFD_SETLK, &lock) != 0) {
        int result = errno == EAGAIN || errno == EACCES ? MOE_L2_E_BUSY : MOE_L2_E_SYSTEM;
        close(fd);
        return result;
    }
    a->engine_fd = fd;
    return MOE_L2_OK;
}

} // namespace

extern "C" {

int moe_l2_engine_attach(moe_l2_arena * a) {
    if (int result = lock_control(a); result != MOE_L2_OK) {
        return result;
    }
    TableLock lock(a->control);
    moe_l2_control & c = *a->control;
    c.engine_pid = (uint32_t) getpid();
    c.engine_epoch++;
    c.active = 0;
    c.bypassed = 0;
    for (uint32_t i = 0; i < c.n_layers; i++) {
        moe_l2_layer & layer = *moe_l2_layer_at(a, i);
        uint64_t resident = 0;
        for (uint32_t e = 0; e < layer.n_expert; e++) {
            uint32_t & state = states_of(&c, layer)[e];
            if (state != MOE_L2_READY) { /* LOADING by an engine that is gone, or a torn word */
                store_state(state, MOE_L2_ABSENT);
            }
            resident += state == MOE_L2_READY;
        }
        store64(layer.counters.resident, resident);
    }
    return MOE_L2_OK;
}

int moe_l2_set_layout(moe_l2_arena * a, uint32_t layer, uint32_t kind, uint32_t layout) {
    moe_l2_layer * l = moe_l2_layer_at(a, layer);
    if (l == nullptr || kind >= MOE_L2_KINDS || l->tensors[kind].expert_bytes == 0 || layout > MOE_L2_LAYOUT_REPACKED) {
        return MOE_L2_E_ARGUMENT;
    }
    TableLock lock(a->control);
    if (l->tensors[kind].layout != layout) {
        if (load64(l->counters.resident) != 0) {
            empty_layer(a, *l);
        }
        l->tensors[kind].layout = layout;
    }
    return MOE_L2_OK;
}

int moe_l2_begin_load(moe_l2_arena * a, uint32_t layer, uint32_t expert) {
    if (!valid(a, layer, expert)) {
        return MOE_L2_E_ARGUMENT;
    }
    moe_l2_layer & l = *moe_l2_layer_at(a, layer);
    TableLock lock(a->control);
    uint32_t & state = states_of(a->control, l)[expert];
    if (state != MOE_L2_ABSENT) {
        return 0;
    }
    owners_of(a->control, l)[expert] = a->control->engine_epoch;
    store_state(state, MOE_L2_LOADING);
    return 1;
}

int moe_l2_end_load(moe_l2_arena * a, uint32_t layer, uint32_t expert, int ok, uint64_t bytes_read) {
    if (!valid(a, layer, expert)) {
        return MOE_L2_E_ARGUMENT;
    }
    moe_l2_layer & l = *moe_l2_layer_at(a, layer);
    uint32_t & state = states_of(a->control, l)[expert];
    {
        TableLock lock(a->control);
        if (state != MOE_L2_LOADING) {
            return MOE_L2_E_ARGUMENT;
        }
        store_state(state, ok ? MOE_L2_READY : MOE_L2_ABSENT);
        add64(l.counters.resident, ok ? 1 : 0);
        add64(l.counters.bytes_read, bytes_read);
    }
    futex_wake_all(&state);
    return MOE_L2_OK;
}

int moe_l2_wait_ready(moe_l2_arena * a, uint32_t layer, uint32_t expert) {
    if (!valid(a, layer, expert)) {
        return MOE_L2_E_ARGUMENT;
    }
    uint32_t & state = states_of(a->control, *moe_l2_layer_at(a, layer))[expert];
    while (load_state(state) == MOE_L2_LOADING) {
        futex_wait(&state, MOE_L2_LOADING, kWaitSliceMs);
    }
    return load_state(state) == MOE_L2_READY ? MOE_L2_OK : MOE_L2_E_LOAD;
}

int moe_l2_arena_drop(moe_l2_arena * a) {
    int result = a->engine_fd >= 0 ? (int) MOE_L2_E_BUSY : lock_control(a);
    if (result != MOE_L2_OK) {
        return result;
    }
    {
        TableLock lock(a->control);
        for (uint32_t i = 0; i < a->control->n_layers; i++) {
            empty_layer(a, *moe_l2_layer_at(a, i));
        }
    }
    close(a->engine_fd);
    a->engine_fd = -1;
    return MOE_L2_OK;
}

int moe_l2_preload_request(moe_l2_arena * a, uint32_t layer, uint32_t expert, uint32_t score) {
    if (!valid(a, layer, expert)) {
        return MOE_L2_E_ARGUMENT;
    }
    __atomic_store_n(&preload_of(a->control, *moe_l2_layer_at(a, layer))[expert], score, __ATOMIC_RELAXED);
    return MOE_L2_OK;
}

int moe_l2_preload_commit(moe_l2_arena * a) {
    __atomic_fetch_add(&a->control->preload_generation, 1, __ATOMIC_RELEASE);
    futex_wake_all(&a->control->preload_generation);
    return MOE_L2_OK;
}

int moe_l2_preload_next(moe_l2_arena * a, uint32_t * layer, uint32_t * expert) {
    uint32_t best = 0;
    for (uint32_t i = 0; i < a->control->n_layers; i++) {
        moe_l2_layer & l = *moe_l2_layer_at(a, i);
        if (load64(l.counters.resident) == l.n_expert) {
            continue;
        }
        const uint32_t * wanted = preload_of(a->control, l);
        const uint32_t * states = states_of(a->control, l);
        for (uint32_t e = 0; e < l.n_expert; e++) {
            uint32_t score = __atomic_load_n(&wanted[e], __ATOMIC_RELAXED);
            if (score > best && load_state(states[e]) == MOE_L2_ABSENT) {
                best = score;
                *layer = i;
                *expert = e;
            }
        }
    }
    return best != 0 ? 1 : 0;
}

int moe_l2_preload_wait(moe_l2_arena * a, uint32_t seen, int timeout_ms) {
    futex_wait(&a->control->preload_generation, seen, timeout_ms);
    return __atomic_load_n(&a->control->preload_generation, __ATOMIC_ACQUIRE) != seen ? (int) MOE_L2_OK : (int) MOE_L2_E_TIMEOUT;
}

} // extern "C"
