"""The life of a request: who waits, who runs, and that every slot comes back whatever happens."""

from __future__ import annotations

import asyncio
import json
import socket

import pytest
from aiohttp import web
from http_helpers import CHAT, fetch, is_free, is_gone, rig, run_loop, short_stream, start_stream, until

from moe_l2d.errors import QueueFull
from moe_l2d.slots import Slots, WaitedTooLong

# --- streaming


def test_chunks_pass_one_by_one() -> None:
    """Each chunk reaches the client before the engine makes the next one."""
    got = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = await start_stream(request)
        for i in range(5):
            await response.write(b"data: %d\n\n" % i)
            await asyncio.wait_for(got.wait(), 5)
            got.clear()
        return response

    async def run() -> None:
        async with rig(handler) as r, r.post() as answer:
            assert answer.headers["Content-Type"] == "text/event-stream"
            assert answer.headers["X-Accel-Buffering"] == "no"
            for i in range(5):
                assert await answer.content.readany() == b"data: %d\n\n" % i
                got.set()

    run_loop(run())


def test_every_byte_passes() -> None:
    """A stream with half events, comments and odd bytes arrives as it was sent."""
    parts = [b": ping\n", b"\n", b"data: {\xff", b"\x00}\r\n\r\n", b"data: [DONE]\n\n", b"x" * 200_000, b"\n\n"]

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = await start_stream(request)
        for part in parts:
            await response.write(part)
        return response

    async def run() -> None:
        async with rig(handler) as r, r.post() as answer:
            assert await answer.read() == b"".join(parts)

    run_loop(run())


def test_a_request_is_accounted() -> None:
    """The record has the engine's counts and the times, for a stream and for a whole answer."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        if "whole" in request.raw_path:
            return web.json_response({"usage": {"prompt_tokens": 4, "completion_tokens": 6}})
        return await short_stream(request)

    async def run() -> None:
        async with rig(handler) as r:
            await fetch(r.post())
            await fetch(r.post(CHAT + "?whole"))
            await fetch(r.get("/props"))
            await is_free(r)
            stream, whole = r.stats.records
            assert (stream.status, stream.outcome, stream.prompt_tokens, stream.generated_tokens) == (200, "ok", 7, 3)
            assert stream.ttft_s is not None
            assert 0 <= stream.queued_s <= stream.ttft_s <= stream.total_s
            assert (whole.prompt_tokens, whole.generated_tokens, whole.ttft_s) == (4, 6, None)
            assert r.handle.began == 2
            assert r.handle.progressed >= 2

    run_loop(run())


# --- waiting


def test_never_more_than_slots_and_first_come_first_served() -> None:
    """However many come, the engine sees at most its slots at once, in order of arrival."""
    order: list[int] = []
    running = 0
    most = 0

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        order.append((await request.json())["n"])
        await asyncio.sleep(0.01)
        running -= 1
        return web.json_response({})

    async def run() -> None:
        async with rig(handler, slots=2) as r:
            tasks = []
            for n in range(12):
                tasks.append(asyncio.create_task(fetch(r.post(json={"n": n}))))
                await until(lambda n=n: len(order) + r.front.waiting > n)  # type: ignore[misc]
            assert {(await t)[0] for t in tasks} == {200}
            assert order == list(range(12))
            assert most == 2
            assert r.handle.most == 2

    run_loop(run())


def test_cheap_requests_do_not_wait() -> None:
    """While all slots are busy, /props and /tokenize are answered."""
    go = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == CHAT:
            await go.wait()
        return web.json_response({"path": request.path})

    async def run() -> None:
        async with rig(handler, slots=1) as r:
            busy = asyncio.create_task(fetch(r.post()))
            await until(lambda: r.front.active == 1)
            assert (await fetch(r.get("/props")))[0] == 200
            assert (await fetch(r.post("/tokenize", json={"content": "x"})))[0] == 200
            go.set()
            await busy

    run_loop(run())


def test_queue_is_bounded_and_times_out() -> None:
    """One too many gets 429 with Retry-After at once, one that waits too long 503, both naming the key."""
    go = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        await go.wait()
        return web.json_response({})

    async def run() -> None:
        async with rig(handler, slots=1, max_waiting=1, queue_timeout_s=0.3) as r:
            busy = asyncio.create_task(fetch(r.post()))
            await until(lambda: r.front.active == 1)
            waiting = asyncio.create_task(fetch(r.post()))
            await until(lambda: r.front.waiting == 1)
            assert (await fetch(r.get("/ready")))[0] == 503
            status, headers, body = await fetch(r.post())
            assert (status, json.loads(body)["error"]["code"]) == (429, "queue_full")
            assert b"server.max_waiting = 1" in body
            assert json.loads(body)["error"]["type"] == "rate_limit_error"
            assert int(headers["Retry-After"]) >= 1
            status, headers, body = await waiting
            assert (status, b"server.queue_timeout_s" in body, "Retry-After" in headers) == (503, True, True)
            go.set()
            assert (await busy)[0] == 200

    run_loop(run())


def test_waiting_client_that_leaves_is_dropped() -> None:
    """A client that leaves the queue is gone from it at once, and the engine never sees its request."""
    go = asyncio.Event()
    seen = 0

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal seen
        seen += 1
        await go.wait()
        return web.json_response({})

    async def run() -> None:
        async with rig(handler, slots=1) as r:
            busy = asyncio.create_task(fetch(r.post()))
            await until(lambda: r.front.active == 1)
            _, writer = await r.raw_chat()
            await until(lambda: r.front.waiting == 1)
            writer.close()
            assert await until(lambda: r.front.waiting == 0) < 0.25
            go.set()
            await busy
            await is_free(r)
            assert seen == 1
            assert sorted(x.outcome for x in r.stats.records) == ["client_left", "ok"]

    run_loop(run())


# --- leaving


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("when", ["silent", "streaming"])
def test_leaving_ends_the_engines_work(when: str, reset: bool) -> None:
    """A client that closes or resets ends the engine's work within 250 ms, also before the first byte."""
    working = asyncio.Event()
    left = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = await start_stream(request) if when == "streaming" else web.StreamResponse()
        if when == "streaming":
            await response.write(b"data: 1\n\n")
        else:
            await request.read()
        working.set()
        await until(lambda: is_gone(request))
        left.set()
        return response

    async def run() -> None:
        async with rig(handler, slots=1) as r:
            _, writer = await r.raw_chat()
            await working.wait()
            if reset:
                writer.transport.abort()
            else:
                writer.close()
            assert await until(left.is_set) < 0.25
            await is_free(r)
            assert [x.outcome for x in r.stats.records] == ["client_left"]

    run_loop(run())


