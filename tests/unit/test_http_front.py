"""The public listener as a client sees it."""

from __future__ import annotations

import asyncio
import io
import json
import socket
from typing import Any

import pytest
from aiohttp import web
from http_helpers import CHAT, MODEL, is_gone, rig, run_loop, short_stream, start_stream, until

from moe_l2d.config import Server
from moe_l2d.engine.state import Phase
from moe_l2d.errors import ConfigError
from moe_l2d.http.front import listening_socket


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    body = await request.content.read()
    seen = {"method": request.method, "target": request.raw_path, "headers": [*request.headers.items()],
            "body": body.decode("latin-1")}  # fmt: skip
    return web.json_response(seen)


async def refused(answer: Any, status: int, code: str) -> dict[str, Any]:
    """Check a refusal of moe-l2d's own in OpenAI's shape; returns its `error`."""
    assert answer.status == status
    assert answer.headers["x-moe-l2-refused-by"] == "moe-l2d"
    error: dict[str, Any] = (await answer.json())["error"]
    assert set(error) == {"message", "type", "code", "param"}
    assert error["code"] == code
    return error


def test_bad_json_is_refused_in_openai_shape() -> None:
    """A body that is no JSON object gets 400 from moe-l2d and never reaches the engine."""

    async def run() -> None:
        async with rig(echo) as r:
            for body in (b"{", b"[]", b"", b"\xff", b"[" * 100_000):
                async with r.post(data=body) as answer:
                    error = await refused(answer, 400, "bad_request")
                    assert error["type"] == "invalid_request_error"
            assert r.handle.began == 0

    run_loop(run())


def test_model_names() -> None:
    """The served name, "auto", null and nothing are accepted; another name gets 404 that names what is served."""

    async def run() -> None:
        async with rig(echo) as r:
            for fields in ({"model": MODEL}, {"model": "auto"}, {}, {"model": None}, {"model": ""}):
                async with r.post(json=fields) as answer:
                    assert answer.status == 200
            async with r.post(json={"model": "other"}) as answer:
                error = await refused(answer, 404, "model_not_found")
                assert error["param"] == "model"
                assert MODEL in error["message"]
            async with r.post(json={"model": 5}) as answer:
                await refused(answer, 400, "bad_request")

    run_loop(run())


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_body(chunked: bool) -> None:
    """A body over the limit gets 413 naming the key, with a Content-Length and without one."""

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100_000

    headers = {} if chunked else {"Content-Length": "2000000"}

    async def run() -> None:
        async with rig(echo, max_body_mib=1) as r, r.post(data=pieces(), headers=headers) as answer:
            error = await refused(answer, 413, "too_large")
            assert "server.max_body_mib = 1" in error["message"]

    run_loop(run())


def test_large_body_passes_unchanged() -> None:
    """A body within the limit arrives byte for byte, with its length and without chunking."""

    async def run() -> None:
        async with rig(echo) as r:
            body = json.dumps({"prompt": "x" * 3_000_000}).encode()
            headers = {"Expect": "100-continue"}
            async with r.post("/completion", data=io.BytesIO(body), headers=headers) as answer:
                seen = await answer.json()
            assert seen["body"].encode("latin-1") == body
            assert ["Content-Length", str(len(body))] in seen["headers"]

    run_loop(run())


def test_request_passes_unchanged() -> None:
    """Method, raw path and query, headers in order and body reach the engine as sent; hop-by-hop headers do not."""

    async def run() -> None:
        async with rig(echo) as r:
            reader, _ = await r.raw(
                "PUT /any/%2Fthing%20?a=%41&b=+&a=2 HTTP/1.1\nHost: localhost:1\nX-One: 1\nx-two: a\nX-two: b\n"
                "Connection: close, X-Gone\nX-Gone: 1\nTE: trailers\nUpgrade: h2c\nKeep-Alive: 5\n"
                "Proxy-Authorization: secret\nAuthorization: Bearer me\nContent-Encoding: gzip\nContent-Length: 4",
                b"\x1f\x8b\x00\xff",
            )
            seen = json.loads((await reader.read()).partition(b"\r\n\r\n")[2])
            assert seen["method"] == "PUT"
            assert seen["target"] == "/any/%2Fthing%20?a=%41&b=+&a=2"
            assert seen["body"].encode("latin-1") == b"\x1f\x8b\x00\xff"
            names = [(k.lower(), v) for k, v in seen["headers"]]
            assert names == [
                ("host", "localhost:1"), ("x-one", "1"), ("x-two", "a"), ("x-two", "b"), ("authorization", "Bearer me"),
                ("content-encoding", "gzip"), ("content-length", "4"),
            ]  # fmt: skip

    run_loop(run())


