"""What f may do, must do, and what is noticed if it does something else: the contract of a solve.

It is that of `torch.utils.checkpoint`: f must return the same when it is called again with the same input. Every
gradient here is compared with that of a plain loop that stores its graph.
"""

import contextlib
import copy
import functools
import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from plain import agree, reference
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import revdeq
from revdeq._device import peak_memory

D, STEPS = 6, 4
SETTINGS = [{"state": "exact"}, {"keep": 3}, {"gamma": 0.8}, {"beta": 0.8, "keep": 8}, {"beta": 1.25, "state": "exact"}]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),  # torch's own forward mode scripts its decompositions
    pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context"),  # of selective checkpoints, from torch 2.15 on
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo inspects it
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors"),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
    random.seed(0)


def solver(**options):
    return functools.partial(revdeq.solve, max_steps=STEPS, check="raise", **options)


solve = solver()


def linear(d=D):
    layer = nn.Linear(d, d)
    layer.weight.data *= 0.5
    return layer


def network():
    return nn.Sequential(linear(), nn.Tanh(), linear())


class Added(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, z, x):
        return self.inner(z) + x


def point(*shape):
    return torch.randn(*(shape or (3, D)), requires_grad=True)


def zeros():
    return torch.zeros(3, D)


def gradients(solution, *of):
    """Of a loss on z and y, with respect to tensors and modules."""
    inputs = [p for x in of for p in (x.parameters() if isinstance(x, nn.Module) else [x])]
    return torch.autograd.grad(solution.z.square().sum() + 0.3 * solution.y.sum(), inputs, allow_unused=True)


def trained(solve, f, *of):
    """The gradients of f(z, x) with respect to x and the rest."""
    x = point()
    return gradients(solve(f, zeros(), x), x, *of)


# 1. What f may be and do. Each case returns gradients, given a function that solves.

CASES = []


def may(case):
    CASES.append(case)
    return case


def both_ways(values):
    """Each of them with the default, and with one of the other settings in turn."""
    for i, value in enumerate(values):
        name = getattr(value, "__name__", None)
        for settings in ({}, SETTINGS[i % len(SETTINGS)]):
            yield pytest.param(value, settings, id=f"{name}-{settings}")


@may
def a_closure_over_tensors_that_are_made_from_each_other(solve):
    encoder, f, x = linear(), linear(), torch.randn(3, D)
    e = encoder(x)
    mean = torch.tanh(e).mean(0)
    return gradients(solve(lambda z: torch.tanh(0.5 * f(z) + e) + 0.2 * mean, zeros()), encoder, f)


@may
def a_closure_over_parts_of_one_tensor(solve):
    encoder, f, x = linear(), linear(), torch.randn(3, D)
    e = encoder(x)
    a, b = e.split([2, D - 2], -1)
    return gradients(solve(lambda z: torch.tanh(f(z) + torch.cat([b, a], -1)) + 0.1 * e, zeros()), encoder, f)


@may
def a_partial_with_nested_arguments(solve):
    @dataclass
    class Named:
        a: Tensor
        b: list[Tensor]

    f, x = network(), point()
    given = Named(x * 2, [x * 3])
    bound = functools.partial(lambda z, g, k: f(z) + g.a * k + g.b[0], k=x.cos())
    solution = solve(bound, zeros(), given)
    given.b.clear()  # what f is given belongs to f while it runs, and to the caller afterwards
    with contextlib.suppress(IndexError):
        return gradients(solution, x, f)
    given.b.append(x * 3)
    return gradients(solution, x, f)


@may
def a_method_of_a_plain_object(solve):
    class Model:
        def __init__(self):
            self.block = network()

        def step(self, z, x):
            return self.block(z) + x

    model = Model()
    return trained(solve, model.step, model.block)


@may
def a_module_with_a_frozen_parameter(solve):
    f = network()
    f[0].weight.requires_grad_(False)
    return trained(solve, Added(f), f[0].bias, f[2])


@may
def one_weight_in_two_places(solve):
    weight = point(D, D)
    return trained(solve, lambda z, x: torch.tanh(0.1 * z @ weight @ weight.t() + x), weight)


@may
def lazy_and_recurrent_layers(solve):
    lazy, lstm, cell = nn.LazyLinear(D), nn.LSTM(D, D), nn.GRUCell(D, D)
    return trained(solve, lambda z, x: 0.3 * lazy(cell(x, z)) + 0.5 * lstm(z)[0] + x, lstm, cell)


@may
def another_module_in_some_evaluations(solve):
    a, b = linear(), linear()
    return gradients(solve(lambda z: torch.tanh((a if z.norm() < 1e-6 else b)(z) + 1), zeros()), a, b)


@may
def a_branch_without_parameters(solve):
    b = linear()
    return gradients(solve(lambda z: torch.tanh(b(z)) if z.norm() > 1e-6 else torch.ones_like(z), zeros()), b)


@may
def sparse_gradients(solve):
    table, padded = nn.Embedding(9, D, sparse=True), nn.Embedding(9, D, scale_grad_by_freq=True, padding_idx=2)
    words, matrix = torch.tensor([1, 2, 1]), torch.eye(3).to_sparse().requires_grad_()
    f = lambda z, x: torch.sparse.mm(matrix, 0.3 * z) + x + table(words) + padded(words)  # noqa: E731
    return trained(solve, f, table, padded, matrix)


@may
def complex_parameters(solve):
    w = nn.Parameter(torch.randn(4, dtype=torch.complex64) * 0.5)
    return trained(solve, lambda z, x: torch.fft.irfft(torch.fft.rfft(z) * w, n=D).tanh() + x, w)


