"""Each example takes as many steps as it needs: its solution and its gradient."""

import copy

import pytest
import torch
from torch import nn

import revdeq

SETTINGS = {
    "beta .5": {"beta": 0.5},
    "beta .75, gamma 1.25": {"beta": 0.75, "gamma": 1.25},
    "beta 1.25": {"beta": 1.25},
}
EVERY = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Block(nn.Module):
    """Examples need different numbers of steps, because `speed` determines how much f contracts."""

    def __init__(self, width=6, dtype=torch.float64, couples=False):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)
        self.linear.weight.data.copy_(torch.eye(width) + 0.1 * self.linear.weight.data)
        self.couples = couples

    def forward(self, z, x, speed):
        mean = 0.02 * z.mean(0, keepdim=True) if self.couples else 0
        return speed[:, None] * torch.sin(self.linear(z) / 4 + mean) * 4 + x


SPEEDS = [0.0, 0.7, -0.4, 0.5, 0.2]


DISTANCES = [0.0, 1.0, 0.03, 0.3, 0.1]


def inputs(dtype=torch.float64):
    return torch.randn(5, 6, dtype=dtype), torch.tensor(SPEEDS, dtype=dtype)


def start(x):
    """Some examples start near their fixed point, and the first one at it."""
    return (x + torch.tensor(DISTANCES, dtype=x.dtype)[:, None] * torch.randn_like(x)).detach()


def stored(f, z0, steps, setting, y0=None):
    """y and z of the same iteration with the same mask, by plain autograd, in the precision of z0."""
    steps, beta, gamma = torch.as_tensor(steps), setting["beta"], setting.get("gamma", 1.0)
    y, z = z0 if y0 is None else y0, z0
    states = []
    for k in range(2 * int(steps.max())):
        other, own = (z, y) if k % 2 == 0 else (y, z)
        moved = (1 - beta) * own + beta * ((1 - gamma) * other + gamma * f(other))
        moved = torch.where((k < 2 * steps).view(-1, *[1] * (own.dim() - 1)), moved, own)
        y, z = (moved, z) if k % 2 == 0 else (y, moved)
        states.append(moved)
    return y, z, states


def loss(y, z):
    return (y.sin() * torch.linspace(0.5, 2, y.numel()).view_as(y)).sum() + (z.square() * z.mean(0)).sum()


GIVEN = {"tol": 0.01, "max_steps": 10, "per_example": True}


