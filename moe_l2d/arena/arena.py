"""The ctypes face of libmoe_l2_arena.so (native/include/moe_l2_arena.h), with numpy views of the control block.

The tables are changed by the library only; here they are read, and experts are asked for.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_l2d.arena import layout
from moe_l2d.errors import EngineError
from moe_l2d.model.gguf_facts import ExpertTensor

LIBRARY = "libmoe_l2_arena.so"
Array = npt.NDArray[Any]


class ArenaError(EngineError):
    """The library refused; `number` is its enum moe_l2_error."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class WrongModel(ArenaError):
    """The arena was made for another model."""


class EngineAttached(ArenaError):
    """Only possible while no engine holds the arena."""


_KINDS: dict[int, type[ArenaError]] = {-5: WrongModel, -6: EngineAttached}


class _Desc(ctypes.Structure):
    _fields_ = (
        ("block", ctypes.c_uint32),
        ("kind", ctypes.c_uint32),
        ("n_expert", ctypes.c_uint32),
        ("ggml_type", ctypes.c_uint32),
        ("shard", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("file_offset", ctypes.c_uint64),
        ("expert_bytes", ctypes.c_uint64),
    )


class Want(ctypes.Structure):
    """struct moe_l2_want"""

    _fields_ = (("expert", ctypes.c_uint32), ("slot", ctypes.c_int32), ("action", ctypes.c_uint32))


_P = ctypes.c_void_p
_U32 = ctypes.c_uint32
_U64P = ctypes.POINTER(ctypes.c_uint64)
_DESCS = ctypes.POINTER(_Desc)
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "moe_l2_arena_create": (
        ctypes.c_int, (_DESCS, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_uint64, ctypes.POINTER(_P)),
    ),
    "moe_l2_arena_limits": (ctypes.c_int, (_DESCS, ctypes.c_size_t, _U64P, _U64P)),
    "moe_l2_arena_attach": (ctypes.c_int, (ctypes.c_int, ctypes.c_int, ctypes.POINTER(_P))),
    "moe_l2_arena_close": (None, (_P,)),
    "moe_l2_control_block": (_P, (_P,)),
    "moe_l2_arena_fd": (ctypes.c_int, (_P,)),
    "moe_l2_control_fd": (ctypes.c_int, (_P,)),
    "moe_l2_error_text": (ctypes.c_char_p, (ctypes.c_int,)),
    "moe_l2_arena_matches": (ctypes.c_int, (_P, _DESCS, ctypes.c_size_t)),
    "moe_l2_engine_attach": (ctypes.c_int, (_P,)),
    "moe_l2_acquire": (ctypes.c_int, (_P, _U32, ctypes.POINTER(Want), ctypes.c_size_t)),
    "moe_l2_release": (ctypes.c_int, (_P, _U32, ctypes.POINTER(Want), ctypes.c_size_t)),
    "moe_l2_end_load": (ctypes.c_int, (_P, _U32, ctypes.c_int32, ctypes.c_int, ctypes.c_uint64)),
    "moe_l2_set_pins": (ctypes.c_int, (_P, _U32, ctypes.POINTER(_U32))),
    "moe_l2_arena_drop": (ctypes.c_int, (_P,)),
    "moe_l2_preload_request": (ctypes.c_int, (_P, _U32, _U32, _U32)),
    "moe_l2_preload_commit": (ctypes.c_int, (_P,)),
    "moe_l2_layout_text": (ctypes.c_char_p, ()),
}


