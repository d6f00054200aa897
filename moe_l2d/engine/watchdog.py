"""When an engine counts as stalled: it has requests and shows no sign of working on them. Pure.

Signs are: it sent something for a request, its count of computed graphs moved, or it said on /slots that a slot
is computing. /health is none: a hung llama-server goes on answering it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sight:
    """What was seen at `now` (monotonic seconds)."""

    now: float
    active: int  # requests that the engine has
    last_progress: float  # when it last sent something
    graphs: int  # of the control block; 0 without an arena
    slots_computing: bool = False  # /slots was asked just now, answered, and named a slot that computes


@dataclass(frozen=True)
class Watch:
    last_sign: float
    graphs: int = 0
    active: int = 0


def observe(watch: Watch, sight: Sight) -> Watch:
    """The watch after this sight."""
    sign = max(watch.last_sign, sight.last_progress)
    # an idle engine owes nothing, and the first request starts the count
    if sight.active == 0 or watch.active == 0 or sight.graphs != watch.graphs or sight.slots_computing:
        sign = max(sign, sight.now)
    return replace(watch, last_sign=sign, graphs=sight.graphs, active=sight.active)


def silent_s(watch: Watch, now: float) -> float:
    return max(0.0, now - watch.last_sign)


def is_stalled(watch: Watch, now: float, stall_s: float) -> bool:
    return watch.active > 0 and silent_s(watch, now) >= stall_s
