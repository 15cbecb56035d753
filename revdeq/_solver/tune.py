"""revdeq.tune: the coefficients with which the iteration of a given f converges fastest.

Near the fixed point, an eigenvalue l of f's Jacobian becomes L = 1 - gamma + gamma l, and an evaluation multiplies
its error by the roots of

    xi^2 = beta L xi + (1 - beta)

so the iteration converges if every L is inside the ellipse with half-axes 1 (real) and (2 - beta) / beta (imaginary).
gamma = 1 / (1 - c) moves the centre c of f's eigenvalues to 0. beta < 1 makes the ellipse taller, for an f that
rotates. beta > 1 makes it flatter and the iteration faster, for an f that does not. Since the eigenvalues of a network
are unknown, `tune` tries some pairs and returns the best.

| f | its eigenvalues | a good pair |
|---|---|---|
| attention | around 0, some larger than 1 in magnitude | beta .7 to 1.1, gamma .7 to .9 |
| convolutions with a normalisation | near the real axis | beta 1.1 to 1.4, gamma 1 to 1.6 |
| a gradient step, far below 0 | real, from -3 to 0 | beta .9 to 1.2, gamma .4 to .6 |

If the eigenvalues fill an ellipse with centre c and half-axes p and q, the best pair and its rate are known
(docs/theory.md).
"""

import contextlib
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from .. import _device
from ..kernels.radix import Radix
from .check import ConvergenceWarning
from .options import Exact, options_from, with_options
from .schedule import CLOSEST_TO_1, UPDATES, Pairs, Problem, anderson, descend
from .solve import checked_f
from .state import flattened_state

OPTIONS = ("beta", "gamma", "max_steps", "tol", "indexed", "aux")
"""The options that apply to a search."""

MOST_SOLVES = 24

START = ((0.8, 1.0), (1.25, 1.0), (0.9, 0.8), (0.7, 0.6), (1.15, 0.75), (1.1, 1.5))
"""First pairs: for attention, convolutions, in between, and positive eigenvalues."""

SLOW = 2.0
"""Seconds after which a terminal shows a progress bar."""


class Trial(NamedTuple):
    beta: float
    gamma: float
    residual: float
    evaluations: int

    @property
    def rate(self) -> float:
        """The mean factor by which an evaluation reduces the residual."""
        return self.residual ** (1 / self.evaluations)


@dataclass(frozen=True)
class Tuning:
    """The result of `revdeq.tune`. Print it for a table, or plot it. If it has a schedule, pass it to `solve` or
    `RevDEQ` as schedule=found.

    Attributes:
        beta, gamma: The best pair.
        schedule: With schedule=True, a pair for every half-step.
        residual: ‖f(z) - z‖ / ‖z‖ after a solve with the result; for several batches, the geometric mean.
        evaluations: The number of evaluations of that solve.
        given: The trial of the initial pair.
        trials: All trials in order, each with its pair, residual and evaluations.
        curves: With schedule=True, the residual of the first batch after 1, 2, 3, ... evaluations, by name: with the
            schedule, with the best pair, and with Anderson acceleration (the best of six settings).

    Example:
        >>> found = revdeq.tune(f, z0, x, max_steps=4)
        >>> found.residual <= found.given.residual
        True
    """

    beta: float
    gamma: float
    residual: float
    evaluations: int
    given: Trial
    trials: list[Trial] = field(default_factory=list)
    schedule: Pairs | None = None
    curves: Mapping[str, list[float]] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"relative residual of f {self._when}", "", "  beta   gamma  residual  evaluations"]
        for trial in sorted(self.trials, key=lambda t: t.rate):
            notes = [note for pair, note in ((self._best, "best"), (self.given, "given")) if trial == pair]
            size = f"{trial.residual:.1e}" if math.isfinite(trial.residual) else "diverges"
            words = f"{trial.beta:6.3f}  {trial.gamma:6.3f}  {size:<10}{trial.evaluations:<13}{', '.join(notes)}"
            lines.append(words.rstrip())
        if self.schedule is not None:
            found = f"a pair for each of {len(self.schedule)} half-steps: {self.residual:.1e}"
            nearer = self._best.residual / self.residual
            lines += ["", f"{found}, {nearer:.1f} times closer than the best pair", "", "  beta   gamma"]
            lines += [f"{beta:6.3f}  {gamma:6.3f}" for beta, gamma in self.schedule]
        return "\n".join(lines)

    @property
    def _best(self) -> Trial:
        return min(self.trials, key=lambda t: t.rate)

    @property
    def _when(self) -> str:
        same = len({t.evaluations for t in self.trials if math.isfinite(t.residual)}) < 2
        return f"after {self.evaluations} evaluations" if same else "at the tolerance"

    def plot(self, path: Any = None) -> Any:
        """Plot the trials, coloured by their residual; for a schedule, the residual by the number of evaluations.

        Args:
            path: The file to save the plot to, if any.

        Returns:
            matplotlib's figure.

        Raises:
            ImportError: matplotlib is not installed.
        """
        try:
            from matplotlib.colors import LogNorm
            from matplotlib.figure import Figure
            from matplotlib.ticker import MaxNLocator
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install matplotlib") from error
        figure = Figure(figsize=(5.5, 4), layout="constrained")
        axes = figure.subplots()
        if self.schedule is not None:
            for (name, sizes), style in zip(self.curves.items(), ("o-", "s-", "^:"), strict=True):
                axes.plot(range(1, len(sizes) + 1), sizes, style, label=name, markersize=4)
            axes.set(yscale="log", xlabel="evaluations of f", ylabel="‖f(z) - z‖ / ‖z‖")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(alpha=0.25)
        else:

            def scatter(trials: Sequence[Any], **style: Any) -> Any:
                return axes.scatter([t.beta for t in trials], [t.gamma for t in trials], **style)

            finite = [t for t in self.trials if 0 < t.residual < math.inf]
            others = [t for t in self.trials if not math.isfinite(t.residual)]
            if others:
                scatter(others, marker="x", color="grey", label="diverges")
            if finite:
                sizes = [t.residual for t in finite]
                colours = LogNorm(min(sizes), max(*sizes, 1.001 * min(sizes)))
                points = scatter(finite, c=sizes, norm=colours, cmap="viridis_r", s=45)
                figure.colorbar(points, label=f"relative residual {self._when}")
            scatter([self], s=160, facecolors="none", edgecolors="red", label="best")
            scatter([self.given], marker="s", s=110, facecolors="none", edgecolors="black", label="given")
            axes.axvspan(1 - CLOSEST_TO_1, 1 + CLOSEST_TO_1, color="grey", alpha=0.15, lw=0)
            axes.set(xlabel="beta (the grey band is not tried)", ylabel="gamma")
        figure.legend(loc="outside upper center", ncols=3, frameon=False)
        if path is not None:
            figure.savefig(path, dpi=150)
        return figure


