"""A service manager for one Type=notify daemon: the part of systemd that moe-l2d talks to, for tests without systemd.

The manager owns the notification socket, starts the program with the variables that systemd would set, and keeps all
messages with the time at which they came.
"""

from __future__ import annotations

import array
import os
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

STOP_LIMIT_S = 20
MAX_DESCRIPTORS = 16


@dataclass(frozen=True)
class Message:
    """One datagram: its NAME=value lines, and when it came (monotonic)."""

    at: float
    fields: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.fields


class NotifyManager:
    """Start a program as systemd does, collect what it says. Use as a context manager: the program ends with it."""

    def __init__(self, command: Sequence[str], folder: Path, watchdog_s: float = 0.0, log: Path | None = None) -> None:
        self.command = list(command)
        self.log = log or folder / "daemon.log"
        self.watchdog_s = watchdog_s
        self.messages: list[Message] = []
        self._path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._path))
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> NotifyManager:
        environment = {**os.environ, "NOTIFY_SOCKET": str(self._path), "LISTEN_FDS": "0", "LISTEN_FDNAMES": ""}
        own_pid = "LISTEN_PID=$$ "  # systemd names the pid of the program itself: sh knows it, exec keeps it
        if self.watchdog_s:
            environment["WATCHDOG_USEC"] = str(int(self.watchdog_s * 1e6))
            own_pid += "WATCHDOG_PID=$$ "
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", f'{own_pid}exec "$@"', "sh", *self.command],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._socket.close()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def receive(self, timeout_s: float) -> Message | None:
        """The next message, or None if none came in time. Descriptors are closed: a sender may wait for that."""
        self._socket.settimeout(max(timeout_s, 0.001))
        try:
            data, ancillary, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(4 * MAX_DESCRIPTORS))
        except TimeoutError:
            return None
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                descriptors = array.array("i", content[: len(content) - len(content) % 4])
                for descriptor in descriptors:
                    os.close(descriptor)
        lines = (line.partition("=") for line in data.decode().splitlines())
        message = Message(time.monotonic(), {name: value for name, _, value in lines})
        self.messages.append(message)
        return message

    def wait_for(self, what: Callable[[Message], bool], timeout_s: float = 15.0) -> Message:
        """The first message from now on for which `what` is true; fails with all that was heard instead."""
        end = time.monotonic() + timeout_s
        while (left := end - time.monotonic()) > 0:
            message = self.receive(min(left, 0.2))
            if message is not None and what(message):
                return message
            if message is None and self.process is not None and self.process.poll() is not None:
                break
        heard = [dict(message.fields) for message in self.messages]
        code = self.process.poll() if self.process else None
        raise AssertionError(f"not heard within {timeout_s} s; exit code {code}, heard {heard}\n{self.log_tail()}")

    def collect(self, seconds: float) -> list[Message]:
        """All messages of the next so many seconds."""
        end = time.monotonic() + seconds
        found = []
        while (left := end - time.monotonic()) > 0:
            if message := self.receive(left):
                found.append(message)
        return found

    def log_tail(self, lines: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
