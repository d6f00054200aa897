/* Decoration of the stock CPU device.
 *
 * The device's interface is a plain struct of function pointers; three of them are replaced, each calls the one
 * it replaced. Everything else, the scheduler's view included, stays as it is: one device "CPU", one backend,
 * one graph split, so flash attention, thread pools and abort callbacks behave as without us.
 */
#include "cpu.h"

#include <map>

#include "buffer.h"
#include "compute.h"
#include "ggml-impl.h"

namespace moe_l2 {

namespace {

ggml_backend_device_i stock_device; /* the interface before decoration; valid once `decorated` */
ggml_backend_i stock_backend;       /* of the CPU backend; the same for each of its instances */
bool decorated = false;

/* An operation as the CPU would see it if its expert weights lay in `buffer`. */
bool stock_supports(ggml_backend_dev_t device, const ggml_tensor * op, ggml_backend_buffer_t buffer) {
    ggml_tensor weights = *op->src[0];
    weights.buffer = buffer;
    ggml_tensor probe = *op;
    probe.src[0] = &weights;
    return stock_device.supports_op(device, &probe);
}

bool device_supports_op(ggml_backend_dev_t device, const ggml_tensor * op) {
    for (const ggml_tensor * src : op->src) {
        if (src != nullptr && src->buffer != nullptr && src->buffer->buft == expert_buffer_type()) {
            return takes(op) && stock_supports(device, op, nullptr);
        }
    }
    return stock_device.supports_op(device, op);
}

bool device_supports_buft(ggml_backend_dev_t device, ggml_backend_buffer_type_t type) {
    return type == expert_buffer_type() || stock_device.supports_buft(device, type);
}

ggml_status backend_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    return compute_graph(backend, graph, stock_backend.graph_compute);
}

void backend_optimize(ggml_backend_t backend, ggml_cgraph * graph, ggml_backend_graph_optimize_params * params) {
    if (stock_backend.graph_optimize != nullptr) {
        stock_backend.graph_optimize(backend, graph, params);
    }
    keep_ids(graph, params);
}

ggml_backend_t device_init_backend(ggml_backend_dev_t device, const char * params) {
    ggml_backend_t backend = stock_device.init_backend(device, params);
    if (backend != nullptr) {
        stock_backend = backend->iface;
        backend->iface.graph_compute = backend_compute;
        backend->iface.graph_optimize = backend_optimize;
    }
    return backend;
}

ggml_backend_dev_t cpu_device() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

/* MUL_MAT_ID of this tensor as llama.cpp asks for it when it looks for a buffer type. */
bool supported_in(ggml_backend_buffer_type_t type, const ggml_tensor * tensor) {
    ggml_tensor b{}, ids{}, op{};
    ggml_tensor weights = *tensor;
    weights.buffer = tag_buffer(type);
    weights.extra = nullptr;
    b.type = GGML_TYPE_F32;
    b.ne[0] = tensor->ne[0];
    b.ne[1] = b.ne[3] = 1;
    b.ne[2] = 512;
    ids.type = GGML_TYPE_I32;
    op.op = GGML_OP_MUL_MAT_ID;
    op.type = GGML_TYPE_F32;
    op.src[0] = &weights;
    op.src[1] = &b;
    op.src[2] = &ids;
    return weights.buffer != nullptr && stock_device.supports_op(cpu_device(), &op);
}

} // namespace

bool decorate_cpu_device() {
    if (decorated) {
        return true;
    }
    ggml_backend_dev_t device = cpu_device();
    if (device == nullptr) {
        return false;
    }
    stock_device = device->iface;
    device->iface.supports_op = device_supports_op;
    device->iface.supports_buft = device_supports_buft;
    device->iface.init_backend = device_init_backend;
    decorated = true;
    return true;
}

ggml_backend_buffer_t tag_buffer(ggml_backend_buffer_type_t type) {
    static std::map<ggml_backend_buffer_type_t, ggml_backend_buffer_t> buffers;
    auto [entry, is_new] = buffers.try_emplace(type, nullptr);
    if (is_new) {
        entry->second = ggml_backend_buft_alloc_buffer(type, 64);
    }
    return entry->second;
}

ggml_backend_buffer_type_t stock_expert_buffer_type(const ggml_tensor * tensor, bool repack) {
    ggml_backend_dev_t device = cpu_device();
    ggml_backend_reg_t reg = ggml_backend_dev_backend_reg(device);
    auto extra_types = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(reg, "ggml_backend_dev_get_extra_bufts");
    if (repack && extra_types != nullptr) {
        for (ggml_backend_buffer_type_t * type = extra_types(device); type != nullptr && *type != nullptr; type++) {
            if (supported_in(*type, tensor)) {
                return *type;
            }
        }
    }
    return ggml_backend_dev_buffer_type(device);
}

} // namespace moe_l2
