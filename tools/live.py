"""A real moe-l2d over the real engine, in a directory of its own, for the end-to-end tests and the benchmarks."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DEMO_MODEL = ROOT / "models" / "moe-l2-demo.gguf"
ENGINE_DIR = Path(os.environ.get("MOE_L2_ENGINE_DIR", ROOT / "build/engine-home/build/bin"))
NATIVE_DIR = Path(os.environ.get("MOE_L2_NATIVE_DIR", ROOT / "build/native"))
PLUGIN = NATIVE_DIR / "libggml-moe-l2.so"
ASK_LIMIT_S = 120


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket: to an engine without the daemon."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=ASK_LIMIT_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self.path))


def toml(sections: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, values in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


class Live:
    """A daemon that was started; ask it over HTTP, inspect it with moe-l2ctl."""

    def __init__(self, folder: Path, process: subprocess.Popen[bytes], port: int) -> None:
        self.folder, self.process, self.port = folder, process, port

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def ctl(self, *arguments: str, check: bool = True) -> Any:
        """The JSON answer of `moe-l2ctl --json ARGUMENTS`."""
        command = [
            sys.executable,
            "-m",
            "moe_l2ctl",
            "--socket",
            str(self.folder / "run/control.sock"),
            "--json",
            *arguments,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_LIMIT_S, cwd=ROOT)
        assert done.returncode == 0 or not check, f"{arguments}: {done.returncode}: {done.stderr}"
        return json.loads(done.stdout) if done.stdout.strip() else None

    def wait_ready(self) -> None:
        self.ctl("wait-ready", "--timeout", str(ASK_LIMIT_S))

    def arena(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ctl("stats")["arena"]
        return found

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=ASK_LIMIT_S)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return post(self.connection(), path, body)

    def get(self, path: str) -> tuple[int, Any]:
        connection = self.connection()
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


def post(connection: http.client.HTTPConnection, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 48, **more}


def children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


@contextmanager
def live(folder: Path, model: Path = DEMO_MODEL, **sections: dict[str, Any]) -> Iterator[Live]:
    """Start the daemon and wait until its sockets answer; at the end it and its engine are gone."""
    for name in ("run", "state"):
        (folder / name).mkdir(exist_ok=True)
    base: dict[str, dict[str, Any]] = {
        "server": {"listen": "127.0.0.1:0", "drain_s": 5},
        "model": {"path": str(model), "context": 1024},
        "engine": {"dir": str(ENGINE_DIR), "restart_backoff_s": 0.2},
        "arena": {},
        "paths": {"runtime_dir": f"{folder}/run", "state_dir": f"{folder}/state", "models_dir": str(model.parent)},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    config = folder / "moe-l2.toml"
    config.write_text(toml(base))
    env = {**os.environ, "MOE_L2_NATIVE_DIR": str(NATIVE_DIR)}
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moe_l2d", "--config", str(config)], stdout=log, stderr=log, env=env, cwd=ROOT
        )
    daemon = Live(folder, process, 0)
    try:
        daemon.port = _wait_for_address(daemon)
        yield daemon
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_address(daemon: Live) -> int:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        if daemon.process.poll() is not None:
            raise AssertionError(f"moe-l2d ended with {daemon.process.returncode}: {daemon.log}")
        if (daemon.folder / "run/control.sock").exists():
            answer = daemon.ctl("status", check=False)
            if answer:
                return int(answer["address"].rpartition(":")[2])
        time.sleep(0.05)
    raise AssertionError(f"moe-l2d does not answer: {daemon.log}")
