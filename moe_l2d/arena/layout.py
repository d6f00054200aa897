"""numpy's view of native/include/moe_l2_control.h; a test compares the two field by field.

numpy's align=True lays out fields by the C rules of the host, so no offset is written here.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

MAGIC = 0x314B4C42324C454D
VERSION = 2
KINDS = 4
EMPTY, LOADING, READY = 0, 1, 2
LAYOUT_NAMES = ("unknown", "file", "repacked")

TENSOR = np.dtype(
    [
        ("file_offset", "u8"),
        ("expert_bytes", "u8"),
        ("slot_stride", "u8"),
        ("arena_offset", "u8"),
        ("shard", "u4"),
        ("ggml_type", "u4"),
        ("layout", "u4"),
        ("reserved", "u4"),
    ],
    align=True,
)

SLOT = np.dtype(
    [
        ("expert", "i4"),
        ("state", "u4"),
        ("owner", "u4"),
        ("in_use", "u4"),
        ("newer", "i4"),
        ("older", "i4"),
        ("list", "u4"),
        ("preloaded", "u4"),
        ("last_use", "u8"),
    ],
    align=True,
)

LAYER_COUNTERS = np.dtype(
    [
        ("lookups", "u8"),
        ("hits", "u8"),
        ("misses", "u8"),
        ("evictions", "u8"),
        ("bytes_read", "u8"),
        ("resident", "u8"),
        ("preloaded", "u8"),
        ("preloaded_used", "u8"),
        ("preloaded_wasted", "u8"),
        ("streamed", "u8"),
        ("load_ns", "u8"),
    ],
    align=True,
)

LAYER = np.dtype(
    [
        ("block", "u4"),
        ("n_expert", "u4"),
        ("n_slots", "u4"),
        ("reserved", "u4"),
        ("newest", "i4", (2,)),
        ("oldest", "i4", (2,)),
        ("first_empty", "i4"),
        ("reserved2", "u4"),
        ("tick", "u8"),
        ("slots_offset", "u8"),
        ("slot_of_offset", "u8"),
        ("uses_offset", "u8"),
        ("preload_offset", "u8"),
        ("pin_offset", "u8"),
        ("tensors", TENSOR, (KINDS,)),
        ("counters", LAYER_COUNTERS),
    ],
    align=True,
)

CONTROL = np.dtype(
    [
        ("magic", "u8"),
        ("layout_version", "u4"),
        ("n_layers", "u4"),
        ("control_bytes", "u8"),
        ("arena_bytes", "u8"),
        ("layers_offset", "u8"),
        ("expert_bytes_total", "u8"),
        ("staging_offset", "u8"),
        ("staging_bytes", "u8"),
        ("fingerprint", "u1", (32,)),
        ("table_lock", "u1", (64,)),
        ("engine_pid", "u4"),
        ("engine_epoch", "u4"),
        ("preload_generation", "u4"),
        ("preload_mib_per_s", "u4"),
        ("pin_generation", "u4"),
        ("reserved", "u4"),
        ("active", "u4"),
        ("bypassed", "u4"),
        ("graphs", "u8"),
        ("tokens", "u8"),
        ("graph_ns", "u8"),
        ("cuts", "u8"),
    ],
    align=True,
)

STRUCTS = {
    "moe_l2_control": CONTROL,
    "moe_l2_layer": LAYER,
    "moe_l2_tensor": TENSOR,
    "moe_l2_slot": SLOT,
    "moe_l2_layer_counters": LAYER_COUNTERS,
}


def lines() -> Iterator[str]:
    """`struct.field offset size` for every field, `struct size bytes` for every struct: as moe_l2_layout_text()."""
    for struct, dtype in STRUCTS.items():
        assert dtype.fields is not None
        for name, (field, offset, *_) in dtype.fields.items():
            yield f"{struct}.{name} {offset} {field.itemsize}"
        yield f"{struct} size {dtype.itemsize}"
