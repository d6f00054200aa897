"""OpenAI's shapes, the guard and the table of routes: pure functions over values."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_l2d import errors
from moe_l2d.http import guard, openai, passthrough
from moe_l2d.http.routes import POST, route_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('ab"\\{}[]:,é', max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text('model"\\stream', max_size=7), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["model", "stream", "messages", "x"]), JSON), st.booleans(), st.booleans())
@settings(deadline=None)  # a loaded machine is no failure
def test_search_finds_what_parsing_finds(fields: dict[str, object], ascii_only: bool, spaced: bool) -> None:
    """The search of large bodies gives the same model and stream as json, wherever these words stand."""
    body = json.dumps(fields, ensure_ascii=ascii_only, indent=1 if spaced else None).encode()
    plain = {k: v for k, v in fields.items() if k in ("model", "stream") and not isinstance(v, (dict, list))}
    assert openai.search(body) == plain


@given(st.binary(max_size=60))
@settings(deadline=None)  # a loaded machine is no failure
def test_search_never_fails_oddly(body: bytes) -> None:
    """Any bytes are searched or refused with ValueError."""
    try:
        openai.search(b'{"model":' + body)
    except ValueError:
        return


def test_large_body_is_understood_quickly() -> None:
    """A 32 MiB image costs far less than parsing it, and its model and stream are still found."""
    body = json.dumps({"messages": [{"url": "QUJD" * (8 << 20)}], "stream": True, "model": "auto"}).encode()
    began = time.perf_counter()
    json.loads(body)
    parsed = time.perf_counter()
    asked = openai.understand(body, "demo")
    assert time.perf_counter() - parsed < (parsed - began) / 2
    assert (asked.model, asked.stream) == ("auto", True)
    with pytest.raises(openai.ModelNotFound):
        openai.understand(body.replace(b'"auto"', b'"other"'), "demo")
    with pytest.raises(errors.BadRequest):
        openai.understand(b"[" + body + b"]", "demo")
    with pytest.raises(errors.BadRequest):
        openai.understand(body[:-4], "demo")


def test_errors_have_openai_types() -> None:
    """Every error of the tree gets a type that OpenAI's clients know, and one line."""
    for kind in errors.ALL:
        body = openai.error_body(kind("cannot\ndo 'x': y"))
        assert b"\n" not in body
        assert json.loads(body)["error"]["type"] in (
            "invalid_request_error", "permission_error", "rate_limit_error", "server_error",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("host", "ok"),
    [
        ("localhost", True), ("localhost:1", True), ("127.0.0.1", True), ("127.3.2.1:5", True), ("[::1]", True),
        ("[::1]:80", True), ("::1", False), ("localhost:x", False), ("localhost.evil", False), ("", False),
        ("0.0.0.0", False), ("[::1]x", False), ("example.org", False), ("127.0.0.1@evil", False),
    ],
)  # fmt: skip
def test_hosts(host: str, ok: bool) -> None:
    """Only names and addresses of the loopback are let in by their Host header."""
    if ok:
        guard.check_local(host, None)
        return
    with pytest.raises(errors.Denied):
        guard.check_local(host, None)


def test_routes() -> None:
    """What the engine computes on waits for a slot, also under an unknown name; what only reads does not."""
    assert all(route_of("POST", p).slot for p in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"))
    assert route_of("POST", "/completion/").slot
    assert route_of("POST", "/new/route").slot
    assert not route_of("POST", "/new/route").json
    assert not any(route_of(m, p).slot for m, p in [("GET", "/props"), ("GET", "/slots"), ("POST", "/tokenize")])
    assert all(path.startswith("/") and not path.endswith("/") for path in POST)


def test_headers_that_differ_in_case_are_kept() -> None:
    """Two headers of one name in two spellings both go on, in order."""
    kept = passthrough.request_headers([("X-a", "1"), ("x-A", "2"), ("Connection", "b"), ("B", "3")], 0)
    assert kept == [("X-a", "1"), ("X-a", "2"), ("Content-Length", "0")]


def test_the_engines_cors_is_dropped() -> None:
    """No Access-Control header of the engine reaches a client."""
    assert passthrough.answer_headers([("access-Control-Allow-Origin", "*"), ("ETag", "x")]) == [("ETag", "x")]
