"""The formats of y and z: float64 as in the paper, or integers, which lose nothing."""

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.backends import backend_for
from ..kernels.half_step import Coefficients
from ..kernels.radix import Radix
from .check import report
from .options import Exact, Options


@dataclass(frozen=True)
class Float64:
    """The paper's mixed precision.

    step: the coefficients. kind: the kernels' class of half-steps.
    """

    step: Any
    kind: Any
    name = "float64"

    def half_step(self, x: Tensor, like: Tensor) -> Any:
        """The half-steps of a state with this initial value, in the memory layout of `like`."""
        in_layout = x if x.stride() == like.stride() else torch.empty_like(like, dtype=x.dtype).copy_(x)
        return self.kind.encoded(in_layout, self.step)

    def check(self, half_steps: Sequence[list[Any]], steps: int) -> None:
        """Raise if a state has overflowed in these steps."""


class Integers(Float64):
    """The exact state: integers, with 1 - beta rounded to a fraction."""

    name = "exact"

    def half_step(self, x: Tensor, like: Tensor) -> Any:
        half_step = super().half_step(x, like)
        report([half_step.alarm.amax()], functools.partial(self._judge, what="z0"))
        half_step.alarm.zero_()
        return half_step

    def check(self, half_steps: Sequence[list[Any]], steps: int) -> None:
        worst = functools.reduce(torch.maximum, [h.alarm for each in half_steps for h in each])
        report([worst.amax()], functools.partial(self._judge, what=f"f, or the state, within {steps} steps,"))

    def _judge(self, alarm: list[float], what: str) -> None:
        """The alarm has the bits of the largest magnitude that did not fit, or 0."""
        if not alarm[0]:
            return
        (size,) = struct.unpack("<f", struct.pack("<i", int(alarm[0])))
        if not math.isfinite(size):
            raise FloatingPointError(
                f"{what} is not finite in float32: start from finite numbers, or use a smaller beta"
            )
        raise OverflowError(
            f"{what} reached {size:.3g} and overflowed the exact state, whose magnitudes must stay below "
            f"{2.0 ** (31 - self.step.fraction_bits):g} with {self.step.fraction_bits} fraction bits: use fewer "
            '(state=revdeq.Exact(fraction_bits=...)), state="float64", normalize it, or find a beta that converges '
            "with revdeq.tune"
        )


def precision_for(options: Options, device: torch.device) -> Float64:
    """The format for these options."""
    name = "float64" if options.state == "float64" else "exact"
    kind: Any = backend_for(device).states[name]
    return _precision(kind, options.beta, options.gamma, options.state)


@functools.lru_cache(64)
def _precision(kind: Any, beta: float, gamma: float, state: str | Exact) -> Float64:
    return (Float64 if state == "float64" else Integers)(coefficients(beta, gamma, state), kind)


def coefficients(beta: float, gamma: float, state: str | Exact = "float64") -> Any:
    """The rounded coefficients. A float64 state rounds beta gamma and beta (1 - gamma) to float32, an exact state 1 -
    beta to a fraction."""
    if state == "float64":
        return Coefficients.rounded(beta, gamma)
    radix = Radix.nearest(beta, state.fraction_bits if isinstance(state, Exact) else Exact().fraction_bits, gamma)
    if radix.p >= radix.d:
        raise ValueError(
            f"beta = {beta:.6g} has no usable fraction: state='exact' needs 1 - beta = p / d with d <= 64, and not 1; "
            "use for example beta = 0.5, 0.8 or 0.9"
        )
    return radix
