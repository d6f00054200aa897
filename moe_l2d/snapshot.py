"""Values of the daemon's parts become the answers of `status` and `stats`. Pure."""

from __future__ import annotations

import time
from typing import Any

from moe_l2d import api
from moe_l2d.arena.arena import Counters
from moe_l2d.engine.state import EngineStatus
from moe_l2d.model.gguf_facts import ModelFacts


def engine(status: EngineStatus, slots: int, active: int, now: float | None = None) -> api.EngineAnswer:
    return {
        "phase": str(status.phase),
        "detail": status.detail,
        "pid": status.pid,
        "generation": status.generation,
        "restarts": status.restarts,
        "since_s": (time.monotonic() if now is None else now) - status.since,
        "slots": slots,
        "active": active,
    }


def model(facts: ModelFacts, name: str) -> api.ModelAnswer:
    return {
        "name": name,
        "path": str(facts.paths[0]),
        "shards": len(facts.paths),
        "architecture": facts.architecture,
        "bytes": facts.file_bytes,
        "moe": facts.is_moe,
        "experts": facts.n_experts,
        "expert_bytes": facts.expert_bytes,
        "fingerprint": facts.fingerprint.hex(),
    }


def arena(counters: Counters, requests: dict[str, Any]) -> api.ArenaAnswer:
    return {
        "lookups": counters.lookups,
        "hits": counters.hits,
        "misses": counters.misses,
        "hit_rate": counters.hits / counters.lookups if counters.lookups else None,
        "evictions": counters.evictions,
        "resident": counters.resident,
        "experts": counters.experts,
        "slots": counters.slots,
        "resident_bytes": counters.resident_bytes,
        "arena_bytes": counters.arena_bytes,
        "bytes_read": counters.bytes_read,
        "preloaded": counters.preloaded,
        "preloaded_used": counters.preloaded_used,
        "preloaded_wasted": counters.preloaded_wasted,
        "streamed": counters.streamed,
        "load_wait_s": counters.load_ns / 1e9,
        "graphs": counters.graphs,
        "tokens": counters.tokens,
        "cuts": counters.cuts,
        "byte_layout": counters.byte_layout,
        "state": arena_state(counters, int(requests["generated_tokens"])),
    }


def arena_state(counters: Counters, generated_tokens: int) -> str:
    if counters.bypassed:
        return "bypassed"
    if counters.active:
        return "in use"
    return "inert" if generated_tokens else "idle"


def arena_warnings(counters: Counters, generated_tokens: int) -> list[str]:
    """What must not stay unsaid about the arena."""
    state = arena_state(counters, generated_tokens)
    if state == "bypassed":
        return [f"the engine computes {counters.bypassed} expert tensors without the arena: "
                f"the cache is bypassed for them, see the engine's log"]
    if state == "inert":
        return ["the engine answered requests and never used the arena: the cache is inert, see the engine's log"]
    return []


def model_warnings(facts: ModelFacts, name: str, context: int) -> list[str]:
    warnings = []
    if not facts.is_moe:
        warnings.append(f"model '{name}' has no experts: the plain engine serves it, without plug-in and arena")
    if facts.context_train is not None and context > facts.context_train:
        warnings.append(f"model.context is {context} and model '{name}' was trained for {facts.context_train} tokens: "
                        f"answers beyond that are of no use")
    return warnings
