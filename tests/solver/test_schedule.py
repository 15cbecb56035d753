"""A pair of coefficients for every half-step: results, gradients, the search, and saving it."""

import gc
import io
import math
import weakref

import pytest
import torch
from torch import nn

import revdeq
from revdeq._solver.schedule import CLOSEST_TO_1, inside
from revdeq._solver.tune import OPTIONS
from revdeq.models import ConvBlock


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def short(monkeypatch):
    """A search that is long enough to be better than a pair."""
    monkeypatch.setattr("revdeq._solver.schedule.UPDATES", 40)


def random_schedule(count, closest=1 / 4):
    """Multiples of 1/32: their products are exact in float32, and 1 - beta is a fraction that the integer state uses
    unchanged, so that all states and baselines have the same coefficients."""
    below = torch.randint(0, 2, (count,)).bool()
    distance = closest + (0.9 - closest) * torch.rand(count)
    beta = torch.where(below, 1 - distance, 1 + distance)
    return (torch.stack([beta, 0.2 + 1.3 * torch.rand(count)], 1).double() * 32).round() / 32


class Block(nn.Module):
    def __init__(self, width=6, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)

    def forward(self, z, x):
        return 0.8 * torch.tanh(self.linear(z)) + x


def unrolled(f, z0, schedule, first=0):
    """y and z by plain autograd; before evaluation `first` nothing is differentiated."""
    y = z = z0
    for k, (beta, gamma) in enumerate(schedule):
        if k == first:
            y, z = y.detach(), z.detach()
        other = z if k % 2 == 0 else y
        moved = (1 - beta) * (y if k % 2 == 0 else z) + beta * ((1 - gamma) * other + gamma * f(other))
        y, z = (moved, z) if k % 2 == 0 else (y, moved)
    return y, z


# The backward pass


@pytest.mark.parametrize("state", ["auto", "exact"])
@pytest.mark.parametrize("max_steps", [1, 3, 16, 64])
@pytest.mark.parametrize("more", [-2, 0, 3])
def test_the_backward_pass_reconstructs_every_bit(state, max_steps, more):
    """Also with a schedule that is shorter or longer than the solve. Factors up to 2 keep the integers in range."""
    f, x = Block(), torch.randn(4, 6)
    schedule = random_schedule(max(1, 2 * max_steps + more))
    report = revdeq.verify(f, torch.zeros(4, 6), x, max_steps=max_steps, schedule=schedule, state=state, beta=0.9)
    assert report.exact and report.evaluations == 2 * max_steps, str(report)


def test_auto_counts_the_bits_of_every_half_step():
    f, x = Block(), torch.randn(4, 6)

    def state(*distances):
        schedule = [(1 - d, 1.0) for d in distances]
        return revdeq.solve(f, torch.zeros(4, 6), x, schedule=schedule, max_steps=4, beta=0.5).state

    # log2((1 + beta) / |1 - beta|) is 1.6 for 1/2 and 4.95 for 1/16
    assert state(*[1 / 2] * 8) == state(*[1 / 16] * 4) == "float64" and state(*[1 / 16] * 8) == "exact"


# Gradients


