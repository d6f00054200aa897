"""moe-l2d as a whole, over the fake engine: supervision, stopping, refusing."""

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

from moe_l2d.errors import Timeout
from tests.conftest import ROOT, FakeInstall, LiveDaemon, is_running, native_dir, wait_until

# After the imports: nobody may not read where this Python lies.
BECOME_NOBODY = "import os\nos.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"


def engine_pid(daemon: LiveDaemon) -> int:
    pid: int = daemon.call("status")["engine"]["pid"]
    return pid


def lines(response: Any) -> list[Any]:
    """The decoded data of a whole event stream."""
    events = [x[5:].strip() for x in response.read().split(b"\n") if x.startswith(b"data:")]
    return [x.decode() if x == b"[DONE]" else json.loads(x) for x in events]


def test_serves_and_stops(daemon: LiveDaemon) -> None:
    """It starts, serves a stream, counts it, and ends with status 0 on SIGTERM, with nothing left behind."""
    daemon.start()
    events = lines(daemon.post(stream=True))
    assert events[-1] == "[DONE]"
    stats = wait_until(lambda: (s := daemon.call("stats"))["requests"]["outcomes"]["ok"] and s)
    assert stats["requests"]["generated_tokens"] == 5
    pid = engine_pid(daemon)
    assert daemon.stop() == 0
    assert not is_running(pid)
    assert not daemon.socket.exists()
    assert not (daemon.run_dir / "engine" / "engine.sock").exists()


def test_engine_environment(daemon: LiveDaemon) -> None:
    """The engine gets neither systemd's variables nor llama.cpp's own, and no descriptor but what it needs."""
    daemon.extra = {"NOTIFY_SOCKET": "/nowhere", "LISTEN_FDS": "1", "WATCHDOG_USEC": "60000000", "LLAMA_ARG_PORT": "1"}
    daemon.start()
    info = daemon.engine()
    assert not {"NOTIFY_SOCKET", "LISTEN_FDS", "WATCHDOG_USEC", "LLAMA_ARG_PORT"} & set(info["env"])
    assert "memfd" not in str(info["fds"])
    assert str(daemon.socket) not in str(info["fds"])


def test_plain_model_is_said(daemon: LiveDaemon) -> None:
    """A model without experts is served without plug-in and arena, and status and stats say so."""
    daemon.start()
    status = daemon.call("status")
    assert status["model"]["moe"] is False
    assert "has no experts" in status["warnings"][0]
    assert daemon.call("stats")["arena"] is None
    assert "GGML_BACKEND_PATH" not in daemon.engine()["env"]


def test_killed_engine_restarts_with_the_same_arena(moe_daemon: LiveDaemon) -> None:
    """kill -9 of the engine: it is started again after a pause, and inherits the very same memfds."""
    moe_daemon.start()
    before = moe_daemon.engine()
    assert before["env"]["GGML_BACKEND_PATH"] == str(native_dir() / "libggml-moe-l2.so")
    arena = [before["inodes"][before["env"][x]] for x in ("MOE_L2_ARENA_FD", "MOE_L2_CONTROL_FD")]
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: moe_daemon.call("status")["engine"]["generation"] == 2)
    moe_daemon.call("ready.wait", timeout_s=10)
    after = moe_daemon.engine()
    assert [after["inodes"][after["env"][x]] for x in ("MOE_L2_ARENA_FD", "MOE_L2_CONTROL_FD")] == arena
    assert moe_daemon.call("status")["engine"]["restarts"] == 1
    assert "engine: ready -> backoff: the engine was killed by SIGKILL" in moe_daemon.text


def test_inert_cache_is_said(moe_daemon: LiveDaemon) -> None:
    """Requests that were answered without the arena (the fake has none) make stats say that the cache is inert."""
    moe_daemon.start()
    assert moe_daemon.call("stats")["arena"]["state"] == "idle"
    lines(moe_daemon.post(stream=True))
    stats = wait_until(lambda: (s := moe_daemon.call("stats"))["arena"]["state"] == "inert" and s)
    assert "inert" in stats["warnings"][0]


def test_failing_engine_backs_off(daemon: LiveDaemon, fake_engine: FakeInstall) -> None:
    """An engine that fails at its start is tried again with doubled pauses, and its last words are quoted."""
    fake_engine.set(die_starts=3)
    daemon.start()
    assert fake_engine.starts == 4
    for pause in ("0.1 s", "0.2 s", "0.4 s"):
        assert f"it is started again in {pause}" in daemon.text
    assert "the engine ended with status 1: E fake engine: start 1 fails as told" in daemon.text


def test_nobody_waits_for_a_hopeless_engine(daemon: LiveDaemon, fake_engine: FakeInstall) -> None:
    """Once the engine has failed four times in a row, a request gets 503 with the reason instead of waiting for it."""
    fake_engine.set(die_starts=1000)
    daemon.start(ready=False)
    wait_until(lambda: fake_engine.starts >= 5)
    began = time.monotonic()
    answer = daemon.post()
    assert answer.status == 503
    assert "fails as told" in answer.read().decode()
    assert time.monotonic() - began < 5


