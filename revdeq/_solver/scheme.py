"""How the solver keeps its states: in float64, the paper's scheme, or as integers, without any loss."""

import abc
import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .. import kernels
from ..kernels import reference_exact as exact
from ..kernels.half_step import Coefficients, HalfStep
from ..kernels.radix import LARGEST_DENOMINATOR, Radix
from .deferred import report
from .inputs import State


class Scheme(abc.ABC):
    """How the solver stores y and z, and which kernels step them, with which coefficients.

    remedy: what to do when the way back is lost. step: the coefficients of every step, after rounding.
    """

    remedy: ClassVar[str]

    step: Any

    @property
    def beta(self) -> float:
        return self.step.beta

    @property
    def gamma(self) -> float:
        return self.step.gamma

    @abc.abstractmethod
    def start(self, initial: Sequence[Tensor], like: State) -> State:
        """The initial state, laid out like `like`."""

    @abc.abstractmethod
    def read(self, state: State, like: State) -> State:
        """The state in the dtypes that f reads."""

    @abc.abstractmethod
    def bind(self, state: State, copy: State, half_steps: int, spilled: list[State] | None = None) -> list[Any]:
        """Half-steps; with `spilled`, to undo as many as are given."""

    @abc.abstractmethod
    def make_room(self, half_steps: list[Any]) -> None:
        """Allocate what will be put aside in all of the steps that were announced."""

    @abc.abstractmethod
    def check(self, half_steps: list[Any], step: int | None) -> None:
        """Raise if a state did not fit, in this step, or, where a look would wait for the device, in any."""


@dataclass(frozen=True)
class Float64(Scheme):
    """The paper's mixed precision."""

    remedy: ClassVar[str] = (
        "Either the float64 state was rounded beyond recovery: "
        'use state="exact", fewer steps or a beta further from 1. Or '
    )
    step: Coefficients
    half_step: type[HalfStep]

    def start(self, initial: Sequence[Tensor], like: State) -> State:
        return [torch.empty_like(c, dtype=torch.float64).copy_(x) for x, c in zip(initial, like, strict=True)]

    def read(self, state: State, like: State) -> State:
        return [torch.empty_like(x, dtype=c.dtype).copy_(x) for x, c in zip(state, like, strict=True)]

    def bind(self, state: State, copy: State, half_steps: int, spilled: list[State] | None = None) -> list[HalfStep]:
        return [self.half_step(x, c) for x, c in zip(state, copy, strict=True)]

    def make_room(self, half_steps: list[HalfStep]) -> None:
        """Nothing is put aside."""

    def check(self, half_steps: list[HalfStep], step: int | None) -> None:
        """Every float fits; what is not finite shows in the norms."""


@dataclass(frozen=True)
class Exact:
    """A state of integers, whose half-steps are undone to the last bit, whatever beta and however many.

    fraction_bits: of the fixed-point numbers that the state consists of. 24 of 32 bits hold magnitudes below 128
        with a resolution of 6e-8.
    """

    fraction_bits: int = 24

    def __post_init__(self) -> None:
        if not isinstance(self.fraction_bits, int) or not 1 <= self.fraction_bits <= 30:
            raise ValueError(f"fraction_bits = {self.fraction_bits!r} must be an integer from 1 to 30; 24 is usual")


@dataclass(frozen=True)
class Integers(Scheme):
    """The scheme that `Exact` asks for, with 1 - beta a fraction."""

    remedy: ClassVar[str] = "The exact state loses nothing: "
    step: Radix
    half_step: type[exact.HalfStep]

    def start(self, initial: Sequence[Tensor], like: State) -> State:
        state = []
        for x, c in zip(initial, like, strict=True):
            number, bad = exact.integer(x, self.step)
            if x.numel():
                report(torch.where(bad, exact.magnitude_bits(x), 0).max(), self._judge_start)
            state.append(torch.empty_like(c, dtype=torch.int64).copy_(number << 32))
        return state

    def read(self, state: State, like: State) -> State:
        copies = [torch.empty_like(x, dtype=c.dtype) for x, c in zip(state, like, strict=True)]
        for x, c in zip(state, copies, strict=True):
            exact.decode(x >> 32, c, self.step)
        return copies

    def bind(self, state: State, copy: State, half_steps: int, spilled: list[State] | None = None) -> list[Any]:
        backs = spilled if spilled is not None else [None] * len(state)
        rows = zip(state, copy, backs, strict=True)
        return [self.half_step(x, c, [self.step] * half_steps, back) for x, c, back in rows]

    def make_room(self, half_steps: list[exact.HalfStep]) -> None:
        for half_step in half_steps:
            half_step.make_room()

    def check(self, half_steps: list[exact.HalfStep], step: int | None) -> None:
        alarms = [h.alarm if step is None else h.alarm[step - 1 : step] for h in half_steps]
        worst = functools.reduce(torch.maximum, alarms).amax(1)
        report(worst, functools.partial(self._judge, first_step=step or 1))

    def _judge_start(self, bits: Tensor) -> None:
        if bits:
            raise self._error(int(bits), "z0 does not fit the exact state", "z0", "start from finite numbers")

    def _judge(self, bits: Tensor, first_step: int) -> None:
        for i, value in enumerate(bits.tolist()):
            if value:
                what = f"the exact state was left in step {first_step + i}"
                raise self._error(value, what, "f", "try a smaller beta, or an f that contracts")

    def _error(self, bits: int, what: str, name: str, if_not_finite: str) -> ArithmeticError:
        (size,) = struct.unpack("<f", struct.pack("<i", bits))
        if not math.isfinite(size):
            return FloatingPointError(f"{what}: {name} is not finite in float32; {if_not_finite}")
        fraction_bits, limit = self.step.fraction_bits, 2.0 ** (31 - self.step.fraction_bits)
        needed = 30 - max(0, math.frexp(max(size, limit))[1])
        remedy = f"use state=revdeq.Exact(fraction_bits={needed}), or " if needed >= 1 else ""
        return OverflowError(
            f"{what}: with {name} at {size:.3g}, where {fraction_bits} fraction bits hold magnitudes below {limit:g}; "
            f"{remedy}normalise {name}"
        )


def scheme_for(state: Any, beta: float, gamma: float, device: torch.device) -> Scheme:
    radix = checked_radix(state, beta, gamma)
    if radix is None:
        return Float64(Coefficients.rounded(beta, gamma), kernels.half_step_for(device, "float64"))
    return Integers(radix, kernels.half_step_for(device, "exact"))


def checked_radix(state: Any, beta: float, gamma: float = 1.0) -> Radix | None:
    """Of the integer state, if that is asked for."""
    if state == "float64":
        return None
    if state == "exact":
        state = Exact()
    if not isinstance(state, Exact):
        raise ValueError(f"state = {state!r} must be 'float64', 'exact' or revdeq.Exact(fraction_bits=...)")
    radix = Radix.nearest(beta, state.fraction_bits, gamma)
    if radix.p == 0 or radix.p >= radix.d:
        raise ValueError(
            f"beta = {beta:.6g} has no usable fraction: state='exact' takes 1 - beta = p / d with d <= "
            f"{LARGEST_DENOMINATOR}, neither 0 nor 1; use beta = 0.5, 0.8 or 0.9, for example"
        )
    return radix
