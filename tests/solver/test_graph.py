"""The solve is part of autograd's graph, without saved tensors: consequences, compared with a stored graph."""

import functools
import subprocess
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import revdeq
from revdeq._device import peak_memory
from revdeq._solver import private
from revdeq.baselines import stored_graph

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
D, STEPS = 6, 4


def solver(**options):
    return lambda *args: revdeq.solve(*args, max_steps=STEPS, check="raise", **options)


SOLVERS = {
    "float64": solver(state="float64"),
    "exact": solver(state="exact"),
    "gamma": solver(gamma=0.8),
    "keep": solver(keep=3),
}


def same(ours, expected, tolerance=2e-6):
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).norm() <= tolerance * b.norm() + 1e-12


def compared(case):
    """A test of the gradients that `case` returns, given a function that solves."""

    @functools.wraps(case)
    def test(name):
        grads = []
        for solve in (SOLVERS[name], None):
            torch.manual_seed(0)
            stored = functools.partial(stored_graph, max_steps=STEPS, gamma=0.8 if name == "gamma" else 1.0)
            grads.append(case(stored if solve is None else lambda *args, solve=solve: solve(*args).z))
        same(*grads)

    del test.__wrapped__
    return pytest.mark.parametrize("name", SOLVERS)(test)


class KeepsOnCtx(torch.autograd.Function):
    """Stores its tensors where saved-tensor hooks do not see them."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.tensors = x, w
        return x * w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.tensors
        return g * w, (g * x).sum(0)


@compared
def test_a_function_that_stores_tensors_on_its_context(solve):
    w, x = torch.randn(D, requires_grad=True), torch.randn(3, D)
    z = solve(lambda z: torch.tanh(KeepsOnCtx.apply(z, w) + x), torch.zeros(3, D))
    return torch.autograd.grad(z.square().sum(), [w])


@compared
def test_a_function_that_unpacks_its_saved_tensors_twice(solve):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            return g * ctx.saved_tensors[1], (g * ctx.saved_tensors[0]).sum(0)

    w, x = torch.randn(D, requires_grad=True), torch.randn(3, D)
    z = solve(lambda z: torch.tanh(Twice.apply(z, w) + x), torch.zeros(3, D))
    return torch.autograd.grad(z.square().sum(), [w])


@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize("state", ["float64", "exact"])
def test_a_different_module_in_every_evaluation(state, keep):
    torch.manual_seed(0)
    layers, x, order = nn.ModuleList(nn.Linear(D, D) for _ in range(2 * STEPS)), torch.randn(3, D), []

    def f(z):
        return torch.tanh(layers[order.pop(0)](z) + x)

    order[:] = range(2 * STEPS)
    expected = stored_graph(f, torch.zeros(3, D), max_steps=STEPS)
    order[:] = [*range(2 * STEPS), *reversed(range(2 * STEPS - keep))]
    z = solver(state=state, keep=keep)(f, torch.zeros(3, D)).z
    parameters = list(layers.parameters())
    same(torch.autograd.grad(z.sum(), parameters), torch.autograd.grad(expected.sum(), parameters))
    assert not order


def test_y_without_z_and_two_solutions_in_one_backward_pass():
    torch.manual_seed(0)
    f, g, x = nn.Linear(D, D), nn.Linear(D, D), torch.randn(3, D)

    def case(solve):
        for p in (*f.parameters(), *g.parameters()):
            p.grad = None
        first = solve(lambda z: torch.tanh(f(z) + x), torch.zeros(3, D))
        second = solve(lambda z: torch.tanh(g(z) + f(x)), torch.zeros(3, D))
        (first[0].sum() + second[1].square().sum() + (first[1] * second[0]).sum()).backward()
        return [p.grad for p in (*f.parameters(), *g.parameters())]

    def ours(*args):
        solution = revdeq.solve(*args, max_steps=STEPS, check="raise")
        return solution.y, solution.z

    def stored(f, z0):
        y, z = z0.double(), z0.double()
        for _ in range(STEPS):
            y = 0.5 * y + 0.5 * f(z.float()).double()
            z = 0.5 * z + 0.5 * f(y.float()).double()
        return y.float(), z.float()

    same(case(ours), case(stored))
    y = revdeq.solve(lambda z: torch.tanh(f(z) + x), torch.zeros(3, D), max_steps=STEPS).y
    expected = stored(lambda z: torch.tanh(f(z) + x), torch.zeros(3, D))[0]
    same(torch.autograd.grad(y.sum(), f.weight), torch.autograd.grad(expected.sum(), f.weight))


@compared
def test_a_reentrant_checkpoint_inside_f(solve):
    f, x = nn.Sequential(nn.Linear(D, D), nn.Tanh()), torch.randn(3, D)
    start = torch.zeros(3, D, requires_grad=True)
    solve(lambda z: 0.5 * checkpoint(f, z, use_reentrant=True) + x, start).square().sum().backward()
    return [p.grad for p in f.parameters()]


@compared
def test_lists_and_objects_that_f_changes(solve):
    class Log:
        losses = 0

    f, x, seen, log = nn.Linear(D, D), torch.randn(3, D, requires_grad=True), [], Log()

    def logging(z, x, seen, log):
        out = torch.tanh(f(z) + x)
        seen.append(z)
        log.losses = log.losses + out.square().mean()
        return out

    z = solve(logging, torch.zeros(3, D), x, seen, log)
    return torch.autograd.grad(z.sum() + log.losses + seen[5].square().sum(), [x, f.weight])


@pytest.mark.parametrize("name", SOLVERS)
def test_energies_and_forces_by_torch_func(name):
    """There torch does not allow saved-tensor hooks: the graph is stored, and the gradient is right."""
    net, x, grads = nn.Linear(D, 1), torch.randn(3, D), []

    def f(z):
        force = torch.func.vmap(torch.func.grad(lambda u: torch.tanh(net(u)).sum()))(z + x)
        return 0.4 * z - 0.3 * force

    stored = functools.partial(stored_graph, max_steps=STEPS, gamma=0.8 if name == "gamma" else 1.0)
    for solve in (lambda *args: SOLVERS[name](*args).z, stored):
        grads.append(torch.autograd.grad(solve(f, torch.ones(3, D)).square().sum(), net.weight))
    same(*grads)


def test_a_backward_pass_in_another_thread_without_the_solution():
    f, x, kept = nn.Linear(D, D), torch.randn(3, D), []

    def keeping(z):
        kept.append(torch.tanh(f(z) + x))
        return kept[-1]

    solution = revdeq.solve(keeping, torch.zeros(3, D), max_steps=STEPS)
    expected = torch.autograd.grad(kept[5].sum(), f.weight, retain_graph=True)
    grads = []
    thread = threading.Thread(target=lambda: grads.append(torch.autograd.grad(kept[5].sum(), f.weight)))
    thread.start()
    thread.join()
    same(grads[0], expected)
    assert solution.steps == STEPS


def test_outputs_that_wrap_other_tensors_are_refused_or_awaited():
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(TypeError, match="f's output is a TwoTensor, which wraps other tensors"):
        revdeq.solve(lambda z: TwoTensor(z, z), torch.zeros(3))
    with torch.no_grad():
        z = revdeq.solve(lambda z: AsyncCollectiveTensor(0.5 * z + 1), torch.zeros(3), max_steps=2).z
        assert torch.equal(z, stored_graph(lambda z: 0.5 * z + 1, torch.zeros(3), max_steps=2))


@pytest.mark.parametrize("name", ["_graph_task", "_keep_graph", "_has_flag"])
def test_without_a_private_torch_api(monkeypatch, name):
    monkeypatch.setattr(private, name, None)
    f, x = nn.Linear(D, D), torch.randn(3, D)
    expected = torch.autograd.grad(
        stored_graph(lambda z: torch.tanh(f(z) + x), torch.zeros(3, D), max_steps=STEPS).sum(), f.weight
    )
    z = SOLVERS["exact"](lambda z: torch.tanh(f(z) + x), torch.zeros(3, D)).z
    same(torch.autograd.grad(z.sum(), f.weight, retain_graph=True), expected)
    same(torch.autograd.grad(z.sum(), f.weight), expected)


def test_a_first_backward_pass_does_not_import_the_compiler():
    program = (
        "import sys, torch, revdeq\n"
        "f = torch.nn.Linear(3, 3)\n"
        "revdeq.solve(lambda z: torch.tanh(f(z)), torch.ones(2, 3)).z.sum().backward()\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_memory_of_solves_inside_f_does_not_grow(state):
    """The tensors of an inner solve are left out of the graph like all others."""
    torch.manual_seed(0)
    inner, outer, x = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(64, 64)

    def f(z):
        h = torch.tanh(outer(z))
        return revdeq.solve(lambda w: torch.tanh(0.3 * inner(w) + h), torch.zeros_like(z), max_steps=2, state=state).z

    def step(n):
        (revdeq.solve(f, x, max_steps=n, state=state, beta=0.5, check=None).z.sum()).backward()

    step(2)
    assert peak_memory(lambda: step(12)) <= 1.1 * peak_memory(lambda: step(3))


@pytest.mark.parametrize("wide", [False, True])
def test_a_thousand_steps(wide):
    """Tensors take the same memory at every depth."""
    f, x = nn.Linear(256 if wide else 8, 256 if wide else 8), torch.randn(64 if wide else 4, 256 if wide else 8)

    def step(n):
        revdeq.solve(
            lambda z: torch.tanh(f(z) + x), torch.zeros_like(x), max_steps=n, state="float64", check=None
        ).z.sum().backward()

    step(4 if wide else 1000)
    assert peak_memory(lambda: step(100)) <= 1.05 * peak_memory(lambda: step(8)) + 4096