@pytest.mark.parametrize("backward_steps", [None, 1, 3])
@pytest.mark.parametrize("of", ["z", "y", "both"])
def test_the_gradient_of_the_coefficients_is_that_of_a_stored_graph(backward_steps, of):
    """In float64, to 1e-9: a half-step back magnifies what rounding lost, 2^-53, by at most (1 + 1.9 * 1.5) / .5 < 2^3,
    and typically by 2: 2^-53 * 2^20 is 1e-10 for the ten of them."""
    f, x, z0 = Block(dtype=torch.float64), torch.randn(4, 6).double(), torch.randn(4, 6).double().requires_grad_()
    schedule = random_schedule(10, closest=0.5).requires_grad_()
    inputs = [schedule, *f.parameters()] + ([z0] if backward_steps is None else [])
    first = -1 if backward_steps is None else 2 * (5 - backward_steps)

    def loss(y, z):
        return (y.sin().sum() if of != "z" else 0) + (z.square().sum() if of != "y" else 0)

    given = {"max_steps": 5, "backward_steps": backward_steps, "schedule": schedule, "state": "float64"}
    solution = revdeq.solve(f, z0, x, **given)
    expected = unrolled(lambda z: f(z, x), z0, schedule, first)
    torch.testing.assert_close((solution.y, solution.z), expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(loss(solution.y, solution.z), inputs)
    theirs = torch.autograd.grad(loss(*expected), inputs)
    if backward_steps is not None:
        assert not ours[0][:first].any() and ours[0][first:-1].all()  # y does not see the last half-step
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())


def test_the_gradient_of_the_coefficients_with_a_nested_state():
    weights = [torch.randn(6, 6, dtype=torch.float64) / 4 for _ in range(2)]
    z0 = {"a": torch.randn(3, 6).double(), "b": [torch.randn(3, 6).double()]}
    schedule = random_schedule(6, closest=0.5).requires_grad_()

    def f(z):
        return {"a": torch.tanh(z["b"][0] @ weights[0]) + 1, "b": [torch.tanh(z["a"] @ weights[1])]}

    z = revdeq.solve(f, z0, max_steps=3, schedule=schedule).z
    (ours,) = torch.autograd.grad(z["a"].square().sum() + z["b"][0].sin().sum(), schedule)

    def of_one(z):
        out = f({"a": z[0], "b": [z[1]]})
        return torch.stack([out["a"], out["b"][0]])

    _, (a, b) = unrolled(of_one, torch.stack([z0["a"], z0["b"][0]]), schedule)
    (theirs,) = torch.autograd.grad(a.square().sum() + b.sin().sum(), schedule)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9 * theirs.abs().max().item())


def test_a_schedule_that_an_optimizer_changes_in_place_is_read_again():
    f, x = Block(), torch.randn(4, 6)
    schedule = random_schedule(4).requires_grad_()
    first = revdeq.solve(f, torch.zeros(4, 6), x, max_steps=2, schedule=schedule).z
    with torch.no_grad():
        schedule.copy_(random_schedule(4))
    second = revdeq.solve(f, torch.zeros(4, 6), x, max_steps=2, schedule=schedule).z
    assert not torch.equal(first, second)
    assert torch.equal(second, revdeq.solve(f, torch.zeros(4, 6), x, max_steps=2, schedule=schedule.tolist()).z)


def test_a_schedule_is_freed_after_its_solve():
    """With the graph that it may have."""
    schedule = random_schedule(4).requires_grad_() * 1
    alive = weakref.ref(schedule)
    revdeq.solve(torch.cos, torch.zeros(3), max_steps=2, schedule=schedule).z.sum().backward()
    del schedule
    gc.collect()
    assert alive() is None


def test_a_layer_refuses_a_schedule_that_requires_a_gradient():
    with pytest.raises(ValueError, match="schedule.*learn_coefficients=True"):
        revdeq.RevDEQ(Block(), max_steps=2, schedule=random_schedule(4).requires_grad_())


def test_a_learnt_constant_pair_gets_the_sum_of_gradients():
    f, x = Block(dtype=torch.float64), torch.randn(4, 6).double()
    deq = revdeq.RevDEQ(f, beta=0.75, gamma=1.25, max_steps=4, learn_coefficients="pair", state="float64")
    deq(x).square().sum().backward()
    pair = torch.tensor([[0.75, 1.25]], dtype=torch.float64, requires_grad=True)
    _, z = unrolled(lambda z: f(z, x), torch.zeros_like(x), pair.expand(8, 2))
    (expected,) = torch.autograd.grad(z.square().sum(), pair)
    # The parameter is float32, and so is its gradient: 2^-24 of it.
    torch.testing.assert_close(deq.learnt.grad.double(), expected, rtol=1e-7, atol=0)


