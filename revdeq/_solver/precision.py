"""The formats of y and z, and the coefficients of every half-step: float64 as in the paper, or integers, without loss.

The kernels' half-steps are bound to a state and to its copy in the dtype that f reads.
"""

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _device, kernels
from ..kernels.half_step import Coefficients
from ..kernels.radix import LARGEST_DENOMINATOR, Radix
from .deferred import report
from .options import Exact, Options

SAFE_BITS = 32
"""The number of its 53 bits that a float64 state may lose: every run that lost fewer was exact."""

CHUNK = 32
"""The exact state is told of so many half-steps in advance."""


@dataclass(frozen=True)
class Float64:
    """The paper's mixed precision.

    schedule, step: the coefficients of the first half-steps, and of all others. half_step: the kernels' class.
    """

    schedule: tuple[Any, ...]
    step: Any
    half_step: Any
    name = "float64"

    def at(self, k: int) -> Any:
        """The coefficients of half-step k."""
        return self.schedule[k] if k < len(self.schedule) else self.step

    def adjoint_at(self, k: int) -> Any:
        """The coefficients of the adjoint of x_k, the result of half-step k, which is stored multiplied by b_k:

        adjoint_k = a adjoint_{k+2} + b vjp_{k+1} + c adjoint_{k+1}"""
        if k >= len(self.schedule):
            return self.step
        now, after, last = self.at(k), self.at(k + 1), self.at(k + 2)
        return Coefficients(last.a * now.b / last.b, now.b, after.c * now.b / after.b)

    def encoded(self, x: Tensor) -> Tensor:
        """The state of an initial value."""
        return x.to(torch.float64, copy=True)

    def bound(self, state: Tensor, like: Tensor, which: int) -> Any:
        """The half-steps of y (0) or z (1) for a state, with copies like this tensor, in memory of their own."""
        return self.half_step(state, like)

    def decoded(self, state: Tensor, dtype: torch.dtype) -> Tensor:
        """The numbers of a state, in new memory."""
        return torch.empty_like(state, dtype=dtype).copy_(state)

    def advance(self, half_step: Any, which: int) -> None:
        """Prepare the next half-step."""

    def check(self, half_steps: Sequence[Any], first: int) -> None:
        """Raise if a state overflowed in a step from `first` on."""


@dataclass(frozen=True)
class Integers(Float64):
    """The exact state: integers, with 1 - beta rounded to a fraction."""

    name = "exact"

    def encoded(self, x: Tensor) -> Tensor:
        state, alarm = self.half_step.encoded(x, torch.empty_like(x), self.step)
        report(alarm, functools.partial(self._judge, what="z0"))
        return state

    def bound(self, state: Tensor, like: Tensor, which: int) -> Any:
        return self.half_step(state, like, self._announced(0, which))

    def decoded(self, state: Tensor, dtype: torch.dtype) -> Tensor:
        return self.half_step.decoded(state, dtype, self.step)

    def advance(self, half_step: Any, which: int) -> None:
        done = half_step.done
        if done == len(half_step.plan.steps):
            half_step.announce(self._announced(done, which))

    def _announced(self, done: int, which: int) -> list[Radix]:
        return [self.at(2 * n + which) for n in range(done, done + CHUNK)]

    def check(self, half_steps: Sequence[Any], first: int) -> None:
        worst = functools.reduce(torch.maximum, [h.alarm[first : h.done].amax() for h in half_steps])
        report(worst, functools.partial(self._judge, what="f"))

    def _judge(self, bits: Tensor, what: str) -> None:
        if not (value := int(bits.max()) if bits.numel() else 0):
            return
        (size,) = struct.unpack("<f", struct.pack("<i", value))
        if not math.isfinite(size):
            raise FloatingPointError(f"{what} is not finite in float32: start from finite numbers, or use a smaller beta")
        raise OverflowError(
            f"{what} reached {size:.3g} and overflowed the exact state, whose magnitudes must stay below "
            f"{2.0 ** (31 - self.step.fraction_bits):g} with {self.step.fraction_bits} fraction bits: use fewer "
            "(state=revdeq.Exact(fraction_bits=...)), normalize it, or find a beta that converges with revdeq.tune"
        )


def duplicate(half_step: Any, copy: Tensor) -> Any:
    """Another half-step with the same state, so that both can be stepped."""
    other = half_step.of(half_step.state.clone(), copy)
    other.spilled = list(half_step.spilled)  # which inverses only read
    return other


def precision_for(options: Options, initial: Sequence[Tensor]) -> Float64:
    """The format for these options and initial tensors."""
    device = initial[0].device
    steps, radices = coefficients(options)
    if options.state == "float64" or not radices or (options.state == "auto" and _is_safe(options, steps, initial)):
        kernels.backends.say_once_what_is_missing(device, "float64")
        return Float64(steps[1:], steps[0], kernels.half_step_for(device, "float64"))
    return Integers(radices[1:], radices[0], kernels.half_step_for(device, "exact"))


@functools.lru_cache(64)
def coefficients(options: Options) -> tuple[tuple[Coefficients, ...], tuple[Radix, ...]]:
    """The rounded coefficients of both formats: first the constant pair, then the schedule. With state="auto" they are
    the same numbers."""
    pairs = [(options.beta, options.gamma), *(options.schedule or ())]
    if options.state == "float64":
        return tuple(Coefficients.rounded(*pair) for pair in pairs), ()
    bits = options.state.fraction_bits if isinstance(options.state, Exact) else Exact().fraction_bits
    radices = tuple(Radix.nearest(beta, bits, gamma) for beta, gamma in pairs)
    if radices[0].p >= radices[0].d:
        if options.state != "auto":
            raise ValueError(
                f"beta = {options.beta:.6g} has no usable fraction: state='exact' needs 1 - beta = p / d with "
                f"d <= {LARGEST_DENOMINATOR}, and not 1; use for example beta = 0.5, 0.8 or 0.9"
            )
        return tuple(Coefficients.rounded(*pair) for pair in pairs), ()
    return tuple(Coefficients.rounded(r.beta, gamma) for r, (_, gamma) in zip(radices, pairs, strict=True)), radices


def _is_safe(options: Options, steps: Sequence[Coefficients], initial: Sequence[Tensor]) -> bool:
    """Whether a float64 state is safe: no step is inverted, or f computes in float64, or few bits are lost; and whether
    the device supports it."""
    if not _device.has_float64(initial[0].device):
        return False
    if not torch.is_grad_enabled() or options.gradient == "implicit" or any(x.dtype == torch.float64 for x in initial):
        return True
    end = 2 * options.max_steps
    first = end - 2 * min(options.max_steps, options.backward_steps or options.max_steps)
    scheduled = steps[1:][first:end]
    lost = sum(map(_bits, scheduled)) + (end - first - len(scheduled)) * _bits(steps[0])
    return lost <= SAFE_BITS


@functools.cache
def _bits(step: Coefficients) -> float:
    return math.log2((1 + abs(step.b)) / abs(step.a))
