"""How the solver stores its states: in float64, as in the paper, or as integers, without loss."""

import abc
import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from .. import _device, kernels
from ..kernels import reference_exact as exact
from ..kernels.half_step import Coefficients, HalfStep, Linear
from ..kernels.radix import LARGEST_DENOMINATOR, Plan, Radix
from .deferred import report, settle
from .options import Exact, Options
from .state import State, two_like


class Scheme(abc.ABC):
    """How the solver stores y and z, and which kernels step them, with which coefficients.

    name: "float64" or "exact".
    step: the rounded coefficients of every half-step that is not part of a schedule.
    """

    name: ClassVar[str]
    step: Any
    schedule: tuple[Any, ...]

    @property
    def beta(self) -> float:
        return self.step.beta

    @property
    def gamma(self) -> float:
        return self.step.gamma

    @property
    def resolution(self) -> float:
        """The distance between neighbouring numbers, if it is constant."""
        return 0.0

    def spills(self, which: int, steps: int) -> int:
        """How often y (0) or z (1) spills its remainders in this many steps; with a schedule the two differ."""
        return 0

    def at(self, k: int) -> Any:
        """The coefficients of half-step k."""
        return self.schedule[k] if k < len(self.schedule) else self.step

    def adjoint_at(self, k: int, count: int) -> Linear:
        """The coefficients of the adjoint of x_k, the result of half-step k of `count`, which is stored multiplied by
        b_k:

            adjoint_k = a adjoint_{k+2} + b vjp_{k+1} + c adjoint_{k+1}

        x_{count-2} has no successor with its a: an incoming adjoint was divided by it."""
        if k >= len(self.schedule):
            return self.step
        now, other, after = self.at(k), self.at(k + 1), self.at(k + 2 if k + 2 < count else k)
        return Coefficients(after.a * now.b / after.b, now.b, other.c * now.b / other.b)

    def kept_at(self, k: int, count: int) -> float:
        """The coefficient that replaces a, for an example that half-step k + 2 does not move."""
        return self.at(k).b / self.at(k + 2 if k + 2 < count else k).b

    @abc.abstractmethod
    def start(self, initial: Sequence[Tensor], like: State) -> State:
        """The initial state, with the layout of `like`."""

    def start_both(self, initial: Sequence[Tensor], like: State) -> tuple[State, State]:
        """The same for y and z."""
        z = self.start(initial, like)
        return [x.clone() for x in z], z

    @abc.abstractmethod
    def read(self, state: State, like: State) -> State:
        """The state in the dtypes of f's input."""

    @abc.abstractmethod
    def carried(self, state: State, like: State) -> State:
        """The final state of another solve, with the layout of `like`."""

    @abc.abstractmethod
    def bind(self, which: int, state: State, copy: State, steps: int, spilled: list[State] | None = None) -> list[Any]:
        """The half-steps of y (0) or z (1) for the announced number of steps; with `spilled`, to invert as many."""

    @abc.abstractmethod
    def make_room(self, half_steps: list[Any]) -> None:
        """Allocate the spilled remainders of the announced steps."""

    @abc.abstractmethod
    def look(self, norms: Tensor, half_steps: list[Any], step: int) -> Tensor:
        """The norms, on the host. Raises if the state overflowed in this step. Synchronizes once. More steps than
        announced may follow."""

    @abc.abstractmethod
    def check(self, half_steps: list[Any], in_any: int | None = None) -> None:
        """Raise if the state overflowed in any step, if that is known without synchronizing. in_any: the number of
        steps, if they share an overflow flag."""


@dataclass(frozen=True)
class Float64(Scheme):
    """The paper's mixed precision."""

    name: ClassVar[str] = "float64"
    step: Coefficients
    half_step: type[HalfStep]
    schedule: tuple[Coefficients, ...] = ()

    def start(self, initial: Sequence[Tensor], like: State) -> State:
        return [torch.empty_like(c, dtype=torch.float64).copy_(x) for x, c in zip(initial, like, strict=True)]

    def start_both(self, initial: Sequence[Tensor], like: State) -> tuple[State, State]:
        rows = [two_like(c, torch.float64)[1].copy_(x) for x, c in zip(initial, like, strict=True)]
        return [y for y, _ in rows], [z for _, z in rows]

    def read(self, state: State, like: State) -> State:
        return [torch.empty_like(x, dtype=c.dtype).copy_(x) for x, c in zip(state, like, strict=True)]

    def carried(self, state: State, like: State) -> State:
        return self.start(state, like)

    def bind(self, which: int, state: State, copy: State, steps: int, spilled: list[State] | None = None) -> list[Any]:
        return [self.half_step(x, c) for x, c in zip(state, copy, strict=True)]

    def make_room(self, half_steps: list[HalfStep]) -> None:
        """float64 has no remainders."""

    def look(self, norms: Tensor, half_steps: list[HalfStep], step: int) -> Tensor:
        return norms.cpu()

    def check(self, half_steps: list[HalfStep], in_any: int | None = None) -> None:
        """float64 does not overflow; infinity and NaN show in the norms."""


