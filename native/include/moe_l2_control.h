/* The control block: what moe-l2d and the engine share about the arena.
 *
 * One memfd, mapped by both. This header is the only description of its layout; moe_l2d/arena/layout.py
 * mirrors it and a test compares the two, field by field. Plain C, fixed-width fields, no pointers.
 *
 * Who writes what:
 *   - everything up to `table_lock` is written once, by moe_l2_arena_create(), and never again;
 *   - slots, lists and `layout` change only inside libmoe_l2_arena.so, under table_lock;
 *   - counters have one writer, the engine, and are read by anybody at any time (aligned 64-bit, relaxed).
 *
 * Offsets are in bytes from the start of the control block unless their comment says otherwise.
 */
#ifndef MOE_L2_CONTROL_H
#define MOE_L2_CONTROL_H

#include <pthread.h>
#include <stdint.h>

#define MOE_L2_CONTROL_MAGIC 0x314b4c42324c454dull /* "MEL2BLK1" read as little-endian bytes */
#define MOE_L2_LAYOUT_VERSION 2u

/* The expert tensors of a block: blk.N.ffn_gate_exps.weight and so on. */
enum moe_l2_kind {
    MOE_L2_GATE = 0,
    MOE_L2_UP = 1,
    MOE_L2_DOWN = 2,
    MOE_L2_GATE_UP = 3,
    MOE_L2_KINDS = 4,
};

/* State of one slot; the word is also a futex. An expert without a slot is absent. */
enum moe_l2_state {
    MOE_L2_EMPTY = 0,
    MOE_L2_LOADING = 1,
    MOE_L2_READY = 2,
};

/* Each layer has two lists of its READY slots, from newest to oldest use. */
enum moe_l2_list {
    MOE_L2_UNPINNED = 0, /* evicted first */
    MOE_L2_PINNED = 1,   /* evicted only when the other list has nothing to give */
    MOE_L2_LISTS = 2,
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

/* Room for one expert: its tensors lie at `slot * slot_stride` of each of the layer's tensors. */
struct moe_l2_slot {
    int32_t expert;    /* -1 = none */
    uint32_t state;    /* enum moe_l2_state */
    uint32_t owner;    /* engine_epoch of the loader, valid in state LOADING */
    uint32_t in_use;   /* computations that hold it; never evicted while not 0 */
    int32_t newer;     /* neighbours in its list, -1 = end; valid in state READY */
    int32_t older;
    uint32_t list;     /* enum moe_l2_list, valid in state READY */
    uint32_t preloaded; /* 1 = loaded by preload and not used since */
    uint64_t last_use; /* tick of the layer; the lists can be made again from it */
};

struct moe_l2_layer_counters {
    uint64_t lookups;    /* one for each distinct expert that a layer needs in a graph */
    uint64_t hits;       /* lookups that found the expert resident */
    uint64_t misses;     /* lookups that had to load it, or wait for it */
    uint64_t evictions;  /* residents that made room for another */
    uint64_t bytes_read; /* from disk, demand and preload together */
    uint64_t resident;   /* experts in state READY */
    uint64_t preloaded;  /* experts loaded by preload */
    uint64_t preloaded_used;   /* of these, used before they were evicted */
    uint64_t preloaded_wasted; /* of these, evicted before they were used */
    uint64_t streamed;   /* experts read past the slots, for a batch that needs more than there are */
    uint64_t load_ns;    /* time the engine waited for misses */
};

struct moe_l2_layer {
    uint32_t block;    /* N of blk.N */
    uint32_t n_expert;
    uint32_t n_slots; /* at most n_expert */
    uint32_t reserved;
    int32_t newest[MOE_L2_LISTS]; /* slots, -1 = the list is empty */
    int32_t oldest[MOE_L2_LISTS];
    int32_t first_empty; /* chained by `older`, -1 = none */
    uint32_t reserved2;
    uint64_t tick;
    uint64_t slots_offset;   /* struct moe_l2_slot[n_slots] */
    uint64_t slot_of_offset; /* int32_t[n_expert], -1 = absent */
    uint64_t uses_offset;    /* uint64_t[n_expert], (token, expert) pairs routed */
    uint64_t preload_offset; /* uint32_t[n_expert], 0 = not wanted, else score; higher loads first */
    uint64_t pin_offset;     /* uint32_t[n_expert], 0 = not pinned, else score */
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
    uint64_t staging_offset; /* in the arena: room for experts that are streamed past the slots */
    uint64_t staging_bytes;
    uint8_t fingerprint[32]; /* of the model, chosen by the creator; compared, never interpreted */

    union moe_l2_mutex table_lock; /* robust; held for every change of a state, never while reading a file */

    uint32_t engine_pid;         /* of the engine that is or was last attached; 0 = none yet */
    uint32_t engine_epoch;       /* +1 for every engine that attached */
    uint32_t preload_generation; /* futex; +1 for every change of the preload tables */
    uint32_t preload_mib_per_s;  /* bound on preload reads; 0 = none */
    uint32_t pin_generation;     /* +1 for every change of the pin tables */
    uint32_t reserved;
    uint32_t active;             /* 1 once the engine has run a graph from this arena: the cache is not inert */
    uint32_t bypassed;           /* expert tensors that the engine computes without the arena (should be 0) */

    uint64_t graphs; /* graphs with expert layers that were computed */
    uint64_t tokens; /* tokens routed, counted at the first expert layer of each graph */
    uint64_t graph_ns; /* time inside graph computation, loads included */
    uint64_t cuts;   /* times a graph was interrupted to load an expert */
};

#endif
