"""One function for each row of api.TABLE."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Protocol

from moe_l2d import api
from moe_l2d.engine.state import EngineStatus, Phase
from moe_l2d.errors import EngineNotReady, Timeout


class Served(Protocol):
    """What the handlers may ask of the daemon."""

    def status(self) -> api.StatusAnswer: ...

    def stats(self) -> api.StatsAnswer: ...

    def config_answer(self) -> api.ConfigAnswer: ...

    async def wait_ready(self, timeout_s: float) -> None: ...

    @property
    def engine_status(self) -> EngineStatus: ...

    def restart_engine(self) -> None: ...

    def shut_down(self) -> None: ...


async def status(daemon: Served, params: api.Nothing) -> api.StatusAnswer:
    return daemon.status()


async def stats(daemon: Served, params: api.Nothing) -> api.StatsAnswer:
    return daemon.stats()


async def watch(daemon: Served, params: api.Watch) -> AsyncGenerator[api.StatsAnswer, None]:
    while True:
        yield daemon.stats()
        await asyncio.sleep(params.interval_s)


async def ready_wait(daemon: Served, params: api.ReadyWait) -> api.ReadyAnswer:
    began = time.monotonic()
    try:
        await daemon.wait_ready(params.timeout_s)
    except EngineNotReady:
        now = daemon.engine_status
        if now.phase in (Phase.FAILED, Phase.STOPPING, Phase.STOPPED):
            raise
        why = f" ({now.detail})" if now.detail else ""
        limit = f"{params.timeout_s:g} s"
        raise Timeout(f"cannot wait longer than '{limit}' for the engine: it is {now.phase}{why}") from None
    return {"waited_s": time.monotonic() - began}


async def config_show(daemon: Served, params: api.Nothing) -> api.ConfigAnswer:
    return daemon.config_answer()


async def engine_restart(daemon: Served, params: api.Nothing) -> api.DoneAnswer:
    daemon.restart_engine()
    return {"accepted": True}


async def shutdown(daemon: Served, params: api.Nothing) -> api.DoneAnswer:
    daemon.shut_down()
    return {"accepted": True}


ONCE: dict[str, Callable[[Served, Any], Awaitable[Any]]] = {
    "status": status,
    "stats": stats,
    "ready.wait": ready_wait,
    "config.show": config_show,
    "engine.restart": engine_restart,
    "shutdown": shutdown,
}
STREAMS: dict[str, Callable[[Served, Any], AsyncGenerator[Any, None]]] = {"watch": watch}
