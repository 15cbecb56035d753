"""The half-steps in Triton, for GPU tensors (and for CPU tensors under Triton's interpreter or an emulator).

A program takes a block of elements, two neighbours per thread: 16-byte accesses for float64 and 8-byte ones for
float32, in one layout, so nothing passes through shared memory. It loads all of them before it stores any: the
compiler cannot know that stores do not change what is loaded after them. Where sums or maxima are taken, a program
goes through a chunk of ROWS such blocks of LANES elements, a few of them at a time. Only the last program is masked; a
mask would make every access scalar.

Coefficients are arguments, so that no value of theirs is compiled for. They travel as their bits, in integers: a
Python float would arrive as float32.
"""

import functools
import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._device import is_capturing
from . import half_step
from .half_step import LANES, Coefficients, Linear
from .launch import _on, launch_blocks, launch_chunks

THREADS = LANES // 2
RELAX_BLOCK, INVERT_BLOCK = 1024, 512
"""As many elements as keep to 32 registers or so, with which a multiprocessor is full of threads."""
RELAXED: tl.constexpr = tl.constexpr(4)
COMPARED: tl.constexpr = tl.constexpr(2)
"""As many rows of a chunk are loaded before any is stored: 96 bytes of a thread."""


@triton.jit
def _offsets(BLOCK: tl.constexpr):
    """Of a block's elements, two neighbours for each thread."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), 2), 2)


@triton.jit
def _load(p_x, m_x):
    """What is masked is 0, and adds nothing to a sum or a maximum."""
    if m_x is None:
        return tl.load(p_x)
    else:  # noqa: RET505
        return tl.load(p_x, mask=m_x, other=0)


@triton.jit
def _number(bits, DTYPE: tl.constexpr):
    return bits.to(DTYPE, bitcast=True)


@triton.jit
def _store_rounded(p_x, b_x, m_x):
    """float64 reaches bfloat16 and float16 by way of float32."""
    if p_x.dtype.element_ty == tl.float64:
        tl.store(p_x, b_x, mask=m_x)
    else:
        tl.store(p_x, b_x.to(tl.float32).to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def _moved_by(p_f, p_read, o_x, m_x, b, c):
    """b f + c z, where z is what f read; without it, b f."""
    b_moved = _number(b, tl.float64) * _load(p_f + o_x, m_x).to(tl.float64)
    if p_read is not None:
        b_moved += _number(c, tl.float64) * _load(p_read + o_x, m_x).to(tl.float64)
    return b_moved


@triton.jit
def _relaxed(p_state, p_f, p_read, o_x, m_x, a, b, c):
    """The old state and the new one."""
    b_state = _load(p_state + o_x, m_x)
    return b_state, _number(a, tl.float64) * b_state + _moved_by(p_f, p_read, o_x, m_x, b, c)


@triton.jit
def _relax(p_state, p_f, p_read, p_copy, o_x, m_x, a, b, c):
    _, b_next = _relaxed(p_state, p_f, p_read, o_x, m_x, a, b, c)
    tl.store(p_state + o_x, b_next, mask=m_x)
    _store_rounded(p_copy + o_x, b_next, m_x)


@triton.jit(do_not_specialize=["n", "a", "b", "c"])
def _relax_kernel(p_state, p_f, p_read, p_copy, n, a, b, c, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    o_x = first + _offsets(BLOCK)
    if first + BLOCK <= n:
        _relax(p_state, p_f, p_read, p_copy, o_x, None, a, b, c)
    else:
        _relax(p_state, p_f, p_read, p_copy, o_x, o_x < n, a, b, c)


@triton.jit
def _groups(left, GROUP: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Of a chunk's rows, those with an element. In the last chunk their number is not known to the compiler, which
    would take many registers to unroll masked rows."""
    return ROWS // GROUP if left is None else ((left + (GROUP * LANES - 1)) // (GROUP * LANES)).to(tl.int32)


