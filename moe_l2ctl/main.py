"""moe-l2ctl: the command line and the exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from moe_l2ctl.commands import chat, config, engine, shutdown, stats, status, version, wait_ready
from moe_l2d.errors import MoeError

SYSTEM_SOCKET = "/run/moe-l2/control.sock"
COMMANDS = (status, stats, chat, wait_ready, engine, config, shutdown, version)
EPILOG = """\
exit status:
   0  done
   1  failed
   2  wrong command line, or a request that the daemon cannot understand
   3  moe-l2d is not running, or is not serving
   4  no permission
   5  not found
   6  timed out (wait-ready)
  75  busy: the queue is full; try again later
  78  the configuration is not valid
 130  interrupted
"""


def default_socket(environment: Mapping[str, str]) -> str:
    """MOE_L2_SOCKET; else the system's, unless only this user's own daemon is there."""
    named = environment.get("MOE_L2_SOCKET")
    if named:
        return named
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and not os.path.exists(SYSTEM_SOCKET):
        own = f"{runtime}/moe-l2/control.sock"
        if os.path.exists(own):
            return own
    return SYSTEM_SOCKET


def _common(json: object, socket: object, shown: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(add_help=False)
    p.add_argument("--json", action="store_true", default=json, help="answer with one line of JSON")
    p.add_argument("--socket", metavar="PATH", default=socket, help=f"moe-l2d's (default: {shown})")
    return p


def parser(socket: str) -> argparse.ArgumentParser:
    # Twice, since parsers share the actions of their parents: behind the command an absent option must leave alone
    # what stood before the command.
    before = _common(False, socket, socket)
    behind = _common(argparse.SUPPRESS, argparse.SUPPRESS, socket)
    p = argparse.ArgumentParser(prog="moe-l2ctl", description="Control and inspect moe-l2d.", epilog=EPILOG,
                                formatter_class=argparse.RawDescriptionHelpFormatter, parents=[before])
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.register(commands, behind)
    return p


def run(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    args = parser(default_socket(environment)).parse_args(arguments)
    result: int = args.run(args)
    return result


def main() -> int:
    try:
        code = run(sys.argv[1:], os.environ)
        sys.stdout.flush()
        return code
    except MoeError as error:
        print(f"moe-l2ctl: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # the reader of our output has enough; Python must not complain about it at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:  # the last boundary: one sentence, not a traceback
        what = f"{type(error).__name__}: {error}"
        print(f"moe-l2ctl: cannot go on: {what} (an error of moe-l2ctl itself)", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