def test_leaving_behind_the_last_event_is_no_leaving() -> None:
    """A client that hangs up once it has [DONE] got all it asked for, and is accounted so."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(b"data: 1\n\ndata: [DONE]\n\n")
        await asyncio.sleep(30)
        return response

    async def run() -> None:
        async with rig(handler) as r:
            reader, writer = await r.raw_chat()
            await reader.readuntil(b"[DONE]\n\n")
            writer.close()
            await until(lambda: r.stats.records)
            assert [x.outcome for x in r.stats.records] == ["ok"]

    run_loop(run())


def test_slow_reader_is_cut() -> None:
    """A client that does not read holds back the engine, costs no memory, and loses its slot after the timeout."""
    sent = 0
    left = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal sent
        response = await start_stream(request)
        try:
            while True:
                await response.write(b"data: " + b"x" * 65_000 + b"\n\n")
                sent += 65_000
        except (ConnectionError, asyncio.CancelledError):
            left.set()
        return response

    async def run() -> None:
        async with rig(handler, slots=1, write_timeout_s=0.7) as r:
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await asyncio.get_running_loop().sock_connect(sock, r.front.address)
            _, writer = await asyncio.open_connection(sock=sock, limit=4096)
            r.writers.append(writer)
            writer.write(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{{}}".encode())
            await until(lambda: sent > 0)
            await asyncio.sleep(0.3)
            stuck = sent
            await asyncio.sleep(0.2)
            assert sent == stuck  # back-pressure reaches the engine
            assert stuck < 10_000_000
            await asyncio.wait_for(left.wait(), 3)
            await is_free(r)
            assert [x.outcome for x in r.stats.records] == ["client_left"]

    run_loop(run())


@pytest.mark.parametrize("steps", range(1, 16))
def test_a_slot_comes_back_wherever_the_task_is_cancelled(steps: int) -> None:
    """Cancelled after any number of loop turns, a request leaves no slot, no count and no connection behind."""

    async def run() -> None:
        async with rig(short_stream, slots=1) as r:
            await r.raw_chat()
            while not r.front._calls:
                await asyncio.sleep(0)
            for _ in range(steps):
                await asyncio.sleep(0)
            for call in list(r.front._calls):
                call.drop()
            await until(lambda: not r.front._calls)
            await is_free(r)
            assert r.handle.began == r.handle.ended
            assert (await fetch(r.post()))[0] == 200

    run_loop(run())


@pytest.mark.parametrize("turns", range(6))
def test_a_slot_handed_over_to_a_cancelled_waiter_is_not_lost(turns: int) -> None:
    """Cancelling a waiter in the same moment as its turn comes gives the slot to the next."""

    async def run() -> None:
        slots = Slots(1, 8)
        go = asyncio.Event()

        async def holder() -> None:
            async with slots.hold(5):
                await go.wait()

        async def waiter() -> None:
            async with slots.hold(5):
                await asyncio.sleep(0)

        first = asyncio.create_task(holder())
        await asyncio.sleep(0)
        second, third = asyncio.create_task(waiter()), asyncio.create_task(waiter())
        await asyncio.sleep(0)
        assert (slots.used, slots.waiting) == (1, 2)
        go.set()
        for _ in range(turns):
            await asyncio.sleep(0)
        second.cancel()
        await asyncio.gather(first, second, third, return_exceptions=True)
        assert (slots.used, slots.waiting) == (0, 0)

    run_loop(run())


def test_slots_refuse() -> None:
    """With no waiting allowed a second one is refused, and a wait is bounded; neither costs a slot."""

    async def run() -> None:
        slots = Slots(1, 0)
        async with slots.hold(1):
            with pytest.raises(QueueFull):
                async with slots.hold(1):
                    pass
            slots.max_waiting = 1
            with pytest.raises(WaitedTooLong):
                async with slots.hold(0.01):
                    pass
        assert (slots.used, slots.waiting) == (0, 0)
        assert slots.retry_after_s >= 1

    run_loop(run())
