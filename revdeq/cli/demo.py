"""`python -m revdeq demo`: the cost of the solver, and the benefit of depth.

A small image model is trained on handwritten digits with the reversible solver, the stored graph and checkpointing, at
three depths. All three compute the same gradient, with different time and memory. Then a model learns prefix sums of 16
bits, and solves longer strings by taking more steps.
"""

import tempfile
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
from .._solver.check import ReconstructionWarning
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
EPOCHS = 4
BATCH = 64
LENGTHS = (16, 32, 64)
"""Lengths of bit strings; the first is that of the training."""
SOLVED_DEPTHS = (1, 2, 5, 10, 20, 40, 80)


def reversible(*args: Any, **kwargs: Any) -> Tensor:
    return solve(*args, **kwargs).z


def all_graphs_kept(*args: Any, max_steps: int, **kwargs: Any) -> Tensor:
    """The stored graph of the same steps, bit for bit, to measure the gradient error that reconstruction adds."""
    return solve(*args, max_steps=max_steps, keep=2 * max_steps, **kwargs).z


METHODS: dict[str, Callable[..., Tensor]] = {
    "reversible": reversible,
    "stored graph": stored_graph,
    "checkpoint": checkpointed,
}


class Classifier(nn.Module):
    """The paper's single-scale image model at the size of the digits."""

    def __init__(self, method: str, max_steps: int, channels: int = 16, **options: Any) -> None:
        super().__init__()
        self.method, self.solve, self.max_steps = method, METHODS[method], max_steps
        self.options = {"beta": BETA, **options}
        self.encode = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), group_norm(channels))
        self.f = ConvBlock(channels, width=2)
        self.classify = nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(16 * channels, 10))

    def forward(self, images: Tensor) -> Tensor:
        x = self.encode(images)
        z = self.solve(self.f, torch.zeros_like(x), x, max_steps=self.max_steps, **self.options)
        return self.classify(z)


@dataclass
class Digits:
    """1,797 images of 8x8 pixels, part of scikit-learn; every fifth is a test image."""

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
    """Train, print the tables, and write the plot to `out`."""
    from tqdm import tqdm

    digits = Digits.load()
    print("1. The cost of a training step: an image model on handwritten digits, trained in three ways.", flush=True)
    total = len(DEPTHS) * len(METHODS) * EPOCHS * digits.batches
    rows = []
    with tqdm(total=total, unit="update", dynamic_ncols=True, mininterval=0.5, disable=None) as bar:
        for max_steps in DEPTHS:
            for method in METHODS:
                bar.set_description(f"{method}, N = {max_steps}", refresh=False)
                rows.append(train(method, max_steps, digits, seed, bar.update))
    batch = digits.images[:BATCH], digits.labels[:BATCH]
    for row in rows:
        row.peak_bytes = step_memory(row.model, *batch)
        row.gradient_error = gradient_error(row.model, *batch)
    for _ in range(7):  # interleaved, so that other load slows all of them
        for row in rows:
            start = time.perf_counter()
            gradients(row.model, *batch)
            row.seconds = min(row.seconds, time.perf_counter() - start)
    print_costs(rows)
    memory, errors = costs_by_depth(batch, seed)

    print("\n2. The benefit of depth: at each bit of a string, is the number of ones so far odd or even?")
    print(f"Training a model on strings of {LENGTHS[0]} bits, about half a minute ...", flush=True)
    solved = prefix_sums(seed)
    print_solved(solved)
    picture(memory, errors, solved).savefig(out, dpi=120)
    print(f"\nThe plot of all of this: {out}")
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
    gradients(model, images, labels)  # one-time allocations
    return peak_memory(lambda: gradients(model, images, labels))


def gradient_error(model: Classifier, images: Tensor, labels: Tensor) -> float:
    """The largest relative error of any parameter's gradient, against the stored graph of the same steps."""
    ours, method = gradients(model, images, labels), model.solve
    model.solve = all_graphs_kept if method is reversible else stored_graph
    stored = gradients(model, images, labels)
    model.solve = method
    return max(((g - s).norm() / s.norm()).item() for g, s in zip(ours, stored, strict=True))


def print_costs(rows: list[Row]) -> None:
    print(f"\n{'':14}  N  evaluations of f  test accuracy  time per update  peak memory  gradient error")
    for row in rows:
        print(
            f"{row.model.method:14} {row.model.max_steps:2}  {2 * row.model.max_steps:16}  {row.accuracy:13.1%}  "
            f"{row.seconds * 1e3:12.1f} ms  {row.peak_bytes / 2**20:7.1f} MiB  {row.gradient_error:14.1g}"
        )
    print(
        "\nMemory grows with N for the stored graph and for checkpointing, but not for the reversible solver. All\n"
        "three learn the same, because their gradients are the same. The gradient error is relative to a stored\n"
        "graph of the same steps."
    )


def print_solved(solved: dict[int, list[float]]) -> None:
    print("\nStrings with every bit right, by the number of steps N:\n")
    print(" " * 20 + "".join(f"{f'N = {n}':>8}" for n in SOLVED_DEPTHS))
    for bits, shares in solved.items():
        print(f"{length_shown(bits):20}" + "".join(f"{share:8.0%}" for share in shares))
    print(
        "\nThe weights are the same in every column, and the model was never trained on longer strings. With more\n"
        "steps, it solves them."
    )


