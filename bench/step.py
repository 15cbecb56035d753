"""A training step (forward and backward) of the paper's blocks: our solver against the alternatives.

    python bench/step.py

For every depth N: time, peak memory (in a fresh process), evaluations of f in the forward pass, and the error of the
gradient. Times are processor time of one thread, methods interleaved. A ratio of times is the median over the rounds of
the ratio within a round; its spread is the 20th to 80th percentile. `bare` is the lower limit: the 2 N evaluations of f
in the forward pass, the 2 N evaluations with their vector-Jacobian products in the backward pass, and nothing else.

torchdeq's solvers make 2 N iterations in each pass, or stop at the same tolerance. Their gradients are approximations:
of the gradient at the fixed point (by the implicit function theorem, IFT) or of one more step (phantom).

gradient error: relative, 2-norm over all parameters, against the stored graph of the same iteration in float64. For
gradients of the fixed point, and for all solves with a tolerance, the reference is the stored graph of 64 steps. (If f
does not converge in 64 steps, every solver is far from that.)
reversal error: against the same solve whose backward pass is given the recorded inputs of the forward pass. This is the
error that reconstruction adds; 0 means exact. It is measured for the reversible solver only.
"""

import functools
import multiprocessing
import time
import warnings

import torch
from table import device, options
from tqdm import tqdm
from turns import one_thread, ratio, ratios, take_turns

import revdeq
from revdeq._device import peak_memory
from revdeq.baselines import checkpointed, stored_graph
from revdeq.models import ConvBlock, TransformerBlock

DEVICE = device()
BETA, TOL = 0.5, 1e-3
DEPTHS = (1, 2, 4, 8, 16, 32, 64)
HEADLINE = 8
"""The depth that the documents quote, with the most rounds."""
KEPT = (2, 4, 8, 12, 16)
QUICK_DEPTHS = (4,)
QUICK = ("reversible", "reversible, exact state", "stored graph", "checkpoint")
SHAPES = {"conv block": (8, 32, 32, 32), "transformer block": (4, 128, 256)}
AGREE = 1e-3
SMALL_BATCH = 1
"""For the errors: with the whole batch, the float64 graph of 64 steps takes gigabytes."""


def problem(block, batch=None, dtype=torch.float32):
    shape = SHAPES[block]
    torch.manual_seed(0)
    f = ConvBlock(shape[1]) if block == "conv block" else TransformerBlock(shape[2])
    x, seed = torch.randn(shape)[:batch], torch.randn(shape)[:batch]
    return f.to(DEVICE, dtype), x.to(DEVICE, dtype).requires_grad_(), seed.to(DEVICE, dtype)


def reversible(f, x, n, **settings):
    return revdeq.solve(f, torch.zeros_like(x), x, beta=BETA, max_steps=n, **settings).z


def by_autograd(solver):
    return lambda f, x, n: solver(f, torch.zeros_like(x), x, beta=BETA, max_steps=n)


def with_torchdeq(solver, iterations=None, tol=0.0, **settings):
    def run(f, x, n):
        import torchdeq

        limit = iterations or 2 * n
        deq = torchdeq.get_deq(
            f_solver=solver, b_solver=solver, f_max_iter=limit, b_max_iter=limit,
            f_tol=tol, b_tol=tol, f_stop_mode="rel", b_stop_mode="rel", **settings,
        )  # fmt: skip
        return deq.train()(lambda z: f(z, x), torch.zeros_like(x))[0][-1]

    return run


