"""How the solver keeps its states: in float64, the paper's scheme, or as integers, without any loss."""

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
from ..kernels import reference
from ..kernels import reference_exact as exact
from ..kernels.half_step import Coefficients, HalfStep, Linear
from ..kernels.radix import LARGEST_DENOMINATOR, Plan, Radix
from .deferred import report, settle
from .options import Exact, Options
from .state import State


class Scheme(abc.ABC):
    """How the solver stores y and z, and which kernels step them, with which coefficients.

    name: "float64" or "exact". remedy: what to do when the way back is lost.
    step: the coefficients of every half-step, after rounding, but for the first ones of a schedule.
    """

    name: ClassVar[str]
    remedy: ClassVar[str]
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
        """The distance between neighbouring numbers, where it does not depend on their size."""
        return 0.0

    def spills(self, which: int, steps: int) -> int:
        """How often y (0) or z (1) puts its remainders aside in so many steps: with a schedule, they differ."""
        return 0

    def at(self, k: int) -> Any:
        """The coefficients of half-step k."""
        return self.schedule[k] if k < len(self.schedule) else self.step

    def adjoint_at(self, k: int, count: int) -> Linear:
        """With x_k what half-step k of `count` wrote, and its adjoint kept multiplied by b_k, those of

            adjoint_k = a adjoint_{k+2} + b vjp_{k+1} + c adjoint_{k+1}

        Nothing follows x_{count-2} by its a: an adjoint that is there before was divided by it."""
        if k >= len(self.schedule):
            return self.step
        now, other, after = self.at(k), self.at(k + 1), self.at(k + 2 if k + 2 < count else k)
        return Coefficients(after.a * now.b / after.b, now.b, other.c * now.b / other.b)

    def kept_at(self, k: int, count: int) -> float:
        """The same, of an example that half-step k + 2 does not move, in the place of a."""
        return self.at(k).b / self.at(k + 2 if k + 2 < count else k).b

    @abc.abstractmethod
    def start(self, initial: Sequence[Tensor], like: State) -> State:
        """The initial state, laid out like `like`."""

    @abc.abstractmethod
    def read(self, state: State, like: State) -> State:
        """The state in the dtypes that f reads."""

    @abc.abstractmethod
    def carried(self, state: State, like: State) -> State:
        """The state in which another solve ended, laid out like `like`."""

    @abc.abstractmethod
    def bind(self, which: int, state: State, copy: State, steps: int, spilled: list[State] | None = None) -> list[Any]:
        """The half-steps of y (0) or z (1), for as many steps as are announced; with `spilled`, to undo as many."""

    @abc.abstractmethod
    def make_room(self, half_steps: list[Any]) -> None:
        """Allocate what will be put aside in all of the steps that were announced."""

    @abc.abstractmethod
    def look(self, norms: Tensor, half_steps: list[Any], step: int) -> Tensor:
        """The norms, on the host, and an error if a state did not fit in this step: the device is waited for once. More
        steps than were announced may follow."""

    @abc.abstractmethod
    def check(self, half_steps: list[Any], in_any: int | None = None) -> None:
        """Raise if a state did not fit in any step, when that is known without waiting for the device. in_any: the
        number of steps, if they share an alarm."""


@dataclass(frozen=True)
class Float64(Scheme):
    """The paper's mixed precision."""

    name: ClassVar[str] = "float64"
    remedy: ClassVar[str] = (
        "Either the float64 state was rounded beyond recovery: "
        'use state="exact", fewer steps or a beta further from 1. Or '
    )
    step: Coefficients
    half_step: type[HalfStep]
    schedule: tuple[Coefficients, ...] = ()

    def start(self, initial: Sequence[Tensor], like: State) -> State:
        return [torch.empty_like(c, dtype=torch.float64).copy_(x) for x, c in zip(initial, like, strict=True)]

    def read(self, state: State, like: State) -> State:
        return [torch.empty_like(x, dtype=c.dtype).copy_(x) for x, c in zip(state, like, strict=True)]

    def carried(self, state: State, like: State) -> State:
        return self.start(state, like)

    def bind(self, which: int, state: State, copy: State, steps: int, spilled: list[State] | None = None) -> list[Any]:
        return [self.half_step(x, c) for x, c in zip(state, copy, strict=True)]

    def make_room(self, half_steps: list[HalfStep]) -> None:
        """Nothing is put aside."""

    def look(self, norms: Tensor, half_steps: list[HalfStep], step: int) -> Tensor:
        return norms.cpu()

    def check(self, half_steps: list[HalfStep], in_any: int | None = None) -> None:
        """Every float fits; what is not finite shows in the norms."""


