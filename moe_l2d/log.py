"""Where log messages go: stderr, in the journal's form if systemd reads it."""

from __future__ import annotations

import logging
import sys

# syslog priorities, which journald takes from "<N>" at a line's start
_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


class _Journal(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        prefix = f"<{_PRIORITY.get(record.levelno, 6)}>"
        return "\n".join(prefix + line for line in super().format(record).splitlines() or [""])


def set_up(level: str, journal: bool) -> None:
    """Log to stderr. `journal`: with priorities and without the time, which journald adds."""
    handler = logging.StreamHandler(sys.stderr)
    plain = logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    handler.setFormatter(_Journal("%(message)s") if journal else plain)
    logging.basicConfig(handlers=[handler], force=True)
    set_level(level)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(logging.WARNING)  # of libraries
    logging.getLogger("moe_l2d").setLevel(level.upper())
