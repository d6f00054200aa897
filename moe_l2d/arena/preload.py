"""In which order experts are loaded before anybody needs them. Pure.

The library takes the highest score first and, among equals, the first block and then the first expert, which
is also the order of the file: the disk reads forward. Experts that were used before come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

READY = 2
MAX_SCORE = 2**32 - 1


def order(states: Sequence[npt.NDArray[Any]], uses: Sequence[npt.NDArray[Any]]) -> Iterator[tuple[int, int, int]]:
    """(layer, expert, score) of every expert that is not READY; arrays of one value an expert, one a layer."""
    for layer, (state, used) in enumerate(zip(states, uses, strict=True)):
        for expert in range(len(state)):
            if state[expert] != READY:
                yield layer, expert, min(MAX_SCORE, 1 + int(used[expert]))
