"""The half-steps in Triton, for GPU tensors (and for CPU tensors under Triton's interpreter or an emulator).

A program takes a chunk of ROWS rows of LANES elements, two neighbours per thread: 16-byte accesses for
float64 and 8-byte ones for float32, in one layout, so nothing passes through shared memory. Only the last
chunk is masked; a mask would make every access scalar. beta and 1 - beta are compile-time constants: a
Python float passed at run time would arrive as float32.
"""

import contextlib
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import reference

THREADS = reference.LANES // 2


@triton.jit
def _relax_row(p_state, p_f, p_copy, o_row, m_row, A: tl.constexpr, BETA: tl.constexpr):
    b_state = tl.load(p_state + o_row, mask=m_row)
    b_f = tl.load(p_f + o_row, mask=m_row).to(tl.float64)
    b_next = A * b_state + BETA * b_f
    tl.store(p_state + o_row, b_next, mask=m_row)
    _store_copy(p_copy + o_row, b_next, m_row)
    return b_next - b_state, b_next


@triton.jit
def _store_copy(p_copy, b_state, m_row):
    if p_copy.dtype.element_ty == tl.float64:
        tl.store(p_copy, b_state, mask=m_row)
    else:
        tl.store(p_copy, b_state.to(tl.float32).to(p_copy.dtype.element_ty), mask=m_row)


