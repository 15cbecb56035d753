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
def _or_zero(b_x, m_row):
    """What is masked adds nothing to a sum or a maximum."""
    return b_x if m_row is None else tl.where(m_row, b_x, 0)


@triton.jit
def _store_copy(p_copy, b_state, m_row):
    if p_copy.dtype.element_ty == tl.float64:
        tl.store(p_copy, b_state, mask=m_row)
    else:
        tl.store(p_copy, b_state.to(tl.float32).to(p_copy.dtype.element_ty), mask=m_row)


@triton.jit
def _store_partial(p_partial, chunk, b_first, b_second, LANES: tl.constexpr):
    """What two reductions leave of a chunk, in memory of shape [2, chunks, LANES]."""
    p_first = p_partial + chunk * LANES
    p_second = p_first + tl.num_programs(0).to(tl.int64) * LANES
    o_lane = tl.arange(0, LANES)
    tl.store(p_first + o_lane, b_first)
    tl.store(p_second + o_lane, b_second)


@triton.jit
def _relax_rows(
    p_state, p_f, p_copy, left, A: tl.constexpr, BETA: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):
    """The chunk's squared changes and squared new states, by lanes. `left` is None in a full chunk."""
    b_change = tl.full((LANES,), 0.0, tl.float64)
    b_value = tl.full((LANES,), 0.0, tl.float64)
    for row in tl.static_range(ROWS):
        o_row = row * LANES + tl.arange(0, LANES)
        m_row = None if left is None else o_row < left
        b_state = tl.load(p_state + o_row, mask=m_row)
        b_f = tl.load(p_f + o_row, mask=m_row).to(tl.float64)
        b_next = A * b_state + BETA * b_f
        tl.store(p_state + o_row, b_next, mask=m_row)
        _store_copy(p_copy + o_row, b_next, m_row)
        b_change += _or_zero((b_next - b_state) * (b_next - b_state), m_row)
        b_value += _or_zero(b_next * b_next, m_row)
    return b_change, b_value


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
    if start + ROWS * LANES <= n:
        b_change, b_value = _relax_rows(p_state, p_f, p_copy, None, A, BETA, ROWS, LANES)
    else:
        b_change, b_value = _relax_rows(p_state, p_f, p_copy, n - start, A, BETA, ROWS, LANES)
    if NORMS:
        _store_partial(p_partial, chunk, b_change, b_value, LANES)


@triton.jit
def _previous(b_state, b_f, A: tl.constexpr, INVERSE_A: tl.constexpr, BETA: tl.constexpr):
    b_scaled = b_state - BETA * b_f.to(tl.float64)
    return b_scaled / A if INVERSE_A is None else b_scaled * INVERSE_A


@triton.jit
def _update_adjoint(p_adjoint, p_vjp, o_row, m_row, A: tl.constexpr, BETA: tl.constexpr):
    b_adjoint = tl.load(p_adjoint + o_row, mask=m_row)
    b_vjp = tl.load(p_vjp + o_row, mask=m_row).to(p_adjoint.dtype.element_ty)
    tl.store(p_adjoint + o_row, A * b_adjoint + BETA * b_vjp, mask=m_row)


@triton.jit
def _invert_rows(
    p_state, p_f, p_copy, p_adjoint, p_vjp, left,
    A: tl.constexpr, INVERSE_A: tl.constexpr, BETA: tl.constexpr, ADJOINT: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    for row in tl.static_range(ROWS):
        o_row = row * LANES + tl.arange(0, LANES)
        m_row = None if left is None else o_row < left
        if ADJOINT:  # first: afterwards, ptxas spills where f is in bfloat16
            _update_adjoint(p_adjoint, p_vjp, o_row, m_row, A, BETA)
        b_state = tl.load(p_state + o_row, mask=m_row)
        b_previous = _previous(b_state, tl.load(p_f + o_row, mask=m_row), A, INVERSE_A, BETA)
        tl.store(p_state + o_row, b_previous, mask=m_row)
        _store_copy(p_copy + o_row, b_previous, m_row)


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
    if start + ROWS * LANES <= n:
        _invert_rows(p_state, p_f, p_copy, p_adjoint, p_vjp, None, A, INVERSE_A, BETA, ADJOINT, ROWS, LANES)
    else:
        _invert_rows(p_state, p_f, p_copy, p_adjoint, p_vjp, n - start, A, INVERSE_A, BETA, ADJOINT, ROWS, LANES)


@triton.jit
def _magnitude_bits(b_x):
    return b_x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _compare_rows(
    p_state, p_f, p_initial, p_adjoint, p_vjp, left,
    A: tl.constexpr, INVERSE_A: tl.constexpr, BETA: tl.constexpr, ADJOINT: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The chunk's largest error and largest state, by lanes, as bits."""
    b_error = tl.full((LANES,), 0, tl.int32)
    b_value = tl.full((LANES,), 0, tl.int32)
    for row in tl.static_range(ROWS):
        o_row = row * LANES + tl.arange(0, LANES)
        m_row = None if left is None else o_row < left
        b_state = tl.load(p_state + o_row, mask=m_row)
        b_previous = _previous(b_state, tl.load(p_f + o_row, mask=m_row), A, INVERSE_A, BETA)
        b_initial = tl.load(p_initial + o_row, mask=m_row).to(tl.float64)
        if ADJOINT:
            _update_adjoint(p_adjoint, p_vjp, o_row, m_row, A, BETA)
        b_error = tl.maximum(b_error, _or_zero(_magnitude_bits(b_previous - b_initial), m_row))
        b_value = tl.maximum(b_value, _or_zero(_magnitude_bits(b_state), m_row))
    return b_error, b_value


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
    if start + ROWS * LANES <= n:
        b_error, b_value = _compare_rows(
            p_state, p_f, p_initial, p_adjoint, p_vjp, None, A, INVERSE_A, BETA, ADJOINT, ROWS, LANES
        )
    else:
        b_error, b_value = _compare_rows(
            p_state, p_f, p_initial, p_adjoint, p_vjp, n - start, A, INVERSE_A, BETA, ADJOINT, ROWS, LANES
        )
    _store_partial(p_partial, chunk, b_error, b_value, LANES)


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
