"""Which coefficients converge: theory and measurements, and the search for good ones."""

import math

import pytest
import torch
from spectrum import best_coefficients, rate
from torch import nn

import revdeq
from revdeq.models import ConvBlock, TransformerBlock

ELLIPSES = [(0.9, 0.0, 0.0), (0.5, 1.5, 0.0), (0.9, 0.3, 0.0), (0.6, 0.6, -0.3), (0.5, 2.0, -1.0)]
"""Half-axes p (real) and q (imaginary), and centre c, of eigenvalues."""


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def on_ellipse(p, q, c, count=64):
    angle = torch.linspace(0, 2 * math.pi, count, dtype=torch.float64)
    return torch.complex(c + p * angle.cos(), q * angle.sin())


def linear_map(eigenvalues):
    """z -> A z + x, where A has these eigenvalues and their conjugates, in blocks of two."""
    a, b = eigenvalues.real, eigenvalues.imag

    def f(z):
        real, imaginary = z
        return torch.stack([a * real - b * imaginary, b * real + a * imaginary]) + 1

    fixed_point = 1 / (1 - torch.complex(a, b)) * (1 + 1j)
    return f, torch.stack([fixed_point.real, fixed_point.imag])


@pytest.mark.parametrize("ellipse", ELLIPSES)
def test_the_best_pair_has_the_rate_of_the_formula(ellipse):
    """No pair beside it has a smaller one."""
    beta, gamma, expected = best_coefficients(*ellipse)
    eigenvalues = on_ellipse(*ellipse)
    assert rate(eigenvalues, beta, gamma) == pytest.approx(expected, rel=1e-6)
    for more, larger in ((0.02, 0), (-0.02, 0), (0, 0.02), (0, -0.02)):
        assert rate(eigenvalues, beta + more, gamma + larger) >= expected - 1e-9


CASES = [
    (0.4, 0.5, (0.5, 0.3, 0.0)),
    (0.8, 1.0, (0.6, 0.1, -0.3)),
    (0.8, 1.2, (0.1, 0.7, 0.1)),
    (1.3, 1.0, (0.6, 0.1, -0.3)),
]


