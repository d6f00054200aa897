/* The device MOE_L2 that offers our buffer type to llama.cpp; it computes nothing itself. */
#pragma once

#include "ggml-backend-impl.h"

namespace moe_l2 {

ggml_backend_dev_t accel_device();
ggml_backend_reg_t registry();

} // namespace moe_l2
