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

    explicit Bench(uint32_t layout = MOE_L2_LAYOUT_FILE, uint64_t cut_off = 0, unsigned threads = 4, bool capped = false) {
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
        CHECK(moe_l2_arena_create(d, 2, kFingerprint, capped ? kExperts * kBytes : 0, &arena) == MOE_L2_OK);
        moe_l2_set_layout(arena, 0, MOE_L2_UP, layout);
        moe_l2_set_layout(arena, 0, MOE_L2_DOWN, MOE_L2_LAYOUT_FILE);
        auto flip = [this](uint32_t, uint32_t kind, const uint8_t * raw, uint8_t * slot) {
            CHECK(kind == MOE_L2_UP);
            for (uint64_t i = 0; i < kBytes; i++) {
                slot[i] = raw[i] ^ 0xff;
            }
            arranged++;
        };
        loader = std::make_unique<Loader>(arena, Files{ModelFile{fd, -1}}, flip, threads);
    }
    ~Bench() {
        loader.reset();
        moe_l2_arena_close(arena);
        close(fd);
    }
    /* Acquire, load, let go. */
    bool load(const std::vector<uint32_t> & experts) {
        std::vector<moe_l2_want> wants;
        for (uint32_t e : experts) {
            wants.push_back({e, -1, 0});
        }
        CHECK(moe_l2_acquire(arena, 0, wants.data(), wants.size()) == MOE_L2_OK);
        const bool ok = loader->load(0, wants);
        CHECK(moe_l2_release(arena, 0, wants.data(), wants.size()) == MOE_L2_OK);
        return ok;
    }
    const moe_l2_layer & layer() { return *moe_l2_layer_at(arena, 0); }
    bool right(uint32_t expert, uint32_t kind, uint8_t mask = 0) {
        const moe_l2_tensor & t = layer().tensors[kind];
        const int32_t at = slot_map_of(moe_l2_control_block(arena), layer())[expert];
        return at >= 0 && same(moe_l2_arena_bytes(arena) + t.arena_offset + (uint64_t) at * t.slot_stride, expert, kind, mask);
    }
    bool same(const uint8_t * slot, uint32_t expert, uint32_t kind, uint8_t mask = 0) {
        const moe_l2_tensor & t = layer().tensors[kind];
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
    CHECK(b.load({3, 39, 0}));
    for (uint32_t e : {3u, 39u, 0u}) {
        CHECK(b.right(e, MOE_L2_UP) && b.right(e, MOE_L2_DOWN));
    }
    CHECK(b.layer().counters.resident == 3 && b.layer().counters.bytes_read == 3 * 2 * kBytes);
    CHECK(b.load({3, 39, 0, 1}));
    CHECK(b.layer().counters.bytes_read == 4 * 2 * kBytes); /* nothing twice */
}

void arranges() {
    Bench b(MOE_L2_LAYOUT_REPACKED);
    CHECK(b.load({7, 8}));
    CHECK(b.right(7, MOE_L2_UP, 0xff) && b.right(7, MOE_L2_DOWN) && b.arranged == 2);
}

void truncated() {
    Bench b(MOE_L2_LAYOUT_FILE, 10);
    CHECK(b.load({38}));
    CHECK(!b.load({39}));
    CHECK(b.loader->error() == "cannot read expert 39 of block 0: the model file ends too early");
    CHECK(b.layer().counters.resident == 1);
    CHECK(b.load({38})); /* the others still serve */
}

void nobody_is_overlooked() {
    Bench b;
    for (int round = 0; round < 20000; round++) {
        const auto e = (uint32_t) round % (kExperts - 2);
        CHECK(b.load({e, e + 1, e + 2}));
        CHECK(moe_l2_arena_drop(b.arena) == MOE_L2_OK);
    }
}

void capped() {
    Bench b(MOE_L2_LAYOUT_REPACKED, 0, 4, true);
    const uint32_t n = b.layer().n_slots;
    CHECK(n < kExperts && n > 3);
    for (uint32_t e = 0; e + 2 < kExperts; e++) {
        CHECK(b.load({e, e + 1, e + 2}));
        for (uint32_t k = e; k < e + 3; k++) {
            CHECK(b.right(k, MOE_L2_UP, 0xff) && b.right(k, MOE_L2_DOWN));
        }
    }
    CHECK(b.layer().counters.evictions == kExperts - n && b.layer().counters.bytes_read == kExperts * 2 * kBytes);
}

