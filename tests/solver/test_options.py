"""The options of a solve: coefficients, states, kept graphs and other gradients."""

import copy
import inspect
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import revdeq
from revdeq import _device
from revdeq._device import peak_memory
from revdeq._solver.options import NAMES, Options
from revdeq._solver.state import refuse_device
from revdeq.baselines import stored_graph
from revdeq.models import ConvBlock, TransformerBlock

STATES = pytest.mark.parametrize("state", ["float64", "exact"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, d=6, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(d, d, dtype=dtype)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


def relative(ours, expected):
    return max(((g - e).norm() / e.norm()).item() for g, e in zip(ours, expected, strict=True))


# declared once


@pytest.mark.parametrize(
    ("keywords", "error", "message"),
    [
        *(
            ({"beta": beta}, ValueError, f"beta = {beta!r} .*revdeq.tune")
            for beta in (1, 1.0, 1 + 1e-9, 0, -0.5, 2, 1e-60)
        ),
        *(({"beta": beta}, ValueError, "beta = .*revdeq.tune") for beta in (math.nan, math.inf, 10**400)),
        *(({"beta": beta}, TypeError, "beta = .*number") for beta in (None, 1j, "0.5", torch.zeros(2), [0.5, 0.6])),
        *(({"gamma": gamma}, ValueError, f"gamma = {gamma} .*revdeq.tune") for gamma in (0, 3.5)),
        ({"gamma": "1"}, TypeError, "gamma = '1' .*number"),
        *(({"max_steps": n}, ValueError, f"max_steps = {n} .*at least 1") for n in (0, -3)),
        *(({"max_steps": n}, TypeError, f"max_steps = {n!r} .*integer") for n in (2.5, "4")),
        *(({"tol": tol}, ValueError, f"tol = {tol} .*None") for tol in (0, -1e-3, math.nan, math.inf)),
        *(({"tol": tol}, TypeError, f"tol = {tol!r} .*None") for tol in ("1e-3", True)),
        *(({name: True}, TypeError, f"{name} = True .*number") for name in ("beta", "gamma")),
        ({"check": "ignore"}, ValueError, "check = 'ignore' .*'warn', 'raise' or None"),
        ({"state": "float32"}, ValueError, "state = 'float32' .*'auto', 'float64', 'exact'"),
        ({"gradient": "ift"}, ValueError, "gradient = 'ift' .*'exact'.*'implicit'"),
        ({"keep": -1}, ValueError, "keep = -1 .*at least 0"),
        ({"keep": 1.5}, TypeError, "keep = 1.5 .*integer"),
        ({"backward_steps": 0}, ValueError, "backward_steps = 0 .*at least 1.*None"),
        ({"keep": 2, "gradient": "implicit"}, ValueError, "keep = 2 .*gradient='exact'"),
        ({"backward_steps": 2, "gradient": "implicit"}, ValueError, "backward_steps = 2 .*gradient='exact'"),
        ({"bta": 0.5}, TypeError, "bta = 0.5: did you mean beta"),
        ({"steps": 3}, TypeError, "steps = 3: did you mean max_steps"),
        ({"solver": "anderson"}, TypeError, "solver = 'anderson': there are beta, gamma, schedule"),
        ({"x": torch.ones(3)}, TypeError, "keyword x.* position"),
    ],
)
def test_bad_options(keywords, error, message):
    with pytest.raises(error, match=message):
        revdeq.solve(torch.cos, torch.zeros(1), **keywords)
    with pytest.raises(error, match=message):
        revdeq.RevDEQ(torch.cos, **keywords)
    with pytest.raises(error, match=message):
        revdeq.verify(torch.cos, torch.zeros(1), **keywords)


def test_a_bad_option_that_equals_a_good_one_from_an_earlier_solve():
    """True equals 1, in a cache, too."""
    for name, good, bad in (("max_steps", 1, True), ("gamma", 1.0, True), ("indexed", False, 0)):
        revdeq.solve(lambda z, evaluation=0: torch.cos(z), torch.zeros(1), **{name: good})
        with pytest.raises(TypeError, match=f"{name} = {bad}"):
            revdeq.solve(torch.cos, torch.zeros(1), **{name: bad})


Z, TWO = torch.zeros(3), (torch.zeros(3), torch.zeros(3))


@pytest.mark.parametrize(
    ("z0", "error", "message"),
    [
        ((), ValueError, "z0 = .*tensor"),
        ((Z, 0.0), TypeError, r"z0\[1\] .*float.*tensor"),
        ({"h": [Z, Z.long()]}, TypeError, r"z0\['h'\]\[1\] .*int64.*z0\['h'\]\[1\].float\(\)"),
        (Z > 0, TypeError, r"z0 .*bool.*z0.float\(\)"),
        (Z + 0j, TypeError, r"z0 .*complex64.*view_as_real\(z0\)"),
        (torch.eye(3).to_sparse(), TypeError, r"z0 .*sparse_coo.*z0.to_dense\(\)"),
        ([Z, Z.to("meta")], ValueError, r"z0\[1\] .*meta.*cpu.*one device"),
        (Z.to("meta"), ValueError, "z0 .*meta"),
        (Z / 0, FloatingPointError, "z0 .*finite"),
    ],
)
def test_bad_initial_states(z0, error, message):
    with pytest.raises(error, match=message):
        revdeq.solve(lambda z: z, z0)


@pytest.mark.parametrize(("x", "kind"), [(None, "NoneType"), (torch.arange(3), "int64")])
def test_a_layer_needs_z0_if_x_cannot_be_a_state(x, kind):
    with pytest.raises(TypeError, match=f"x .*{kind}.*z0"):
        revdeq.RevDEQ(torch.cos)(x)


# gamma


# state="auto"


# keep


def gradients(f, x, seed=0, **settings):
    torch.manual_seed(seed)
    z = revdeq.solve(f, torch.zeros_like(x), x, check="raise", **settings).z
    return [z.detach(), *torch.autograd.grad(z.square().sum(), [x, *f.parameters()])]


@STATES
@pytest.mark.parametrize("tol", [None, 1e-3])
@pytest.mark.parametrize("keep", [1, 5, 8, 100])
def test_kept_graphs_change_no_bit(state, keep, tol):
    f, x = Block(), torch.randn(3, 6, requires_grad=True)
    settings = {"beta": 0.8, "max_steps": 5, "state": state, "tol": tol}
    assert all(map(torch.equal, gradients(f, x, keep=keep, **settings), gradients(f, x, **settings)))


@pytest.mark.parametrize(("keep", "again"), [(0, 8), (3, 5), (7, 1), (8, 0), (99, 0)])
def test_what_is_kept_is_not_evaluated_again(keep, again):
    block, calls = Block(), []

    def f(z, x):
        calls.append(1)
        return block(z, x)

    z = revdeq.solve(f, torch.zeros(3, 6), torch.randn(3, 6), max_steps=4, keep=keep).z
    assert len(calls) == 8
    z.sum().backward()
    assert len(calls) == 8 + again


def test_memory_grows_with_what_is_kept():
    f, x = ConvBlock(16), torch.randn(4, 16, 16, 16)

    def peak(keep):
        def run():
            revdeq.solve(f, torch.zeros_like(x), x, max_steps=8, keep=keep).z.sum().backward()

        run()
        return peak_memory(run)

    sizes = [peak(keep) for keep in (0, 4, 8, 16)]
    assert sizes == sorted(sizes) and sizes[-1] > 4 * sizes[0]


# gradient="implicit"


def fixed_point_gradient(f, x, parameters, weight):
    """The gradient at a converged fixed point, by solving with the whole Jacobian."""
    z = x.detach().clone()
    for _ in range(400):
        z = (0.5 * z + 0.5 * f(z, x)).detach()
    z.requires_grad_()
    out = f(z, x)
    jacobian = torch.autograd.functional.jacobian(lambda z: f(z, x), z).reshape(z.numel(), z.numel())
    u = torch.linalg.solve(torch.eye(z.numel(), dtype=z.dtype) - jacobian.T, weight.flatten()).view_as(z)
    return torch.autograd.grad(out, parameters, u)


@pytest.mark.parametrize(("beta", "gamma"), [(0.5, 1.0), (0.8, 0.8), (1.2, 0.9)])
def test_the_implicit_gradient_is_that_of_the_fixed_point(beta, gamma):
    f, x = Block(dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    parameters = [x, *f.parameters()]
    settings = {"beta": beta, "gamma": gamma, "max_steps": 120, "check": "raise"}
    solution = revdeq.solve(f, torch.zeros_like(x), x, gradient="implicit", **settings)
    assert solution.adjoint.steps is None
    ours = torch.autograd.grad(solution.z, parameters, weight)
    assert solution.adjoint.steps == 120 and solution.adjoint.change < 1e-10
    assert relative(ours, fixed_point_gradient(f, x, parameters, weight)) <= 1e-9


def test_the_implicit_gradient_counts_evaluations_and_products():
    block, calls, products = Block(), [], []

    def f(z, x):
        calls.append(torch.is_grad_enabled() and z.requires_grad)
        out = block(z, x)
        if out.requires_grad:
            out.register_hook(lambda g: products.append(1))
        return out

    z = revdeq.solve(f, torch.zeros(3, 6), torch.randn(3, 6), max_steps=5, gradient="implicit").z
    assert calls == [True] * 10, "all in one grad mode: some modules compute otherwise without one"
    z.sum().backward()
    assert len(calls) == 11 and len(products) == 2 * 5 + 1


def test_the_implicit_gradient_with_a_tolerance_hooks_and_several_tensors():
    block, x, calls = Block(), torch.randn(3, 6, requires_grad=True), []

    def f(z, x):
        return {"a": block(z["b"][0], x), "b": (0.5 * z["a"] + 0.1 * x,)}

    z0 = {"a": torch.zeros(3, 6), "b": (torch.zeros(3, 6),)}
    block.linear.weight.register_hook(lambda g: calls.append(1))
    solution = revdeq.solve(f, z0, x, max_steps=60, tol=1e-6, gradient="implicit", check="raise")
    ours = torch.autograd.grad(solution.z["a"].sum() + solution.y["b"][0].sum(), [x, *block.parameters()])
    assert 5 < solution.adjoint.steps < 60 and calls == [1]
    exact = revdeq.solve(f, z0, x, max_steps=60, tol=1e-6)
    expected = torch.autograd.grad(exact.z["a"].sum() + exact.y["b"][0].sum(), [x, *block.parameters()])
    assert relative(ours, expected) <= 1e-4  # both are within the tolerance of the fixed point's


def test_an_adjoint_equation_that_does_not_converge_warns():
    """f contracts only by .99 at the fixed point."""
    x = torch.randn(8, requires_grad=True)
    settings = {"max_steps": 4, "gradient": "implicit", "beta": 0.5}
    z = revdeq.solve(lambda z: 0.99 * z + x, torch.zeros(8), check="raise", **settings).z
    with pytest.raises(revdeq.ConvergenceError, match="the adjoint equation of gradient='implicit' is not solved"):
        z.sum().backward()
    with pytest.warns(revdeq.ConvergenceWarning, match="Take more steps, find better coefficients with revdeq.tune"):
        revdeq.solve(lambda z: 0.99 * z + x, torch.zeros(8), **settings).z.sum().backward()


# backward_steps


# layers


def test_a_layers_options_may_be_changed_between_calls():
    deq, x = revdeq.RevDEQ(Block(), beta=0.8, max_steps=4), torch.randn(3, 6)
    deq(x)
    assert deq.last.steps == 4
    deq.max_steps, deq.gamma = 12, 0.9
    assert torch.equal(deq(x), revdeq.solve(deq.f, torch.zeros(3, 6), x, beta=0.8, gamma=0.9, max_steps=12).z)
    assert deq.last.steps == 12
    deq.max_steps = 0
    with pytest.raises(ValueError, match="max_steps = 0 must be at least 1"):
        deq(x)
    assert math.isclose(copy.deepcopy(deq).gamma, 0.9)


def test_an_implicit_gradient_with_an_empty_tensor_in_the_state():
    w = torch.tensor(0.5, requires_grad=True)
    z0 = torch.zeros(2, 3), torch.zeros(2, 0)
    z, _ = revdeq.solve(
        lambda z: (torch.cos(w * z[0]), z[1]), z0, gradient="implicit", max_steps=30, gamma=0.7, check="raise"
    ).z
    z.sum().backward()
    zw = 6 * -(torch.sin(w * z) * z / (1 + w * torch.sin(w * z))).mean()
    torch.testing.assert_close(w.grad, zw.detach())


class Shift(nn.Module):
    def forward(self, z, x):
        return torch.cos(z) + x


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: revdeq.solve(Shift(), torch.zeros(3)), TypeError, r"f\(z\).*solve\(f, z0, x\)"),
        (lambda: revdeq.RevDEQ(Shift), TypeError, "class Shift.*instance"),
        (lambda: revdeq.RevDEQ(Shift())(torch.zeros(3), tol=1e-3), TypeError, "tol is an option.*deq.tol"),
        (lambda: revdeq.RevDEQ(Shift())(torch.zeros(3), mask=None), TypeError, "mask=.*add them to f"),
        (lambda: revdeq.solve(Shift(), torch.zeros(3), torch.zeros(3) / 0), FloatingPointError, r"args\[0\].*finite"),
        (
            lambda: revdeq.solve(Shift(), torch.zeros(3), kwargs={"x": torch.zeros(3) / 0}),
            FloatingPointError,
            r"kwargs\['x'\].*finite",
        ),
    ],
)
def test_common_mistakes_have_their_own_remedy(call, error, message):
    with pytest.raises(error, match=message):
        call()
