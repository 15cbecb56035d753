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
from .half_step import LANES, Linear, in_order
from .launch import launch_blocks, launch_chunks
from .radix import Radix

BLOCK = 512


COEFFICIENTS = ["start", "to", "sign", "weight", "by_start", "by_to", "gamma", "rest"]
ADJOINT_COEFFICIENTS = ["adjoint_a", "adjoint_b", "adjoint_c"]


@triton.jit
def _mixed(b_f, p_read, o_x, m_x, gamma, rest):
    """gamma f + (1 - gamma) z, where z is what f read; without it, f."""
    if p_read is None:
        return b_f
    elif b_f.dtype == tl.float64 or p_read.dtype.element_ty == tl.float64:  # noqa: RET505
        b_g = gpu._number(gamma, tl.float64) * b_f.to(tl.float64)
        return b_g + gpu._number(rest, tl.float64) * gpu._load(p_read + o_x, m_x).to(tl.float64)
    else:
        b_g = gpu._number(gamma, tl.float32) * b_f.to(tl.float32)
        return b_g + gpu._number(rest, tl.float32) * gpu._load(p_read + o_x, m_x).to(tl.float32)


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
def _alarm(b_f, b_fits):
    return tl.where(b_fits, 0, tl.maximum(gpu._magnitude_bits(b_f), 1))


@triton.jit
def _raise_alarm(p_alarm, b_alarm, o_x, LANES: tl.constexpr):
    """Only where something is wrong is there anything to store; of several in a lane, any will do."""
    o_lane = tl.max_contiguous(tl.multiple_of(o_x % LANES, 2), 2)
    tl.store(p_alarm + o_lane, b_alarm, mask=b_alarm != 0)


@triton.jit
def _encode(p_state, p_x, p_alarm, o_x, m_x, SCALE: tl.constexpr, LANES: tl.constexpr):
    b_x = gpu._load(p_x + o_x, m_x)
    b_number, b_fits = _integer(b_x, SCALE)
    tl.store(p_state + o_x, b_number << 32, mask=m_x)
    _raise_alarm(p_alarm, _alarm(b_x, b_fits), o_x, LANES)


