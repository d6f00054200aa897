"""moe-l2d: the command line, the environment, the exit status. Nothing else of the daemon reads the first two."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from moe_l2d import __version__, config, log
from moe_l2d.config import Config, Installation
from moe_l2d.errors import ConfigError, MoeError

SYSTEM_FILE = Path("/etc/moe-l2.toml")
ENGINE_DIR = "/usr/lib/moe-l2/engine"
NATIVE_DIR = "/usr/lib/moe-l2/native"
EPILOG = """\
exit status: 0 stopped as asked; 1 failed; 2 wrong command line; 4 no permission;
75 another moe-l2d runs here; 78 wrong configuration.
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="moe-l2d", description="Serve a mixture-of-experts model over HTTP.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    p.add_argument("--config", type=Path, metavar="FILE", help="configuration (default: /etc/moe-l2.toml if it exists)")
    p.add_argument("--check-config", action="store_true", help="say whether the configuration is valid, and exit")
    p.add_argument("--user", action="store_true",
                   help="run for this user alone: directories below $XDG_RUNTIME_DIR and ~/.local/state, "
                        "configuration in ~/.config/moe-l2.toml")
    p.add_argument("--version", action="version", version=f"moe-l2d {__version__}")
    return p


def user_defaults(environment: Mapping[str, str]) -> Config:
    """The defaults with one user's directories instead of the system's."""
    home = environment.get("HOME")
    runtime = environment.get("XDG_RUNTIME_DIR")
    if not home or not runtime:
        missing = "HOME" if not home else "XDG_RUNTIME_DIR"
        raise ConfigError(f"cannot run with '--user': the environment has no {missing}; log in properly, or set it")
    state = environment.get("XDG_STATE_HOME") or f"{home}/.local/state"
    paths = config.Paths(f"{runtime}/moe-l2", f"{state}/moe-l2", f"{state}/moe-l2/models")
    return dataclasses.replace(Config(), paths=paths)


def config_file(given: Path | None, user: bool, environment: Mapping[str, str]) -> Path | None:
    """The file to read; None if none was named and the usual one does not exist."""
    if given is not None:
        return given
    usual = SYSTEM_FILE
    if user:
        base = environment.get("XDG_CONFIG_HOME") or f"{environment.get('HOME', '')}/.config"
        usual = Path(base) / "moe-l2.toml"
    return usual if usual.exists() else None


def installation(loaded: Config, environment: Mapping[str, str]) -> Installation:
    engine = loaded.engine.dir or environment.get("MOE_L2_ENGINE_DIR") or ENGINE_DIR
    native = environment.get("MOE_L2_NATIVE_DIR") or NATIVE_DIR
    return Installation(Path(engine), Path(native))


def watchdog_usec(environment: Mapping[str, str], pid: int) -> int | None:
    """WATCHDOG_USEC, if systemd means this process."""
    text = environment.get("WATCHDOG_USEC", "")
    if environment.get("WATCHDOG_PID", str(pid)) != str(pid) or not text.isdigit():
        return None
    return int(text) or None


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    args = parser().parse_args(arguments)
    base = user_defaults(environment) if args.user else Config()
    file = config_file(args.config, args.user, environment)

    def load() -> Config:
        return config.load(file, base) if file else base

    loaded = load()
    if args.check_config:
        print(f"{file or 'the built-in configuration'} is valid")
        return 0
    log.set_up(loaded.log.level, journal="JOURNAL_STREAM" in environment)
    # imported late: a wrong configuration is refused without them
    import uvloop

    from moe_l2d.daemon import Daemon, Setting
    from moe_l2d.notify import Notifier

    setting = Setting(loaded, installation(loaded, environment), environment, file, load)
    notifier = Notifier(environment.get("NOTIFY_SOCKET"), watchdog_usec(environment, os.getpid()))

    async def serve() -> None:
        await Daemon(setting, notifier).run()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve())
    return 0


def main() -> int:
    try:
        return run(sys.argv[1:], os.environ)
    except MoeError as error:
        print(f"moe-l2d: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception:  # the last boundary: a bug is logged whole, and ends with status 1
        logging.getLogger("moe_l2d").exception("moe-l2d: an error of its own")
        return 1


if __name__ == "__main__":
    sys.exit(main())
