"""What training code can do to a function that the backward pass evaluates again. Each hazard is a function of the
solver; its gradients are those of the stored graph, or an error names the cause."""

import contextlib
import copy
import functools
import gc
import itertools
import operator
import random
import threading
import weakref
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacrev, jvp, stack_module_state, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils import parametrizations, parametrize, prune
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import revdeq
from revdeq._solver.call import Call
from revdeq._solver.places import Places
from revdeq._solver.tape import Tape
from revdeq._solver.way_back import WayBack
from revdeq.baselines import stored_graph

D, STEPS = 6, 4
TOLERANCE = 2e-6
"""Sums of a few float32 numbers in another order, and 6e-8 in the states."""

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is"),  # torch's own forward mode scripts its decompositions
    pytest.mark.filterwarnings("ignore:A saved_tensors_hooks context"),  # of selective checkpoints, from torch 2.15 on
    pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar"),  # LBFGS of torch 2.8
]

RIGHT, REFUSED = [], []


def right(hazard):
    RIGHT.append(hazard)
    return hazard


def refused(error, text):
    def decorate(hazard):
        REFUSED.append((hazard, error, text))
        return hazard

    return decorate


def by_name(hazard):
    return getattr(hazard, "__name__", None)


def reference(f, z0, *args, **settings):
    return stored_graph(f, z0, *args, max_steps=STEPS, **settings)


def solver(state):
    return lambda f, z0, *args: revdeq.solve(f, z0, *args, max_steps=STEPS, state=state, check="raise").z


def gradients(hazard, solve):
    torch.manual_seed(0)
    random.seed(0)
    found: list[Tensor | None] = []
    for x in hazard(solve):
        found += [p.grad for p in x.parameters()] if isinstance(x, nn.Module) else [x]
    return [x.to_dense() if x is not None and x.layout is not torch.strided else x for x in found]


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("hazard", RIGHT, ids=by_name)
def test_the_gradient_is_right(hazard, state):
    expected, ours = gradients(hazard, reference), gradients(hazard, solver(state))
    assert any(x is not None for x in expected)
    for gradient, other in zip(ours, expected, strict=True):
        if gradient is None or other is None:
            assert gradient is other
            continue
        assert (gradient - other).abs().max() <= TOLERANCE * other.abs().max()


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("hazard, error, text", REFUSED, ids=by_name)
def test_it_is_refused(hazard, error, text, state):
    with pytest.raises(error, match=text):
        gradients(hazard, solver(state))


def linear():
    layer = nn.Linear(D, D)
    layer.weight.data *= 0.5
    return layer


def network():
    return nn.Sequential(linear(), nn.Tanh(), linear())


class Added(nn.Module):
    def __init__(self, inner=None):
        super().__init__()
        self.inner = inner or network()

    def forward(self, z, x):
        return self.inner(z) + x


def point():
    return torch.randn(3, D, requires_grad=True)


def trained(solve, f, *modules, x=None, z0=None):
    x = point() if x is None else x
    z = solve(f, torch.zeros(3, D) if z0 is None else z0, x)
    z.square().sum().backward()
    return [*modules, x.grad]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, w):
        ctx.save_for_backward(z, w)
        return z @ w

    @staticmethod
    def backward(ctx, g):
        z, w = ctx.saved_tensors
        return g @ w.T, z.T @ g


# 1. transforms of torch.func, and derivatives, inside f


@right
def vmap_of_a_module(solve):
    f = network()
    return trained(solve, lambda z, x: vmap(f, chunk_size=2)(z) + x, f)


@right
def vmap_over_captured_results(solve):
    f, x, w = network(), point(), nn.Parameter(torch.randn(3, D, D) * 0.2)
    doubled, weights = x * 2, w * 1.0
    z = solve(lambda z: vmap(lambda a, b, c: f(a) + b + a @ c)(z, doubled, weights), torch.zeros(3, D))
    z.square().sum().backward()
    return f, x.grad, w.grad


