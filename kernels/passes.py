"""How every Triton kernel goes through memory, whatever it computes there.

An operation is a function of some elements: of pointers, numbers, offsets and a mask. It loads and computes, and
returns what is to be stored, as pairs of a pointer and a block, and what is to be added up. Which elements those are,
and that all are loaded before any is stored, is decided here: the compiler cannot know that a store does not change
what is loaded after it.

A program takes a block of elements, two neighbours per thread: 16-byte accesses for float64 and 8-byte ones for
float32, in one layout, so nothing passes through shared memory. Where sums or maxima are taken, a program goes through
a chunk of ROWS such blocks of LANES elements, a few of them at a time, and each lane has totals of its own. Only the
last program is masked; a mask would make every access scalar.
"""

import triton
import triton.language as tl


@triton.jit
def each_block(
    OPERATION: tl.constexpr, pointers, numbers, n, BLOCK: tl.constexpr, p_alarm=None, LANES: tl.constexpr = None
):  # fmt: skip
    """An operation on a program's block. Nothing is added up; with `p_alarm`, the last of what would be is an alarm."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    o_x = first + offsets(BLOCK)
    if first + BLOCK <= n:
        _block(OPERATION, pointers, numbers, o_x, None, p_alarm, LANES)
    else:
        _block(OPERATION, pointers, numbers, o_x, n, p_alarm, LANES)


@triton.jit
def _block(OPERATION: tl.constexpr, pointers, numbers, o_x, n, p_alarm, LANES: tl.constexpr):
    m_x = _mask(o_x, n)
    stores, added = OPERATION(pointers, numbers, o_x, m_x)
    _store_all(stores, o_x, m_x)
    if p_alarm is not None:
        raise_alarm(p_alarm, added[-1], o_x, LANES)


@triton.jit
def each_chunk(
    OPERATION: tl.constexpr, pointers, numbers, totals, n, GROUP: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """An operation on the rows of a program's chunk, GROUP of them at a time. Returns the totals, which begin as given:
    floats are added up, row by row, and of integers the largest is kept."""
    first = tl.program_id(0).to(tl.int64) * (ROWS * LANES)
    if first + ROWS * LANES <= n:
        totals = _groups(OPERATION, pointers, numbers, totals, first, None, ROWS // GROUP, GROUP, LANES)
    else:
        # In the last chunk the compiler does not know the number of rows: it would take many registers to unroll them.
        groups = ((n - first + (GROUP * LANES - 1)) // (GROUP * LANES)).to(tl.int32)
        totals = _groups(OPERATION, pointers, numbers, totals, first, n, groups, GROUP, LANES)
    return totals


@triton.jit
def _groups(
    OPERATION: tl.constexpr, pointers, numbers, totals, first, n, groups, GROUP: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    for group in tl.range(groups):
        o_x = first + group * (GROUP * LANES) + offsets(LANES)
        totals = _rows(OPERATION, pointers, numbers, totals, o_x, n, GROUP - 1, LANES)
    return totals


@triton.jit
def _rows(
    OPERATION: tl.constexpr, pointers, numbers, totals, o_x, n, MORE: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """A row, and MORE of them after it, which are loaded before this one is stored."""
    m_x = _mask(o_x, n)
    stores, added = OPERATION(pointers, numbers, o_x, m_x)
    totals = _with(totals, added)
    if MORE > 0:
        totals = _rows(OPERATION, pointers, numbers, totals, o_x + LANES, n, MORE - 1, LANES)
    _store_all(stores, o_x, m_x)
    return totals


@triton.jit
def _mask(o_x, n):
    """Which elements an operation is for: all of them (None) in a full block or chunk, which is given no n. Whoever
    leaves out others does it here."""
    return None if n is None else o_x < n


@triton.jit
def _with(totals, added):
    sums = ()
    for i in tl.static_range(len(totals)):
        sums += (tl.maximum(totals[i], added[i]) if totals[i].dtype == tl.int32 else totals[i] + added[i],)
    return sums


@triton.jit
def offsets(BLOCK: tl.constexpr):
    """Of a block's elements, two neighbours for each thread."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), 2), 2)


@triton.jit
def load(p_x, o_x, m_x):
    """What is masked is 0, and adds nothing to a sum or a maximum."""
    if m_x is None:
        return tl.load(p_x + o_x)
    else:  # noqa: RET505
        return tl.load(p_x + o_x, mask=m_x, other=0)


@triton.jit
def _store_all(stores, o_x, m_x):
    for i in tl.static_range(len(stores)):
        _store(stores[i][0], stores[i][1], o_x, m_x)


@triton.jit
def _store(p_x, b_x, o_x, m_x):
    """float64 reaches bfloat16 and float16 by way of float32."""
    if b_x.dtype == tl.float64 and p_x.dtype.element_ty != tl.float64:
        b_x = b_x.to(tl.float32)
    tl.store(p_x + o_x, b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def store_totals(p_totals, totals, LANES: tl.constexpr):
    """In memory of shape [totals, chunks, LANES]."""
    chunk, chunks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    for i in tl.static_range(len(totals)):
        tl.store(p_totals + (i * chunks + chunk) * LANES + offsets(LANES), totals[i])


@triton.jit
def raise_alarm(p_alarm, b_alarm, o_x, LANES: tl.constexpr):
    """Only where something is wrong is there anything to store; of several in a lane, any will do."""
    o_lane = tl.max_contiguous(tl.multiple_of(o_x % LANES, 2), 2)
    tl.store(p_alarm + o_lane, b_alarm, mask=b_alarm != 0)


@triton.jit
def number(bits, DTYPE: tl.constexpr):
    """Coefficients are arguments, so that no value of theirs is compiled for. They travel as their bits, in integers:
    a Python float would arrive as float32."""
    return bits.to(DTYPE, bitcast=True)
