"""moe-l2ctl stats"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from moe_l2ctl import format
from moe_l2ctl.client import ANSWER_S, Client

METHODS = ("stats", "watch")
CLEAR = "\x1b[H\x1b[2J"


def register(commands: Any, common: argparse.ArgumentParser) -> None:
    p = commands.add_parser("stats", parents=[common], help="requests, tokens per second, how the arena does")
    p.add_argument("--watch", type=float, metavar="SECONDS", nargs="?", const=1.0, help="again every so often (1 s)")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.watch is None:
        with Client(args.socket) as client:
            show(client.call("stats"), args.json)
        return 0
    screen = sys.stdout.isatty() and not args.json
    with Client(args.socket, timeout_s=args.watch + ANSWER_S) as client:
        for answer in client.stream("watch", interval_s=args.watch):
            print(CLEAR if screen else "", end="")
            show(answer, args.json)
            if not screen and not args.json:
                print()
            sys.stdout.flush()
    return 0


def show(answer: dict[str, Any], as_json: bool) -> None:
    print(format.to_json(answer) if as_json else format.stats(answer))
