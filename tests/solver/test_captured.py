"""f captures tensors of which one is computed from another: their common source gets the right gradient, once."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import revdeq
from revdeq.baselines import stored_graph

pytestmark = pytest.mark.usefixtures("on_device")

D = 5


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enc, self.lin, self.out = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.pos = nn.Parameter(torch.randn(3, D))


def mean(model, x):
    e = model.enc(x)
    m = e.mean(0)
    return lambda z: torch.tanh(0.5 * model.lin(z) + e) + m


def position(model, x):
    h = x + model.pos
    return lambda z: torch.tanh(model.lin(z) * 0.5 + h) + 0.1 * model.pos


def saved_between(model, x):
    e = model.enc(x)
    m = torch.tanh(e)
    return lambda z: torch.tanh(0.5 * model.lin(z) + e) + m


def same_layer(model, x):
    h = model.lin(x)
    return lambda z: torch.tanh(0.5 * model.lin(z) + h)


def chain(model, x):
    a = model.enc(x)
    b = a * model.pos
    c = torch.sigmoid(model.out(b))
    return lambda z: torch.tanh(0.3 * model.lin(z) + a + b) * c


def parts_of_one(model, x):
    e = model.enc(x)
    a, b = e.split([2, D - 2], -1)
    return lambda z: torch.tanh(0.5 * model.lin(z) + torch.cat([b, a], -1)) + 0.1 * e


def within(model, x):
    e = model.enc(x)
    m = torch.tanh(e)

    def f(z):
        inner = revdeq.solve(lambda w: torch.tanh(0.3 * model.out(w) + m + e), torch.zeros_like(z), max_steps=2)
        return torch.tanh(0.5 * model.lin(z) + inner.z) + 0.1 * e

    return f


CASES = [mean, position, saved_between, same_layer, chain, parts_of_one, within]
SETTINGS = [{}, {"state": "exact", "beta": 0.8}, {"keep": 3}, {"keep": 8}, {"gamma": 0.8}, {"check": "raise"}]


def gradients(solver, case, **settings):
    model = Model()
    x = torch.randn(3, D)
    z = solver(case(model, x), torch.zeros(3, D), max_steps=4, **settings)
    getattr(z, "z", z).square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_common_source_of_captured_tensors_gets_the_right_gradient(case, settings):
    ours = gradients(revdeq.solve, case, **settings)
    expected = gradients(stored_graph, case, **{k: v for k, v in settings.items() if k in ("beta", "gamma")})
    assert ours.keys() == expected.keys()
    for name, grad in expected.items():
        assert (ours[name] - grad).norm() <= 1e-5 * grad.norm(), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_the_implicit_gradient_equals_the_exact_one_at_a_fixed_point(case):
    settings = {"beta": 0.8, "max_steps": 60}
    model, x = Model(), torch.randn(3, D)
    grads = []
    for gradient in ("exact", "implicit"):
        model.zero_grad()
        revdeq.solve(case(model, x), torch.zeros(3, D), gradient=gradient, **settings).z.square().sum().backward()
        grads.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, grad in grads[0].items():
        assert (grads[1][name] - grad).norm() <= 1e-4 * grad.norm(), name


def test_a_cached_parametrization():
    """f captures both the result of a parametrization and the parameter that it is computed from."""

    def run(solver):
        torch.manual_seed(0)
        layer = parametrizations.weight_norm(nn.Linear(D, D))
        x, g = torch.randn(3, D), layer.parametrizations.weight.original0
        with parametrize.cached():
            z = solver(lambda z: torch.tanh(0.5 * layer(z) + x + g.mean()), torch.zeros(3, D), max_steps=4)
            getattr(z, "z", z).square().sum().backward()
        return [p.grad for p in layer.parameters()]

    for ours, expected in zip(run(revdeq.solve), run(stored_graph), strict=True):
        assert (ours - expected).norm() <= 1e-5 * expected.norm()


def test_captured_tensors_with_the_torchdeq_core():
    torchdeq = pytest.importorskip("torchdeq")
    import revdeq.torchdeq  # noqa: F401

    model, x = Model(), torch.randn(3, D)
    core = torchdeq.get_deq(core="reversible", f_max_iter=8, beta=0.5)
    core(position(model, x), torch.zeros(3, D))[0][-1].square().sum().backward()
    ours = model.pos.grad.clone()
    model.zero_grad()
    stored_graph(position(model, x), torch.zeros(3, D), max_steps=4).square().sum().backward()
    assert (ours - model.pos.grad).norm() <= 1e-5 * model.pos.grad.norm()
