"""The options of a solve: declared, documented and checked here.

`revdeq.solve`, `revdeq.RevDEQ` and `revdeq.verify` take them as keyword arguments.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeVar

import torch

from ..kernels.half_step import Coefficients, float32
from .monitor import CHECKS

GRADIENTS = ("exact", "implicit")


@dataclass(frozen=True)
class Exact:
    """The exact state with a custom range: integers, whose steps are inverted bit for bit, for every beta and N.

    Pass it as `state`. `state="exact"` is `Exact()`.

    Args:
        fraction_bits: The number of fractional bits, of 32, from 1 to 30. Magnitudes must stay below
            2^(31 - fraction_bits), and the resolution is 2^-fraction_bits: 128 and 6e-8 with 24 bits.

    Raises:
        ValueError: fraction_bits is not an integer from 1 to 30.

    Example:
        >>> revdeq.solve(f, z0, x, state=revdeq.Exact(fraction_bits=20)).state  # magnitudes up to 2048
        'exact'
    """

    fraction_bits: int = 24

    def __post_init__(self) -> None:
        if type(self.fraction_bits) is not int or not 1 <= self.fraction_bits <= 30:
            raise ValueError(
                f"fraction_bits = {self.fraction_bits!r} must be an integer from 1 to 30; the default is 24"
            )


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a solve.

    Args:
        beta: The relaxation, in (0, 2) and not 1. Below 1 it tolerates an f that rotates, such as attention; above 1 it
            is faster if f only contracts, as convolutions do. `revdeq.tune` finds a good one. It is rounded to float32,
            which makes beta * f exact in float64.
        gamma: The damping of f, in (0, 3]: f(z) is replaced by (1 - gamma) z + gamma f(z). 1 is the paper's iteration.
        schedule: A pair (beta, gamma) for each of the first half-steps: a sequence of pairs, a tensor of shape (K, 2),
            or the result of `revdeq.tune(..., schedule=True)`. Shorter solves use its first pairs, and longer ones
            continue with beta and gamma. A tensor that requires a gradient gets one.
        max_steps: The number of steps N, each of which evaluates f twice; with a `tol`, the maximum.
        tol: None takes exactly `max_steps` steps and never synchronizes with the device. With tol > 0 the iteration
            stops after the first step whose relative change, `Solution.change`, is at most tol.
        per_example: With a `tol`, whether each example of a batch (the first dimension of z0) stops separately: after
            the first step whose relative change for this example is at most tol, its states are frozen. f is still
            evaluated on the whole batch. `Solution.steps` and `Solution.change` then have an entry per example, and the
            result of an example does not depend on the others, if f treats examples independently.
        compact: With `per_example` and without gradients (torch.no_grad), whether f is evaluated only on the examples
            that have not stopped. They are selected from z and from all tensors in args and kwargs whose first
            dimension is the batch, whenever their number falls below a power of two. f must treat examples
            independently, and must get per-example tensors as arguments. With gradients, with random numbers in f, and
            in `revdeq.steps`, f is evaluated on the whole batch.
        indexed: Whether f is called as f(z, *args, evaluation=k), with k = 0 ... 2 * max_steps - 1, in both passes: for
            modules, embeddings or caches that differ by evaluation.
        aux: Whether f returns a pair (state, aux). `Solution.aux` is then the sum of aux over all evaluations, a tensor
            or a tree of tensors, with exact gradients; with aux="list", the list of them. With `backward_steps`, only
            those of the last steps have a gradient; with per_example=True, those of examples that have stopped are
            included.
        state: The format of y and z. "auto" chooses "float64" if that is safe (reconstruction loses at most 32 of its
            53 bits, or z0 is float64, or no step has to be inverted), and otherwise "exact". "float64" is the paper's
            mixed precision; its reconstruction error grows like |1 - beta|^-N. "exact" stores integers in the same 8
            bytes, and its steps lose no bits: the gradient is that of a stored graph of the same steps, for every beta
            and N. The resolution is 6e-8, coarser than a float64 f. 1 - beta is rounded to the nearest fraction with a
            denominator of at most 64, also with "auto", so that every N runs the same iteration. Magnitudes must stay
            below 128 (or use `revdeq.Exact(fraction_bits=...)`). Remainders take 8 more bytes per element of z0
            for every 32 steps with beta .5, 16 with .75, 13 with .8, and 9 with .9.
        check: What to do if the backward pass fails to reconstruct z0, so that the gradient cannot be trusted: "warn",
            once per calling line, "raise", or None to skip the check. On the CPU this happens at the end of the
            backward pass; on other devices, without synchronizing, at a later call of `solve` or at exit. During CUDA
            graph capture nothing is checked. With gradient="implicit", the check is whether z is still as close to f(z)
            as it was, and whether the adjoint converged. If `backward_steps` stops before z0, z is compared there.
        gradient: "exact" is the gradient of the iteration that ran. "implicit" is that of the fixed point, as in
            classical equilibrium models: the adjoint equation is solved at the last state, with the same beta, gamma,
            max_steps and tol. It is faster, wrong if the iteration has not converged, and z0 gets no gradient.
        keep: The number of last evaluations whose graphs are stored, so that the backward pass does not evaluate f
            again there. 0 needs the least memory; 2 * max_steps needs the time and the memory of a stored graph.
        backward_steps: None differentiates all steps. A number k truncates the gradient to the last k steps; z0 then
            gets no gradient unless k is at least the number of steps. With a `tol`, the states of the last k steps are
            stored until it is known where the iteration ends, and these steps are then taken again.
        capture: Whether to capture one forward step and one backward step as CUDA graphs, including f, and to replay
            them: for an f whose kernels take less time than their launches. f must be a module without hooks and random
            numbers, and must read only its arguments, parameters and buffers. The first solve with inputs of a kind
            (shapes, dtypes, modes) runs as usual, and the second one captures. If steps cannot be captured, on the CPU
            for example, a warning says why, once, and the solve runs as usual.
    """

    beta: float = 0.5
    gamma: float = 1.0
    schedule: Any = None
    max_steps: int = 8
    tol: float | None = None
    per_example: bool = False
    compact: bool = False
    indexed: bool = False
    aux: bool | str = False
    state: str | Exact = "auto"
    check: str | None = "warn"
    gradient: str = "exact"
    keep: int = 0
    backward_steps: int | None = None
    capture: bool = False

    def __post_init__(self) -> None:
        _check_pair("beta", self.beta, "gamma", self.gamma)
        object.__setattr__(self, "schedule", _pairs(self.schedule))
        for name in ("per_example", "compact", "indexed", "aux", "capture"):
            if not isinstance(getattr(self, name), bool) and (name, self.aux) != ("aux", "list"):
                also = ' or "list"' if name == "aux" else ""
                raise TypeError(f"{name} = {getattr(self, name)!r} must be True or False{also}")
        _at_least("max_steps", self.max_steps, 1, "a step evaluates f twice")
        _at_least("keep", self.keep, 0, "the number of last evaluations whose graphs are kept")
        if self.backward_steps is not None:
            _at_least("backward_steps", self.backward_steps, 1, "the number of last steps to differentiate; None: all")
        if self.tol is not None and not _is_number(self.tol):
            raise TypeError(f"tol = {self.tol!r} must be a number, or None to take exactly max_steps steps")
        if self.tol is not None and not 0 < self.tol <= sys.float_info.max:
            self._refuse("tol", "must be positive and finite, or None to take exactly max_steps steps")
        if self.per_example and self.tol is None:
            self._refuse("per_example", "needs a tol, at which an example stops: for example tol=1e-3")
        if self.compact and not self.per_example:
            self._refuse("compact", "leaves out examples that have stopped: set per_example=True and a tol")
        if self.compact and self.aux:
            self._refuse("aux", "would have different examples in every evaluation: leave it out with compact=True")
        if self.per_example and self.backward_steps is not None:
            why = "counts steps of the batch, in which some examples have already stopped"
            self._refuse("backward_steps", f"{why}: leave it out with per_example=True")
        if self.state not in ("auto", "float64", "exact") and not isinstance(self.state, Exact):
            self._refuse("state", "must be 'auto', 'float64', 'exact' or revdeq.Exact(fraction_bits=...)")
        if self.check not in CHECKS:
            self._refuse("check", "must be 'warn', 'raise' or None")
        if self.gradient not in GRADIENTS:
            fixed_point = "'implicit' (of the fixed point, by the implicit function theorem)"
            self._refuse("gradient", f"must be 'exact' (of the iteration) or {fixed_point}")
        for name, none in (("keep", 0), ("backward_steps", None), ("aux", False)):
            if self.gradient == "implicit" and getattr(self, name) != none:
                self._refuse(name, "applies to gradient='exact' only: leave it out with gradient='implicit'")

    def _refuse(self, name: str, why: str) -> None:
        raise ValueError(f"{name} = {getattr(self, name)!r} {why}")

    @property
    def pairs(self) -> tuple[tuple[float, float], ...]:
        """The pairs of the schedule."""
        return self.schedule or ()


