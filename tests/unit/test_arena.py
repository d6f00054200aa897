"""moe_l2d/arena/"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from moe_l2d.arena import layout, preload
from moe_l2d.arena.arena import Arena, EngineAttached, Library, Want, WrongModel, limits
from moe_l2d.errors import EngineError
from moe_l2d.model.gguf_facts import ExpertTensor, ModelFacts, read
from tests.conftest import native_dir, write_gguf


@pytest.fixture
def library() -> Library:
    return Library(native_dir())


@pytest.fixture
def facts(tmp_path: Path) -> ModelFacts:
    return read(write_gguf(tmp_path / "m.gguf", moe=True))


@pytest.fixture
def arena(library: Library, facts: ModelFacts) -> Iterator[Arena]:
    made = Arena.create(library, facts.experts, facts.fingerprint)
    yield made
    made.close()


def test_layout_is_the_header(library: Library) -> None:
    """numpy's view and the C structs agree on every field: name, offset and size, and on each struct's size."""
    assert sorted(layout.lines()) == sorted(library.layout_text().splitlines())


def test_new_arena(arena: Arena, facts: ModelFacts) -> None:
    """A new arena is empty, knows its model, and its memory is not touched."""
    counters = arena.counters()
    assert (counters.resident, counters.lookups, counters.experts) == (0, 0, 8)
    assert counters.expert_bytes == facts.expert_bytes
    assert counters.byte_layout == "unknown"
    assert not counters.active
    assert arena.fingerprint == facts.fingerprint
    arena_fd, _ = arena.fds
    assert os.fstat(arena_fd).st_blocks == 0
    assert [layer["block"] for layer in arena.layers()] == [0, 1]
    assert not os.get_inheritable(arena_fd)


def test_attach_sees_the_same(library: Library, arena: Arena) -> None:
    """Who attaches by the descriptors sees the same tables."""
    other = Arena.attach(library, *arena.fds)
    arena.set_preload_rate(7)
    arena.request([(1, 2, 9)])
    assert other.counters() == arena.counters()
    assert other._layers["preload_offset"].tolist() == arena._layers["preload_offset"].tolist()
    other.close()


def test_another_model_is_refused(arena: Arena, facts: ModelFacts) -> None:
    """An arena is not used for tensors that it was not made for."""
    arena.matches(facts.experts)
    with pytest.raises(WrongModel, match="cannot use the arena"):
        arena.matches(facts.experts[:-1])


def test_drop_needs_no_engine(library: Library, arena: Arena) -> None:
    """While an engine is attached, the arena cannot be dropped; afterwards it can."""
    engine = Arena.attach(library, *arena.fds)
    library.check(library.c.moe_l2_engine_attach(engine._handle), "attach")
    with pytest.raises(EngineAttached):
        arena.drop()
    engine.close()
    arena.drop()


def test_load_shows_in_the_counters(library: Library, arena: Arena) -> None:
    """A load that ended well makes the expert resident, in states and counters."""
    engine = Arena.attach(library, *arena.fds)
    library.check(library.c.moe_l2_engine_attach(engine._handle), "attach")
    want = Want(3, -1, 0)
    library.check(library.c.moe_l2_acquire(engine._handle, 1, want, 1), "acquire")
    assert (want.slot, want.action) == (3, 1)
    library.check(library.c.moe_l2_end_load(engine._handle, 1, want.slot, 1, 1000), "end")
    engine.close()
    assert arena.states()[1].tolist() == [0, 0, 0, layout.READY]
    counters = arena.counters()
    assert (counters.resident, counters.bytes_read, counters.resident_bytes) == (1, 1000, 3 * 32 * 32 * 4)


def test_bad_requests_are_refused(arena: Arena, library: Library) -> None:
    """An expert that does not exist cannot be asked for; descriptors of something else are no arena."""
    with pytest.raises(EngineError, match="expert 4 of layer 0"):
        arena.request([(0, 4, 1)])
    fd = os.memfd_create("x")
    with pytest.raises(EngineError, match="cannot attach to the arena"):
        Arena.attach(library, fd, fd)
    os.close(fd)


def test_missing_library(tmp_path: Path) -> None:
    """A missing library is one sentence that says what to set."""
    with pytest.raises(EngineError, match="MOE_L2_NATIVE_DIR"):
        Library(tmp_path)


def test_preload_order() -> None:
    """Everything that is not resident is asked for; what was used more comes before what was used less."""
    states = [np.array([0, 2, 1]), np.array([0, 0, 0])]
    uses = [np.array([5, 9, 0]), np.array([0, 2**40, 1])]
    wanted = list(preload.order(states, uses))
    assert [(layer, expert) for layer, expert, _ in wanted] == [(0, 0), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [score for *_, score in wanted] == [6, 1, 1, 2**32 - 1, 2]


def test_describe_needs_experts(library: Library) -> None:
    """An arena without a tensor is refused by the library, not made by accident."""
    with pytest.raises(EngineError):
        Arena.create(library, (), b"\0" * 32)
    with pytest.raises(EngineError):
        Arena.create(library, (ExpertTensor(0, 9, 4, 0, 0, 0, 64),), b"\0" * 32)


def test_capacity_is_kept(library: Library, facts: ModelFacts) -> None:
    """An arena of a given capacity has that many bytes at most, and fewer slots than experts; too little is refused."""
    least, most = limits(library, facts.experts)
    assert least < most or most == least
    with pytest.raises(EngineError, match="capacity"):
        Arena.create(library, facts.experts, facts.fingerprint, 4096)
    whole = Arena.create(library, facts.experts, facts.fingerprint, most)
    assert whole.counters().slots == whole.counters().experts
    whole.close()


def test_pins_reach_the_library(arena: Arena) -> None:
    """Pins are set a layer at a time, and counted by their generation."""
    arena.set_pins(0, [1, 0, 0, 5])
    arena.set_pins(1, [0, 0, 0, 0])
    assert int(arena._control["pin_generation"][0]) == 2
    with pytest.raises(EngineError, match="pin experts of layer 9"):
        arena.set_pins(9, [1])