@dataclass(frozen=True)
class Integers(Scheme):
    """The scheme that `Exact` asks for, with 1 - beta a fraction."""

    name: ClassVar[str] = "exact"
    remedy: ClassVar[str] = "The exact state loses nothing: "
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
        """With a remainder of 0, as if it began here."""
        return [torch.empty_like(c, dtype=torch.int64).copy_(x >> 32 << 32) for x, c in zip(state, like, strict=True)]

    def bind(self, which: int, state: State, copy: State, steps: int, spilled: list[State] | None = None) -> list[Any]:
        backs = spilled if spilled is not None else [None] * len(state)
        announced = self._announced(which, 0, steps)
        return [self.half_step(x, c, announced, back) for x, c, back in zip(state, copy, backs, strict=True)]

    def spills(self, which: int, steps: int) -> int:
        return Plan(self._announced(which, 0, steps)).spills

    def _announced(self, which: int, first: int, count: int) -> list[Radix]:
        """Of y or z, from a step on."""
        if 2 * first >= len(self.schedule):
            return [self.step] * count
        return [self.at(2 * n + which) for n in range(first, first + count)]

    def make_room(self, half_steps: list[exact.HalfStep]) -> None:
        for half_step in half_steps:
            half_step.make_room()

    def look(self, norms: Tensor, half_steps: list[exact.HalfStep], step: int) -> Tensor:
        alarms, count = [h.alarm[step - 1 : step] for h in half_steps], norms.numel()
        values = torch.cat([norms.flatten().view(torch.int32), _worst(alarms)]).cpu()
        if step == 1:
            settle()  # z0's own alarm has come, too
        self._judge(values[count:], first_step=step)
        for i, h in enumerate(half_steps):  # first those of y, then those of z
            if h.done == len(h.plan.steps):  # twice as many in all, and little for solves that end soon
                h.announce(self._announced(2 * i // len(half_steps), h.done, h.done))
        return values[:count].view(torch.float32).view(norms.shape)

    def check(self, half_steps: list[exact.HalfStep], in_any: int | None = None) -> None:
        decide = functools.partial(self._judge, first_step=1, in_any=in_any)
        report(_worst([h.alarm for h in half_steps]), decide)

    def _judge_start(self, bits: Tensor) -> None:
        if bits.any():
            raise self._error(int(bits.max()), "z0 does not fit the exact state", "z0", "start from finite numbers")

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
                f"{what}: the state outgrew {limit:g}, which {fraction_bits} fraction bits hold, while {name} was at "
                f"{size:.3g}: with this beta the iteration diverges; use a smaller one (revdeq.tune finds a good one), "
                "or state=revdeq.Exact(fraction_bits=...) with fewer fraction bits"
            )
        diverging = "; or the iteration diverges, and needs other coefficients (revdeq.tune)" if name == "f" else ""
        needed = 30 - max(0, math.frexp(max(size, limit))[1])
        remedy = f"use state=revdeq.Exact(fraction_bits={needed}), or " if needed >= 1 else ""
        return OverflowError(
            f"{what}: {name} reached {size:.3g}, but {fraction_bits} fraction bits hold magnitudes below {limit:g}; "
            f"{remedy}normalise {name}{diverging}"
        )


def _worst(alarms: list[Tensor]) -> Tensor:
    return functools.reduce(torch.maximum, alarms).amax(1)


SAFE_BITS = 32
"""What a float64 state can lose of its 53 bits on the way back and still give f the numbers that it had: it was exact
in every run that lost less."""


def scheme_for(options: Options, initial: Sequence[Tensor]) -> Scheme:
    """The scheme that the options ask for, of an iteration that starts from these tensors."""
    device = initial[0].device
    kernels.backends.say_once_what_is_missing(device, "float64")
    plan = _plan(options)
    if plan.radix is None or (options.state == "auto" and _is_safe(options, plan, initial)):
        return Float64(plan.step, _half_step(device, "float64", options), plan.schedule)
    return Integers(plan.radix, _half_step(device, "exact", options), plan.radix_schedule)


def _half_step(device: torch.device, state: str, options: Options) -> Any:
    found = kernels.half_step_for(device, state)
    if options.per_example and found.__module__.rpartition(".")[2].startswith("gpu"):
        return (reference if state == "float64" else exact).HalfStep
    return found


class _Plan(NamedTuple):
    """Coefficients for both states. With state="auto" they are the same, so that the iteration is."""

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
    """Of the iteration as it runs, and of its schedule."""
    return _plan(options)[:2]


def _is_safe(options: Options, plan: _Plan, initial: Sequence[Tensor]) -> bool:
    """Whether a float64 state will do: no step is undone, or f is as fine as the state, or little is lost. And whether
    the device has one."""
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
    """Of the integer state, if that is asked for, or may be used."""
    if options.state == "float64":
        return None
    bits = options.state.fraction_bits if isinstance(options.state, Exact) else Exact().fraction_bits
    radix = Radix.nearest(float(options.beta), bits, float(options.gamma))
    if radix.p < radix.d:
        return radix
    if options.state == "auto":
        return None
    raise ValueError(
        f"beta = {options.beta:.6g} has no usable fraction: state='exact' takes 1 - beta = p / d with d <= "
        f"{LARGEST_DENOMINATOR}, and not 1; use beta = 0.5, 0.8 or 0.9, for example"
    )
