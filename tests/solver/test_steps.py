"""What looped models need: the index of an evaluation, losses on intermediate steps, auxiliary outputs, a start in the
middle, and plain looping. Gradients are those of the stored graph of the iteration."""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import revdeq

D, N = 6, 5
STATES = {"float64": {"beta": 0.5}, "exact": {"beta": 0.8, "state": "exact"}, "damped": {"beta": 0.75, "gamma": 0.5}}
TOLERANCE = 3e-6
"""Sums of a few float32 numbers in another order, and 6e-8 in the states of the exact one."""


class Block(nn.Module):
    """Has a different bias in every evaluation, and returns the mean square of its output as aux."""

    def __init__(self, evaluations=2 * N, indexed=True, aux=True):
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.bias = nn.Linear(D, D), nn.Embedding(evaluations, D)
        self.indexed, self.aux = indexed, aux

    def forward(self, z, x, evaluation=0):
        out = torch.tanh(0.5 * self.linear(z) + x + (self.bias.weight[evaluation] if self.indexed else 0))
        return (out, out.square().mean()) if self.aux else out


def stored(f, z0, x, steps=N, y0=None, beta=0.5, gamma=1.0, state=None):
    """y, z and aux of every step, by plain autograd."""
    y, z, rows = (z0 if y0 is None else y0).double(), z0.double(), []
    for n in range(steps):
        aux = 0
        for k in (2 * n, 2 * n + 1):
            read = (z if k % 2 == 0 else y).float()
            out = f(read, x, k)
            out, more = out if f.aux else (out, torch.zeros(()))
            moved = (1 - beta) * (y if k % 2 == 0 else z) + beta * ((1 - gamma) * read.double() + gamma * out.double())
            y, z, aux = (moved, z, aux + more) if k % 2 == 0 else (y, moved, aux + more)
        rows.append((y.float(), z.float(), aux))
    return rows


def inputs():
    torch.manual_seed(1)
    return torch.randn(3, D).requires_grad_(), torch.randn(3, D).requires_grad_()


def close(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).norm() <= TOLERANCE * (1e-3 + b.norm())


@pytest.mark.parametrize("options", STATES.values(), ids=STATES)
@pytest.mark.parametrize("aux", [True, "list"])
def test_indexed_and_aux(options, aux):
    f, (z0, x) = Block(), inputs()
    targets = [z0, x, *f.parameters()]
    solution = revdeq.solve(f, z0, x, max_steps=N, indexed=True, aux=aux, check="raise", **options)
    total = sum(solution.aux) if aux == "list" else solution.aux
    ours = torch.autograd.grad(solution.z.sum() + 2 * total, targets)
    rows = stored(f, z0, x, **options)
    expected = torch.autograd.grad(rows[-1][1].sum() + 2 * sum(aux for *_, aux in rows), targets)
    close(ours, expected)
    if aux == "list":  # in the order of the evaluations
        close([a + b for a, b in zip(solution.aux[::2], solution.aux[1::2], strict=True)], [aux for *_, aux in rows])


def test_a_loss_on_aux_alone_and_a_nested_aux():
    f, (z0, x) = Block(), inputs()

    def g(z, x, evaluation):
        out, aux = f(z, x, evaluation)
        return out, {"mean": aux, "count": torch.ones(())}

    aux = revdeq.solve(g, z0, x, max_steps=N, indexed=True, aux=True).aux  # the solution is gone
    ours = torch.autograd.grad(aux["mean"], [z0, x])
    close(ours, torch.autograd.grad(sum(a for *_, a in stored(f, z0, x)), [z0, x]))
    assert aux["count"] == 2 * N


def test_a_layer_returns_aux_beside_z():
    deq, x = revdeq.RevDEQ(lambda z, x: (torch.tanh(0.5 * z + x), z.sum()), aux=True), torch.ones(2, 3)
    solution = revdeq.solve(deq.f, torch.zeros(2, 3), x, aux=True)
    assert all(map(torch.equal, deq(x), (solution.z, solution.aux)))


def test_a_different_module_in_every_evaluation_some_without_gradients():
    torch.manual_seed(0)
    layers, (z0, x) = nn.ModuleList(nn.Linear(D, D) for _ in range(2 * N + 2)), inputs()

    def f(z, x, evaluation):
        return torch.tanh(0.5 * layers[evaluation](z) + x)

    f.aux = False
    revdeq.solve(f, z0, x, max_steps=N, indexed=True, check="raise").z.sum().backward()
    ours = [p.grad for p in layers.parameters()]
    assert all(g is None for g in ours[-4:])
    close(ours[:-4], torch.autograd.grad(stored(f, z0, x)[-1][1].sum(), list(layers.parameters())[:-4]))