@pytest.mark.parametrize(("beta", "gamma", "ellipse"), CASES)
def test_the_measured_rate_is_the_largest_root(beta, gamma, ellipse):
    """Between the numbers of steps that leave errors of 1e-5 and 1e-10."""
    eigenvalues = on_ellipse(*ellipse, count=9)
    expected = rate(eigenvalues, beta, gamma)
    last = math.ceil(math.log(1e-10) / (2 * math.log(expected)))
    f, fixed_point = linear_map(eigenvalues)
    errors = []
    for n in (last // 2, last):
        z = revdeq.solve(f, torch.zeros_like(fixed_point), beta=beta, gamma=gamma, max_steps=n).z
        errors.append((z - fixed_point).norm().item())
    assert (errors[1] / errors[0]) ** (1 / (2 * (last - last // 2))) == pytest.approx(expected, rel=0.02)


def test_where_plain_iteration_and_the_papers_diverge_the_tuned_pair_converges():
    eigenvalues = on_ellipse(0.5, 2.0, -1.0)
    assert eigenvalues.real.max() < 1 and eigenvalues.abs().max() > 2
    assert rate(eigenvalues, 0.5) > 1 and rate(eigenvalues, 0.8) > 1
    f, fixed_point = linear_map(eigenvalues)
    found = revdeq.tune(f, torch.zeros_like(fixed_point), max_steps=20)
    assert found.given.residual > 1 and found.residual < 1e-3
    z = revdeq.solve(f, torch.zeros_like(fixed_point), beta=found.beta, gamma=found.gamma, max_steps=100).z
    torch.testing.assert_close(z, fixed_point, rtol=1e-8, atol=1e-8)


# the search


def blocks():
    return {
        "conv": (ConvBlock(16), torch.randn(2, 16, 8, 8)),
        "transformer": (TransformerBlock(32, heads=4), torch.randn(2, 12, 32)),
    }


def test_nested_states_and_other_dtypes():
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    found = revdeq.tune(lambda z: (0.5 * z[1] + x, z[0].tanh()), (torch.zeros_like(x), torch.zeros_like(x)))
    assert found.residual < 0.1


@pytest.mark.parametrize(("name", "given"), [("conv", {}), ("transformer", {"beta": 1.2, "gamma": 0.9})])
def test_tune_is_never_worse_than_the_given_pair_and_is_deterministic(name, given):
    """On every second example, which was held out."""
    f, x = blocks()[name]
    found = revdeq.tune(f, torch.zeros_like(x), x, max_steps=6, **given)
    held = x[1::2]
    z = revdeq.solve(f, torch.zeros_like(held), held, max_steps=6, **given).z
    residual = ((f(z, held) - z).norm() / z.norm()).item()
    assert found.given[:3] == (given.get("beta", 0.5), given.get("gamma", 1.0), pytest.approx(residual, rel=1e-3))
    assert found.residual <= found.given.residual and len(found.trials) <= 24
    assert all(abs(1 - t.beta) >= 1 / 16 and 0 < t.gamma < 2 for t in found.trials)
    again = revdeq.tune(f, torch.zeros_like(x), x, max_steps=6, **given)
    assert again.trials == found.trials and str(again) == str(found)


def test_all_solves_of_tune_see_the_same_random_numbers():
    """Nothing of one example is held out, so that the given pair is tried twice."""
    f, x = nn.Sequential(nn.Linear(64, 64), nn.Dropout(), nn.Tanh()), torch.randn(1, 64)
    before = torch.get_rng_state()
    found = revdeq.tune(lambda z, x: f(z) + x, torch.zeros_like(x), x, max_steps=4)
    assert found.given in found.trials and torch.equal(torch.get_rng_state(), before)


WORKS = [("conv", {"max_steps": 8}), ("transformer", {"max_steps": 24}), ("conv", {"max_steps": 100, "tol": 1e-3})]


@pytest.mark.parametrize(("name", "settings"), WORKS)
def test_what_tune_returns_works(name, settings):
    """Its state inverts its pair: a solve of the whole batch passes its check, and tune says why it chose it."""
    f, x = blocks()[name]
    found = revdeq.tune(f, torch.zeros_like(x), x, **settings)
    assert found.state == "float64" or isinstance(found.state, revdeq.Exact)
    pair = {"beta": found.beta, "gamma": found.gamma, "state": found.state, "check": "raise"}
    revdeq.solve(f, torch.zeros_like(x), x, **settings, **pair).z.sum().backward()
    assert f"state = {found.state!r}" in str(found) and found.why


def test_tune_chooses_more_fraction_bits_for_smaller_states():
    f = nn.Linear(8, 8)
    f.weight.data *= 0.5
    bits = []
    for size in (1e-3, 1.0, 100.0):
        step = lambda z, x: size * torch.tanh(f(z / size) + x)  # noqa: B023, E731
        found = revdeq.tune(step, torch.zeros(6, 8), torch.randn(6, 8), max_steps=80)
        bits.append(found.state.fraction_bits)
    assert bits[0] > 30 > bits[1] > bits[2]


def test_a_float64_z0_stays_among_pairs_that_float64_inverts():
    f, x = nn.Linear(8, 8).double(), torch.randn(6, 8, dtype=torch.float64)
    found = revdeq.tune(lambda z, x: torch.tanh(f(z) + x), torch.zeros_like(x), x, max_steps=20)
    assert found.state == "float64"


@pytest.mark.parametrize("f", [lambda z: z / 0, lambda z: z / (1 // 0)], ids=["diverges", "raises"])
def test_tune_says_why_it_found_nothing(f):
    with pytest.raises((FloatingPointError, ZeroDivisionError), match="the iteration diverges with all|division"):
        revdeq.tune(f, torch.ones(3))


def test_a_layer_takes_what_tune_finds_or_stays_as_it_was():
    f = nn.Linear(8, 8)
    deq, x = revdeq.RevDEQ(lambda z, x: torch.tanh(f(z) + x), max_steps=6), torch.randn(6, 8)
    found = deq.tune(x, batches=[(torch.randn(6, 8),)])
    assert (deq.beta, deq.gamma, deq.state) == (found.beta, found.gamma, found.state) != (0.5, 1.0, "float64")
    before = deq.options
    deq.f = lambda z, x: z / 0
    with pytest.raises(FloatingPointError):
        deq.tune(x)
    assert deq.options == before


@pytest.mark.parametrize("pair", [(0.75, 1.25), (0.0, 0.0)], ids=["tuned", "not tuned"])
def test_a_layer_that_was_saved_by_0_3_loads(pair):
    layer = revdeq.RevDEQ(nn.Linear(2, 2), state="exact")
    saved = {"coefficients": torch.tensor([pair]), **layer.f.state_dict(prefix="f.")}
    layer.load_state_dict(saved)
    assert (layer.beta, layer.gamma, layer.state) == (*(pair if pair[0] else (0.5, 1.0)), "exact")
    with pytest.raises(ValueError, match="saved with a schedule"):
        layer.load_state_dict({**saved, "coefficients": torch.ones(5, 2)})


def test_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    f, x = blocks()["conv"]
    revdeq.tune(f, torch.zeros_like(x), x, max_steps=2).plot().savefig(tmp_path / "tune.png")
    assert (tmp_path / "tune.png").stat().st_size > 5000
