"""moe-l2ctl wait-ready"""

from __future__ import annotations

import argparse
import time
from typing import Any

from moe_l2ctl import format
from moe_l2ctl.arguments import amount
from moe_l2ctl.client import ANSWER_S, Client
from moe_l2d.errors import NotRunning

METHODS = ("ready.wait",)
# A daemon that was started just before this command needs a moment until its socket is there.
APPEARS_S = 5.0
RETRY_S = 0.1


def register(commands: Any, common: argparse.ArgumentParser) -> None:
    p = commands.add_parser("wait-ready", parents=[common], help="wait until a request would be served at once")
    p.add_argument("--timeout", type=amount, default=600.0, metavar="SECONDS", help="at most so long (default: 600)")
    p.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    began = time.monotonic()
    client = _connect(args, min(APPEARS_S, args.timeout))
    with client:
        left = max(0.0, round(args.timeout - (time.monotonic() - began), 1))
        client.call("ready.wait", timeout_s=left)
    waited = time.monotonic() - began
    print(format.to_json({"ready": True, "waited_s": waited}) if args.json else f"ready after {waited:.1f} s")
    return 0


def _connect(args: argparse.Namespace, patience_s: float) -> Client:
    end = time.monotonic() + patience_s
    while True:
        try:
            return Client(args.socket, timeout_s=args.timeout + ANSWER_S)
        except NotRunning:
            if time.monotonic() + RETRY_S > end:
                raise
            time.sleep(RETRY_S)
