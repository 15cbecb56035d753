"""`python -m revdeq demo`: what a reversible solve costs, how exact it is, and what depth is good for."""

import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from tqdm import tqdm

from .. import ReconstructionWarning, solve
from .._device import peak_memory
from ..baselines import checkpointed, stored_graph
from ..models import ConvBlock, PuzzleModel

DEPTHS = (1, 2, 4, 8, 16, 32, 64)
SOLVED_DEPTHS = (1, 2, 5, 10, 20, 40, 80)
BITS, UPDATES = 16, 300
Rows = dict[str, list[float]]


def add_options(_: ArgumentParser) -> None:
    """There are none."""


def run(_: Namespace) -> int:
    warnings.simplefilter("ignore", ReconstructionWarning)  # the picture shows what it is about
    torch.set_num_threads(1)  # its tensors are too small for threads to pay
    torch.manual_seed(0)
    begin = time.perf_counter()
    memory = costs("1/3  memory of a step, MiB", METHODS, lambda f, n: peak_memory(lambda: f(max_steps=n)) / 2**20)
    show(memory, DEPTHS, "{:.1f}")
    errors = costs("2/3  gradient error that reconstruction adds", STATES, reconstruction_error)
    show(errors, DEPTHS, "{:.0e}")
    solved = prefix_sums()
    show(solved, SOLVED_DEPTHS, "{:.0%}")
    picture(memory, errors, solved).savefig("demo.png", dpi=120)
    print(f"The picture: demo.png ({time.perf_counter() - begin:.0f} s in all)")
    return 0


def show(rows: Rows, depths: tuple[int, ...], form: str) -> None:
    print("\n" + " " * 32 + "".join(f"{f'N = {n}':>8}" for n in depths))
    for name, values in rows.items():
        print(f"{name:32}" + "".join(f"{form.format(value):>8}" for value in values))
    print(flush=True)


METHODS = {
    "stored graph": stored_graph,
    "checkpoint": checkpointed,
    "revdeq, float64 state": solve,
    "revdeq, exact state": partial(solve, state="exact"),
}
STATES = {
    "float64 state (default), beta .5": solve,
    "float64 state, beta .8": partial(solve, beta=0.8),
    "exact state, beta .8": partial(solve, state="exact", beta=0.8),
}


def costs(title: str, methods: dict[str, Any], measured: Callable[..., float]) -> Rows:
    """A measurement of each method at each of DEPTHS: the gradient of an image model's block on handwritten digits."""
    digits = torch.tensor(load_digits().images[:64]).float().unsqueeze(1) / 16
    f, x = ConvBlock(16), nn.Conv2d(1, 16, 3, padding=1)(digits).detach()

    def gradient(method: Callable[..., Any], **options: Any) -> Tensor:
        found = method(f, torch.zeros_like(x), x, **options)
        loss = getattr(found, "z", found).square().mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(f.parameters()))])

    rows: Rows = {name: [] for name in methods}
    for name, depth in tqdm(list(product(methods, DEPTHS)), desc=title):
        rows[name].append(measured(partial(gradient, methods[name]), depth))
    return rows


def reconstruction_error(gradient: Callable[..., Tensor], depth: int) -> float:
    kept = gradient(max_steps=depth, keep=2 * depth)  # the same steps with all graphs kept
    return float((gradient(max_steps=depth) - kept).norm() / kept.norm())


def prefix_sums() -> Rows:
    """Learn whether the number of ones up to each bit of a string is odd. Returns the share of solved strings."""
    model = PuzzleModel(features=1, dimensions=1, noise=1.0, beta=0.8, state="exact")
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=UPDATES, pct_start=0.1)
    for _ in tqdm(range(UPDATES), desc=f"3/3  training on prefix sums of {BITS} bits"):
        bits = torch.randint(2, (64, BITS))
        model.equilibrium.max_steps = int(torch.randint(5, 17, ()))
        logits = model(bits.unsqueeze(1).float())
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), (bits.cumsum(1) % 2).flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.eval()
    solved: Rows = {f"{length} bits": [] for length in (BITS, 2 * BITS, 4 * BITS)}
    for name, model.equilibrium.max_steps in product(solved, SOLVED_DEPTHS):
        bits = torch.randint(2, (200, int(name.split()[0])))
        with torch.no_grad():
            right = model(bits.unsqueeze(1).float()).argmax(-1) == bits.cumsum(1) % 2
        solved[name].append(right.all(1).float().mean().item())
    return solved


def picture(memory: Rows, errors: Rows, solved: Rows) -> Figure:
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    panels = figure.subplots(1, 3)
    # 0 is drawn at the lowest error, NaN and all above 1 at the highest.
    shown = {name: [max(1e-9, e) if e < 1 else 1.0 for e in values] for name, values in errors.items()}
    for axes, rows, depths in zip(panels, (memory, shown, solved), (DEPTHS, DEPTHS, SOLVED_DEPTHS), strict=True):
        for size, (name, values) in zip((10, 8, 6, 4), rows.items(), strict=False):  # points may lie on each other
            axes.semilogx(depths, values, "o-", base=2, markersize=size, label=name, clip_on=False)
        axes.set_xticks(depths, depths)
        axes.set_xlabel("steps N (2 N evaluations of f)")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, loc="upper left")
    panels[0].set_title("Peak memory of a training step, MiB", pad=10)
    panels[0].set_yscale("log")
    panels[0].yaxis.set_major_formatter("{x:g}")
    panels[1].set_title("Gradient error that reconstruction adds", pad=10)
    panels[1].set(yscale="log", ylim=(1e-9, 1))
    panels[1].set_yticks([1e-9, 1e-7, 1e-5, 1e-3, 1e-1, 1], ["0", "1e-7", "1e-5", "1e-3", "0.1", "≥ 1"])
    panels[2].set_title(f"Prefix sums solved after training on {BITS} bits", pad=10)
    panels[2].set_ylim(0, 1)
    panels[2].yaxis.set_major_formatter("{x:.0%}")
    return figure
