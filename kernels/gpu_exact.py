"""The exact half-steps in Triton: exact.py with a program for each chunk, as in gpu.py.

Integers throughout, and float32 to convert: no float64 instruction, unless f itself is in float64.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from . import exact, gpu, reference


@triton.jit
def _load(p_x, m_row):
    """What is masked is 0, and adds nothing to a sum or a maximum."""
    if m_row is None:
        return tl.load(p_x)
    else:  # noqa: RET505
        return tl.load(p_x, mask=m_row, other=0)


@triton.jit
def _integer(b_f, SCALE: tl.constexpr):
    """f in units of 2^-G, rounded to the nearest even, and where it does not fit into 32 bits."""
    if b_f.dtype == tl.float64:
        b_scaled = b_f * SCALE
        b_size = tl.abs(b_scaled)
        b_whole = tl.where(b_size < 4503599627370496.0, (b_size + 4503599627370496.0) - 4503599627370496.0, b_size)
    else:
        b_scaled = b_f.to(tl.float32) * SCALE
        b_size = tl.abs(b_scaled)
        b_whole = tl.where(b_size < 8388608.0, (b_size + 8388608.0) - 8388608.0, b_size)
    b_fits = b_whole < 2147483648.0
    b_number = tl.where(b_fits, b_whole, 0.0).to(tl.int64)
    return tl.where(b_scaled < 0.0, -b_number, b_number), b_fits


@triton.jit
def _store_decoded(p_copy, b_y, m_row, UNIT: tl.constexpr):
    if p_copy.dtype.element_ty == tl.float64:
        tl.store(p_copy, b_y.to(tl.float64) * UNIT, mask=m_row)
    else:
        tl.store(p_copy, (b_y.to(tl.int32).to(tl.float32) * UNIT).to(p_copy.dtype.element_ty), mask=m_row)


@triton.jit
def _floor_divide(b_x, D: tl.constexpr):
    """floor(x / D) for |x| < 2^33 D. Triton's own division of signed integers is towards zero."""
    return ((b_x + D * 8589934592).to(tl.uint64) // D).to(tl.int64) - 8589934592


@triton.jit
def _relax_rows(
    p_state, p_f, p_copy, p_spill, p_alarm, left,
    SIGN: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, SPILL: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b_change = tl.full((LANES,), 0.0, tl.float32)
    b_value = tl.full((LANES,), 0.0, tl.float32)
    for row in tl.static_range(ROWS):
        o_row = row * LANES + tl.arange(0, LANES)
        m_row = None if left is None else o_row < left
        b_state = _load(p_state + o_row, m_row)
        b_f = _load(p_f + o_row, m_row)
        b_y = b_state >> 32
        b_r = b_state.to(tl.uint32)
        if SPILL:
            tl.store(p_spill + o_row, b_r.to(tl.int32, bitcast=True), mask=m_row)
            b_r = b_r * 0
        b_rest = b_r // P
        b_e = (b_r - b_rest * P).to(tl.int64)
        b_number, b_fits = _integer(b_f, SCALE)
        b_t = SIGN * (P * b_y + b_e) + (D - SIGN * P) * b_number
        b_next = _floor_divide(b_t, D)
        b_r = b_rest.to(tl.int64) * D + (b_t - b_next * D)
        tl.store(p_state + o_row, (b_next << 32) | b_r, mask=m_row)
        _store_decoded(p_copy + o_row, b_next, m_row, UNIT)
        b_fits = b_fits & (b_next >= -2147483648) & (b_next < 2147483648)
        # Only where something is wrong is there anything to store; of several in a lane, any will do.
        b_bits = tl.maximum(gpu._magnitude_bits(b_f), 1)
        tl.store(p_alarm + tl.arange(0, LANES), b_bits, mask=b_fits == 0)
        b_step = (b_next - b_y).to(tl.float32) * UNIT
        b_size = b_next.to(tl.int32).to(tl.float32) * UNIT
        b_change += b_step * b_step
        b_value += b_size * b_size
    return b_change, b_value


@triton.jit(do_not_specialize=["n", "half_step"])
def _relax_kernel(
    p_state, p_f, p_copy, p_spill, p_alarm, p_partial, n, half_step,
    SIGN: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
    SPILL: tl.constexpr, NORMS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * (ROWS * LANES)
    p_state += start
    p_f += start
    p_copy += start
    p_alarm += half_step * LANES
    if SPILL:
        p_spill += start
    if start + ROWS * LANES <= n:
        b_change, b_value = _relax_rows(
            p_state, p_f, p_copy, p_spill, p_alarm, None, SIGN, P, D, SCALE, UNIT, SPILL, ROWS, LANES
        )
    else:
        b_change, b_value = _relax_rows(
            p_state, p_f, p_copy, p_spill, p_alarm, n - start, SIGN, P, D, SCALE, UNIT, SPILL, ROWS, LANES
        )
    if NORMS:
        gpu._store_partial(p_partial, chunk, b_change, b_value, LANES)


@triton.jit
def _previous(b_state, b_f, SIGN: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr):
    b_number, _ = _integer(b_f, SCALE)
    b_r = b_state.to(tl.uint32)
    b_rest = b_r // D
    b_t = (b_state >> 32) * D + (b_r - b_rest * D).to(tl.int64)
    b_u = SIGN * (b_t - (D - SIGN * P) * b_number)
    if P == 1:
        return b_u, b_rest.to(tl.int64)
    b_y = _floor_divide(b_u, P)
    return b_y, b_rest.to(tl.int64) * P + (b_u - b_y * P)


@triton.jit
def _invert_rows(
    p_state, p_f, p_copy, p_adjoint, p_vjp, p_spill, left,
    SIGN: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
    A: tl.constexpr, BETA: tl.constexpr, ADJOINT: tl.constexpr, SPILL: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    for row in tl.static_range(ROWS):
        o_row = row * LANES + tl.arange(0, LANES)
        m_row = None if left is None else o_row < left
        b_state = _load(p_state + o_row, m_row)
        b_y, b_r = _previous(b_state, _load(p_f + o_row, m_row), SIGN, P, D, SCALE)
        if SPILL:
            b_r = _load(p_spill + o_row, m_row).to(tl.int64) & 0xFFFFFFFF
        tl.store(p_state + o_row, (b_y << 32) | b_r, mask=m_row)
        _store_decoded(p_copy + o_row, b_y, m_row, UNIT)
        if ADJOINT:
            gpu._update_adjoint(p_adjoint, p_vjp, o_row, m_row, A, BETA)


@triton.jit(do_not_specialize=["n"])
def _invert_kernel(
    p_state, p_f, p_copy, p_adjoint, p_vjp, p_spill, n,
    SIGN: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
    A: tl.constexpr, BETA: tl.constexpr, ADJOINT: tl.constexpr, SPILL: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * (ROWS * LANES)
    p_state += start
    p_f += start
    p_copy += start
    if ADJOINT:
        p_adjoint += start
        p_vjp += start
    if SPILL:
        p_spill += start
    if start + ROWS * LANES <= n:
        _invert_rows(
            p_state, p_f, p_copy, p_adjoint, p_vjp, p_spill, None,
            SIGN, P, D, SCALE, UNIT, A, BETA, ADJOINT, SPILL, ROWS, LANES,
        )  # fmt: skip
    else:
        _invert_rows(
            p_state, p_f, p_copy, p_adjoint, p_vjp, p_spill, n - start,
            SIGN, P, D, SCALE, UNIT, A, BETA, ADJOINT, SPILL, ROWS, LANES,
        )  # fmt: skip


@triton.jit
def _compare_rows(
    p_state, p_f, p_initial, p_adjoint, p_vjp, left,
    SIGN: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
    A: tl.constexpr, BETA: tl.constexpr, ADJOINT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b_error = tl.full((LANES,), 0, tl.int32)
    b_value = tl.full((LANES,), 0, tl.int32)
    for row in tl.static_range(ROWS):
        o_row = row * LANES + tl.arange(0, LANES)
        m_row = None if left is None else o_row < left
        b_state = _load(p_state + o_row, m_row)
        b_y, b_r = _previous(b_state, _load(p_f + o_row, m_row), SIGN, P, D, SCALE)
        b_initial, _ = _integer(_load(p_initial + o_row, m_row), SCALE)
        if ADJOINT:
            gpu._update_adjoint(p_adjoint, p_vjp, o_row, m_row, A, BETA)
        b_off = (b_y - b_initial).to(tl.float32) * UNIT + b_r.to(tl.float32)
        b_error = tl.maximum(b_error, gpu._magnitude_bits(b_off))
        b_value = tl.maximum(b_value, gpu._magnitude_bits((b_state >> 32).to(tl.float32) * UNIT))
    return b_error, b_value


@triton.jit(do_not_specialize=["n"])
def _compare_kernel(
    p_state, p_f, p_initial, p_adjoint, p_vjp, p_partial, n,
    SIGN: tl.constexpr, P: tl.constexpr, D: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
    A: tl.constexpr, BETA: tl.constexpr, ADJOINT: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * (ROWS * LANES)
    p_state += start
    p_f += start
    p_initial += start
    if ADJOINT:
        p_adjoint += start
        p_vjp += start
    if start + ROWS * LANES <= n:
        b_error, b_value = _compare_rows(
            p_state, p_f, p_initial, p_adjoint, p_vjp, None,
            SIGN, P, D, SCALE, UNIT, A, BETA, ADJOINT, ROWS, LANES,
        )  # fmt: skip
    else:
        b_error, b_value = _compare_rows(
            p_state, p_f, p_initial, p_adjoint, p_vjp, n - start,
            SIGN, P, D, SCALE, UNIT, A, BETA, ADJOINT, ROWS, LANES,
        )  # fmt: skip
    gpu._store_partial(p_partial, chunk, b_error, b_value, LANES)


class HalfStep(exact.HalfStep):
    def __init__(
        self, state: Tensor, copy: Tensor, radix: exact.Radix, half_steps: int, spilled: list[Tensor] | None = None
    ) -> None:
        super().__init__(state, copy, radix, half_steps, spilled)
        self._constants: dict[str, Any] = {
            "SIGN": radix.sign, "P": radix.p, "D": radix.d, "SCALE": 1 / radix.unit, "UNIT": radix.unit,
        }  # fmt: skip
        self._warps = gpu.warps(state.device)

    def _launch(self, kernel: Any, *arguments: Any, **constants: Any) -> None:
        gpu.launch(kernel, self._warps, self.state, *arguments, **constants, **self._constants)

    def _relax(self, f: Tensor, spill: Tensor | None) -> None:
        arguments = (self.in_order(f), self.copy, spill, self.alarm, None, self.state.numel(), self.done)
        self._launch(_relax_kernel, *arguments, NORMS=False, SPILL=spill is not None)

    def _relax_norms(self, f: Tensor, spill: Tensor | None) -> Tensor:
        partial = self.partial_sums()
        arguments = (self.in_order(f), self.copy, spill, self.alarm, partial, self.state.numel(), self.done)
        self._launch(_relax_kernel, *arguments, NORMS=True, SPILL=spill is not None, ROWS=reference.ROWS)
        return partial

    def _invert(self, f: Tensor, adjoint: Tensor | None, vjp: Tensor | None, spill: Tensor | None) -> None:
        vjp = None if vjp is None else self.in_order(vjp)
        arguments = (self.in_order(f), self.copy, adjoint, vjp, spill, self.state.numel())
        flags = {"ADJOINT": adjoint is not None, "SPILL": spill is not None}
        self._launch(_invert_kernel, *arguments, A=self.radix.a, BETA=self.radix.beta, **flags)

    def invert_compare(self, f: Tensor, initial: Tensor, adjoint: Tensor | None, vjp: Tensor | None) -> Tensor:
        partial = self.partial_maxima()
        vjp = None if vjp is None else self.in_order(vjp)
        arguments = (self.in_order(f), self.in_order(initial), adjoint, vjp, partial, self.state.numel())
        flags = {"ADJOINT": adjoint is not None, "ROWS": reference.ROWS}
        self._launch(_compare_kernel, *arguments, A=self.radix.a, BETA=self.radix.beta, **flags)
        return partial