PARAMETRIZATIONS = {
    "orthogonal": parametrizations.orthogonal,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm_in_evaluation_mode": lambda layer: parametrizations.spectral_norm(layer).eval(),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}
for name, parametrized in PARAMETRIZATIONS.items():

    def parametrized_layer(solve, parametrized=parametrized):
        f = Added(nn.Sequential(parametrized(linear()), nn.Tanh()))
        return trained(solve, f, f)

    parametrized_layer.__name__ = name
    may(parametrized_layer)


@may
def a_parametrization_cached_inside_f(solve):
    f = nn.Sequential(parametrizations.orthogonal(linear()), nn.Tanh())

    def cached(z, x):
        with parametrize.cached():
            return f(f(z)) + x

    return trained(solve, cached, f)


@may
def a_parametrization_cached_around_both_passes(solve):
    f = parametrizations.weight_norm(linear())
    with parametrize.cached():
        f(torch.zeros(1, D))
        return trained(solve, Added(f), f)


class Product(torch.autograd.Function):
    """Unpacks twice, keeps a tensor where saved-tensor hooks do not see it, and changes its gradient in place."""

    @staticmethod
    def forward(ctx, z, w):
        ctx.save_for_backward(z, w)
        ctx.z = z
        return z @ w

    @staticmethod
    def backward(ctx, g):
        z, w = ctx.saved_tensors
        assert torch.equal(ctx.saved_tensors[0], ctx.z)
        g.mul_(0.5)
        return g @ w.T, z.T @ g


@may
def a_custom_function(solve):
    w = nn.Parameter(torch.randn(D, D) * 0.2)
    return trained(solve, lambda z, x: Product.apply(z, w).tanh() + x, w)


@may
def results_written_in_place(solve):
    f = linear()

    def written(z, x):
        out = torch.zeros_like(z)
        out[[0, 1]] = f(z)[:2]
        out[2].add_(z[1] * 0.2)
        return out.tanh_() + x

    return trained(solve, written, f)


@may
def changed_and_restored_gradient_mode(solve):
    f = network()

    def step(z, x):
        with torch.no_grad():
            scale = f(z).norm()
        return f(z) / (1 + scale) + x

    return trained(solve, step, f)


RETURNED = {
    "its input": lambda z, x: z,
    "a view of its input": lambda z, x: z.t(),
    "a captured tensor": lambda z, x: x,
    "a view": lambda z, x: x.t(),
    "an expanded tensor": lambda z, x: (z + x)[:, :1].expand(4, 4),
    "a negative view": lambda z, x: torch.complex(z, 0.5 * z + x).conj().imag,
    "another dtype": lambda z, x: (0.5 * z + x).double(),
}


@pytest.mark.parametrize("what", RETURNED)
def test_f_may_return(what):
    x, z0 = point(4, 4), point(4, 4)
    f = functools.partial(lambda f, x, z: f(z, x), RETURNED[what], x)
    before = x.detach().clone()
    agree(gradients(solve(f, z0), z0, x), gradients(reference(f, z0), z0, x))
    assert torch.equal(x, before)


# derivatives inside f


@may
def the_gradient_of_an_energy(solve):
    f, w = network(), nn.Parameter(torch.randn(D) * 0.1)

    def step(z, x):
        with torch.enable_grad():
            energy = (f(z) * w).square().sum()
        return 0.8 * z - 0.3 * torch.autograd.grad(energy, z, create_graph=True)[0] + x

    x = point()
    return gradients(solve(step, torch.ones(3, D, requires_grad=True), x), x, f, w)


@may
def derivatives_by_a_leaf_of_its_own_and_by_a_weight(solve):
    w = nn.Parameter(torch.randn(D, D) * 0.3)

    def step(z, x):
        leaf = z.detach().requires_grad_()
        by_z, by_w = torch.autograd.grad((leaf @ w).tanh().square().sum(), [leaf, w], create_graph=True)
        return 0.2 * z - 0.1 * by_z - 0.05 * z @ by_w + x

    return trained(solve, step, w)


# checkpoints, compiled parts, another solve


@may
def checkpoints_inside_and_around(solve):
    f, x = network(), point()
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    inner = functools.partial(checkpoint, f, use_reentrant=False, context_fn=contexts)
    around = functools.partial(checkpoint, use_reentrant=False)
    return torch.autograd.grad(
        around(lambda x: solve(lambda z, x: inner(z) + x, zeros(), x).z, x).square().sum(), [x, *f.parameters()]
    )


def save_products(context, operation, *args, **kwargs):
    saved = operation is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@may
def a_reentrant_checkpoint(solve):
    f = nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.3))
    z0 = torch.ones(3, D, requires_grad=True)
    solve(lambda z: 0.5 * checkpoint(f, z, use_reentrant=True) + 1, z0).z.sum().backward()
    return f[0].weight.grad, z0.grad


COMPILED = {
    "function": lambda f: torch.compile(lambda z, x: f(z, x), backend="aot_eager"),
    "module": lambda f: torch.compile(f, backend="aot_eager"),
    "part": lambda f: lambda z, x: torch.compile(f.inner, backend="aot_eager", fullgraph=True)(z) + x,
    "cond": lambda f: lambda z, x: torch.cond(z.sum() > 1e9, lambda z: z.clone(), lambda z: f.inner(z), (z,)) + x,
}


@pytest.mark.parametrize("what", COMPILED)
def test_f_may_be_compiled(what):
    torch._dynamo.reset()
    f, x = Added(network()), point()
    agree(gradients(solve(COMPILED[what](f), zeros(), x), x, f), gradients(reference(f, zeros(), x), x, f))


@may
def a_solve_with_dropout_inside(solve):
    inner, f = linear(), linear()

    def step(z, x):
        w = solve(lambda w, z: F.dropout(torch.tanh(inner(w) + z), 0.3), torch.zeros_like(z), z).z
        return 0.3 * F.dropout(f(z), 0.3) + 0.3 * w + x

    return trained(solve, step, inner, f)


@may
def a_value_that_a_solve_inside_keeps(solve):
    inner, other = linear(), linear()

    def step(z, x):
        kept = []

        def g(w):
            kept.append(other(w + z))
            return torch.tanh(inner(w) + x)

        return 0.3 * solve(g, torch.zeros_like(z)).z + 0.1 * kept[-1]

    return trained(solve, step, inner, other)


@pytest.mark.parametrize(
    "options", [{"gradient": "implicit"}, {"per_example": True, "tol": 1e-2}], ids=["implicit", "per_example"]
)
def test_a_solve_inside_f_refuses_options_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        solve(lambda z: solve(lambda w: 0.5 * w + z, zeros(), **options).z, zeros())


def test_a_solve_inside_f_takes_no_steps_one_by_one():
    with pytest.raises((ValueError, RuntimeError), match="steps"):
        solve(lambda z: [s.z for s in revdeq.steps(lambda w: 0.5 * w + z, zeros())][-1], zeros())