@triton.jit(do_not_specialize=["n"])
def _encode_kernel(p_state, p_x, p_alarm, n, SCALE: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    o_x = first + gpu._offsets(BLOCK)
    if first + BLOCK <= n:
        _encode(p_state, p_x, p_alarm, o_x, None, SCALE, LANES)
    else:
        _encode(p_state, p_x, p_alarm, o_x, o_x < n, SCALE, LANES)


@triton.jit
def _decode(p_state, p_copy, o_x, m_x, UNIT: tl.constexpr):
    _store_decoded(p_copy + o_x, gpu._load(p_state + o_x, m_x) >> 32, m_x, UNIT)


@triton.jit(do_not_specialize=["n"])
def _decode_kernel(p_state, p_copy, n, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    o_x = first + gpu._offsets(BLOCK)
    if first + BLOCK <= n:
        _decode(p_state, p_copy, o_x, None, UNIT)
    else:
        _decode(p_state, p_copy, o_x, o_x < n, UNIT)


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
def _relaxed(
    p_state, p_f, p_read, p_spill, o_x, m_x, start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr,
):  # fmt: skip
    """The old state, Y and R after the half-step, and the alarm: 0, or where f or Y does not fit, the bits of f's
    magnitude. With a spill, R starts again from 0."""
    b_state = gpu._load(p_state + o_x, m_x)
    b_f = gpu._load(p_f + o_x, m_x)
    b_number, b_fits = _integer(_mixed(b_f, p_read, o_x, m_x, gamma, rest), SCALE)
    b_r = b_state & 0xFFFFFFFF
    if p_spill is not None:
        b_r = b_r * 0
    b_next, b_r = _stepped(b_state, b_r, b_number, start, to, sign, weight, by_start, by_to)
    return b_state, b_next, b_r, _alarm(b_f, b_fits & (b_next >= -2147483648) & (b_next < 2147483648))


@triton.jit
def _store_relaxed(p_state, p_copy, p_spill, b_state, b_next, b_r, o_x, m_x, UNIT: tl.constexpr):
    if p_spill is not None:
        tl.store(p_spill + o_x, (b_state & 0xFFFFFFFF).to(tl.int32), mask=m_x)
    tl.store(p_state + o_x, (b_next << 32) | b_r, mask=m_x)
    _store_decoded(p_copy + o_x, b_next, m_x, UNIT)


@triton.jit
def _relax(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, o_x, m_x, start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b_state, b_next, b_r, b_alarm = _relaxed(
        p_state, p_f, p_read, p_spill, o_x, m_x, start, to, sign, weight, by_start, by_to, gamma, rest, SCALE
    )
    _store_relaxed(p_state, p_copy, p_spill, b_state, b_next, b_r, o_x, m_x, UNIT)
    _raise_alarm(p_alarm, b_alarm, o_x, LANES)


@triton.jit(do_not_specialize=["n", "half_step", *COEFFICIENTS])
def _relax_kernel(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, n, half_step, start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    o_x = first + gpu._offsets(BLOCK)
    p_alarm += half_step * LANES
    if first + BLOCK <= n:
        _relax(
            p_state, p_f, p_read, p_copy, p_spill, p_alarm, o_x, None,
            start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, LANES,
        )  # fmt: skip
    else:
        _relax(
            p_state, p_f, p_read, p_copy, p_spill, p_alarm, o_x, o_x < n,
            start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, LANES,
        )  # fmt: skip


@triton.jit
def _relax_rows(
    p_state, p_f, p_read, p_copy, p_spill, o_x, n, b_change, b_value, b_worst,
    start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, MORE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """As in gpu.py, and the worst alarm so far."""
    m_x = None if n is None else o_x < n
    b_state, b_next, b_r, b_alarm = _relaxed(
        p_state, p_f, p_read, p_spill, o_x, m_x, start, to, sign, weight, by_start, by_to, gamma, rest, SCALE
    )
    b_step = (b_next - (b_state >> 32)).to(tl.float32) * UNIT
    b_size = b_next.to(tl.int32).to(tl.float32) * UNIT
    b_change += b_step * b_step
    b_value += b_size * b_size
    b_worst = tl.maximum(b_worst, b_alarm)
    if MORE > 0:
        b_change, b_value, b_worst = _relax_rows(
            p_state, p_f, p_read, p_copy, p_spill, o_x + LANES, n, b_change, b_value, b_worst,
            start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, MORE - 1, LANES,
        )  # fmt: skip
    _store_relaxed(p_state, p_copy, p_spill, b_state, b_next, b_r, o_x, m_x, UNIT)
    return b_change, b_value, b_worst


@triton.jit
def _relax_chunk(
    p_state, p_f, p_read, p_copy, p_spill, first, n, start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b_change = tl.full((LANES,), 0.0, tl.float32)
    b_value = tl.full((LANES,), 0.0, tl.float32)
    b_worst = tl.full((LANES,), 0, tl.int32)
    for group in tl.range(gpu._groups(None if n is None else n - first, gpu.RELAXED, ROWS, LANES)):
        o_x = first + group * (gpu.RELAXED * LANES) + gpu._offsets(LANES)
        b_change, b_value, b_worst = _relax_rows(
            p_state, p_f, p_read, p_copy, p_spill, o_x, n, b_change, b_value, b_worst,
            start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, gpu.RELAXED - 1, LANES,
        )  # fmt: skip
    return b_change, b_value, b_worst


@triton.jit(do_not_specialize=["n", "half_step", *COEFFICIENTS])
def _relax_norms_kernel(
    p_state, p_f, p_read, p_copy, p_spill, p_alarm, p_partial, n, half_step,
    start, to, sign, weight, by_start, by_to, gamma, rest,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * (ROWS * LANES)
    if first + ROWS * LANES <= n:
        b_change, b_value, b_worst = _relax_chunk(
            p_state, p_f, p_read, p_copy, p_spill, first, None,
            start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, ROWS, LANES,
        )  # fmt: skip
    else:
        b_change, b_value, b_worst = _relax_chunk(
            p_state, p_f, p_read, p_copy, p_spill, first, n,
            start, to, sign, weight, by_start, by_to, gamma, rest, SCALE, UNIT, ROWS, LANES,
        )  # fmt: skip
    gpu._store_sums(p_partial, chunk, b_change, b_value, LANES)
    tl.store(p_alarm + half_step * LANES + gpu._offsets(LANES), b_worst, mask=b_worst != 0)


@triton.jit
def _previous(
    b_state, p_f, p_read, o_x, m_x, start, to, sign, weight, by_start, by_to, gamma, rest, SCALE: tl.constexpr
):  # fmt: skip
    """Y and R before the half-step."""
    b_number, _ = _integer(_mixed(gpu._load(p_f + o_x, m_x), p_read, o_x, m_x, gamma, rest), SCALE)
    return _stepped(b_state, b_state & 0xFFFFFFFF, b_number, start, to, sign, weight, by_start, by_to)


@triton.jit
def _invert(
    p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_seed, p_spill, o_x, m_x,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """p_read, if it is not None, is p_copy."""
    b_y, b_r = _previous(
        gpu._load(p_state + o_x, m_x), p_f, p_read, o_x, m_x,
        start, to, sign, weight, by_start, by_to, gamma, rest, SCALE,
    )  # fmt: skip
    if p_spill is not None:
        b_r = gpu._load(p_spill + o_x, m_x).to(tl.int64) & 0xFFFFFFFF
    if p_adjoint is not None:
        b_next = gpu._updated(p_adjoint, p_vjp, p_other, o_x, m_x, adjoint_a, adjoint_b, adjoint_c)
        gpu._store_adjoint(p_adjoint, p_seed, b_next, o_x, m_x)
    tl.store(p_state + o_x, (b_y << 32) | b_r, mask=m_x)
    _store_decoded(p_copy + o_x, b_y, m_x, UNIT)


@triton.jit(do_not_specialize=["n", *COEFFICIENTS, *ADJOINT_COEFFICIENTS])
def _invert_kernel(
    p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_seed, p_spill, n,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    o_x = first + gpu._offsets(BLOCK)
    if first + BLOCK <= n:
        _invert(
            p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_seed, p_spill, o_x, None,
            start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c, SCALE, UNIT,
        )  # fmt: skip
    else:
        _invert(
            p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_seed, p_spill, o_x, o_x < n,
            start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c, SCALE, UNIT,
        )  # fmt: skip


@triton.jit
def _compare_rows(
    p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, o_x, n, b_worst, floor,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr, MORE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """As in gpu.py."""
    m_x = None if n is None else o_x < n
    b_state = gpu._load(p_state + o_x, m_x)
    b_start, _ = _integer(gpu._load(p_initial + o_x, m_x), SCALE)
    b_y, b_r = _previous(b_state, p_f, p_read, o_x, m_x, start, to, sign, weight, by_start, by_to, gamma, rest, SCALE)
    b_error = (b_y - b_start).to(tl.float32) * UNIT + b_r.to(tl.float32)
    b_value = (b_state >> 32).to(tl.int32).to(tl.float32) * UNIT
    b_worst = tl.maximum(b_worst, gpu._ratio_bits(b_error, b_value, floor))
    if p_adjoint is not None:
        b_next = gpu._updated(p_adjoint, p_vjp, p_other, o_x, m_x, adjoint_a, adjoint_b, adjoint_c)
    if MORE > 0:
        b_worst = _compare_rows(
            p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, o_x + LANES, n, b_worst, floor,
            start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
            SCALE, UNIT, MORE - 1, LANES,
        )  # fmt: skip
    if p_adjoint is not None:
        gpu._store_adjoint(p_adjoint, p_seed, b_next, o_x, m_x)
    return b_worst


@triton.jit
def _compare_chunk(
    p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, first, n, floor,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b_worst = tl.full((LANES,), 0, tl.int32)
    for group in tl.range(gpu._groups(None if n is None else n - first, gpu.COMPARED, ROWS, LANES)):
        o_x = first + group * (gpu.COMPARED * LANES) + gpu._offsets(LANES)
        b_worst = _compare_rows(
            p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, o_x, n, b_worst, floor,
            start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
            SCALE, UNIT, gpu.COMPARED - 1, LANES,
        )  # fmt: skip
    return b_worst


@triton.jit(do_not_specialize=["n", *COEFFICIENTS, *ADJOINT_COEFFICIENTS])
def _compare_kernel(
    p_state, p_f, p_read, p_initial, p_floor, p_adjoint, p_vjp, p_other, p_seed, p_worst, n,
    start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
    SCALE: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * (ROWS * LANES)
    floor = tl.load(p_floor)
    if first + ROWS * LANES <= n:
        b_worst = _compare_chunk(
            p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, first, None, floor,
            start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
            SCALE, UNIT, ROWS, LANES,
        )  # fmt: skip
    else:
        b_worst = _compare_chunk(
            p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, first, n, floor,
            start, to, sign, weight, by_start, by_to, gamma, rest, adjoint_a, adjoint_b, adjoint_c,
            SCALE, UNIT, ROWS, LANES,
        )  # fmt: skip
    tl.store(p_worst + chunk * LANES + gpu._offsets(LANES), b_worst)


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

    @staticmethod
    def encoded(x: Tensor, like: Tensor, radix: Radix) -> tuple[Tensor, Tensor]:
        state = torch.empty_like(like, dtype=torch.int64)
        alarm = torch.zeros(LANES, dtype=torch.int32, device=x.device)
        tensors = state, in_order(x, state), alarm
        launch_blocks(_encode_kernel, gpu.warps(x.device), BLOCK, tensors, (), (1 / radix.unit, LANES))
        return state, alarm

    @staticmethod
    def decoded(state: Tensor, dtype: torch.dtype, radix: Radix) -> Tensor:
        copy = torch.empty_like(state, dtype=dtype)
        launch_blocks(_decode_kernel, gpu.warps(state.device), BLOCK, (state, copy), (), (radix.unit,))
        return copy

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
        launch_blocks(_relax_kernel, self._warps, BLOCK, tensors, (self.done, *there), constants)

    def _relax_norms(self, f: Tensor, read: Tensor | None, spill: Tensor | None, step: Radix) -> Tensor:
        there, _ = self._numbers_of(step, f)
        partial = self.partial_sums()
        tensors = self.state, self.in_order(f), self._read(read, step), self.copy, spill, self.alarm, partial
        launch_chunks(_relax_norms_kernel, self._warps, tensors, (self.done, *there), self._scales)
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
        seed: Tensor | None,
    ) -> None:
        _, back = self._numbers_of(step, f)
        other = other if adjoint_step.c and adjoint is not None else None
        before = self.state, self.in_order(f), self._read(self.copy, step), self.copy
        tensors = *before, adjoint, self.in_order_or_none(vjp), other, seed, spill
        numbers = *back, *self._adjoint_bits(adjoint_step)
        launch_blocks(_invert_kernel, self._warps, BLOCK, tensors, numbers, self._scales)

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
        seed: Tensor | None = None,
    ) -> Tensor:
        _, back = self._numbers_of(step, f)
        worst = self.partial_maxima()
        other = other if adjoint_step.c and adjoint is not None else None
        before = self.state, self.in_order(f), self._read(self.copy, step), self.in_order(initial), floor
        tensors = *before, adjoint, self.in_order_or_none(vjp), other, seed, worst
        numbers = *back, *self._adjoint_bits(adjoint_step)
        launch_chunks(_compare_kernel, self._warps, tensors, numbers, self._scales)
        return worst
