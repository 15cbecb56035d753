"""The exact half-steps in Triton, as reference_exact.py specifies them.

Arithmetic is in integers, and conversions are in float32. Only an f in float64 takes float64 arithmetic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import half_step, reference_exact
from ..half_step import Adjoints, Compared
from ..radix import Radix
from . import integers, memory
from .float64 import magnitude_bits, ratio_bits, update_adjoint
from .launch import launch

BLOCK = 512
LANES: tl.constexpr = tl.constexpr(half_step.LANES)
INTEGERS = ["n", "start", "to", "sign", "weight", "by_start", "by_to"]


@triton.jit
def _mixed(p_f, p_z, gamma, o, m):
    """f, and g = gamma f + (1 - gamma) z; without z, f again."""
    f = memory.load(p_f, o, m)
    if p_z is None:
        return f, f
    else:  # noqa: RET505
        z = memory.load(p_z, o, m)
        WIDE: tl.constexpr = tl.float64 if f.dtype == tl.float64 or z.dtype == tl.float64 else tl.float32
        gamma = tl.cast(gamma, WIDE)  # a float32 number
        return f, gamma * f.to(WIDE) + (1.0 - gamma) * z.to(WIDE)


@triton.jit
def _store_decoded(p_copy, y, UNIT: tl.constexpr, o, m):
    """Y as f reads it, in float64 if f reads float64."""
    if p_copy.dtype.element_ty == tl.float64:
        memory.store(p_copy, y.to(tl.float64) * UNIT, o, m)
    else:
        memory.store(p_copy, y.to(tl.int32).to(tl.float32) * UNIT, o, m)


@triton.jit
def _alarm(f, fits):
    """0, or the bits of |f| where something does not fit."""
    return tl.where(fits, 0, tl.maximum(magnitude_bits(f), 1))


@triton.jit
def _raise_alarm(p_alarm, alarm, SIZE: tl.constexpr):
    """Stores nothing where the alarm is 0. Of several alarms in a lane, any may be stored last."""
    o_lane = tl.max_contiguous(tl.multiple_of(memory.offsets(SIZE) % LANES, 2), 2)
    tl.store(p_alarm + o_lane, alarm, mask=alarm != 0)


@triton.jit(do_not_specialize=["n"])
def _encode_kernel(
    p_state, p_x, p_alarm, n: tl.int64, UNIT: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr
):
    o, m = memory.row_of(0, n, ROWS, EVEN, SIZE)
    x = memory.load(p_x, o, m)
    number, fits = integers.rounded(x, UNIT)
    memory.store(p_state, number << 32, o, m)
    _raise_alarm(p_alarm, _alarm(x, fits), SIZE)


@triton.jit(do_not_specialize=["n"])
def _decode_kernel(
    p_state, p_copy, n: tl.int64, UNIT: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr
):
    o, m = memory.row_of(0, n, ROWS, EVEN, SIZE)
    _store_decoded(p_copy, memory.load(p_state, o, m) >> 32, UNIT, o, m)


@triton.jit(do_not_specialize=INTEGERS)
def _relax_kernel(
    p_state, p_f, p_z, p_copy, p_spill, p_alarm, p_partial, n: tl.int64,
    start: tl.int32, to: tl.int32, sign: tl.int32, weight: tl.int32, by_start: tl.uint32, by_to: tl.uint32,
    gamma: tl.float32, UNIT: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """With a spill, the remainder is saved there and restarts from 0. An f or a Y that does not fit raises the alarm.
    With `p_partial`, squares are added up as in float64.py."""
    alarms = tl.full((SIZE,), 0, tl.int32)
    changes, squares = tl.full((SIZE,), 0, tl.float32), tl.full((SIZE,), 0, tl.float32)
    for row in tl.range(ROWS):
        o, m = memory.row_of(row, n, ROWS, EVEN, SIZE)
        state = memory.load(p_state, o, m)
        f, g = _mixed(p_f, p_z, gamma, o, m)
        y, r = state >> 32, state & 0xFFFFFFFF
        number, fits = integers.rounded(g, UNIT)
        if p_spill is not None:
            memory.store(p_spill, r, o, m)
            r = r * 0
        after, r = integers.stepped(y, r, number, (start, to, sign, weight, by_start, by_to))
        memory.store(p_state, (after << 32) | r, o, m)
        _store_decoded(p_copy, after, UNIT, o, m)
        fits = fits & (after >= -2147483648) & (after < 2147483648)
        alarms = tl.maximum(alarms, _alarm(f, fits))
        change, value = (after - y).to(tl.float32) * UNIT, after.to(tl.int32).to(tl.float32) * UNIT
        changes += change * change
        squares += value * value
    _raise_alarm(p_alarm, alarms, SIZE)
    if p_partial is not None:
        memory.store_lanes(p_partial, changes, 0, SIZE)
        memory.store_lanes(p_partial, squares, 1, SIZE)


@triton.jit(do_not_specialize=INTEGERS)
def _invert_kernel(
    p_state, p_f, p_z, p_copy, p_adjoint, p_vjp, p_other, p_seed, p_spill, p_floor, p_maxima, n: tl.int64,
    start: tl.int32, to: tl.int32, sign: tl.int32, weight: tl.int32, by_start: tl.uint32, by_to: tl.uint32,
    gamma: tl.float32, a: tl.float64, b: tl.float64, c: tl.float64,
    a_32: tl.float32, b_32: tl.float32, c_32: tl.float32,
    UNIT: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """With a spill, the remainder is restored from there. With `p_maxima`, as in float64.py; an initial state has the
    remainder 0."""
    maxima, floor = tl.full((SIZE,), 0, tl.int32), 0.0 if p_floor is None else tl.load(p_floor)
    for row in tl.range(ROWS):
        o, m = memory.row_of(row, n, ROWS, EVEN, SIZE)
        state = memory.load(p_state, o, m)
        _, g = _mixed(p_f, p_z, gamma, o, m)
        number, _ = integers.rounded(g, UNIT)
        step = start, to, sign, weight, by_start, by_to
        y, r = integers.stepped(state >> 32, state & 0xFFFFFFFF, number, step)
        if p_spill is not None:
            r = memory.load(p_spill, o, m).to(tl.int64) & 0xFFFFFFFF
        if p_maxima is not None:
            initial, _ = integers.rounded(memory.load(p_copy, o, m), UNIT)
            error = (y - initial).to(tl.float32) * UNIT + r.to(tl.float32)
            value = (state >> 32).to(tl.int32).to(tl.float32) * UNIT
            maxima = tl.maximum(maxima, ratio_bits(error, value, floor))
        update_adjoint((p_adjoint, p_vjp, p_other, p_seed), (a, b, c), (a_32, b_32, c_32), o, m)
        if p_maxima is None:
            memory.store(p_state, (y << 32) | r, o, m)
            _store_decoded(p_copy, y, UNIT, o, m)
    if p_maxima is not None:
        memory.store_lanes(p_maxima, maxima, 0, SIZE)


class HalfStep(reference_exact.HalfStep):
    def __init__(self, state: Tensor, step: Radix) -> None:
        super().__init__(state, step)
        p, d, ends = step.p, step.d, (integers.reciprocal(step.p), integers.reciprocal(step.d))
        self._forward = p, d, step.sign, step.weight, *ends, step.gamma
        adjoint = step.a, step.b, step.c
        self._backward = d, p, step.sign, -step.sign * step.weight, *ends[::-1], step.gamma, *adjoint, *adjoint

    def decoded(self, dtype: torch.dtype, rows: Tensor | None = None) -> Tensor:
        state = self.state if rows is None else self.state[rows]
        copy = torch.empty_like(state, dtype=dtype)
        launch(_decode_kernel, BLOCK, (state, copy), (), (self.step.unit,))
        return copy

    def _encode(self, x: Tensor) -> None:
        launch(_encode_kernel, BLOCK, (self.state, x, self.alarm), (), (self.step.unit,))

    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        block, tensors = BLOCK if partial is None else None, (self.state, f_z, z, copy, self._spill())
        launch(_relax_kernel, block, (*tensors, self.alarm, partial), self._forward, (self.step.unit,))

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints, compared: Compared) -> None:
        block, spill = (BLOCK, self._take_back()) if compared is None else (None, None)
        tensors = self.state, f_z, z, copy, *adjoints, spill, *(compared or (None, None))
        launch(_invert_kernel, block, tensors, self._backward, (self.step.unit,))
