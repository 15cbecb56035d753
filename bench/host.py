"""Host overhead: the time that Python and torch spend on a solve beyond bare evaluations of f. With small kernels, a
GPU waits for it.

    python bench/host.py

Tensors are tiny, so that computing takes almost no time, and the clock is processor time. Bare is a loop of 2 N
evaluations of f with their graphs, and for the backward pass a loop of 2 N evaluations with their vector-Jacobian
products. The time of a solver minus that is fitted by a line over the depths N: the slope is the overhead per
half-step, the intercept the overhead per solve. The last column is the time of a whole solve, both passes, per
evaluation.

A stored graph does not evaluate f again, so its backward pass is below the bare one. torchdeq's backward pass is not
such a line: with a phantom gradient it takes one product, and with the implicit gradient (IFT) 2 N products of one
graph. It counts only in the last column. Its forward pass builds no graphs.

With Triton, half-steps are also launched as for a GPU, with a stubbed driver: kernels are compiled, selected and
called, but compute nothing, so that all states are zeros. Everything else runs on CPU tensors. These are not times of a
GPU or of its driver, and the backward pass has no separate thread.
"""

import contextlib
import ctypes
import functools
import importlib.util
import random
import statistics
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from table import options
from torch import nn
from tqdm import tqdm

import revdeq
from revdeq.baselines import checkpointed, stored_graph
from revdeq.kernels import backend

sys.path.insert(0, str(Path(__file__).parent.parent / "tests/tools"))
import gpu_targets

SHAPE = (4, 8)
BETA = 0.5
DEPTHS = (2, 8, 16)
BLOCKS = 5
"""Rounds are assigned to blocks round-robin: the spread of their medians is the noise."""
CALIBRATION = 4
"""The depth of the bare solve before and after each run, which measures the current speed of the machine. Other load on
the same cores can slow it down by 1.5 to 2 for a minute, in processor time, too."""
PASSES = ("forward", "backward")
PER_HALF_STEP, ONCE, TOTAL = "seconds per half-step", "seconds once per solve", "seconds per evaluation"
COLUMNS = (*(f"{way} {what}" for what in (PER_HALF_STEP, ONCE) for way in PASSES), TOTAL)
LAUNCHES = "launches per evaluation"
CPU, STUBBED = "CPU", "GPU, driver stubbed"
NOTES = {CPU: "half-steps in C", STUBBED: "half-steps by Triton up to the driver, on CPU tensors; not GPU time"}


class Small(nn.Module):
    """A linear layer and tanh."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SHAPE[1], SHAPE[1])

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


class TenOperations(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.gate, self.last = (nn.Linear(SHAPE[1], SHAPE[1]) for _ in range(3))
        self.norm = nn.LayerNorm(SHAPE[1])

    def forward(self, z, x):
        h = self.norm(z + F.gelu(self.first(z) + x))
        return torch.tanh(self.last(h * torch.sigmoid(self.gate(h))))


FUNCTIONS = {"small": Small, "ten operations": TenOperations}


class Problem:
    """f, and tensors that are created once and not timed."""

    def __init__(self, make):
        torch.manual_seed(0)
        self.f, self.z0 = make(), torch.zeros(SHAPE)
        self.x, self.seed = torch.randn(SHAPE).requires_grad_(), torch.randn(SHAPE)
        self.inputs = [self.x, *self.f.parameters()]


def reversible(state, gamma):
    def run(problem, n):
        return revdeq.solve(problem.f, problem.z0, problem.x, beta=BETA, gamma=gamma, max_steps=n, state=state).z

    return run


def by_autograd(solver):
    return lambda problem, n: solver(problem.f, problem.z0, problem.x, beta=BETA, max_steps=n)


def anderson(**settings):
    """torchdeq's solver with 2 N iterations, in both passes if the backward pass has any."""

    @functools.cache  # created once, like a layer
    def deq(n):
        import torchdeq

        limits = {"f_max_iter": 2 * n, "b_max_iter": 2 * n, "f_tol": 0.0, "b_tol": 0.0}
        return torchdeq.get_deq(f_solver="anderson", b_solver="anderson", **limits, **settings).train()

    def run(problem, n):
        f, x = problem.f, problem.x
        return deq(n)(lambda z: f(z, x), problem.z0)[0][-1]

    return run


