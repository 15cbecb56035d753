"""Every backend gives the bits of the reference, for every state, dtype, size and layout."""

import itertools
import random

import pytest
import torch

from revdeq.kernels import cpu, half_step, reference, reference_exact
from revdeq.kernels.half_step import DTYPES, LANES, Coefficients, rows_of
from revdeq.kernels.radix import Radix

CHUNK = rows_of(1) * LANES
STEP, MIXED = Coefficients.rounded(0.8), Coefficients.rounded(0.8, 1.3)
RADIX = Radix.nearest(0.6, 24, 0.7)
OPERATIONS = ("relax", "relax_norms", "invert", "invert_adjoint", "invert_compare", "compare alone")
REFERENCES = {"float64": reference.HalfStep, "exact": reference_exact.HalfStep}


def same_bits(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    a, b = a.cpu(), b.cpu()
    different = (a.view(integer) != b.view(integer)) & ~(a.isnan() & b.isnan())
    assert not different.any(), f"{different.sum()} of {a.numel()}, e.g. {a[different][:3]} and {b[different][:3]}"


def wide_range(shape, dtype, seed, unit=1.0):
    """Values over many magnitudes, with zeros, and, in float16, subnormals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    x *= unit * 10.0 ** torch.randint(-9, 4, shape, generator=generator)
    x[torch.rand(shape, generator=generator) < 0.02] = 0.0
    return x.clamp(-6e4, 6e4).to(dtype)


def tensors(shape, f_dtype, dtype, step):
    """A state, and f, z, the adjoint, the product, the other adjoint and the initial state. An exact state and what it
    takes stay in its range."""
    exact = isinstance(step, Radix)
    unit = 2**12 * step.unit if exact else 1.0
    state = wide_range(shape, torch.float64, 1, unit)
    if exact:
        state = (state / step.unit).long() << 32 | torch.randint(2**25, shape)
    dtypes = {"f_z": f_dtype, "z": dtype, "vjp": dtype, "initial": dtype}
    given = {name: wide_range(shape, x, seed, unit) for seed, (name, x) in enumerate(dtypes.items(), 2)}
    return state, given | {name: wide_range(shape, half_step.wide(dtype), len(name)) for name in ("adjoint", "other")}


def run(kind, operation, step, state, given, seed=None, spill=False, in_place=False, device="cpu"):
    """What an operation writes and returns. What it fails to write shows as NaN."""
    h, given = kind(state.to(device, copy=True), step), {name: x.to(device, copy=True) for name, x in given.items()}
    f_z, z, adjoint = given["f_z"], given["z"], given["adjoint"]
    read = z if in_place else torch.full_like(z, torch.nan)
    exact = isinstance(step, Radix)
    if exact:
        h.done = 1 if not spill else step.free_half_steps + (not operation.startswith("relax"))
        h._spilled = [(state >> 7).int().to(device)] * spill
    seed = None if seed is None else torch.full_like(z, torch.nan, dtype=seed)
    adjoints = adjoint, given["vjp"], given["other"], seed
    floor = torch.tensor(1e-3, device=device)
    extra = {
        "invert_adjoint": (read, *adjoints),
        "invert_compare": (given["initial"], floor, *adjoints),
        "compare alone": (given["initial"], floor),
    }
    name = "invert_compare" if operation == "compare alone" else operation
    returned = getattr(h, name)(f_z, z, *extra.get(operation, (read,)))
    assert not exact or not h.alarm.any()
    return [x for x in (h.state, read, adjoint, seed, returned, *(h._spilled if exact else ())) if x is not None]


def compare(half_steps, operation, step, state, given, **more):
    """With the reference. Return what was written."""
    (classes, device), kind = half_steps, "exact" if isinstance(step, Radix) else "float64"
    expected = run(REFERENCES[kind], operation, step, state, given, device=device, **more)
    results = run(classes[kind], operation, step, state, given, device=device, **more)
    for result, right in zip(results, expected, strict=True):
        same_bits(result, right)
    return results


def pairwise(**factors):
    """Few cases in which every two values of different factors meet."""
    names, draw = list(factors), random.Random(0)
    indices = [(i, j) for i in range(len(names)) for j in range(len(factors[names[i]]))]
    missing = {(a, b) for a in indices for b in indices if a[0] < b[0]}
    cases = []
    while missing:
        chosen = dict(min(missing))
        for i in draw.sample(range(len(names)), len(names)):
            if i not in chosen:
                new = [
                    sum(tuple(sorted(((i, j), other))) in missing for other in chosen.items())
                    for j in range(len(factors[names[i]]))
                ]
                chosen[i] = draw.choice([j for j, count in enumerate(new) if count == max(new)])
        missing -= {(a, b) for a in chosen.items() for b in chosen.items() if a[0] < b[0]}
        cases.append([factors[name][chosen[i]] for i, name in enumerate(names)])
    return cases


STEPS = [
    *(Coefficients.rounded(beta) for beta in (0.1, 0.5, 0.8, 1.2)),
    *(Coefficients.rounded(beta, gamma) for beta, gamma in ((2 / 3, 0.7), (0.8, 1.3), (0.95, 1.3), (1.9, 0.7))),
    *(Radix.nearest(beta, bits) for beta, bits in ((0.5, 24), (0.8, 1), (0.95, 40), (1.2, 24))),
    *(Radix.nearest(*numbers) for numbers in ((0.6, 24, 0.7), (0.8, 30, 1.3), (1.9, 20, 0.7), (0.123, 24, 1.3))),
]
CASES = pairwise(
    operation=OPERATIONS,
    step=STEPS,
    n=[0, 1, 2, 3, 17, LANES - 1, LANES, LANES + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 131],
    f_dtype=DTYPES,
    dtype=DTYPES,
    seed=[None, *DTYPES],
    spill=[False, True],
    in_place=[False, True],
)


def compare_all(half_steps, operations):
    for operation, step, n, f_dtype, dtype, seed, spill, in_place in CASES:
        if operation in operations:
            state, given = tensors((n,), f_dtype, dtype, step)
            more = {"seed": seed, "spill": spill, "in_place": in_place}
            _, _, adjoint, *rest = compare(half_steps, operation, step, state, given, **more)
            if seed is not None and operation in ("invert_adjoint", "invert_compare"):
                same_bits(rest[0], adjoint.to(seed))


@pytest.mark.parametrize("operations", [OPERATIONS[:3], OPERATIONS[3:]], ids=["without adjoints", "with adjoints"])
def test_bits_equal_the_reference(half_steps, operations):
    compare_all(half_steps, operations)


def test_a_change_of_more_than_32_bits(half_steps):
    step = Radix.nearest(0.8, 24)
    _, given = tensors((300,), torch.float32, torch.float32, step)
    compare(half_steps, "relax_norms", step, torch.full((300,), -100 << 56), given | {"f_z": torch.full((300,), 100.0)})


def test_bits_equal_the_reference_for_all_fraction_bits(half_steps):
    for bits in range(1, 41):
        step = Radix.nearest(0.75, bits)
        state, given = tensors((LANES + 3,), torch.float32, torch.float32, step)
        for operation in ("relax_norms", "invert_compare"):
            compare(half_steps, operation, step, state, given)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2),
    "gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
    "negated": torch._neg_view,
}
DENSE = ("contiguous", "channels_last", "permuted")
WRITTEN = ("adjoint", "other", "z")


@pytest.mark.parametrize("layout", DENSE)
def test_layouts_do_not_change_the_values(half_steps, layout):
    for operation, of_f, step in pairwise(operation=OPERATIONS, of_f=list(LAYOUTS), step=[MIXED, RADIX]):
        state, given = tensors((3, 5, 7, 11), torch.float32, torch.float32, step)
        moved = {name: LAYOUTS[layout if name in WRITTEN else of_f](x) for name, x in given.items()}
        plain = compare(half_steps, operation, step, state, {name: x.contiguous() for name, x in moved.items()})
        results = compare(half_steps, operation, step, LAYOUTS[layout](state), moved)
        for result, right in zip(results[:3], plain[:3], strict=True):
            assert result.stride() == LAYOUTS[layout](state).stride()
            same_bits(result.contiguous(), right)


def test_many_elements_have_larger_chunks(half_steps, monkeypatch):
    """In every backend, by the one function. An H100 has 132 multiprocessors."""
    assert all(-(-n // (rows_of(n) * LANES)) >= 132 for n in (2**k for k in range(18, 31)))
    few, n = rows_of(1), 2**14 + 131
    monkeypatch.setattr(half_step, "MANY", 2**14)
    assert rows_of(n) > few
    for step, operation in itertools.product((MIXED, RADIX), ("relax_norms", "invert_compare")):
        results = compare(half_steps, operation, step, *tensors((n,), torch.float32, torch.float32, step))
        assert results[-1].shape[-2:] == (-(-n // (rows_of(n) * LANES)), LANES)


@pytest.mark.skipif(cpu.library is None, reason="the C kernel was not built: no C compiler")
def test_the_number_of_threads_does_not_change_the_bits(monkeypatch):
    """Above 2^15 elements, the C kernel shares its chunks among threads."""
    half_steps = {"float64": cpu.HalfStep, "exact": cpu.ExactHalfStep}, "cpu"
    for step in (STEP, MIXED, RADIX):
        case = tensors((2**15 + 131,), torch.float32, torch.float32, step)
        for threads, operation in itertools.product((1, 2, 3), ("relax_norms", "invert_adjoint", "invert_compare")):
            monkeypatch.setattr(cpu, "get_num_threads", lambda threads=threads: threads)
            compare(half_steps, operation, step, *case)


def test_conversions_round_as_torch_does(half_steps):
    """Every bit pattern of the 16-bit dtypes goes in, and every halfway case between two of them comes out."""
    (classes, device), half = half_steps, Coefficients.rounded(0.5)
    stride = 8 if device.type == "cpu" and classes["float64"] is not cpu.HalfStep else 1  # the interpreter is slow
    for dtype in (torch.float16, torch.bfloat16):
        every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
        state = torch.zeros(every.shape, dtype=torch.float64, device=device)
        classes["float64"](state, half).relax(every, None, every.clone())
        same_bits(state, 0.5 * torch.zeros_like(state) + 0.5 * every.double())
        finite = every[every.isfinite()].double().sort().values
        between = torch.cat([(finite[1:] + finite[:-1]) / 2 * (1 + s * 2.0**-30) for s in (-1, 0, 1)])
        between = torch.cat([between[::stride], finite.max() * torch.tensor([1.001, 1.01, 1e6], device=device)])
        copy = torch.empty(between.shape, dtype=dtype, device=device)
        classes["float64"](between * 2, half).relax(torch.zeros_like(between), None, copy)
        same_bits(copy, between.to(dtype))


def test_infinities_and_nan_propagate(half_steps):
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e300, 3e38, 0.0], dtype=torch.float64)
    for dtype, operation in itertools.product(DTYPES, ("relax", "invert_compare")):
        given = dict.fromkeys(("f_z", "z", "vjp", "initial"), special.to(dtype))
        given |= dict.fromkeys(("adjoint", "other"), torch.zeros(6, dtype=half_step.wide(dtype)))
        *_, last = compare(half_steps, operation, STEP, special, given)
        if operation == "invert_compare":
            assert last.view(torch.float32).amax(1).isnan().all()  # inf / inf is the largest error


def test_the_inverse_undoes_the_step(half_steps):
    (classes, device), f_z = half_steps, wide_range((2000,), torch.float32, 6)
    for beta in (0.5, 0.8, 0.9, 1.2):
        step, start = Coefficients.rounded(beta), wide_range((2000,), torch.float32, 5).double()
        h, read = classes["float64"](start.to(device, copy=True), step), torch.empty_like(f_z, device=device)
        h.relax(f_z.to(device), None, read)
        h.invert(f_z.to(device), None, read)
        # One rounding of the product and one of the sum, each half a unit in the last place of what is rounded,
        # and divided by a on the way back; the inverse adds three roundings of its own.
        a = abs(step.a)
        bound = 4 * 2.0**-52 * (torch.maximum(a * start.abs(), (step.b * f_z.double()).abs()) / a + start.abs())
        assert ((h.state.cpu() - start).abs() <= bound).all()
        # so that what f reads is the same to the last bit wherever f does not dwarf the state
        safe = bound < 2.0**-25 * start.abs()
        assert safe.float().mean() > 0.8
        same_bits(read.cpu()[safe], start[safe].float())


def test_against_numbers_computed_by_hand(half_steps):
    """beta = .75: y' = .25 * 2 + .75 * 4 = 3.5, and back (3.5 - 3) / .25 = 2. The adjoint: .25 * 8 + .75 * 4 = 5.
    With gamma = 2/3: y' = .25 * 2 + .5 * 4 + .25 * 12 = 5.5, and the adjoint is .25 * 8 + .5 * 4 + .25 * 4 = 5."""
    classes, device = half_steps
    f_z, z, vjp, other = (torch.tensor([x], device=device) for x in (4.0, 12.0, 4.0, 4.0))
    for step, expected in ((Coefficients(0.25, 0.75), 3.5), (Coefficients(0.25, 0.5, 0.25), 5.5)):
        state, read, adjoint = torch.tensor([2.0]).double().to(device), torch.zeros(1, device=device), 2 * f_z
        h = classes["float64"](state, step)
        partial = h.relax_norms(f_z, z, read)
        assert (state.item(), read.item()) == (expected, expected)
        assert partial.sum((1, 2)).tolist() == [(expected - 2) ** 2, expected**2]
        h.invert_adjoint(f_z, z, read, adjoint, vjp, other)
        assert (state.item(), read.item(), adjoint.item()) == (2.0, 2.0, 5.0)


def test_errors_are_relative_to_the_state_or_the_floor(half_steps):
    """State 1e3, 1, 1e-9 and 0, each off by 1e-3, with a floor of .1: ratios 1e-6, 1e-3, 1e-2 and 1e-2."""
    classes, device = half_steps
    state = torch.tensor([1e3, 1.0, 1e-9, 0.0], dtype=torch.float64, device=device)
    initial, floor = (2 * state + 1e-3).float(), torch.tensor(0.1, device=device)
    h = classes["float64"](state, Coefficients(0.5, 0.5))
    worst = h.invert_compare(torch.zeros(4, device=device), None, initial, floor)
    assert worst.shape == (1, LANES)
    ratios = worst.view(torch.float32)[0, :4].cpu()
    torch.testing.assert_close(ratios, torch.tensor([1e-6, 1e-3, 1e-2, 1e-2]), rtol=0.05, atol=0)


def test_coefficients_are_float32_and_add_up_to_one():
    for beta, gamma in itertools.product((0.1, 0.5, 0.8, 1.2, 1.9), (1.0, 0.5, 1.3, 1.9)):
        step = Coefficients.rounded(beta, gamma)
        assert all(torch.tensor(x, dtype=torch.float32).item() == x for x in (step.b, step.c))
        assert step.a + (step.b + step.c) == 1 and (step.c == 0) == (gamma == 1)
        assert (step.beta, step.gamma) == pytest.approx((beta, gamma), rel=2**-22)
