"""The exact half-steps in plain PyTorch: the specification of the integer state.

A state is one int64 per element. Its high 32 bits are a signed fixed-point number Y, in units of 2^-G; its low
32 bits are a remainder R >= 0, which keeps what a division would lose. With a = 1 - beta = s p / d in lowest
terms (s = 1 or -1) and F = f in units of 2^-G, rounded to the nearest integer, a half-step and its inverse are

    e = R mod p, R = floor(R / p)                      T = Y d + (R mod d), R = floor(R / d)
    T = s (p Y + e) + (d - s p) F                      U = s (T - (d - s p) F)
    Y = floor(T / d), R = R d + (T mod d)              Y = floor(U / p), R = R p + (U mod p)

They are integers throughout, so that each undoes the other to the last bit, whatever beta and however often.
R grows by d / p in a half-step, and before it would outgrow 32 bits it is put aside and starts again from 0.

f reads Y 2^-G, rounded to its dtype. No tensor is float64 unless f's are.
"""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from . import reference

LARGEST_DENOMINATOR = 64


@dataclass(frozen=True)
class Radix:
    """1 - beta = sign p / d, and the number G of fraction bits of the state."""

    sign: int
    p: int
    d: int
    fraction_bits: int

    @classmethod
    def nearest(cls, beta: float, fraction_bits: int) -> "Radix":
        """The fraction nearest to 1 - beta with a denominator of at most 64. It may be 0 / 1."""
        a = Fraction(1 - Fraction(beta)).limit_denominator(LARGEST_DENOMINATOR)
        return cls(-1 if a < 0 else 1, abs(a.numerator), a.denominator, fraction_bits)

    @property
    def a(self) -> float:
        return self.sign * self.p / self.d

    @property
    def beta(self) -> float:
        return self.weight / self.d

    @property
    def weight(self) -> int:
        return self.d - self.sign * self.p

    @property
    def unit(self) -> float:
        return 2.0**-self.fraction_bits

    @property
    def free_half_steps(self) -> int:
        """How many half-steps fit into 32 bits of remainder."""
        bound, count = 1, 0
        while (bound := -(-bound // self.p) * self.d) <= 2**32:
            count += 1
        return count

    def spills_before(self, half_step: int) -> bool:
        return half_step > 0 and half_step % self.free_half_steps == 0


def encode(x: Tensor, radix: Radix) -> Tensor:
    return integer(x, radix)[0] << 32


def integer(f: Tensor, radix: Radix) -> tuple[Tensor, Tensor]:
    """f in units of 2^-G, and where that is not a number of 32 bits (it is 0 there)."""
    scaled = f.to(torch.promote_types(f.dtype, torch.float32)) * 2.0**radix.fraction_bits
    whole = scaled.round()
    bad = ~(whole.abs() < 2.0**31)
    return torch.where(bad, 0.0, whole).to(torch.int64), bad


def decode(y: Tensor, copy: Tensor, radix: Radix) -> None:
    wide = torch.promote_types(copy.dtype, torch.float32)
    copy.copy_(y.to(wide) * radix.unit)


def relax(state: Tensor, f: Tensor, copy: Tensor, spill: Tensor | None, radix: Radix) -> Tensor:
    """Where f or the new state does not fit."""
    s, p, d = radix.sign, radix.p, radix.d
    y, r = _unpacked(state, spill)
    number, bad = integer(f, radix)
    t = s * (p * y + r % p) + radix.weight * number
    y = _floor_divide(t, d)
    state.copy_((y << 32) | (_floor_divide(r, p) * d + t % d))
    decode(y, copy, radix)
    return bad | (y < -(2**31)) | (y >= 2**31)


def relax_norms(state: Tensor, f: Tensor, copy: Tensor, spill: Tensor | None, radix: Radix) -> tuple[Tensor, Tensor]:
    """`relax`, and the partial sums of squares as in reference.py, but in float32."""
    before = state >> 32
    bad = relax(state, f, copy, spill, radix)
    after = state >> 32
    squares = [((x.to(torch.float32)) * radix.unit).square() for x in (after - before, after)]
    return torch.stack([reference.lane_sums(x) for x in squares]), bad


def previous(state: Tensor, f: Tensor, spill: Tensor | None, radix: Radix) -> tuple[Tensor, Tensor]:
    """Y and R before the half-step; `spill` is what was put aside then."""
    s, p, d = radix.sign, radix.p, radix.d
    y, r = _unpacked(state, None)
    t = y * d + r % d
    u = s * (t - radix.weight * integer(f, radix)[0])
    r = _floor_divide(r, d) * p + u % p
    return _floor_divide(u, p), r if spill is None else spill.to(torch.int64) & 0xFFFFFFFF


def invert(state: Tensor, f: Tensor, copy: Tensor, spill: Tensor | None, radix: Radix) -> None:
    y, r = previous(state, f, spill, radix)
    state.copy_((y << 32) | r)
    decode(y, copy, radix)


def update_adjoint(adjoint: Tensor, vjp: Tensor, radix: Radix) -> None:
    adjoint.copy_(radix.a * adjoint + radix.beta * vjp.to(adjoint.dtype))


def invert_compare(state: Tensor, f: Tensor, initial: Tensor, radix: Radix) -> Tensor:
    y, r = previous(state, f, None, radix)
    error = (y - integer(initial, radix)[0]).to(torch.float32) * radix.unit + r.to(torch.float32)
    value = (state >> 32).to(torch.float32) * radix.unit
    return torch.stack([reference.lane_maxima(error), reference.lane_maxima(value)])


def magnitude_bits(f: Tensor) -> Tensor:
    """Ordered like the magnitudes, NaN above them all, and never 0."""
    return f.to(torch.float32).abs().view(torch.int32).clamp(min=1)


def _unpacked(state: Tensor, spill: Tensor | None) -> tuple[Tensor, Tensor]:
    """Y and R. With a spill, R is put aside there."""
    r = state & 0xFFFFFFFF
    if spill is None:
        return state >> 32, r
    spill.copy_(r)  # its 32 bits, as an int32
    return state >> 32, torch.zeros_like(r)


def _floor_divide(x: Tensor, divisor: int) -> Tensor:
    return torch.div(x, divisor, rounding_mode="floor")


class HalfStep(reference.HalfStep):
    """An integer state, its copy in the dtype that f reads, and the radix.

    spilled: remainders put aside, 4 bytes per element each, the latest last. Given, half-steps are undone.
    alarm: [half-steps, LANES]: 0, or the bits of the magnitude (float32) of an f that did not fit, or with which
        the state did not fit; what was computed with it is worthless.
    """

    def __init__(
        self, state: Tensor, copy: Tensor, radix: Radix, half_steps: int, spilled: list[Tensor] | None = None
    ) -> None:
        super().__init__(state, copy, radix.beta)
        self.radix = radix
        self.done = half_steps if spilled is not None else 0
        self.spilled = [] if spilled is None else spilled
        self._room: list[Tensor] = []
        self.alarm = torch.zeros((half_steps, reference.LANES), dtype=torch.int32, device=state.device)

    def relax(self, f: Tensor) -> None:
        self._relax(f, self._put_aside())
        self.done += 1

    def relax_norms(self, f: Tensor) -> Tensor:
        partial = self._relax_norms(f, self._put_aside())
        self.done += 1
        return partial

    def invert(self, f: Tensor) -> None:
        self.done -= 1
        self._invert(f, None, None, self._take_back())

    def invert_adjoint(self, f: Tensor, adjoint: Tensor, vjp: Tensor) -> None:
        self.done -= 1
        self._invert(f, adjoint, vjp, self._take_back())

    def _put_aside(self) -> Tensor | None:
        if not self.radix.spills_before(self.done):
            return None
        self.spilled.append(self._room.pop() if self._room else torch.empty_like(self.state, dtype=torch.int32))
        return self.spilled[-1]

    def make_room(self) -> None:
        """Allocate now what all half-steps will put aside."""
        spills = sum(map(self.radix.spills_before, range(len(self.alarm))))
        try:
            self._room = [torch.empty_like(self.state, dtype=torch.int32) for _ in range(spills)]
        except RuntimeError as error:
            size = 8 * spills * self.state.numel() / 2**30
            raise MemoryError(
                f"the remainders of {len(self.alarm)} steps at beta = {self.beta:.6g} take {4 * spills} bytes per "
                f"element of y and of z, {size:.1f} GiB in all, for which there is no memory: use a smaller beta (0.5 "
                "takes none up to 32 steps) or fewer steps"
            ) from error

    def _take_back(self) -> Tensor | None:
        return self.spilled.pop() if self.radix.spills_before(self.done) else None

    def _relax(self, f: Tensor, spill: Tensor | None) -> None:
        self._raise_alarm(f, relax(self.state, f, self.copy, spill, self.radix))

    def _relax_norms(self, f: Tensor, spill: Tensor | None) -> Tensor:
        partial, bad = relax_norms(self.state, f, self.copy, spill, self.radix)
        self._raise_alarm(f, bad)
        return partial

    def _invert(self, f: Tensor, adjoint: Tensor | None, vjp: Tensor | None, spill: Tensor | None) -> None:
        invert(self.state, f, self.copy, spill, self.radix)
        if adjoint is not None and vjp is not None:
            update_adjoint(adjoint, vjp, self.radix)

    def invert_compare(self, f: Tensor, initial: Tensor, adjoint: Tensor | None, vjp: Tensor | None) -> Tensor:
        if adjoint is not None and vjp is not None:
            update_adjoint(adjoint, vjp, self.radix)
        return invert_compare(self.state, f, initial, self.radix)

    def _raise_alarm(self, f: Tensor, bad: Tensor) -> None:
        if bad.numel():
            self.alarm[self.done, 0] = torch.where(bad, magnitude_bits(f), 0).max()

    def _find_largest(self, f: Tensor) -> None:
        self.alarm[self.done, 0] = magnitude_bits(f).max()

    def partial_sums(self) -> Tensor:
        if self._partial is None:
            shape = (2, reference.chunk_count(self.state), reference.LANES)
            self._partial = self.state.new_empty(shape, dtype=torch.float32)
        return self._partial
