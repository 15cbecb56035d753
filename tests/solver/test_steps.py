"""What looped models need: the index of an evaluation, losses on intermediate steps, auxiliary outputs, a start in the
middle, and plain looping. Gradients are those of the stored graph of the iteration."""

import copy
import functools
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from plain import Block, agree, iterate
from torch import Tensor, nn

import revdeq

D, N = 6, 5
SETTINGS = [{"beta": 0.5}, {"beta": 0.8, "state": "exact"}, {"beta": 0.75, "gamma": 0.5}]
EVERY = pytest.mark.parametrize("settings", SETTINGS, ids=str)
close = functools.partial(agree, tolerance=3e-6)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Indexed(Block):
    """Has a different bias in every evaluation, and returns the mean square of its output as aux."""

    def __init__(self):
        super().__init__(D)
        self.bias = nn.Embedding(2 * N, D)

    def forward(self, z, x, evaluation):
        out = torch.tanh(0.5 * self.linear(z) + x + self.bias.weight[evaluation])
        return out, out.square().mean()


def stored(f, *args, state=None, **settings):
    return iterate(f, *args, **{"max_steps": N, **settings})


def inputs():
    return torch.randn(3, D).requires_grad_(), torch.randn(3, D).requires_grad_()


INDEXED = {"indexed": True, "aux": True}


@pytest.mark.parametrize(("settings", "aux"), [*zip(SETTINGS, [True, "list", "list"], strict=True)], ids=str)
def test_indexed_and_aux(settings, aux):
    f, (z0, x) = Indexed(), inputs()
    targets = [z0, x, *f.parameters()]
    solution = revdeq.solve(f, z0, x, max_steps=N, indexed=True, aux=aux, check="raise", **settings)
    rows = stored(f, z0, x, **INDEXED, **settings)
    total, every = sum(solution.aux) if aux == "list" else solution.aux, [a for row in rows for a in row.aux]
    ours = torch.autograd.grad(solution.z.sum() + 2 * total, targets)
    close(ours, torch.autograd.grad(rows[-1].z.sum() + 2 * sum(every), targets))
    if aux == "list":  # in the order of the evaluations
        close(solution.aux, every)


def test_a_loss_on_aux_alone_and_a_nested_aux():
    f, (z0, x) = Indexed(), inputs()

    def g(z, x, evaluation):
        out, aux = f(z, x, evaluation)
        return out, {"mean": aux, "count": torch.ones(())}

    aux = revdeq.solve(g, z0, x, max_steps=N, **INDEXED).aux  # the solution is gone
    expected = sum(a for row in stored(f, z0, x, **INDEXED) for a in row.aux)
    close(*(torch.autograd.grad(a, [z0, x]) for a in (aux["mean"], expected)))
    assert aux["count"] == 2 * N


def test_a_layer_returns_aux_beside_z():
    deq, x = revdeq.RevDEQ(lambda z, x: (torch.tanh(0.5 * z + x), z.sum()), aux=True), torch.ones(2, 3)
    solution = revdeq.solve(deq.f, torch.zeros(2, 3), x, aux=True)
    assert all(map(torch.equal, deq(x), (solution.z, solution.aux)))


def test_a_different_module_in_every_evaluation_some_without_gradients():
    layers, (z0, x) = nn.ModuleList(nn.Linear(D, D) for _ in range(2 * N + 2)), inputs()

    def f(z, x, evaluation):
        return torch.tanh(0.5 * layers[evaluation](z) + x)

    revdeq.solve(f, z0, x, max_steps=N, indexed=True, check="raise").z.sum().backward()
    ours = [p.grad for p in layers.parameters()]
    assert all(g is None for g in ours[-4:])
    close(ours[:-4], torch.autograd.grad(stored(f, z0, x, indexed=True)[-1].z.sum(), list(layers.parameters())[:-4]))


@EVERY
def test_steps_have_the_bits_of_solve(settings):
    f, (z0, x) = Block(), inputs()
    steps = list(revdeq.steps(f, z0, x, max_steps=N, **settings))
    assert [s.steps for s in steps] == list(range(1, N + 1))
    for s in steps:
        whole = revdeq.solve(f, z0, x, max_steps=s.steps, **settings)
        assert torch.equal(s.z, whole.z) and torch.equal(s.y, whole.y) and s.change == whole.change
    with torch.no_grad():
        plain = list(revdeq.steps(f, z0, x, max_steps=N, **settings))
    assert all(torch.equal(a.z, b.z) for a, b in zip(steps, plain, strict=True)) and not plain[-1].z.requires_grad


