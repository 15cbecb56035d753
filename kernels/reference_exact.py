"""The exact half-steps in plain PyTorch: the specification of the integer state.

A state is one int64 per element. Its high 32 bits are a signed fixed-point number Y, in units of 2^-G; its low 32
bits are a remainder R >= 0, which stores the remainders of divisions. With a = 1 - beta = s p / d in lowest
terms (s = 1 or -1) and F = g in units of 2^-G, rounded to the nearest integer, a half-step and its inverse are

    e = R mod p, R = floor(R / p)                      T = Y d + (R mod d), R = floor(R / d)
    T = s (p Y + e) + (d - s p) F                      U = s (T - (d - s p) F)
    Y = floor(T / d), R = R d + (T mod d)              Y = floor(U / p), R = R p + (U mod p)

All are integers, so that each inverts the other exactly, for every beta and any number of steps. g is f if gamma = 1,
and otherwise gamma f + (1 - gamma) z, with z the copy of the other state that f read: in float64 if f or the copy is
float64, otherwise in float32, with gamma and 1 - gamma rounded to that dtype, and each operation rounded once.

R grows by a factor of d / p per half-step. Before it overflows 32 bits, it is spilled to a buffer and restarts from 0.

f reads Y 2^-G, rounded to its dtype. No tensor is float64 unless f's are.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from . import half_step, reference
from .half_step import LANES, Adjoints, Linear
from .radix import Plan, Radix
from .reference import Taking, taking


def encode(x: Tensor, radix: Radix) -> Tensor:
    return integer(x, radix)[0] << 32


def integer(g: Tensor, radix: Radix) -> tuple[Tensor, Tensor]:
    """g in units of 2^-G, and a mask of overflows (with 0 in their place)."""
    scaled = g.to(torch.promote_types(g.dtype, torch.float32)) * 2.0**radix.fraction_bits
    whole = scaled.round()
    bad = ~(whole.abs() < 2.0**31)
    return torch.where(bad, 0.0, whole).to(torch.int64), bad


def mixed(f: Tensor, read: Tensor | None, radix: Radix) -> Tensor:
    """g, from f and what f read."""
    if radix.gamma == 1 or read is None:
        return f
    wide = torch.float64 if torch.float64 in (f.dtype, read.dtype) else torch.float32
    return radix.gamma * f.to(wide) + (1 - radix.gamma) * read.to(wide)


def decode(y: Tensor, copy: Tensor, radix: Radix) -> None:
    wide = torch.promote_types(copy.dtype, torch.float32)
    copy.copy_(y.to(wide) * radix.unit)


def relax(
    state: Tensor,
    f: Tensor,
    read: Tensor | None,
    copy: Tensor,
    spill: Tensor | None,
    radix: Radix,
    each: Taking | None = None,
) -> Tensor:
    """Returns a mask of overflows, of f or of the new state."""
    s, p, d = radix.sign, radix.p, radix.d
    y, r = _unpacked(state, spill)
    number, bad = integer(mixed(f, read, radix), radix)
    t = s * (p * y + r % p) + radix.weight * number
    y = _floor_divide(t, d)
    after, bad = (y << 32) | (_floor_divide(r, p) * d + t % d), bad | (y < -(2**31)) | (y >= 2**31)
    if each is not None:  # a frozen example keeps its remainder
        after, bad = torch.where(each.moves, after, state), bad & each.moves
    state.copy_(after)
    decode(y if each is None else after >> 32, copy, radix)
    return bad


def previous(state: Tensor, f: Tensor, read: Tensor, spill: Tensor | None, radix: Radix) -> tuple[Tensor, Tensor]:
    """Y and R before the half-step; `spill` has the remainders that it spilled."""
    s, p, d = radix.sign, radix.p, radix.d
    y, r = _unpacked(state, None)
    t = y * d + r % d
    u = s * (t - radix.weight * integer(mixed(f, read, radix), radix)[0])
    r = _floor_divide(r, d) * p + u % p
    return _floor_divide(u, p), r if spill is None else spill.to(torch.int64) & 0xFFFFFFFF


def invert(
    state: Tensor, f: Tensor, copy: Tensor, spill: Tensor | None, radix: Radix, each: Taking | None = None
) -> None:
    """The copy holds what f read, until it is overwritten with the state."""
    y, r = previous(state, f, copy, spill, radix)
    before = (y << 32) | r
    state.copy_(before if each is None else torch.where(each.moves, before, state))
    decode(y if each is None else state >> 32, copy, radix)


def invert_compare(state: Tensor, f: Tensor, read: Tensor, initial: Tensor, floor: Tensor, radix: Radix) -> Tensor:
    """As in reference.py. A nonzero remainder in the initial state is an error too."""
    y, r = previous(state, f, read, None, radix)
    error = (y - integer(initial, radix)[0]).to(torch.float32) * radix.unit + r.to(torch.float32)
    value = (state >> 32).to(torch.float32) * radix.unit
    return reference.lane_ratios(error, value, floor)


def magnitude_bits(f: Tensor) -> Tensor:
    """The bits of the magnitudes, in their order, with NaN last; never 0."""
    return f.to(torch.float32).abs().view(torch.int32).clamp(min=1)


def _unpacked(state: Tensor, spill: Tensor | None) -> tuple[Tensor, Tensor]:
    """Y and R. With a spill, R is moved there and becomes 0."""
    r = state & 0xFFFFFFFF
    if spill is None:
        return state >> 32, r
    spill.copy_(r)  # its 32 bits, as an int32
    return state >> 32, torch.zeros_like(r)


def _floor_divide(x: Tensor, divisor: int) -> Tensor:
    return torch.div(x, divisor, rounding_mode="floor")


class HalfStep(half_step.HalfStep):
    """An integer state, its copy in the dtype that f reads, and the announced half-steps.

    steps: the radix of each half-step. Calls must pass the same ones, in this order.
    spilled: the spilled remainders, 4 bytes per element each, the latest last. If given, this object inverts half-steps
        instead of taking them.
    alarm: [half-steps, LANES]: 0, or the magnitude (the bits of a float32) of an f that overflowed or made the state
        overflow. Results computed from it are meaningless.
    """

    sums = torch.float32

    def __init__(
        self, state: Tensor, copy: Tensor, steps: Sequence[Radix], spilled: list[Tensor] | None = None
    ) -> None:
        super().__init__(state, copy)
        self.plan = Plan(steps)
        self.done = len(steps) if spilled is not None else 0
        self.spilled = [] if spilled is None else spilled
        self._room: list[Tensor] = []
        taken = len(steps) if spilled is None else 0  # inverses raise no alarm
        self.alarm = torch.zeros((taken, LANES), dtype=torch.int32, device=state.device)

    @staticmethod
    def encoded(x: Tensor, like: Tensor, radix: Radix) -> tuple[Tensor, Tensor]:
        """The state of x, with the layout of `like`, and an alarm as in `alarm`: 0, unless an x does not fit."""
        number, bad = integer(x, radix)
        alarm = torch.where(bad, magnitude_bits(x), 0).flatten()
        state = torch.empty_like(like, dtype=torch.int64).copy_(number << 32)
        return state, alarm.amax(0, keepdim=True) if x.numel() else alarm

    @staticmethod
    def decoded(state: Tensor, dtype: torch.dtype, radix: Radix) -> Tensor:
        """A state as f reads it."""
        copy = torch.empty_like(state, dtype=dtype)
        decode(state >> 32, copy, radix)
        return copy

    def relax(self, f: Tensor, read: Tensor | None, step: Radix) -> None:
        super().relax(f, read, step)
        self.done += 1

    def relax_norms(self, f: Tensor, read: Tensor | None, step: Radix) -> Tensor:
        partial = super().relax_norms(f, read, step)
        self.done += 1
        return partial

    def _is_announced(self, step: Radix) -> None:
        announced = self.plan.steps[self.done]
        assert step is announced or step == announced, "this is not the announced step"

    def _put_aside(self, step: Radix) -> Tensor | None:
        self._is_announced(step)
        if not self.plan.spills_before(self.done):
            return None
        self.spilled.append(self._room.pop() if self._room else torch.empty_like(self.state, dtype=torch.int32))
        return self.spilled[-1]

    def _take_back(self, step: Radix) -> Tensor | None:
        self.done -= 1
        self._is_announced(step)
        return self.spilled.pop() if self.plan.spills_before(self.done) else None

    def of(self, state: Tensor, copy: Tensor) -> "HalfStep":
        other = type(self)(state, copy, self.plan.steps)
        other.plan, other.done, other.alarm = self.plan, self.done, self.alarm
        return other

    def announce(self, steps: Sequence[Radix]) -> None:
        """Announce more half-steps."""
        self.plan.steps = [*self.plan.steps, *steps]
        self.alarm = torch.cat([self.alarm, self.alarm.new_zeros(len(steps), LANES)])

    def make_room(self) -> None:
        """Allocate the spills of all announced half-steps."""
        spills = self.plan.spills
        try:
            self._room = [torch.empty_like(self.state, dtype=torch.int32) for _ in range(spills)]
        except RuntimeError as error:
            size, steps = 8 * spills * self.state.numel() / 2**30, self.plan.steps
            raise MemoryError(
                f"the remainders of {len(steps)} steps at beta = {steps[0].beta:.6g} take {4 * spills} bytes per "
                f"element of y and of z, {size:.1f} GiB in total, and there is not enough memory: use a smaller beta "
                "(0.5 needs none up to 32 steps) or fewer steps"
            ) from error

    def _relax(self, f: Tensor, read: Tensor | None, step: Radix) -> None:
        spill = self._put_aside(step)
        self._raise_alarm(f, relax(self.state, f, read, self.copy, spill, step, taking(self)))

    def _relax_norms(self, f: Tensor, read: Tensor | None, step: Radix) -> Tensor:
        """The sums of squares are those of reference.py, but in float32."""
        before = self.state >> 32
        self._relax(f, read, step)
        after = self.state >> 32
        squares = [(x.to(torch.float32) * step.unit).square() for x in (after - before, after)]
        return torch.stack([reference.lane_sums(x, taking(self)) for x in squares])

    def _invert(self, f: Tensor, adjoints: Adjoints, step: Radix, adjoint_step: Linear) -> None:
        each = taking(self)
        invert(self.state, f, self.copy, self._take_back(step), step, each)
        reference.update_adjoint(*adjoints, adjoint_step, each)

    def _compare(
        self, f: Tensor, initial: Tensor, floor: Tensor, adjoints: Adjoints, step: Radix, adjoint_step: Linear
    ) -> Tensor:
        reference.update_adjoint(*adjoints, adjoint_step)
        return self.partial_maxima().copy_(invert_compare(self.state, f, self.copy, initial, floor, step))

    def _raise_alarm(self, f: Tensor, bad: Tensor) -> None:
        if bad.numel():
            self.alarm[self.done, 0] = torch.where(bad, magnitude_bits(f), 0).max()

    def _find_largest(self, f: Tensor) -> None:
        self.alarm[self.done, 0] = magnitude_bits(f).max()
