/* The control block: what moe-l2d and the engine share about the arena.
 *
 * One memfd, mapped by both. This header is the only description of its layout; moe_l2d/arena/layout.py
 * mirrors it and a test compares the two, field by field. Plain C, fixed-width fields, no pointers.
 *
 * Who writes what:
 *   - everything up to `table_lock` is written once, by moe_l2_arena_create(), and never again;
 *   - expert states and `layout` change only inside libmoe_l2_arena.so;
 *   - counters have one writer, the engine, and are read by anybody at any time (aligned 64-bit, relaxed).
 *
 * Offsets are in bytes from the start of the control block unless their comment says otherwise.
 */
#ifndef MOE_L2_CONTROL_H
#define MOE_L2_CONTROL_H

#include <pthread.h>
#include <stdint.h>

#define MOE_L2_CONTROL_MAGIC 0x314b4c42324c454dull /* "MEL2BLK1" read as little-endian bytes */
#define MOE_L2_LAYOUT_VERSION 1u

/* The expert tensors of a block: blk.N.ffn_gate_exps.weight and so on. */
enum moe_l2_kind {
    MOE_L2_GATE = 0,
    MOE_L2_UP = 1,
    MOE_L2_DOWN = 2,
    MOE_L2_GATE_UP = 3,
    MOE_L2_KINDS = 4,
};

/* State of one expert of one layer; the word is also a futex. */
enum moe_l2_state {
    MOE_L2_ABSENT = 0,
    MOE_L2_LOADING = 1,
    MOE_L2_READY = 2,
};

/* How the bytes of a resident expert are arranged. */
enum moe_l2_byte_layout {
    MOE_L2_LAYOUT_UNKNOWN = 0, /* nothing resident yet */
    MOE_L2_LAYOUT_FILE = 1,    /* as in the GGUF */
    MOE_L2_LAYOUT_REPACKED = 2 /* as the CPU backend's CPU_REPACK buffer type arranges it */
};

/* One expert tensor of a layer; `expert_bytes` is 0 where the layer has no tensor of that kind. */
struct moe_l2_tensor {
    uint64_t file_offset;  /* of expert 0, from the start of its shard */
    uint64_t expert_bytes; /* of one expert, the same in the file and in the arena */
    uint64_t slot_stride;  /* from one slot to the next in the arena; >= expert_bytes, a multiple of 64 */
    uint64_t arena_offset; /* of slot 0, from the start of the arena; a multiple of 4096 */
    uint32_t shard;        /* which file of a split model, from 0 */
    uint32_t ggml_type;    /* enum ggml_type */
    uint32_t layout;       /* enum moe_l2_byte_layout */
    uint32_t reserved;
};

struct moe_l2_layer_counters {
    uint64_t lookups;    /* one for each distinct expert that a layer needs in a graph */
    uint64_t hits;       /* lookups that found the expert resident */
    uint64_t misses;     /* lookups that had to load it, or wait for it */
    uint64_t evictions;  /* 0 while every expert has its own slot */
    uint64_t bytes_read; /* from disk, demand and preload together */
    uint64_t resident;   /* experts in state READY */
    uint64_t preloaded;  /* experts loaded by preload */
    uint64_t load_ns;    /* time the engine waited for misses */
};

struct moe_l2_layer {
    uint32_t block;    /* N of blk.N */
    uint32_t n_expert; /* experts in this layer; slot i holds expert i */
    uint64_t states_offset;  /* uint32_t[n_expert], enum moe_l2_state */
    uint64_t owners_offset;  /* uint32_t[n_expert], engine_epoch of the loader, valid in state LOADING */
    uint64_t uses_offset;    /* uint64_t[n_expert], (token, expert) pairs routed */
    uint64_t preload_offset; /* uint32_t[n_expert], 0 = not wanted, else score; higher loads first */
    struct moe_l2_tensor tensors[MOE_L2_KINDS];
    struct moe_l2_layer_counters counters;
};

/* Room for a process-shared pthread mutex of any libc (glibc: 40 bytes on x86-64, 48 on aarch64). */
union moe_l2_mutex {
    pthread_mutex_t mutex;
    uint8_t room[64];
};

struct moe_l2_control {
    uint64_t magic;
    uint32_t layout_version;
    uint32_t n_layers;
    uint64_t control_bytes;
    uint64_t arena_bytes;
    uint64_t layers_offset; /* struct moe_l2_layer[n_layers] */
    uint64_t expert_bytes_total;
    uint8_t fingerprint[32]; /* of the model, chosen by the creator; compared, never interpreted */

    union moe_l2_mutex table_lock; /* robust; held for every change of a state, never while reading a file */

    uint32_t engine_pid;         /* of the engine that is or was last attached; 0 = none yet */
    uint32_t engine_epoch;       /* +1 for every engine that attached */
    uint32_t preload_generation; /* futex; +1 for every change of the preload tables */
    uint32_t preload_mib_per_s;  /* bound on preload reads; 0 = none */
    uint32_t active;             /* 1 once the engine has run a graph from this arena: the cache is not inert */
    uint32_t bypassed;           /* expert tensors that the engine computes without the arena (should be 0) */

    uint64_t graphs; /* graphs with expert layers that were computed */
    uint64_t tokens; /* tokens routed, counted at the first expert layer of each graph */
    uint64_t graph_ns; /* time inside graph computation, loads included */
    uint64_t cuts;   /* times a graph was interrupted to load an expert */
};

#endif
