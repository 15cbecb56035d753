"""Memory does not grow with depth."""

import pytest
import torch

import revdeq
from revdeq._device import peak_memory
from revdeq.baselines import checkpointed, stored_graph
from revdeq.models import ConvBlock

pytestmark = pytest.mark.usefixtures("on_device")


def solve(*args, **settings):
    """64 steps are beyond float64's range, and the backward pass would warn."""
    return revdeq.solve(*args, **settings, state="float64", check=None).z


def peak(solver, max_steps, grad=True):
    torch.manual_seed(0)
    f, x = ConvBlock(16, width=4), torch.randn(4, 16, 32, 32, requires_grad=True)

    def step():
        with torch.set_grad_enabled(grad):
            z = solver(f, torch.zeros_like(x), x, max_steps=max_steps)
            if grad:
                torch.autograd.grad(z, [x, *f.parameters()], torch.ones_like(x))

    step()  # one-time allocations
    return peak_memory(step, x.device)


@pytest.mark.parametrize("grad", [True, False])
def test_peak_memory_is_the_same_at_every_depth(grad):
    """With at least two steps, because the first and the last one allocate less."""
    assert peak(solve, 32, grad) <= 1.001 * peak(solve, 2, grad)


def test_the_measurement_sees_memory_that_grows():
    assert peak(stored_graph, 16) > 4 * peak(stored_graph, 2)
    assert peak(checkpointed, 32) > 4 * peak(checkpointed, 2)


def test_without_grad_no_graph_of_f_is_built():
    assert peak(solve, 4, grad=False) < 0.7 * peak(solve, 4)
