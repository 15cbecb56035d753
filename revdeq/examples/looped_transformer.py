"""A looped transformer from scratch: one block, applied repeatedly, learns to sort digits.

The number of steps is random in every update, so that the model works at every depth.

python -m revdeq.examples.looped_transformer  # 10 s
"""

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import revdeq

LENGTH, DIGITS = 6, 10


class Block(nn.Module):
    """f(z, x): a transformer block with input injection."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        u = z + x
        h = self.norm1(u + self.attention(u, u, u, need_weights=False)[0])
        return self.norm2(h + self.mlp(h))


class LoopedTransformer(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(DIGITS, width), nn.Parameter(torch.randn(LENGTH, width))
        self.loop = revdeq.RevDEQ(Block(width), beta=0.8, state="exact")  # exact gradients at every depth
        self.head = nn.Linear(width, DIGITS)

    def forward(self, digits: Tensor) -> Tensor:
        return self.head(self.loop(self.token(digits) + self.position))


def solved(model: LoopedTransformer, steps: int) -> float:
    """The share of lists that are sorted correctly."""
    model.loop.max_steps = steps
    digits = torch.randint(DIGITS, (500, LENGTH))
    with torch.no_grad():
        return (model(digits).argmax(-1) == digits.sort().values).all(1).float().mean().item()


def main(updates: int = 250) -> None:
    torch.set_default_device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    torch.manual_seed(0)
    model = LoopedTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=updates)
    draw = random.Random(0)
    for update in range(1, updates + 1):
        model.loop.max_steps = draw.randint(2, 6)  # memory does not depend on it
        digits = torch.randint(DIGITS, (64, LENGTH))
        loss = F.cross_entropy(model(digits).flatten(0, 1), digits.sort().values.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if update % 50 == 0:
            print(f"update {update:4}  loss {loss.item():.3f}", flush=True)
    for steps in (1, 2, 4, 8):
        print(f"N = {steps}: {solved(model, steps):.1%} of the lists are sorted")


if __name__ == "__main__":
    main()
