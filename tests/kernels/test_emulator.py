"""The emulator computes what PTX specifies, and raises for errors that a GPU would not report."""

import math
from fractions import Fraction

import numpy as np
import pytest
from emulator import EmulationError, Memory, parse, run
from emulator.arithmetic import bfloat16_to_float32, float32_to_bfloat16, fma, to_integer

THREADS = 64


def program(body, *types):
    """A kernel of two warps. x0, x1, ... are its parameters, and the offset of a thread's float32 is in %rd0."""
    parameters = ",\n".join([f".param .{t} x{i}" for i, t in enumerate((*types, "u64", "u64"))])
    return parse(f"""
.visible .entry kernel(
{parameters}
)
.reqntid {THREADS}
{{
    .reg .pred %p<4>;
    .reg .b16 %rs<4>;
    .reg .b32 %r<8>;
    .reg .b64 %rd<8>;
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %rd0, %r0, 4;
    {body}
    ret;
}}
""")


def execute(body, *arrays, programs=1):
    """The arrays are changed in place; their addresses are in %rd1, %rd2, ..."""
    memory = Memory()
    addresses = [memory.allocate(array, f"x{i}") for i, array in enumerate(arrays)]
    loads = "\n".join(f"ld.param.b64 %rd{i + 1}, [x{i}];" for i in range(len(arrays)))
    run(program(f"{loads}\n{body}", *["u64"] * len(arrays)), range(programs), addresses, memory)


def floats(n=THREADS):
    return np.arange(n, dtype=np.float32)


def test_a_kernel_with_a_branch():
    x, y = floats(), np.full(THREADS, np.nan, np.float32)
    execute(
        """
    add.s64 %rd3, %rd1, %rd0;
    add.s64 %rd4, %rd2, %rd0;
    ld.global.b32 %r1, [%rd3];
    setp.lt.f32 %p1, %r1, 0f41200000;
    @%p1 bra $small;
    mul.rn.f32 %r1, %r1, 0fBF800000;
$small:
    st.global.b32 [%rd4], %r1;
    """,
        x,
        y,
    )
    assert (y == np.where(x < 10, x, -x)).all()


CHOOSE = """
    mov.b64 %rd3, x0;
    mov.b64 %rd4, x1;
    setp.lt.u32 %p1, %r0, 20;
    selp.b64 %rd3, %rd3, %rd4, %p1;
"""


def test_a_parameter_can_be_loaded_by_its_address():
    x, y = np.zeros(THREADS, np.float32), np.zeros(THREADS, np.float32)
    execute(
        f"""
    {CHOOSE}
    ld.param.b64 %rd5, [%rd3];
    add.s64 %rd5, %rd5, %rd0;
    st.global.b32 [%rd5], 0f3F800000;
    """,
        x,
        y,
    )
    assert (x == (np.arange(THREADS) < 20)).all()
    assert (y == (np.arange(THREADS) >= 20)).all()


@pytest.mark.parametrize("load", ["ld.param.b64 %rd5, [%rd3+4];", "ld.param.b32 %r5, [%rd3];"])
def test_loading_part_of_a_parameter_is_an_error(load):
    with pytest.raises(EmulationError, match="is not a parameter|is not of the size"):
        execute(f"{CHOOSE}{load}", floats(), floats())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@np.errstate(all="ignore")
def test_a_multiply_add_is_rounded_once(dtype):
    """Against exact arithmetic, over the whole range: subnormal, cancelling, halfway, overflowing."""
    generator = np.random.default_rng(0)
    digits, lowest = (24, -149) if dtype == np.float32 else (53, -1074)
    largest = Fraction(float(np.finfo(dtype).max))
    numbers = generator.standard_normal((3, 3000)) * 2.0 ** generator.integers(-40, 40, (3, 3000))
    a, b, c = numbers.astype(dtype)
    c[:1000] = -(a * b)[:1000] * (1 + generator.integers(-2, 3, 1000) * np.finfo(dtype).eps).astype(dtype)
    tiny = float(np.finfo(dtype).smallest_normal)
    a[1000:1500] *= dtype(tiny**0.5)
    b[1000:1500] *= dtype(tiny**0.5)
    c[1000:1500] *= dtype(tiny)
    one_and_a_half_ulps = 1 + np.finfo(dtype).eps
    a[1500:1600], b[1500:1600] = one_and_a_half_ulps, one_and_a_half_ulps
    c[1500:1600] = np.ldexp(generator.choice([-1, 1], 100), generator.integers(-60, 60, 100)).astype(dtype)
    a[1600:1700], b[1600:1700] = np.finfo(dtype).max, 1 + 2.0**-20
    c[1700:1900] = np.ldexp((a * b)[1700:1900], generator.choice([-52, -53, -54, 52, 53, 54, -250, 250], 200))

    def rounded(x):
        if x == 0:
            return 0.0
        exponent = max(math.floor(math.log2(abs(x.numerator)) - math.log2(x.denominator)) - digits, lowest)
        unit = Fraction(2) ** exponent
        while abs(x) >= unit * 2**digits:
            unit *= 2
        value = round(x / unit) * unit  # to the nearest even
        if abs(value) > largest:
            return math.inf if x > 0 else -math.inf
        return float(value)

    result = fma(a, b, c)
    for x, y, z, r in zip(a.tolist(), b.tolist(), c.tolist(), result.tolist(), strict=True):
        if all(map(math.isfinite, (x, y, z))):
            assert r == rounded(Fraction(x) * Fraction(y) + Fraction(z))
    assert (result != a * b + c).sum() > 300, "cases where rounding twice gives another result"


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@np.errstate(all="ignore")
def test_multiply_adds_of_infinities_nan_and_zeros(dtype):
    special = np.array([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan], dtype)
    a, b, c = (x.ravel() for x in np.meshgrid(special, special, special))
    expected = a * b + c  # nothing is rounded
    np.testing.assert_array_equal(fma(a, b, c), expected)
    number = ~np.isnan(expected)
    assert (np.signbit(fma(a, b, c)) == np.signbit(expected))[number].all()


