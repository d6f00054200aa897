"""A llama-server that computes nothing: it sends each token when it is due, and writes into it when that was.

Started like the engine (`--host SOCKET`, other flags ignored). A request's JSON may name `max_tokens` and `rate`
(tokens per second; 0: all at once). Every event carries `"due":N,"sent":N`, CLOCK_MONOTONIC in ns, which is the same
clock in every process of the machine. Written on bare protocols so that it costs little of the two cores it shares.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import cast

import uvloop

HEAD = b"HTTP/1.1 200 OK\r\nServer: paced\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":" token"}}],"id":"chatcmpl-x","model":"paced",'
LAST = b'data: {"choices":[],"timings":{"prompt_n":1,"predicted_n":%d}}\n\n'


class Connection(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are no subclass
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if blank and len(body) >= length:
            self._received = b""
            self._answer(head.split(b" ", 2), body)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _answer(self, line: list[bytes], body: bytes) -> None:
        if line[0] == b"POST":
            asked = json.loads(body)
            self._n = int(asked.get("max_tokens", 16))
            rate = float(asked.get("rate", 0))
            self._step = round(1e9 / rate) if rate else 0
            self._i = 0
            self._start = time.monotonic_ns()
            self._transport.write(HEAD)
            self._tick()
            return
        answer = b"[]" if line[1] == b"/slots" else b'{"status":"ok"}'
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)
        self._transport.write(head + answer)

    def _tick(self) -> None:
        while self._i < self._n:
            due = self._start + self._i * self._step
            now = time.monotonic_ns()
            if due > now:
                self._timer = self._loop.call_later((due - now) / 1e9, self._tick)
                return
            self._chunk(TEXT + b'"due":%d,"sent":%d}\n\n' % (due, now))
            self._i += 1
        self._chunk(LAST % self._n)
        self._chunk(b"data: [DONE]\n\n")
        self._transport.write(b"0\r\n\r\n")

    def _chunk(self, event: bytes) -> None:
        self._transport.write(b"%x\r\n%s\r\n" % (len(event), event))


async def serve(path: str) -> None:
    server = await asyncio.get_running_loop().create_unix_server(Connection, path, backlog=512)
    await server.serve_forever()


def main() -> int:
    if "--version" in sys.argv:
        print("version: paced")
        return 0
    path = sys.argv[sys.argv.index("--host") + 1]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
