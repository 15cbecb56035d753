"""The backward pass reports a wrong reconstruction."""

import warnings

import pytest
import torch
from torch import nn

import revdeq
from revdeq._solver import monitor
from revdeq.baselines import stored_graph
from revdeq.models import ConvBlock


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(monitor, "_already_warned", set())


def block():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def run(f, **settings):
    revdeq.solve(f, torch.randn(5, 8), state="float64", **settings).z.sum().backward()


def test_within_its_range_float64_is_silent():
    for beta, max_steps in ((0.5, 8), (0.8, 4), (0.75, 8), (1.2, 4)):
        run(block(), beta=beta, max_steps=max_steps, check="raise")


def test_beyond_its_range_it_warns_once_for_each_place_that_calls():
    f = block()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for beta in (0.9, 0.89, 0.88):  # with another text each time
            revdeq.solve(f, torch.randn(5, 8), beta=beta, max_steps=20, state="float64").z.sum().backward()
        layer = revdeq.RevDEQ(lambda z, x: f(z) + x, beta=0.9, max_steps=20, state="float64")
        layer(torch.randn(5, 8)).sum().backward()
    assert [w.category for w in caught] == [revdeq.ReconstructionWarning] * 2
    assert all(w.filename == __file__ for w in caught)
    assert caught[0].lineno != caught[1].lineno
    assert "beta = 0.9, N = 20 steps" in str(caught[0].message)
    assert "fewer steps or a beta further from 1" in str(caught[0].message)


def test_it_raises_or_keeps_silent_on_request():
    with pytest.raises(revdeq.ReconstructionError, match='state="exact"'):
        run(block(), beta=0.9, max_steps=20, check="raise")
    run(block(), beta=0.9, max_steps=20, check=None)
    with pytest.raises(ValueError, match="check = True"):
        revdeq.RevDEQ(block(), check=True)


def test_a_function_that_changes_between_the_passes_is_noticed():
    f = block()
    calls = 0

    def drifting(z):
        nonlocal calls
        calls += 1
        return f(z) + 1e-3 * calls

    with pytest.raises(revdeq.ReconstructionError, match="does not return the same"):
        run(drifting, check="raise")


def drifting_beside(large):
    """Eight features of magnitude 1, which f shifts by 1e-3 in the backward pass, and a ninth for `large`."""
    linear, calls = block(), 0

    def f(z):
        nonlocal calls
        calls += 1
        return torch.cat([linear(z[:, :8]) + 1e-3 * (calls > 4), large(z[:, 8:])], 1)

    return f


@pytest.mark.cpu
def test_one_large_feature_does_not_hide_an_error_elsewhere():
    """And its own rounding, relative to the others, is no error."""
    f, z0 = drifting_beside(lambda z: 0 * z + 1e3), torch.randn(5, 9)
    z = revdeq.solve(f, z0, max_steps=2, state="float64", check="raise").z
    with pytest.raises(revdeq.ReconstructionError):
        z.sum().backward()
    linear = block()
    z = revdeq.solve(
        lambda z: torch.cat([linear(z[:, :8]), 0 * z[:, 8:] + 1e6], 1), z0, max_steps=8, state="float64", check="raise"
    ).z
    z.sum().backward()


@pytest.mark.cpu
def test_one_large_tensor_does_not_hide_an_error_in_another():
    f = drifting_beside(lambda z: z)
    z0 = {"small": torch.randn(5, 8), "large": torch.full((3,), 1e3)}
    solution = revdeq.solve(
        lambda z: {"small": f(z["small"]), "large": 0.5 * z["large"] + 500}, z0,
        max_steps=2, state="float64", check="raise",
    )  # fmt: skip
    with pytest.raises(revdeq.ReconstructionError):
        solution.z["small"].sum().backward()


@pytest.mark.parametrize(
    ("values", "typical"),
    [([3.0], 3.0), ([0.0, 0.0], 1e-30), ([0.0, -2.0, 0.0, 1.0, 9.0], 2.0), ([], 1e-30), ([1e-40], 1e-30)],
)
def test_the_typical_magnitude_is_the_median_of_what_is_not_zero(values, typical):
    found = monitor.typical_magnitudes(torch.tensor(values), 2 * torch.tensor(values))
    assert found.shape == (2,) and found.dtype == torch.float32
    assert found[0].item() == pytest.approx(typical)
    assert found[1].item() == pytest.approx(typical if typical == 1e-30 else 2 * typical)


