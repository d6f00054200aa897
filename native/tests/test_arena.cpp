/* The arena's tables: layout, states, deaths. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "arena/arena.h"
#include "check.h"

using namespace moe_l2;

namespace {

const uint8_t kFingerprint[32] = {7, 1, 4};
constexpr uint64_t kLarge = 50000; /* bytes of an expert's tensor where a capacity matters: rounding to pages must not */

std::vector<moe_l2_tensor_desc> two_layers(uint64_t expert_bytes = 100) {
    std::vector<moe_l2_tensor_desc> d;
    uint64_t offset = 1000;
    for (uint32_t block : {5u, 2u}) { /* not in order, and not from 0 */
        for (uint32_t kind : {MOE_L2_GATE, MOE_L2_UP, MOE_L2_DOWN}) {
            moe_l2_tensor_desc t{};
            t.block = block;
            t.kind = kind;
            t.n_expert = block == 5 ? 6 : 4;
            t.expert_bytes = expert_bytes + kind; /* no multiple of anything */
            t.file_offset = offset;
            offset += t.expert_bytes * t.n_expert;
            d.push_back(t);
        }
    }
    return d;
}

moe_l2_arena * make(uint64_t capacity = 0) {
    moe_l2_arena * a = nullptr;
    auto d = two_layers(capacity == 0 ? 100 : kLarge);
    CHECK(moe_l2_arena_create(d.data(), d.size(), kFingerprint, capacity, &a) == MOE_L2_OK);
    return a;
}

/* Acquire one expert; MUST_LOAD is loaded at once if `load`. */
moe_l2_want get(moe_l2_arena * a, uint32_t layer, uint32_t expert, bool load = true) {
    moe_l2_want w{expert, -1, 0};
    CHECK(moe_l2_acquire(a, layer, &w, 1) == MOE_L2_OK && w.slot >= 0);
    if (load && w.action == MOE_L2_MUST_LOAD) {
        CHECK(moe_l2_end_load(a, layer, w.slot, 1, 303) == MOE_L2_OK);
    }
    return w;
}

void put(moe_l2_arena * a, uint32_t layer, const moe_l2_want & w) { CHECK(moe_l2_release(a, layer, &w, 1) == MOE_L2_OK); }

/* Use an expert and let go of it. */
moe_l2_want use(moe_l2_arena * a, uint32_t layer, uint32_t expert) {
    moe_l2_want w = get(a, layer, expert);
    put(a, layer, w);
    return w;
}

bool resident(moe_l2_arena * a, uint32_t layer, uint32_t expert) {
    return slot_map_of(moe_l2_control_block(a), *moe_l2_layer_at(a, layer))[expert] >= 0;
}

/* A capacity with room for `slots` experts in each layer. */
uint64_t room_for(uint64_t slots) {
    auto d = two_layers(kLarge);
    uint64_t least, most;
    CHECK(moe_l2_arena_limits(d.data(), d.size(), &least, &most) == MOE_L2_OK);
    return least + (slots - 1) * (6 + 4) / 4 * 3 * 50048;
}

