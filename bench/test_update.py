"""The half-steps, as the solver calls them, compared with unfused PyTorch and with a plain copy of the same bytes.

    pytest bench/test_update.py

A provider is timed only after its result has been checked against the reference. pytest-benchmark's own table
has only the fused half-step; the table of ratios after it is from interleaved runs of all providers.
"""

import functools
import itertools

import pytest
import torch
from table import device
from turns import ratio, take_turns

from revdeq import kernels
from revdeq.kernels import Coefficients, Radix, reference, reference_exact

DEVICE = device()
STEP, RADIX = Coefficients.rounded(0.8), Radix.nearest(0.8, 24)
BETA = STEP.b
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # the compiler's own
PART = 2**18
LARGE = 2**20
"""The largest size of a quick run. Larger sizes have fewer rounds."""
NOTHING_TO_COMPARE = "the result differs from the reference, so its time means nothing"


def data(n, dtype):
    generator = torch.Generator().manual_seed(0)

    def random(dtype):
        part = torch.randn(min(n, PART), generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        return part.repeat(n // len(part))

    return random(torch.float64), random(dtype), random(dtype), random(torch.float32), random(dtype)


def in_parts(*tensors):
    """Parts whose temporaries fit into the cache, so that checks take less time than measurements."""
    return zip(*(x.split(PART) for x in tensors), strict=True)


def agree(result, expected, tolerance=0.0):
    return all(torch.allclose(x, y, rtol=tolerance, atol=tolerance) for x, y in in_parts(result, expected))


def copying(bytes_read):
    source, target = (torch.ones(bytes_read // 4, device=DEVICE) for _ in range(2))
    return lambda: target.copy_(source)


@functools.cache
def compiles(dtype):
    """Whether torch.compile compiles functions of a dtype. If a GPU only emulates bfloat16, it does not."""
    if dtype != torch.bfloat16 or DEVICE.type != "cuda":
        return True
    return torch.cuda.is_bf16_supported(including_emulation=False)


@functools.cache  # torch.compile itself takes a millisecond
def compiled(function):
    return torch.compile(function, dynamic=True)


def naive_forward(state, f):
    y = (1 - BETA) * state + BETA * f.double()
    return y, y.to(f.dtype)


def in_place_forward(state, f, copy):
    state.mul_(1 - BETA).add_(f.double().mul_(BETA))
    copy.copy_(state)


def forward(n, dtype):
    """The providers, whose results are checked, and the bytes that each has to move."""
    state, f, copy, *_ = data(n, dtype)
    expected, expected_copy = state.clone(), torch.empty_like(copy)
    for x, g, c in in_parts(expected, f, expected_copy):
        reference.relax(x, g, None, c, STEP)

    def check(provider, tolerance=0.0):
        x, c = state.clone(), torch.empty_like(copy)
        results = provider(x, c) or (x, c)
        assert agree(results[0], expected, tolerance), NOTHING_TO_COMPARE
        assert tolerance or agree(results[1], expected_copy), NOTHING_TO_COMPARE

    half_step = kernels.half_step_for(DEVICE)
    check(lambda x, c: half_step(x, c).relax(f, None, STEP))
    check(lambda x, c: naive_forward(x, f))
    check(lambda x, c: in_place_forward(x, f, c))
    if compiles(dtype):
        check(lambda x, c: compiled(in_place_forward)(x, f, c), 1e-15)  # it may contract a multiply-add
    fused = half_step(state.clone(), torch.empty_like(copy))
    integers = exact_half_step(state, f, copy, "relax")
    in_place = state.clone()
    providers = {
        "fused": lambda: fused.relax(f, None, STEP),
        "fused with norms": lambda: fused.relax_norms(f, None, STEP),
        "fused, exact state": integers,
        "unfused": lambda: naive_forward(state, f),
        "unfused, in place": lambda: in_place_forward(in_place, f, copy),
        "torch.compile": lambda: compiled(in_place_forward)(in_place, f, copy),
        "copy": copying(n * (8 + f.element_size())),
    }
    return providers, dict.fromkeys(providers, 2 * n * (8 + f.element_size()))


def naive_backward(state, f, adjoint, vjp):
    y = (state - BETA * f.double()) / (1 - BETA)
    return y, y.to(f.dtype), (1 - BETA) * adjoint + BETA * vjp.float()


def in_place_backward(state, f, copy, adjoint, vjp):
    state.sub_(f.double().mul_(BETA)).div_(1 - BETA)
    copy.copy_(state)
    adjoint.mul_(1 - BETA).add_(vjp.float() * BETA)


def backward(n, dtype):
    """Ours also write the seed of the next product, in the same pass; the others would pass on the adjoint itself."""
    state, f, copy, adjoint, vjp = data(n, dtype)
    expected, expected_copy, expected_adjoint = state.clone(), torch.empty_like(f), adjoint.clone()
    for x, g, c, y, v in in_parts(expected, f, expected_copy, expected_adjoint, vjp):
        reference.HalfStep(x, c).invert_adjoint(g, y, v, None, STEP, STEP)

    def check(provider, tolerance=0.0):
        x, c, g = state.clone(), torch.empty_like(copy), adjoint.clone()
        results = provider(x, c, g) or (x, c, g)
        assert agree(results[0], expected, tolerance), NOTHING_TO_COMPARE
        assert tolerance or agree(results[1], expected_copy), NOTHING_TO_COMPARE
        assert agree(results[2], expected_adjoint, tolerance), NOTHING_TO_COMPARE

    half_step = kernels.half_step_for(DEVICE)
    seed = torch.empty_like(f)
    check(lambda x, c, g: half_step(x, c).invert_adjoint(f, g, vjp, None, STEP, STEP, seed))
    assert agree(seed, expected_adjoint.to(dtype)), NOTHING_TO_COMPARE
    rounding = 0.0 if DEVICE.type == "cpu" else 1e-15  # on GPUs, torch multiplies by the reciprocal of a number
    check(lambda x, c, g: naive_backward(x, f, g, vjp), rounding)
    check(lambda x, c, g: in_place_backward(x, f, c, g, vjp), rounding)
    if compiles(dtype):
        check(lambda x, c, g: compiled(in_place_backward)(x, f, c, g, vjp), 1e-6)
    integers = exact_half_step(state, f, copy, "invert_adjoint", adjoint.clone(), vjp, seed)
    state.zero_(), f.zero_()  # repeated inversion would run into infinity, which is slow on some CPUs
    fused = half_step(state.clone(), torch.empty_like(copy))
    in_place, gradient = state.clone(), adjoint.clone()
    providers = {
        "fused": lambda: fused.invert_adjoint(f, gradient, vjp, None, STEP, STEP, seed),
        "fused, exact state": integers,
        "unfused": lambda: naive_backward(state, f, adjoint, vjp),
        "unfused, in place": lambda: in_place_backward(in_place, f, copy, gradient, vjp),
        "torch.compile": lambda: compiled(in_place_backward)(in_place, f, copy, gradient, vjp),
        "copy": copying(n * (12 + 2 * f.element_size())),
    }
    seeded = ("fused", "fused, exact state", "copy")
    moved = {name: n * (2 * 8 + 2 * 4 + (3 + (name in seeded)) * f.element_size()) for name in providers}
    return providers, moved


def exact_half_step(x, f, copy, operation, *more):
    """A half-step of the integer state, checked against its reference. It is always the first one, so that no remainder
    is spilled. Its bits become meaningless by repetition, which does not change the time."""

    def call(half_step, f, *more):
        half_step.done = 0 if operation == "relax" else 1
        if operation == "relax":
            half_step.relax(f, None, RADIX)
        else:
            adjoint, vjp, seed = more
            half_step.invert_adjoint(f, adjoint, vjp, None, RADIX, RADIX, seed)

    def bound(half_step, x, f, copy, *more):
        state = reference_exact.encode(x, RADIX)
        bound_step = half_step(state, torch.empty_like(copy), [RADIX])
        call(bound_step, f, *(y.clone() for y in more))
        return bound_step

    ours = bound(kernels.half_step_for(DEVICE, "exact"), x, f, copy, *more)
    for state, result, *part in in_parts(ours.state, ours.copy, x, f, copy, *more):
        expected = bound(reference_exact.HalfStep, *part)
        assert torch.equal(state, expected.state) and torch.equal(result, expected.copy), NOTHING_TO_COMPARE
    return lambda: call(ours, f, *more)


DIRECTIONS = {"forward": forward, "backward": backward}


@pytest.mark.parametrize("exponent", range(10, 27, 2))
@pytest.mark.parametrize(("direction", "dtype"), [*itertools.product(DIRECTIONS, DTYPES)])
def test_half_step(benchmark, table, quick, direction, dtype, exponent):
    n = 2**exponent
    if quick and n > LARGE:
        pytest.skip("left out of a quick run")
    if dtype == "bfloat16" and exponent not in (14, 22):
        pytest.skip("bfloat16 is measured at two sizes only, to save time")
    providers, moved = DIRECTIONS[direction](n, DTYPES[dtype])
    if not compiles(DTYPES[dtype]):
        del providers["torch.compile"]
    times = take_turns(providers, budget=0.3 if quick else 1.0, rounds=(3, 25) if n > LARGE else (5, 25))
    for provider, seconds in times.items():
        table.add(f"{direction} half-step", provider, n, "seconds", seconds, dtype, moved[provider])
    benchmark.group = f"{direction}, {dtype}, 2^{exponent}"
    benchmark.extra_info["seconds"] = min(times["fused"])
    benchmark.extra_info["ratios"] = {name: ratio(times[name], times["fused"]) for name in times}
    benchmark.pedantic(providers["fused"], rounds=3)
