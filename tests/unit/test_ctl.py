"""moe_l2ctl/"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from moe_l2ctl import format, main
from moe_l2d import errors
from tests.conftest import ROOT, FakeInstall, LiveDaemon, wait_until


def ctl(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "MOE_L2_SOCKET"} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moe_l2ctl", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, **more)


def test_imports_nothing_heavy() -> None:
    """No command imports aiohttp, numpy, gguf or asyncio."""
    code = "import sys, moe_l2ctl.main; print({'aiohttp', 'numpy', 'gguf', 'asyncio', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_imports_are_quick() -> None:
    """The tool's own start costs less than 100 ms of processor time beyond the bare interpreter's."""

    def cost(code: str) -> float:
        best = 9.0
        for _ in range(5):
            before = os.times()
            subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, check=True)
            after = os.times()
            used = after.children_user - before.children_user + after.children_system - before.children_system
            best = min(best, used)
        return best

    assert cost("import moe_l2ctl.main as m; m.parser('x')") - cost("pass") < 0.1


def test_not_running(short_dir: Path) -> None:
    """Without a daemon every command that needs one ends with 3 and one sentence; `version` does not need one."""
    path = str(short_dir / "none.sock")
    for command in (["status"], ["stats"], ["chat", "x"], ["engine", "restart"], ["config", "show"], ["shutdown"],
                    ["wait-ready", "--timeout", "0.2"]):  # fmt: skip
        done = ctl("--socket", path, *command)
        assert done.returncode == 3, command
        assert done.stderr.count("\n") == 1
        assert f"cannot connect to moe-l2d at '{path}': it is not running" in done.stderr
        assert done.stdout == ""
    assert ctl("--socket", path, "version").returncode == 0


def test_usage_and_help() -> None:
    """A wrong command line ends with 2; the help names every exit status that the error tree can give."""
    assert ctl("fly").returncode == 2
    assert ctl("engine").returncode == 2
    text = ctl("--help").stdout
    for kind in errors.ALL:
        assert f" {kind.exit_code}  " in text
    for module in main.COMMANDS:
        assert module.__name__.rpartition(".")[2].replace("_", "-") in text


def test_options_on_both_sides() -> None:
    """--json and --socket count before and after the command."""
    p = main.parser("/default")
    for arguments in (["--json", "--socket", "/x", "status"], ["status", "--json", "--socket", "/x"]):
        args = p.parse_args(arguments)
        assert (args.json, args.socket) == (True, "/x")
    assert p.parse_args(["status"]).socket == "/default"


def test_config_check(tmp_path: Path) -> None:
    """config check needs no daemon: 0 for a valid file, 78 and the sentence for another."""
    path = tmp_path / "x.toml"
    path.write_text("[engine]\nslots = 3\n")
    assert ctl("config", "check", str(path)).returncode == 0
    assert json.loads(ctl("--json", "config", "check", str(path)).stdout)["valid"] is True
    path.write_text("[engine]\nslots = 999\n")
    done = ctl("config", "check", str(path))
    assert done.returncode == 78
    assert "engine.slots '999': it must be from 1 to 256" in done.stderr


def test_silent_daemon(short_dir: Path) -> None:
    """A peer that hangs up without an answer is one sentence, too."""
    path = short_dir / "s.sock"
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(path))
        s.listen()
        child = subprocess.Popen([sys.executable, "-m", "moe_l2ctl", "--socket", str(path), "status"], cwd=ROOT,
                                 stderr=subprocess.PIPE, text=True)
        connection, _ = s.accept()
        connection.recv(10000)
        connection.close()
        _, text = child.communicate(timeout=10)
    assert child.returncode == 3
    assert "hung up" in text


def test_commands_against_a_daemon(moe_daemon: LiveDaemon, fake_engine: FakeInstall) -> None:
    """Every command works on a running daemon, for people and as JSON."""
    moe_daemon.start()
    at = ("--socket", str(moe_daemon.socket))
    assert "ready after" in ctl(*at, "wait-ready").stdout
    assert "tiny-moe" in ctl(*at, "status").stdout
    assert json.loads(ctl(*at, "--json", "status").stdout)["ready"] is True
    chat = ctl(*at, "chat", "hello", "--max-tokens", "4")
    assert (chat.returncode, chat.stdout) == (0, "t0 t1 t2 t3 \n")
    assert "tokens/s" in chat.stderr
    assert json.loads(ctl(*at, "--json", "chat", "-", "--max-tokens", "4", input="hello").stdout)["tokens"] == 4
    stats = ctl(*at, "stats").stdout
    for word in ("lookups", "hits", "misses", "hit rate", "tokens/s", "0 of 8 resident", "INERT", "from disk"):
        assert word in stats
    assert json.loads(ctl(*at, "stats", "--json").stdout)["arena"]["experts"] == 8
    shown = ctl(*at, "config", "show").stdout
    moe_daemon.config.with_suffix(".shown").write_text(shown)
    assert ctl("config", "check", str(moe_daemon.config.with_suffix(".shown"))).returncode == 0
    assert ctl(*at, "engine", "restart").returncode == 0
    assert ctl(*at, "wait-ready").returncode == 0
    fake_engine.set(die_after=2)
    died = ctl(*at, "chat", "hello", "--max-tokens", "9")
    assert died.returncode == 1
    assert died.stderr.startswith("moe-l2ctl: cannot ")
    assert ctl(*at, "shutdown").returncode == 0
    assert moe_daemon.process is not None
    assert moe_daemon.process.wait(15) == 0


def test_interrupt_is_quiet(daemon: LiveDaemon) -> None:
    """Ctrl+C ends a command with 130 and says nothing."""
    daemon.start()
    command = [sys.executable, "-m", "moe_l2ctl", "--socket", str(daemon.socket), "stats", "--watch", "0.1"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    wait_until(lambda: child.stdout and child.stdout.readline())
    child.send_signal(signal.SIGINT)
    _, text = child.communicate(timeout=10)
    assert (child.returncode, text) == (130, "")


def test_waits_for_a_daemon_that_is_just_starting(daemon: LiveDaemon) -> None:
    """wait-ready right after the daemon's start does not fail because the socket is not there yet."""
    daemon.launch()
    began = time.monotonic()
    assert ctl("--socket", str(daemon.socket), "wait-ready", "--timeout", "20").returncode == 0
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB")])
def test_size(value: int, text: str) -> None:
    """Sizes are in binary units with one digit."""
    assert format.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(3.21, "3.2 s"), (75, "1 min 15 s"), (3700, "1 h 1 min"), (93784, "1 d 2 h")]
)
def test_duration(value: float, text: str) -> None:
    """Durations have the two largest units."""
    assert format.duration(value) == text
