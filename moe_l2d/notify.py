"""What systemd is told: READY, STATUS, WATCHDOG, RELOADING, STOPPING. Without systemd nothing happens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from sdnotify import SystemdNotifier

from moe_l2d import api

log = logging.getLogger("moe_l2d.notify")

STATUS_EVERY_S = 1.0


class Notifier:
    """`socket` says whether systemd listens at all; `watchdog_usec` is WATCHDOG_USEC if it is meant for us."""

    def __init__(self, socket: str | None, watchdog_usec: int | None) -> None:
        self._systemd = SystemdNotifier() if socket else None
        self._watchdog_s = watchdog_usec / 1e6 if watchdog_usec else None
        self._last_status = ""

    def _send(self, text: str) -> None:
        if self._systemd is not None:
            self._systemd.notify(text)

    def ready(self) -> None:
        self._send("READY=1")

    def reloading(self) -> None:
        self._send(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def status(self, text: str) -> None:
        if text != self._last_status:
            self._last_status = text
            self._send(f"STATUS={text}")

    async def run(self, text: Callable[[], str], healthy: Callable[[], str]) -> None:
        """Keep STATUS current and feed the watchdog from the event loop, at half of its limit.

        `healthy` answers "" or what is wrong; then the watchdog gets nothing and systemd restarts the daemon.
        """
        every = min(STATUS_EVERY_S, self._watchdog_s / 2) if self._watchdog_s else STATUS_EVERY_S
        fed = 0.0
        while True:
            self.status(text())
            now = time.monotonic()
            if self._watchdog_s and now - fed >= self._watchdog_s / 2 - every / 2:
                wrong = healthy()
                if wrong:
                    log.error("the watchdog is not fed: %s", wrong)
                else:
                    self._send("WATCHDOG=1")
                    fed = now
            await asyncio.sleep(every)


def status_text(status: api.StatusAnswer) -> str:
    """One line for `systemctl status`. Pure."""
    engine, name = status["engine"], status["model"]["name"]
    detail = f": {engine['detail']}" if engine["detail"] else ""
    if status["phase"] != "ready":
        return f"{status['phase']} {name}{detail}"
    running = f", {engine['active']} running" if engine["active"] else ""
    if status["loaded"] is None:
        return f"serving {name} (no experts: plain engine){running}"
    return f"serving {name}, {100 * status['loaded']:.0f} % of its experts resident{running}"