@right
def an_ensemble(solve):
    modules = [network() for _ in range(2)]
    parameters, _ = stack_module_state(modules)
    x = torch.randn(2, 3, D, requires_grad=True)
    f = lambda z, x: vmap(lambda p, z: functional_call(modules[0], p, (z,)))(parameters, z) + x  # noqa: E731
    return *trained(solve, f, x=x, z0=torch.zeros(2, 3, D)), *(p.grad for p in parameters.values())


@right
def the_gradient_of_an_energy(solve):
    f, w = network(), nn.Parameter(torch.randn(D) * 0.1)
    doubled = w * 2
    step = lambda z, x: 0.8 * z - 0.3 * grad(lambda z: (f(z) * doubled).square().sum())(z) + x  # noqa: E731
    return *trained(solve, step, f, z0=torch.ones(3, D)), w.grad


@right
def jacobians(solve):
    f = network()
    step = lambda z, x: 0.3 * vmap(lambda z: jacrev(f)(z).sum(0))(z) + 0.3 * jvp(f, (z,), (x,))[1]  # noqa: E731
    return trained(solve, step, f, z0=torch.ones(3, D))


@right
def forward_mode_inside_f(solve):
    f = network()

    def step(z, x):
        with forward_ad.dual_level():
            return 0.3 * forward_ad.unpack_dual(f(forward_ad.make_dual(z, x))).tangent + 0.2 * z + x

    return trained(solve, step, f, z0=torch.ones(3, D))


# 2. hooks


@right
def backward_hooks_that_change_gradients(solve):
    f = network()
    f[0].register_full_backward_hook(lambda module, by_input, by_output: (by_input[0] * 0.5,))
    f[2].register_full_backward_pre_hook(lambda module, by_output: (by_output[0].clamp(-0.1, 0.1),))
    return trained(solve, lambda z, x: f(z) + x, f, z0=point())


@right
def hooks_on_all_modules(solve):
    f, module = network(), nn.modules.module
    scale = lambda module, by_input, by_output: tuple(g if g is None else g * 0.9 for g in by_input)  # noqa: E731
    handle = module.register_module_full_backward_hook(scale)
    try:
        return trained(solve, lambda z, x: f(z) + x, f, z0=point())
    finally:
        handle.remove()


@right
def hooks_inside_f(solve):
    f = network()

    def hooked(z, x):
        if z.requires_grad:
            z.register_hook(lambda g: g * 0.5)
        h = f(z)
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.3, 0.3))
        return h + x

    return trained(solve, hooked, f)


@right
def a_hook_on_an_argument_inside_f(solve):
    def hooked(z, x):
        x.register_hook(lambda g: g * 0.9)
        return 0.5 * z + x

    return trained(solve, hooked)


@right
def a_hook_on_a_parameter_inside_f(solve):
    f = network()

    def hooked(z, x):
        f[0].weight.register_hook(lambda g: g * 0.9)
        return f(z) + x

    return trained(solve, hooked, f)


@right
def a_hook_that_f_registers_once(solve):
    f, handles = network(), []

    def hooked(z, x):
        if not handles:
            handles.append(f[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1)))
        return f(z) + x

    return trained(solve, hooked, f)


def hooked_weight():
    weight = nn.Parameter(torch.randn(D, D) * 0.2)
    weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
    return weight


@right
def a_hook_on_what_a_custom_function_takes(solve):
    weight = hooked_weight()
    return *trained(solve, lambda z, x: Product.apply(z, weight).tanh() + x), weight.grad


@right
def a_hook_on_what_vmap_takes(solve):
    weight = hooked_weight()
    z0 = torch.ones(D, D)
    return *trained(solve, lambda z, x: vmap(torch.mul)(z, weight) + x, x=torch.ones(D, D), z0=z0), weight.grad


@right
def a_kept_gradient_of_what_a_custom_function_takes(solve):
    weight = nn.Parameter(torch.randn(D, D) * 0.2) * 1
    weight.retain_grad()
    return *trained(solve, lambda z, x: Product.apply(z, weight).tanh() + x), weight.grad


@right
def a_hook_on_what_a_custom_function_takes_from_arguments(solve):
    weight = hooked_weight()
    solve(lambda z, w: Product.apply(z, w).tanh() + 1, torch.zeros(3, D), weight).sum().backward()
    return [weight.grad]


