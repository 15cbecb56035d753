"""The kernels' PTX, executed by an emulator, gives the bits of the reference.

By default each operation is tested with every dtype of f, every dtype that f reads and every GPU, but not in every
combination: that is `pytest -m full`. A launch has full chunks, or a full chunk and a tail, which ends at each register
of a thread in turn.
"""

import itertools
import random

import numpy as np
import pytest
import torch
from emulator import emulating
from gpu_targets import TARGETS, skip_without_the_compiler

skip_without_the_compiler()

from revdeq.kernels import gpu, half_step, reference, reference_exact  # noqa: E402
from revdeq.kernels.gpu import exact, float64, integers, launch  # noqa: E402
from revdeq.kernels.half_step import LANES, Coefficients, wide  # noqa: E402
from revdeq.kernels.radix import LARGEST_DENOMINATOR, Radix  # noqa: E402

DTYPES = half_step.DTYPES
GPUS = ("sm_80", "sm_90", "sm_100")
REFERENCES = {"float64": reference.HalfStep, "exact": reference_exact.HalfStep}
# Coefficients that are not float32 numbers; and 1 - beta = 1/5, -1/5 and 2/5.
STEPS = {
    "float64": [Coefficients(1 - 0.8, 0.8), Coefficients(1 - 0.8, 1.3 * 0.8, -0.3 * 0.8)],
    "exact": [Radix.nearest(0.8, 24), Radix.nearest(1.2, 24, 1.3), Radix.nearest(0.6, 24)],
}
OPERATIONS = ("relax", "relax_norms", "invert", "invert_adjoint", "invert_compare", "compare alone")
SPILLING = ("relax and spill", "relax_norms and spill", "invert and spill", "invert_adjoint and spill")
ROWS = half_step.rows_of(1)


