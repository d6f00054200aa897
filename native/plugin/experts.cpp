#include "experts.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>

#include "arena/arena.h"
#include "cpu.h"
#include "ggml-impl.h"
#include "names.h"
#include "settings.h"

namespace moe_l2 {

Experts::~Experts() {
    loader.reset(); /* its threads use the arena */
    moe_l2_arena_close(arena);
    for (const ModelFile & file : files) {
        for (int fd : {file.fd, file.direct}) {
            if (fd >= 0) {
                close(fd);
            }
        }
    }
}

moe_l2_control & Experts::control() { return *moe_l2_control_block(arena); }

void Experts::computing(bool on) { loader->computing(on); }

ExpertTensor & Experts::record(ggml_tensor * tensor) {
    auto found = std::find_if(tensors.begin(), tensors.end(), [&](const auto & t) { return t->model == tensor; });
    if (found != tensors.end()) {
        return **found;
    }
    auto expert = std::make_unique<ExpertTensor>();
    expert->owner = this;
    expert->model = tensor;
    if (ExpertName name; parse_expert_name(tensor->name, name)) {
        expert->block = name.block;
        expert->kind = name.kind;
    }
    tensors.push_back(std::move(expert));
    return *tensors.back();
}

bool Experts::note(ggml_tensor * tensor, const void * data) {
    ExpertTensor & expert = record(tensor);
    ExpertName name;
    expert.in_file = parse_expert_name(tensor->name, name) && mapped.find(data, ggml_nbytes(tensor), expert.file);
    if (!expert.in_file) {
        GGML_LOG_WARN("moe-l2: tensor '%s' is copied into memory and not cached: it is not mapped from a file; "
                      "start the engine with --load-mode mmap\n", tensor->name);
    }
    return expert.in_file;
}

bool Experts::read(const ExpertTensor & expert, void * to, size_t offset, size_t size) {
    if (!open_files()) {
        return false;
    }
    const int fd = files[shard_of_path(expert.file.path.c_str())].fd;
    return pread(fd, to, size, (off_t) (expert.file.offset + offset)) == (ssize_t) size;
}

std::vector<moe_l2_tensor_desc> Experts::describe() const {
    std::vector<moe_l2_tensor_desc> descriptions;
    for (const auto & t : tensors) {
        if (t->in_file) {
            moe_l2_tensor_desc d{};
            d.block = t->block;
            d.kind = t->kind;
            d.n_expert = (uint32_t) t->model->ne[2];
            d.ggml_type = (uint32_t) t->model->type;
            d.shard = shard_of_path(t->file.path.c_str());
            d.file_offset = t->file.offset;
            d.expert_bytes = ggml_nbytes(t->model) / (uint64_t) t->model->ne[2];
            descriptions.push_back(d);
        }
    }
    return descriptions;
}

/* The arena of moe-l2d if it gave us one and it is this model's, else one of our own. */
bool Experts::take_arena(const std::vector<moe_l2_tensor_desc> & descriptions) {
    const Settings & s = settings();
    if (s.arena_fd >= 0 && s.control_fd >= 0) {
        int result = moe_l2_arena_attach(s.arena_fd, s.control_fd, &arena);
        if (result == MOE_L2_OK) {
            result = moe_l2_arena_matches(arena, descriptions.data(), descriptions.size());
        }
        if (result == MOE_L2_OK) {
            result = moe_l2_engine_attach(arena);
        }
        if (result == MOE_L2_OK) {
            return true;
        }
        GGML_LOG_WARN("moe-l2: the arena of moe-l2d is not used: %s; this model gets an arena of its own\n", moe_l2_error_text(result));
        moe_l2_arena_close(arena);
        arena = nullptr;
    }
    const uint8_t fingerprint[32] = {}; /* nobody will compare it: this arena ends with the process */
    int result = moe_l2_arena_create(descriptions.data(), descriptions.size(), fingerprint, s.arena_bytes, &arena);
    if (result == MOE_L2_OK) {
        result = moe_l2_engine_attach(arena);
    }
    if (result != MOE_L2_OK) {
        GGML_LOG_ERROR("moe-l2: cannot make an arena: %s (%s)\n", moe_l2_error_text(result), strerror(errno));
    }
    return result == MOE_L2_OK;
}

/* Open the model's files again, for reading at our own pace; refuse one that is not what llama.cpp mapped. */
bool Experts::open_files() {
    for (const auto & t : tensors) {
        if (!t->in_file) {
            continue;
        }
        const uint32_t shard = shard_of_path(t->file.path.c_str());
        if (files.size() <= shard) {
            files.resize(shard + 1);
        }
        ModelFile & file = files[shard];
        if (file.fd >= 0) {
            continue;
        }
        struct stat st {};
        file.fd = ::open(t->file.path.c_str(), O_RDONLY | O_CLOEXEC);
        if (file.fd < 0 || fstat(file.fd, &st) != 0) {
            GGML_LOG_ERROR("moe-l2: cannot open model file '%s': %s\n", t->file.path.c_str(), strerror(errno));
            return false;
        }
        if (st.st_ino != t->file.inode) {
            GGML_LOG_ERROR("moe-l2: cannot read experts from '%s': the file was replaced after the engine mapped it; restart the engine\n",
                           t->file.path.c_str());
            return false;
        }
        if (settings().direct) {
            file.direct = ::open(t->file.path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
            if (file.direct < 0) {
                GGML_LOG_WARN("moe-l2: experts of '%s' are read through the page cache: its file system has no direct reads (%s)\n",
                              t->file.path.c_str(), strerror(errno));
            }
        }
    }
    return true;
}

/* Per tensor the layout that the CPU backend computes fastest with, and the tensor it will compute with. */
bool Experts::choose_layouts() {
    const uint32_t n_layers = control().n_layers;
    by_layer.assign(n_layers, std::vector<ExpertTensor *>(MOE_L2_KINDS, nullptr));
    for (const auto & t : tensors) {
        if (!t->in_file) {
            continue;
        }
        for (t->layer = 0; moe_l2_layer_at(arena, t->layer)->block != t->block; t->layer++) {
        }
        by_layer[t->layer][t->kind] = t.get();
        const moe_l2_tensor & place = moe_l2_layer_at(arena, t->layer)->tensors[t->kind];

        ggml_backend_buffer_type_t type = stock_expert_buffer_type(t->model, settings().repack);
        const bool repacked = !ggml_backend_buft_is_host(type);
        ggml_tensor & in_arena = t->in_arena;
        in_arena = *t->model;
        in_arena.data = moe_l2_arena_bytes(arena) + place.arena_offset;
        in_arena.buffer = tag_buffer(type);
        in_arena.extra = nullptr;
        in_arena.ne[2] = moe_l2_layer_at(arena, t->layer)->n_slots;
        in_arena.nb[2] = place.slot_stride;
        in_arena.nb[3] = place.slot_stride * (uint64_t) in_arena.ne[2];
        if (in_arena.buffer == nullptr) {
            GGML_LOG_ERROR("moe-l2: cannot compute tensor '%s': the CPU backend gives no buffer of type %s\n", t->model->name,
                           ggml_backend_buft_name(type));
            return false;
        }
        if (repacked) {
            in_arena.buffer->iface.init_tensor(in_arena.buffer, &in_arena);
        }
        moe_l2_set_layout(arena, t->layer, t->kind, repacked ? MOE_L2_LAYOUT_REPACKED : MOE_L2_LAYOUT_FILE);
    }
    return true;
}

/* Repack one expert: the CPU backend's own code, on a tensor of one expert. Called by the loader's threads. */
void Experts::arrange(uint32_t layer, uint32_t kind, const uint8_t * raw, uint8_t * slot) {
    ggml_tensor one = by_layer[layer][kind]->in_arena;
    one.ne[2] = 1;
    one.nb[2] = one.nb[3] = one.nb[1] * (uint64_t) one.ne[1];
    one.data = slot;
    one.buffer->iface.set_tensor(one.buffer, &one, raw, 0, ggml_nbytes(&one));
}

/* Load as many experts as there are slots, for measurements that are not about loading. */
bool Experts::fill() {
    for (uint32_t layer = 0; layer < control().n_layers; layer++) {
        std::vector<moe_l2_want> wants(moe_l2_layer_at(arena, layer)->n_slots);
        for (uint32_t e = 0; e < wants.size(); e++) {
            wants[e].expert = e;
        }
        const bool ok = moe_l2_acquire(arena, layer, wants.data(), wants.size()) == MOE_L2_OK && loader->load(layer, wants);
        release(layer, wants);
        if (!ok) {
            GGML_LOG_ERROR("moe-l2: %s\n", loader->error().c_str());
            return false;
        }
    }
    return true;
}

bool Experts::open() {
    if (state != State::closed) {
        return state == State::open;
    }
    state = State::failed;
    const std::vector<moe_l2_tensor_desc> descriptions = describe();
    if (!take_arena(descriptions) || !open_files() || !choose_layouts()) {
        return false;
    }
    auto place = [this](uint32_t layer, uint32_t kind, const uint8_t * raw, uint8_t * slot) { arrange(layer, kind, raw, slot); };
    loader = std::make_unique<Loader>(arena, files, place, settings().loaders);
    control().bypassed = (uint32_t) (tensors.size() - descriptions.size());
    GGML_LOG_INFO("moe-l2: %u layers of experts, %.1f MiB, come through the arena%s\n", control().n_layers,
                  (double) control().expert_bytes_total / 1048576.0, settings().arena_fd >= 0 ? " of moe-l2d" : "");
    if (settings().preload && settings().arena_fd < 0 && !fill()) {
        return false;
    }
    state = State::open;
    return true;
}

bool Experts::has_all_slots(uint32_t layer) const {
    const moe_l2_layer & l = *moe_l2_layer_at(arena, layer);
    return l.n_slots == l.n_expert;
}

bool Experts::complete(uint32_t layer) const {
    const moe_l2_layer & l = *moe_l2_layer_at(arena, layer);
    return l.n_slots == l.n_expert && load_resident(l) == l.n_expert;
}

uint8_t * Experts::staging() { return moe_l2_arena_bytes(arena) + control().staging_offset; }

/* Fill `distinct` with the experts that `need` names, and count uses. */
void Experts::count(const Need & need) {
    moe_l2_layer & layer = *moe_l2_layer_at(arena, need.layer);
    uint64_t * uses = uses_of(&control(), layer);
    distinct.clear();
    seen.assign(layer.n_expert, 0);
    const auto * ids = static_cast<const uint8_t *>(need.ids->data);
    for (int64_t token = 0; token < need.ids->ne[1]; token++) {
        for (int64_t k = 0; k < need.ids->ne[0]; k++) {
            const int32_t id = *reinterpret_cast<const int32_t *>(ids + token * need.ids->nb[1] + k * need.ids->nb[0]);
            if (id < 0 || (uint32_t) id >= layer.n_expert) {
                continue; /* llama.cpp pads with ids out of range in no case we know; never index with one */
            }
            store64(uses[id], uses[id] + 1); /* one writer */
            if (!seen[id]) {
                seen[id] = 1;
                distinct.push_back((uint32_t) id);
            }
        }
    }
    add64(layer.counters.lookups, distinct.size());
}

void Experts::used(const Need & need) {
    count(need);
    add64(moe_l2_layer_at(arena, need.layer)->counters.hits, distinct.size());
}

void Experts::release(uint32_t layer, const std::vector<moe_l2_want> & wants) {
    moe_l2_release(arena, layer, wants.data(), wants.size());
}

Experts::Held Experts::hold(const Need & need, std::vector<moe_l2_want> & wants) {
    count(need);
    wants.clear();
    for (uint32_t expert : distinct) {
        wants.push_back({expert, -1, MOE_L2_IS_READY});
    }
    moe_l2_layer_counters & counters = moe_l2_layer_at(arena, need.layer)->counters;
    const bool in_slots = moe_l2_acquire(arena, need.layer, wants.data(), wants.size()) == MOE_L2_OK;
    if (!in_slots) {
        for (moe_l2_want & want : wants) {
            moe_l2_acquire_resident(arena, need.layer, &want);
        }
    }
    const auto ready = std::count_if(wants.begin(), wants.end(), [](const moe_l2_want & w) {
        return w.slot >= 0 && w.action == MOE_L2_IS_READY;
    });
    const auto misses = wants.size() - (size_t) ready;
    add64(counters.hits, (uint64_t) ready);
    add64(counters.misses, misses);
    if (misses != 0) {
        add64(control().cuts, 1);
    }
    if (!in_slots) {
        add64(counters.streamed, misses);
        return Held::some;
    }
    if (misses == 0) {
        return Held::slots;
    }
    const auto started = std::chrono::steady_clock::now();
    const bool ok = loader->load(need.layer, wants);
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - started);
    add64(counters.load_ns, (uint64_t) ns.count());
    if (!ok) {
        GGML_LOG_ERROR("moe-l2: %s\n", loader->error().c_str());
        release(need.layer, wants);
        return Held::failed;
    }
    return Held::slots;
}

} // namespace moe_l2
