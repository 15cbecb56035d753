"""`python -m revdeq demo`: a small image model on handwritten digits, trained three ways.

The same model is trained by the reversible solver, through the stored graph and with checkpointing, at
three depths. All three follow the same gradient; they differ in the time and the memory they take for it.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._device import peak_memory
from .._solver.monitor import ReconstructionWarning
from .._solver.solve import solve
from ..baselines import checkpointed, stored_graph
from ..models import ConvBlock
from ..models.blocks import group_norm

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEPTHS = (2, 4, 8)
PLOTTED_DEPTHS = (1, 2, 4, 8, 16, 32, 64)
BETA = 0.5
PLOTTED_BETAS = (0.5, 0.8, 0.9)
EPOCHS = 5
BATCH = 64


def reversible(*args: Any, **kwargs: Any) -> Tensor:
    return solve(*args, **kwargs).z


def all_graphs_kept(*args: Any, max_steps: int, **kwargs: Any) -> Tensor:
    """The same steps, to the bit, with their stored graph: what going back adds to the error of a gradient shows."""
    return solve(*args, max_steps=max_steps, keep=2 * max_steps, **kwargs).z


METHODS: dict[str, Callable[..., Tensor]] = {
    "reversible": reversible,
    "stored graph": stored_graph,
    "checkpoint": checkpointed,
}


class Classifier(nn.Module):
    """The paper's single-scale image model at the size of the digits."""

    def __init__(self, method: str, max_steps: int, beta: float = BETA, channels: int = 16) -> None:
        super().__init__()
        self.method, self.solve, self.max_steps, self.beta = method, METHODS[method], max_steps, beta
        self.encode = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), group_norm(channels))
        self.f = ConvBlock(channels, width=2)
        self.classify = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10))

    def forward(self, images: Tensor) -> Tensor:
        x = self.encode(images)
        z = self.solve(self.f, torch.zeros_like(x), x, beta=self.beta, max_steps=self.max_steps)
        return self.classify(z)


