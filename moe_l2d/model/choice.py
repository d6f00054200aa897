"""Which file is the model: the one that was named, or for "auto" the newest of a directory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from moe_l2d.errors import ModelError
from moe_l2d.model.gguf_facts import SHARD


@dataclass(frozen=True)
class Found:
    name: str  # of the file
    modified: float


def newest(files: Iterable[Found]) -> str | None:
    """The name of the newest model's first file; several shards are one model, as new as its newest shard.

    Projectors (mmproj-*.gguf) belong to another model and are none themselves. Pure.
    """
    models: dict[str, float] = {}
    for file in files:
        if not file.name.endswith(".gguf") or file.name.startswith(("mmproj", ".")):
            continue
        match = SHARD.fullmatch(file.name)
        first = f"{match['stem']}-00001-of-{match['of']}.gguf" if match else file.name
        models[first] = max(models.get(first, 0.0), file.modified)
    return max(models, key=lambda name: (models[name], name), default=None)


def choose(path: str, models_dir: str) -> Path:
    """The model's first file; ModelError if "auto" finds none."""
    if path != "auto":
        return Path(path)
    directory = Path(models_dir)
    try:
        files = [Found(p.name, p.stat().st_mtime) for p in directory.iterdir() if p.is_file()]
    except OSError as error:
        cause = (error.strerror or str(error)).lower()
        sentence = f"cannot look for a model in '{directory}': {cause}; set model.path or paths.models_dir"
        raise ModelError(sentence) from None
    name = newest(files)
    if name is None:
        cause = "it holds no .gguf file"
        raise ModelError(f"cannot find a model in '{directory}': {cause}; put one there or set model.path")
    return directory / name