REVERSIBLE = {
    f"reversible, {state}, gamma {gamma:g}": reversible(state, gamma)
    for state in ("float64", "exact")
    for gamma in (1.0, 0.8)
}
OTHERS = {"stored graph": by_autograd(stored_graph), "checkpoint": by_autograd(checkpointed)}
TORCHDEQ = {"torchdeq Anderson, phantom": anderson(), "torchdeq Anderson, IFT": anderson(ift=True)}
"""The phantom gradient is torchdeq's default."""


def of_bare(problem, n):
    """Seconds of the forward and of the backward pass."""
    f, x, seed = problem.f, problem.x, problem.seed
    z = problem.z0.detach().requires_grad_()
    targets = [z, *problem.inputs]
    start = time.process_time()
    for _ in range(2 * n):
        f(z, x)
    middle = time.process_time()
    for _ in range(2 * n):
        torch.autograd.grad(f(z, x), targets, seed)
    return middle - start, time.process_time() - middle


def of_solver(solver, problem, n):
    start = time.process_time()
    z = solver(problem, n)
    middle = time.process_time()
    torch.autograd.grad(z, problem.inputs, problem.seed)
    del z  # frees the rest of the graph
    return middle - start, time.process_time() - middle


def inside(around, run):
    """Enter the context of a place outside of the timed part."""

    def inside_it():
        with around():
            return run()

    return inside_it


def runs_in(around, make, solvers, depths):
    """Functions, by provider and depth, that return the seconds of both passes."""
    problem, runs = Problem(make), {}
    for n in depths:
        runs["bare", n] = inside(around, functools.partial(of_bare, problem, n))
        for name, solver in solvers.items():
            runs[name, n] = inside(around, functools.partial(of_solver, solver, problem, n))
    return runs


def in_turns(cases, budget):
    """The results of all cases, round by round, for this many seconds, but at least one round per block. Times are
    scaled to the machine's fastest speed."""
    taken = {case: {key: [] for key in runs} for case, runs in cases.items()}
    calibration = functools.partial(of_bare, Problem(Small), CALIBRATION)
    before = fastest = sum(calibration())
    turns = {"bare": 4} | dict.fromkeys(REVERSIBLE, 2)  # the noise of bare is in all differences
    order = [(case, key) for case, runs in cases.items() for key in runs for _ in range(turns.get(key[0], 1))]
    end, rounds = time.perf_counter() + budget, 0
    with tqdm(desc="host time", unit=" rounds", leave=False, disable=None) as progress:
        while rounds < BLOCKS or time.perf_counter() < end:
            random.Random(rounds).shuffle(order)  # a fixed order would favour runs whose code is still cached
            for case, key in order:
                seconds, after = cases[case][key](), sum(calibration())
                around, before = (before + after) / 2, after
                taken[case][key].append([s / around for s in seconds])
                fastest = min(fastest, around)
            rounds += 1
            progress.update()
    return {
        case: {key: [[fastest * x for x in passes] for passes in each] for key, each in runs.items()}
        for case, runs in taken.items()
    }


def line(depths, values):
    """Least squares: the slope per half-step (there are 2 N), and the intercept."""
    return tuple(statistics.linear_regression([2 * n for n in depths], values))


def quantities(seconds, name, depths):
    """The columns of a provider, from the seconds of each pass by provider and depth: those of `bare` itself, and of
    others minus `bare`."""
    found = {}
    for i, way in enumerate(PASSES):
        if name in TORCHDEQ and way == "backward":
            continue  # it does not make these evaluations
        if name == "bare":
            found[f"{way} {PER_HALF_STEP}"], _ = line(depths, [seconds[name, n][i] for n in depths])
            continue
        own = [seconds[name, n][i] - seconds["bare", n][i] for n in depths]
        found[f"{way} {PER_HALF_STEP}"], found[f"{way} {ONCE}"] = line(depths, own)
    return {**found, TOTAL: sum(seconds[name, depths[-1]]) / (2 * depths[-1])}


def by_blocks(taken, name, depths):
    """The columns of a provider, with a number per block."""
    columns = {}
    for block in range(BLOCKS):
        rounds = {key: each[block::BLOCKS] for key, each in taken.items()}
        medians = {key: list(map(statistics.median, zip(*each, strict=True))) for key, each in rounds.items()}
        for column, value in quantities(medians, name, depths).items():
            columns.setdefault(column, []).append(value)
    return columns


