"""moe_l2d/engine/{backoff,watchdog,command,flags,spawn}.py"""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from moe_l2d.config import Installation, parse
from moe_l2d.engine import backoff, command, spawn, watchdog
from moe_l2d.engine.watchdog import Sight, Watch
from moe_l2d.model.gguf_facts import ModelFacts

FACTS = ModelFacts((Path("/m/x.gguf"),), "a", "n", None, None, 1, (), b"")
INSTALL = Installation(Path("/e"), Path("/n"))


def test_backoff_doubles_and_is_bounded() -> None:
    """Each failure in a row doubles the pause up to its bound, however many there are."""
    assert [backoff.delay_s(n, 1, 60) for n in (1, 2, 3, 7, 10_000)] == [1, 2, 4, 60, 60]


def test_good_start_resets_backoff() -> None:
    """An engine that served for long failed for the first time; one that served briefly did not."""
    assert backoff.count_failure(5, backoff.HEALTHY_S) == 1
    assert backoff.count_failure(5, backoff.HEALTHY_S - 1) == 6
    assert backoff.count_failure(5, None) == 6


def watched(*sights: Sight) -> Watch:
    watch = Watch(last_sign=0.0)
    for sight in sights:
        watch = watchdog.observe(watch, sight)
    return watch


def test_silent_engine_with_requests_is_stalled() -> None:
    """With a request and no sign for stall_s it is stalled, and not a moment before."""
    watch = watched(Sight(10, 1, 0, 0), Sight(50, 1, 0, 0))
    assert not watchdog.is_stalled(watch, 19.9, 10)
    assert watchdog.is_stalled(watch, 20, 10)


def test_idle_engine_is_never_stalled() -> None:
    """Without requests silence means nothing, and the first request starts the count."""
    watch = watched(Sight(1000, 0, 0, 0))
    assert not watchdog.is_stalled(watch, 9999, 10)
    watch = watchdog.observe(watch, Sight(9999, 1, 0, 0))
    assert not watchdog.is_stalled(watch, 10_008, 10)


@pytest.mark.parametrize("sign", [Sight(15, 1, 15, 0), Sight(15, 1, 0, 7), Sight(15, 1, 0, 0, slots_computing=True)])
def test_signs_of_life(sign: Sight) -> None:
    """Something sent, a graph computed, or a computing slot on /slots: each counts from when it was seen."""
    watch = watched(Sight(10, 1, 0, 0), sign)
    assert not watchdog.is_stalled(watch, 24, 10)
    assert watchdog.is_stalled(watch, 25, 10)


def test_argv_plain() -> None:
    """The command line holds what the configuration says; context is per slot."""
    argv = command.arguments(parse("[engine]\nslots = 3\n[model]\ncontext = 1000"), INSTALL, Path("/m/x.gguf"), "x", 4)
    pairs = dict(itertools.pairwise(argv))
    assert argv[0] == "/e/llama-server"
    assert pairs["--host"] == "/run/moe-l2/engine/engine.sock"
    assert (pairs["--ctx-size"], pairs["--parallel"], pairs["--threads"], pairs["--alias"]) == ("3000", "3", "4", "x")
    assert pairs["--load-mode"] == "mmap"
    assert "--no-repack" not in argv


def test_argv_extra_comes_last() -> None:
    """extra_args follow ours; repack = false is passed on."""
    config = parse('[engine]\nrepack = false\nextra_args = ["--cache-ram", "0"]')
    argv = command.arguments(config, INSTALL, Path("/m"), "x", 1)
    assert argv[-3:] == ["--no-repack", "--cache-ram", "0"]


def test_environment_is_small() -> None:
    """Only what a program needs is passed on; with an arena the plug-in's variables are added."""
    outer = {"PATH": "/bin", "NOTIFY_SOCKET": "x", "LLAMA_ARG_PORT": "1", "MOE_L2_ARENA_FD": "99", "LD_PRELOAD": "y"}
    plain = command.build(parse(""), INSTALL, FACTS, name="x", threads=1, environment=outer, arena_fds=None)
    assert plain.env == {"PATH": "/bin"}
    assert plain.pass_fds == ()
    moe = command.build(parse("[engine]\nrepack=false"), INSTALL, FACTS, name="x", threads=1, environment=outer,
                        arena_fds=(7, 8))
    assert moe.env == {
        "PATH": "/bin", "GGML_BACKEND_PATH": "/n/libggml-moe-l2.so", "MOE_L2_ARENA_FD": "7", "MOE_L2_CONTROL_FD": "8",
        "MOE_L2_LOADERS": "4", "MOE_L2_REPACK": "0", "MOE_L2_DIRECT_IO": "0",
    }  # fmt: skip
    assert moe.pass_fds == (7, 8)


def test_reason_is_the_telling_line() -> None:
    """Of the engine's last lines the last one that sounds like an error explains its end."""
    log = spawn.EngineLog()
    for line in ("loading", "E couldn't bind HTTP server socket", "0.01.1 I no error in this", "cleaning up"):
        log.add(line)
    assert log.reason == "E couldn't bind HTTP server socket"
    for n in range(100):
        log.add(f"line {n}")
    assert len(log.lines) == spawn.KEPT_LINES
    assert log.reason == ""
    assert spawn.EngineLog().reason == ""


def test_pump_cuts_endless_lines() -> None:
    """A line without end does not grow in memory, and lines split over reads come whole."""

    async def pumped() -> list[str]:
        stream, log = asyncio.StreamReader(), spawn.EngineLog()
        for chunk in (b"one\ntw", b"o\n", b"x" * 100_000, b"\n\xff end"):
            stream.feed_data(chunk)
        stream.feed_eof()
        await log.pump(stream)
        return list(log.lines)

    lines = asyncio.run(pumped())
    assert lines[:2] == ["one", "two"]
    assert max(map(len, lines)) == spawn.MAX_LINE
    assert lines[-1] == "\ufffd end"


def test_how_ended() -> None:
    """Ends are told in words."""
    assert spawn.how_ended(-9) == "was killed by SIGKILL"
    assert spawn.how_ended(1) == "ended with status 1"
    assert spawn.how_ended(None) == "does not end"