@EVERY
@pytest.mark.parametrize("couples", [False, True], ids=["apart", "coupled"])
@pytest.mark.parametrize("keep", [0, 5])
@pytest.mark.parametrize("apart", [False, True], ids=["z0", "z0 and y0"])
def test_gradients_are_those_of_a_stored_graph_with_the_same_mask(setting, couples, keep, apart):
    """In float64, to 1e-9: a half-step back magnifies what rounding lost, 2^-53, by less than 2 typically, and 2^-53 *
    2^20 is 1e-10."""
    f, (x, speed) = Block(couples=couples), inputs()
    z0, y0 = (start(x).requires_grad_() for _ in range(2))
    x.requires_grad_()
    speed.requires_grad_()
    solution = revdeq.solve(
        f, z0, x, speed, y0=y0 if apart else None, state="float64", check="raise", keep=keep, **GIVEN, **setting
    )
    assert solution.nfe == 2 * solution.steps.max()
    assert len(set(solution.steps.tolist())) >= 2, "the examples are too alike to show anything"
    y, z, _ = stored(lambda z: f(z, x, speed), z0, solution.steps, setting, y0 if apart else None)
    torch.testing.assert_close((solution.y, solution.z), (y, z), rtol=1e-12, atol=1e-12)
    wanted = [z0, x, speed, *f.parameters()] + ([y0] if apart else [])
    ours = torch.autograd.grad(loss(solution.y, solution.z), wanted)
    for a, b in zip(ours, torch.autograd.grad(loss(y, z), wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())


@EVERY
@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("couples", [False, True], ids=["apart", "coupled"])
def test_the_backward_pass_reconstructs_every_bit(setting, state, couples):
    f, (x, speed) = Block(dtype=torch.float32, couples=couples), inputs(torch.float32)
    given = {**GIVEN, "max_steps": 40 if state == "exact" else 10, "tol": 1e-5 if state == "exact" else 1e-2}
    report = revdeq.verify(f, start(x), x, speed, state=state, **given, **setting)
    assert report.exact and report.evaluations >= 8, str(report)


def test_spilled_remainders_stay_with_frozen_examples():
    """With beta = 63/64 that is every fifth step."""
    f, (x, speed) = Block(dtype=torch.float32), inputs(torch.float32)
    given = {"beta": 63 / 64, "state": "exact", "tol": 1e-5, "max_steps": 40, "per_example": True}
    solution = revdeq.solve(f, start(x), x, speed, **given)
    assert solution.steps.min() < 5 and 10 < solution.steps.max() < 40
    report = revdeq.verify(f, start(x), x, speed, **given)
    assert report.exact, str(report)


def test_an_example_stops_after_its_own_first_step_with_a_small_change():
    f, (x, speed) = Block(), inputs()
    z0 = start(x)
    solution = revdeq.solve(f, z0, x, speed, **GIVEN)
    with torch.no_grad():
        every = [s.z for s in revdeq.steps(f, z0, x, speed, max_steps=10)]
    states = torch.stack([z0, *every])
    changes = (states[1:] - states[:-1]).norm(dim=-1) / (states[1:].norm(dim=-1) + 1e-5)
    for i, steps in enumerate(solution.steps.tolist()):
        first = next((n + 1 for n in range(10) if changes[n, i] <= 0.01), 10)
        assert steps == first
        assert torch.equal(solution.z[i], every[steps - 1][i])
        # of states that are rounded to float32, and differ by a hundredth
        torch.testing.assert_close(solution.change[i], changes[steps - 1, i], rtol=1e-5, atol=0)
    assert solution.steps.dtype == torch.int64 and solution.nfe == 2 * solution.steps.max()


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_an_example_does_not_depend_on_its_batch(state, dtype):
    """To the last bit, in any batch and at any position: f computes each row the same way."""

    def f(z, x, speed):
        return speed[:, None] * torch.tanh(z + z.roll(1, 1)) + x

    x, speed = (t.to(dtype) for t in inputs())
    z0 = torch.randn(5, 6, dtype=dtype)
    given = {**GIVEN, "tol": 1e-2 if dtype == torch.bfloat16 else 1e-5, "state": state}

    def solved(rows):
        leaves = [t[rows].clone().requires_grad_() for t in (z0, x)]
        solution = revdeq.solve(f, leaves[0], leaves[1], speed[rows], **given)
        grads = torch.autograd.grad(solution.z.float().square().sum() + solution.y.float().sum(), leaves)
        return solution.z, solution.y, solution.steps, solution.change, *grads

    together = solved([0, 1, 2, 3, 4])
    for rows in ([0], [1], [2], [3], [4], [4, 1], [2, 0, 3]):
        for a, b in zip(solved(rows), together, strict=True):
            assert torch.equal(a, b[rows])


def test_a_nested_state_arrives_as_a_whole():
    weight = torch.randn(6, 4, dtype=torch.float64) / 4
    x, speed = inputs()
    z0 = {"a": torch.randn(5, 6).double(), "b": [torch.randn(5, 2, 2).double()]}
    leaves = [z0["a"].requires_grad_(), z0["b"][0].requires_grad_()]

    def f(z):
        b = torch.tanh(z["a"] @ weight) * speed[:, None]
        return {"a": speed[:, None] * torch.sin(z["b"][0].flatten(1) @ weight.T) + x, "b": [b.view(5, 2, 2)]}

    def joined(z):
        return torch.cat([z["a"], z["b"][0].flatten(1)], 1)

    def flat(z):
        return joined(f({"a": z[:, :6], "b": [z[:, 6:].view(5, 2, 2)]}))

    solution = revdeq.solve(f, z0, **GIVEN, state="float64")
    assert len(set(solution.steps.tolist())) >= 2
    one = revdeq.solve(flat, joined(z0), **GIVEN, state="float64")
    assert torch.equal(one.steps, solution.steps)
    _, z, _ = stored(flat, joined(z0), solution.steps, {"beta": 0.5})
    ours = torch.autograd.grad(joined(solution.z).square().sum(), leaves)
    for a, b in zip(ours, torch.autograd.grad(z.square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@EVERY
def test_losses_on_intermediate_states(setting):
    f, (x, speed) = Block(couples=True), inputs()
    z0 = start(x).requires_grad_()
    wanted = [z0, *f.parameters()]
    ours, last = 0, None
    for n, s in enumerate(revdeq.steps(f, z0, x, speed, **GIVEN, state="float64", **setting)):
        ours, last = ours + s.z.square().sum() / (n + 1) + (s.y.sin().sum() if n == 1 else 0), s
    solution = revdeq.solve(f, z0, x, speed, **GIVEN, state="float64", **setting)
    assert torch.equal(last.z, solution.z) and torch.equal(last.steps, solution.steps) and n + 1 == last.steps.max()
    _, _, states = stored(lambda z: f(z, x, speed), z0, solution.steps, setting)
    theirs = sum(z.square().sum() / (n + 1) for n, z in enumerate(states[1::2])) + states[2].sin().sum()
    for a, b in zip(torch.autograd.grad(ours, wanted), torch.autograd.grad(theirs, wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())


def test_a_loss_on_a_step_before_the_others_are_taken():
    f, (x, speed) = Block(), inputs()
    z0 = start(x)
    iteration = revdeq.steps(f, z0, x, speed, **GIVEN, state="float64")
    for _ in range(4):
        s = next(iteration)
    ours = torch.autograd.grad(s.z.square().sum(), [*f.parameters()], retain_graph=True)
    _, z, _ = stored(lambda z: f(z, x, speed), z0, s.steps, {"beta": 0.5})
    assert s.steps.min() < 4
    for a, b in zip(ours, torch.autograd.grad(z.square().sum(), [*f.parameters()]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())


def test_a_half_precision_f():
    """Seeds have f's dtype, and are 0 for frozen examples; only rounding is left, 2^-8 of each product."""
    f, (x, speed) = Block(dtype=torch.bfloat16, couples=True), inputs(torch.bfloat16)
    given = {**GIVEN, "tol": 1e-2, "max_steps": 6, "beta": 0.75}
    solution = revdeq.solve(f, torch.zeros(5, 6, dtype=torch.bfloat16), x, speed, **given)
    assert len(set(solution.steps.tolist())) >= 2
    solution.z.float().square().sum().backward()
    wide = copy.deepcopy(f).double()
    x, speed = x.double(), speed.double()
    _, z, _ = stored(lambda z: wide(z, x, speed), torch.zeros(5, 6).double(), solution.steps, {"beta": 0.75})
    for a, b in zip(f.parameters(), torch.autograd.grad(z.square().sum(), [*wide.parameters()]), strict=True):
        torch.testing.assert_close(a.grad.double(), b, rtol=0, atol=0.05 * b.abs().max().item())


def test_the_implicit_gradient_is_taken_where_each_example_ended():
    f, (x, speed) = Block(), inputs()
    given = {**GIVEN, "tol": 1e-6, "max_steps": 200, "state": "exact"}
    z0 = torch.zeros(5, 6).double()
    exact, implicit = (
        torch.autograd.grad(revdeq.solve(f, z0, x, speed, gradient=g, **given).z.square().sum(), [*f.parameters()])
        for g in ("exact", "implicit")
    )
    for a, b in zip(exact, implicit, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3 * b.abs().max().item())


# compact=True


def test_examples_of_any_size():
    """Rows of one number each, of a few, and no rows at all."""

    def f(z):
        return 0.5 * torch.tanh(z) + x

    for shape in ((4,), (3, 17), (1, 5), (0, 6)):
        x = torch.randn(shape, requires_grad=True)
        s = revdeq.solve(f, torch.zeros(shape), tol=0.01, max_steps=50, per_example=True, check="raise")
        assert s.steps.shape == s.converged.shape == shape[:1] and (s.change <= 0.01).all() and s.converged.all()
        y, z, _ = stored(f, torch.zeros(shape), s.steps, {"beta": 0.5}) if len(x) else (s.y, s.z, None)
        torch.testing.assert_close((s.y, s.z), (y, z), rtol=1e-6, atol=1e-6)
        ours, theirs = (torch.autograd.grad(z.sum(), x, retain_graph=True)[0] for z in (s.z, z))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_layer_says_which_examples_converged():
    f, (x, speed) = Block(), inputs()
    deq = revdeq.RevDEQ(f, **{**GIVEN, "max_steps": 3})
    deq(x, speed, z0=start(x)).sum().backward()
    last = deq.last
    assert last.steps.shape == last.change.shape == last.converged.shape == (5,)
    assert last.nfe == 2 * last.steps.max()
    assert last.converged.tolist() == (last.change <= 0.01).tolist() and 0 < last.converged.sum() < 5


@pytest.mark.parametrize(
    "z0", [torch.zeros(()), {"a": torch.zeros(3, 2), "b": torch.zeros(2, 2)}], ids=["scalar", "two"]
)
def test_a_state_without_a_batch_is_refused(z0):
    with pytest.raises(ValueError, match="per_example.*first dimension"):
        revdeq.solve(lambda z: z, z0, **GIVEN)
