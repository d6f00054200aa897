/* Computing a graph with experts from the arena.
 *
 * When every expert of every layer is resident, the graph runs in one piece, as without us: only the weight
 * operand of MUL_MAT_ID is exchanged, and what the router chose is counted afterwards. Any other layer interrupts
 * the graph once, right before its first MUL_MAT_ID, where the router's choice is known: what it needs is brought
 * into slots and held there, and the ids are exchanged for slot numbers. A batch that needs more experts than the
 * layer has slots is streamed (stream.h).
 * Threads: called by the one thread that computes graphs. Blocks while missing experts are read.
 */
#pragma once

#include "ggml-backend-impl.h"

namespace moe_l2 {

using StockCompute = ggml_status (*)(ggml_backend_t, ggml_cgraph *);

ggml_status compute_graph(ggml_backend_t backend, ggml_cgraph * graph, StockCompute stock);

/* Keep the router's choices allocated until the graph's end, so that they can be counted there. */
void keep_ids(const ggml_cgraph * graph, ggml_backend_graph_optimize_params * params);

} // namespace moe_l2