def test_a_solve_inside_f_checks_its_shapes():
    with pytest.raises(ValueError, match=r"\(3, 1\)"):
        solve(lambda z: solve(lambda w: (0.5 * w + z)[:, :1], zeros()).z, zeros())


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_a_solve_inside_f_stops_at_its_tolerance(state):
    """It is unrolled, in float64 arithmetic, whatever its state is."""
    w, counts = point(D), []

    def f(z, x, steps=None):
        inner = functools.partial(lambda u: 0.5 * torch.tanh(u) + 0.3 * w * z)
        if steps is not None:
            return reference(inner, zeros(), max_steps=steps).z + x
        s = revdeq.solve(inner, zeros(), tol=1e-3, max_steps=50, state=state)
        counts.append(s.steps)
        return s.z + x

    ours = trained(solver(max_steps=1) if False else functools.partial(revdeq.solve, max_steps=1, check="raise"), f, w)
    first, second = counts[:2]
    torch.manual_seed(0)
    assert 3 < first < 50 and 3 < second < 50 and len(ours) == 2


# random numbers


@may
def dropout(solve):
    f = nn.Sequential(linear(), nn.Dropout(0.3))
    return trained(solve, lambda z, x: f(z) + F.dropout(x, 0.2), f)


@may
def attention_with_dropout(solve):
    f = nn.MultiheadAttention(D, 2, dropout=0.3, batch_first=True)
    return trained(solve, lambda z, x: 0.5 * f(z[None], x[None], x[None])[0][0] + x, f)


def test_dropout_is_one_mask_per_solve_and_the_generator_moves_once():
    w, start = point(500), torch.get_rng_state()
    F.dropout(w)
    after_one = torch.get_rng_state()
    torch.set_rng_state(start)
    z = revdeq.solve(lambda z: F.dropout(w) + 0 * z, torch.zeros(500), max_steps=12).z
    assert torch.equal(torch.get_rng_state(), after_one)
    z.sum().backward()
    assert torch.equal(torch.get_rng_state(), after_one)
    assert torch.equal(w.grad != 0, z != 0)
    assert (w.grad.unique().numel(), 0 < (z != 0).sum() < 500) == (2, True)


def test_one_mask_whatever_the_layout():
    """A mask is drawn in the order of the memory."""
    masks = []

    def f(z):
        masks.append(F.dropout(torch.ones_like(z)))
        return (0.5 * z * masks[-1]) @ torch.eye(6)

    solve(f, torch.zeros(6, 5).t().requires_grad_()).z.sum().backward()
    assert all(torch.equal(mask, masks[0]) for mask in masks) and len(masks) == 16


def test_f_that_draws_nothing_leaves_the_generator_alone(monkeypatch):
    calls, original = [], torch.set_rng_state
    monkeypatch.setattr(torch, "set_rng_state", lambda s: calls.append(1) or original(s))
    solve(network(), point()).z.sum().backward()
    assert not calls


# values that f stores


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("i", "settings"), [(0, {}), (1, {"keep": 3}), (3, {"state": "exact"}), (6, {"keep": 3}), (7, {})])
def test_a_loss_may_use_what_any_evaluation_stored(i, settings, alone):
    """Even without a loss on the solution: later half-steps are then inverted without a gradient."""
    f, start, x, found = linear(), linear(), torch.randn(3, D), []
    for run in (solver(**settings), reference):
        kept = []

        def step(z):
            kept.append(torch.tanh(f(z) + x))  # noqa: B023
            return kept[-1]  # noqa: B023

        solution = run(step, start(x))
        loss = kept[i].square().sum() + (0 if alone else solution.z.sum())
        found.append(torch.autograd.grad(loss, [start.weight, f.weight], allow_unused=True))
    agree(*found)


@may
def losses_of_all_evaluations_and_of_another_module(solve):
    f, other, losses = linear(), linear(), []

    def step(z, x):
        losses.append(other(z).square().mean() + 0.1 * other(z.detach()).sum() + other(x).cos().mean())
        return torch.tanh(f(z) + x)

    x = point()
    z = solve(step, zeros(), x).z
    return torch.autograd.grad(z.sum() + sum(losses[: 2 * STEPS]), [x, *f.parameters(), *other.parameters()])


@may
def a_leaf_that_f_creates_and_stores(solve):
    f, kept = linear(), []

    def step(z):
        kept.append(z.detach().requires_grad_())
        return torch.tanh(f(kept[-1]))

    (solve(step, torch.ones(3, D)).z.sum() + kept[3].sum()).backward()
    return [kept[3].grad, kept[2 * STEPS - 1].grad]


def test_losses_one_after_the_other():
    f, x, found = linear(), torch.randn(3, D), []
    for run in (solve, solver(keep=5), solver(state="exact"), reference):
        kept = []

        def step(z):
            kept.append(torch.tanh(f(z) + x))  # noqa: B023
            return kept[-1]  # noqa: B023

        z = run(step, zeros()).z
        f.zero_grad()
        for loss in (kept[5].sum(), z.sum(), kept[2].square().sum(), z.square().sum() + kept[6].sum()):
            loss.backward(retain_graph=True)
        found.append([p.grad.clone() for p in f.parameters()])
    agree(found[0], found[3])
    agree(found[1], found[3])
    agree(found[2], found[3])


# hooks


@may
def module_hooks_that_change_gradients(solve):
    f = network()
    f[0].register_full_backward_hook(lambda module, by_input, by_output: (by_input[0] * 0.5,))
    f[2].register_full_backward_pre_hook(lambda module, by_output: (by_output[0].clamp(-0.1, 0.1),))
    f[1].register_forward_hook(lambda module, given, out: out * 0.9)
    x, z0 = point(), point()
    return gradients(solve(Added(f), z0, x), x, z0, f)


@may
def tensor_hooks_that_change_gradients(solve):
    f = network()

    def step(z, x):
        h = f(z)
        if z.requires_grad:
            z.register_hook(lambda g: g * 0.5)
            h.register_hook(lambda g: g.clamp_(-0.3, 0.3))
        return h + x

    x, z0 = point(), point()
    return gradients(solve(step, z0, x), x, z0, f)


@may
def a_hook_on_a_parameter_and_a_kept_gradient(solve):
    f, x = network(), point()
    encoded = x * 2
    encoded.retain_grad()
    f[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    solve(lambda z: f(z) + encoded, zeros()).z.square().sum().backward()
    return encoded.grad, f[0].weight.grad


@may
def optimizers_in_the_backward_pass(solve):
    f, x = network(), point()
    for p in f.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda p, optimizer=optimizer: (optimizer.step(), optimizer.zero_grad()))
    for _ in range(2):
        once = solve(Added(f), zeros(), x).z
        solve(Added(f), zeros(), once).z.square().sum().backward()
    return *(p.detach() for p in f.parameters()), x.grad