@right
def a_hook_on_what_a_custom_function_takes_from_a_module(solve):
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = hooked_weight()

        def forward(self, z, x):
            return Product.apply(z, self.weight).tanh() + x

    f = Module()
    return trained(solve, f, f)


@right
def a_backward_hook_removed_between_the_passes(solve):
    f = network()
    handle = f[0].register_full_backward_hook(lambda module, by_input, by_output: (by_input[0] * 0.5,))
    z = solve(lambda z, x: f(z) + x, torch.ones(3, D, requires_grad=True), point())
    handle.remove()
    z.sum().backward()
    return [f]


@right
def a_backward_hook_added_between_the_passes(solve):
    f = Added()
    z = solve(f, torch.ones(3, D), point())
    f.inner.register_full_backward_pre_hook(lambda module, by_output: None)
    z.sum().backward()
    return [f]


@right
def optimizers_in_the_backward_pass(solve):
    f, x = network(), point()
    for p in f.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)

        def step(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        once = solve(lambda z, x: f(z) + x, torch.zeros(3, D), x)
        solve(lambda z, x: f(z) + x, torch.zeros(3, D), once).square().sum().backward()
    return *(p.detach() for p in f.parameters()), x.grad


# 3. contexts around the passes


@right
def a_counter_of_flops(solve):
    f = Added()
    with FlopCounterMode(display=False):
        return trained(solve, f, f)


@right
def a_backward_pass_in_inference_mode(solve):
    f, x = network(), point()
    loss = solve(lambda z, x: f(z) + x, torch.zeros(3, D), x).square().sum()
    with torch.inference_mode():
        loss.backward()
    return f, x.grad


@right
def a_backward_pass_in_another_thread(solve):
    f, x = network(), point()
    doubled, made = x * 2, []
    forward = threading.Thread(target=lambda: made.append(solve(lambda z: f(z) + doubled, torch.zeros(3, D))))
    forward.start()
    forward.join()
    backward = threading.Thread(target=lambda: made[0].square().sum().backward())
    backward.start()
    backward.join()
    return f, x.grad


@right
def selective_checkpoints(solve):
    f = network()

    def policy(context, operation, *args, **kwargs):
        saved = operation is torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    around = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)
    x = point()
    around(lambda x: solve(lambda z, x: around(f, z) + x, torch.zeros(3, D), x), x).square().sum().backward()
    return f, x.grad


@right
def anomaly_detection(solve):
    f = network()
    with torch.autograd.set_detect_anomaly(True):
        return trained(solve, lambda z, x: f(z) + x, f)


@refused(revdeq.ReconstructionError, "f does not return the same")
def a_mode_around_the_forward_pass(solve):
    class Scaled(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            return out * 1.5 if func is torch.tanh else out

    f = network()
    with Scaled():
        z = solve(lambda z, x: f(z) + x, torch.zeros(3, D), point())
    z.sum().backward()
    return [f]


@refused(RuntimeError, "was changed between the forward and the backward pass")
def permitted_changes_of_saved_tensors(solve):
    f = network()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        z = solve(lambda z, x: f(z) + x, torch.ones(3, D), point())
        with torch.no_grad():
            f[0].weight.mul_(1.5)
        z.sum().backward()
    return [f]


@right
def a_traced_gradient(solve):
    f, x = Added(), point()
    joint = lambda x: torch.autograd.grad(solve(f, torch.zeros(3, D), x).square().sum(), [x, *f.parameters()])  # noqa: E731
    return make_fx(joint)(x)(x)


@right
def a_layer_that_autocast_spares(solve):
    """Its derivative is not rounded to bfloat16, either."""
    f, x = network(), point()

    def spared(z, x):
        with torch.autocast(z.device.type, enabled=False):
            h = f[0](z)
        return f[2](h.tanh()) + x

    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=False):
        z = solve(spared, torch.zeros(3, D), x)
    z.square().sum().backward()
    return f[0], x.grad


@right
def autocast_around_the_backward_pass(solve):
    f, x = network(), point()
    loss = solve(lambda z, x: f(z) + x, torch.zeros(3, D), x).square().sum()
    with torch.autocast(x.device.type, torch.bfloat16):
        loss.backward()
    return [f]


