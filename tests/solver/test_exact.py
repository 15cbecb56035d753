"""The integer state: every half-step is inverted to the last bit, so every gradient is exact."""

import itertools

import pytest
import torch
from torch import nn

import revdeq
from revdeq.baselines import stored_graph
from revdeq.kernels import Radix, cpu, cpu_exact
from revdeq.kernels import reference_exact as exact
from revdeq.kernels.radix import ROOM, Plan
from revdeq.models import ConvBlock, TransformerBlock

pytestmark = pytest.mark.usefixtures("on_device")
BETAS = (0.5, 0.6, 2 / 3, 0.75, 0.8, 0.9, 0.95, 1.2)
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
FREE_HALF_STEPS = {0.5: 32, 0.6: 23, 2 / 3: 20, 0.75: 16, 0.8: 13, 0.9: 9, 0.95: 7, 1.2: 13}


@pytest.mark.parametrize("beta", BETAS)
def test_the_fraction_and_the_free_half_steps_of_a_radix(beta):
    radix = Radix.nearest(beta, 24)
    assert radix.beta == pytest.approx(beta, abs=1e-15)
    assert radix.free_half_steps == FREE_HALF_STEPS[beta]


@pytest.mark.parametrize("beta", BETAS)
def test_a_plan_spills_when_the_remainder_is_full(beta):
    radix = Radix.nearest(beta, 24)
    plan, free = Plan([radix] * 200), radix.free_half_steps
    assert [i for i in range(200) if plan.spills_before(i)] == [*range(free, 200, free)]
    assert plan.spills == 199 // free


def test_a_plan_of_different_steps_spills_when_it_must():
    radices = [Radix.nearest((0.5, 0.9, 0.6, 1.2, 0.95)[i * i % 5], 24) for i in range(100)]
    plan, bound = Plan(radices), 1
    for i, radix in enumerate(radices):
        without = radix.outgrown(bound)
        assert plan.spills_before(i) == (without > ROOM), "it spills neither too early nor too late"
        bound = radix.outgrown(1) if plan.spills_before(i) else without
        assert bound <= ROOM


@pytest.mark.parametrize("gamma", [1.0, 1.3])
def test_half_steps_with_different_radices(exact_half_step, gamma):
    """Each half-step has its own radix, and the inverse takes them in reverse order."""
    half_step, device = exact_half_step
    radices = [
        Radix.nearest(beta, 24, gamma) for beta in (0.5, 0.9, 0.6, 0.95, 0.95, 0.9, 0.9, 0.95, 0.9, 0.8, 1.2, 0.9)
    ]

    def there_and_back(half_step):
        generator = torch.Generator().manual_seed(3)
        start, *fs = (torch.randn(700, generator=generator).to(device) for _ in range(13))
        state, copy, read = exact.encode(start, radices[0]), torch.empty_like(start), 0.5 * start
        there, left = half_step(state, copy, radices), []
        for f, radix in zip(fs, radices, strict=True):
            there.relax(f, read, radix)
            left += [state.clone(), copy.clone()]
        assert there.spilled
        back = half_step(state, copy, radices, there.spilled)
        for f, radix in zip(reversed(fs), reversed(radices), strict=True):
            copy.copy_(read)
            back.invert(f, radix)
        assert torch.equal(state, exact.encode(start, radices[0]))
        return left

    assert all(map(torch.equal, there_and_back(half_step), there_and_back(exact.HalfStep)))


def test_a_step_that_was_not_announced_is_an_error():
    announced, another = Radix.nearest(0.5, 24), Radix.nearest(0.8, 24)
    step = exact.HalfStep(torch.zeros(3, dtype=torch.int64), torch.zeros(3), [announced])
    with pytest.raises(AssertionError, match="not the announced step"):
        step.relax(torch.zeros(3), None, another)


