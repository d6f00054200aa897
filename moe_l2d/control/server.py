"""The control socket: frames in, frames out. What they mean is in handlers.py, who may send them in peer.py."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgpack

from moe_l2d import api
from moe_l2d.control import claim, handlers, peer
from moe_l2d.errors import BadRequest, Busy, MoeError, TooLarge

log = logging.getLogger("moe_l2d.control")

# Each costs a task and a buffer; people and their tools need a handful.
MAX_CONNECTIONS = 64
# How long a peer may leave an answer unread.
WRITE_S = 10.0
# How long an answer may still take once the caller sends no more.
GRACE_S = 0.1
# How long a refused peer may go on sending.
LINGER_S = 1.0


class ControlServer:
    def __init__(self, path: Path, daemon: handlers.Served, rights: peer.Rights) -> None:
        self._path = path
        self._daemon = daemon
        self._rights = rights
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self, sock: socket.socket) -> None:
        """Listen on a socket that claim.bind_socket() made."""
        self._server = await asyncio.start_unix_server(self._connected, sock=sock, backlog=claim.BACKLOG)

    @property
    def is_serving(self) -> bool:
        return self._server is not None and self._server.is_serving()

    async def stop(self) -> None:
        """Close, hang up on everybody, remove the socket's file."""
        if self._server is None:
            return
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._server = None
        self._path.unlink(missing_ok=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except (ConnectionError, TimeoutError):
            log.debug("control: a client went away")
        except asyncio.CancelledError:
            pass  # stop() hangs up
        except Exception:  # a task boundary: one connection must not end the daemon
            log.exception("control: an error of our own, the connection is closed")
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        who = peer.of(writer.get_extra_info("socket"))
        if len(self._connections) > MAX_CONNECTIONS:
            busy = Busy(f"cannot take another control connection: {MAX_CONNECTIONS} are open, close one")
            await _send(writer, _refusal(None, busy))
            return
        frames = _Frames(reader)
        while True:
            try:
                frame = await frames.next()
            except MoeError as error:
                # after a malformed frame nobody knows where the next one begins
                await _send(writer, _refusal(None, error))
                await _linger(reader, writer)
                return
            if frame is None:
                return
            answering = asyncio.ensure_future(self._answer(frame[0], who, writer))
            await frames.until(answering)

    async def _answer(self, frame: object, who: peer.Peer, writer: asyncio.StreamWriter) -> None:
        number = api.call_id(frame)
        try:
            call = api.parse_call(frame)
            peer.check(who, self._rights, call.method.access)
            if call.method.access is api.Access.CHANGE:
                log.info("control: %s asked for by uid %d (pid %d)", call.method.name, who.uid, who.pid)
            async for result in _results(self._daemon, call):
                await _send(writer, {"id": number, "ok": True, "result": result})
        except MoeError as error:
            await _send(writer, _refusal(number, error))


async def _results(daemon: handlers.Served, call: api.Call) -> AsyncIterator[Any]:
    if call.method.streams:
        async with contextlib.aclosing(handlers.STREAMS[call.method.name](daemon, call.params)) as stream:
            async for result in stream:
                yield result
    else:
        yield await handlers.ONCE[call.method.name](daemon, call.params)


def _refusal(number: int | str | None, error: MoeError) -> dict[str, object]:
    return {"id": number, "ok": False, "error": {"code": error.code, "message": str(error)}}


async def _send(writer: asyncio.StreamWriter, frame: dict[str, object]) -> None:
    writer.write(msgpack.packb(frame))
    await asyncio.wait_for(writer.drain(), WRITE_S)


async def _linger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Swallow what the peer is still sending, for a moment: closing at once could cost it our answer."""
    with contextlib.suppress(TimeoutError, OSError):
        writer.write_eof()
        async with asyncio.timeout(LINGER_S):
            while await reader.read(65536):
                pass


def _too_large() -> TooLarge:
    return TooLarge(f"cannot read the request: it has more than {api.MAX_FRAME} bytes")


class _Frames:
    """Frames of one connection. It goes on reading while an answer is made, to notice that the caller left."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._unpacker = msgpack.Unpacker(max_buffer_size=api.MAX_FRAME, raw=False)
        self._over = False
        self._error: MoeError | None = None

    async def next(self) -> tuple[object] | None:
        """The next frame in a tuple (it may be None itself); None at the end. BadRequest, TooLarge."""
        while True:
            if self._error is not None:
                raise self._error
            try:
                return (self._unpacker.unpack(),)
            except msgpack.OutOfData:
                pass
            except (msgpack.UnpackException, ValueError, RecursionError) as error:
                cause = str(error) or type(error).__name__
                if "exceeds max" in cause:
                    raise _too_large() from None
                raise BadRequest(f"cannot read the request: it is no msgpack map ({cause[:80]})") from None
            if self._over:
                return None
            self._take(await self._reader.read(65536))

    async def until(self, task: asyncio.Future[None]) -> None:
        """Wait for `task`; cancel it if the caller hangs up."""
        reading: asyncio.Future[bytes] | None = None
        try:
            while not task.done():
                if reading is None and not self._over and self._error is None:
                    reading = asyncio.ensure_future(self._reader.read(65536))
                waiting: set[asyncio.Future[Any]] = {task} if reading is None else {task, reading}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if reading is not None and reading.done():
                    self._take(reading.result())
                    reading = None
                    if self._over:
                        # one that only closed its sending side still reads a prompt answer
                        await asyncio.wait({task}, timeout=GRACE_S)
                        task.cancel()
            if not task.cancelled():
                task.result()
        finally:
            task.cancel()
            if reading is not None:
                await self._recover(reading)

    async def _recover(self, reading: asyncio.Future[bytes]) -> None:
        """Stop a read that is under way without losing what it may just have got."""
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self._take(await reading)

    def _take(self, chunk: bytes) -> None:
        if not chunk:
            self._over = True
            return
        try:
            self._unpacker.feed(chunk)
        except msgpack.BufferFull:
            self._error = _too_large()