class Launches:
    """Replaces the list of calls of the stubbed driver."""

    def __init__(self):
        self.count = 0

    def append(self, call):
        self.count += 1

    def during(self, run):
        before = self.count
        run()
        return self.count - before


@contextlib.contextmanager
def stubbed():
    """Triton's launches on CPU tensors are counted and ignored."""
    from stub_driver import stub

    from revdeq.kernels import gpu

    with pytest.MonkeyPatch.context() as patch:
        stub(patch).calls = launches = Launches()
        patch.setattr(gpu, "runs_on", lambda device: True)
        yield launches


@contextlib.contextmanager
def launching():
    """Solves launch kernels that write nothing, so torch.empty must return zeros: a solve refuses NaN."""
    fill = zero_fill()
    fill.value = True
    try:
        with backend("triton"):
            yield
    finally:
        fill.value = False


def zero_fill():
    """torch's switch for it, which has no Python name."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    return ctypes.c_bool.in_dll(library, "FLAGS_caffe2_cpu_allocator_do_zero_fill")


def no_stub():
    """Why solves cannot run with a stubbed driver, or None."""
    if gpu_targets.missing:
        return gpu_targets.missing
    try:
        zero_fill()
    except (OSError, ValueError) as error:
        return f"torch {torch.__version__} cannot be set to clear memory ({error})"
    return ""


def show(title, found, deepest):
    launched = any(LAUNCHES in columns for columns in found.values())
    print(f"\n{title}")
    print(f"  {'':32}{'per half-step':>20}{'once per solve':>20}{'total':>12}" + f"{'launches':>10}" * launched)
    print(f"  {'':32}" + 2 * f"{'forward':>10}{'backward':>10}" + f"{f'N = {deepest}':>12}")
    for name, columns in found.items():
        middle = {column: statistics.median(values) for column, values in columns.items()}
        cells = [f"{middle[c] * 1e6:.1f}" if c in middle else "-" for c in COLUMNS]
        count = f"{middle[LAUNCHES]:10.1f}" if LAUNCHES in middle else ""
        print(f"  {name:32}{''.join(f'{cell:>10}' for cell in cells[:-1])}{cells[-1]:>12}{count}")


def main():
    table, quick = options(__doc__, "few rounds and depths, without torchdeq")
    warnings.simplefilter("error", revdeq.ReconstructionWarning)  # a wrong solve must not be measured
    torch.set_num_threads(1)
    depths, budget = (DEPTHS[:2], 5.0) if quick else (DEPTHS, 90.0)
    others = OTHERS if quick or importlib.util.find_spec("torchdeq") is None else OTHERS | TORCHDEQ
    places = {CPU: (functools.partial(backend, "cpu"), REVERSIBLE | others)}
    with contextlib.ExitStack() as stack:
        launches, trouble = Launches(), no_stub()
        if not trouble:
            try:
                launches = stack.enter_context(stubbed())
                places[STUBBED] = (launching, REVERSIBLE)
            except (AttributeError, ImportError) as error:  # only the stub uses private names
                trouble = f"the stub does not fit these kernels ({error})"
        if trouble:
            print(f"No launches: {trouble}")
        cases = {
            (name, place): runs_in(around, make, solvers, depths)
            for place, (around, solvers) in places.items()
            for name, make in FUNCTIONS.items()
        }
        for runs in cases.values():  # warm-up: compiles, imports and fills caches
            for run in runs.values():
                run()
        counts = {case: {key: launches.during(run) for key, run in runs.items()} for case, runs in cases.items()}
        taken = in_turns(cases, budget)
    print("\nmicroseconds of processor time beyond bare, and of bare itself; total: per evaluation of a whole solve")
    for (name, place), rounds in taken.items():
        found = {}
        for provider in dict.fromkeys(provider for provider, _ in rounds):
            found[provider] = by_blocks(rounds, provider, depths)
            if place == STUBBED:
                count = [counts[name, place][provider, n] for n in depths]
                found[provider][LAUNCHES] = [line(depths, count)[0]]
        show(f"{name}, {place} ({NOTES[place]})", found, depths[-1])
        for provider, columns in found.items() if table else ():
            for column, values in columns.items():
                table.add(f"host, {name}, {place}", provider, depths[-1], column, values)


if __name__ == "__main__":
    main()
