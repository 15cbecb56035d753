"""Which coefficients converge: theory and measurements, and the search for good ones."""

import io
import math

import pytest
import torch
import torch.nn.functional as F
from spectrum import best_coefficients, rate
from torch import nn

import revdeq
from revdeq._solver.tune import CLOSEST_TO_1, MOST_SOLVES
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


def measured_rate(eigenvalues, beta, gamma, steps=None):
    """Between two numbers of steps: by default, those that leave errors of 1e-5 and 1e-10."""
    last = math.ceil(math.log(1e-10) / (2 * math.log(rate(eigenvalues, beta, gamma)))) if steps is None else 0
    steps = steps or (last // 2, last)
    f, fixed_point = linear_map(eigenvalues)
    errors = []
    for n in steps:
        z = revdeq.solve(f, torch.zeros_like(fixed_point), beta=beta, gamma=gamma, max_steps=n, state="float64").z
        errors.append((z - fixed_point).norm().item())
    return (errors[1] / errors[0]) ** (1 / (2 * (steps[1] - steps[0])))


@pytest.mark.parametrize("ellipse", ELLIPSES)
def test_the_best_pair_has_the_rate_of_the_formula(ellipse):
    beta, gamma, expected = best_coefficients(*ellipse)
    eigenvalues = on_ellipse(*ellipse)
    assert rate(eigenvalues, beta, gamma) == pytest.approx(expected, rel=1e-6)
    if beta == 1:
        return
    last = math.ceil(math.log(1e-10) / (2 * math.log(expected)))
    measured = measured_rate(eigenvalues, beta, gamma, (last // 2, last))
    # at best, roots are double: the error falls like n rho^n, whose ratio here is larger by 2
    doubled = measured / 2 ** (1 / (2 * (last - last // 2)))
    assert 0.98 * doubled <= expected <= 1.02 * measured
    assert expected == pytest.approx(doubled, rel=0.02) or expected == pytest.approx(measured, rel=0.02)


@pytest.mark.parametrize("beta", [0.4, 0.8, 1.3])
@pytest.mark.parametrize("gamma", [0.5, 1.0, 1.2])
@pytest.mark.parametrize("ellipse", [(0.5, 0.3, 0.0), (0.6, 0.1, -0.3), (0.1, 0.7, 0.1)])
def test_the_measured_rate_is_the_largest_root(beta, gamma, ellipse):
    eigenvalues = on_ellipse(*ellipse, count=9)
    expected = rate(eigenvalues, beta, gamma)
    if 0.5 < expected < 0.99:
        assert measured_rate(eigenvalues, beta, gamma) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("beta", [0.3, 0.5, 0.8, 1.2, 1.7])
def test_the_iteration_converges_within_its_ellipse_and_not_beyond(beta):
    """Half-axes 1 and (2 - beta) / beta."""
    for scale, converges in ((0.97, True), (1.03, False)):
        eigenvalues = on_ellipse(scale, scale * (2 - beta) / beta, 0.0)
        assert (rate(eigenvalues, beta) < 1) == converges
    for angle in (0.1, 0.7, 1.4):
        edge = complex(math.cos(angle), (2 - beta) / beta * math.sin(angle))
        inside, outside = (torch.tensor([scale * edge], dtype=torch.complex128) for scale in (0.97, 1.03))
        assert measured_rate(inside, beta, 1.0, (60, 120)) < 1 < measured_rate(outside, beta, 1.0, (60, 120))


def test_where_plain_iteration_and_the_papers_diverge_the_tuned_pair_converges():
    eigenvalues = on_ellipse(0.5, 2.0, -1.0)
    assert eigenvalues.real.max() < 1 and eigenvalues.abs().max() > 2
    assert rate(eigenvalues, 0.5) > 1 and rate(eigenvalues, 0.8) > 1
    f, fixed_point = linear_map(eigenvalues)
    z = torch.zeros_like(fixed_point)
    for _ in range(40):
        z = f(z)
    assert (z - fixed_point).norm() > 1e6
    found = revdeq.tune(f, torch.zeros_like(fixed_point), max_steps=20)
    assert found.given.residual > 1 and found.residual < 1e-3
    z = revdeq.solve(f, torch.zeros_like(fixed_point), beta=found.beta, gamma=found.gamma, max_steps=100).z
    torch.testing.assert_close(z, fixed_point, rtol=1e-8, atol=1e-8)


def test_no_pair_converges_beyond_a_real_part_of_1():
    with pytest.raises(ValueError, match="c \\+ p = 1.1 must be below 1"):
        best_coefficients(1.1)


# the search


def blocks():
    return {
        "conv": (ConvBlock(16), torch.randn(2, 16, 8, 8)),
        "transformer": (TransformerBlock(32, heads=4), torch.randn(2, 12, 32)),
    }


@pytest.mark.parametrize("name", ["conv", "transformer"])
@pytest.mark.parametrize("given", [{}, {"beta": 0.8}, {"beta": 1.2, "gamma": 0.9}])
def test_tune_is_never_worse_than_the_given_pair(name, given):
    f, x = blocks()[name]
    calls = 0

    def counted(z, x):
        nonlocal calls
        calls += 1
        assert not torch.is_grad_enabled()
        return f(z, x)

    found = revdeq.tune(counted, torch.zeros_like(x), x, max_steps=6, **given)
    assert found.given[:2] == (given.get("beta", 0.5), given.get("gamma", 1.0))
    assert found.residual == min(t.residual for t in found.trials) <= found.given.residual
    assert len(found.trials) <= MOST_SOLVES and calls <= MOST_SOLVES * 13
    assert all(abs(1 - t.beta) >= CLOSEST_TO_1 and 0 < t.gamma < 2 for t in found.trials)
    z = revdeq.solve(f, torch.zeros_like(x), x, beta=found.beta, gamma=found.gamma, max_steps=6, state="float64").z
    assert ((f(z, x) - z).norm() / z.norm()).item() == pytest.approx(found.residual, rel=1e-4)
    again = revdeq.tune(f, torch.zeros_like(x), x, max_steps=6, **given)
    assert again.trials == found.trials, "it is deterministic"


@pytest.mark.parametrize("name", ["conv", "transformer"])
def test_tune_finds_a_better_pair_than_the_papers(name):
    """Better than both of the paper's betas, by a factor that does not depend on the seed."""
    f, x = blocks()[name]
    found = revdeq.tune(f, torch.zeros_like(x), x, max_steps=8)
    papers = [revdeq.tune(f, torch.zeros_like(x), x, max_steps=8, beta=beta).given.residual for beta in (0.5, 0.8)]
    assert found.residual < 0.5 * min(papers)


@pytest.mark.parametrize("name", ["conv", "transformer"])
def test_with_a_tolerance_tune_finds_the_fastest_pair(name):
    """With a limit of 100 steps, all pairs would be equally good in the end."""
    f, x = blocks()[name]

    def evaluations(residual, **pair):
        """Until the residual is below it: a slow iteration changes little, but has not converged."""
        residuals = []

        def recording(z, x):
            out = f(z, x)
            residuals.append((out - z).norm() / z.norm())
            return out

        revdeq.solve(recording, torch.zeros_like(x), x, max_steps=100, **pair)
        # every second evaluation reads z
        return next((2 * n for n, each in enumerate(residuals[::2]) if each < residual), math.inf)

    found = revdeq.tune(f, torch.zeros_like(x), x, max_steps=100, tol=1e-3)
    pairs = {"beta": found.beta, "gamma": found.gamma}, {"beta": 0.5}, {"beta": 0.8}
    with torch.no_grad():
        tuned, *papers = (evaluations(1e-2, **pair) for pair in pairs)
    assert tuned < 0.8 * min(papers)
    assert len({t.evaluations for t in found.trials}) > 1 and "at the tolerance" in str(found)
    deq = revdeq.RevDEQ(f, max_steps=100, tol=1e-3)
    deq.tune(x)
    assert (deq.beta, deq.gamma) == (found.beta, found.gamma)


def test_an_f_that_changes_its_input_in_place():
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    found = [
        revdeq.tune(lambda z, x, relu=relu: torch.tanh(linear(relu(z)) + x), torch.zeros_like(x), x)
        for relu in (F.relu_, F.relu)
    ]
    assert found[0].trials == found[1].trials


def test_tune_finds_a_large_gamma_if_all_eigenvalues_are_positive():
    """As trained convolutions have them. The search is at least as good as the formula, whose pair is the best for
    infinitely many steps."""
    eigenvalues = torch.linspace(0, 0.95, 32, dtype=torch.float64)
    z0, x = torch.zeros_like(eigenvalues), torch.ones_like(eigenvalues)
    beta, gamma, _ = best_coefficients(0.475, 0.0, 0.475)

    def tuned(**given):
        return revdeq.tune(lambda z, x: eigenvalues * z + x, z0, x, max_steps=16, **given)

    assert tuned().residual <= tuned(beta=beta, gamma=gamma).given.residual


def test_all_solves_see_one_draw_and_the_generator_is_left_alone():
    f, x = nn.Linear(8, 8), torch.randn(4, 8)
    before = torch.get_rng_state()

    def tuned():
        return revdeq.tune(lambda z, x: torch.tanh(f(F.dropout(z, 0.2)) + x), torch.zeros_like(x), x)

    assert tuned().trials == tuned().trials
    assert torch.equal(torch.get_rng_state(), before)


def test_nested_states_and_other_dtypes():
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    found = revdeq.tune(lambda z: (0.5 * z[1] + x, z[0].tanh()), (torch.zeros_like(x), torch.zeros_like(x)))
    assert found.residual < 0.1


def test_a_pair_that_diverges_is_tried_and_not_chosen():
    f, _ = linear_map(on_ellipse(0.4, 0.0, -1.6))
    found = revdeq.tune(f, torch.zeros(2, 64), max_steps=400)
    assert any(math.isinf(t.residual) for t in found.trials) and math.isfinite(found.residual)
    assert "diverges" in str(found)


def test_bad_input():
    with pytest.raises(ValueError, match=r"beta = 0.97 is within 1/16 of 1.*0.9 or 1.1"):
        revdeq.tune(torch.cos, torch.zeros(3), beta=0.97)
    with pytest.raises(FloatingPointError, match="the iteration diverges with all .* pairs"):
        revdeq.tune(lambda z: z / 0, torch.zeros(3))
    with pytest.raises(TypeError, match="unknown keyword max_step = 4: did you mean max_steps"):
        revdeq.tune(torch.cos, torch.zeros(3), max_step=4)


def test_a_table_and_a_plot(tmp_path):
    f, x = blocks()["conv"]
    found = revdeq.tune(f, torch.zeros_like(x), x)
    lines = str(found).splitlines()
    assert "after 16 evaluations" in lines[0] and lines[3].endswith("best")
    assert sum(line.endswith("given") for line in lines) == 1 and len(lines) == 3 + len(found.trials)
    pytest.importorskip("matplotlib")
    from readable import complaints

    assert not complaints(found.plot(tmp_path / "tune.png"))
    assert (tmp_path / "tune.png").stat().st_size > 5000


# layers


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


def test_a_tuned_layer_keeps_its_coefficients_when_it_is_saved_and_loaded():
    model, x = nn.Sequential(nn.Linear(8, 8), revdeq.RevDEQ(Block())), torch.randn(4, 8)
    untuned = model.state_dict()
    assert not untuned["1.coefficients"].any()
    found = model[1].tune(model[0](x))
    assert (model[1].beta, model[1].gamma) == (found.beta, found.gamma) != (0.5, 1.0)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = nn.Sequential(nn.Linear(8, 8), revdeq.RevDEQ(Block()))
    other.load_state_dict(torch.load(file, weights_only=True))
    assert (other[1].beta, other[1].gamma) == (found.beta, found.gamma)
    assert torch.equal(other(x), model(x))
    assert other.state_dict().keys() == model.state_dict().keys()
    other.load_state_dict(untuned)
    assert other[1].beta == found.beta, "a state in which nothing was found leaves them alone"
    del untuned["1.coefficients"]
    other.load_state_dict(untuned)
    assert other[1].beta == found.beta, "and so does one that was saved before they were part of it"
    near_one = revdeq.RevDEQ(Block(), beta=0.98)
    assert abs(1 - near_one.tune(x).beta) >= CLOSEST_TO_1


def test_tune_warns_if_no_pair_converges():
    with pytest.warns(
        revdeq.ConvergenceWarning, match=r"no pair converges: with the best of \d+, the residual is still 2"
    ):
        revdeq.tune(lambda z: 3 * z + 1, torch.zeros(4))