def test_the_typical_magnitude_meets_every_feature():
    """A sample of 1,024 elements: half of 64 features are large, at any position."""
    for shape in ((64, 3, 1000), (3000, 64), (64, 64, 64)):
        axis = shape.index(64)
        x = torch.ones(shape) * torch.tensor([1.0, 100.0] * 32).view(
            [-1 if i == axis else 1 for i in range(len(shape))]
        )
        assert monitor.typical_magnitudes(x).item() in (1.0, 100.0)
        x.narrow(axis, 0, 40).fill_(5.0)
        assert monitor.typical_magnitudes(x).item() == 5.0


@pytest.mark.parametrize("beta", [0.5, 0.75, 0.8, 0.9])
def test_a_silent_gradient_is_a_right_one(beta):
    """A gradient that passes the check is within 3e-5 of the stored graph's, at every depth."""
    torch.manual_seed(0)
    f, x = ConvBlock(16), torch.randn(2, 16, 8, 8)
    weight, silent = torch.randn_like(x), []
    for max_steps in (1, 2, 4, 8, 16, 32):
        z = revdeq.solve(f, torch.zeros_like(x), x, beta=beta, max_steps=max_steps, state="float64", check="raise").z
        try:
            ours = torch.autograd.grad(z, list(f.parameters()), weight)
        except revdeq.ReconstructionError:
            continue
        silent.append(max_steps)
        z = stored_graph(f, torch.zeros_like(x), x, beta=beta, max_steps=max_steps)
        for g, e in zip(ours, torch.autograd.grad(z, list(f.parameters()), weight), strict=True):
            assert (g - e).norm() <= 3e-5 * e.norm()
    assert {1, 2, 4} <= set(silent)
    assert 32 not in silent


def test_the_verdict_of_a_device_comes_with_a_later_solve(monkeypatch):
    monkeypatch.setattr("revdeq._device.can_look", lambda x: False)
    run(block(), beta=0.9, max_steps=20, check="raise")
    with pytest.raises(revdeq.ReconstructionError):
        revdeq.solve(torch.cos, torch.zeros(1))
    revdeq.solve(torch.cos, torch.zeros(1))


def test_an_empty_state_has_nothing_to_lose():
    z0 = torch.zeros(0, requires_grad=True)
    revdeq.solve(torch.cos, z0, check="raise").z.sum().backward()
    zero = torch.zeros(3, requires_grad=True)
    revdeq.solve(lambda z: 0 * z, zero, check="raise").z.sum().backward()


@pytest.mark.cpu
def test_an_iteration_that_diverges_is_named_as_the_cause():
    weight = torch.tensor(40.0, requires_grad=True)
    settings = {"beta": 0.8, "max_steps": 8, "state": "float64", "check": "raise"}
    z = revdeq.solve(lambda z: weight * z + 1, torch.randn(5, 8), **settings).z
    with pytest.raises(revdeq.ReconstructionError, match="The iteration does not converge: z has size"):
        z.sum().backward()


@pytest.mark.cpu
@pytest.mark.parametrize("parts", [lambda z: z, lambda z: (z, 1e6 * z)])
def test_states_too_small_for_the_exact_state_are_noticed(parts):
    """One tensor of the state is enough. An exact zero is not too small."""
    weight = torch.full((3,), 1e-6, requires_grad=True)

    def f(z):
        first = z[0] if isinstance(z, tuple) else z
        return parts(0.5 * first + weight)

    z0 = parts(torch.zeros(3))
    z = revdeq.solve(f, z0, state="exact", check="raise").z
    with pytest.raises(revdeq.ReconstructionError, match="exact state, 6e-08"):
        (z[0] if isinstance(z, tuple) else z).sum().backward()
    zero = torch.zeros(3, requires_grad=True)
    revdeq.solve(lambda z: 0.5 * z + zero, torch.zeros(3), state="exact", check="raise").z.sum().backward()
