"""revdeq.tune: coefficients with which the iteration of a given f converges faster.

Near the fixed point, an eigenvalue l of f's Jacobian becomes L = 1 - gamma + gamma l, and an evaluation multiplies
its error by the roots of

    xi^2 = beta L xi + (1 - beta)

so the iteration converges if every L is inside the ellipse with half-axes 1 (real) and (2 - beta) / beta (imaginary).
gamma = 1 / (1 - c) moves the centre c of f's eigenvalues to 0. beta < 1 makes the ellipse taller, for an f that
rotates. beta > 1 makes it flatter and the iteration faster, for an f that does not. Since the eigenvalues of a network
are unknown, `tune` tries some pairs and returns the best.
"""

import collections
import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Unpack

from .check import ConvergenceError, ConvergenceWarning, ReconstructionError
from .options import Exact, Keywords, options_from
from .repeatable import generator_states, set_generator_states
from .solve import checked_f, solve
from .state import flattened_state
from .unrolled import sum_of_squares

MOST_SOLVES = 24

START = ((0.8, 1.0), (1.25, 1.0), (0.9, 0.8), (0.7, 0.6), (1.15, 0.75), (1.1, 1.5))
"""First pairs: for attention, convolutions, in between, and positive eigenvalues."""

FINALISTS = 3
"""So many of the best pairs are compared on what was held out."""

CLOSEST_TO_1 = 1 / 16
"""A smaller |1 - beta| gains nothing, and costs the reconstruction four bits or more per half-step."""

HEADROOM = 16
"""How much larger than what was seen here a number may become in an exact state."""

REBUILT = 1e-8
"""The relative error up to which a float64 state counts as inverted, which varies from batch to batch by a factor of
100. Where there is no exact state, a hundred times that, which the check at the end just allows."""


class Trial(NamedTuple):
    """A pair of coefficients, the residual ‖f(z) - z‖ / ‖z‖ after a solve with it, and the number of evaluations."""

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
    """The result of `revdeq.tune`. Print it for a table, or plot it.

    Attributes:
        beta, gamma: The best pair.
        state: "float64", or the `revdeq.Exact` that this pair needs.
        residual: ‖f(z) - z‖ / ‖z‖ after a solve with it, of what was held out; the geometric mean of several batches.
        evaluations: The number of evaluations of that solve.
        given: The trial of the initial pair, of what was held out.
        trials: All trials of the search in order.
        why: What was held out, and what decided on the pair and the state.

    Example:
        >>> found = revdeq.tune(f, z0, x, max_steps=4)
        >>> found.residual <= found.given.residual
        True
    """

    beta: float
    gamma: float
    state: str | Exact
    residual: float
    evaluations: int
    given: Trial
    trials: list[Trial]
    why: str

    def __str__(self) -> str:
        lines = [f"beta = {self.beta:g}, gamma = {self.gamma:g}, state = {self.state!r}: {self.why}", ""]
        lines += ["the search:", "  beta   gamma  residual  evaluations"]
        for trial in sorted(self.trials, key=lambda t: t.rate):
            size = f"{trial.residual:.1e}" if math.isfinite(trial.residual) else "diverges"
            notes = {self.given[:2]: "  given", (self.beta, self.gamma): "  chosen"}
            words = f"{trial.beta:6.3f}  {trial.gamma:6.3f}  {size:<10}{trial.evaluations}"
            lines.append(words + notes.get(trial[:2], ""))
        return "\n".join(lines)

    def plot(self) -> Any:
        """Plot the trials, coloured by their residual.

        Returns:
            matplotlib's figure: figure.savefig("tuning.png") saves it.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            >>> figure = revdeq.tune(f, z0, x, max_steps=4).plot()
        """
        from matplotlib.colors import LogNorm
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.5, 4), layout="constrained")
        axes = figure.subplots()
        betas, gammas, sizes, _ = zip(*[t for t in self.trials if math.isfinite(t.residual)], strict=True)
        colours = LogNorm(min(sizes), max(*sizes, 1.001 * min(sizes)))
        points = axes.scatter(betas, gammas, c=sizes, s=45, cmap="viridis_r", norm=colours)
        figure.colorbar(points, label="relative residual of the search")
        axes.scatter(self.beta, self.gamma, s=160, facecolors="none", edgecolors="red", label="chosen")
        axes.scatter(*self.given[:2], marker="s", s=110, facecolors="none", edgecolors="black", label="given")
        axes.set(xlabel="beta", ylabel="gamma")
        figure.legend(loc="outside upper center", ncols=2, frameon=False)
        return figure


