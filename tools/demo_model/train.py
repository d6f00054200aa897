"""Train the demo model: a small Qwen3-MoE language model, saved as one safetensors file plus tokenizer.

Every expert is computed for every token and masked by the router, which at this size is faster than dispatching tokens.
Needs torch, tokenizers and safetensors; written for one CUDA GPU.
"""

import argparse
import gzip
import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

CONFIG = dict(
    n_layer=8,
    n_embd=256,
    n_head=8,
    n_kv=2,
    head_dim=32,
    n_expert=32,
    top_k=4,
    n_ff=128,
    vocab=8192,
    eps=1e-6,
    rope_base=10000.0,
    context=1024,
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WEIGHT = dict(codegen=3.0, math=1.0, general_qa=1.2, chinese_tech=2.0, translate=0.7, creative_write=1.2)


def train_tokenizer(texts):
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    tok.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=CONFIG["vocab"], special_tokens=SPECIAL, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    return tok


def render(messages):
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)


class RMSNorm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(n))

    def forward(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), CONFIG["eps"])


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        c = CONFIG
        e, hd = c["n_embd"], c["head_dim"]
        self.attn_norm, self.ffn_norm, self.attn_q_norm, self.attn_k_norm = (
            RMSNorm(e),
            RMSNorm(e),
            RMSNorm(hd),
            RMSNorm(hd),
        )
        self.attn_q, self.attn_k, self.attn_v = (
            nn.Linear(e, n * hd, bias=False) for n in (c["n_head"], c["n_kv"], c["n_kv"])
        )
        self.attn_output = nn.Linear(c["n_head"] * hd, e, bias=False)
        self.ffn_gate_inp = nn.Linear(e, c["n_expert"], bias=False)
        hidden = c["n_expert"] * c["n_ff"]
        self.gate, self.up = nn.Linear(e, hidden, bias=False), nn.Linear(e, hidden, bias=False)
        self.down = nn.Linear(hidden, e, bias=False)

    def forward(self, x, cos, sin):
        c = CONFIG
        b, t, _ = x.shape
        h = self.attn_norm(x)
        q = self.attn_q_norm(self.attn_q(h).view(b, t, c["n_head"], -1)).transpose(1, 2)
        k = self.attn_k_norm(self.attn_k(h).view(b, t, c["n_kv"], -1)).transpose(1, 2)
        v = self.attn_v(h).view(b, t, c["n_kv"], -1).transpose(1, 2)
        a = F.scaled_dot_product_attention(rope(q, cos, sin), rope(k, cos, sin), v, is_causal=True, enable_gqa=True)
        x = x + self.attn_output(a.transpose(1, 2).reshape(b, t, -1))
        h = self.ffn_norm(x)
        probs = F.softmax(self.ffn_gate_inp(h).float(), -1)
        top, idx = probs.topk(c["top_k"], -1)
        gates = torch.zeros_like(probs).scatter(-1, idx, top / top.sum(-1, keepdim=True))
        load = (gates > 0).float().mean((0, 1)) * c["n_expert"] / c["top_k"]
        balance = (load * probs.mean((0, 1))).sum()
        act = F.silu(self.gate(h)) * self.up(h)
        act = act.view(b, t, c["n_expert"], -1) * gates.to(act.dtype).unsqueeze(-1)
        return x + self.down(act.view(b, t, -1)), balance


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token_embd = nn.Embedding(CONFIG["vocab"], CONFIG["n_embd"])
        self.layers = nn.ModuleList(Layer() for _ in range(CONFIG["n_layer"]))
        self.output_norm = RMSNorm(CONFIG["n_embd"])
        half = CONFIG["head_dim"] // 2
        freq = CONFIG["rope_base"] ** (-torch.arange(half).float() / half)
        angle = torch.outer(torch.arange(CONFIG["context"]).float(), freq)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, targets):
        x = self.token_embd(ids)
        t = ids.shape[1]
        cos, sin = self.cos[:t].to(x.dtype), self.sin[:t].to(x.dtype)
        balance = 0.0
        for layer in self.layers:
            x, part = layer(x, cos, sin)
            balance = balance + part
        logits = F.linear(self.output_norm(x), self.token_embd.weight)
        loss = F.cross_entropy(logits.float().view(-1, logits.shape[-1]), targets.reshape(-1))
        return loss, balance / CONFIG["n_layer"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, default=Path("corpus.jsonl.gz"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=400, help="training time")
    parser.add_argument("--batch", type=int, default=96)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    torch.manual_seed(1)
    rng = random.Random(1)
    args.out.mkdir(parents=True, exist_ok=True)
    with gzip.open(args.corpus, "rt", encoding="utf-8") as corpus:
        rows = [json.loads(line) for line in corpus]
    tok = train_tokenizer(
        [t for r in rows if r["domain"] != "math" for _, t in r["messages"]]
        + [t for r in rows[::20] for _, t in r["messages"]]
    )
    tok.save(str(args.out / "tokenizer.json"))
    streams = {}
    for domain in WEIGHT:
        mine = [r for r in rows if r["domain"] == domain]
        rng.shuffle(mine)
        ids = [i for e in tok.encode_batch([render(r["messages"]) + "<|endoftext|>" for r in mine]) for i in e.ids]
        streams[domain] = torch.tensor(ids, dtype=torch.long, device="cuda")
        print(f"{domain:16} {len(ids) / 1e6:.2f} M tokens", flush=True)
    size = {d: w * math.sqrt(len(streams[d])) for d, w in WEIGHT.items()}
    share = torch.tensor([size[d] for d in WEIGHT], device="cuda")
    names = list(WEIGHT)
    model = Model().cuda()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1.5e-3,
        betas=(0.9, 0.95),
        fused=True,
    )
    run = torch.compile(model)

    def batch():
        pick = torch.multinomial(share, args.batch, replacement=True).tolist()
        out = torch.empty(args.batch, args.length + 1, dtype=torch.long, device="cuda")
        for row, which in enumerate(pick):
            stream = streams[names[which]]
            start = rng.randrange(max(1, len(stream) - args.length - 1))
            piece = stream[start : start + args.length + 1]
            out[row, : len(piece)] = piece
            out[row, len(piece) :] = 0
        return out[:, :-1], out[:, 1:]

    start, step = time.time(), 0
    while (spent := time.time() - start) < args.seconds:
        progress = spent / args.seconds
        lr = 1.5e-3 * min(1.0, (step + 1) / 200) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in opt.param_groups:
            group["lr"] = lr
        ids, targets = batch()
        with torch.autocast("cuda", torch.bfloat16):
            loss, balance = run(ids, targets)
        (loss + 0.003 * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 250 == 0:
            print(f"step {step} {spent:.0f}s loss {loss.item():.3f} balance {balance.item():.2f}", flush=True)
        step += 1
    print(f"step {step} loss {loss.item():.3f} tokens {step * args.batch * args.length / 1e6:.0f} M", flush=True)
    save_file(
        {k: v.detach().to(torch.bfloat16).contiguous().cpu() for k, v in model.state_dict().items()},
        str(args.out / "model.safetensors"),
    )
    (args.out / "config.json").write_text(json.dumps(CONFIG))


if __name__ == "__main__":
    main()
