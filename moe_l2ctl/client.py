"""One conversation with moe-l2d over its control socket."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import msgpack

from moe_l2d import api
from moe_l2d.errors import Denied, MoeError, NotRunning, Timeout, from_code

# A daemon that is well answers within milliseconds.
ANSWER_S = 10.0


class Client:
    """Connects at once: NotRunning or Denied if that fails."""

    def __init__(self, path: str, timeout_s: float = ANSWER_S) -> None:
        self._path = path
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sock.settimeout(timeout_s)
        self._unpacker = msgpack.Unpacker(max_buffer_size=api.MAX_FRAME * 16, raw=False)
        self._number = 0
        try:
            self._sock.connect(path)
        except PermissionError:
            self.close()
            raise Denied(f"cannot connect to moe-l2d at '{path}': permission denied; use sudo, "
                         f"or become a member of the group moe-l2") from None
        except (FileNotFoundError, ConnectionRefusedError):
            self.close()
            if os.path.exists(path) and not stat.S_ISSOCK(os.stat(path).st_mode):
                raise NotRunning(f"cannot connect to moe-l2d at '{path}': it is no socket; name its socket with "
                                 f"--socket") from None
            raise NotRunning(f"cannot connect to moe-l2d at '{path}': it is not running; "
                             f"start it with 'systemctl start moe-l2d', or name its socket with --socket") from None
        except OSError as error:
            self.close()
            cause = (error.strerror or str(error)).lower()
            raise NotRunning(f"cannot connect to moe-l2d at '{path}': {cause}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._sock.close()

    def call(self, method: str, **params: Any) -> Any:
        """The result of one call; the error that the daemon names."""
        return next(self.stream(method, **params))

    def stream(self, method: str, **params: Any) -> Iterator[Any]:
        """Results until the daemon ends the conversation."""
        self._number += 1
        frame = {"v": api.VERSION, "id": self._number, "method": method, "params": params}
        try:
            self._sock.sendall(msgpack.packb(frame))
            while True:
                answer = self._receive(method)
                if not answer.get("ok"):
                    error = answer.get("error") or {}
                    raise from_code(str(error.get("code")), str(error.get("message")))
                yield answer.get("result")
        except TimeoutError:
            raise Timeout(f"cannot call '{method}': moe-l2d at '{self._path}' did not answer in "
                          f"{self._sock.gettimeout():g} s") from None
        except OSError as error:
            cause = (error.strerror or str(error)).lower()
            raise NotRunning(f"cannot call '{method}': moe-l2d at '{self._path}' hung up ({cause})") from None

    def _receive(self, method: str) -> dict[str, Any]:
        while True:
            try:
                answer = self._unpacker.unpack()
            except msgpack.OutOfData:
                chunk = self._sock.recv(65536)
                if not chunk:
                    raise NotRunning(f"cannot call '{method}': moe-l2d at '{self._path}' hung up") from None
                self._unpacker.feed(chunk)
                continue
            if not isinstance(answer, dict):
                raise MoeError(f"cannot read the answer of '{self._path}': it is no moe-l2d")
            return answer
