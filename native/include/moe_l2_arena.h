/* libmoe_l2_arena.so: the only code that changes the tables of the arena.
 *
 * Used by the engine's plug-in (C++) and by moe-l2d (Python, ctypes). C ABI.
 *
 * An arena is two memfds: the bytes of the experts, and the control block (moe_l2_control.h). Whoever holds
 * both descriptors can attach. A process that dies at any moment, also while it holds a lock or loads an
 * expert, costs that one load: locks are robust, and the next engine to attach takes unfinished loads back.
 *
 * Threads: every function may be called from any thread, except that close() must come last.
 * Blocking: moe_l2_wait_ready() and moe_l2_wait_preload() wait; the others hold table_lock for well under a
 * millisecond. Errors: functions return MOE_L2_OK or a negative moe_l2_error, text by moe_l2_error_text().
 */
#ifndef MOE_L2_ARENA_H
#define MOE_L2_ARENA_H

#include <stddef.h>
#include <stdint.h>

#include "moe_l2_control.h"

#ifdef __cplusplus
extern "C" {
#endif

#define MOE_L2_API __attribute__((visibility("default")))

enum moe_l2_error {
    MOE_L2_OK = 0,
    MOE_L2_E_ARGUMENT = -1,    /* layer, expert or description out of range */
    MOE_L2_E_SYSTEM = -2,      /* a system call failed, errno is set */
    MOE_L2_E_NOT_AN_ARENA = -3, /* wrong magic, size or offsets */
    MOE_L2_E_VERSION = -4,     /* written by another layout version */
    MOE_L2_E_MODEL = -5,       /* the arena was made for another model */
    MOE_L2_E_BUSY = -6,        /* another living engine holds the arena */
    MOE_L2_E_LOAD = -7,        /* the expert could not be read; it is absent again */
    MOE_L2_E_TIMEOUT = -8,
    MOE_L2_E_FULL = -9,        /* more experts at once than the layer has slots free for */
    MOE_L2_E_CAPACITY = -10,   /* the capacity is below what one expert of each layer needs */
};

/* One expert tensor, as the GGUF has it. */
struct moe_l2_tensor_desc {
    uint32_t block;    /* N of blk.N */
    uint32_t kind;     /* enum moe_l2_kind */
    uint32_t n_expert; /* the same for all tensors of a block */
    uint32_t ggml_type;
    uint32_t shard;
    uint32_t reserved;
    uint64_t file_offset;  /* bytes from the start of the shard */
    uint64_t expert_bytes; /* bytes of one expert */
};

/* An expert that a computation needs, and where it is. */
struct moe_l2_want {
    uint32_t expert;
    int32_t slot;    /* out */
    uint32_t action; /* out: enum moe_l2_action */
};

enum moe_l2_action {
    MOE_L2_IS_READY = 0,
    MOE_L2_MUST_LOAD = 1, /* by the caller, who ends it with moe_l2_end_load() */
    MOE_L2_MUST_WAIT = 2, /* another thread loads it: moe_l2_wait_ready() */
};

typedef struct moe_l2_arena moe_l2_arena;

/* Make both memfds (close-on-exec, sealed against resizing) for the `n` tensors; the layers are ordered by
 * block. `fingerprint` is 32 bytes. `capacity` is the most bytes that the arena's memfd may have, 0 = room for all
 * experts; all layers get the same share of slots. The memory is reserved, not touched. */
MOE_L2_API int moe_l2_arena_create(const struct moe_l2_tensor_desc * tensors, size_t n, const uint8_t * fingerprint,
                                   uint64_t capacity, moe_l2_arena ** out);
/* The smallest capacity that moe_l2_arena_create() accepts for these tensors, and the one that holds them all. */
MOE_L2_API int moe_l2_arena_limits(const struct moe_l2_tensor_desc * tensors, size_t n, uint64_t * least, uint64_t * most);
/* Map an arena made by somebody else; the descriptors are duplicated. Everything is checked first. */
MOE_L2_API int moe_l2_arena_attach(int arena_fd, int control_fd, moe_l2_arena ** out);
/* Unmap and close; the memory lives on in other holders of the descriptors. An attached engine is one no more. */
MOE_L2_API void moe_l2_arena_close(moe_l2_arena * arena);

MOE_L2_API struct moe_l2_control * moe_l2_control_block(moe_l2_arena * arena);
MOE_L2_API uint8_t * moe_l2_arena_bytes(moe_l2_arena * arena);
MOE_L2_API int moe_l2_arena_fd(const moe_l2_arena * arena);
MOE_L2_API int moe_l2_control_fd(const moe_l2_arena * arena);
MOE_L2_API struct moe_l2_layer * moe_l2_layer_at(moe_l2_arena * arena, uint32_t layer);
MOE_L2_API const char * moe_l2_error_text(int error);

/* Is this arena made for exactly these tensors? MOE_L2_OK or MOE_L2_E_MODEL. */
MOE_L2_API int moe_l2_arena_matches(moe_l2_arena * arena, const struct moe_l2_tensor_desc * tensors, size_t n);

/* Become the engine of this arena, until close() or the end of the process (a lock on the control memfd that
 * the kernel releases), and make experts that a dead engine was loading ABSENT again. MOE_L2_E_BUSY while
 * another engine is attached. */
MOE_L2_API int moe_l2_engine_attach(moe_l2_arena * arena);

/* Say how the bytes of one tensor are arranged from now on. If the residents were arranged otherwise, the
 * whole layer becomes absent. */
MOE_L2_API int moe_l2_set_layout(moe_l2_arena * arena, uint32_t layer, uint32_t kind, uint32_t layout);

/* Get the `n` distinct experts into slots and mark these in use, evicting by least recent use, unpinned slots first.
 * All or nothing: MOE_L2_E_FULL changes nothing. Every want is to be given back by moe_l2_release(). */
MOE_L2_API int moe_l2_acquire(moe_l2_arena * arena, uint32_t layer, struct moe_l2_want * wants, size_t n);
MOE_L2_API int moe_l2_release(moe_l2_arena * arena, uint32_t layer, const struct moe_l2_want * wants, size_t n);
/* The slot of a resident expert, marked in use, or -1; counts as a use. For batches that need more than the slots. */
MOE_L2_API int moe_l2_acquire_resident(moe_l2_arena * arena, uint32_t layer, struct moe_l2_want * want);
/* `ok` != 0: the bytes are in place, the slot becomes READY; else it becomes EMPTY. Wakes who waits. */
MOE_L2_API int moe_l2_end_load(moe_l2_arena * arena, uint32_t layer, int32_t slot, int ok, uint64_t bytes_read);
/* Wait while the slot is LOADING. MOE_L2_OK if it then holds `expert`, else MOE_L2_E_LOAD. */
MOE_L2_API int moe_l2_wait_ready(moe_l2_arena * arena, uint32_t layer, uint32_t expert, int32_t slot);

/* Replace a layer's pins: `scores[n_expert]`, 0 = not pinned. A pinned expert is evicted only when every other slot
 * is in use. Nothing is loaded by it. */
MOE_L2_API int moe_l2_set_pins(moe_l2_arena * arena, uint32_t layer, const uint32_t * scores);

/* Make every expert absent and give the memory back to the system. Only while no engine is attached. */
MOE_L2_API int moe_l2_arena_drop(moe_l2_arena * arena);

/* Ask for an expert to be loaded before it is used; `score` 0 withdraws. Wakes the engine's preloader once
 * moe_l2_preload_commit() is called. */
MOE_L2_API int moe_l2_preload_request(moe_l2_arena * arena, uint32_t layer, uint32_t expert, uint32_t score);
MOE_L2_API int moe_l2_preload_commit(moe_l2_arena * arena);
/* The absent expert with the highest score (first block, then first expert among equals) for which there is room:
 * an empty slot, or, for a pinned expert, an unpinned one. It is put into that slot, marked in use, and to be
 * loaded by the caller, as after moe_l2_acquire(): 1, or 0 = nothing to do. */
MOE_L2_API int moe_l2_preload_begin(moe_l2_arena * arena, uint32_t * layer, struct moe_l2_want * want);
/* Sleep until preload_generation differs from `seen` or `timeout_ms` passed. */
MOE_L2_API int moe_l2_preload_wait(moe_l2_arena * arena, uint32_t seen, int timeout_ms);

/* The layout as text, one `name offset size` a line, for the test that compares it with Python's view. */
MOE_L2_API const char * moe_l2_layout_text(void);

#ifdef __cplusplus
}
#endif

#endif
