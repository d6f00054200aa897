"""Identity gates: with the plug-in and through the daemon, the same engine gives the same results."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, wait_until

from tools.live import DEMO_MODEL, ENGINE_DIR, NATIVE_DIR, PLUGIN, UnixConnection, chat, live, post
from tools.synth_model import SHAPES, write_model

PROMPTS = (
    "Solve the equation 7x + 12 = 68.",
    "Write a Python function called isleap.",
    "写一首诗。",
    "Translate: Save changes?",
)


@pytest.mark.parametrize("repack", [1, 0])
@pytest.mark.parametrize("kind", ["q4_k", "q8_0"])
def test_logits_are_bit_equal(tmp_path: Path, kind: str, repack: int) -> None:
    """Batches of 1, 4 and 64 tokens of four sequences give the same logits, bit for bit, repacked or not."""
    model = tmp_path / "model.gguf"
    write_model(model, replace(SHAPES["tiny"], layers=2), kind, DEMO_MODEL)
    gate = [str(NATIVE_DIR / "tests/test_identity"), str(model), str(PLUGIN), f"repack={repack}"]
    done = subprocess.run(gate, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    repacked = int(re.search(r"(\d+) tensors repacked", done.stdout)[1])  # type: ignore[index]
    assert repacked == (6 if kind == "q4_k" and repack and has_avx2() else 0)


@pytest.mark.parametrize("percent", [50, 25, 0])
@pytest.mark.parametrize("kind", ["q4_k", "q8_0"])
def test_logits_are_bit_equal_under_pressure(tmp_path: Path, kind: str, percent: int) -> None:
    """With room for half, a quarter, or the least number of experts that works, not one bit of the logits changes."""
    model = tmp_path / "model.gguf"
    write_model(model, SHAPES["tiny"], kind, DEMO_MODEL)
    gate = [str(NATIVE_DIR / "tests/test_identity"), str(model), str(PLUGIN), f"percent={percent}"]
    done = subprocess.run(gate, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def has_avx2() -> bool:
    """On x86-64 llama.cpp repacks Q4_K from AVX2 on, and never Q8_0."""
    return "avx2" in Path("/proc/cpuinfo").read_text()


def test_perplexity_is_equal_to_every_digit(tmp_path: Path) -> None:
    """llama-perplexity prints the same value with the plug-in as without, also with an arena of 8 of 17 MB."""
    text = tmp_path / "text"
    text.write_text((ROOT / "LICENSE").read_text() + (ROOT / "tools/demo_model/corpus.py").read_text())
    command = [
        str(ENGINE_DIR / "llama-perplexity"),
        "-m",
        str(DEMO_MODEL),
        "-f",
        str(text),
        "-c",
        "256",
        "--chunks",
        "6",
        "-lv",
        "4",
    ]
    found = []
    for plugin, mib in ((None, 0), (PLUGIN, 0), (PLUGIN, 8)):
        env = {key: value for key, value in os.environ.items() if not key.startswith("GGML_")}
        if plugin:
            env |= {"GGML_BACKEND_PATH": str(plugin), "MOE_L2_ARENA_MIB": str(mib)}
        done = subprocess.run([*command, "--load-mode", "mmap"], env=env, capture_output=True, timeout=300)
        output = (done.stdout + done.stderr).decode(errors="replace")  # its debug output cuts characters in two
        assert ("loaded MOE_L2 backend" in output) == (plugin is not None)
        found.append(re.search(r"Final estimate: PPL = ([\d.]+ \+/- [\d.]+)", output)[1])  # type: ignore[index]
    assert found[0] == found[1] == found[2]


@pytest.fixture
def plain_server(short_dir: Path) -> Iterator[Path]:
    """The socket of llama-server of the same build, without plug-in and daemon."""
    path = short_dir / "plain.sock"
    command = [str(ENGINE_DIR / "llama-server"), "-m", str(DEMO_MODEL), "--host", str(path), "-c", "2048", "-np", "2"]
    with (short_dir / "plain.log").open("wb") as log:
        process = subprocess.Popen([*command, "--jinja", "-fit", "off"], stdout=log, stderr=log)
    try:
        wait_until(lambda: path.exists() and _healthy(path), 60)
        yield path
    finally:
        process.kill()
        process.wait()


def _healthy(path: Path) -> bool:
    connection = UnixConnection(path)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _substance(answer: Any) -> Any:
    return {key: answer[key] for key in ("choices", "usage")}


def test_answers_are_those_of_the_plain_server(short_dir: Path, plain_server: Path) -> None:
    """At temperature 0, one request at a time, moe-l2d answers byte for byte what the plain engine answers."""
    with live(short_dir) as daemon:
        daemon.wait_ready()
        for prompt in PROMPTS:
            body = chat(prompt, logprobs=True)
            plain = post(UnixConnection(plain_server), "/v1/chat/completions", body)
            ours = daemon.post("/v1/chat/completions", body)
            assert plain[0] == ours[0] == 200
            assert _substance(plain[1]) == _substance(ours[1])
            assert ours[1]["choices"][0]["message"]["content"]
        assert daemon.arena()["state"] == "in use"
