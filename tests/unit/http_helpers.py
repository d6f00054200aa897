"""A Front over an upstream whose handler the test writes, and an engine handle that counts."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import uvloop
from aiohttp import web

from moe_l2d.config import Config, Model, Server
from moe_l2d.engine.state import EngineStatus, Phase
from moe_l2d.errors import EngineNotReady
from moe_l2d.http.front import Front
from moe_l2d.request import RequestRecord
from moe_l2d.stats import Stats

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
CHAT = "/v1/chat/completions"
MODEL = "demo"


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run on the loop that the daemon uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


class Handle:
    """An EngineHandle; `began`, `ended` and `progressed` must balance in every test."""

    def __init__(self, socket_path: Path, slots: int) -> None:
        self.socket_path = socket_path
        self.slots = slots
        self.began = self.ended = self.progressed = 0
        self.most = 0
        self._status = EngineStatus(Phase.READY, 1, 1, 0, "", 0.0)

    @property
    def status(self) -> EngineStatus:
        return self._status

    def become(self, phase: Phase, detail: str = "", generation: int | None = None) -> None:
        now = generation if generation is not None else self._status.generation
        self._status = replace(self._status, phase=phase, detail=detail, generation=now)

    async def wait_ready(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while self._status.phase is not Phase.READY:
            if self._status.phase is Phase.FAILED or time.monotonic() >= end:
                raise EngineNotReady(f"cannot serve: the engine is {self._status.phase}: {self._status.detail}")
            await asyncio.sleep(0.005)

    def request_began(self) -> None:
        self.began += 1
        self.most = max(self.most, self.began - self.ended)

    def progress(self) -> None:
        self.progressed += 1

    def request_ended(self) -> None:
        self.ended += 1
        assert self.ended <= self.began


class KeepingStats(Stats):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[RequestRecord] = []

    def record(self, record: RequestRecord) -> None:
        super().record(record)
        self.records.append(record)


class Rig:
    def __init__(self, front: Front, handle: Handle, stats: KeepingStats, session: aiohttp.ClientSession) -> None:
        self.front = front
        self.handle = handle
        self.stats = stats
        self.session = session
        self.writers: list[asyncio.StreamWriter] = []
        self.upstream: web.Server | None = None
        self.upstream_listener: asyncio.Server | None = None

    @property
    def base(self) -> str:
        return "http://{}:{}".format(*self.front.address)

    def post(self, path: str = CHAT, **kwargs: Any) -> Any:
        if "data" not in kwargs and "json" not in kwargs:
            kwargs["json"] = {"messages": [], "stream": True}
        return self.session.post(self.base + path, **kwargs)

    def get(self, path: str, **kwargs: Any) -> Any:
        return self.session.get(self.base + path, **kwargs)

    async def raw(self, head: str, body: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection on which `head` (lines, LF) and `body` were sent."""
        reader, writer = await asyncio.open_connection(*self.front.address)
        self.writers.append(writer)
        writer.write(head.strip().replace("\n", "\r\n").encode() + b"\r\n\r\n" + body)
        await writer.drain()
        return reader, writer

    async def raw_chat(self, **fields: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        body = json.dumps({"stream": True, **fields}).encode()
        return await self.raw(f"POST {CHAT} HTTP/1.1\nHost: localhost\nContent-Length: {len(body)}", body)

    async def kill_upstream(self) -> None:
        """As a killed engine: every connection breaks, none is accepted."""
        assert self.upstream is not None
        assert self.upstream_listener is not None
        self.upstream_listener.close()
        for connection in list(self.upstream.connections):
            if connection.transport is not None:
                connection.transport.abort()

    async def start_upstream(self, handler: Handler) -> None:
        self.handle.socket_path.unlink(missing_ok=True)
        self.upstream = web.Server(handler, access_log=None, auto_decompress=False)
        self.upstream_listener = await asyncio.get_running_loop().create_unix_server(
            self.upstream, str(self.handle.socket_path)
        )


@asynccontextmanager
async def rig(handler: Handler, slots: int = 2, **server: Any) -> AsyncIterator[Rig]:
    directory = Path(tempfile.mkdtemp(prefix="ml2", dir="/tmp"))
    handle = Handle(directory / "e.sock", slots)
    stats = KeepingStats()
    config = Config(server=replace(Server(listen="127.0.0.1:0"), **server), model=Model(name=MODEL))
    front = Front(config, handle, stats, lambda: {}, lambda: b"moe_l2_up 1\n")
    async with aiohttp.ClientSession(auto_decompress=False) as session:
        made = Rig(front, handle, stats, session)
        await made.start_upstream(handler)
        await front.start()
        try:
            yield made
        finally:
            for writer in made.writers:
                writer.transport.abort()
            await front.stop()
            await made.kill_upstream()
            assert made.upstream is not None
            await made.upstream.shutdown(0.1)
            shutil.rmtree(directory)
    assert handle.began == handle.ended, "request_began and request_ended do not balance"
    assert stats.snapshot()["active"] == 0


async def until(what: Callable[[], object], timeout_s: float = 5.0) -> float:
    """Wait for it; returns the seconds it took."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() - began < timeout_s, "did not come true in time"
        await asyncio.sleep(0.005)
    return time.monotonic() - began


def is_gone(request: web.BaseRequest) -> bool:
    return request.transport is None or request.transport.is_closing()


async def start_stream(request: web.BaseRequest) -> web.StreamResponse:
    await request.read()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    return response


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


FINAL = {"choices": [], "timings": {"prompt_n": 5, "cache_n": 2, "predicted_n": 3}}


async def short_stream(request: web.BaseRequest) -> web.StreamResponse:
    """Three tokens, the counts, [DONE]."""
    response = await start_stream(request)
    for i in range(3):
        await response.write(event({"choices": [{"delta": {"content": f"t{i}"}}]}))
    await response.write(event(FINAL))
    await response.write(b"data: [DONE]\n\n")
    return response


async def fetch(context: Any) -> tuple[int, Any, bytes]:
    async with context as answer:
        return answer.status, answer.headers, await answer.read()


async def is_free(r: Rig) -> None:
    """All slots are back."""
    await until(lambda: r.front._pipeline is not None and r.front._pipeline.slots.used == 0 and r.front.active == 0)
    assert r.front.waiting == 0
