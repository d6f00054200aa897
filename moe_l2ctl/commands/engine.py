"""moe-l2ctl engine restart"""

from __future__ import annotations

import argparse
from typing import Any

from moe_l2ctl import format
from moe_l2ctl.client import Client

METHODS = ("engine.restart",)


def register(commands: Any, common: argparse.ArgumentParser) -> None:
    p = commands.add_parser("engine", help="act on the engine")
    verbs = p.add_subparsers(dest="verb", required=True, metavar="VERB")
    restart = verbs.add_parser("restart", parents=[common],
                               help="end the engine and start it again; running requests end with an error, "
                                    "experts stay in memory")
    restart.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with Client(args.socket) as client:
        answer = client.call("engine.restart")
    print(format.to_json(answer) if args.json else "the engine is being restarted; 'moe-l2ctl wait-ready' waits for it")
    return 0
