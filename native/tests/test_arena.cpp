/* The arena's tables: layout, states, deaths. */
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "arena/arena.h"
#include "check.h"

using namespace moe_l2;

namespace {

const uint8_t kFingerprint[32] = {7, 1, 4};

std::vector<moe_l2_tensor_desc> two_layers() {
    std::vector<moe_l2_tensor_desc> d;
    uint64_t offset = 1000;
    for (uint32_t block : {5u, 2u}) { /* not in order, and not from 0 */
        for (uint32_t kind : {MOE_L2_GATE, MOE_L2_UP, MOE_L2_DOWN}) {
            moe_l2_tensor_desc t{};
            t.block = block;
            t.kind = kind;
            t.n_expert = block == 5 ? 6 : 4;
            t.expert_bytes = 100 + kind; /* no multiple of anything */
            t.file_offset = offset;
            offset += t.expert_bytes * t.n_expert;
            d.push_back(t);
        }
    }
    return d;
}

moe_l2_arena * make() {
    moe_l2_arena * a = nullptr;
    auto d = two_layers();
    CHECK(moe_l2_arena_create(d.data(), d.size(), kFingerprint, &a) == MOE_L2_OK);
    return a;
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
    CHECK(moe_l2_arena_create(d.data(), 0, kFingerprint, &a) == MOE_L2_E_ARGUMENT);
    d[1].kind = MOE_L2_GATE; /* twice */
    CHECK(moe_l2_arena_create(d.data(), d.size(), kFingerprint, &a) == MOE_L2_E_ARGUMENT);
    d = two_layers();
    d[1].n_expert = 5; /* not as many as its neighbours */
    CHECK(moe_l2_arena_create(d.data(), d.size(), kFingerprint, &a) == MOE_L2_E_ARGUMENT);
    a = make();
    for (int bad : {-1, 2}) {
        CHECK(moe_l2_begin_load(a, (uint32_t) bad, 0) == MOE_L2_E_ARGUMENT);
    }
    CHECK(moe_l2_begin_load(a, 0, 4) == MOE_L2_E_ARGUMENT);
    CHECK(moe_l2_end_load(a, 0, 0, 1, 1) == MOE_L2_E_ARGUMENT); /* nobody began it */
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
    CHECK(moe_l2_begin_load(a, 0, 1) == 1);
    CHECK(moe_l2_begin_load(a, 0, 1) == 0); /* someone is at it */
    std::thread waiter([&] { CHECK(moe_l2_wait_ready(a, 0, 1) == MOE_L2_OK); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(moe_l2_end_load(a, 0, 1, 1, 303) == MOE_L2_OK);
    waiter.join();
    CHECK(moe_l2_begin_load(a, 0, 1) == 0); /* resident */
    CHECK(moe_l2_begin_load(a, 0, 2) == 1);
    CHECK(moe_l2_end_load(a, 0, 2, 0, 0) == MOE_L2_OK); /* failed: free for the next try */
    CHECK(moe_l2_wait_ready(a, 0, 2) == MOE_L2_E_LOAD);
    CHECK(moe_l2_begin_load(a, 0, 2) == 1);
    const moe_l2_layer & l = *moe_l2_layer_at(a, 0);
    CHECK(l.counters.resident == 1 && l.counters.bytes_read == 303);
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
              return moe_l2_arena_attach(moe_l2_arena_fd(a), moe_l2_control_fd(a), &b) == MOE_L2_OK &&
                             moe_l2_engine_attach(b) == MOE_L2_OK && moe_l2_begin_load(b, 1, 3) == 1 &&
                             moe_l2_end_load(b, 1, 3, 1, 10) == MOE_L2_OK && moe_l2_begin_load(b, 1, 4) == 1
                         ? 0
                         : 1;
          }) == 0);
    CHECK(moe_l2_begin_load(a, 1, 4) == 0); /* still marked as being loaded */
    CHECK(moe_l2_engine_attach(a) == MOE_L2_OK);
    CHECK(moe_l2_begin_load(a, 1, 4) == 1); /* that load is lost, and only that */
    CHECK(moe_l2_begin_load(a, 1, 3) == 0);
    CHECK(moe_l2_layer_at(a, 1)->counters.resident == 1);
    moe_l2_arena_close(a);
}

