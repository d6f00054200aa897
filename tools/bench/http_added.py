"""What moe-l2d adds to the time to the first token and to each chunk, over talking to the engine directly.

Both ways are measured in one run, in turn, over an engine that only sends. Run it: python tools/bench/http_added.py
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent))

from http_bench import Daemon, Stream, cli, daemon, percentile

ROUNDS = 150
TOKENS = 20
RATE = 400.0
WARM_UP = 20


def http_added(rounds: int = ROUNDS) -> dict[str, object]:
    """Milliseconds at the median and the 99th percentile, directly, through moe-l2d, and what it adds."""
    with daemon(slots=4) as d, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(d, rounds))


async def _measure(d: Daemon, rounds: int) -> dict[str, object]:
    ttft: dict[str, list[float]] = {"direct": [], "through": []}
    chunk: dict[str, list[float]] = {"direct": [], "through": []}
    for i in range(rounds + WARM_UP):
        for way in ("direct", "through") if i % 2 else ("through", "direct"):
            stream = await _one(d, way)
            if i < WARM_UP:
                continue
            ttft[way].append((stream.first - stream.asked) / 1e6)
            chunk[way] += [(come - sent) / 1e6 for _, sent, come in stream.events[1:]]
    result: dict[str, object] = {"rounds": rounds, "tokens": TOKENS, "rate": RATE}
    for name, values in (("ttft", ttft), ("chunk", chunk)):
        for share, word in ((0.5, "p50"), (0.99, "p99")):
            direct, through = (percentile(values[way], share) for way in ("direct", "through"))
            result[f"{name}_direct_ms_{word}"] = round(direct, 4)
            result[f"{name}_through_ms_{word}"] = round(through, 4)
            result[f"{name}_added_ms_{word}"] = round(through - direct, 4)
    return result


async def _one(d: Daemon, way: str) -> Stream:
    """One request on a connection that is already open: a client keeps its connection, too."""
    loop = asyncio.get_running_loop()
    stream = Stream(TOKENS, RATE)
    if way == "direct":
        await loop.create_unix_connection(lambda: stream, d.engine_socket)
    else:
        await loop.create_connection(lambda: stream, "127.0.0.1", d.port)
    await asyncio.sleep(0.002)
    stream.ask()
    await stream.done
    if len(stream.events) != TOKENS:
        raise RuntimeError(f"{way}: {len(stream.events)} of {TOKENS} tokens came")
    return stream


if __name__ == "__main__":
    sys.exit(cli(http_added(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)))
