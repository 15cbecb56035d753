"""Convergence to the fixed point: revdeq, tuned and with the paper's beta, beside torchdeq's Anderson and Broyden.

    python bench/convergence.py                    # two minutes: the paper's blocks with random weights
    REVDEQ_DATA=DIR python bench/convergence.py    # and trained ones; DIR holds CIFAR-10 and WikiText-2

The residual is ‖f(z) - z‖ / ‖z‖ by the number of evaluations of f, and the time that of a solve without a gradient down
to 1e-2, 1e-3 and 1e-4, on one thread, in turns. Both sides are tuned on one batch, by the residual after 24
evaluations, with equally many solves, and measured on another: ours by `revdeq.tune`, Anderson acceleration by its
history, regularization and damping. "As it is" means torchdeq's defaults. The trained blocks are those of two presets,
trained once, in some minutes, and saved in runs/bench.
"""

import functools
import itertools
import os
import warnings
from pathlib import Path

import torch
from step import BLOCKS, DEVICE
from table import main, markdown
from turns import one_thread, ratios, take_turns

import revdeq

EXAMPLES = {"conv block": 4, "transformer block": 2, "trained conv block": 32, "trained transformer block": 8}
PRESETS = {
    "trained conv block": ("cifar10-tiny", {"updates": 300}),
    "trained transformer block": ("wikitext2-tiny", {"updates": 300, "batch": 8}),
}
RUNS, SCALE = Path(__file__).parent.parent / "runs" / "bench", 2
"""The scale of the image model that is used: 32 channels, 8 by 8 pixels."""
TARGETS, SHOWN = {"1e-2": 1e-2, "1e-3": 1e-3, "1e-4": 1e-4}, (8, 16, 24)
MOST, TUNED_AT = 60, 24
HISTORIES, REGULARIZATIONS, DAMPINGS = (3, 4, 5, 6, 8, 10), (1e-4, 1e-8), (0.8, 1.0)
STYLES = {
    "revdeq, tuned": ("#2f7ed8", "-"),
    "revdeq, beta .8": ("#2f7ed8", "--"),
    "revdeq, beta .5": ("#2f7ed8", ":"),
    "Anderson, tuned": ("#9b5de5", "-"),
    "Anderson as it is": ("#9b5de5", "--"),
    "Broyden": ("#f2a541", "-"),
}


def problem(block):
    """f, a batch to tune on, and one to measure on."""
    torch.manual_seed(0)
    if block not in PRESETS:
        make, shape = BLOCKS[block]
        return make().to(DEVICE), *torch.randn(2, EXAMPLES[block], *shape[1:]).to(DEVICE)
    from revdeq import training

    name, settings = PRESETS[block]
    data, out = Path(os.environ["REVDEQ_DATA"]), RUNS / name
    training.train(training.configured(name, settings), data, out, resume=True, device="cpu")
    found = training.restored(out, data)
    layer = found.model.scales[SCALE] if name.startswith("cifar10") else found.model.equilibrium
    seen = []
    hook = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad():
        for batch in itertools.islice(found.dataset.evaluation("valid", EXAMPLES[block]), 2):
            found.model(batch.inputs)
    hook.remove()
    return layer.f.to(DEVICE), *(x.to(DEVICE) for x in seen)


def relative(out, z):
    return ((out.double() - z.double()).norm() / z.double().norm()).item()