class Library:
    """The loaded library; EngineError if it is missing or lacks a function."""

    def __init__(self, native_dir: Path) -> None:
        path = native_dir / LIBRARY
        try:
            self.c = ctypes.CDLL(str(path), use_errno=True)
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(self.c, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise EngineError(f"cannot load the arena library '{path}': {error}; install or build moe-l2's native "
                              f"part, or set MOE_L2_NATIVE_DIR") from None

    def layout_text(self) -> str:
        text: bytes = self.c.moe_l2_layout_text()
        return text.decode()

    def check(self, result: int, doing: str) -> int:
        """`result` if it is no error, else the error with the sentence "cannot <doing>: ..."."""
        if result >= 0:
            return result
        cause = self.c.moe_l2_error_text(result).decode()
        if result == -2:
            cause = f"{cause}: {os.strerror(ctypes.get_errno()).lower()}"
        raise _KINDS.get(result, ArenaError)(f"cannot {doing}: {cause}", result)


@dataclass(frozen=True)
class Counters:
    """What the arena did, summed over its layers. Times in ns, sizes in bytes."""

    lookups: int
    hits: int
    misses: int
    evictions: int
    bytes_read: int
    resident: int
    preloaded: int
    preloaded_used: int
    preloaded_wasted: int
    streamed: int
    load_ns: int
    experts: int
    slots: int
    arena_bytes: int
    expert_bytes: int
    resident_bytes: int
    graphs: int
    tokens: int
    graph_ns: int
    cuts: int
    active: bool
    bypassed: int
    engine_pid: int
    engine_epoch: int
    byte_layout: str  # "unknown", "file", "repacked" or "mixed"


class Arena:
    """An arena of experts: two memfds that outlive the engine. Close it last."""

    def __init__(self, library: Library, handle: Any) -> None:
        self._lib = library
        self._handle = handle
        base = library.c.moe_l2_control_block(handle)
        head = np.frombuffer(_memory(base, layout.CONTROL.itemsize), layout.CONTROL, count=1)
        whole = _memory(base, int(head["control_bytes"][0]))
        self._control = np.frombuffer(whole, layout.CONTROL, count=1)
        offset, n = int(head["layers_offset"][0]), int(head["n_layers"][0])
        self._layers = np.frombuffer(whole, layout.LAYER, count=n, offset=offset)
        self._whole = whole

    @classmethod
    def create(cls, library: Library, experts: Sequence[ExpertTensor], fingerprint: bytes, capacity: int = 0) -> Arena:
        """A new, empty arena for these tensors, of at most `capacity` bytes (0: room for all); its memory is reserved
        and not touched."""
        handle = _P()
        made = library.c.moe_l2_arena_create(
            _describe(experts), len(experts), fingerprint, capacity, ctypes.byref(handle)
        )  # fmt: skip
        library.check(made, "make the arena")
        return cls(library, handle)

    @classmethod
    def attach(cls, library: Library, arena_fd: int, control_fd: int) -> Arena:
        """An arena that somebody else made; the descriptors are duplicated."""
        handle = _P()
        library.check(library.c.moe_l2_arena_attach(arena_fd, control_fd, ctypes.byref(handle)), "attach to the arena")
        return cls(library, handle)

    def close(self) -> None:
        """Unmap; every view of it is void."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            del self._control, self._layers, self._whole
            self._lib.c.moe_l2_arena_close(handle)

    @property
    def fds(self) -> tuple[int, int]:
        """(arena, control), as the engine inherits them."""
        return self._lib.c.moe_l2_arena_fd(self._handle), self._lib.c.moe_l2_control_fd(self._handle)

    @property
    def graphs(self) -> int:
        """Graphs computed so far: while it moves, the engine works."""
        return int(self._control["graphs"][0])

    @property
    def fingerprint(self) -> bytes:
        return bytes(self._control["fingerprint"][0])

    def matches(self, experts: Sequence[ExpertTensor]) -> None:
        """WrongModel unless the arena was made for exactly these tensors."""
        matches = self._lib.c.moe_l2_arena_matches(self._handle, _describe(experts), len(experts))
        self._lib.check(matches, "use the arena")

    def drop(self) -> None:
        """Forget every expert and give the memory back. EngineAttached while an engine runs."""
        self._lib.check(self._lib.c.moe_l2_arena_drop(self._handle), "drop the arena")

    def set_preload_rate(self, mib_per_s: int) -> None:
        self._control["preload_mib_per_s"] = mib_per_s

    def uses(self) -> list[Array]:
        """Per layer: how often each expert was routed to, uint64[n_expert] (a copy)."""
        return [self._table(layer, "uses_offset", "u8") for layer in self._layers]

    def states(self) -> list[Array]:
        """Per layer: enum moe_l2_state of each expert's slot, EMPTY without one, uint32[n_expert]."""
        found = []
        for layer in self._layers:
            n, at = int(layer["n_slots"]), int(layer["slots_offset"])
            slots = np.frombuffer(self._whole, layout.SLOT, count=n, offset=at)
            slot_of = self._table(layer, "slot_of_offset", "i4")
            found.append(np.where(slot_of >= 0, slots["state"][slot_of], layout.EMPTY).astype("u4"))
        return found

    def set_pins(self, layer: int, scores: Sequence[int]) -> None:
        """Replace the pins of a layer: one score an expert, 0 = not pinned."""
        done = self._lib.c.moe_l2_set_pins(self._handle, layer, (_U32 * len(scores))(*scores))
        self._lib.check(done, f"pin experts of layer {layer}")

    def request(self, wanted: Iterable[tuple[int, int, int]]) -> None:
        """Ask for (layer, expert, score) to be loaded before use; the highest score first."""
        for layer, expert, score in wanted:
            done = self._lib.c.moe_l2_preload_request(self._handle, layer, expert, score)
            self._lib.check(done, f"ask for expert {expert} of layer {layer}")
        self._lib.check(self._lib.c.moe_l2_preload_commit(self._handle), "wake the preload")

    def counters(self) -> Counters:
        control, layers = self._control[0], self._layers
        per_expert = layers["tensors"]["expert_bytes"].sum(axis=1)
        sums = {name: int(layers["counters"][name].sum()) for name in layout.LAYER_COUNTERS.names or ()}
        return Counters(
            **sums,
            experts=int(layers["n_expert"].sum()),
            slots=int(layers["n_slots"].sum()),
            arena_bytes=int(control["arena_bytes"]),
            expert_bytes=int(control["expert_bytes_total"]),
            resident_bytes=int((layers["counters"]["resident"] * per_expert).sum()),
            graphs=int(control["graphs"]),
            tokens=int(control["tokens"]),
            graph_ns=int(control["graph_ns"]),
            cuts=int(control["cuts"]),
            active=bool(control["active"]),
            bypassed=int(control["bypassed"]),
            engine_pid=int(control["engine_pid"]),
            engine_epoch=int(control["engine_epoch"]),
            byte_layout=self._byte_layout(),
        )

    def layers(self) -> list[dict[str, int]]:
        """The counters of each layer, with its block."""
        names = layout.LAYER_COUNTERS.names or ()
        return [{"block": int(layer["block"]), "n_expert": int(layer["n_expert"])}
                | {name: int(layer["counters"][name]) for name in names} for layer in self._layers]

    def _byte_layout(self) -> str:
        tensors = self._layers["tensors"]
        seen = {int(x) for x in tensors["layout"][tensors["expert_bytes"] > 0]} - {0}
        if len(seen) > 1:
            return "mixed"
        number = seen.pop() if seen else 0
        return layout.LAYOUT_NAMES[number] if number < len(layout.LAYOUT_NAMES) else f"unknown ({number})"

    def _table(self, layer: Any, offset: str, kind: str) -> Array:
        count, at = int(layer["n_expert"]), int(layer[offset])
        view: Array = np.frombuffer(self._whole, np.dtype(kind), count=count, offset=at)
        return view.copy()


def limits(library: Library, experts: Sequence[ExpertTensor]) -> tuple[int, int]:
    """(least, most): the smallest capacity in bytes that works for these tensors, and the one that holds them all."""
    least, most = ctypes.c_uint64(), ctypes.c_uint64()
    done = library.c.moe_l2_arena_limits(_describe(experts), len(experts), ctypes.byref(least), ctypes.byref(most))
    library.check(done, "size the arena")
    return least.value, most.value


def _memory(address: int, n: int) -> memoryview:
    return memoryview((ctypes.c_char * n).from_address(address)).cast("B")


def _describe(experts: Sequence[ExpertTensor]) -> Any:
    array = (_Desc * len(experts))()
    for desc, t in zip(array, experts, strict=True):
        desc.block, desc.kind, desc.n_expert, desc.ggml_type = t.block, t.kind, t.n_expert, t.ggml_type
        desc.shard, desc.file_offset, desc.expert_bytes = t.shard, t.file_offset, t.expert_bytes
    return array
