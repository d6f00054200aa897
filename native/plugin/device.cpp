/* Entry point of the plug-in: registry and device.
 *
 * The device is of type ACCEL, so llama.cpp offers weights to its buffer type before the CPU's own. It never
 * gets a node to compute: the graph stays with the stock CPU backend, whose device we decorate (cpu.cpp).
 */
#include "device.h"

#include <cstring>

#include "buffer.h"
#include "cpu.h"
#include "ggml-impl.h"
#include "settings.h"

static_assert(GGML_BACKEND_API_VERSION == 3, "the plug-in was written for API version 3 of ggml back ends");

namespace moe_l2 {

namespace {

const char * name_of_device(ggml_backend_dev_t) { return "MOE_L2"; }
const char * describe_device(ggml_backend_dev_t) { return "experts from the moe-l2 arena"; }

void device_memory(ggml_backend_dev_t, size_t * free, size_t * total) {
    *free = 0; /* nothing to report: the arena is accounted for by whoever made it */
    *total = 0;
}

enum ggml_backend_dev_type device_type(ggml_backend_dev_t) { return GGML_BACKEND_DEVICE_TYPE_ACCEL; }

void device_props(ggml_backend_dev_t device, ggml_backend_dev_props * props) {
    memset(props, 0, sizeof(*props));
    props->name = name_of_device(device);
    props->description = describe_device(device);
    props->type = device_type(device);
    props->caps.mmap_support = true;
}

const char * name_of_backend(ggml_backend_t) { return "MOE_L2"; }
void free_backend(ggml_backend_t backend) { delete backend; }

/* Never called: supports_op() below says no to whatever is to be computed. */
ggml_status compute_nothing(ggml_backend_t, ggml_cgraph *) { return GGML_STATUS_FAILED; }

ggml_backend_t init_backend(ggml_backend_dev_t device, const char *) {
    static ggml_guid guid = {'m', 'o', 'e', '-', 'l', '2', 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
    auto * backend = new ggml_backend{};
    backend->guid = &guid;
    backend->iface.get_name = name_of_backend;
    backend->iface.free = free_backend;
    backend->iface.graph_compute = compute_nothing;
    backend->device = device;
    return backend;
}

ggml_backend_buffer_type_t buffer_type(ggml_backend_dev_t) { return expert_buffer_type(); }

/* Yes to llama.cpp looking for a buffer type (it asks with an empty buffer of no usage), no to the scheduler
 * looking for a backend (weights have their usage then): that one shall find the CPU. */
bool supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    return takes(op) && op->src[0]->buffer->usage != GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
}

bool supports_buft(ggml_backend_dev_t, ggml_backend_buffer_type_t type) { return type == expert_buffer_type(); }

const char * name_of_registry(ggml_backend_reg_t) { return "MOE_L2"; }
size_t device_count(ggml_backend_reg_t) { return 1; }
ggml_backend_dev_t device_at(ggml_backend_reg_t, size_t) { return accel_device(); }

} // namespace

ggml_backend_reg_t registry() {
    static ggml_backend_reg reg = [] {
        ggml_backend_reg r{};
        r.api_version = GGML_BACKEND_API_VERSION;
        r.iface.get_name = name_of_registry;
        r.iface.get_device_count = device_count;
        r.iface.get_device = device_at;
        return r;
    }();
    return &reg;
}

ggml_backend_dev_t accel_device() {
    static ggml_backend_device device = [] {
        ggml_backend_device d{};
        d.iface.get_name = name_of_device;
        d.iface.get_description = describe_device;
        d.iface.get_memory = device_memory;
        d.iface.get_type = device_type;
        d.iface.get_props = device_props;
        d.iface.init_backend = init_backend;
        d.iface.get_buffer_type = buffer_type;
        d.iface.supports_op = supports_op;
        d.iface.supports_buft = supports_buft;
        d.reg = registry();
        return d;
    }();
    return &device;
}

} // namespace moe_l2

/* Called by ggml for GGML_BACKEND_PATH, possibly more than once. */
extern "C" __attribute__((visibility("default"))) ggml_backend_reg_t ggml_backend_init(void) {
    if (!moe_l2::decorate_cpu_device()) {
        GGML_LOG_ERROR("moe-l2: the plug-in is not used: ggml has no CPU device to compute with\n");
        return nullptr;
    }
    moe_l2::leave_experts_to_us();
    return moe_l2::registry();
}
