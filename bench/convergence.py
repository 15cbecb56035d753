"""Convergence to the fixed point and to its gradient: ours, tuned and with the paper's beta, against torchdeq's.

    python bench/convergence.py

residual: ‖f(z) - z‖ / ‖z‖ by the number of evaluations, and the evaluations, time and memory of a solve without a
gradient down to 1e-2, 1e-3 and 1e-4.
gradient: the distance of the worst parameter's gradient from that of the fixed point (relative, 2-norm), and the time
and memory of both passes. The fixed point and its gradient are computed once, in float64, to 1e-10.
held out: the residual on batches that were not used for tuning, with a schedule (a pair for every half-step), with the
best constant pair, and with Anderson's best setting, chosen afterwards.

Both sides are tuned with the same number of solves by the same residual: ours by `revdeq.tune`, Anderson acceleration
by its history, regularization and damping. "as it is" means torchdeq's defaults. All on one thread, interleaved. The
blocks are the paper's, with random weights, and two trained by presets.
"""

import copy
import functools
import itertools
import math
import time
import warnings

import torch
from step import DEVICE, problem
from table import options
from torchdeq import get_deq
from torchdeq.solver import get_solver, register_solver
from torchdeq.solver.anderson import anderson_solver
from tqdm import tqdm
from trained import available, trained
from turns import one_thread, take_turns

import revdeq
from revdeq._device import peak_memory

BLOCKS = {"conv block": 4, "transformer block": 2}
"""The batch sizes: half of those in step.py."""
TARGETS = {"1e-2": 1e-2, "1e-3": 1e-3, "1e-4": 1e-4}
MOST = 60
"""The number of evaluations up to which residuals are measured."""
TUNED_AT = 24
"""Both sides are tuned for the smallest residual after this many evaluations."""
HISTORIES, REGULARISATIONS, DAMPINGS = (3, 4, 5, 6, 8, 10), (1e-4, 1e-8), (0.8, 1.0)
"""The settings of Anderson acceleration: as many as `revdeq.tune` tries."""
SETTLED, LONGEST = 1e-10, 3000
FINE, COARSE = (8, 12, 16, 24, 32, 48), (16, 32)
"""Evaluations of a forward pass. The adjoint equation is solved with as many products."""
SCHEDULED = (4, 8, 12, 16)
"""Evaluations that schedules are made for."""
PROVIDERS = {
    "ours, tuned, implicit": FINE,
    "ours, tuned, exact": (8, 16, 24, 40),
    "ours, schedule, implicit": SCHEDULED,
    "ours, schedule, exact": SCHEDULED,
    "ours, beta .5, implicit": (32,),
    "ours, beta .8, implicit": COARSE,
    "ours, beta .5, exact": (32,),
    "ours, beta .8, exact": COARSE,
    "Anderson, IFT": FINE,
    "Anderson as it is, IFT": FINE,
    "Broyden, IFT": (16, 24),
    "Anderson, phantom": (16,),
}
OURS = ("ours, tuned", "ours, schedule", "ours, beta .5", "ours, beta .8")
QUICK = {"ours, tuned, implicit": (16,), "Anderson, IFT": (16,)}
SEEN, HELD_OUT = 3, 2
"""Batches to tune for, and to measure on."""
MEMORY_AT = 24
"""Memory is measured at this number of evaluations, or the next. Neither ours nor Anderson's depends on it."""