def test_coefficients_have_no_gradient_by_default():
    f, x, schedule = Block(), torch.randn(4, 6), random_schedule(4)
    revdeq.solve(f, torch.zeros(4, 6), x, max_steps=2, schedule=schedule).z.sum().backward()
    assert schedule.grad is None
    with torch.no_grad():
        z = revdeq.solve(f, torch.zeros(4, 6), x, max_steps=2, schedule=schedule.requires_grad_()).z
    assert not z.requires_grad


def test_learnt_coefficients_can_cross_the_gap_around_1():
    """It is used at a distance of 1/16 from 1, on its own side, and its gradient ignores that."""
    learnt = nn.Parameter(torch.tensor([[0.97, 1.0]]))
    optimizer, sides = torch.optim.SGD([learnt], lr=0.01), []
    for _ in range(8):
        used = inside(learnt)
        sides.append(used[0, 0].item())
        optimizer.zero_grad()
        (-used[:, 0]).sum().backward()
        optimizer.step()
    assert sides[0] == 1 - CLOSEST_TO_1 and sides[-1] == 1 + CLOSEST_TO_1 and set(sides) == {sides[0], sides[-1]}


def test_the_implicit_gradient_with_a_schedule_is_that_of_the_fixed_point():
    """A schedule, then the constant pair, until both have converged."""
    f, x = Block(dtype=torch.float64), torch.randn(4, 6).double()
    found = []
    for schedule in (None, random_schedule(12)):
        options = {"schedule": schedule, "beta": 1.1, "gamma": 0.9, "max_steps": 60, "gradient": "implicit"}
        z = revdeq.solve(f, torch.zeros_like(x), x, **options).z
        found.append((z.detach(), *torch.autograd.grad(z.square().sum(), list(f.parameters()))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


# Fewer and more steps


def test_shorter_solves_use_the_first_pairs_and_longer_ones_continue_with_the_constant_pair():
    f, x, schedule = Block(dtype=torch.float64), torch.randn(4, 6).double(), random_schedule(6)
    pair = {"beta": 0.75, "gamma": 1.25}
    for max_steps in (1, 2, 3, 5):
        z = revdeq.solve(f, torch.zeros_like(x), x, max_steps=max_steps, schedule=schedule, **pair).z
        rows = [*schedule.tolist(), *[(0.75, 1.25)] * 4][: 2 * max_steps]
        _, expected = unrolled(lambda z: f(z, x), torch.zeros_like(x), rows)
        torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-12)


def test_a_schedule_with_a_tolerance():
    f, x = Block(dtype=torch.float64), torch.randn(4, 6).double()
    options = {"beta": 1.1, "gamma": 0.9, "schedule": random_schedule(4), "max_steps": 100}
    solution = revdeq.solve(f, torch.zeros_like(x), x, tol=1e-9, **options)
    assert 2 < solution.steps < 100 and solution.change <= 1e-9
    same = revdeq.solve(f, torch.zeros_like(x), x, **{**options, "max_steps": solution.steps})
    assert torch.equal(same.z, solution.z)


# How it is found


def blocks():
    return {
        "linear": (Block(16), lambda: torch.randn(32, 16)),
        "conv": (ConvBlock(8), lambda: torch.randn(16, 8, 6, 6)),
    }


def residual(f, x, **options):
    with torch.no_grad():
        z = revdeq.solve(f, torch.zeros_like(x), x, **options).z
        return ((f(z, x) - z).norm() / z.norm()).item()


@pytest.mark.parametrize("name", list(blocks()))
def test_a_schedule_beats_the_best_pair_on_a_held_out_batch(name):
    f, draw = blocks()[name]
    x, other = draw(), draw()
    found = revdeq.tune(f, torch.zeros_like(x), x, max_steps=3, schedule=True)
    assert len(found.schedule) == 6 == found.evaluations
    assert all(abs(1 - beta) >= CLOSEST_TO_1 and 0 < gamma <= 3 for beta, gamma in found.schedule)
    pair = {"beta": found.beta, "gamma": found.gamma, "max_steps": 3}
    assert residual(f, other, schedule=found, **pair) < 0.8 * residual(f, other, **pair)
    for state in ("auto", "float64"):  # 1 - beta is a fraction already; float32 sums in f, of which one is 1e-7
        assert residual(f, x, schedule=found, state=state, **pair) == pytest.approx(found.residual, rel=1e-3)


def test_a_schedule_is_never_worse_than_the_pair_on_its_own_batch(short, monkeypatch):
    """Even if the descent diverges."""
    monkeypatch.setattr("revdeq._solver.schedule.RATE", 30.0)
    f, x = Block(), torch.randn(8, 6)
    found = revdeq.tune(f, torch.zeros_like(x), x, max_steps=2, schedule=True)
    pair = min(found.trials, key=lambda t: t.rate)
    assert found.residual <= pair.residual and len(found.schedule) == 4
    if found.residual == pair.residual:
        assert found.schedule == ((pair.beta, pair.gamma),) * 4


def test_several_batches_count_alike(short):
    f = Block(16)
    xs = [torch.randn(4, 16) for _ in range(3)]
    batches = [(torch.zeros_like(x), x) for x in xs]
    found = revdeq.tune(f, *batches[0], batches=batches[1:], max_steps=2, schedule=True)
    sizes = [residual(f, x, schedule=found, max_steps=2, state="float64") for x in xs]
    assert found.residual == pytest.approx(math.prod(sizes) ** (1 / 3), rel=1e-4)
    assert found.residual <= min(t.residual for t in found.trials)


def test_the_search_changes_neither_f_nor_the_generators(short):
    f, x = Block(), torch.randn(8, 6)
    f.linear.bias.requires_grad_(False)
    f.linear.weight.grad = torch.ones_like(f.linear.weight)
    dropped = nn.Dropout(0.2)
    before = torch.get_rng_state()

    def noisy(z, x):
        return f(dropped(z), x)

    with torch.no_grad():
        first, again = (revdeq.tune(noisy, torch.zeros_like(x), x, max_steps=2, schedule=True) for _ in range(2))
    assert first == again, "it is deterministic"
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(f.linear.weight.grad, torch.ones(6, 6)) and f.linear.bias.grad is None
    assert (f.linear.weight.requires_grad, f.linear.bias.requires_grad) == (True, False)


def test_the_search_uses_float64_if_integers_overflow(short):
    """Magnitudes beyond 128, and more steps than float64 is safe for."""
    f, x = Block(), 1000 * torch.randn(8, 6)
    found = revdeq.tune(lambda z, x: 1000 * f(z / 1000, x / 1000), torch.zeros_like(x), x, max_steps=5, schedule=True)
    assert found.residual < min(t.residual for t in found.trials)


def test_with_a_tolerance_a_schedule_is_as_long_as_the_best_pair_needs(short):
    f, x = Block(), torch.randn(8, 6)
    found = revdeq.tune(f, torch.zeros_like(x), x, max_steps=50, tol=1e-2, schedule=True)
    assert len(found.schedule) == found.evaluations < 20


def test_the_search_with_indexed_and_aux(short):
    weights = [torch.randn(6, 6) / 4 for _ in range(4)]

    def f(z, x, evaluation, scale):
        return torch.tanh(z @ weights[evaluation]) + scale * x, z.sum()

    x = torch.randn(8, 6)
    given = {"indexed": True, "aux": True, "kwargs": {"scale": 2.0}}
    found = revdeq.tune(f, torch.zeros_like(x), x, max_steps=2, schedule=True, **given)
    assert len(found.curves["Anderson"]) == 4


def test_the_search_takes_only_options_that_apply():
    x = torch.zeros(3)
    with pytest.raises(TypeError, match=f"state = 'exact': there are {', '.join(OPTIONS)}"):
        revdeq.tune(torch.cos, x, state="exact")
    with pytest.raises(TypeError, match="schedule = 4 must be True or False"):
        revdeq.tune(torch.cos, x, schedule=4)
    with pytest.raises(TypeError, match=r"batches\[0\] is of type Tensor: it must be a tuple \(z0, \*args\)"):
        revdeq.tune(torch.cos, x, batches=[x])


def test_a_table_and_a_plot(short, tmp_path):
    f, x = Block(), torch.randn(8, 6)
    found = revdeq.tune(f, torch.zeros_like(x), x, max_steps=2, schedule=True)
    assert "a pair for each of 4 half-steps" in str(found) and str(found).splitlines()[-5] == "  beta   gamma"
    assert list(found.curves) == ["schedule", "best pair", "Anderson"]
    assert found.curves["schedule"][-1] == pytest.approx(found.residual, rel=1e-6)
    assert all(len(sizes) == 4 for sizes in found.curves.values())
    pytest.importorskip("matplotlib")
    from readable import complaints

    assert not complaints(found.plot(tmp_path / "schedule.png"))
    assert (tmp_path / "schedule.png").stat().st_size > 5000


# Where it is stored


def test_a_layer_saves_and_loads_it(short):
    f, x = Block(), torch.randn(8, 6)
    deq = revdeq.RevDEQ(f, max_steps=2)
    found = deq.tune(x, schedule=True, batches=[(torch.randn(8, 6),)])
    assert deq.schedule == found.schedule and len(found.schedule) == 4
    file = io.BytesIO()
    torch.save(deq.state_dict(), file)
    file.seek(0)
    other = revdeq.RevDEQ(Block(), max_steps=2)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert (other.beta, other.gamma, other.schedule) == (found.beta, found.gamma, found.schedule)
    assert torch.equal(other(x), deq(x))
    deq.tune(x)
    assert deq.schedule is None, "a pair for all replaces it"
    other.load_state_dict(deq.state_dict())
    assert other.schedule is None and other.beta == deq.beta


def test_checkpoints_that_write_into_a_layers_tensors_restore_the_schedule():
    """Like torch.distributed.checkpoint, which needs tensors of the same shapes."""
    x = torch.randn(8, 6)
    deq, other = (revdeq.RevDEQ(Block(), max_steps=2) for _ in range(2))
    deq.use(0.8, 1.1, [(0.7, 1.2), (1.2, 0.9), (0.6, 1.4), (0.8, 1.0)])
    other.use(0.5, 1.0, [(0.5, 1.0)] * 4)
    tensors = other.state_dict()
    assert other.state_dict().keys() == tensors.keys()  # the first ones are still those of the layer
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(deq.state_dict()[name])
    other.double().float()  # before it is used
    assert torch.equal(other(x), deq(x)) and (other.beta, other.gamma, other.schedule) == (0.8, 1.1, deq.schedule)


def test_the_other_solvers_of_a_model_take_a_schedule():
    f, x = Block(), torch.randn(4, 6)
    schedule = random_schedule(6).tolist()
    options = {"max_steps": 3, "schedule": schedule}
    expected = revdeq.models.Equilibrium(f, state="float64", **options)(x)
    for solver in ("stored", "checkpointed"):
        assert torch.equal(revdeq.models.Equilibrium(f, solver=solver, **options)(x), expected)


def test_a_tuning_without_a_schedule_is_refused_as_one():
    found = revdeq.tune(torch.cos, torch.zeros(3), max_steps=2)
    with pytest.raises(ValueError, match="schedule.*tune with schedule=True, or.*beta=found.beta"):
        revdeq.solve(torch.cos, torch.zeros(3), schedule=found)
