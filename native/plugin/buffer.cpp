#include "buffer.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "device.h"
#include "ggml-impl.h"
#include "names.h"

namespace moe_l2 {

namespace {

/* Address space for all expert tensors of a model. Touching it is a fault, except where a tensor had to be copied. */
struct Reservation {
    uint8_t * base = nullptr;
    size_t size = 0;
    Experts experts;

    ~Reservation() {
        if (base != nullptr) {
            munmap(base, size);
        }
    }
};

Reservation & reservation(ggml_backend_buffer_t buffer) { return *static_cast<Reservation *>(buffer->context); }

void buffer_free(ggml_backend_buffer_t buffer) { delete &reservation(buffer); }

void * buffer_base(ggml_backend_buffer_t buffer) { return reservation(buffer).base; }

ggml_status buffer_init_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor) {
    if (tensor->view_src == nullptr) {
        tensor->extra = &reservation(buffer).experts.record(tensor);
    }
    return GGML_STATUS_SUCCESS;
}

/* Give a tensor real memory: for bytes that are in no file we could read later. */
bool make_writable(const ggml_tensor * tensor) {
    const auto page = (uintptr_t) sysconf(_SC_PAGESIZE);
    const uintptr_t start = reinterpret_cast<uintptr_t>(tensor->data) / page * page;
    const uintptr_t end = reinterpret_cast<uintptr_t>(tensor->data) + ggml_nbytes(tensor);
    return mprotect(reinterpret_cast<void *>(start), end - start, PROT_READ | PROT_WRITE) == 0;
}

void buffer_set_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size) {
    Experts & experts = reservation(buffer).experts;
    if (offset == 0 && size == ggml_nbytes(tensor) && experts.note(tensor, data)) {
        return;
    }
    if (!make_writable(tensor)) {
        GGML_ABORT("moe-l2: cannot get memory for tensor '%s' (%zu bytes)", tensor->name, ggml_nbytes(tensor));
    }
    memcpy(static_cast<uint8_t *>(tensor->data) + offset, data, size);
}

void buffer_memset_tensor(ggml_backend_buffer_t, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    if (!make_writable(tensor)) {
        GGML_ABORT("moe-l2: cannot get memory for tensor '%s' (%zu bytes)", tensor->name, ggml_nbytes(tensor));
    }
    memset(static_cast<uint8_t *>(tensor->data) + offset, value, size);
}

void buffer_get_tensor(ggml_backend_buffer_t, const ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    const ExpertTensor * expert = expert_tensor(tensor);
    if (expert == nullptr || !expert->in_file) {
        memcpy(data, static_cast<const uint8_t *>(tensor->data) + offset, size);
    } else if (!expert->owner->read(*expert, data, offset, size)) {
        GGML_ABORT("moe-l2: cannot read tensor '%s' from '%s'", tensor->name, expert->file.path.c_str());
    }
}

void buffer_clear(ggml_backend_buffer_t, uint8_t) {} /* there is nothing to clear */

const char * type_name(ggml_backend_buffer_type_t) { return "MOE_L2"; }

ggml_backend_buffer_t type_alloc(ggml_backend_buffer_type_t type, size_t size) {
    auto r = std::make_unique<Reservation>();
    void * base = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED) {
        GGML_LOG_ERROR("moe-l2: cannot reserve %zu MiB of address space for the experts: %s\n", size >> 20, strerror(errno));
        return nullptr;
    }
    r->base = static_cast<uint8_t *>(base);
    r->size = size;
    ggml_backend_buffer_i i{};
    i.free_buffer = buffer_free;
    i.get_base = buffer_base;
    i.init_tensor = buffer_init_tensor;
    i.memset_tensor = buffer_memset_tensor;
    i.set_tensor = buffer_set_tensor;
    i.get_tensor = buffer_get_tensor;
    i.clear = buffer_clear;
    return ggml_backend_buffer_init(type, i, r.release(), size);
}

size_t type_alignment(ggml_backend_buffer_type_t) { return 64; }

/* Not host memory: nobody may read it past us, nor lock it into RAM. */
bool type_is_host(ggml_backend_buffer_type_t) { return false; }

} // namespace

ggml_backend_buffer_type_t expert_buffer_type() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type t{};
        t.iface.get_name = type_name;
        t.iface.alloc_buffer = type_alloc;
        t.iface.get_alignment = type_alignment;
        t.iface.is_host = type_is_host;
        t.device = accel_device();
        return t;
    }();
    return &type;
}

ExpertTensor * expert_tensor(const ggml_tensor * tensor) {
    const bool ours = tensor != nullptr && tensor->buffer != nullptr && tensor->buffer->buft == expert_buffer_type();
    return ours ? static_cast<ExpertTensor *>(tensor->extra) : nullptr;
}

bool takes(const ggml_tensor * op) {
    const ggml_tensor * weights = op->op == GGML_OP_MUL_MAT_ID ? op->src[0] : nullptr;
    ExpertName name;
    return weights != nullptr && weights->buffer != nullptr && weights->buffer->buft == expert_buffer_type() &&
           ggml_is_contiguous(weights) && weights->ne[3] == 1 && parse_expert_name(weights->name, name);
}

} // namespace moe_l2
