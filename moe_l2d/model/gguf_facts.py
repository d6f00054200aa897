"""What the daemon must know of a model, from its GGUF header alone. No tensor data is read.

The walk over the header is our own: the gguf package's reader turns every token of the vocabulary into numpy
arrays, which takes seconds for a large one. The sizes of the tensor types do come from the package.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import hashlib
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from moe_l2d.errors import ModelError

KINDS = ("gate", "up", "down", "gate_up")  # the order of enum moe_l2_kind
EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down|gate_up)_exps\.weight")
SHARD = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<of>\d{5})\.gguf")
MAGIC = b"GGUF"
# Larger counts than any real header has are a sign of a damaged file, and would be walked for minutes.
MAX_ENTRIES = 1 << 20

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]  # innermost first, as the file has it
    type: int
    shard: int
    offset: int  # from the start of its shard
    n_bytes: int


@dataclass(frozen=True)
class ExpertTensor:
    """One expert tensor, as moe_l2_tensor_desc wants it."""

    block: int
    kind: int
    n_expert: int
    ggml_type: int
    shard: int
    file_offset: int
    expert_bytes: int


@dataclass(frozen=True)
class ModelFacts:
    paths: tuple[Path, ...]  # one a shard, in order
    architecture: str
    general_name: str
    context_train: int | None  # tokens
    n_expert_used: int | None
    file_bytes: int
    experts: tuple[ExpertTensor, ...]  # ordered by block, then kind
    fingerprint: bytes  # 32 bytes; b"" without experts
    kv_bytes: int = 0  # of the KV cache for one token, at 16 bits a value

    @property
    def is_moe(self) -> bool:
        return bool(self.experts)

    @property
    def expert_bytes(self) -> int:
        return sum(t.expert_bytes * t.n_expert for t in self.experts)

    @property
    def n_experts(self) -> int:
        """(layer, index) pairs."""
        return sum({t.block: t.n_expert for t in self.experts}.values())

    @property
    def stem(self) -> str:
        """The file's name without .gguf and without the number of the shard."""
        return stem(self.paths[0])


@dataclass(frozen=True)
class _Shard:
    keys: dict[str, Any]
    tensors: list[Tensor]
    n_bytes: int


def stem(path: Path) -> str:
    match = SHARD.fullmatch(path.name)
    return match["stem"] if match else path.name.removesuffix(".gguf")


def shard_paths(path: Path) -> tuple[Path, ...]:
    """All files of the model that `path` (its only or its first file) begins. ModelError for a later shard."""
    match = SHARD.fullmatch(path.name)
    if match is None:
        return (path,)
    if int(match["no"]) != 1:
        first = f"{match['stem']}-00001-of-{match['of']}.gguf"
        raise ModelError(f"cannot serve model '{path}': it is shard {int(match['no'])} of {int(match['of'])}, "
                         f"set model.path to the first, {first}")
    return tuple(path.with_name(f"{match['stem']}-{n:05d}-of-{match['of']}.gguf")
                 for n in range(1, int(match["of"]) + 1))


def read(path: Path) -> ModelFacts:
    """The facts of a model. ModelError if a file is missing, damaged, truncated or unknown to us."""
    paths = shard_paths(path)
    shards = [_read_shard(p, number) for number, p in enumerate(paths)]
    keys = shards[0].keys
    told = keys.get("split.count", 1) or 1
    if told != len(paths):
        raise ModelError(f"cannot serve model '{path}': its header says {told} shards, its name says {len(paths)}")
    architecture = str(keys.get("general.architecture", ""))
    experts = expert_tensors(path, (t for s in shards for t in s.tensors))
    name = str(keys.get("general.name", ""))
    return ModelFacts(
        paths=paths,
        architecture=architecture,
        general_name=name,
        context_train=_whole(keys.get(f"{architecture}.context_length")),
        n_expert_used=_whole(keys.get(f"{architecture}.expert_used_count")),
        file_bytes=sum(s.n_bytes for s in shards),
        experts=experts,
        fingerprint=fingerprint(architecture, name, shards) if experts else b"",
        kv_bytes=kv_bytes(architecture, keys),
    )


def identity(paths: Iterable[Path]) -> list[tuple[int, ...]]:
    """What changes when a file is replaced or written to: device, inode, size, time of change; (0,) if it is gone."""
    found: list[tuple[int, ...]] = []
    for path in paths:
        try:
            s = path.stat()
        except OSError:
            found.append((0,))
            continue
        found.append((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns))
    return found


def kv_bytes(architecture: str, keys: Mapping[str, Any]) -> int:
    """Bytes that one token takes in the KV cache: 2 for each value of each head's key and value, in every block.

    More than the truth where an architecture compresses its cache or lets blocks look at a window only.
    """

    def number(name: str) -> int:
        return _whole(keys.get(f"{architecture}.{name}")) or 0

    heads = number("attention.head_count")
    each = number("embedding_length") // heads if heads else 0
    width = (number("attention.key_length") or each) + (number("attention.value_length") or each)
    return 2 * number("block_count") * (number("attention.head_count_kv") or heads) * width


