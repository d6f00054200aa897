"""What all tests share: short runtime directories, the fake engine, waiting without guessing."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_l2ctl.client import Client
from moe_l2d.errors import MoeError

ROOT = Path(__file__).resolve().parent.parent
FAKE = ROOT / "tests" / "fakes" / "fake_engine.py"
DEMO_MODEL = ROOT / "models" / "moe-l2-demo.gguf"


def wait_until(what: Callable[[], Any], timeout_s: float = 10.0, step_s: float = 0.02) -> Any:
    """The first true value of what(); fails the test after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while True:
        value = what()
        if value:
            return value
        if time.monotonic() > end:
            pytest.fail(f"not so within {timeout_s} s: {getattr(what, '__doc__', None) or what}")
        time.sleep(step_s)


def is_running(pid: int) -> bool:
    """Is there such a process, and is it no zombie?"""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


@pytest.fixture
def short_dir() -> Iterator[Path]:
    """A directory whose path leaves room for a Unix socket's name (107 bytes)."""
    path = Path(tempfile.mkdtemp(prefix="ml2", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


class FakeInstall:
    """A directory with an executable `llama-server` that runs the fake engine, and its switches."""

    def __init__(self, root: Path) -> None:
        self.dir = root / "fake-engine"
        self.dir.mkdir(parents=True)
        self.file = self.dir / "switches.json"
        self.values: dict[str, Any] = {}
        self.set(state_dir=str(self.dir))
        script = self.dir / "llama-server"
        script.write_text(f'#!/bin/sh\nFAKE_FILE="{self.file}" exec "{sys.executable}" "{FAKE}" "$@"\n')
        script.chmod(0o755)

    def set(self, **switches: Any) -> None:
        """Change switches; a running engine sees them at its next request."""
        self.values.update(switches)
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(self.values))
        fresh.rename(self.file)

    @property
    def starts(self) -> int:
        path = self.dir / "starts"
        return int(path.read_text() or 0) if path.exists() else 0


@pytest.fixture
def fake_engine(short_dir: Path) -> FakeInstall:
    return FakeInstall(short_dir)


@pytest.fixture
def ended_by_test() -> Iterator[list[int]]:
    """Process ids that the test started; killed at its end, whatever happened."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def write_gguf(path: Path, *, moe: bool, blocks: int = 2, n_expert: int = 4, shards: int = 1) -> Path:
    """A tiny model file with the right names and shapes and random numbers; the fake engine never reads it."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(1)
    names = [path.name] if shards == 1 else [f"{path.stem}-{i + 1:05d}-of-{shards:05d}.gguf" for i in range(shards)]
    for number, name in enumerate(names):
        w = gguf.GGUFWriter(str(path.with_name(name)), "qwen3moe" if moe else "llama")
        if number == 0:
            w.add_name("tiny")
            w.add_context_length(1024)
            w.add_array("tokenizer.ggml.tokens", [f"token {i}" for i in range(300)])
        if shards > 1:
            w.add_uint16("split.no", number)
            w.add_uint16("split.count", shards)
        if number == 0:
            w.add_tensor("token_embd.weight", rng.random((32, 64), np.float32))
        for block in range(blocks):
            if block % shards != number:
                continue
            if moe:
                for kind in ("gate", "up", "down"):
                    data = rng.random((n_expert, 32, 32), np.float32)
                    w.add_tensor(f"blk.{block}.ffn_{kind}_exps.weight", data)
            else:
                w.add_tensor(f"blk.{block}.ffn_up.weight", rng.random((32, 32), np.float32))
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.write_tensors_to_file()
        w.close()
    return path.with_name(names[0])


def native_dir() -> Path:
    """Where libmoe_l2_arena.so is; skips the test if it was not built."""
    path = Path(os.environ.get("MOE_L2_NATIVE_DIR") or ROOT / "build" / "native")
    if not (path / "libmoe_l2_arena.so").exists():
        pytest.skip(f"there is no libmoe_l2_arena.so in {path}: run make")
    return path


class LiveDaemon:
    """A moe-l2d of its own directories, over the fake engine. start() waits until its control socket answers."""

    def __init__(self, root: Path, fake: FakeInstall, model: Path) -> None:
        self.root, self.fake = root, fake
        self.run_dir = root / "run"
        self.socket = self.run_dir / "control.sock"
        self.config = root / "moe-l2.toml"
        self.log = root / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.extra: dict[str, str] = {}
        self.settings: dict[str, dict[str, Any]] = {
            "server": {"listen": "127.0.0.1:0", "drain_s": 5},
            "model": {"path": str(model), "context": 512},
            "engine": {"restart_backoff_s": 0.1, "restart_backoff_max_s": 0.5},
            "paths": {"runtime_dir": str(self.run_dir), "state_dir": str(root), "models_dir": str(root)},
            "log": {"level": "debug"},
        }

    def write_config(self) -> None:
        sections = [f"[{s}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in keys.items())
                    for s, keys in self.settings.items()]
        self.config.write_text("\n".join(sections))

    def environment(self) -> dict[str, str]:
        native = os.environ.get("MOE_L2_NATIVE_DIR") or str(ROOT / "build" / "native")
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MOE_L2", "NOTIFY", "WATCHDOG", "LISTEN"))}
        env |= {"MOE_L2_ENGINE_DIR": str(self.fake.dir), "MOE_L2_NATIVE_DIR": native, "PYTHONPATH": str(ROOT)}
        return env | self.extra

    def launch(self, **more: Any) -> subprocess.Popen[bytes]:
        self.write_config()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen([sys.executable, "-m", "moe_l2d", "--config", str(self.config)],
                                            env=self.environment(), stdout=log, stderr=log, cwd="/", **more)
        return self.process

    def start(self, ready: bool = True) -> LiveDaemon:
        self.launch()
        wait_until(lambda: self.dead or self.answers)
        assert not self.dead, self.text
        if ready:
            self.call("ready.wait", timeout_s=15)
        return self

    @property
    def dead(self) -> bool:
        return self.process is None or self.process.poll() is not None

    @property
    def answers(self) -> bool:
        with contextlib.suppress(MoeError):
            return bool(self.call("status"))
        return False

    @property
    def text(self) -> str:
        return self.log.read_text()

    def call(self, method: str, **params: Any) -> Any:
        with Client(str(self.socket), timeout_s=20) as client:
            return client.call(method, **params)

    def engine(self) -> dict[str, Any]:
        """/fake/info of the running engine, over its Unix socket."""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(5)
            s.connect(str(self.run_dir / "engine" / "engine.sock"))
            s.sendall(b"GET /fake/info HTTP/1.0\r\n\r\n")
            raw = b"".join(iter(lambda: s.recv(65536), b""))
        info: dict[str, Any] = json.loads(raw.partition(b"\r\n\r\n")[2])
        return info

    def connect(self) -> http.client.HTTPConnection:
        host, _, port = self.call("status")["address"].rpartition(":")
        return http.client.HTTPConnection(host, int(port), timeout=20)

    def post(self, **body: Any) -> http.client.HTTPResponse:
        """A chat request; the answer's head has arrived."""
        connection = self.connect()
        self.connections.append(connection)
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5} | body
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    connections: list[http.client.HTTPConnection] = []  # noqa: RUF012 - emptied by stop()

    def stop(self, timeout_s: float = 20) -> int:
        """SIGTERM, wait, and the exit status; killed if it does not end."""
        for connection in self.connections:
            connection.close()
        self.connections.clear()
        if self.process is None:
            return 0
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
            pytest.fail(f"moe-l2d did not end within {timeout_s} s of SIGTERM:\n{self.text}")


@pytest.fixture
def plain_model(short_dir: Path) -> Path:
    return write_gguf(short_dir / "plain.gguf", moe=False)


@pytest.fixture
def moe_model(short_dir: Path) -> Path:
    return write_gguf(short_dir / "tiny-moe.gguf", moe=True)


@pytest.fixture
def daemon(short_dir: Path, fake_engine: FakeInstall, plain_model: Path) -> Iterator[LiveDaemon]:
    """A daemon over the fake engine with a model without experts; start() it."""
    live = LiveDaemon(short_dir, fake_engine, plain_model)
    yield live
    live.stop()


@pytest.fixture
def moe_daemon(short_dir: Path, fake_engine: FakeInstall, moe_model: Path) -> Iterator[LiveDaemon]:
    """As `daemon`, with experts and an arena."""
    if not (native_dir() / "libggml-moe-l2.so").exists():
        pytest.skip("the plug-in is not built: run make")
    live = LiveDaemon(short_dir, fake_engine, moe_model)
    yield live
    live.stop()