class Ours:
    def __init__(self, f, **pair):
        self.f, self.pair = f, pair

    def solve(self, x, evaluations):
        return revdeq.solve(self.f, torch.zeros_like(x), x, max_steps=evaluations // 2, **self.pair).z

    def residuals(self, x):
        """By the number of evaluations. The state after 2 n of them is what the next one reads."""
        sizes = []

        def f(z, x):
            out = self.f(z, x)
            sizes.append(relative(out, z))
            return out

        revdeq.solve(f, torch.zeros_like(x), x, max_steps=MOST // 2 + 1, **self.pair)
        return {k: sizes[k] for k in range(2, MOST + 1, 2)}


class Theirs:
    def __init__(self, f, solver, **settings):
        from torchdeq.solver import get_solver

        self.f, self.solver, self.settings = (
            f,
            functools.partial(get_solver(solver), tol=0.0, stop_mode="rel"),
            settings,
        )
        self.before = solver == "broyden"  # it evaluates f once before its iterations

    def solve(self, x, evaluations):
        z0, limit = torch.zeros_like(x), evaluations - self.before
        return self.solver(lambda z: self.f(z, x), z0, max_iter=limit, **self.settings)[0]

    def residuals(self, x):
        calls = 0

        def f(z):
            nonlocal calls
            calls += 1
            return self.f(z, x)

        limits = {"max_iter": MOST, "indexing": range(1, MOST + 2)}
        _, states, _ = self.solver(f, torch.zeros_like(x), **limits, **self.settings)
        return {k: relative(self.f(z, x), z) for k, z in enumerate(states, calls - len(states) + 1)}


def methods(f, x):
    """All methods, tuned on x."""
    found = revdeq.tune(f, torch.zeros_like(x), x, max_steps=TUNED_AT // 2)
    settings = itertools.product(HISTORIES, REGULARIZATIONS, DAMPINGS)
    tried = [Theirs(f, "anderson", m=m, lam=lam, tau=tau) for m, lam, tau in settings]

    def residual(method):
        z = method.solve(x, TUNED_AT)
        return relative(f(z, x), z)

    return {
        "revdeq, tuned": Ours(f, beta=found.beta, gamma=found.gamma),
        "revdeq, beta .8": Ours(f, beta=0.8),
        "revdeq, beta .5": Ours(f, beta=0.5),
        "Anderson, tuned": min(tried, key=residual),
        "Anderson as it is": Theirs(f, "anderson"),
        "Broyden": Theirs(f, "broyden"),
    }


@torch.no_grad()
def measure(results, quick):
    warnings.simplefilter("ignore", revdeq.ConvergenceWarning)  # expected with few evaluations
    clock = one_thread()
    blocks = [b for b in EXAMPLES if b not in PRESETS or (os.environ.get("REVDEQ_DATA") and not quick)]
    for block in blocks[:1] if quick else blocks:
        with torch.enable_grad():
            f, seen, x = problem(block)
        found, runs = methods(f, seen), {}
        for coefficient, value in found["revdeq, tuned"].pair.items():
            results.add(f"convergence, {block}", "revdeq, tuned", TUNED_AT, coefficient, [value])
        for name, method in found.items():
            residuals = method.residuals(x)
            last = next((k for k, size in residuals.items() if size <= min(TARGETS.values())), MOST)
            for k, size in residuals.items():
                if k <= last:
                    results.add(f"convergence, {block}", name, k, "residual", [size])
            for label, target in TARGETS.items():
                if reached := [k for k, size in residuals.items() if size <= target]:
                    runs[label, name] = functools.partial(method.solve, x, reached[0])
        times = take_turns(runs, 2.0 if quick else 10.0, rounds=(3, 15), clock=clock)
        for (label, name), seconds in times.items():
            results.add(f"convergence to {label}, {block}", name, 0, "seconds", seconds)
            if ours := times.get((label, "revdeq, tuned")):
                over = ratios(ours, seconds)
                results.add(f"convergence to {label}, {block}", name, 0, "time of revdeq, tuned, over it", over)


def table(results):
    """Residuals after equal evaluations, and what a residual of 1e-3 takes."""
    header = ["block", "method", *(f"residual after {k}" for k in SHOWN), "evaluations to 1e-3", "time to 1e-3"]
    rows = []
    for block in (block for block in EXAMPLES if results.methods(f"convergence, {block}")):
        for name in STYLES:
            residuals = results.by_size(f"convergence, {block}", name, "residual")
            least = min(residuals.values())  # they end where they reach the last target
            cells = [f"{residuals[k]:.0e}" if k in residuals else f"< {least:.0e}" for k in SHOWN]
            reached = next((str(k) for k, size in residuals.items() if size <= TARGETS["1e-3"]), f"> {MOST}")
            seconds = results.median(f"convergence to 1e-3, {block}", name, 0, "seconds")
            cells += [reached, "nan" if seconds != seconds else f"{1e3 * seconds:.0f} ms"]
            pair = (results.median(f"convergence, {block}", name, TUNED_AT, c) for c in ("beta", "gamma"))
            title = "revdeq, tuned: beta {:.2f}, gamma {:.2f}".format(*pair) if name == "revdeq, tuned" else name
            rows.append([block if name == next(iter(STYLES)) else "", title, *cells])
    return markdown(header, rows)


def picture(results):
    """The residual by the number of evaluations."""
    from matplotlib.figure import Figure

    blocks = [block for block in EXAMPLES if results.methods(f"convergence, {block}")]
    columns = min(2, len(blocks))
    rows = -(-len(blocks) // columns)
    figure = Figure(figsize=(9, 0.6 + 2.8 * rows), layout="constrained")
    for axes, block in zip(figure.subplots(rows, columns, squeeze=False).flat, blocks, strict=False):
        for name, (color, style) in STYLES.items():
            found = results.by_size(f"convergence, {block}", name, "residual")
            axes.plot(list(found), list(found.values()), style, color=color, label=name)
        axes.set(title=block, yscale="log", ylim=(1e-4, 2), xlabel="evaluations of f", ylabel="‖f(z) - z‖ / ‖z‖")
        axes.grid(alpha=0.25)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)
    return figure


if __name__ == "__main__":
    main(__doc__, measure, table)