def test_bfloat16_is_rounded_to_the_nearest_even():
    every = np.arange(2**16, dtype=np.uint16)
    exact = bfloat16_to_float32(every)
    number = ~np.isnan(exact)
    assert (float32_to_bfloat16(exact) == every)[number].all()
    assert (float32_to_bfloat16(exact) == 0x7FFF)[~number].all()
    halfway = (every[:0x7F80].astype(np.uint32) << 16 | 0x8000).view(np.float32)
    assert (float32_to_bfloat16(halfway) == every[:0x7F80] + (every[:0x7F80] & 1)).all()


def test_conversions_to_integers_saturate():
    x = np.array([1.9, -1.9, 3e9, -3e9, np.inf, np.nan])
    top = 2**31 - 1
    assert to_integer(x, np.int32).tolist() == [1, -1, top, -top - 1, top, -(2**31)]
    assert to_integer(x.astype(np.float32), np.int32).tolist() == [1, -1, top, -top - 1, top, 0]
    assert to_integer(x, np.uint64).tolist() == [1, 0, 3 * 10**9, 0, 2**64 - 1, 2**63]


def test_operations_on_bits():
    x = np.zeros(THREADS, np.uint32)
    execute(
        """
    add.s64 %rd3, %rd1, %rd0;
    mov.b64 %rd4, 0x123456789ABCDEF0;
    mov.b64 {%r1, %r2}, %rd4;
    bfe.u64 %rd5, %rd4, 28, 8;
    cvt.u32.u64 %r3, %rd5;
    shl.b32 %r4, %r1, 32;
    shr.s32 %r5, %r1, 40;
    mul.hi.u32 %r6, %r1, %r2;
    add.s32 %r7, %r3, %r4;
    add.s32 %r7, %r7, %r5;
    add.s32 %r7, %r7, %r6;
    st.global.b32 [%rd3], %r7;
    """,
        x,
    )
    assert (x == 0x89 + 0 - 1 + (0x9ABCDEF0 * 0x12345678 >> 32)).all()


STORE = "add.s64 %rd3, %rd1, %rd0; st.global.b32 [%rd3], %r0;"


def lines(body):
    return body.replace("; ", ";\n")


@pytest.mark.parametrize("size", [THREADS - 1, 1])
def test_an_access_out_of_bounds_is_an_error(size):
    with pytest.raises(
        EmulationError, match=f"out of bounds: {THREADS - size} threads access x0, which has {4 * size} bytes"
    ):
        execute(lines(STORE), floats(size), floats())
    with pytest.raises(EmulationError, match=r"out of bounds: .* at byte -4: ld.global"):
        execute(lines("ld.global.b32 %r1, [%rd2+-4];"), floats(), floats())
    with pytest.raises(EmulationError, match="out of bounds: an access to 0x10, which is not allocated"):
        execute(lines("mov.b64 %rd1, 16; ld.global.b32 %r1, [%rd1];"), floats())


def test_a_wide_access_with_only_its_first_half_in_bounds_is_an_error():
    with pytest.raises(EmulationError, match="out of bounds"):
        execute(lines("ld.global.v2.b32 {%r1, %r2}, [%rd1+8];"), floats(3))


