from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_l2d.http import sse
from moe_l2d.request import Usage

PARTS = [b"\n", b"\r\n", b"\r", b"a", b"data: x", b":", b"\n\n", b"\xff"]
STREAM_BYTES = st.lists(st.sampled_from(PARTS)).map(b"".join)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(c % (len(data) + 1) for c in cuts), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(STREAM_BYTES, st.lists(st.integers(0, 1000)), st.integers(1, 12))
@settings(deadline=None)  # a loaded machine is no failure
def test_any_split_gives_the_same_events(data: bytes, cuts: list[int], limit: int) -> None:
    """However a stream is cut into pieces, the same events come out, also of events longer than the limit."""
    whole, pieces = sse.EventSplitter(limit), sse.EventSplitter(limit)
    expected = whole.feed(data)
    assert [e for piece in split(data, cuts) for e in pieces.feed(piece)] == expected


@given(st.lists(st.text("abc:{} ", min_size=1), max_size=8), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
@settings(deadline=None)  # a loaded machine is no failure
def test_events_are_what_stands_between_blank_lines(texts: list[str], blank: bytes) -> None:
    """Every event is returned once, in order, whole."""
    splitter = sse.EventSplitter()
    assert splitter.feed(b"".join(t.encode() + blank for t in texts)) == [t.encode() for t in texts]
    assert not splitter.in_event


@given(STREAM_BYTES, st.integers(1, 20))
@settings(deadline=None)  # a loaded machine is no failure
def test_memory_is_bounded(data: bytes, limit: int) -> None:
    """A stream that never ends its event is not collected."""
    splitter = sse.EventSplitter(limit)
    for _ in range(3):
        splitter.feed(data)
        assert len(splitter._rest) <= limit + 3


def test_unfinished_event_is_known() -> None:
    """in_event tells whether our error event must end another one first."""
    splitter = sse.EventSplitter()
    splitter.feed(b"data: {")
    assert splitter.in_event
    splitter.feed(b"}\n\n")
    assert not splitter.in_event


def test_error_event_stands_alone() -> None:
    """An error event after half an event is an event of its own."""
    body = b'{"error":{}}'
    events = sse.EventSplitter().feed(b'data: {"cho' + sse.error_event(body, in_event=True))
    assert events == [b'data: {"cho', b"data: " + body]
    assert sse.EventSplitter().feed(sse.error_event(body, in_event=False)) == [b"data: " + body]


def counted(*events: bytes) -> Usage:
    meter = sse.Meter(is_stream=True)
    for e in events:
        meter.feed(e)
    return meter.usage()


def data(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def test_counts_come_from_timings() -> None:
    """Without usage the engine's timings count; reused prompt tokens are part of the prompt."""
    last = data({"choices": [], "timings": {"cache_n": 2, "prompt_n": 5, "predicted_n": 3}})
    assert counted(data({"choices": []}), last, b"data: [DONE]\n\n") == Usage(7, 3)


def test_counts_come_from_usage_first() -> None:
    """OpenAI's usage is taken where it is sent."""
    last = data({"usage": {"prompt_tokens": 9, "completion_tokens": 4}, "timings": {"prompt_n": 1, "predicted_n": 1}})
    assert counted(last) == Usage(9, 4)


def test_counts_of_anthropic_streams() -> None:
    """Anthropic's streams tell the prompt's tokens at the start and the answer's near the end."""
    usage = {"cache_read_input_tokens": 9, "input_tokens": 2, "output_tokens": 0}
    start = b"event: message_start\n" + data({"message": {"usage": usage}})
    end = b"event: message_delta\n" + data({"usage": {"output_tokens": 6}})
    assert counted(start, data({}), end, b"event: message_stop\n" + data({})) == Usage(11, 6)


def test_a_user_cannot_fake_counts() -> None:
    """The words usage and timings inside a text are not taken for the engine's counts."""
    text = data({"content": '"usage":{"prompt_tokens":1000}, "timings":{"predicted_n":1000}'})
    assert counted(text) == Usage(None, 1)


def test_a_cut_stream_counts_its_events() -> None:
    """Of a stream that was cut the events with data are counted, comments are not."""
    assert counted(data({}), b": ping\n\n", data({})) == Usage(None, 2)


@given(st.binary(max_size=200))
@settings(deadline=None)  # a loaded machine is no failure
def test_counting_never_fails(tail: bytes) -> None:
    """Whatever an engine sends, counting does not raise."""
    for key in (b'"usage":', b'"timings": {'):
        sse.find_usage(key + tail)
        meter = sse.Meter(is_stream=False)
        meter.feed(key + tail)
        meter.usage()


def test_long_body_is_counted_by_its_end() -> None:
    """The counts at the end of a body larger than what is kept are found."""
    meter = sse.Meter(is_stream=False)
    body = json.dumps({"text": "x" * 100_000, "usage": {"prompt_tokens": 3, "completion_tokens": 2}}).encode()
    for i in range(0, len(body), 1000):
        meter.feed(body[i : i + 1000])
    assert meter.usage() == Usage(3, 2)


def test_comments_are_no_progress() -> None:
    """A comment that keeps the connection open says nothing about the engine's health."""
    meter = sse.Meter(is_stream=True)
    assert not meter.feed(b": ping\n\n")
    assert meter.feed(b"data: {}\n\n")