@triton.jit
def _relax_rows(
    p_state, p_f, p_read, p_copy, o_x, n, b_change, b_value, a, b, c, MORE: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """A row, and MORE of them after it: all are loaded before any is stored. Adds to the squared changes and to the
    squared new states. `n` is None in a full chunk."""
    m_x = None if n is None else o_x < n
    b_state, b_next = _relaxed(p_state, p_f, p_read, o_x, m_x, a, b, c)
    b_change += (b_next - b_state) * (b_next - b_state)
    b_value += b_next * b_next
    if MORE > 0:
        b_change, b_value = _relax_rows(
            p_state, p_f, p_read, p_copy, o_x + LANES, n, b_change, b_value, a, b, c, MORE - 1, LANES
        )
    tl.store(p_state + o_x, b_next, mask=m_x)
    _store_rounded(p_copy + o_x, b_next, m_x)
    return b_change, b_value


@triton.jit
def _relax_chunk(p_state, p_f, p_read, p_copy, first, n, a, b, c, ROWS: tl.constexpr, LANES: tl.constexpr):
    b_change = tl.full((LANES,), 0.0, tl.float64)
    b_value = tl.full((LANES,), 0.0, tl.float64)
    for group in tl.range(_groups(None if n is None else n - first, RELAXED, ROWS, LANES)):
        o_x = first + group * (RELAXED * LANES) + _offsets(LANES)
        b_change, b_value = _relax_rows(
            p_state, p_f, p_read, p_copy, o_x, n, b_change, b_value, a, b, c, RELAXED - 1, LANES
        )
    return b_change, b_value


@triton.jit
def _store_sums(p_partial, chunk, b_first, b_second, LANES: tl.constexpr):
    """What two sums leave of a chunk, in memory of shape [2, chunks, LANES]."""
    p_first = p_partial + chunk * LANES + _offsets(LANES)
    tl.store(p_first, b_first)
    tl.store(p_first + tl.num_programs(0).to(tl.int64) * LANES, b_second)


@triton.jit(do_not_specialize=["n", "a", "b", "c"])
def _relax_norms_kernel(p_state, p_f, p_read, p_copy, p_partial, n, a, b, c, ROWS: tl.constexpr, LANES: tl.constexpr):
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * (ROWS * LANES)
    if first + ROWS * LANES <= n:
        b_change, b_value = _relax_chunk(p_state, p_f, p_read, p_copy, first, None, a, b, c, ROWS, LANES)
    else:
        b_change, b_value = _relax_chunk(p_state, p_f, p_read, p_copy, first, n, a, b, c, ROWS, LANES)
    _store_sums(p_partial, chunk, b_change, b_value, LANES)


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
"""$1 / $4, given 1 / $4 in $2 and -$4 in $3: a quotient and its correction by what it leaves, which is correctly
rounded (Brisebarre, Muller and Raina, 2004) as long as nothing overflows or underflows on the way. Quotients outside of
[2^-900, 2^1023), zeros and what is not finite among them, are divided as usual. Of float64 instructions this takes 3 in
place of 10, of which some GPUs have few."""


@triton.jit
def _previous(b_state, p_f, p_read, o_x, m_x, a, b, c, inverse, minus_a):
    """With `inverse` and `minus_a`, divides by way of them."""
    b_scaled = b_state - _moved_by(p_f, p_read, o_x, m_x, b, c)
    if inverse is None:
        return b_scaled / _number(a, tl.float64)
    else:  # noqa: RET505
        return tl.inline_asm_elementwise(
            DIVIDE, "=&d,d,d,d,d",
            [b_scaled, _number(inverse, tl.float64), _number(minus_a, tl.float64), _number(a, tl.float64)],
            dtype=tl.float64, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _updated(p_adjoint, p_vjp, p_other, o_x, m_x, a, b, c):
    """The adjoint, in its own precision."""
    b_adjoint = _load(p_adjoint + o_x, m_x)
    b_vjp = _load(p_vjp + o_x, m_x).to(b_adjoint.dtype)
    b_next = _number(a, b_adjoint.dtype) * b_adjoint + _number(b, b_adjoint.dtype) * b_vjp
    if p_other is not None:
        b_next += _number(c, b_adjoint.dtype) * _load(p_other + o_x, m_x)
    return b_next


@triton.jit
def _store_adjoint(p_adjoint, p_seed, b_next, o_x, m_x):
    tl.store(p_adjoint + o_x, b_next, mask=m_x)
    if p_seed is not None:
        _store_rounded(p_seed + o_x, b_next, m_x)


@triton.jit
def _invert(
    p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_seed, o_x, m_x,
    a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c,
):  # fmt: skip
    """p_read, if it is not None, is p_copy."""
    b_previous = _previous(_load(p_state + o_x, m_x), p_f, p_read, o_x, m_x, a, b, c, inverse, minus_a)
    if p_adjoint is not None:
        b_next = _updated(p_adjoint, p_vjp, p_other, o_x, m_x, adjoint_a, adjoint_b, adjoint_c)
        _store_adjoint(p_adjoint, p_seed, b_next, o_x, m_x)
    tl.store(p_state + o_x, b_previous, mask=m_x)
    _store_rounded(p_copy + o_x, b_previous, m_x)


@triton.jit(do_not_specialize=["n", "a", "b", "c", "inverse", "minus_a", "adjoint_a", "adjoint_b", "adjoint_c"])
def _invert_kernel(
    p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_seed, n,
    a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    o_x = first + _offsets(BLOCK)
    if first + BLOCK <= n:
        _invert(
            p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_seed, o_x, None,
            a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c,
        )  # fmt: skip
    else:
        _invert(
            p_state, p_f, p_read, p_copy, p_adjoint, p_vjp, p_other, p_seed, o_x, o_x < n,
            a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c,
        )  # fmt: skip


@triton.jit
def _magnitude_bits(b_x):
    return b_x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _ratio_bits(b_error, b_value, floor):
    """Of |error| / max(|value|, floor) in float32. As bits, NaN is above all numbers."""
    b_size = tl.maximum(_magnitude_bits(b_value), floor.to(tl.int32, bitcast=True))
    return _magnitude_bits(tl.div_rn(b_error.to(tl.float32), b_size.to(tl.float32, bitcast=True)))


@triton.jit
def _compare_rows(
    p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, o_x, n, b_worst, floor,
    a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c, MORE: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The largest relative error so far, by lanes, as bits. See `_relax_rows`."""
    m_x = None if n is None else o_x < n
    b_state = _load(p_state + o_x, m_x)
    b_initial = _load(p_initial + o_x, m_x).to(tl.float64)
    b_error = _previous(b_state, p_f, p_read, o_x, m_x, a, b, c, inverse, minus_a) - b_initial
    b_worst = tl.maximum(b_worst, _ratio_bits(b_error, b_state, floor))
    if p_adjoint is not None:
        b_next = _updated(p_adjoint, p_vjp, p_other, o_x, m_x, adjoint_a, adjoint_b, adjoint_c)
    if MORE > 0:
        b_worst = _compare_rows(
            p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, o_x + LANES, n, b_worst, floor,
            a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c, MORE - 1, LANES,
        )  # fmt: skip
    if p_adjoint is not None:
        _store_adjoint(p_adjoint, p_seed, b_next, o_x, m_x)
    return b_worst


@triton.jit
def _compare_chunk(
    p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, first, n, floor,
    a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    b_worst = tl.full((LANES,), 0, tl.int32)
    for group in tl.range(_groups(None if n is None else n - first, COMPARED, ROWS, LANES)):
        o_x = first + group * (COMPARED * LANES) + _offsets(LANES)
        b_worst = _compare_rows(
            p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, o_x, n, b_worst, floor,
            a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c, COMPARED - 1, LANES,
        )  # fmt: skip
    return b_worst


@triton.jit(do_not_specialize=["n", "a", "b", "c", "inverse", "minus_a", "adjoint_a", "adjoint_b", "adjoint_c"])
def _compare_kernel(
    p_state, p_f, p_read, p_initial, p_floor, p_adjoint, p_vjp, p_other, p_seed, p_worst, n,
    a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * (ROWS * LANES)
    floor = tl.load(p_floor)
    if first + ROWS * LANES <= n:
        b_worst = _compare_chunk(
            p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, first, None, floor,
            a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c, ROWS, LANES,
        )  # fmt: skip
    else:
        b_worst = _compare_chunk(
            p_state, p_f, p_read, p_initial, p_adjoint, p_vjp, p_other, p_seed, first, n, floor,
            a, b, c, inverse, minus_a, adjoint_a, adjoint_b, adjoint_c, ROWS, LANES,
        )  # fmt: skip
    tl.store(p_worst + chunk * LANES + _offsets(LANES), b_worst)


def bits_of(number: float, dtype: torch.dtype) -> int:
    """Of a number rounded to float32 or float64, as a signed integer of the same size."""
    real, integer = ("<d", "<q") if dtype == torch.float64 else ("<f", "<i")
    return struct.unpack(integer, struct.pack(real, number))[0]


class Bits:
    """The bits of a step's coefficients, as long as it is the same step."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._step: Linear | None = None
        self._bits: tuple[int, ...] = ()

    def __call__(self, step: Linear) -> tuple[int, ...]:
        if step is not self._step:
            self._step, self._bits = step, tuple(bits_of(x, self._dtype) for x in (step.a, step.b, step.c))
        return self._bits


class HalfStep(half_step.HalfStep):
    def __init__(self, state: Tensor, copy: Tensor) -> None:
        super().__init__(state, copy)
        self._bits = Bits(torch.float64)
        self._inverted: Coefficients | None = None
        self._adjoint_bits = Bits(torch.promote_types(copy.dtype, torch.float32))
        self._warps = warps(state.device)
        self._by_reciprocal = divides_by_reciprocal(state.device)

    def _inversion(self, step: Coefficients) -> tuple[int | None, ...]:
        """What an inverse is given of a step: its coefficients, and by what to divide."""
        if not self._by_reciprocal:
            return *self._bits(step), None, None
        if step is not self._inverted:
            self._inverted = step
            self._quotient = tuple(bits_of(x, torch.float64) for x in (1 / step.a, -step.a))
        return *self._bits(step), *self._quotient

    def _read(self, read: Tensor | None, step: Coefficients) -> Tensor | None:
        return self.in_order_or_none(read) if step.c else None

    def relax(self, f: Tensor, read: Tensor | None, step: Coefficients) -> None:
        tensors = self.state, self.in_order(f), self._read(read, step), self.copy
        launch_blocks(_relax_kernel, self._warps, RELAX_BLOCK, tensors, self._bits(step))

    def relax_norms(self, f: Tensor, read: Tensor | None, step: Coefficients) -> Tensor:
        partial = self.partial_sums()
        tensors = self.state, self.in_order(f), self._read(read, step), self.copy, partial
        launch_chunks(_relax_norms_kernel, self._warps, tensors, self._bits(step))
        return partial

    def invert(self, f: Tensor, step: Coefficients) -> None:
        tensors = self.state, self.in_order(f), self._read(self.copy, step), self.copy, None, None, None, None
        launch_blocks(_invert_kernel, self._warps, INVERT_BLOCK, tensors, (*self._inversion(step), 0, 0, 0))

    def invert_adjoint(
        self,
        f: Tensor,
        adjoint: Tensor,
        vjp: Tensor,
        other: Tensor | None,
        step: Coefficients,
        adjoint_step: Linear,
        seed: Tensor | None = None,
    ) -> None:
        before = self.state, self.in_order(f), self._read(self.copy, step), self.copy
        tensors = *before, adjoint, self.in_order(vjp), other if adjoint_step.c else None, seed
        numbers = *self._inversion(step), *self._adjoint_bits(adjoint_step)
        launch_blocks(_invert_kernel, self._warps, INVERT_BLOCK, tensors, numbers)

    def invert_compare(
        self,
        f: Tensor,
        initial: Tensor,
        floor: Tensor,
        adjoint: Tensor | None,
        vjp: Tensor | None,
        other: Tensor | None,
        step: Coefficients,
        adjoint_step: Linear,
        seed: Tensor | None = None,
    ) -> Tensor:
        worst = self.partial_maxima()
        before = self.state, self.in_order(f), self._read(self.copy, step), self.in_order(initial), floor
        other = other if adjoint_step.c and adjoint is not None else None
        tensors = *before, adjoint, self.in_order_or_none(vjp), other, seed, worst
        numbers = *self._inversion(step), *self._adjoint_bits(adjoint_step)
        launch_chunks(_compare_kernel, self._warps, tensors, numbers)
        return worst


def warps(device: torch.device) -> int:
    return THREADS // _warp_size(device)


def _warp_size(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).warp_size if device.type == "cuda" else 32


def divides_by_reciprocal(device: torch.device) -> bool:
    """Where kernels are compiled to PTX."""
    return device.type == "cuda" and torch.version.hip is None


@functools.cache
def driver_trouble(kind: str) -> str:
    """Why Triton cannot launch on a GPU of this kind, if so: the first time, it builds its own driver."""
    if not getattr(torch, kind).is_available():
        return ""
    try:
        triton.runtime.driver.active.utils  # noqa: B018
    except Exception as error:
        return f"{type(error).__name__}: {error}".strip().splitlines()[0]
    return ""


def kernel_trouble(device: torch.device) -> str:
    """Why a kernel does not compile for a GPU or is not loaded there, if so: the GPU may be newer than Triton, or its
    driver older. While a graph is recorded, nothing is tried."""
    if not getattr(torch, device.type).is_available() or _has_stand_in() or is_capturing(device):
        return ""
    return _first_kernel_trouble(device)


@functools.cache
def _first_kernel_trouble(device: torch.device) -> str:
    """Of the kernel that a solve launches first. It is not launched here, and takes no tensor."""
    number = 2**40  # of 64 bits, as those of coefficients are
    arguments = torch.float64, torch.float32, None, torch.float32, 1, number, number, number, RELAX_BLOCK
    try:
        with _on(device):
            kernel = _relax_kernel.warmup(*arguments, grid=(1,), num_warps=warps(device), enable_fp_fusion=False)
            getattr(kernel, "run", None)  # loads it; who watches compilation may have got none
    except Exception as error:
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


def runs_on(device: torch.device) -> bool:
    """Whether a launch on tensors of this device can work: on a GPU, or where something stands in for one."""
    return device.type in ("cuda", "xpu") or (device.type == "cpu" and _has_stand_in())


def _has_stand_in() -> bool:
    """Triton's interpreter, or an emulator."""
    interpreted = not isinstance(_relax_kernel, triton.runtime.JITFunction)
    return interpreted or triton.runtime.JITFunction.run.__module__ != "triton.runtime.jit"