# 4. parameters


PARAMETRIZATIONS = {
    "orthogonal": parametrizations.orthogonal,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer).eval(),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
}


def parametrized(solve, name, as_module):
    f = Added(nn.Sequential(PARAMETRIZATIONS[name](linear()), nn.Tanh()))
    return trained(solve, f if as_module else lambda z, x: f(z, x), f)


for name in PARAMETRIZATIONS:
    for as_module in (False, True):
        hazard = functools.partial(parametrized, name=name, as_module=as_module)
        hazard.__name__ = f"{name}_as_{'module' if as_module else 'closure'}"
        right(hazard)


@right
def a_parametrization_cached_inside_f(solve):
    f = nn.Sequential(parametrizations.orthogonal(linear()), nn.Tanh())

    def cached(z, x):
        with parametrize.cached():
            return f(f(z)) + x

    return trained(solve, cached, f)


@refused(RuntimeError, "a cached parametrization around the forward pass only")
def a_parametrization_cached_around_the_forward_pass(solve):
    f = Added(nn.Sequential(parametrizations.orthogonal(linear()), nn.Tanh()))
    with parametrize.cached():
        z = solve(f, torch.zeros(3, D), point())
    z.sum().backward()
    return [f]


@right
def lazy_layers(solve):
    f = Added(nn.Sequential(nn.LazyLinear(D), nn.Tanh()))
    return trained(solve, f, f)


@right
def low_rank_adapters(solve):
    base, a, b = linear().requires_grad_(False), nn.Parameter(torch.randn(D, 2) * 0.3), nn.Parameter(torch.zeros(2, D))
    return *trained(solve, lambda z, x: base(z).tanh() + z @ a @ b + x), a.grad + b.grad.sum()


@right
def sparse_embeddings(solve):
    tables = nn.Embedding(9, D, sparse=True), nn.Embedding(9, D, scale_grad_by_freq=True, padding_idx=2)
    words, f = torch.tensor([1, 2, 1]), network()
    return trained(solve, lambda z, x: f(z) + x + tables[0](words) + tables[1](words), f, *tables)


@right
def complex_parameters(solve):
    w = nn.Parameter(torch.randn(4, dtype=torch.complex64) * 0.5)
    f = lambda z, x: torch.fft.irfft(torch.fft.rfft(z) * w, n=D).tanh() + x  # noqa: E731
    return *trained(solve, f), w.grad


@right
def recurrent_layers(solve):
    lstm, cell = nn.LSTM(D, D), nn.GRUCell(D, D)
    return trained(solve, lambda z, x: 0.5 * cell(x, z) + 0.5 * lstm(z)[0] + x, lstm, cell)


@right
def replicas_of_data_parallel(solve):
    f = network()
    replica = nn.Sequential(*(copy.copy(module) for module in f))
    for module in (replica[0], replica[2]):
        parameters, module._parameters = module._parameters, {}
        for name, p in parameters.items():
            setattr(module, name, p * 1)
    return trained(solve, Added(replica), f)


@right
def a_sparse_matrix(solve):
    f, matrix = network(), torch.eye(3).to_sparse().requires_grad_()
    return *trained(solve, lambda z, x: torch.sparse.mm(matrix, f(z)) + x, f), matrix.grad


# 5. states, arguments and what f keeps


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Named:
    a: Tensor
    b: Tensor


@right
def named_tuples_of_views_of_one_tensor(solve):
    f, both = network(), torch.randn(6, D, requires_grad=True)
    z = solve(lambda z: Pair(f(z.b) + 1, 0.5 * z.a), Pair(*both.chunk(2)))
    operator.mul(*z).sum().backward()
    return f, both.grad


@right
def data_classes_and_partials(solve):
    f, x = network(), point()
    inside = Named(x * 2, x * 3)
    z = solve(functools.partial(lambda z, a, k: f(z) + a.a * k + a.b, k=x * 1), torch.zeros(3, D), inside)
    z.square().sum().backward()
    return f, x.grad


