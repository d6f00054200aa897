"""moe_l2d/model/gguf_facts.py and choice.py"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_l2d.errors import ModelError
from moe_l2d.model import choice, gguf_facts
from moe_l2d.model.machine import count_cores
from tests.conftest import DEMO_MODEL, write_gguf


def test_against_the_gguf_package(tmp_path: Path) -> None:
    """Our walk over the header finds the tensors where the gguf package finds them."""
    import gguf

    path = write_gguf(tmp_path / "m.gguf", moe=True)
    facts = gguf_facts.read(path)
    theirs = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert len(facts.experts) == 6
    for t in facts.experts:
        one = theirs[f"blk.{t.block}.ffn_{gguf_facts.KINDS[t.kind]}_exps.weight"]
        assert (t.file_offset, t.expert_bytes * t.n_expert) == (one.data_offset, one.n_bytes)
        assert (t.ggml_type, t.n_expert) == (one.tensor_type, 4)
    assert (facts.architecture, facts.general_name, facts.context_train) == ("qwen3moe", "tiny", 1024)
    assert facts.n_experts == 8
    assert facts.file_bytes == path.stat().st_size


def test_demo_model_is_read_fast() -> None:
    """The demo model's facts come within a fraction of a second, although it has 8192 tokens of vocabulary."""
    began = time.monotonic()
    facts = gguf_facts.read(DEMO_MODEL)
    assert time.monotonic() - began < 0.5
    assert (facts.n_experts, facts.n_expert_used, len(facts.experts)) == (256, 4, 24)


def test_shards(tmp_path: Path) -> None:
    """Several shards are one model: offsets are within each shard, and the first names them all."""
    first = write_gguf(tmp_path / "m.gguf", moe=True, shards=2)
    facts = gguf_facts.read(first)
    assert [(t.block, t.shard) for t in facts.experts] == [(0, 0)] * 3 + [(1, 1)] * 3
    assert facts.stem == "m"
    second = facts.paths[1]
    with pytest.raises(ModelError, match=r"shard 2 of 2, set model.path to the first, m-00001-of-00002.gguf"):
        gguf_facts.read(second)
    second.unlink()
    with pytest.raises(ModelError, match=r"m-00002-of-00002.gguf': no such file"):
        gguf_facts.read(first)


def test_not_moe(tmp_path: Path) -> None:
    """A model without experts is no error."""
    facts = gguf_facts.read(write_gguf(tmp_path / "m.gguf", moe=False))
    assert not facts.is_moe
    assert facts.fingerprint == b""


def test_truncated(tmp_path: Path) -> None:
    """A tensor that ends beyond the file is refused with both numbers."""
    path = write_gguf(tmp_path / "m.gguf", moe=True)
    size = path.stat().st_size
    os.truncate(path, size - 100)
    with pytest.raises(ModelError, match=rf"truncated: tensor 'blk.1.ffn_down_exps.weight' .* byte {size - 100}"):
        gguf_facts.read(path)


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    """However short a file is cut, the answer is a ModelError."""
    path = write_gguf(tmp_path / "m.gguf", moe=True)
    whole = path.read_bytes()
    for n in [*range(0, 400, 7), *range(400, len(whole) - 40, 997)]:
        path.write_bytes(whole[:n])
        with pytest.raises(ModelError, match="cannot serve model"):
            gguf_facts.read(path)


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 1200), byte=st.integers(0, 255))
def test_damaged_header_never_escapes(tmp_path_factory: pytest.TempPathFactory, at: int, byte: int) -> None:
    """A damaged byte in the header gives facts or a ModelError, quickly, and nothing else."""
    base = tmp_path_factory.getbasetemp() / "damaged.gguf"
    if not base.exists():
        write_gguf(base, moe=True)
    data = bytearray(base.read_bytes())
    data[at] = byte
    path = base.with_name("damaged-copy.gguf")
    path.write_bytes(data)
    with contextlib.suppress(ModelError):
        gguf_facts.read(path)


def test_not_a_gguf(tmp_path: Path) -> None:
    """Another kind of file is named as such; a missing one and a directory, too."""
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK" + b"\0" * 100)
    with pytest.raises(ModelError, match="not a GGUF file"):
        gguf_facts.read(path)
    with pytest.raises(ModelError, match="no such file"):
        gguf_facts.read(tmp_path / "y.gguf")
    with pytest.raises(ModelError, match="directory"):
        gguf_facts.read(tmp_path)


def test_fingerprint_differs(tmp_path: Path) -> None:
    """Another number of experts is another fingerprint; the same file has the same."""
    a = gguf_facts.read(write_gguf(tmp_path / "a.gguf", moe=True)).fingerprint
    b = gguf_facts.read(write_gguf(tmp_path / "b.gguf", moe=True)).fingerprint
    c = gguf_facts.read(write_gguf(tmp_path / "c.gguf", moe=True, n_expert=8)).fingerprint
    assert a == b != c


def test_newest() -> None:
    """The newest model wins; shards count as one, as new as the newest of them; projectors and others do not count."""
    found = [choice.Found(n, t) for n, t in [
        ("old.gguf", 1.0), ("big-00001-of-00002.gguf", 2.0), ("big-00002-of-00002.gguf", 9.0), ("mid.gguf", 5.0),
        ("mmproj-big.gguf", 99.0), ("note.txt", 99.0), (".part.gguf", 99.0)]]  # fmt: skip
    assert choice.newest(found) == "big-00001-of-00002.gguf"
    assert choice.newest([]) is None


def test_choose(tmp_path: Path) -> None:
    """A named path is taken; an empty or missing models_dir is refused with what to do."""
    assert choice.choose("/x/y.gguf", "/none") == Path("/x/y.gguf")
    with pytest.raises(ModelError, match=r"holds no .gguf file; put one there or set model.path"):
        choice.choose("auto", str(tmp_path))
    with pytest.raises(ModelError, match="no such file"):
        choice.choose("auto", str(tmp_path / "none"))


def test_count_cores() -> None:
    """Two threads of one core count once; a quota of the cgroup bounds the count."""
    siblings = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}
    assert count_cores([0, 1, 2, 3], siblings, None) == 2
    assert count_cores([0, 1, 2, 3], siblings, 0.5) == 1
    assert count_cores([], siblings, None) == 1
