"""Many streams at once through moe-l2d: how late each token is, and what a stream costs in memory and CPU.

The engine sends 20 tokens a second to each of 200 streams and does nothing else. Lateness is counted from the moment
when the engine owed the token, so it includes the engine's and the client's own. Run it: python tools/bench/streams.py
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent))

from http_bench import Daemon, Stream, cli, daemon, percentile

STREAMS = 200
RATE = 20.0
SECONDS = 10.0
WARM_UP = 2  # enough to have every module loaded; more would count streams' memory as idle


def streams(n: int = STREAMS, seconds: float = SECONDS) -> dict[str, object]:
    """Lateness in ms over all tokens and of the worst stream, KB of memory per stream, share of a core used."""
    with daemon(slots=n) as d, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(d, n, seconds))


async def _measure(d: Daemon, n: int, seconds: float) -> dict[str, object]:
    await _run(d, WARM_UP, 5)
    idle_kb = d.rss_kb
    busy = asyncio.create_task(_run(d, n, round(seconds * RATE)))
    await asyncio.sleep(seconds / 2)
    cpu, began = d.cpu_s, time.monotonic()
    await asyncio.sleep(seconds / 4)
    cpu_share = (d.cpu_s - cpu) / (time.monotonic() - began)
    busy_kb = d.rss_kb
    done = await busy
    late = [[(come - due) / 1e6 for due, _, come in s.events] for s in done]
    engine = [(sent - due) / 1e6 for s in done for due, sent, _ in s.events]
    every = [ms for one in late for ms in one]
    return {
        "streams": n,
        "rate": RATE,
        "seconds": seconds,
        "tokens": len(every),
        "late_ms_p50": round(percentile(every, 0.5), 3),
        "late_ms_p99": round(percentile(every, 0.99), 3),
        "late_ms_max": round(max(every), 3),
        "worst_stream_late_ms_p99": round(max(percentile(one, 0.99) for one in late), 3),
        "engine_late_ms_p99": round(percentile(engine, 0.99), 3),
        "rss_idle_kb": idle_kb,
        "rss_busy_kb": busy_kb,
        "rss_per_stream_kb": round((busy_kb - idle_kb) / n, 1),
        "daemon_cpu_share": round(cpu_share, 3),
    }


async def _run(d: Daemon, n: int, tokens: int) -> list[Stream]:
    """`n` streams that begin spread over one token's time, all of them whole at the end."""
    loop = asyncio.get_running_loop()
    made = []
    for _ in range(n):
        stream = Stream(tokens, RATE)
        await loop.create_connection(lambda s=stream: s, "127.0.0.1", d.port)  # type: ignore[misc]
        stream.ask()
        made.append(stream)
        await asyncio.sleep(1 / RATE / n)
    await asyncio.gather(*(s.done for s in made))
    for stream in made:
        if len(stream.events) != tokens:
            raise RuntimeError(f"a stream brought {len(stream.events)} of {tokens} tokens")
    return made


if __name__ == "__main__":
    sys.exit(cli(streams(int(sys.argv[1]) if len(sys.argv) > 1 else STREAMS)))
