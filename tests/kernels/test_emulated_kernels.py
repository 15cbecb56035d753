"""The kernels' PTX, executed by an emulator, gives the bits of the reference.

By default each operation is tested with every dtype of f, every dtype of the copy and every GPU, but not in every
combination: that is `pytest -m full`. Of the other combinations ten are drawn at random every day, or as many as
`--sample` says. A launch has a full chunk and a tail, which ends at each register of a thread in turn.
"""

import itertools

import pytest
import torch
from emulator import emulating
from gpu_targets import TARGETS, skip_without_the_compiler
from test_frozen_examples import OPERATIONS as OF_EXAMPLES
from test_frozen_examples import run as run_examples
from test_kernels import DTYPES, OPERATIONS, run, same_bits, tensors, wide_range
from torch import nn

skip_without_the_compiler()

import revdeq  # noqa: E402
from revdeq.kernels import Coefficients, Radix, gpu, gpu_exact, half_step, launch, reference  # noqa: E402
from revdeq.kernels import reference_exact as exact  # noqa: E402
from revdeq.kernels.half_step import LANES  # noqa: E402
from revdeq.kernels.radix import LARGEST_DENOMINATOR  # noqa: E402

GPUS = ("sm_80", "sm_90", "sm_100")
BETA = 0.8
STEP = Coefficients(1 - BETA, BETA)  # not float32 numbers
MIXED = Coefficients(1 - BETA, 1.3 * BETA, -0.3 * BETA)
EXACT_OPERATIONS = (
    "relax", "relax and spill", "relax_norms", "relax_norms and spill",
    "invert", "invert and take back", "invert_adjoint", "invert_adjoint and take back",
    "invert_compare", "compare alone",
)  # fmt: skip
FEW_ROWS = 4


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


@pytest.fixture(params=[FEW_ROWS, pytest.param(half_step.ROWS, marks=pytest.mark.full)], ids="{} rows".format)
def rows(request, monkeypatch):
    """The rows of a chunk. With few of them, few tails cover all rows; whole solves use the real number."""
    monkeypatch.setattr(half_step, "ROWS", request.param)
    return request.param


def emulated(gpu_name):
    """If several values in a lane do not fit, any of them may be reported."""
    return emulating(TARGETS[gpu_name], unordered=["p_alarm"])


def covering(operations):
    """All combinations of operations, GPUs, dtypes of f and of the copy. The default ones cover every operation with
    every GPU and every dtype."""
    chosen = {
        (operation, GPUS[(i + j) % 3], DTYPES[j], DTYPES[(i + j) % 4])
        for i, operation in enumerate(operations)
        for j in range(4)
    }
    return [
        pytest.param(
            *case,
            id="-".join(str(x).removeprefix("torch.") for x in case),
            marks=[] if case in chosen else pytest.mark.full,
        )
        for case in itertools.product(operations, GPUS, DTYPES, DTYPES)
    ]


def one_of(gpus):
    """The middle one, or all with `-m full`."""
    return [pytest.param(name, marks=[] if i == 1 else pytest.mark.full) for i, name in enumerate(gpus)]


