"""The exact half-steps in Triton: reference_exact.py with a program for each block or chunk, as in gpu.py.

Integers throughout, and float32 to convert: no float64 instruction, unless f itself is in float64.

A half-step and its inverse are one function, with p and d exchanged:

    e = R mod from, R = floor(R / from)
    T = sign (from Y + e) + weight F
    Y = floor(T / to), R = R to + (T mod to)

`from` and `to` are arguments, so that no beta is compiled for. To divide by such an n <= 64 is to multiply by its
reciprocal m = floor(2^31 / n) + 1: floor(x / n) = floor(x m / 2^31) for 0 <= x < n 2^19. For m n exceeds 2^31 by
e <= n, so that x m / 2^31 exceeds x / n by x e / (2^31 n) < n e / (2^12 n) <= 1 / n, and the next integer is at least
1 / n away. A longer number is divided in two digits, of which the lower has 19 bits.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import gpu, reference_exact
from .half_step import LANES, Linear
from .launch import Kernel, launch_blocks, launch_chunks
from .radix import Radix

BLOCK = 512


@triton.jit
def _load(p_x, m_x):
    """What is masked is 0, and adds nothing to a sum or a maximum."""
    if m_x is None:
        return tl.load(p_x)
    else:  # noqa: RET505
        return tl.load(p_x, mask=m_x, other=0)


@triton.jit
def _mixed(b_f, b_read, gamma, rest):
    """gamma f + (1 - gamma) z, where z is what f read; without it, f."""
    if b_read is None:
        return b_f
    elif b_f.dtype == tl.float64 or b_read.dtype == tl.float64:  # noqa: RET505
        b_g = gpu._number(gamma, tl.float64) * b_f.to(tl.float64)
        return b_g + gpu._number(rest, tl.float64) * b_read.to(tl.float64)
    else:
        b_g = gpu._number(gamma, tl.float32) * b_f.to(tl.float32)
        return b_g + gpu._number(rest, tl.float32) * b_read.to(tl.float32)


@triton.jit
def _integer(b_g, SCALE: tl.constexpr):
    """g in units of 2^-G, rounded to the nearest even, and where it fits into 32 bits (it is 0 elsewhere)."""
    if b_g.dtype == tl.float64:
        b_scaled = b_g * SCALE
        b_size = tl.abs(b_scaled)
        b_whole = tl.where(b_size < 4503599627370496.0, (b_size + 4503599627370496.0) - 4503599627370496.0, b_size)
    else:
        b_scaled = b_g.to(tl.float32) * SCALE
        b_size = tl.abs(b_scaled)
        b_whole = tl.where(b_size < 8388608.0, (b_size + 8388608.0) - 8388608.0, b_size)
    b_fits = b_whole < 2147483648.0
    b_number = tl.where(b_fits, b_whole, 0.0).to(tl.int32)
    return tl.where(b_scaled < 0.0, -b_number, b_number).to(tl.int64), b_fits


@triton.jit
def _store_decoded(p_copy, b_y, m_x, UNIT: tl.constexpr):
    if p_copy.dtype.element_ty == tl.float64:
        tl.store(p_copy, b_y.to(tl.float64) * UNIT, mask=m_x)
    else:
        tl.store(p_copy, (b_y.to(tl.int32).to(tl.float32) * UNIT).to(p_copy.dtype.element_ty), mask=m_x)


@triton.jit
def _divided(b_x, n, by):
    """Quotient and remainder of 0 <= x < 2^41 by n, in 32-bit arithmetic but for the ends."""
    b_high = (b_x >> 19).to(tl.uint32)
    b_first = tl.umulhi(b_high * 2, by)
    b_low = ((b_high - b_first * n) << 19) | (b_x.to(tl.uint32) & 0x7FFFF)
    b_second = tl.umulhi(b_low * 2, by)
    return (b_first.to(tl.int64) << 19) + b_second.to(tl.int64), b_low - b_second * n


@triton.jit
def _stepped(b_state, b_r, b_number, start, to, sign, weight, by_start, by_to):
    """Y and R after a half-step, or after its inverse. Y is right if its magnitude is below 2^34."""
    n = start.to(tl.uint32, bitcast=True)
    m = to.to(tl.uint32, bitcast=True)
    b_rest, b_e = _divided(b_r, n, by_start.to(tl.uint32, bitcast=True))
    b_t = (sign * start) * (b_state >> 32) + sign * b_e.to(tl.int64) + weight * b_number
    b_next, b_remainder = _divided(b_t + (to.to(tl.int64) << 34), m, by_to.to(tl.uint32, bitcast=True))
    return b_next - 17179869184, (b_rest.to(tl.uint32) * m + b_remainder).to(tl.int64)


@triton.jit
def _relax_block(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, o_x, o_lane, m_x, start, to, sign, weight, by_start, by_to,
    gamma, rest, SCALE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Y before and after."""
    b_state = _load(p_state + o_x, m_x)
    b_f = _load(p_f + o_x, m_x)
    b_read = None if p_read is None else _load(p_read + o_x, m_x)
    b_y = b_state >> 32
    b_r = b_state & 0xFFFFFFFF
    if p_spill is not None:
        tl.store(p_spill + o_x, b_r.to(tl.int32), mask=m_x)
        b_r = b_r * 0
    b_number, b_fits = _integer(_mixed(b_f, b_read, gamma, rest), SCALE)
    b_next, b_r = _stepped(b_state, b_r, b_number, start, to, sign, weight, by_start, by_to)
    tl.store(p_state + o_x, (b_next << 32) | b_r, mask=m_x)
    _store_decoded(p_copy + o_x, b_next, m_x, UNIT)
    b_fits = b_fits & (b_next >= -2147483648) & (b_next < 2147483648)
    # Only where something is wrong is there anything to store; of several in a lane, any will do.
    b_bits = tl.maximum(gpu._magnitude_bits(b_f), 1)
    tl.store(p_alarm + (o_x * 0 + o_lane), b_bits, mask=b_fits == 0)
    return b_y, b_next