class Problem:
    """A block with its input, the gradient of its output, and the settings of both sides."""

    def __init__(self, block, batch=None):
        if block in BLOCKS:
            self.f, x, self.seed = problem(block, batch or BLOCKS[block])
        else:
            self.f, xs = trained(block, SEEN + HELD_OUT)
            self.seen, self.held_out, x = xs[:SEEN], xs[SEEN:], xs[0]
            self.seed = torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
        self.x, self.parameters = x.detach(), list(self.f.parameters())
        tuning = revdeq.tune(self.f, torch.zeros_like(x), self.x, beta=0.8, max_steps=TUNED_AT // 2)
        self.pair = {"beta": tuning.beta, "gamma": tuning.gamma}
        settings = itertools.product(HISTORIES, REGULARISATIONS, DAMPINGS)
        self.anderson = min(
            (dict(zip(("m", "lam", "tau"), values, strict=True)) for values in settings),
            key=lambda chosen: self.residual(self.solvers(chosen)["Anderson"](TUNED_AT)),
        )
        register_solver("tuned", functools.partial(anderson_solver, **self.anderson))

    def at(self, z):
        return self.f(z, self.x)

    @torch.no_grad()
    def residual(self, z):
        return relative(self.at(z), z)

    def _pair(self, name, k=None):
        if "schedule" in name:
            return {**self.pair, "schedule": self.schedule(k)}
        return self.pair if "tuned" in name else {"beta": 0.5 if "beta .5" in name else 0.8}

    @functools.cache  # noqa: B019  there are four, and the problem lives as long as they are needed
    def schedule(self, k):
        """Tuned for all batches that may be seen, of a trained block."""
        first, *others = [(torch.zeros_like(x), x) for x in self.seen]
        return revdeq.tune(self.f, *first, batches=others, beta=0.8, max_steps=k // 2, schedule=True)

    def solvers(self, anderson=None):
        """Solves without a gradient, by the number of evaluations."""
        anderson = self.anderson if anderson is None else anderson

        def ours(name, k):
            pair = self._pair(name, k)
            with torch.no_grad():
                return revdeq.solve(self.f, torch.zeros_like(self.x), self.x, max_steps=k // 2, **pair).z

        def torchdeqs(name, k, **settings):
            iterations = k - 1 if name == "broyden" else k  # it evaluates f once before them
            with torch.no_grad():
                return get_solver(name)(
                    self.at, torch.zeros_like(self.x), max_iter=iterations, tol=0.0, stop_mode="rel", **settings
                )[0]

        return {
            **{name: functools.partial(ours, name) for name in OURS},
            "Anderson": functools.partial(torchdeqs, "anderson", **anderson),
            "Anderson as it is": functools.partial(torchdeqs, "anderson"),
            "Broyden": functools.partial(torchdeqs, "broyden"),
        }

    def gradient(self, provider, k):
        """The gradient of the parameters, by a forward and a backward pass."""
        name, *_, kind = provider.split(", ")
        z0 = torch.zeros_like(self.x)
        if name == "ours":
            z = revdeq.solve(self.f, z0, self.x, max_steps=k // 2, gradient=kind, **self._pair(provider, k)).z
        else:
            solver = {"Anderson": "tuned", "Anderson as it is": "anderson", "Broyden": "broyden"}[name]
            # The gradient by a hook takes less time and memory than torchdeq's default.
            how = "grad" if kind == "phantom" else "ift" if name.endswith("as it is") else "hook_ift"
            deq = get_deq(
                f_solver=solver, b_solver=solver, f_max_iter=k, b_max_iter=k, f_tol=0.0, b_tol=0.0,
                f_stop_mode="rel", b_stop_mode="rel", **{how: 1},
            )  # fmt: skip
            z = deq.train()(self.at, z0)[0][-1]
        return torch.autograd.grad(z, self.parameters, self.seed)

    @torch.no_grad()
    def residuals(self, name):
        """Residuals by the number of evaluations, until the smallest target is reached."""
        if name == "ours, schedule":  # each is made for its own number of evaluations
            found = {k: self.residual(self.solvers()[name](k)) for k in SCHEDULED}
        elif name.startswith("ours"):
            found = self._along(**self._pair(name))
        else:
            settings = self.anderson if name == "Anderson" else {}
            found = self._along_torchdeqs("broyden" if name == "Broyden" else "anderson", **settings)
        reached = next((k for k, size in found.items() if size <= min(TARGETS.values())), MOST)
        return {k: size for k, size in found.items() if k <= reached}

    def _along(self, **pair):
        """The state after k evaluations is what the next one reads, where k is even."""
        sizes = []

        def f(z, x):
            out = self.f(z, x)
            sizes.append(relative(out, z))
            return out

        revdeq.solve(f, torch.zeros_like(self.x), self.x, max_steps=MOST // 2 + 1, **pair)
        return {k: sizes[k] for k in range(2, MOST + 1, 2)}

    def _along_torchdeqs(self, solver, **settings):
        return along_torchdeqs(solver, self.f, self.x, MOST, **settings)


@torch.no_grad()
def along_torchdeqs(solver, f, x, most, **settings):
    """The residuals of a solver of torchdeq by the number of evaluations."""
    calls = 0

    def counted(z):
        nonlocal calls
        calls += 1
        return f(z, x)

    steps = {"max_iter": most, "indexing": range(1, most + 2)}
    _, states, _ = get_solver(solver)(counted, torch.zeros_like(x), tol=0.0, stop_mode="rel", **steps, **settings)
    first = calls - len(states) + 1  # one evaluation per state
    return {k: relative(f(z, x), z) for k, z in enumerate(states, first)}


def fixed_points_gradient(f, x, seed, beta, gamma):
    """The gradient of f's parameters at the fixed point, by the same iteration in plain operations, in float64."""
    f, x, seed = copy.deepcopy(f).double(), x.double(), seed.double()
    with torch.no_grad():
        z = settled(lambda z: f(z, x), torch.zeros_like(x), beta, gamma)
    z.requires_grad_()
    out = f(z, x)
    u = settled(lambda u: torch.autograd.grad(out, z, u, retain_graph=True)[0] + seed, seed, beta, gamma)
    return torch.autograd.grad(out, list(f.parameters()), u)


def settled(function, start, beta, gamma):
    """The fixed point. If the iteration does not converge, it is repeated with smaller steps."""
    for pair in ((beta, gamma), (0.9, gamma / 2), (0.9, gamma / 4)):
        b, g = pair
        before = now = start
        for _ in range(LONGEST):
            out = function(now)
            size = ((out - now).norm() / now.norm().clamp(min=1e-300)).item()
            if size <= SETTLED:
                return out
            if not math.isfinite(size):
                break
            before, now = now, (1 - b) * before + b * ((1 - g) * now + g * out)
    raise ArithmeticError(f"no fixed point was reached: the residual is {size:.1e}")


def relative(out, z):
    """The residual."""
    return ((out.double() - z.double()).norm() / z.double().norm()).item()


def worst(gradients, expected):
    return max(((g.double() - e).norm() / e.norm()).item() for g, e in zip(gradients, expected, strict=True))


def measure_residuals(given, block, add, quick, clock):
    """Measure solves without a gradient."""
    needed, solvers = {}, given.solvers()
    if block in BLOCKS:
        del solvers["ours, schedule"]
    for name in solvers:
        found = given.residuals(name)
        for k, size in found.items():
            add(f"residual, {block}", name, k, "residual", [size])
        for label, target in TARGETS.items():
            k = next((k for k, size in found.items() if size <= target), None)
            if k is not None:
                needed[name, label] = k
    runs = {key: functools.partial(solvers[key[0]], k) for key, k in needed.items()}
    times = take_turns(runs, 1.0 if quick else 2.0, least=1e-4, rounds=(3, 15), clock=clock)
    for (name, label), k in needed.items():
        add(f"residual {label}, {block}", name, k, "seconds", times[name, label])
        if not quick:
            add(f"residual {label}, {block}", name, k, "bytes", [peak_memory(runs[name, label], DEVICE)])
    print(f"\n{block}: tuned {given.pair}, Anderson {given.anderson}")
    print(f"  {'':24}" + "".join(f"{f'evaluations, ms to {label}':>28}" for label in TARGETS))
    for name in solvers:
        cells = [
            f"{needed[name, label]:17}{min(times[name, label]) * 1e3:8.1f} ms" if (name, label) in needed else "-"
            for label in TARGETS
        ]
        print(f"  {name:24}" + "".join(f"{cell:>28}" for cell in cells), flush=True)


def measure_gradients(given, block, add, quick, clock):
    """Measure a forward and a backward pass, and the error of their gradient."""
    expected = fixed_points_gradient(given.f, given.x, given.seed, **given.pair)
    providers = {
        name: ks
        for name, ks in (QUICK if quick else PROVIDERS).items()
        if "schedule" not in name or block not in BLOCKS
    }
    cases = [(name, k) for name, ks in providers.items() for k in ks]
    distances = {}

    def run(case):
        gradients = given.gradient(*case)
        if case not in distances:
            distances[case] = worst(gradients, expected)

    runs = {case: functools.partial(run, case) for case in cases}
    times = take_turns(runs, 4.0, least=1e-4, rounds=(2, 6), clock=clock)
    memory = {}
    for name, ks in providers.items():
        k = next((k for k in ks if k >= MEMORY_AT), ks[-1])
        memory[name] = peak_memory(runs[name, k], DEVICE)
        add(f"gradient, {block}", name, k, "bytes", [memory[name]])
    print(f"\n  {'':26}{'evaluations':>12}{'time':>12}{'distance':>12}{'memory':>12}")
    for name, k in cases:
        add(f"gradient, {block}", name, k, "distance", [distances[name, k]])
        add(f"gradient, {block}", name, k, "seconds", times[name, k])
        took = f"{min(times[name, k]) * 1e3:9.1f} ms"
        print(f"  {name:26}{k:12}{took:>12}{distances[name, k]:12.1e}{memory[name] / 2**20:8.1f} MiB", flush=True)


def measure_schedules(given, block, add, clock, counts=SCHEDULED):
    """Find the schedules. Measure residuals on batches that were not used for tuning, and the time of the search."""
    f, xs = given.f, given.held_out
    names = ("m", "lam", "tau")
    settings = [dict(zip(names, v, strict=True)) for v in itertools.product(HISTORIES, REGULARISATIONS, DAMPINGS)]
    theirs = [[along_torchdeqs("anderson", f, x, max(counts), **each) for each in settings] for x in xs]

    @torch.no_grad()
    def residual(x, **how):
        z = revdeq.solve(f, torch.zeros_like(x), x, **how).z
        return relative(f(z, x), z)

    print(f"\n{block}, held out\n  {'evaluations':>12}{'schedule':>12}{'tuned':>12}{'Anderson':>12}{'search':>12}")
    for k in counts:
        began = clock()
        found = given.schedule(k)
        took = clock() - began
        pair = {"beta": found.beta, "gamma": found.gamma, "max_steps": k // 2}
        sizes = {
            "ours, schedule": [residual(x, schedule=found, **pair) for x in xs],
            "ours, tuned": [residual(x, **pair) for x in xs],
            "Anderson": [min(each[k] for each in batch) for batch in theirs],
        }
        for name, values in sizes.items():
            add(f"held out, {block}", name, k, "residual", values)
        add(f"held out, {block}", "ours, schedule", k, "seconds of the search", [took])
        cells = [f"{sum(values) / len(values):12.1e}" for values in sizes.values()]
        print(f"  {k:12}" + "".join(cells) + f"{took:10.0f} s", flush=True)


def main():
    table, quick = options(__doc__, "one block, two solvers, few rounds")
    warnings.simplefilter("ignore", revdeq.ConvergenceWarning)  # expected with few evaluations
    clock = one_thread()
    blocks = ["conv block"] if quick else [*BLOCKS, *available()]
    for block in tqdm(blocks, desc="convergence", leave=False, disable=None):
        given = Problem(block, 2 if quick else None)
        add = table.add if table else lambda *row: None
        if block not in BLOCKS:
            measure_schedules(given, block, add, clock)  # the other two use the schedules
        measure_residuals(given, block, add, quick, clock)
        measure_gradients(given, block, add, quick, clock)


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - start:.0f} s")