def length_shown(bits: int) -> str:
    return f"{bits} bits{', as trained' if bits == LENGTHS[0] else ''}"


def prefix_sums(seed: int) -> dict[int, list[float]]:
    """Train the preset prefix-tiny. Returns the share of solved strings by length, at SOLVED_DEPTHS."""
    from tqdm import tqdm

    from ..training import Stopped, configured, data, evaluate, restored
    from ..training import train as train_preset

    preset = configured("prefix-tiny", {"bits": LENGTHS[0], "seed": seed, "log_every": 5, "evaluate_every": 500})
    bar = tqdm(total=preset.training.updates, unit="update", dynamic_ncols=True, disable=None)
    with tempfile.TemporaryDirectory() as folder, bar:

        def progress(row: dict[str, Any]) -> None:
            bar.update(row["update"] - bar.n)

        try:
            train_preset(preset, None, Path(folder), device="cpu", quiet=True, callback=progress)
        except Stopped as stopped:  # its checkpoint is in a temporary folder
            raise KeyboardInterrupt from stopped
        trained = restored(Path(folder, "last.pt"), None, {"evaluation_batches": 4})
    model: Any = trained.model
    solved: dict[int, list[float]] = {bits: [] for bits in LENGTHS}
    for bits, shares in solved.items():
        for model.equilibrium.max_steps in SOLVED_DEPTHS:
            shares.append(evaluate(model, data.PrefixSums(bits), "test", trained.preset.training).metric)
    return solved


def costs_by_depth(batch: tuple[Tensor, Tensor], seed: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Peak bytes by method, and the gradient error of reconstruction by state, at PLOTTED_DEPTHS."""

    def by_depth(measurement: Callable[..., float], method: str, images: int = BATCH, **options: Any) -> list[float]:
        torch.manual_seed(seed)
        model = Classifier(method, 1, **options)
        values = []
        for model.max_steps in PLOTTED_DEPTHS:
            values.append(measurement(model, batch[0][:images], batch[1][:images]))
        return values

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ReconstructionWarning)  # the plot shows it
        memory = {method: by_depth(step_memory, method) for method in METHODS}
        errors, exact = {}, []
        for beta in PLOTTED_BETAS:
            float64, integers = (
                by_depth(gradient_error, "reversible", images=16, beta=beta, state=state)
                for state in ("float64", "exact")
            )
            errors[f"float64 state, beta {beta}"] = float64
            exact.append(integers)
    errors["exact state, each beta"] = [max(values) for values in zip(*exact, strict=True)]
    return memory, errors


def picture(memory: dict[str, list[float]], errors: dict[str, list[float]], solved: dict[int, list[float]]) -> "Figure":
    """memory: peak bytes by method. errors: of the gradient, by state. solved: shares by length."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    for method, peaks in memory.items():
        left.plot(PLOTTED_DEPTHS, [peak / 2**20 for peak in peaks], "o-", label=method)
    left.set(title="Peak memory of an update", yscale="log", ylabel="MiB")
    left.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter(NullFormatter())

    zero, highest, lost_somewhere = 1e-9, 1.0, False
    for state, values in errors.items():
        shown = [min(max(e, zero), highest) for e in values]  # NaN is not drawn
        (line,) = middle.plot(PLOTTED_DEPTHS, shown, "o-", label=state)
        if lost := [n for n, e in zip(PLOTTED_DEPTHS, values, strict=True) if not e < highest]:
            # An empty line with clip_on=False would break the layout.
            middle.plot(lost, [highest] * len(lost), "x", color=line.get_color(), clip_on=False)
            line.set_markevery([n not in lost for n in PLOTTED_DEPTHS])
            lost_somewhere = True
    middle.axhline(2.0**-24, color="grey", linestyle=":", label="rounding of float32")
    if lost_somewhere:
        middle.plot([], [], "x", color="black", label="1 or more, or not finite")
    middle.set(
        title="Gradient error added by reconstruction",
        yscale="log",
        ylim=(zero / 2, highest),
        ylabel="relative, worst parameter",
    )
    middle.set_yticks([1, 1e-2, 1e-4, 1e-6, 1e-8, zero], ["1", *(f"$10^{{{k}}}$" for k in (-2, -4, -6, -8)), "0"])
    middle.yaxis.set_minor_locator(NullLocator())

    for bits, shares in solved.items():
        right.plot(SOLVED_DEPTHS, shares, "o-", label=length_shown(bits))
    right.set(title="Prefix sums: longer strings take more steps", ylabel="strings solved", ylim=(-0.03, 1.03))
    right.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    for axes, depths in ((left, PLOTTED_DEPTHS), (middle, PLOTTED_DEPTHS), (right, SOLVED_DEPTHS)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(depths, [str(n) for n in depths])
        axes.set_xlabel("steps N (2 N evaluations of f)")
        axes.set_title(axes.get_title(), fontsize=10)
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2, frameon=False, fontsize=8)
        axes.grid(alpha=0.3)
    return figure
