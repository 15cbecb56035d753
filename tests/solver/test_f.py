"""What f may do, and what is noticed if it does something else: the contract of a solve.

It is that of `torch.utils.checkpoint`: f must return the same when it is called again with the same input. Gradients
are compared with those of a plain loop that stores its graph.
"""

import contextlib
import functools
import gc
import itertools
import random
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from plain import agree, gradients, reference
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import revdeq
from revdeq._device import peak_memory

D, STEPS = 6, 4
EXACT, KEEP, GAMMA = {"state": "exact"}, {"keep": 3}, {"gamma": 0.8}
IMPLICIT = {"gradient": "implicit", "max_steps": 40}
SETTINGS = [{}, EXACT, KEEP, GAMMA, {"beta": 0.8, "keep": 8}, {"beta": 1.25, "state": "exact"}]

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
    return functools.partial(revdeq.solve, **{"max_steps": STEPS, "check": "raise", **options})


solve = solver()


def same(gradients_by, *runs, tolerance=2e-6):
    """Solves give the gradients of the stored graph, from the same seed."""
    found = []
    for run in (*(runs or (solve,)), reference):
        torch.manual_seed(0)
        found.append(gradients_by(run))
    agree(*found, tolerance=tolerance)


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


def in_turn(cases, values):
    """Each case with one of the values."""
    return [pytest.param(x, v, id=f"{name(x)}-{v}") for x, v in zip(cases, itertools.cycle(values), strict=False)]


def name(x):
    return getattr(x, "__name__", None) or str(x)


# 1. What f may be


@dataclass
class Argument:
    a: Tensor
    b: list[Tensor]


