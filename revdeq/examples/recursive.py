"""A tiny recursive model: one small network, applied again and again to an answer and a thought, solves sudokus.

As in "Less is More: Recursive Reasoning with Tiny Networks" (Jolicoeur-Martineau, 2025): warm starts, a loss and an
update for each of a puzzle's segments (deep supervision), a head that halts solved puzzles, and averaged weights (EMA).
But the gradient is that of a whole segment, not of its last cycle, in the memory of one evaluation of f.

python -m revdeq.examples.recursive  # 2 min
"""

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import revdeq

CLUES = 8
"""The number of cells, of 16, that are given."""
PLACES = torch.tensor([(i // 4, 4 + i % 4, 8 + i // 8 * 2 + i % 4 // 2) for i in range(16)])
"""The row, the column and the box of every cell: 12 groups."""


class Cycle(nn.TransformerEncoderLayer):
    """f(z, x): two thoughts about the puzzle and the answer, and then an answer, all by one network."""

    def forward(self, z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        network, answer = super().forward, z["answer"]
        thought = network(z["thought"] + answer + x)
        thought = network(thought + answer + x)
        return {"answer": network(answer + thought), "thought": thought}


class Recursive(nn.Module):
    segments = 8  # at most, for a puzzle

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.cell, self.places = nn.Embedding(5, width), nn.Embedding(12, width)
        self.start = nn.Parameter(torch.randn(2, width), requires_grad=False)
        self.cycle = Cycle(width, nhead=4, dim_feedforward=2 * width, dropout=0.0, activation=F.silu, batch_first=True)
        self.digit, self.solved = nn.Linear(width, 4), nn.Linear(width, 1)

    def fresh(self, clues: Tensor, solution: Tensor) -> dict[str, Any]:
        """What is carried from one segment to the next, where puzzles begin."""
        answer, thought = (x.expand(len(clues), 16, -1) for x in self.start)
        carry = {"clues": clues, "solution": solution, "guess": clues, "z": {"answer": answer, "thought": thought}}
        return carry | {"segments": torch.zeros(len(clues)), "halted": torch.zeros(len(clues), dtype=torch.bool)}

    def forward(self, carry: dict[str, Any]) -> tuple[dict[str, Any], Tensor, Tensor]:
        """A segment: the carry after it, and the logits of the digits and of being solved."""
        x = self.cell(carry["clues"]) + self.places(PLACES.to(carry["clues"].device)).sum(1)
        end = revdeq.solve(self.cycle, carry["z"], x, beta=0.5, max_steps=2)
        digits, solved = self.digit(end.z["answer"]), self.solved(end.z["answer"]).amin((1, 2))  # the least certain
        carry = carry | {"z": end.z, "guess": digits.argmax(-1) + 1, "segments": carry["segments"] + 1}
        carry["halted"] = (solved > 0) | (carry["segments"] == self.segments)
        return carry, digits, solved


def where(which: Tensor, one: Any, other: Any) -> Any:
    """Of two carries, puzzle by puzzle, without their graphs."""
    if isinstance(one, dict):
        return {key: where(which, one[key], other[key]) for key in one}
    return torch.where(which.view(-1, *[1] * (one.dim() - 1)), one, other).detach()


def grids() -> Tensor:
    """All 288 sudokus of 4 x 4 cells."""
    rows = torch.tensor(list(itertools.permutations(range(1, 5))))
    found = rows[torch.cartesian_prod(*[torch.arange(24)] * 4)].flatten(1)
    for group in range(4, 12):
        cells = found[:, PLACES.eq(group).any(1).nonzero().flatten().tolist()]
        found = found[(cells.sort().values == torch.arange(1, 5)).all(1)]
    return found


def puzzles(count: int, solutions: Tensor) -> tuple[Tensor, Tensor]:
    """Clues (0 is an empty cell) that only one solution fits, and that solution."""
    answers = solutions[torch.randint(len(solutions), (4 * count,))]
    given = torch.rand(answers.shape).argsort(1) < CLUES
    fitting = ((solutions == answers.unsqueeze(1)) | ~given.unsqueeze(1)).all(2).sum(1)
    unique = (fitting == 1).nonzero().flatten()[:count]
    return (answers * given)[unique], answers[unique]


def main(updates: int = 800, batch: int = 64, count: int = 500) -> float:
    torch.set_default_device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    torch.manual_seed(0)
    solutions, model = grids(), Recursive()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    carry = model.fresh(*puzzles(batch, solutions))
    for update in range(1, updates + 1):
        carry = where(carry["halted"], model.fresh(*puzzles(batch, solutions)), carry)
        carry, digits, solved = model(carry)
        right = (carry["guess"] == carry["solution"]).all(1).to(solved)
        loss = F.cross_entropy(digits.flatten(0, 1), carry["solution"].flatten() - 1)
        loss = loss + 0.5 * F.binary_cross_entropy_with_logits(solved, right)
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model)
        if update % 100 == 0 or update == updates:
            print(f"update {update:4}  loss {loss.item():.3f}  norm of the gradient {norm.item():.2f}", flush=True)
    carry = model.fresh(*puzzles(count, solutions))
    with torch.no_grad():
        for _ in range(model.segments):
            carry = where(carry["halted"], carry, average(carry)[0])
    share = (carry["guess"] == carry["solution"]).all(1).float().mean().item()
    print(f"{share:.1%} of {count} new sudokus are solved, in {carry['segments'].mean():.1f} segments each")
    return share


if __name__ == "__main__":
    main()
