"""Starting the engine's process so that it cannot outlive the daemon, and ending it for certain."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import re
import signal
from asyncio.subprocess import Process
from collections import deque

from moe_l2d.engine.command import Command

log = logging.getLogger("moe_l2d.engine")

PR_SET_PDEATHSIG = 1
# How long the engine may take after SIGTERM. It never ends by itself while requests are deferred inside it.
# It has nothing to save, and one that generates may hang on SIGTERM, its clients with it.
TERM_S = 2.0
# How long the kernel may take to end and reap it after SIGKILL; longer means it hangs in a driver.
KILL_S = 10.0
# Under memory pressure the kernel takes the engine before the daemon, which can start it again.
OOM_SCORE_ADJ = 500
KEPT_LINES = 20
MAX_LINE = 4000
_HARMLESS = re.compile(r"^\S+ [ID] ")  # llama.cpp's levels
# Once it serves, its words may quote a request. Only these are about itself: our plug-in's, ggml's, the C++ run time's.
_OF_ITSELF = re.compile(r"moe-l2: |GGML_ASSERT|\bggml_|\bCUDA error|^terminate called|std::bad_alloc|out of memory")
_OF_REQUESTS = re.compile(r"^\S+ [IWED] (srv|slot|que|res|chat|http)\b|exception")
_PLUGIN = re.compile(r"(?:^| )([IWE])? ?(moe-l2: .*)")
_LEVELS = {"W": logging.WARNING, "E": logging.ERROR}
_TELLING = re.compile(r"(?i:\b(error|failed|fatal|abort|cannot|couldn't|unable|invalid)\b)|GGML_ASSERT|(^|\s)E ")
_libc = ctypes.CDLL(None, use_errno=True)


async def spawn(command: Command) -> Process:
    """Start it; OSError if that fails.

    It gets a session (and so a process group) of its own, and SIGKILL when the thread that forked it ends: call
    this on the main thread.
    """
    parent = os.getpid()

    def in_child() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)

    process = await asyncio.create_subprocess_exec(
        *command.argv,
        env=dict(command.env),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        pass_fds=command.pass_fds,
        start_new_session=True,
        preexec_fn=in_child,
    )
    with contextlib.suppress(OSError), open(f"/proc/{process.pid}/oom_score_adj", "w") as file:
        file.write(str(OOM_SCORE_ADJ))
    return process


async def end(process: Process, term_s: float = TERM_S) -> str:
    """The stop ladder: TERM, wait, KILL, reap. Returns how it ended."""
    if process.returncode is None:
        _signal(process, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), term_s)
        except TimeoutError:
            log.warning("the engine (pid %d) did not end within %g s of SIGTERM, sending SIGKILL", process.pid, term_s)
            return await kill(process)
    _signal(process, signal.SIGKILL)  # what it left in its process group
    return how_ended(process.returncode)


async def kill(process: Process) -> str:
    """KILL and reap, for an engine that is not asked any more."""
    _signal(process, signal.SIGKILL)
    try:
        await asyncio.wait_for(process.wait(), KILL_S)
    except TimeoutError:
        log.error("the engine (pid %d) is still there %g s after SIGKILL, it hangs in the kernel", process.pid, KILL_S)
    return how_ended(process.returncode)


def _signal(process: Process, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def how_ended(code: int | None) -> str:
    """For people: "was killed by SIGKILL", "ended with status 1"."""
    if code is None:
        return "does not end"
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


class EngineLog:
    """The engine's output: what it says of itself goes to the log, the last lines are kept to explain its end.

    While it serves, it also says what is wrong with requests, in their own words: these lines go nowhere, since no
    prompt may be logged or shown.
    """

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.serving = False

    def add(self, line: str) -> None:
        if self.serving and (_OF_REQUESTS.search(line) or not _OF_ITSELF.search(line)):
            return
        self.lines.append(line)
        ours = _PLUGIN.search(line)
        if ours is not None:
            log.log(_LEVELS.get(ours[1], logging.DEBUG), "engine: %s", ours[2])
        else:
            log.debug("engine: %s", line)

    @property
    def reason(self) -> str:
        """The last line that sounds like an error; "" without any."""
        telling = [line for line in self.lines if _TELLING.search(line) and not _HARMLESS.match(line)]
        return telling[-1] if telling else ""

    async def pump(self, stream: asyncio.StreamReader) -> None:
        """Read until the engine closes its output; a line without end is cut at MAX_LINE."""
        rest = b""
        while chunk := await stream.read(65536):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > MAX_LINE:
                lines.append(rest)
                rest = b""
            for line in lines:
                self.add(line[:MAX_LINE].decode("utf-8", "replace").rstrip())
        if rest:
            self.add(rest.decode("utf-8", "replace"))
