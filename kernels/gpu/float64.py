"""The half-steps in Triton, for GPU tensors (and for CPU tensors under Triton's interpreter or an emulator): what each
operation computes. passes.py contains the loops and memory accesses."""

import functools
import struct
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._device import is_capturing
from .. import half_step
from ..half_step import LANES, Adjoints, Coefficients
from . import passes
from .launch import _on, launch_blocks, launch_chunks

THREADS = LANES // 2
RELAX_BLOCK, INVERT_BLOCK = 1024, 512
"""Elements per block: few enough that a thread needs about 32 registers, and a multiprocessor is full of threads."""
RELAXED: tl.constexpr = tl.constexpr(4)
COMPARED: tl.constexpr = tl.constexpr(2)
"""How many rows of a chunk are loaded before any is stored: 96 bytes per thread."""
EACH = ["now", "sixteenth"]
NUMBERS = ["n", *EACH, "a", "b", "c", "inverse", "minus_a", "adjoint_a", "adjoint_b", "adjoint_c", "kept"]
"""The arguments whose values kernels are not specialized for."""


@triton.jit
def _moved_by(p_f, p_read, o_x, m_x, b, c):
    """b f + c z, where z is what f read; without it, b f."""
    b_moved = passes.number(b, tl.float64) * passes.load(p_f, o_x, m_x).to(tl.float64)
    if p_read is not None:
        b_moved += passes.number(c, tl.float64) * passes.load(p_read, o_x, m_x).to(tl.float64)
    return b_moved


@triton.jit
def _relax(pointers, numbers, o_x, m_x, left):
    """Adds up the squared changes and the squared new states."""
    p_state, p_f, p_read, p_copy = pointers
    a, b, c = numbers
    b_state = passes.load(p_state, o_x, m_x)
    b_next = passes.number(a, tl.float64) * b_state + _moved_by(p_f, p_read, o_x, m_x, b, c)
    b_next = passes.where(left, 1, b_next, b_state)
    b_change = b_next - b_state
    squares = passes.where(left, 1, b_change * b_change, 0.0), passes.where(left, 1, b_next * b_next, 0.0)
    return ((p_state, b_next), (p_copy, b_next)), squares


@triton.jit(do_not_specialize=NUMBERS)
def _relax_kernel(
    p_state, p_f, p_read, p_copy, p_ends, n, now, sixteenth, a, b, c, BLOCK: tl.constexpr
):  # fmt: skip
    each = p_ends, now, sixteenth
    passes.each_block(_relax, (p_state, p_f, p_read, p_copy), (a, b, c), n, each, BLOCK)


