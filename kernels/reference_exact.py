"""The specification of the exact state: its loops, with the objects of exact_state.py, and its half-steps.

A state is one int64 per element. Its high 32 bits are a signed fixed-point number Y, in units of 2^-G; its low 32
bits are a remainder R >= 0, which stores the remainders of divisions. With a = 1 - beta = s p / d in lowest
terms (s = 1 or -1) and F = g in units of 2^-G, rounded to the nearest integer, a half-step and its inverse are

    e = R mod p, R = floor(R / p)                      T = Y d + (R mod d), R = floor(R / d)
    T = s (p Y + e) + (d - s p) F                      U = s (T - (d - s p) F)
    Y = floor(T / d), R = R d + (T mod d)              Y = floor(U / p), R = R p + (U mod p)

All numbers are integers, so that each inverts the other exactly, for every beta and any number of steps. If gamma = 1,
g is f. Otherwise g is gamma f + (1 - gamma) z, where z is what f read. It is computed in float64 if f or z is float64,
and otherwise in float32: gamma and 1 - gamma are rounded to that dtype, and each operation rounds once.

A half-step multiplies R by about d / p. Before R overflows 32 bits, it is spilled to a buffer and restarts from 0. f
reads Y 2^-G, rounded to its dtype. No tensor is float64 unless f's are.
"""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import Self

from . import half_step, reference
from .half_step import LANES, Adjoints, Compared
from .radix import Radix
from .reference import Function, evaluate


@torch.no_grad()
def iterate(f: Function, y: Any, z: Any, read: Tensor, steps: int) -> Tensor:
    """Steps of two `ExactState`s, y and z. f reads the numbers of z first. Returns what it would read of z next."""
    for _ in range(steps):
        for state in (y, z):
            read = state.relax(f(read))
    return read


@torch.no_grad()
def invert(f: Function, y: Any, z: Any, read: Tensor, steps: int) -> Tensor:
    """Their inverse. f reads the numbers of y first. Returns what it read before the first step, to the last bit."""
    for _ in range(steps):
        for state in (z, y):
            read = state.invert(f(read))
    return read


@torch.no_grad()
def gradient(f: Function, y: Any, z: Any, read: Tensor, grad: Tensor, beta: float, steps: int) -> Tensor:
    """Algorithm 1, as in reference.py."""
    seed, y_bar, z_bar = beta * grad, torch.zeros_like(grad), beta * grad
    for _ in range(steps):
        for state, adjoint in ((z, y_bar), (y, z_bar)):
            f_read, vjp = evaluate(f, read, seed)
            read, seed = state.invert_adjoint(f_read, adjoint, vjp)
    return (z_bar + (1 - beta) * y_bar) / beta


def relaxed(y: Tensor, r: Tensor, g: Tensor, step: Radix) -> tuple[Tensor, Tensor, Tensor]:
    """Y and R after the half-step, and a mask of overflows, of f or of Y."""
    number, bad = integer(g, step)
    t = step.sign * (step.p * y + r % step.p) + step.weight * number
    y = t // step.d
    return y, r // step.p * step.d + t % step.d, bad | (y < -(2**31)) | (y >= 2**31)


def inverted(y: Tensor, r: Tensor, g: Tensor, step: Radix) -> tuple[Tensor, Tensor]:
    """Y and R before the half-step."""
    t = y * step.d + r % step.d
    u = step.sign * (t - step.weight * integer(g, step)[0])
    return u // step.p, r // step.d * step.p + u % step.p


def mixed(f_z: Tensor, z: Tensor | None, step: Radix) -> Tensor:
    """g, from f and what f read."""
    if z is None:
        return f_z
    dtype = torch.float64 if torch.float64 in (f_z.dtype, z.dtype) else torch.float32
    return step.gamma * f_z.to(dtype) + (1 - step.gamma) * z.to(dtype)


def integer(g: Tensor, step: Radix) -> tuple[Tensor, Tensor]:
    """g in units of 2^-G, and a mask of overflows (with 0 in their place)."""
    whole = (g.to(torch.promote_types(g.dtype, torch.float32)) / step.unit).round()
    bad = ~(whole.abs() < 2.0**31)
    return torch.where(bad, 0.0, whole).to(torch.int64), bad


