/* The states of experts: who loads what, who waits, what is resident. */
#include <fcntl.h>
#include <linux/falloc.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <vector>

#include "arena.h"
#include "lists.h"

namespace moe_l2 {

TableLock::TableLock(moe_l2_control * control) : mutex(&control->table_lock.mutex) {
    if (pthread_mutex_lock(mutex) == EOWNERDEAD) {
        pthread_mutex_consistent(mutex);
        for (uint32_t i = 0; i < control->n_layers; i++) {
            repair(control, at<moe_l2_layer>(control, control->layers_offset)[i]);
        }
    }
}

TableLock::~TableLock() { pthread_mutex_unlock(mutex); }

void repair(moe_l2_control * control, moe_l2_layer & layer) {
    Lists lists(control, layer);
    for (int list = 0; list < MOE_L2_LISTS; list++) {
        layer.newest[list] = layer.oldest[list] = -1;
    }
    layer.first_empty = -1;
    int32_t * map = slot_map_of(control, layer);
    std::fill(map, map + layer.n_expert, -1);
    std::vector<int32_t> ready;
    for (int32_t i = 0; i < (int32_t) layer.n_slots; i++) {
        moe_l2_slot & s = lists.slot(i);
        const bool holds = s.expert >= 0 && (uint32_t) s.expert < layer.n_expert && map[s.expert] < 0;
        if (holds && (s.state == MOE_L2_READY || s.state == MOE_L2_LOADING)) {
            map[s.expert] = i;
            if (s.state == MOE_L2_READY) {
                ready.push_back(i);
            }
        } else {
            store_state(s.state, MOE_L2_EMPTY);
            s.expert = -1;
            s.in_use = 0;
            lists.push_empty(i);
        }
    }
    std::sort(ready.begin(), ready.end(), [&](int32_t a, int32_t b) { return lists.slot(a).last_use < lists.slot(b).last_use; });
    for (int32_t i : ready) {
        lists.push_newest(i);
    }
    store64(layer.counters.resident, ready.size());
}

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
    moe_l2_slot * slots = slots_of(a->control, layer);
    for (uint32_t i = 0; i < layer.n_slots; i++) {
        store_state(slots[i].state, MOE_L2_EMPTY);
    }
    repair(a->control, layer);
    for (const moe_l2_tensor & t : layer.tensors) {
        if (t.expert_bytes != 0) {
            punch(a, t.arena_offset, t.slot_stride * layer.n_slots);
        }
    }
}

/* A slot for an absent expert, LOADING and in use, or -1. */
int32_t make_room(moe_l2_arena * a, Lists & lists, uint32_t expert, bool may_evict, bool spare_pinned) {
    int32_t i = lists.pop_empty(expert);
    if (i < 0 && may_evict) {
        i = lists.victim(spare_pinned);
        if (i >= 0) {
            lists.evict(i);
        }
    }
    if (i >= 0) {
        lists.begin(i, expert, a->control->engine_epoch);
        lists.slot(i).in_use = 1;
    }
    return i;
}

