"""Each example takes as many steps as it needs: its solution and its gradient."""

import copy

import pytest
import torch
import torch.nn.functional as F
from plain import agree, iterate
from torch import nn

import revdeq

SETTINGS = [{"beta": 0.5}, {"beta": 0.75, "gamma": 1.25}, {"beta": 1.25}]
EVERY = pytest.mark.parametrize("setting", SETTINGS, ids=str)
GIVEN = {"tol": 0.01, "max_steps": 10, "per_example": True}
SPEEDS, DISTANCES = [0.0, 0.7, -0.4, 0.5, 0.2], [0.0, 1.0, 0.03, 0.3, 0.1]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Block(nn.Module):
    """Examples need different numbers of steps, because `speed` determines how much f contracts."""

    def __init__(self, dtype=torch.float64, couples=False):
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=dtype)
        self.linear.weight.data.copy_(torch.eye(6) + 0.1 * self.linear.weight.data)
        self.couples = couples

    def forward(self, z, x, speed):
        mean = 0.02 * z.mean(0, keepdim=True) if self.couples else 0
        return speed[:, None] * torch.sin(self.linear(z) / 4 + mean) * 4 + x


def inputs(dtype=torch.float64):
    """x, the speeds, and a z0: some examples start near their fixed point, and the first one at it."""
    x = torch.randn(5, 6, dtype=dtype)
    return x, torch.tensor(SPEEDS, dtype=dtype), x + torch.tensor(DISTANCES, dtype=dtype)[:, None] * torch.randn_like(x)


def stored(f, *args, steps, **setting):
    """Every step of the iteration in which examples stop."""
    assert len(set(steps.tolist())) >= 2, "the examples are too alike to show anything"
    return iterate(f, *args, stops=steps, max_steps=int(steps.max()), **setting)


def loss(s):
    return (s.y.sin() * torch.linspace(0.5, 2, s.y.numel()).view_as(s.y)).sum() + (s.z.square() * s.z.mean(0)).sum()


@EVERY
@pytest.mark.parametrize(("couples", "keep", "apart"), [(False, 0, True), (True, 0, False), (True, 5, True)])
def test_gradients_are_those_of_a_stored_graph_with_the_same_mask(setting, couples, keep, apart):
    """In float64, to 1e-9: a half-step back magnifies what rounding lost, 2^-53, by less than 2 typically, and 2^-53 *
    2^20 is 1e-10."""
    f, (x, speed, z0) = Block(couples=couples), inputs()
    y0 = (z0 + 0.1).requires_grad_() if apart else None
    wanted = [
        x.requires_grad_(),
        speed.requires_grad_(),
        z0.requires_grad_(),
        *f.parameters(),
        *([y0] if apart else []),
    ]
    solution = revdeq.solve(f, z0, x, speed, y0=y0, check="raise", keep=keep, **GIVEN, **setting)
    assert solution.nfe == 2 * solution.steps.max() and solution.steps.dtype == torch.int64
    expected = stored(f, z0, x, speed, y0=y0, steps=solution.steps, **setting)[-1]
    torch.testing.assert_close((solution.y, solution.z), (expected.y, expected.z), rtol=1e-12, atol=1e-12)
    agree(*(torch.autograd.grad(loss(s), wanted) for s in (solution, expected)), tolerance=1e-9)


@EVERY
@pytest.mark.parametrize(("state", "couples"), [("float64", False), ("exact", True)])
def test_the_backward_pass_reconstructs_every_bit(setting, state, couples):
    f, (x, speed, z0) = Block(dtype=torch.float32, couples=couples), inputs(torch.float32)
    given = {**GIVEN, "max_steps": 40 if state == "exact" else 10, "tol": 1e-5 if state == "exact" else 1e-2}
    report = revdeq.verify(f, z0, x, speed, state=state, **given, **setting)
    assert report.exact and report.evaluations >= 8, str(report)


