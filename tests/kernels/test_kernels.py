"""Every backend gives the bits of the reference, for every dtype, size and layout."""

import ctypes
import itertools
import mmap
import os
import sys

import pytest
import torch

from revdeq.kernels import Coefficients, cpu, reference
from revdeq.kernels import half_step as base

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
CHUNK = base.ROWS * base.LANES
STEP = Coefficients.rounded(0.8)
MIXED = Coefficients.rounded(0.8, 1.3)
STEPS = pytest.mark.parametrize("step", [STEP, MIXED], ids=["gamma 1", "gamma 1.3"])


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
    """state, f, an unwritten copy, adjoint, vjp, what f read, the other adjoint and the floor of a comparison. What a
    kernel fails to write shows as NaN."""
    wide = torch.float64 if copy_dtype == torch.float64 else torch.float32
    return (
        wide_range(shape, torch.float64, device, seed=1),
        wide_range(shape, f_dtype, device, seed=2),
        torch.full(shape, torch.nan, dtype=copy_dtype, device=device),
        wide_range(shape, wide, device, seed=3),
        wide_range(shape, copy_dtype, device, seed=4),
        wide_range(shape, copy_dtype, device, seed=7),
        wide_range(shape, wide, device, seed=8),
        torch.tensor(1e-3, device=device),
    )


def run(half_step, operation, state, f, copy, adjoint, vjp, read, other, floor, step, adjoint_step=None, seed=None):
    """What the operation writes to state, copy, adjoint and a seed of this dtype, if given, and what it returns."""
    state, copy, adjoint = state.clone(), copy.clone(), adjoint.clone()
    if step.c and not operation.startswith("relax"):
        copy.copy_(read)  # until it is overwritten
    steps = step, adjoint_step or step
    seed = None if seed is None else torch.full_like(adjoint, torch.nan, dtype=seed)
    extra = {
        "relax": (read if step.c else None, step),
        "relax_norms": (read if step.c else None, step),
        "invert": (step,),
        "invert_adjoint": (adjoint, vjp, other, *steps, seed),
        "invert_compare": (vjp, floor, adjoint, vjp, other, *steps, seed),
        "compare alone": (vjp, floor, None, None, None, *steps),
    }[operation]
    operation = "invert_compare" if operation == "compare alone" else operation
    returned = getattr(half_step(state, copy), operation)(f, *extra)
    return [x for x in (state, copy, adjoint, seed, returned) if x is not None]


OPERATIONS = ("relax", "relax_norms", "invert", "invert_adjoint", "invert_compare", "compare alone")


@STEPS
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_number_of_threads_does_not_change_the_bits(operation, step):
    """Above 2^15 elements, the C kernel shares its chunks among threads."""
    if cpu.library is None:
        pytest.skip("the C kernel was not built: no C compiler")
    case = tensors((2**16 + 131,), torch.float32, torch.float32, torch.device("cpu"))
    expected = run(reference.HalfStep, operation, *case, step)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for result, reference_result in zip(run(cpu.HalfStep, operation, *case, step), expected, strict=True):
                same_bits(result, reference_result)
    finally:
        torch.set_num_threads(before)


PAIRS = [(STEP, *pair) for pair in itertools.product(DTYPES, DTYPES)] + [(MIXED, x, x) for x in DTYPES]
"""Coefficients, and dtypes of f and of what it reads: dtypes are converted by the same code for both coefficients."""


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize(("step", "f_dtype", "copy_dtype"), PAIRS)
def test_bits_equal_the_reference_for_every_pair_of_dtypes(half_step, operation, f_dtype, copy_dtype, step):
    half_step, device = half_step
    case = tensors((2 * CHUNK + 131,), f_dtype, copy_dtype, device)
    expected = run(reference.HalfStep, operation, *case, step)
    for result, reference_result in zip(run(half_step, operation, *case, step), expected, strict=True):
        same_bits(result, reference_result)


