"""The second coefficient: y' = a y + b f(z) + c z, forward and backward, in both states."""

import pytest
import torch
from torch import nn

import revdeq
from revdeq.kernels import Coefficients, Radix

COEFFICIENTS = pytest.mark.parametrize(("beta", "gamma"), [(0.5, 1.0), (0.5, 0.6), (0.8, 1.3), (1.2, 0.5), (0.75, 1.9)])


def unrolled(f, z0, step, max_steps):
    """y and z by plain autograd."""
    y = z = z0
    for _ in range(max_steps):
        y = step.a * y + step.b * f(z) + step.c * z
        z = step.a * z + step.b * f(y) + step.c * y
    return y, z


def problem(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(6, 6).to(dtype)
    x, z0 = (torch.randn(4, 6, dtype=dtype, requires_grad=True) for _ in range(2))
    return (lambda z: 0.8 * torch.tanh(linear(z)) + x), x, z0, list(linear.parameters())


@COEFFICIENTS
@pytest.mark.parametrize("state", ["float64", "exact"])
def test_the_gradient_is_that_of_the_unrolled_iteration(state, beta, gamma):
    """For z0, captured tensors and parameters, from y and from z. The exact state has a resolution of 6e-8."""
    f, x, z0, parameters = problem(torch.float64)
    step = Coefficients.rounded(beta, gamma) if state == "float64" else Radix.nearest(beta, 24, gamma)
    solution = revdeq.solve(f, z0, beta=beta, gamma=gamma, max_steps=5, state=state, check="raise")
    expected = unrolled(f, z0, step, 5)
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if state == "float64" else {"rtol": 1e-5, "atol": 2e-6}
    torch.testing.assert_close((solution.y, solution.z), expected, **tolerance)
    assert solution.beta == step.beta and solution.gamma == step.gamma
    seeds = [torch.randn_like(z0) for _ in range(2)]
    for outputs, wanted, seed in (
        ([solution.y], [expected[0]], seeds[:1]),
        ([solution.z], [expected[1]], seeds[1:]),
        ([solution.y, solution.z], expected, seeds),
    ):
        ours = torch.autograd.grad(outputs, [z0, x, *parameters], seed, retain_graph=True)
        theirs = torch.autograd.grad(wanted, [z0, x, *parameters], seed, retain_graph=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, **tolerance)


@COEFFICIENTS
def test_gradcheck(beta, gamma):
    f, _, z0, _ = problem(torch.float64)

    def both(z0):
        solution = revdeq.solve(f, z0, beta=beta, gamma=gamma, max_steps=3, state="float64")
        return solution.y, solution.z

    torch.autograd.gradcheck(both, z0)


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_both_passes_compute_the_same(state):
    """The inputs and outputs of f are equal bit for bit, also with a state of several tensors."""
    torch.manual_seed(0)
    linear = nn.Linear(6, 6)

    def f(z):
        return {"a": torch.tanh(linear(z["a"])), "b": torch.cos(z["b"]) + z["a"].sum()}

    z0 = {"a": torch.zeros(4, 6), "b": torch.randn(3, 5).t()}
    report = revdeq.verify(f, z0, beta=0.5, gamma=0.8, max_steps=6, state=state)
    assert report.exact, str(report)


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_every_backend_gives_the_same_bits(backend, state):
    f, x, z0, parameters = problem(torch.float32)

    def run(name):
        with revdeq.kernels.backend(name):
            z = revdeq.solve(f, z0, beta=0.8, gamma=1.3, max_steps=3, state=state).z
            return [z, *torch.autograd.grad(z.sum(), [z0, x, *parameters])]

    assert all(map(torch.equal, run(backend), run("reference")))


def test_gamma_1_is_the_iteration_without_gamma():
    f, x, z0, parameters = problem(torch.float32)
    results = []
    for settings in ({}, {"gamma": 1.0}, {"gamma": 1}):
        z = revdeq.solve(f, z0, beta=0.8, max_steps=4, **settings).z
        results.append([z, *torch.autograd.grad(z.sum(), [z0, x, *parameters])])
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))
