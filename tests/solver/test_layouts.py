"""The state takes the memory layout of f's output, so that the output is not copied."""

import pytest
import torch
from plain import agree, reference
from torch import nn
from torch.utils._pytree import tree_leaves

import revdeq
from revdeq.kernels import half_step

EACH = pytest.mark.parametrize(("state", "gamma"), [("float64", 1.0), ("float64", 0.7), ("exact", 0.7)])
CHANNELS_LAST = torch.channels_last


@pytest.fixture(params=["cpu", "fakegpu"])
def device(request):
    torch.manual_seed(0)
    if request.param == "cpu":
        yield "cpu"
        return
    import fake_gpu

    with fake_gpu.emulated():
        yield fake_gpu.DEVICE


@pytest.fixture
def copies(monkeypatch):
    """The strides of outputs of f, and of its vector-Jacobian products, that had to be copied."""
    seen, in_order = [], half_step.HalfStep.in_order

    def counted(self, x):
        result = in_order(self, x)
        if result is not x:
            seen.append(tuple(x.stride()))
        return result

    monkeypatch.setattr(half_step.HalfStep, "in_order", counted)
    return seen


class Conv(nn.Module):
    """Always returns one layout, and computes something else if its input has another one: so may a convolution, at
    least in the last bits."""

    def __init__(self, device, differs=True):
        super().__init__()
        self.layer, self.differs = nn.Conv2d(4, 4, 3, padding=1).to(device), differs

    def forward(self, z, x):
        bias = 0.2 if self.differs and not z.is_contiguous() else 0.1
        return torch.tanh(0.5 * self.layer(z) + bias + x).contiguous(memory_format=CHANNELS_LAST)


def image(device):
    return torch.randn(2, 4, 5, 3).to(device).requires_grad_()


def solved(f, z0, x, of, **settings):
    """The solution and gradients."""
    solution = revdeq.solve(f, z0, x, **{"beta": 0.8, "max_steps": 6, "check": "raise", **settings})
    loss = sum(z.square().sum() for z in tree_leaves(solution.z))
    return solution, [g.cpu() for g in torch.autograd.grad(loss, [x, *of])]


@EACH
def test_a_channels_last_f_with_a_contiguous_z0_copies_only_in_its_first_call(device, copies, state, gamma):
    f, z0, x, seen = Conv(device), image(device), image(device), []

    def watched(z, x):
        seen.append(z.is_contiguous(memory_format=CHANNELS_LAST))
        return f(z, x)

    solution = revdeq.solve(watched, z0, x, beta=0.8, gamma=gamma, max_steps=6, state=state, check="raise")
    assert seen == [False] + 11 * [True] and len(copies) == (gamma != 1)
    assert all(t.is_contiguous(memory_format=CHANNELS_LAST) for t in (solution.z, solution.y))
    seen.clear()
    solution.z.square().sum().backward()
    assert seen == 11 * [True] + [False] and z0.grad.shape == z0.shape
    assert len(copies) <= 6, copies  # the initial state, which y and z are compared with, and its product


@EACH
def test_the_backward_pass_uses_the_layouts_of_the_forward_pass(device, state, gamma):
    """If f returned other bits in any evaluation, the reconstruction would be wrong."""
    f, z0, x = Conv(device), torch.zeros(2, 4, 5, 3, device=device), image(device)
    settings = {"state": state, "gamma": gamma}
    solution, ours = solved(f, z0, x, f.parameters(), **settings)
    with torch.no_grad():
        assert torch.equal(solution.z, revdeq.solve(f, z0, x, beta=0.8, max_steps=6, **settings).z)
    _, kept = solved(f, z0, x, f.parameters(), keep=11, **settings)
    assert all(map(torch.equal, ours, kept))


@EACH
def test_gradients_are_those_of_the_stored_graph(device, state, gamma):
    f, z0, x = Conv(device, differs=False), image(device), image(device)
    _, ours = solved(f, z0, x, [z0, *f.parameters()], state=state, gamma=gamma)
    f, z0, x = f.to("cpu"), *(t.detach().cpu().requires_grad_() for t in (z0, x))
    z = reference(f, z0, x, beta=0.8, gamma=gamma, max_steps=6).z
    agree(ours, torch.autograd.grad(z.square().sum(), [x, z0, *f.parameters()]), tolerance=1e-5)


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_each_tensor_of_a_state_has_its_own_layout(device, copies, state):
    f, x = Conv(device), image(device)
    zeros = {name: torch.zeros(2, 4, 5, 3, device=device) for name in ("image", "plain")}
    zeros["vector"] = torch.zeros(3, 4, device=device)

    def g(z, x):
        of_image = f(z["image"], x)
        plain = (0.3 * z["plain"].contiguous() + 0.1 * of_image).contiguous()
        return {"image": of_image, "plain": plain, "vector": 0.5 * torch.tanh(z["vector"].t()).contiguous().t()}

    z = solved(g, zeros, x, f.parameters(), state=state)[0].z
    assert z["image"].is_contiguous(memory_format=CHANNELS_LAST)
    assert z["plain"].is_contiguous() and z["vector"].t().is_contiguous()
    assert len(copies) <= 2 * 3, copies  # of the two tensors that start in another layout


def test_strides_of_dimensions_of_size_1_are_ignored(device, copies):
    f, x = Conv(device), torch.randn(8, 4, 1, 1).to(device).requires_grad_()

    def elsewhere(z, x):
        return f(z, x).as_strided((8, 4, 1, 1), (4, 1, 7, 9))  # the same places

    solved(elsewhere, torch.zeros(8, 4, 1, 1, device=device), x, f.parameters())
    assert not copies


def test_dropout_has_one_mask_though_f_returns_another_layout_than_that_of_z0(device):
    """It is drawn in the order of the memory: the state keeps the layout of z0."""
    f = lambda z: nn.functional.dropout(0 * z + 1).contiguous(memory_format=CHANNELS_LAST)  # noqa: E731
    solution = revdeq.solve(f, torch.zeros(2, 3, 4, 4, device=device), max_steps=3)
    assert len(solution.z.unique()) == len(solution.y.unique()) == 2
