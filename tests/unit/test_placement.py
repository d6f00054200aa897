"""moe_l2d/model/placement.py"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_l2d.errors import ConfigError, ModelError
from moe_l2d.model.machine import memory
from moe_l2d.model.placement import RESERVE, Memory, Needs, Plan, check_arena, parse_size, plan

GB = 10**9
NEEDS = Needs(least=1 * GB, most=16 * GB, other=2 * GB)


@pytest.mark.parametrize(
    ("text", "value"),
    [("6GB", 6 * GB), ("512 MiB", 512 << 20), ("1.5T", 1_500 * GB), ("7", 7), ("6gb", 6 * GB), ("6 GBs", None)],
)  # fmt: skip
def test_sizes(text: str, value: int | None) -> None:
    """Sizes with decimal and binary units are read, anything else is none."""
    assert parse_size(text) == value


def test_bad_sizes_are_refused() -> None:
    """A value that is no size names the key and what it may be."""
    for good in ("auto", "all", "6GB"):
        check_arena("memory.arena", good)
    with pytest.raises(ConfigError, match=r"memory\.arena 'much': it must be"):
        check_arena("memory.arena", "much")


def test_auto_takes_what_is_free() -> None:
    """With room for all every expert gets a slot; else the arena gets what the rest leaves."""
    assert plan("auto", NEEDS, Memory(64 * GB, 32 * GB)).capacity == 0
    assert plan("auto", NEEDS, Memory(64 * GB, 12 * GB)).capacity == 10 * GB - RESERVE
    limited = Memory(64 * GB, 32 * GB, limit=8 * GB, limit_left=7 * GB)
    assert plan("auto", NEEDS, limited).capacity == 5 * GB - RESERVE


@pytest.mark.parametrize(
    ("wanted", "memory", "parts"),
    [
        ("auto", Memory(64 * GB, 3 * GB), ["at least 1.0 GB", "2.0 GB for the rest", "3.0 GB are free"]),
        ("0.5GB", Memory(64 * GB, 32 * GB), ["'0.5GB'", "500.0 MB", "1.0 GB"]),
        ("all", Memory(16 * GB, 15 * GB), ["'all'", "18.0 GB", "the machine has 16.0 GB"]),
        ("8GB", Memory(64 * GB, 32 * GB, 9 * GB, 9 * GB), ["'8GB'", "10.0 GB", "the cgroup's limit allows 9.0 GB"]),
    ],
)
def test_what_cannot_work_is_refused_with_numbers(wanted: str, memory: Memory, parts: list[str]) -> None:
    """Too little memory, too small an arena, more than the machine or the cgroup has: one sentence with the numbers."""
    with pytest.raises(ModelError) as refused:
        plan(wanted, NEEDS, memory)
    for part in parts:
        assert part in str(refused.value)


def test_more_than_is_free_now_warns() -> None:
    """A size that the machine has and that is not free is taken, and said."""
    found = plan("12GB", NEEDS, Memory(32 * GB, 8 * GB))
    assert found.capacity == 12 * GB
    assert "may swap" in found.warning
    assert plan("40GB", NEEDS, Memory(64 * GB, 60 * GB)) == Plan(0, "40GB: all experts, 16.0 GB", "")


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40), st.integers(1, 1 << 38), st.integers(0, 1 << 39))
def test_auto_never_takes_what_is_not_there(total: int, free: int, most: int, other: int) -> None:
    """Whatever the numbers, auto's arena and the rest of the model fit into what is free, or it refuses."""
    free = min(free, total)
    try:
        found = plan("auto", Needs(min(most, 1 << 20), most, other), Memory(total, free))
    except ModelError:
        return
    assert (found.capacity or most) + other + RESERVE <= free


def test_this_machine() -> None:
    """The machine's own figures make sense."""
    found = memory()
    assert 0 < found.available <= found.total
    assert (found.limit is None) == (found.limit_left is None)
