"""moe-l2ctl status"""

from __future__ import annotations

import argparse
from typing import Any

from moe_l2ctl import format
from moe_l2ctl.client import Client

METHODS = ("status",)


def register(commands: Any, common: argparse.ArgumentParser) -> None:
    p = commands.add_parser("status", parents=[common], help="what the daemon, its engine and its model are doing")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with Client(args.socket) as client:
        answer = client.call("status")
    print(format.to_json(answer) if args.json else format.status(answer))
    return 0