COEFFICIENTS = ["start", "to", "sign", "weight", "by_start", "by_to", "gamma", "rest"]
ADJOINT_COEFFICIENTS = ["adjoint_a", "adjoint_b", "adjoint_c"]


@triton.jit
def _relax(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, n, block, half_step,
    start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = block.to(tl.int64) * BLOCK
    p_state += first
    p_f += first
    p_copy += first
    p_alarm += half_step * LANES
    if p_read is not None:
        p_read += first
    if p_spill is not None:
        p_spill += first
    o_lane = gpu._offsets(LANES)[None, :]
    o_x = tl.arange(0, BLOCK // LANES)[:, None] * LANES + o_lane
    if first + BLOCK <= n:
        _relax_block(
            p_state, p_f, p_read, p_copy, p_spill, p_alarm, o_x, o_lane, None,
            start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT,
        )  # fmt: skip
    else:
        _relax_block(
            p_state, p_f, p_read, p_copy, p_spill, p_alarm, o_x, o_lane, o_x < n - first,
            start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", "half_step", *COEFFICIENTS])
def _relax_kernel(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, n, half_step, start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _relax(
        p_state, p_f, p_read, p_copy, p_spill, p_alarm, n, tl.program_id(0), half_step,
        start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, LANES, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "first", "half_step", *COEFFICIENTS])
def _relax_leaves_kernel(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, n, first, half_step,
    start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    _relax(
        gpu._of(p_state, first, at), gpu._of(p_f, first, at), gpu._of(p_read, first, at), gpu._of(p_copy, first, at),
        gpu._of(p_spill, first, at), gpu._of(p_alarm, first, at), gpu._plain(gpu._of(n, first, at)),
        at - gpu._plain(gpu._of(first, first, at)), half_step,
        start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, LANES, BLOCK,
    )  # fmt: skip


@triton.jit
def _relax_rows(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, left, start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b_change = tl.full((LANES,), 0.0, tl.float32)
    b_value = tl.full((LANES,), 0.0, tl.float32)
    for row in tl.range(gpu._rows_left(left, ROWS, LANES)):
        o_lane = gpu._offsets(LANES)
        o_x = row * LANES + o_lane
        m_x = None if left is None else o_x < left
        b_y, b_next = _relax_block(
            p_state, p_f, p_read, p_copy, p_spill, p_alarm, o_x, o_lane, m_x,
            start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT,
        )  # fmt: skip
        b_step = (b_next - b_y).to(tl.float32) * UNIT
        b_size = b_next.to(tl.int32).to(tl.float32) * UNIT
        b_change += b_step * b_step
        b_value += b_size * b_size
    return b_change, b_value


@triton.jit
def _relax_norms(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, p_partial, n, chunk, chunks, half_step,
    start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    chunk = chunk.to(tl.int64)
    first = chunk * (ROWS * LANES)
    p_state += first
    p_f += first
    p_copy += first
    p_alarm += half_step * LANES
    if p_read is not None:
        p_read += first
    if p_spill is not None:
        p_spill += first
    if first + ROWS * LANES <= n:
        b_change, b_value = _relax_rows(
            p_state, p_f, p_read, p_copy, p_spill, p_alarm, None,
            start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, ROWS, LANES,
        )  # fmt: skip
    else:
        b_change, b_value = _relax_rows(
            p_state, p_f, p_read, p_copy, p_spill, p_alarm, n - first,
            start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, ROWS, LANES,
        )  # fmt: skip
    gpu._store_sums(p_partial, chunk, chunks, b_change, b_value, LANES)


@triton.jit(do_not_specialize=["n", "half_step", *COEFFICIENTS])
def _relax_norms_kernel(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, p_partial, n, half_step,
    start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    _relax_norms(
        p_state, p_f, p_read, p_copy, p_spill, p_alarm, p_partial, n, tl.program_id(0), tl.num_programs(0), half_step,
        start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, ROWS, LANES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "first", "half_step", *COEFFICIENTS])
def _relax_norms_leaves_kernel(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, p_partial, n, first, half_step,
    start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    n_leaf = gpu._plain(gpu._of(n, first, at))
    _relax_norms(
        gpu._of(p_state, first, at), gpu._of(p_f, first, at), gpu._of(p_read, first, at), gpu._of(p_copy, first, at),
        gpu._of(p_spill, first, at), gpu._of(p_alarm, first, at), gpu._of(p_partial, first, at), n_leaf,
        at - gpu._plain(gpu._of(first, first, at)), tl.cdiv(n_leaf, ROWS * LANES), half_step,
        start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, ROWS, LANES,
    )  # fmt: skip


@triton.jit
def _invert_block(
    p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_spill, o_x, m_x,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    b_state = _load(p_state + o_x, m_x)
    b_f = _load(p_f + o_x, m_x)
    b_read = None if p_read is None else _load(p_read + o_x, m_x)
    b_spill = None if p_spill is None else _load(p_spill + o_x, m_x)
    if p_adjoint is not None:
        b_adjoint = _load(p_adjoint + o_x, m_x)
        b_vjp = _load(p_vjp + o_x, m_x)
        b_other = None if p_other is None else _load(p_other + o_x, m_x)
        tl.store(p_adjoint + o_x, gpu._updated(b_adjoint, b_vjp, b_other, adjoint_a, adjoint_b, adjoint_c), mask=m_x)
    b_number, _ = _integer(_mixed(b_f, b_read, gamma, rest), SCALE)
    b_y, b_r = _stepped(b_state, b_state & 0xFFFFFFFF, b_number, start, to, sign, weight, by_start, by_to)
    if b_spill is not None:
        b_r = b_spill.to(tl.int64) & 0xFFFFFFFF
    tl.store(p_state + o_x, (b_y << 32) | b_r, mask=m_x)
    _store_decoded(p_copy + o_x, b_y, m_x, UNIT)


@triton.jit
def _invert(
    p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_spill, n, block,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """p_read, if it is not None, is p_copy."""
    first = block.to(tl.int64) * BLOCK
    p_state += first
    p_f += first
    p_copy += first
    if p_read is not None:
        p_read += first
    if p_adjoint is not None:
        p_adjoint += first
        p_vjp += first
    if p_other is not None:
        p_other += first
    if p_spill is not None:
        p_spill += first
    o_x = gpu._offsets(BLOCK)
    if first + BLOCK <= n:
        _invert_block(
            p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_spill, o_x, None,
            start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c, SCALE, UNIT,
        )  # fmt: skip
    else:
        _invert_block(
            p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_spill, o_x, o_x < n - first,
            start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c, SCALE, UNIT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["n", *COEFFICIENTS, *ADJOINT_COEFFICIENTS])
def _invert_kernel(
    p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_spill, n,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    _invert(
        p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_spill, n, tl.program_id(0),
        start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c, SCALE, UNIT, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "first", *COEFFICIENTS, *ADJOINT_COEFFICIENTS])
def _invert_leaves_kernel(
    p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_spill, n, first,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    _invert(
        gpu._of(p_state, first, at), gpu._of(p_f, first, at), gpu._of(p_read, first, at), gpu._of(p_copy, first, at),
        gpu._of(p_adjoint, first, at), gpu._of(p_vjp, first, at), gpu._of(p_other, first, at),
        gpu._of(p_spill, first, at), gpu._plain(gpu._of(n, first, at)), at - gpu._plain(gpu._of(first, first, at)),
        start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c, SCALE, UNIT, BLOCK,
    )  # fmt: skip


@triton.jit
def _compare_rows(
    p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, left, floor,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b_worst = tl.full((LANES,), 0, tl.int32)
    for row in tl.range(gpu._rows_left(left, ROWS, LANES)):
        o_x = row * LANES + gpu._offsets(LANES)
        m_x = None if left is None else o_x < left
        b_state = _load(p_state + o_x, m_x)
        b_f = _load(p_f + o_x, m_x)
        b_initial = _load(p_initial + o_x, m_x)
        b_read = None if p_read is None else _load(p_read + o_x, m_x)
        if p_adjoint is not None:
            b_adjoint = _load(p_adjoint + o_x, m_x)
            b_vjp = _load(p_vjp + o_x, m_x)
            b_other = None if p_other is None else _load(p_other + o_x, m_x)
            b_next = gpu._updated(b_adjoint, b_vjp, b_other, adjoint_a, adjoint_b, adjoint_c)
            tl.store(p_adjoint + o_x, b_next, mask=m_x)
        b_number, _ = _integer(_mixed(b_f, b_read, gamma, rest), SCALE)
        b_start, _ = _integer(b_initial, SCALE)
        b_y, b_r = _stepped(b_state, b_state & 0xFFFFFFFF, b_number, start, to, sign, weight, by_start, by_to)
        b_error = (b_y - b_start).to(tl.float32) * UNIT + b_r.to(tl.float32)
        b_value = (b_state >> 32).to(tl.int32).to(tl.float32) * UNIT
        b_worst = tl.maximum(b_worst, gpu._ratio_bits(b_error, b_value, floor))
    return b_worst


@triton.jit
def _compare(
    p_state, p_f, p_read, p_initial, p_floor, p_adjoint, p_vjp, p_other, p_worst, n, chunk,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    chunk = chunk.to(tl.int64)
    first = chunk * (ROWS * LANES)
    p_state += first
    p_f += first
    p_initial += first
    if p_read is not None:
        p_read += first
    if p_adjoint is not None:
        p_adjoint += first
        p_vjp += first
    if p_other is not None:
        p_other += first
    floor = tl.load(p_floor)
    if first + ROWS * LANES <= n:
        b_worst = _compare_rows(
            p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, None, floor,
            start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
            SCALE, UNIT, ROWS, LANES,
        )  # fmt: skip
    else:
        b_worst = _compare_rows(
            p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, n - first, floor,
            start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
            SCALE, UNIT, ROWS, LANES,
        )  # fmt: skip
    tl.store(p_worst + chunk * LANES + gpu._offsets(LANES), b_worst)


@triton.jit(do_not_specialize=["n", *COEFFICIENTS, *ADJOINT_COEFFICIENTS])
def _compare_kernel(
    p_state, p_f, p_read, p_initial, p_floor, p_adjoint, p_vjp, p_other, p_worst, n,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    _compare(
        p_state, p_f, p_read, p_initial, p_floor, p_adjoint, p_vjp, p_other, p_worst, n, tl.program_id(0),
        start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
        SCALE, UNIT, ROWS, LANES,
    )  # fmt: skip


@triton.jit(do_not_specialize=["n", "first", *COEFFICIENTS, *ADJOINT_COEFFICIENTS])
def _compare_leaves_kernel(
    p_state, p_f, p_read, p_initial, p_floor, p_adjoint, p_vjp, p_other, p_worst, n, first,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    _compare(
        gpu._of(p_state, first, at), gpu._of(p_f, first, at), gpu._of(p_read, first, at),
        gpu._of(p_initial, first, at), gpu._of(p_floor, first, at), gpu._of(p_adjoint, first, at),
        gpu._of(p_vjp, first, at), gpu._of(p_other, first, at), gpu._of(p_worst, first, at),
        gpu._plain(gpu._of(n, first, at)), at - gpu._plain(gpu._of(first, first, at)),
        start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
        SCALE, UNIT, ROWS, LANES,
    )  # fmt: skip


RELAX = Kernel(_relax_kernel, _relax_leaves_kernel)
RELAX_NORMS = Kernel(_relax_norms_kernel, _relax_norms_leaves_kernel)
INVERT = Kernel(_invert_kernel, _invert_leaves_kernel)
COMPARE = Kernel(_compare_kernel, _compare_leaves_kernel)


def reciprocal(n: int) -> int:
    """floor(2^31 / n) + 1, its 32 bits as a signed integer."""
    bits = 2**31 // n + 1
    return bits - 2**32 if bits >= 2**31 else bits


class HalfStep(reference_exact.HalfStep):
    def __init__(
        self, state: Tensor, copy: Tensor, steps: Sequence[Radix], spilled: list[Tensor] | None = None
    ) -> None:
        super().__init__(state, copy, steps, spilled)
        self._adjoint_bits = gpu.Bits(torch.promote_types(copy.dtype, torch.float32))
        self._warps = gpu.warps(state.device)
        self._step: Radix | None = None
        self._f_dtype: torch.dtype | None = None
        self._numbers: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
        self._scales: tuple[float, float] = 1.0, 1.0

    def _numbers_of(self, step: Radix, f: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the way there and the way back are given, as long as it is the same step."""
        if step is not self._step or f.dtype != self._f_dtype:
            p, d, sign = step.p, step.d, step.sign
            wide = torch.float64 if torch.float64 in (f.dtype, self.copy.dtype) else torch.float32
            mix = gpu.bits_of(step.gamma, wide), gpu.bits_of(1 - step.gamma, wide)
            there = p, d, sign, d - sign * p, reciprocal(p), reciprocal(d), *mix
            back = d, p, sign, p - sign * d, reciprocal(d), reciprocal(p), *mix
            self._numbers, self._scales = (there, back), (1 / step.unit, step.unit)
            self._step, self._f_dtype = step, f.dtype
        return self._numbers

    def _read(self, read: Tensor | None, step: Radix) -> Tensor | None:
        return self.in_order_or_none(read) if step.gamma != 1 else None

    def _relax(self, f: Tensor, read: Tensor | None, spill: Tensor | None, step: Radix) -> None:
        there, _ = self._numbers_of(step, f)
        tensors = self.state, self.in_order(f), self._read(read, step), self.copy, spill, self.alarm
        constants = *self._scales, LANES
        launch_blocks(RELAX, self._warps, BLOCK, tensors, (self.done, *there), constants)

    def _relax_norms(self, f: Tensor, read: Tensor | None, spill: Tensor | None, step: Radix) -> Tensor:
        there, _ = self._numbers_of(step, f)
        partial = self.partial_sums()
        tensors = self.state, self.in_order(f), self._read(read, step), self.copy, spill, self.alarm, partial
        launch_chunks(RELAX_NORMS, self._warps, tensors, (self.done, *there), self._scales)
        return partial

    def _invert(
        self,
        f: Tensor,
        adjoint: Tensor | None,
        vjp: Tensor | None,
        other: Tensor | None,
        spill: Tensor | None,
        step: Radix,
        adjoint_step: Linear,
    ) -> None:
        _, back = self._numbers_of(step, f)
        seed = other if adjoint_step.c and adjoint is not None else None
        before = self.state, self.in_order(f), self._read(self.copy, step), self.copy
        tensors = *before, adjoint, self.in_order_or_none(vjp), seed, spill
        numbers = *back, *self._adjoint_bits(adjoint_step)
        launch_blocks(INVERT, self._warps, BLOCK, tensors, numbers, self._scales)

    def invert_compare(
        self,
        f: Tensor,
        initial: Tensor,
        floor: Tensor,
        adjoint: Tensor | None,
        vjp: Tensor | None,
        other: Tensor | None,
        step: Radix,
        adjoint_step: Linear,
    ) -> Tensor:
        _, back = self._numbers_of(step, f)
        worst = self.partial_maxima()
        seed = other if adjoint_step.c and adjoint is not None else None
        before = self.state, self.in_order(f), self._read(self.copy, step), self.in_order(initial), floor
        tensors = *before, adjoint, self.in_order_or_none(vjp), seed, worst
        numbers = *back, *self._adjoint_bits(adjoint_step)
        launch_chunks(COMPARE, self._warps, tensors, numbers, self._scales)
        return worst
