"""Programs that were tried, and what they met."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import revdeq


class WithBuffer(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("buffer", buffer)

    def forward(self, z, x):
        return torch.tanh(0.3 * self.linear(z) + x)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(5).to_sparse(),
        lambda: torch.eye(5).to_sparse_csr(),
        lambda: torch.eye(5).to_sparse_csc(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.eye(5).to_mkldnn(),
    ],
    ids=["coo", "csr", "csc", "nested", "jagged", "mkldnn"],
)
def test_buffers_of_any_layout_in_training_mode(make):
    f = WithBuffer(make()).train()
    revdeq.solve(f, torch.zeros(5, 5), torch.randn(5, 5), check="raise").z.sum().backward()
    assert f.linear.weight.grad.norm() > 0


@pytest.mark.parametrize("name", ["__getattr__", "__dict__"])
def test_objects_in_closures_that_raise_when_looked_into(name):
    def refuse(*_):
        raise ValueError("no such thing")

    kind = type("Refusing", (), {name: refuse if name == "__getattr__" else property(refuse)})
    refusing, linear = kind(), nn.Linear(4, 4)

    def f(z):
        assert refusing is not None
        return torch.tanh(0.3 * linear(z))

    revdeq.solve(f, torch.zeros(3, 4), check="raise").z.sum().backward()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:The PyTorch API of MaskedTensors")
def test_nested_and_masked_tensors_as_states_are_named():
    parts = [torch.ones(2), torch.ones(3)]
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(TypeError, match="z0 is a NestedTensor, which wraps other tensors"):
            revdeq.solve(lambda z: 0.5 * z, torch.nested.nested_tensor(parts, layout=layout))
    masked = torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    with pytest.raises(TypeError, match="z0 is a MaskedTensor"):
        revdeq.solve(lambda z: 0.5 * z, masked)


@pytest.mark.parametrize("written", [lambda z: z.mul_(0.3).tanh_(), lambda z: (z.mul_(0.1), torch.tanh(z))[1]])
def test_with_an_implicit_gradient_f_may_change_its_input_in_place(written):
    b, grads = nn.Parameter(torch.ones(4)), []
    for f in (lambda z: written(z.clone()) + b, lambda z: written(z) + b):
        z = revdeq.solve(f, torch.ones(3, 4), gradient="implicit", max_steps=30, check="raise").z
        grads += torch.autograd.grad(z.sum(), b)
    torch.testing.assert_close(grads[1], grads[0])


def test_with_an_implicit_gradient_f_may_be_a_gradient_itself():
    """An energy's: every evaluation needs grad mode."""
    linear, seen = nn.Linear(4, 4), set()

    def f(z):
        seen.add(torch.is_grad_enabled())
        energy = torch.tanh(linear(z)).square().sum()
        return 0.5 - 0.2 * torch.autograd.grad(energy, z, create_graph=True)[0]

    revdeq.solve(f, torch.zeros(3, 4), gradient="implicit", max_steps=30, check="raise").z.sum().backward()
    assert seen == {True}
    assert linear.weight.grad.norm() > 0


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_noise_that_is_not_torchs_and_noise_that_begins_later_are_noticed(gradient):
    import numpy as np

    linear, calls = nn.Linear(4, 4), []

    def late(z):
        calls.append(1)
        return torch.tanh(0.3 * linear(z)) + (0.1 * torch.randn(3, 4) if len(calls) > 1 else 0)

    def foreign(z):
        return torch.tanh(0.3 * linear(z)) + 0.1 * torch.from_numpy(np.random.randn(3, 4)).float()

    for f in (late, foreign):
        z = revdeq.solve(f, torch.zeros(3, 4), gradient=gradient, check="raise").z
        with pytest.raises(revdeq.ReconstructionError):
            z.sum().backward()


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_a_scaled_loss_that_overflows_is_its_scalers_business(gradient):
    linear = nn.Linear(4, 4)
    z = revdeq.solve(lambda z: torch.tanh(0.3 * linear(z)), torch.zeros(3, 4), gradient=gradient, check="raise").z
    (z.sum() * torch.inf).backward()
    assert not linear.weight.grad.isfinite().all()


def test_gradients_that_explode_are_named():
    torch.manual_seed(0)
    w, x = nn.Parameter(torch.randn(64, 64) / 8), torch.randn(8, 64)
    z = revdeq.solve(
        lambda z: F.rms_norm(z + torch.sin(30 * z @ w) + x, (64,)), torch.zeros(8, 64), beta=0.8, max_steps=50,
        check="raise",
    ).z  # fmt: skip
    with pytest.raises(revdeq.ConvergenceError, match="not finite .* gamma"):
        z.sum().backward()


def test_two_points_are_no_fixed_point():
    with pytest.raises(revdeq.ConvergenceError, match=r"two different points.*gamma"):
        revdeq.solve(lambda z: -torch.tanh(2 * z), torch.full((3,), 0.1), tol=1e-6, max_steps=500, check="raise")


@pytest.mark.parametrize("beta", [0.995, 0.99, 0.98, 0.97, 1.01])
@pytest.mark.parametrize("max_steps", [2, 8])
def test_near_1_beta_is_the_same_with_and_without_a_gradient(beta, max_steps):
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)

    def run():
        return revdeq.solve(lambda z: torch.tanh(linear(z) + x), torch.zeros(4, 8), beta=beta, max_steps=max_steps)

    training = run()
    with torch.no_grad():
        assert run().beta == pytest.approx(training.beta, rel=2**-24)  # a fraction, or that rounded to float32
    training.z.sum().backward()


def test_a_module_that_keeps_a_solution_is_copied():
    module = nn.Linear(4, 4)
    module.solution = revdeq.solve(lambda z: torch.tanh(0.3 * module(z)), torch.zeros(3, 4))
    z = copy.deepcopy(module).solution.z
    assert torch.equal(z, module.solution.z)
    assert not z.requires_grad
    torch.optim.swa_utils.AveragedModel(module)


def test_an_attribute_of_an_argument_stays():
    seen = []
    for needs in (False, True):
        x = torch.randn(3, 4, requires_grad=needs)
        x.mask = torch.ones(4)
        revdeq.solve(lambda z, x: seen.append(hasattr(x, "mask")) or 0.5 * z + x, torch.zeros(3, 4), x)
    assert all(seen)