def roundtrip(
    half_step, radix, device, n=3000, half_steps=40, f_dtype=torch.float32, copy_dtype=torch.float32, norms=False
):
    """Everything that is written on the way there and back."""
    generator = torch.Generator().manual_seed(1)

    def random(dtype):
        return (3 * torch.randn(n, generator=generator)).to(dtype).to(device)

    state, copy = (
        exact.encode(random(torch.float32), radix),
        torch.full((n,), torch.nan, dtype=copy_dtype, device=device),
    )
    start, fs = state.clone(), [random(f_dtype) for _ in range(half_steps)]
    adjoint, other_adjoint = (random(torch.promote_types(copy_dtype, torch.float32)) for _ in range(2))
    reads, steps = [random(copy_dtype) for _ in range(half_steps)], [radix] * half_steps
    there = half_step(state, copy, steps)
    left = []
    for f, read in zip(fs, reads, strict=True):
        if norms:
            left.append(there.relax_norms(f, read, radix).clone())
        else:
            there.relax(f, read, radix)
    assert not there.alarm.any()
    left += [state.clone(), copy.clone(), *(x.clone() for x in there.spilled)]
    back = half_step(state, copy, steps, there.spilled)
    for f, read in zip(reversed(fs[1:]), reversed(reads[1:]), strict=True):
        if radix.gamma != 1:
            copy.copy_(read)  # otherwise it is not read
        back.invert_adjoint(f, adjoint, random(copy_dtype), other_adjoint, radix, radix)
    copy.copy_(reads[0])
    other, floor = random(copy_dtype), torch.tensor(0.5, device=device)
    maxima = torch.cat(
        [
            back.invert_compare(fs[0], other, floor, None, None, None, radix, radix),
            back.invert_compare(fs[0], other, floor, adjoint, other, other_adjoint, radix, radix),
        ]
    )
    back.invert(fs[0], radix)
    assert torch.equal(state, start), "the inverses end at the initial state"
    return [x.cpu() for x in (*left, copy, adjoint, maxima)]


