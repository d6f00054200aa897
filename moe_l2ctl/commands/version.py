"""moe-l2ctl version"""

from __future__ import annotations

import argparse
from typing import Any

from moe_l2ctl import format
from moe_l2ctl.client import Client
from moe_l2d import __version__
from moe_l2d.errors import Denied, NotRunning

METHODS = ("status",)


def register(commands: Any, common: argparse.ArgumentParser) -> None:
    p = commands.add_parser("version", parents=[common], help="the versions of this tool and of the running daemon")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        with Client(args.socket) as client:
            daemon, why = client.call("status")["version"], ""
    except (NotRunning, Denied) as error:
        daemon, why = None, str(error)
    if args.json:
        print(format.to_json({"moe-l2ctl": __version__, "moe-l2d": daemon}))
    else:
        print(f"moe-l2ctl {__version__}\nmoe-l2d   {daemon or f'unknown ({why})'}")
    return 0
