"""The control API: one table of methods, what each needs and answers.

A request is the msgpack map {v: 1, id, method, params}, an answer {id, ok: true, result} or
{id, ok: false, error: {code, message}}. A method that streams answers many times, until the caller hangs up.
moe-l2ctl imports this module, so it imports nothing slow.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

from moe_l2d.errors import BadRequest, NotFound

VERSION = 1
# Bounds what one peer can make the other hold; the largest answer is a few kilobytes a layer.
MAX_FRAME = 1 << 20


class Access(StrEnum):
    READ = "read"  # root, the daemon's own user, group moe-l2
    CHANGE = "change"  # root, the daemon's own user, group moe-l2-admin


def _number(default: float, low: float, high: float) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True)
class Nothing:
    """A method without parameters."""


@dataclass(frozen=True)
class Watch:
    interval_s: float = _number(1.0, 0.1, 3600.0)


@dataclass(frozen=True)
class ReadyWait:
    timeout_s: float = _number(600.0, 0.0, 86400.0)


class EngineAnswer(TypedDict):
    phase: str
    detail: str  # one sentence, "" when all is well
    pid: int | None
    generation: int
    restarts: int
    since_s: float  # how long it has been in this phase
    slots: int
    active: int  # requests that it computes


class ModelAnswer(TypedDict):
    name: str
    path: str
    shards: int
    architecture: str
    bytes: int
    moe: bool
    experts: int  # (layer, index) pairs
    expert_bytes: int
    fingerprint: str


class StatusAnswer(TypedDict):
    version: str
    pid: int
    uptime_s: float
    phase: str  # of the engine, or "draining"
    ready: bool  # a request would be served now
    address: str  # of the HTTP API
    engine: EngineAnswer
    model: ModelAnswer
    preload: str  # of arena.preload
    memory: str  # how much the arena may take, and why
    loaded: float | None  # share of the experts that are resident; None without an arena
    warnings: list[str]  # whole sentences


class ArenaAnswer(TypedDict):
    lookups: int
    hits: int
    misses: int
    hit_rate: float | None
    evictions: int
    resident: int
    experts: int
    slots: int  # experts that the arena has room for
    resident_bytes: int
    arena_bytes: int
    bytes_read: int
    preloaded: int
    preloaded_used: int
    preloaded_wasted: int
    streamed: int  # read past the slots, for batches that need more than there are
    load_wait_s: float
    graphs: int
    tokens: int
    cuts: int
    byte_layout: str
    state: str  # "in use", "idle" (no request yet), "inert" (requests ran and it saw none), "bypassed" (in part)


class StatsAnswer(TypedDict):
    phase: str
    engine_restarts: int
    requests: dict[str, Any]  # stats.Stats.snapshot()
    arena: ArenaAnswer | None  # None: the model has no experts
    warnings: list[str]


class ReadyAnswer(TypedDict):
    waited_s: float


class DoneAnswer(TypedDict):
    """The change was accepted; what follows is to be seen in `status`."""

    accepted: bool


class ConfigAnswer(TypedDict):
    file: str | None  # None: built-in defaults only
    config: dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Method:
    name: str
    access: Access
    params: type[Any]
    answer: type[Any]
    streams: bool = False


TABLE: tuple[Method, ...] = (
    Method("status", Access.READ, Nothing, StatusAnswer),
    Method("stats", Access.READ, Nothing, StatsAnswer),
    Method("watch", Access.READ, Watch, StatsAnswer, streams=True),
    Method("ready.wait", Access.READ, ReadyWait, ReadyAnswer),
    Method("config.show", Access.READ, Nothing, ConfigAnswer),
    Method("engine.restart", Access.CHANGE, Nothing, DoneAnswer),
    Method("shutdown", Access.CHANGE, Nothing, DoneAnswer),
)
METHODS = {method.name: method for method in TABLE}


@dataclass(frozen=True)
class Call:
    """A request that is well-formed."""

    id: int | str | None
    method: Method
    params: Any  # an instance of method.params


def parse_call(frame: object) -> Call:
    """The call that a decoded frame makes; BadRequest or NotFound say what is wrong with it. Pure."""
    if not isinstance(frame, dict):
        raise BadRequest("cannot read the request: it must be a map {v, id, method, params}")
    version, name, params = frame.get("v"), frame.get("method"), frame.get("params")
    if version != VERSION or isinstance(version, bool):
        raise BadRequest(f"cannot serve protocol version '{_short(version)}': this moe-l2d speaks version {VERSION}")
    unknown = set(frame) - {"v", "id", "method", "params"}
    if unknown:
        raise BadRequest(f"cannot read the request: it has the unknown key '{_short(sorted(map(str, unknown))[0])}'")
    if not isinstance(name, str):
        raise BadRequest("cannot read the request: 'method' must be a string")
    method = METHODS.get(name)
    if method is None:
        raise NotFound(f"cannot call method '{_short(name)}': there is no such method, "
                       f"known are {', '.join(sorted(METHODS))}")
    return Call(call_id(frame), method, _params(method, {} if params is None else params))


def call_id(frame: object) -> int | str | None:
    """The id to answer with, also to a frame that is wrong otherwise."""
    value = frame.get("id") if isinstance(frame, dict) else None
    return value if isinstance(value, (int, str)) else None


def _params(method: Method, params: object) -> Any:
    if not isinstance(params, dict):
        raise BadRequest(f"cannot call method '{method.name}': 'params' must be a map")
    known = {f.name: f for f in dataclasses.fields(method.params)}
    for name, value in params.items():
        if name not in known:
            raise BadRequest(f"cannot call method '{method.name}': it has no parameter '{_short(name)}'")
        low, high = known[name].metadata["low"], known[name].metadata["high"]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise BadRequest(f"cannot call method '{method.name}' with {name} '{_short(value)}': "
                             f"it must be a number from {low:g} to {high:g}")
    return method.params(**params)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