@triton.jit(do_not_specialize=["n"])
def _relax_kernel(
    p_state, p_f, p_copy, p_partial, n,
    A: tl.constexpr, BETA: tl.constexpr, NORMS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * (ROWS * LANES)
    p_state += start
    p_f += start
    p_copy += start
    o_lane = tl.arange(0, LANES)
    b_change = tl.full((LANES,), 0.0, tl.float64)
    b_value = tl.full((LANES,), 0.0, tl.float64)
    if start + ROWS * LANES <= n:
        for row in tl.static_range(ROWS):
            b_step, b_next = _relax_row(p_state, p_f, p_copy, row * LANES + o_lane, None, A, BETA)
            if NORMS:
                b_change += b_step * b_step
                b_value += b_next * b_next
    else:
        for row in tl.static_range(ROWS):
            o_row = row * LANES + o_lane
            m_row = o_row < n - start
            b_step, b_next = _relax_row(p_state, p_f, p_copy, o_row, m_row, A, BETA)
            if NORMS:
                b_change += tl.where(m_row, b_step * b_step, 0.0)
                b_value += tl.where(m_row, b_next * b_next, 0.0)
    if NORMS:
        p_partial += chunk * LANES
        tl.store(p_partial + o_lane, b_change)
        p_partial += tl.num_programs(0).to(tl.int64) * LANES
        tl.store(p_partial + o_lane, b_value)


@triton.jit
def _previous(p_state, p_f, o_row, m_row, A: tl.constexpr, INVERSE_A: tl.constexpr, BETA: tl.constexpr):
    b_state = tl.load(p_state + o_row, mask=m_row)
    b_f = tl.load(p_f + o_row, mask=m_row).to(tl.float64)
    b_previous = b_state - BETA * b_f
    if INVERSE_A is None:
        b_previous = b_previous / A
    else:
        b_previous = b_previous * INVERSE_A
    return b_state, b_previous


@triton.jit
def _update_adjoint(p_adjoint, p_vjp, o_row, m_row, A: tl.constexpr, BETA: tl.constexpr):
    b_adjoint = tl.load(p_adjoint + o_row, mask=m_row)
    b_vjp = tl.load(p_vjp + o_row, mask=m_row).to(p_adjoint.dtype.element_ty)
    tl.store(p_adjoint + o_row, A * b_adjoint + BETA * b_vjp, mask=m_row)


@triton.jit
def _invert_row(
    p_state, p_f, p_copy, p_adjoint, p_vjp, o_row, m_row,
    A: tl.constexpr, INVERSE_A: tl.constexpr, BETA: tl.constexpr, ADJOINT: tl.constexpr,
):  # fmt: skip
    _, b_previous = _previous(p_state, p_f, o_row, m_row, A, INVERSE_A, BETA)
    tl.store(p_state + o_row, b_previous, mask=m_row)
    _store_copy(p_copy + o_row, b_previous, m_row)
    if ADJOINT:
        _update_adjoint(p_adjoint, p_vjp, o_row, m_row, A, BETA)


@triton.jit(do_not_specialize=["n"])
def _invert_kernel(
    p_state, p_f, p_copy, p_adjoint, p_vjp, n,
    A: tl.constexpr, INVERSE_A: tl.constexpr, BETA: tl.constexpr, ADJOINT: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * (ROWS * LANES)
    p_state += start
    p_f += start
    p_copy += start
    if ADJOINT:
        p_adjoint += start
        p_vjp += start
    o_lane = tl.arange(0, LANES)
    if start + ROWS * LANES <= n:
        for row in tl.static_range(ROWS):
            _invert_row(p_state, p_f, p_copy, p_adjoint, p_vjp, row * LANES + o_lane, None, A, INVERSE_A, BETA, ADJOINT)
    else:
        for row in tl.static_range(ROWS):
            o_row = row * LANES + o_lane
            _invert_row(p_state, p_f, p_copy, p_adjoint, p_vjp, o_row, o_row < n - start, A, INVERSE_A, BETA, ADJOINT)


@triton.jit
def _magnitude_bits(b_x):
    return b_x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _compare_row(
    p_state, p_f, p_initial, p_adjoint, p_vjp, o_row, m_row,
    A: tl.constexpr, INVERSE_A: tl.constexpr, BETA: tl.constexpr, ADJOINT: tl.constexpr,
):  # fmt: skip
    b_state, b_previous = _previous(p_state, p_f, o_row, m_row, A, INVERSE_A, BETA)
    b_initial = tl.load(p_initial + o_row, mask=m_row).to(tl.float64)
    if ADJOINT:
        _update_adjoint(p_adjoint, p_vjp, o_row, m_row, A, BETA)
    return _magnitude_bits(b_previous - b_initial), _magnitude_bits(b_state)


@triton.jit(do_not_specialize=["n"])
def _compare_kernel(
    p_state, p_f, p_initial, p_adjoint, p_vjp, p_partial, n,
    A: tl.constexpr, INVERSE_A: tl.constexpr, BETA: tl.constexpr, ADJOINT: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    start = chunk * (ROWS * LANES)
    p_state += start
    p_f += start
    p_initial += start
    if ADJOINT:
        p_adjoint += start
        p_vjp += start
    o_lane = tl.arange(0, LANES)
    b_error = tl.full((LANES,), 0, tl.int32)
    b_value = tl.full((LANES,), 0, tl.int32)
    if start + ROWS * LANES <= n:
        for row in tl.static_range(ROWS):
            o_row = row * LANES + o_lane
            b_row_error, b_row_value = _compare_row(
                p_state, p_f, p_initial, p_adjoint, p_vjp, o_row, None, A, INVERSE_A, BETA, ADJOINT
            )
            b_error = tl.maximum(b_error, b_row_error)
            b_value = tl.maximum(b_value, b_row_value)
    else:
        for row in tl.static_range(ROWS):
            o_row = row * LANES + o_lane
            m_row = o_row < n - start
            b_row_error, b_row_value = _compare_row(
                p_state, p_f, p_initial, p_adjoint, p_vjp, o_row, m_row, A, INVERSE_A, BETA, ADJOINT
            )
            b_error = tl.where(m_row, tl.maximum(b_error, b_row_error), b_error)
            b_value = tl.where(m_row, tl.maximum(b_value, b_row_value), b_value)
    p_partial += chunk * LANES
    tl.store(p_partial + o_lane, b_error)
    p_partial += tl.num_programs(0).to(tl.int64) * LANES
    tl.store(p_partial + o_lane, b_value)


class HalfStep(reference.HalfStep):
    def __init__(self, state: Tensor, copy: Tensor, beta: float) -> None:
        super().__init__(state, copy, beta)
        a = 1 - beta
        self._relaxation: dict[str, Any] = {"A": a, "BETA": beta}
        # Dividing by a power of two is multiplying by its inverse, to the bit, for a tenth of the instructions.
        self._inversion: dict[str, Any] = {
            **self._relaxation,
            "INVERSE_A": 1 / a if math.frexp(a)[0] in (0.5, -0.5) else None,
        }
        self._warps = warps(state.device)

    def _launch(self, kernel: Any, *tensors: Tensor | None, **constants: Any) -> None:
        launch(kernel, self._warps, self.state, *tensors, self.state.numel(), **constants)

    def relax(self, f: Tensor) -> None:
        self._launch(_relax_kernel, self.in_order(f), self.copy, None, NORMS=False, **self._relaxation)

    def relax_norms(self, f: Tensor) -> Tensor:
        partial = self.partial_sums()
        rows = reference.ROWS  # more than elsewhere, where more programs fill a GPU sooner: each leaves LANES sums
        self._launch(_relax_kernel, self.in_order(f), self.copy, partial, NORMS=True, ROWS=rows, **self._relaxation)
        return partial

    def invert(self, f: Tensor) -> None:
        self._launch(_invert_kernel, self.in_order(f), self.copy, None, None, ADJOINT=False, **self._inversion)

    def invert_adjoint(self, f: Tensor, adjoint: Tensor, vjp: Tensor) -> None:
        f, vjp = self.in_order(f), self.in_order(vjp)
        self._launch(_invert_kernel, f, self.copy, adjoint, vjp, ADJOINT=True, **self._inversion)

    def invert_compare(self, f: Tensor, initial: Tensor, adjoint: Tensor | None, vjp: Tensor | None) -> Tensor:
        f, initial, partial = self.in_order(f), self.in_order(initial), self.partial_maxima()
        vjp = None if vjp is None else self.in_order(vjp)
        flags = {"ADJOINT": adjoint is not None, "ROWS": reference.ROWS}
        self._launch(_compare_kernel, f, initial, adjoint, vjp, partial, **flags, **self._inversion)
        return partial


def launch(kernel: Any, warps: int, state: Tensor, *arguments: Any, ROWS: int = 4, **constants: Any) -> None:
    """A program for each chunk of the state, of ROWS rows; with no elements, none."""
    n = state.numel()
    if n == 0:
        return
    grid = (-(-n // (ROWS * reference.LANES)),)
    with _on(state.device):
        kernel[grid](
            state, *arguments, ROWS=ROWS, LANES=reference.LANES, **constants, num_warps=warps, enable_fp_fusion=False
        )


def warps(device: torch.device) -> int:
    return THREADS // _warp_size(device)


def _warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, whatever device its tensors are on."""
    return contextlib.nullcontext() if device.type == "cpu" else getattr(torch, device.type).device(device)


def runs_on(device: torch.device) -> bool:
    """Whether a launch on tensors of this device can work: on a GPU, or where something stands in for one."""
    interpreted = not isinstance(_relax_kernel, triton.runtime.JITFunction)
    emulated = triton.runtime.JITFunction.run.__module__ != "triton.runtime.jit"
    return device.type in ("cuda", "xpu") or (device.type == "cpu" and (interpreted or emulated))
