"""Who is at the other end of a Unix socket, and what that one may do."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass
from typing import Protocol

from moe_l2d.api import Access
from moe_l2d.errors import Denied

READERS = "moe-l2"
CHANGERS = "moe-l2-admin"
SO_PEERGROUPS = 59
# getsockopt() of Python takes 1024 bytes at most: 256 groups
PEERGROUPS_ROOM = 1024


@dataclass(frozen=True)
class Peer:
    pid: int
    uid: int
    groups: frozenset[int]  # primary and supplementary


@dataclass(frozen=True)
class Rights:
    """Who may do what; a group that does not exist is None."""

    own_uid: int
    readers: int | None
    changers: int | None


class HasOptions(Protocol):
    def getsockopt(self, level: int, optname: int, buflen: int = ..., /) -> bytes: ...


def check(peer: Peer, rights: Rights, access: Access) -> None:
    """Denied unless `peer` may do what needs `access`. Pure."""
    if peer.uid in (0, rights.own_uid):
        return
    allowed = {rights.changers} if access is Access.CHANGE else {rights.readers, rights.changers}
    if peer.groups & allowed:
        return
    group = CHANGERS if access is Access.CHANGE else READERS
    verb = "change moe-l2d" if access is Access.CHANGE else "inspect moe-l2d"
    raise Denied(f"cannot {verb} as user '{peer.uid}': only root and members of the group {group} may; "
                 f"use sudo, or 'usermod -aG {group} USER' and log in again")


def of(sock: HasOptions) -> Peer:
    """The process that connected `sock`, as the kernel recorded it then."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, PEERGROUPS_ROOM)
        groups = struct.unpack(f"{len(raw) // 4}I", raw)
    except OSError:  # more than fit
        groups = _group_list(uid, gid)
    return Peer(pid, uid, frozenset((gid, *groups)))


def rights() -> Rights:
    return Rights(os.getuid(), _gid(READERS), _gid(CHANGERS))


def _group_list(uid: int, gid: int) -> tuple[int, ...]:
    try:
        return tuple(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except KeyError:
        return ()


def _gid(name: str) -> int | None:
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None
