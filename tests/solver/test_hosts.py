"""Solves inside other tools and threads: each gives the right result, or an error with a reason."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad

import revdeq
from revdeq.baselines import stored_graph

STATES = pytest.mark.parametrize("state", ["float64", "exact"])


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def agree(ours, expected, tolerance=2e-6):
    """Both states: the exact one resolves 6e-8, which the Jacobian of a few steps of these small f at most doubles."""
    for g, e in zip(ours, expected, strict=True):
        assert (g - e).norm() <= tolerance * e.norm()


def in_another_thread(run):
    """Run it in another thread, like a GPU's backward pass. Returns its result or raises its error."""
    result = []

    def work():
        try:
            result.append(run())
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


# threads


@STATES
@pytest.mark.parametrize("nodes", [0, 1000])
@pytest.mark.parametrize("where", ["backward", "forward", "both"])
def test_a_captured_result_and_another_thread(state, nodes, where):
    """Autograd numbers its nodes separately in each thread. The other thread creates `nodes` nodes before."""
    encoder, linear, x = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(3, 6)
    calls = []
    parameters = [*encoder.parameters(), *linear.parameters()]

    def run(solver):
        e = encoder(x)
        e.register_hook(lambda g: calls.append(1))
        return solver(lambda z: torch.tanh(linear(z) + e), torch.zeros(3, 6))

    def elsewhere(action):
        def work():
            x = torch.ones(1, requires_grad=True)
            for _ in range(nodes):
                x = x * 1
            return action()

        return in_another_thread(work)

    expected = torch.autograd.grad(run(stored_graph).sum(), parameters)
    calls.clear()
    e = encoder(x)
    e.register_hook(lambda g: calls.append(1))

    def solved():
        return revdeq.solve(lambda z: torch.tanh(linear(z) + e), torch.zeros(3, 6), state=state, check="raise").z

    z = elsewhere(solved) if where in ("forward", "both") else solved()
    gradients = functools.partial(torch.autograd.grad, z.sum(), parameters)
    agree(elsewhere(gradients) if where in ("backward", "both") else gradients(), expected)
    assert calls == [1]


def test_a_custom_function_of_captured_tensors_in_another_thread():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return 2 * w

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    weight, x = torch.rand(4, requires_grad=True), torch.randn(4, requires_grad=True)
    e = x * x

    def f(z):
        return torch.tanh(Double.apply(weight) * z + Double.apply(e))

    expected = torch.autograd.grad(stored_graph(f, torch.zeros(4)).sum(), [weight, x])
    e = x * x
    z = in_another_thread(lambda: revdeq.solve(f, torch.zeros(4), check="raise").z)
    agree(in_another_thread(lambda: torch.autograd.grad(z.sum(), [weight, x])), expected)


# saved tensors


def compressed(x):
    return x.half() if x.is_floating_point() else x.to(torch.int32)


@STATES
@pytest.mark.parametrize(
    ("unpack", "what"),
    [
        (lambda x: x.float(), "dtype"),
        (lambda x: x.flatten()[:5], "shape"),
        (lambda x: x.to("meta"), "device"),
    ],
)
def test_saved_tensors_that_come_back_as_others_are_refused(state, unpack, what):
    linear, x = nn.Linear(6, 6), torch.randn(3, 6)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        z = revdeq.solve(lambda z: torch.tanh(linear(z) + x), torch.zeros(3, 6), state=state).z
    with pytest.raises(RuntimeError, match="a saved-tensor hook returned .* instead of .*: exclude the solve"):
        z.sum().backward()


@STATES
def test_saved_tensors_may_come_back_in_another_layout(state):
    linear, x = nn.Linear(6, 6), torch.randn(3, 6)
    parameters = list(linear.parameters())

    def gradients():
        z = revdeq.solve(lambda z: torch.tanh(linear(z) + x), torch.zeros(3, 6), state=state, check="raise").z
        return torch.autograd.grad(z.sum(), parameters)

    plain = gradients()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x.t().contiguous().t() if x.dim() == 2 else x):
        assert all(map(torch.equal, plain, gradients()))


# gradients changed in place


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g.mul_(0.5)


def clamped(out):
    out.register_hook(lambda g: g.clamp_(-0.01, 0.01))
    return out


def past_autograd(out):
    def hook(g):
        g.data.mul_(0.5)

    out.register_hook(hook)
    return out


@STATES
@pytest.mark.parametrize("change", [InPlace.apply, clamped, past_autograd])
def test_a_gradient_that_f_changes_in_place(state, change):
    linear, x = nn.Linear(6, 6), torch.randn(3, 6)

    def f(z):
        return change(torch.tanh(linear(z) + x))

    def gradients(solve):
        return torch.autograd.grad(solve().sum(), list(linear.parameters()))

    ours = gradients(lambda: revdeq.solve(f, torch.zeros(3, 6), state=state, check="raise").z)
    agree(ours, gradients(lambda: stored_graph(f, torch.zeros(3, 6))))


