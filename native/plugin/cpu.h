/* The stock CPU backend, as far as we need to know it: its own view of an operation, and its buffer types. */
#pragma once

#include "ggml-backend-impl.h"

namespace moe_l2 {

/* The buffer type that llama.cpp would choose for this expert tensor without us: CPU_REPACK where the CPU
 * backend repacks the type, else the plain one. `repack` false: always the plain one. */
ggml_backend_buffer_type_t stock_expert_buffer_type(const ggml_tensor * tensor, bool repack);

/* A buffer of that type without room, to give tensors their type and `extra`; lives as long as the process. */
ggml_backend_buffer_t tag_buffer(ggml_backend_buffer_type_t type);

/* Decorate the CPU device, once: it accepts MUL_MAT_ID on our buffer type, and its backends compute through us. */
bool decorate_cpu_device();

} // namespace moe_l2
