"""Start-up time of the service with a cold and a warm arena, and what a restart of the engine reads again.

cold: moe-l2d is started, nothing of the model is in the page cache; until the first token of the first answer.
warm: the engine is killed and started again by moe-l2d, the arena is resident; until the same token.
plain: llama-server without plug-in and daemon, nothing in the page cache; until the first token: the baseline.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from tools.live import ENGINE_DIR, Live, UnixConnection, live

QUESTION = {"prompt": "Solve the equation 7x + 12 = 68.", "max_tokens": 1, "temperature": 0}
LIMIT_S = 600


def forget(model: Path) -> None:
    """Drop the file from the page cache, as after booting."""
    fd = os.open(model, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def answer(connection: http.client.HTTPConnection) -> bool:
    """Ask for one token; False while nobody is there or the model loads."""
    try:
        connection.request("POST", "/v1/completions", json.dumps(QUESTION), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        reply.read()
        return reply.status == 200
    except OSError:
        return False
    finally:
        connection.close()


def until_answered(connect: object, started: float) -> float:
    while not answer(connect()):  # type: ignore[operator]
        if time.perf_counter() - started > LIMIT_S:
            raise TimeoutError(f"no answer within {LIMIT_S} s")
        time.sleep(0.02)
    return time.perf_counter() - started


def plain_s(model: Path, folder: Path) -> float:
    forget(model)
    path = folder / "plain.sock"
    command = [
        str(ENGINE_DIR / "llama-server"),
        "-m",
        str(model),
        "--host",
        str(path),
        "-c",
        "2048",
        "-np",
        "2",
        "--no-warmup",
    ]
    env = {key: value for key, value in os.environ.items() if not key.startswith("GGML_")}
    started = time.perf_counter()
    process = subprocess.Popen([*command, "-fit", "off"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        return until_answered(lambda: UnixConnection(path), started)
    finally:
        process.kill()
        process.wait()


def restart_s(daemon: Live) -> tuple[float, int]:
    """Seconds from the engine's death to the first token, and expert bytes that were read again."""
    total = daemon.arena()["experts"]
    while daemon.arena()["resident"] < total:
        time.sleep(0.1)
    before = daemon.arena()["bytes_read"]
    os.kill(daemon.ctl("status")["engine"]["pid"], signal.SIGKILL)
    started = time.perf_counter()
    took = until_answered(daemon.connection, started)
    return took, int(daemon.arena()["bytes_read"]) - int(before)


def startup(model: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="ml2", dir="/tmp") as name:
        folder = Path(name)
        result = {"start_plain_s": plain_s(model, folder)}
        forget(model)
        started = time.perf_counter()
        with live(folder, model) as daemon:
            result["start_cold_s"] = until_answered(daemon.connection, started)
            result["cold_read_mib"] = int(daemon.arena()["bytes_read"]) / 2**20
            result["start_warm_s"], result["restart_bytes_reread"] = restart_s(daemon)
            result["experts_mib"] = int(daemon.arena()["resident_bytes"]) / 2**20
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    print(json.dumps(startup(parser.parse_args().model), indent=1))


if __name__ == "__main__":
    main()
