#!/usr/bin/env python3
"""`make demo`: serve the demo model, ask it three questions over the OpenAI API, show the statistics, stop everything.

Standard library only. All that it makes is in one temporary folder, and the daemon dies with this process, so that
nothing is left over however it ends.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "models/moe-l2-demo.gguf"
USUAL_PORT = 11435
CONTEXT = 1024  # what the demo model was trained with
START_LIMIT_S = 120  # from the daemon's start until the model answers
STOP_LIMIT_S = 20  # the daemon's own stop ladder is shorter
REQUEST_LIMIT_S = 120

# (domain, prompt, most tokens): of the kinds that this small model has really learnt, see tools/demo_model.
QUESTIONS = (
    ("math", "Solve the equation 7x + 12 = 68.", 100),
    ("codegen", "Write a Python function called isleap.", 120),
    ("creative_write", "写一首诗。", 240),
)

BOLD, DIM, PLAIN = (
    ("\x1b[1m", "\x1b[2m", "\x1b[0m") if sys.stdout.isatty() and "NO_COLOR" not in os.environ else ("",) * 3
)


class DemoError(Exception):
    """Why the demo cannot go on; the text says what and what to do."""


@dataclass(frozen=True)
class Service:
    process: subprocess.Popen[bytes]
    port: int
    folder: Path

    @property
    def log(self) -> Path:
        return self.folder / "moe-l2d.log"

    @property
    def control_socket(self) -> Path:
        return self.folder / "run/control.sock"


def say(text: str = "") -> None:
    print(text, flush=True)


def free_port() -> int:
    """The usual port, or another one if that is taken."""
    for port in (USUAL_PORT, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise DemoError("cannot find a free port on 127.0.0.1")


def config_text(folder: Path, port: int) -> str:
    return f"""\
[server]
listen = "127.0.0.1:{port}"
[model]
path = "{MODEL}"
context = {CONTEXT}
[paths]
runtime_dir = "{folder}/run"
state_dir = "{folder}/state"
models_dir = "{MODEL.parent}"
"""


def die_with_parent() -> None:
    """Runs in the child: the kernel ends it when this program ends, even by SIGKILL."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


@contextmanager
def running_service() -> Iterator[Service]:
    """The daemon on a free port with everything in a temporary folder; stopped and removed at the end."""
    program = ROOT / ".venv/bin/moe-l2d"
    if not program.exists():
        raise DemoError(f"cannot start '{program}': it is not there; run 'make setup'")
    # In /tmp whatever $TMPDIR says: the path of a Unix socket has room for 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="moe-l2-demo-", dir="/tmp"))
    process = None
    try:
        for name in ("run", "state"):
            (folder / name).mkdir()
        port = free_port()
        config = folder / "moe-l2.toml"
        config.write_text(config_text(folder, port))
        with (folder / "moe-l2d.log").open("wb") as log:
            process = subprocess.Popen(
                [program, "--config", config],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl+C is for this program alone, which then stops the daemon in order
                preexec_fn=die_with_parent,
            )
        yield Service(process, port, folder)
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # a second Ctrl+C must not leave half of it behind
            signal.signal(number, signal.SIG_IGN)
        if process is not None:
            stop(process)
        shutil.rmtree(folder, ignore_errors=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, wait, SIGKILL to the daemon's session. The engine, in a group of its own, dies with the daemon."""
    process.terminate()
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        say(f"moe-l2d did not stop within {STOP_LIMIT_S} s: killed")
        process.kill()
        process.wait()


def wait_until_ready(service: Service) -> None:
    """Wait for /ready, with a dot a second."""
    started = time.monotonic()
    print("starting moe-l2d ", end="", flush=True)
    dots = 0
    while (elapsed := time.monotonic() - started) < START_LIMIT_S:
        if service.process.poll() is not None:
            say()
            raise DemoError(f"cannot start moe-l2d: it ended with exit code {service.process.returncode}")
        if is_ready(service.port):
            say(f" ready in {elapsed:.1f} s on http://127.0.0.1:{service.port}")
            return
        if elapsed > dots:
            dots += 1
            print(".", end="", flush=True)
        time.sleep(0.05)
    say()
    raise DemoError(f"cannot reach moe-l2d: not ready within {START_LIMIT_S} s")


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/ready")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def stream_answer(port: int, prompt: str, max_tokens: int) -> Iterator[str]:
    """The pieces of the answer as they arrive (server-sent events of the OpenAI chat API)."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_LIMIT_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise DemoError(
                f"cannot ask '{prompt}': status {response.status}, {response.read(500).decode(errors='replace')}"
            )
        for line in response:
            data = line.strip().removeprefix(b"data: ")
            if data == line.strip() or data == b"[DONE]":
                continue
            event = json.loads(data)
            if "error" in event:
                raise DemoError(f"cannot ask '{prompt}': {event['error']}")
            for choice in event.get("choices", ()):
                yield choice.get("delta", {}).get("content") or ""
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DemoError(f"cannot ask '{prompt}': {error or type(error).__name__}") from error
    finally:
        connection.close()


def ask(service: Service, domain: str, prompt: str, max_tokens: int) -> None:
    say(f"\n{BOLD}> {prompt}{PLAIN}  {DIM}({domain}){PLAIN}")
    started = time.monotonic()
    first = 0.0
    count = 0
    for piece in stream_answer(service.port, prompt, max_tokens):
        if piece:
            first = first or time.monotonic() - started
            count += 1
            print(piece, end="", flush=True)
    if not count:
        raise DemoError(f"cannot ask '{prompt}': the answer was empty")
    elapsed = time.monotonic() - started
    say(f"\n{DIM}[first token after {first * 1000:.0f} ms, {count} pieces in {elapsed:.2f} s]{PLAIN}")


def show_stats(service: Service) -> None:
    say(f"\n{BOLD}$ moe-l2ctl stats{PLAIN}")
    command = [str(ROOT / ".venv/bin/moe-l2ctl"), "--socket", str(service.control_socket), "stats"]
    if subprocess.run(command, timeout=30).returncode != 0:
        raise DemoError("cannot show the statistics: moe-l2ctl failed, its message is above")


def tail(path: Path, lines: int = 25) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else ""


def run() -> None:
    with running_service() as service:
        try:
            wait_until_ready(service)
            for question in QUESTIONS:
                ask(service, *question)
            show_stats(service)
        except DemoError:
            say(f"\nthe end of the daemon's log:\n{tail(service.log)}\n")
            raise
        print("\nstopping ", end="", flush=True)
    say("done; nothing is left running")


def end_orderly(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end_orderly)
    try:
        run()
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; everything is stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
