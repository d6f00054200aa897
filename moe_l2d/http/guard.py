"""Who may talk to a loopback listener: programs of this machine, not web pages that a browser here shows.

A page can make a browser send requests to 127.0.0.1: by a name of its own that it lets resolve to it (the Host
header shows that name), or openly, from its own origin (the Origin header shows that).
"""

from __future__ import annotations

from urllib.parse import urlsplit

from moe_l2d.config import is_loopback
from moe_l2d.errors import Denied


def check_local(host: str | None, origin: str | None) -> None:
    """Denied unless both headers, where present, name the loopback (any port)."""
    if host is not None and not is_loopback(host_name(host)):
        raise Denied(
            f"cannot accept host '{host[:100]}': on a loopback address only localhost, 127.0.0.1 and [::1] are served"
        )
    if origin is not None and not is_loopback(urlsplit_host(origin)):
        raise Denied(f"cannot accept origin '{origin[:100]}': web pages of other hosts may not use this service")


def host_name(host: str) -> str:
    """"::1" of "[::1]:80", "localhost" of "localhost:80"; "" if malformed."""
    if host.startswith("["):
        name, bracket, port = host[1:].partition("]")
        return name if bracket and (not port or (port[0] == ":" and port[1:].isdigit())) else ""
    name, colon, port = host.partition(":")
    return name if not colon or port.isdigit() else ""


def urlsplit_host(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""
