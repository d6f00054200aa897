"""Builds the parts, starts them in the order in which data flows, and stops them in reverse."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_l2d import __version__, api, metrics, snapshot
from moe_l2d import log as logs
from moe_l2d.arena import preload
from moe_l2d.arena.arena import Arena, Library, limits
from moe_l2d.config import Config, Installation, changed_keys, is_loopback
from moe_l2d.control import claim, peer
from moe_l2d.control.server import ControlServer
from moe_l2d.engine import command
from moe_l2d.engine.process import Engine, Timing
from moe_l2d.engine.state import EngineStatus, Phase
from moe_l2d.errors import ConfigError, EngineError
from moe_l2d.http.front import Front
from moe_l2d.model import choice, gguf_facts, machine, placement
from moe_l2d.notify import Notifier, status_text
from moe_l2d.stats import Stats

log = logging.getLogger("moe_l2d")

# Keys that SIGHUP can change in a running daemon; every other key needs a restart, and is named then.
RELOADABLE = frozenset({
    "log.level", "server.max_waiting", "server.queue_timeout_s", "server.drain_s", "server.write_timeout_s",
    "server.max_body_mib", "engine.stall_s", "engine.start_timeout_s", "engine.restart_backoff_s",
    "engine.restart_backoff_max_s", "arena.preload_mib_per_s",
})  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """What main found out from the command line and the environment."""

    config: Config
    installation: Installation
    environment: Mapping[str, str]  # of the daemon; the engine gets a small part of it
    config_file: Path | None
    reload: Callable[[], Config]


def timing(config: Config) -> Timing:
    e = config.engine
    return Timing(e.start_timeout_s, e.stall_s, e.restart_backoff_s, e.restart_backoff_max_s)


class Daemon:
    """All parts of a running moe-l2d; implements control.handlers.Served. To be made on the event loop."""

    def __init__(self, setting: Setting, notifier: Notifier) -> None:
        self._setting = setting
        self._notifier = notifier
        self.config = setting.config
        self._started = time.monotonic()
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._draining = False
        self._address = ""
        self._warnings: list[str] = []
        self._parts = ExitStack()
        self._arena: Arena | None = None
        self._plan = placement.Plan(0, "none: the model has no experts")

    # --- start and stop

    async def run(self) -> None:
        """Serve until told to stop. MoeError if it cannot start."""
        with self._parts:
            control_socket = self._claim()
            self._build()
            async with AsyncExitStack() as listening:
                control = ControlServer(self.config.control_socket, self, peer.rights())
                await self._front.start()
                self._address = _shown(*self._front.address)
                listening.push_async_callback(self._front.stop)
                await control.start(control_socket)
                listening.push_async_callback(control.stop)
                await self._serve(control)

    def _claim(self) -> Any:
        directory = self.config.runtime_dir
        lock = claim.lock_runtime_dir(directory)
        self._parts.callback(os.close, lock)
        sock = claim.bind_socket(self.config.control_socket)
        self._parts.callback(self.config.control_socket.unlink, missing_ok=True)
        self._parts.callback(sock.close)
        return sock

    def _build(self) -> None:
        config, install = self.config, self._setting.installation
        _need(install.engine_dir / command.PROGRAM, "the engine", "engine.dir or MOE_L2_ENGINE_DIR")
        path = choice.choose(config.model.path, config.paths.models_dir)
        self._facts = facts = gguf_facts.read(path)
        self._name = config.model.name or facts.stem
        self._warnings += snapshot.model_warnings(facts, self._name, config.model.context)
        if not is_loopback(config.server.host_port[0]):
            self._warnings.append(f"server.listen is {config.server.listen}: everybody who reaches that address "
                                  f"may use the model, there is no authentication")
        if facts.is_moe:
            self._arena = self._make_arena()
        threads = config.engine.threads or machine.usable_cores()
        command_line = command.build(
            config, install, facts, name=self._name, threads=threads, environment=self._setting.environment,
            arena_fds=self._arena.fds if self._arena else None, direct=self._plan.capacity > 0,
        )  # fmt: skip
        (config.runtime_dir / "engine").mkdir(mode=0o700, exist_ok=True)
        files = gguf_facts.identity(facts.paths)

        def start_with() -> command.Command:
            """The arena holds experts of the files as they were: another file's dense weights do not go with them."""
            for path, before, now in zip(facts.paths, files, gguf_facts.identity(facts.paths), strict=True):
                if before != now:
                    raise EngineError(f"cannot start the engine: model file '{path}' was replaced or changed since "
                                      f"moe-l2d was started; restart moe-l2d to serve the new one")
            return command_line

        self._engine = Engine(start_with, config.engine_socket, config.engine.slots, timing(config),
                              graphs=self._graphs)
        self._stats = Stats()
        named = dataclasses.replace(config.model, path=str(path), name=self._name)
        self._front = Front(dataclasses.replace(config, model=named), self._engine, self._stats,
                            self._snapshot, metrics.exporter(self.status, self.stats))
        for warning in self._warnings:
            log.warning("%s", warning)

    def _make_arena(self) -> Arena:
        native = self._setting.installation.native_dir
        _need(native / command.PLUGIN, "the engine's plug-in", "MOE_L2_NATIVE_DIR")
        library = Library(native)
        self._plan = self._place(library)
        arena = Arena.create(library, self._facts.experts, self._facts.fingerprint, self._plan.capacity)
        self._parts.callback(arena.close)
        arena.set_preload_rate(self.config.arena.preload_mib_per_s)
        if self.config.arena.preload == "all":
            arena.request(preload.order(arena.states(), arena.uses()))
        slots = arena.counters().slots
        n = self._facts.n_experts
        log.info("arena: room for %d of %d experts; memory.arena is %s", slots, n, self._plan.reason)
        return arena

    def _place(self, library: Library) -> placement.Plan:
        facts, config = self._facts, self.config
        least, most = limits(library, facts.experts)
        context = facts.kv_bytes * config.model.context * config.engine.slots
        needs = placement.Needs(least, most, facts.file_bytes - facts.expert_bytes + context)
        found = placement.plan(config.memory.arena, needs, machine.memory())
        if found.warning:
            self._warnings.append(found.warning)
        return found

    async def _serve(self, control: ControlServer) -> None:
        self._catch_signals()
        self._notifier.ready()
        log.info("moe-l2d %s serves '%s' on http://%s", __version__, self._name, self._address)

        def healthy() -> str:
            return "" if control.is_serving else "the control socket is closed"

        async with asyncio.TaskGroup() as tasks:
            engine = tasks.create_task(self._engine.run())
            telling = tasks.create_task(self._notifier.run(lambda: status_text(self.status()), healthy))
            await self._stop.wait()
            await self._drain()
            self._engine.stop()
            await engine
            telling.cancel()
        log.info("stopped")

    async def _drain(self) -> None:
        self._draining = True
        self._notifier.stopping()
        limit = self.config.server.drain_s
        if self._front.active:
            log.info("stopping: %d requests may go on for %g s (server.drain_s)", self._front.active, limit)
        draining = asyncio.ensure_future(self._front.drain(limit))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        if draining.done() and draining.result():
            log.warning("stopping: %d requests were cut after %g s (server.drain_s)", draining.result(), limit)
        draining.cancel()
        await asyncio.wait({draining})

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._told_to_stop, number.name)
        loop.add_signal_handler(signal.SIGHUP, self.reload)

    def _told_to_stop(self, why: str) -> None:
        if self._stop.is_set():
            log.warning("%s again: not waiting for running requests", why)
            self._hurry.set()
        else:
            log.info("%s: stopping", why)
            self._stop.set()

    # --- reload

    def reload(self) -> None:
        """Take over what can change at run time; say what cannot. A bad file changes nothing."""
        self._notifier.reloading()
        try:
            self._take_over(self._setting.reload())
        except ConfigError as error:
            log.error("%s; the configuration stays as it was", error)
        finally:
            self._notifier.ready()

    def _take_over(self, new: Config) -> None:
        changed = changed_keys(self.config, new)
        taken = [key for key in changed if key in RELOADABLE]
        for key in taken:
            section, _, name = key.partition(".")
            part = dataclasses.replace(getattr(self.config, section), **{name: getattr(getattr(new, section), name)})
            self.config = dataclasses.replace(self.config, **{section: part})
        logs.set_level(self.config.log.level)
        self._engine.timing = timing(self.config)
        self._front.reconfigure(self.config.server)
        if self._arena is not None:
            self._arena.set_preload_rate(self.config.arena.preload_mib_per_s)
        log.info("reloaded: %s", ", ".join(taken) or "nothing changed")
        left = [key for key in changed if key not in RELOADABLE]
        if left:
            log.warning("cannot change %s while running: restart moe-l2d for it", ", ".join(left))

    # --- what the control socket and HTTP may ask

    def status(self) -> api.StatusAnswer:
        status = self._engine.status
        counters = self._arena.counters() if self._arena else None
        return {
            "version": __version__,
            "pid": os.getpid(),
            "uptime_s": time.monotonic() - self._started,
            "phase": "draining" if self._draining else str(status.phase),
            "ready": status.phase is Phase.READY and not self._draining,
            "address": self._address,
            "engine": snapshot.engine(status, self._engine.slots, self._engine.active),
            "model": snapshot.model(self._facts, self._name),
            "preload": self.config.arena.preload,
            "memory": self._plan.reason,
            "loaded": counters.resident / counters.experts if counters else None,
            "warnings": self._all_warnings(),
        }

    def stats(self) -> api.StatsAnswer:
        requests = self._stats.snapshot()
        status = self._engine.status
        return {
            "phase": str(status.phase),
            "engine_restarts": status.restarts,
            "requests": requests,
            "arena": snapshot.arena(self._arena.counters(), requests) if self._arena else None,
            "warnings": self._all_warnings(),
        }

    def _all_warnings(self) -> list[str]:
        if self._arena is None:
            return list(self._warnings)
        generated = self._stats.snapshot()["generated_tokens"]
        assert isinstance(generated, int)
        return self._warnings + snapshot.arena_warnings(self._arena.counters(), generated)

    def _snapshot(self) -> dict[str, object]:
        return {"status": self.status(), "stats": self.stats()}

    def _graphs(self) -> int:
        return self._arena.graphs if self._arena else 0

    def config_answer(self) -> api.ConfigAnswer:
        file = self._setting.config_file
        return {"file": str(file) if file else None, "config": self.config.as_dict()}

    async def wait_ready(self, timeout_s: float) -> None:
        await self._engine.wait_ready(timeout_s)

    @property
    def engine_status(self) -> EngineStatus:
        return self._engine.status

    def restart_engine(self) -> None:
        self._engine.restart()

    def shut_down(self) -> None:
        self._told_to_stop("shutdown over the control socket")


def _shown(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _need(path: Path, what: str, where: str) -> None:
    if not path.is_file():
        raise EngineError(f"cannot find {what} '{path}': no such file; install it, or set {where}")