@pytest.mark.parametrize("status", [200, 201, 204, 301, 400, 404, 429, 500, 503])
def test_answers_pass_unchanged(status: int) -> None:
    """Status, reason, headers and bytes of any answer are the engine's own; a refusal says whose it is."""
    body = b"" if status == 204 else b'{"x":\x00\xff}'

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        headers = [("Content-Type", "application/x-y"), ("X-A", "1"), ("X-A", "2"), ("Location", "/elsewhere"),
                   ("Content-Encoding", "gzip"), ("Keep-Alive", "timeout=5"), ("Server", "llama.cpp")]  # fmt: skip
        return web.Response(status=status, reason="Just So", body=body, headers=headers)

    async def run() -> None:
        async with rig(handler) as r, r.get("/props", allow_redirects=False) as answer:
            assert (answer.status, answer.reason, await answer.read()) == (status, "Just So", body)
            assert answer.headers.getall("X-A") == ["1", "2"]
            assert answer.headers["Server"] == "llama.cpp"
            assert answer.headers["Content-Encoding"] == "gzip"
            assert "Keep-Alive" not in answer.headers
            assert answer.headers.get("x-moe-l2-refused-by") == ("engine" if status >= 400 else None)

    run_loop(run())


def test_head_and_options_pass() -> None:
    """HEAD keeps the engine's length and has no body; OPTIONS is passed on."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=b"12345", headers={"X-M": request.method})

    async def run() -> None:
        async with rig(handler) as r:
            async with r.session.head(r.base + "/props") as answer:
                assert (answer.headers["Content-Length"], await answer.read()) == ("5", b"")
            async with r.session.options(r.base + "/props") as answer:
                assert answer.headers["X-M"] == "OPTIONS"

    run_loop(run())


def test_http_1_0_client_gets_the_whole_stream() -> None:
    """A client without chunked encoding gets plain bytes and the end of the connection."""

    async def run() -> None:
        async with rig(short_stream) as r:
            reader, _ = await r.raw(f"POST {CHAT} HTTP/1.0\nContent-Length: 2", b"{}")
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            assert b"chunked" not in head.lower()
            assert body.endswith(b"data: [DONE]\n\n")

    run_loop(run())


def test_web_pages_cannot_read_or_rebind() -> None:
    """A foreign Host or Origin is refused, and the engine's CORS headers never reach a client."""

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        cors = {"Access-Control-Allow-Origin": "http://localhost:3", "Access-Control-Allow-Credentials": "true"}
        return web.json_response({}, headers=cors)

    async def run() -> None:
        async with rig(handler) as r:
            for host in ("localhost", "localhost:99", "127.0.0.1", "[::1]:8", "LOCALHOST."):
                async with r.get("/props", headers={"Host": host, "Origin": "http://localhost:3"}) as answer:
                    assert answer.status == 200
                    assert not [h for h in answer.headers if h.lower().startswith("access-control")]
            for host in ("evil.example", "evil.example:11435", "127.0.0.1.evil.example", "[::1", "10.0.0.1", ""):
                async with r.get("/props", headers={"Host": host}) as answer:
                    await refused(answer, 403, "denied")
            for origin in ("http://evil.example", "null", "http://localhost.evil.example", "http://[x"):
                async with r.post(json={}, headers={"Origin": origin}) as answer:
                    await refused(answer, 403, "denied")

    run_loop(run())


def test_strange_targets_are_refused() -> None:
    """A request to a proxy (absolute target) or with a method of no use here is refused, not passed on."""

    async def run() -> None:
        async with rig(echo) as r:
            for line in ("GET http://evil.example/props HTTP/1.1", "TRACE /props HTTP/1.1"):
                reader, _ = await r.raw(f"{line}\nHost: localhost\nConnection: close")
                assert b" 400 " in (await reader.read()).partition(b"\r\n")[0]
    
    run_loop(run())


