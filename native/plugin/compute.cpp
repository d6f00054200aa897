#include "compute.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "arena/arena.h"
#include "buffer.h"
#include "ggml-impl.h"
#include "stream.h"

namespace moe_l2 {

namespace {

/* A MUL_MAT_ID node on expert weights. */
struct Use {
    int node;
    ggml_tensor * op;
    ExpertTensor * expert;
    ggml_tensor * ids; /* src[2] as llama.cpp set it */
};

/* The first use of a layer in the graph, by one choice of the router. */
struct LayerUse {
    int node;
    Experts * owner;
    Need need;
    bool complete; /* all experts of the layer were resident before the graph ran */
};

std::vector<Use> find_uses(const ggml_cgraph * graph) {
    std::vector<Use> uses;
    for (int i = 0; i < graph->n_nodes; i++) {
        ggml_tensor * op = graph->nodes[i];
        if (op->op == GGML_OP_MUL_MAT_ID) {
            if (ExpertTensor * expert = expert_tensor(op->src[0])) {
                uses.push_back({i, op, expert, op->src[2]});
            }
        }
    }
    return uses;
}

/* Exchanges the operands of the nodes for ours, and puts llama.cpp's own back at the end. */
class Exchange {
  public:
    explicit Exchange(std::vector<Use> & uses) : uses(uses) {
        for (Use & use : uses) {
            use.ids = use.op->src[2];
            use.op->src[0] = use.expert->in_file ? &use.expert->in_arena : use.op->src[0];
        }
    }
    ~Exchange() {
        for (Use & use : uses) {
            use.op->src[0] = use.expert->model;
            use.op->src[2] = use.ids;
        }
    }
    Exchange(const Exchange &) = delete;
    Exchange & operator=(const Exchange &) = delete;

  private:
    std::vector<Use> & uses;
};

std::vector<LayerUse> layer_uses(const std::vector<Use> & uses) {
    std::vector<LayerUse> layers;
    for (const Use & use : uses) {
        if (!use.expert->in_file) {
            continue;
        }
        const Need need{use.expert->layer, use.op->src[2]};
        const bool known = std::any_of(layers.rbegin(), layers.rend(), [&](const LayerUse & l) {
            return l.owner == use.expert->owner && l.need.layer == need.layer && l.need.ids == need.ids;
        });
        if (!known) {
            layers.push_back({use.node, use.expert->owner, need, use.expert->owner->complete(need.layer)});
        }
    }
    return layers;
}

/* The router's choice with slots instead of experts, int32 [n_used, n_tokens]. */
struct SlotIds {
    std::vector<int32_t> slots;
    ggml_tensor tensor;

    SlotIds(const ggml_tensor * ids, const std::vector<moe_l2_want> & wants, int64_t n_expert) : tensor(*ids) {
        std::vector<int32_t> slot_of((size_t) n_expert, 0);
        for (const moe_l2_want & want : wants) {
            slot_of[want.expert] = want.slot;
        }
        for (int64_t token = 0; token < ids->ne[1]; token++) {
            for (int64_t k = 0; k < ids->ne[0]; k++) {
                const auto * at = static_cast<const uint8_t *>(ids->data) + token * ids->nb[1] + k * ids->nb[0];
                slots.push_back(slot_of[(size_t) *reinterpret_cast<const int32_t *>(at)]);
            }
        }
        tensor.nb[0] = sizeof(int32_t);
        tensor.nb[1] = sizeof(int32_t) * (size_t) ids->ne[0];
        tensor.nb[2] = tensor.nb[3] = tensor.nb[1] * (size_t) ids->ne[1];
        tensor.view_src = nullptr;
        tensor.data = slots.data();
    }
    SlotIds(const SlotIds &) = delete;
    SlotIds & operator=(const SlotIds &) = delete;
};

/* One run of a graph, piece by piece. */
class Run {
  public:
    Run(ggml_backend_t backend, ggml_cgraph * graph, StockCompute stock, std::vector<Use> & uses)
        : backend(backend), graph(graph), stock(stock), uses(uses) {}

    /* Before each layer that is not complete the graph stops to bring in what the layer needs. */
    ggml_status all(const std::vector<LayerUse> & layers) {
        ggml_status status = GGML_STATUS_SUCCESS;
        for (const LayerUse & layer : layers) {
            if (!layer.complete && status == GGML_STATUS_SUCCESS) {
                status = upto(layer.node);
                status = status == GGML_STATUS_SUCCESS ? one(layer) : status;
            }
        }
        status = status == GGML_STATUS_SUCCESS ? upto(graph->n_nodes) : status;
        for (const auto & [layer, wants] : held) {
            layer->owner->release(layer->need.layer, wants);
        }
        return status;
    }

