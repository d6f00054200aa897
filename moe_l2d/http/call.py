"""One exchange with a client: aiohttp's server on one side, the pipeline on the other."""

from __future__ import annotations

import asyncio
import time
from itertools import count

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

from moe_l2d.errors import MoeError, NotRunning, TooLarge
from moe_l2d.http import openai, passthrough, sse
from moe_l2d.http.routes import route_of
from moe_l2d.pipeline import ClientLeft
from moe_l2d.request import Asked, Request, Usage

SERVER = "moe-l2"
JSON_TYPE = "application/json; charset=utf-8"
# aiohttp's own exceptions for a connection that is gone; reading a body raises the payload's, too.
_GONE = (ConnectionError, aiohttp.ClientPayloadError, web.RequestPayloadError)
_numbers = count(1)


class HttpCall:
    """Implements pipeline.Call."""

    def __init__(self, http: web.BaseRequest, model: str, task: asyncio.Task[object]) -> None:
        self.id = f"r{next(_numbers)}"
        self.method = http.method
        self.target = http.raw_path
        self.path = self.target.partition("?")[0]
        self.started = time.monotonic()
        self.running = False
        self.streamed = False
        self.stopped: MoeError | None = None
        self.status: int | None = None
        self.response: web.StreamResponse | None = None
        self.blocked_since: float | None = None  # in a write to the client, or a read of its body: time.monotonic()
        self._route = route_of(self.method, self.path)
        self.takes_slot = self._route.slot
        self.makes_embeddings = self._route.embeddings
        self._http = http
        self._model = model
        self._task = task
        self._left = False
        self._asks_stream = False
        self._meter: sse.Meter | None = None

    # --- asked by the listener's watch

    @property
    def client_is_gone(self) -> bool:
        transport = self._http.transport
        return transport is None or transport.is_closing()

    def drop(self) -> None:
        """The client left: end the call, there is nobody to tell."""
        if not self._left:
            self._left = True
            self.abort()
            self._task.cancel()

    def stop(self, reason: MoeError) -> None:
        """End the call and tell the client `reason`."""
        if not self._left and self.stopped is None:
            self.stopped = reason
            self._task.cancel()

    # --- asked by the pipeline

    async def read_body(self, limit_bytes: int) -> bytes | None:
        http = self._http
        length = http.content_length
        if length is not None and length > limit_bytes:
            raise _too_large(limit_bytes)
        if not http.body_exists:
            return None
        if http.headers.get("Expect", "").lower() == "100-continue" and http.transport is not None:
            http.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        try:
            while True:
                self.blocked_since = time.monotonic()
                part = await http.content.readany()
                if not part:
                    return bytes(body)
                body += part
                if len(body) > limit_bytes:
                    raise _too_large(limit_bytes)
        except _GONE as error:
            raise ClientLeft(str(error)) from None
        finally:
            self.blocked_since = None

    def understand(self, body: bytes | None) -> Request:
        coded = self._http.headers.get("Content-Encoding", "identity").lower() != "identity"
        asked = Asked() if coded or not self._route.json else openai.understand(body or b"", self._model)
        self._asks_stream = asked.stream
        return Request(self.id, self.path, asked.model, asked.stream, self.started)

    def headers_for_engine(self, body: bytes | None) -> passthrough.Headers:
        # llama-server closes the connection behind a stream and does not say so: the next request would be lost
        length = None if body is None else len(body)
        return passthrough.request_headers(self._http.headers.items(), length, closing=self._asks_stream)

    async def begin(self, answer: aiohttp.ClientResponse) -> None:
        headers: CIMultiDict[str] = CIMultiDict(passthrough.answer_headers(answer.headers.items()))
        # not answer.content_type, which parses the whole field
        self.streamed = headers.get("Content-Type", "").partition(";")[0].strip().lower() == sse.CONTENT_TYPE
        self._meter = sse.Meter(self.streamed)
        if self.streamed:  # no proxy between us and the client may collect or keep events
            headers.setdefault("Cache-Control", "no-cache")
            headers.setdefault("X-Accel-Buffering", "no")
        if answer.status >= 400:
            headers.setdefault(openai.REFUSED_BY, "engine")
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        if "Content-Length" not in headers and self.method != "HEAD" and answer.status not in (204, 304):
            if self._http.version >= aiohttp.HttpVersion11:
                response.enable_chunked_encoding()
            else:
                response.force_close()
        await self._prepare(response)

    def see(self, chunk: bytes) -> bool:
        return self._meter is None or self._meter.feed(chunk)

    async def write(self, chunk: bytes) -> None:
        assert self.response is not None
        self.blocked_since = time.monotonic()
        try:
            await self.response.write(chunk)
        except ConnectionError as error:
            raise ClientLeft(str(error)) from None
        self.blocked_since = None

    async def end(self) -> None:
        assert self.response is not None
        self.blocked_since = time.monotonic()
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientLeft(str(error)) from None
        self.blocked_since = None

    async def fail(self, error: MoeError, retry_after_s: int | None) -> None:
        body = openai.error_body(error)
        if self.response is None:
            await self.answer(error.http_status, body, JSON_TYPE, _refusal_headers(retry_after_s))
        elif self.streamed:
            event = sse.error_event(body, self._meter is not None and self._meter.in_event)
            await self.write(event)
            await self.end()
        else:
            self.abort()

    def abort(self) -> None:
        transport = self._http.transport
        if transport is not None:
            transport.abort()

    @property
    def is_whole(self) -> bool:
        return self._meter is not None and self._meter.done

    @property
    def is_error(self) -> bool:
        return self._meter is not None and self._meter.failed

    def usage(self) -> Usage:
        return Usage() if self._meter is None else self._meter.usage()

    # --- answers of our own

    async def answer(self, status: int, body: bytes, content_type: str, headers: dict[str, str] | None = None) -> None:
        """A whole answer that does not come from the engine."""
        head = {"Content-Type": content_type, "Server": SERVER, **(headers or {})}
        response = web.Response(status=status, body=body, headers=head)
        if isinstance(self.stopped, NotRunning):
            response.force_close()
        await self._prepare(response)
        await self.end()

    async def _prepare(self, response: web.StreamResponse) -> None:
        try:
            await response.prepare(self._http)
        except ConnectionError as error:
            raise ClientLeft(str(error)) from None
        self.response = response
        self.status = response.status


def _refusal_headers(retry_after_s: int | None) -> dict[str, str]:
    headers = {openai.REFUSED_BY: "moe-l2d"}
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    return headers


def _too_large(limit_bytes: int) -> TooLarge:
    return TooLarge(
        f"cannot accept the request's body: it is larger than server.max_body_mib = {limit_bytes >> 20} MiB allows"
    )
