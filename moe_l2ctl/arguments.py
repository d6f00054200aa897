"""Types of command-line arguments; a value that cannot be used is a usage error, exit status 2."""

from __future__ import annotations

import argparse
import math


def amount(text: str) -> float:
    """A finite number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"'{text}' is no number from 0 up")
    return value
