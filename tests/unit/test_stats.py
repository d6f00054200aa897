"""moe_l2d/stats.py, snapshot.py, metrics.py, notify.py's text, main.py's pure parts"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moe_l2d import main, metrics, snapshot
from moe_l2d.arena.arena import Counters
from moe_l2d.config import Config, parse
from moe_l2d.engine.state import EngineStatus, Phase
from moe_l2d.errors import ALL, ConfigError, EngineNotReady, from_code
from moe_l2d.model.gguf_facts import ModelFacts
from moe_l2d.notify import status_text
from moe_l2d.request import RequestRecord
from moe_l2d.stats import Stats

FACTS = ModelFacts((Path("/m/x.gguf"),), "a", "n", 1024, 4, 1, (), b"")
COUNTERS = Counters(10, 8, 2, 0, 500, 2, 1, 1, 0, 0, 10**9, 4, 4, 4096, 400, 200, 3, 30, 1, 0, True, 0, 5, 1, "file")


def record(**more: Any) -> RequestRecord:
    values: dict[str, Any] = {"id": "r", "path": "/", "status": 200, "outcome": "ok", "prompt_tokens": 7,
                              "generated_tokens": 11, "queued_s": 0.5, "ttft_s": 1.0, "total_s": 3.0}  # fmt: skip
    return RequestRecord(**(values | more))


def test_totals_and_rates() -> None:
    """Totals count since start; the speed of a stream leaves the first token's time out."""
    now = [100.0]
    stats = Stats(clock=lambda: now[0])
    stats.begin()
    stats.begin()
    now[0] = 110.0
    stats.record(record())
    stats.record(record(outcome="client_left", ttft_s=None, generated_tokens=None, prompt_tokens=None))
    s: Any = stats.snapshot()
    assert (s["active"], s["began"], s["generated_tokens"], s["prompt_tokens"]) == (0, 2, 11, 7)
    assert s["outcomes"] == {"ok": 1, "client_left": 1, "engine_died": 0, "error": 0}
    assert s["tokens_per_s"] == s["last_minute"]["tokens_per_s"] == 5.0
    assert s["last_minute"]["generated_per_s"] == pytest.approx(1.1)
    assert s["ttft_buckets"][5] == 1
    assert s["ttft_buckets"][4] == 0


def test_window_forgets() -> None:
    """After a minute the rates are of nothing, the totals stay."""
    now = [0.0]
    stats = Stats(clock=lambda: now[0])
    stats.begin()
    stats.record(record())
    now[0] = 61.0
    s: Any = stats.snapshot()
    assert s["last_minute"]["requests"] == 0
    assert s["last_minute"]["tokens_per_s"] is None
    assert s["tokens_per_s"] == 5.0


def test_arena_state() -> None:
    """In use, idle, inert and bypassed are told apart, and the last two warn."""

    def state(active: bool, bypassed: int, tokens: int) -> tuple[str, bool]:
        counters = Counters(**(vars(COUNTERS) | {"active": active, "bypassed": bypassed}))
        return snapshot.arena_state(counters, tokens), bool(snapshot.arena_warnings(counters, tokens))

    assert state(True, 0, 5) == ("in use", False)
    assert state(False, 0, 0) == ("idle", False)
    assert state(False, 0, 5) == ("inert", True)
    assert state(True, 2, 5) == ("bypassed", True)


def test_model_warnings() -> None:
    """A model without experts and a context beyond the training are said."""
    plain, context = snapshot.model_warnings(FACTS, "x", 4096)
    assert "no experts" in plain
    assert "4096" in context
    assert "1024" in context


def status(**more: Any) -> Any:
    engine = snapshot.engine(EngineStatus(Phase.READY, 1, 1, 0, "", 0.0), 2, 1, now=5.0)
    return {"version": "1", "pid": 1, "uptime_s": 5.0, "phase": "ready", "ready": True, "address": "a",
            "engine": engine, "model": snapshot.model(FACTS, "x"), "preload": "all", "loaded": 0.43,
            "warnings": []} | more  # fmt: skip


def test_status_text() -> None:
    """systemd is told what is going on, in one line."""
    assert status_text(status()) == "serving x, 43 % of its experts resident, 1 running"
    assert status_text(status(loaded=None)) == "serving x (no experts: plain engine), 1 running"
    assert status_text(status(phase="loading")) == "loading x"


def test_metrics() -> None:
    """/metrics is well-formed Prometheus text with the arena's counters, the histogram and the phase."""
    from prometheus_client.parser import text_string_to_metric_families

    stats = Stats()
    stats.begin()
    stats.record(record())
    requests = stats.snapshot()
    answer: Any = {"phase": "ready", "engine_restarts": 0, "requests": requests,
                   "arena": snapshot.arena(COUNTERS, requests), "warnings": []}  # fmt: skip
    text = metrics.exporter(status, lambda: answer)().decode()
    samples = {(s.name, tuple(s.labels.values())): s.value
               for family in text_string_to_metric_families(text) for s in family.samples}
    assert samples["moe_l2_arena_lookups_total", ()] == 10
    assert samples["moe_l2_arena_resident_bytes", ()] == 200
    assert samples["moe_l2_arena_bytes", ()] == 4096
    assert samples["moe_l2_engine_phase", ("ready",)] == 1
    assert samples["moe_l2_engine_phase", ("loading",)] == 0
    assert samples["moe_l2_requests_total", ("ok",)] == 1
    assert samples["moe_l2_time_to_first_token_seconds_bucket", ("1.0",)] == 1
    assert samples["moe_l2_time_to_first_token_seconds_count", ()] == 1


def test_errors_travel_by_their_word() -> None:
    """Every error keeps its kind over the control socket; codes are unique."""
    assert len({kind.code for kind in ALL}) == len(ALL)
    for kind in ALL:
        assert type(from_code(kind.code, "x")) is kind
    assert issubclass(EngineNotReady, from_code("engine", "").__class__)
    assert str(from_code("new_word", "a sentence")) == "a sentence"


def test_user_directories() -> None:
    """--user keeps everything below the user's own directories, and needs XDG_RUNTIME_DIR."""
    config = main.user_defaults({"HOME": "/home/u", "XDG_RUNTIME_DIR": "/run/user/7"})
    assert str(config.control_socket) == "/run/user/7/moe-l2/control.sock"
    assert config.paths.models_dir == "/home/u/.local/state/moe-l2/models"
    assert parse("[log]\nlevel='debug'", config).paths == config.paths
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        main.user_defaults({"HOME": "/home/u"})


def test_installation() -> None:
    """engine.dir wins over the environment, which wins over the system's directories."""
    assert main.installation(Config(), {}).engine_dir == Path("/usr/lib/moe-l2/engine")
    assert main.installation(Config(), {"MOE_L2_ENGINE_DIR": "/e"}).engine_dir == Path("/e")
    assert main.installation(parse("[engine]\ndir='/d'"), {"MOE_L2_ENGINE_DIR": "/e"}).engine_dir == Path("/d")
    assert main.installation(Config(), {"MOE_L2_NATIVE_DIR": "/n"}).native_dir == Path("/n")


def test_watchdog_is_for_us() -> None:
    """WATCHDOG_USEC counts only if WATCHDOG_PID is ours or absent."""
    assert main.watchdog_usec({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "5"}, 5) == 3000000
    assert main.watchdog_usec({"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "5"}, 6) is None
    assert main.watchdog_usec({"WATCHDOG_USEC": "3000000"}, 6) == 3000000
    assert main.watchdog_usec({}, 6) is None
