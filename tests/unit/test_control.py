"""moe_l2d/api.py and moe_l2d/control/"""

from __future__ import annotations

import asyncio
import os
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_l2ctl import main as ctl
from moe_l2d import api
from moe_l2d.api import Access
from moe_l2d.control import claim, handlers, peer
from moe_l2d.control.server import MAX_CONNECTIONS, ControlServer
from moe_l2d.engine.state import EngineStatus, Phase
from moe_l2d.errors import BadRequest, Busy, Denied, EngineNotReady, MoeError, NotFound

RIGHTS = peer.Rights(own_uid=500, readers=70, changers=71)


class FakeDaemon:
    """What the handlers need, with nothing behind it."""

    def __init__(self) -> None:
        self.engine_status = EngineStatus(Phase.LOADING, 1, 1, 0, "", 0.0)
        self.done: list[str] = []
        self.waits_cancelled = 0

    def status(self) -> Any:
        return {"version": "x"}

    def stats(self) -> Any:
        return {"phase": "loading"}

    def config_answer(self) -> Any:
        return {"file": None, "config": {}}

    async def wait_ready(self, timeout_s: float) -> None:
        try:
            await asyncio.sleep(timeout_s)
        except asyncio.CancelledError:
            self.waits_cancelled += 1
            raise
        raise EngineNotReady("cannot serve")

    def restart_engine(self) -> None:
        self.done.append("restart")

    def shut_down(self) -> None:
        self.done.append("shutdown")


def talk(directory: Path, client: Callable[[str], Any], daemon: FakeDaemon | None = None,
         rights: peer.Rights | None = None) -> Any:
    """Run `client(path)` in a thread against a control server; its result."""
    path = directory / "c.sock"

    async def serve() -> Any:
        server = ControlServer(path, daemon or FakeDaemon(), rights or peer.rights())
        await server.start(claim.bind_socket(path))
        try:
            return await asyncio.wait_for(asyncio.to_thread(client, str(path)), 20)
        finally:
            await server.stop()
            assert not path.exists()

    return asyncio.run(serve())


def exchange(data: bytes) -> Callable[[str], list[Any]]:
    """A client that sends `data` and reads all answers until the server hangs up."""

    def client(path: str) -> list[Any]:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(5)
            s.connect(path)
            s.sendall(data)
            s.shutdown(socket.SHUT_WR)
            unpacker = msgpack.Unpacker()
            while chunk := s.recv(65536):
                unpacker.feed(chunk)
            return list(unpacker)

    return client


def frame(method: str, **more: Any) -> bytes:
    packed: bytes = msgpack.packb({"v": 1, "id": 1, "method": method, "params": {}} | more)
    return packed


def test_every_row_is_served_and_commanded() -> None:
    """Each row of the table has a handler and a command of moe-l2ctl, and there is none without a row."""
    assert set(handlers.ONCE) == {m.name for m in api.TABLE if not m.streams}
    assert set(handlers.STREAMS) == {m.name for m in api.TABLE if m.streams}
    assert {name for module in ctl.COMMANDS for name in module.METHODS} == set(api.METHODS)
    assert len(api.METHODS) == len(api.TABLE)


def test_several_frames_back_to_back(short_dir: Path) -> None:
    """Frames that come in one piece are answered in order, each with its id."""
    answers = talk(short_dir, exchange(frame("status", id=7) + frame("stats", id="x")))
    assert answers == [
        {"id": 7, "ok": True, "result": {"version": "x"}},
        {"id": "x", "ok": True, "result": {"phase": "loading"}},
    ]


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (frame("status", v=2), "bad_request", "version '2'"),
        (frame("status", v=True), "bad_request", "version"),
        (frame("fly"), "not_found", "'fly'"),
        (frame("status", params={"x": 1}), "bad_request", "no parameter 'x'"),
        (frame("watch", params={"interval_s": 0}), "bad_request", "from 0.1 to 3600"),
        (frame("watch", params={"interval_s": "1"}), "bad_request", "interval_s"),
        (frame("status", params=[]), "bad_request", "'params' must be a map"),
        (frame("status", extra=1), "bad_request", "unknown key 'extra'"),
        (msgpack.packb([1, 2]), "bad_request", "must be a map"),
        (b"GET / HTTP/1.1\r\n\r\n", "bad_request", "cannot read"),
        (b"\xc1", "bad_request", "no msgpack"),
        (msgpack.packb("x" * 2_000_000), "too_large", "1048576"),
        (b"\x91" * 100_000, "bad_request", "cannot read"),
    ],
)
def test_wrong_frames_get_one_sentence(short_dir: Path, data: bytes, code: str, words: str) -> None:
    """Whatever is wrong with a frame, the answer is one sentence with a stable word."""
    first = talk(short_dir, exchange(data))[0]
    assert first["ok"] is False
    assert first["error"]["code"] == code
    assert words in first["error"]["message"]
    assert "\n" not in first["error"]["message"]


KEYS = st.sampled_from(["v", "id", "method", "params", "q"])
LEAVES = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(sorted(api.METHODS)) | st.binary(max_size=3)


@given(st.recursive(LEAVES, lambda x: st.lists(x, max_size=3) | st.dictionaries(KEYS, x)))
def test_any_value_is_a_call_or_refused(value: object) -> None:
    """No decoded value makes the parser fail in another way than BadRequest or NotFound."""
    try:
        call = api.parse_call(value)
    except (BadRequest, NotFound):
        return
    assert call.method in api.TABLE


