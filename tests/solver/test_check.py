"""A wrong reconstruction, a gradient that explodes and an iteration that does not converge are reported; and
`revdeq.verify` finds where and why."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import revdeq
from revdeq._solver.check import typical_magnitude
from revdeq.baselines import stored_graph
from revdeq.models import ConvBlock, TransformerBlock

pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr("revdeq._solver.check._already_warned", set())
    torch.manual_seed(0)


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def run(f, z0=None, **settings):
    revdeq.solve(f, torch.randn(5, 8) if z0 is None else z0, **settings).z.sum().backward()


@pytest.mark.parametrize(("beta", "max_steps"), [(0.5, 8), (0.8, 4), (0.75, 8), (1.2, 4)])
def test_within_its_range_float64_is_silent(beta, max_steps):
    """The rounding of a large feature is no error, either."""
    linear = block()
    run(linear, beta=beta, max_steps=max_steps, check="raise")
    wide = torch.randn(5, 9)
    run(lambda z: torch.cat([linear(z[:, :8]), 0 * z[:, 8:] + 1e6], 1), wide, check="raise")


@pytest.mark.cpu
def test_beyond_its_range_it_warns_once_for_each_place_that_calls():
    f = block()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for beta in (0.9, 0.89, 0.88):  # with another text each time
            revdeq.solve(f, torch.randn(5, 8), beta=beta, max_steps=20).z.sum().backward()
        layer = revdeq.RevDEQ(lambda z, x: f(z) + x, beta=0.9, max_steps=20)
        layer(torch.randn(5, 8)).sum().backward()
    assert [w.category for w in caught] == [revdeq.ReconstructionWarning] * 2
    assert all(w.filename == __file__ for w in caught)
    assert caught[0].lineno != caught[1].lineno
    assert "beta = 0.9, N = 20 steps" in str(caught[0].message)
    assert "fewer steps or a beta further from 1" in str(caught[0].message)


@pytest.mark.cpu
def test_it_raises_or_keeps_silent_on_request():
    with pytest.raises(revdeq.ReconstructionError, match='state="exact"'):
        run(block(), beta=0.9, max_steps=20, check="raise")
    run(block(), beta=0.9, max_steps=20, check=None)
    run(block(), beta=0.9, max_steps=20, check="raise", state="exact")


def drifting(large, count, after=4, shift=1e-3):
    """Eight features of magnitude 1, which f shifts after a number of calls, and more for `large`."""
    linear, calls = block(), []

    def f(z):
        calls.append(1)
        return torch.cat([linear(z[:, :8]) + (shift if len(calls) > after else 0), large(z[:, 8:])], 1)

    return f, torch.randn(5, 8 + count)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("state", "cause", "drift"),
    [
        ("exact", "The exact state loses nothing: f does not return the same", (torch.clone, 0)),
        ("float64", "f does not return the same", (lambda z: 0 * z + 1e3, 1)),
        ("float64", "f does not return the same", (torch.clone, 0, 7)),
        ("float64", "f does not return the same", (torch.clone, 0, 4, math.nan)),
    ],
    ids=["alone", "large", "only where y0 is reconstructed", "NaN"],
)
def test_a_function_that_drifts_is_noticed(state, cause, drift):
    """One large feature does not hide an error elsewhere."""
    f, z0 = drifting(*drift)
    z = revdeq.solve(f, z0, max_steps=2, check="raise", state=state).z
    with pytest.raises(revdeq.ReconstructionError, match=cause):
        z.sum().backward()


def test_a_sample_of_magnitudes_sees_all_features():
    x = torch.ones(72, 8)
    x[:, 0] = 1e6
    assert 1 < typical_magnitude(x) < 1e3


@pytest.mark.cpu
def test_one_large_tensor_does_not_hide_an_error_in_another():
    f, small = drifting(torch.clone, 0)
    z0 = {"small": small, "large": torch.full((3,), 1e3)}
    step = lambda z: {"small": f(z["small"]), "large": 0.5 * z["large"] + 500}  # noqa: E731
    solution = revdeq.solve(step, z0, max_steps=2, check="raise")
    with pytest.raises(revdeq.ReconstructionError):
        solution.z["small"].sum().backward()


@pytest.mark.parametrize("beta", [0.5, 0.75, 0.8, 0.9])
@pytest.mark.cpu
def test_a_silent_gradient_is_a_right_one(beta):
    """A gradient that passes the check is within 3e-5 of the stored graph's, at every depth."""
    f, x = ConvBlock(16), torch.randn(2, 16, 8, 8)
    weight, silent = torch.randn_like(x), []
    for max_steps in (1, 2, 4, 8, 16, 32):
        z = revdeq.solve(f, torch.zeros_like(x), x, beta=beta, max_steps=max_steps, check="raise").z
        try:
            ours = torch.autograd.grad(z, list(f.parameters()), weight)
        except revdeq.ReconstructionError:
            continue
        silent.append(max_steps)
        z = stored_graph(f, torch.zeros_like(x), x, beta=beta, max_steps=max_steps)
        for g, e in zip(ours, torch.autograd.grad(z, list(f.parameters()), weight), strict=True):
            assert (g - e).norm() <= 3e-5 * e.norm()
    assert {1, 2, 4} <= set(silent) and 32 not in silent


