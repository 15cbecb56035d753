"""The half-steps of the float64 state in Triton: equation 5 of the paper, its inverse and the adjoint of Algorithm 1.

    y' = a y + b f(z) + c z
    y = (y' - b f(z) - c z) / a
    adjoint = a adjoint + b vjp + c other

reference.py specifies them. The coefficients are arguments, so that another beta compiles nothing. `p_` begins the name
of a pointer, `o` are the offsets of elements, and `m` masks those that do not exist.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import half_step
from ..half_step import Adjoints, Compared
from . import memory
from .launch import launch

RELAX_BLOCK, INVERT_BLOCK = 1024, 512
"""Elements per block: few enough that a thread needs at most 40 registers, and a multiprocessor is full of threads."""


@triton.jit
def _moved_by(p_f, p_z, b, c, o, m):
    """b f(z) + c z, or b f(z) without z."""
    moved = b * memory.load(p_f, o, m).to(tl.float64)
    if p_z is not None:
        moved += c * memory.load(p_z, o, m).to(tl.float64)
    return moved


@triton.jit(do_not_specialize=["n"])
def _relax_kernel(
    p_y, p_f, p_z, p_copy, p_partial, n: tl.int64, a: tl.float64, b: tl.float64, c: tl.float64,
    ROWS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """With `p_partial`, adds up the squared changes and the squared new states."""
    changes, squares = tl.full((SIZE,), 0, tl.float64), tl.full((SIZE,), 0, tl.float64)
    for row in tl.range(ROWS):
        o, m = memory.row_of(row, n, ROWS, EVEN, SIZE)
        y = memory.load(p_y, o, m)
        after = a * y + _moved_by(p_f, p_z, b, c, o, m)
        memory.store(p_y, after, o, m)
        memory.store(p_copy, after, o, m)
        changes += (after - y) * (after - y)
        squares += after * after
    if p_partial is not None:
        memory.store_lanes(p_partial, changes, 0, SIZE)
        memory.store_lanes(p_partial, squares, 1, SIZE)


DIVIDE: tl.constexpr = tl.constexpr(
    """
    .reg .pred %usual_${:uid};
    .reg .b32 %exponent_${:uid};
    .reg .f64 %rest_${:uid};
    mul.rn.f64 $0, $1, $3;
    mov.b64 {_, %exponent_${:uid}}, $0;
    bfe.u32 %exponent_${:uid}, %exponent_${:uid}, 20, 11;
    add.s32 %exponent_${:uid}, %exponent_${:uid}, -123;
    setp.le.u32 %usual_${:uid}, %exponent_${:uid}, 1922;
    neg.f64 %rest_${:uid}, $2;
    fma.rn.f64 %rest_${:uid}, $0, %rest_${:uid}, $1;
    fma.rn.f64 $0, %rest_${:uid}, $3, $0;
    @%usual_${:uid} bra USUAL_${:uid};
    div.rn.f64 $0, $1, $2;
USUAL_${:uid}:
    """
)
"""$1 / $2, where $3 is 1 / $2: the product with the reciprocal, corrected by its residual. This takes 3 float64
instructions instead of 10, and float64 is slow on some GPUs. The quotient is correctly rounded (Brisebarre, Muller and
Raina, 2004) unless an intermediate result overflows or underflows. Quotients outside [2^-900, 2^1023), which include
zeros, infinities and NaN, take the division instruction."""


@triton.jit
def _quotient(x, a, inverse, IN_PTX: tl.constexpr):
    if IN_PTX:
        return tl.inline_asm_elementwise(DIVIDE, "=&d,d,d,d", [x, a, inverse], tl.float64, is_pure=True, pack=1)
    else:  # noqa: RET505
        return x / a


@triton.jit
def update_adjoint(adjoints, step, step_32, o, m):
    """In the adjoint's precision, with the coefficients of that precision. Without an adjoint, nothing happens."""
    p_adjoint, p_vjp, p_other, p_seed = adjoints
    if p_adjoint is not None:
        adjoint = memory.load(p_adjoint, o, m)
        vjp = memory.load(p_vjp, o, m).to(adjoint.dtype)
        a, b, c = step if adjoint.dtype == tl.float64 else step_32
        after = a * adjoint + b * vjp
        if p_other is not None:
            after += c * memory.load(p_other, o, m)
        memory.store(p_adjoint, after, o, m)
        if p_seed is not None:
            memory.store(p_seed, after, o, m)


@triton.jit
def magnitude_bits(x):
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def ratio_bits(error, y, floor):
    """The bits of |error| / max(|y|, floor) in float32. As an integer, NaN is larger than all numbers."""
    size = tl.maximum(magnitude_bits(y), floor.to(tl.int32, bitcast=True))
    return magnitude_bits(tl.div_rn(error.to(tl.float32), size.to(tl.float32, bitcast=True)))


@triton.jit(do_not_specialize=["n"])
def _invert_kernel(
    p_y, p_f, p_z, p_copy, p_adjoint, p_vjp, p_other, p_seed, p_floor, p_maxima, n: tl.int64,
    a: tl.float64, b: tl.float64, c: tl.float64, a_32: tl.float32, b_32: tl.float32, c_32: tl.float32,
    inverse: tl.float64, IN_PTX: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """With `p_maxima`, only the adjoint is stored, and the state is compared with the initial one in `p_copy`."""
    maxima, floor = tl.full((SIZE,), 0, tl.int32), 0.0 if p_floor is None else tl.load(p_floor)
    for row in tl.range(ROWS):
        o, m = memory.row_of(row, n, ROWS, EVEN, SIZE)
        y = memory.load(p_y, o, m)
        before = _quotient(y - _moved_by(p_f, p_z, b, c, o, m), a, inverse, IN_PTX)
        if p_maxima is not None:
            initial = memory.load(p_copy, o, m).to(tl.float64)
            maxima = tl.maximum(maxima, ratio_bits(before - initial, y, floor))
        update_adjoint((p_adjoint, p_vjp, p_other, p_seed), (a, b, c), (a_32, b_32, c_32), o, m)
        if p_maxima is None:
            memory.store(p_y, before, o, m)
            memory.store(p_copy, before, o, m)
    if p_maxima is not None:
        memory.store_lanes(p_maxima, maxima, 0, SIZE)


class HalfStep(half_step.HalfStep):
    def _relax(self, f_z: Tensor, z: Tensor | None, copy: Tensor, partial: Tensor | None) -> None:
        block, tensors = RELAX_BLOCK if partial is None else None, (self.state, f_z, z, copy, partial)
        launch(_relax_kernel, block, tensors, (self.step.a, self.step.b, self.step.c))

    def _invert(self, f_z: Tensor, z: Tensor | None, copy: Tensor, adjoints: Adjoints, compared: Compared) -> None:
        block, tensors = INVERT_BLOCK if compared is None else None, (self.state, f_z, z, copy, *adjoints)
        step = self.step.a, self.step.b, self.step.c  # for both precisions of an adjoint
        numbers, constants = (*step, *step, 1 / self.step.a), (is_ptx(self.state.device),)
        launch(_invert_kernel, block, (*tensors, *(compared or (None, None))), numbers, constants)


def is_ptx(device: torch.device) -> bool:
    """Whether kernels are compiled to PTX, which DIVIDE is written in."""
    return device.type == "cuda" and torch.version.hip is None