@pytest.mark.parametrize(("settings", "keep"), [*zip([*SETTINGS, {}], [0, 3, 3, 1], strict=True)], ids=str)
def test_losses_on_all_steps(settings, keep):
    f, (z0, x) = Indexed(), inputs()

    def loss(rows, auxes):
        return sum(n * s.z.square().sum() + s.y.sum() + a for n, (s, a) in enumerate(zip(rows, auxes, strict=True), 1))

    ours = list(revdeq.steps(f, z0, x, max_steps=N, keep=keep, check="raise", **INDEXED, **settings))
    rows = stored(f, z0, x, **INDEXED, **settings)
    losses = loss(ours, [s.aux for s in ours]), loss(rows, [sum(row.aux) for row in rows])
    close(*(torch.autograd.grad(each, [z0, x, *f.parameters()]) for each in losses))


def test_leaving_the_loop_and_a_tolerance():
    f, (z0, x) = Block(), inputs()
    steps = revdeq.steps(f, z0, x, max_steps=50)
    with torch.no_grad():  # the mode is that of the call
        s = next(s for s in steps if s.steps == 3)
    close(*(torch.autograd.grad(t.z.sum(), [z0, x]) for t in (s, stored(f, z0, x)[2])))
    *_, last = revdeq.steps(f, z0, x, max_steps=50, tol=1e-3)
    assert last.steps == revdeq.solve(f, z0, x, max_steps=50, tol=1e-3).steps < 50


def test_a_backward_pass_between_two_steps():
    f, (z0, x) = Block(), inputs()
    steps, rows = revdeq.steps(f, z0, x, max_steps=N), stored(f, z0, x)
    early = torch.autograd.grad(next(steps).z.sum(), x, retain_graph=True)
    close(early, torch.autograd.grad(rows[0].z.sum(), x, retain_graph=True))
    *_, last = steps
    close(torch.autograd.grad(last.z.sum(), x), torch.autograd.grad(rows[-1].z.sum(), x))
    steps = revdeq.steps(f, z0, x, max_steps=N)
    next(steps).z.sum().backward()  # frees the graph, and leaves the states
    *_, last = steps
    assert torch.equal(last.z, revdeq.solve(f, z0, x, max_steps=N).z)


def test_steps_of_a_layer_and_what_they_refuse():
    f, (z0, x), y0 = Block(), inputs(), torch.randn(3, D)
    deq = revdeq.RevDEQ(f, max_steps=3)
    *_, last = deq.steps(x, z0=z0, y0=y0)
    assert torch.equal(last.z, deq(x, z0=z0, y0=y0)) and len(list(deq.steps(x, max_steps=2))) == 2
    with pytest.raises(ValueError, match="gradient = 'implicit'"):
        revdeq.steps(f, z0, x, gradient="implicit")
    steps = revdeq.steps(f, z0, x)
    with torch.no_grad():
        next(steps).z.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place.*clone"):
        next(steps)


def test_float64_states_continue_from_their_values():
    f, (z0, x) = Block(dtype=torch.float64), [v.detach().double() for v in inputs()]
    part = revdeq.solve(f, z0, x, max_steps=2)
    assert torch.equal(revdeq.solve(f, part.z, x, y0=part.y, max_steps=3).z, revdeq.solve(f, z0, x, max_steps=5).z)


@dataclass
class Carried:
    high: Tensor
    low: Tensor


class Named(NamedTuple):
    high: Tensor
    low: Tensor


@pytest.mark.parametrize("kind", [Carried, Named])
def test_dataclasses_and_named_tuples_as_states(kind):
    linear, (z0, x) = nn.Linear(D, D), inputs()

    def f(high, low):
        return torch.tanh(0.5 * linear(low) + x), 0.3 * torch.sin(high)

    z = revdeq.solve(lambda s: kind(*f(s.high, s.low)), kind(z0, z0)).z
    high, low = revdeq.solve(lambda s: f(*s), (z0, z0)).z
    assert isinstance(z, kind)
    ours, expected = (torch.autograd.grad(a.sum() + b.sum(), [z0, x]) for a, b in ((z.high, z.low), (high, low)))
    assert all(map(torch.equal, ours, expected))