@pytest.fixture(autouse=True)
def _unwritten_memory_shows():
    """torch.empty returns NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _blocks_of_a_large_state(monkeypatch):
    """Small tensors use large blocks too."""
    monkeypatch.setattr(launch, "SMALL", 0)


def emulated(gpu_name="sm_90"):
    """If several values in a lane do not fit, any of them may be reported."""
    return emulating(TARGETS[gpu_name], unordered=["p_alarm"])


def same_bits(results, expected):
    for a, b in zip(results, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
        integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
        different = (a.view(integer) != b.view(integer)) & ~(a.isnan() & b.isnan())
        assert not different.any(), f"{different.sum()} of {a.numel()}, e.g. {a[different][:3]} and {b[different][:3]}"


def tensors(state, n, f_dtype, dtype, step, spill=False):
    """A state, and f, z, adjoint, vjp, other and an initial state: over many magnitudes with zeros, or within the range
    of the exact state."""
    generator = torch.Generator().manual_seed(n)
    dtypes = f_dtype, dtype, wide(dtype), dtype, wide(dtype), dtype
    if state == "float64":
        x = torch.randn((7, n), generator=generator, dtype=torch.float64)
        x *= 10.0 ** torch.randint(-9, 4, (7, n), generator=generator)
        x[torch.rand((7, n), generator=generator) < 0.02] = 0.0
        return x[0].clone(), *(x[i + 1].to(t, copy=True) for i, t in enumerate(dtypes))
    scale = (1 if step.sign > 0 else 4) * (1 if step.gamma == 1 else 2)  # above beta = 1 the state grows
    y = torch.randint(-(2**31), 2**31, (n,), generator=generator) // scale
    room = 2**32 if spill else -(-(2**32) // step.d) * step.p - step.p
    r = torch.randint(0, room, (n,), generator=generator)
    return y << 32 | r, *(((252 * torch.rand(n, generator=generator) - 126) / scale).to(t) for t in dtypes)


def run(classes, state, operation, n, f_dtype, dtype, step, seed=None, offset=0, kind=torch.Tensor):
    """Everything that an operation writes and returns. With an offset, all tensors begin there in their memory."""
    operation, _, spill = operation.partition(" and ")
    y, *rest = tensors(state, n + offset, f_dtype, dtype, step, bool(spill))
    y, f, z, adjoint, vjp, other, initial = (x[offset:] for x in (y, *rest))
    z, other = (z, other) if step.c else (None, None)
    copy = torch.full((n + offset,), torch.nan, dtype=dtype)[offset:]
    first = REFERENCES[state](y, step)
    if state == "exact" and spill:
        first.done = step.free_half_steps
    if state == "exact" and not operation.startswith("relax"):
        first.relax(f, z, copy)  # the half-step that is then inverted
    h = classes[state](y.as_subclass(kind), step)
    if state == "exact":
        h.done, h._spilled = first.done, [x.clone() for x in first._spilled]
    seed = None if seed is None else torch.full((n,), torch.nan, dtype=seed)
    floor = torch.tensor(1e-3 if state == "float64" else 0.5)
    extra = {
        "invert_adjoint": (copy, adjoint, vjp, other, seed),
        "invert_compare": (initial, floor, adjoint, vjp, other, seed),
        "compare alone": (initial, floor),
    }
    name = "invert_compare" if operation == "compare alone" else operation
    returned = getattr(h, name)(f, z, *extra.get(operation, (copy,)))
    exact_only = (h.alarm, *h._spilled) if state == "exact" else ()
    assert state == "float64" or (not h.alarm.any() and len(h._spilled) == (spill != "" and "relax" in operation))
    return [x for x in (y, copy, adjoint, seed, returned, *exact_only) if x is not None]


def compare(gpu_name, state, *case, **more):
    with emulated(gpu_name):
        results = run(gpu.STATES, state, *case, **more)
    same_bits(results, run(REFERENCES, state, *case, **more))


def covering(operations):
    """Every operation with every GPU, every dtype of f and every dtype that f reads, and a few other combinations; all
    others are `full`."""
    every = [*itertools.product(operations, GPUS, DTYPES, DTYPES)]
    chosen = {
        (operation, GPUS[(i + j) % 3], DTYPES[j], DTYPES[(i + j) % 4])
        for i, operation in enumerate(operations)
        for j in range(2 if "spill" in operation else 4)
    }
    chosen |= {*random.Random(0).sample(every, 5)}
    return [
        pytest.param(*case, id="-".join(map(str, case)).replace("torch.", ""), marks=() if case in chosen else FULL)
        for case in every
    ]


FULL = pytest.mark.full
ALL_GPUS = [pytest.param(name, marks=() if name == "sm_90" else FULL) for name in GPUS]
BOTH_STATES = pytest.mark.parametrize("state", REFERENCES)


def compare_sizes(gpu_name, state, operation, f_dtype, dtype):
    """Three chunks; and a chunk with a tail that ends in every third register of its rows, in threads of all warps. The
    dtypes choose which, and the coefficients."""
    chosen = DTYPES.index(f_dtype) + DTYPES.index(dtype)
    tails = [(ROWS + k // 2) * LANES + 37 * k % (LANES // 2) * 2 + k % 2 for k in range(chosen % 3, 2 * ROWS, 3)]
    for n in (3 * ROWS * LANES, *tails):
        compare(gpu_name, state, operation, n, f_dtype, dtype, STEPS[state][chosen % len(STEPS[state])])


@pytest.mark.parametrize(("operation", "gpu_name", "f_dtype", "dtype"), covering(OPERATIONS))
def test_ptx_gives_the_bits_of_the_reference(operation, gpu_name, f_dtype, dtype):
    compare_sizes(gpu_name, "float64", operation, f_dtype, dtype)


@pytest.mark.parametrize(("operation", "gpu_name", "f_dtype", "dtype"), covering((*OPERATIONS, *SPILLING)))
def test_ptx_gives_the_bits_of_the_exact_reference(operation, gpu_name, f_dtype, dtype):
    compare_sizes(gpu_name, "exact", operation, f_dtype, dtype)


@BOTH_STATES
@pytest.mark.parametrize("operation", ["relax_norms", "invert_compare"])
def test_ptx_sums_in_chunks_of_large_states(monkeypatch, state, operation):
    """They have 16 rows, of which the last chunk lacks some."""
    rows = half_step.rows_of(2**30)
    for module in (half_step, reference, launch):
        monkeypatch.setattr(module, "rows_of", lambda n: rows)
    assert rows > ROWS
    compare("sm_90", state, operation, 2 * rows * LANES + 1301, torch.float32, torch.float32, STEPS[state][1])


def dividends(a, seed):
    """Numbers with all exponents of float64. The quotients of some by a are halfway between two floats, or nearly so,
    or at the ends of the range."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.arange(-1074, 1024, dtype=torch.float64).repeat(2)
    bits = torch.randint(2**52, 2**53, exponents.shape, generator=generator).double()
    halves = torch.where(torch.arange(len(bits)) % 2 == 0, 0.0, 0.5)
    near = (bits - 2.0**52 + 2.0**51 + halves) * 2.0**-52 * a  # its quotient has one bit too many
    x = torch.ldexp(torch.cat([bits * 2.0**-53, near]), exponents.repeat(2))
    infinity = torch.tensor(torch.inf, dtype=torch.float64)
    x = torch.cat([x, x.nextafter(infinity), x.nextafter(-infinity)])
    ends = [0.0, 5e-324, 2.0**-1022, 2.0**-900 * a, 2.0**1023 * a, torch.finfo(torch.float64).max, torch.inf, torch.nan]
    ends = torch.tensor(ends, dtype=torch.float64)
    x = torch.cat([x, ends, ends.nextafter(0 * infinity.sign()), ends.nextafter(2 * ends)])
    return torch.cat([x, -x])