def test_watch_streams_until_the_caller_leaves(short_dir: Path) -> None:
    """watch answers again and again; when the caller hangs up, the server is done with it."""

    def client(path: str) -> int:
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(5)
            s.connect(path)
            s.sendall(frame("watch", params={"interval_s": 0.1}))
            unpacker, seen = msgpack.Unpacker(), 0
            while seen < 3:
                unpacker.feed(s.recv(65536))
                seen += len(list(unpacker))
            return seen

    assert talk(short_dir, client) == 3


def test_leaving_cancels_the_wait(short_dir: Path) -> None:
    """A caller that hangs up while it waits costs nothing more."""
    daemon = FakeDaemon()

    def client(path: str) -> None:
        with socket.socket(socket.AF_UNIX) as s:
            s.connect(path)
            s.sendall(frame("ready.wait", params={"timeout_s": 100}))
            threading.Event().wait(0.1)
        threading.Event().wait(0.4)

    talk(short_dir, client, daemon)
    assert daemon.waits_cancelled == 1


def test_wait_times_out_with_its_own_word(short_dir: Path) -> None:
    """ready.wait that runs out is a timeout that names the phase; with an engine that failed it is that error."""
    answer = talk(short_dir, exchange(frame("ready.wait", params={"timeout_s": 0.01})))[0]
    assert answer["error"]["code"] == "timeout"
    assert "loading" in answer["error"]["message"]
    failed = FakeDaemon()
    failed.engine_status = EngineStatus(Phase.FAILED, None, 1, 0, "x", 0.0)
    answer = talk(short_dir, exchange(frame("ready.wait", params={"timeout_s": 0.01})), failed)[0]
    assert answer["error"]["code"] == "engine_not_ready"


def test_changes_reach_the_daemon(short_dir: Path) -> None:
    """engine.restart and shutdown are accepted and done."""
    daemon = FakeDaemon()
    talk(short_dir, exchange(frame("engine.restart") + frame("shutdown")), daemon)
    assert daemon.done == ["restart", "shutdown"]


def test_too_many_connections(short_dir: Path) -> None:
    """One connection more than allowed is refused in one sentence, and the others go on."""

    def client(path: str) -> Any:
        held = []
        for _ in range(MAX_CONNECTIONS):
            s = socket.socket(socket.AF_UNIX)
            s.settimeout(5)
            s.connect(path)
            s.sendall(frame("status"))
            s.recv(1000)
            held.append(s)
        refused = exchange(b"")(path)
        for s in held:
            s.close()
        return refused

    assert talk(short_dir, client)[0]["error"]["code"] == "busy"


@pytest.mark.parametrize(
    ("uid", "groups", "read", "change"),
    [
        (0, (), True, True),
        (500, (), True, True),
        (9, (70,), True, False),
        (9, (71,), True, True),
        (9, (1,), False, False),
    ],
)
def test_rights(uid: int, groups: tuple[int, ...], read: bool, change: bool) -> None:
    """Root and the own user may all; moe-l2 may read; moe-l2-admin may read and change; nobody else anything."""
    who = peer.Peer(1, uid, frozenset(groups))
    for access, allowed in ((Access.READ, read), (Access.CHANGE, change)):
        if allowed:
            peer.check(who, RIGHTS, access)
        else:
            with pytest.raises(Denied):
                peer.check(who, RIGHTS, access)


def test_missing_groups_allow_nobody() -> None:
    """Groups that do not exist on the machine give no right to anybody."""
    with pytest.raises(Denied):
        peer.check(peer.Peer(1, 9, frozenset({1, 2})), peer.Rights(500, None, None), Access.READ)


def test_peer_of_a_socket() -> None:
    """The kernel's record of who connected has our pid, uid and groups."""
    a, b = socket.socketpair(socket.AF_UNIX)
    who = peer.of(a)
    assert (who.pid, who.uid) == (os.getpid(), os.getuid())
    assert who.groups == {os.getgid(), *os.getgroups()}
    a.close()
    b.close()


def test_socket_mode_and_stale_socket(short_dir: Path) -> None:
    """The socket has mode 0660; a stale one is replaced; a living one and a file that is none are not touched."""
    path = short_dir / "c.sock"
    first = claim.bind_socket(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660
    first.close()
    second = claim.bind_socket(path)
    second.listen()
    with pytest.raises(Busy, match="another moe-l2d answers"):
        claim.bind_socket(path)
    second.close()
    path.unlink()
    path.write_text("mine")
    with pytest.raises(Busy, match="no socket"):
        claim.bind_socket(path)
    assert path.read_text() == "mine"


def test_lock(short_dir: Path) -> None:
    """The runtime directory is made and locked; who comes second is told the pid; the lock ends with its holder."""
    directory = short_dir / "run"
    fd = claim.lock_runtime_dir(directory)
    with pytest.raises(Busy, match=f"pid {os.getpid()}"):
        claim.lock_runtime_dir(directory)
    os.close(fd)
    os.close(claim.lock_runtime_dir(directory))
    (short_dir / "file").write_text("")
    with pytest.raises(MoeError, match="not a directory"):
        claim.lock_runtime_dir(short_dir / "file" / "run")