@pytest.mark.parametrize("options", STATES.values(), ids=STATES)
def test_steps_have_the_bits_of_solve(options):
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    steps = list(revdeq.steps(f, z0, x, max_steps=N, **options))
    assert [s.steps for s in steps] == list(range(1, N + 1))
    for s in steps:
        whole = revdeq.solve(f, z0, x, max_steps=s.steps, **{"state": steps[0].state, **options})
        assert torch.equal(s.z, whole.z) and torch.equal(s.y, whole.y) and s.change == whole.change
    with torch.no_grad():
        plain = list(revdeq.steps(f, z0, x, max_steps=N, **{"state": steps[0].state, **options}))
    assert all(torch.equal(a.z, b.z) for a, b in zip(steps, plain, strict=True))
    assert not plain[-1].z.requires_grad


@pytest.mark.parametrize("options", STATES.values(), ids=STATES)
@pytest.mark.parametrize("keep", [0, 3])
def test_losses_on_all_steps(options, keep):
    f, (z0, x) = Block(), inputs()
    targets = [z0, x, *f.parameters()]
    settings = {"indexed": True, "aux": True, "keep": keep, "check": "raise", **options}
    loss = 0
    for s in revdeq.steps(f, z0, x, max_steps=N, **settings):
        loss = loss + s.steps * s.z.square().sum() + s.y.sum() + s.aux
    ours = torch.autograd.grad(loss, targets)
    rows = stored(f, z0, x, **options)
    losses = [n * z.square().sum() + y.sum() + aux for n, (y, z, aux) in enumerate(rows, 1)]
    close(ours, torch.autograd.grad(sum(losses), targets))


def test_leaving_the_loop_and_a_tolerance():
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    for s in revdeq.steps(f, z0, x, max_steps=50):
        if s.steps == 3:
            break
    close(torch.autograd.grad(s.z.sum(), [z0, x]), torch.autograd.grad(stored(f, z0, x, 3)[-1][1].sum(), [z0, x]))
    *_, last = revdeq.steps(f, z0, x, max_steps=50, tol=1e-3)
    assert last.steps == revdeq.solve(f, z0, x, max_steps=50, tol=1e-3).steps < 50


def test_a_backward_pass_between_two_steps():
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    steps = revdeq.steps(f, z0, x, max_steps=N)
    first = next(steps)
    early = torch.autograd.grad(first.z.sum(), x, retain_graph=True)
    close(early, torch.autograd.grad(stored(f, z0, x, 1)[-1][1].sum(), x))
    *_, last = steps
    close(torch.autograd.grad(last.z.sum(), x), torch.autograd.grad(stored(f, z0, x)[-1][1].sum(), x))
    steps = revdeq.steps(f, z0, x, max_steps=N)
    next(steps).z.sum().backward()  # frees the graph, and leaves the states
    *_, last = steps
    assert torch.equal(last.z, revdeq.solve(f, z0, x, max_steps=N).z)


def test_steps_of_a_layer_and_what_they_refuse():
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    deq = revdeq.RevDEQ(f, max_steps=3)
    *_, last = deq.steps(x, z0=z0)
    assert torch.equal(last.z, deq(x, z0=z0))
    assert len(list(deq.steps(x, max_steps=2))) == 2
    with pytest.raises(ValueError, match="gradient = 'implicit'"):
        revdeq.steps(f, z0, x, gradient="implicit")
    steps = revdeq.steps(f, z0, x)
    with torch.no_grad():
        next(steps).z.mul_(2)
    with pytest.raises(RuntimeError, match="modified in place.*clone"):
        next(steps)


@pytest.mark.parametrize("options", STATES.values(), ids=STATES)
def test_y0(options):
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    y0 = torch.randn(3, D).requires_grad_()
    targets = [z0, y0, x, *f.linear.parameters()]
    solution = revdeq.solve(f, z0, x, y0=y0, max_steps=N, check="raise", **options)
    ours = torch.autograd.grad(solution.z.sum() + solution.y.square().sum(), targets)
    y, z, _ = stored(f, z0, x, y0=y0, **options)[-1]
    close(ours, torch.autograd.grad(z.sum() + y.square().sum(), targets))
    assert torch.equal(revdeq.RevDEQ(f, max_steps=N, **options)(x, z0=z0, y0=y0), solution.z)
    with pytest.raises(ValueError, match="y0 .*z0"):
        revdeq.solve(f, z0, x, y0=y0[:2])


def test_float64_states_continue_from_their_values():
    f, (z0, x) = Block(indexed=False, aux=False).double(), [v.detach().double() for v in inputs()]
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

    def f(state, x):
        return kind(torch.tanh(0.5 * linear(state.low) + x), 0.3 * torch.sin(state.high))

    solution = revdeq.solve(f, kind(z0, z0), x)
    assert isinstance(solution.z, kind)
    ours = torch.autograd.grad(solution.z.high.sum() + solution.z.low.sum(), [z0, x])
    pair = revdeq.solve(
        lambda s, x: tuple(vars(f(kind(*s), x)).values()) if kind is Carried else tuple(f(kind(*s), x)), (z0, z0), x
    )
    expected = torch.autograd.grad(pair.z[0].sum() + pair.z[1].sum(), [z0, x])
    assert all(map(torch.equal, ours, expected))