def test_spilled_remainders_stay_with_examples_that_have_stopped():
    """With beta = 63/64 that is every fifth step."""
    f, (x, speed, z0) = Block(dtype=torch.float32), inputs(torch.float32)
    given = {"beta": 63 / 64, "state": "exact", "tol": 1e-5, "max_steps": 40, "per_example": True}
    solution = revdeq.solve(f, z0, x, speed, **given)
    assert solution.steps.min() < 5 and 10 < solution.steps.max() < 40
    report = revdeq.verify(f, z0, x, speed, **given)
    assert report.exact, str(report)


def test_an_example_stops_after_its_own_first_step_with_a_small_change():
    f, (x, speed, z0) = Block(), inputs()
    solution = revdeq.solve(f, z0, x, speed, **GIVEN)
    with torch.no_grad():
        every = [s.z for s in revdeq.steps(f, z0, x, speed, max_steps=10)]
    states = torch.stack([z0, *every])
    changes = (states[1:] - states[:-1]).norm(dim=-1) / (states[1:].norm(dim=-1) + 1e-5)
    for i, steps in enumerate(solution.steps.tolist()):
        first = next((n + 1 for n in range(10) if changes[n, i] <= 0.01), 10)
        assert steps == first and torch.equal(solution.z[i], every[steps - 1][i])
        # of states that are rounded to float32, and differ by a hundredth
        torch.testing.assert_close(solution.change[i], changes[steps - 1, i], rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("state", "dtype"), [("float64", torch.float64), ("float64", torch.bfloat16), ("exact", torch.float32)]
)
def test_an_example_does_not_depend_on_its_batch(state, dtype):
    """To the last bit, in any batch and at any position: f computes each row the same way."""

    def f(z, x, speed):
        return speed[:, None] * torch.tanh(z + z.roll(1, 1)) + x

    x, speed, _ = inputs(dtype)
    z0 = torch.randn(5, 6, dtype=dtype)
    given = {**GIVEN, "tol": 1e-2 if dtype == torch.bfloat16 else 1e-5, "state": state}

    def solved(rows):
        leaves = [t[rows].clone().requires_grad_() for t in (z0, x)]
        solution = revdeq.solve(f, leaves[0], leaves[1], speed[rows], **given)
        grads = torch.autograd.grad(solution.z.float().square().sum() + solution.y.float().sum(), leaves)
        return solution.z, solution.y, solution.steps, solution.change, *grads

    together = solved([0, 1, 2, 3, 4])
    for rows in ([0], [3], [4, 1], [2, 0, 3]):
        assert all(torch.equal(a, b[rows]) for a, b in zip(solved(rows), together, strict=True))


def test_a_nested_state_stops_as_a_whole():
    weight, (x, speed, _) = torch.randn(6, 4, dtype=torch.float64) / 4, inputs()
    z0 = {"a": torch.randn(5, 6).double().requires_grad_(), "b": [torch.randn(5, 2, 2).double().requires_grad_()]}

    def f(z):
        b = torch.tanh(z["a"] @ weight) * speed[:, None]
        return {"a": speed[:, None] * torch.sin(z["b"][0].flatten(1) @ weight.T) + x, "b": [b.view(5, 2, 2)]}

    def joined(z):
        return torch.cat([z["a"], z["b"][0].flatten(1)], 1)

    solution = revdeq.solve(f, z0, **GIVEN)
    flat = revdeq.solve(lambda z: joined(f({"a": z[:, :6], "b": [z[:, 6:].view(5, 2, 2)]})), joined(z0), **GIVEN)
    assert torch.equal(flat.steps, solution.steps)
    expected = stored(f, z0, steps=solution.steps)[-1]
    found = [torch.autograd.grad(joined(s.z).square().sum(), [z0["a"], z0["b"][0]]) for s in (solution, expected)]
    agree(*found, tolerance=1e-9)


@EVERY
def test_losses_on_intermediate_states(setting):
    f, (x, speed, z0) = Block(couples=True), inputs()
    wanted = [z0.requires_grad_(), *f.parameters()]
    solution = revdeq.solve(f, z0, x, speed, **GIVEN, **setting)
    rows = list(revdeq.steps(f, z0, x, speed, **GIVEN, **setting))
    assert torch.equal(rows[-1].z, solution.z) and torch.equal(rows[-1].steps, solution.steps)
    expected, losses = stored(f, z0, x, speed, steps=solution.steps, **setting), []
    assert len(rows) == len(expected)
    for each in (rows, expected):
        losses.append(sum(s.z.square().sum() / (n + 1) for n, s in enumerate(each)) + each[1].y.sin().sum())
    agree(*(torch.autograd.grad(loss, wanted) for loss in losses), tolerance=1e-9)