NAMES = tuple(field.name for field in dataclasses.fields(Options))


def options_from(keywords: dict[str, Any], names: Sequence[str] = NAMES) -> Options:
    for name in keywords:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
            value = keywords[name]
            if isinstance(value, torch.Tensor):
                raise TypeError(f"unknown keyword {name}, a tensor: pass f's tensors positionally: solve(f, z0, x)")
            raise TypeError(f"unknown keyword {name} = {value!r}: {hint}")
    is_immutable = type(keywords.get("schedule", ())) in (tuple, type(None))  # a tensor may change, and holds its graph
    try:
        return _options(**keywords) if is_immutable else Options(**keywords)
    except TypeError:  # not hashable, or invalid
        return Options(**keywords)


_options = functools.lru_cache(256, typed=True)(Options)  # 1 and True are equal, but not both are valid


F = TypeVar("F", bound=Callable[..., Any])


def with_options(*, only: Sequence[str] = NAMES) -> Callable[[F], F]:
    """Decorator: gives a function with **options their names, defaults and documentation, which replaces the line
    "{options}" of its docstring. only: the options that apply to it."""

    def decorated(function: F) -> F:
        signature = inspect.signature(function)
        shown = [
            inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
            for field in dataclasses.fields(Options)
            if field.name in only
        ]
        others = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
        function.__signature__ = signature.replace(parameters=[*others, *shown])  # type: ignore[attr-defined]
        if function.__doc__:
            function.__doc__ = documented(function.__doc__, only)
        return function

    return decorated