def test_keyword_arguments_of_f():
    linear, (z0, x) = nn.Linear(D, D), inputs()
    scale = torch.ones(D, requires_grad=True)

    def f(z, x, *, scale, shift=0.0):
        return torch.tanh(0.5 * linear(z) * scale + x + shift)

    ours = torch.autograd.grad(revdeq.solve(f, z0, x, kwargs={"scale": scale, "shift": 0.1}).z.sum(), [x, scale])
    expected = torch.autograd.grad(
        revdeq.solve(lambda z, x: f(z, x, scale=scale, shift=0.1), z0, x).z.sum(), [x, scale]
    )
    assert all(map(torch.equal, ours, expected))
    assert torch.equal(
        revdeq.RevDEQ(f)(x, z0=z0, scale=scale, shift=0.1),
        revdeq.solve(f, z0, x, kwargs={"scale": scale, "shift": 0.1}).z,
    )
    with pytest.raises(TypeError, match="scale"):
        revdeq.solve(f, z0, x)


def test_without_a_gradient_f_may_fill_a_cache():
    """Such as keys and values of every evaluation, because no backward pass repeats them."""
    (z0, x), f, cache = inputs(), Block(indexed=False, aux=False), torch.zeros(2 * N, 3, D)

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
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(f.parameters()))])


@pytest.mark.parametrize("factor", [0.5, 1.0])
def test_revdeq_loop_is_close_to_plain_looping(factor):
    """In each pass, 1/64 of the state two passes before replaces f. The error of a pass does not grow in later ones, so
    16 passes leave at most 16/64 of the size of a state, if all errors have the same direction."""
    torch.manual_seed(0)
    f, x, z0 = Rotation(factor), torch.randn(4, 8), torch.randn(4, 8)
    solution, expected = revdeq.loop(f, z0, x, times=16), plainly(f, z0, x, 16)
    assert (solution.z - expected).norm() < 16 / 64 * expected.norm()
    assert (solution.y - plainly(f, z0, x, 15)).norm() < 16 / 64 * expected.norm()
    ours, theirs = gradient(solution.z.square().sum(), f), gradient(expected.square().sum(), f)
    assert nn.functional.cosine_similarity(ours, theirs, 0) > 0.99  # .14 rad, and so within 16/64


def test_revdeq_loop_is_a_solve_with_beta_near_1():
    torch.manual_seed(0)
    f, x, z0 = Rotation(1.0), torch.randn(4, 8), torch.randn(4, 8)
    solution = revdeq.loop(f, z0, x, times=12)
    assert (solution.steps, solution.nfe, solution.beta, solution.state) == (6, 12, 63 / 64, "exact")
    assert torch.equal(solution.z, revdeq.solve(f, z0, x, beta=63 / 64, max_steps=6, state="exact").z)


def test_the_gradient_of_a_loop_is_exact_at_any_depth():
    """Compared with a stored graph of the same iteration in float64. The resolution of integers and float32 is 6e-8."""
    torch.manual_seed(0)
    f, x, z0 = Rotation(0.9), torch.randn(4, 8), torch.randn(4, 8)
    ours = gradient(revdeq.loop(f, z0, x, times=200, check="raise").z.sum(), f)
    fine = copy.deepcopy(f).double()
    z = revdeq.baselines.stored_graph(fine, z0.double(), x.double(), beta=63 / 64, max_steps=100)
    theirs = gradient(z.sum(), fine)
    # A contraction by .9 adds up roundings of 200 passes to at most 10 of them, of a few units of 6e-8 each.
    assert (ours - theirs).norm() < 1e-5 * theirs.norm()


def test_a_loop_takes_the_options_of_a_solve():
    f, x, z0 = Rotation(0.5), torch.randn(4, 8), torch.randn(4, 8)

    def indexed(z, x, evaluation):
        return f(z, x), z.new_tensor(float(evaluation))

    assert revdeq.loop(indexed, z0, x, times=4, indexed=True, aux=True).aux == 0 + 1 + 2 + 3
    assert torch.equal(revdeq.loop(f, z0, times=4, kwargs={"x": x}).z, revdeq.loop(f, z0, x, times=4).z)


@pytest.mark.parametrize("times", [1, 5, 0, True, 2.0])
def test_times_is_an_even_number(times):
    with pytest.raises(ValueError, match=f"times = {times} must be an even integer"):
        revdeq.loop(torch.tanh, torch.zeros(3), times=times)


def test_loop_takes_times_and_not_max_steps():
    with pytest.raises(TypeError, match="max_steps = 4.*times"):
        revdeq.loop(torch.tanh, torch.zeros(3), max_steps=4)
