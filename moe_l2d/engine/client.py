"""What the supervisor asks the engine over its Unix socket."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import aiohttp

# Bounds one probe. A loaded machine may take long to answer; a probe that times out is only "silent".
PROBE_S = 2.0


class Health(Enum):
    ABSENT = "absent"  # nobody listens
    SILENT = "silent"  # listens and does not answer
    LOADING = "loading"
    READY = "ready"


class EngineClient:
    def __init__(self, socket_path: Path) -> None:
        self._path = str(socket_path)
        self._session: aiohttp.ClientSession | None = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # no keep-alive: the engine behind the path may be another one by the next probe
            connector = aiohttp.UnixConnector(path=self._path, force_close=True)
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=aiohttp.ClientTimeout(total=PROBE_S), base_url="http://engine"
            )
        return self._session

    async def health(self) -> Health:
        try:
            async with self._open().get("/health") as answer:
                return Health.READY if answer.status == 200 else Health.LOADING
        except TimeoutError:
            return Health.SILENT
        except (aiohttp.ClientError, OSError):
            return Health.ABSENT

    async def computing(self) -> int | None:
        """Slots that compute something; None if the engine does not say."""
        try:
            async with self._open().get("/slots") as answer:
                if answer.status != 200:
                    return None
                slots = await answer.json()
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError):
            return None
        if not isinstance(slots, list):
            return None
        return sum(bool(slot.get("is_processing")) for slot in slots if isinstance(slot, dict))

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()