def test_f_may_change_its_gradient_in_place_now_and_then():
    linear, z0 = nn.Linear(6, 6), torch.randn(3, 6)

    def gradients(solve):
        calls = []

        def hook(g):
            calls.append(1)
            return g.mul_(0.5) if len(calls) == 3 else None

        def f(z):
            out = torch.tanh(linear(z))
            if out.requires_grad:
                out.register_hook(hook)
            return out

        return torch.autograd.grad(solve(f).sum(), list(linear.parameters()))

    ours = gradients(lambda f: revdeq.solve(f, z0, check="raise").z)
    agree(ours, gradients(lambda f: stored_graph(f, z0)))


# stateful layers


def norm_block():
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())


class Holder:
    def __init__(self, block):
        self.block = block

    def __call__(self, z):
        return self.block(z)

    def method(self, z):
        return self.block(z)


def wrappings(block):
    return {
        "closure": lambda z: block(z),
        "partial": functools.partial(lambda b, z: b(z), block),
        "method": Holder(block).method,
        "object": Holder(block),
        "list": functools.partial(lambda layers, z: layers[0](z), [block]),
    }


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo inspects it
@pytest.mark.parametrize("wrapping", list(wrappings(None)))
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["batch norm", "spectral norm"])
def test_stateful_layers_are_refused_wherever_they_are(wrapping, compiled, kind):
    block = norm_block()
    if kind == "spectral norm":
        block = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh())
    before = {name: b.clone() for name, b in block.named_buffers()}
    f = wrappings(block)[wrapping]
    if compiled:
        torch._dynamo.reset()
        f = torch.compile(f, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"(GroupNorm|cached).*eval\(\)"):
        revdeq.solve(f, torch.randn(4, 6), max_steps=3)
    assert all(torch.equal(b, before[name]) for name, b in block.named_buffers()), "and nothing has changed"


def test_a_stateful_layer_that_f_does_not_call_is_allowed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.block = nn.BatchNorm1d(6), nn.Linear(6, 6)

        def forward(self, x):
            x = self.norm(x)
            return revdeq.solve(lambda z: torch.tanh(self.block(z) + x), torch.zeros_like(x)).z

    Model()(torch.randn(4, 6)).sum().backward()


# leaf tensors created inside f


@STATES
@pytest.mark.parametrize("kind", ["energy", "parameter", "factory"])
def test_leaf_tensors_that_f_creates(state, kind):
    net, x = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)), torch.randn(3, 6)

    def f(z):
        if kind == "energy":
            point = z.detach().requires_grad_()
        elif kind == "parameter":
            point = nn.Parameter(z.detach().clone())
        else:
            point = torch.zeros_like(z, requires_grad=True)
        (force,) = torch.autograd.grad(net(point + x).sum(), point, create_graph=True)
        return 0.5 * z - 0.3 * force

    expected = torch.autograd.grad(stored_graph(f, torch.ones(3, 6)).square().sum(), net[0].weight)
    z = revdeq.solve(f, torch.ones(3, 6), state=state, check="raise").z
    agree(torch.autograd.grad(z.square().sum(), net[0].weight), expected)


@STATES
def test_a_leaf_tensor_that_f_creates_and_keeps(state):
    linear, kept, grads = nn.Linear(6, 6), [], []

    def f(z):
        kept.append(z.detach().requires_grad_())
        return torch.tanh(linear(kept[-1]))

    for solve in (stored_graph, lambda *args: revdeq.solve(*args, state=state, check="raise").z):
        kept.clear()
        (solve(f, torch.ones(3, 6)).sum() + kept[3].sum()).backward()
        grads.append([torch.zeros(3, 6) if x.grad is None else x.grad for x in kept[:16]])
    agree(grads[1], grads[0])


# caches


@STATES
@pytest.mark.parametrize("used_before", [False, True])
def test_a_cached_parametrization_around_both_passes(state, used_before):
    normed, x = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6)), torch.randn(3, 6)

    def f(z):
        return torch.tanh(normed(z) + x)

    parameters = list(normed.parameters())
    expected = torch.autograd.grad(stored_graph(f, torch.zeros(3, 6)).sum(), parameters)
    with nn.utils.parametrize.cached():
        if used_before:
            normed(x)
        z = revdeq.solve(f, torch.zeros(3, 6), state=state, check="raise").z
        ours = torch.autograd.grad(z.sum(), parameters)
    agree(ours, expected)


def test_hidden_state_inside_f_is_noticed():
    linear, memory = nn.Linear(6, 6), []

    def recurrent(z):
        memory.append(torch.tanh(linear(z) + (memory[-1] if memory else 0)))
        return memory[-1]

    z = revdeq.solve(recurrent, torch.zeros(3, 6), check="raise").z
    with pytest.raises(revdeq.ReconstructionError, match="f does not return the same"):
        z.sum().backward()


