"""What looped models need: the index of an evaluation, losses on intermediate steps, auxiliary outputs, continuing a
solution, and a warning if gradients explode. Gradients are those of the stored graph of the iteration."""

import copy
import gc
import warnings
import weakref
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import revdeq
from revdeq._device import peak_memory

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
    assert aux != "list" or len(solution.aux) == 2 * N


def test_a_loss_on_aux_alone_and_a_nested_aux():
    f, (z0, x) = Block(), inputs()

    def g(z, x, evaluation):
        out, aux = f(z, x, evaluation)
        return out, {"mean": aux, "count": torch.ones(())}

    aux = revdeq.solve(g, z0, x, max_steps=N, indexed=True, aux=True).aux  # the solution is gone
    ours = torch.autograd.grad(aux["mean"], [z0, x])
    close(ours, torch.autograd.grad(sum(a for *_, a in stored(f, z0, x)), [z0, x]))
    assert aux["count"] == 2 * N


def test_memory_of_aux_does_not_grow():
    f = Block(200)
    z0, x = torch.zeros(2000, D), torch.randn(2000, D)

    def run(steps):
        solution = revdeq.solve(f, z0, x, max_steps=steps, indexed=True, aux=True)
        (solution.aux + solution.z.sum()).backward()

    run(2)
    assert peak_memory(lambda: run(30)) <= 1.05 * peak_memory(lambda: run(4))


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


def test_a_counter_in_f_is_noticed_and_the_error_names_indexed():
    calls = []

    def f(z, x):
        calls.append(1)
        return torch.tanh(0.5 * z + x * len(calls))

    z0, x = inputs()
    solution = revdeq.solve(f, z0, x, max_steps=N, check="raise")
    with pytest.raises(revdeq.ReconstructionError, match="indexed=True"):
        solution.z.sum().backward()


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


def test_steps_with_an_f_that_changes_its_input():
    weight, (z0, x) = torch.randn(D).requires_grad_(), inputs()

    def total(f):
        return sum(s.z.sum() + s.y.sum() for s in revdeq.steps(f, z0, x, max_steps=3))

    ours = torch.autograd.grad(total(lambda z, x: z.mul_(0.5).add_(weight * x)), [weight, x])
    close(ours, torch.autograd.grad(total(lambda z, x: 0.5 * z + weight * x), [weight, x]))


def test_steps_frees_its_memory():
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    gc.collect()
    for s in revdeq.steps(f, z0, x, max_steps=4):
        if s.steps == 2:
            break
    s.z.sum().backward()
    ref = weakref.ref(s.z)
    del s
    assert ref() is None


@pytest.mark.parametrize("options", STATES.values(), ids=STATES)
def test_continuing_a_solution_gives_the_bits_of_one_solve(options):
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    targets, options = [z0, x, *f.linear.parameters()], {"state": "float64", **options}
    whole = revdeq.solve(f, z0, x, max_steps=7, **options)
    part = revdeq.solve(f, z0, x, max_steps=3, **options)
    both = revdeq.solve(f, part, x, max_steps=4, **options)
    assert torch.equal(both.z, whole.z) and torch.equal(both.y, whole.y)
    close(torch.autograd.grad(both.z.sum(), targets), torch.autograd.grad(whole.z.sum(), targets))


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_a_continued_solution_has_the_next_indices_and_pairs(state):
    """With exact gradients, also of the schedule."""
    f, (z0, x) = Block(aux=False), inputs()
    torch.manual_seed(2)
    schedule = (0.3 + 0.4 * torch.rand(2 * N, 2)).requires_grad_()
    options = {"state": state, "indexed": True, "schedule": schedule}
    whole = revdeq.solve(f, z0, x, max_steps=N, **options)
    first = revdeq.solve(f, z0, x, max_steps=1, **options)
    rest = revdeq.solve(f, revdeq.solve(f, first, x, max_steps=1, **options), x, max_steps=N - 2, **options)
    # A continued exact state starts without a remainder, which moves it by a unit or two of its resolution.
    unit = 0 if state == "float64" else 2**-24
    assert (whole.z - rest.z).abs().max() <= 4 * unit and (whole.y - rest.y).abs().max() <= 4 * unit
    leaves = [z0, x, schedule, *f.parameters()]
    close(torch.autograd.grad(rest.z.sum(), leaves), torch.autograd.grad(whole.z.sum(), leaves))


@pytest.mark.parametrize("learnt", [True, "pair"])
def test_a_layer_with_learnt_coefficients_continues_with_the_next_ones(learnt):
    f, (z0, x) = Block(aux=False), inputs()
    layer = revdeq.RevDEQ(f, max_steps=N, indexed=True, learn_coefficients=learnt)
    with torch.no_grad():
        layer.learnt.mul_(0.8)
    *_, whole = layer.steps(x, z0=z0)
    first = revdeq.solve(f, z0, x, **layer._used(1))
    assert torch.equal(layer(x, z0=first, max_steps=N - 1), whole.z)


