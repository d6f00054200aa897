/* MUL_MAT_ID for a batch that needs more experts than a layer has slots.
 *
 * Experts that are resident are computed from their slots; the others pass through the staging area in windows, one
 * window being read while the one before is computed. Each is read once for each of its tensors that the graph uses,
 * and evicts nothing. For a window the rows that chose one of its experts are gathered, multiplied by the stock
 * kernel and scattered into the result: the kernel works row by row, so the bits are those of the whole operation.
 * Threads: the one that computes graphs. Blocks while a window is read.
 */
#pragma once

#include <vector>

#include "compute.h"
#include "experts.h"

namespace moe_l2 {

class Stream {
  public:
    /* What a layer needs, and which of it is resident and held (slot >= 0). */
    Stream(ggml_backend_t backend, StockCompute stock, Experts & owner, const ggml_tensor * ids, std::vector<moe_l2_want> wants);

    /* Compute one MUL_MAT_ID of the layer. GGML_STATUS_FAILED with a logged reason if an expert could not be read. */
    ggml_status compute(ggml_tensor * op, const ExpertTensor & expert);

  private:
    struct Pair {
        int32_t k;     /* which of the token's experts */
        int32_t token;
        int32_t expert;
        int32_t index; /* of the expert in the window */
    };
    ggml_status window(ggml_tensor * op, const ggml_tensor & weights, const std::vector<int32_t> & index_of);

    ggml_backend_t backend;
    StockCompute stock;
    Experts & owner;
    const ggml_tensor * ids;
    std::vector<moe_l2_want> wants;
    std::vector<uint32_t> missing;
    std::vector<Pair> pairs;
    std::vector<float> rows, results;
    std::vector<int32_t> chosen;
};

} // namespace moe_l2
