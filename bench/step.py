"""A training step, forward and backward: revdeq beside forty plain lines, the stored graph, checkpoints and torchdeq.

    python bench/step.py            # five minutes
    python bench/step.py --quick    # revdeq, the forty lines (bench/forty_lines.py) and the bare evaluations only

Every method makes 2 N = 16 evaluations of f in the forward pass (torchdeq: 16 iterations, or 30, a common setting).
Bare is the lower limit: 2 N evaluations without a graph, and 2 N with their vector-Jacobian products. Times are
processor time of one thread. Methods take turns, and every other round begins at the other end. A ratio of times is the
median over the rounds of the ratio within a round.

The error of a gradient is relative, in the 2-norm over all parameters, against the stored graph of the same iteration
in float64. For implicit and phantom gradients, which approximate that of the fixed point, it is against 64 steps.
"""

import functools
import warnings

import forty_lines
import torch
from table import device, main, markdown
from torch import nn
from turns import one_thread, ratios, take_turns

import revdeq
from revdeq._device import peak_memory
from revdeq.baselines import checkpointed, stored_graph
from revdeq.models import ConvBlock, TransformerBlock

DEVICE = device()
BETA, STEPS, DEEP = 0.5, 8, 64


class MLP(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


BLOCKS = {
    "MLP of 64": (lambda: MLP(64), (32, 64)),
    "MLP of 256": (lambda: MLP(256), (64, 256)),
    "conv block": (lambda: ConvBlock(32), (8, 32, 32, 32)),
    "transformer block": (lambda: TransformerBlock(256), (4, 128, 256)),
}
PAPER = ("conv block", "transformer block")


def problem(block, batch=None, dtype=torch.float32):
    make, shape = BLOCKS[block]
    torch.manual_seed(0)
    f, x, seed = make(), torch.randn(shape)[:batch], torch.randn(shape)[:batch]
    return f.to(DEVICE, dtype), x.to(DEVICE, dtype).requires_grad_(), seed.to(DEVICE, dtype)


def by_revdeq(**settings):
    return lambda f, x: revdeq.solve(f, torch.zeros_like(x), x, beta=BETA, max_steps=STEPS, **settings).z


def by_autograd(solver, steps=STEPS):
    return lambda f, x: solver(f, torch.zeros_like(x), x, beta=BETA, max_steps=steps)


def by_torchdeq(iterations, **settings):
    def run(f, x):
        import torchdeq

        limits = {"f_max_iter": iterations, "b_max_iter": iterations, "f_tol": 0.0, "b_tol": 0.0}
        deq = torchdeq.get_deq(f_solver="anderson", b_solver="anderson", **limits, **settings).train()
        return deq(lambda z: f(z, x), torch.zeros_like(x))[0][-1]

    return run


FORTY, BARE = "forty plain lines", "bare evaluations"
METHODS = {
    "revdeq": by_revdeq(state="float64"),
    FORTY: by_autograd(forty_lines.solve),
    "revdeq, exact state": by_revdeq(state="exact"),
    "revdeq, keep 8": by_revdeq(state="float64", keep=8),
    "stored graph": by_autograd(stored_graph),
    "checkpoint": by_autograd(checkpointed),
    "torchdeq Anderson, IFT, 16 iterations": by_torchdeq(2 * STEPS, ift=True),
    "torchdeq Anderson, IFT, 30 iterations": by_torchdeq(30, ift=True),
    "torchdeq Anderson, phantom": by_torchdeq(2 * STEPS, grad=1),
    "revdeq, implicit": by_revdeq(state="float64", gradient="implicit"),
}
QUICK = ("revdeq", FORTY)
BRIEF = [name for name in METHODS if name not in ("revdeq, exact state", "stored graph", "torchdeq Anderson, phantom")]
OF_THE_FIXED_POINT = ("torchdeq", "revdeq, implicit")


def gradient(method, f, x, seed):
    return torch.autograd.grad(method(f, x), [x, *f.parameters()], seed)


def bare(f, x, seed):
    z, inputs = torch.zeros_like(x).requires_grad_(), [x, *f.parameters()]
    for _ in range(2 * STEPS):
        with torch.no_grad():
            f(z, x)
    for _ in range(2 * STEPS):
        torch.autograd.grad(f(z, x), [z, *inputs], seed)


def distance(gradients, expected):
    """Relative, over all parameters together."""
    norms = [[t.double().norm() for t in (g - e, e)] for g, e in zip(gradients, expected, strict=True)]
    difference, size = torch.tensor(norms).norm(dim=0)
    return (difference / size).item()


@functools.cache
def true_gradient(block, steps):
    """By the stored graph in float64, for one example: that of 64 steps takes gigabytes for more."""
    return gradient(by_autograd(stored_graph, steps), *problem(block, 1, torch.float64))


def error(name, block):
    steps = DEEP if name.startswith(OF_THE_FIXED_POINT) else STEPS
    return distance(gradient(METHODS[name], *problem(block, 1)), true_gradient(block, steps))


def peak(name, block):
    f, x, seed = problem(block)
    run = functools.partial(gradient, METHODS[name], f, x, seed)
    if DEVICE.type != "cpu":
        run()  # libraries take workspaces from torch's memory, once
    return peak_memory(run, DEVICE)


def timed(names, block, budget, clock):
    f, x, seed = problem(block)
    runs = {name: functools.partial(gradient, METHODS[name], f, x, seed) for name in names}
    runs[BARE] = functools.partial(bare, f, x, seed)
    return take_turns(runs, budget, least=0.03, rounds=(9, 51), clock=clock)


def measure(results, quick):
    warnings.simplefilter("ignore", revdeq.ConvergenceWarning)  # 8 steps are few for an implicit gradient
    clock = one_thread()
    names = QUICK if quick else tuple(METHODS)
    for block in BLOCKS:
        times = timed(names, block, 8.0 if quick else 30.0, clock)
        for name, seconds in times.items():
            results.add(f"step, {block}", name, STEPS, "seconds", seconds)
            for other in ("stored graph", FORTY, BARE):
                if other in times and other != name:
                    results.add(f"step, {block}", name, STEPS, f"time over {other}", ratios(seconds, times[other]))
        for name in () if quick else names:
            results.add(f"step, {block}", name, STEPS, "bytes", [peak(name, block)])
            results.add(f"step, {block}", name, STEPS, "gradient error", [error(name, block)])


def table(results):
    """Times and memory relative to the stored graph, and errors."""
    header = [f"relative to the stored graph, N = {STEPS}", *(f"{block}: time" for block in BLOCKS)]
    header += [f"{block}: {what}" for what in ("memory", "gradient error") for block in PAPER]
    rows = []
    for name in results.methods("step, conv block"):
        cells = [f"{over(results, block, name, 'stored graph'):.2f}" for block in BLOCKS]
        cells += [f"{relative_memory(results, block, name):.2f}" for block in PAPER]
        cells += [f"{results.median(f'step, {block}', name, STEPS, 'gradient error'):.0e}" for block in PAPER]
        rows.append([name, *cells])
    return markdown(header, rows)


def brief(results):
    """Times and memory of some methods."""
    header = [f"time / memory over the stored graph's, N = {STEPS}", *BLOCKS]
    rows = []
    for name in BRIEF:
        pairs = [(over(results, b, name, "stored graph"), relative_memory(results, b, name)) for b in BLOCKS]
        rows.append([name, *(f"{time:.2f} / {memory:.2f}" for time, memory in pairs)])
    return markdown(header, rows)


def short(results):
    """revdeq beside what one would write without it, and beside the lower limit."""
    header = [f"time of a training step of revdeq, N = {STEPS}", *BLOCKS]
    rows = [
        [f"over {other}", *(f"{over(results, block, 'revdeq', other):.2f}" for block in BLOCKS)]
        for other in (FORTY, BARE)
    ]
    return markdown(header, rows)


def over(results, block, name, other):
    return 1.0 if name == other else results.median(f"step, {block}", name, STEPS, f"time over {other}")


def relative_memory(results, block, name):
    ours, graph = (results.median(f"step, {block}", m, STEPS, "bytes") for m in (name, "stored graph"))
    return ours / graph


def both(results):
    """Without the stored graph, as with --quick, there is one table."""
    measured = "stored graph" in results.methods("step, conv block")
    return f"{table(results)}\n\n{short(results)}" if measured else short(results)


if __name__ == "__main__":
    main(__doc__, measure, both)