@pytest.mark.parametrize("norms", [False, True])
def test_the_number_of_threads_does_not_change_the_bits(norms):
    if cpu.library is None:
        pytest.skip("the C kernel was not built: no C compiler")
    radix, settings = Radix.nearest(0.6, 24), {"n": 2**15 + 77, "half_steps": 12, "norms": norms}  # past a spill
    expected = roundtrip(exact.HalfStep, radix, torch.device("cpu"), **settings)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            ours = roundtrip(cpu_exact.HalfStep, radix, torch.device("cpu"), **settings)
            assert all(map(torch.equal, ours, expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize(("beta", "norms"), [*((beta, False) for beta in (*BETAS, 0.3)), (0.6, True), (1.7, True)])
def test_bits_equal_the_reference_for_every_beta(exact_half_step, beta, norms, gamma):
    half_step, device = exact_half_step
    radix = Radix.nearest(beta, 24, gamma)
    steps = 2 * radix.free_half_steps + 2 if beta == 0.95 else 2 if norms else 4  # past the second spill
    settings = {"half_steps": steps, "norms": norms, "n": 4500 if norms else 600}
    expected = roundtrip(exact.HalfStep, radix, device, **settings)
    assert all(map(torch.equal, roundtrip(half_step, radix, device, **settings), expected))


PAIRS = [(1.0, *pair) for pair in itertools.product(DTYPES, DTYPES)] + [(1.3, x, x) for x in DTYPES]
"""gamma, and dtypes of f and of what it reads: dtypes are converted by the same code for every gamma."""


@pytest.mark.parametrize(("gamma", "f_dtype", "copy_dtype"), PAIRS)
def test_bits_equal_the_reference_for_every_pair_of_dtypes(exact_half_step, f_dtype, copy_dtype, gamma):
    half_step, device = exact_half_step
    settings = {"half_steps": 4, "f_dtype": f_dtype, "copy_dtype": copy_dtype, "n": 600}
    radix = Radix.nearest(0.8 if gamma == 1 else 0.6, 24, gamma)
    expected = roundtrip(exact.HalfStep, radix, device, **settings)
    assert all(map(torch.equal, roundtrip(half_step, radix, device, **settings), expected))


@pytest.mark.parametrize("n", [0, 1, 2, 255, 257, 1023, 1025, 4097])
def test_bits_equal_the_reference_for_every_size(exact_half_step, n):
    half_step, device = exact_half_step
    radix = Radix.nearest(0.6, 24)
    expected = roundtrip(exact.HalfStep, radix, device, n=n, half_steps=2, norms=True)
    assert all(map(torch.equal, roundtrip(half_step, radix, device, n=n, half_steps=2, norms=True), expected))


@pytest.mark.parametrize("beta", BETAS)
def test_random_bits_and_extremes_survive_a_step_and_its_inverse(exact_half_step, beta):
    """Random states with a remainder within its bound, and f over its whole range. The extremes are at both ends: C
    steps the last elements, if they are fewer than eight, in other code."""
    half_step, device = exact_half_step
    radix = Radix.nearest(beta, 24)
    generator = torch.Generator().manual_seed(2)
    bound = -(-(2**32) // radix.d) * radix.p - radix.p  # R that still has room for one half-step
    y = torch.randint(-(2**31), 2**31, (2004,), generator=generator)
    r = torch.randint(0, bound, (2004,), generator=generator)
    f = (torch.rand(2004, generator=generator) * 256 - 128).clamp(-127.9, 127.9)
    for end in (slice(4), slice(-4, None)):
        y[end], r[end] = torch.tensor([-(2**31), 2**31 - 1, 0, -1]), torch.tensor([0, bound - 1, bound - 1, 0])
        f[end] = torch.tensor([127.9, -127.9, 0.0, 127.9])
    if radix.sign < 0:  # above beta = 1 the state may overflow, which raises the alarm
        y, f = y // 4, f / 4
    state = ((y << 32) | r).to(device)
    start, copy, expected = state.clone(), torch.empty(2004, device=device), state.clone()
    bound_step = half_step(state, copy, [radix])
    partial = bound_step.relax_norms(f.to(device), None, radix)
    assert not bound_step.alarm.any()
    specified = exact.HalfStep(expected, torch.empty_like(copy), [radix])
    assert torch.equal(partial, specified.relax_norms(f.to(device), None, radix))
    assert torch.equal(state, expected)
    bound_step.invert(f.to(device), radix)
    assert torch.equal(state, start)


@pytest.mark.parametrize("bad", [128.0, -129.0, 1e30, float("inf"), float("nan")])
def test_an_overflow_raises_the_alarm_of_its_half_step(exact_half_step, bad):
    half_step, device = exact_half_step
    state, copy = torch.zeros(300, dtype=torch.int64, device=device), torch.zeros(300, device=device)
    radix = Radix.nearest(0.5, 24)
    step = half_step(state, copy, [radix] * 3)
    f = torch.zeros(300, device=device)
    step.relax(f, None, radix)
    f[17] = bad
    step.relax(f, None, radix)
    alarm = step.alarm.amax(1).cpu().view(torch.float32)
    assert alarm[0] == 0
    assert torch.equal(alarm[1], torch.tensor(abs(bad))) or (alarm[1].isnan() and bad != bad)


def blocks():
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh())
    return {
        "mlp": (lambda z, x: mlp(z) + x, torch.randn(4, 8)),
        "conv": (ConvBlock(16), torch.randn(2, 16, 6, 6)),
        "transformer": (TransformerBlock(16, 2), torch.randn(2, 5, 16)),
    }


@pytest.mark.parametrize(
    ("name", "beta", "max_steps"),
    [
        *itertools.product(["mlp"], BETAS, [1, 13, 64]),
        *itertools.product(["conv", "transformer"], BETAS, [13]),
        *itertools.product(["conv", "transformer"], [0.5, 0.95, 1.2], [64]),
    ],
)
def test_the_backward_pass_computes_what_the_forward_pass_computed(name, beta, max_steps):
    """With the same inputs and outputs of f, bit for bit, the gradient is that of the stored graph."""
    f, x = blocks()[name]
    report = revdeq.verify(f, torch.zeros_like(x), x, beta=beta, max_steps=max_steps, state="exact")
    assert report.exact, str(report)


def gradients(f, x, weight, **settings):
    z = revdeq.solve(f, torch.zeros_like(x), x, **settings).z
    return z, torch.autograd.grad(z, [x, *f.parameters()], weight)


@pytest.mark.parametrize(("beta", "max_steps"), [(0.5, 64), (0.8, 8), (0.9, 16)])
def test_the_gradient_equals_that_of_kept_graphs_bit_for_bit(beta, max_steps):
    f, x = blocks()["conv"]
    x.requires_grad_()
    weight = torch.randn_like(x)
    settings = {"beta": beta, "max_steps": max_steps, "state": "exact", "check": "raise"}
    _, ours = gradients(f, x, weight, **settings)
    _, expected = gradients(f, x, weight, keep=2 * max_steps, **settings)
    assert all(map(torch.equal, ours, expected))


@pytest.mark.cpu
def test_it_is_exact_where_float64_fails():
    f, x = blocks()["conv"]
    x.requires_grad_()
    weight = torch.randn_like(x)
    with pytest.raises(revdeq.ReconstructionError):
        gradients(f, x, weight, beta=0.9, max_steps=64, state="float64", check="raise")
    z, ours = gradients(f, x, weight, beta=0.9, max_steps=64, state="exact", check="raise")
    expected_z = stored_graph(f, torch.zeros_like(x), x, beta=0.9, max_steps=64)
    expected = torch.autograd.grad(expected_z, [x, *f.parameters()], weight)
    # The forward passes differ by the resolution of the state, and the gradients accordingly.
    torch.testing.assert_close(z, expected_z, rtol=0, atol=1e-5)
    for g, e in zip(ours, expected, strict=True):
        assert (g - e).norm() <= 1e-3 * e.norm()


@pytest.mark.parametrize("beta", BETAS)
def test_the_solution_is_close_to_that_of_the_float64_state(beta):
    for f, x in blocks().values():
        settings = {"beta": beta, "max_steps": 6, "check": None}
        ours = revdeq.solve(f, torch.zeros_like(x), x, state="exact", **settings).z
        expected = revdeq.solve(f, torch.zeros_like(x), x, **settings).z
        assert (ours - expected).abs().max() <= 1e-6 * max(1.0, expected.abs().max())


def test_tolerance_nested_states_and_dtypes():
    weight = nn.Parameter(torch.tensor(0.5))

    def f(z):
        return {"a": torch.cos(z["a"]) * weight, "b": (0.5 * z["b"][0] + 1).float(), "c": z["c"] * 0}

    z0 = {"a": torch.zeros(3, 2).t(), "b": [torch.zeros((), dtype=torch.float64)], "c": torch.zeros(0)}
    solution = revdeq.solve(
        lambda z: {**f(z), "b": [f(z)["b"]]}, z0, beta=0.75, max_steps=60, tol=1e-4, state="exact", check="raise"
    )
    assert solution.steps < 60
    assert solution.beta == 0.75
    assert solution.change <= 1e-4
    torch.testing.assert_close(solution.z["b"][0], torch.tensor(2.0, dtype=torch.float64), rtol=1e-3, atol=0)
    (solution.z["a"].sum() + solution.z["b"][0]).backward()
    assert weight.grad.isfinite()


def test_every_backend_gives_the_same_solution_and_gradient(backend):
    f, x = blocks()["conv"]
    x.requires_grad_()
    weight = torch.randn_like(x)
    settings = {"beta": 0.8, "max_steps": 8, "state": "exact", "tol": 1e-9}
    with revdeq.kernels.backend("reference"):
        expected_z, expected = gradients(f, x, weight, **settings)
    with revdeq.kernels.backend(backend):
        z, ours = gradients(f, x, weight, **settings)
    assert torch.equal(z, expected_z)
    assert all(map(torch.equal, ours, expected))


def test_no_float64_tensor_is_made(monkeypatch):
    class NoFloat64(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            assert not (isinstance(out, torch.Tensor) and out.dtype == torch.float64), func
            return out

    f, x = blocks()["conv"]
    x.requires_grad_()
    with revdeq.kernels.backend("reference"), NoFloat64():
        gradients(f, x, torch.ones_like(x), beta=0.8, max_steps=8, state="exact")


def test_beta_is_rounded_to_the_nearest_fraction():
    solution = revdeq.solve(torch.cos, torch.zeros(2), beta=0.7001, state="exact")
    assert solution.beta == 0.7
    assert revdeq.solve(torch.cos, torch.zeros(2), beta=0.999, state="exact").beta == 63 / 64
    assert revdeq.solve(torch.cos, torch.zeros(2), beta=1.001, state="exact").beta == 65 / 64
    with pytest.raises(ValueError, match="beta = 0.001 has no usable fraction"):
        revdeq.solve(torch.cos, torch.zeros(2), beta=0.001, state="exact")


@pytest.mark.cpu
def test_overflow_errors_name_the_step_and_the_remedy():
    with pytest.raises(
        OverflowError,
        match=r"overflow in step 2: f reached 150, .*below 128; use state=revdeq.Exact\(fraction_bits=22\)",
    ):
        revdeq.solve(lambda z: z * 0 + torch.where(z.abs() > 50, 150.0, 100.0), torch.zeros(3), state="exact")
    roomy = revdeq.solve(lambda z: z * 0 + 150.0, torch.zeros(3), state=revdeq.Exact(fraction_bits=22))
    torch.testing.assert_close(roomy.z, torch.full((3,), 150.0), rtol=0.01, atol=0)
    with pytest.raises(FloatingPointError, match="overflow in step 1: f is not finite"):
        revdeq.solve(lambda z: z / 0, torch.zeros(3), state="exact")
    with pytest.raises(OverflowError, match=r"z0 .*500.*revdeq.Exact\(fraction_bits=21\)"):
        revdeq.solve(torch.cos, torch.full((3,), 500.0), state="exact")
    with pytest.raises(OverflowError, match=r"overflow in step 1: f reached 3e\+10") as told:
        revdeq.solve(lambda z: z * 0 + 3e10, torch.zeros(3), state="exact")
    assert "fraction_bits=" not in str(told.value), "no number of fraction bits is enough"
    with pytest.raises(FloatingPointError, match="z0 .*not finite"):
        revdeq.solve(torch.cos, torch.zeros(3) / 0, state="exact")


@pytest.mark.cpu
def test_an_overflow_of_the_state_is_not_blamed_on_f():
    with pytest.raises(OverflowError, match=r"in step 1: the state exceeded 128, .* while f was only 100: .*diverges"):
        revdeq.solve(lambda z: 0 * z + 100, torch.full((3,), -100.0), beta=1.9, state="exact")


@pytest.mark.cpu
def test_where_reading_would_wait_the_error_comes_with_a_later_solve(monkeypatch):
    monkeypatch.setattr("revdeq._device.can_look", lambda x: False)
    revdeq.solve(lambda z: z / 0, torch.zeros(3), state="exact")
    with pytest.raises(FloatingPointError, match="overflow in step 1"):
        revdeq.solve(torch.cos, torch.zeros(3))


def test_bad_fraction_bits():
    for bits in (0, 31, 2.5, "24"):
        with pytest.raises(ValueError, match="fraction_bits = .* must be an integer from 1 to 30"):
            revdeq.Exact(fraction_bits=bits)


def test_an_error_names_the_size_of_remainders_that_do_not_fit_into_memory(monkeypatch):
    def none_left(*args, **kwargs):
        raise RuntimeError("not enough memory: you tried to allocate")

    steps = [Radix.nearest(0.9, 24)] * 64
    half_step = exact.HalfStep(torch.zeros(2**20, dtype=torch.int64), torch.zeros(2**20), steps)
    monkeypatch.setattr(torch, "empty_like", none_left)
    with pytest.raises(
        MemoryError, match=r"64 steps at beta = 0.9 take 28 bytes per element.*0.1 GiB in total.*smaller beta"
    ):
        half_step.make_room()


def test_at_the_size_of_the_image_model_of_the_paper():
    """C = 64, width 2, 32x32, beta .8, N = 8, where float64 is 3e-4 off."""
    torch.manual_seed(0)
    f, x = ConvBlock(64, width=2), torch.randn(4, 64, 32, 32)
    assert revdeq.verify(f, torch.zeros_like(x), x, beta=0.8, max_steps=8, state="exact").exact
    assert not revdeq.verify(f, torch.zeros_like(x), x, beta=0.8, max_steps=8, state="float64").exact


def test_f_may_change_its_input_in_place():
    def in_place(z):
        return z.mul_(0.5).add_(1)

    expected = revdeq.solve(lambda z: 0.5 * z + 1, torch.zeros(3), state="exact")
    assert torch.equal(revdeq.solve(in_place, torch.zeros(3), state="exact").y, expected.y)
    with torch.inference_mode():
        assert torch.equal(revdeq.solve(in_place, torch.zeros(3), state="exact").y, expected.y)