/* Undo what acquire() did for one want. */
void give_back(Lists & lists, const moe_l2_want & want) {
    if (want.action == MOE_L2_MUST_LOAD) {
        lists.abandon(want.slot);
    } else {
        lists.slot(want.slot).in_use--;
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
        moe_l2_slot * slots = slots_of(&c, layer);
        for (uint32_t k = 0; k < layer.n_slots; k++) {
            slots[k].in_use = 0;
            if (slots[k].state != MOE_L2_READY) { /* LOADING by an engine that is gone, or a torn word */
                store_state(slots[k].state, MOE_L2_EMPTY);
            }
        }
        repair(&c, layer);
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

int moe_l2_acquire(moe_l2_arena * a, uint32_t layer, moe_l2_want * wants, size_t n) {
    moe_l2_layer * l = moe_l2_layer_at(a, layer);
    if (l == nullptr) {
        return MOE_L2_E_ARGUMENT;
    }
    for (size_t k = 0; k < n; k++) {
        if (wants[k].expert >= l->n_expert) {
            return MOE_L2_E_ARGUMENT;
        }
    }
    if (n > l->n_slots) {
        return MOE_L2_E_FULL;
    }
    TableLock lock(a->control);
    Lists lists(a->control, *l);
    /* first hold what is there, so that no want evicts another */
    for (size_t k = 0; k < n; k++) {
        moe_l2_want & w = wants[k];
        w.slot = lists.slot_of(w.expert);
        if (w.slot >= 0) {
            moe_l2_slot & s = lists.slot(w.slot);
            s.in_use++;
            w.action = s.state == MOE_L2_READY ? MOE_L2_IS_READY : MOE_L2_MUST_WAIT;
            if (w.action == MOE_L2_IS_READY) {
                lists.touch(w.slot);
            }
        }
    }
    for (size_t k = 0; k < n; k++) {
        moe_l2_want & w = wants[k];
        if (w.slot >= 0) {
            continue;
        }
        w.slot = make_room(a, lists, w.expert, true, false);
        w.action = MOE_L2_MUST_LOAD;
        if (w.slot < 0) { /* the preload holds too much just now */
            for (size_t u = 0; u < n; u++) {
                if (wants[u].slot >= 0 && (u < k || wants[u].action != MOE_L2_MUST_LOAD)) {
                    give_back(lists, wants[u]);
                }
            }
            return MOE_L2_E_FULL;
        }
    }
    return MOE_L2_OK;
}

int moe_l2_release(moe_l2_arena * a, uint32_t layer, const moe_l2_want * wants, size_t n) {
    moe_l2_layer * l = moe_l2_layer_at(a, layer);
    if (l == nullptr) {
        return MOE_L2_E_ARGUMENT;
    }
    TableLock lock(a->control);
    moe_l2_slot * slots = slots_of(a->control, *l);
    for (size_t k = 0; k < n; k++) {
        /* a slot whose load failed has been given to another expert, or to none */
        if (wants[k].slot >= 0 && slots[wants[k].slot].expert == (int32_t) wants[k].expert && slots[wants[k].slot].in_use > 0) {
            slots[wants[k].slot].in_use--;
        }
    }
    return MOE_L2_OK;
}

int moe_l2_acquire_resident(moe_l2_arena * a, uint32_t layer, moe_l2_want * want) {
    if (!valid(a, layer, want->expert)) {
        return MOE_L2_E_ARGUMENT;
    }
    moe_l2_layer & l = *moe_l2_layer_at(a, layer);
    TableLock lock(a->control);
    Lists lists(a->control, l);
    want->slot = lists.slot_of(want->expert);
    if (want->slot >= 0 && lists.slot(want->slot).state != MOE_L2_READY) {
        want->slot = -1;
    }
    if (want->slot >= 0) {
        lists.slot(want->slot).in_use++;
        lists.touch(want->slot);
        want->action = MOE_L2_IS_READY;
    }
    return MOE_L2_OK;
}

int moe_l2_end_load(moe_l2_arena * a, uint32_t layer, int32_t slot, int ok, uint64_t bytes_read) {
    moe_l2_layer * l = moe_l2_layer_at(a, layer);
    if (l == nullptr || slot < 0 || (uint32_t) slot >= l->n_slots) {
        return MOE_L2_E_ARGUMENT;
    }
    moe_l2_slot & s = slots_of(a->control, *l)[slot];
    {
        TableLock lock(a->control);
        Lists lists(a->control, *l);
        if (s.state != MOE_L2_LOADING) {
            return MOE_L2_E_ARGUMENT;
        }
        add64(l->counters.bytes_read, bytes_read);
        if (ok) {
            lists.push_newest(slot);
            store_state(s.state, MOE_L2_READY);
            count_resident(*l);
        } else {
            lists.abandon(slot);
        }
    }
    futex_wake_all(&s.state);
    return MOE_L2_OK;
}

int moe_l2_wait_ready(moe_l2_arena * a, uint32_t layer, uint32_t expert, int32_t slot) {
    moe_l2_layer * l = moe_l2_layer_at(a, layer);
    if (!valid(a, layer, expert) || slot < 0 || (uint32_t) slot >= l->n_slots) {
        return MOE_L2_E_ARGUMENT;
    }
    moe_l2_slot & s = slots_of(a->control, *l)[slot];
    while (load_state(s.state) == MOE_L2_LOADING) {
        futex_wait(&s.state, MOE_L2_LOADING, kWaitSliceMs);
    }
    return load_state(s.state) == MOE_L2_READY && s.expert == (int32_t) expert ? MOE_L2_OK : MOE_L2_E_LOAD;
}

int moe_l2_set_pins(moe_l2_arena * a, uint32_t layer, const uint32_t * scores) {
    moe_l2_layer * l = moe_l2_layer_at(a, layer);
    if (l == nullptr || scores == nullptr) {
        return MOE_L2_E_ARGUMENT;
    }
    TableLock lock(a->control);
    memcpy(pins_of(a->control, *l), scores, l->n_expert * sizeof(uint32_t));
    repair(a->control, *l); /* every slot into the list that it now belongs to, in the old order */
    __atomic_fetch_add(&a->control->pin_generation, 1, __ATOMIC_RELEASE);
    return MOE_L2_OK;
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

int moe_l2_preload_begin(moe_l2_arena * a, uint32_t * layer, moe_l2_want * want) {
    TableLock lock(a->control);
    uint32_t best = 0;
    for (uint32_t i = 0; i < a->control->n_layers; i++) {
        moe_l2_layer & l = *moe_l2_layer_at(a, i);
        if (load64(l.counters.resident) == l.n_expert) {
            continue;
        }
        Lists lists(a->control, l);
        const bool has_empty = l.n_slots == l.n_expert || l.first_empty >= 0;
        const uint32_t * wanted = preload_of(a->control, l);
        const uint32_t * pins = pins_of(a->control, l);
        for (uint32_t e = 0; e < l.n_expert; e++) {
            const uint32_t score = __atomic_load_n(&wanted[e], __ATOMIC_RELAXED);
            if (score > best && lists.slot_of(e) < 0 && (has_empty || (pins[e] != 0 && lists.victim(true) >= 0))) {
                best = score;
                *layer = i;
                want->expert = e;
            }
        }
    }
    if (best == 0) {
        return 0;
    }
    moe_l2_layer & l = *moe_l2_layer_at(a, *layer);
    Lists lists(a->control, l);
    want->slot = make_room(a, lists, want->expert, pins_of(a->control, l)[want->expert] != 0, true);
    want->action = MOE_L2_MUST_LOAD;
    return want->slot >= 0 ? 1 : 0;
}

int moe_l2_preload_wait(moe_l2_arena * a, uint32_t seen, int timeout_ms) {
    futex_wait(&a->control->preload_generation, seen, timeout_ms);
    return __atomic_load_n(&a->control->preload_generation, __ATOMIC_ACQUIRE) != seen ? (int) MOE_L2_OK : (int) MOE_L2_E_TIMEOUT;
}

} // extern "C"
