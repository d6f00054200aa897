"""Server-sent events, pure: cut a byte stream into events, find the engine's counts, write an error event.

Lines end in LF or CRLF; the lone CR that the standard also allows is used by no engine and not known here.
"""

from __future__ import annotations

import json
import re
from typing import Any

from moe_l2d.request import Usage

CONTENT_TYPE = "text/event-stream"
DONE = b"data: [DONE]"
_ERROR_EVENT = (b'data: {"error":', b'error: {', b'data: {"type":"error"')
# The counts stand at the end of an event or body, so the end is all that is kept of a long one.
KEPT_BYTES = 16 * 1024

_BLANK_LINE = re.compile(rb"\n\r?\n")
_BLANK_LINE_MAX = 3
_decode = json.JSONDecoder().raw_decode


class EventSplitter:
    """Give it a stream in any pieces and it returns the events, without their blank lines.

    It keeps at most `limit` bytes: of a longer event only the last `limit` bytes are returned.
    """

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self._limit = limit
        self._rest = b""

    @property
    def in_event(self) -> bool:
        """Has an event begun that is not over?"""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        if not self._rest and data.endswith(b"\n\n") and data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            event = self._end_of(data[:-2])  # by far the most come like this: one whole event
            return [event] if event else []
        events = []
        buffer = self._rest + data
        start = 0
        for match in _BLANK_LINE.finditer(buffer, max(0, len(self._rest) - _BLANK_LINE_MAX + 1)):
            event = self._end_of(buffer[start : match.start()].removesuffix(b"\r"))
            start = match.end()
            if event:
                events.append(event)
        rest = buffer[start:].lstrip(b"\r\n")
        # A cut must not part the end of line from the blank line that may follow: the rest keeps its last bytes.
        self._rest = rest[-(self._limit + _BLANK_LINE_MAX) :]
        return events

    def _end_of(self, event: bytes) -> bytes:
        return event.lstrip(b"\r\n")[-self._limit :].lstrip(b"\r\n")


class Meter:
    """Watches the bytes of one answer go by and knows at the end what the engine counted."""

    def __init__(self, is_stream: bool) -> None:
        self._splitter = EventSplitter() if is_stream else None
        self._tail = b""
        self._first_counts = b""
        self._last_counts = b""
        self.events = 0  # that carried data, [DONE] left out
        self.failed = False  # an event or body that is an error went by
        self.done = False  # [DONE] went by: the client has all of the answer

    @property
    def in_event(self) -> bool:
        return self._splitter is not None and self._splitter.in_event

    def feed(self, chunk: bytes) -> bool:
        """Did the chunk bring something of the answer (not merely a comment to keep the connection open)?"""
        if self._splitter is None:
            self._tail = chunk[-KEPT_BYTES:] if len(chunk) >= KEPT_BYTES else (self._tail + chunk)[-KEPT_BYTES:]
            return True
        before = self.events
        for event in self._splitter.feed(chunk):
            if event.startswith(DONE):
                self.done = True
                continue
            if event.startswith(b":"):
                continue
            self.events += 1
            self.failed = self.failed or event.startswith(_ERROR_EVENT)
            if b'"usage":' in event or b'"timings":' in event:
                self._first_counts = self._first_counts or event
                self._last_counts = event
        return self.events > before

    def usage(self) -> Usage:
        if self._splitter is None:
            return find_usage(self._tail)
        first, last = find_usage(self._first_counts), find_usage(self._last_counts)
        prompt = first.prompt_tokens if last.prompt_tokens is None else last.prompt_tokens
        generated = last.generated_tokens
        return Usage(prompt, (self.events or None) if generated is None else generated)


def find_usage(tail: bytes) -> Usage:
    """The counts in the end of a JSON text: `usage` of OpenAI's and Anthropic's shapes, else the engine's `timings`.

    A quote inside a JSON string is escaped, so the bytes `"usage":` stand only where the key stands.
    """
    usage, timings = _last_object(tail, b'"usage"'), _last_object(tail, b'"timings"')
    prompt = _count(usage, "prompt_tokens", "input_tokens")
    if prompt is not None:  # Anthropic's count leaves out what was reused; OpenAI's has no such key beside it
        prompt += _count(usage, "cache_read_input_tokens") or 0
    generated = _count(usage, "completion_tokens", "output_tokens")
    if prompt is None and (new := _count(timings, "prompt_n")) is not None:
        prompt = new + (_count(timings, "cache_n") or 0)
    if generated is None:
        generated = _count(timings, "predicted_n")
    return Usage(prompt, generated)


def _last_object(tail: bytes, key: bytes) -> dict[str, Any]:
    at = tail.rfind(key)
    if at < 0:
        return {}
    text = tail[at + len(key) :].decode("utf-8", "replace").lstrip().removeprefix(":").lstrip()
    try:
        value, _ = _decode(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _count(values: dict[str, Any], *names: str) -> int | None:
    for name in names:
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def error_event(body: bytes, in_event: bool) -> bytes:
    """`body` (JSON, one line) as an event; if an event is unfinished, it is ended first so that ours stands alone."""
    return (b"\n\n" if in_event else b"") + b"data: " + body + b"\n\n"
