"""revdeq.loop: z <- f(z), as close as an invertible iteration can be."""

import copy

import pytest
import torch
from torch import nn

import revdeq


class Block(nn.Module):
    """Its Jacobian is `factor` times a rotation, times the derivative of tanh."""

    def __init__(self, factor, width=8):
        super().__init__()
        self.weight = nn.Parameter(factor * nn.init.orthogonal_(torch.empty(width, width)))

    def forward(self, z, x):
        return torch.tanh(z @ self.weight.T + x)


def plainly(f, z, x, times):
    for _ in range(times):
        z = f(z, x)
    return z


def gradient(loss, f):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(f.parameters()))])


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_revdeq_loop_is_close_to_plain_looping(factor):
    """In each pass, 1/64 of the state two passes before replaces f. The error of a pass does not grow in later ones, so
    16 passes leave at most 16/64 of the size of a state, if all errors have the same direction."""
    torch.manual_seed(0)
    f, x, z0 = Block(factor), torch.randn(4, 8), torch.randn(4, 8)
    solution, expected = revdeq.loop(f, z0, x, times=16), plainly(f, z0, x, 16)
    assert (solution.z - expected).norm() < 16 / 64 * expected.norm()
    assert (solution.y - plainly(f, z0, x, 15)).norm() < 16 / 64 * expected.norm()
    ours, theirs = gradient(solution.z.square().sum(), f), gradient(expected.square().sum(), f)
    assert nn.functional.cosine_similarity(ours, theirs, 0) > 0.99  # .14 rad, and so within 16/64


def test_revdeq_loop_is_a_solve_with_beta_near_1():
    torch.manual_seed(0)
    f, x, z0 = Block(1.0), torch.randn(4, 8), torch.randn(4, 8)
    solution = revdeq.loop(f, z0, x, times=12)
    assert (solution.steps, solution.nfe, solution.beta, solution.state) == (6, 12, 63 / 64, "exact")
    assert torch.equal(solution.z, revdeq.solve(f, z0, x, beta=63 / 64, max_steps=6, state="exact").z)


def test_the_gradient_of_a_loop_is_exact_at_any_depth():
    """Compared with a stored graph of the same iteration in float64. The resolution of integers and float32 is 6e-8."""
    torch.manual_seed(0)
    f, x, z0 = Block(0.9), torch.randn(4, 8), torch.randn(4, 8)
    ours = gradient(revdeq.loop(f, z0, x, times=200, check="raise").z.sum(), f)
    fine = copy.deepcopy(f).double()
    z = revdeq.baselines.stored_graph(fine, z0.double(), x.double(), beta=63 / 64, max_steps=100)
    theirs = gradient(z.sum(), fine)
    # A contraction by .9 adds up roundings of 200 passes to at most 10 of them, of a few units of 6e-8 each.
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_a_loop_takes_the_options_of_a_solve():
    f, x, z0 = Block(0.5), torch.randn(4, 8), torch.randn(4, 8)

    def indexed(z, x, evaluation):
        return f(z, x), z.new_tensor(float(evaluation))

    assert revdeq.loop(indexed, z0, x, times=4, indexed=True, aux=True).aux == 0 + 1 + 2 + 3
    assert torch.equal(revdeq.loop(f, z0, times=4, kwargs={"x": x}).z, revdeq.loop(f, z0, x, times=4).z)


WRONG = [
    (7, ValueError, "times=8, in whose y"),
    (0, ValueError, "times=2"),
    (True, ValueError, "even"),
    (2.0, TypeError, "integer"),
]


def test_an_odd_number_of_loops_is_in_y():
    f, x, z0 = Block(0.5), torch.randn(4, 8), torch.randn(4, 8)
    *_, last = revdeq.steps(f, z0, x, beta=63 / 64, state="exact", max_steps=3)
    assert torch.equal(revdeq.loop(f, z0, x, times=6).y, last.y)


def test_without_gradients_a_loop_has_no_limit():
    with torch.no_grad():
        solution = revdeq.loop(lambda z: 1.1 * z, torch.full((2, 2), 50.0), times=64)
    assert solution.state == "float64" and solution.z.min() > 128
    f, x, z0 = Block(0.5), torch.randn(4, 8), torch.randn(4, 8)
    with torch.no_grad():
        z = revdeq.loop(f, z0, x, times=16).z
    torch.testing.assert_close(z, revdeq.loop(f, z0, x, times=16).z.detach(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("times", "error", "remedy"), WRONG)
def test_times_is_an_even_number(times, error, remedy):
    with pytest.raises(error, match=f"times = {times}.*{remedy}"):
        revdeq.loop(torch.tanh, torch.zeros(3), times=times)


def test_loop_takes_times_and_not_max_steps():
    with pytest.raises(TypeError, match="max_steps = 4.*times"):
        revdeq.loop(torch.tanh, torch.zeros(3), max_steps=4)


def test_steps_in_inference_mode():
    """There, tensors have no version counters."""
    f, x, z0 = Block(0.5), torch.randn(4, 8), torch.randn(4, 8)
    with torch.inference_mode():
        *_, last = revdeq.steps(f, z0, x, max_steps=5)
        assert torch.equal(last.z, revdeq.solve(f, z0, x, max_steps=5).z)