def test_engine_death_ends_a_stream_with_an_error(daemon: LiveDaemon, fake_engine: FakeInstall) -> None:
    """An engine that dies in a stream ends it with an error event; never with [DONE]."""
    fake_engine.set(die_after=3)
    daemon.start()
    events = lines(daemon.post(stream=True, max_tokens=10))
    assert "[DONE]" not in events
    assert "error" in events[-1]


def test_engine_that_ignores_term_is_killed(daemon: LiveDaemon, fake_engine: FakeInstall) -> None:
    """An engine that ignores SIGTERM ends by SIGKILL within the bound of the ladder."""
    fake_engine.set(ignore_term=1)
    daemon.start()
    pid, began = engine_pid(daemon), time.monotonic()
    assert daemon.stop() == 0
    assert time.monotonic() - began < 12
    assert not is_running(pid)
    assert "sending SIGKILL" in daemon.text


def test_killed_daemon_leaves_no_engine(daemon: LiveDaemon) -> None:
    """kill -9 of the daemon: the kernel ends the engine, and the next daemon starts over the stale sockets."""
    daemon.start()
    pid = engine_pid(daemon)
    assert daemon.process is not None
    daemon.process.kill()
    daemon.process.wait(5)
    wait_until(lambda: not is_running(pid), 2)
    assert daemon.socket.exists()
    daemon.start()
    assert engine_pid(daemon) != pid


def test_second_daemon_is_refused(daemon: LiveDaemon, short_dir: Path) -> None:
    """A second daemon in the same runtime directory, or on the same control socket, ends with 75 and one sentence."""
    daemon.start()
    run = [sys.executable, "-m", "moe_l2d", "--config"]
    second = subprocess.run([*run, str(daemon.config)], env=daemon.environment(), capture_output=True, text=True)
    assert second.returncode == 75
    assert second.stderr.count("\n") == 1
    assert f"pid {daemon.process.pid if daemon.process else 0}" in second.stderr
    other = short_dir / "other.toml"
    text = daemon.config.read_text().replace(str(daemon.run_dir), str(short_dir / "run2"))
    other.write_text(f'{text}\n[control]\nsocket = "{daemon.socket}"\n')
    third = subprocess.run([*run, str(other)], env=daemon.environment(), capture_output=True, text=True)
    assert third.returncode == 75
    assert "another moe-l2d answers" in third.stderr
    assert daemon.answers


def test_two_at_once(daemon: LiveDaemon) -> None:
    """Of several daemons that start at the same moment exactly one serves."""
    daemon.write_config()
    command = [sys.executable, "-m", "moe_l2d", "--config", str(daemon.config)]
    some = [subprocess.Popen(command, env=daemon.environment(), stderr=subprocess.DEVNULL) for _ in range(3)]
    try:
        wait_until(lambda: sum(p.poll() == 75 for p in some) == 2, 15)
        wait_until(lambda: daemon.answers)
        assert sum(p.poll() is None for p in some) == 1
    finally:
        for p in some:
            p.terminate()
            p.wait(15)


