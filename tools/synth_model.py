"""Write a GGUF of a real mixture-of-experts model's shapes with random weights, for measuring and testing.

Quantised blocks are random bytes with sensible scales, so a gigabyte is written in seconds and a forward pass
stays finite. The tokenizer is copied from a real model: a server loads the file and answers (nonsense).
Routing by random weights has little locality: the worst case for a cache.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Q
from gguf import GGUFReader, GGUFValueType, GGUFWriter


@dataclass(frozen=True)
class Shape:
    """Sizes of a qwen3moe model; with 0 experts, of the dense qwen3 model that it would be."""

    layers: int
    embedding: int
    heads: int
    kv_heads: int
    head_size: int
    experts: int
    experts_used: int
    expert_size: int


SHAPES = {
    "qwen3-30b-a3b": Shape(48, 2048, 32, 4, 128, 128, 8, 768),
    "tiny": Shape(3, 512, 4, 2, 64, 16, 4, 256),
    "dense": Shape(2, 512, 4, 2, 64, 0, 0, 512),
}
TYPES = {"q4_k": Q.Q4_K, "q6_k": Q.Q6_K, "q8_0": Q.Q8_0, "q4_0": Q.Q4_0}
BLOCK = {Q.Q4_K: (256, 144), Q.Q6_K: (256, 210), Q.Q8_0: (32, 34), Q.Q4_0: (32, 18)}  # weights, bytes
SCALES = {Q.Q4_K: {0: 2e-4, 2: 1.5e-3}, Q.Q6_K: {208: 1e-5}, Q.Q8_0: {0: 2e-4}, Q.Q4_0: {0: 3e-3}}  # offset -> half
POOL_BLOCKS = 1 << 16


class BlockPool:
    """Random quantised blocks, made once a type and cut from at random places."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pools: dict[Q, np.ndarray] = {}

    def take(self, kind: Q, count: int) -> np.ndarray:
        """`count` blocks of `kind`: uint8 [count, bytes a block]."""
        if kind not in self.pools:
            pool = self.rng.integers(0, 256, (POOL_BLOCKS, BLOCK[kind][1]), dtype=np.uint8)
            for offset, scale in SCALES[kind].items():
                pool[:, offset : offset + 2] = np.frombuffer(np.float16(scale).tobytes(), dtype=np.uint8)
            self.pools[kind] = pool
        start = int(self.rng.integers(0, POOL_BLOCKS))
        return self.pools[kind][(np.arange(count, dtype=np.int64) + start) % POOL_BLOCKS]


def tensors(shape: Shape, vocab: int, expert_type: Q) -> list[tuple[str, tuple[int, ...], Q]]:
    """Names, numpy shapes (slowest first) and types of all tensors."""
    e, q_size, kv_size = shape.embedding, shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    found: list[tuple[str, tuple[int, ...], Q]] = [
        ("token_embd.weight", (vocab, e), Q.Q4_K),
        ("output.weight", (vocab, e), Q.Q6_K),
        ("output_norm.weight", (e,), Q.F32),
    ]
    for i in range(shape.layers):
        layer: list[tuple[str, tuple[int, ...], Q]] = [
            ("attn_norm", (e,), Q.F32),
            ("ffn_norm", (e,), Q.F32),
            ("attn_q_norm", (shape.head_size,), Q.F32),
            ("attn_k_norm", (shape.head_size,), Q.F32),
            ("attn_q", (q_size, e), Q.Q4_K),
            ("attn_k", (kv_size, e), Q.Q4_K),
            ("attn_v", (kv_size, e), Q.Q6_K),
            ("attn_output", (e, q_size), Q.Q4_K),
        ]
        if shape.experts:
            layer += [
                ("ffn_gate_inp", (shape.experts, e), Q.F32),
                ("ffn_gate_exps", (shape.experts, shape.expert_size, e), expert_type),
                ("ffn_up_exps", (shape.experts, shape.expert_size, e), expert_type),
                ("ffn_down_exps", (shape.experts, e, shape.expert_size), expert_type),
            ]
        else:
            layer += [
                ("ffn_gate", (shape.expert_size, e), Q.Q4_K),
                ("ffn_up", (shape.expert_size, e), Q.Q4_K),
                ("ffn_down", (e, shape.expert_size), Q.Q4_K),
            ]
        found += [(f"blk.{i}.{name}.weight", size, kind) for name, size, kind in layer]
    return found


def copy_tokenizer(writer: GGUFWriter, source: Path) -> int:
    """Copy tokenizer.* of `source`; returns the number of tokens."""
    reader = GGUFReader(source)
    for field in reader.fields.values():
        if field.name.startswith("tokenizer."):
            kind = field.types[0]
            element = field.types[-1] if kind == GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), kind, sub_type=element)
    return len(reader.fields["tokenizer.ggml.tokens"].data)


def write_model(out: Path, shape: Shape, expert_type: str, tokenizer: Path, seed: int = 0) -> None:
    """Write the model to `out`; the same arguments give the same bytes."""
    pool = BlockPool(seed)
    writer = GGUFWriter(str(out), "qwen3moe" if shape.experts else "qwen3")
    writer.add_name(f"synthetic-{shape.layers}x{shape.experts}-{expert_type}")
    writer.add_block_count(shape.layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.embedding)
    writer.add_feed_forward_length(shape.expert_size * max(1, shape.experts_used))
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.experts_used)
        writer.add_expert_feed_forward_length(shape.expert_size)
    plan = tensors(shape, copy_tokenizer(writer, tokenizer), TYPES[expert_type])
    for name, size, kind in plan:
        if kind == Q.F32:
            writer.add_tensor_info(name, size, np.dtype(np.float32), int(np.prod(size)) * 4, raw_dtype=kind)
        else:
            weights, block_bytes = BLOCK[kind]
            raw = (*size[:-1], size[-1] // weights * block_bytes)
            writer.add_tensor_info(name, raw, np.dtype(np.uint8), int(np.prod(raw)), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, size, kind in plan:
        if kind != Q.F32:
            writer.write_tensor_data(pool.take(kind, int(np.prod(size)) // BLOCK[kind][0]))
        elif name.endswith("ffn_gate_inp.weight"):
            writer.write_tensor_data((pool.rng.standard_normal(size) * 0.05).astype(np.float32))
        else:
            writer.write_tensor_data(np.ones(size, dtype=np.float32))
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, help="fewer layers than the real model, for a smaller file")
    parser.add_argument("--experts", default="q4_k", choices=sorted(TYPES), help="type of the expert tensors")
    parser.add_argument("--tokenizer", type=Path, default=Path(__file__).parents[1] / "models/moe-l2-demo.gguf")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    write_model(args.out, replace(shape, layers=args.layers or shape.layers), args.experts, args.tokenizer, args.seed)
    print(f"{args.out}: {args.out.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