def test_own_routes_tell_the_truth() -> None:
    """/health and /ready follow the engine's phase, /metrics and /v1/models answer whatever the engine does."""

    async def run() -> None:
        async with rig(echo) as r:
            for phase in Phase:
                r.handle.become(phase, "because")
                ok = 200 if phase is Phase.READY else 503
                async with r.get("/health") as answer:
                    health = await answer.json()
                    assert answer.status == ok
                    assert health["engine"]["phase"] == phase
                    assert health["engine"]["detail"] == "because"
                async with r.get("/ready") as answer:
                    assert (answer.status, (await answer.json())["ready"]) == (ok, ok == 200)
                async with r.get("/metrics") as answer:
                    assert await answer.text() == "moe_l2_up 1\n"
                    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                async with r.get("/v1/models") as answer:
                    assert [m["id"] for m in (await answer.json())["data"]] == [MODEL]
            async with r.get(f"/v1/models/{MODEL}") as answer:
                assert (await answer.json())["id"] == MODEL
            async with r.get("/v1/models/other") as answer:
                await refused(answer, 404, "model_not_found")

    run_loop(run())


def test_taken_port_is_refused_in_one_sentence() -> None:
    """A port in use and a foreign address are named with their cause and the key to change."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on '127.0.0.1:{port}': address already in use"):
            listening_socket("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"cannot listen on '192.0.2.1:0': .*server.listen"):
        listening_socket("192.0.2.1", 0)


def test_reload_takes_over_limits() -> None:
    """New limits hold for the next request."""

    async def run() -> None:
        async with rig(echo) as r:
            r.front.reconfigure(Server(max_body_mib=1, max_waiting=7))
            async with r.post(data=io.BytesIO(b"x" * 1_100_000)) as answer:
                await refused(answer, 413, "too_large")
            assert r.front._pipeline is not None
            assert r.front._pipeline.slots.max_waiting == 7

    run_loop(run())


def test_bound_socket_is_accepted() -> None:
    """A socket that somebody else bound (socket activation) is served."""

    async def run() -> None:
        async with rig(echo) as r:
            await r.front.stop()
            sock = listening_socket("127.0.0.1", 0)
            port = sock.getsockname()[1]
            await r.front.start(sock)
            assert r.front.address == ("127.0.0.1", port)
            async with r.get("/health") as answer:
                assert answer.status == 200

    run_loop(run())


def test_drain_lets_streams_end() -> None:
    """While draining, new requests get 503 with Retry-After, waiting ones too, and the running stream is whole."""
    go = asyncio.Event()

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        response = await start_stream(request)
        await response.write(b"data: 1\n\n")
        await go.wait()
        await response.write(b"data: 2\n\n")
        return response

    async def run() -> None:
        async with rig(handler, slots=1) as r, r.post() as running:
            assert await running.content.readany() == b"data: 1\n\n"
            waiting = asyncio.create_task(fetch(r.post()))
            await until(lambda: r.front.waiting == 1)
            drain = asyncio.create_task(r.front.drain(5))
            status, headers, _ = await waiting
            assert (status, "Retry-After" in headers) == (503, True)
            async with r.post() as late:
                await refused(late, 503, "not_running")
                assert "Retry-After" in late.headers
            async with r.get("/ready") as answer:
                assert answer.status == 503
            assert not drain.done()
            go.set()
            assert await running.read() == b"data: 2\n\n"
            assert await drain == 0

    run_loop(run())


def test_drain_cuts_at_its_limit() -> None:
    """A stream that runs beyond the limit ends with an error event and is counted."""
    seen: list[web.BaseRequest] = []

    async def handler(request: web.BaseRequest) -> web.StreamResponse:
        seen.append(request)
        response = await start_stream(request)
        await response.write(b"data: 1\n\n")
        await until(lambda: is_gone(request))
        return response

    async def run() -> None:
        async with rig(handler) as r, r.post() as running:
            await running.content.readany()
            assert await r.front.drain(0.05) == 1
            last = (await running.read()).removeprefix(b"data: ")
            assert json.loads(last)["error"]["code"] == "not_running"
            assert r.stats.records[-1].outcome == "error"
            await until(lambda: is_gone(seen[0]))

    run_loop(run())


async def fetch(context: Any) -> tuple[int, Any, bytes]:
    async with context as answer:
        return answer.status, answer.headers, await answer.read()


def test_embeddings_need_their_key() -> None:
    """Without engine.embeddings a request for them is refused by the daemon, which names the key."""

    async def run() -> None:
        async with rig(echo) as r:
            for path in ("/v1/embeddings", "/embedding"):
                async with r.post(path, json={"input": "x"}) as answer:
                    error = await refused(answer, 501, "not_served")
                assert "engine.embeddings" in error["message"]

    run_loop(run())
