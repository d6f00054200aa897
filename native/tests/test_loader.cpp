/* The loader: the right bytes in the right slots, once, and failures that are told. */
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <thread>

#include "arena/arena.h"
#include "arena/loader.h"
#include "check.h"

using namespace moe_l2;

namespace {

constexpr uint32_t kExperts = 40;
constexpr uint64_t kBytes = 5003;
const uint8_t kFingerprint[32] = {};

uint8_t byte_at(uint64_t file_offset) { return (uint8_t) (file_offset * 2654435761u >> 13); }

/* A file of known bytes, an arena over it, and what the loader did. */
struct Bench {
    int fd = memfd_create("model", 0);
    moe_l2_arena * arena = nullptr;
    std::atomic<int> arranged{0};
    std::unique_ptr<Loader> loader;

    explicit Bench(uint32_t layout = MOE_L2_LAYOUT_FILE, uint64_t cut_off = 0, unsigned threads = 4) {
        const uint64_t total = 64 + 2 * kExperts * kBytes;
        std::vector<uint8_t> bytes(total);
        for (uint64_t i = 0; i < total; i++) {
            bytes[i] = byte_at(i);
        }
        CHECK(write(fd, bytes.data(), total - cut_off) == (ssize_t) (total - cut_off));
        moe_l2_tensor_desc d[2] = {};
        for (uint32_t i = 0; i < 2; i++) {
            d[i].kind = i == 0 ? MOE_L2_UP : MOE_L2_DOWN;
            d[i].n_expert = kExperts;
            d[i].expert_bytes = kBytes;
            d[i].file_offset = 64 + i * kExperts * kBytes;
        }
        CHECK(moe_l2_arena_create(d, 2, kFingerprint, &arena) == MOE_L2_OK);
        moe_l2_set_layout(arena, 0, MOE_L2_UP, layout);
        moe_l2_set_layout(arena, 0, MOE_L2_DOWN, MOE_L2_LAYOUT_FILE);
        auto flip = [this](uint32_t, uint32_t kind, const uint8_t * raw, uint8_t * slot) {
            CHECK(kind == MOE_L2_UP);
            for (uint64_t i = 0; i < kBytes; i++) {
                slot[i] = raw[i] ^ 0xff;
            }
            arranged++;
        };
        loader = std::make_unique<Loader>(arena, Files{fd}, flip, threads);
    }
    ~Bench() {
        loader.reset();
        moe_l2_arena_close(arena);
        close(fd);
    }
    const moe_l2_layer & layer() { return *moe_l2_layer_at(arena, 0); }
    bool right(uint32_t expert, uint32_t kind, uint8_t mask = 0) {
        const moe_l2_tensor & t = layer().tensors[kind];
        const uint8_t * slot = moe_l2_arena_bytes(arena) + t.arena_offset + expert * t.slot_stride;
        for (uint64_t i = 0; i < kBytes; i++) {
            if (slot[i] != (byte_at(t.file_offset + expert * kBytes + i) ^ mask)) {
                return false;
            }
        }
        return true;
    }
};

void loads_what_is_asked() {
    Bench b;
    CHECK(b.loader->load(0, {3, 39, 0}));
    for (uint32_t e : {3u, 39u, 0u}) {
        CHECK(b.right(e, MOE_L2_UP) && b.right(e, MOE_L2_DOWN));
    }
    CHECK(b.layer().counters.resident == 3 && b.layer().counters.bytes_read == 3 * 2 * kBytes);
    CHECK(b.loader->load(0, {3, 39, 0, 1}));
    CHECK(b.layer().counters.bytes_read == 4 * 2 * kBytes); /* nothing twice */
}

void arranges() {
    Bench b(MOE_L2_LAYOUT_REPACKED);
    CHECK(b.loader->load(0, {7, 8}));
    CHECK(b.right(7, MOE_L2_UP, 0xff) && b.right(7, MOE_L2_DOWN) && b.arranged == 2);
}

void truncated() {
    Bench b(MOE_L2_LAYOUT_FILE, 10);
    CHECK(b.loader->load(0, {38}));
    CHECK(!b.loader->load(0, {39}));
    CHECK(b.loader->error() == "cannot read expert 39 of block 0: the model file ends too early");
    CHECK(b.layer().counters.resident == 1);
    CHECK(b.loader->load(0, {38})); /* the others still serve */
}

/* A worker may have taken an expert from the queue and not yet begun it when load() finds the queue empty. */
void nobody_is_overlooked() {
    Bench b;
    for (int round = 0; round < 20000; round++) {
        const auto e = (uint32_t) round % (kExperts - 2);
        CHECK(b.loader->load(0, {e, e + 1, e + 2}));
        CHECK(moe_l2_arena_drop(b.arena) == MOE_L2_OK);
        for (uint32_t kind : {MOE_L2_UP, MOE_L2_DOWN}) {
            moe_l2_set_layout(b.arena, 0, kind, MOE_L2_LAYOUT_FILE);
        }
    }
}

void preloads_all() {
    Bench b;
    for (uint32_t e = 0; e < kExperts; e++) {
        moe_l2_preload_request(b.arena, 0, e, 1);
    }
    moe_l2_preload_commit(b.arena);
    CHECK(b.loader->load(0, {5})); /* demand in the middle of it */
    for (int i = 0; i < 500 && load64(b.layer().counters.resident) < kExperts; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(b.layer().counters.resident == kExperts);
    CHECK(b.layer().counters.bytes_read == kExperts * 2 * kBytes);
    CHECK(b.layer().counters.preloaded >= kExperts - 1);
    for (uint32_t e = 0; e < kExperts; e++) {
        CHECK(b.right(e, MOE_L2_UP) && b.right(e, MOE_L2_DOWN));
    }
}

void preload_gives_up() {
    Bench b(MOE_L2_LAYOUT_FILE, 10);
    moe_l2_preload_request(b.arena, 0, 39, 1);
    uint32_t layer, expert;
    for (int i = 0; i < 500 && moe_l2_preload_next(b.arena, &layer, &expert) == 1; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(moe_l2_preload_next(b.arena, &layer, &expert) == 0); /* withdrawn, not tried for ever */
}

void preload_keeps_its_bound() {
    Bench b(MOE_L2_LAYOUT_FILE, 0, 2);
    moe_l2_control_block(b.arena)->preload_mib_per_s = 1; /* 40 experts of 10 kB: 0.38 s at 1 MiB/s */
    const auto started = std::chrono::steady_clock::now();
    for (uint32_t e = 0; e < kExperts; e++) {
        moe_l2_preload_request(b.arena, 0, e, 1);
    }
    while (load64(b.layer().counters.resident) < kExperts) {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    CHECK(std::chrono::steady_clock::now() - started > std::chrono::milliseconds(300));
}

} // namespace

int main() {
    return run_all({
        {"the experts asked for are read into their slots, and none twice", loads_what_is_asked},
        {"tensors in another layout than the file's go through the arranger, the others do not", arranges},
        {"a file that ends too early is said in a sentence, and the rest stays usable", truncated},
        {"no expert is overlooked between the queue and its loading", nobody_is_overlooked},
        {"preload fills the arena around demand loads", preloads_all},
        {"preload gives up what cannot be read", preload_gives_up},
        {"preload keeps to its rate", preload_keeps_its_bound},
    });
}
