"""The state takes the memory layout of f's output, so that the output is not copied."""

import pytest
import torch
from torch import nn

import revdeq
from revdeq.baselines import stored_graph
from revdeq.kernels import half_step

STATES = ("float64", "exact")
CHANNELS_LAST = torch.channels_last


@pytest.fixture(params=["cpu", "fakegpu"])
def device(request):
    if request.param == "cpu":
        yield "cpu"
        return
    import fake_gpu

    with fake_gpu.emulated():
        yield fake_gpu.DEVICE


@pytest.fixture
def copies(monkeypatch):
    """The names of the operations that had to copy the output of f or of its vector-Jacobian product."""
    seen, in_order = [], half_step.HalfStep.in_order

    def counted(self, x):
        result = in_order(self, x)
        if result is not x:
            seen.append(tuple(x.stride()))
        return result

    monkeypatch.setattr(half_step.HalfStep, "in_order", counted)
    return seen


def conv(device, memory_format=CHANNELS_LAST, channels=4):
    """An f that always returns one layout, and computes something else if its input has another one: so may a
    convolution, at least in the last bits."""
    torch.manual_seed(0)
    layer = nn.Conv2d(channels, channels, 3, padding=1).to(device)

    def f(z, x):
        bias = 0.1 if z.is_contiguous() else 0.2
        return torch.tanh(0.5 * layer(z) + bias + x).contiguous(memory_format=memory_format)

    return f, list(layer.parameters())


def gradients(f, z0, x, parameters, **settings):
    solution = revdeq.solve(f, z0, x, beta=0.8, max_steps=6, check="raise", **settings)
    leaves = torch.utils._pytree.tree_leaves(solution.z)
    sum(z.square().sum() for z in leaves).backward()
    found = [p.grad for p in (*parameters, x)]
    for p in (*parameters, x):
        p.grad = None
    return solution, [g.cpu() for g in found]


@pytest.mark.parametrize("state", STATES)
def test_a_channels_last_f_with_a_contiguous_z0_copies_only_in_its_first_call(device, copies, state):
    f, _ = conv(device)
    z0 = torch.zeros(2, 4, 5, 3, device=device, requires_grad=True)
    x = torch.randn(2, 4, 5, 3).to(device).requires_grad_()
    seen = []

    def watched(z, x):
        seen.append(z.is_contiguous(memory_format=CHANNELS_LAST))
        return f(z, x)

    solution = revdeq.solve(watched, z0, x, beta=0.8, max_steps=6, state=state, check="raise")
    assert not copies
    assert seen == [False] + 11 * [True]
    assert solution.nfe == 12
    assert all(t.is_contiguous(memory_format=CHANNELS_LAST) for t in (solution.z, solution.y))
    seen.clear()
    solution.z.square().sum().backward()
    assert seen == 11 * [True] + [False]
    assert len(copies) <= 3, copies  # the initial state, which y and z are compared with, and its product
    assert z0.grad.shape == z0.shape


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("gamma", [1.0, 0.7])
def test_the_backward_pass_uses_the_layouts_of_the_forward_pass(device, state, gamma):
    """If f returned other bits in any evaluation, the reconstruction would be wrong."""
    f, parameters = conv(device)
    x = torch.randn(2, 4, 5, 3).to(device).requires_grad_()
    settings = {"state": state, "gamma": gamma}
    with torch.no_grad():  # nothing is compared: what the iteration is
        expected = revdeq.solve(f, torch.zeros(2, 4, 5, 3, device=device), x, beta=0.8, max_steps=6, **settings).z
    solution, ours = gradients(f, torch.zeros(2, 4, 5, 3, device=device), x, parameters, **settings)
    assert torch.equal(solution.z.detach().cpu(), expected.cpu())
    solution = revdeq.solve(
        f, torch.zeros(2, 4, 5, 3, device=device), x, beta=0.8, max_steps=6, gamma=gamma, keep=11, state=state
    )
    solution.z.square().sum().backward()  # from graphs that were stored, all but that of the first evaluation
    for p, g in zip((*parameters, x), ours, strict=True):
        assert torch.equal(p.grad.cpu(), g)