def documented(docstring: str, only: Sequence[str] = NAMES) -> str:
    """The docstring with the options in place of the line "{options}" in its `Args:`."""
    if not docstring:  # python -OO
        return docstring
    lines = inspect.cleandoc(Options.__doc__ or "").splitlines()
    before, _, after = docstring.partition("{options}")
    indent = " " * (len(before) - len(before.rstrip(" ")))
    described, shown = [], False
    for line in (line.removeprefix("    ") for line in lines[lines.index("Args:") + 1 :]):
        if not line.startswith(" "):  # the first line of an option
            shown = line.partition(":")[0] in only
        if shown:
            described.append(line)
    return before + f"\n{indent}".join(described) + after


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _float32(x: Any) -> float:
    try:
        return float32(float(x))
    except OverflowError:
        return math.inf


MOST = {"beta": "(0, 2) and not 1", "gamma": "(0, 3]"}


def _check_pair(beta_name: str, beta: Any, gamma_name: str, gamma: Any) -> None:
    for kind, name, value in (("beta", beta_name, beta), ("gamma", gamma_name, gamma)):
        if not _is_number(value):
            raise TypeError(f"{name} = {value!r} must be a number in {MOST[kind]}; `schedule` takes one for each step")
        rounded = _float32(value)
        if not rounded > 0 or not (rounded < 2 or (kind == "gamma" and rounded <= 3)):
            raise ValueError(
                f"{name} = {value!r} must be in {MOST[kind]}, also after rounding to float32: outside, the iteration "
                "converges for no f; revdeq.tune finds a good one"
            )
    if Coefficients.rounded(beta, gamma).a == 0:
        raise ValueError(
            f"{beta_name} = {beta!r} must not be 1, also after rounding to float32: the backward pass divides by "
            "1 - beta; 0.5 to 0.9 work well, or use revdeq.tune"
        )


def _pairs(schedule: Any) -> tuple[tuple[float, float], ...] | None:
    """The pairs of a schedule in any of its forms."""
    if schedule is None:
        return None
    schedule = getattr(schedule, "schedule", schedule)  # the result of revdeq.tune
    if schedule is None:
        raise ValueError(
            "schedule has no pairs: tune with schedule=True, or pass beta=found.beta, gamma=found.gamma instead"
        )
    if isinstance(schedule, torch.Tensor):
        if schedule.dim() != 2 or schedule.shape[1] != 2:
            raise ValueError(
                f"schedule has shape {tuple(schedule.shape)}: it must be (K, 2), a beta and a gamma for each half-step"
            )
        schedule = schedule.tolist()
    try:
        pairs = [tuple(pair) for pair in schedule]
    except TypeError:
        pairs = [()]
    if any(len(pair) != 2 for pair in pairs):
        raise TypeError(f"schedule = {schedule!r} must be a sequence of pairs (beta, gamma), one for each half-step")
    for i, (beta, gamma) in enumerate(pairs):
        _check_pair(f"schedule[{i}][0]", beta, f"schedule[{i}][1]", gamma)
    return tuple((float(beta), float(gamma)) for beta, gamma in pairs)


def _at_least(name: str, value: Any, least: int, meaning: str) -> None:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} = {value!r} must be an integer of at least {least}: {meaning}") from None
    if number < least:
        raise ValueError(f"{name} = {value!r} must be at least {least}: {meaning}")