@pytest.mark.parametrize("settings", [{}, {"state": "exact"}, {"keep": 3}], ids=str)
def test_hooks_on_what_f_uses_fire_once(settings):
    f, x, calls = network(), point(), []
    encoded = x * 2
    encoded.register_hook(lambda g: calls.append("encoded"))
    f[0].weight.register_hook(lambda g: calls.append("weight"))
    f[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    solver(**settings)(lambda z: f(z) + encoded, zeros()).z.sum().backward()
    assert sorted(calls) == ["accumulated", "encoded", "weight"]


# where the passes run


@pytest.mark.parametrize("where", ["around the forward pass", "around both", "inside", "around, but switched off inside"])
def test_autocast(where):
    f, x, seen, found = network(), point(), set(), []
    cast = functools.partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)
    with_cache = functools.partial(torch.autocast, "cpu", torch.bfloat16)

    def step(z, x):
        inside = {"inside": cast(), "around, but switched off inside": torch.autocast("cpu", enabled=False)}
        with inside.get(where, contextlib.nullcontext()):
            h = f[0](z)
        seen.add(h.dtype)
        return f[2](h.tanh()).float() + x

    for run, around in ((solve, with_cache), (reference, cast)):
        with around() if where != "inside" else contextlib.nullcontext():
            solution = run(step, zeros(), x)
            if where == "around both":
                found.append(gradients(solution, x, f))
        if where != "around both":
            found.append(gradients(solution, x, f))
    # Sums over evaluations, in float32 here, and of products that are bfloat16 in both.
    agree(*found, tolerance=4 * torch.finfo(torch.bfloat16).eps)
    assert seen == {torch.float32 if "off" in where else torch.bfloat16}


@may
def the_backward_pass_inside_autocast(solve):
    f, x = network(), point()
    loss = solve(Added(f), zeros(), x).z.square().sum()
    with torch.autocast("cpu", torch.bfloat16):
        return torch.autograd.grad(loss, f[0].weight)


def test_the_backward_pass_inside_autocast_takes_memory_that_does_not_grow():
    f, x = nn.Sequential(linear(256), nn.Tanh(), linear(256)), torch.randn(4, 256)

    def step(n):
        with torch.autocast("cpu", torch.bfloat16):
            revdeq.solve(lambda z: f(z) + x, torch.zeros_like(x), max_steps=n, check=None).z.sum().backward()

    step(4)
    assert peak_memory(lambda: step(16), x.device) <= 1.05 * peak_memory(lambda: step(4), x.device)


@may
def attention_with_a_chosen_kernel(solve):
    x = point(2, 3, 5, 8)
    with sdpa_kernel(SDPBackend.MATH):
        solution = solve(lambda z, x: 0.5 * F.scaled_dot_product_attention(z + x, z, x) + x, 0 * x.detach(), x)
    return gradients(solution, x)


def test_the_attention_backend_is_that_of_the_forward_pass():
    seen, x = set(), point()
    with sdpa_kernel(SDPBackend.MATH):
        z = solve(lambda z: (seen.add(torch.backends.cuda.flash_sdp_enabled()), 0.5 * z + x)[1], zeros()).z
    z.sum().backward()
    assert seen == {False} and torch.backends.cuda.flash_sdp_enabled()


@may
def saved_tensors_on_the_cpu(solve):
    f = network()
    with save_on_cpu():
        return trained(solve, Added(f), f)


@may
def saved_tensors_in_another_layout(solve):
    f = network()
    with saved_tensors_hooks(lambda x: x, lambda x: x.t().contiguous().t() if x.dim() == 2 else x):
        return trained(solve, Added(f), f)


@may
def anomaly_detection_and_a_counter_of_flops(solve):
    f = Added(network())
    with torch.autograd.set_detect_anomaly(True), FlopCounterMode(display=False):
        return trained(solve, f, f)


def in_another_thread(run):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


@may
def passes_in_different_threads(solve):
    """Autograd numbers its nodes separately in each thread."""
    f, encoder, x = network(), linear(), point()
    encoded = encoder(x)
    solution = in_another_thread(lambda: solve(lambda z: f(z) + encoded, zeros()))
    return in_another_thread(lambda: gradients(solution, x, f, encoder))


@may
def threads_of_its_own(solve):
    f = network()
    with ThreadPoolExecutor(2) as pool:
        return trained(solve, lambda z, x: torch.cat(list(pool.map(f, z.split([1, 2])))) + x, f)


def test_solves_in_two_threads_do_not_disturb_each_other():
    def job(seed):
        torch.manual_seed(seed)
        f, x = network(), point()
        return lambda: gradients(revdeq.solve(Added(f), zeros(), x, max_steps=3 + seed), x, f)

    jobs = [job(0), job(1)]
    expected = [job() for job in jobs]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(20):
            for ours, theirs in zip(pool.map(lambda job: job(), jobs), expected, strict=True):
                assert all(map(torch.equal, ours, theirs))


# states


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


@may
def a_named_tuple_of_views_of_one_tensor(solve):
    f, both = network(), torch.randn(6, D, requires_grad=True)
    z = solve(lambda z: Pair(f(z.b) + 1, 0.5 * z.a), Pair(*both.chunk(2))).z
    return torch.autograd.grad((z.a * z.b).sum(), [both, *f.parameters()])


PASSED_ON = [lambda z: z, lambda z: z.contiguous(), nn.Dropout().eval(), lambda z: z[:]]


@pytest.mark.parametrize("passed_on", PASSED_ON, ids=["itself", "contiguous", "dropout", "view"])
def test_f_may_return_one_part_of_its_state_as_another(passed_on):
    weight, x, z0 = (0.4 * torch.randn(4, 4)).requires_grad_(), point(3, 4), (torch.zeros(3, 4), torch.zeros(3, 4))

    def f(z, x):
        return passed_on(z[1]), torch.tanh(z[0] @ weight) + x

    found = [torch.autograd.grad(run(f, z0, x).z[0].sum(), [weight, x]) for run in (solve, solver(state="exact"), reference)]
    agree(found[0], found[2])
    agree(found[1], found[2])


def test_a_dict_may_come_back_in_another_order():
    x = point(3)
    s = solve(lambda z: {"b": 0.5 * z["b"] + x, "a": z["b"]}, {"a": torch.zeros(3), "b": torch.zeros(3)})
    assert list(s.z) == ["a", "b"]
    assert torch.equal(s.z["b"], reference(lambda z: 0.5 * z + x, torch.zeros(3)).z)


