"""Snapshots become Prometheus text. Names end in their unit; all begin with moe_l2_."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from moe_l2d import api
from moe_l2d.engine.state import Phase
from moe_l2d.stats import TTFT_BUCKETS_S

_ARENA_COUNTERS = {
    "lookups": "Expert lookups, one for each distinct expert that a layer needed in a graph",
    "hits": "Lookups that found the expert resident",
    "misses": "Lookups that had to load the expert",
    "evictions": "Experts evicted",
    "bytes_read": "Bytes of experts read from disk",
    "preloaded": "Experts loaded before they were needed",
    "graphs": "Graphs with expert layers that were computed",
    "tokens": "Tokens routed",
}
_ARENA_GAUGES = {
    "resident": "Experts in memory",
    "experts": "Experts of the model, all layers",
    "resident_bytes": "Bytes of the experts in memory",
    "arena_bytes": "Size of the arena",
}


class _Snapshots(Collector):
    def __init__(self, status: Callable[[], api.StatusAnswer], stats: Callable[[], api.StatsAnswer]) -> None:
        self._status = status
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        status, stats = self._status(), self._stats()
        yield from _daemon(status)
        yield from _requests(stats)
        if stats["arena"] is not None:
            yield from _arena(stats["arena"])


def _daemon(status: api.StatusAnswer) -> Iterator[Metric]:
    info = GaugeMetricFamily("moe_l2_info", "Version and model", labels=["version", "model"])
    info.add_metric([status["version"], status["model"]["name"]], 1)
    yield info
    yield GaugeMetricFamily("moe_l2_uptime_seconds", "Time since start", value=status["uptime_s"])
    yield GaugeMetricFamily("moe_l2_ready", "1 when a request would be served now", value=status["ready"])
    phase = GaugeMetricFamily("moe_l2_engine_phase", "1 for the phase that the engine is in", labels=["phase"])
    for one in Phase:
        phase.add_metric([str(one)], status["engine"]["phase"] == one)
    yield phase
    restarts, slots = status["engine"]["restarts"], status["engine"]["slots"]
    yield CounterMetricFamily("moe_l2_engine_restarts", "Times the engine was started again", value=restarts)
    yield GaugeMetricFamily("moe_l2_engine_slots", "Requests that it can compute at once", value=slots)


def _requests(stats: api.StatsAnswer) -> Iterator[Metric]:
    r = stats["requests"]
    yield GaugeMetricFamily("moe_l2_requests_active", "Requests taken in and not yet over", value=r["active"])
    outcomes = CounterMetricFamily("moe_l2_requests", "Requests that ended", labels=["outcome"])
    for outcome, n in r["outcomes"].items():
        outcomes.add_metric([outcome], n)
    yield outcomes
    yield CounterMetricFamily("moe_l2_prompt_tokens", "Tokens of prompts", value=r["prompt_tokens"])
    yield CounterMetricFamily("moe_l2_generated_tokens", "Tokens generated", value=r["generated_tokens"])
    yield CounterMetricFamily("moe_l2_queued_seconds", "Time that requests waited for a slot", value=r["queued_s"])
    speed = GaugeMetricFamily("moe_l2_stream_tokens_per_second", "Speed of one stream, mean over the last minute")
    if r["last_minute"]["tokens_per_s"] is not None:
        speed.add_metric([], r["last_minute"]["tokens_per_s"])
    yield speed
    buckets = [(str(bound), n) for bound, n in zip(TTFT_BUCKETS_S, r["ttft_buckets"], strict=True)]
    yield HistogramMetricFamily(
        "moe_l2_time_to_first_token_seconds", "From the request's arrival to its first streamed event",
        buckets=[*buckets, ("+Inf", r["ttft_count"])], sum_value=r["ttft_sum_s"],
    )  # fmt: skip


def _arena(arena: api.ArenaAnswer) -> Iterator[Metric]:
    values: dict[str, object] = dict(arena)
    for name, help in _ARENA_COUNTERS.items():
        yield CounterMetricFamily(f"moe_l2_arena_{name}", help, value=_float(values[name]))
    for name, help in _ARENA_GAUGES.items():
        short = name.removeprefix("arena_")
        yield GaugeMetricFamily(f"moe_l2_arena_{short}", help, value=_float(values[name]))
    waited = "Time that graphs waited for experts to be loaded"
    yield CounterMetricFamily("moe_l2_arena_load_wait_seconds", waited, value=arena["load_wait_s"])
    state = GaugeMetricFamily("moe_l2_arena_state", "1 for the state that the arena is in", labels=["state"])
    for one in ("in use", "idle", "inert", "bypassed"):
        state.add_metric([one.replace(" ", "_")], arena["state"] == one)
    yield state


def _float(value: object) -> float:
    assert isinstance(value, (int, float))
    return float(value)


def exporter(status: Callable[[], api.StatusAnswer], stats: Callable[[], api.StatsAnswer]) -> Callable[[], bytes]:
    """A function that renders /metrics from fresh snapshots."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshots(status, stats))
    return lambda: generate_latest(registry)
