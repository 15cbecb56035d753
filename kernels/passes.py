"""How every Triton kernel goes through memory, whatever it computes there.

An operation is a function of some elements: of pointers, numbers, offsets and a mask. It loads and computes, and
returns what is to be stored, as pairs of a pointer and a block, and what is to be added up. Which elements those are,
and that all are loaded before any is stored, is decided here: the compiler cannot know that a store does not change
what is loaded after it.

A program takes a block of elements, two neighbours per thread: 16-byte accesses for float64 and 8-byte ones for
float32, in one layout, so nothing passes through shared memory. Where sums or maxima are taken, a program goes through
a chunk of ROWS such blocks of LANES elements, a few of them at a time, and each lane has totals of its own. Only the
last program is masked; a mask would make every access scalar.

Where the examples of a batch take part in different numbers of half-steps (`HalfStep.each`), a program has elements of
one example, and an operation is told in how many half-steps, from this one on, that one still takes part: all that
matters is whether it is more than 1, more than 0, or at least 0. Elsewhere it is told None, and compiled without it.
"""

import triton
import triton.language as tl


@triton.jit
def each_block(
    OPERATION: tl.constexpr, pointers, numbers, n, each, BLOCK: tl.constexpr, p_alarm=None, LANES: tl.constexpr = None
):  # fmt: skip
    """An operation on a program's block. Nothing is added up; with `p_alarm`, the last of what would be is an alarm."""
    first, end = _part(n, each, BLOCK)
    left = None if each[0] is None else _left(each, BLOCK)
    o_x = first + offsets(BLOCK)
    if first + BLOCK <= end:
        _block(OPERATION, pointers, numbers, o_x, None, left, p_alarm, LANES)
    else:
        _block(OPERATION, pointers, numbers, o_x, end, left, p_alarm, LANES)


@triton.jit
def _part(n, each, SIZE: tl.constexpr):
    """Where a program's elements begin, and where their example ends.

    each: how many half-steps each example takes part in, the number of this one, and a sixteenth of the number of
    elements of an example: the compiler then knows that accesses may be as wide as elsewhere."""
    if each[0] is None:
        return tl.program_id(0).to(tl.int64) * SIZE, n
    else:  # noqa: RET505
        length, programs, example = _example(each[2], SIZE)
        begin = example.to(tl.int64) * length
        return begin + (tl.program_id(0) - example * programs).to(tl.int64) * SIZE, begin + length


@triton.jit
def _left(each, SIZE: tl.constexpr):
    """In how many half-steps a program's example still takes part."""
    _, _, example = _example(each[2], SIZE)
    return tl.load(each[0] + example) - each[1]


@triton.jit
def _example(sixteenth, SIZE: tl.constexpr):
    """The number of elements and of programs of each example, and which one this program's is."""
    length = sixteenth.to(tl.int64) * 16
    programs = ((length + (SIZE - 1)) // SIZE).to(tl.int32)
    return length, programs, tl.program_id(0) // programs


@triton.jit
def _block(
    OPERATION: tl.constexpr, pointers, numbers, o_x, n, left, p_alarm, LANES: tl.constexpr
):  # fmt: skip
    m_x = None if n is None else o_x < n  # all, in a full block; a function cannot return None in Triton 3.6
    stores, added = OPERATION(pointers, numbers, o_x, m_x, left)
    _store_all(stores, o_x, m_x)
    if p_alarm is not None:
        raise_alarm(p_alarm, added[-1], o_x, LANES)


@triton.jit
def each_chunk(
    OPERATION: tl.constexpr, pointers, numbers, totals, n, each,
    GROUP: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """An operation on the rows of a program's chunk, GROUP of them at a time. Returns the totals, which begin as given:
    floats are added up, row by row, and of integers the largest is kept."""
    first, end = _part(n, each, ROWS * LANES)
    left = None if each[0] is None else _left(each, ROWS * LANES)
    if first + ROWS * LANES <= end:
        totals = _groups(OPERATION, pointers, numbers, totals, first, None, left, ROWS // GROUP, GROUP, LANES)
    else:
        # In the last chunk the compiler does not know the number of rows: it would take many registers to unroll them.
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
    """A row, and MORE of them after it, which are loaded before this one is stored."""
    m_x = None if n is None else o_x < n  # all, in a full block; a function cannot return None in Triton 3.6
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
    """Of an example that takes part in so many half-steps, or where all do, x, and of one that does not, the rest."""
    return b_x if left is None else tl.where(left >= least, b_x, b_rest)


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
