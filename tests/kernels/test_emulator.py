"""The emulator raises for errors that a GPU would not report. test_emulated_kernels.py shows that it computes right."""

import numpy as np
import pytest
from emulator import EmulationError, Memory, parse, run
from emulator.arithmetic import fma

THREADS = 64


def program(body, *types):
    """A kernel of two warps. x0, x1, ... are its parameters. A thread has its number in %r0, and the offset of its
    float32 in %rd0."""
    parameters = ",\n".join([f".param .{t} x{i}" for i, t in enumerate((*types, "u64", "u64"))])
    body = body.replace("; ", ";\n")
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


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_multiply_add_is_rounded_once(dtype):
    eps = np.full(3, np.finfo(dtype).eps)
    assert (fma(1 + eps, 1 + eps, -(1 + 2 * eps)) == eps**2).all()


STORE = "add.s64 %rd3, %rd1, %rd0; st.global.b32 [%rd3], %r0; "
NEIGHBOUR = "xor.b32 %r1, %r0, 1; mul.wide.u32 %rd4, %r1, 4; add.s64 %rd4, %rd1, %rd4; "
ERRORS = {
    "out of bounds: 1 threads access x0, which has 252 bytes": (STORE, floats(THREADS - 1)),
    "out of bounds: .* at byte -4: ld.global": ("ld.global.b32 %r1, [%rd2+-4];", floats(), floats()),
    "out of bounds: an access to 0x10, which is not allocated": ("mov.b64 %rd1, 16; ld.global.b32 %r1, [%rd1];",),
    "out of bounds: 64 threads access x0, which has 12": ("ld.global.v2.b32 {%r1, %r2}, [%rd1+8];", floats(3)),
    "misaligned: an access of 4 bytes to x0": ("ld.global.b32 %r1, [%rd1+2];", floats()),
    "misaligned: an access of 8 bytes to x0": ("ld.global.v2.b32 {%r1, %r2}, [%rd1+4];", floats()),
    "thread 0 writes what another wrote, in x0: st.global": ("st.global.b32 [%rd1], %r0;", floats()),
    r"what another wrote, in x0: .*rd4": (STORE + NEIGHBOUR + "st.global.b32 [%rd4], %r0;", floats()),
    "reads what another wrote, in x0": (STORE + NEIGHBOUR + "ld.global.b32 %r2, [%rd4];", floats()),
    "writes what another reads, in x0": (NEIGHBOUR + "ld.global.b32 %r2, [%rd4]; " + STORE, floats()),
    "register %r1 is read before it is written: add.s32": ("add.s32 %r2, %r1, 1;",),
    "%r1 is read before it is written": ("setp.lt.u32 %p1, %r0, 63; @%p1 mov.b32 %r1, 0; add.s32 %r2, %r1, 1;",),
    "%r1 is not of the size of f64": ("mov.b32 %r1, 0; abs.f64 %rd2, %r1;",),
    "%q1 is neither a register nor a constant": ("add.s32 %r1, %q1, 1;",),
    "not an instruction: .local .b8 depot": (".local .b8 depot[8];",),
    "unsupported instruction: add.f32": ("add.f32 %r1, %r0, %r0;",),  # may be contracted
    "unsupported instruction: add.rn.ftz": ("add.rn.ftz.f32 %r1, %r0, %r0;",),
    "unsupported instruction: atom": ("bra $end; atom.global.add.u32 %r1, [%rd1], 1; \n$end:",),  # not even reached
}


@pytest.mark.parametrize("message", ERRORS)
def test_what_a_gpu_would_not_report_is_an_error(message):
    with pytest.raises(EmulationError, match=message):
        execute(*ERRORS[message])


def test_two_programs_writing_to_one_address_is_a_race():
    execute(STORE, floats())
    with pytest.raises(EmulationError, match="race"):
        execute(STORE, floats(), programs=2)


def test_accesses_that_are_no_race():
    """A thread that accesses its own element again, and threads that only read."""
    execute(f"{STORE}ld.global.b32 %r1, [%rd3]; {STORE}", floats())
    execute(f"ld.global.b32 %r1, [%rd1]; {NEIGHBOUR}ld.global.b32 %r2, [%rd4];", floats(), programs=2)


def test_an_undefined_half_of_a_pair_is_allowed_unless_it_is_used():
    """Compilers generate such pairs. If the half is used, it is all ones."""
    pair = "add.s64 %rd3, %rd1, %rd0; mov.b64 %rd4, {%r0, %r7}; "
    x = np.zeros(THREADS, np.uint32)
    execute(pair + "mov.b64 {%r1, _}, %rd4; st.global.b32 [%rd3], %r1;", x)
    assert (x == np.arange(THREADS)).all()
    execute(pair + "mov.b64 {_, %r1}, %rd4; st.global.b32 [%rd3], %r1;", x)
    assert (x == 0xFFFFFFFF).all()
