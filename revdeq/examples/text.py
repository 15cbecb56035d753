"""A looped transformer of one's own, with fast text generation: a key-value cache for every evaluation.

It learns to copy: after a word of random letters and a bar it repeats the word. Its block has rotary positions, RMS
norms, and an embedding per evaluation.

python -m revdeq.examples.text  # 10 s
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from revdeq.models import Cache, LanguageModel

LETTERS, BAR, LENGTH, STEPS = 8, 8, 6, 3


class Block(nn.Module):
    """f(z, x), with the index of the evaluation, and a cache when it generates text."""

    def __init__(self, d: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.evaluation = nn.Embedding(2 * STEPS, d)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.norm1, self.norm2, self.norm3 = nn.RMSNorm(d), nn.RMSNorm(d), nn.RMSNorm(d)

    def forward(self, z: Tensor, x: Tensor, cache: Cache | None = None, evaluation: int = 0) -> Tensor:
        u = z + x + self.evaluation.weight[evaluation]
        parts = self.qkv(self.norm1(u)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        positions = torch.arange(z.shape[1], device=z.device) if cache is None else cache.positions
        q, k = rotated(q, positions), rotated(k, positions)
        if cache is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:  # the current positions, and all cached ones
            attended = cache.attend(q, k, v)
        h = u + self.out(attended.transpose(1, 2).flatten(-2))
        g = self.norm2(h)
        return self.norm3(h + self.down(F.silu(self.gate(g)) * self.up(g)))


def rotated(t: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions: (B, heads, T, size), at positions (T) or (B, T)."""
    half = t.shape[-1] // 2
    angles = positions[..., None] / 100 ** (torch.arange(half, device=t.device) / half)
    cos, sin = angles.cos(), angles.sin()
    if positions.dim() == 2:  # prompts of different lengths
        cos, sin = cos[:, None], sin[:, None]
    a, b = t.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def sentences(count: int) -> Tensor:
    word = torch.randint(LETTERS, (count, LENGTH))
    return torch.cat([word, torch.full((count, 1), BAR), word], 1)


def main(updates: int = 100) -> None:
    torch.manual_seed(0)
    model = LanguageModel(LETTERS + 1, 64, length=2 * LENGTH + 1, block=Block, indexed=True, max_steps=STEPS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for update in range(1, updates + 1):
        text = sentences(64)
        loss = F.cross_entropy(model(text)[:, LENGTH:-1].flatten(0, 1), text[:, LENGTH + 1 :].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if update % 50 == 0:
            print(f"update {update:4}  loss {loss.item():.3f}", flush=True)
    text = sentences(500)
    for use_cache in (True, False):
        begin = time.perf_counter()
        written = model.generate(text[:, : LENGTH + 1], max_new_tokens=LENGTH, use_cache=use_cache)
        speed = written[:, LENGTH + 1 :].numel() / (time.perf_counter() - begin)
        right = (written == text).all(1).float().mean()
        how = "with caches" if use_cache else "without"
        print(f"{right:.1%} of the words are copied, {speed:,.0f} tokens per second {how}")


if __name__ == "__main__":
    main()