class Method(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = network()

    def step(self, z, x, given):
        return self.block(z) + x * given.a + given.b[0]


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


def save_products(context, operation, *args, **kwargs):
    saved = operation is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


class May:
    """Each function returns an f(z, x), and what its gradients are compared for."""

    def a_partial_of_a_method_with_nested_arguments():
        model, a, b = Method(), point(), point()
        return functools.partial(model.step, given=Argument(2 * a, [3 * b, b])), model, a, b

    def capture_tensors_made_from_each_other():
        encoder, f, given = linear(), linear(), torch.randn(3, D)
        e = encoder(given)
        mean, (a, b) = torch.tanh(e).mean(0), e.split([2, D - 2], -1)
        return lambda z, x: torch.tanh(0.5 * f(z) + torch.cat([b, a], -1)) + 0.2 * mean + 0.1 * x, encoder, f

    def capture_what_a_layer_of_its_own_and_a_solve_inside_use():
        f, inner, given = linear(), parametrizations.weight_norm(linear()), torch.randn(3, D)
        h = f(given)
        m = torch.tanh(inner(h) * inner.bias)

        def step(z, x):
            w = revdeq.solve(lambda w: torch.tanh(0.3 * inner(w) + m + h), torch.zeros_like(z), max_steps=2).z
            return torch.tanh(0.5 * f(z) + w + h) + x

        return step, f, inner

    def have_sparse_gradients_and_complex_parameters():
        tables = nn.Embedding(9, D, sparse=True), nn.Embedding(9, D, scale_grad_by_freq=True, padding_idx=2)
        words, matrix = torch.tensor([1, 2, 1]), torch.eye(3).to_sparse().requires_grad_()
        w = nn.Parameter(torch.randn(4, dtype=torch.complex64) * 0.5)

        def f(z, x):
            z = torch.fft.irfft(torch.fft.rfft(torch.sparse.mm(matrix, z)) * w, n=D).tanh()
            return z + x + tables[0](words) + tables[1](words)

        return f, *tables, matrix, w

    def be_parametrized():
        f = nn.Sequential(
            parametrizations.weight_norm(linear()),
            parametrizations.orthogonal(linear()),
            prune.l1_unstructured(linear(), "weight", 0.5),
            parametrizations.spectral_norm(linear()).eval(),
        )

        def cached(z, x):
            with parametrize.cached():
                return f[1:](f(z)).tanh() + x

        return cached, f

    def call_a_custom_function():
        w = nn.Parameter(torch.randn(D, D) * 0.2)
        return lambda z, x: Product.apply(z, w).tanh() + x, w

    def write_its_result_in_place():
        f = linear()

        def written(z, x):
            out = torch.zeros_like(z)
            out[[0, 1]] = f(z)[:2]
            out[2].add_(z[1] * 0.2)
            with torch.no_grad():
                scale = f(z).norm()
            return out.tanh_() / (1 + scale) + x

        return written, f

    def differentiate_an_energy():
        f, w = network(), nn.Parameter(torch.randn(D) * 0.3)

        def step(z, x):
            z = z if z.requires_grad else z.detach().requires_grad_()
            return 0.8 * z - 0.3 * torch.autograd.grad((f(z) * w).tanh().sum(), z, create_graph=True)[0] + x

        return step, f, w

    def differentiate_by_a_weight_and_a_leaf_of_its_own():
        w = nn.Parameter(torch.randn(D, D) * 0.3)

        def step(z, x):
            leaf = nn.Parameter(z.detach())
            by_z, by_w = torch.autograd.grad((leaf @ w).cos().sum(), [leaf, w], create_graph=True)
            return 0.2 * z - 0.1 * by_z - 0.05 * z @ by_w + x

        return step, w

    def map_over_a_batch_by_vmap():
        f, w = network(), point(3, D, D)
        return lambda z, x: vmap(lambda z, w: f(z) + 0.1 * z @ w)(z, 2 * w) + x, f, w

    def drop_out():
        f, attention = nn.Sequential(linear(), nn.Dropout(0.3)), nn.MultiheadAttention(D, 2, dropout=0.3)
        return lambda z, x: f(z) + 0.5 * attention(z, x, x)[0] + F.dropout(x, 0.2), f, attention

    def have_checkpoints():
        f = nn.Sequential(linear(), nn.Dropout(0.3), nn.Tanh())
        contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
        inner = functools.partial(checkpoint, f, use_reentrant=False, context_fn=contexts)
        return lambda z, x: inner(z) + x, f

    def have_hooks_that_change_gradients():
        f = network()
        f[0].weight.register_hook(lambda g: g.clamp(-0.1, 0.1))
        f[1].register_full_backward_hook(lambda module, by_input, by_output: (by_input[0] * 0.5,))
        f[2].register_full_backward_pre_hook(lambda module, by_output: (by_output[0].clamp(-0.1, 0.1),))
        f[1].register_forward_hook(lambda module, given, out: out * 0.9)

        def step(z, x):
            out = torch.tanh(f(z) + x)
            out.register_hook(lambda g: g.clamp_(-0.3, 0.3))
            return out

        return step, f

    def return_its_input_or_a_captured_tensor():
        f, x0 = linear(), point()
        return lambda z, x: z if z.norm() > 3 else x0 if z.norm() < 1e-3 else f(z) + x, x0

    def return_an_expanded_and_negative_view():
        f = linear()
        return lambda z, x: torch.complex(z, 0.5 * (f(z) + x)[:, :1].expand(3, D)).conj().imag, f

    def return_another_dtype():
        f = linear()
        return lambda z, x: (f(z).tanh() + x).double(), f


MAY = [x for key, x in vars(May).items() if not key.startswith("__")]


@pytest.mark.parametrize(("case", "settings"), [*in_turn(MAY, SETTINGS), *in_turn(MAY[9::3], SETTINGS[1:3])])
def test_f_may(case, settings):
    """Larger coefficients amplify the resolution of an exact state."""
    coefficients = {k: v for k, v in settings.items() if k in ("beta", "gamma")}

    def of(run):
        f, *of = case()
        z0, x = point() if settings else zeros(), point()
        return gradients(run(f, z0, x, **coefficients), z0, x, *of)

    same(of, solver(**settings), tolerance=7e-6 if "beta" in settings else 2e-6)


COMPILED = {
    "module": lambda f: torch.compile(f, backend="aot_eager"),
    "part": lambda f: lambda z, x: torch.compile(f.inner, backend="aot_eager", fullgraph=True)(z) + x,
}


@pytest.mark.parametrize("what", COMPILED)
def test_f_may_be_compiled(what):
    torch._dynamo.reset()
    f, x = Added(network()), point()
    same(lambda run: gradients(run(f if run is reference else COMPILED[what](f), zeros(), x), x, f))


@pytest.mark.parametrize("settings", [{}, KEEP], ids=str)
def test_hooks_on_what_f_uses_run_once(settings):
    f, x, calls = network(), point(), []
    encoded = x * 2
    encoded.retain_grad()
    encoded.register_hook(lambda g: calls.append("encoded"))
    f[0].weight.register_hook(lambda g: calls.append("weight"))
    f[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    solver(**settings)(lambda z: f(z) + encoded, zeros()).z.sum().backward()
    assert sorted(calls) == ["accumulated", "encoded", "weight"]
    agree([encoded.grad * 2], [x.grad])


# another solve inside


def test_f_may_solve_with_dropout_and_store_values():
    inner, other, f, x = linear(), linear(), linear(), point()

    def of(run):
        def step(z, x):
            kept = []

            def g(w, z):
                kept.append(other(w + z))
                return F.dropout(torch.tanh(inner(w) + z), 0.3)

            return 0.3 * F.dropout(f(z), 0.3) + 0.3 * run(g, torch.zeros_like(z), z).z + 0.1 * kept[-1] + x

        return gradients(run(step, zeros(), x), x, inner, other, f)

    same(of, solve, solver(**EXACT))


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_a_solve_inside_f_stops_at_its_tolerance(state):
    """It is unrolled, in the arithmetic of the float64 state."""
    w, x, counts = point(D), point(), []

    def inner(u, z):
        return 0.5 * torch.tanh(u) + w * z + 1

    def step(z, x):
        s = revdeq.solve(inner, torch.ones_like(z), z, tol=1e-3, max_steps=50, state=state)
        counts.append(s.steps)
        return 0.3 * s.z + x

    def stored(z, x):
        return 0.3 * reference(inner, torch.ones_like(z), z, max_steps=counts.pop(0)).z + x

    ours = gradients(solve(step, zeros(), x), x, w)
    assert 1 < counts[0] == revdeq.solve(inner, torch.ones(3, D), zeros(), tol=1e-3, max_steps=50).steps < 50
    agree(ours, gradients(reference(stored, zeros(), x), x, w))


INSIDE = {
    "implicit": (lambda z: revdeq.solve(torch.cos, z, gradient="implicit").z, "gradient"),
    "per_example": (lambda z: revdeq.solve(torch.cos, z, per_example=True, tol=1e-2).z, "per_example"),
    "steps": (lambda z: [s.z for s in revdeq.steps(torch.cos, z)][-1], "steps"),
    "another shape": (lambda z: revdeq.solve(lambda w: w[:, :1], z).z, r"\(3, 1\)"),
}


@pytest.mark.parametrize("what", INSIDE)
def test_a_solve_inside_f_refuses(what):
    with pytest.raises((ValueError, RuntimeError), match=INSIDE[what][1]):
        solve(INSIDE[what][0], point())


# random numbers, and values that f stores


def test_dropout_is_one_mask_per_solve_and_the_generator_moves_once():
    w, start = point(500), torch.get_rng_state()
    F.dropout(w)
    after_one = torch.get_rng_state()
    torch.set_rng_state(start)
    z = revdeq.solve(lambda z: F.dropout(w) + 0 * z, torch.zeros(500), max_steps=12).z
    assert torch.equal(torch.get_rng_state(), after_one)
    torch.rand(1)
    later = torch.get_rng_state()
    z.sum().backward()
    assert torch.equal(torch.get_rng_state(), later)
    assert 0 < (z != 0).sum() < 500 and torch.equal(w.grad != 0, z != 0) and len(w.grad.unique()) == 2


def storing():
    """An f, its layer, and what it stores."""
    layer, kept = linear(), []
    return lambda z: kept.append(torch.tanh(layer(z) + 1)) or kept[-1], layer, kept


STORED = [(0, {}, True), (1, KEEP, False), (3, EXACT, True), (6, KEEP, True), (7, {}, False), (0, EXACT, False)]


@pytest.mark.parametrize(("i", "settings", "alone"), STORED, ids=str)
def test_a_loss_may_use_what_any_evaluation_stored(i, settings, alone):
    """Also without the solution: later half-steps are then inverted without a gradient."""
    z0 = point()

    def of(run):
        f, layer, kept = storing()
        z = run(f, z0).z.sum()
        z = 0 if alone else z
        return torch.autograd.grad(kept[i].square().sum() + z, [z0, layer.weight], allow_unused=True)

    same(of, solver(**settings))


def test_losses_one_after_the_other():
    def of(run):
        f, layer, kept = storing()
        z = run(f, zeros()).z
        for loss in (kept[5].sum(), z.sum(), kept[2].square().sum(), z.square().sum() + kept[6].sum()):
            loss.backward(retain_graph=True)
        return [p.grad for p in layer.parameters()]

    same(of, solver(keep=5), solver(**EXACT))


# where the passes run


@contextlib.contextmanager
def cast(enabled=True, cache=True):
    with torch.autocast("cpu", torch.bfloat16, enabled, cache):
        yield


def here(run):
    return run()


def in_a_thread(run):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def within(context, *args):
    def call(run):
        with context(*args):
            return run()

    return call


def transposed(x):
    return x.t().contiguous().t() if x.dim() == 2 else x


PLACES = {  # of the forward and of the backward pass
    "one thread and another": (in_a_thread, in_a_thread),
    "nothing and autocast": (here, within(cast)),
    "a chosen attention": (within(sdpa_kernel, SDPBackend.MATH), here),
    "saved tensors on the cpu": (within(save_on_cpu), here),
    "saved tensors in another layout": (within(saved_tensors_hooks, lambda x: x, transposed), here),
    "anomaly detection": (here, within(torch.autograd.set_detect_anomaly, True)),
}


@pytest.mark.parametrize("where", PLACES)
def test_the_passes_may_run_in(where):
    """Of autograd's nodes, each thread numbers its own."""
    (forward, backward), seen = PLACES[where], set()
    f, x, encoder = network(), torch.randn(3, D), linear()
    encoded = encoder(x)

    def step(z):
        seen.add(torch.backends.cuda.flash_sdp_enabled())
        return f(z) + 0.5 * F.scaled_dot_product_attention(z, encoded, encoded)

    def of(run):
        solution = forward(lambda: run(step, zeros()))
        loss = solution.z.square().sum() + solution.y.sum()
        parameters = [*encoder.parameters(), *f.parameters()]
        return backward(lambda: torch.autograd.grad(loss, parameters, retain_graph=True))

    same(of)
    assert seen == {where != "a chosen attention"} and torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("where", ["around the forward pass", "around both", "inside", "switched off inside"])
def test_autocast(where):
    f, x, seen, found = network(), point(), set(), []
    inside = {"inside": cast, "switched off inside": functools.partial(cast, False)}.get(where, contextlib.nullcontext)

    def step(z, x):
        with inside():
            h = f[0](z)
        seen.add(h.dtype)
        return f[2](h.float().tanh()) + x

    for run, cache in ((solve, True), (reference, False)):
        with cast(where != "inside", cache):
            solution = run(step, zeros(), x)
            if where == "around both":
                found.append(gradients(solution, x, f))
        found += [gradients(solution, x, f)] if where != "around both" else []
    # Products are bfloat16 in both, their sums over evaluations are not in the stored graph.
    agree(*found, tolerance=4 * torch.finfo(torch.bfloat16).eps)
    assert seen == {torch.float32 if "off" in where else torch.bfloat16}


def test_an_f_that_differentiates_itself_is_repeated_bit_for_bit_under_autocast():
    """Autocast shares the cast of a leaf, but not that of another tensor, whose gradients are summed in float32."""
    f, g, x = linear(), linear(), torch.randn(3, D)

    def step(z):
        z = z if z.requires_grad else z.detach().requires_grad_()
        return 0.5 * z - 0.2 * torch.autograd.grad((f(z).tanh() + g(z).sin()).sum(), z, create_graph=True)[0]

    with cast():
        assert revdeq.verify(step, point(), max_steps=STEPS).exact
        assert revdeq.verify(step, f(x).float(), max_steps=STEPS, state="exact").exact


@pytest.mark.parametrize("inside", [False, True])
def test_memory_does_not_grow(inside):
    """With both passes in autocast, whose cache would keep tensors, and with a solve inside f."""
    f, inner, x = linear(128), linear(128), torch.randn(128, 128)

    def step(z):
        h = torch.tanh(f(z))
        return revdeq.solve(lambda w: torch.tanh(inner(w) + h), torch.zeros_like(z), max_steps=2).z if inside else h

    def both(n):
        with cast(not inside):
            revdeq.solve(step, x, max_steps=n, state="float64", check=None).z.sum().backward()

    both(4)
    assert peak_memory(lambda: both(12), x.device) <= 1.05 * peak_memory(lambda: both(4), x.device)


def test_solves_in_two_threads():
    """If f draws in one of them, another thread may take its random numbers: that is the caller's business."""
    jobs = [(network(), point()) for _ in range(2)]

    def run(job):
        f, x = job
        return gradients(solve(Added(f), zeros(), x), x, f)

    expected = [*map(run, jobs)] * 20
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(run, jobs * 20))
    assert all(torch.equal(a, b) for pair in zip(found, expected, strict=True) for a, b in zip(*pair, strict=True))


def test_saved_tensor_hooks_around_a_solve_do_not_see_its_tensors():
    f = network()
    with saved_tensors_hooks(lambda x: x.half(), lambda x: x):
        solution = solve(f, torch.ones(3, D))
    same(lambda run: gradients(solution if run is solve else run(f, torch.ones(3, D)), f))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_around_and_inside(reentrant):
    f = nn.Sequential(linear(), nn.Tanh(), nn.Dropout(0.3))

    def of(run):
        f.zero_grad()
        z0 = torch.ones(3, D, requires_grad=True)
        if reentrant:
            z = run(lambda z: 0.5 * checkpoint(f, z, use_reentrant=True) + 1, z0).z
        else:
            z = checkpoint(lambda z0: run(f, z0).z, z0, use_reentrant=False)
        z.square().sum().backward()
        return [f[0].weight.grad, z0.grad]

    same(of)


# states


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


PASSED_ON = [lambda z: z, lambda z: z.contiguous(), nn.Dropout().eval(), lambda z: z[:]]


@pytest.mark.parametrize(("passed_on", "settings"), in_turn(PASSED_ON, [{}, EXACT]))
def test_f_may_return_one_part_of_its_state_as_another(passed_on, settings):
    """The parts begin as views of one tensor. The first is inverted first."""
    f, both = linear(), torch.randn(6, D, requires_grad=True)

    def of(run):
        z = run(lambda z: Pair(torch.tanh(f(z.b)), passed_on(z.a)), Pair(*both.chunk(2))).z
        return torch.autograd.grad((z.a * z.b).sum(), [both, *f.parameters()])

    same(of, solver(**settings))


def test_an_expanded_z0_and_a_y0_from_inference_mode():
    f, z0 = network(), point(1, D)
    with torch.inference_mode():
        y0 = torch.ones(3, D)
    same(lambda run: gradients(run(f, z0.expand(3, D), y0=y0.clone() if run is reference else y0), z0, f))


# training


def test_optimizers_in_the_backward_pass():
    def of(run):
        f, x = network(), point()
        for p in f.parameters():
            sgd = torch.optim.SGD([p], lr=0.1)
            p.register_post_accumulate_grad_hook(lambda p, sgd=sgd: sgd.step() or sgd.zero_grad())
        for _ in range(2):
            once = run(Added(f), zeros(), x).z
            z = F.relu(run(Added(f), zeros(), once).z, inplace=True)
            loss = z.square().sum()
            z.data.zero_()  # a result may be changed
            loss.backward()
        return [x.grad, *(p.detach() for p in f.parameters())]

    same(of)


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_an_infinite_gradient_is_left_to_the_grad_scaler(gradient):
    f = linear()
    (solver(gradient=gradient)(lambda z: torch.tanh(f(z)), zeros()).z.sum() * torch.inf).backward()
    assert not f.weight.grad.isfinite().all()


def test_functional_call_around_the_forward_pass():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, x, run):
            return run(lambda z: torch.tanh(self.layer(z) + x), torch.zeros_like(x)).z

    model, x, weight = Model(), torch.randn(3, D), point(D, D)
    same(lambda run: torch.autograd.grad(functional_call(model, {"layer.weight": weight}, (x, run)).sum(), weight))


