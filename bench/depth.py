"""Memory and exactness of a training step against its depth, for the paper's conv block.

    python bench/depth.py            # two minutes
    python bench/depth.py --quick    # half a minute: three depths, without resident memory

memory: the largest number of bytes in tensors that were alive at the same time.
resident: the peak of the process's resident memory during two steps, in a fresh process with the default malloc. Its
    slope for a tiny state is the memory that autograd's nodes take.
reconstruction error: of what f reads in the backward pass against what it read in the forward pass, relative, the
    worst of all evaluations. 0 is bit for bit.
gradient error: relative, over all parameters, against a stored graph in float64. Every method computes in float32.

The float64 state of the paper loses up to 2 N log2((1 + beta) / |1 - beta|) bits when it is inverted. The exact state
is an integer whose remainders are kept, and loses none.
"""

import functools
import subprocess
import sys
import warnings
from pathlib import Path

import torch
from step import DEVICE, distance, gradient
from table import main, markdown
from turns import one_thread

import revdeq
from revdeq._device import peak_memory
from revdeq.baselines import checkpointed, stored_graph
from revdeq.models import ConvBlock

SHAPE, RESIDENT_SHAPE, BETA = (8, 32, 32, 32), (16, 32, 32, 32), 0.5
DEPTHS, RESIDENT_DEPTHS = (1, 2, 4, 8, 16, 32, 48, 64), (4, 16, 32, 48)
TINY_SHAPE, TINY_DEPTHS = (1, 32, 2, 2), (1000, 2000)
QUICK_DEPTHS = (4, 16, 64)
QUANTITIES = {
    "bytes": "memory, MiB",
    "resident bytes": "resident, MiB",
    "reconstruction error": "reconstruction error",
    "gradient error": "gradient error",
}
LOOKS = {
    "stored graph": {"color": "#8a8f98", "marker": "o", "markersize": 11},
    "checkpoint": {"color": "#f2a541", "marker": "s", "markersize": 7},
    "revdeq, exact state": {"color": "#13b5b1", "marker": "x", "markersize": 9},
    "revdeq": {"color": "#2f7ed8", "marker": "o", "markersize": 4, "fillstyle": "full"},
}
"""Where lines coincide, as those of correct gradients do, every marker can still be seen."""


def by_revdeq(state):
    return lambda f, x, n: revdeq.solve(f, torch.zeros_like(x), x, beta=BETA, max_steps=n, state=state).z


def by_autograd(solver):
    return lambda f, x, n: solver(f, torch.zeros_like(x), x, beta=BETA, max_steps=n)


METHODS = {
    "stored graph": by_autograd(stored_graph),
    "checkpoint": by_autograd(checkpointed),
    "revdeq": by_revdeq("float64"),
    "revdeq, exact state": by_revdeq("exact"),
}


def problem(shape, dtype=torch.float32):
    torch.manual_seed(0)
    f, x, seed = ConvBlock(shape[1]), torch.randn(shape), torch.randn(shape)
    return f.to(DEVICE, dtype), x.to(DEVICE, dtype).requires_grad_(), seed.to(DEVICE, dtype)


def step(method, n, f, x, seed):
    return gradient(lambda f, x: method(f, x, n), f, x, seed)


class Compared:
    """f that records what it reads in the forward pass, and compares it with what it reads in the backward pass."""

    def __init__(self, f):
        self.f, self.parameters, self.read, self.worst = f, f.parameters, [], 0.0
        self.turned_back = False

    def __call__(self, z, x):
        now = z.detach().double()
        if self.turned_back:
            before = self.read.pop()
            self.worst = max(self.worst, ((now - before).norm() / before.norm().clamp(min=1e-300)).item())
        else:
            self.read.append(now)
        return self.f(z, x)


def reconstruction_error(method, n, f, x, seed):
    compared = Compared(f)
    z = method(compared, x, n)
    compared.turned_back = True
    torch.autograd.grad(z, [x, *f.parameters()], seed)
    return compared.worst


