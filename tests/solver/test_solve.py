"""The iteration: its two equations, its convergence, its tolerance."""

import pytest
import torch
from torch import nn

import revdeq
from revdeq.baselines import stored_graph

pytestmark = pytest.mark.usefixtures("on_device")


def test_two_steps_against_numbers_computed_by_hand():
    """f(z) = z + 1, beta = .5, from 0:
    y1 = .5 * 0 + .5 * 1 = .5,      z1 = .5 * 0 + .5 * 1.5 = .75
    y2 = .5 * .5 + .5 * 1.75 = 1.125,  z2 = .5 * .75 + .5 * 2.125 = 1.4375
    """
    one = revdeq.solve(lambda z: z + 1, torch.zeros(1), max_steps=1)
    two = revdeq.solve(lambda z: z + 1, torch.zeros(1), max_steps=2)
    assert (one.y.item(), one.z.item()) == (0.5, 0.75)
    assert (two.y.item(), two.z.item()) == (1.125, 1.4375)
    assert two.change.item() == (1.4375 - 0.75) / (1.4375 + 1e-5)


def affine(d=6, k=0.6):
    """f(z, x) = A z + x with ‖A‖ = k: the fixed point is (I - A)^-1 x."""
    torch.manual_seed(1)
    q, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))
    r, _ = torch.linalg.qr(torch.randn(d, d, dtype=torch.float64))
    matrix = k * q @ torch.diag(torch.linspace(0.1, 1, d, dtype=torch.float64)) @ r
    return matrix, torch.randn(d, dtype=torch.float64)


@pytest.mark.parametrize(("beta", "k"), [(0.3, 0.6), (0.5, 0.2), (0.8, 0.75), (1.1, 0.75)])
def test_convergence_is_at_least_as_fast_as_the_bound(beta, k):
    """‖y_n - q‖, ‖z_n - q‖ <= L^n ‖z_0 - q‖ with L = |1 - beta| + beta k (the paper's theorem)."""
    assert beta < 2 / (k + 1)
    matrix, x = affine(k=k)
    fixed_point = torch.linalg.solve(torch.eye(len(x), dtype=torch.float64) - matrix, x)
    bound = abs(1 - beta) + beta * k
    for steps in (1, 2, 3, 5, 10, 20):
        solution = revdeq.solve(lambda z: matrix @ z + x, torch.zeros_like(x), beta=beta, max_steps=steps)
        limit = bound**steps * fixed_point.norm() * (1 + 1e-6)  # beta is rounded to float32
        assert (solution.y - fixed_point).norm() <= limit
        assert (solution.z - fixed_point).norm() <= limit


def test_the_tolerance_stops_at_the_first_step_that_meets_it():
    matrix, x = affine()
    tol = 1e-4

    def residual(steps):
        return revdeq.solve(lambda z: matrix @ z + x, torch.zeros_like(x), max_steps=steps).change.item()

    solution = revdeq.solve(lambda z: matrix @ z + x, torch.zeros_like(x), max_steps=200, tol=tol)
    assert solution.change <= tol < residual(solution.steps - 1)
    assert solution.change.item() == residual(solution.steps)
    assert solution.nfe == 2 * solution.steps


def test_change_and_gap_are_over_all_tensors_of_a_state():
    matrix, x = affine()
    whole = revdeq.solve(lambda z: matrix @ z + x, torch.zeros_like(x), max_steps=3)

    def halves(z):
        top, bottom = (matrix @ torch.cat([z["top"], z["rest"][0]]) + x).split(3)
        return {"top": top, "rest": (bottom,)}

    nested = revdeq.solve(halves, {"top": torch.zeros_like(x[:3]), "rest": (torch.zeros_like(x[3:]),)}, max_steps=3)
    assert torch.equal(torch.cat([nested.z["top"], nested.z["rest"][0]]), whole.z)
    before = revdeq.solve(lambda z: matrix @ z + x, torch.zeros_like(x), max_steps=2).z
    expected = (whole.z - before).norm() / (whole.z.norm() + 1e-5)
    torch.testing.assert_close((nested.change, whole.change), (expected, expected), rtol=1e-12, atol=0)
    gap = (whole.y - whole.z).norm() / (whole.z.norm() + 1e-5)
    torch.testing.assert_close((nested.gap, whole.gap), (gap, gap), rtol=1e-12, atol=0)


def test_a_layer_starts_from_zero_or_from_z0():
    layer = revdeq.RevDEQ(lambda z, x: 0.5 * z + x, beta=0.5, max_steps=60)
    assert layer.last is None
    x = torch.ones(2, 3)
    torch.testing.assert_close(layer(x), torch.full((2, 3), 2.0))
    assert layer.last.steps == 60 and layer.last.nfe == 120 and not layer.last.change.requires_grad
    layer.max_steps = 1
    assert torch.equal(layer(x, z0=torch.full((2, 3), 2.0)), torch.full((2, 3), 2.0))
    assert layer.last.change == 0


def test_without_grad_the_bits_are_the_same_and_nothing_is_kept():
    f, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh()), torch.randn(5, 8)
    with_grad = revdeq.solve(f, x, beta=0.7, state="float64")
    with torch.no_grad():
        without = revdeq.solve(f, x, beta=0.7)
    with torch.inference_mode():
        inference = revdeq.solve(f, x, beta=0.7)
    assert with_grad.z.requires_grad and not without.z.requires_grad and without.z.grad_fn is None
    assert torch.equal(with_grad.z, without.z) and torch.equal(with_grad.y, without.y)
    assert torch.equal(with_grad.z, inference.z)
    assert with_grad.change == without.change


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_the_result_is_the_unrolled_iteration_bit_for_bit(dtype):
    torch.manual_seed(0)
    f = nn.Sequential(nn.Linear(8, 8), nn.Tanh()).to(dtype)
    z0 = torch.randn(5, 8, dtype=dtype)
    solution = revdeq.solve(f, z0, beta=0.8, max_steps=5)
    assert solution.z.dtype == dtype
    assert torch.equal(solution.z, stored_graph(f, z0, beta=0.8, max_steps=5))


@pytest.mark.cpu
def test_divergence_is_reported_after_the_last_step_or_with_a_tolerance_where_it_happens():
    def explode(z):
        return z * 1e30 + 1  # z_n is about 1e(60 n - 30), and its square overflows for n = 4

    with pytest.raises(FloatingPointError, match="after step 40 of at most 40"):
        revdeq.solve(explode, torch.zeros(4, dtype=torch.float64), max_steps=40)
    with pytest.raises(FloatingPointError, match="after step 4 of at most 40"):
        revdeq.solve(explode, torch.zeros(4, dtype=torch.float64), max_steps=40, tol=1e-3)
    with pytest.raises(FloatingPointError, match="after step 1 of at most 8"):
        revdeq.solve(lambda z: z / 0, torch.zeros(4), tol=1e-3)
