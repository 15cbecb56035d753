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

    def encoded(self, x: Tensor) -> Any:
        """The half-steps of a new state with the numbers of x."""
        return self.half_step.encoded(x, self.step)

    def check(self, half_steps: Sequence[Any]) -> None:
        """Raise if a state has overflowed."""


@dataclass(frozen=True)
class Integers(Float64):
    """The exact state: integers, with 1 - beta rounded to a fraction."""

    name = "exact"

    def encoded(self, x: Tensor) -> Any:
        half_step = self.half_step.encoded(x, self.step)
        report(half_step.alarm, functools.partial(self._judge, what="z0"))
        return half_step

    def check(self, half_steps: Sequence[Any]) -> None:
        worst = functools.reduce(torch.maximum, [h.alarm for h in half_steps]).amax()
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
