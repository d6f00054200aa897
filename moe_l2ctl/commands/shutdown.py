"""moe-l2ctl shutdown"""

from __future__ import annotations

import argparse
from typing import Any

from moe_l2ctl import format
from moe_l2ctl.client import Client

METHODS = ("shutdown",)


def register(commands: Any, common: argparse.ArgumentParser) -> None:
    p = commands.add_parser("shutdown", parents=[common],
                            help="let running requests end (server.drain_s at most), then stop the daemon")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with Client(args.socket) as client:
        answer = client.call("shutdown")
    print(format.to_json(answer) if args.json else "moe-l2d is stopping")
    return 0