void streams() {
    Bench b(MOE_L2_LAYOUT_REPACKED, 10);
    std::vector<uint8_t> area(4 * 8192);
    const uint32_t experts[4] = {9, 2, 30, 17};
    Loader::Group group;
    b.loader->stream(0, MOE_L2_UP, experts, 4, area.data(), 8192, group);
    CHECK(b.loader->wait(group));
    for (int i = 0; i < 4; i++) {
        CHECK(b.same(&area[i * 8192], experts[i], MOE_L2_UP, 0xff));
    }
    CHECK(b.layer().counters.resident == 0 && b.layer().counters.bytes_read == 4 * kBytes);
    const uint32_t cut = 39;
    Loader::Group failing;
    b.loader->stream(0, MOE_L2_DOWN, &cut, 1, area.data(), 8192, failing);
    CHECK(!b.loader->wait(failing));
}

void direct() {
    char path[] = "/var/tmp/moe-l2-direct-XXXXXX";
    int fd = mkstemp(path);
    std::vector<uint8_t> bytes(100001);
    for (size_t i = 0; i < bytes.size(); i++) {
        bytes[i] = byte_at(i);
    }
    CHECK(fd >= 0 && write(fd, bytes.data(), bytes.size()) == (ssize_t) bytes.size() && fsync(fd) == 0);
    const ModelFile file{fd, open(path, O_RDONLY | O_DIRECT)};
    unlink(path);
    if (file.direct < 0) {
        printf("  (skipped: no direct reads on this file system)\n");
        return;
    }
    for (uint64_t offset : {0ull, 1ull, 4095ull, 4096ull, 77777ull, 99000ull}) {
        const uint8_t * got = read_range(file, offset, 1001, nullptr);
        CHECK(got != nullptr && memcmp(got, &bytes[offset], 1001) == 0);
    }
    CHECK(read_range(file, 99001, 1001, nullptr) == nullptr && errno == 0); /* a byte beyond the end */
    close(file.direct);
    close(fd);
}

void preloads_all() {
    Bench b;
    for (uint32_t e = 0; e < kExperts; e++) {
        moe_l2_preload_request(b.arena, 0, e, 1);
    }
    moe_l2_preload_commit(b.arena);
    CHECK(b.load({5})); /* demand in the middle of it */
    for (int i = 0; i < 500 && load_resident(b.layer()) < kExperts; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(load_resident(b.layer()) == kExperts);
    CHECK(load64(b.layer().counters.bytes_read) == kExperts * 2 * kBytes);
    CHECK(load64(b.layer().counters.preloaded) + 5 >= kExperts); /* all but the demanded one; four may be counted a moment later */
    for (uint32_t e = 0; e < kExperts; e++) {
        CHECK(b.right(e, MOE_L2_UP) && b.right(e, MOE_L2_DOWN));
    }
}

void preload_gives_up() {
    Bench b(MOE_L2_LAYOUT_FILE, 10);
    moe_l2_preload_request(b.arena, 0, 39, 1);
    const uint32_t & wanted = preload_of(moe_l2_control_block(b.arena), b.layer())[39];
    for (int i = 0; i < 500 && __atomic_load_n(&wanted, __ATOMIC_RELAXED) != 0; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    CHECK(__atomic_load_n(&wanted, __ATOMIC_RELAXED) == 0 && load_resident(b.layer()) == 0); /* withdrawn, not tried for ever */
}

void preload_keeps_its_bound() {
    Bench b(MOE_L2_LAYOUT_FILE, 0, 2);
    __atomic_store_n(&moe_l2_control_block(b.arena)->preload_mib_per_s, 1, __ATOMIC_RELAXED); /* 40 experts of 10 kB: 0.38 s at 1 MiB/s */
    const auto started = std::chrono::steady_clock::now();
    for (uint32_t e = 0; e < kExperts; e++) {
        moe_l2_preload_request(b.arena, 0, e, 1);
    }
    while (load_resident(b.layer()) < kExperts) {
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
        {"twenty thousand loads, each complete when load() returns", nobody_is_overlooked},
        {"with fewer slots than experts the right bytes are in the right slots, read once while they stay", capped},
        {"streamed experts come one tensor at a time and touch no slot", streams},
        {"direct reads bring the same bytes from any offset", direct},
        {"preload fills the arena around demand loads", preloads_all},
        {"preload gives up what cannot be read", preload_gives_up},
        {"preload keeps to its rate", preload_keeps_its_bound},
    });
}
