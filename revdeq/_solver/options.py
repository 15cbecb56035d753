"""The options of a solve: their names for type checkers and editors, their defaults, and the checks of their values."""

import functools
import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypedDict

from ..kernels.half_step import Coefficients


@dataclass(frozen=True)
class Exact:
    """The exact state with a custom range. `state="exact"` is `Exact()`.

    Args:
        fraction_bits: The number of fractional bits, of 32, from 1 to 40. Magnitudes must stay below
            2^(31 - fraction_bits), and the resolution is 2^-fraction_bits: 128 and 6e-8 with 24 bits.

    Raises:
        ValueError: fraction_bits is not an integer from 1 to 40.

    Example:
        >>> revdeq.solve(f, z0, x, state=revdeq.Exact(fraction_bits=20)).state  # magnitudes up to 2048
        'exact'
    """

    fraction_bits: int = 24

    def __post_init__(self) -> None:
        if type(self.fraction_bits) is not int or not 1 <= self.fraction_bits <= 40:
            raise ValueError(
                f"fraction_bits = {self.fraction_bits!r} must be an integer from 1 to 40; the default is 24"
            )


class Keywords(TypedDict, total=False):
    """The keywords of `revdeq.solve`, `revdeq.steps`, `revdeq.verify` and `revdeq.RevDEQ`, as `revdeq.Options` explains
    them."""

    beta: float
    gamma: float
    max_steps: int
    tol: float | None
    per_example: bool
    indexed: bool
    aux: bool | str
    state: str | Exact
    check: str | None
    gradient: str
    keep: int


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a solve, which are keywords of `revdeq.solve` and attributes of `revdeq.RevDEQ`.

    Args:
        beta: The relaxation, in (0, 2) and not 1. Below 1 it tolerates an f that rotates, such as attention; above 1 it
            is faster if f only contracts, as convolutions do. `revdeq.tune` finds a good one.
        gamma: The damping of f, in (0, 3]: f(z) is replaced by (1 - gamma) z + gamma f(z).
        max_steps: The number of steps N, each of which evaluates f twice; with a `tol`, the maximum.
        tol: None takes exactly `max_steps` steps and never waits for the device. With tol > 0 the iteration stops after
            the first step whose relative change, `Solution.change`, is at most tol.
        per_example: With a `tol`, whether each example of a batch (the first dimension of z0) stops separately: it
            keeps its states, and `Solution.steps`, `change` and `converged` have an entry per example.
        indexed: Whether f is called as f(z, *args, evaluation=k), with k = 0 ... 2 * max_steps - 1, in both passes.
        aux: Whether f returns a pair (state, aux). `Solution.aux` is the sum of aux over all evaluations; with
            aux="list", the list of them.
        state: The format of y and z. "float64" is the paper's mixed precision, whose inverse steps divide by 1 - beta,
            which amplifies rounding errors. "exact" stores integers in the same 8 bytes, and its steps lose no bits:
            1 - beta is rounded to a fraction, and magnitudes must stay below 128 (or use
            `revdeq.Exact(fraction_bits=...)`).
        check: What to do if the backward pass fails to reconstruct z0, so that the gradient cannot be trusted: "warn",
            once per calling line, "raise", or None to skip the check.
        gradient: "exact" is the gradient of the iteration that ran. "implicit" is that of the fixed point, by the
            adjoint equation, with the same beta, gamma, max_steps and tol.
        keep: The number of last evaluations whose graphs are stored, so that the backward pass does not evaluate f
            again there.

    Raises:
        TypeError, ValueError: A value is not allowed; the message says which are.

    Example:
        >>> revdeq.Options(max_steps=12).beta
        0.5
    """

    beta: float = 0.5
    gamma: float = 1.0
    max_steps: int = 8
    tol: float | None = None
    per_example: bool = False
    indexed: bool = False
    aux: bool | str = False
    state: str | Exact = "float64"
    check: str | None = "warn"
    gradient: str = "exact"
    keep: int = 0

    def __post_init__(self) -> None:
        _check_pair(self.beta, self.gamma)
        tol, is_exact = self.tol, self.gradient == "exact"
        for name, holds, must in (
            ("max_steps", _is_count(self.max_steps, 1), "an integer of at least 1: a step evaluates f twice"),
            ("tol", tol is None or (_is_number(tol) and 0 < tol < math.inf), "positive and finite, or None"),
            ("indexed", isinstance(self.indexed, bool), "True or False"),
            ("per_example", isinstance(self.per_example, bool), "True or False"),
            ("per_example", not self.per_example or tol is not None, "False without a tol, at which an example stops"),
            ("aux", self.aux in (True, False, "list"), 'True, False or "list"'),
            ("state", self.state in ("float64", "exact") or isinstance(self.state, Exact),
             "'float64', 'exact' or revdeq.Exact(fraction_bits=...)"),
            ("check", self.check in ("warn", "raise", None), "'warn', 'raise' or None"),
            ("gradient", self.gradient in ("exact", "implicit"), "'exact' (of the iteration) or 'implicit' (of the "
             "fixed point)"),
            ("keep", _is_count(self.keep, 0), "an integer of at least 0"),
            ("keep", is_exact or not self.keep, "0 with gradient='implicit'"),
            ("aux", is_exact or not self.aux, "False with gradient='implicit'"),
        ):  # fmt: skip
            if not holds:
                raise ValueError(f"{name} = {getattr(self, name)!r} must be {must}")


NAMES = tuple(field.name for field in fields(Options))
_remembered = functools.lru_cache(256, typed=True)(Options)  # 1 and True are equal, but not both are valid


def options_from(keywords: Any) -> Options:
    """Checked options; a set of options that was checked before costs a microsecond."""
    try:
        return _remembered(**keywords)
    except TypeError:  # a list is not hashable, or a name is wrong
        for name, value in keywords.items():
            if name not in NAMES:
                raise TypeError(f"unknown keyword {name} = {value!r}: there are {', '.join(NAMES)}") from None
        return Options(**keywords)


SMALLEST = 2.0**-60
"""Of beta and gamma, so that float32 can represent their product."""


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def _is_count(x: Any, least: int) -> bool:
    return isinstance(x, Integral) and not isinstance(x, bool) and int(x) >= least


def _check_pair(beta: Any, gamma: Any) -> None:
    for name, value, most, text in (("beta", beta, 2, "(0, 2) and not 1"), ("gamma", gamma, 3, "(0, 3]")):
        if not _is_number(value):
            raise TypeError(f"{name} = {value!r} must be a number in {text}")
        if not SMALLEST <= value <= most:
            raise ValueError(f"{name} = {value!r} must be in {text}; revdeq.tune finds a good one")
    if beta == 2 or Coefficients.rounded(beta, gamma).a == 0:
        raise ValueError(
            f"beta = {beta!r} must not be 1 or 2: the backward pass divides by 1 - beta; revdeq.loop repeats f with a "
            "beta close to 1"
        )