@dataclass(frozen=True)
class Integers(Scheme):
    """The integer state of `Exact`, with 1 - beta rounded to a fraction."""

    name: ClassVar[str] = "exact"
    step: Radix
    half_step: type[exact.HalfStep]
    schedule: tuple[Radix, ...] = ()

    @property
    def resolution(self) -> float:
        return self.step.unit

    def start(self, initial: Sequence[Tensor], like: State) -> State:
        state = []
        for x, c in zip(initial, like, strict=True):
            encoded, alarm = self.half_step.encoded(x, c, self.step)
            report(alarm, self._judge_start)
            state.append(encoded)
        return state

    def read(self, state: State, like: State) -> State:
        return [self.half_step.decoded(x, c.dtype, self.step) for x, c in zip(state, like, strict=True)]

    def carried(self, state: State, like: State) -> State:
        """With remainders of 0, as in an initial state."""
        return [torch.empty_like(c, dtype=torch.int64).copy_(x >> 32 << 32) for x, c in zip(state, like, strict=True)]

    def bind(self, which: int, state: State, copy: State, steps: int, spilled: list[State] | None = None) -> list[Any]:
        backs = spilled if spilled is not None else [None] * len(state)
        announced = self._announced(which, 0, steps)
        return [self.half_step(x, c, announced, back) for x, c, back in zip(state, copy, backs, strict=True)]

    def spills(self, which: int, steps: int) -> int:
        return Plan(self._announced(which, 0, steps)).spills

    def _announced(self, which: int, first: int, count: int) -> list[Radix]:
        """The coefficients of y or z, from a step on."""
        if 2 * first >= len(self.schedule):
            return [self.step] * count
        return [self.at(2 * n + which) for n in range(first, first + count)]

    def make_room(self, half_steps: list[exact.HalfStep]) -> None:
        for half_step in half_steps:
            half_step.make_room()

    def look(self, norms: Tensor, half_steps: list[exact.HalfStep], step: int) -> Tensor:
        alarms, count = [h.alarm[:step][-1:] for h in half_steps], norms.numel()  # captured steps have one row
        values = torch.cat([norms.flatten().view(torch.int32), _worst(alarms)]).cpu()
        if step == 1:
            settle()  # also the overflow check of z0
        self._judge(values[count:], first_step=step)
        for i, h in enumerate(half_steps):  # first those of y, then those of z
            if h.done == len(h.plan.steps):  # doubles the buffers, so that short solves need little
                h.announce(self._announced(2 * i // len(half_steps), h.done, h.done))
        return values[:count].view(torch.float32).view(norms.shape)

    def check(self, half_steps: list[exact.HalfStep], in_any: int | None = None) -> None:
        decide = functools.partial(self._judge, first_step=1, in_any=in_any)
        report(_worst([h.alarm for h in half_steps]), decide)

    def _judge_start(self, bits: Tensor) -> None:
        if bits.any():
            raise self._error(int(bits.max()), "z0 is too large for the exact state", "z0", "start from finite numbers")

    def _judge(self, bits: Tensor, first_step: int, in_any: int | None = None) -> None:
        for i, value in enumerate(bits.tolist()):
            if value:
                what = f"overflow in {f'step {first_step + i}' if in_any is None else f'one of {in_any} steps'}"
                raise self._error(value, what, "f", "try a smaller beta, or an f that contracts")

    def _error(self, bits: int, what: str, name: str, if_not_finite: str) -> ArithmeticError:
        (size,) = struct.unpack("<f", struct.pack("<i", bits))
        if not math.isfinite(size):
            return FloatingPointError(f"{what}: {name} is not finite in float32; {if_not_finite}")
        fraction_bits, limit = self.step.fraction_bits, 2.0 ** (31 - self.step.fraction_bits)
        if size < limit:
            return OverflowError(
                f"{what}: the state exceeded {limit:g}, the limit with {fraction_bits} fraction bits, while {name} "
                f"was only {size:.3g}: the iteration diverges with this beta; use a smaller one (revdeq.tune finds a "
                "good one), or state=revdeq.Exact(fraction_bits=...) with fewer fraction bits"
            )
        diverging = "; or the iteration diverges: find other coefficients with revdeq.tune" if name == "f" else ""
        needed = 30 - max(0, math.frexp(max(size, limit))[1])
        remedy = f"use state=revdeq.Exact(fraction_bits={needed}), or " if needed >= 1 else ""
        return OverflowError(
            f"{what}: {name} reached {size:.3g}, but with {fraction_bits} fraction bits magnitudes must stay below "
            f"{limit:g}; {remedy}normalize {name}{diverging}"
        )


def _worst(alarms: list[Tensor]) -> Tensor:
    return functools.reduce(torch.maximum, alarms).amax(1)


def relax(half_steps: list[Any], outputs: Sequence[Tensor], read: State, step: Any) -> None:
    for half_step, out, x in zip(half_steps, outputs, read, strict=True):
        half_step.relax(out, x, step)


def relax_norms(half_steps: list[Any], outputs: Sequence[Tensor], read: State, step: Any) -> Tensor:
    """The squared 2-norms of the change and of the new state, summed over all tensors."""
    partial = [h.relax_norms(out, x, step) for h, out, x in zip(half_steps, outputs, read, strict=True)]
    if half_steps[0].ends is None:
        return functools.reduce(torch.add, [x.sum((1, 2)) for x in partial])
    examples = half_steps[0].examples
    sums = [x.view(2, examples, x[0].numel() // max(examples, 1)).sum(-1) for x in partial]
    return functools.reduce(torch.add, sums)


SAFE_BITS = 32
"""The number of its 53 bits that a float64 state may lose: every run that lost fewer was exact."""


def scheme_for(options: Options, initial: Sequence[Tensor]) -> Scheme:
    """The scheme for these options and initial tensors."""
    device = initial[0].device
    kernels.backends.say_once_what_is_missing(device, "float64")
    plan = _plan(options)
    if plan.radix is None or (options.state == "auto" and _is_safe(options, plan, initial)):
        return Float64(plan.step, kernels.half_step_for(device, "float64"), plan.schedule)
    return Integers(plan.radix, kernels.half_step_for(device, "exact"), plan.radix_schedule)


class _Plan(NamedTuple):
    """The rounded coefficients. With state="auto" they are the same for both states, so that the iteration is the
    same."""

    step: Coefficients
    schedule: tuple[Coefficients, ...]
    radix: Radix | None
    radix_schedule: tuple[Radix, ...]


@functools.lru_cache(64)
def _plan(options: Options) -> _Plan:
    radix, pairs = radix_of(options), [(float(options.beta), float(options.gamma)), *options.pairs]
    if radix is None:
        step, *schedule = (Coefficients.rounded(*pair) for pair in pairs)
        return _Plan(step, tuple(schedule), None, ())
    radices = [Radix.nearest(beta, radix.fraction_bits, gamma) for beta, gamma in pairs]
    step, *schedule = (Coefficients.rounded(r.beta, gamma) for r, (_, gamma) in zip(radices, pairs, strict=True))
    return _Plan(step, tuple(schedule), radix, tuple(radices[1:]))


def rounded_coefficients(options: Options) -> tuple[Coefficients, tuple[Coefficients, ...]]:
    """The rounded pair, and the rounded schedule."""
    return _plan(options)[:2]


def _is_safe(options: Options, plan: _Plan, initial: Sequence[Tensor]) -> bool:
    """Whether a float64 state is safe: no step is inverted, or f computes in float64, or few bits are lost; and whether
    the device supports it."""
    if not _device.has_float64(initial[0].device):
        return False
    if not torch.is_grad_enabled() or options.gradient == "implicit" or any(x.dtype == torch.float64 for x in initial):
        return True
    undone = min(options.max_steps, options.backward_steps or options.max_steps)
    return _lost_bits(plan, 2 * (options.max_steps - undone), 2 * options.max_steps) <= SAFE_BITS


@functools.lru_cache(64)
def _lost_bits(plan: _Plan, first: int, end: int) -> float:
    scheduled = plan.schedule[first:end]
    constant = max(0, end - max(first, len(plan.schedule)))
    return sum(map(_bits, scheduled)) + constant * _bits(plan.step)


def _bits(step: Coefficients) -> float:
    return math.log2((1 + abs(step.b)) / abs(step.a))


def radix_of(options: Options) -> Radix | None:
    """The radix of the integer state, if it is or may be used."""
    if options.state == "float64":
        return None
    bits = options.state.fraction_bits if isinstance(options.state, Exact) else Exact().fraction_bits
    radix = Radix.nearest(float(options.beta), bits, float(options.gamma))
    if radix.p < radix.d:
        return radix
    if options.state == "auto":
        return None
    raise ValueError(
        f"beta = {options.beta:.6g} has no usable fraction: state='exact' needs 1 - beta = p / d with d <= "
        f"{LARGEST_DENOMINATOR}, and not 1; use for example beta = 0.5, 0.8 or 0.9"
    )