def test_a_solution_cannot_be_continued_after_its_backward_pass():
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    part = revdeq.solve(f, z0, x, max_steps=3)
    part.z.sum().backward()
    with pytest.raises(RuntimeError, match="y0=s.y"):
        revdeq.solve(f, part, x)
    revdeq.solve(f, part.z.detach(), x, y0=part.y.detach()).z.sum().backward()


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
    buffer = torch.zeros(3, D)
    with pytest.raises(RuntimeError, match=r"kwargs\['buffer'\] in place"):
        revdeq.solve(lambda z, x, buffer: buffer.add_(1) * 0 + torch.tanh(z + x), z0, x, kwargs={"buffer": buffer})
    with pytest.raises(TypeError, match="scale"):
        revdeq.solve(f, z0, x)


def test_max_steps_of_one_call():
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    deq = revdeq.RevDEQ(f, max_steps=3)
    assert torch.equal(deq(x, z0=z0, max_steps=5), revdeq.solve(f, z0, x, max_steps=5).z)
    assert deq.last.steps == 5 and deq.max_steps == 3


# Exploding gradients


def expanding(scale):
    torch.manual_seed(0)
    weight = torch.randn(D, D)
    return lambda z, x: torch.nn.functional.layer_norm(z + torch.sin(scale * z @ weight) + x, (D,))


def test_the_growth_of_the_adjoint_is_that_of_the_stored_graph():
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    solution = revdeq.solve(f, z0, x, max_steps=N)
    assert solution.adjoint.growth is None
    (2 * solution.z.sum()).backward()
    y, z = z0.detach().double(), z0.detach().double()
    y1 = (0.5 * y + 0.5 * f(z.float(), x).double()).detach().requires_grad_()
    z1 = 0.5 * z + 0.5 * f(y1.float(), x).double()
    a, b = y1, z1
    for _ in range(N - 1):
        a = 0.5 * a + 0.5 * f(b.float(), x).double()
        b = 0.5 * b + 0.5 * f(a.float(), x).double()
    by_y, by_z = torch.autograd.grad(2 * b.sum(), [y1, z1])
    expected = torch.hypot(by_y.norm(), by_z.norm()) / torch.full((3, D), 2.0).norm()
    torch.testing.assert_close(solution.adjoint.growth.double(), expected, rtol=1e-5, atol=0)


def test_an_expanding_loop_warns_once():
    z0, x = inputs()
    f = expanding(30.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            solution = revdeq.solve(f, z0, x, beta=0.8, max_steps=8)
            solution.z[:, 0].sum().backward()
    (warning,) = caught
    assert warning.category is revdeq.ConvergenceWarning
    assert "grew" in str(warning.message) and "gamma" in str(warning.message)
    assert solution.adjoint.growth > 1000


def test_a_gradient_that_is_not_finite_raises():
    z0, x = inputs()
    scale = torch.full((), 1e20, requires_grad=True)
    solution = revdeq.solve(lambda z, x: torch.sin(scale * z) + x, z0, x, beta=0.5, max_steps=4, check="raise")
    with pytest.raises(revdeq.ConvergenceError, match="not finite.*gamma"):
        solution.z.sum().backward()


def test_an_infinite_incoming_gradient_is_left_to_the_grad_scaler():
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    for gradient in ("exact", "implicit"):
        z = revdeq.solve(f, z0, x, max_steps=20, check="raise", gradient=gradient).z
        z.backward(torch.full_like(z, torch.inf))
        assert not x.grad.isfinite().all()


def test_a_copy_of_a_solution_has_no_graph():
    f, (z0, x) = Block(indexed=False, aux=False), inputs()
    module = nn.Module()
    module.kept = revdeq.solve(f, z0, x)
    copied = copy.deepcopy(module).kept
    assert torch.equal(copied.z, module.kept.z) and not copied.z.requires_grad


def test_verify_reports_the_growth():
    z0, x = inputs()
    calm, wild = revdeq.verify(Block(indexed=False, aux=False), z0, x), revdeq.verify(expanding(30.0), z0, x, beta=0.8)
    assert calm.growth < 1 and "multiplied by" in str(calm) and "gamma" not in str(calm)
    assert wild.growth > 1000 and "gamma" in str(wild)


def test_verify_with_indexed_and_aux():
    z0, x = inputs()
    report = revdeq.verify(Block(), z0, x, max_steps=N, indexed=True, aux=True)
    assert report.exact and report.evaluations == 2 * N


def test_without_a_gradient_f_may_fill_caches():
    """Such as keys and values of every evaluation, because no backward pass repeats them."""
    z0, x = inputs()
    f = Block(indexed=False, aux=False)
    f.register_buffer("cache", torch.zeros(2 * N, 3, D))
    given = torch.zeros(2 * N, 3, D)

    def filling(z, x, given, evaluation):
        f.cache[evaluation] = z
        given[evaluation] = z
        return f(z, x)

    with torch.no_grad():
        solution = revdeq.solve(filling, z0, x, given, max_steps=N, indexed=True)
    assert torch.equal(f.cache, given) and torch.equal(given[0], z0) and given.abs().sum((1, 2)).all()
    assert torch.equal(solution.y, given[-1])
    with pytest.raises(RuntimeError, match=r"args\[1\]|cache"):
        revdeq.solve(filling, z0, x, given, max_steps=N, indexed=True)