def tune(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    batches: Sequence[tuple[Any, ...]] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[Keywords],
) -> Tuning:
    """Find the beta and gamma with which `max_steps` steps come closest to the fixed point of f, or with a `tol`, those
    that reach it in the fewest evaluations; and the state that inverts their steps.

    This is a pattern search over at most 24 pairs, each tried by a solve without a graph, starting from pairs that work
    well for attention and convolutions. The best are compared with the given pair on what was held out: one of several
    batches, or every second example if z0 and all args share their first dimension. The result is never worse there
    than the given pair. It is deterministic: all solves see the same random numbers. f, its parameters and their
    gradients are not changed. Tune again after f has been trained for a while.

    Args:
        f, z0, args: As for `revdeq.solve`.
        batches: More inputs to tune for, each a tuple (z0, *args), with equal weight.
        kwargs: Keyword arguments for f.
        options: Those of the solves to tune for, as for `revdeq.solve`; the search starts from beta and gamma.

    Returns:
        A `revdeq.Tuning`, with the best beta and gamma, the state, their residual and all trials.

    Raises:
        FloatingPointError: f is not finite at z0, or the iteration diverges with every pair.
        RuntimeError: No pair has a state that can be inverted, or a solve with the result and these options fails.

    Example:
        >>> found = revdeq.tune(f, z0, x, max_steps=8)
        >>> z = revdeq.solve(f, z0, x, beta=found.beta, gamma=found.gamma, state=found.state, max_steps=8).z
    """
    checked = options_from(options)
    for i, batch in enumerate(batches):
        if not isinstance(batch, (tuple, list)) or not batch:
            raise TypeError(f"batches[{i}] is of type {type(batch).__name__}: it must be a tuple (z0, *args)")
    x = flattened_state(z0)[0][0]
    everything = [(z0, *args), *map(tuple, batches)]
    problem = Problem(checked_f(f), everything, kwargs or {}, options, generator_states(x.device))
    try:
        tuned, held, what = _split(problem)
        given = _allowed(checked.beta, checked.gamma, upwards=checked.beta > 1)
        trials: dict[tuple[float, float], Trial] = {}
        for pair in _search(given, trials):
            trials[pair] = tuned.trial(*pair)
        ranked = sorted(trials.values(), key=lambda t: t.rate)
        if not math.isfinite(ranked[0].residual):
            raise FloatingPointError(
                f"the iteration diverges with all {len(trials)} pairs that were tried: f returns NaN or infinity, "
                "or has eigenvalues with real parts above 1; normalize f's output, or start with a smaller gamma"
            )
        first = held.trial(*given)
        finalists = sorted((held.trial(t.beta, t.gamma) for t in ranked[:FINALISTS]), key=lambda t: t.rate)
        order = [*(t for t in finalists if t.rate < first.rate), first, *ranked]
        best, state, reason = problem.inverted(order, can_be_exact=x.dtype != torch.float64)
        problem.check(best, state)
    finally:
        problem.rewind()
    if best.residual >= 1:
        warnings.warn(
            f"no pair converges: with the best of {len(trials)}, the residual is still {best.residual:.2g} after the "
            "last step; normalize f's output, so that f contracts",
            ConvergenceWarning,
            stacklevel=2,
        )
    decision = "no pair beats the given one" if best[:2] == first[:2] else "it beats the given pair"
    why = f"{decision} on {what}; {reason}"
    return Tuning(best.beta, best.gamma, state, best.residual, best.evaluations, first, list(trials.values()), why)


