"""Values as text for people, or as JSON for programs."""

from __future__ import annotations

import json
from typing import Any

SCHEMA = 1
INDENT = 16


def to_json(value: dict[str, Any]) -> str:
    """One line; `schema` grows when a key changes its meaning or goes away."""
    return json.dumps({"schema": SCHEMA, **value}, ensure_ascii=False)


def rows(pairs: list[tuple[str, str]]) -> str:
    return "\n".join(f"{name + ':':<{INDENT}}{text}" for name, text in pairs)


def size(n: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"


def duration(seconds: float) -> str:
    """93784 -> "1 d 2 h"; 3.21 -> "3.2 s"."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    for long, short, name, sub in ((86400, 3600, "d", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s")):
        if whole >= long:
            return f"{whole // long} {name} {whole % long // short} {sub}"
    return f"{whole} s"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def status(s: dict[str, Any]) -> str:
    engine, model = s["engine"], s["model"]
    detail = f": {engine['detail']}" if engine["detail"] else ""
    pid = f", pid {engine['pid']}" if engine["pid"] else ""
    pairs = [
        ("moe-l2d", f"{s['version']}, pid {s['pid']}, up {duration(s['uptime_s'])}"),
        ("state", s["phase"] + (", serving" if s["ready"] else ", not serving")),
        ("HTTP", f"http://{s['address']}"),
        ("model", f"{model['name']} ({model['architecture'] or 'unknown architecture'}, {size(model['bytes'])})"),
        ("file", model["path"] + (f" and {model['shards'] - 1} more shards" if model["shards"] > 1 else "")),
    ]
    if model["moe"]:
        loaded = "" if s["loaded"] is None else f", {percent(s['loaded'])} resident, preload {s['preload']}"
        pairs.append(("experts", f"{model['experts']} ({size(model['expert_bytes'])}){loaded}"))
        pairs.append(("memory", s["memory"]))
    else:
        pairs.append(("experts", "none: served by the plain engine"))
    busy = f"{engine['active']} of {engine['slots']} slots busy"
    lives = f"start {engine['generation']}, {engine['restarts']} restarts"
    pairs.append(("engine", f"{engine['phase']} for {duration(engine['since_s'])}{pid}, {lives}, {busy}{detail}"))
    return _with_warnings(rows(pairs), s["warnings"])


_STATES = {
    "in use": "in use",
    "idle": "not used yet (no request so far)",
    "inert": "INERT: requests were answered without it",
    "bypassed": "BYPASSED by some of the expert tensors",
}


def stats(s: dict[str, Any]) -> str:
    r, arena = s["requests"], s["arena"]
    minute, ended = r["last_minute"], r["outcomes"]
    speed = f"{rate(minute['tokens_per_s'])} tokens/s (last minute), {rate(r['tokens_per_s'])} (since start)"
    failed = ", ".join(f"{n} {name.replace('_', ' ')}" for name, n in ended.items() if n and name != "ok")
    pairs = [
        ("engine", f"{s['phase']}, {s['engine_restarts']} restarts"),
        ("requests", f"{r['active']} active, {ended['ok']} answered" + (f", {failed}" if failed else "")),
        ("tokens", f"{r['generated_tokens']} generated, {r['prompt_tokens']} of prompts"),
        ("speed", speed),
    ]
    if minute["ttft_p50_s"] is not None:
        first = f"{1e3 * minute['ttft_p50_s']:.0f} ms (median), {1e3 * minute['ttft_p95_s']:.0f} ms (95 %)"
        pairs.append(("first token", first))
    if arena is None:
        pairs.append(("arena", "none: the model has no experts"))
        return _with_warnings(rows(pairs), s["warnings"])
    # a hit rate says nothing without the speed beside it
    hit_rate = f"{percent(arena['hit_rate'])} at {rate(minute['tokens_per_s'] or r['tokens_per_s'])} tokens/s"
    pairs += [
        ("lookups", f"{arena['lookups']}: {arena['hits']} hits, {arena['misses']} misses"),
        ("hit rate", hit_rate),
        ("experts", f"{arena['resident']} of {arena['experts']} resident in {arena['slots']} slots, "
                    f"{arena['preloaded']} by preload, {arena['evictions']} evicted, {arena['streamed']} streamed"),
        ("arena", f"{size(arena['resident_bytes'])} of {size(arena['arena_bytes'])}, {_STATES[arena['state']]}, "
                  f"layout {arena['byte_layout']}"),
        ("read", f"{size(arena['bytes_read'])} from disk, {duration(arena['load_wait_s'])} waited for it"),
    ]  # fmt: skip
    return _with_warnings(rows(pairs), s["warnings"])


def config(answer: dict[str, Any]) -> str:
    """As TOML that moe-l2d reads."""
    lines = [f"# {answer['file'] or 'built-in defaults, no file'}"]
    for section, keys in answer["config"].items():
        lines += ["", f"[{section}]"] + [f"{key} = {_toml(value)}" for key, value in keys.items()]
    return "\n".join(lines)


def _toml(value: Any) -> str:
    # JSON's strings, numbers, booleans and lists of strings are TOML's, too
    return json.dumps(value, ensure_ascii=False)


def _with_warnings(text: str, warnings: list[str]) -> str:
    return "\n".join([text, *(f"{'warning:':<{INDENT}}{w}" for w in warnings)])
