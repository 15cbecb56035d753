"""The loops and memory accesses of all Triton kernels.

An operation is a function of pointers, numbers, offsets and a mask. It loads and computes, and returns what to store,
as pairs of a pointer and a block, and what to accumulate. The functions here choose the elements and load all of them
before any is stored: the compiler cannot know that a store does not change what is loaded after it.

A program processes a block of elements, two neighbours per thread: 16-byte accesses for float64 and 8-byte accesses for
float32, in one layout, so nothing goes through shared memory. To compute sums or maxima, a program processes a chunk of
ROWS such blocks of LANES elements, a few of them at a time, with separate totals for each lane. Only the last program
is masked; a mask would make every access scalar.

If the examples of a batch take different numbers of half-steps (`HalfStep.each`), a program processes elements of one
example only, and `left` is the number of half-steps that this example still takes, including this one. Only whether it
is above 1, above 0, or at least 0 matters. Without `each`, it is None, and kernels are compiled without it.
"""

import triton
import triton.language as tl


@triton.jit
def each_block(
    OPERATION: tl.constexpr, pointers, numbers, n, each, BLOCK: tl.constexpr, p_alarm=None, LANES: tl.constexpr = None
):  # fmt: skip
    """Applies an operation to this program's block. Nothing is accumulated; with `p_alarm`, the operation's last value
    is an alarm."""
    first, end = _part(n, each, BLOCK)
    left = None if each[0] is None else _left(each, BLOCK)
    o_x = first + offsets(BLOCK)
    if first + BLOCK <= end:
        _block(OPERATION, pointers, numbers, o_x, None, left, p_alarm, LANES)
    else:
        _block(OPERATION, pointers, numbers, o_x, end, left, p_alarm, LANES)


@triton.jit
def _part(n, each, SIZE: tl.constexpr):
    """The offset of this program's first element, and of the end of its example.

    each: the number of half-steps of each example, the number of this half-step, and a sixteenth of the number of
    elements of an example, from which the compiler sees that wide accesses are aligned."""
    if each[0] is None:
        return tl.program_id(0).to(tl.int64) * SIZE, n
    else:  # noqa: RET505
        length, programs, example = _example(each[2], SIZE)
        begin = example.to(tl.int64) * length
        return begin + (tl.program_id(0) - example * programs).to(tl.int64) * SIZE, begin + length


@triton.jit
def _left(each, SIZE: tl.constexpr):
    """How many half-steps this program's example still takes, including this one."""
    _, _, example = _example(each[2], SIZE)
    return tl.load(each[0] + example) - each[1]


@triton.jit
def _example(sixteenth, SIZE: tl.constexpr):
    """The number of elements and of programs per example, and the index of this program's example."""
    length = sixteenth.to(tl.int64) * 16
    programs = ((length + (SIZE - 1)) // SIZE).to(tl.int32)
    return length, programs, tl.program_id(0) // programs


@triton.jit
def _block(
    OPERATION: tl.constexpr, pointers, numbers, o_x, n, left, p_alarm, LANES: tl.constexpr
):  # fmt: skip
    m_x = None if n is None else o_x < n  # None in a full block; inline, because Triton 3.6 cannot return None
    stores, added = OPERATION(pointers, numbers, o_x, m_x, left)
    _store_all(stores, o_x, m_x)
    if p_alarm is not None:
        raise_alarm(p_alarm, added[-1], o_x, LANES)


@triton.jit
def each_chunk(
    OPERATION: tl.constexpr, pointers, numbers, totals, n, each,
    GROUP: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Applies an operation to the rows of this program's chunk, GROUP rows at a time. Returns the updated totals:
    floats are added up, row by row, and of integers the maximum is kept."""
    first, end = _part(n, each, ROWS * LANES)
    left = None if each[0] is None else _left(each, ROWS * LANES)
    if first + ROWS * LANES <= end:
        totals = _groups(OPERATION, pointers, numbers, totals, first, None, left, ROWS // GROUP, GROUP, LANES)
    else:
        # Not a compile-time constant: the compiler would unroll the loop, which would take many registers.
        groups = ((end - first + (GROUP * LANES - 1)) // (GROUP * LANES)).to(tl.int32)
        totals = _groups(OPERATION, pointers, numbers, totals, first, end, left, groups, GROUP, LANES)
    return totals


@triton.jit
def _groups(
    OPERATION: tl.constexpr, pointers, numbers, totals, first, n, left, groups,
    GROUP: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    for group in tl.range(groups):
        o_x = first + group * (GROUP * LANES) + offsets(LANES)
        totals = _rows(OPERATION, pointers, numbers, totals, o_x, n, left, GROUP - 1, LANES)
    return totals


@triton.jit
def _rows(
    OPERATION: tl.constexpr, pointers, numbers, totals, o_x, n, left, MORE: tl.constexpr, LANES: tl.constexpr
):  # fmt: skip
    """Processes one row, and MORE rows after it, which are loaded before this one is stored."""
    m_x = None if n is None else o_x < n  # None in a full block; inline, because Triton 3.6 cannot return None
    stores, added = OPERATION(pointers, numbers, o_x, m_x, left)
    totals = _with(totals, added)
    if MORE > 0:
        totals = _rows(OPERATION, pointers, numbers, totals, o_x + LANES, n, left, MORE - 1, LANES)
    _store_all(stores, o_x, m_x)
    return totals


@triton.jit
def _with(totals, added):
    sums = ()
    for i in tl.static_range(len(totals)):
        sums += (tl.maximum(totals[i], added[i]) if totals[i].dtype == tl.int32 else totals[i] + added[i],)
    return sums


@triton.jit
def where(left, least: tl.constexpr, b_x, b_rest):
    """x, if the example still takes at least `least` half-steps or without `each`; otherwise rest."""
    return b_x if left is None else tl.where(left >= least, b_x, b_rest)


@triton.jit
def offsets(BLOCK: tl.constexpr):
    """The offsets within a block, two neighbours per thread."""
    return tl.max_contiguous(tl.multiple_of(tl.arange(0, BLOCK), 2), 2)


@triton.jit
def load(p_x, o_x, m_x):
    """Masked elements are 0, which changes neither a sum nor a maximum."""
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
    """float64 is rounded to float32 before it is rounded to bfloat16 or float16."""
    if b_x.dtype == tl.float64 and p_x.dtype.element_ty != tl.float64:
        b_x = b_x.to(tl.float32)
    tl.store(p_x + o_x, b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def store_totals(p_totals, totals, LANES: tl.constexpr):
    """To a buffer of shape [totals, chunks, LANES]."""
    chunk, chunks = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    for i in tl.static_range(len(totals)):
        tl.store(p_totals + (i * chunks + chunk) * LANES + offsets(LANES), totals[i])


@triton.jit
def raise_alarm(p_alarm, b_alarm, o_x, LANES: tl.constexpr):
    """Stores nothing where the alarm is 0. If there are several in a lane, any of them may be stored last."""
    o_lane = tl.max_contiguous(tl.multiple_of(o_x % LANES, 2), 2)
    tl.store(p_alarm + o_lane, b_alarm, mask=b_alarm != 0)


@triton.jit
def number(bits, DTYPE: tl.constexpr):
    """Coefficients are arguments, so that kernels are not compiled for their values. They are passed as integers with
    the same bits, because Triton converts Python floats to float32."""
    return bits.to(DTYPE, bitcast=True)
