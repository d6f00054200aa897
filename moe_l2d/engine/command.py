"""The engine's command line and environment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moe_l2d.config import Config, Installation
from moe_l2d.model.gguf_facts import ModelFacts

PROGRAM = "llama-server"
PLUGIN = "libggml-moe-l2.so"
# Of the daemon's own environment the engine gets only what a program needs to run at all. LLAMA_ARG_* would
# override our arguments; NOTIFY_SOCKET, LISTEN_* and WATCHDOG_* are the daemon's own conversation with systemd.
PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME")


@dataclass(frozen=True)
class Command:
    argv: tuple[str, ...]
    env: Mapping[str, str]
    pass_fds: tuple[int, ...] = ()


def build(config: Config, installation: Installation, facts: ModelFacts, *, name: str, threads: int,
          environment: Mapping[str, str], arena_fds: tuple[int, int] | None, direct: bool = False) -> Command:
    """How to start llama-server; without `arena_fds` it is the plain engine, with no plug-in.

    `direct`: experts are read past the page cache, which would only take memory from an arena that is short of it.
    """
    return Command(
        argv=tuple(arguments(config, installation, facts.paths[0], name, threads)),
        env=variables(config, installation, environment, arena_fds, direct),
        pass_fds=arena_fds or (),
    )


def arguments(config: Config, installation: Installation, model: Path, name: str, threads: int) -> list[str]:
    slots = config.engine.slots
    argv = [
        str(installation.engine_dir / PROGRAM),
        "--model", str(model),
        "--alias", name,
        "--host", str(config.engine_socket),
        # set_tensor must get pointers into the mapped file: auto turns mmap off where a device lacks it
        "--load-mode", "mmap",
        # what fits is decided here
        "-fit", "off",
        # a warm-up run touches every expert
        "--no-warmup",
        "--parallel", str(slots),
        "--ctx-size", str(config.model.context * slots),
        "--threads", str(threads),
        "--jinja",
        "--metrics",
        "--slots",
        "--no-webui",
    ]  # fmt: skip
    if not config.engine.repack:
        argv.append("--no-repack")
    if config.engine.embeddings:
        argv += ["--embeddings", "--pooling", "mean"]  # OpenAI's shape holds one vector a text
    return argv + list(config.engine.extra_args)


def variables(config: Config, installation: Installation, environment: Mapping[str, str],
              arena_fds: tuple[int, int] | None, direct: bool = False) -> dict[str, str]:
    env = {key: environment[key] for key in PASSED_ON if key in environment}
    if arena_fds is not None:
        env |= {
            "GGML_BACKEND_PATH": str(installation.native_dir / PLUGIN),
            "MOE_L2_ARENA_FD": str(arena_fds[0]),
            "MOE_L2_CONTROL_FD": str(arena_fds[1]),
            "MOE_L2_LOADERS": str(config.arena.loaders),
            "MOE_L2_REPACK": "1" if config.engine.repack else "0",
            "MOE_L2_DIRECT_IO": "1" if direct else "0",
        }
    return env