@pytest.mark.parametrize("beta", [0.5, 0.8, 0.9, 1.2, 0.1, 1 - 2.0**-24, 1.9])
def test_division_by_the_reciprocal_is_correctly_rounded(beta):
    """For every exponent, including subnormal quotients and those that overflow."""
    step = Coefficients.rounded(beta)
    x, results = dividends(step.a, seed=int(1000 * beta)), []
    for classes in (gpu.STATES, REFERENCES):
        h, copy = classes["float64"](x.clone(), step), torch.zeros_like(x)
        with emulated():
            h.invert(torch.zeros(x.shape), None, copy)
        results.append([h.state, copy])
    same_bits(*results)
    assert results[0][0].isfinite().any() and (results[0][0].abs() < 2.0**-1022).any()


def test_integer_division_by_the_reciprocal_is_exact():
    """For every x in the range that integers.py states. umulhi(2 x, reciprocal) is monotonic in x, so it is k from
    x = k n to x = k n + n - 1 if it is k at both ends."""
    k = np.arange(2**19)
    for n in range(1, LARGEST_DENOMINATOR + 1):
        for x in (k * n, k * n + n - 1):
            assert ((2 * integers.reciprocal(n) * x) >> 32 == k).all()


@pytest.mark.parametrize("p, d", [(1, 2), (1, 5), (1, 64), (3, 64), (31, 63), (63, 64), (61, 64)])
def test_ptx_divides_integers_at_the_edges(p, d):
    """Remainders and states at the ends of their ranges, and next to multiples of p, d and the lower digit."""
    radix = Radix(1, p, d, 24)
    room = p * (2**32 // d)  # smaller remainders still fit into 32 bits after the step
    near = {k * n + i for n in (p, d, 2**19) for k in (0, 1, 2**13, room // n) for i in (-1, 0, 1)}
    remainders = torch.tensor(sorted({room - 1, *(x for x in near if 0 <= x < room)}))
    values = torch.tensor([-(2**31), -(2**31) + 1, -(2**19), -1, 0, 1, 2**19 - 1, 2**31 - 2, 2**31 - 1])
    state = ((values << 32)[:, None] | remainders).flatten()
    f = torch.tensor([-127.0, -1.0, 0.0, 2.0**-24, 127.0]).repeat(len(state) // 5 + 1)[: len(state)]
    results = []
    for classes in (gpu.STATES, REFERENCES):
        h, copy = classes["exact"](state.clone(), radix), torch.zeros(len(state))
        with emulated():
            h.relax(f, None, copy)
        results.append([h.state, copy])
    same_bits(*results)


class LastElements(torch.Tensor):
    """The last elements of a tensor, with 2^31 elements before them."""

    def numel(self):
        return 2**31 + super().numel()


@pytest.mark.parametrize("gpu_name", ALL_GPUS)
@BOTH_STATES
@pytest.mark.parametrize("operation", ["relax", "invert_adjoint"])
def test_ptx_finds_elements_beyond_32_bits(operation, state, gpu_name):
    case = state, operation, 1500, torch.float32, torch.float32, STEPS[state][1]
    blocks = {"float64": {"relax": float64.RELAX_BLOCK}.get(operation, float64.INVERT_BLOCK), "exact": exact.BLOCK}
    with emulating(TARGETS[gpu_name], last=-(-1500 // blocks[state]), before=2**31):
        results = run(gpu.STATES, *case, kind=LastElements)
    same_bits(results, run(REFERENCES, *case))


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("operation", ["relax", "invert_adjoint"])
def test_ptx_gives_the_bits_of_the_reference_for_every_beta(operation, gamma):
    for beta in (0.5, 0.75, 2 / 3, 1.5, 1.9, 1 - 2.0**-20, *((1.0,) if operation == "relax" else ())):
        step = Coefficients.rounded(beta, gamma)
        compare("sm_90", "float64", operation, 1500, torch.float32, torch.float32, step)


@pytest.mark.parametrize("gpu_name", ALL_GPUS)
@BOTH_STATES
def test_small_states_have_small_blocks(monkeypatch, state, gpu_name):
    """Each thread has two neighbours, and the tail ends at either of them."""
    monkeypatch.setattr(launch, "SMALL", 2**18)
    programs, launch_by_triton = [], launch._launch_by_triton

    def noted(kernel, device, number, arguments):
        programs.append(number)
        return launch_by_triton(kernel, device, number, arguments)

    monkeypatch.setattr(launch, "_launch_by_triton", noted)
    for operation in ("relax", "invert", "invert_adjoint"):
        for n in (3 * LANES, 3 * LANES + 101, 3 * LANES + 102):
            compare(gpu_name, state, operation, n, torch.bfloat16, torch.float32, STEPS[state][1])
    assert programs == 3 * [3, 4, 4]


@BOTH_STATES
@pytest.mark.parametrize("operation", ["invert_adjoint", "invert_compare"])
def test_ptx_writes_the_seed(operation, state):
    for dtype, seed in zip(DTYPES, (*DTYPES[1:], *DTYPES[:1]), strict=True):
        compare("sm_90", state, operation, 5 * LANES + 101, seed, dtype, STEPS[state][1], seed=seed)


@pytest.mark.parametrize("gpu_name", ALL_GPUS)
def test_unaligned_tensors(gpu_name):
    """At an offset of one element, the alignment is unknown and accesses are narrow."""
    for operation in ("relax", "invert_adjoint"):
        compare(gpu_name, "float64", operation, 1500, torch.bfloat16, torch.float32, STEPS["float64"][0], offset=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ptx_encodes_and_decodes(dtype):
    """Including numbers that must be rounded, states with a remainder, which f does not read, and rows of a state."""
    radix, generator = Radix.nearest(0.8, 24), torch.Generator().manual_seed(0)
    for gpu_name, n in zip(GPUS, (2 * exact.BLOCK, exact.BLOCK + 101, 1), strict=True):
        x = 252 * torch.rand(n, generator=generator) - 126
        x = (x * 2.0 ** torch.randint(-30, 1, (n,), generator=generator)).to(dtype)
        numbers, rows = torch.randint(-(2**63), 2**63 - 1, (n,), generator=generator), torch.arange(0, n, 3)
        results = []
        for classes in (gpu.STATES, REFERENCES):
            with emulated(gpu_name):
                h, other = classes["exact"].encoded(x, radix), classes["exact"](numbers, radix)
                results.append([h.state, h.alarm, other.decoded(dtype), other.decoded(dtype, rows)])
        same_bits(*results)


NEARLY = 128 - 2.0**-27  # fits, but not after rounding


@pytest.mark.parametrize("bad", [128.0, -129.0, 1e30, float("inf"), float("nan"), NEARLY])
def test_ptx_raises_the_alarm_for_what_does_not_fit(bad):
    """An initial state or an f, in the lane of its place."""
    radix, dtype = Radix.nearest(0.8, 24), torch.float64 if bad == NEARLY else torch.float32
    for place in (0, 255, 1024 + 300, 1499):
        x, expected = torch.zeros(1500, dtype=dtype), torch.zeros(LANES)
        x[place], expected[place % LANES] = bad, abs(bad)
        with emulated():
            encoded, h = (gpu.STATES["exact"].encoded(y, radix) for y in (x, torch.zeros(1500)))
            h.relax(x, None, torch.zeros(1500))
            summed = gpu.STATES["exact"].encoded(torch.zeros(1500), radix)
            summed.relax_norms(x, None, torch.zeros(1500))
        for found in (encoded, h, summed):
            same_bits([found.alarm.view(torch.float32)], [expected])


def test_ptx_raises_the_alarm_for_a_state_that_leaves_its_range():
    """f fits, but a step from -127 beyond f = 127 does not."""
    h = gpu.STATES["exact"](torch.full((1500,), -127 << 56), Radix.nearest(1.2, 24))
    with emulated():
        h.relax(torch.full((1500,), 127.0), None, torch.zeros(1500))
    assert (h.alarm.view(torch.float32) == 127.0).all(), "every lane, from more than one program"
