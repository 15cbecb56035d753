"""Models that are compiled, exported or traced."""

import pytest
import torch
from plain import Block
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import revdeq

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit", "ignore:Converting a tensor to a Python"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo inspects it
]


class Model(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.deq = revdeq.RevDEQ(Block(), max_steps=4, **settings)

    def forward(self, x):
        return self.head(self.deq(self.encoder(x)))


def exported(model, x):
    batch = torch.export.Dim("batch", min=2)
    return torch.export.export(model, (x,), dynamic_shapes=({0: batch},)).module()


TRACERS = {
    "export": exported,
    "trace": lambda model, x: torch.jit.trace(model, x),
    "make_fx": lambda model, x: make_fx(model)(x),
}


@pytest.mark.parametrize(
    ("tracer", "state"), [("export", "float64"), ("export", "exact"), ("trace", "exact"), ("make_fx", "float64")]
)
def test_a_traced_model_computes_what_the_model_computes(tracer, state):
    model = Model(state=state, beta=0.8, gamma=0.9).eval().requires_grad_(False)
    traced = TRACERS[tracer](model, torch.randn(3, 6))
    x = torch.randn(3 if tracer == "make_fx" else 5, 6)
    assert model(x).norm() > 0.1
    # the traced iteration keeps float64 numbers: an exact state differs by its resolution of 6e-8, for a few steps
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0 if state == "float64" else 1e-6)


def test_dropout_cannot_be_traced():
    """Every evaluation would have another mask."""
    model, x = Model().requires_grad_(False), torch.randn(3, 6)
    model.deq.f.linear = nn.Sequential(model.deq.f.linear, nn.Dropout())
    with pytest.raises(Exception, match="(?s)dropout.*eval"):
        make_fx(model)(x)
    torch.testing.assert_close(make_fx(model.eval())(x)(x), model(x))


REFUSED = [("export", {"tol": 1e-3}), ("make_fx", {"gradient": "implicit"}), ("make_fx", {"aux": True})]


@pytest.mark.parametrize(("tracer", "settings"), REFUSED, ids=str)
def test_what_cannot_be_traced_is_refused_by_name(tracer, settings):
    with pytest.raises(ValueError, match=f"{next(iter(settings))}.*traced"):
        TRACERS[tracer](Model(**settings).eval().requires_grad_(False), torch.randn(3, 6))


def test_a_solve_of_fake_tensors_returns_the_right_shapes():
    with FakeTensorMode():
        model = Model()
        out = model(torch.randn(3, 6))
        assert out.shape == (3, 2)
        out.sum().backward()
        assert model.deq.f.linear.weight.grad.shape == (6, 6)
        z = revdeq.solve(lambda z: {"h": [0.5 * z["h"][0]]}, {"h": [torch.ones(3)]}).z
    assert z["h"][0].shape == (3,)


def test_a_compiled_model_around_the_solve_breaks_its_graph_once():
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    model, counter, x = Model(), CompileCounter(), torch.randn(3, 6)
    out = torch.compile(model, backend=counter)(x)
    assert torch.equal(out, model(x))
    found = [torch.autograd.grad(z.sum(), list(model.parameters())) for z in (out, model(x))]
    assert all(map(torch.equal, *found))
    graphs = "before the solve", "for the zeros it starts from", "after it"
    assert counter.frame_count == len(graphs)


def test_with_fullgraph_the_error_says_to_compile_f():
    def model(x):
        return revdeq.solve(lambda z, x: torch.tanh(z + x), torch.zeros(3, 6), x).z

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile f, f.compile\(\).*without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(3, 6))


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_compiling_a_whole_training_step_changes_neither_pass(gradient):
    """In a compiled one, dropout would draw another mask."""
    linear, compiled = nn.Linear(6, 6), []

    def f(z, x):
        compiled.append(torch.compiler.is_compiling())
        return torch.tanh(0.3 * linear(z) + x)

    def step(x):
        revdeq.solve(f, torch.zeros(3, 6), x, gradient=gradient, check=None).z.square().sum().backward()

    torch.compile(step, backend="eager")(torch.randn(3, 6))
    assert len(compiled) >= 16 and not any(compiled) and linear.weight.grad is not None
