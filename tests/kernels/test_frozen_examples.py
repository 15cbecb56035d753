"""Examples of a batch that take different numbers of half-steps: every backend gives the bits of the reference."""

import itertools

import pytest
import torch
from test_kernels import CHUNK, DTYPES, LAYOUTS, MIXED, STEP, same_bits, tensors, wide_range

from revdeq.kernels import Coefficients, Radix, reference, reference_exact

ADJOINT = Coefficients(0.3, 0.7, 0.2)
ENDS = (4, 8, 6, 2, 10)
"""The half-steps of each example. Half-steps 4 and 5, one of y and one of z, move those with 6, 8 and 10."""
OPERATIONS = ("relax", "relax_norms", "invert", "invert_adjoint")


def ends_of(examples, device):
    return torch.tensor([*itertools.islice(itertools.cycle(ENDS), examples)], dtype=torch.int32, device=device)


def run(half_step, operation, case, step, now, seed=None, kept=1.25):
    """What an operation writes to the state, its copy, the adjoint and its seed, and what it returns."""
    state, f, copy, adjoint, vjp, read, other, _ = (x.clone() for x in case)
    if not operation.startswith("relax"):
        copy.copy_(read)
    if isinstance(step, Radix):
        state = reference_exact.encode(state.clamp(-9, 9), step) + 12_345
        half_steps = [step] * 3
        bound = (
            half_step(state, copy, half_steps)
            if operation.startswith("relax")
            else half_step(state, copy, half_steps, [])
        )
    else:
        bound = half_step(state, copy)
    bound.each(ends_of(len(state), state.device), now, kept)
    seed = torch.full_like(adjoint, torch.nan, dtype=seed or adjoint.dtype)
    extra = {
        "relax": (read, step),
        "relax_norms": (read, step),
        "invert": (step,),
        "invert_adjoint": (adjoint, vjp, other, step, ADJOINT, seed),
    }[operation]
    returned = getattr(bound, operation)(f, *extra)
    assert not isinstance(step, Radix) or not bound.alarm.any()
    return [x for x in (state, copy, adjoint, seed, returned) if x is not None]


def compare(half_step, reference_half_step, operation, case, step, now, **more):
    expected = run(reference_half_step, operation, case, step, now, **more)
    for result, reference_result in zip(run(half_step, operation, case, step, now, **more), expected, strict=True):
        if result.dtype == torch.int64:
            assert torch.equal(result, reference_result)
        else:
            same_bits(result, reference_result)


@pytest.mark.parametrize(("step", "now"), [(STEP, 4), (MIXED, 5)], ids=["gamma 1", "gamma 1.3"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bits_of_every_dtype(half_step, operation, step, now):
    half_step, device = half_step
    for f_dtype, copy_dtype in zip(DTYPES, DTYPES[1:] + DTYPES[:1], strict=True):
        case = tensors((5, 144), f_dtype, copy_dtype, device)
        compare(half_step, reference.HalfStep, operation, case, step, now, seed=f_dtype)


RADICES = [Radix.nearest(0.5, 24), Radix.nearest(0.8, 20, 1.3), Radix.nearest(1.2, 24), Radix.nearest(0.6, 24, 0.7)]


@pytest.mark.parametrize("radix", RADICES, ids=lambda r: f"{r.sign * r.p}/{r.d}")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_bits_of_integers(exact_half_step, operation, radix):
    half_step, device = exact_half_step
    for now, dtype in zip((4, 5, 4, 5), DTYPES, strict=True):
        case = [x.clamp(-9, 9) if x.dim() else x for x in tensors((3, 144), dtype, dtype, device)]
        compare(half_step, reference_exact.HalfStep, operation, case, radix, now)


SHAPES = [(0, 3), (3, 0), (1, 1), (7, 1), (3, 144), (2, CHUNK), (2, CHUNK + 1), (1, CHUNK + 16)]
"""Triton has kernels only for examples of a multiple of 16 elements."""


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_every_size(half_step, operation, shape):
    half_step, device = half_step
    compare(half_step, reference.HalfStep, operation, tensors(shape, *[torch.float32] * 2, device), MIXED, 5)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_bits_of_integers_of_every_size(exact_half_step, operation, shape):
    half_step, device = exact_half_step
    case = [x.clamp(-9, 9) if x.dim() else x for x in tensors(shape, *[torch.float32] * 2, device)]
    compare(half_step, reference_exact.HalfStep, operation, case, RADICES[1], 5)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_layouts_with_the_batch_outermost(half_step, operation):
    half_step, device = half_step
    case = [LAYOUTS["channels_last"](x) if x.dim() else x for x in tensors((5, 6, 7, 11), *[torch.float32] * 2, device)]
    compare(half_step, reference.HalfStep, operation, case, MIXED, 4)


def test_a_frozen_example_against_numbers_computed_by_hand(half_step):
    """Half-step 2 moves the example that takes 4 half-steps; the one that takes 2 is frozen."""
    half_step, device = half_step
    state = torch.tensor([[2.0], [2.0]], dtype=torch.float64, device=device)
    copy, f = torch.zeros(2, 1, device=device), torch.tensor([[4.0], [torch.nan]], device=device)
    bound, step = half_step(state, copy), Coefficients(0.25, 0.75)
    ends = torch.tensor([4, 2], dtype=torch.int32, device=device)
    bound.each(ends, 2)
    partial = bound.relax_norms(f, None, step)
    assert state.flatten().tolist() == copy.flatten().tolist() == [3.5, 2.0]
    assert partial.view(2, 2, -1).sum(-1).tolist() == [[1.5**2, 0], [3.5**2, 0]]
    # The adjoint of state 1 decays in the example that half-step 3 moved. The seed is for half-step 1, of both.
    adjoint, vjp, seed = (torch.full((2, 1), x, device=device) for x in (8.0, 4.0, torch.nan))
    bound.each(ends, 2, kept=0.5)
    bound.invert_adjoint(f, adjoint, vjp, None, step, step, seed)
    assert state.flatten().tolist() == copy.flatten().tolist() == [2.0, 2.0]
    assert adjoint.flatten().tolist() == seed.flatten().tolist() == [0.25 * 8 + 0.75 * 4, 0.5 * 8 + 0.75 * 4]
    bound.each(ends, 3)
    bound.invert_adjoint(f, adjoint, vjp, None, step, step, seed)
    assert adjoint.flatten().tolist() == [5 + 3, 7 + 3] and seed.flatten().tolist() == [8, 0]


def test_sums_do_not_depend_on_the_neighbours(half_step):
    """The sums of an example are the same to the last bit in any batch and at any position."""
    half_step, device = half_step
    state, f = (wide_range((3, CHUNK + 304), torch.float64, device, seed).float() for seed in (1, 2))

    def sums(rows):
        bound = half_step(state[rows].double(), state[rows].clone())
        bound.each(torch.full((len(rows),), 2, dtype=torch.int32, device=device), 1)
        return bound.relax_norms(f[rows], None, STEP).view(2, len(rows), -1).sum(-1)

    together = sums([*range(3)])
    for i in range(3):
        assert torch.equal(sums([i])[:, 0], together[:, i])
    assert torch.equal(sums([2, 1])[:, 1], together[:, 1])