@STEPS
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 17, 255, 256, 257, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
def test_bits_equal_the_reference_for_every_size(half_step, operation, n, step):
    half_step, device = half_step
    case = tensors((n,), torch.float32, torch.float32, device)
    expected = run(reference.HalfStep, operation, *case, step)
    for result, reference_result in zip(run(half_step, operation, *case, step), expected, strict=True):
        same_bits(result, reference_result)


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("beta", [0.1, 0.5, 2 / 3, 0.75, 0.9, 0.95, 1.2, 1.9])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bits_equal_the_reference_for_every_beta(half_step, operation, beta, gamma):
    half_step, device = half_step
    step = Coefficients.rounded(beta, gamma)
    case = tensors((1000,), torch.float32, torch.float32, device)
    expected = run(reference.HalfStep, operation, *case, step)
    for result, reference_result in zip(run(half_step, operation, *case, step), expected, strict=True):
        same_bits(result, reference_result)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
}


@pytest.mark.parametrize("f_layout", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_layouts_do_not_change_the_values(half_step, operation, layout, f_layout, step=MIXED):
    half_step, device = half_step
    case = tensors((3, 5, 7, 11), torch.float32, torch.float32, device)
    expected = run(reference.HalfStep, operation, *case, step)
    state, f, copy, adjoint, vjp, read, other, floor = case
    state, copy, adjoint, read, other = (LAYOUTS[layout](x) for x in (state, copy, adjoint, read, other))
    f, vjp = LAYOUTS[f_layout](f), LAYOUTS[f_layout](vjp)
    results = run(half_step, operation, state, f, copy, adjoint, vjp, read, other, floor, step)
    for result, reference_result in zip(results[:3], expected[:3], strict=True):
        assert result.stride() == state.stride()
        same_bits(result.contiguous(), reference_result)


@pytest.mark.parametrize("seed", DTYPES)
@pytest.mark.parametrize("copy_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("operation", ["invert_adjoint", "invert_compare"])
def test_a_seed_is_the_adjoint_in_another_dtype(half_step, operation, copy_dtype, seed):
    half_step, device = half_step
    case = tensors((CHUNK + 131,), seed, copy_dtype, device)
    _, _, adjoint, result, *_ = run(half_step, operation, *case, MIXED, seed=seed)
    same_bits(adjoint, run(reference.HalfStep, operation, *case, MIXED)[2])
    same_bits(result, adjoint.to(seed))


def test_an_output_of_f_need_not_be_dense(half_step):
    half_step, device = half_step
    state, f, copy, *_ = tensors((6, 50), torch.float32, torch.float32, device)
    strange = {"expanded": f[:1].expand(6, 50), "strided": torch.stack([f, f], -1)[..., 0], "odd": f.flatten()[1:]}
    strange["odd"] = torch.cat([strange["odd"], f.flatten()[:1]]).view(6, 50)[:, 1:]
    for f in strange.values():
        part = tuple(slice(0, k) for k in f.shape)
        expected, result = state[part].clone(), state[part].clone()
        reference.relax(expected, f, None, copy[part].clone(), STEP)
        half_step(result, copy[part].clone()).relax(f, None, STEP)
        same_bits(result, expected)


def test_conversions_round_as_torch_does(half_step):
    """Every bit pattern of the 16-bit dtypes goes in, and every halfway case between two of them comes out."""
    half_step, device = half_step
    half = Coefficients.rounded(0.5)
    stride = 8 if device.type == "cpu" and half_step is not cpu.HalfStep else 1  # Triton's interpreter is slow
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
        state = torch.zeros(every.shape, dtype=torch.float64, device=device)
        half_step(state, every.clone()).relax(every, None, half)
        same_bits(state, 0.5 * torch.zeros_like(state) + 0.5 * every.double())
        finite = every[every.isfinite()].double().sort().values
        between = torch.cat([(finite[1:] + finite[:-1]) / 2 * (1 + s * 2.0**-30) for s in (-1, 0, 1)])
        between = torch.cat([between[::stride], finite.max() * torch.tensor([1.001, 1.01, 1e6], device=device)])
        copy = torch.empty(between.shape, dtype=dtype, device=device)
        half_step(between * 2, copy).relax(torch.zeros_like(between), None, half)
        same_bits(copy, between.to(dtype))


@pytest.mark.parametrize("operation", ["relax", "invert_compare"])
def test_infinities_and_nan_propagate(half_step, operation):
    half_step, device = half_step
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e300, 3e38, 0.0], dtype=torch.float64, device=device)
    for dtype in DTYPES:
        f = special.to(dtype)
        zeros = torch.zeros_like(f, dtype=torch.promote_types(dtype, torch.float32))
        case = (special.clone(), f, torch.zeros_like(f), zeros, zeros, special.to(dtype), zeros, torch.ones(()))
        expected = run(reference.HalfStep, operation, *case, STEP)
        if operation == "invert_compare":
            assert expected[-1].view(torch.float32).amax(1).isnan().all()  # inf / inf is the largest error
        for result, reference_result in zip(run(half_step, operation, *case, STEP), expected, strict=True):
            same_bits(result, reference_result)


