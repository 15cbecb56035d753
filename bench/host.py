"""Host time: what Python and torch spend on a solve beyond evaluations of f. With small kernels, a GPU waits for it.

    python bench/host.py    # 15 seconds

f is a linear layer and tanh on tiny tensors, so that computing takes almost no time, and the clock is processor time.
Bare is a loop of 2 N evaluations of f without a graph, and for the backward pass of 2 N evaluations with their
vector-Jacobian products. The time of a solver minus bare is fitted by a line over the depths N, round by round: the
slope is the time per half-step, the intercept the time once per solve. (A stored graph does not evaluate f again, so
its backward pass is below bare.)

The path of a call is counted for the second `deq(x).sum().backward()`: the files and functions of the package that run,
and their calls.
"""

import functools
import random
import statistics
import sys
import time
import warnings
from pathlib import Path

import torch
from table import main, markdown
from torch import nn

import revdeq
from revdeq.baselines import checkpointed, stored_graph

SHAPE, BETA, DEPTHS, ROUNDS = (4, 8), 0.5, (2, 8, 16), 200
PASSES = ("forward", "backward")
COLUMNS = [f"{way} {what}" for what in ("seconds once per solve", "seconds per half-step") for way in PASSES]
PATH = ("files", "functions", "calls")


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SHAPE[1], SHAPE[1])

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


def by_revdeq(**settings):
    return lambda f, z0, x, n: revdeq.solve(f, z0, x, beta=BETA, max_steps=n, **settings).z


def by_autograd(solver):
    return lambda f, z0, x, n: solver(f, z0, x, beta=BETA, max_steps=n)


METHODS = {
    "revdeq, check=None": by_revdeq(state="float64", check=None),
    "revdeq": by_revdeq(state="float64"),
    "revdeq, gamma .8": by_revdeq(state="float64", gamma=0.8),
    "revdeq, exact state": by_revdeq(state="exact"),
    "stored graph": by_autograd(stored_graph),
    "checkpoint": by_autograd(checkpointed),
}


class Problem:
    """f, and tensors that are made once and not timed."""

    def __init__(self):
        torch.manual_seed(0)
        self.f, self.z0 = Small(), torch.zeros(SHAPE)
        self.x, self.seed = torch.randn(SHAPE).requires_grad_(), torch.randn(SHAPE)
        self.inputs = [self.x, *self.f.parameters()]

    def bare(self, n):
        """Seconds of the forward and of the backward pass."""
        z = self.z0.detach().requires_grad_()
        start = time.process_time()
        with torch.no_grad():
            for _ in range(2 * n):
                self.f(z, self.x)
        middle = time.process_time()
        for _ in range(2 * n):
            torch.autograd.grad(self.f(z, self.x), [z, *self.inputs], self.seed)
        return middle - start, time.process_time() - middle

    def solve(self, method, n):
        start = time.process_time()
        z = method(self.f, self.z0, self.x, n)
        middle = time.process_time()
        torch.autograd.grad(z, self.inputs, self.seed)
        del z  # frees the rest of the graph
        return middle - start, time.process_time() - middle


def beyond_bare(taken, bare):
    """The columns of one round, from the seconds of both passes at every depth."""
    once, slopes = [], []
    for i in range(len(PASSES)):
        own = [taken[n][i] - bare[n][i] for n in taken]
        slope, intercept = statistics.linear_regression([2 * n for n in taken], own)
        once.append(intercept)
        slopes.append(slope)
    return dict(zip(COLUMNS, [*once, *slopes], strict=True))


def rounds(problem, count):
    """The columns by method, each with a number per round."""
    found = {name: {column: [] for column in COLUMNS} for name in METHODS}
    runs = {("bare", n): functools.partial(problem.bare, n) for n in DEPTHS}
    runs |= {(name, n): functools.partial(problem.solve, m, n) for name, m in METHODS.items() for n in DEPTHS}
    order = list(runs)
    for key in order:
        runs[key]()
    for i in range(count):
        random.Random(i).shuffle(order)  # a fixed order would favour runs whose code is still cached
        taken = {key: runs[key]() for key in order}
        bare = {n: taken["bare", n] for n in DEPTHS}
        for name in METHODS:
            for column, value in beyond_bare({n: taken[name, n] for n in DEPTHS}, bare).items():
                found[name][column].append(value)
    return found


def path_of_a_call():
    """The files and functions of the package that the second call goes through, and the number of their calls."""
    folders = tuple(f"{Path(package.__file__).parent}/" for package in (revdeq, revdeq.kernels))
    codes = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename.startswith(folders):
            codes.append(frame.f_code)

    deq, x = revdeq.RevDEQ(Small()), torch.randn(SHAPE)
    deq(x).sum().backward()
    sys.setprofile(profile)
    try:
        deq(x).sum().backward()
    finally:
        sys.setprofile(None)
    return len({code.co_filename for code in codes}), len(set(codes)), len(codes)


def measure(results, quick):
    warnings.simplefilter("error", revdeq.ReconstructionWarning)  # a wrong solve must not be measured
    torch.set_num_threads(1)
    for name, columns in rounds(Problem(), ROUNDS // 4 if quick else ROUNDS).items():
        for column, values in columns.items():
            results.add("host", name, DEPTHS[-1], column, values)
    for quantity, value in zip(PATH, path_of_a_call(), strict=True):
        results.add("host, path of a call", "revdeq", 8, quantity, [value])


def table(results):
    header = ["microseconds beyond bare evaluations", *(column.replace("seconds ", "") for column in COLUMNS)]
    rows = [
        [name, *(f"{1e6 * results.median('host', name, DEPTHS[-1], column):.0f}" for column in COLUMNS)]
        for name in METHODS
    ]
    counts = [f"{results.median('host, path of a call', 'revdeq', 8, what):.0f} {what}" for what in PATH]
    return f"{markdown(header, rows)}\n\nA call of the layer, forward and backward, goes through {', '.join(counts)}."


if __name__ == "__main__":
    main(__doc__, measure, table)
