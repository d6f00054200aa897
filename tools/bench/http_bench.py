"""What the HTTP benchmarks share: a moe-l2d in a process of its own over the paced engine, and a lean client."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import gguf
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
PACED = Path(__file__).resolve().parent / "paced_engine.py"
READY_S = 30.0
_STAMP = re.compile(rb'"due":(\d+),"sent":(\d+)')


@dataclass(frozen=True)
class Daemon:
    pid: int
    port: int
    engine_socket: str

    @property
    def rss_kb(self) -> int:
        """Resident memory of the daemon's own process, without the engine."""
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1])
        raise RuntimeError(f"no VmRSS for process {self.pid}")

    @property
    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def daemon(slots: int) -> Iterator[Daemon]:
    """moe-l2d with a configuration of its own over the paced engine, ready to serve."""
    root = Path(tempfile.mkdtemp(prefix="ml2b", dir="/tmp"))
    engine = root / "engine"
    engine.mkdir()
    program = engine / "llama-server"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{PACED}" "$@"\n')
    program.chmod(0o755)
    _write_model(root / "paced.gguf")
    (root / "run").mkdir()
    config = root / "moe-l2.toml"
    config.write_text(
        f'[server]\nlisten = "127.0.0.1:0"\n[model]\npath = "{root}/paced.gguf"\n[engine]\ndir = "{engine}"\n'
        f'slots = {slots}\n[paths]\nruntime_dir = "{root}/run"\nstate_dir = "{root}/state"\nmodels_dir = "{root}"\n'
    )
    log_path = root / "log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moe_l2d", "--config", str(config)],
            cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        try:
            port = _wait_ready(process, log_path)
            yield Daemon(process.pid, port, str(root / "run" / "engine" / "engine.sock"))
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            shutil.rmtree(root, ignore_errors=True)


def _write_model(path: Path) -> None:
    """A model file without experts, so that the daemon serves it without the plug-in."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("paced")
    writer.add_block_count(1)
    writer.add_context_length(1 << 20)
    writer.add_tensor("output_norm.weight", np.ones(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _wait_ready(process: subprocess.Popen[bytes], log_path: Path) -> int:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        text = log_path.read_text(errors="replace")
        if process.poll() is not None:
            raise RuntimeError(f"moe-l2d ended with status {process.returncode}:\n{text}")
        if (found := re.search(r"on http://127\.0\.0\.1:(\d+)", text)) and _is_ready(int(found[1])):
            return int(found[1])
        time.sleep(0.05)
    raise RuntimeError(f"moe-l2d was not ready within {READY_S} s:\n{log_path.read_text(errors='replace')}")


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


class Stream(asyncio.Protocol):
    """One streamed request; notes when each event came. Bare, so that the client is not what is measured."""

    def __init__(self, tokens: int, rate: float) -> None:
        body = json.dumps({"messages": [], "stream": True, "max_tokens": tokens, "rate": rate}).encode()
        self._request = (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked = 0
        self.first = 0
        self.events: list[tuple[int, int, int]] = []  # due, sent, come; ns
        self._rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's are no subclass

    def ask(self) -> None:
        self.asked = time.monotonic_ns()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data = self._rest + data
        end = 0
        for stamp in _STAMP.finditer(data):
            self.first = self.first or now
            self.events.append((int(stamp[1]), int(stamp[2]), now))
            end = stamp.end()
        if data.endswith(b"0\r\n\r\n") and b"[DONE]" in data:
            self._transport.close()
        self._rest = data[max(end, len(data) - 200) :]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def cli(result: dict[str, object]) -> int:
    print(json.dumps(result, indent=2))
    return 0
