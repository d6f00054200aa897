"""What moe-l2d tells its service manager, and what it hides from the engine (over the fake engine)."""

from __future__ import annotations

import http.client
import itertools
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest
from conftest import DEMO_MODEL, FakeInstall
from notify_manager import Message, NotifyManager

WATCHDOG_S = 1.0
LOAD_S = 1.5  # longer than the daemon needs to open its sockets


@pytest.fixture
def manager(short_dir: Path, fake_engine: FakeInstall) -> NotifyManager:
    """A manager for a daemon whose engine takes LOAD_S to load."""
    fake_engine.set(load_s=LOAD_S)
    for name in ("run", "state"):
        (short_dir / name).mkdir()
    config = short_dir / "moe-l2.toml"
    config.write_text(f"""\
[server]
listen = "127.0.0.1:0"
drain_s = 2
[model]
path = "{DEMO_MODEL}"
context = 1024
[engine]
dir = "{fake_engine.dir}"
[paths]
runtime_dir = "{short_dir}/run"
state_dir = "{short_dir}/state"
models_dir = "{DEMO_MODEL.parent}"
""")
    return NotifyManager([sys.executable, "-m", "moe_l2d.main", "--config", str(config)], short_dir, WATCHDOG_S)


def is_ready(message: Message) -> bool:
    return message.fields.get("READY") == "1"


def is_serving(message: Message) -> bool:
    return "serving" in message.fields.get("STATUS", "")


def listening_port(pid: int) -> int:
    process = psutil.Process(pid)
    connections = getattr(process, "net_connections", None) or process.connections  # the old name until psutil 6
    ports = [c.laddr.port for c in connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(ports) == 1
    return int(ports[0])


def http_status(port: int, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        return response.status
    finally:
        connection.close()


def test_ready_means_that_the_sockets_answer(manager: NotifyManager, short_dir: Path) -> None:
    """At READY=1 both sockets answer, although the model is not loaded: /ready still says 503."""
    with manager:
        manager.wait_for(is_ready)
        port = listening_port(manager.pid)
        assert http_status(port, "/ready") == 503
        assert http_status(port, "/metrics") == 200
        with socket.socket(socket.AF_UNIX) as control:
            control.connect(str(short_dir / "run/control.sock"))


def test_status_tells_of_the_loading_and_its_end(manager: NotifyManager) -> None:
    """STATUS= is another text while the model loads than after it, and /ready then says 200."""
    with manager:
        manager.wait_for(is_ready)
        loaded = manager.wait_for(is_serving, LOAD_S + 10)
        texts = [m.fields["STATUS"] for m in manager.messages if "STATUS" in m]
        assert any(word in text.lower() for text in texts for word in ("starting", "loading")), texts
        assert texts[0] != loaded.fields["STATUS"]
        assert http_status(listening_port(manager.pid), "/ready") == 200


def test_watchdog_pings_at_half_the_interval(manager: NotifyManager) -> None:
    """WATCHDOG=1 comes about every half of WATCHDOG_USEC, also while the model loads, never close to the limit."""
    with manager:
        manager.wait_for(is_ready)
        times = [m.at for m in manager.collect(5 * WATCHDOG_S) if "WATCHDOG" in m]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(gaps) >= 6, gaps
    assert max(gaps) < 0.9 * WATCHDOG_S, gaps
    assert sorted(gaps)[len(gaps) // 2] == pytest.approx(WATCHDOG_S / 2, abs=0.15)


def test_sigterm_is_announced_and_ends_the_daemon(manager: NotifyManager) -> None:
    """After SIGTERM the manager hears STOPPING=1, the exit code is 0 and no process is left."""
    with manager:
        manager.wait_for(is_ready)
        family = [psutil.Process(manager.pid), *psutil.Process(manager.pid).children(recursive=True)]
        assert manager.process is not None
        manager.process.send_signal(signal.SIGTERM)
        manager.wait_for(lambda m: m.fields.get("STOPPING") == "1")
        assert manager.process.wait(20) == 0
        assert psutil.wait_procs(family, timeout=5)[1] == []


def test_the_engine_does_not_see_the_manager(manager: NotifyManager) -> None:
    """The engine's environment has none of the manager's variables: its messages would be taken for the daemon's."""
    with manager:
        manager.wait_for(is_serving, LOAD_S + 10)
        assert "NOTIFY_SOCKET" in psutil.Process(manager.pid).environ()
        engines = [
            child
            for child in psutil.Process(manager.pid).children(recursive=True)
            if any("fake_engine.py" in word for word in child.cmdline())
        ]
        assert len(engines) == 1
        names = [n for n in engines[0].environ() if n == "NOTIFY_SOCKET" or n.startswith(("LISTEN_", "WATCHDOG_"))]
        assert names == []
