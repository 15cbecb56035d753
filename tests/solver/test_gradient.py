"""The gradient is that of the computation that ran."""

import pytest
import torch
from torch import nn

import revdeq
from revdeq.baselines import checkpointed, stored_graph
from revdeq.models import ConvBlock, TransformerBlock

pytestmark = pytest.mark.usefixtures("on_device")


def relative_errors(gradients, expected):
    return [((g - e).norm() / e.norm()).item() for g, e in zip(gradients, expected, strict=True)]


def gradients(solver, f, x, **settings):
    """The gradient of a random linear function of the solution, for x and f's parameters."""
    weight = torch.randn(x.shape, generator=torch.Generator().manual_seed(7), device="cpu").to(x)
    z = solver(f, torch.zeros_like(x), x, **settings)
    z = getattr(z, "z", z)
    return z, torch.autograd.grad(z, [x, *f.parameters()], weight)


def paper_blocks():
    torch.manual_seed(0)
    yield "conv", ConvBlock(32), torch.randn(16, 32, 32, 32)
    yield "transformer", TransformerBlock(256), torch.randn(8, 128, 256)


@pytest.mark.parametrize("name", ["conv", "transformer"])
def test_gradient_equals_stored_graph_in_the_settings_of_the_paper(name):
    """beta = .8, N = 4, from zero. Plain reversal is 28 % off for the conv block. Only float32 rounding is
    left here: 2^-24 in each of the 16 products that a gradient adds up."""
    f, x = {name: (f, x.requires_grad_()) for name, f, x in paper_blocks()}[name]
    z, ours = gradients(revdeq.solve, f, x, beta=0.8, max_steps=4)
    expected_z, expected = gradients(stored_graph, f, x, beta=0.8, max_steps=4)
    assert torch.equal(z, expected_z)
    assert max(relative_errors(ours, expected)) <= 1e-6


def record(f):
    """f, and a list of the inputs it was called with."""
    inputs = []

    def recording(z, *args):
        inputs.append(z.detach().clone())
        return f(z, *args)

    return recording, inputs


@pytest.mark.parametrize("name", ["conv", "transformer"])
def test_both_passes_give_f_the_same_inputs_bit_for_bit(name):
    f, x = {name: (f, x[:4].requires_grad_()) for name, f, x in paper_blocks()}[name]
    recording, inputs = record(f)
    solution = revdeq.solve(recording, torch.zeros_like(x), x, beta=0.5, max_steps=8)
    forward = list(inputs)
    inputs.clear()
    solution.z.sum().backward()
    assert len(forward) == len(inputs) == 16
    # The last evaluation of a step is the first to be repeated.
    for evaluation, (before, again) in enumerate(zip(reversed(forward), inputs, strict=True)):
        assert torch.equal(before, again), f"evaluation {16 - evaluation}"


class Tanh(nn.Module):
    def __init__(self, d=3, dtype=torch.float64):
        super().__init__()
        self.linear = nn.Linear(d, d, dtype=dtype)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


@pytest.mark.parametrize("beta", [0.5, 0.8, 1.3])
def test_gradcheck(beta):
    torch.manual_seed(0)
    f = Tanh()

    def function(z0, x, weight, bias):
        solution = revdeq.solve(lambda z, x: torch.tanh(z @ weight.T + bias + x), z0, x, beta=beta, max_steps=4)
        return solution.z, solution.y

    z0, x = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(function, (z0, x, *f.parameters()))


def test_gradients_reach_z0_args_and_parameters():
    torch.manual_seed(0)
    f = Tanh(5, torch.float32)
    z0, x = torch.randn(4, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)
    inputs = [z0, x, *f.parameters()]
    ours = torch.autograd.grad(revdeq.solve(f, z0, x, max_steps=6).z.square().sum(), inputs)
    expected = torch.autograd.grad(stored_graph(f, z0, x, max_steps=6).square().sum(), inputs)
    assert max(relative_errors(ours, expected)) <= 1e-6


def test_gradients_reach_captured_tensors():
    """The output of an encoder, another module's weight, and a weight-normed layer."""
    torch.manual_seed(0)
    encoder, normed = nn.Linear(5, 5), nn.utils.parametrizations.weight_norm(nn.Linear(5, 5))
    image, scale = torch.randn(4, 5), torch.tensor(0.5, requires_grad=True)

    def run(solver):
        first, second = encoder(image).chunk(2, 0)
        x = torch.cat([first, second * scale])
        z = solver(lambda z: torch.tanh(normed(z) + x), torch.zeros(4, 5), max_steps=6)
        return torch.autograd.grad(
            getattr(z, "z", z).square().sum(), [*encoder.parameters(), *normed.parameters(), scale]
        )

    assert max(relative_errors(run(revdeq.solve), run(stored_graph))) <= 1e-6


