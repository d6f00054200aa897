"""A program that behaves like llama-server on a Unix socket, with switches.

Run it as `fake_engine.py --host SOCKET -np N ...`; flags that it does not know are accepted and ignored.
Switches come from the environment as FAKE_<NAME> (upper case), and from the JSON file that FAKE_FILE names,
which is read again for every request, so that a test can change its mind while the engine runs:

    start_s        seconds before the socket is bound                           0
    load_s         seconds of 503 on /health and everything else after that     0
    rate           tokens per second; 0 = as fast as possible                   0
    tokens         tokens of an answer; 0 = the request's max_tokens, or 16     0
    prompt_s       seconds of silence before the first token                    0
    die_after      kill -9 itself once so many tokens of one answer are sent    0
    die_starts     how many of the first starts end at once with status 1       0
    die_ready_s    kill -9 itself so many seconds after it became healthy       0
    ignore_term    1: SIGTERM is ignored                                        0
    stall          1: answers are never begun; /health stays 200, /slots is silent   0
    health_silent  1: /health accepts and never answers                         0
    state_dir      where the starts are counted (file `starts`)

Beyond llama-server's routes: /echo-any... answers with the request's method, path, headers and body;
/fake/info with argv, environment, descriptors and what was served and cancelled.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

from aiohttp import web

DEFAULTS: dict[str, Any] = {
    "start_s": 0.0, "load_s": 0.0, "rate": 0.0, "tokens": 0, "prompt_s": 0.0, "die_after": 0, "die_starts": 0,
    "die_ready_s": 0.0, "ignore_term": 0, "stall": 0, "health_silent": 0, "state_dir": "",
}  # fmt: skip
GONE = (ConnectionResetError, BrokenPipeError)


def switches() -> dict[str, Any]:
    values = dict(DEFAULTS)
    for name, default in DEFAULTS.items():
        text = os.environ.get(f"FAKE_{name.upper()}")
        if text is not None:
            values[name] = type(default)(text)
    path = os.environ.get("FAKE_FILE")
    if path and os.path.exists(path):
        values.update(json.loads(Path(path).read_text() or "{}"))
    return values


def count_start(directory: str) -> int:
    if not directory:
        return 1
    path = Path(directory) / "starts"
    n = int(path.read_text()) + 1 if path.exists() else 1
    path.write_text(str(n))
    return n


class ClientGone(Exception):
    pass


class FakeEngine:
    def __init__(self, slots: int, alias: str) -> None:
        self.slots = asyncio.Semaphore(slots)
        self.n_slots = slots
        self.alias = alias
        self.ready_at = time.monotonic() + switches()["load_s"]
        self.running: dict[int, dict[str, Any]] = {}
        self.cancelled: list[str] = []
        self.served = 0
        self.began = 0
        self.most_at_once = 0

    # --- routes

    async def any(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        if path == "/fake/info":
            return web.json_response(self.info())
        if path in ("/health", "/v1/health"):
            if switches()["health_silent"]:
                await asyncio.sleep(3600)
            waiting = self.loading()
            return web.json_response({"status": "ok"}) if waiting is None else waiting
        waiting = self.loading()
        if waiting is not None:
            return waiting
        if path == "/slots":
            return await self.slots_route()
        if path in ("/v1/models", "/models"):
            return web.json_response({"object": "list", "data": [{"id": self.alias, "object": "model"}]})
        if path == "/props":
            return web.json_response({"total_slots": self.n_slots, "model_alias": self.alias})
        if path == "/metrics":
            return web.Response(text="llamacpp:requests_processing 0\n")
        if path.startswith("/echo-any"):
            return await self.echo(request)
        if path == "/v1/embeddings":
            return await self.embeddings(request)
        if path in ("/v1/chat/completions", "/v1/completions", "/completion", "/completions", "/v1/messages"):
            return await self.generate(request)
        error = {"code": 404, "message": "File Not Found", "type": "not_found_error"}
        return web.json_response({"error": error}, status=404)

    def loading(self) -> web.Response | None:
        if time.monotonic() >= self.ready_at:
            return None
        error = {"message": "Loading model", "type": "unavailable_error", "code": 503}
        return web.json_response({"error": error}, status=503)

    async def slots_route(self) -> web.Response:
        if switches()["stall"]:
            await asyncio.sleep(3600)
        busy = list(self.running.values())
        slots = [{"id": i, "is_processing": i < len(busy)} for i in range(self.n_slots)]
        return web.json_response(slots)

    async def echo(self, request: web.Request) -> web.Response:
        body = await request.read()
        status = int(request.query.get("status", "200"))
        seen = {
            "method": request.method,
            "path": request.raw_path,
            "headers": [[k, v] for k, v in request.headers.items()],
            "body": body.decode("latin-1"),
        }
        return web.json_response(seen, status=status, headers={"X-Echo": "yes"})

    async def embeddings(self, request: web.Request) -> web.Response:
        await request.read()
        data = [{"object": "embedding", "index": 0, "embedding": [0.1, 0.2, 0.3]}]
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        return web.json_response({"object": "list", "model": self.alias, "data": data, "usage": usage})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.json()
        except ValueError:
            error = {"code": 400, "message": "cannot parse JSON", "type": "invalid_request_error"}
            return web.json_response({"error": error}, status=400)
        self.began += 1
        number = self.began
        try:
            await self.wait(request, self.slots.acquire())
        except ClientGone:
            self.cancelled.append("deferred")
            return web.Response()  # nobody reads it
        self.running[number] = {"tokens": 0}
        self.most_at_once = max(self.most_at_once, len(self.running))
        try:
            answer = await self.answer(request, body, self.running[number])
        except ClientGone:
            self.cancelled.append("running")
            return web.Response()
        except GONE:
            self.cancelled.append("running")
            return web.Response()
        except asyncio.CancelledError:
            self.cancelled.append("running")
            raise
        finally:
            del self.running[number]
            self.slots.release()
        self.served += 1
        return answer

    async def answer(self, request: web.Request, body: dict[str, Any], state: dict[str, Any]) -> web.StreamResponse:
        s = switches()
        chat = "chat" in request.path or "messages" in request.path
        n = int(s["tokens"] or body.get("max_tokens") or body.get("n_predict") or 16)
        while switches()["stall"]:
            await self.pause(request, 0.05)
        began = time.monotonic()
        await self.pause(request, s["prompt_s"])
        stream: web.StreamResponse | None = None
        if body.get("stream"):
            stream = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await stream.prepare(request)
            if chat:
                await stream.write(self.event(chat, {"role": "assistant", "content": None}))
        first = time.monotonic()
        words = []
        for i in range(n):
            if s["rate"]:
                await self.pause(request, first + i / s["rate"] - time.monotonic())
            words.append(f"t{i} ")
            state["tokens"] = i + 1
            if stream is not None:
                await stream.write(self.event(chat, {"content": words[-1]} if chat else words[-1]))
            if s["die_after"] and i + 1 >= s["die_after"]:
                await asyncio.sleep(0.02)  # let the token leave first
                os.kill(os.getpid(), signal.SIGKILL)
        seconds = time.monotonic() - first
        usage = {"completion_tokens": n, "prompt_tokens": 7, "total_tokens": n + 7}
        timings = {"prompt_n": 7, "prompt_ms": 1e3 * (first - began), "predicted_n": n, "predicted_ms": 1e3 * seconds}
        if stream is None:
            text = "".join(words)
            choice = {"index": 0, "finish_reason": "length"} | (
                {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            )
            kind = "chat.completion" if chat else "text_completion"
            whole = {"object": kind, "id": "fake", "model": self.alias, "choices": [choice]}
            return web.json_response(whole | {"usage": usage, "timings": timings})
        last: dict[str, Any] = {"timings": timings}
        if chat and not (body.get("stream_options") or {}).get("include_usage"):
            await stream.write(self.event(chat, {}, "length", last))
        elif chat:
            await stream.write(self.event(chat, {}, "length"))
            chunk = {"choices": [], "object": "chat.completion.chunk", "id": "fake", "model": self.alias}
            await stream.write(sse(chunk | last | {"usage": usage}))
        else:
            await stream.write(self.event(chat, "", "length", last | {"usage": usage}))
        await stream.write(b"data: [DONE]\n\n")
        await stream.write_eof()
        return stream

    def event(self, chat: bool, what: Any, reason: str | None = None, more: dict[str, Any] | None = None) -> bytes:
        choice = {"index": 0, "finish_reason": reason} | ({"delta": what} if chat else {"text": what})
        kind = "chat.completion.chunk" if chat else "text_completion"
        return sse({"choices": [choice], "object": kind, "id": "fake", "model": self.alias} | (more or {}))

    # --- helpers

    async def pause(self, request: web.Request, seconds: float) -> None:
        """Sleep, but notice within 20 ms that the client left."""
        end = time.monotonic() + seconds
        while True:
            if request.transport is None or request.transport.is_closing():
                raise ClientGone
            left = end - time.monotonic()
            if left <= 0:
                return
            await asyncio.sleep(min(left, 0.02))

    async def wait(self, request: web.Request, what: Any) -> None:
        task = asyncio.ensure_future(what)
        while not (await asyncio.wait({task}, timeout=0.02))[0]:
            if request.transport is None or request.transport.is_closing():
                task.cancel()
                raise ClientGone

    def info(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "argv": sys.argv,
            "env": dict(os.environ),
            "fds": {n: os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if alive(n)},
            "inodes": {n: os.fstat(int(n)).st_ino for n in os.listdir("/proc/self/fd") if alive(n)},
            "served": self.served,
            "began": self.began,
            "running": len(self.running),
            "most_at_once": self.most_at_once,
            "cancelled": self.cancelled,
        }


def alive(fd: str) -> bool:
    try:
        os.fstat(int(fd))
    except OSError:
        return False
    return True


def sse(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def option(argv: list[str], *names: str, default: str = "") -> str:
    for name, value in itertools.pairwise(argv):
        if name in names:
            return value
    return default


async def serve(path: str, engine_slots: int, alias: str) -> None:
    s = switches()
    engine = FakeEngine(engine_slots, alias)
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{tail:.*}", engine.any)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)  # as the real one: a stale socket file is in the way
    except OSError as error:
        print(f"E couldn't bind HTTP server socket, hostname: {path}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from None
    site = web.SockSite(runner, sock, backlog=512, shutdown_timeout=0.1)
    await site.start()
    print(f"I server is listening on unix://{path}", file=sys.stderr, flush=True)
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, (lambda: None) if s["ignore_term"] else ended.set)
    loop.add_signal_handler(signal.SIGINT, ended.set)
    if s["die_ready_s"]:
        loop.call_later(s["load_s"] + s["die_ready_s"], os.kill, os.getpid(), signal.SIGKILL)
    await ended.wait()
    await runner.cleanup()


def main() -> int:
    if "--version" in sys.argv:
        print("version: fake")
        return 0
    s = switches()
    start = count_start(s["state_dir"])
    if start <= s["die_starts"]:
        print(f"E fake engine: start {start} fails as told", file=sys.stderr, flush=True)
        return 1
    time.sleep(s["start_s"])
    slots = int(option(sys.argv, "-np", "--parallel", default="1"))
    asyncio.run(serve(option(sys.argv, "--host"), slots, option(sys.argv, "-a", "--alias", default="fake")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
