"""The exact half-steps in Triton: reference_exact.py with a program for each block or chunk, as in gpu.py.

All arithmetic is in integers, and conversions are in float32: there is no float64 instruction unless f is float64.

A half-step and its inverse are one function, with p and d exchanged:

    e = R mod from, R = floor(R / from)
    T = sign (from Y + e) + weight F
    Y = floor(T / to), R = R to + (T mod to)

`from` and `to` are arguments, so that kernels are not compiled for a beta. Division by n <= 64 is multiplication by the
reciprocal m = floor(2^31 / n) + 1: floor(x / n) = floor(x m / 2^31) for 0 <= x < n 2^19. Proof: m n exceeds 2^31 by
e <= n, so x m / 2^31 exceeds x / n by x e / (2^31 n) < n e / (2^12 n) <= 1 / n, and the next integer is at least 1 / n
away. Larger numbers are divided in two digits, of which the lower has 19 bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import reference_exact
from ..half_step import LANES, Adjoints
from ..radix import Radix
from . import float64 as gpu
from . import passes
from .launch import launch_blocks, launch_chunks

BLOCK = 512

STEP = ["start", "to", "sign", "weight", "by_start", "by_to", "gamma", "rest"]
NUMBERS = ["n", *gpu.EACH, *STEP, "adjoint_a", "adjoint_b", "adjoint_c", "kept"]


@triton.jit
def _mixed(p_f, p_read, o_x, m_x, step):
    """f, and gamma f + (1 - gamma) z, where z is what f read; without it, f again."""
    _, _, _, _, _, _, gamma, rest = step
    b_f = passes.load(p_f, o_x, m_x)
    if p_read is None:
        return b_f, b_f
    elif b_f.dtype == tl.float64 or p_read.dtype.element_ty == tl.float64:  # noqa: RET505
        b_g = passes.number(gamma, tl.float64) * b_f.to(tl.float64)
        return b_f, b_g + passes.number(rest, tl.float64) * passes.load(p_read, o_x, m_x).to(tl.float64)
    else:
        b_g = passes.number(gamma, tl.float32) * b_f.to(tl.float32)
        return b_f, b_g + passes.number(rest, tl.float32) * passes.load(p_read, o_x, m_x).to(tl.float32)


@triton.jit
def _integer(b_g, UNIT: tl.constexpr):
    """g in units of 2^-G, rounded to the nearest even, and whether it fits into 32 bits (it is 0 if not)."""
    if b_g.dtype == tl.float64:
        b_scaled = b_g * (1 / UNIT)
        b_size = tl.abs(b_scaled)
        b_whole = tl.where(b_size < 4503599627370496.0, (b_size + 4503599627370496.0) - 4503599627370496.0, b_size)
    else:
        b_scaled = b_g.to(tl.float32) * (1 / UNIT)
        b_size = tl.abs(b_scaled)
        b_whole = tl.where(b_size < 8388608.0, (b_size + 8388608.0) - 8388608.0, b_size)
    b_fits = b_whole < 2147483648.0
    b_number = tl.where(b_fits, b_whole, 0.0).to(tl.int32)
    return tl.where(b_scaled < 0.0, -b_number, b_number).to(tl.int64), b_fits


@triton.jit
def _decoded(p_copy, b_y, UNIT: tl.constexpr):
    """Y as f reads it, in float64 if f reads float64."""
    return (
        b_y.to(tl.float64) * UNIT if p_copy.dtype.element_ty == tl.float64 else b_y.to(tl.int32).to(tl.float32) * UNIT
    )


@triton.jit
def _alarm(b_f, b_fits):
    """0, or the bits of |f| where something does not fit."""
    return tl.where(b_fits, 0, tl.maximum(gpu._magnitude_bits(b_f), 1))


@triton.jit
def _encode(pointers, numbers, o_x, m_x, left):
    p_state, p_x = pointers
    b_x = passes.load(p_x, o_x, m_x)
    b_number, b_fits = _integer(b_x, numbers[0])
    return ((p_state, b_number << 32),), (_alarm(b_x, b_fits),)


@triton.jit(do_not_specialize=NUMBERS)
def _encode_kernel(p_state, p_x, p_alarm, n, UNIT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    each = None, None, None
    passes.each_block(_encode, (p_state, p_x), (UNIT,), n, each, BLOCK, p_alarm, LANES)


@triton.jit
def _decode(pointers, numbers, o_x, m_x, left):
    p_state, p_copy = pointers
    return ((p_copy, _decoded(p_copy, passes.load(p_state, o_x, m_x) >> 32, numbers[0])),), ()


@triton.jit(do_not_specialize=NUMBERS)
def _decode_kernel(p_state, p_copy, n, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    passes.each_block(_decode, (p_state, p_copy), (UNIT,), n, (None, None, None), BLOCK)


@triton.jit
def _divided(b_x, n, by):
    """Quotient and remainder of 0 <= x < 2^41 by n, in 32-bit arithmetic except at both ends."""
    b_high = (b_x >> 19).to(tl.uint32)
    b_first = tl.umulhi(b_high * 2, by)
    b_low = ((b_high - b_first * n) << 19) | (b_x.to(tl.uint32) & 0x7FFFF)
    b_second = tl.umulhi(b_low * 2, by)
    return (b_first.to(tl.int64) << 19) + b_second.to(tl.int64), b_low - b_second * n


@triton.jit
def _stepped(b_state, b_r, b_number, step):
    """Y and R after a half-step, or after its inverse. Y is correct if its magnitude is below 2^34."""
    start, to, sign, weight, by_start, by_to, _, _ = step
    n = start.to(tl.uint32, bitcast=True)
    m = to.to(tl.uint32, bitcast=True)
    b_rest, b_e = _divided(b_r, n, by_start.to(tl.uint32, bitcast=True))
    b_t = (sign * start) * (b_state >> 32) + sign * b_e.to(tl.int64) + weight * b_number
    b_next, b_remainder = _divided(b_t + (to.to(tl.int64) << 34), m, by_to.to(tl.uint32, bitcast=True))
    return b_next - 17179869184, (b_rest.to(tl.uint32) * m + b_remainder).to(tl.int64)


@triton.jit
def _relax(pointers, numbers, o_x, m_x, left):
    """Adds up squares as in gpu.py, and keeps the largest alarm, for an f or a Y that does not fit. With a spill, the
    remainder is saved there and restarts from 0."""
    p_state, p_f, p_read, p_copy, p_spill = pointers
    step, UNIT = numbers
    b_state = passes.load(p_state, o_x, m_x)
    b_f, b_g = _mixed(p_f, p_read, o_x, m_x, step)
    b_number, b_fits = _integer(b_g, UNIT)
    b_old = b_state & 0xFFFFFFFF
    b_next, b_r = _stepped(b_state, b_old if p_spill is None else b_old * 0, b_number, step)
    b_step = (b_next - (b_state >> 32)).to(tl.float32) * UNIT
    b_size = b_next.to(tl.int32).to(tl.float32) * UNIT
    b_alarm = _alarm(b_f, b_fits & (b_next >= -2147483648) & (b_next < 2147483648))
    squares = passes.where(left, 1, b_step * b_step, 0.0), passes.where(left, 1, b_size * b_size, 0.0)
    b_alarm = passes.where(left, 1, b_alarm, 0)
    b_next = passes.where(left, 1, b_next, b_state >> 32)
    b_r = passes.where(left, 1, b_r, b_old)  # even if it is spilled
    stores = ()
    if p_spill is not None:
        stores += ((p_spill, b_old),)
    stores += ((p_state, (b_next << 32) | b_r), (p_copy, _decoded(p_copy, b_next, UNIT)))
    return stores, (squares[0], squares[1], b_alarm)


@triton.jit(do_not_specialize=NUMBERS)
def _relax_kernel(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, p_ends, n, now, sixteenth,
    start, to, sign, weight, by_start, by_to, gamma, rest,
    UNIT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pointers = p_state, p_f, p_read, p_copy, p_spill
    numbers = (start, to, sign, weight, by_start, by_to, gamma, rest), UNIT
    each = p_ends, now, sixteenth
    passes.each_block(_relax, pointers, numbers, n, each, BLOCK, p_alarm, LANES)


@triton.jit(do_not_specialize=NUMBERS)
def _relax_norms_kernel(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, p_partial, p_ends, n, now, sixteenth,
    start, to, sign, weight, by_start, by_to, gamma, rest,
    UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    pointers = p_state, p_f, p_read, p_copy, p_spill
    numbers = (start, to, sign, weight, by_start, by_to, gamma, rest), UNIT
    b_zero = tl.full((LANES,), 0.0, tl.float32)
    totals = b_zero, b_zero, tl.full((LANES,), 0, tl.int32)
    each = p_ends, now, sixteenth
    totals = passes.each_chunk(_relax, pointers, numbers, totals, n, each, gpu.RELAXED, ROWS, LANES)
    passes.store_totals(p_partial, totals[:2], LANES)
    passes.raise_alarm(p_alarm, totals[2], passes.offsets(LANES), LANES)


@triton.jit
def _previous(b_state, p_f, p_read, o_x, m_x, step, UNIT: tl.constexpr):
    """Y and R before the half-step."""
    _, b_g = _mixed(p_f, p_read, o_x, m_x, step)
    b_number, _ = _integer(b_g, UNIT)
    return _stepped(b_state, b_state & 0xFFFFFFFF, b_number, step)


@triton.jit
def _invert(pointers, numbers, o_x, m_x, left):
    """p_read, if it is not None, is p_copy. With a spill, the remainder is restored from there."""
    p_state, p_f, p_read, p_copy, p_spill, adjoints = pointers
    step, adjoint_step, UNIT = numbers
    b_state = passes.load(p_state, o_x, m_x)
    b_y, b_r = _previous(b_state, p_f, p_read, o_x, m_x, step, UNIT)
    if p_spill is not None:
        b_r = passes.load(p_spill, o_x, m_x).to(tl.int64) & 0xFFFFFFFF
    b_y = passes.where(left, 1, b_y, b_state >> 32)
    b_r = passes.where(left, 1, b_r, b_state & 0xFFFFFFFF)
    stores = gpu._update(adjoints, adjoint_step, o_x, m_x, left)
    stores += ((p_state, (b_y << 32) | b_r), (p_copy, _decoded(p_copy, b_y, UNIT)))
    return stores, ()


@triton.jit(do_not_specialize=NUMBERS)
def _invert_kernel(
    p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_seed, p_spill, p_ends, n, now, sixteenth,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c, kept,
    UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    pointers = p_state, p_f, p_read, p_copy, p_spill, (p_adjoint, p_vjp, p_other, p_seed)
    step = start, to, sign, weight, by_start, by_to, gamma, rest
    numbers = step, (adjoint_a, adjoint_b, adjoint_c, kept), UNIT
    passes.each_block(_invert, pointers, numbers, n, (p_ends, now, sixteenth), BLOCK)


@triton.jit
def _compare(pointers, numbers, o_x, m_x, left):
    """As in gpu.py."""
    p_state, p_f, p_read, p_initial, adjoints = pointers
    step, adjoint_step, floor, UNIT = numbers
    b_state = passes.load(p_state, o_x, m_x)
    b_start, _ = _integer(passes.load(p_initial, o_x, m_x), UNIT)
    b_y, b_r = _previous(b_state, p_f, p_read, o_x, m_x, step, UNIT)
    b_error = (b_y - b_start).to(tl.float32) * UNIT + b_r.to(tl.float32)
    b_value = (b_state >> 32).to(tl.int32).to(tl.float32) * UNIT
    return gpu._update(adjoints, adjoint_step, o_x, m_x, left), (gpu._ratio_bits(b_error, b_value, floor),)


@triton.jit(do_not_specialize=NUMBERS)
def _compare_kernel(
    p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, p_floor, p_worst, n,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    pointers = p_state, p_f, p_read, p_initial, (p_adjoint, p_vjp, p_other, p_seed)
    step = start, to, sign, weight, by_start, by_to, gamma, rest
    numbers = step, (adjoint_a, adjoint_b, adjoint_c, None), tl.load(p_floor), UNIT
    totals = (tl.full((LANES,), 0, tl.int32),)
    each = None, None, None
    totals = passes.each_chunk(_compare, pointers, numbers, totals, n, each, gpu.COMPARED, ROWS, LANES)
    passes.store_totals(p_worst, totals, LANES)


def reciprocal(n: int) -> int:
    """floor(2^31 / n) + 1, its 32 bits as a signed integer."""
    bits = 2**31 // n + 1
    return bits - 2**32 if bits >= 2**31 else bits


class HalfStep(reference_exact.HalfStep):
    def __init__(self, state: Tensor, step: Radix) -> None:
        super().__init__(state, step)
        self._warps = gpu.warps(state.device)

    def decoded(self, dtype: torch.dtype, rows: Any = ...) -> Tensor:
        state = self.state[rows]
        copy = torch.empty_like(state, dtype=dtype)
        launch_blocks(_decode_kernel, self._warps, BLOCK, (state, copy), (), (self.step.unit,))
        return copy

    def _encode(self, x: Tensor) -> None:
        launch_blocks(_encode_kernel, self._warps, BLOCK, (self.state, x, self.alarm), (), (self.step.unit, LANES))

    def _numbers(self, f_z: Tensor, copy: Tensor, backwards: bool) -> tuple[int, ...]:
        """The arguments of the step or of its inverse."""
        p, d, sign, gamma = self.step.p, self.step.d, self.step.sign, self.step.gamma
        if backwards:
            p, d = d, p
        wide = torch.float64 if torch.float64 in (f_z.dtype, copy.dtype) else torch.float32
        mix = gpu.bits_of(gamma, wide), gpu.bits_of(1 - gamma, wide)
        return p, d, sign, d - sign * p, reciprocal(p), reciprocal(d), *mix

    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        tensors, numbers = (self.state, f_z, z, copy, self._spill(), self.alarm), self._numbers(f_z, copy, False)
        unit = self.step.unit
        if partial is None:
            launch_blocks(_relax_kernel, self._warps, BLOCK, (*tensors, None), (None, None, *numbers), (unit, LANES))
        else:
            launch_chunks(_relax_norms_kernel, self._warps, (*tensors, partial, None), (None, None, *numbers), (unit,))

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints) -> None:
        tensors = self.state, f_z, z, copy, *adjoints, self._take_back(), None
        bits = gpu.adjoint_bits(self.step, copy.dtype)
        numbers = None, None, *self._numbers(f_z, copy, True), *bits, None
        launch_blocks(_invert_kernel, self._warps, BLOCK, tensors, numbers, (self.step.unit,))

    def _compare(
        self, f_z: Tensor, z: Tensor | None, initial: Tensor, adjoints: Adjoints, floor: Tensor, maxima: Tensor
    ) -> None:
        tensors = self.state, f_z, z, initial, *adjoints, floor, maxima
        numbers = *self._numbers(f_z, initial, True), *gpu.adjoint_bits(self.step, initial.dtype)
        launch_chunks(_compare_kernel, self._warps, tensors, numbers, (self.step.unit,))
