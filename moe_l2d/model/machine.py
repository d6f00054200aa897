"""What the machine offers to this process."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from moe_l2d.model.placement import Memory

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


def memory() -> Memory:
    """What this machine and the cgroups (v2) of this process have, now."""
    facts = dict(re.findall(r"^(\w+):\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE))
    limits: list[tuple[int, int]] = []  # (limit, what is left of it)
    for group in _cgroups():
        for name in ("memory.max", "memory.high"):
            try:
                limit = (group / name).read_text().strip()
                if limit != "max":
                    used = int((group / "memory.current").read_text())
                    limits.append((int(limit), max(0, int(limit) - used)))
            except (OSError, ValueError):
                continue
    return Memory(
        total=int(facts["MemTotal"]) << 10,
        available=int(facts["MemAvailable"]) << 10,
        limit=min((limit for limit, _ in limits), default=None),
        limit_left=min((left for _, left in limits), default=None),
    )


def _quota() -> float | None:
    """CPUs' worth of time that this process's cgroup (v2) and those above it allow; None = no bound."""
    found: list[float] = []
    for group in _cgroups():
        try:
            quota, period = (group / "cpu.max").read_text().split()
            if quota != "max":
                found.append(int(quota) / int(period))
        except (OSError, ValueError):
            continue
    return min(found, default=None)


def _cgroups() -> Iterator[Path]:
    """This process's cgroup (v2) and those above it, as far as they are to be seen."""
    try:
        line = next(x for x in Path("/proc/self/cgroup").read_text().splitlines() if x.startswith("0::"))
    except (OSError, StopIteration):
        return
    group = CGROUP / line[3:].lstrip("/")
    while group != CGROUP.parent and CGROUP in (group, *group.parents):
        yield group
        group = group.parent