@pytest.mark.parametrize("beta", [0.5, 0.75, 0.8, 0.9, 1.2])
def test_the_inverse_undoes_the_step(half_step, beta):
    half_step, device = half_step
    step = Coefficients.rounded(beta)
    start = wide_range((5000,), torch.float32, device, seed=5).double()
    f = wide_range((5000,), torch.float32, device, seed=6)
    state, copy = start.clone(), torch.empty_like(f)
    bound = half_step(state, copy)
    bound.relax(f, None, step)
    bound.invert(f, step)
    # One rounding of the product and one of the sum, each half a unit in the last place of what is rounded,
    # and divided by a on the way back; the inverse adds three roundings of its own.
    a = abs(step.a)
    largest = torch.maximum(a * start.abs(), (step.b * f.double()).abs())
    bound = 4 * 2.0**-52 * (largest / a + start.abs())
    assert ((state - start).abs() <= bound).all()
    # so that what f reads is the same to the last bit wherever f does not dwarf the state
    safe = bound < 2.0**-25 * start.abs()
    assert safe.float().mean() > 0.8
    same_bits(copy[safe], start[safe].float())


def test_the_step_against_numbers_computed_by_hand(half_step):
    """beta = .75: y' = .25 * 2 + .75 * 4 = 3.5, and back (3.5 - 3) / .25 = 2. The adjoint: .25 * 8 + .75 * 4 = 5."""
    half_step, device = half_step
    state = torch.tensor([2.0], dtype=torch.float64, device=device)
    copy, f = torch.zeros(1, device=device), torch.tensor([4.0], device=device)
    adjoint, vjp = torch.tensor([8.0], device=device), torch.tensor([4.0], device=device)
    bound, step = half_step(state, copy), Coefficients(0.25, 0.75)
    partial = bound.relax_norms(f, None, step)
    assert (state.item(), copy.item()) == (3.5, 3.5)
    assert partial.sum((1, 2)).tolist() == [1.5**2, 3.5**2]
    bound.invert_adjoint(f, adjoint, vjp, None, step, step)
    assert (state.item(), copy.item(), adjoint.item()) == (2.0, 2.0, 5.0)


