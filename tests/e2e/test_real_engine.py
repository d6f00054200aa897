"""The whole service over the real engine: deaths, clients that leave, models that are broken or no MoE."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conftest import is_running, wait_until

from tools.live import DEMO_MODEL, ENGINE_DIR, NATIVE_DIR, ROOT, Live, chat, children, live, toml
from tools.synth_model import SHAPES, write_model

LONG = chat("Write a Python function called isleap.", max_tokens=900, stream=True, ignore_eos=True)


@contextmanager
def streaming(daemon: Live) -> Iterator[http.client.HTTPResponse]:
    """A streaming request of which the first chunk has arrived; at the end the client hangs up."""
    connection = daemon.connection()
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(LONG), {"Content-Type": "application/json"})
        with connection.getresponse() as answer:
            assert answer.status == 200
            assert answer.read1(1 << 16).startswith(b"data: ")
            yield answer
    finally:
        connection.close()


def busy_slots(daemon: Live) -> int:
    return sum(slot["is_processing"] for slot in daemon.get("/slots")[1])


def test_restarted_engine_reads_no_expert_twice(short_dir: Path) -> None:
    """kill -9 of the engine in mid-stream ends the stream with an error event; the next engine finds the arena warm."""
    with live(short_dir) as daemon:
        daemon.wait_ready()
        status, before = daemon.post("/v1/chat/completions", chat("Solve the equation 7x + 12 = 68."))
        assert status == 200
        wait_until(lambda: daemon.arena()["resident"] == daemon.arena()["experts"], 60)  # preload has come to its end
        read = daemon.arena()["bytes_read"]
        assert read > 0
        with streaming(daemon) as answer:
            engine = daemon.ctl("status")["engine"]["pid"]
            os.kill(engine, signal.SIGKILL)
            rest = answer.read().decode()
        last = [line for line in rest.splitlines() if line.startswith("data: ")][-1]
        assert "error" in json.loads(last.removeprefix("data: ")), last
        daemon.wait_ready()
        assert daemon.ctl("status")["engine"]["pid"] != engine
        status, after = daemon.post("/v1/chat/completions", chat("Solve the equation 7x + 12 = 68."))
        assert status == 200
        assert after["choices"][0]["message"] == before["choices"][0]["message"]
        assert daemon.arena()["bytes_read"] == read
        assert daemon.ctl("stats")["engine_restarts"] == 1


def test_lazy_arena_reads_only_what_is_used(short_dir: Path) -> None:
    """Without preload an expert is read at its first use only; starting uses a few (the engine tries its context)."""
    with live(short_dir, arena={"preload": "none"}) as daemon:
        daemon.wait_ready()
        assert daemon.arena()["resident"] < daemon.arena()["experts"] / 4
        assert daemon.post("/v1/chat/completions", chat("写一首诗。"))[0] == 200
        first = daemon.arena()
        assert first["misses"] == first["resident"] > 0
        assert first["resident"] < first["experts"]
        assert daemon.post("/v1/chat/completions", chat("写一首诗。", cache_prompt=False))[0] == 200
        second = daemon.arena()
        assert second["bytes_read"] == first["bytes_read"]
        assert second["lookups"] > first["lookups"]
        assert second["hits"] - first["hits"] == second["lookups"] - first["lookups"]


def test_killed_daemon_leaves_nothing(short_dir: Path) -> None:
    """kill -9 of the daemon takes the engine with it; the next daemon starts over its leftovers."""
    with live(short_dir) as daemon:
        daemon.wait_ready()
        with streaming(daemon):
            engines = children(daemon.process.pid)
            assert len(engines) == 1
            daemon.process.kill()
            daemon.process.wait()
            wait_until(lambda: not is_running(engines[0]), 2)
    with live(short_dir) as daemon:
        daemon.wait_ready()
        assert daemon.post("/v1/chat/completions", chat("写一首诗。"))[0] == 200


def test_client_that_leaves_frees_the_slot(short_dir: Path) -> None:
    """A client that hangs up in mid-stream has its slot freed within a second."""
    # one thread: with two on a busy machine a token may take a second, and between tokens nobody looks at the client
    with live(short_dir, engine={"threads": 1}) as daemon:
        daemon.wait_ready()
        with streaming(daemon):
            assert busy_slots(daemon) == 1
        left = time.monotonic()
        wait_until(lambda: busy_slots(daemon) == 0, 1.0)
        assert time.monotonic() - left < 1.0


def run_daemon(folder: Path, model: Path) -> subprocess.CompletedProcess[str]:
    """Start the daemon on a model that it must refuse."""
    (folder / "run").mkdir(exist_ok=True)
    config = folder / "moe-l2.toml"
    config.write_text(toml({
        "server": {"listen": "127.0.0.1:0"},
        "model": {"path": str(model)},
        "engine": {"dir": str(ENGINE_DIR)},
        "paths": {"runtime_dir": f"{folder}/run", "state_dir": str(folder), "models_dir": str(folder)},
    }))  # fmt: skip
    env = {**os.environ, "MOE_L2_NATIVE_DIR": str(NATIVE_DIR)}
    command = [sys.executable, "-m", "moe_l2d", "--config", str(config)]
    return subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_truncated_model_is_refused(short_dir: Path) -> None:
    """A model file that ends too early is refused in one sentence with the numbers, and nothing stays running."""
    model = short_dir / "cut.gguf"
    whole = DEMO_MODEL.read_bytes()
    model.write_bytes(whole[: len(whole) * 2 // 3])
    done = run_daemon(short_dir, model)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "cut.gguf" in last
    assert str(len(whole) * 2 // 3) in last.replace(",", "")
    assert "Traceback" not in done.stderr


def test_model_without_experts_is_served_plainly(short_dir: Path) -> None:
    """A GGUF that is no mixture of experts is served, and status says that the arena has no part in it."""
    model = short_dir / "dense.gguf"
    write_model(model, SHAPES["dense"], "q4_k", DEMO_MODEL)
    with live(short_dir, model) as daemon:
        daemon.wait_ready()
        assert daemon.post("/v1/chat/completions", chat("Hello", max_tokens=4))[0] == 200
        status = daemon.ctl("status")
        assert status["model"]["moe"] is False
        assert any("no experts" in warning for warning in status["warnings"])
        assert daemon.ctl("stats")["arena"] is None


def test_embeddings_beside_chat(short_dir: Path) -> None:
    """With engine.embeddings the same engine makes embeddings and chats."""
    with live(short_dir, engine={"dir": str(ENGINE_DIR), "embeddings": True}) as daemon:
        daemon.wait_ready()
        status, answer = daemon.post("/v1/embeddings", {"input": ["one", "two"], "model": "auto"})
        assert status == 200
        vectors = [item["embedding"] for item in answer["data"]]
        assert len(vectors) == 2
        assert vectors[0] != vectors[1]
        assert daemon.post("/v1/chat/completions", chat("写一首诗。", max_tokens=8))[0] == 200


def test_small_arena_gives_the_same_answers(short_dir: Path) -> None:
    """With room for a third of the experts the answers are the same, within the memory that was allowed."""
    answers = []
    for arena in ("all", "6MB"):
        with live(short_dir, memory={"arena": arena}) as daemon:
            daemon.wait_ready()
            texts = [daemon.post("/v1/chat/completions", chat(text)) for text in ("写一首诗。", "Solve 3x + 4 = 19.")]
            answers.append([answer["choices"][0]["message"]["content"] for status, answer in texts if status == 200])
            counters = daemon.arena()
    assert answers[0] == answers[1]
    assert len(answers[0]) == 2
    assert counters["evictions"] > 0
    assert counters["slots"] < counters["experts"]
    assert counters["arena_bytes"] <= 6_000_000


def test_clients_that_hang_up_behind_done_cost_nobody(short_dir: Path) -> None:
    """Streams whose clients leave at [DONE], one behind the other, are all answered: the engine closes behind each."""
    body = json.dumps(chat("写一首诗。", max_tokens=2, stream=True))
    with live(short_dir) as daemon:
        daemon.wait_ready()
        for _ in range(100):
            connection = daemon.connection()
            try:
                connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
                with connection.getresponse() as answer:
                    assert answer.status == 200, answer.read()
                    for line in answer:
                        if line.startswith(b"data: [DONE]"):
                            break
            finally:
                connection.close()
        outcomes = daemon.ctl("stats")["requests"]["outcomes"]
        assert outcomes == {"ok": 100, "client_left": 0, "engine_died": 0, "error": 0}


def test_replaced_model_is_not_mixed_with_old_experts(short_dir: Path) -> None:
    """A model file that was replaced under the daemon is not served with the experts of the old one: it says so."""
    model = short_dir / "model.gguf"
    model.write_bytes(DEMO_MODEL.read_bytes())
    with live(short_dir, model) as daemon:
        daemon.wait_ready()
        other = short_dir / "other.gguf"
        other.write_bytes(DEMO_MODEL.read_bytes())
        other.rename(model)
        daemon.ctl("engine", "restart")
        status = wait_until(lambda: (s := daemon.ctl("status"))["engine"]["phase"] == "failed" and s, 15)
        assert "was replaced" in status["engine"]["detail"]
        code, answer = daemon.post("/v1/chat/completions", chat("Hello"))
        assert code == 503
        assert "was replaced" in answer["error"]["message"]


def test_restart_in_a_stream_is_quick_and_says_why(short_dir: Path) -> None:
    """An engine that is restarted while it generates is gone within seconds, and its client is told the reason."""
    with live(short_dir) as daemon:
        daemon.wait_ready()
        with streaming(daemon) as answer:
            asked = time.monotonic()
            daemon.ctl("engine", "restart")
            rest = answer.read().decode()
        assert time.monotonic() - asked < 5
        assert "restarted, as was asked for" in rest.rpartition("data: ")[2]
        daemon.wait_ready()