# nested solves


@STATES
def test_a_nested_solve_with_a_hook_on_an_inner_weight(state):
    inner, outer, x, calls = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(3, 6), []

    def nested(solve):
        def f(z):
            return torch.tanh(outer(z) + solve(lambda u: 0.5 * torch.tanh(inner(u) + z), torch.zeros(3, 6)))

        return solve(f, torch.zeros(3, 6) + x)

    parameters = [*inner.parameters(), *outer.parameters()]
    expected = torch.autograd.grad(nested(functools.partial(stored_graph, max_steps=3)).sum(), parameters)
    inner.weight.register_hook(lambda g: calls.append(1))
    ours = nested(lambda f, z0: revdeq.solve(f, z0, max_steps=3, state=state, check="raise").z)
    agree(torch.autograd.grad(ours.sum(), parameters), expected)
    assert calls == [1]


# transforms


def test_transforms_around_a_closure_are_refused():
    def loss(w):
        return revdeq.solve(lambda z: torch.tanh(w * z + w), torch.zeros(3)).z.sum()

    for transform in (torch.func.grad(loss), torch.func.vmap(loss), torch.func.jacrev(loss)):
        with pytest.raises(TypeError, match="torch.func.*batch dimension.*autograd"):
            transform(torch.rand(3))
    for mapped in (
        lambda z: revdeq.solve(torch.cos, z).z,
        lambda x: revdeq.solve(lambda z, x: z / 2 + x, torch.zeros(3), x).z,
    ):
        with pytest.raises(TypeError, match="torch.func"):
            torch.func.vmap(mapped)(torch.zeros(2, 3))
    with torch.no_grad(), pytest.raises(TypeError, match="torch.func"):
        torch.func.vmap(loss)(torch.rand(3))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is")  # torch's own forward mode scripts its decompositions
def test_forward_mode_is_refused():
    """Also under no_grad, where torch would lose the tangent silently."""
    with forward_ad.dual_level():
        dual, weight = (forward_ad.make_dual(torch.rand(3), torch.ones(3)) for _ in range(2))
        for z0, args in ((dual, (weight.new_zeros(3),)), (torch.zeros(3), (dual,))):
            for grad in (True, False):
                with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="forward-mode.*reverse mode"):
                    revdeq.solve(lambda z, x: torch.cos(z + x), z0, *args)
        with torch.no_grad(), pytest.raises(RuntimeError, match="forward-mode.*reverse mode"):
            revdeq.solve(lambda z: torch.cos(weight * z), torch.zeros(3))
        schedule = forward_ad.make_dual(torch.full((4, 2), 0.5), torch.ones(4, 2))
        with pytest.raises(RuntimeError, match="forward-mode.*reverse mode"):
            revdeq.solve(torch.cos, torch.zeros(3), schedule=schedule)
        assert revdeq.solve(torch.cos, torch.zeros(3)).steps == 8


@STATES
def test_batched_gradients_are_refused(state):
    w = torch.rand(3, requires_grad=True)
    z = revdeq.solve(lambda z: torch.tanh(w * z + w), torch.zeros(3), state=state).z
    with pytest.raises(RuntimeError, match="is_grads_batched.*call it once per gradient"):
        torch.autograd.grad(z, w, torch.eye(3), is_grads_batched=True)


# arguments


def test_containers_in_args_are_not_changed():
    log, x = [], torch.randn(3, requires_grad=True)

    def f(z, inputs, log):
        log.append(z.detach().norm().item())
        inputs["seen"].append(1)
        return torch.tanh(0.5 * z + inputs["x"])

    seen = []
    z = revdeq.solve(f, torch.zeros(3), {"x": x, "seen": seen}, log, max_steps=3).z
    assert len(log) == len(seen) == 6
    agree(
        torch.autograd.grad(z.sum(), x),
        torch.autograd.grad(stored_graph(lambda z: torch.tanh(0.5 * z + x), torch.zeros(3), max_steps=3).sum(), x),
    )


def test_f_that_changes_an_argument_in_place_is_refused():
    table = {"counts": torch.zeros(3)}

    def f(z, table):
        table["counts"] += 1
        return 0.5 * z + table["counts"]

    with pytest.raises(RuntimeError, match=r"f modifies args\[0\]\['counts'\] in place"):
        revdeq.solve(f, torch.zeros(3), table)
    with torch.no_grad():  # without a backward pass, it may be a cache
        revdeq.solve(f, torch.zeros(3), table)


