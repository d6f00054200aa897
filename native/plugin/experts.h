/* The expert tensors of one model, and the arena they are computed from.
 *
 * Life: note() for each expert tensor while llama.cpp loads the model (nothing is copied); open() before the
 * first graph: attaches the daemon's arena, or makes one, decides the byte layout, starts the loader;
 * then for every graph src() gives what to compute with and need() makes experts resident.
 * Threads: the loading thread first, later the one thread that computes graphs.
 */
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "arena/loader.h"
#include "ggml-backend.h"
#include "ggml.h"
#include "mapped_file.h"
#include "moe_l2_arena.h"

namespace moe_l2 {

class Experts;

/* One expert tensor; ggml_tensor::extra of the model's tensor points here. */
struct ExpertTensor {
    Experts * owner = nullptr;
    ggml_tensor * model = nullptr; /* llama.cpp's tensor, whose data is an address without memory */
    FileRange file;
    bool in_file = false;   /* found in a mapped file: can go through the arena */
    uint32_t block = 0;
    uint32_t kind = 0;
    uint32_t layer = 0;     /* index in the control block, known after open() */
    ggml_tensor in_arena{}; /* the same tensor over the arena's bytes, in the layout that is computed with */
};

/* One use of a layer's experts by a graph: int32 ids[n_used, n_tokens] chosen by the router. */
struct Need {
    uint32_t layer;
    const ggml_tensor * ids;
};

class Experts {
  public:
    Experts() = default;
    ~Experts();
    Experts(const Experts &) = delete;
    Experts & operator=(const Experts &) = delete;

    /* The record of a tensor of this model; made at first call. */
    ExpertTensor & record(ggml_tensor * tensor);
    /* llama.cpp says: this tensor's bytes are at `data`. False: not in a mapped file, it must be copied. */
    bool note(ggml_tensor * tensor, const void * data);

    /* Bytes of a tensor as they are in the file. */
    bool read(const ExpertTensor & expert, void * to, size_t offset, size_t size);

    /* Idempotent. False with a logged reason if the model cannot be computed through an arena. */
    bool open();
    /* Every expert of the layer is resident, expert i in slot i. */
    bool complete(uint32_t layer) const;
    /* The layer has a slot for each expert, so that slots and experts have the same numbers. */
    bool has_all_slots(uint32_t layer) const;

    enum class Held { slots, some, failed };
    /* Count one use of a layer and hold what it needs in slots, loading what is missing. Held::some: it needs more
     * than there are slots, only what is resident is held and the rest has slot -1. Held::failed: logged. */
    Held hold(const Need & need, std::vector<moe_l2_want> & wants);
    void release(uint32_t layer, const std::vector<moe_l2_want> & wants);
    /* Count one use of a layer that was complete before the graph ran. */
    void used(const Need & need);
    /* Room for streaming experts past the slots. */
    uint8_t * staging();
    Loader & reader() { return *loader; }

    void computing(bool on);
    moe_l2_control & control();

  private:
    std::vector<moe_l2_tensor_desc> describe() const;
    bool take_arena(const std::vector<moe_l2_tensor_desc> & descriptions);
    bool open_files();
    bool choose_layouts();
    bool fill();
    void arrange(uint32_t layer, uint32_t kind, const uint8_t * raw, uint8_t * slot);
    void count(const Need & need);

    std::vector<std::unique_ptr<ExpertTensor>> tensors;
    MappedFiles mapped;
    moe_l2_arena * arena = nullptr;
    std::unique_ptr<Loader> loader;
    Files files; /* ours to close */
    enum class State { closed, open, failed } state = State::closed;
    std::vector<std::vector<ExpertTensor *>> by_layer; /* [layer][kind], nullptr where there is none */

    /* what count() found in the last graph node it looked at */
    std::vector<uint32_t> distinct;
    std::vector<uint8_t> seen;
};

} // namespace moe_l2
