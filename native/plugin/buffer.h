/* The buffer type MOE_L2: takes expert tensors and gives them an address, no memory. */
#pragma once

#include "experts.h"
#include "ggml-backend-impl.h"

namespace moe_l2 {

ggml_backend_buffer_type_t expert_buffer_type();

/* The record of a tensor that lies in a buffer of our type, else nullptr. */
ExpertTensor * expert_tensor(const ggml_tensor * tensor);

/* True for an operation that loads may place in our buffer type: MUL_MAT_ID on a tensor with an expert's name. */
bool takes(const ggml_tensor * op);

} // namespace moe_l2
