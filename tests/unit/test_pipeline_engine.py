"""The life of a request while the engine is in trouble: what the client is told, and that nothing is lost silently."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web
from http_helpers import CHAT, event, fetch, is_free, rig, run_loop, short_stream, start_stream, until

from moe_l2d.engine.state import Phase


def test_engine_death_in_a_stream_is_told() -> None:
    """A stream whose engine dies ends with an error event that gives the reason, after ending the half event."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(event({"choices": []}) + b"data: {")
        await asyncio.Event().wait()
        return response

    async def run() -> None:
        async with rig(handler, slots=1) as r, r.post() as answer:
            await answer.content.readany()
            asyncio.get_running_loop().call_later(0.05, r.handle.become, Phase.BACKOFF, "killed by signal 9")
            await r.kill_upstream()
            blank, _, last = (await answer.read()).rpartition(b"data: ")
            assert blank == b"\n\n"
            error = json.loads(last)["error"]
            assert error["code"] == "engine"
            assert "killed by signal 9" in error["message"]
            await is_free(r)
            assert [(x.status, x.outcome) for x in r.stats.records] == [(200, "engine_died")]

    run_loop(run())


def test_engine_death_before_the_answer_is_502() -> None:
    """Without a byte of an answer the client gets 502 and the reason."""
    working = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        working.set()
        await asyncio.Event().wait()
        return web.Response()

    async def run() -> None:
        async with rig(handler, slots=1) as r:
            post = asyncio.create_task(fetch(r.post()))
            await working.wait()
            await r.kill_upstream()
            r.handle.become(Phase.BACKOFF, "out of memory")
            status, headers, body = await post
            assert (status, headers["x-moe-l2-refused-by"]) == (502, "moe-l2d")
            assert b"out of memory" in body
            await is_free(r)
            assert r.stats.records[0].outcome == "engine_died"

    run_loop(run())


def test_engine_death_in_a_whole_answer_breaks_the_connection() -> None:
    """A body that is no event stream is never ended as if it were whole."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"half":')
        await asyncio.Event().wait()
        return response

    async def run() -> None:
        async with rig(handler, slots=1) as r, r.post() as answer:
            await answer.content.readany()
            r.handle.become(Phase.BACKOFF)
            await r.kill_upstream()
            with pytest.raises(aiohttp.ClientError):
                await answer.read()
            await is_free(r)

    run_loop(run())


def test_requests_wait_for_a_restarting_engine() -> None:
    """While the engine restarts requests wait, also when it is called ready before it accepts, and then are served."""

    async def run() -> None:
        async with rig(short_stream) as r:
            await r.kill_upstream()
            r.handle.become(Phase.BACKOFF, "died")
            posts = [asyncio.create_task(fetch(r.post())) for _ in range(4)]
            await until(lambda: r.front.waiting == 2)
            assert r.handle.began == 0
            r.handle.become(Phase.READY, generation=2)
            await until(lambda: r.handle.began >= 2)
            assert not any(p.done() for p in posts)
            await r.start_upstream(short_stream)
            assert {(await p)[0] for p in posts} == {200}

    run_loop(run())


def test_a_new_engine_gets_new_connections() -> None:
    """A request after a restart of the engine does not go into a connection that the old one had open."""

    async def run() -> None:
        async with rig(short_stream) as r:
            for _ in range(5):
                assert (await fetch(r.post()))[0] == 200
                await r.kill_upstream()
                await r.start_upstream(short_stream)
            assert (await fetch(r.post()))[0] == 200

    run_loop(run())


@pytest.mark.parametrize("phase", [Phase.FAILED, Phase.LOADING, Phase.READY])
def test_an_engine_that_does_not_come_is_503(phase: Phase) -> None:
    """The wait for the engine is bounded by server.queue_timeout_s; the answer has the reason and Retry-After."""

    async def run() -> None:
        async with rig(short_stream, queue_timeout_s=0.2) as r:
            await r.kill_upstream()
            r.handle.become(phase, "no such file")
            status, headers, body = await fetch(r.post())
            assert (status, json.loads(body)["error"]["code"]) == (503, "engine_not_ready")
            assert "Retry-After" in headers
            await is_free(r)

    run_loop(run())


def test_no_prompt_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Neither prompts nor queries appear in the log at any level."""

    async def run() -> None:
        async with rig(short_stream) as r:
            await fetch(r.post(CHAT + "?key=hidden-q", json={"messages": [{"content": "hidden-p"}]}))
            await fetch(r.post(CHAT, data=b'{"hidden-b'))

    with caplog.at_level("DEBUG"):
        run_loop(run())
    assert "status 200, ok" in caplog.text
    assert "hidden" not in caplog.text


def test_an_error_event_of_the_engine_is_an_error() -> None:
    """A stream in which the engine says that it failed passes unchanged, and is accounted as an error."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(event("a") + b'data: {"error":{"code":500,"message":"Compute error."}}\n\n')
        return response

    async def run() -> None:
        async with rig(handler) as r:
            _, _, body = await fetch(r.post())
            assert body.endswith(b'"Compute error."}}\n\n')
            await until(lambda: r.stats.records)
            assert [x.outcome for x in r.stats.records] == ["error"]

    run_loop(run())
