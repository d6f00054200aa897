"""The public listener: limits, the daemon's own few routes, who is connected, how it drains and stops."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from moe_l2d.config import Config, Server, is_loopback
from moe_l2d.engine.state import EngineHandle, Phase
from moe_l2d.errors import BadRequest, Busy, ConfigError, MoeError, NotRunning, NotServed
from moe_l2d.http import guard, openai
from moe_l2d.http.call import JSON_TYPE, HttpCall
from moe_l2d.pipeline import CLIENT_LEFT_STATUS, RETRY_AFTER_S, ClientLeft, Pipeline
from moe_l2d.stats import Stats

BACKLOG = 512
KEEPALIVE_S = 75.0
# How soon a client's leaving is noticed: the engine's work for it must end within 250 ms of it.
WATCH_S = 0.05
# A write that takes this long is the client's slowness, and no sign of a stalled engine.
SLOW_WRITE_S = 0.5
# Requests being read or passing through beyond those that run and wait; more connections are refused at once.
MORE_OPEN = 512
CUT_S = 2.0  # bounds the end of calls that were told to stop
CLOSE_S = 0.2  # bounds aiohttp's closing of idle connections; all calls are over by then
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"})
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

log = logging.getLogger(__name__)


class Front:
    def __init__(
        self,
        config: Config,
        engine: EngineHandle,
        stats: Stats,
        snapshot: Callable[[], dict[str, object]],
        metrics_text: Callable[[], bytes],
    ) -> None:
        self._server = config.server
        self._engine = engine
        self._stats = stats
        self._snapshot = snapshot
        self._metrics_text = metrics_text
        self._model = config.model.name or Path(config.model.path).stem
        self._embeddings = config.engine.embeddings
        self._created = int(time.time())
        self._local_only = is_loopback(config.server.host_port[0])
        self._calls: set[HttpCall] = set()
        self._draining = False
        self._watch: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._pipeline: Pipeline | None = None
        self._web: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._address = ("", 0)

    # --- life

    async def start(self, bound: socket.socket | None = None) -> None:
        """Listen, on `bound` if given. Raises MoeError if the address cannot be used."""
        sock = bound or listening_socket(*self._server.host_port)
        self._draining = False
        name = sock.getsockname()
        self._address = (name[0], name[1])
        self._local_only = is_loopback(name[0])
        self._pipeline = Pipeline(self._server, self._engine, self._stats)
        self._web = web.Server(self._handle, access_log=None, keepalive_timeout=KEEPALIVE_S, auto_decompress=False)
        self._listener = await asyncio.get_running_loop().create_server(self._web, sock=sock, backlog=BACKLOG)

    @property
    def address(self) -> tuple[str, int]:
        return self._address

    @property
    def active(self) -> int:
        """Requests in the engine."""
        return sum(call.running for call in self._calls)

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return self._pipeline.slots.waiting if self._pipeline else 0

    async def drain(self, limit_s: float) -> int:
        """Take no new work, let what runs go on for `limit_s`, then cut it. Returns how many were cut."""
        self._draining = True
        for call in list(self._calls):
            if not call.running:
                call.stop(_stopping())
        await self._wait_idle(limit_s)
        cut = list(self._calls)
        for call in cut:
            call.stop(NotRunning("cannot finish the answer: moe-l2d is stopping and server.drain_s is over; try again"))
        if cut:
            await self._wait_idle(CUT_S)
        return len(cut)

    async def stop(self) -> None:
        """Close the listener and every connection; cuts what still runs."""
        if self._listener is not None:
            self._listener.close()
        await self.drain(0.0)
        for call in list(self._calls):
            call.drop()
        if self._web is not None:
            await self._web.shutdown(CLOSE_S)
        if self._pipeline is not None:
            await self._pipeline.close()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        self._listener = self._web = self._pipeline = None

    def reconfigure(self, server: Server) -> None:
        """Take over all but the address; it holds for what comes from now on."""
        self._server = server
        if self._pipeline is not None:
            self._pipeline.reconfigure(server)

    async def _wait_idle(self, limit_s: float) -> None:
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return

    # --- one request

    async def _handle(self, http: web.BaseRequest) -> web.StreamResponse:
        task = asyncio.current_task()
        assert task is not None
        call = HttpCall(http, self._model, task)
        self._enter(call)
        try:
            try:
                await self._route(call, http)
            except MoeError as error:
                await call.fail(error, RETRY_AFTER_S if error.http_status in (409, 503) else None)
        except ClientLeft:
            call.abort()
        finally:
            self._leave(call)
        # aiohttp wants an answer to finish; for a client that left this one goes nowhere. (An answer is a mapping,
        # and false when it holds nothing.)
        return web.Response(status=CLIENT_LEFT_STATUS) if call.response is None else call.response

    async def _route(self, call: HttpCall, http: web.BaseRequest) -> None:
        if self._local_only:
            guard.check_local(http.headers.get("Host"), http.headers.get("Origin"))
        if not call.target.startswith("/") or call.method not in METHODS:
            raise BadRequest(f"cannot serve '{call.method} {call.path[:100]}': not a path, or a method not served here")
        most = self._engine.slots + self._server.max_waiting + MORE_OPEN
        if len(self._calls) > most:
            raise Busy(f"cannot accept the request: {most} are open already; try again later")
        own = self._own_answer(call)
        if own is not None:
            await call.answer(*own)
            return
        if self._draining:
            call.stopped = _stopping()
            raise call.stopped
        if call.makes_embeddings and not self._embeddings:
            raise NotServed("cannot make embeddings: engine.embeddings is false; set it to true and restart moe-l2d")
        assert self._pipeline is not None
        await self._pipeline.serve(call)

    def _enter(self, call: HttpCall) -> None:
        self._calls.add(call)
        self._idle.clear()
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(WATCH_S, self._look)

    def _leave(self, call: HttpCall) -> None:
        self._calls.discard(call)
        if not self._calls:
            self._idle.set()

    def _look(self) -> None:
        """One look at every open call; runs only while there are any. aiohttp tells a handler nothing by itself."""
        self._watch = None
        if not self._calls:
            return
        self._watch = asyncio.get_running_loop().call_later(WATCH_S, self._look)
        now = time.monotonic()
        for call in list(self._calls):
            if call.client_is_gone:
                call.drop()
            elif call.blocked_since is not None and now - call.blocked_since > SLOW_WRITE_S:
                if now - call.blocked_since > self._server.write_timeout_s:
                    log.info("request %s: the client took no bytes for server.write_timeout_s, dropped", call.id)
                    call.drop()
                elif call.running:
                    self._engine.progress()

    # --- the daemon's own routes

    def _own_answer(self, call: HttpCall) -> tuple[int, bytes, str] | None:
        if call.method not in ("GET", "HEAD"):
            return None
        path = call.path
        if path in ("/health", "/v1/health"):
            return self._health()
        if path == "/ready":
            return self._ready()
        if path == "/metrics":
            return 200, self._metrics_text(), METRICS_TYPE
        if path in ("/v1/models", "/models"):
            return _json(200, openai.models_body(self._model, self._created))
        if path.startswith("/v1/models/"):
            asked = path.removeprefix("/v1/models/")
            if asked not in (self._model, openai.ANY_MODEL):
                raise openai.ModelNotFound(f"cannot find model '{asked[:200]}': this service serves '{self._model}'")
            return _json(200, openai.model_entry(self._model, self._created))
        return None

    def _health(self) -> tuple[int, bytes, str]:
        status = self._engine.status
        healthy = status.phase is Phase.READY and not self._draining
        return _json(
            200 if healthy else 503,
            {
                "status": "ok" if healthy else "draining" if self._draining else "unavailable",
                "model": self._model,
                "engine": {"phase": str(status.phase), "restarts": status.restarts, "detail": status.detail},
                "requests": {"running": self.active, "waiting": self.waiting},
            },
        )

    def _ready(self) -> tuple[int, bytes, str]:
        phase = self._engine.status.phase
        if self._draining:
            return _json(503, {"ready": False, "reason": "moe-l2d is stopping"})
        if phase is not Phase.READY:
            return _json(503, {"ready": False, "reason": f"the engine is {phase}"})
        if self._pipeline is None or not self._pipeline.slots.has_room:
            return _json(503, {"ready": False, "reason": "all slots are busy and the queue is full"})
        return _json(200, {"ready": True})


def listening_socket(host: str, port: int) -> socket.socket:
    """A bound TCP socket. Raises ConfigError naming the address and the cause."""
    shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    sock: socket.socket | None = None
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
        # now, and not when the loop gets to it: two daemons may both bind, only one may listen
        sock.listen(BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        cause = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot listen on '{shown}': {cause}; free it or change server.listen") from None
    sock.setblocking(False)
    return sock


def _json(status: int, value: object) -> tuple[int, bytes, str]:
    return status, json.dumps(value).encode(), JSON_TYPE


def _stopping() -> NotRunning:
    return NotRunning("cannot take the request: moe-l2d is stopping; try again in a few seconds")