def test_a_captured_part_of_a_split_gets_its_own_gradient():
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    a, b = x.unbind()
    # 60 steps are beyond float64's range, but the derivative of an affine map does not depend on where it is taken.
    z = revdeq.solve(lambda z: 0.5 * z + a, torch.zeros_like(a), max_steps=60, check=None).z
    (gradient,) = torch.autograd.grad((z + b).sum(), x)
    torch.testing.assert_close(gradient, torch.tensor([[2.0] * 3, [1.0] * 3], dtype=torch.float64))


def test_nested_arguments():
    a, b = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)

    def f(z, tensors, factor):
        return factor * z + tensors["a"] + tensors["more"][0]

    z = revdeq.solve(f, torch.zeros(3), {"a": a, "more": [b, "a label"]}, 0.5, max_steps=60, check=None).z
    for gradient in torch.autograd.grad(z.sum(), [a, b]):
        torch.testing.assert_close(gradient, torch.full((3,), 2.0))


def test_gradients_of_a_loss_on_y_and_z():
    torch.manual_seed(0)
    f, x = Tanh(), torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    z0 = torch.zeros_like(x)
    solution = revdeq.solve(f, z0, x, beta=0.8, max_steps=3)
    ours = torch.autograd.grad((solution.y.square() + solution.z.sin()).sum(), [x, *f.parameters()])
    beta = solution.beta
    y = z = z0
    for _ in range(3):
        y = (1 - beta) * y + beta * f(z, x)
        z = (1 - beta) * z + beta * f(y, x)
    expected = torch.autograd.grad((y.square() + z.sin()).sum(), [x, *f.parameters()])
    assert max(relative_errors(ours, expected)) <= 1e-14


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_of_low_precision_are_added_up_as_in_a_stored_graph(dtype):
    """torch adds them up in the dtype of the parameter: float32 weights under autocast have float32 sums."""
    torch.manual_seed(0)
    f, x = Tanh(6, dtype), torch.randn(3, 6, dtype=dtype)
    z, (_, *ours) = gradients(revdeq.solve, f, x.requires_grad_(), max_steps=20)
    expected_z, (_, *expected) = gradients(stored_graph, f, x, max_steps=20)
    assert torch.equal(z, expected_z)
    assert max(relative_errors(ours, expected)) <= 4 * torch.finfo(dtype).eps


def test_f_may_ignore_its_state_or_its_parameters():
    x, unused = torch.randn(3, requires_grad=True), nn.Linear(3, 3)
    z = revdeq.solve(lambda z: 2 * x, torch.zeros(3), beta=0.5, max_steps=30).z
    torch.testing.assert_close(torch.autograd.grad(z.sum(), x)[0], torch.full((3,), 2.0))

    class Partial(nn.Module):
        def __init__(self):
            super().__init__()
            self.unused, self.used = unused, nn.Parameter(torch.ones(3))

        def forward(self, z, x):
            return 0.5 * z + self.used

    f = Partial()
    revdeq.RevDEQ(f)(x.detach()).sum().backward()
    assert f.used.grad is not None and unused.weight.grad is None


def test_retain_graph_gives_the_same_gradient_twice():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    z = revdeq.solve(Tanh(), torch.zeros_like(x), x).z
    once = torch.autograd.grad(z.sum(), x, retain_graph=True)[0]
    twice = torch.autograd.grad(z.sum(), x)[0]
    assert torch.equal(once, twice)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(z.sum(), x)


def test_a_second_derivative_is_refused_with_a_remedy():
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    z = revdeq.solve(Tanh(), torch.zeros_like(x), x).z
    with pytest.raises(RuntimeError, match="no second derivative.*create_graph"):
        torch.autograd.grad(z.sum(), x, create_graph=True)


def test_checkpointing_agrees_with_the_stored_graph():
    """Checks the baselines that the benchmarks compare with."""
    torch.manual_seed(0)
    f, x = Tanh(5, torch.float32), torch.randn(4, 5, requires_grad=True)
    _, ours = gradients(checkpointed, f, x, beta=0.8, max_steps=4)
    _, expected = gradients(stored_graph, f, x, beta=0.8, max_steps=4)
    assert all(map(torch.equal, ours, expected))


def test_gradients_match_on_every_layout():
    torch.manual_seed(0)
    f, x = ConvBlock(16), torch.randn(2, 16, 6, 5)
    _, expected = gradients(stored_graph, f, x.clone().requires_grad_(), beta=0.8, max_steps=3)
    for layout in (
        x.to(memory_format=torch.channels_last),
        x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0),
        torch.stack([x, x], -1)[..., 0],
        x[:1].expand(2, -1, -1, -1),
    ):
        layout = layout.detach().requires_grad_()
        _, ours = gradients(revdeq.solve, f, layout, beta=0.8, max_steps=3)
        _, theirs = gradients(stored_graph, f, layout, beta=0.8, max_steps=3)
        assert max(relative_errors(ours, theirs)) <= 1e-6
    channels_last = revdeq.solve(f, x.to(memory_format=torch.channels_last), x, max_steps=1).z
    assert channels_last.is_contiguous(memory_format=torch.channels_last)
    assert expected[0].shape == x.shape