void death_with_the_lock() {
    moe_l2_arena * a = make();
    CHECK(in_child([&] {
              TableLock lock(moe_l2_control_block(a));
              _exit(0); /* no destructor */
              return 0;
          }) == 0);
    CHECK(moe_l2_begin_load(a, 0, 0) == 1); /* would hang for ever with an ordinary lock */
    CHECK(moe_l2_end_load(a, 0, 0, 1, 1) == MOE_L2_OK);
    moe_l2_arena_close(a);
}

void layout_change_empties() {
    moe_l2_arena * a = make();
    for (uint32_t kind : {MOE_L2_GATE, MOE_L2_UP, MOE_L2_DOWN}) {
        CHECK(moe_l2_set_layout(a, 0, kind, MOE_L2_LAYOUT_FILE) == MOE_L2_OK);
    }
    CHECK(moe_l2_begin_load(a, 0, 0) == 1 && moe_l2_end_load(a, 0, 0, 1, 1) == MOE_L2_OK);
    CHECK(moe_l2_set_layout(a, 0, MOE_L2_GATE, MOE_L2_LAYOUT_FILE) == MOE_L2_OK);
    CHECK(moe_l2_layer_at(a, 0)->counters.resident == 1); /* the same again: still warm */
    CHECK(moe_l2_set_layout(a, 0, MOE_L2_UP, MOE_L2_LAYOUT_REPACKED) == MOE_L2_OK);
    CHECK(moe_l2_layer_at(a, 0)->counters.resident == 0);
    CHECK(moe_l2_layer_at(a, 0)->tensors[MOE_L2_GATE].layout == MOE_L2_LAYOUT_FILE);
    CHECK(moe_l2_begin_load(a, 0, 0) == 1);
    CHECK(moe_l2_set_layout(a, 0, MOE_L2_GATE_UP, MOE_L2_LAYOUT_FILE) == MOE_L2_E_ARGUMENT); /* no such tensor */
    moe_l2_arena_close(a);
}

void drop() {
    moe_l2_arena * a = make();
    memset(moe_l2_arena_bytes(a), 1, moe_l2_control_block(a)->arena_bytes);
    CHECK(moe_l2_begin_load(a, 0, 0) == 1 && moe_l2_end_load(a, 0, 0, 1, 1) == MOE_L2_OK);
    CHECK(moe_l2_arena_drop(a) == MOE_L2_OK);
    CHECK(moe_l2_layer_at(a, 0)->counters.resident == 0 && moe_l2_arena_bytes(a)[0] == 0);
    CHECK(moe_l2_begin_load(a, 0, 0) == 1);
    moe_l2_arena_close(a);
}

void preload_order() {
    moe_l2_arena * a = make();
    uint32_t layer, expert;
    CHECK(moe_l2_preload_next(a, &layer, &expert) == 0);
    CHECK(moe_l2_preload_request(a, 0, 3, 5) == MOE_L2_OK && moe_l2_preload_request(a, 1, 2, 9) == MOE_L2_OK);
    const uint32_t seen = moe_l2_control_block(a)->preload_generation;
    CHECK(moe_l2_preload_wait(a, seen, 1) == MOE_L2_E_TIMEOUT);
    CHECK(moe_l2_preload_commit(a) == MOE_L2_OK && moe_l2_preload_wait(a, seen, 1) == MOE_L2_OK);
    CHECK(moe_l2_preload_next(a, &layer, &expert) == 1 && layer == 1 && expert == 2);
    CHECK(moe_l2_begin_load(a, 1, 2) == 1);
    CHECK(moe_l2_preload_next(a, &layer, &expert) == 1 && layer == 0 && expert == 3);
    CHECK(moe_l2_preload_request(a, 0, 3, 0) == MOE_L2_OK && moe_l2_preload_next(a, &layer, &expert) == 0);
    moe_l2_arena_close(a);
}

} // namespace

int main() {
    return run_all({
        {"layers are ordered by block, tensors do not overlap, another model does not match", layout},
        {"nonsense is refused, never indexed with", refuses_nonsense},
        {"only a whole arena of this version is attached, and it cannot be shrunk", attaches_only_to_arenas},
        {"an expert is loaded once, waiters wake, a failed load can be tried again", states},
        {"a second engine is refused while the first lives", one_engine},
        {"an engine that dies while loading costs that load only", death_while_loading},
        {"a process that dies with the lock does not block the others", death_with_the_lock},
        {"residents in another byte layout are dropped, the same layout stays warm", layout_change_empties},
        {"drop empties the arena and gives the memory back", drop},
        {"preload takes the highest score first and skips what is being loaded", preload_order},
    });
}
