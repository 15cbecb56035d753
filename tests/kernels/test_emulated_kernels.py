"""The kernels' PTX, executed by an emulator, gives the bits of the reference."""

import numpy as np
import pytest
import torch
from emulator import emulating
from gpu_targets import TARGETS, skip_without_the_compiler
from test_kernels import OPERATIONS, REFERENCES, compare, pairwise, same_bits, tensors

skip_without_the_compiler()

from revdeq.kernels import gpu, half_step  # noqa: E402
from revdeq.kernels.gpu import exact, float64, integers, launch  # noqa: E402
from revdeq.kernels.half_step import DTYPES, LANES, Coefficients  # noqa: E402
from revdeq.kernels.radix import LARGEST_DENOMINATOR, Radix  # noqa: E402

GPUS = ("sm_80", "sm_90", "sm_100")
FLOAT64 = [Coefficients.rounded(0.8), Coefficients.rounded(0.8, 1.3), Coefficients.rounded(1.9, 0.7)]
EXACT = [Radix.nearest(0.8, 24), Radix.nearest(1.2, 24, 1.3), Radix.nearest(0.6, 24)]
BOTH_STATES = pytest.mark.parametrize("step", [FLOAT64[1], EXACT[1]], ids=["float64", "exact"])
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


def emulated(gpu_name="sm_90", **settings):
    """If several values in a lane do not fit, any of them may be reported."""
    return emulating(TARGETS[gpu_name], unordered=["p_alarm"], **settings)


def compare_emulated(operation, step, state, given, gpu_name="sm_90", **more):
    with emulated(gpu_name):
        return compare((gpu.STATES, torch.device("cpu")), operation, step, state, given, **more)


@pytest.mark.parametrize(
    ("operation", "gpu_name", "step", "n", "f_dtype", "dtype", "seed", "spill", "in_place"),
    pairwise(
        operation=OPERATIONS,
        gpu_name=GPUS,
        step=[*FLOAT64, *EXACT],
        # three chunks, or a tail that ends in each register of a thread, in threads of all warps
        n=[3 * ROWS * LANES, *((ROWS + k // 2) * LANES + 37 * k % (LANES // 2) * 2 + k % 2 for k in range(2 * ROWS))],
        f_dtype=DTYPES,
        dtype=DTYPES,
        seed=[None, *DTYPES],
        spill=[False, True],
        in_place=[False, True],
    ),
)
def test_ptx_gives_the_bits_of_the_reference(operation, gpu_name, step, n, f_dtype, dtype, seed, spill, in_place):
    case = tensors((n,), f_dtype, dtype, step)
    compare_emulated(operation, step, *case, gpu_name, seed=seed, spill=spill, in_place=in_place)


def float32s(n, step):
    return tensors((n,), torch.float32, torch.float32, step)


@BOTH_STATES
@pytest.mark.parametrize("operation", ["relax_norms", "invert_compare"])
def test_ptx_sums_in_chunks_of_large_states(monkeypatch, operation, step):
    """They have 16 rows, of which the last chunk lacks some."""
    monkeypatch.setattr(half_step, "MANY", 0)
    rows = half_step.rows_of(1)
    assert rows > ROWS
    compare_emulated(operation, step, *float32s(2 * rows * LANES + 1301, step))


def test_ptx_relaxes_by_f_itself():
    step = Coefficients(0.0, 1.0)
    compare_emulated("relax", step, *float32s(1500, step))


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
    x = dividends(step.a, seed=int(1000 * beta))
    given = dict.fromkeys(("f_z", "z", "adjoint", "vjp", "other", "initial"), torch.zeros(x.shape))
    state, *_ = compare_emulated("invert", step, x, given)
    assert state.isfinite().any() and (state.abs() < 2.0**-1022).any()


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
            there = h.state.clone(), copy.clone()
            h.invert(f, None, copy)
        results.append([*there, h.state, copy])
    for result, expected in zip(*results, strict=True):
        same_bits(result, expected)
    assert torch.equal(h.state, state)


class LastElements(torch.Tensor):
    """The last elements of a tensor, with 2^31 elements before them."""

    def numel(self):
        return 2**31 + super().numel()


@BOTH_STATES
@pytest.mark.parametrize("operation", ["relax", "invert_adjoint"])
def test_ptx_finds_elements_beyond_32_bits(operation, step):
    state, given = float32s(1500, step)
    block = {"relax": float64.RELAX_BLOCK}.get(operation, float64.INVERT_BLOCK) if step in FLOAT64 else exact.BLOCK
    with emulated(last=-(-1500 // block), before=2**31):
        compare((gpu.STATES, torch.device("cpu")), operation, step, state.as_subclass(LastElements), given)


@BOTH_STATES
def test_small_states_have_small_blocks(monkeypatch, step):
    """Each thread has two neighbours, and the tail ends at either of them."""
    monkeypatch.setattr(launch, "SMALL", 2**18)
    programs, launch_by_triton = [], launch._launch_by_triton

    def noted(kernel, device, number, arguments):
        programs.append(number)
        return launch_by_triton(kernel, device, number, arguments)

    monkeypatch.setattr(launch, "_launch_by_triton", noted)
    for n in (3 * LANES, 3 * LANES + 101, 3 * LANES + 102):
        compare_emulated("invert_adjoint", step, *float32s(n, step))
    assert programs == [3, 4, 4]


def test_unaligned_tensors():
    """At an offset of one element, the alignment is unknown and accesses are narrow."""
    results = []
    for classes in (gpu.STATES, REFERENCES):
        state, given = float32s(1500, FLOAT64[0])
        f, read, adjoint, vjp = (given[name][1:] for name in ("f_z", "z", "adjoint", "vjp"))
        with emulated():
            classes["float64"](state[1:], FLOAT64[0]).invert_adjoint(f, None, read, adjoint, vjp)
        results.append([state, given["z"], given["adjoint"]])
    for result, expected in zip(*results, strict=True):
        same_bits(result, expected)


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
        for result, expected in zip(*results, strict=True):
            same_bits(result, expected)


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
            same_bits(found.alarm.view(torch.float32), expected)


def test_ptx_raises_the_alarm_for_a_state_that_leaves_its_range():
    """f fits, but a step from -127 beyond f = 127 does not."""
    h = gpu.STATES["exact"](torch.full((1500,), -127 << 56), Radix.nearest(1.2, 24))
    with emulated():
        h.relax(torch.full((1500,), 127.0), None, torch.zeros(1500))
    assert (h.alarm.view(torch.float32) == 127.0).all(), "every lane, from more than one program"
