"""Breakdown of the time of a training step: evaluations of f, vector-Jacobian products, half-steps, and the solver's
overhead.

    python bench/breakdown.py

Functions are timed where they are called, and the overhead is the rest. For a tiny f the overhead is also measured from
outside, as the time of a solve minus that of the bare evaluations and products.
"""

import contextlib
import functools
import statistics
import time
from collections import defaultdict
from unittest import mock

import torch
from step import BETA, DEVICE, evaluations, problem, products
from table import options
from tqdm import tqdm
from turns import keep_freed_memory, take_turns

import revdeq
from revdeq._device import synchronize
from revdeq._solver.tape import Tape
from revdeq.kernels import half_step_for

N = 8
PARTS = (
    "f", "relax", "overhead, forward",
    "f again", "Jacobian products", "invert and adjoint", "overhead, backward",
)  # fmt: skip


def tiny():
    torch.manual_seed(0)
    linear = torch.nn.Linear(8, 8).to(DEVICE)
    f = Tiny(linear)
    x = torch.randn(4, 8, device=DEVICE).requires_grad_()
    return f, x, torch.ones_like(x)


class Tiny(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


class Clock:
    """Adds up the time of functions by name, excluding that of timed functions inside them."""

    def __init__(self):
        self.totals = defaultdict(float)
        self._inner = [0.0]

    @contextlib.contextmanager
    def part(self, name):
        wait()
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            wait()
            elapsed = time.perf_counter() - start
            self.totals[name] += elapsed - self._inner.pop()
            self._inner[-1] += elapsed

    def timed(self, owner, attribute, name):
        function = getattr(owner, attribute)

        def run(*args, **kwargs):
            with self.part(name):
                return function(*args, **kwargs)

        return mock.patch.object(owner, attribute, run)


def wait():
    synchronize(DEVICE)


def one_step(f, x, seed, n):
    clock = Clock()
    phase = ["f"]

    def evaluated(*args):
        with clock.part(phase[0]):
            return f(*args)

    steps = half_step_for(DEVICE)
    inputs = [x, *f.parameters()]
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in (
            (steps, "relax", "relax"),
            (steps, "relax_norms", "relax"),
            (steps, "invert_adjoint", "invert and adjoint"),
            (steps, "invert_compare", "invert and adjoint"),
            (Tape, "turn", "overhead, backward"),
            (Tape, "back", "overhead, backward"),
        ):
            stack.enter_context(clock.timed(owner, attribute, name))
        with clock.part("overhead, forward"):
            z = revdeq.solve(evaluated, torch.zeros_like(x), x, beta=BETA, max_steps=n, state="float64", check=None).z
        phase[0] = "f again"
        with clock.part("Jacobian products"):
            torch.autograd.grad(z, inputs, seed)
    return clock.totals


def own_time(depths=(8, 40), budget=2.0):
    """Overhead of the solver in seconds, for a tiny f: per half-step (the slope between two depths), and per solve (the
    intercept)."""
    f, x, seed = tiny()
    z0, inputs = torch.zeros_like(x), [x, *f.parameters()]

    def forward(n):
        return revdeq.solve(f, z0, x, beta=BETA, max_steps=n, state="float64", check=None).z

    runs = {}
    for n in depths:
        runs["evaluations", n] = functools.partial(evaluations, f, x, n)
        runs["products", n] = functools.partial(products, f, x, n, seed)
        runs["forward", n] = functools.partial(forward, n)
        runs["both", n] = lambda n=n: torch.autograd.grad(forward(n), inputs, seed)
    # The minimum of many rounds: differences of medians would be dominated by other load.
    least = {name: min(seconds) for name, seconds in take_turns(runs, budget, rounds=(50, 500)).items()}
    own = {
        "forward": [least["forward", n] - least["evaluations", n] for n in depths],
        "backward": [least["both", n] - least["forward", n] - least["products", n] for n in depths],
    }
    for name, (shallow, deep) in own.items():
        per_half_step = (deep - shallow) / (2 * (depths[1] - depths[0]))
        yield name, per_half_step, shallow - 2 * depths[0] * per_half_step


def main():
    table, quick = options(__doc__, "few rounds")
    rounds = 3 if quick else 10
    keep_freed_memory()
    problems = {
        "conv block": problem("conv block"),
        "transformer block": problem("transformer block"),
        "tiny f": tiny(),
    }
    print(f"\nShares of one step, N = {N}")
    print(f"  {'':18}" + "".join(f"{part:>25}" for part in PARTS))
    for name, (f, x, seed) in tqdm(problems.items(), desc="breakdown", leave=False, disable=None):
        one_step(f, x, seed, N)
        totals = [one_step(f, x, seed, N) for _ in range(rounds)]
        whole = statistics.median(sum(t.values()) for t in totals)
        shares = {part: statistics.median(t[part] for t in totals) / whole for part in PARTS}
        print(f"  {name:18}" + "".join(f"{share:25.1%}" for share in shares.values()))
        for part in PARTS if table else ():
            table.add(f"breakdown, {name}", part, N, "seconds", [t[part] for t in totals])
    print("  overhead of the solver, tiny f:")
    for name, per_half_step, once in own_time(budget=1.0 if quick else 5.0):
        print(f"    {name}: {per_half_step * 1e6:.0f} us per half-step, {once * 1e6:.0f} us per solve")
        if table:
            table.add("own time of a half-step, tiny f", name, N, "seconds", [per_half_step])
            table.add("own time once, tiny f", name, N, "seconds", [once])


if __name__ == "__main__":
    main()