@pytest.mark.parametrize("state", STATES)
def test_gradients_are_those_of_the_stored_graph(device, state):
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 4, 3, padding=1)
    x, z0 = torch.randn(2, 4, 5, 3), torch.randn(2, 4, 5, 3)
    found = []
    for solve in (revdeq.solve, stored_graph):
        place = device if solve is revdeq.solve else "cpu"
        module, given, start = layer.to(place), x.to(place).requires_grad_(), z0.to(place).requires_grad_()

        def f(z, x, module=module):
            return torch.tanh(0.5 * module(z) + x).contiguous(memory_format=CHANNELS_LAST)

        settings = {"state": state, "check": "raise"} if solve is revdeq.solve else {}
        z = solve(f, start, given, beta=0.8, max_steps=6, **settings)
        z = z.z if solve is revdeq.solve else z
        (z[1] if isinstance(z, tuple) else z).square().sum().backward()
        found.append([g.detach().cpu() for g in (given.grad, start.grad, *(p.grad for p in module.parameters()))])
        module.zero_grad()
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm()  # 12 evaluations and products, each rounded to float32


@pytest.mark.parametrize("state", STATES)
def test_each_tensor_of_a_state_has_its_own_layout(device, copies, state):
    f, parameters = conv(device)
    zeros = {name: torch.zeros(2, 4, 5, 3, device=device) for name in ("image", "plain")}
    zeros["vector"] = torch.zeros(3, 4, device=device)
    x = torch.randn(2, 4, 5, 3).to(device).requires_grad_()

    def g(z, x):
        image = f(z["image"], x)
        plain = (0.3 * z["plain"].contiguous() + 0.1 * image).contiguous()
        return {"image": image, "plain": plain, "vector": 0.5 * torch.tanh(z["vector"].t()).contiguous().t()}

    solution, ours = gradients(g, zeros, x, parameters, state=state)
    assert solution.z["image"].is_contiguous(memory_format=CHANNELS_LAST)
    assert solution.z["plain"].is_contiguous()
    assert solution.z["vector"].t().is_contiguous()
    assert len(copies) <= 2 * 3, copies  # of the two tensors that start in another layout
    _, tupled = gradients(
        lambda z, x: tuple(g(dict(zip(zeros, z, strict=True)), x).values()), tuple(zeros.values()), x, parameters,
        state=state,
    )  # fmt: skip
    assert all(map(torch.equal, ours, tupled))


def test_strides_of_dimensions_of_size_1_are_ignored(device, copies):
    f, parameters = conv(device)
    x = torch.randn(8, 4, 1, 1).to(device).requires_grad_()

    def elsewhere(z, x):
        return f(z, x).as_strided((8, 4, 1, 1), (4, 1, 7, 9))  # the same places

    gradients(elsewhere, torch.zeros(8, 4, 1, 1, device=device), x, parameters)
    assert not copies


@pytest.mark.parametrize("shape", [(), (0,), (1, 1), (3, 0)])
def test_scalars_and_empty_tensors_have_no_layout(device, copies, shape):
    revdeq.solve(lambda z: 0.5 * z, torch.zeros(shape, device=device))
    assert not copies


def test_an_output_that_is_not_dense_leaves_the_state_as_it_is(device, copies):
    x = torch.randn(3, 1).to(device).requires_grad_()
    z0 = torch.zeros(3, 4, device=device)
    solution = revdeq.solve(lambda z, x: torch.tanh(z.mean(1, keepdim=True) + x).expand(3, 4), z0, x, max_steps=3)
    assert solution.z.is_contiguous()
    assert len(copies) == 6
    solution.z.sum().backward()
    assert x.grad.isfinite().all().item()


def test_dropout_has_one_mask_though_f_returns_another_layout_than_that_of_z0(device):
    """It is drawn in the order of the memory: the state keeps the layout of z0."""
    torch.manual_seed(0)
    f = lambda z: nn.functional.dropout(0 * z + 1).contiguous(memory_format=CHANNELS_LAST)  # noqa: E731
    y = revdeq.solve(f, torch.zeros(2, 3, 4, 4, device=device), max_steps=3).y  # evaluation 1 moves y
    assert len(y.unique()) == 2