def test_the_implicit_gradient_of_an_f_that_differentiates_itself():
    f, seen = linear(), set()

    def step(z):
        seen.add(torch.is_grad_enabled())
        z = z if z.requires_grad else z.detach().requires_grad_()
        return 0.5 - 0.2 * torch.autograd.grad(torch.tanh(f(z)).square().sum(), z, create_graph=True)[0]

    ours = solver(**IMPLICIT)(step, zeros()).z
    assert seen == {True}
    stored = reference(step, zeros(), max_steps=40).z
    agree(*(torch.autograd.grad(z.sum(), f.weight) for z in (ours, stored)), tolerance=1e-4)


# 2. What is noticed in the forward pass


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


UNREADABLE = {
    "a wrapper": Wrapping,
    "TwoTensor": lambda x: TwoTensor(x, x),
    "MaskedTensor": lambda x: torch.masked.masked_tensor(x.detach(), torch.ones_like(x, dtype=torch.bool)),
    "zeros": lambda x: torch._efficientzerotensor(x.shape),
}


@pytest.mark.parametrize(("what", "when"), [*in_turn(UNREADABLE, [0, 1, 4]), ("a wrapper", 4)])
def test_tensors_that_kernels_cannot_read_are_refused(what, when):
    """As z0, the first output or a later one. In the reference: a kernel that reads an address that does not exist ends
    the process."""
    calls, x = [], point(D)

    def f(z):
        calls.append(1)
        return UNREADABLE[what](0.5 * z + x) if len(calls) == when else 0.5 * z + x

    with revdeq.kernels.backend("reference"), pytest.raises(TypeError, match="(?s)(z0|output).*(wraps|memory)"):
        solve(f, zeros() if when else UNREADABLE[what](zeros()))
    assert len(calls) == when


