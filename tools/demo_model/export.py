"""Write a trained demo model (train.py's output folder) as a GGUF file that llama.cpp loads as a qwen3moe model."""

import argparse
import json
from pathlib import Path

import gguf
import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy)
import numpy as np
from gguf import GGMLQuantizationType as T
from safetensors.numpy import load_file

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--experts", default="q8_0", choices=("q4_0", "q5_0", "q8_0", "f16"))
    args = parser.parse_args()
    c = json.loads((args.model / "config.json").read_text())
    w = load_file(str(args.model / "model.safetensors"))
    tok = json.loads((args.model / "tokenizer.json").read_text())
    vocab = sorted(tok["model"]["vocab"].items(), key=lambda kv: kv[1])
    tokens = [t for t, _ in vocab]
    special = {a["content"] for a in tok["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in tok["model"]["merges"]]
    g = gguf.GGUFWriter(str(args.out), "qwen3moe")
    g.add_name("moe-l2 demo")
    g.add_context_length(c["context"])
    g.add_block_count(c["n_layer"])
    g.add_embedding_length(c["n_embd"])
    g.add_feed_forward_length(c["n_ff"] * c["top_k"])
    g.add_head_count(c["n_head"])
    g.add_head_count_kv(c["n_kv"])
    g.add_key_length(c["head_dim"])
    g.add_value_length(c["head_dim"])
    g.add_layer_norm_rms_eps(c["eps"])
    g.add_rope_freq_base(c["rope_base"])
    g.add_expert_count(c["n_expert"])
    g.add_expert_used_count(c["top_k"])
    g.add_expert_feed_forward_length(c["n_ff"])
    g.add_tokenizer_model("gpt2")
    g.add_tokenizer_pre("qwen2")
    g.add_token_list(tokens)
    g.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    g.add_token_merges(merges)
    g.add_eos_token_id(tokens.index("<|im_end|>"))
    g.add_bos_token_id(tokens.index("<|endoftext|>"))
    g.add_pad_token_id(tokens.index("<|endoftext|>"))
    g.add_add_bos_token(False)
    g.add_chat_template(CHAT_TEMPLATE)

    def put(name, array, kind):
        array = np.ascontiguousarray(array.astype(np.float32))
        g.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)

    dense, expert = T.Q8_0, {"q4_0": T.Q4_0, "q5_0": T.Q5_0, "q8_0": T.Q8_0, "f16": T.F16}[args.experts]
    put("token_embd.weight", w["token_embd.weight"], dense)
    put("output_norm.weight", w["output_norm.weight"], T.F32)
    n, e, f = c["n_expert"], c["n_embd"], c["n_ff"]
    for i in range(c["n_layer"]):
        src, dst = f"layers.{i}.", f"blk.{i}."
        for norm in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm"):
            put(f"{dst}{norm}.weight", w[f"{src}{norm}.weight"], T.F32)
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            put(f"{dst}{name}.weight", w[f"{src}{name}.weight"], dense)
        put(f"{dst}ffn_gate_inp.weight", w[f"{src}ffn_gate_inp.weight"], T.F32)
        put(f"{dst}ffn_gate_exps.weight", w[f"{src}gate.weight"].reshape(n, f, e), expert)
        put(f"{dst}ffn_up_exps.weight", w[f"{src}up.weight"].reshape(n, f, e), expert)
        put(f"{dst}ffn_down_exps.weight", w[f"{src}down.weight"].reshape(e, n, f).transpose(1, 0, 2), expert)
    g.write_header_to_file()
    g.write_kv_data_to_file()
    g.write_tensors_to_file()
    g.close()


if __name__ == "__main__":
    main()
