"""The owner of the engine: one task starts it, watches it, restarts it and ends it.

    STOPPED -> STARTING -> LOADING -> READY -> (dies, stalls) -> BACKOFF -> STARTING ...
    STARTING -> FAILED (cannot be executed) -> STARTING ...      any -> STOPPING -> STOPPED, or STARTING on restart()

_set() is the only place that changes the phase: it logs old -> new and wakes all who wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from asyncio.subprocess import Process
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_l2d.engine import backoff, spawn, watchdog
from moe_l2d.engine.client import EngineClient, Health
from moe_l2d.engine.command import Command
from moe_l2d.engine.state import EngineStatus, Phase
from moe_l2d.errors import EngineNotReady, MoeError

log = logging.getLogger("moe_l2d.engine")

# Between two looks at an engine that starts; start-up time is known to this.
PROBE_EVERY_S = 0.05
# The first quiet part of stall_s after which /slots is asked, as a share of it.
ASK_SHARE = 1 / 3
# Requests do not wait for an engine that has failed so often in a row.
HOPELESS_AFTER = 4
# The longest pause between two sights of the stall watchdog, and the shortest.
WATCH_MOST_S, WATCH_LEAST_S = 2.0, 0.05


@dataclass(frozen=True)
class Timing:
    """The part of the configuration that may change while the engine runs."""

    start_timeout_s: float
    stall_s: float
    backoff_s: float
    backoff_max_s: float
    term_s: float = spawn.TERM_S


@dataclass(frozen=True)
class _End:
    why: str  # "" if it was asked for
    wanted: bool


class Engine:
    """Implements state.EngineHandle. run() is the owner task; everything else may be called beside it."""

    def __init__(self, make_command: Callable[[], Command], socket_path: Path, slots: int, timing: Timing,
                 graphs: Callable[[], int] | None = None) -> None:
        self._make_command = make_command
        self._socket_path = socket_path
        self._slots = slots
        self.timing = timing
        self._graphs = graphs or (lambda: 0)
        self._client = EngineClient(socket_path)
        self._status = EngineStatus(Phase.STOPPED, None, 0, 0, "", time.monotonic())
        self._changed = asyncio.Event()
        self._asked = asyncio.Event()  # stop() or restart() was called
        self._stop_wanted = False
        self._failures = 0  # in a row
        self._last_failure = ""
        self._active = 0
        self._last_progress = 0.0
        self._ended_at_ready_for: float | None = None
        self.output = spawn.EngineLog()

    # --- what HTTP may ask

    @property
    def socket_path(self) -> Path:
        return self._socket_path

    @property
    def slots(self) -> int:
        return self._slots

    @property
    def status(self) -> EngineStatus:
        return self._status

    async def wait_ready(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while True:
            status, changed = self._status, self._changed
            if status.phase is Phase.READY:
                return
            if self._stop_wanted or status.phase is Phase.FAILED:
                raise EngineNotReady(_not_ready(status))
            if self._failures >= HOPELESS_AFTER:
                raise EngineNotReady(f"cannot serve the request: the engine failed {self._failures} times in a row: "
                                     f"{self._last_failure}")
            try:
                await asyncio.wait_for(changed.wait(), max(0.0, end - time.monotonic()))
            except TimeoutError:
                raise EngineNotReady(_not_ready(self._status)) from None

    async def changed(self, timeout_s: float) -> EngineStatus:
        """The status after its next change, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        return self._status

    def request_began(self) -> None:
        self._active += 1

    def progress(self) -> None:
        self._last_progress = time.monotonic()

    def request_ended(self) -> None:
        self._active = max(0, self._active - 1)

    @property
    def active(self) -> int:
        return self._active

    # --- what the daemon may ask

    def restart(self) -> None:
        """End the engine and start it again at once, whatever it is doing."""
        self._asked.set()

    def stop(self) -> None:
        """End the engine; run() returns after it."""
        self._stop_wanted = True
        self._asked.set()

    async def run(self) -> None:
        """Own the engine until stop(). Cancelling it kills the engine, too."""
        self._failures = 0
        try:
            while not self._stop_wanted:
                self._asked.clear()
                end = await self._one_life()
                if self._stop_wanted:
                    break
                self._status = replace(self._status, restarts=self._status.restarts + 1)
                if end.wanted:
                    self._failures = 0
                    continue
                self._failures = backoff.count_failure(self._failures, self._ended_at_ready_for)
                self._last_failure = end.why
                pause = backoff.delay_s(self._failures, self.timing.backoff_s, self.timing.backoff_max_s)
                if self._status.phase is Phase.FAILED:
                    pause = self.timing.backoff_max_s
                    self._set(Phase.FAILED, detail=f"{end.why}; it is tried again in {pause:g} s")
                else:
                    self._set(Phase.BACKOFF, detail=f"{end.why}; it is started again in {pause:g} s")
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._asked.wait(), pause)
        finally:
            self._set(Phase.STOPPED, pid=None)
            await self._client.close()
            self._socket_path.unlink(missing_ok=True)

    # --- the owner task's own

    def _set(self, phase: Phase, *, detail: str = "", **more: Any) -> None:
        old = self._status
        if (old.phase, old.detail) == (phase, detail) and not more:
            return
        since = old.since if old.phase is phase else time.monotonic()
        self._status = replace(old, phase=phase, detail=detail, since=since, **more)
        if old.phase is not phase:
            level = logging.WARNING if phase in (Phase.BACKOFF, Phase.FAILED) else logging.INFO
            log.log(level, "engine: %s -> %s%s", old.phase, phase, f": {detail}" if detail else "")
        woken, self._changed = self._changed, asyncio.Event()
        woken.set()

    async def _one_life(self) -> _End:
        """From spawning to the reaped process."""
        self._ended_at_ready_for = None
        # llama-server never unlinks its socket, and does not start over a stale one
        self._socket_path.unlink(missing_ok=True)
        self.output = spawn.EngineLog()
        try:
            command = self._make_command()
        except MoeError as error:
            self._set(Phase.FAILED, detail=str(error), pid=None)
            return _End(self._status.detail, wanted=False)
        try:
            process = await spawn.spawn(command)
        except OSError as error:
            cause = (error.strerror or str(error)).lower()
            self._set(Phase.FAILED, detail=f"cannot start the engine '{command.argv[0]}': {cause}", pid=None)
            return _End(self._status.detail, wanted=False)
        log.debug("engine: pid %d: %s", process.pid, " ".join(command.argv))
        self._set(Phase.STARTING, pid=process.pid, generation=self._status.generation + 1)
        assert process.stdout is not None
        pump = asyncio.create_task(self.output.pump(process.stdout))
        died = asyncio.create_task(process.wait())
        try:
            why = await self._until_ready(died) or await self._while_ready(died)
            return await self._close_down(process, pump, why)
        finally:
            if process.returncode is None:  # cancelled, or an error of ours: it must not stay
                await asyncio.shield(spawn.kill(process))
            died.cancel()
            pump.cancel()
            self._set(self._status.phase, detail=self._status.detail, pid=None)

    async def _close_down(self, process: Process, pump: asyncio.Task[None], why: str) -> _End:
        if self._asked.is_set():
            why = "moe-l2d is stopping" if self._stop_wanted else "it is being restarted, as was asked for"
            self._set(Phase.STOPPING, detail=why)
            how = await spawn.end(process, self.timing.term_s)
            log.info("engine: pid %d %s", process.pid, how)
            return _End("", wanted=True)
        how = await spawn.kill(process)
        await asyncio.wait({pump}, timeout=1.0)  # its last words may still be in the pipe
        if why:
            why = f"the engine {why} and was killed"
            log.error("engine: pid %d: %s", process.pid, why)
        else:
            why = f"the engine {how}"
        reason = self.output.reason
        return _End(f"{why}: {reason}" if reason else why, wanted=False)

    async def _until_ready(self, died: asyncio.Task[int]) -> str:
        """Wait for health; what is wrong with it if it is to be killed, else ""."""
        began = time.monotonic()
        while not died.done() and not self._asked.is_set():
            health = await self._client.health()
            if health is Health.READY:
                took = time.monotonic() - began
                self.output.serving = True
                self._set(Phase.READY)
                log.info("engine: ready after %.1f s", took)
                return ""
            if health is Health.LOADING:
                self._set(Phase.LOADING)
            if time.monotonic() - began > self.timing.start_timeout_s:
                return f"was not ready within engine.start_timeout_s ({self.timing.start_timeout_s:g} s)"
            await self._sleep(PROBE_EVERY_S, died)
        return ""

    async def _while_ready(self, died: asyncio.Task[int]) -> str:
        """Watch it; what is wrong with it if it is to be killed, else ""."""
        if self._status.phase is not Phase.READY:
            return ""
        began = time.monotonic()
        watch = watchdog.Watch(last_sign=began, graphs=self._graphs())
        try:
            while not died.done() and not self._asked.is_set():
                stall_s = self.timing.stall_s
                await self._sleep(min(WATCH_MOST_S, max(WATCH_LEAST_S, stall_s / 8)), died)
                watch = watchdog.observe(watch, self._sight())
                if watch.active and watchdog.silent_s(watch, time.monotonic()) >= stall_s * ASK_SHARE:
                    computing = await self._client.computing()
                    watch = watchdog.observe(watch, replace(self._sight(), slots_computing=bool(computing)))
                if watchdog.is_stalled(watch, time.monotonic(), stall_s):
                    return f"made no progress on {watch.active} request(s) for engine.stall_s ({stall_s:g} s)"
        finally:
            self._ended_at_ready_for = time.monotonic() - began
        return ""

    def _sight(self) -> watchdog.Sight:
        return watchdog.Sight(time.monotonic(), self._active, self._last_progress, self._graphs())

    async def _sleep(self, seconds: float, died: asyncio.Task[int]) -> None:
        """Until the engine died, stop() or restart() was called, or the time is up."""
        asked = asyncio.ensure_future(self._asked.wait())
        try:
            await asyncio.wait({died, asked}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()


def _not_ready(status: EngineStatus) -> str:
    why = f": {status.detail}" if status.detail else ""
    return f"cannot serve the request: the engine is {status.phase}{why}"