@pytest.mark.parametrize("z0", [torch.zeros(0), torch.zeros(3)])
def test_what_is_empty_or_zero_raises_no_alarm(z0):
    zero = torch.zeros_like(z0, requires_grad=True)
    revdeq.solve(lambda z: 0.5 * z + zero, z0, check="raise").z.sum().backward()
    revdeq.solve(lambda z: 0.5 * z + zero, z0, check="raise", state="exact").y.sum().backward()


def expanding(z):
    weight = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    return F.layer_norm(z + torch.sin(30 * z @ weight), (6,))


@pytest.mark.cpu
def test_a_gradient_that_explodes_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            z0 = torch.randn(3, 6, requires_grad=True)
            solution = revdeq.solve(expanding, z0, beta=0.8, max_steps=4)
            solution.z[:, 0].sum().backward()
    (warning,) = caught
    assert warning.category is revdeq.ConvergenceWarning
    assert "grew" in str(warning.message) and "gamma" in str(warning.message)
    assert solution.adjoint.growth > 1000


def test_the_growth_of_the_adjoint_is_that_of_a_linear_map():
    """f(z) = 2 z and beta = .5: y' = .5 y + z, z' = .5 z + y'."""
    solution = revdeq.solve(lambda z: 2 * z, torch.ones(3, requires_grad=True), max_steps=2)
    assert solution.adjoint.growth is None
    solution.z.sum().backward()
    y1 = torch.ones(3, dtype=torch.float64, requires_grad=True)
    z1 = 0.5 + y1
    y2 = 0.5 * y1 + z1
    by_y, by_z = torch.autograd.grad((0.5 * z1 + y2).sum(), [y1, z1])
    expected = torch.hypot(by_y.norm(), by_z.norm()) / 3**0.5
    torch.testing.assert_close(solution.adjoint.growth.double(), expected, rtol=1e-6, atol=0)


@pytest.mark.cpu
def test_converging_to_two_points_is_noticed():
    f, z0 = lambda z: 9 - torch.tanh(2 * (z - 9)), torch.full((3,), 9.1)
    with pytest.raises(revdeq.ConvergenceError, match=r"two different points.*gamma"):
        revdeq.solve(f, z0, tol=1e-6, max_steps=500, check="raise")
    with torch.no_grad():
        solution = revdeq.solve(f, z0, tol=1e-6, max_steps=500, check=None)
    assert solution.converged and 0.1 < solution.gap < 0.5
    assert revdeq.solve(torch.cos, z0, tol=1e-6, max_steps=500, check="raise").gap < 1e-5


# verify


def test_verify_confirms_the_block_of_the_paper():
    f, x = TransformerBlock(16, 2), torch.randn(2, 16, 16)
    report = revdeq.verify(f, torch.zeros_like(x), x, beta=0.5, max_steps=8)
    assert report.exact
    assert str(report).startswith("exact: the backward pass gave f the same 16 inputs")


@pytest.mark.cpu
def test_verify_reports_rounding_and_where_it_began():
    f, x = ConvBlock(16), torch.randn(2, 16, 8, 8)
    report = revdeq.verify(f, torch.zeros_like(x), x, beta=0.9, max_steps=12)
    assert not report.exact and not report.changed_output
    first = max(report.changed_input)
    assert f"the float64 state did not reconstruct the input of evaluation {first} " in str(report)
    assert "beta = 0.9, 12 steps" in str(report)


@pytest.mark.cpu
@pytest.mark.parametrize("change", [lambda z, k: z + 1e-6 * k, lambda z, k: z.roll(k, 1)], ids=["numbers", "places"])
def test_verify_reports_a_nondeterministic_function(change):
    linear, calls = nn.Linear(50, 50), []

    def f(z):
        calls.append(1)
        return change(torch.tanh(linear(z)), len(calls))

    report = revdeq.verify(f, torch.randn(4, 50), max_steps=4)
    assert report.changed_output[0] == 8
    assert str(report).startswith("your f is not deterministic: evaluation 8 differs when it is repeated")


def test_verify_takes_the_arguments_of_solve():
    def f(z, x, evaluation):
        return {"a": 0.5 * F.dropout(z["a"]) + x + evaluation, "b": [0.5 * z["b"][0]]}, z["a"].sum()

    z0 = {"a": torch.zeros(3), "b": [torch.zeros((), dtype=torch.bfloat16)]}
    with torch.no_grad():
        report = revdeq.verify(f, z0, torch.ones(3, requires_grad=True), indexed=True, aux=True, tol=0.3, max_steps=20)
    assert report.exact and 2 < report.evaluations <= 40
    with pytest.raises(ValueError, match="gradient = 'implicit'.*gradient='exact'"):
        revdeq.verify(torch.cos, torch.zeros(3), gradient="implicit")
    with pytest.raises(TypeError, match="f = None must be callable"):
        revdeq.verify(None, torch.ones(3))