@pytest.mark.parametrize("which", ["y", "z"])
def test_a_loss_with_a_sparse_gradient(which):
    f, (x, speed, z0), rows = Block(couples=True), inputs(), torch.tensor([0, 3])
    state = getattr(revdeq.solve(f, z0, x, speed, **GIVEN), which)
    losses = F.embedding(rows, state, sparse=True).sum(), state[rows].sum()
    ours, expected = (torch.autograd.grad(loss, [*f.parameters()], retain_graph=True) for loss in losses)
    assert all(map(torch.equal, ours, expected))


def test_a_half_precision_f():
    """Seeds have f's dtype, and are 0 for examples that have stopped; only rounding is left, 2^-8 of each product."""
    f, (x, speed, _) = Block(dtype=torch.bfloat16, couples=True), inputs(torch.bfloat16)
    z0 = torch.zeros_like(x)
    solution = revdeq.solve(f, z0, x, speed, **{**GIVEN, "max_steps": 6, "beta": 0.75})
    wide, (x, speed, z0) = copy.deepcopy(f).double(), (t.double() for t in (x, speed, z0))
    expected = stored(wide, z0, x, speed, steps=solution.steps, beta=0.75)[-1]
    ours = torch.autograd.grad(solution.z.float().square().sum(), [*f.parameters()])
    agree(ours, torch.autograd.grad(expected.z.square().sum(), [*wide.parameters()]), tolerance=0.05)


def test_the_implicit_gradient_is_taken_where_each_example_ended():
    f, (x, speed, _) = Block(), inputs()
    given, z0 = {**GIVEN, "tol": 1e-6, "max_steps": 200, "state": "exact"}, torch.zeros_like(x)
    solutions = [revdeq.solve(f, z0, x, speed, gradient=g, **given) for g in ("exact", "implicit")]
    agree(*(torch.autograd.grad(s.z.square().sum(), [*f.parameters()]) for s in solutions), tolerance=1e-3)


@pytest.mark.parametrize("shape", [(4,), (3, 17), (1, 5), (0, 6)])
def test_examples_of_any_size(shape):
    """Rows of one number each, of a few, and no rows at all."""
    x = torch.randn(shape, requires_grad=True)
    s = revdeq.solve(
        lambda z: 0.5 * torch.tanh(z) + x, torch.zeros(shape), tol=0.01, max_steps=50, per_example=True, check="raise"
    )
    assert s.steps.shape == s.converged.shape == shape[:1] and (s.change <= 0.01).all() and s.converged.all()
    if len(x):
        most = int(s.steps.max())
        expected = iterate(lambda z: 0.5 * torch.tanh(z) + x, torch.zeros(shape), stops=s.steps, max_steps=most)[-1]
        torch.testing.assert_close(s.z, expected.z, rtol=1e-6, atol=1e-6)
        agree(*(torch.autograd.grad(t.z.sum(), x) for t in (s, expected)), tolerance=1e-5)


def test_a_layer_says_which_examples_converged():
    f, (x, speed, z0) = Block(), inputs()
    deq = revdeq.RevDEQ(f, **{**GIVEN, "max_steps": 3})
    deq(x, speed, z0=z0).sum().backward()
    last = deq.last
    assert last.steps.shape == last.change.shape == last.converged.shape == (5,) and last.nfe == 2 * last.steps.max()
    assert last.converged.tolist() == (last.change <= 0.01).tolist() and 0 < last.converged.sum() < 5


@pytest.mark.parametrize("z0", [torch.zeros(()), {"a": torch.zeros(3, 2), "b": torch.zeros(2, 2)}], ids=["0-d", "two"])
def test_a_state_without_a_batch_is_refused(z0):
    with pytest.raises(ValueError, match="per_example.*first dimension"):
        revdeq.solve(lambda z: z, z0, **GIVEN)