def sizes(rows):
    """Three chunks; and one chunk with a tail that ends in each register of each row, in threads of all warps."""
    yield 3 * rows * LANES
    for slot in range(2 * rows):
        yield (rows + slot // 2) * LANES + 37 * slot % (LANES // 2) * 2 + slot % 2


def compare(results, expected):
    for result, reference_result in zip(results, expected, strict=True):
        same_bits(result, reference_result)


@pytest.mark.parametrize(("operation", "gpu_name", "f_dtype", "copy_dtype"), covering(OPERATIONS))
def test_ptx_gives_the_bits_of_the_reference(operation, gpu_name, f_dtype, copy_dtype, rows):
    with emulated(gpu_name):
        for n in sizes(rows):
            case = tensors((n,), f_dtype, copy_dtype, "cpu")
            step = MIXED if n % 2 else STEP
            compare(run(gpu.HalfStep, operation, *case, step), run(reference.HalfStep, operation, *case, step))


def dividends(a, seed):
    """Numbers with all exponents of float64. The quotients of some by a are halfway between two floats, or nearly so,
    or at the ends of the range."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.arange(-1074, 1024, dtype=torch.float64).repeat(2)
    bits = torch.randint(2**52, 2**53, exponents.shape, generator=generator).double()
    halves = torch.where(torch.arange(len(bits)) % 2 == 0, 0.0, 0.5)
    near = (bits - 2.0**52 + 2.0**51 + halves) * 2.0**-52 * a  # its quotient has one bit too many
    x = torch.ldexp(torch.cat([bits * 2.0**-53, near]), exponents.repeat(2))
    x = torch.cat([x, x.nextafter(torch.tensor(torch.inf).double()), x.nextafter(-torch.tensor(torch.inf).double())])
    ends = [0.0, 5e-324, 2.0**-1022, 2.0**-900 * a, 2.0**1023 * a, torch.finfo(torch.float64).max, torch.inf, torch.nan]
    ends = torch.tensor(ends, dtype=torch.float64)
    x = torch.cat([x, ends, ends.nextafter(torch.zeros((), dtype=torch.float64)), ends.nextafter(2 * ends)])
    return torch.cat([x, -x])


@pytest.mark.parametrize("beta", [0.5, 0.8, 0.9, 1.2, 0.1, 1 - 2.0**-24, 1.9])
def test_division_by_the_reciprocal_is_correctly_rounded(beta):
    """For every exponent, including subnormal quotients and those that overflow."""
    step = Coefficients.rounded(beta)
    x = dividends(step.a, seed=int(1000 * beta))
    results = []
    for half_step_class in (gpu.HalfStep, reference.HalfStep):
        state, copy = x.clone(), torch.zeros_like(x)
        with emulated("sm_90"):
            half_step_class(state, copy).invert(torch.zeros(x.shape), step)
        results.append([state, copy])
    compare(*results)
    assert results[0][0].isfinite().any() and (results[0][0].abs() < 2.0**-1022).any()


@pytest.mark.parametrize("n", range(1, LARGEST_DENOMINATOR + 1))
def test_integer_division_by_the_reciprocal_is_exact(n):
    """For every x in the range that gpu_exact.py states. umulhi(2 x, reciprocal) is monotonic in x, so it is k from
    x = k n to x = k n + n - 1 if it is k at both ends."""
    reciprocal = gpu_exact.reciprocal(n) & 0xFFFFFFFF
    k = torch.arange(2**19)
    for x in (k * n, k * n + n - 1):
        assert torch.equal((2 * x * reciprocal) >> 32, k)


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
    for half_step_class in (exact.HalfStep, gpu_exact.HalfStep):
        here, copy = state.clone(), torch.zeros(len(state))
        with emulated("sm_90"):
            half_step_class(here, copy, [radix]).relax(f, None, radix)
        results.append([here, copy])
    compare(*results)


class LastElements(torch.Tensor):
    """The last elements of a tensor, with 2^31 elements before them."""

    def numel(self):
        return 2**31 + super().numel()


@pytest.mark.parametrize("gpu_name", one_of(GPUS))
@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("operation", ["relax", "invert_adjoint"])
def test_ptx_finds_elements_beyond_32_bits(operation, state, gpu_name):
    before, f, copy, adjoint, vjp, read, other, _ = tensors((1500,), torch.float32, torch.float32, "cpu")
    step, settings, classes = MIXED, (), (reference.HalfStep, gpu.HalfStep)
    if state == "exact":
        step = Radix.nearest(BETA, 24, 1.3)
        f, read, initial = (torch.randn(1500) for _ in range(3))
        before, settings = exact.encode(initial, step), ([step] * 4,)
        classes = exact.HalfStep, gpu_exact.HalfStep
    block = {"float64": gpu.RELAX_BLOCK if operation == "relax" else gpu.INVERT_BLOCK, "exact": gpu_exact.BLOCK}[state]
    results = []
    for half_step_class, kind in zip(classes, (torch.Tensor, LastElements), strict=True):
        left = [x.clone() for x in (before, read if operation == "invert_adjoint" else copy, adjoint)]
        with emulating(TARGETS[gpu_name], last=-(-1500 // block), before=2**31):
            bound = half_step_class(left[0].as_subclass(kind), left[1], *settings)
            bound.done = 1
            if operation == "relax":
                bound.relax(f, read, step)
            else:
                bound.invert_adjoint(f, left[2], vjp, other, step, step)
        results.append(left)
    compare(*results)


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("beta", [0.5, 0.75, 2 / 3, 1.5, 1.9, 1 - 2.0**-20])
@pytest.mark.parametrize("operation", ["relax", "invert_adjoint"])
def test_ptx_gives_the_bits_of_the_reference_for_every_beta(operation, beta, gamma):
    case, step = tensors((1500,), torch.float32, torch.float32, "cpu"), Coefficients.rounded(beta, gamma)
    with emulated("sm_90"):
        compare(run(gpu.HalfStep, operation, *case, step), run(reference.HalfStep, operation, *case, step))


def run_exact(half_step, operation, f_dtype, copy_dtype, n, radix, seed=None):
    """Everything that an operation writes and returns, for a random state and a random f."""
    generator = torch.Generator().manual_seed(n)
    spill = operation.endswith(("spill", "take back"))
    scale = 1 if radix.sign > 0 else 4  # above beta = 1 the state grows
    y = torch.randint(-(2**31), 2**31, (n,), generator=generator) // scale
    has_room = 2**32 if spill else -(-(2**32) // radix.d) * radix.p - radix.p
    state = y << 32 | torch.randint(0, has_room, (n,), generator=generator)
    scale *= 1 if radix.gamma == 1 else 2
    dtypes = f_dtype, copy_dtype, copy_dtype
    f, vjp, read = (((252 * torch.rand(n, generator=generator) - 126) / scale).to(t) for t in dtypes)
    aside = torch.randint(-(2**31), 2**31, (n,), generator=generator).to(torch.int32)
    copy, wide = torch.full((n,), torch.nan, dtype=copy_dtype), torch.promote_types(copy_dtype, torch.float32)
    adjoint, other = (wide_range((n,), wide, "cpu", seed=seed) for seed in (3, 4))
    name, _, place = operation.partition(" and ")
    if name not in ("relax", "relax_norms"):  # take the step that is then inverted
        exact.relax(state, f, read, copy.clone(), aside.clone() if spill else None, radix)
        if radix.gamma != 1:
            copy.copy_(read)
    free = radix.free_half_steps
    step = half_step(state, copy, [radix] * (2 * free), [aside] if place == "take back" else None)
    step.done = {"spill": free, "take back": free + 1}.get(place, 3)
    floor = torch.tensor(0.5)
    seed = None if seed is None else torch.full((n,), torch.nan, dtype=seed)
    extra = {
        "relax": (read, radix),
        "relax_norms": (read, radix),
        "invert": (radix,),
        "invert_adjoint": (adjoint, vjp, other, radix, radix, seed),
        "invert_compare": (vjp, floor, adjoint, vjp, other, radix, radix, seed),
        "compare alone": (vjp, floor, None, None, None, radix, radix),
    }[name]
    returned = getattr(step, "invert_compare" if name == "compare alone" else name)(f, *extra)
    assert not step.alarm.any()
    assert len(step.spilled) == (place == "spill")
    return [x for x in (state, copy, adjoint, step.alarm, *step.spilled, seed, returned) if x is not None]


@pytest.mark.parametrize(("operation", "gpu_name", "f_dtype", "copy_dtype"), covering(EXACT_OPERATIONS))
def test_ptx_gives_the_bits_of_the_exact_reference(operation, gpu_name, f_dtype, copy_dtype, rows):
    # 1 - beta is 1/5, or 2/5, or -1/5
    beta = (0.8, 0.6, 1.2)[(DTYPES.index(f_dtype) + DTYPES.index(copy_dtype)) % 3]
    with emulated(gpu_name):
        for n in sizes(rows):
            radix = Radix.nearest(beta, 24, 1.3 if n % 2 else 1.0)
            case = operation, f_dtype, copy_dtype, n, radix
            compare(run_exact(gpu_exact.HalfStep, *case), run_exact(exact.HalfStep, *case))


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("operation", OF_EXAMPLES)
def test_ptx_freezes_examples(operation, state, monkeypatch):
    """Examples of a block and a tail, of less than a block, and of a size that is no multiple of 16, which the
    reference steps. An f that does not fit raises no alarm in a frozen example."""
    monkeypatch.setattr(half_step, "ROWS", FEW_ROWS)
    for gpu_name, length, now in zip(GPUS, (1048, 1104, 48), (4, 5, 4), strict=True):
        dtype = DTYPES[length % 3]
        case = tensors((5, length), dtype, torch.float32, "cpu")
        classes, step = (gpu.HalfStep, reference.HalfStep), MIXED
        if state == "exact":
            case = [x.clamp(-9, 9) if x.dim() else x for x in case]
            classes, step = (gpu_exact.HalfStep, exact.HalfStep), Radix.nearest(BETA, 20, 1.3)
        case[1][3] = torch.inf  # an example that has ended
        with emulated(gpu_name):
            compare(*(run_examples(each, operation, case, step, now, seed=torch.bfloat16) for each in classes))


@pytest.mark.parametrize("gpu_name", one_of(GPUS))
@pytest.mark.parametrize("operation", ["relax", "invert", "invert_adjoint"])
def test_small_states_have_small_blocks(monkeypatch, operation, gpu_name):
    """Each thread has two neighbours, and the tail ends at either of them."""
    monkeypatch.setattr(launch, "SMALL", 2**18)
    programs, launch_by_triton = [], launch._launch_by_triton

    def noted(kernel, warps, device, number, arguments):
        programs.append(number)
        return launch_by_triton(kernel, warps, device, number, arguments)

    monkeypatch.setattr(launch, "_launch_by_triton", noted)
    with emulated(gpu_name):
        for n in (3 * LANES, 3 * LANES + 101, 3 * LANES + 102):
            launch._compiled.clear()
            case = tensors((n,), torch.bfloat16, torch.float32, "cpu")
            compare(run(gpu.HalfStep, operation, *case, MIXED), run(reference.HalfStep, operation, *case, MIXED))
            case = operation, torch.bfloat16, torch.float32, n, Radix.nearest(BETA, 24, 1.3)
            compare(run_exact(gpu_exact.HalfStep, *case), run_exact(exact.HalfStep, *case))
    assert programs == [3, 3, 4, 4, 4, 4]


@pytest.mark.parametrize("seed_dtype", DTYPES)
@pytest.mark.parametrize("copy_dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("operation", ["invert_adjoint", "invert_compare"])
def test_ptx_writes_the_seed(operation, copy_dtype, seed_dtype, rows):
    n = (rows + 1) * LANES + 101
    with emulated("sm_90"):
        case = tensors((n,), seed_dtype, copy_dtype, "cpu")
        results = [
            run(half_step_class, operation, *case, MIXED, seed=seed_dtype)
            for half_step_class in (gpu.HalfStep, reference.HalfStep)
        ]
        compare(*results)
        assert results[0][3].dtype == seed_dtype
        case = operation, seed_dtype, copy_dtype, n, Radix.nearest(BETA, 24, 1.3), seed_dtype
        compare(*(run_exact(half_step_class, *case) for half_step_class in (gpu_exact.HalfStep, exact.HalfStep)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gpu_name", one_of(GPUS))
def test_ptx_encodes_and_decodes(gpu_name, dtype):
    """Including numbers that must be rounded, and states with a remainder, which f does not read."""
    radix = Radix.nearest(BETA, 24)
    for n in (2 * gpu_exact.BLOCK, gpu_exact.BLOCK + 101, 1):
        x = ((252 * torch.rand(n) - 126) * 2.0 ** torch.randint(-30, 1, (n,))).to(dtype)
        numbers = torch.randint(-(2**63), 2**63 - 1, (n,))
        with emulated(gpu_name):
            state, alarm = gpu_exact.HalfStep.encoded(x, x, radix)
            copy = gpu_exact.HalfStep.decoded(numbers, dtype, radix)
        compare([state, copy], [exact.encode(x, radix), exact.HalfStep.decoded(numbers, dtype, radix)])
        assert not alarm.any() and not exact.HalfStep.encoded(x, x, radix)[1].any()


@pytest.mark.parametrize("bad", [128.0, -129.0, float("inf"), float("nan")])
def test_ptx_raises_the_alarm_for_an_initial_state_that_does_not_fit(bad):
    x, radix = torch.zeros(1500), Radix.nearest(BETA, 24)
    x[1301] = bad
    with emulated("sm_90"):
        state, alarm = gpu_exact.HalfStep.encoded(x, x, radix)
    expected = torch.zeros(LANES)
    expected[1301 % LANES] = abs(bad)
    same_bits(alarm.view(torch.float32), expected)
    expected_state, expected_alarm = exact.HalfStep.encoded(x, x, radix)
    compare([state, alarm.amax(0, keepdim=True)], [expected_state, expected_alarm])


def test_the_initial_state_has_the_layout_of_like():
    x, radix = torch.randn(3, 5, 7), Radix.nearest(BETA, 24)
    like = torch.empty(7, 3, 5).permute(1, 2, 0)
    with emulated("sm_90"):
        state, _ = gpu_exact.HalfStep.encoded(x, like, radix)
        copy = gpu_exact.HalfStep.decoded(state, torch.float32, radix)
    assert state.stride() == copy.stride() == like.stride()
    compare([state.contiguous()], [exact.encode(x, radix)])


NEARLY = 128 - 2.0**-27  # fits, but not after rounding


@pytest.mark.parametrize("place", [0, 255, 1023, 1024, 1024 + 300, 1499])
@pytest.mark.parametrize("bad", [128.0, -129.0, 1e30, float("inf"), float("nan"), NEARLY])
def test_ptx_raises_the_alarm_for_an_f_that_does_not_fit(bad, place):
    f = torch.zeros(1500, dtype=torch.float64 if bad == NEARLY else torch.float32)
    radix = Radix.nearest(0.8, 24)
    step = gpu_exact.HalfStep(torch.zeros(1500, dtype=torch.int64), torch.zeros(1500), [radix] * 3)
    f[place] = bad
    step.done = 1
    with emulated("sm_90"):
        step.relax(f, None, radix)
    expected = torch.zeros(3, LANES)
    expected[1, place % LANES] = abs(bad)
    same_bits(step.alarm.view(torch.float32), expected)


def test_ptx_raises_the_alarm_for_a_state_that_leaves_its_range():
    """f fits, but a step from -127 beyond f = 127 does not."""
    state, f = torch.full((1500,), -127 << 56), torch.full((1500,), 127.0)
    radix = Radix.nearest(1.2, 24)
    step = gpu_exact.HalfStep(state, torch.zeros(1500), [radix])
    with emulated("sm_90"):
        step.relax(f, None, radix)
    assert (step.alarm.view(torch.float32) == 127.0).all(), "every lane, from more than one program"


@pytest.mark.parametrize("gpu_name", one_of(GPUS))
def test_unaligned_tensors(gpu_name):
    """At an offset of one element, the alignment is unknown and accesses are narrow."""
    for operation in ("relax", "invert_adjoint"):
        *case, floor = tensors((1501,), torch.bfloat16, torch.float32, "cpu")
        case = [x[1:] for x in case]
        expected = run(reference.HalfStep, operation, *case, floor, STEP)
        state, f, copy, adjoint, vjp, *_ = (torch.cat([x[:1], x])[1:] for x in case)
        extra = (None, STEP) if operation == "relax" else (adjoint, vjp, None, STEP, STEP)
        with emulated(gpu_name):
            getattr(gpu.HalfStep(state, copy), operation)(f, *extra)
        compare([state, copy, adjoint], expected)


def solve(**settings):
    torch.manual_seed(0)
    f = nn.Sequential(nn.Linear(61, 61), nn.Tanh())
    x = torch.randn(70, 61, requires_grad=True)
    solution = revdeq.solve(lambda z, x: f(z) + x, torch.zeros(70, 61), x, beta=BETA, check="raise", **settings)
    solution.z.square().sum().backward()
    return [solution.y, solution.z, x.grad, *(p.grad for p in f.parameters())], solution


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("tol", [None, 1e-2])
def test_a_whole_solve_and_its_gradient_in_ptx_have_the_bits_of_the_cpu(state, tol):
    settings = {"state": state, "tol": tol, "max_steps": 6 if tol else 4}
    expected, cpu_solution = solve(**settings)
    with emulated("sm_90"), revdeq.kernels.backend("triton"):
        results, solution = solve(**settings)
    assert solution.steps == cpu_solution.steps
    compare(results, expected)
