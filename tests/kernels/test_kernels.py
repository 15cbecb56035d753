"""Every backend gives the bits of the reference, for every dtype, size and layout."""

import ctypes
import itertools
import mmap
import os
import sys

import pytest
import torch

from revdeq.kernels import cpu, reference

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CHUNK = reference.ROWS * reference.LANES
BETA = torch.tensor(0.8, dtype=torch.float32).item()


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    a, b = a.cpu(), b.cpu()
    different = (a.view(integer) != b.view(integer)) & ~(a.isnan() & b.isnan())
    assert not different.any(), (
        f"{different.sum()} of {a.numel()} differ, e.g. {a[different][:3]} and {b[different][:3]}"
    )


def wide_range(shape, dtype, device, seed=0):
    """Values over many magnitudes, with zeros, and, in float16, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x *= 10.0 ** torch.randint(-9, 4, shape, generator=generator)
    x[torch.rand(shape, generator=generator) < 0.02] = 0.0
    return x.to(dtype).to(device)


def tensors(shape, f_dtype, copy_dtype, device):
    """state, f, an unwritten copy, adjoint and vjp. What a kernel fails to write shows as NaN."""
    wide = torch.float64 if copy_dtype == torch.float64 else torch.float32
    return (
        wide_range(shape, torch.float64, device, seed=1),
        wide_range(shape, f_dtype, device, seed=2),
        torch.full(shape, torch.nan, dtype=copy_dtype, device=device),
        wide_range(shape, wide, device, seed=3),
        wide_range(shape, copy_dtype, device, seed=4),
    )


def run(half_step, operation, state, f, copy, adjoint, vjp, beta):
    """What the operation leaves in state, copy and adjoint, and what it returns."""
    state, copy, adjoint = state.clone(), copy.clone(), adjoint.clone()
    extra = {
        "invert_adjoint": (adjoint, vjp),
        "invert_compare": (vjp, adjoint, vjp),
        "compare alone": (vjp, None, None),
    }.get(operation, ())
    operation = "invert_compare" if operation == "compare alone" else operation
    returned = getattr(half_step(state, copy, beta), operation)(f, *extra)
    return [state, copy, adjoint, *([] if returned is None else [returned])]


OPERATIONS = ("relax", "relax_norms", "invert", "invert_adjoint", "invert_compare", "compare alone")


@pytest.mark.parametrize("operation", OPERATIONS)
def test_threads_change_no_bit(operation):
    """Above 2^15 elements, the C kernel shares its chunks among threads."""
    if cpu.library is None:
        pytest.skip("the C kernel was not built: no C compiler")
    case = tensors((2**16 + 131,), torch.float32, torch.float32, torch.device("cpu"))
    expected = run(reference.HalfStep, operation, *case, BETA)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for result, reference_result in zip(run(cpu.HalfStep, operation, *case, BETA), expected, strict=True):
                same_bits(result, reference_result)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("f_dtype", "copy_dtype"), [*itertools.product(DTYPES, DTYPES)])
def test_bits_equal_the_reference_for_every_pair_of_dtypes(half_step, operation, f_dtype, copy_dtype):
    half_step, device = half_step
    case = tensors((2 * CHUNK + 131,), f_dtype, copy_dtype, device)
    expected = run(reference.HalfStep, operation, *case, BETA)
    for result, reference_result in zip(run(half_step, operation, *case, BETA), expected, strict=True):
        same_bits(result, reference_result)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 17, 255, 256, 257, CHUNK - 1, CHUNK, CHUNK + 1, 40_001])
def test_bits_equal_the_reference_for_every_size(half_step, operation, n):
    half_step, device = half_step
    case = tensors((n,), torch.float32, torch.float32, device)
    expected = run(reference.HalfStep, operation, *case, BETA)
    for result, reference_result in zip(run(half_step, operation, *case, BETA), expected, strict=True):
        same_bits(result, reference_result)


@pytest.mark.parametrize("beta", [0.1, 0.5, 2 / 3, 0.75, 0.9, 0.95, 1.2, 1.9])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bits_equal_the_reference_for_every_beta(half_step, operation, beta):
    half_step, device = half_step
    beta = torch.tensor(beta, dtype=torch.float32).item()
    case = tensors((1000,), torch.float32, torch.float32, device)
    expected = run(reference.HalfStep, operation, *case, beta)
    for result, reference_result in zip(run(half_step, operation, *case, beta), expected, strict=True):
        same_bits(result, reference_result)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
}


@pytest.mark.parametrize("f_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_layouts_do_not_change_the_values(half_step, operation, layout, f_layout):
    half_step, device = half_step
    case = tensors((3, 5, 7, 11), torch.float32, torch.float32, device)
    expected = run(reference.HalfStep, operation, *case, BETA)
    state, f, copy, adjoint, vjp = case
    state, copy, adjoint = (LAYOUTS[layout](x) for x in (state, copy, adjoint))
    f, vjp = LAYOUTS[f_layout](f), LAYOUTS[f_layout](vjp)
    results = run(half_step, operation, state, f, copy, adjoint, vjp, BETA)
    for result, reference_result in zip(results[:3], expected[:3], strict=True):
        assert result.stride() == state.stride()
        same_bits(result.contiguous(), reference_result)


def test_an_output_of_f_need_not_be_dense(half_step):
    half_step, device = half_step
    state, f, copy, *_ = tensors((6, 50), torch.float32, torch.float32, device)
    strange = {"expanded": f[:1].expand(6, 50), "strided": torch.stack([f, f], -1)[..., 0], "odd": f.flatten()[1:]}
    strange["odd"] = torch.cat([strange["odd"], f.flatten()[:1]]).view(6, 50)[:, 1:]
    for f in strange.values():
        part = tuple(slice(0, k) for k in f.shape)
        expected, result = state[part].clone(), state[part].clone()
        reference.relax(expected, f, copy[part].clone(), BETA)
        half_step(result, copy[part].clone(), BETA).relax(f)
        same_bits(result, expected)


def test_conversions_round_as_torch_does(half_step):
    """Every bit pattern of the 16-bit dtypes goes in, and every halfway case between two of them comes out."""
    half_step, device = half_step
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
        state = torch.zeros(every.shape, dtype=torch.float64, device=device)
        half_step(state, every.clone(), 0.5).relax(every)
        same_bits(state, 0.5 * torch.zeros_like(state) + 0.5 * every.double())
        finite = every[every.isfinite()].double().sort().values
        between = torch.cat([(finite[1:] + finite[:-1]) / 2 * (1 + s * 2.0**-30) for s in (-1, 0, 1)])
        between = torch.cat([between, finite.max() * torch.tensor([1.001, 1.01, 1e6], device=device)])
        copy = torch.empty(between.shape, dtype=dtype, device=device)
        half_step(between * 2, copy, 0.5).relax(torch.zeros_like(between))
        same_bits(copy, between.to(dtype))


def test_not_finite_values_pass_through(half_step):
    half_step, device = half_step
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e300, 3e38, 0.0], dtype=torch.float64, device=device)
    for dtype in DTYPES:
        f = special.to(dtype)
        case = (special.clone(), f, torch.zeros_like(f), *(torch.zeros_like(f, dtype=torch.float32) for _ in range(2)))
        expected = run(reference.HalfStep, "relax", *case, BETA)
        for result, reference_result in zip(run(half_step, "relax", *case, BETA), expected, strict=True):
            same_bits(result, reference_result)


@pytest.mark.parametrize("beta", [0.5, 0.75, 0.8, 0.9, 1.2])
def test_step_and_inverse_are_inverse_to_each_other(half_step, beta):
    half_step, device = half_step
    beta = torch.tensor(beta, dtype=torch.float32).item()
    start = wide_range((5000,), torch.float32, device, seed=5).double()
    f = wide_range((5000,), torch.float32, device, seed=6)
    state, copy = start.clone(), torch.empty_like(f)
    bound = half_step(state, copy, beta)
    bound.relax(f)
    bound.invert(f)
    # One rounding of the product and one of the sum, each half a unit in the last place of what is rounded,
    # and divided by a on the way back; the inverse adds three roundings of its own.
    a = abs(1 - beta)
    largest = torch.maximum(a * start.abs(), (beta * f.double()).abs())
    bound = 4 * 2.0**-52 * (largest / a + start.abs())
    assert ((state - start).abs() <= bound).all()
    # so that what f reads is the same to the last bit wherever f does not dwarf the state
    safe = bound < 2.0**-25 * start.abs()
    assert safe.float().mean() > 0.8
    same_bits(copy[safe], start[safe].float())


def test_the_step_computes_both_equations_by_hand(half_step):
    """beta = .75: y' = .25 * 2 + .75 * 4 = 3.5, and back (3.5 - 3) / .25 = 2. The adjoint: .25 * 8 + .75 * 4 = 5."""
    half_step, device = half_step
    state = torch.tensor([2.0], dtype=torch.float64, device=device)
    copy, f = torch.zeros(1, device=device), torch.tensor([4.0], device=device)
    adjoint, vjp = torch.tensor([8.0], device=device), torch.tensor([4.0], device=device)
    bound = half_step(state, copy, 0.75)
    partial = bound.relax_norms(f)
    assert (state.item(), copy.item()) == (3.5, 3.5)
    assert partial.sum((1, 2)).tolist() == [1.5**2, 3.5**2]
    bound.invert_adjoint(f, adjoint, vjp)
    assert (state.item(), copy.item(), adjoint.item()) == (2.0, 2.0, 5.0)


