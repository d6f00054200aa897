"""How much memory the arena may take. Pure: sizes in, a plan or a refusal with the numbers out."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_l2d.errors import ConfigError, ModelError

UNITS = {"": 1, "B": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
         "KI": 2**10, "MI": 2**20, "GI": 2**30, "TI": 2**40}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?)?B?", re.IGNORECASE)
# Compute buffers of the engine, the two programs themselves, and some air for the page cache.
RESERVE = 1 << 30


@dataclass(frozen=True)
class Memory:
    """Bytes. `limit` is the smallest memory limit of the process's cgroups, None without any."""

    total: int
    available: int  # now, without swapping
    limit: int | None = None
    limit_left: int | None = None  # of that limit


@dataclass(frozen=True)
class Needs:
    """Bytes that a model takes."""

    least: int  # the smallest arena that works
    most: int  # the arena that holds every expert
    other: int  # dense weights and the context


@dataclass(frozen=True)
class Plan:
    capacity: int  # bytes for the arena; 0 = every expert has its slot
    reason: str  # for people
    warning: str = ""


def parse_size(text: str) -> int | None:
    """Bytes of "6GB", "512 MiB", "1.5T"; None if it is no size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    return int(float(match[1]) * UNITS[(match[2] or "").upper()])


def check_arena(key: str, value: str) -> None:
    """ConfigError unless `value` may stand for memory.arena."""
    if value in ("auto", "all"):
        return
    size = parse_size(value)
    if size is None or size < 1:
        raise ConfigError(f"cannot use {key} '{value}': it must be \"auto\", \"all\" or a size such as 6GB or 512MiB")


def plan(wanted: str, needs: Needs, memory: Memory) -> Plan:
    """Size the arena. ModelError if it cannot work; what works at a price is said in `warning`."""
    ceiling = memory.total if memory.limit is None else min(memory.total, memory.limit)
    free = memory.available if memory.limit_left is None else min(memory.available, memory.limit_left)
    room = max(0, free - needs.other - RESERVE)
    whose = "the machine has" if ceiling == memory.total else "the cgroup's limit allows"
    if wanted == "auto":
        if room >= needs.most:
            return Plan(0, f"auto: all experts fit, {size(needs.most)} of {size(room)} to have")
        if room < needs.least:
            raise ModelError(
                f"cannot serve the model: its experts need at least {size(needs.least)} of memory, beside "
                f"{size(needs.other)} for the rest of it and {size(RESERVE)} in reserve, and only {size(free)} are "
                f"free; free memory or take a smaller model"
            )
        return Plan(room, f"auto: {size(room)} of {size(needs.most)} that all experts need")
    asked = needs.most if wanted == "all" else parse_size(wanted) or 0
    if asked < needs.least:
        raise ModelError(
            f"cannot use memory.arena '{wanted}': {size(asked)} are less than the {size(needs.least)} that one expert "
            f"of each layer and a window for the others need"
        )
    whole = min(asked, needs.most) + needs.other
    if whole > ceiling:
        raise ModelError(
            f"cannot use memory.arena '{wanted}': with {size(needs.other)} for the rest of the model it makes "
            f"{size(whole)}, and {whose} {size(ceiling)}"
        )
    taken = min(asked, needs.most)
    warning = ""
    if taken > room:
        warning = (f"memory.arena is {wanted}: the arena may grow to {size(taken)}, {size(room)} are free for it now, "
                   f"the machine may swap")
    if asked >= needs.most:
        return Plan(0, f"{wanted}: all experts, {size(needs.most)}", warning)
    return Plan(asked, f"{wanted}: {size(asked)} of {size(needs.most)} that all experts need", warning)


def size(n: int) -> str:
    """1234567 -> "1.2 MB"."""
    for unit, one in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= one:
            return f"{n / one:.1f} {unit}"
    return f"{n} bytes"
