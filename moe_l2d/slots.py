"""Who may be in the engine: so many at once, the others in order of arrival, so many of those at most.

The engine must never hold more requests than it has slots: with requests deferred inside it llama-server does not
end on SIGTERM, and a deferred request cannot be withdrawn cheaply.
"""

from __future__ import annotations

import asyncio
import math
import time
from types import TracebackType

from moe_l2d.errors import QueueFull, Timeout

RETRY_AFTER_MAX_S = 60


class WaitedTooLong(Timeout):
    """No slot became free within server.queue_timeout_s."""

    http_status = 503


class Slots:
    def __init__(self, slots: int, max_waiting: int) -> None:
        self.total = slots
        self.max_waiting = max_waiting
        self._free = slots
        self._waiting: dict[asyncio.Future[None], None] = {}  # a dict: in order, and any of them goes at once
        self._mean_hold_s = 1.0

    @property
    def used(self) -> int:
        return self.total - self._free

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_room(self) -> bool:
        """Would one more be let in or allowed to wait?"""
        return len(self._waiting) < self.max_waiting or (self._free > 0 and not self._waiting)

    @property
    def retry_after_s(self) -> int:
        """Whole seconds until a place in the queue is likely free, from how long slots were held lately."""
        return min(RETRY_AFTER_MAX_S, max(1, math.ceil(self._mean_hold_s / self.total)))

    def check_room(self) -> None:
        if not self.has_room:
            raise QueueFull(
                f"cannot queue the request: {self.used} are running and {self.waiting} waiting, as many as "
                f"server.max_waiting = {self.max_waiting} allows; try again later"
            )

    def hold(self, timeout_s: float) -> _Hold:
        """`async with` it for a slot. Raises QueueFull at once, or WaitedTooLong after `timeout_s`."""
        return _Hold(self, timeout_s)

    def note_hold(self, seconds: float) -> None:
        self._mean_hold_s += 0.2 * (seconds - self._mean_hold_s)

    async def take(self, timeout_s: float) -> None:
        self.check_room()
        if self._free > 0:
            self._free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = None
        try:
            async with asyncio.timeout(timeout_s):
                await turn
        except BaseException as error:
            self._waiting.pop(turn, None)
            if turn.done() and not turn.cancelled():
                self.give()  # the slot came in the same moment as the end of the wait
            if isinstance(error, TimeoutError):
                raise WaitedTooLong(
                    f"cannot serve the request: none of the {self.total} slots became free within "
                    f"{timeout_s:.0f} s (server.queue_timeout_s); try again later"
                ) from None
            raise

    def give(self) -> None:
        """Hand the slot to the one who waits longest; invariant: a free slot means that nobody waits."""
        while self._waiting:
            turn = next(iter(self._waiting))
            del self._waiting[turn]
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class _Hold:
    """A slot taken and given back; written out, since each request of every stream passes here."""

    __slots__ = ("_began", "_slots", "_timeout_s")

    def __init__(self, slots: Slots, timeout_s: float) -> None:
        self._slots, self._timeout_s = slots, timeout_s

    async def __aenter__(self) -> None:
        await self._slots.take(self._timeout_s)
        self._began = time.monotonic()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        self._slots.note_hold(time.monotonic() - self._began)
        self._slots.give()
