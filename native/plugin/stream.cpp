#include "stream.h"

#include <algorithm>
#include <cstring>
#include <memory>

#include "ggml-impl.h"

namespace moe_l2 {

namespace {

int32_t id_at(const ggml_tensor * ids, int64_t k, int64_t token) {
    return *reinterpret_cast<const int32_t *>(static_cast<const uint8_t *>(ids->data) + token * ids->nb[1] + k * ids->nb[0]);
}

/* A tensor over memory of our own. */
ggml_tensor * over(ggml_context * ctx, ggml_type type, int64_t ne0, int64_t ne1, int64_t ne2, void * data) {
    ggml_tensor * t = ggml_new_tensor_3d(ctx, type, ne0, ne1, ne2);
    t->data = data;
    return t;
}

} // namespace

Stream::Stream(ggml_backend_t backend, StockCompute stock, Experts & owner, const ggml_tensor * ids, std::vector<moe_l2_want> wants)
    : backend(backend), stock(stock), owner(owner), ids(ids), wants(std::move(wants)) {
    for (const moe_l2_want & want : this->wants) {
        if (want.slot < 0) {
            missing.push_back(want.expert);
        }
    }
}

ggml_status Stream::compute(ggml_tensor * op, const ExpertTensor & expert) {
    const int64_t n_expert = expert.model->ne[2];
    const uint64_t stride = expert.in_arena.nb[2];
    const uint64_t half = owner.control().staging_bytes / 2 / stride * stride;
    const auto per_window = (size_t) std::max<uint64_t>(1, half / stride);
    uint8_t * const staging = owner.staging();

    Loader::Group groups[2];
    auto begin = [&](size_t w) {
        const size_t first = w * per_window;
        if (first < missing.size()) {
            const size_t n = std::min(per_window, missing.size() - first);
            owner.reader().stream(expert.layer, expert.kind, &missing[first], n, staging + (w % 2) * per_window * stride, stride, groups[w % 2]);
        }
    };
    begin(0);
    std::vector<int32_t> index_of(n_expert, -1);
    for (const moe_l2_want & want : wants) {
        index_of[want.expert] = want.slot;
    }
    ggml_status status = window(op, expert.in_arena, index_of); /* the residents, while the first window is read */
    for (size_t w = 0; w * per_window < missing.size(); w++) {
        const bool ok = owner.reader().wait(groups[w % 2]);
        groups[w % 2] = Loader::Group();
        if (!ok) {
            GGML_LOG_ERROR("moe-l2: %s\n", owner.reader().error().c_str());
            status = GGML_STATUS_FAILED;
        }
        if (status != GGML_STATUS_SUCCESS) {
            break;
        }
        begin(w + 1);
        std::fill(index_of.begin(), index_of.end(), -1);
        const size_t first = w * per_window;
        const size_t n = std::min(per_window, missing.size() - first);
        for (size_t i = 0; i < n; i++) {
            index_of[missing[first + i]] = (int32_t) i;
        }
        ggml_tensor weights = expert.in_arena;
        weights.data = staging + (w % 2) * per_window * stride;
        weights.ne[2] = (int64_t) n;
        status = window(op, weights, index_of);
    }
    for (Loader::Group & group : groups) {
        owner.reader().wait(group); /* its reads go to the staging area, which outlives them then */
    }
    return status;
}

ggml_status Stream::window(ggml_tensor * op, const ggml_tensor & weights, const std::vector<int32_t> & index_of) {
    const ggml_tensor * input = op->src[1];
    pairs.clear();
    for (int64_t token = 0; token < ids->ne[1]; token++) {
        for (int64_t k = 0; k < ids->ne[0]; k++) {
            const int32_t expert = id_at(ids, k, token);
            if (expert >= 0 && (size_t) expert < index_of.size() && index_of[expert] >= 0) {
                pairs.push_back({(int32_t) k, (int32_t) token, expert, index_of[expert]});
            }
        }
    }
    if (pairs.empty()) {
        return GGML_STATUS_SUCCESS;
    }
    const int64_t n = (int64_t) pairs.size();
    const int64_t in = input->ne[0];
    const int64_t out = op->ne[0];
    rows.resize((size_t) (n * in));
    results.resize((size_t) (n * out));
    chosen.resize((size_t) n);
    for (int64_t i = 0; i < n; i++) {
        const Pair & p = pairs[i];
        const auto * row = static_cast<const uint8_t *>(input->data) + (p.k % input->ne[1]) * input->nb[1] + p.token * input->nb[2];
        memcpy(&rows[i * in], row, (size_t) in * sizeof(float));
        chosen[i] = p.index;
    }

    ggml_init_params params{ggml_tensor_overhead() * 4 + ggml_graph_overhead_custom(4, false), nullptr, true};
    std::unique_ptr<ggml_context, void (*)(ggml_context *)> ctx(ggml_init(params), ggml_free);
    ggml_tensor * w = ggml_new_tensor_3d(ctx.get(), weights.type, weights.ne[0], weights.ne[1], weights.ne[2]);
    w->data = weights.data;
    w->buffer = weights.buffer;
    w->extra = weights.extra;
    w->nb[2] = weights.nb[2];
    w->nb[3] = weights.nb[2] * (uint64_t) weights.ne[2];
    ggml_tensor * b = over(ctx.get(), GGML_TYPE_F32, in, 1, n, rows.data());
    ggml_tensor * one_id = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_I32, 1, n);
    one_id->data = chosen.data();
    ggml_tensor * product = ggml_mul_mat_id(ctx.get(), w, b, one_id);
    product->data = results.data();
    ggml_cgraph * graph = ggml_new_graph_custom(ctx.get(), 4, false);
    ggml_build_forward_expand(graph, product);
    if (ggml_status status = stock(backend, graph); status != GGML_STATUS_SUCCESS) {
        return status;
    }
    for (int64_t i = 0; i < n; i++) {
        auto * row = static_cast<uint8_t *>(op->data) + pairs[i].k * op->nb[1] + pairs[i].token * op->nb[2];
        memcpy(row, &results[i * out], (size_t) out * sizeof(float));
    }
    return GGML_STATUS_SUCCESS;
}

} // namespace moe_l2
