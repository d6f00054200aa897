#include "compute.h"

#include <algorithm>
#include <chrono>
#include <vector>

#include "arena/arena.h"
#include "buffer.h"
#include "ggml-impl.h"

namespace moe_l2 {

namespace {

/* A MUL_MAT_ID node on expert weights. */
struct Use {
    int node;
    ggml_tensor * op;
    ExpertTensor * expert;
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
                uses.push_back({i, op, expert});
            }
        }
    }
    return uses;
}

/* Exchanges src[0] of the nodes for tensors over the arena, and puts llama.cpp's own back at the end. */
class Exchange {
  public:
    explicit Exchange(std::vector<Use> & uses) : uses(uses) {
        for (Use & use : uses) {
            use.op->src[0] = use.expert->in_file ? &use.expert->in_arena : use.op->src[0];
        }
    }
    ~Exchange() {
        for (Use & use : uses) {
            use.op->src[0] = use.expert->model;
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

/* Run the graph, stopping before each layer that is not complete to bring in what it needs. */
ggml_status run(ggml_backend_t backend, ggml_cgraph * graph, StockCompute stock, const std::vector<LayerUse> & layers) {
    int done = 0;
    for (const LayerUse & layer : layers) {
        if (layer.complete) {
            continue;
        }
        if (layer.node > done) {
            ggml_cgraph part = ggml_graph_view(graph, done, layer.node);
            if (ggml_status status = stock(backend, &part); status != GGML_STATUS_SUCCESS) {
                return status;
            }
            done = layer.node;
        }
        if (!layer.owner->need(layer.need)) {
            return GGML_STATUS_FAILED;
        }
    }
    if (done == 0) {
        return stock(backend, graph);
    }
    ggml_cgraph rest = ggml_graph_view(graph, done, graph->n_nodes);
    return stock(backend, &rest);
}

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
        status = run(backend, graph, stock, layers);
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