@may
def an_expanded_z0_and_a_y0(solve):
    f, z0, y0 = network(), point(1, D), point()
    return gradients(solve(f, z0.expand(3, D), y0=y0), z0, y0, f)


def test_a_z0_from_inference_mode():
    x = point(3)
    with torch.inference_mode():
        z0 = torch.ones(3)
    f = functools.partial(lambda x, z: torch.tanh(z + x), x)
    agree(gradients(solve(f, z0), x), gradients(reference(f, z0.clone()), x))


@may
def a_result_that_is_changed_in_place(solve):
    f, x = network(), point()
    z = F.relu(solve(Added(f), zeros(), x).z, inplace=True)
    total = z.sum()
    z.data.zero_()
    return torch.autograd.grad(total, [x, *f.parameters()])


# training


def test_a_gradient_scaler_scales_and_skips_what_overflows():
    f, x = Added(network()), point()
    plain = gradients(solve(f, zeros(), x), f)
    scaled = torch.autograd.grad(1024 * (s := solve(f, zeros(), x)).z.square().sum() + 1024 * 0.3 * s.y.sum(), f.parameters())
    agree([g / 1024 for g in scaled], plain)
    (solve(f, zeros(), x).z.sum() * torch.inf).backward()
    assert not f.inner[0].weight.grad.isfinite().all()


@pytest.mark.parametrize("around", ["both passes", "the forward pass"])
def test_functional_call(around):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, x, run):
            return run(lambda z: torch.tanh(self.layer(z) + x), torch.zeros_like(x)).z

    model, x, found = Model(), torch.randn(3, D), []
    others = {name: (0.5 * p).detach().requires_grad_() for name, p in model.named_parameters()}

    def run(model, solve):
        z = model(x, solve)
        return torch.autograd.grad(z.sum(), list(others.values()))

    for run in (solve, reference):
        if around == "both passes":

            class Stepped(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.model = model

                def forward(self, x, run=run):
                    return torch.autograd.grad(self.model(x, run).sum(), list(self.model.parameters()))

            found.append(functional_call(Stepped(), {f"model.{k}": v for k, v in others.items()}, (x,)))
        else:
            found.append(torch.autograd.grad(functional_call(model, others, (x, run)).sum(), list(others.values())))
    agree(*found)


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_parameters_may_be_frozen_between_the_passes(gradient):
    """The gradient of the others is that of the forward pass."""
    f, x, found = network(), point(), []
    for change in (False, True):
        f.requires_grad_(True)
        z = revdeq.solve(Added(f), zeros(), x, gradient=gradient, max_steps=40, state="exact", check="raise").z
        if change:
            f.requires_grad_(False)
        found.append(torch.autograd.grad(z.sum(), x))
    agree(*found)


def test_a_module_that_stores_a_solution_is_copied():
    f = linear()
    f.solution = solve(f, torch.ones(3, D))
    assert torch.equal(copy.deepcopy(f).solution.z, f.solution.z)


@pytest.mark.parametrize(("case", "settings"), list(both_ways(CASES)))
def test_the_gradient_is_that_of_a_stored_graph(case, settings):
    expected = {k: v for k, v in settings.items() if k in ("beta", "gamma")}
    found = []
    for run in (solver(**settings), functools.partial(reference, **expected)):
        torch.manual_seed(0)
        found.append(case(run))
    agree(*found, tolerance=5e-6 if "beta" in settings else 2e-6)


# 2. What is noticed, in the forward pass


class Wrapping(Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, x):
        wrapper = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)
        wrapper.inner = x
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*(x.inner if isinstance(x, cls) else x for x in args), **(kwargs or {}))


WITHOUT_MEMORY = {
    "a wrapper": Wrapping,
    "TwoTensor": lambda x: TwoTensor(x, x),
    "MaskedTensor": lambda x: torch.masked.masked_tensor(x.detach(), torch.ones_like(x, dtype=torch.bool)),
    "zeros": lambda x: torch._efficientzerotensor(x.shape),
}


@pytest.mark.parametrize("from_evaluation", [1, 4])
@pytest.mark.parametrize("what", WITHOUT_MEMORY)
def test_an_output_that_kernels_cannot_read_is_refused(what, from_evaluation):
    """In the reference: a kernel that is given an address that does not exist ends the process."""
    calls = []

    def f(z):
        calls.append(1)
        return WITHOUT_MEMORY[what](0.5 * z) if len(calls) >= from_evaluation else 0.5 * z

    with revdeq.kernels.backend("reference"), pytest.raises(TypeError, match="wraps|without memory|no memory"):
        solve(f, point())
    assert len(calls) == from_evaluation


@pytest.mark.parametrize("what", WITHOUT_MEMORY)
def test_a_z0_that_kernels_cannot_read_is_refused(what):
    with revdeq.kernels.backend("reference"), pytest.raises(TypeError, match="z0.*(wraps|without memory|no memory)"):
        solve(lambda z: 0.5 * z, WITHOUT_MEMORY[what](torch.ones(3)))


@pytest.mark.parametrize("what", ["TwoTensor", "zeros"])
def test_a_gradient_that_kernels_cannot_read_is_refused_or_right(what):
    x = point()
    with revdeq.kernels.backend("reference"):
        z = solve(lambda z: 0.5 * z + x, zeros()).z
        with pytest.raises((TypeError, RuntimeError), match="gradient"):
            torch.autograd.grad(z, x, WITHOUT_MEMORY[what](torch.ones(3, D)))


