"""Looped models: memory and time of a forward and a backward pass through many calls of one block, by each method.

    python bench/looped.py            # two minutes
    python bench/looped.py --quick    # two depths

The block is a transformer block, 64 wide, with 8 sequences of 64 tokens. Deep supervision adds the losses of the states
on the way, of every second call in all methods: `revdeq.steps` yields one after each step, which is two calls, and with
`aux` f returns the loss of what it reads. Times are processor time of one thread, in turns, relative to the stored
graph with as many calls; memory is the largest number of bytes in tensors alive at the same time.
"""

import functools

import torch
import torch.nn.functional as F
from table import device, main, markdown
from torch import nn
from torch.utils.checkpoint import checkpoint
from turns import one_thread, ratios, take_turns

import revdeq
from revdeq._device import peak_memory
from revdeq.models import TransformerBlock

DEVICE = device()
WIDTH, TOKENS, BATCH, CLASSES, CALLS = 64, 64, 8, 16, 4
DEPTHS = (8, 16, 32, 64)
OPTIONS = {"gamma": 0.5, "state": "exact"}


class Looped(nn.Module):
    """A block, and a head for the loss on a state."""

    def __init__(self):
        super().__init__()
        self.block, self.head = TransformerBlock(WIDTH), nn.Linear(WIDTH, CLASSES)

    def checkpointed(self, z, x):
        return checkpoint(self.block, z, x, use_reentrant=False)

    def four(self, z, x):
        for _ in range(CALLS):
            z = self.checkpointed(z, x)
        return z

    def loss(self, z, target):
        return F.cross_entropy(self.head(z).flatten(0, 1), target.flatten())


def plain(model, z, x, target, calls):
    for _ in range(calls):
        z = model.block(z, x)
    return model.loss(z, target)


def checkpointed(model, z, x, target, calls):
    for _ in range(calls):
        z = model.checkpointed(z, x)
    return model.loss(z, target)


def reversible(model, z, x, target, calls):
    return model.loss(revdeq.solve(model.block, z, x, max_steps=calls // 2, **OPTIONS).z, target)


def by_loop(model, z, x, target, calls):
    return model.loss(revdeq.loop(model.block, z, x, times=calls).z, target)


def reversible_four(model, z, x, target, calls):
    return model.loss(revdeq.solve(model.four, z, x, max_steps=calls // 2 // CALLS, **OPTIONS).z, target)


def supervised(model, z, x, target, calls, one_call):
    loss = 0.0
    for k in range(calls):
        z = one_call(z, x)
        if k % 2 == 1:
            loss = loss + model.loss(z, target)
    return loss


def supervised_plain(model, *rest):
    return supervised(model, *rest, model.block)


def supervised_checkpointed(model, *rest):
    return supervised(model, *rest, model.checkpointed)


def supervised_by_steps(model, z, x, target, calls):
    return sum(model.loss(s.z, target) for s in revdeq.steps(model.block, z, x, max_steps=calls // 2, **OPTIONS))


def supervised_by_aux(model, z, x, target, calls):
    def f(z, x, evaluation):  # even evaluations read z, odd ones y, and the first one z0
        reads_z = evaluation > 0 and evaluation % 2 == 0
        return model.block(z, x), model.loss(z, target) if reads_z else z.new_zeros(())

    solution = revdeq.solve(f, z, x, max_steps=calls // 2, aux=True, indexed=True, **OPTIONS)
    return solution.aux + model.loss(solution.z, target)


METHODS = {
    "stored graph": plain,
    "checkpoint around each call": checkpointed,
    "revdeq": reversible,
    "revdeq.loop": by_loop,
    "revdeq, f of 4 checkpointed calls": reversible_four,
    "deep supervision, stored graph": supervised_plain,
    "deep supervision, checkpoint": supervised_checkpointed,
    "deep supervision, revdeq.steps": supervised_by_steps,
    "deep supervision, revdeq with aux": supervised_by_aux,
}
LOOKS = (
    {"color": "#8a8f98", "marker": "o", "markersize": 4},
    {"color": "#f2a541", "marker": "s", "markersize": 5},
    {"color": "#2f7ed8", "marker": "o", "markersize": 4},
    {"color": "#13b5b1", "marker": "x", "markersize": 9},
    {"color": "#9b5de5", "marker": "o", "markersize": 11, "fillstyle": "none"},
)
"""Where lines coincide, every marker can still be seen."""


def problem():
    torch.manual_seed(0)
    x, z = torch.randn(2, BATCH, TOKENS, WIDTH, device=DEVICE)
    return Looped().to(DEVICE), z, x, torch.randint(CLASSES, (BATCH, TOKENS), device=DEVICE)


def gradient(method, calls, model, z, x, target):
    used = model.parameters()
    return torch.autograd.grad(method(model, z, x, target, calls), list(used))


def measure(results, quick):
    clock, given = one_thread(), problem()
    for calls in DEPTHS[:2] if quick else DEPTHS:
        runs = {name: functools.partial(gradient, method, calls, *given) for name, method in METHODS.items()}
        for name, seconds in (times := take_turns(runs, 15.0, rounds=(3, 9), clock=clock)).items():
            results.add("looped", name, calls, "seconds", seconds)
            results.add("looped", name, calls, "time over stored graph", ratios(seconds, times["stored graph"]))
            results.add("looped", name, calls, "bytes", [peak_memory(runs[name], DEVICE)])


def table(results):
    depths = list(results.by_size("looped", "stored graph", "bytes"))
    header = ["memory, and time over the stored graph", *(f"{n} calls" for n in depths)]
    rows = []
    for name in METHODS:
        memory = [results.median("looped", name, n, "bytes") / 2**20 for n in depths]
        time = [results.median("looped", name, n, "time over stored graph") for n in depths]
        rows.append([name, *(f"{m:.1f} MiB, {t:.2f}" for m, t in zip(memory, time, strict=True))])
    return markdown(header, rows)


def picture(results):
    """Memory by the number of calls, without and with deep supervision."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    panels, titles = figure.subplots(1, 2, sharey=True), ("a loss on the last state", "a loss on every second state")
    for axes, title, deep in zip(panels, titles, (False, True), strict=True):
        names = [name for name in METHODS if name.startswith("deep") == deep]
        for name, look in zip(names, LOOKS, strict=False):
            found = results.by_size("looped", name, "bytes")
            label = name.removeprefix("deep supervision, ")
            axes.plot(list(found), [v / 2**20 for v in found.values()], label=label, **look)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(title=title, xlabel="calls of the block")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    panels[0].set(ylabel="peak memory, MiB", ylim=(2, 1000))  # with room for the legends
    return figure


if __name__ == "__main__":
    main(__doc__, measure, table)
