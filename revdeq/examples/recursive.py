"""A tiny recursive model: one small network, applied again and again to an answer and a thought, solves sudokus.

As in "Less is More: Recursive Reasoning with Tiny Networks" (Jolicoeur-Martineau, 2025): states are carried from one
segment of a puzzle to the next (warm start), each segment has a loss and an update of its own (deep supervision), a
head says when a puzzle is solved, which is then replaced by a new one (halting), and an average of the weights is what
is used (EMA). But the gradient is that of a whole segment, not of its last cycle, in the memory of one evaluation of f.

    python -m revdeq.examples.recursive             # about two minutes on two cores
    python -m revdeq.examples.recursive --compile --autocast
"""

import argparse
import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import revdeq
from revdeq._device import devices

CLUES, SEGMENTS = 8, 8  # the cells of 16 that are given, and the most segments for a puzzle
PLACES = torch.tensor([(i // 4, 4 + i % 4, 8 + i // 8 * 2 + i % 4 // 2) for i in range(16)])  # row, column, box


def grids() -> Tensor:
    """All 288 sudokus of 4 x 4 cells."""
    rows = torch.tensor(list(itertools.permutations(range(1, 5))))
    found = rows[torch.cartesian_prod(*[torch.arange(24)] * 4)].flatten(1)
    for group in range(12):
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


class Network(nn.Module):
    """Attention between the cells, and an MLP."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, z: Tensor) -> Tensor:
        q, k, v = self.qkv(z).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        z = F.rms_norm(z + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)), (self.width,))
        return F.rms_norm(z + self.mlp(z), (self.width,))


class Cycle(nn.Module):
    """f(z, x): two thoughts about the puzzle and the answer, and then an answer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = Network(width)

    def forward(self, z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        thought = self.network(z["thought"] + z["answer"] + x)
        thought = self.network(thought + z["answer"] + x)
        return {"answer": self.network(z["answer"] + thought), "thought": thought}


class Recursive(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.cell, self.places = nn.Embedding(5, width), nn.Embedding(12, width)
        self.start = nn.Parameter(torch.randn(2, width), requires_grad=False)
        self.cycle, self.head, self.solved = Cycle(width), nn.Linear(width, 4), nn.Linear(width, 1)
        for layer in self.cycle.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=layer.in_features**-0.5)

    def forward(self, carry: dict[str, Any]) -> tuple[revdeq.Solution, Tensor, Tensor]:
        """One segment, from a carry: how it ended, the logits of every cell, and whether the puzzle is solved."""
        x = self.cell(carry["clues"]) + self.places(PLACES.to(carry["clues"].device)).sum(1)
        # Cycles come to expand while they learn, and gradients would explode in deeper ones: gamma damps them.
        end = revdeq.solve(self.cycle, carry["z"], x, y0=carry["y"], beta=0.5, gamma=0.5, max_steps=2)
        return end, self.head(end.z["answer"]), self.solved(end.z["answer"]).squeeze(2).amin(1)  # the least certain

    def fresh(self, clues: Tensor, solution: Tensor) -> dict[str, Any]:
        """The carry that puzzles begin with."""
        answer, thought = (x.expand(len(clues), 16, -1) for x in self.start)
        z = {"answer": answer, "thought": thought}
        return {"clues": clues, "solution": solution, "segments": torch.zeros(len(clues)), "z": z, "y": z}


def replaced(which: Tensor, new: Any, old: Any) -> Any:
    """The new carry where `which` says so, puzzle by puzzle, and otherwise the old one without its graph."""
    if isinstance(new, dict):
        return {key: replaced(which, new[key], old[key]) for key in new}
    return torch.where(which.view(-1, *[1] * (new.dim() - 1)), new, old.detach())


def share_solved(model: Any, carry: dict[str, Any]) -> tuple[float, float]:
    """The share of puzzles whose answer is right when they halt, and how many segments they take."""
    going, answers = torch.ones(len(carry["clues"]), dtype=torch.bool), carry["clues"]
    for _ in range(SEGMENTS):
        end, logits, q = model(carry)
        answers = torch.where(going.unsqueeze(1), logits.argmax(-1) + 1, answers)
        carry |= {"z": end.z, "y": end.y, "segments": carry["segments"] + going}
        going &= q <= 0
    return (answers == carry["solution"]).all(1).float().mean().item(), carry["segments"].mean().item()


def main(updates: int = 800, batch: int = 64, count: int = 500, compiled: bool = False, bf16: bool = False) -> float:
    torch.set_default_device(devices()[0])
    torch.manual_seed(0)
    solutions, model, autocast = grids(), Recursive(), torch.autocast(devices()[0].type, torch.bfloat16, enabled=bf16)
    if compiled:
        model.cycle.compile()  # f, and not the model around it
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=updates, pct_start=0.1)
    carry, halted = model.fresh(*puzzles(batch, solutions)), torch.zeros(batch, dtype=torch.bool)
    for update in range(1, updates + 1):
        carry = replaced(halted, model.fresh(*puzzles(batch, solutions)), carry)
        with autocast:
            end, logits, q = model(carry)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), carry["solution"].flatten() - 1)
        right = (logits.argmax(-1) + 1 == carry["solution"]).all(1)
        loss = loss + 0.5 * F.binary_cross_entropy_with_logits(q.float(), right.float())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        carry |= {"z": end.z, "y": end.y, "segments": carry["segments"] + 1}
        halted = (q > 0) | (carry["segments"] >= SEGMENTS)
        if update % 100 == 0 or update == updates:
            growth = end.adjoint.growth
            print(f"update {update:4}  loss {loss.item():.3f}  the adjoint grew {growth:.1f} times", flush=True)
    with torch.no_grad(), autocast:
        solved, segments = share_solved(average, model.fresh(*puzzles(count, solutions)))
    print(f"{solved:.1%} of {count} new sudokus are solved, in {segments:.1f} segments each")
    return solved


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=800)
    parser.add_argument("--compile", action="store_true", help="compile f")
    parser.add_argument("--autocast", action="store_true", help="compute in bfloat16")
    arguments = parser.parse_args()
    main(arguments.updates, compiled=arguments.compile, bf16=arguments.autocast)