@with_options
def tune(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    schedule: bool = False,
    batches: Sequence[tuple[Any, ...]] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Tuning:
    """Find the beta and gamma with which `max_steps` steps come closest to the fixed point of f, or with a `tol`, those
    that reach it in the fewest evaluations.

    This is a pattern search over at most 24 pairs, each tried by a solve without a graph, starting from pairs that work
    well for attention and convolutions. With schedule=True it then optimizes a pair for every half-step, by 150 updates
    of gradient descent through the solve, in the memory of a training step. The result is never worse than the given
    pair, and a schedule never worse than the best pair. It is deterministic: all solves see the same random numbers. f,
    its parameters and their gradients are not changed. Tune again after f has been trained for a while.

    Args:
        f, z0, args: As for `revdeq.solve`.
        schedule: Whether to find a pair for every half-step: for all 2 `max_steps`, or with a `tol` for as many as the
            best pair needs. It is optimized for the state after the last of them.
        batches: More inputs to tune for, each a tuple (z0, *args), with equal weight. A schedule from two or three
            batches generalizes a little better.
        kwargs: Keyword arguments for f.
        {options}

    Returns:
        A `revdeq.Tuning`, with the best beta and gamma, the schedule, their residual and all trials.

    Raises:
        ValueError: The initial beta is within 1/16 of 1, where reconstruction is too lossy.
        FloatingPointError: f is not finite at z0, or the iteration diverges with every pair.

    Example:
        >>> found = revdeq.tune(f, z0, x, max_steps=8)
        >>> z = revdeq.solve(f, z0, x, beta=found.beta, gamma=found.gamma, max_steps=8).z
        >>> found = revdeq.tune(f, z0, x, max_steps=2, schedule=True)
        >>> z = revdeq.solve(f, z0, x, schedule=found, max_steps=2).z
    """
    checked = options_from(options)
    if abs(1 - checked.beta) < CLOSEST_TO_1:
        raise ValueError(
            f"beta = {checked.beta!r} is within 1/16 of 1, where the backward pass would lose too many bits: start "
            "with 0.9 or 1.1, for example"
        )
    if not isinstance(schedule, bool):
        raise TypeError(f"schedule = {schedule!r} must be True or False: whether to find a schedule")
    for i, batch in enumerate(batches):
        if not isinstance(batch, (tuple, list)) or not batch:
            raise TypeError(f"batches[{i}] is of type {type(batch).__name__}: it must be a tuple (z0, *args)")
    device = flattened_state(z0)[0][0].device
    every = [(z0, *args), *map(tuple, batches)]
    random = _device.generator_states(device)
    problem = Problem(checked_f(f), every, kwargs or {}, checked.indexed, bool(checked.aux), device, random)
    try:
        trials = _best_pair(problem, checked.max_steps, checked.tol, (float(checked.beta), float(checked.gamma)))
        best = min(trials, key=lambda t: t.rate)
        if not math.isfinite(best.residual):
            raise FloatingPointError(
                f"the iteration diverges with all {len(trials)} pairs that were tried: f returns NaN or infinity, "
                "or has eigenvalues with real parts above 1; normalize f's output, or start with a smaller gamma"
            )
        found = Tuning(*best, given=trials[0], trials=trials)
        if schedule:
            found = _with_schedule(problem, found)
    finally:
        problem.rewind()
    if found.residual >= 1:
        warnings.warn(
            f"no pair converges: with the best of {len(trials)}, the residual is still {found.residual:.2g} after the "
            "last step; normalize f's output, so that f contracts",
            ConvergenceWarning,
            stacklevel=2,
        )
    return found


def _best_pair(problem: Problem, max_steps: int, tol: float | None, given: tuple[float, float]) -> list[Trial]:
    """Run the search. Returns all trials."""
    trials: dict[tuple[float, float], Trial] = {}
    with _progress(MOST_SOLVES, "solve") as done:
        for beta, gamma in _search(given, trials):
            found = problem.residual(beta=beta, gamma=gamma, max_steps=max_steps, tol=tol)
            trials[beta, gamma] = Trial(beta, gamma, *found)
            done()
    return list(trials.values())


def _with_schedule(problem: Problem, found: Tuning) -> Tuning:
    """The result of gradient descent from the best pair, or the pair itself if that is better."""
    count = found.evaluations
    pair = found.beta, found.gamma
    with _progress(UPDATES, "update") as done:
        descended = descend(problem, (pair,) * count, done)
    # Rounded to the fractions of state="auto", so that all states use the same coefficients.
    descended = tuple((Radix.nearest(beta, Exact().fraction_bits, gamma).beta, gamma) for beta, gamma in descended)
    settings = {"beta": found.beta, "gamma": found.gamma, "max_steps": count // 2}
    schedules = [(pair,) * count, descended]
    sizes = [problem.residual(schedule=pairs, **settings)[0] for pairs in schedules]
    best = schedules[sizes.index(min(sizes))]
    curves = {
        "schedule": problem.along(schedule=best, **settings),
        "best pair": problem.along(**settings),
        "Anderson": anderson(problem, count),
    }
    return replace(found, schedule=best, residual=min(sizes), curves=curves)


def _search(given: tuple[float, float], trials: dict[tuple[float, float], Trial]) -> Iterator[tuple[float, float]]:
    """Yield the pairs to try; `trials` has the results so far. From the best of the first pairs, steps in four
    directions, and shorter steps if none is better."""
    for pair in (given, *START):
        if pair not in trials:
            yield pair
    size = 0.16
    while len(trials) < MOST_SOLVES and size > 0.01:
        centre = min(trials, key=lambda pair: trials[pair].rate)
        before = trials[centre].rate
        for move in ((size, 0.0), (-size, 0.0), (0.0, size), (0.0, -size)):
            pair = _allowed(centre[0] + move[0], centre[1] + move[1], upwards=move[0] > 0)
            if pair not in trials and len(trials) < MOST_SOLVES:
                yield pair
                if trials[pair].rate < before:  # continue from there: solves are what costs
                    break
        if min(trial.rate for trial in trials.values()) >= before:
            size /= 2


def _allowed(beta: float, gamma: float, upwards: bool) -> tuple[float, float]:
    """The closest allowed pair: a step of beta towards 1 continues on the other side of it."""
    if abs(1 - beta) < CLOSEST_TO_1:
        beta = 1 + CLOSEST_TO_1 if upwards else 1 - CLOSEST_TO_1
    return round(min(max(beta, 0.1), 1.9), 4), round(min(max(gamma, 0.05), 1.9), 4)


@contextlib.contextmanager
def _progress(total: int, unit: str) -> Iterator[Callable[[], None]]:
    """A function to call after each trial. It shows a progress bar if tqdm and a terminal are available."""
    bar: Any = None
    began, done = time.monotonic(), 0

    def step() -> None:
        nonlocal bar, done
        done += 1
        if bar is not None:
            bar.update()
        elif done == 1 and total * (time.monotonic() - began) > SLOW and sys.stderr.isatty():
            with contextlib.suppress(ImportError):
                from tqdm import tqdm

                bar = tqdm(total=total, initial=done, desc="tune", unit=unit, leave=False)

    try:
        yield step
    finally:
        if bar is not None:
            bar.close()
