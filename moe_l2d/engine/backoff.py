"""How long to wait before the engine is started again. Pure."""

from __future__ import annotations

# An engine that served this long had a good start: its end counts as the first failure again.
HEALTHY_S = 60.0


def delay_s(failures: int, first_s: float, most_s: float) -> float:
    """The pause after the `failures`-th end in a row (from 1): doubled each time, bounded by `most_s`."""
    return min(most_s, first_s * 2.0 ** min(failures - 1, 64))


def count_failure(failures: int, ready_for_s: float | None) -> int:
    """Ends in a row, this one included; `ready_for_s` is how long the engine was READY, None if it never was."""
    if ready_for_s is not None and ready_for_s >= HEALTHY_S:
        return 1
    return failures + 1