@triton.jit(do_not_specialize=NUMBERS)
def _relax_norms_kernel(
    p_state, p_f, p_read, p_copy, p_partial, p_ends, n, now, sixteenth, a, b, c,
    ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    totals = tl.full((LANES,), 0.0, tl.float64), tl.full((LANES,), 0.0, tl.float64)
    pointers = p_state, p_f, p_read, p_copy
    each = p_ends, now, sixteenth
    totals = passes.each_chunk(_relax, pointers, (a, b, c), totals, n, each, RELAXED, ROWS, LANES)
    passes.store_totals(p_partial, totals, LANES)


DIVIDE: tl.constexpr = tl.constexpr(
    """
    .reg .pred %usual_${:uid};
    .reg .b32 %exponent_${:uid};
    .reg .f64 %rest_${:uid};
    mul.rn.f64 $0, $1, $2;
    mov.b64 {_, %exponent_${:uid}}, $0;
    bfe.u32 %exponent_${:uid}, %exponent_${:uid}, 20, 11;
    add.s32 %exponent_${:uid}, %exponent_${:uid}, -123;
    setp.le.u32 %usual_${:uid}, %exponent_${:uid}, 1922;
    fma.rn.f64 %rest_${:uid}, $0, $3, $1;
    fma.rn.f64 $0, %rest_${:uid}, $2, $0;
    @%usual_${:uid} bra USUAL_${:uid};
    div.rn.f64 $0, $1, $4;
USUAL_${:uid}:
    """
)
"""$1 / $4, given 1 / $4 in $2 and -$4 in $3: the product with the reciprocal, corrected by its residual. It is
correctly rounded (Brisebarre, Muller and Raina, 2004) unless an intermediate result overflows or underflows. Quotients
outside [2^-900, 2^1023), which include zeros, infinities and NaN, use the division instruction. This takes 3 float64
instructions instead of 10, and on some GPUs float64 is slow."""


@triton.jit
def _previous(b_state, p_f, p_read, o_x, m_x, step):
    """Divides by a: with DIVIDE, if `inverse` and `minus_a` are given."""
    a, b, c, inverse, minus_a = step
    b_scaled = b_state - _moved_by(p_f, p_read, o_x, m_x, b, c)
    if inverse is None:
        return b_scaled / passes.number(a, tl.float64)
    else:  # noqa: RET505
        factors = passes.number(inverse, tl.float64), passes.number(minus_a, tl.float64), passes.number(a, tl.float64)
        return tl.inline_asm_elementwise(
            DIVIDE, "=&d,d,d,d,d", [b_scaled, factors[0], factors[1], factors[2]],
            dtype=tl.float64, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _update(adjoints, step, o_x, m_x, left):
    """Updates the adjoint, if there is one, in its own precision. Returns the stores of the adjoint and the seed."""
    p_adjoint, p_vjp, p_other, p_seed = adjoints
    a, b, c, kept = step
    stores = ()
    if p_adjoint is not None:
        b_adjoint = passes.load(p_adjoint, o_x, m_x)
        b_vjp = passes.load(p_vjp, o_x, m_x).to(b_adjoint.dtype)
        b_old = passes.number(a, b_adjoint.dtype) * b_adjoint
        if left is not None:
            b_old = tl.where(left > 1, b_old, passes.number(kept, b_adjoint.dtype) * b_adjoint)
        b_next = b_old + passes.number(b, b_adjoint.dtype) * b_vjp
        if p_other is not None:
            b_mixed = b_next + passes.number(c, b_adjoint.dtype) * passes.load(p_other, o_x, m_x)
            b_next = passes.where(left, 1, b_mixed, b_next)
        stores += ((p_adjoint, b_next),)
        if p_seed is not None:
            stores += ((p_seed, passes.where(left, 0, b_next, 0.0)),)
    return stores


@triton.jit
def _invert(pointers, numbers, o_x, m_x, left):
    """p_read, if it is not None, is p_copy."""
    p_state, p_f, p_read, p_copy, adjoints = pointers
    step, adjoint_step = numbers
    b_state = passes.load(p_state, o_x, m_x)
    b_previous = passes.where(left, 1, _previous(b_state, p_f, p_read, o_x, m_x, step), b_state)
    stores = _update(adjoints, adjoint_step, o_x, m_x, left)
    stores += ((p_state, b_previous), (p_copy, b_previous))
    return stores, ()


@triton.jit(do_not_specialize=NUMBERS)
def _invert_kernel(
    p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_seed, p_ends, n, now, sixteenth,
    a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c, kept, BLOCK: tl.constexpr,
):  # fmt: skip
    pointers = p_state, p_f, p_read, p_copy, (p_adjoint, p_vjp, p_other, p_seed)
    numbers = (a, b, c, inverse, minus_a), (adjoint_a, adjoint_b, adjoint_c, kept)
    passes.each_block(_invert, pointers, numbers, n, (p_ends, now, sixteenth), BLOCK)


@triton.jit
def _magnitude_bits(b_x):
    return b_x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _ratio_bits(b_error, b_value, floor):
    """The bits of |error| / max(|value|, floor) in float32. As an integer, NaN is larger than all numbers."""
    b_size = tl.maximum(_magnitude_bits(b_value), floor.to(tl.int32, bitcast=True))
    return _magnitude_bits(tl.div_rn(b_error.to(tl.float32), b_size.to(tl.float32, bitcast=True)))


@triton.jit
def _compare(pointers, numbers, o_x, m_x, left):
    """Keeps the largest relative error, as bits."""
    p_state, p_f, p_read, p_initial, adjoints = pointers
    step, adjoint_step, floor = numbers
    b_state = passes.load(p_state, o_x, m_x)
    b_initial = passes.load(p_initial, o_x, m_x).to(tl.float64)
    b_error = _previous(b_state, p_f, p_read, o_x, m_x, step) - b_initial
    return _update(adjoints, adjoint_step, o_x, m_x, left), (_ratio_bits(b_error, b_state, floor),)


@triton.jit(do_not_specialize=NUMBERS)
def _compare_kernel(
    p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, p_floor, p_worst, n,
    a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    pointers = p_state, p_f, p_read, p_initial, (p_adjoint, p_vjp, p_other, p_seed)
    numbers = (a, b, c, inverse, minus_a), (adjoint_a, adjoint_b, adjoint_c, None), tl.load(p_floor)
    totals = (tl.full((LANES,), 0, tl.int32),)
    each = None, None, None
    totals = passes.each_chunk(_compare, pointers, numbers, totals, n, each, COMPARED, ROWS, LANES)
    passes.store_totals(p_worst, totals, LANES)


def bits_of(number: float, dtype: torch.dtype) -> int:
    """The bits of a number rounded to float32 or float64, as a signed integer of the same size."""
    real, integer = ("<d", "<q") if dtype == torch.float64 else ("<f", "<i")
    return struct.unpack(integer, struct.pack(real, number))[0]


class Bits:
    """The bits of a step's coefficients, cached for the last step."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._step: Any | None = None
        self._bits: tuple[int, ...] = ()

    def __call__(self, step: Any) -> tuple[int, ...]:
        if step is not self._step:
            self._step, self._bits = step, tuple(bits_of(x, self._dtype) for x in (step.a, step.b, step.c))
        return self._bits


class HalfStep(half_step.HalfStep):
    def __init__(self, state: Tensor, step: Coefficients) -> None:
        super().__init__(state, step)
        self._bits, self._warps = Bits(torch.float64), warps(state.device)
        self._quotient: tuple[int | None, ...] = None, None
        if divides_by_reciprocal(state.device):
            self._quotient = tuple(bits_of(x, torch.float64) for x in (1 / step.a, -step.a))

    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        tensors = self.state, f_z, z, copy
        numbers = None, None, *self._bits(self.step)
        if partial is None:
            launch_blocks(_relax_kernel, self._warps, RELAX_BLOCK, (*tensors, None), numbers)
        else:
            launch_chunks(_relax_norms_kernel, self._warps, (*tensors, partial, None), numbers)

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints) -> None:
        tensors = self.state, f_z, z, copy, *adjoints, None
        bits = adjoint_bits(self.step, copy.dtype)
        numbers = None, None, *self._bits(self.step), *self._quotient, *bits, None
        launch_blocks(_invert_kernel, self._warps, INVERT_BLOCK, tensors, numbers)

    def _compare(
        self, f_z: Tensor, z: Tensor | None, initial: Tensor, adjoints: Adjoints, floor: Tensor, maxima: Tensor
    ) -> None:
        tensors = self.state, f_z, z, initial, *adjoints, floor, maxima
        numbers = *self._bits(self.step), *self._quotient, *adjoint_bits(self.step, initial.dtype)
        launch_chunks(_compare_kernel, self._warps, tensors, numbers)


def adjoint_bits(step: Any, dtype: torch.dtype) -> tuple[int, ...]:
    return tuple(bits_of(x, half_step.wide(dtype)) for x in (step.a, step.b, step.c))


def warps(device: torch.device) -> int:
    return THREADS // _warp_size(device)


def _warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def divides_by_reciprocal(device: torch.device) -> bool:
    """Whether kernels are compiled to PTX, which DIVIDE is written in."""
    return device.type == "cuda" and torch.version.hip is None


@functools.cache
def driver_trouble(kind: str) -> str:
    """Why Triton cannot launch on this type of GPU, or "". Triton compiles its driver when it is first used."""
    if not getattr(torch, kind).is_available():
        return ""
    try:
        triton.runtime.driver.active.utils  # noqa: B018
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return ""


def kernel_trouble(device: torch.device) -> str:
    """Why a kernel cannot be compiled for this GPU or loaded on it, or "": the GPU may be newer than Triton, or its
    driver older. During graph capture, this is not tried."""
    if not getattr(torch, device.type).is_available() or _has_stand_in() or is_capturing(device):
        return ""
    return _first_kernel_trouble(device)


@functools.cache
def _first_kernel_trouble(device: torch.device) -> str:
    """Compile and load the first kernel of a solve, without launching it."""
    number = 2**40  # a 64-bit integer, like the bits of coefficients
    tensors, coefficients = (torch.float64, torch.float32, None, torch.float32, None), (number, number, number)
    arguments = *tensors, 1, None, None, *coefficients, RELAX_BLOCK
    try:
        with _on(device):
            kernel = _relax_kernel.warmup(*arguments, grid=(1,), num_warps=warps(device), enable_fp_fusion=False)
            getattr(kernel, "run", None)  # loads it; a compilation hook may have returned None
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


def runs_on(device: torch.device) -> bool:
    """Whether kernels can be launched on tensors of this device: on a GPU, or on a CPU that emulates one."""
    return device.type in ("cuda", "xpu") or (device.type == "cpu" and _has_stand_in())


def _has_stand_in() -> bool:
    """Whether Triton's interpreter or an emulator executes the kernels."""
    interpreted = not isinstance(_relax_kernel, triton.runtime.JITFunction)
    return interpreted or triton.runtime.JITFunction.run.__module__ != "triton.runtime.jit"
