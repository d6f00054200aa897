"""Decode and prompt speed of the engine with the plug-in over the same engine without it, in pairs.

Both sides are llama-bench of one build on one model, run in turn: stock (with its own repacking), plug-in, stock,
plug-in ... A pair's ratio is free of the machine's slow drift; the median over the pairs is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader


@dataclass(frozen=True)
class Speed:
    """Tokens a second of one run: prompt processing and decoding."""

    prompt: float
    decode: float


def bench_once(engine_dir: Path, plugin: Path | None, model: Path, tokens: tuple[int, int], repeats: int) -> Speed:
    """One llama-bench process; medians of its repeats, after its own warm-up.

    The plain engine has all experts in memory before it computes, so ours fills its arena first; loading is
    startup.py's subject.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith(("MOE_L2_", "GGML_"))}
    if plugin is not None:
        env |= {"GGML_BACKEND_PATH": str(plugin), "MOE_L2_PRELOAD": "1"}
    prompt, decode = tokens
    command = [str(engine_dir / "llama-bench"), "-m", str(model), "-lm", "mmap", "-o", "json", "-r", str(repeats)]
    command += ["-p", str(prompt), "-n", str(decode)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    by_kind = {bool(row["n_gen"]): statistics.median(row["samples_ts"]) for row in rows}
    return Speed(prompt=by_kind[False], decode=by_kind[True])


def read_bandwidth() -> float:
    """Bytes a second that all cores together read from memory: the median of five sums over 1 GiB."""
    cores = len(os.sched_getaffinity(0))
    parts = np.array_split(np.ones(1 << 27, dtype=np.float64), cores)
    rates = []
    for _ in range(5):
        threads = [threading.Thread(target=np.sum, args=(part,)) for part in parts]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        rates.append((1 << 30) / (time.perf_counter() - started))
    return statistics.median(rates)


def bytes_per_token(model: Path) -> int:
    """Weight bytes that decoding one token reads: all dense tensors but the embedding, and the experts used."""
    reader = GGUFReader(model)
    fields = {field.name.rpartition(".")[2]: field for field in reader.fields.values()}
    share = fields["expert_used_count"].contents() / fields["expert_count"].contents()
    total = 0.0
    for tensor in reader.tensors:
        if tensor.name != "token_embd.weight":
            total += int(tensor.n_bytes) * (share if "_exps." in tensor.name else 1.0)
    return int(total)


def compare(engine_dir: Path, plugin: Path, model: Path, pairs: int = 11, repeats: int = 3) -> dict[str, float]:
    """Median speeds and pairwise ratios (plug-in / stock)."""
    tokens = (256, 64)
    found: list[tuple[Speed, Speed]] = []
    for _ in range(pairs):
        stock = bench_once(engine_dir, None, model, tokens, repeats)
        ours = bench_once(engine_dir, plugin, model, tokens, repeats)
        found.append((stock, ours))
    return {
        "decode_stock": statistics.median(stock.decode for stock, _ in found),
        "decode": statistics.median(ours.decode for _, ours in found),
        "decode_ratio": statistics.median(ours.decode / stock.decode for stock, ours in found),
        "prompt_stock": statistics.median(stock.prompt for stock, _ in found),
        "prompt": statistics.median(ours.prompt for _, ours in found),
        "prompt_ratio": statistics.median(ours.prompt / stock.prompt for stock, ours in found),
        "decode_limit": read_bandwidth() / bytes_per_token(model),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    engine_dir, native_dir = Path(os.environ["MOE_L2_ENGINE_DIR"]), Path(os.environ["MOE_L2_NATIVE_DIR"])
    print(json.dumps(compare(engine_dir, native_dir / "libggml-moe-l2.so", args.model, args.pairs), indent=1))


if __name__ == "__main__":
    main()
