"""moe-l2ctl chat"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from moe_l2ctl import format
from moe_l2ctl.arguments import amount
from moe_l2ctl.client import Client
from moe_l2d.errors import BadRequest, EngineError, MoeError, NotFound, NotRunning, QueueFull, Timeout, TooLarge

METHODS = ("status",)
# A prompt may be worked on for minutes before the first token.
SILENCE_S = 600.0
_BY_STATUS: dict[int, type[MoeError]] = {
    400: BadRequest, 404: NotFound, 413: TooLarge, 429: QueueFull, 502: EngineError, 503: NotRunning, 504: Timeout,
}  # fmt: skip


def register(commands: Any, common: argparse.ArgumentParser) -> None:
    p = commands.add_parser("chat", parents=[common], help="ask the model one thing and print its answer as it comes")
    p.add_argument("text", metavar="TEXT", nargs="+", help="what to ask; - reads it from standard input")
    p.add_argument("--system", metavar="TEXT", help="a system message to go before it")
    p.add_argument("--max-tokens", type=int, metavar="N", help="longest answer")
    p.add_argument("--temperature", type=amount, metavar="T", help="0 is the same answer every time")
    p.add_argument("--url", metavar="URL", help="of the HTTP API (default: asked from the daemon)")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import http.client

    url = args.url or _address(args.socket)
    try:
        parts = urlsplit(url if "//" in url else f"//{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None:
        raise BadRequest(f"cannot use URL '{url}': it must be http://ADDRESS:PORT")
    connection = http.client.HTTPConnection(host, port or 80, timeout=SILENCE_S)
    try:
        answer = _Answer(echo=not args.json)
        answer.read(_post(connection, _body(args)))
    except TimeoutError:
        raise Timeout(f"cannot chat over '{url}': nothing came for {SILENCE_S:g} s") from None
    except (OSError, http.client.HTTPException) as error:
        cause = (getattr(error, "strerror", None) or str(error) or type(error).__name__).lower()
        raise NotRunning(f"cannot chat over '{url}': {cause}; see 'moe-l2ctl status'") from None
    finally:
        connection.close()
    answer.finish()
    if args.json:
        print(format.to_json(answer.summary()))
    else:
        print()
        print(answer.speed_line(), file=sys.stderr)
    return 0


def _address(socket_path: str) -> str:
    with Client(socket_path) as client:
        return f"http://{client.call('status')['address']}"


def _body(args: argparse.Namespace) -> dict[str, Any]:
    text = sys.stdin.read() if args.text == ["-"] else " ".join(args.text)
    if not text.strip():
        raise BadRequest("cannot chat: TEXT is empty; say what to ask")
    messages = [{"role": "system", "content": args.system}] if args.system else []
    body: dict[str, Any] = {"messages": [*messages, {"role": "user", "content": text}], "stream": True}
    if args.max_tokens is not None:
        body["max_tokens"] = args.max_tokens
    if args.temperature is not None:
        body["temperature"] = args.temperature
    return body


def _post(connection: Any, body: dict[str, Any]) -> Any:
    import json

    connection.request("POST", "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raw = response.read()
        try:
            message = json.loads(raw)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = raw[:200].decode("utf-8", "replace")
        kind = _BY_STATUS.get(response.status, MoeError)
        raise kind(message or f"cannot chat: the daemon answered with status {response.status}")
    return response


class _Answer:
    """Reads a stream of server-sent events; `echo` prints the text as it comes."""

    def __init__(self, echo: bool) -> None:
        self.echo = echo
        self.text = ""
        self.pieces = 0
        self.done = False
        self.timings: dict[str, Any] = {}
        self.began = time.monotonic()
        self.first: float | None = None
        self.last = self.began

    def read(self, response: Any) -> None:
        import json

        for line in response:
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                self.done = True  # but read on to the end: hanging up before it looks like leaving
                continue
            event = json.loads(data)
            if "error" in event:
                error = event["error"]
                raise EngineError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
            self.timings = event.get("timings") or self.timings
            for choice in event.get("choices", ()):
                delta = choice.get("delta") or {}
                self.piece((delta.get("reasoning_content") or "") + (delta.get("content") or ""))

    def piece(self, text: str) -> None:
        if not text:
            return
        self.last = time.monotonic()
        self.first = self.first or self.last
        self.pieces += 1
        self.text += text
        if self.echo:
            try:
                print(text, end="", flush=True)
            except BrokenPipeError:  # our reader has enough; not to be taken for the connection's
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise SystemExit(0) from None

    def finish(self) -> None:
        if not self.done:
            raise EngineError("cannot finish the answer: the stream ended in the middle; see 'moe-l2ctl status'")

    @property
    def tokens(self) -> int:
        return int(self.timings.get("predicted_n", self.pieces))

    @property
    def tokens_per_s(self) -> float | None:
        ms = self.timings.get("predicted_ms")
        if ms:
            return 1e3 * self.tokens / float(ms)
        seconds = self.last - (self.first or self.last)
        return (self.pieces - 1) / seconds if seconds > 0 else None

    def summary(self) -> dict[str, Any]:
        first = None if self.first is None else self.first - self.began
        return {"text": self.text, "tokens": self.tokens, "tokens_per_s": self.tokens_per_s, "first_token_s": first}

    def speed_line(self) -> str:
        first = "" if self.first is None else f", first after {1e3 * (self.first - self.began):.0f} ms"
        return f"[{self.tokens} tokens, {format.rate(self.tokens_per_s)} tokens/s{first}]"