@dataclass(frozen=True)
class Problem:
    """f, and the batches (z0, *args) to tune it for. All solves see the same random numbers."""

    f: Callable[..., Any]
    batches: Sequence[tuple[Any, ...]]
    kwargs: Mapping[str, Any]
    options: Keywords
    random: Sequence[tuple[Any, Tensor]]

    def rewind(self) -> None:
        set_generator_states(self.random)

    def solved(self, f: Any, batch: tuple[Any, ...], **changed: Any) -> Any:
        self.rewind()
        keywords: Any = {**self.options, "check": None, "per_example": False, "keep": 0, **changed}
        return solve(f, *batch, kwargs=self.kwargs, **keywords)

    @torch.no_grad()
    def trial(self, beta: float, gamma: float, **changed: Any) -> Trial:
        """The geometric mean of the residuals of the batches, infinite if a solve diverges."""
        logarithms, count = [], 1
        for batch in self.batches:
            try:
                s = self.solved(self.f, batch, beta=beta, gamma=gamma, state="float64", **changed)
            except FloatingPointError:
                return Trial(beta, gamma, math.inf, 2 * options_from(self.options).max_steps)
            logarithms.append(self._log_residual(batch, s))
            count = max(count, s.nfe)
        mean = sum(logarithms) / len(logarithms)
        return Trial(beta, gamma, math.exp(mean) if mean < 700 else math.inf, count)

    def _log_residual(self, batch: tuple[Any, ...], solution: Any) -> float:
        """log(‖f(z) - z‖ / ‖z‖); infinity in place of NaN."""
        self.rewind()
        index = {"evaluation": solution.nfe - 1} if self.options.get("indexed") else {}
        out = self.f(tree_map(torch.clone, solution.z), *batch[1:], **self.kwargs, **index)
        old, new = tree_leaves(solution.z), tree_leaves(out[0] if self.options.get("aux") else out)
        change = sum_of_squares(a.double() - b for a, b in zip(new, old, strict=True))
        change, value = (x.clamp(min=sys.float_info.min).log() for x in (change, sum_of_squares(old)))
        return float((change - value).nan_to_num(math.inf, math.inf) / 2)

    def inverted(self, trials: Sequence[Trial], can_be_exact: bool) -> tuple[Trial, str | Exact, str]:
        """The first trial whose steps can be inverted, in which state, and why."""
        if options_from(self.options).gradient == "implicit":
            return trials[0], "float64", "gradient='implicit' inverts no step, in any state"
        for trial in trials:
            try:
                error, size = self._reconstructed(trial)
            except FloatingPointError:
                continue
            if error <= (REBUILT if can_be_exact else 100 * REBUILT):
                return trial, "float64", f"a float64 state inverts these steps (error {error:.0e})"
            if can_be_exact:
                bits = min(max(math.floor(31 - math.log2(HEADROOM * size)), 1), 40)
                why = f"a float64 state does not invert these steps (error {error:.0e})"
                return trial, Exact(fraction_bits=bits), f"{why}, and numbers up to {size:.2g} were seen"
        raise RuntimeError(
            "a float64 state inverts the steps of no pair that was tried, and an exact state has fewer bits than the "
            "float64 numbers that f reads: take fewer steps, or use float32"
        )

    def _reconstructed(self, trial: Trial) -> tuple[float, float]:
        """The relative error of what evaluation 1 of f reads in the backward pass with a float64 state, where it is
        largest, and the largest magnitude that f read or returned in the forward pass."""
        worst = largest = 0.0
        for batch in self.batches:
            observed = Observed(self.f)
            with self._both_passes(observed, batch, trial, "float64"):
                largest = max(largest, observed.size)
            before, after = observed.first[1], observed.latest[0]
            wrong = sum_of_squares(x.double() - y.double() for x, y in zip(after, before, strict=True))
            worst = max(worst, float((wrong / sum_of_squares(before)).nan_to_num(math.inf).sqrt()))
        return worst, largest

    def check(self, trial: Trial, state: str | Exact) -> None:
        """Raise if a solve with the result fails in one of the passes."""
        try:
            with self._both_passes(self.f, self.batches[0], trial, state, check="raise"):
                pass
        except (ReconstructionError, ConvergenceError, FloatingPointError, OverflowError) as error:
            if not isinstance(error, ConvergenceError) or self.options.get("check") == "raise":
                found = f"beta = {trial.beta:g}, gamma = {trial.gamma:g}, state = {state!r}"
                raise RuntimeError(f"a solve with the best that was found, {found}, fails: {error}") from error

    @contextlib.contextmanager
    def _both_passes(self, f: Any, batch: tuple[Any, ...], trial: Trial, state: Any, **changed: Any) -> Iterator[None]:
        """A solve before, and its backward pass after what is inside."""
        with torch.inference_mode(False), torch.enable_grad():
            z0 = tree_map(lambda x: x.detach().clone().requires_grad_(), batch[0])
            s = self.solved(f, (z0, *batch[1:]), beta=trial.beta, gamma=trial.gamma, state=state, **changed)
            yield
            leaves = tree_leaves(s.z)
            torch.autograd.grad(leaves, tree_leaves(z0), [torch.ones_like(x) for x in leaves], allow_unused=True)


class Observed:
    """f. first, latest: the first and the latest two states that it read. size: the largest magnitude that it read or
    returned."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f, self.size = f, 0.0
        self.first, self.latest = list[list[Tensor]](), collections.deque[list[Tensor]](maxlen=2)

    def __call__(self, z: Any, *args: Any, **kwargs: Any) -> Any:
        self.latest.append([x.detach().clone() for x in tree_leaves(z)])
        if len(self.first) < 2:
            self.first.append(self.latest[-1])
        out = self._f(z, *args, **kwargs)
        seen = [*self.latest[-1], *(x.detach() for x in tree_leaves(out))]
        self.size = max(self.size, *(float(x.abs().amax()) for x in seen if x.numel()), 0.0)
        return out


def _split(problem: Problem) -> tuple[Problem, Problem, str]:
    """The problem to tune for, what is held out, and what that is."""
    batches = problem.batches
    if len(batches) > 1:
        return replace(problem, batches=batches[:-1]), replace(problem, batches=batches[-1:]), "the batch held out"

    def half(start: int) -> Problem:
        return replace(problem, batches=[tree_map(lambda x: x[start::2], batches[0])])

    lengths = {x.shape[0] if isinstance(x, Tensor) and x.dim() else 0 for x in tree_leaves(batches[0])}
    if len(lengths) == 1 and min(lengths) > 1:
        even, odd = half(0), half(1)
        with contextlib.suppress(RuntimeError, ValueError, IndexError):  # some f take no part of a batch, as of a graph
            odd.trial(0.5, 1.0, max_steps=1)
            return even, odd, "every second example, held out"
    return problem, problem, "this batch (nothing could be held out)"


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