@pytest.mark.parametrize(("access", "offset"), [("b32 %r1", 2), ("b64 %rd4", 4), ("v2.b32 {%r1, %r2}", 4)])
def test_a_misaligned_access_is_an_error(access, offset):
    with pytest.raises(EmulationError, match="misaligned: an access of . bytes to x0"):
        execute(lines(f"ld.global.{access}, [%rd1+{offset}];"), floats())


def test_two_threads_writing_to_one_address_is_a_race():
    with pytest.raises(EmulationError, match="race: thread 0 writes what another wrote, in x0: st.global"):
        execute(lines("st.global.b32 [%rd1], %r0;"), floats())


def test_two_programs_writing_to_one_address_is_a_race():
    execute(lines(STORE), floats())
    with pytest.raises(EmulationError, match="race"):
        execute(lines(STORE), floats(), programs=2)


def test_two_threads_writing_in_sequence_is_a_race():
    again = "xor.b32 %r1, %r0, 1; mul.wide.u32 %rd4, %r1, 4; add.s64 %rd4, %rd1, %rd4; st.global.b32 [%rd4], %r0;"
    with pytest.raises(EmulationError, match="writes what another wrote"):
        execute(lines(f"{STORE} {again}"), floats())


NEIGHBOUR = "xor.b32 %r1, %r0, 1; mul.wide.u32 %rd4, %r1, 4; add.s64 %rd4, %rd1, %rd4; ld.global.b32 %r2, [%rd4];"


def test_reading_what_another_thread_wrote_is_a_race():
    with pytest.raises(EmulationError, match="reads what another wrote, in x0: ld.global"):
        execute(lines(f"{STORE} {NEIGHBOUR}"), floats())


def test_writing_what_another_thread_read_is_a_race():
    with pytest.raises(EmulationError, match="writes what another reads, in x0: st.global"):
        execute(lines(f"{NEIGHBOUR} {STORE}"), floats())


def test_accesses_that_are_no_race():
    """A thread that accesses its own element again, and threads that only read."""
    execute(lines(f"{STORE} ld.global.b32 %r1, [%rd3]; {STORE}"), floats())
    execute(lines(f"ld.global.b32 %r1, [%rd1]; {NEIGHBOUR}"), floats(), programs=2)


def test_reading_an_unwritten_register_is_an_error():
    with pytest.raises(EmulationError, match="register %r1 is read before it is written: add.s32"):
        execute(lines("add.s32 %r2, %r1, 1;"))
    some = "setp.lt.u32 %p1, %r0, 63; @%p1 mov.b32 %r1, 0; add.s32 %r2, %r1, 1;"
    with pytest.raises(EmulationError, match="%r1 is read before it is written"):
        execute(lines(some))
    execute(lines(some.replace("63", "64")))


def test_an_undefined_half_of_a_pair_is_allowed_unless_it_is_used():
    """Compilers generate such pairs. If the half is used, it is all ones."""
    pair = "add.s64 %rd3, %rd1, %rd0; mov.b64 %rd4, {%r0, %r7}; "
    x = np.zeros(THREADS, np.uint32)
    execute(lines(pair + "mov.b64 {%r1, _}, %rd4; st.global.b32 [%rd3], %r1;"), x)
    assert (x == np.arange(THREADS)).all()
    execute(lines(pair + "mov.b64 {_, %r1}, %rd4; st.global.b32 [%rd3], %r1;"), x)
    assert (x == 0xFFFFFFFF).all()


@pytest.mark.parametrize(
    "instruction",
    [
        "bar.sync 0;",
        "add.f32 %r1, %r0, %r0;",  # may be contracted
        "add.rz.f32 %r1, %r0, %r0;",
        "add.rn.ftz.f32 %r1, %r0, %r0;",
        "ld.global.L1::evict_last.b32 %r1, [%rd1];",
        "st.shared.b32 [%r1], %r0;",
        "atom.global.add.u32 %r1, [%rd1], 1;",
    ],
)
def test_an_unknown_instruction_is_an_error_even_if_no_thread_reaches_it(instruction):
    with pytest.raises(EmulationError, match="unsupported instruction"):
        execute(lines(f"bra $end; {instruction} \n$end:"), floats())


def test_text_that_cannot_be_parsed_is_an_error():
    with pytest.raises(EmulationError, match="not an instruction: .local .b8 depot"):
        execute(".local .b8 depot[8];")
    with pytest.raises(EmulationError, match="no kernel"):
        parse("")
    with pytest.raises(EmulationError, match="%r1 is not of the size of f64"):
        execute(lines("mov.b32 %r1, 0; abs.f64 %rd2, %r1;"))
    with pytest.raises(EmulationError, match="%q1 is neither a register nor a constant"):
        execute(lines("add.s32 %r1, %q1, 1;"))
    with pytest.raises(EmulationError, match="1 arguments for 0 parameters"):
        run(program(""), range(1), [7], Memory())