SOLVERS = {
    "reversible": functools.partial(reversible, state="float64"),
    "reversible, exact state": functools.partial(reversible, state="exact"),
    "stored graph": by_autograd(stored_graph),
    "checkpoint": by_autograd(checkpointed),
    "torchdeq Anderson, IFT": with_torchdeq("anderson", ift=True),
    "torchdeq Broyden, IFT": with_torchdeq("broyden", ift=True),
    "torchdeq Anderson, phantom": with_torchdeq("anderson", grad=1),
    "torchdeq Anderson, IFT, 30 iterations": with_torchdeq("anderson", iterations=30, ift=True),
    **{f"keep {k}": functools.partial(reversible, state="float64", keep=k) for k in KEPT},
    "implicit": functools.partial(reversible, gradient="implicit", check=None),
}
ONLY_AT = {
    "stored graph": (1, 2, 4, 8, 16, 64),
    "checkpoint": (1, 2, 4, 8, 16, 64),
    "torchdeq Anderson, IFT": (1, 4, 8, 16, 64),
    "torchdeq Broyden, IFT": (1, 4, 8, 16),
    "torchdeq Anderson, phantom": (1, 4, 8, 16),
    **dict.fromkeys(["torchdeq Anderson, IFT, 30 iterations", *(f"keep {k}" for k in KEPT), "implicit"], (HEADLINE,)),
}
"""To save time, not at every N. 30 iterations is a common setting."""
WITH_TOLERANCE = {
    "reversible": functools.partial(reversible, tol=TOL, state="float64"),
    "reversible, exact state": functools.partial(reversible, tol=TOL, state="exact"),
    "torchdeq Anderson, IFT": with_torchdeq("anderson", iterations=30, tol=TOL, ift=True),
    "torchdeq Broyden, IFT": with_torchdeq("broyden", iterations=30, tol=TOL, ift=True),
    "torchdeq Anderson, phantom": with_torchdeq("anderson", iterations=30, tol=TOL, grad=1),
}
PRELOADED = ["revdeq.models", "revdeq.baselines", "torchdeq", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"]
"""Imported once by the fork server: two seconds per measurement otherwise."""
FAMILIES = {"step": SOLVERS, "tolerance": WITH_TOLERANCE}
TOLERANCE_STEPS = 15
"""max_steps of the reversible solver: 30 evaluations, as for torchdeq."""


def gradient(solver, f, x, n, seed):
    inputs = [x, *f.parameters()]
    return torch.autograd.grad(solver(f, x, n), inputs, seed)


def evaluations(f, x, n):
    """The evaluations of f in a forward pass, and nothing else."""
    z = torch.zeros_like(x)
    for _ in range(2 * n):
        f(z.detach().requires_grad_(), x)


def products(f, x, n, seed):
    """The evaluations of f in a backward pass with their vector-Jacobian products, and nothing else."""
    z, inputs = torch.zeros_like(x), [x, *f.parameters()]
    for _ in range(2 * n):
        leaf = z.detach().requires_grad_()
        torch.autograd.grad(f(leaf, x), [leaf, *inputs], seed)


def bare(f, x, n, seed):
    evaluations(f, x, n)
    products(f, x, n, seed)


def distance(gradients, expected):
    """Relative, over all parameters together."""
    differences = torch.stack([(g.double() - e.double()).norm() for g, e in zip(gradients, expected, strict=True)])
    return (differences.norm() / torch.stack([e.double().norm() for e in expected]).norm()).item()


class Counted:
    def __init__(self, f):
        self.f, self.count, self.parameters = f, 0, f.parameters

    def __call__(self, *args):
        self.count += 1
        return self.f(*args)


class _GivenBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, stored):
        return stored.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Remembering(Counted):
    """Records the inputs of f in the forward pass, and evaluates f at those in the backward pass."""

    def __init__(self, f):
        super().__init__(f)
        self.inputs, self.turned_back = [], False

    def __call__(self, z, *args):
        if self.turned_back:
            return self.f(_GivenBack.apply(z, self.inputs.pop()), *args)
        self.inputs.append(z.detach().clone())
        return self.f(z, *args)


@functools.cache
def true_gradient(block, n):
    """By the stored graph, in float64."""
    f, x, seed = problem(block, SMALL_BATCH, torch.float64)
    return gradient(SOLVERS["stored graph"], f, x, n, seed)


def errors_and_gradients(solver, block, n, true_depth):
    """The gradients, and a dict with the evaluations of the forward pass and the gradient error."""
    f, x, seed = problem(block, SMALL_BATCH)
    counted = Counted(f)
    z = solver(counted, x, n)
    results = {"evaluations": counted.count}
    gradients = torch.autograd.grad(z, [x, *f.parameters()], seed)
    results["gradient error"] = distance(gradients, true_gradient(block, true_depth))
    return results, gradients


def reversal_error(solver, block, n, gradients):
    f, x, seed = problem(block, SMALL_BATCH)
    remembering = Remembering(f)
    z = solver(remembering, x, n)
    remembering.turned_back = True
    return distance(gradients, torch.autograd.grad(z, [x, *f.parameters()], seed))