def expert_tensors(path: Path, tensors: Iterable[Tensor]) -> tuple[ExpertTensor, ...]:
    """The expert tensors among `tensors`, ordered by block and kind; pure but for the path in its errors."""
    found = []
    counts: dict[int, int] = {}
    for tensor in tensors:
        match = EXPERT.fullmatch(tensor.name)
        if match is None:
            continue
        block = int(match[1])
        if len(tensor.shape) < 3 or tensor.n_bytes % tensor.shape[2]:
            _refuse(path, f"its expert tensor '{tensor.name}' has the shape {tensor.shape}, which is no row of experts")
        n_expert = tensor.shape[2]
        if counts.setdefault(block, n_expert) != n_expert:
            _refuse(path, f"its expert tensor '{tensor.name}' has {n_expert} experts, others of its block have "
                          f"{counts[block]}")
        found.append(ExpertTensor(block, KINDS.index(match[2]), n_expert, tensor.type, tensor.shard, tensor.offset,
                                  tensor.n_bytes // n_expert))
    return tuple(sorted(found, key=lambda t: (t.block, t.kind)))


def fingerprint(architecture: str, name: str, shards: list[_Shard]) -> bytes:
    """32 bytes that differ when the experts' bytes could: where they lie, how they look, how large the files are."""
    digest = hashlib.sha256(f"{architecture}\0{name}\0".encode())
    lines = [
        f"{t.name} {t.type} {'x'.join(map(str, t.shape))} {t.offset} {shards[t.shard].n_bytes}\n"
        for shard in shards
        for t in shard.tensors
        if EXPERT.fullmatch(t.name)
    ]
    for line in sorted(lines):
        digest.update(line.encode())
    return digest.digest()


def _read_shard(path: Path, number: int) -> _Shard:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            if size < 24:
                _refuse(path, f"the file has {size} bytes, too few for a GGUF header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
                return _Header(path, view, size, number).read()
    except OSError as error:
        _refuse(path, (error.strerror or str(error)).lower())


def _refuse(path: Path, cause: str) -> NoReturn:
    raise ModelError(f"cannot serve model '{path}': {cause}")


def _whole(value: object) -> int | None:
    # some architectures give one number a layer
    if isinstance(value, list):
        value = max((v for v in value if isinstance(v, int)), default=None)
    return value if isinstance(value, int) else None


class _Header:
    """One pass over a header; strings of arrays are walked over and not kept."""

    def __init__(self, path: Path, view: mmap.mmap, size: int, number: int) -> None:
        self.path, self.view, self.size, self.number = path, view, size, number
        self.at = 0

    def read(self) -> _Shard:
        if self.view[:4] != MAGIC:
            _refuse(self.path, f"it is not a GGUF file, it begins with {self.view[:4]!r}")
        self.at = 4
        version = self.number_of("I")
        if version not in (2, 3):
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = " (it is big-endian)" if swapped in (2, 3) else ""
            _refuse(self.path, f"its GGUF version is {version}{hint}, known are 2 and 3")
        n_tensors, n_keys = self.number_of("Q"), self.number_of("Q")
        if n_tensors > MAX_ENTRIES or n_keys > MAX_ENTRIES:
            _refuse(self.path, f"its header claims {n_tensors} tensors and {n_keys} keys, the file is damaged")
        keys: dict[str, Any] = {}
        for _ in range(n_keys):
            name = self.string()
            keys[name] = self.value(self.number_of("I"))
        raw = [self.tensor() for _ in range(n_tensors)]
        alignment = keys.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            _refuse(self.path, f"its general.alignment is {alignment!r}, the file is damaged")
        start = (self.at + alignment - 1) // alignment * alignment
        return _Shard(keys, [self.placed(t, start) for t in raw], self.size)

    def take(self, n: int) -> int:
        """Move on by `n` bytes; the offset before."""
        at = self.at
        if n < 0 or at + n > self.size:
            _refuse(self.path, f"the file is truncated: it ends within its header, at byte {self.size}; "
                               f"fetch the model again")
        self.at = at + n
        return at

    def number_of(self, code: str) -> Any:
        at = self.take(struct.calcsize(code))
        return struct.unpack_from("<" + code, self.view, at)[0]

    def string(self) -> str:
        n = self.number_of("Q")
        at = self.take(n)
        return self.view[at : at + n].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            if kind not in _SCALARS:
                _refuse(self.path, f"its header has a value of the unknown type {kind}, the file is damaged")
            return self.number_of(_SCALARS[kind])
        item, n = self.number_of("I"), self.number_of("Q")
        if item == _STRING:
            for _ in range(n):
                self.take(self.number_of("Q"))
            return None
        if item not in _SCALARS:
            _refuse(self.path, f"its header has an array of the unknown type {item}, the file is damaged")
        at = self.take(n * struct.calcsize(_SCALARS[item]))
        return list(struct.unpack_from(f"<{n}{_SCALARS[item]}", self.view, at)) if n <= 4096 else None

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self.string()
        n_dims = self.number_of("I")
        if n_dims > 4:
            _refuse(self.path, f"its tensor '{name}' has {n_dims} dimensions, the file is damaged")
        shape = tuple(self.number_of("Q") for _ in range(n_dims))
        return name, shape, self.number_of("I"), self.number_of("Q")

    def placed(self, raw: tuple[str, tuple[int, ...], int, int], start: int) -> Tensor:
        name, shape, kind, offset = raw
        try:
            per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            _refuse(self.path, f"its tensor '{name}' has the type {kind}, which this version does not know")
        count = 1
        for n in shape:
            count *= n
        if count % per_block:
            _refuse(self.path, f"its tensor '{name}' has {count} values, no multiple of {per_block}, it is damaged")
        n_bytes = count // per_block * block_bytes
        end = start + offset + n_bytes
        if end > self.size:
            _refuse(self.path, f"the file is truncated: tensor '{name}' ends at byte {end} and the file at byte "
                               f"{self.size}; fetch the model again")
        return Tensor(name, shape, kind, self.number, start + offset, n_bytes)