def test_two_coefficients_against_numbers_computed_by_hand(half_step):
    """beta = .75 and gamma = 2/3: y' = .25 * 2 + .5 * 4 + .25 * 12 = 5.5, and back (5.5 - 5) / .25 = 2. The adjoint,
    with coefficients of its own: .5 * 8 + 1 * 4 + 2 * 3 = 14."""
    half_step, device = half_step
    state = torch.tensor([2.0], dtype=torch.float64, device=device)
    copy, f, read, adjoint, vjp, other = (torch.tensor([x], device=device) for x in (0.0, 4.0, 12.0, 8.0, 4.0, 3.0))
    bound, step = half_step(state, copy), Coefficients(0.25, 0.5, 0.25)
    bound.relax(f, read, step)
    assert (state.item(), copy.item()) == (5.5, 5.5)
    copy.copy_(read)
    bound.invert_adjoint(f, adjoint, vjp, other, step, Coefficients(0.5, 1.0, 2.0))
    assert (state.item(), copy.item(), adjoint.item()) == (2.0, 2.0, 14.0)


def test_coefficients_may_change_from_step_to_step(half_step):
    """Those of the state and of the adjoint, and whether c is 0, in one bound half-step."""
    half_step, device = half_step
    case = tensors((1000,), torch.float32, torch.float32, device)
    steps = [Coefficients.rounded(b, g) for b, g in ((0.5, 1.0), (0.8, 1.3), (0.8, 1.0), (1.2, 0.6))]

    def sequence(half_step):
        state, f, copy, adjoint, vjp, read, other, floor = (x.clone() for x in case)
        bound = half_step(state, copy)
        for step in steps:
            bound.relax(f, read, step)
        for step, adjoint_step in zip(reversed(steps), steps, strict=True):
            copy.copy_(read)
            bound.invert_adjoint(f, adjoint, vjp, other, step, adjoint_step)
        return [state, copy, adjoint, bound.invert_compare(f, read, floor, None, None, None, steps[1], steps[0])]

    for result, expected in zip(sequence(half_step), sequence(reference.HalfStep), strict=True):
        same_bits(result, expected)


@pytest.mark.parametrize("gamma", [1.0, 0.5, 1.3, 1.9])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8, 1.2, 1.9])
def test_coefficients_are_float32_and_add_up_to_one(beta, gamma):
    step = Coefficients.rounded(beta, gamma)
    assert all(torch.tensor(x, dtype=torch.float32).item() == x for x in (step.b, step.c))
    assert step.a + (step.b + step.c) == 1
    assert step.beta == pytest.approx(beta, rel=2**-22) and step.gamma == pytest.approx(gamma, rel=2**-22)
    if gamma == 1:
        assert step == Coefficients(1 - step.b, torch.tensor(beta, dtype=torch.float32).item(), 0.0)


def test_errors_are_relative_to_the_state_or_the_floor(half_step):
    """State 1e3, 1, 1e-9 and 0, each off by 1e-3, with a floor of .1: ratios 1e-6, 1e-3, 1e-2 and 1e-2."""
    half_step, device = half_step
    state = torch.tensor([1e3, 1.0, 1e-9, 0.0], dtype=torch.float64, device=device)
    step, f = Coefficients(0.5, 0.5), torch.zeros(4, device=device)
    initial = (2 * state + 1e-3).float()
    worst = half_step(state, f.clone()).invert_compare(
        f, initial, torch.tensor(0.1, device=device), None, None, None, step, step
    )
    assert worst.shape == (1, base.LANES)
    ratios = worst.view(torch.float32)[0, :4].cpu()
    torch.testing.assert_close(ratios, torch.tensor([1e-6, 1e-3, 1e-2, 1e-2]), rtol=0.05, atol=0)


def looped(window, total):
    """The address of `total` bytes of virtual memory that repeat one window of real memory."""
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
    step = cpu.Packed(1 - beta, beta, 0)
    bound = cpu.Bound(state, copy, n, step, step, cpu.CODE[torch.float32], cpu.Examples(1, n, None, 1, 0))
    cpu.library.revdeq_relax(ctypes.addressof(bound), f, cpu.CODE[torch.float32], 1, None)
    steps = [0.0]
    for _ in range(513):
        steps.append((1 - beta) * steps[-1] + beta)
    assert (values[:4099] == steps[513]).all()
    assert (values[4099:] == steps[512]).all()
