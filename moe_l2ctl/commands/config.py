"""moe-l2ctl config show|check"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from moe_l2ctl import format
from moe_l2ctl.client import Client

METHODS = ("config.show",)


def register(commands: Any, common: argparse.ArgumentParser) -> None:
    p = commands.add_parser("config", help="show or check the configuration")
    verbs = p.add_subparsers(dest="verb", required=True, metavar="VERB")
    shown = verbs.add_parser("show", parents=[common], help="the configuration that the daemon runs with")
    shown.set_defaults(run=show)
    checked = verbs.add_parser("check", parents=[common], help="say whether a file is a valid configuration")
    checked.add_argument("file", type=Path, metavar="FILE")
    checked.set_defaults(run=check)


def show(args: argparse.Namespace) -> int:
    with Client(args.socket) as client:
        answer = client.call("config.show")
    print(format.to_json(answer) if args.json else format.config(answer))
    return 0


def check(args: argparse.Namespace) -> int:
    from moe_l2d import config

    config.load(args.file)
    print(format.to_json({"valid": True, "file": str(args.file)}) if args.json else f"{args.file} is valid")
    return 0
