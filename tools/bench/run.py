"""`make bench`: everything that docs/benchmarks.md says, in one run; each figure beside its baseline of the same run.

Writes docs/results/serve.json and the table in docs/benchmarks.md between its two marks.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.bench.engine import compare
from tools.bench.http_added import http_added
from tools.bench.startup import startup
from tools.bench.streams import streams
from tools.live import DEMO_MODEL, ENGINE_DIR, PLUGIN
from tools.synth_model import SHAPES, write_model

ROOT = Path(__file__).resolve().parents[2]

RESULTS = ROOT / "docs/results/serve.json"
PAGE = ROOT / "docs/benchmarks.md"
BEGIN, END = "<!-- table: written by make bench -->", "<!-- end of table -->"
BUSY_LOAD = 0.7  # a load average above this before we start means that something else is running


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    ours: str
    baseline: str
    result: str
    goal: str
    met: bool | None  # None: no goal


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def models() -> Iterator[dict[str, Path]]:
    """The demo model and two generated ones with the shapes of Qwen3-30B-A3B, 1.8 and 2.0 GB; removed at the end."""
    with tempfile.TemporaryDirectory(prefix="moe-l2-bench-", dir="/var/tmp") as folder:
        found = {"demo (Q5_0, 21 MB)": DEMO_MODEL}
        for label, kind, layers in (
            ("Qwen3-30B shapes, Q4_K, 1.8 GB", "q4_k", 5),
            ("Qwen3-30B shapes, Q8_0, 2.0 GB", "q8_0", 3),
        ):
            path = Path(folder) / f"{kind}.gguf"
            say(f"writing {label}")
            write_model(path, replace(SHAPES["qwen3-30b-a3b"], layers=layers), kind, DEMO_MODEL)
            found[label] = path
        yield found


def measure(pairs: int) -> dict[str, Any]:
    results: dict[str, Any] = {"engine": {}}
    with models() as found:
        for label, path in found.items():
            n = pairs * 4 if path == DEMO_MODEL else pairs  # a run of it is short, and one disturbance spoils it
            say(f"engine, plug-in against plain, {n} pairs: {label}")
            results["engine"][label] = compare(ENGINE_DIR, PLUGIN, path, n)
        say("start-up, cold and warm")
        results["startup"] = startup(list(found.values())[1])
    say("what the daemon adds to a request")
    results["http"] = http_added()
    say("200 streams")
    results["streams"] = streams()
    return results


def summary(results: dict[str, Any]) -> dict[str, float]:
    """The keys of docs/results/serve.json; ratios are the worst over the models."""
    engine = results["engine"].values()
    return {
        "decode_ratio": round(min(e["decode_ratio"] for e in engine), 4),
        "prompt_ratio": round(min(e["prompt_ratio"] for e in engine), 4),
        "ttft_added_ms_p50": results["http"]["ttft_added_ms_p50"],
        "chunk_added_ms_p50": results["http"]["chunk_added_ms_p50"],
        "streams200_late_ms_p99": results["streams"]["worst_stream_late_ms_p99"],
        "rss_per_stream_kb": results["streams"]["rss_per_stream_kb"],
        "start_cold_s": round(results["startup"]["start_cold_s"], 3),
        "start_warm_s": round(results["startup"]["start_warm_s"], 3),
        "restart_bytes_reread": results["startup"]["restart_bytes_reread"],
    }


def rows(results: dict[str, Any], found: dict[str, float]) -> list[Row]:
    table = []
    for label, e in results["engine"].items():
        limit = f", memory allows {e['decode_limit']:.0f}"
        for kind, note in (("decode", limit), ("prompt", "")):
            ratio = e[f"{kind}_ratio"]
            ours, plain = (f"{e[key]:.1f} tokens/s" for key in (kind, f"{kind}_stock"))
            table.append(
                Row(f"{kind}, {label}", ours, f"{plain} (plain engine{note})", f"{ratio:.3f}", ">= 0.97", ratio >= 0.97)
            )
    http, start = results["http"], results["startup"]
    for key, what, goal in (("ttft", "time to first token", 1.0), ("chunk", "delay of a chunk", 0.2)):
        ours, plain = (f"{http[f'{key}_{way}_ms_p50']:.3f} ms" for way in ("through", "direct"))
        added = http[f"{key}_added_ms_p50"]
        table.append(
            Row(
                f"{what}, median",
                ours,
                f"{plain} (engine asked directly)",
                f"+{added:.3f} ms",
                f"< {goal} ms",
                added < goal,
            )
        )
    late = found["streams200_late_ms_p99"]
    sent = f"{results['streams']['engine_late_ms_p99']:.1f} ms (when the engine sent it)"
    table.append(
        Row("200 streams, worst stream's p99", f"{late:.1f} ms late", sent, f"{late:.1f} ms", "<= 50 ms", late <= 50)
    )
    idle = f"{results['streams']['rss_idle_kb'] / 1024:.0f} MiB without streams"
    table.append(Row("memory a stream", f"{found['rss_per_stream_kb']:.0f} kB", idle, "", "", None))
    plain = f"{start['start_plain_s']:.2f} s (plain engine, cold)"
    for name, what in (("start_cold_s", "start to first token, cold"), ("start_warm_s", "engine restart, arena warm")):
        share = start[name] / start["start_plain_s"]
        table.append(Row(what, f"{start[name]:.2f} s", plain, f"{share:.2f}", "", None))
    reread = start["restart_bytes_reread"]
    table.append(
        Row(
            "expert bytes read again",
            f"{reread:.0f}",
            f"{start['experts_mib']:.0f} MiB resident",
            f"{reread:.0f}",
            "0",
            reread == 0,
        )
    )
    return table


def markdown(table: list[Row], machine: str) -> str:
    lines = [f"Measured {time.strftime('%Y-%m-%d')} with `make bench` on {machine}.", ""]
    lines += ["| what | moe-l2 | baseline, same run | result | goal | |", "| --- | --- | --- | --- | --- | --- |"]
    for row in table:
        mark = "" if row.met is None else "met" if row.met else "**missed**"
        lines.append(f"| {row.what} | {row.ours} | {row.baseline} | {row.result} | {row.goal} | {mark} |")
    return "\n".join(lines)


def machine() -> str:
    cpu = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    flags = Path("/proc/cpuinfo").read_text()
    vector = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else platform.machine()
    memory = int(re.search(r"MemTotal:\s+(\d+)", Path("/proc/meminfo").read_text())[1])  # type: ignore[index]
    name = cpu[1] if cpu else platform.machine()
    cores, python = len(os.sched_getaffinity(0)), platform.python_version()
    return f"{cores} cores of {name} ({vector}), {memory / 2**20:.0f} GiB, Python {python}"


def write(table: str, results: dict[str, Any], found: dict[str, float]) -> None:
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(
        json.dumps({**found, "date": time.strftime("%Y-%m-%d"), "machine": machine(), "detail": results}, indent=1)
        + "\n"
    )
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}")


def show(table: list[Row]) -> None:
    """The table on the terminal, columns aligned."""
    cells = [("what", "moe-l2", "baseline", "result", "goal", "")]
    cells += [
        (r.what, r.ours, r.baseline, r.result, r.goal, "" if r.met is None else "met" if r.met else "MISSED")
        for r in table
    ]
    widths = [max(len(line[i]) for line in cells) for i in range(6)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=7, help="runs of each engine; the demo model: 4 times that")
    parser.add_argument("--no-write", action="store_true", help="leave docs/ alone")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    if load > BUSY_LOAD:
        say(f"another load disturbs this: the load average is {load:.1f} before anything was measured")
    try:
        results = measure(args.pairs)
    except subprocess.CalledProcessError as error:
        say(f"cannot measure: '{error.cmd[0]}' ended with status {error.returncode}: {error.stderr}")
        return 1
    found = summary(results)
    table = rows(results, found)
    if not args.no_write:
        write(markdown(table, machine()), results, found)
    show(table)
    return 0 if all(row.met is not False for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