def test_taken_port(daemon: LiveDaemon) -> None:
    """A port that somebody else has is refused in one sentence, and the control socket does not stay behind."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        daemon.settings["server"]["listen"] = f"127.0.0.1:{taken.getsockname()[1]}"
        code = daemon.launch().wait(15)
    assert code == 78
    assert "cannot listen on '127.0.0.1:" in daemon.text
    assert "server.listen" in daemon.text
    assert not daemon.socket.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_no_write_permission(daemon: LiveDaemon, short_dir: Path) -> None:
    """Without write permission on the runtime directory it ends with 4 and one sentence that names the directory."""
    short_dir.chmod(0o755)
    daemon.run_dir.mkdir(mode=0o755)
    daemon.write_config()
    script = "import uvloop, sys, moe_l2d.daemon\nfrom moe_l2d import main\n" + BECOME_NOBODY + "sys.exit(main.main())"
    command = [sys.executable, "-c", script, "--config", str(daemon.config)]
    child = subprocess.run(command, env=daemon.environment(), capture_output=True, text=True)
    assert child.returncode == 4
    assert child.stderr.count("\n") == 1
    assert f"cannot use '{daemon.run_dir}': permission denied" in child.stderr


def test_bad_config(daemon: LiveDaemon) -> None:
    """A wrong configuration ends it with 78 and one sentence that names file, key, value and limit."""
    daemon.settings["server"]["max_waiting"] = 10001
    assert daemon.launch().wait(15) == 78
    assert daemon.text.count("\n") == 1
    assert "server.max_waiting '10001': it must be from 0 to 10000" in daemon.text
    assert str(daemon.config) in daemon.text


def test_truncated_model(daemon: LiveDaemon, plain_model: Path) -> None:
    """A truncated model is refused with the numbers, with status 1."""
    plain_model.write_bytes(plain_model.read_bytes()[:-500])
    assert daemon.launch().wait(15) == 1
    assert "is truncated" in daemon.text
    assert str(plain_model.stat().st_size) in daemon.text


def test_missing_engine(daemon: LiveDaemon) -> None:
    """Without llama-server it says where it looked, and what to set."""
    (daemon.fake.dir / "llama-server").unlink()
    assert daemon.launch().wait(15) == 1
    assert "cannot find the engine" in daemon.text
    assert "MOE_L2_ENGINE_DIR" in daemon.text


def test_reload(daemon: LiveDaemon) -> None:
    """SIGHUP takes over what can change, names what cannot, and a bad file changes nothing."""
    daemon.start()
    assert daemon.process is not None
    daemon.settings["server"]["max_waiting"] = 0
    daemon.settings["engine"]["slots"] = 1
    daemon.write_config()
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "cannot change engine.slots while running" in daemon.text)
    shown = daemon.call("config.show")["config"]
    assert shown["server"]["max_waiting"] == 0
    assert shown["engine"]["slots"] == 2
    daemon.settings["server"]["max_waiting"] = -1
    daemon.write_config()
    daemon.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "the configuration stays as it was" in daemon.text)
    assert daemon.call("config.show")["config"]["server"]["max_waiting"] == 0


def test_stalled_engine_is_restarted(daemon: LiveDaemon, fake_engine: FakeInstall) -> None:
    """An engine that accepts and never generates, while /health is fine, is killed, restarted, and that is said."""
    daemon.settings["engine"]["stall_s"] = 1
    fake_engine.set(stall=1)
    daemon.start()
    pid = engine_pid(daemon)
    connection = daemon.connect()
    daemon.connections.append(connection)
    connection.request("POST", "/v1/chat/completions", '{"messages": []}', {"Content-Type": "application/json"})
    wait_until(lambda: "made no progress on 1 request(s) for engine.stall_s (1 s) and was killed" in daemon.text)
    assert not is_running(pid)
    fake_engine.set(stall=0)
    daemon.call("ready.wait", timeout_s=10)


def test_slow_prompt_is_no_stall(daemon: LiveDaemon, fake_engine: FakeInstall) -> None:
    """An engine that is silent over a long prompt, but says on /slots that it computes, is left alone."""
    daemon.settings["engine"]["stall_s"] = 1
    fake_engine.set(prompt_s=2.5)
    daemon.start()
    assert lines(daemon.post(stream=True))[-1] == "[DONE]"
    assert daemon.call("status")["engine"]["restarts"] == 0


def test_drain(daemon: LiveDaemon, fake_engine: FakeInstall) -> None:
    """SIGTERM lets a running stream end, within server.drain_s."""
    fake_engine.set(rate=20)
    daemon.start()
    response = daemon.post(stream=True, max_tokens=20)
    assert daemon.process is not None
    daemon.process.terminate()
    assert lines(response)[-1] == "[DONE]"
    assert daemon.process.wait(10) == 0


def test_engine_restart_on_demand(daemon: LiveDaemon) -> None:
    """engine.restart ends the engine and starts another at once."""
    daemon.start()
    pid = engine_pid(daemon)
    daemon.call("engine.restart")
    wait_until(lambda: daemon.call("status")["engine"]["generation"] == 2)
    daemon.call("ready.wait", timeout_s=10)
    assert engine_pid(daemon) != pid
    assert not is_running(pid)


def test_wait_ready_times_out(daemon: LiveDaemon, fake_engine: FakeInstall) -> None:
    """While the model loads, READY is not claimed, and waiting ends with a timeout that names the phase."""
    fake_engine.set(load_s=30)
    daemon.start(ready=False)
    wait_until(lambda: daemon.call("status")["phase"] == "loading")
    with pytest.raises(Timeout, match="loading"):
        daemon.call("ready.wait", timeout_s=0.2)
    assert daemon.call("status")["ready"] is False


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_wrong_user_is_refused(daemon: LiveDaemon, short_dir: Path) -> None:
    """A user in none of the groups may neither read nor change; the sentence names the group."""
    daemon.start()
    short_dir.chmod(0o755)
    daemon.run_dir.chmod(0o755)
    daemon.socket.chmod(0o666)
    script = (
        "import sys\nfrom moe_l2ctl.client import Client\nfrom moe_l2d.errors import MoeError\n"
        + BECOME_NOBODY
        + "for method in ('status', 'shutdown'):\n"
        "    try:\n        Client(sys.argv[1]).call(method)\n        print('allowed')\n"
        "    except MoeError as error:\n        print(error.code, error)\n"
    )
    command = [sys.executable, "-c", script, str(daemon.socket)]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    read, change = done.stdout.splitlines()
    assert read.startswith("denied cannot inspect moe-l2d as user '65534'")
    assert "group moe-l2 " in read
    assert change.startswith("denied cannot change moe-l2d")
    assert "group moe-l2-admin " in change