/* Run `body` in a child that ends without cleaning up, as a killed process does. */
template <typename Body> int in_child(Body body) {
    pid_t pid = fork();
    if (pid == 0) {
        _exit(body());
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

void layout() {
    moe_l2_arena * a = make();
    moe_l2_control & c = *moe_l2_control_block(a);
    CHECK(c.n_layers == 2 && moe_l2_layer_at(a, 0)->block == 2 && moe_l2_layer_at(a, 1)->block == 5);
    CHECK(moe_l2_layer_at(a, 2) == nullptr);
    CHECK(c.expert_bytes_total == (100 + 101 + 102) * (6 + 4));
    CHECK(memcmp(c.fingerprint, kFingerprint, 32) == 0);
    uint64_t end = 0;
    for (uint32_t i = 0; i < c.n_layers; i++) {
        const moe_l2_layer & l = *moe_l2_layer_at(a, i);
        CHECK(l.tensors[MOE_L2_GATE_UP].expert_bytes == 0);
        for (uint32_t kind : {MOE_L2_GATE, MOE_L2_UP, MOE_L2_DOWN}) {
            const moe_l2_tensor & t = l.tensors[kind];
            CHECK(t.slot_stride == 128 && t.arena_offset % 4096 == 0 && t.arena_offset >= end);
            end = t.arena_offset + t.slot_stride * l.n_expert;
        }
    }
    CHECK(end <= c.arena_bytes);
    auto d = two_layers();
    CHECK(moe_l2_arena_matches(a, d.data(), d.size()) == MOE_L2_OK);
    d[3].file_offset++;
    CHECK(moe_l2_arena_matches(a, d.data(), d.size()) == MOE_L2_E_MODEL);
    CHECK(moe_l2_arena_matches(a, d.data(), d.size() - 1) == MOE_L2_E_MODEL);
    moe_l2_arena_close(a);
}

void refuses_nonsense() {
    moe_l2_arena * a = nullptr;
    auto d = two_layers();
    CHECK(moe_l2_arena_create(d.data(), 0, kFingerprint, 0, &a) == MOE_L2_E_ARGUMENT);
    d[1].kind = MOE_L2_GATE; /* twice */
    CHECK(moe_l2_arena_create(d.data(), d.size(), kFingerprint, 0, &a) == MOE_L2_E_ARGUMENT);
    d = two_layers();
    d[1].n_expert = 5; /* not as many as its neighbours */
    CHECK(moe_l2_arena_create(d.data(), d.size(), kFingerprint, 0, &a) == MOE_L2_E_ARGUMENT);
    a = make();
    moe_l2_want w{0, -1, 0};
    for (int bad : {-1, 2}) {
        CHECK(moe_l2_acquire(a, (uint32_t) bad, &w, 1) == MOE_L2_E_ARGUMENT);
    }
    w.expert = 4;
    CHECK(moe_l2_acquire(a, 0, &w, 1) == MOE_L2_E_ARGUMENT);
    CHECK(moe_l2_end_load(a, 0, 0, 1, 1) == MOE_L2_E_ARGUMENT); /* nobody began it */
    CHECK(moe_l2_end_load(a, 0, 4, 1, 1) == MOE_L2_E_ARGUMENT);
    moe_l2_arena_close(a);
}

void attaches_only_to_arenas() {
    moe_l2_arena * a = make();
    moe_l2_arena * b = nullptr;
    CHECK(moe_l2_arena_attach(moe_l2_arena_fd(a), moe_l2_control_fd(a), &b) == MOE_L2_OK);
    moe_l2_arena_bytes(a)[77] = 9;
    CHECK(moe_l2_arena_bytes(b)[77] == 9);
    moe_l2_arena_close(b);

    int other = memfd_create("other", 0);
    CHECK(moe_l2_arena_attach(moe_l2_arena_fd(a), other, &b) == MOE_L2_E_NOT_AN_ARENA); /* empty */
    CHECK(ftruncate(other, (off_t) moe_l2_control_block(a)->control_bytes) == 0);
    CHECK(moe_l2_arena_attach(moe_l2_arena_fd(a), other, &b) == MOE_L2_E_NOT_AN_ARENA); /* zeros */
    CHECK(moe_l2_arena_attach(moe_l2_control_fd(a), moe_l2_control_fd(a), &b) == MOE_L2_E_NOT_AN_ARENA); /* wrong size */
    moe_l2_control_block(a)->layout_version++;
    CHECK(moe_l2_arena_attach(moe_l2_arena_fd(a), moe_l2_control_fd(a), &b) == MOE_L2_E_VERSION);
    moe_l2_control_block(a)->layout_version--;
    moe_l2_layer_at(a, 1)->tensors[MOE_L2_UP].arena_offset = 1ull << 40;
    CHECK(moe_l2_arena_attach(moe_l2_arena_fd(a), moe_l2_control_fd(a), &b) == MOE_L2_E_NOT_AN_ARENA);
    CHECK(ftruncate(moe_l2_arena_fd(a), 4096) != 0); /* sealed: nobody can make us fault */
    close(other);
    moe_l2_arena_close(a);
}

void states() {
    moe_l2_arena * a = make();
    moe_l2_want first = get(a, 0, 1, false);
    CHECK(first.action == MOE_L2_MUST_LOAD && first.slot == 1); /* a slot for each: slot i is expert i's */
    moe_l2_want second = get(a, 0, 1, false);
    CHECK(second.action == MOE_L2_MUST_WAIT && second.slot == 1); /* someone is at it */
    std::thread waiter([&] { CHECK(moe_l2_wait_ready(a, 0, 1, 1) == MOE_L2_OK); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(moe_l2_end_load(a, 0, 1, 1, 303) == MOE_L2_OK);
    waiter.join();
    CHECK(get(a, 0, 1).action == MOE_L2_IS_READY);
    moe_l2_want failing = get(a, 0, 2, false);
    CHECK(moe_l2_end_load(a, 0, failing.slot, 0, 0) == MOE_L2_OK); /* failed: free for the next try */
    CHECK(moe_l2_wait_ready(a, 0, 2, failing.slot) == MOE_L2_E_LOAD);
    moe_l2_want again = get(a, 0, 2, false);
    CHECK(again.action == MOE_L2_MUST_LOAD);
    put(a, 0, failing); /* the one whose load failed holds what is not its own any more, or nothing */
    const moe_l2_layer & l = *moe_l2_layer_at(a, 0);
    CHECK(l.counters.resident == 1 && l.counters.bytes_read == 303 && l.counters.evictions == 0);
    moe_l2_arena_close(a);
}

void capacity() {
    auto d = two_layers(kLarge);
    uint64_t least, most;
    CHECK(moe_l2_arena_limits(d.data(), d.size(), &least, &most) == MOE_L2_OK && least < most);
    moe_l2_arena * a = nullptr;
    CHECK(moe_l2_arena_create(d.data(), d.size(), kFingerprint, least - 1, &a) == MOE_L2_E_CAPACITY);
    for (uint64_t bytes = least; bytes <= most + 4096; bytes += 4999) {
        a = make(bytes);
        const moe_l2_control & c = *moe_l2_control_block(a);
        CHECK(c.arena_bytes <= std::max(bytes, most) && (bytes >= most || c.arena_bytes <= bytes));
        for (uint32_t i = 0; i < c.n_layers; i++) {
            const moe_l2_layer & l = *moe_l2_layer_at(a, i);
            CHECK(l.n_slots >= 1 && l.n_slots <= l.n_expert && (bytes < most || l.n_slots == l.n_expert));
        }
        CHECK(c.staging_offset + c.staging_bytes == c.arena_bytes && (bytes >= most || c.staging_bytes >= 2 * 50048));
        moe_l2_arena_close(a);
    }
}

void evicts_the_oldest() {
    moe_l2_arena * a = make(room_for(3));
    const uint32_t n = moe_l2_layer_at(a, 1)->n_slots;
    CHECK(n >= 2 && n < 6);
    for (uint32_t e = 0; e < n; e++) {
        use(a, 1, e);
    }
    use(a, 1, 0); /* now 1 is the oldest */
    use(a, 1, n);
    CHECK(resident(a, 1, 0) && !resident(a, 1, 1) && resident(a, 1, n));
    CHECK(moe_l2_layer_at(a, 1)->counters.evictions == 1 && moe_l2_layer_at(a, 1)->counters.resident == n);
    moe_l2_arena_close(a);
}

void what_is_in_use_stays() {
    moe_l2_arena * a = make(room_for(3));
    const uint32_t n = moe_l2_layer_at(a, 1)->n_slots;
    std::vector<moe_l2_want> held;
    for (uint32_t e = 0; e < n; e++) {
        held.push_back(get(a, 1, e));
    }
    moe_l2_want more{n, -1, 0};
    CHECK(moe_l2_acquire(a, 1, &more, 1) == MOE_L2_E_FULL);
    CHECK(moe_l2_layer_at(a, 1)->counters.evictions == 0);
    put(a, 1, held[1]);
    CHECK(get(a, 1, n).slot == held[1].slot && !resident(a, 1, 1));
    std::vector<moe_l2_want> too_many;
    for (uint32_t e = 0; e <= n; e++) {
        too_many.push_back({e, -1, 0});
    }
    CHECK(moe_l2_acquire(a, 1, too_many.data(), too_many.size()) == MOE_L2_E_FULL);
    moe_l2_arena_close(a);
}

void all_or_nothing() {
    moe_l2_arena * a = make(room_for(3));
    const uint32_t n = moe_l2_layer_at(a, 1)->n_slots;
    moe_l2_want held = get(a, 1, 5); /* as a preload would */
    for (uint32_t e = 0; e + 1 < n; e++) {
        use(a, 1, e);
    }
    std::vector<moe_l2_want> wants;
    for (uint32_t e = 0; e < n; e++) {
        wants.push_back({e, -1, 0}); /* n experts, n - 1 slots to have */
    }
    const uint64_t evictions = moe_l2_layer_at(a, 1)->counters.evictions;
    CHECK(moe_l2_acquire(a, 1, wants.data(), wants.size()) == MOE_L2_E_FULL);
    put(a, 1, held);
    CHECK(moe_l2_acquire(a, 1, wants.data(), wants.size()) == MOE_L2_OK); /* nothing was left held or half-made */
    CHECK(wants.back().action == MOE_L2_MUST_LOAD && moe_l2_layer_at(a, 1)->counters.evictions == evictions + 1);
    moe_l2_arena_close(a);
}

void pins() {
    moe_l2_arena * a = make(room_for(3));
    const uint32_t n = moe_l2_layer_at(a, 1)->n_slots;
    use(a, 1, 0); /* the oldest */
    for (uint32_t e = 1; e < n; e++) {
        use(a, 1, e);
    }
    const uint32_t scores[6] = {1, 0, 0, 0, 0, 0};
    CHECK(moe_l2_set_pins(a, 1, scores) == MOE_L2_OK && moe_l2_control_block(a)->pin_generation == 1);
    for (uint32_t e = n; e < 6; e++) {
        use(a, 1, e);
        CHECK(resident(a, 1, 0));
    }
    const uint32_t none[6] = {};
    CHECK(moe_l2_set_pins(a, 1, none) == MOE_L2_OK);
    for (uint32_t e = 1; e <= n; e++) {
        use(a, 1, e);
    }
    CHECK(!resident(a, 1, 0)); /* the oldest again */
    const uint32_t every[6] = {1, 1, 1, 1, 1, 1};
    CHECK(moe_l2_set_pins(a, 1, every) == MOE_L2_OK);
    use(a, 1, 0); /* pins bend before they stop the service */
    CHECK(resident(a, 1, 0));
    moe_l2_arena_close(a);
}

void one_engine() {
    moe_l2_arena * a = make();
    CHECK(moe_l2_engine_attach(a) == MOE_L2_OK);
    CHECK(moe_l2_control_block(a)->engine_pid == (uint32_t) getpid());
    moe_l2_arena * b = nullptr;
    CHECK(moe_l2_arena_attach(moe_l2_arena_fd(a), moe_l2_control_fd(a), &b) == MOE_L2_OK);
    CHECK(moe_l2_engine_attach(b) == MOE_L2_E_BUSY);
    CHECK(moe_l2_arena_drop(b) == MOE_L2_E_BUSY);
    moe_l2_arena_close(a);
    CHECK(moe_l2_engine_attach(b) == MOE_L2_OK);
    moe_l2_arena_close(b);
}

void death_while_loading() {
    moe_l2_arena * a = make();
    CHECK(in_child([&] {
              moe_l2_arena * b = nullptr;
              CHECK(moe_l2_arena_attach(moe_l2_arena_fd(a), moe_l2_control_fd(a), &b) == MOE_L2_OK);
              CHECK(moe_l2_engine_attach(b) == MOE_L2_OK);
              get(b, 1, 3);        /* held, too */
              get(b, 1, 4, false); /* being loaded */
              return 0;
          }) == 0);
    CHECK(get(a, 1, 4, false).action == MOE_L2_MUST_WAIT); /* still marked as being loaded */
    CHECK(moe_l2_engine_attach(a) == MOE_L2_OK);
    CHECK(get(a, 1, 4, false).action == MOE_L2_MUST_LOAD); /* that load is lost, and only that */
    CHECK(get(a, 1, 3).action == MOE_L2_IS_READY);
    CHECK(slots_of(moe_l2_control_block(a), *moe_l2_layer_at(a, 1))[3].in_use == 1); /* the dead hold nothing */
    CHECK(moe_l2_layer_at(a, 1)->counters.resident == 1);
    moe_l2_arena_close(a);
}

void death_with_the_lock() {
    moe_l2_arena * a = make(room_for(3));
    const uint32_t n = moe_l2_layer_at(a, 1)->n_slots;
    for (uint32_t e = 0; e < n; e++) {
        use(a, 1, e);
    }
    CHECK(in_child([&] {
              TableLock lock(moe_l2_control_block(a));
              moe_l2_layer & l = *moe_l2_layer_at(a, 1);
              moe_l2_slot * slots = slots_of(moe_l2_control_block(a), l);
              slots[0].older = 77; /* in the middle of a change */
              l.newest[0] = l.oldest[0] = 99;
              l.counters.resident = 5;
              _exit(0);            /* no destructor */
              return 0;
          }) == 0);
    use(a, 1, n); /* would hang for ever with an ordinary lock, or run through a torn list */
    CHECK(!resident(a, 1, 0) && moe_l2_layer_at(a, 1)->counters.resident == n);
    moe_l2_arena_close(a);
}

void layout_change_empties() {
    moe_l2_arena * a = make();
    for (uint32_t kind : {MOE_L2_GATE, MOE_L2_UP, MOE_L2_DOWN}) {
        CHECK(moe_l2_set_layout(a, 0, kind, MOE_L2_LAYOUT_FILE) == MOE_L2_OK);
    }
    use(a, 0, 0);
    CHECK(moe_l2_set_layout(a, 0, MOE_L2_GATE, MOE_L2_LAYOUT_FILE) == MOE_L2_OK);
    CHECK(moe_l2_layer_at(a, 0)->counters.resident == 1); /* the same again: still warm */
    CHECK(moe_l2_set_layout(a, 0, MOE_L2_UP, MOE_L2_LAYOUT_REPACKED) == MOE_L2_OK);
    CHECK(moe_l2_layer_at(a, 0)->counters.resident == 0);
    CHECK(moe_l2_layer_at(a, 0)->tensors[MOE_L2_GATE].layout == MOE_L2_LAYOUT_FILE);
    CHECK(get(a, 0, 0).action == MOE_L2_MUST_LOAD);
    CHECK(moe_l2_set_layout(a, 0, MOE_L2_GATE_UP, MOE_L2_LAYOUT_FILE) == MOE_L2_E_ARGUMENT); /* no such tensor */
    moe_l2_arena_close(a);
}

void drop() {
    moe_l2_arena * a = make();
    memset(moe_l2_arena_bytes(a), 1, moe_l2_control_block(a)->arena_bytes);
    use(a, 0, 0);
    CHECK(moe_l2_arena_drop(a) == MOE_L2_OK);
    CHECK(moe_l2_layer_at(a, 0)->counters.resident == 0 && moe_l2_arena_bytes(a)[0] == 0);
    CHECK(get(a, 0, 0).action == MOE_L2_MUST_LOAD);
    moe_l2_arena_close(a);
}

void preload_order() {
    moe_l2_arena * a = make();
    uint32_t layer;
    moe_l2_want w{};
    CHECK(moe_l2_preload_begin(a, &layer, &w) == 0);
    CHECK(moe_l2_preload_request(a, 0, 3, 5) == MOE_L2_OK && moe_l2_preload_request(a, 1, 2, 9) == MOE_L2_OK);
    const uint32_t seen = moe_l2_control_block(a)->preload_generation;
    CHECK(moe_l2_preload_wait(a, seen, 1) == MOE_L2_E_TIMEOUT);
    CHECK(moe_l2_preload_commit(a) == MOE_L2_OK && moe_l2_preload_wait(a, seen, 1) == MOE_L2_OK);
    CHECK(moe_l2_preload_begin(a, &layer, &w) == 1 && layer == 1 && w.expert == 2);
    CHECK(moe_l2_preload_begin(a, &layer, &w) == 1 && layer == 0 && w.expert == 3);
    CHECK(moe_l2_preload_begin(a, &layer, &w) == 0);
    moe_l2_arena_close(a);
}

void preload_evicts_for_pins_only() {
    moe_l2_arena * a = make(room_for(3));
    const uint32_t n = moe_l2_layer_at(a, 1)->n_slots;
    for (uint32_t e = 0; e < n; e++) {
        use(a, 1, e);
    }
    uint32_t layer;
    moe_l2_want w{};
    CHECK(moe_l2_preload_request(a, 1, 5, 7) == MOE_L2_OK && moe_l2_preload_begin(a, &layer, &w) == 0); /* no room */
    const uint32_t scores[6] = {0, 0, 0, 0, 0, 1};
    CHECK(moe_l2_set_pins(a, 1, scores) == MOE_L2_OK);
    CHECK(moe_l2_preload_begin(a, &layer, &w) == 1 && layer == 1 && w.expert == 5 && !resident(a, 1, 0));
    moe_l2_arena_close(a);
}

} // namespace

int main() {
    return run_all({
        {"layers are ordered by block, tensors do not overlap, another model does not match", layout},
        {"nonsense is refused, never indexed with", refuses_nonsense},
        {"only a whole arena of this version is attached, and it cannot be shrunk", attaches_only_to_arenas},
        {"an expert is loaded once, waiters wake, a failed load can be tried again", states},
        {"a capacity is kept to the byte, and one that is too small is refused", capacity},
        {"the least recently used expert makes room", evicts_the_oldest},
        {"what is in use is never evicted, and more than the slots is refused", what_is_in_use_stays},
        {"an acquisition that fails in the middle leaves nothing behind", all_or_nothing},
        {"a pinned expert goes last", pins},
        {"a second engine is refused while the first lives", one_engine},
        {"an engine that dies while loading costs that load only", death_while_loading},
        {"a process that dies with the lock in the middle of a change costs nothing", death_with_the_lock},
        {"residents in another byte layout are dropped, the same layout stays warm", layout_change_empties},
        {"drop empties the arena and gives the memory back", drop},
        {"preload takes the highest score first and skips what is being loaded", preload_order},
        {"preload evicts for pinned experts only", preload_evicts_for_pins_only},
    });
}