def peak(family, provider, block, n):
    """Run in a fresh process."""
    warnings.simplefilter("ignore", revdeq.ReconstructionWarning)
    return peak_of(FAMILIES[family][provider], block, n)


def peak_of(solver, block, n):
    f, x, seed = problem(block)

    def run():
        return gradient(solver, f, x, n, seed)

    if DEVICE.type != "cpu":
        run()  # libraries take workspaces from torch's memory, once
    return peak_memory(run, DEVICE)


def measured(family, provider, block, n, processes):
    """Everything but the time, by quantity."""
    solver = FAMILIES[family][provider]
    fixed_point = family == "tolerance" or provider.startswith(("torchdeq", "implicit"))
    results, gradients = errors_and_gradients(solver, block, n, 64 if fixed_point else n)
    if provider.startswith("reversible"):
        results["reversal error"] = reversal_error(solver, block, n, gradients)
    if not lost(results):
        with processes.Pool(1) as pool:
            results["bytes"] = pool.apply(peak, (family, provider, block, n))
    return results


def timed(family, names, block, n, budget, clock):
    f, x, seed = problem(block)
    runs = {"bare": lambda: bare(f, x, n, seed)} if family == "step" else {}
    for name in names:
        runs[name] = functools.partial(gradient, FAMILIES[family][name], f, x, n, seed)
    if n == HEADLINE:
        return take_turns(runs, 6 * budget, rounds=(7, 15), clock=clock)
    return take_turns(runs, budget, rounds=(3, 15) if n < 16 else (1, 2), clock=clock)


def lost(row):
    """Whether the float64 state is out of its range, so that time and memory would be those of a wrong gradient."""
    return not row.get("reversal error", 0.0) <= AGREE  # NaN counts as lost


def show(title, times, results):
    print(f"\n{title}")
    print(
        f"  {'':38}{'time':>12}{'over bare':>11}{'memory':>11}{'evaluations':>13}{'gradient error':>16}{'reversal':>10}"
    )
    for provider in dict.fromkeys([*times, *results]):
        seconds, row = times.get(provider), results.get(provider, {})
        took = f"{min(seconds) * 1e3:.1f} ms" if seconds else "lost"
        over = f"{ratio(seconds, times['bare']):.3f}" if "bare" in times and seconds else ""
        memory = f"{row['bytes'] / 2**20:.1f} MiB" if "bytes" in row else ""
        error = f"{row['gradient error']:.1e}" if row else ""
        reversal = f"{row['reversal error']:.0e}" if "reversal error" in row else ""
        count = row.get("evaluations", "")
        print(f"  {provider:38}{took:>12}{over:>11}{memory:>11}{count:>13}{error:>16}{reversal:>10}")


def main():
    table, quick = options(__doc__, "few depths, solvers and rounds")
    warnings.simplefilter("ignore", revdeq.ReconstructionWarning)
    clock = one_thread()
    depths, budget = (QUICK_DEPTHS, 1.0) if quick else (DEPTHS, 4.0)
    cases = [("step", block, n) for block in SHAPES for n in depths]
    if not quick:
        cases += [("tolerance", block, TOLERANCE_STEPS) for block in SHAPES]
    # The fork server has imported everything and computed nothing.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    for family, block, n in tqdm(cases, desc="whole steps", leave=False, disable=None):
        names = [name for name in FAMILIES[family] if family == "tolerance" or n in ONLY_AT.get(name, (n,))]
        if quick:
            names = list(QUICK)
        results = {name: measured(family, name, block, n, processes) for name in names}
        times = timed(family, [name for name in names if not lost(results[name])], block, n, budget, clock)
        title = f"{block}, N = {n}" if family == "step" else f"{block}, tolerance {TOL:g}, at most {2 * n} evaluations"
        show(title, times, results)
        if table is None:
            continue
        for provider, seconds in times.items():
            table.add(f"{family}, {block}", provider, n, "seconds", seconds)
            if "stored graph" in times:
                over = ratios(seconds, times["stored graph"])
                table.add(f"{family}, {block}", provider, n, "time over stored graph", over)
        for provider, row in results.items():
            for quantity, value in row.items():
                table.add(f"{family}, {block}", provider, n, quantity, [value])


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - start:.0f} s")
