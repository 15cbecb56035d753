"""Puzzles of mixed sizes in one batch: what is saved if each of them stops separately.

    python -m revdeq train maze-tiny --out runs/bench/maze-tiny      # once, 16 minutes of a core
    python bench/examples.py

The models were trained on strings of 16 bits and on mazes of 4 x 4 cells. A batch has equally many puzzles of each
size, strings of 8 to 64 bits or mazes of 4 to 12 cells, padded to the largest. f keeps the padding at 0, like the
padding of its convolutions, so that a puzzle is solved as if it were alone. Measured, interleaved:

all steps              every puzzle takes as many steps as the hardest may need
whole batch            all of them stop when the change of the batch is small
per example            each stops separately, and f is evaluated for all until the last one stops
per example, compact   f is evaluated only for those that have not stopped

Times are processor time of one thread. A puzzle is solved if every position is right.
"""

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from table import device, options
from turns import one_thread, ratio, take_turns

import revdeq
from revdeq.training.data.puzzles import Mazes, PrefixSums
from revdeq.training.presets import configured
from revdeq.training.restore import restored
from revdeq.training.run import train

DEVICE = device()
RUNS = Path(__file__).parent.parent / "runs" / "bench"
TOL = 1e-2
WAYS = {
    "all steps": {},
    "whole batch": {"tol": TOL},
    "per example": {"tol": TOL, "per_example": True},
    "per example, compact": {"tol": TOL, "per_example": True, "compact": True},
}
KINDS = {
    "prefix sums": ("prefix-tiny", lambda size: PrefixSums(bits=size), range(8, 65, 8), 40, "bits"),
    "mazes": ("maze-tiny", lambda size: Mazes(cells=size), range(4, 13), 80, "cells"),
}
"""The preset, a function that generates puzzles, their sizes, the largest number of steps, and the unit of sizes."""


def model_of(preset, quick):
    """The trained model, or None if it has to be trained first."""
    if quick:
        return configured(preset).build(**KINDS_OF[preset]).eval()
    if preset == "prefix-tiny":  # a minute, once
        train(configured(preset), None, RUNS / preset, resume=True, device="cpu")
    last = RUNS / preset / "last.pt"
    return restored(last, None).model.eval() if last.exists() else None


KINDS_OF = {"prefix-tiny": {"features": 1, "dimensions": 1}, "maze-tiny": {"features": 3, "dimensions": 2}}


def batch_of(make, sizes, each):
    """Padded inputs, targets and masks, and the size of each puzzle."""
    generator = torch.Generator().manual_seed(3)
    made = [make(size).made(each, generator) for size in sizes]
    space = made[-1][1].shape[1:]

    def padded(x):
        missing = [(0, whole - part) for whole, part in zip(space, x.shape[-len(space) :], strict=True)]
        return F.pad(x, [n for pair in reversed(missing) for n in pair])

    inputs = torch.cat([padded(x) for x, _ in made])
    targets = torch.cat([padded(y) for _, y in made])
    inside = torch.cat([padded(torch.ones_like(x[:, :1])) for x, _ in made])
    order = torch.randperm(len(inputs), generator=generator)
    of = torch.tensor(sizes).repeat_interleave(each)
    return [x[order].to(DEVICE) for x in (inputs, targets, inside, of)]


def solver(model, inputs, inside, max_steps):
    """A function of options that solves the batch, and returns the solution and the model's answers."""
    block = model.equilibrium.f

    def f(z, x, inside):
        hidden = F.relu(block.conv1(z) + x) * inside
        return block.norm(z + block.conv2(hidden)) * inside

    x = model.encode(inputs) * inside

    def solved(**given):
        solution = revdeq.solve(f, torch.zeros_like(x), x, inside, beta=0.8, max_steps=max_steps, **given)
        return solution, model.classify(solution.z.movedim(1, -1)).argmax(-1)

    return solved


@torch.no_grad()
def measured(kind, table, quick, clock):
    preset, make, sizes, max_steps, unit = KINDS[kind]
    model = model_of(preset, quick)
    if model is None:
        print(f"{kind} are left out: python -m revdeq train {preset} --out {RUNS / preset}")
        return
    if quick:
        sizes, max_steps = sizes[:3], 8
    inputs, targets, inside, of = batch_of(make, sizes, 2 if quick else 8)
    solved = solver(model.to(DEVICE), inputs, inside, max_steps)
    times = take_turns(
        {way: lambda given=given: solved(**given) for way, given in WAYS.items()}, 1, rounds=(2, 3), clock=clock
    )
    print(f"\n{len(inputs)} {kind} of {sizes[0]} to {sizes[-1]} {unit}, at most {max_steps} steps")
    print(f"{'':22}{'evaluations of an example':>26}{'time':>7}{'solved':>9}")
    for way, given in WAYS.items():
        solution, answers = solved(**given)
        right = ((answers == targets) | (inside[:, 0] == 0)).flatten(1).all(1)
        taken = torch.as_tensor(solution.steps).expand(len(inputs))
        mean = 2 * taken.float().mean().item()
        share, over = right.float().mean().item(), ratio(times[way], times["all steps"])
        print(f"{way:22}{mean:26.1f}{over:7.2f}{share:9.1%}")
        if table is not None:
            for quantity, values in (
                ("seconds", times[way]),
                ("of all steps", [over]),
                ("evaluations of an example", [mean]),
                ("solved", [share]),
            ):
                table.add(f"examples, {kind}", way, max_steps, quantity, values)
    # With more puzzles, for a histogram.
    inputs, _, inside, of = batch_of(make, sizes, 2 if quick else 40)
    taken = solver(model, inputs, inside, max_steps)(**WAYS["per example, compact"])[0].steps
    for size in sizes:
        steps, counts = taken[of == size].unique(return_counts=True)
        here = taken[of == size].float()
        print(f"{size:4} {unit}: {here.min():.0f} to {here.max():.0f} steps, {here.mean():.1f} on average")
        if table is not None:
            for n, count in zip(steps.tolist(), counts.tolist(), strict=True):
                table.add(f"steps taken, {kind}", f"{size} {unit}", n, "examples", [count])


def main():
    table, quick = options(__doc__, "small puzzles and untrained models")
    clock = one_thread()
    for kind in KINDS:
        measured(kind, table, quick, clock)


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - start:.0f} s")
