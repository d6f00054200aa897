/* Identity gate: the same batches decoded with and without the plug-in give the same logits, bit for bit.
 *
 *   test_identity MODEL PLUGIN [repack=0|1] [percent=N]
 *
 * The program runs itself: `--decode MODEL OUT` decodes fixed batches of 1, 4 and 64 tokens of four sequences
 * and writes all logits. It is run stock, then with the plug-in on a cold arena made here as moe-l2d would make
 * it, then on the same arena, warm. With percent=N (0: the least that works) the arena has room for that part of the
 * experts, and a run that evicted or streamed nothing fails. The counters in the control block prove that the arena was really used.
 */
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "arena/arena.h"
#include "check.h"
#include "ggml-backend.h"
#include "gguf.h"
#include "llama.h"
#include "plugin/names.h"

using namespace moe_l2;

namespace {

constexpr int kSequences = 4;

void decode(llama_context * context, const std::vector<llama_token> & tokens, std::vector<int> & positions, FILE * out, int n_vocab) {
    llama_batch batch = llama_batch_init((int32_t) tokens.size(), 0, 1);
    for (size_t i = 0; i < tokens.size(); i++) {
        const int seq = (int) (i % kSequences);
        batch.token[i] = tokens[i];
        batch.pos[i] = positions[seq]++;
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = seq;
        batch.logits[i] = 1;
    }
    batch.n_tokens = (int32_t) tokens.size();
    CHECK(llama_decode(context, batch) == 0);
    for (size_t i = 0; i < tokens.size(); i++) {
        CHECK(fwrite(llama_get_logits_ith(context, (int32_t) i), sizeof(float), (size_t) n_vocab, out) == (size_t) n_vocab);
    }
    llama_batch_free(batch);
}

int decode_all(const char * model_path, const char * out_path, bool repack) {
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_WARN || level == GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
    ggml_backend_load_all_from_path(MOE_L2_ENGINE_BIN);
    llama_model_params mp = llama_model_default_params();
    mp.use_extra_bufts = repack;
    llama_model * model = llama_model_load_from_file(model_path, mp);
    CHECK(model != nullptr);
    llama_context_params cp = llama_context_default_params();
    cp.n_ctx = 1024;
    cp.n_seq_max = kSequences;
    cp.n_batch = cp.n_ubatch = 64;
    cp.n_threads = cp.n_threads_batch = 2;
    llama_context * context = llama_init_from_model(model, cp);
    CHECK(context != nullptr);
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    FILE * out = fopen(out_path, "wb");
    CHECK(out != nullptr);
    std::vector<int> positions(kSequences, 0);
    uint32_t state = 1;
    for (int size : {64, 4, 1, 1, 64, 4, 1}) {
        std::vector<llama_token> tokens;
        for (int i = 0; i < size; i++) {
            state = state * 1664525u + 1013904223u;
            tokens.push_back((llama_token) (state >> 8) % n_vocab);
        }
        decode(context, tokens, positions, out, n_vocab);
    }
    CHECK(fclose(out) == 0);
    llama_free(context);
    llama_model_free(model);
    return 0;
}

std::string slurp(const std::string & path) {
    std::string all;
    FILE * f = fopen(path.c_str(), "rb");
    CHECK(f != nullptr);
    char buffer[1 << 16];
    for (size_t n; (n = fread(buffer, 1, sizeof(buffer), f)) > 0;) {
        all.append(buffer, n);
    }
    fclose(f);
    return all;
}

moe_l2_arena * make_arena(const char * model_path, int percent) {
    ggml_context * meta = nullptr;
    gguf_init_params params{true, &meta};
    gguf_context * g = gguf_init_from_file(model_path, params);
    CHECK(g != nullptr);
    std::vector<moe_l2_tensor_desc> d;
    for (ggml_tensor * t = ggml_get_first_tensor(meta); t != nullptr; t = ggml_get_next_tensor(meta, t)) {
        ExpertName name;
        if (parse_expert_name(t->name, name)) {
            moe_l2_tensor_desc one{};
            one.block = name.block;
            one.kind = name.kind;
            one.n_expert = (uint32_t) t->ne[2];
            one.ggml_type = (uint32_t) t->type;
            one.expert_bytes = ggml_nbytes(t) / (uint64_t) t->ne[2];
            one.file_offset = gguf_get_data_offset(g) + gguf_get_tensor_offset(g, gguf_find_tensor(g, t->name));
            d.push_back(one);
        }
    }
    moe_l2_arena * arena = nullptr;
    const uint8_t fingerprint[32] = {};
    uint64_t least, most;
    CHECK(moe_l2_arena_limits(d.data(), d.size(), &least, &most) == MOE_L2_OK);
    const uint64_t capacity = percent == 100 ? 0 : std::max(least, most * (uint64_t) percent / 100);
    CHECK(moe_l2_arena_create(d.data(), d.size(), fingerprint, capacity, &arena) == MOE_L2_OK);
    gguf_free(g);
    ggml_free(meta);
    return arena;
}

std::string run(const char * self, const char * model, const std::string & out, const char * plugin, const moe_l2_arena * arena, const char * repack) {
    pid_t pid = fork();
    if (pid == 0) {
        unsetenv("GGML_BACKEND_PATH");
        if (plugin != nullptr) {
            setenv("GGML_BACKEND_PATH", plugin, 1);
            setenv("MOE_L2_ARENA_FD", std::to_string(moe_l2_arena_fd(arena)).c_str(), 1);
            setenv("MOE_L2_CONTROL_FD", std::to_string(moe_l2_control_fd(arena)).c_str(), 1);
            setenv("MOE_L2_REPACK", repack, 1);
            fcntl(moe_l2_arena_fd(arena), F_SETFD, 0);
            fcntl(moe_l2_control_fd(arena), F_SETFD, 0);
        }
        execl(self, self, "--decode", model, out.c_str(), repack, (char *) nullptr);
        _exit(127);
    }
    int status = 0;
    CHECK(waitpid(pid, &status, 0) == pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    std::string logits = slurp(out);
    unlink(out.c_str());
    return logits;
}

struct Totals {
    uint64_t lookups = 0, hits = 0, misses = 0, resident = 0, bytes = 0, uses = 0, repacked = 0, evictions = 0, streamed = 0;
};

Totals totals(moe_l2_arena * arena) {
    Totals t;
    for (uint32_t i = 0; i < moe_l2_control_block(arena)->n_layers; i++) {
        const moe_l2_layer & l = *moe_l2_layer_at(arena, i);
        t.lookups += l.counters.lookups;
        t.hits += l.counters.hits;
        t.misses += l.counters.misses;
        t.resident += l.counters.resident;
        t.bytes += l.counters.bytes_read;
        t.evictions += l.counters.evictions;
        t.streamed += l.counters.streamed;
        for (const moe_l2_tensor & tensor : l.tensors) {
            t.repacked += tensor.layout == MOE_L2_LAYOUT_REPACKED;
        }
        for (uint32_t e = 0; e < l.n_expert; e++) {
            t.uses += uses_of(moe_l2_control_block(arena), l)[e];
        }
    }
    return t;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc == 5 && strcmp(argv[1], "--decode") == 0) {
        return decode_all(argv[2], argv[3], strcmp(argv[4], "1") == 0);
    }
    CHECK(argc >= 3);
    const char * repack = "1";
    int percent = 100;
    for (int i = 3; i < argc; i++) {
        repack = strcmp(argv[i], "repack=0") == 0 ? "0" : repack;
        sscanf(argv[i], "percent=%d", &percent);
    }
    char folder[] = "/tmp/moe-l2-identity-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    const std::string out = std::string(folder) + "/logits";
    moe_l2_arena * arena = make_arena(argv[1], percent);
    moe_l2_control & control = *moe_l2_control_block(arena);

    const std::string stock = run(argv[0], argv[1], out, nullptr, nullptr, repack);
    const std::string cold = run(argv[0], argv[1], out, argv[2], arena, repack);
    CHECK(stock.size() > 0 && stock == cold);
    const Totals first = totals(arena);
    CHECK(control.active == 1 && control.bypassed == 0 && control.graphs == 7 && control.cuts > 0);
    CHECK(control.tokens == 64 + 4 + 1 + 1 + 64 + 4 + 1);
    CHECK(first.lookups == first.hits + first.misses && (first.hits > 0 || percent < 50));
    CHECK(first.bytes > 0 && first.uses % control.tokens == 0);

    const std::string warm = run(argv[0], argv[1], out, argv[2], arena, repack);
    CHECK(stock == warm);
    const Totals second = totals(arena);
    CHECK(second.lookups == 2 * first.lookups && second.uses == 2 * first.uses);
    CHECK(control.engine_epoch == 2);
    if (percent == 100) {
        CHECK(first.misses == first.resident && first.evictions == 0);
        CHECK(second.bytes == first.bytes && second.misses == first.misses); /* a restart reads no expert twice */
    } else {
        CHECK(first.evictions + first.streamed > 0); /* a gate that saw no pressure proves nothing */
    }
    moe_l2_arena_close(arena);
    rmdir(folder);
    printf("identical: %zu bytes of logits, %llu lookups, %llu misses, %llu evictions, %llu streamed, %llu tensors repacked, cold and warm\n1 passed, 0 failed\n",
           stock.size(), (unsigned long long) second.lookups, (unsigned long long) second.misses, (unsigned long long) second.evictions,
           (unsigned long long) second.streamed, (unsigned long long) second.repacked);
    return 0;
}
