"""What of a message's head goes on to the other side: all but what concerns this one connection."""

from __future__ import annotations

from collections.abc import Iterable

# RFC 9110, 7.6.1, with the older Proxy-Connection
HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_NOT_TO_ENGINE = HOP_BY_HOP | {"content-length", "expect"}
Headers = list[tuple[str, str]]


def request_headers(headers: Iterable[tuple[str, str]], body_bytes: int | None, closing: bool = False) -> Headers:
    """For the engine. The body was read whole, so its length (None: there is no body) replaces any framing.

    `closing`: the connection is for this request alone.
    """
    pairs = list(headers)
    dropped = _NOT_TO_ENGINE | _named_by_connection(pairs)
    # aiohttp's client loses one of two headers whose names differ in case only: all take the first's spelling
    spelling: dict[str, str] = {}
    kept = [(spelling.setdefault(low, name), value) for name, value in pairs if (low := name.lower()) not in dropped]
    if body_bytes is not None:
        kept.append(("Content-Length", str(body_bytes)))
    if closing:
        kept.append(("Connection", "close"))
    return kept


def answer_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    """For the client. The engine lets every web page read its answers with the user's credentials: not so here."""
    pairs = list(headers)
    dropped = HOP_BY_HOP | _named_by_connection(pairs)
    return [
        (name, value)
        for name, value in pairs
        if (low := name.lower()) not in dropped and not low.startswith("access-control-")
    ]


def _named_by_connection(pairs: Headers) -> set[str]:
    values = [value for name, value in pairs if name.lower() == "connection"]
    return {low for value in values for word in value.split(",") if (low := word.strip().lower()) != "close"}