OUTPUTS = {
    "structure": ((lambda z: (z, z)), TypeError, "must return the structure of z0|tuple"),
    "nothing": ((lambda z: None), TypeError, "NoneType"),
    "shape": ((lambda z: z[:1]), ValueError, r"shape \(1, 6\)"),
    "dtype": ((lambda z: z.long()), TypeError, "int64"),
    "device": ((lambda z: z.to("meta")), (TypeError, ValueError), "meta"),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("what", OUTPUTS)
def test_another_output_is_refused(what, late):
    f, error, text = OUTPUTS[what]
    calls = []

    def changing(z):
        calls.append(1)
        return 0.5 * z if late and len(calls) < 3 else f(z)

    with pytest.raises(error, match=text):
        solve(changing, zeros())


@pytest.mark.parametrize("settings", [{}, {"tol": 1e-3}, {"state": "exact"}], ids=str)
def test_nan_is_refused_where_it_can_be_seen(settings):
    with pytest.raises(FloatingPointError, match="not finite"):
        solver(**settings)(lambda z: z / 0, point())
    with pytest.raises(FloatingPointError, match="z0 is not finite"):
        solver(**settings)(lambda z: 0.5 * z, torch.full((3,), torch.nan))


IN_PLACE = {
    "its input": lambda z, x: z.mul_(0.5) + x,
    "its input, and returns it": lambda z, x: z.mul_(0.5).add_(x),
    "its input through a view": lambda z, x: (z[0].zero_(), 0.5 * z + x)[1],
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("what", IN_PLACE)
def test_an_f_that_changes_its_input_is_refused(what, grad):
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match="modifies its input in place.*z.add"):
        solve(IN_PLACE[what], zeros(), point())


def test_an_f_that_changes_its_input_later_is_refused():
    with pytest.raises(RuntimeError, match="modifies its input in place"):
        solve(lambda z, x: (z.mul_(0.5) if z.detach().norm() > 0 else z) + x, zeros(), point())


def test_an_f_that_changes_a_saved_tensor_is_refused():
    def f(z, x):
        h = torch.tanh(z + x)
        out = h.exp() * h
        h.add_(1)
        return 0.1 * out

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        solve(f, zeros(), point())


def norm_block():
    return nn.Sequential(linear(), nn.BatchNorm1d(D), nn.Tanh())


class Holder:
    def __init__(self, block):
        self.block = block

    def method(self, z):
        return self.block(z)


WRAPPINGS = {
    "module": lambda block: block,
    "closure": lambda block: lambda z: block(z),
    "partial": lambda block: functools.partial(lambda b, z: b(z), block),
    "method": lambda block: Holder(block).method,
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_batch_norm_in_training_mode_is_refused(wrapping, grad):
    block = norm_block()
    with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"GroupNorm.*eval\(\)"):
        solve(WRAPPINGS[wrapping](block), point())
    block.eval()
    z0 = point()
    agree(gradients(solve(block, z0), z0, block), gradients(reference(block, z0), z0, block))


def test_spectral_norm_in_training_mode_is_refused_with_its_remedy():
    f = parametrizations.spectral_norm(linear())
    with pytest.raises(RuntimeError, match=r"f changes a buffer.*eval\(\)"):
        solve(lambda z: torch.tanh(f(z)), point())


def test_a_stateful_layer_that_f_does_not_call_is_allowed():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.block = nn.BatchNorm1d(D), linear()

        def forward(self, x):
            x = self.norm(x)
            return solve(lambda z: torch.tanh(self.block(z) + x), torch.zeros_like(x)).z

    Model()(torch.randn(4, D)).sum().backward()


def vmapped(z):
    return torch.func.vmap(torch.tanh)(z)


FUNCTORCH = {
    "vmap": vmapped,
    "grad": torch.func.grad(lambda z: z.cos().sum()),
    "jvp": lambda z: torch.func.jvp(torch.sin, (z,), (z,))[1],
    "a dual number": lambda z: forward_ad.unpack_dual(torch.sin(forward_ad.make_dual(z, z))).tangent,
}


@pytest.mark.parametrize("what", ["vmap", "grad"])
def test_torch_func_inside_f_is_refused(what):
    """There torch allows no saved-tensor hooks."""
    with pytest.raises(RuntimeError, match="torch.func"):
        solve(FUNCTORCH[what], point())
    with torch.no_grad():
        assert torch.equal(solve(FUNCTORCH[what], torch.ones(3)).z, reference(FUNCTORCH[what], torch.ones(3)).z)


def loss_of(w):
    return solve(lambda z: torch.tanh(w * z + w), torch.zeros(3)).z.sum()


AROUND = {
    "grad": torch.func.grad(loss_of),
    "vmap": torch.func.vmap(loss_of),
    "jacrev": torch.func.jacrev(loss_of),
    "vmap of z0": torch.func.vmap(lambda z: solve(torch.cos, z).z),
    "vmap of an argument": torch.func.vmap(lambda x: solve(lambda z, x: 0.5 * z + x, torch.zeros(()), x).z),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("what", AROUND)
def test_torch_func_around_the_solve_is_refused(what, grad):
    with torch.set_grad_enabled(grad), pytest.raises((TypeError, RuntimeError), match="torch.func"):
        AROUND[what](torch.rand(3))


@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_is_refused(grad):
    with forward_ad.dual_level(), torch.set_grad_enabled(grad):
        dual = forward_ad.make_dual(torch.rand(3), torch.ones(3))
        with pytest.raises((TypeError, RuntimeError), match="forward-mode"):
            solve(torch.cos, dual)
        with pytest.raises((TypeError, RuntimeError), match="forward-mode"):
            solve(lambda z: torch.cos(dual * z), torch.zeros(3))


@pytest.mark.parametrize("how", ["module", "function"])
@pytest.mark.parametrize("tracer", ["export", "make_fx"])
def test_dropout_cannot_be_traced(tracer, how):
    """Every evaluation would have another mask."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.dropout = linear(), nn.Dropout()

        def forward(self, x):
            drop = self.dropout if how == "module" else functools.partial(F.dropout, training=self.training)
            return solve(lambda z: torch.tanh(self.layer(drop(z)) + x), torch.zeros_like(x)).z

    model, x = Model().requires_grad_(False), torch.randn(3, D)
    trace = {"export": lambda m: torch.export.export(m, (x,)).module(), "make_fx": lambda m: make_fx(m)(x)}[tracer]
    with pytest.raises(Exception, match="(?s)dropout|random.*eval"):
        trace(model)
    torch.testing.assert_close(trace(model.eval())(x), model(x))


def test_a_wrong_signature():
    with pytest.raises(TypeError, match=r"f is called as f\(z, x\)"):
        revdeq.RevDEQ(nn.Linear(4, 4))(torch.randn(2, 4))
    with pytest.raises(TypeError, match="of f's own"):
        solve(lambda z: (_ for _ in ()).throw(TypeError("of f's own")), zeros())


# 3. What is noticed in the backward pass


def between(change, f=None, x=None, **options):
    """The backward pass of a solve, after a change of what f uses."""
    f, x = f or network(), point() if x is None else x
    z = solver(**options)(lambda z, x: f(z) + x, zeros(), x).z
    change(f, x)
    return lambda: z.sum().backward()


@torch.no_grad()
def change_a_weight(f, x):
    f[0].weight.add_(1)


@pytest.mark.parametrize("settings", [{}, {"state": "exact"}, {"keep": 3}, {"gradient": "implicit"}], ids=str)
def test_a_weight_that_is_changed_in_place_is_an_error(settings):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        between(change_a_weight, **settings)()


@torch.no_grad()
def test_a_weight_that_only_the_second_evaluation_saves():
    """A linear layer saves its weight only if its input needs a gradient, and z0 needs none."""
    f = nn.Sequential(linear(), nn.Tanh())
    with torch.enable_grad():
        backward = between(lambda f, x: f[0].weight.mul_(1.01), f)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            backward()


def test_a_z0_that_is_changed_in_place_is_an_error():
    f, z0 = network(), torch.ones(3, D)
    z = solve(f, z0).z
    z0.zero_()
    with pytest.raises(RuntimeError, match="z0.*was changed"):
        z.sum().backward()


CHANGED = {
    "an argument": lambda f, x: x.data.mul_(1.5),
    "the data of a weight": lambda f, x: f[0].weight.data.mul_(1.1),
    "dropout": lambda f, x: f.eval(),
}


@pytest.mark.parametrize("settings", [{}, {"state": "exact"}, {"keep": 3}, {"gradient": "implicit"}], ids=str)
@pytest.mark.parametrize("what", CHANGED)
def test_an_f_that_returns_something_else_is_noticed(what, settings):
    f = nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.3))
    with pytest.raises((revdeq.ReconstructionError, RuntimeError), match="f does not return"):
        between(CHANGED[what], f, **settings)()


def test_a_tensor_of_a_closure_that_is_another_one_by_then_is_noticed():
    f, total = linear(), 0
    for x in torch.randn(2, 3, D):
        total = total + solve(lambda z: torch.tanh(f(z) + x), zeros()).z  # noqa: B023
    with pytest.raises(revdeq.ReconstructionError, match="f does not return the same"):
        total.sum().backward()


class Remembers(nn.Module):
    """A cache that the first evaluation fills, or an average over all of them."""

    def __init__(self, grows):
        super().__init__()
        self.layer, self.grows, self.cache = network(), grows, []

    def forward(self, z, x):
        if self.grows or not self.cache:
            self.cache.append(self.layer(z if self.grows else x))
        return 0.5 * z + 0.3 * sum(self.cache) / len(self.cache) + x


UNREPEATABLE = {
    "a cache": lambda: Remembers(grows=False),
    "an average": lambda: Remembers(grows=True),
    "Python's random numbers": lambda: lambda z, x, f=linear(): f(z) * random.random() + x,
    "layers dropped at random": lambda: lambda z, x, f=network(): (f(z) if random.random() < 0.5 else 0.1 * z) + x,
    "a generator of its own": lambda: (
        lambda z, x, f=linear(), own=torch.Generator(): f(z) * torch.rand(3, D, generator=own) + x
    ),
}


@pytest.mark.parametrize("what", UNREPEATABLE)
def test_an_f_that_cannot_be_repeated_is_noticed(what):
    with pytest.raises((revdeq.ReconstructionError, RuntimeError), match="f does not return the same"):
        trained(solve, UNREPEATABLE[what]())


def test_an_f_that_counts_is_noticed_with_an_implicit_gradient():
    f, calls = linear(), []
    z = solver(gradient="implicit")(lambda z: torch.tanh(f(z)) + 0.1 * (calls.append(1), len(calls))[1], zeros()).z
    with pytest.raises(revdeq.ReconstructionError, match="f does not return"):
        z.sum().backward()


def test_a_parametrization_that_is_cached_around_the_forward_pass_is_refused():
    f = Added(parametrizations.weight_norm(linear()))
    with parametrize.cached():
        z = solve(f, zeros(), point()).z
    with pytest.raises(RuntimeError, match="f does not return the same.*cache"):
        z.sum().backward()


def test_a_kept_tensor_that_is_changed_in_place_is_an_error():
    w = point(D)
    s = solver(keep=2)(lambda z: torch.tanh(z * z + w), zeros())
    with torch.no_grad():
        s.y.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        s.z.sum().backward()


def scratch_block():
    w, scratch = point(D), torch.zeros(3, D)

    def f(z):
        with torch.no_grad():
            scratch.copy_(z).sin_()
        return torch.tanh(w * scratch) + 0.1 * z

    return f, w


def test_a_scratch_buffer_that_f_fills_again():
    """It holds the right numbers whenever f is repeated, but not while evaluations are kept."""
    f, w = scratch_block()
    agree(gradients(solve(f, torch.ones(3, D)), w), plain_scratch(w))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(solver(keep=3)(f, torch.ones(3, D)), w)


def plain_scratch(w):
    return gradients(reference(lambda z: torch.tanh(w * z.detach().sin()) + 0.1 * z, torch.ones(3, D)), w)


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_a_second_derivative_is_refused(gradient):
    w = point(3)
    z = solver(gradient=gradient)(lambda z: torch.tanh(w * z + w), torch.zeros(3)).z
    with pytest.raises(RuntimeError, match="no second derivative.*create_graph"):
        torch.autograd.grad(z.sum(), w, create_graph=True)


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_batched_gradients_are_refused(state):
    w = point(3)
    z = solver(state=state)(lambda z: torch.tanh(w * z + w), torch.zeros(3)).z
    with pytest.raises(RuntimeError, match="is_grads_batched"):
        torch.autograd.grad(z, w, torch.eye(3), is_grads_batched=True)


UNPACKED = {"dtype": lambda x: x.half(), "shape": lambda x: x.flatten()[:5], "device": lambda x: x.to("meta")}


@pytest.mark.parametrize("what", UNPACKED)
def test_a_saved_tensor_hook_that_returns_something_else_is_refused(what):
    f = linear()
    with saved_tensors_hooks(lambda x: x, lambda x: UNPACKED[what](x) if x.is_floating_point() else x):
        z = solve(lambda z, x: torch.tanh(f(z) + x), zeros(), point()).z
    with pytest.raises(RuntimeError, match="saved-tensor hook"):
        z.sum().backward()


def test_y_is_not_a_part_of_the_graph_of_z():
    w = point(D)
    s = solver(gamma=0.8)(lambda z: torch.tanh(z + w), zeros())
    with pytest.raises(RuntimeError):
        torch.autograd.grad(s.z.sum(), s.y)


def test_a_stored_value_after_its_solution_is_gone():
    f, kept = linear(), []
    solve(lambda z: (kept.append(torch.tanh(f(z))), kept[-1])[1], torch.ones(3, D))
    with pytest.raises(RuntimeError, match="solution"):
        kept[3].sum().backward()


def test_a_backward_pass_inside_another_one_of_the_same_solve_is_refused():
    w, calls, later = point(D), [], []

    def hook(g):
        calls.append(1)
        if len(calls) == 3:
            torch.autograd.grad(*later)

    def f(z):
        out = torch.tanh(z * w + 1)
        out.register_hook(hook)
        return out

    z = solve(f, zeros()).z
    later += [z.square().sum(), w, None, True]
    with pytest.raises(RuntimeError, match="backward pass"):
        z.sum().backward(retain_graph=True)
    agree(*(torch.autograd.grad(z.sum(), w, retain_graph=True) for _ in range(2)))


def test_a_backward_pass_in_inference_mode_is_right_or_names_it():
    f, x = network(), point()
    loss = solve(Added(f), zeros(), x).z.square().sum()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference"):
        loss.backward()


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_with_an_implicit_gradient_f_may_differentiate_and_gradients_may_be_infinite(gradient):
    f, seen = linear(), set()

    def step(z):
        seen.add(torch.is_grad_enabled())
        return 0.5 - 0.2 * torch.autograd.grad(torch.tanh(f(z)).square().sum(), z, create_graph=True)[0]

    z0 = torch.zeros(3, D, requires_grad=gradient == "exact")
    z = revdeq.solve(step, z0, gradient=gradient, max_steps=30, state="exact", check="raise").z
    (by_weight,) = torch.autograd.grad(z.sum(), f.weight, retain_graph=True)
    assert by_weight.norm() > 0 and seen == {True}
    assert not torch.autograd.grad(z.sum() * torch.inf, f.weight)[0].isfinite().all()


# 4. Nothing is left behind


@contextlib.contextmanager
def without_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def alive():
    return sum(isinstance(x, Tensor) for x in gc.get_objects())


LEFT = [{}, {"state": "exact"}, {"keep": 3}, {"tol": 1e-3}, {"gradient": "implicit"}, {"per_example": True, "tol": 1e-3}]


@pytest.mark.parametrize("settings", LEFT, ids=str)
def test_nothing_is_left_to_the_garbage_collector(settings):
    """A reference cycle would keep the tensors of an evaluation alive."""
    f, x = network(), torch.randn(3, D)

    def ways():
        z = revdeq.solve(lambda z: f(z) + x, zeros(), **settings).z
        torch.autograd.grad(z.sum(), f[0].weight, retain_graph=True)
        torch.autograd.grad(z.sum(), f[0].weight)
        revdeq.solve(lambda z: f(z) + x, zeros(), **settings)
        with torch.no_grad():
            revdeq.solve(lambda z: f(z) + x, zeros(), **settings)

    ways()
    with without_collector():
        before = alive()
        ways()
        assert alive() == before


def test_a_solve_that_fails_leaves_nothing_behind():
    w = point(D)

    def fails(z):
        if z.abs().max() > 0.5:
            raise KeyError("f")
        return torch.tanh(z + w) + 1

    def ways():
        with pytest.raises(KeyError):
            solve(fails, zeros())
        with pytest.raises(FloatingPointError):
            solver(tol=1e-3)(lambda z: (w.sum() + 1e30) * z * z + 1, zeros())
        with pytest.raises(OverflowError):
            solver(state="exact")(lambda z: 90 * w.square() * z + 90, zeros())
        for around in (True, False):
            z = checkpoint(lambda x: solve(lambda z: torch.tanh(z * w + x), zeros()).z, w, use_reentrant=around)
            z.sum().backward()

    ways()
    gc.collect()
    with without_collector():
        before = alive()
        ways()
        gc.collect()  # an exception refers to its frames
        assert alive() == before


@pytest.mark.parametrize("settings", [{}, {"state": "exact"}, {"gradient": "implicit"}], ids=str)
def test_a_backward_pass_frees_what_f_captures_while_the_solution_is_alive(settings):
    def solved():
        f, doubled = linear(), 2 * point()
        return solver(**settings)(lambda z: torch.tanh(f(z) + doubled), zeros()).z, weakref.ref(doubled)

    with without_collector():
        z, captured = solved()
        z.sum().backward(retain_graph=True)
        assert captured() is not None
        z.sum().backward()
        assert captured() is None
        with pytest.raises(RuntimeError, match="a second time"):
            z.sum().backward()


@pytest.mark.parametrize("evaluation", [1, 2, 5, 9, 12])
def test_an_interruption_leaves_everything_as_it_was(evaluation):
    """Ctrl-C in the first evaluation, later, and in the backward pass, of 8 evaluations each."""
    f, x, calls, solution = network(), point(), [], None

    def interrupted(z):
        calls.append(1)
        out = F.dropout(f(z) + x, 0.1)
        if len(calls) == evaluation:
            raise KeyboardInterrupt
        return out

    F.dropout(x, 0.1)
    expected = torch.get_rng_state()
    torch.set_rng_state(torch.Generator().manual_seed(0).get_state())
    torch.manual_seed(0)
    f, x = network(), point()
    with pytest.raises(KeyboardInterrupt):
        with torch.autocast("cpu", torch.bfloat16):
            solution = solve(interrupted, zeros())
        solution.z.sum().backward()
    assert (solution is None) == (evaluation <= 8)
    assert torch.equal(torch.get_rng_state(), expected)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    seen = []
    with saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        x.exp()
    assert len(seen) == 1  # of others, and none of ours
    agree(gradients(solve(Added(f), zeros(), x), x, f), gradients(reference(Added(f), zeros(), x), x, f))


def test_memory_of_a_solve_inside_f_does_not_grow():
    inner, outer, x = nn.Linear(64, 64), nn.Linear(64, 64), torch.randn(64, 64)

    def f(z):
        h = torch.tanh(outer(z))
        return revdeq.solve(lambda w: torch.tanh(0.3 * inner(w) + h), torch.zeros_like(z), max_steps=2).z

    def step(n):
        revdeq.solve(f, x, max_steps=n, check=None).z.sum().backward()

    step(2)
    assert peak_memory(lambda: step(12), x.device) <= 1.1 * peak_memory(lambda: step(3), x.device)


def test_an_idle_thread_costs_nothing():
    """A solve with dropout does not wait for threads that do not draw."""
    f, stop = nn.Sequential(linear(), nn.Dropout(0.3)), threading.Event()
    idle = threading.Thread(target=stop.wait)
    idle.start()
    try:
        agree(trained(solve, Added(f), f), trained_alone(f))
    finally:
        stop.set()
        idle.join()


def trained_alone(f):
    torch.manual_seed(0)
    linear()
    return trained(reference, Added(f), f)