@right
def a_list_that_is_emptied_after_the_solve(solve):
    f, x = network(), point()
    given = [x * 1, x * 2]
    z = solve(lambda z, pair: f(z) + pair[0] * pair[1], torch.zeros(3, D), given)
    given.clear()
    z.square().sum().backward()
    return f, x.grad


@right
def a_result_that_is_changed_in_place(solve):
    f, x = network(), point()
    z = F.relu(solve(lambda z, x: f(z) + x, torch.zeros(3, D), x), inplace=True)
    total = z.sum()
    z.data.zero_()
    total.backward()
    return f, x.grad


@refused(revdeq.ReconstructionError, "f does not return the same")
def a_cache_that_grows(solve):
    f, cache = network(), []

    def remembering(z, x):
        cache.append(f(z))
        return 0.5 * sum(cache) / len(cache) + x

    return trained(solve, remembering, f)


@refused(revdeq.ReconstructionError, "f does not return the same")
def draws_of_python(solve):
    f = network()
    return trained(solve, lambda z, x: f(z) * random.random() + x, f)


@refused(RuntimeError, "f used a different tensor of shape")
def layers_that_are_dropped_at_random(solve):
    f, g = network(), network()
    return trained(solve, lambda z, x: (f(z) if random.random() < 0.5 else g(z)) + x, f)


@refused(revdeq.ReconstructionError, "f does not return the same")
def dropout_switched_off_between_the_passes(solve):
    f = nn.Sequential(linear(), nn.Dropout(0.5))
    z = solve(lambda z, x: f(z) + x, torch.zeros(3, D), point())
    f.eval()
    z.sum().backward()
    return [f]


# 6. whole training steps


@right
def steps_with_clipped_gradients_and_two_optimizers(solve):
    f, x = network(), point()
    adam, lbfgs = torch.optim.AdamW(f.parameters(), lr=0.01), torch.optim.LBFGS(f.parameters(), lr=0.1, max_iter=2)

    def loss(factor=1.0):
        lbfgs.zero_grad()
        value = solve(lambda z, x: f(z) + x, torch.zeros(3, D), x * factor).square().mean()
        value.backward()
        return value

    for i in range(3):
        loss(i + 1)
        nn.utils.clip_grad_norm_(f.parameters(), 0.5)
        adam.step()
    lbfgs.step(loss)
    return *(p.detach() for p in f.parameters()), x.grad


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_a_backward_pass_frees_captured_tensors_while_the_solution_is_alive(gradient):
    def solved():
        f, doubled = network(), point() * 2
        z = revdeq.solve(lambda z: f(z) + doubled, torch.zeros(3, D), gradient=gradient, check=None).z
        return z, weakref.ref(doubled)

    with without_collector():
        z, captured = solved()
        z.sum().backward(retain_graph=True)
        assert captured() is not None
        z.sum().backward()
        assert captured() is None
        with pytest.raises(RuntimeError, match="a second time"):
            z.sum().backward()


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("backward", [False, True])
def test_captured_tensors_are_freed_immediately(state, backward):
    def solved():
        f, doubled = network(), point() * 2
        return solver(state)(lambda z: f(z) + doubled, torch.zeros(3, D)), weakref.ref(doubled)

    with without_collector():
        z, captured = solved()
        assert captured() is not None
        if backward:
            z.sum().backward()
        del z
        assert captured() is None


def test_nothing_is_left_to_the_garbage_collector():
    """A reference cycle through a tape would keep the tensors of an evaluation alive."""
    f, x = network(), point().detach()
    several = [{}, {"state": "exact"}, {"keep": 3}, {"tol": 1e-3}, {"backward_steps": 2}]
    with without_collector():  # collecting takes a second in a large process, so it is done once
        before = alive()
        for options, how in itertools.product(several, ["backward", "grad", "none"]):
            z = revdeq.solve(lambda z: f(z) + x, torch.zeros(3, D), **options).z
            if how == "backward":
                z.sum().backward()
            elif how == "grad":
                torch.autograd.grad(z.sum(), f[0].weight)
            del z
            assert alive() == before, (options, how)


def alive():
    return sum(type(x) in (Tape, WayBack, Call, Places) for x in gc.get_objects())


@contextlib.contextmanager
def without_collector():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