  private:
    ggml_status upto(int node) {
        if (node <= position) {
            return GGML_STATUS_SUCCESS;
        }
        ggml_status status;
        if (position == 0 && node == graph->n_nodes) {
            status = stock(backend, graph);
        } else {
            ggml_cgraph part = ggml_graph_view(graph, position, node);
            status = stock(backend, &part);
        }
        position = node;
        return status;
    }

    ggml_status one(const LayerUse & layer) {
        std::vector<moe_l2_want> wants;
        const Experts::Held how = layer.owner->hold(layer.need, wants);
        if (how == Experts::Held::failed) {
            return GGML_STATUS_FAILED;
        }
        held.emplace_back(&layer, wants);
        if (how == Experts::Held::some) {
            return streamed(layer, wants);
        }
        if (!layer.owner->has_all_slots(layer.need.layer)) {
            slot_ids.push_back(std::make_unique<SlotIds>(layer.need.ids, wants, n_expert(layer)));
            for (Use & use : uses) {
                if (is_of(use, layer)) {
                    use.op->src[2] = &slot_ids.back()->tensor;
                }
            }
        }
        return GGML_STATUS_SUCCESS;
    }

    ggml_status streamed(const LayerUse & layer, const std::vector<moe_l2_want> & wants) {
        Stream stream(backend, stock, *layer.owner, layer.need.ids, wants);
        for (Use & use : uses) {
            if (!is_of(use, layer)) {
                continue;
            }
            ggml_status status = upto(use.node);
            status = status == GGML_STATUS_SUCCESS ? stream.compute(use.op, *use.expert) : status;
            if (status != GGML_STATUS_SUCCESS) {
                return status;
            }
            position = use.node + 1;
        }
        return GGML_STATUS_SUCCESS;
    }

    static bool is_of(const Use & use, const LayerUse & layer) {
        return use.expert->in_file && use.expert->owner == layer.owner && use.expert->layer == layer.need.layer && use.ids == layer.need.ids;
    }

    int64_t n_expert(const LayerUse & layer) const {
        const auto found = std::find_if(uses.begin(), uses.end(), [&](const Use & use) { return is_of(use, layer); });
        return found->expert->model->ne[2];
    }

    ggml_backend_t backend;
    ggml_cgraph * graph;
    StockCompute stock;
    std::vector<Use> & uses;
    int position = 0; /* the first node that is not computed yet */
    std::vector<std::pair<const LayerUse *, std::vector<moe_l2_want>>> held;
    std::vector<std::unique_ptr<SlotIds>> slot_ids;
};

} // namespace

ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph * graph, StockCompute stock) {
    std::vector<Use> uses = find_uses(graph);
    if (uses.empty()) {
        return stock(backend, graph);
    }
    const auto started = std::chrono::steady_clock::now();
    for (const Use & use : uses) {
        if (use.expert->in_file && !use.expert->owner->open()) {
            return GGML_STATUS_FAILED;
        }
    }
    const std::vector<LayerUse> layers = layer_uses(uses);
    if (layers.empty()) {
        return stock(backend, graph); /* llama.cpp copied the experts into our reservation: plain tensors */
    }
    Experts & owner = *layers.front().owner;
    owner.computing(true);
    ggml_status status;
    {
        Exchange exchange(uses);
        status = Run(backend, graph, stock, uses).all(layers);
    }
    owner.computing(false);
    if (status != GGML_STATUS_SUCCESS) {
        return status;
    }
    for (const LayerUse & layer : layers) {
        if (layer.complete) {
            layer.owner->used(layer.need);
        }
    }
    moe_l2_control & control = owner.control();
    const auto ns = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - started);
    add64(control.graph_ns, (uint64_t) ns.count());
    add64(control.graphs, 1);
    add64(control.tokens, (uint64_t) layers.front().need.ids->ne[1]);
    __atomic_store_n(&control.active, 1, __ATOMIC_RELAXED);
    return status;
}

void keep_ids(const ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    if (params == nullptr || params->add_alloc_dep == nullptr) {
        return;
    }
    for (const Use & use : find_uses(graph)) {
        params->add_alloc_dep(params->user_data, use.op->src[2], graph->nodes[graph->n_nodes - 1]);
    }
}

} // namespace moe_l2
