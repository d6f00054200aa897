"""Records of finished requests become totals since start and rates over the last minute. No text, ever."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_l2d.request import RequestRecord

WINDOW_S = 60.0
OUTCOMES = ("ok", "client_left", "engine_died", "error")
TTFT_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
# A window of a busy minute; more than this many requests a minute are rated over fewer seconds.
MAX_WINDOW_RECORDS = 20_000


@dataclass(frozen=True)
class _Ended:
    at: float
    record: RequestRecord


class Stats:
    """Fed by the pipeline on the event loop, read by anybody on it. Not for several threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = clock()
        self._active = 0
        self._began = 0
        self._outcomes = dict.fromkeys(OUTCOMES, 0)
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._decode_s = 0.0
        self._decode_tokens = 0
        self._queued_s = 0.0
        self._ttft_sum_s = 0.0
        self._ttft_count = 0
        self._ttft_buckets = [0] * len(TTFT_BUCKETS_S)
        self._window: deque[_Ended] = deque(maxlen=MAX_WINDOW_RECORDS)

    def begin(self) -> None:
        """A request was taken in; exactly one record() follows."""
        self._began += 1
        self._active += 1

    def record(self, record: RequestRecord) -> None:
        """A request that began is over."""
        self._active = max(0, self._active - 1)
        self._outcomes[record.outcome] += 1
        self._prompt_tokens += record.prompt_tokens or 0
        self._generated_tokens += record.generated_tokens or 0
        self._queued_s += record.queued_s
        tokens, seconds = decode_share(record)
        self._decode_tokens += tokens
        self._decode_s += seconds
        if record.ttft_s is not None:
            self._ttft_sum_s += record.ttft_s
            self._ttft_count += 1
            for i, bound in enumerate(TTFT_BUCKETS_S):
                self._ttft_buckets[i] += record.ttft_s <= bound
        self._window.append(_Ended(self._clock(), record))

    def snapshot(self) -> dict[str, object]:
        """All of it as plain values: `totals` since start and `last_minute`."""
        now = self._clock()
        while self._window and self._window[0].at < now - WINDOW_S:
            self._window.popleft()
        return {
            "uptime_s": now - self._started,
            "active": self._active,
            "began": self._began,
            "outcomes": dict(self._outcomes),
            "prompt_tokens": self._prompt_tokens,
            "generated_tokens": self._generated_tokens,
            "queued_s": self._queued_s,
            "tokens_per_s": _ratio(self._decode_tokens, self._decode_s),
            "ttft_sum_s": self._ttft_sum_s,
            "ttft_count": self._ttft_count,
            "ttft_buckets": list(self._ttft_buckets),
            "last_minute": self._last_minute(now),
        }

    def _last_minute(self, now: float) -> dict[str, object]:
        records = [ended.record for ended in self._window]
        span = max(1e-9, min(WINDOW_S, now - self._started))
        if len(self._window) == MAX_WINDOW_RECORDS:
            span = max(1e-9, now - self._window[0].at)
        shares = [decode_share(r) for r in records]
        ttfts = sorted(r.ttft_s for r in records if r.ttft_s is not None)
        return {
            "requests": len(records),
            "requests_per_s": len(records) / span,
            # what one stream sees: tokens after the first over the time they took
            "tokens_per_s": _ratio(sum(t for t, _ in shares), sum(s for _, s in shares)),
            # what the machine delivers, all streams and idle time together
            "generated_per_s": sum(r.generated_tokens or 0 for r in records) / span,
            "prompt_per_s": sum(r.prompt_tokens or 0 for r in records) / span,
            "ttft_p50_s": percentile(ttfts, 0.5),
            "ttft_p95_s": percentile(ttfts, 0.95),
            "queued_p95_s": percentile(sorted(r.queued_s for r in records), 0.95),
        }


def decode_share(record: RequestRecord) -> tuple[int, float]:
    """(tokens, seconds) of pure generation: the first token's time belongs to the prompt."""
    if record.ttft_s is None or (record.generated_tokens or 0) < 2:
        return 0, 0.0
    seconds = record.total_s - record.ttft_s
    return (record.generated_tokens or 0) - 1, max(0.0, seconds)


def percentile(ordered: list[float], share: float) -> float | None:
    """The value below which `share` of the ordered list lies; None of nothing."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _ratio(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds > 0 else None
