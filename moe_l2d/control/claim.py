"""One daemon a runtime directory and a control socket: who comes second is refused in one sentence."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path

from moe_l2d.errors import Busy, Denied, MoeError

LOCK = "moe-l2d.lock"
# How long a living daemon may take to accept; one that hangs longer still holds the lock file.
CONNECT_S = 2.0
SOCKET_MODE = 0o660
BACKLOG = 64


def lock_runtime_dir(directory: Path) -> int:
    """Make the directory if it is missing, and hold its lock until the returned descriptor is closed.

    The lock ends with the process, however it ends; so two that start at once cannot both win.
    """
    try:
        directory.mkdir(mode=0o750, parents=True, exist_ok=True)
        fd = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o640)
    except OSError as error:
        raise _cannot_use(directory, error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 20, 0).decode("ascii", "replace").strip()
        os.close(fd)
        who = f" (pid {pid})" if pid else ""
        raise Busy(f"cannot use the runtime directory '{directory}': another moe-l2d{who} uses it; "
                   f"stop it, or set paths.runtime_dir") from None
    os.truncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


def bind_socket(path: Path) -> socket.socket:
    """The control socket, bound with mode 0660 and not yet listening; a stale one is replaced."""
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        sock.bind(str(path))
        # nobody can connect before listen(), so there is no moment with the wrong mode
        path.chmod(SOCKET_MODE)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise _taken(path) from None
        raise _cannot_use(path, error) from None
    sock.setblocking(False)
    return sock


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise _cannot_use(path, error) from None
    if not stat.S_ISSOCK(mode):
        raise Busy(f"cannot use the control socket '{path}': there is a file that is no socket; "
                   f"remove it, or set control.socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            pass  # stale
        except FileNotFoundError:
            return
        except TimeoutError:
            raise _taken(path) from None
        except OSError as error:
            raise _cannot_use(path, error) from None
        else:
            raise _taken(path)
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _cannot_use(path, error) from None


def _taken(path: Path) -> MoeError:
    cause = "another moe-l2d answers on it"
    return Busy(f"cannot use the control socket '{path}': {cause}; stop it, or set control.socket")


def _cannot_use(path: Path, error: OSError) -> MoeError:
    cause = (error.strerror or str(error)).lower()
    kind = Denied if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else MoeError
    return kind(f"cannot use '{path}': {cause}; give user '{os.getuid()}' write access, or set paths.runtime_dir")
