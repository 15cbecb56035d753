"""How all kernels access memory.

A program processes a block of elements, two neighbours per thread: 16-byte accesses for float64 and 8-byte accesses for
float32, in one layout, so that nothing goes through shared memory. A mask would make every access scalar, so only the
last block has one. A kernel loads all that it needs before it stores anything: the compiler cannot know that a store
does not change what is loaded after it.
"""

import triton
import triton.language as tl


@triton.jit
def first(SIZE: tl.constexpr):
    """The offset of this program's first element. Tensors may have more than 2^31 elements."""
    return tl.program_id(0).to(tl.int64) * SIZE


@triton.jit
def offsets(SIZE: tl.constexpr):
    """The offsets within a block, two neighbours per thread."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, SIZE), 2), 2)


@triton.jit
def load(p_x, o, m):
    """Masked elements are 0, which changes neither a sum nor a maximum."""
    if m is None:
        return tl.load(p_x + o)
    else:  # noqa: RET505
        return tl.load(p_x + o, mask=m, other=0)


@triton.jit
def store(p_x, x, o, m):
    """float64 is rounded to float32 before it is rounded to bfloat16 or float16."""
    if x.dtype == tl.float64 and p_x.dtype.element_ty != tl.float64:
        x = x.to(tl.float32)
    tl.store(p_x + o, x.to(p_x.dtype.element_ty), mask=m)


@triton.jit
def store_lanes(p_partial, x, index, LANES: tl.constexpr):
    """The result of each lane of this program's chunk, at this index of a buffer of shape [:, chunks, LANES]."""
    chunk, chunks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    tl.store(p_partial + (index * chunks + chunk) * LANES + offsets(LANES), x)