def looped(window, total):
    """The address of `total` bytes in which the same memory, of the size of a window, comes again and again."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    file = os.memfd_create("window")
    os.truncate(file, window)
    start = libc.mmap(None, total + window, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    fixed = 0x10
    for offset in range(0, total, window):
        address = libc.mmap(start + offset, window, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | fixed, file, 0)
        assert address == start + offset
    os.close(file)
    return start


@pytest.mark.skipif(cpu.library is None, reason="the C kernel was not built: no C compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="maps memory as Linux does")
def test_more_than_two_to_the_31_elements_in_c():
    """16 GiB of state that are 32 MiB, seen 513 times: each of its elements takes 512 steps, and the first
    4,099 of them one more."""
    window, n = 2**22, 2**31 + 4099
    state, f, copy = (looped(window * size, n * size) for size in (8, 4, 4))
    values = torch.frombuffer((ctypes.c_double * window).from_address(state), dtype=torch.float64)
    (ctypes.c_float * window).from_address(f)[:] = [1.0] * window
    beta = 2.0**-10
    bound = cpu._Bound(state, copy, n, beta, cpu.CODE[torch.float32])
    cpu.library.revdeq_relax(ctypes.addressof(bound), f, cpu.CODE[torch.float32], 1)
    steps = [0.0]
    for _ in range(513):
        steps.append((1 - beta) * steps[-1] + beta)
    assert (values[:4099] == steps[513]).all()
    assert (values[4099:] == steps[512]).all()
