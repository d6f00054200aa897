"""HTTP to the engine over its Unix socket: bytes out, bytes back, nothing read into them."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from yarl import URL

from moe_l2d.errors import BadRequest

CONNECT_TIMEOUT_S = 2.0
# Bodies beyond this go out in pieces: one write of many MiB would hold up every stream on the loop.
PIECE_BYTES = 64 * 1024
# The engine closes a connection that was idle for 5 s; ours must be given up well before, lest a request be sent into
# that. Idle ones each keep one of its HTTP threads busy, but there are never more than requests were at once.
KEEPALIVE_S = 2.0
# aiohttp would add these; the engine is to see what the client sent and no more.
_NOT_OURS = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")

# Raised before a byte of the request was sent; the only timeout of the session is the one for connecting.
NotConnected = (aiohttp.ClientConnectorError, aiohttp.ServerTimeoutError)
Broken = (aiohttp.ClientError, OSError, TimeoutError)


class Upstream:
    def __init__(self, socket_path: Path) -> None:
        connector = aiohttp.UnixConnector(path=str(socket_path), limit=0, keepalive_timeout=KEEPALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_NOT_OURS,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S, sock_read=None),
        )

    async def ask(
        self, method: str, target: str, headers: list[tuple[str, str]], body: bytes | None
    ) -> aiohttp.ClientResponse:
        """The engine's answer, its body unread; `target` is the raw path and query. Close it with close().

        Raises one of NotConnected or Broken, and BadRequest for a head that cannot be passed on.
        """
        data = body if body is None or len(body) <= PIECE_BYTES else _pieces(body)
        try:
            url = _url(target) if "?" in target else _url_of_path(target)
            return await self._session.request(method, url, headers=headers, data=data, allow_redirects=False)
        except ValueError as error:  # a target that is no URL, a header that is not UTF-8
            raise BadRequest(f"cannot pass the request's head on to the engine: {error}") from None

    async def close(self) -> None:
        await self._session.close()


def _url(target: str) -> URL:
    return URL(f"http://engine{target}", encoded=True)


# Of the few paths that there are; a query may be anything, and anybody's words.
_url_of_path = functools.lru_cache(maxsize=64)(_url)


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    view = memoryview(body)
    for start in range(0, len(body), PIECE_BYTES):
        yield bytes(view[start : start + PIECE_BYTES])
