"""The life of a request; read this first.

    read the body -> understand it -> wait for a slot and the engine -> ask the engine -> pass its bytes on -> account

The public side is a Call: it knows HTTP servers and OpenAI's shapes, this file knows the order of things and who
owns what at each moment. Whatever ends a request early (the client leaves, the daemon stops, the engine dies) arrives
here as an exception, and every resource is given back by a `finally` or `async with` that does not await.
"""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path
from typing import Protocol

import aiohttp

from moe_l2d.config import Server
from moe_l2d.engine.state import EngineHandle, Phase
from moe_l2d.errors import EngineError, EngineNotReady, MoeError
from moe_l2d.request import Outcome, Request, RequestRecord, Usage
from moe_l2d.slots import Slots
from moe_l2d.stats import Stats
from moe_l2d.upstream import Broken, NotConnected, Upstream

# Requests that take no slot: the engine has four HTTP threads beyond its slots, and its supervisor needs one.
CHEAP_AT_ONCE = 3
CHEAP_WAITING = 256
RECONNECT_PAUSE_S = 0.05  # between attempts to reach an engine that is said to be ready and does not accept
DEATH_NOTICE_S = 0.5  # how long the engine's owner is given to say why it died
FAIL_WRITE_S = 1.0  # how long telling a client of its request's end may take
RETRY_AFTER_S = 5  # for a client that came while the engine or the daemon cannot serve
CLIENT_LEFT_STATUS = 499

log = logging.getLogger(__name__)


class ClientLeft(Exception):
    """The client is gone, or does not read what it asked for."""


class EngineDied(EngineError):
    """The engine broke off its answer, or gave none."""


class Call(Protocol):
    """One exchange with a client, as the public side gives it to the pipeline."""

    id: str
    method: str
    path: str
    target: str  # raw path and query
    takes_slot: bool
    started: float  # time.monotonic()
    running: bool  # in the engine: set here, read by whoever drains
    stopped: MoeError | None  # set before the task is cancelled by ourselves, not because the client left
    status: int | None  # sent to the client; None before
    streamed: bool  # the answer is a stream of events; known after begin()

    async def read_body(self, limit_bytes: int) -> bytes | None:
        """None if the request has no body. TooLarge, ClientLeft."""

    def understand(self, body: bytes | None) -> Request:
        """What the body says that concerns us. BadRequest, NotFound."""

    def headers_for_engine(self, body: bytes | None) -> list[tuple[str, str]]: ...

    async def begin(self, answer: aiohttp.ClientResponse) -> None:
        """Send the head of the engine's answer. ClientLeft."""

    def see(self, chunk: bytes) -> bool:
        """Note what passes by; did it bring something of the answer, not merely keep the connection open?"""

    async def write(self, chunk: bytes) -> None:
        """Send a part of the body, wait while the client does not read. ClientLeft."""

    async def end(self) -> None: ...

    async def fail(self, error: MoeError, retry_after_s: int | None) -> None:
        """Tell the client in whatever form is still possible: an answer, an event, a broken connection."""

    def abort(self) -> None:
        """Break the connection, so that nobody takes what was sent for the whole."""

    @property
    def is_whole(self) -> bool:
        """The client has got the last of a stream; it may hang up then."""

    @property
    def is_error(self) -> bool:
        """The engine said, in the middle of a stream, that it failed."""

    def usage(self) -> Usage: ...


class _Times:
    """Moments of one request."""

    def __init__(self) -> None:
        self.queued_s = 0.0
        self.first_event: float | None = None  # time.monotonic()


