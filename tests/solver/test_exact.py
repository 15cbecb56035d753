"""The integer state: every half-step is inverted to the last bit, so every gradient is exact."""

import pytest
import torch
from torch import nn

import revdeq
from revdeq.baselines import stored_graph
from revdeq.kernels.radix import Radix
from revdeq.models import ConvBlock, TransformerBlock

pytestmark = pytest.mark.usefixtures("on_device")
FREE = {0.5: 32, 0.6: 23, 2 / 3: 20, 0.75: 16, 0.8: 13, 0.9: 9, 0.95: 7, 1.2: 13}


@pytest.mark.parametrize("beta", FREE)
def test_the_fraction_and_the_free_half_steps_of_a_radix(beta):
    radix = Radix.nearest(beta, 24)
    assert radix.beta == pytest.approx(beta, abs=1e-15)
    assert radix.free_half_steps == FREE[beta]


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
        *(("mlp", beta, 13) for beta in FREE),
        *(("mlp", 0.5, 64), ("mlp", 0.95, 1), ("conv", 0.8, 13), ("conv", 1.2, 13), ("transformer", 0.5, 13)),
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


def test_beta_is_rounded_to_the_nearest_fraction():
    solution = revdeq.solve(torch.cos, torch.zeros(2), beta=0.7001, state="exact")
    assert solution.beta == 0.7
    assert revdeq.solve(torch.cos, torch.zeros(2), beta=0.999, state="exact").beta == 63 / 64
    assert revdeq.solve(torch.cos, torch.zeros(2), beta=1.001, state="exact").beta == 65 / 64
    with pytest.raises(ValueError, match="beta = 0.001 .*fraction"):
        revdeq.solve(torch.cos, torch.zeros(2), beta=0.001, state="exact")


@pytest.mark.cpu
def test_overflow_errors_name_the_limit_and_the_remedy():
    with pytest.raises(OverflowError, match=r"150.*below 128 .*revdeq.Exact\(fraction_bits="):
        revdeq.solve(lambda z: z * 0 + torch.where(z.abs() > 50, 150.0, 100.0), torch.zeros(3), state="exact")
    roomy = revdeq.solve(lambda z: z * 0 + 150.0, torch.zeros(3), state=revdeq.Exact(fraction_bits=22))
    torch.testing.assert_close(roomy.z, torch.full((3,), 150.0), rtol=0.01, atol=0)
    with pytest.raises(OverflowError, match=r"z0 .*500.*revdeq.Exact\(fraction_bits="):
        revdeq.solve(torch.cos, torch.full((3,), 500.0), state="exact")
    with pytest.raises(FloatingPointError, match="f.* not finite"):
        revdeq.solve(lambda z: z / 0, torch.zeros(3), state="exact")


@pytest.mark.parametrize(
    ("beta", "first", "later"), [(0.5, 128, 128), (1.5, 100, 100), (0.5, 150, 0)], ids=["just", "the state", "y alone"]
)
def test_what_does_not_fit_is_noticed(beta, first, later):
    f = lambda z, evaluation: torch.full_like(z, later if evaluation else first)  # noqa: E731
    with pytest.raises(OverflowError, match=f"reached {first} and"):
        revdeq.solve(f, torch.zeros(3), state="exact", beta=beta, indexed=True)


@pytest.mark.parametrize("bits", [0, 41, 2.5, "24"])
def test_bad_fraction_bits(bits):
    with pytest.raises(ValueError, match="fraction_bits = .* must be an integer from 1 to 40"):
        revdeq.Exact(fraction_bits=bits)


@pytest.mark.parametrize("bits", [12, 32, 40])
def test_small_states_are_exact_with_more_fraction_bits(bits):
    """40 bits resolve 1e-12, and their magnitudes stay below 2^-9."""
    size = 2.0 ** (24 - bits)
    f, x = nn.Linear(6, 6), torch.randn(4, 6)
    report = revdeq.verify(
        lambda z, x: size * torch.tanh(f(z / size) + x), torch.zeros(4, 6), x, max_steps=20, state=revdeq.Exact(bits)
    )
    assert report.exact, str(report)