def resident(name, n, shape=RESIDENT_SHAPE):
    """In a fresh process."""
    command = [sys.executable, __file__, "--resident", name, str(n), *map(str, shape)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_resident(name, n, *shape):
    warnings.simplefilter("ignore", revdeq.ReconstructionWarning)
    torch.set_num_threads(1)
    f, x, seed = problem(shape)
    for _ in range(2):
        step(METHODS[name], n, f, x, seed)
    (peak,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    print(1024 * int(peak.split()[1]))  # getrusage would include the parent's


def measure(results, quick):
    warnings.simplefilter("ignore", revdeq.ReconstructionWarning)  # the errors are what is measured
    one_thread()
    for n in QUICK_DEPTHS if quick else DEPTHS:
        single = (1, *SHAPE[1:])
        expected = step(METHODS["stored graph"], n, *problem(single, torch.float64))
        for name, method in METHODS.items():
            run = functools.partial(step, method, n, *problem(SHAPE))
            results.add("depth", name, n, "bytes", [peak_memory(run, DEVICE)])
            error = distance(step(method, n, *problem(single)), expected)
            results.add("depth", name, n, "gradient error", [error])
            if name.startswith("revdeq"):
                error = reconstruction_error(method, n, *problem(single))
                results.add("depth", name, n, "reconstruction error", [error])
    if DEVICE.type == "cpu" and sys.platform == "linux" and not quick:
        for n in RESIDENT_DEPTHS:
            for name in METHODS:
                results.add("depth", name, n, "resident bytes", [resident(name, n)])
        few, many = TINY_DEPTHS
        grown = resident("revdeq", many, TINY_SHAPE) - resident("revdeq", few, TINY_SHAPE)
        results.add("nodes", "revdeq", many, "bytes per evaluation", [grown / (2 * (many - few))])


def table(results, depths=None, quantities=tuple(QUANTITIES)):
    depths = depths or sorted({row.size for row in results.rows if row.benchmark == "depth"})
    rows = []
    for quantity in quantities:
        title = QUANTITIES[quantity]
        for name in METHODS:
            found = results.by_size("depth", name, quantity)
            shown = [f"{found.get(n, float('nan')) / 2**20:.0f}" for n in depths]
            if "error" in quantity:
                shown = ["0" if found.get(n) == 0 else f"{found.get(n, float('nan')):.0e}" for n in depths]
            if found:
                rows.append([f"{title}: {name}", *shown])
    return markdown(["conv block, beta .5", *(f"N = {n}" for n in depths)], rows)


def nodes(results):
    """Measured on Linux only."""
    taken = results.median("nodes", "revdeq", TINY_DEPTHS[1], "bytes per evaluation")
    text = f"Autograd's nodes take {taken / 1e3:.0f} KB of the process's memory per evaluation of this block."
    return text if taken == taken else ""


def exactness(results):
    """Memory and gradients at a few depths."""
    return table(results, QUICK_DEPTHS, ("bytes", "gradient error"))


def picture(results):
    """Memory and the error of the gradient by depth."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    memory, error = figure.subplots(1, 2)
    for axes, quantity, scale in ((memory, "bytes", 2**-20), (error, "gradient error", 1)):
        for name, look in LOOKS.items():
            found = results.by_size("depth", name, quantity)
            label = "revdeq, float64 state (default)" if name == "revdeq" else name
            axes.plot(list(found), [scale * v for v in found.values()], label=label, **{"fillstyle": "none", **look})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("steps N (2 N evaluations of f)")
        axes.grid(alpha=0.25)
    memory.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    memory.yaxis.set_major_formatter("{x:g}")
    memory.set_title("peak memory of a training step, MiB")
    error.set_title("relative error of the gradient")
    figure.legend(*memory.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


if __name__ == "__main__":
    if sys.argv[1:2] == ["--resident"]:
        print_resident(sys.argv[2], *map(int, sys.argv[3:]))
    else:
        main(__doc__, measure, table)
