"""What the rest of the daemon may know of the engine, and ask of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol


class Phase(StrEnum):
    STOPPED = "stopped"  # not running, and nobody wants it to
    STARTING = "starting"  # spawned, its socket does not answer yet
    LOADING = "loading"  # answers, the model is being loaded
    READY = "ready"  # serves
    BACKOFF = "backoff"  # died; the next start is scheduled
    STOPPING = "stopping"  # on the stop ladder
    FAILED = "failed"  # cannot be started at all (no program, no permission); a restart may be asked for


@dataclass(frozen=True)
class EngineStatus:
    phase: Phase
    pid: int | None
    generation: int  # starts counted, from 1; 0 before the first
    restarts: int  # starts that followed an end which nobody had asked for, or that somebody did ask for
    detail: str  # one sentence, "" when all is well
    since: float  # time.monotonic() of the last change of phase


class EngineHandle(Protocol):
    """What HTTP may ask of the engine."""

    @property
    def socket_path(self) -> Path: ...

    @property
    def slots(self) -> int: ...

    @property
    def status(self) -> EngineStatus: ...

    async def wait_ready(self, timeout_s: float) -> None:
        """Return once the engine is READY; EngineNotReady with the reason if it is not within `timeout_s`."""

    def request_began(self) -> None:
        """A request was handed to the engine (feeds the stall watchdog, as the next two)."""

    def progress(self) -> None:
        """The engine sent something for some request."""

    def request_ended(self) -> None:
        """A request of request_began() is over, in whatever way."""