class Pipeline:
    def __init__(self, server: Server, engine: EngineHandle, stats: Stats) -> None:
        """To be made on the event loop that it serves on."""
        self._server = server
        self._engine = engine
        self._stats = stats
        self._upstream = Upstream(Path(engine.socket_path))
        self.slots = Slots(engine.slots, server.max_waiting)
        self._cheap = Slots(CHEAP_AT_ONCE, CHEAP_WAITING)

    async def serve(self, call: Call) -> None:
        """Serve one call to its end, whatever that is. Raises only CancelledError, when nobody is left to answer."""
        times = _Times()
        outcome: Outcome = "error"
        if call.takes_slot:
            self._stats.begin()
        try:
            await self._live(call, times)
            outcome = "ok" if (call.status or 0) < 400 and not call.is_error else "error"
        except ClientLeft:
            outcome = "ok" if call.is_whole else "client_left"
        except MoeError as error:
            outcome = "engine_died" if isinstance(error, EngineDied) else "error"
            await self._fail(call, error)
        except asyncio.CancelledError:
            if call.stopped is None:
                outcome = "ok" if call.is_whole else "client_left"
                raise
            _take_back_cancellation()
            await self._fail(call, call.stopped)
        finally:
            self._account(call, times, outcome)

    async def _live(self, call: Call, times: _Times) -> None:
        lane = self.slots if call.takes_slot else self._cheap
        lane.check_room()  # before a large body is read for nothing
        body = await call.read_body(self._server.max_body_mib << 20)
        request = call.understand(body)
        log.debug("request %s: %s, model %s, stream %s", request.id, request.path, request.model, request.stream)
        arrived = time.monotonic()
        async with lane.hold(self._server.queue_timeout_s):
            while not await self._try(call, body, times, arrived):
                await asyncio.sleep(RECONNECT_PAUSE_S)

    async def _try(self, call: Call, body: bytes | None, times: _Times, arrived: float) -> bool:
        """With a slot in hand: wait for the engine, ask it, pass its answer on. False if it could not be reached.

        Only a request of which the engine got no byte is tried again; it might have acted on any other.
        """
        left = arrived + self._server.queue_timeout_s - time.monotonic()
        if self._engine.status.phase is not Phase.READY:
            await self._engine.wait_ready(max(0.0, left))
        times.queued_s = time.monotonic() - arrived
        generation = self._engine.status.generation
        call.running = True
        if call.takes_slot:
            self._engine.request_began()
        try:
            answer = await self._upstream.ask(call.method, call.target, call.headers_for_engine(body), body)
            try:
                await self._relay(call, answer, times, generation)
            finally:
                answer.close()  # not release(): an answer that is not read to its end must end in the engine, too
        except NotConnected as error:
            call.running = False
            if left <= RECONNECT_PAUSE_S:
                raise EngineNotReady(
                    f"cannot reach the engine at '{self._engine.socket_path}': {error}; "
                    f"gave up after server.queue_timeout_s = {self._server.queue_timeout_s:.0f} s"
                ) from None
            return False
        except Broken as error:
            raise await self._died(generation, "gave no answer", error) from None
        finally:
            if call.takes_slot:
                self._engine.request_ended()
        return True

    async def _relay(self, call: Call, answer: aiohttp.ClientResponse, times: _Times, generation: int) -> None:
        await call.begin(answer)
        content = answer.content
        while True:
            try:
                chunk = await content.readany()
            except Broken as error:
                raise await self._died(generation, "broke off its answer", error) from None
            if not chunk:
                break
            if call.see(chunk):
                if call.takes_slot:
                    self._engine.progress()
                if times.first_event is None and call.streamed:
                    times.first_event = time.monotonic()
            await call.write(chunk)
        await call.end()

    async def _died(self, generation: int, what: str, error: Exception) -> EngineDied:
        """The error for a lost connection, with the reason that the engine's owner finds, if it does so in time."""
        end = time.monotonic() + DEATH_NOTICE_S
        status = self._engine.status
        while status.generation == generation and status.phase is Phase.READY and time.monotonic() < end:
            await asyncio.sleep(0.02)
            status = self._engine.status
        reason = status.detail or "it closed the connection"
        return EngineDied(f"cannot finish the request: the engine {what}: {reason}; try again")

    async def _fail(self, call: Call, error: MoeError) -> None:
        try:
            async with asyncio.timeout(FAIL_WRITE_S):
                await call.fail(error, self._retry_after_s(error))
        except (ClientLeft, TimeoutError):
            call.abort()

    def _retry_after_s(self, error: MoeError) -> int | None:
        if error.http_status == 429:
            return self.slots.retry_after_s
        return RETRY_AFTER_S if error.http_status == 503 else None

    def _account(self, call: Call, times: _Times, outcome: Outcome) -> None:
        call.running = False
        now = time.monotonic()
        usage = call.usage()
        record = RequestRecord(
            id=call.id,
            path=call.path,
            status=call.status or CLIENT_LEFT_STATUS,
            outcome=outcome,
            prompt_tokens=usage.prompt_tokens,
            generated_tokens=usage.generated_tokens,
            queued_s=times.queued_s,
            ttft_s=None if times.first_event is None else times.first_event - call.started,
            total_s=now - call.started,
        )
        if call.takes_slot:
            self._stats.record(record)
        level = logging.INFO if call.takes_slot else logging.DEBUG
        log.log(
            level, "request %s: %s %s, status %d, %s, %.3f s, %s prompt and %s generated tokens", call.id, call.method,
            call.path, record.status, outcome, record.total_s, record.prompt_tokens or 0, record.generated_tokens or 0,
        )  # fmt: skip

    def reconfigure(self, server: Server) -> None:
        self._server = server
        self.slots.max_waiting = server.max_waiting

    async def close(self) -> None:
        await self._upstream.close()


def _take_back_cancellation() -> None:
    """The task was cancelled to stop the call, which it now does in good order."""
    task = asyncio.current_task()
    if task is not None:
        task.uncancel()
