"""How all kernels access memory.

A thread accesses two neighbours at once: 16 bytes of float64, and 8 bytes of float32. All tensors have this layout, so
that nothing goes through shared memory. If the number of elements is odd, each element has an access of its own. A
kernel loads all that it needs before it stores anything: the compiler must assume that a store changes what is loaded
after it.
"""

import triton
import triton.language as tl


@triton.jit
def offsets(SIZE: tl.constexpr):
    """The offsets within a block, two neighbours per thread."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, SIZE), 2), 2)


@triton.jit
def row_of(row, n, ROWS: tl.constexpr, EVEN: tl.constexpr, SIZE: tl.constexpr):
    """The offsets of the elements in a row of this program, and a mask of those that exist. There may be more than 2^31
    elements."""
    o = (tl.program_id(0).to(tl.int64) * ROWS + row) * SIZE + offsets(SIZE)
    if EVEN:
        n = n // 2 * 2  # shows the compiler that neighbours have the same mask
    return o, o < n


@triton.jit
def load(p_x, o, m):
    """Masked elements are 0, which changes neither a sum nor a maximum."""
    return tl.load(p_x + o, mask=m, other=0)


@triton.jit
def store(p_x, x, o, m):
    """float64 is rounded to float32 before it is rounded to bfloat16 or float16."""
    if x.dtype == tl.float64 and p_x.dtype.element_ty != tl.float64:
        x = x.to(tl.float32)
    tl.store(p_x + o, x.to(p_x.dtype.element_ty), mask=m)


@triton.jit
def store_lanes(p_partial, x, index, LANES: tl.constexpr):
    """Store the result of each lane of this program's chunk, at an index of a [:, chunks, LANES] buffer."""
    chunk, chunks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    tl.store(p_partial + (index * chunks + chunk) * LANES + offsets(LANES), x)