def test_keyword_arguments_of_f():
    linear, (z0, x), scale = nn.Linear(D, D), inputs(), torch.ones(D, requires_grad=True)

    def f(z, x, *, scale, shift=0.0):
        return torch.tanh(0.5 * linear(z) * scale + x + shift)

    given = {"scale": scale, "shift": 0.1}
    found = [revdeq.solve(f, z0, x, kwargs=given).z, revdeq.solve(lambda z, x: f(z, x, **given), z0, x).z]
    assert torch.equal(revdeq.RevDEQ(f)(x, z0=z0, **given), found[0])
    assert all(map(torch.equal, *(torch.autograd.grad(z.sum(), [x, scale]) for z in found)))
    with pytest.raises(TypeError, match="scale"):
        revdeq.solve(f, z0, x)


def test_without_a_gradient_f_may_fill_a_cache():
    """Such as keys and values of every evaluation, because no backward pass repeats them."""
    (z0, x), f, cache = inputs(), Block(), torch.zeros(2 * N, 3, D)

    def filling(z, x, cache, evaluation):
        cache[evaluation] = z
        return f(z, x)

    with torch.no_grad():
        solution = revdeq.solve(filling, z0, x, cache, max_steps=N, indexed=True)
    assert torch.equal(cache[0], z0) and torch.equal(cache[-1], solution.y)


# revdeq.loop: z <- f(z), as close as an invertible iteration can be


class Rotation(nn.Module):
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
    return torch.autograd.grad(loss, f.weight)[0].flatten()


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_revdeq_loop_is_close_to_plain_looping(factor):
    """In each pass, 1/64 of the state two passes before replaces f. The error of a pass does not grow in later ones, so
    16 passes leave at most 16/64 of the size of a state, if all errors have the same direction."""
    f, x, z0 = Rotation(factor), torch.randn(4, 8), torch.randn(4, 8)
    solution, expected = revdeq.loop(f, z0, x, times=16), plainly(f, z0, x, 16)
    assert (solution.z - expected).norm() < 16 / 64 * expected.norm()
    assert (solution.y - plainly(f, z0, x, 15)).norm() < 16 / 64 * expected.norm()
    ours, theirs = gradient(solution.z.square().sum(), f), gradient(expected.square().sum(), f)
    assert nn.functional.cosine_similarity(ours, theirs, 0) > 0.99  # .14 rad, and so within 16/64


def test_revdeq_loop_is_a_solve_with_beta_near_1_and_its_options():
    f, x, z0 = Rotation(1.0), torch.randn(4, 8), torch.randn(4, 8)
    solution = revdeq.loop(f, z0, x, times=12)
    assert (solution.steps, solution.nfe, solution.beta, solution.state) == (6, 12, 63 / 64, "exact")
    assert torch.equal(solution.z, revdeq.solve(f, z0, x, beta=63 / 64, max_steps=6, state="exact").z)
    assert torch.equal(revdeq.loop(f, z0, times=12, kwargs={"x": x}).z, solution.z)

    def indexed(z, x, evaluation):
        return f(z, x), z.new_tensor(float(evaluation))

    assert revdeq.loop(indexed, z0, x, times=4, indexed=True, aux=True).aux == 0 + 1 + 2 + 3


def test_the_gradient_of_a_loop_is_exact_at_any_depth():
    """Compared with a stored graph of the same iteration in float64. The resolution of integers and float32 is 6e-8."""
    f, x, z0 = Rotation(0.9), torch.randn(4, 8), torch.randn(4, 8)
    ours = gradient(revdeq.loop(f, z0, x, times=200, check="raise").z.sum(), f)
    fine = copy.deepcopy(f).double()
    theirs = gradient(iterate(fine, z0.double(), x.double(), beta=63 / 64, max_steps=100)[-1].z.sum(), fine)
    # A contraction by .9 adds up roundings of 200 passes to at most 10 of them, of a few units of 6e-8 each.
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


@pytest.mark.parametrize("times", [1, 5, 0, True, 2.0])
def test_times_is_an_even_number(times):
    with pytest.raises(ValueError, match=f"times = {times}.*even"):
        revdeq.loop(torch.tanh, torch.zeros(3), times=times)
    with pytest.raises(TypeError, match="max_steps = 4.*times"):
        revdeq.loop(torch.tanh, torch.zeros(3), max_steps=4)