def test_an_f_with_the_wrong_signature():
    with pytest.raises(TypeError, match=r"f is called as f\(z, x\), but"):
        revdeq.RevDEQ(nn.Linear(4, 4))(torch.randn(2, 4))
    with pytest.raises(TypeError, match=r"f is called as f\(z\), but"):
        revdeq.solve(lambda z, x: z, torch.zeros(3))

    def own(z):
        raise TypeError("of f's own")

    with pytest.raises(TypeError, match="of f's own"):
        revdeq.solve(own, torch.zeros(3))


# sparse gradients


@STATES
@pytest.mark.parametrize("sparse", [False, True])
def test_sparse_gradients(state, sparse):
    """Of the state and of a weight, by an embedding."""
    weight, index = torch.rand(5, 4, requires_grad=True), torch.tensor([3, 1, 1, 0, 2])

    def f(z, sparse=sparse):
        return 0.4 * F.embedding(index, z, sparse=sparse) + torch.tanh(F.embedding(index, weight, sparse=sparse))

    (ours,) = torch.autograd.grad(revdeq.solve(f, torch.zeros(5, 4), state=state, check="raise").z.sum(), weight)
    # the stored graph casts its state, and autograd cannot cast a sparse gradient
    (expected,) = torch.autograd.grad(stored_graph(lambda z: f(z, False), torch.zeros(5, 4)).sum(), weight)
    assert ours.is_sparse == sparse
    agree([ours.to_dense()], [expected])


# tracers


class Model(nn.Module):
    def __init__(self, **settings):
        super().__init__()
        self.encoder, self.head = nn.Linear(6, 6), nn.Linear(6, 2)
        self.deq = revdeq.RevDEQ(Block(), **settings)

    def forward(self, x):
        return self.head(self.deq(self.encoder(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


def exported(strict):
    def export(model, x):
        batch = torch.export.Dim("batch", min=2)
        return torch.export.export(model, (x,), dynamic_shapes=({0: batch},), strict=strict).module()

    return export


def by_make_fx(model, x):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(model)(x)


TRACERS = {
    "export": exported(False),
    "strict export": exported(True),
    "trace": lambda model, x: torch.jit.trace(model, x),
    "make_fx": by_make_fx,
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated", "ignore:Converting a tensor to a Python")
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("tracer", list(TRACERS))
@pytest.mark.parametrize("state", ["float64", "exact"])
def test_a_traced_model_computes_what_the_model_computes(tracer, state):
    model = Model(state=state, beta=0.8, max_steps=4).eval().requires_grad_(False)
    traced = TRACERS[tracer](model, torch.randn(3, 6))
    x = torch.randn(3 if tracer == "make_fx" else 5, 6)
    assert model(x).norm() > 0.1
    # the traced iteration keeps float64 numbers: an exact state differs by its resolution of 6e-8, for a few steps
    torch.testing.assert_close(traced(x), model(x), rtol=0, atol=0 if state == "float64" else 1e-6)


class DropsOut(Block):
    def __init__(self, how):
        super().__init__()
        self.dropout, self.how = nn.Dropout(), how

    def forward(self, z, x):
        drop = (
            self.dropout if self.how == "module" else functools.partial(nn.functional.dropout, training=self.training)
        )
        return super().forward(drop(z), x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.* is deprecated", "ignore:Converting a tensor to a Python")
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("how", ["module", "function"])
@pytest.mark.parametrize("tracer", list(TRACERS))
def test_dropout_cannot_be_traced(tracer, how):
    """Every evaluation would have another mask. TorchDynamo, which traces strictly, sees only modules."""
    model = Model(max_steps=2).requires_grad_(False)
    model.deq.f = DropsOut(how)
    if tracer != "strict export" or how == "module":
        with pytest.raises(Exception, match="f draws random numbers.*eval"):
            TRACERS[tracer](model, torch.randn(3, 6))
    if tracer != "strict export":
        TRACERS[tracer](model.eval(), torch.randn(3, 6))


@pytest.mark.filterwarnings("ignore:`torch.jit", "ignore:.*torch.jit.trace.* is deprecated")
def test_a_tolerance_cannot_be_traced():
    model = Model(tol=1e-3).eval().requires_grad_(False)
    for tracer in ("export", "trace", "make_fx"):
        with pytest.raises(ValueError, match="traced or exported model takes a fixed number of steps"):
            TRACERS[tracer](model, torch.randn(3, 6))


def test_a_solve_of_fake_tensors_returns_the_right_shapes():
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():
        model = Model()
        model.deq.f = DropsOut("function")
        out = model(torch.randn(3, 6))
    assert out.shape == (3, 2)
    out.sum().backward()
    assert model.deq.f.linear.weight.grad.shape == (6, 6)
    with FakeTensorMode():
        z = revdeq.solve(lambda z: {"h": [0.5 * z["h"][0]]}, {"h": [torch.ones(3)]}).z
    assert z["h"][0].shape == (3,)