def decode(y: Tensor, copy: Tensor, step: Radix) -> Tensor:
    return copy.copy_(y.to(half_step.wide(copy.dtype)) * step.unit)


def magnitude_bits(f_z: Tensor) -> Tensor:
    """The bits of the magnitudes, in their order, with NaN last; never 0."""
    return f_z.to(torch.float32).abs().view(torch.int32).clamp(min=1)


class HalfStep(half_step.HalfStep):
    """The half-steps of an integer state.

    done: the number of half-steps taken and not inverted. alarm: LANES times 0, or the magnitude, as the bits of a
    float32, of an f that overflowed or made the state overflow, or of an initial value: then the state is meaningless.
    """

    sums = torch.float32
    alarm: Tensor

    def __init__(self, state: Tensor, step: Radix) -> None:
        super().__init__(state, step)
        self.done = 0
        self.alarm = torch.zeros(LANES, dtype=torch.int32, device=state.device)
        self._spilled: list[Tensor] = []  # remainders, 4 bytes per element each, the latest last

    @classmethod
    def encoded(cls, x: Tensor, step: Radix) -> Self:
        self = cls(torch.empty_like(x, dtype=torch.int64), step)
        self._encode(self.in_order(x))
        return self

    def decoded(self, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
        state = self.state if rows is None else self.state[rows]
        return decode(state >> 32, torch.empty_like(state, dtype=dtype), self.step)

    def duplicate(self) -> Self:
        other = super().duplicate()
        other.done, other.alarm, other._spilled = self.done, self.alarm, [*self._spilled]  # inverses only read them
        return other

    def _spill(self) -> Tensor | None:
        """Where this half-step spills its remainder."""
        spills = self.done and self.done % self.step.free_half_steps == 0
        self.done += 1
        if not spills:
            return None
        self._spilled.append(torch.empty_like(self.state, dtype=torch.int32))
        return self._spilled[-1]

    def _take_back(self) -> Tensor | None:
        """What the half-step that is inverted spilled."""
        self.done -= 1
        return self._spilled.pop() if self.done and self.done % self.step.free_half_steps == 0 else None

    def _encode(self, x: Tensor) -> None:
        number, bad = integer(x, self.step)
        self.state.copy_(number << 32)
        self._raise_alarm(x, bad)

    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        spill, before, r = self._spill(), self.state >> 32, self.state & 0xFFFFFFFF
        if spill is not None:
            spill.copy_(r)  # its 32 bits, as an int32
            r.zero_()
        y, r, bad = relaxed(before, r, mixed(f_z, z, self.step), self.step)
        if partial is not None:
            for i, x in enumerate((y - before, y)):
                partial[i] = reference.lane_sums((x.to(torch.float32) * self.step.unit).square())
        self.state.copy_((y << 32) | r)
        decode(y, copy, self.step)
        self._raise_alarm(f_z, bad)

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints, compared: Compared) -> None:
        """A nonzero remainder in the initial state is an error too."""
        after = self.state >> 32
        y, r = inverted(after, self.state & 0xFFFFFFFF, mixed(f_z, z, self.step), self.step)
        reference.update(adjoints, self.step)
        if compared:
            error = (y - integer(copy, self.step)[0]).to(torch.float32) * self.step.unit + r.to(torch.float32)
            reference.lane_maxima(error, after.to(torch.float32) * self.step.unit, *compared)
            return
        if (spilled := self._take_back()) is not None:
            r = spilled.to(torch.int64) & 0xFFFFFFFF
        self.state.copy_((y << 32) | r)
        decode(y, copy, self.step)

    def _raise_alarm(self, f_z: Tensor, bad: Tensor) -> None:
        """The alarm of the first lane."""
        if bad.numel():
            self.alarm[0] = torch.maximum(self.alarm[0], torch.where(bad, magnitude_bits(f_z), 0).max())
