"""What the machine offers to this process."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

CPU = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")


def count_cores(allowed: Iterable[int], siblings: dict[int, str], quota: float | None) -> int:
    """Physical cores among the `allowed` CPUs (`siblings` names each one's core), but not more than `quota`. Pure."""
    cores = len({siblings.get(cpu, str(cpu)) for cpu in allowed})
    if quota is not None:
        cores = min(cores, max(1, round(quota)))
    return max(1, cores)


def usable_cores() -> int:
    """Physical cores that this process may use: its affinity and its cgroup's quota count."""
    allowed = os.sched_getaffinity(0)
    siblings = {}
    for cpu in allowed:
        try:
            siblings[cpu] = (CPU / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
        except OSError:
            siblings[cpu] = str(cpu)
    return count_cores(allowed, siblings, _quota())


def _quota() -> float | None:
    """CPUs' worth of time that this process's cgroup (v2) and those above it allow; None = no bound."""
    try:
        line = next(x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
    except (OSError, StopIteration):
        return None
    found: list[float] = []
    group = CGROUP / line[3:].lstrip("/")
    while group != CGROUP.parent and CGROUP in (group, *group.parents):
        try:
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                found.append(int(quota) / int(period))
        except (OSError, ValueError):
            pass
        group = group.parent
    return min(found, default=None)