class Wraps(torch.autograd.Function):
    """Its gradient is a tensor that wraps others."""

    @staticmethod
    def forward(ctx, x, what):
        ctx.what = what
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return UNREADABLE[ctx.what](g), None


@pytest.mark.parametrize(("what", "where"), [("a wrapper", "outside"), ("TwoTensor", "outside"), ("TwoTensor", "in f")])
def test_gradients_that_kernels_cannot_read_are_refused(what, where):
    x = point(D)
    with revdeq.kernels.backend("reference"):
        z = solve(lambda z: Wraps.apply(0.5 * z, what) + x if where == "in f" else 0.5 * z + x, zeros()).z
        with pytest.raises((TypeError, RuntimeError), match="(?s)gradient.*(wraps|memory)"):
            torch.autograd.grad(z if where == "in f" else Wraps.apply(z, what), x, torch.ones(3, D))


def changes_what_it_saved(z, x):
    h = torch.tanh(z + x)
    out = h.exp() * h
    h.add_(1)
    return 0.1 * out


def differentiates_through_all_evaluations(z, x):
    return 0.5 * z + 0.1 * torch.autograd.grad((z * x).cos().sum(), x)[0]


ITS_INPUT, IN_PLACE = "modifies its input in place.*z = z", "modified by an inplace operation"
REFUSED = {  # in the first evaluation, or in the third
    "another structure": (lambda z, x: (z, z), r"tuple.*f\(...\)\[0\]", 1),
    "nothing": (lambda z, x: None, "NoneType", 3),
    "another shape": (lambda z, x: z[:1], r"shape \(1, 6\)", 1),
    "a shape that broadcasts": (lambda z, x: z[:, :1], r"shape \(3, 1\)", 3),
    "integers": (lambda z, x: z.long(), "int64", 3),
    "another device": (lambda z, x: z.to("meta"), "meta", 1),
    "NaN": (lambda z, x: z / 0 + x, "not finite", 1),
    "its changed input": (lambda z, x: z.mul_(0.5).add_(x), ITS_INPUT, 1),
    "a changed input": (lambda z, x: z.mul_(0.5) + x, ITS_INPUT, 3),
    "a changed view of its input": (lambda z, x: (z[0].zero_(), 0.5 * z + x)[1], ITS_INPUT, 1),
    "a changed saved tensor": (changes_what_it_saved, IN_PLACE, 3),
    "torch.func": (lambda z, x: torch.func.grad(lambda z: (z.cos() * x).sum())(z), "torch.func", 1),
    "a derivative of all": (differentiates_through_all_evaluations, "differentiates through earlier evaluations", 3),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_f_is_refused_that_returns(what):
    (f, text, first), calls, x = REFUSED[what], [], point()

    def step(z):
        calls.append(1)
        return 0.5 * z + x if len(calls) < first else f(z, x)

    with pytest.raises((TypeError, ValueError, RuntimeError, FloatingPointError), match=text):
        solve(step, x if "derivative" in what else zeros())


@pytest.mark.parametrize("settings", [{}, {"tol": 1e-3}, EXACT], ids=str)
def test_a_z0_that_is_not_finite_is_named(settings):
    with pytest.raises(FloatingPointError, match="z0 is not finite"):
        solver(**settings)(lambda z: 0.5 * z, torch.full((3,), torch.nan))


class Normed(nn.Module):
    """With a norm that it need not call."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = linear(), nn.BatchNorm1d(D)

    def forward(self, z):
        return torch.tanh(self.norm(self.linear(z)))

    def without(self, z):
        return torch.tanh(self.linear(z))


WRAPPINGS = {
    "module": lambda block: block,
    "closure": lambda block: lambda z: block(z),
    "partial": lambda block: functools.partial(lambda b, z: b(z), block),
    "method": lambda block: block.forward,
    "spectral norm": lambda block: parametrizations.spectral_norm(linear()),
}


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_batch_norm_in_training_mode_is_refused(wrapping):
    block, z0 = Normed(), point()
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=r"f changes a buffer.*eval\(\)"):
            solve(WRAPPINGS[wrapping](block), z0)
    same(lambda run: gradients(run(block.without, z0), z0))
    block.eval()
    same(lambda run: gradients(run(block, z0), z0, block))


def loss_of(w):
    return solve(lambda z: torch.tanh(w * z + w), torch.zeros(3)).z.sum()


def forward_mode(w):
    with forward_ad.dual_level():
        return loss_of(forward_ad.make_dual(w, w))


TRANSFORMED = {  # with gradients, or without, where a tangent would be lost silently
    "grad": (torch.func.grad(loss_of), "torch.func|functorch", True),
    "vmap": (vmap(loss_of), "torch.func|functorch", False),
    "vmap of z0": (vmap(lambda z: solve(torch.cos, z).z), "torch.func|functorch", True),
    "vmap of x": (vmap(lambda x: solve(lambda z, x: z + x, torch.zeros(()), x).z), "torch.func|functorch", False),
    "forward mode": (forward_mode, "forward-mode", True),
    "forward mode without gradients": (forward_mode, "forward-mode", False),
}


@pytest.mark.parametrize("what", TRANSFORMED)
def test_transforms_are_refused(what):
    run, text, grad = TRANSFORMED[what]
    with torch.set_grad_enabled(grad), pytest.raises((TypeError, RuntimeError), match=text):
        run(torch.rand(3))


# 3. What is noticed in the backward pass


class Remembers(nn.Module):
    """A cache that the first evaluation fills."""

    def __init__(self):
        super().__init__()
        self.layer, self.cache = network(), []

    def forward(self, z):
        self.cache = self.cache or [self.layer(z)]
        return 0.5 * z + 0.3 * self.cache[0]


def cached_around(f, z0):
    with parametrize.cached():
        return solve(parametrizations.weight_norm(f[0]), z0)


def own_generator(f, z0):
    own = torch.Generator().manual_seed(0)
    return solve(lambda z: f(z) * torch.rand(3, D, generator=own), z0)


def filling_a_buffer(f, z0):
    scratch = torch.zeros(3, D)
    return solver(**KEEP)(lambda z: f(z) * scratch.copy_(z.detach()).sin_(), z0)


def in_place(tensor):
    with torch.no_grad():
        tensor.mul_(1.5)


CHANGED = IN_PLACE + ".*was changed between"
ANOTHER = "f does not return the same|failed to reconstruct z0"
BETWEEN = {  # what is solved with f and z0, what changes afterwards, and the error
    "a weight": (solve, lambda f, z0, s: in_place(f[0].weight), CHANGED),
    "a weight, kept": (solver(keep=8), lambda f, z0, s: in_place(f[2].weight), IN_PLACE),
    "a weight, implicit": (solver(**IMPLICIT), lambda f, z0, s: in_place(f[2].weight), IN_PLACE),
    "z0": (solve, lambda f, z0, s: in_place(z0), CHANGED),
    "a state that f has read": (solver(keep=2), lambda f, z0, s: in_place(s.y.detach()), IN_PLACE),
    "the data of a weight, exact": (solver(**EXACT), lambda f, z0, s: f[0].weight.data.mul_(1.1), ANOTHER),
    "the training mode": (solve, lambda f, z0, s: f.eval(), ANOTHER),
    "a scratch buffer, kept": (filling_a_buffer, None, IN_PLACE),
    "a cache": (lambda f, z0: solve(Remembers(), z0), None, ANOTHER),
    "Python's generator": (lambda f, z0: solve(lambda z: f(z) * random.random(), z0), None, ANOTHER),
    "a generator of its own": (own_generator, None, ANOTHER),
    "a cached parametrization": (cached_around, None, "f does not return the same.*cache"),
}


@pytest.mark.parametrize("what", BETWEEN)
def test_what_changes_between_the_passes_is_noticed(what):
    """z0 needs no gradient: a linear layer then saves its weight in the second evaluation first."""
    run, change, text = BETWEEN[what]
    f, z0 = nn.Sequential(*network(), nn.Dropout(0.5 if what == "the training mode" else 0)), torch.ones(3, D)
    solution = run(f, z0)
    if change:
        change(f, z0, solution)
    with pytest.raises((revdeq.ReconstructionError, RuntimeError), match=f"(?s){text}"):
        solution.z.sum().backward()


ASKED = {
    "a second derivative": (lambda s, w: torch.autograd.grad(s.z.sum(), w, create_graph=True), "second derivative"),
    "batched": (lambda s, w: torch.autograd.grad(s.z, w, torch.ones(2, 3, D), is_grads_batched=True), "(?i)batch"),
    "z by y": (lambda s, w: torch.autograd.grad(s.z.sum(), s.y), "."),
    "a second time": (lambda s, w: [s.z.sum().backward() for _ in range(2)], "a second time.*retain_graph"),
}


@pytest.mark.parametrize(("what", "settings"), [*in_turn(ASKED, [EXACT, GAMMA]), *in_turn(ASKED, [IMPLICIT])])
def test_what_has_no_gradient_is_refused(what, settings):
    ask, text = ASKED[what]
    w = point(D)
    solution = solver(**settings)(lambda z: torch.tanh(0.3 * z * w + w), zeros())
    with pytest.raises(RuntimeError, match=text):
        ask(solution, w)


def test_a_backward_pass_in_inference_mode_is_refused():
    loss = solve(network(), zeros()).z.sum()
    with torch.inference_mode(), pytest.raises(RuntimeError, match="inference"):
        loss.backward()


def test_a_backward_pass_inside_another_one_of_the_same_solve_is_refused():
    """It would replace the adjoints of the first one."""
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
    return sum(issubclass(type(x), Tensor) for x in gc.get_objects())


LEFT = [EXACT, KEEP, IMPLICIT, {"per_example": True, "tol": 1e-3}]


@pytest.mark.parametrize("settings", LEFT, ids=str)
def test_nothing_is_left_to_the_garbage_collector(settings):
    """A reference cycle would keep the tensors of an evaluation alive."""
    f, x = network(), torch.randn(3, D)

    def all_ways():
        z = revdeq.solve(lambda z: f(z) + x, zeros(), **settings).z
        torch.autograd.grad(z.sum(), f[0].weight, retain_graph=True)
        torch.autograd.grad(z.sum(), f[0].weight)
        revdeq.solve(lambda z: f(z) + x, zeros(), **settings)
        checkpoint(lambda x: revdeq.solve(Added(f), zeros(), x, **settings).z, x, use_reentrant=False).sum().backward()
        with contextlib.suppress(OverflowError):
            revdeq.solve(lambda z: 300 * f(z) + 1000, zeros(), state="exact")
        with contextlib.suppress(ZeroDivisionError):
            revdeq.solve(lambda z: f(z) / (1 if z.sum() == 0 else 0 // 0), zeros(), **settings)
        f.zero_grad()

    all_ways()
    with without_collector():
        before = alive()
        all_ways()
        assert alive() == before


@pytest.mark.parametrize("settings", [{}, IMPLICIT], ids=str)
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


@pytest.mark.parametrize("evaluation", [1, 5, 12])
def test_an_interruption_leaves_everything_as_it_was(evaluation):
    """Ctrl-C in the first of 8 evaluations, later, and in the backward pass."""
    f, x, calls, solution, start = network(), point(), [], None, torch.get_rng_state()

    def interrupted(z):
        calls.append(1)
        out = F.dropout(f(z) + x, 0.1)
        if len(calls) == evaluation:
            raise KeyboardInterrupt
        return out

    F.dropout(x, 0.1)
    after_one = torch.get_rng_state()
    torch.set_rng_state(start)
    with pytest.raises(KeyboardInterrupt):
        with cast():
            solution = solve(interrupted, zeros())
        solution.z.sum().backward()
    assert (solution is None) == (evaluation <= 8) and torch.equal(torch.get_rng_state(), after_one)
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
    seen = []
    with saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        x.exp()
    assert len(seen) == 1  # by hooks of others, and by none of ours
    same(lambda run: gradients(run(Added(f), zeros(), x), x, f))