@dataclass
class Digits:
    """1,797 images of 8x8 pixels, which ship inside scikit-learn's wheel; every fifth one is for testing."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def batches(self) -> int:
        return -(-len(self.labels) // BATCH)

    @classmethod
    def load(cls) -> "Digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
        labels = torch.tensor(digits.target)
        test = torch.arange(len(labels)) % 5 == 0
        return cls(images[~test], labels[~test], images[test], labels[test])


@dataclass
class Row:
    model: Classifier
    accuracy: float
    seconds: float = float("inf")
    peak_bytes: int = 0
    gradient_error: float = 0.0


def run(out: Path, seed: int = 0) -> list[Row]:
    """Train, print the table, and write the plot to `out`."""
    from tqdm import tqdm

    digits = Digits.load()
    total = len(DEPTHS) * len(METHODS) * EPOCHS * digits.batches
    rows = []
    with tqdm(total=total, unit="step", dynamic_ncols=True, mininterval=0.5) as bar:
        for max_steps in DEPTHS:
            for method in METHODS:
                bar.set_description(f"training, {method}, N = {max_steps}", refresh=False)
                rows.append(train(method, max_steps, digits, seed, bar.update))
    batch = digits.images[:BATCH], digits.labels[:BATCH]
    for row in rows:
        row.peak_bytes = step_memory(row.model, *batch)
        row.gradient_error = gradient_error(row.model, *batch)
    for _ in range(7):  # turn by turn, so that a busy machine slows all of them down
        for row in rows:
            start = time.perf_counter()
            gradients(row.model, *batch)
            row.seconds = min(row.seconds, time.perf_counter() - start)
    print_table(rows)
    plot(batch, out, seed)
    print(f"\nMemory and gradient error against depth: {out}")
    return rows


def train(method: str, max_steps: int, digits: Digits, seed: int, progress: Callable[[], Any]) -> Row:
    torch.manual_seed(seed)
    model = Classifier(method, max_steps)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=EPOCHS * digits.batches)
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(digits.labels)).split(BATCH):
            loss = F.cross_entropy(model(digits.images[batch]), digits.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            progress()
    with torch.no_grad():
        accuracy = (model(digits.test_images).argmax(1) == digits.test_labels).float().mean().item()
    return Row(model, accuracy)


def gradients(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(F.cross_entropy(model(images), labels), list(model.parameters()))


def step_memory(model: nn.Module, images: Tensor, labels: Tensor) -> int:
    gradients(model, images, labels)  # what is allocated once only
    return peak_memory(lambda: gradients(model, images, labels))


def gradient_error(model: Classifier, images: Tensor, labels: Tensor) -> float:
    """Of the parameter that is furthest, relatively, from its gradient by a stored graph of the same steps."""
    ours, method = gradients(model, images, labels), model.solve
    model.solve = all_graphs_kept if method is reversible else stored_graph
    stored = gradients(model, images, labels)
    model.solve = method
    return max(((g - s).norm() / s.norm()).item() for g, s in zip(ours, stored, strict=True))


def print_table(rows: list[Row]) -> None:
    print(f"\n{'':14}  N  evaluations of f  test accuracy  time per step  peak memory  gradient error")
    for row in rows:
        print(
            f"{row.model.method:14} {row.model.max_steps:2}  {2 * row.model.max_steps:16}  {row.accuracy:13.1%}  "
            f"{row.seconds * 1e3:10.1f} ms  {row.peak_bytes / 2**20:7.1f} MiB  {row.gradient_error:14.1e}"
        )


def plot(batch: tuple[Tensor, Tensor], out: Path, seed: int) -> None:
    def by_depth(measurement: Callable[..., float], method: str, beta: float = BETA) -> list[float]:
        torch.manual_seed(seed)
        model = Classifier(method, 1, beta)
        values = []
        for model.max_steps in PLOTTED_DEPTHS:
            values.append(measurement(model, *batch))
        return values

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReconstructionWarning)  # it would announce what the plot shows
        memory = {method: by_depth(step_memory, method) for method in METHODS}
        errors = {beta: by_depth(gradient_error, "reversible", beta) for beta in PLOTTED_BETAS}
    picture(memory, errors).savefig(out, dpi=120)


def picture(memory: dict[str, list[float]], errors: dict[float, list[float]]) -> "Figure":
    """Peak bytes by method and errors of the gradient by beta, each at PLOTTED_DEPTHS."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, peaks in memory.items():
        left.plot(PLOTTED_DEPTHS, [peak / 2**20 for peak in peaks], "o-", label=method)
    left.set(yscale="log", ylabel="peak memory of a training step (MiB)")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(NullFormatter())
    zero, highest, lost_somewhere = 1e-9, 1.0, False
    for beta, values in errors.items():
        shown = [min(max(e, zero), highest) for e in values]  # a NaN stays one, and is left out of the line
        (line,) = right.plot(PLOTTED_DEPTHS, shown, "o-", label=f"beta = {beta}")
        if lost := [n for n, e in zip(PLOTTED_DEPTHS, values, strict=True) if not e < highest]:
            # An empty line with clip_on=False has no place, for which the layout would give away all there is.
            right.plot(lost, [highest] * len(lost), "x", color=line.get_color(), clip_on=False)
            line.set_markevery([n not in lost for n in PLOTTED_DEPTHS])
            lost_somewhere = True
    right.axhline(2.0**-24, color="grey", linestyle=":", label="rounding of float32")
    if lost_somewhere:
        right.plot([], [], "x", color="black", label="1 or more, or not finite")
    right.set(
        yscale="log",
        ylim=(zero / 2, highest),
        ylabel="relative error of the gradient by going back,\nreversible, worst parameter",
    )
    right.set_yticks([1, 1e-2, 1e-4, 1e-6, 1e-8, zero], ["1", *(f"$10^{{{k}}}$" for k in (-2, -4, -6, -8)), "0"])
    right.yaxis.set_minor_locator(NullLocator())
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("steps N (2 N evaluations of f)")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
    return figure
