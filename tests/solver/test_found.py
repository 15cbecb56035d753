"""Problems that were found by trying real programs."""

import copy
import gc
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import revdeq
from revdeq._solver.tape import Tape


class WithBuffer(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.register_buffer("buffer", buffer)

    def forward(self, z, x):
        return torch.tanh(0.3 * self.linear(z) + x)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(5).to_sparse(),
        lambda: torch.eye(5).to_sparse_csr(),
        lambda: torch.eye(5).to_sparse_csc(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.eye(5).to_mkldnn(),
    ],
    ids=["coo", "csr", "csc", "nested", "jagged", "mkldnn"],
)
def test_buffers_of_any_layout_in_training_mode(make):
    f = WithBuffer(make()).train()
    revdeq.solve(f, torch.zeros(5, 5), torch.randn(5, 5), check="raise").z.sum().backward()
    assert f.linear.weight.grad.norm() > 0


@pytest.mark.parametrize("name", ["__getattr__", "__dict__"])
def test_captured_objects_that_raise_when_they_are_inspected(name):
    def refuse(*_):
        raise ValueError("no such thing")

    kind = type("Refusing", (), {name: refuse if name == "__getattr__" else property(refuse)})
    refusing, linear = kind(), nn.Linear(4, 4)

    def f(z):
        assert refusing is not None
        return torch.tanh(0.3 * linear(z))

    revdeq.solve(f, torch.zeros(3, 4), check="raise").z.sum().backward()


class Counting(nn.Module):
    """Updates a running mean, in one of several ways."""

    def __init__(self, change, size=4):
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change
        self.plain, self.frozen = torch.zeros(size), nn.Parameter(torch.zeros(size), requires_grad=False)
        self.register_buffer("buffer", torch.zeros(size))

    def forward(self, z):
        with torch.no_grad():
            self.change(self, z.mean())
        return torch.tanh(0.3 * self.linear(z))


def replace(name):
    return lambda module, mean: setattr(module, name, 0.9 * getattr(module, name) + 0.1 * mean)


def change_data(name):
    return lambda module, mean: setattr(getattr(module, name), "data", getattr(module, name) + mean)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("buffer", lambda module, mean: module.buffer.lerp_(mean, 0.1)),
        ("buffer", change_data("buffer")),
        ("frozen", lambda module, mean: module.frozen.lerp_(mean, 0.1)),
        ("frozen", change_data("frozen")),
        ("plain", lambda module, mean: module.plain.lerp_(mean, 0.1)),
    ],
    ids=["buffer", "data of a buffer", "frozen parameter", "data of a frozen parameter", "attribute, in place"],
)
def test_running_statistics_inside_f_are_refused(name, change):
    f = Counting(change)
    for called in (f, lambda z: f(z)):
        with pytest.raises(RuntimeError, match=f"f changes {name}, .*in the backward pass too"):
            revdeq.solve(called, torch.ones(3, 4))
    assert f.buffer.eq(0).all()
    with torch.no_grad():
        revdeq.solve(f, torch.ones(3, 4))


def test_the_error_for_a_large_buffer_says_that_it_changed():
    f = Counting(lambda module, mean: module.buffer.add_(mean), size=1 << 17)
    with pytest.raises(RuntimeError, match="f changes buffer.*not restored: buffer"):
        revdeq.solve(f, torch.ones(3, 4))


@pytest.mark.parametrize("name", ["plain", "buffer"])
def test_what_f_assigns_elsewhere_changes_only_in_the_forward_pass(name):
    """In an attribute, in a closure or in a global variable: a feature or statistics, for example."""
    global count
    module, count, enclosed = Counting(replace(name)), torch.zeros(()), torch.zeros(())

    def f(z):
        global count
        nonlocal enclosed
        count, enclosed = count + 1, enclosed + 1
        return module(z)

    z = revdeq.solve(f, torch.ones(3, 4), max_steps=3, check="raise").z
    before = count, enclosed, getattr(module, name)
    assert count == enclosed == 6 and before[2].ne(0).all()
    z.sum().backward()
    assert all(x is y for x, y in zip((count, enclosed, getattr(module, name)), before, strict=True))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:Please use quant_min")
def test_observers_inside_f_are_refused_with_a_remedy():
    quantization = torch.ao.quantization
    f = nn.Sequential(nn.Linear(4, 4), quantization.FakeQuantize(), nn.Tanh())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="disable_observer"):
            revdeq.solve(f, torch.ones(3, 4))
        f.eval()
    f.apply(quantization.disable_observer)
    revdeq.solve(f, torch.ones(3, 4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:The PyTorch API of MaskedTensors")
def test_nested_and_masked_tensors_as_states_are_refused():
    parts = [torch.ones(2), torch.ones(3)]
    for layout in (torch.strided, torch.jagged):
        with pytest.raises(TypeError, match="z0 is a NestedTensor, which wraps other tensors"):
            revdeq.solve(lambda z: 0.5 * z, torch.nested.nested_tensor(parts, layout=layout))
    masked = torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
    with pytest.raises(TypeError, match="z0 is a MaskedTensor"):
        revdeq.solve(lambda z: 0.5 * z, masked)


@pytest.mark.parametrize("written", [lambda z: z.mul_(0.3).tanh_(), lambda z: (z.mul_(0.1), torch.tanh(z))[1]])
def test_with_an_implicit_gradient_f_may_change_its_input_in_place(written):
    b, grads = nn.Parameter(torch.ones(4)), []
    for f in (lambda z: written(z.clone()) + b, lambda z: written(z) + b):
        z = revdeq.solve(f, torch.ones(3, 4), gradient="implicit", max_steps=30, check="raise").z
        grads += torch.autograd.grad(z.sum(), b)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_with_an_implicit_gradient_a_compiled_f_may_overwrite_what_it_saved():
    """As Inductor's functions do, including those compiled by an exact solve or loaded from its disk cache."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    overwritten = []

    def compiled_forward(graph, inputs):
        return make_boxed_func(graph)

    def compiled_backward(graph, inputs):
        donated = torch._guards.TracingContext.get().fw_metadata.bw_donated_idxs

        def run(*saved_and_grads):
            results = graph(*saved_and_grads)
            for i in donated:
                overwritten.append(saved_and_grads[i].data.fill_(torch.nan))
            return results

        return make_boxed_func(run)

    linear = nn.Linear(4, 4)

    def f(z, x):
        return torch.tanh(0.3 * linear(torch.tanh(z)).square() + x)

    def grads(f, **options):
        solution = revdeq.solve(f, torch.zeros(3, 4), torch.ones(3, 4), max_steps=20, check="raise", **options)
        return torch.autograd.grad(solution.z.sum(), [linear.weight, linear.bias])

    wanted = grads(f, gradient="implicit")
    compiled = torch.compile(f, backend=aot_autograd(fw_compiler=compiled_forward, bw_compiler=compiled_backward))
    for gradient in ("exact", "implicit", "implicit"):
        torch.testing.assert_close(grads(compiled, gradient=gradient), wanted)
    assert overwritten


def test_with_an_implicit_gradient_f_may_be_a_gradient_itself():
    """f is the gradient of an energy, so that every evaluation needs grad mode."""
    linear, seen = nn.Linear(4, 4), set()

    def f(z):
        seen.add(torch.is_grad_enabled())
        energy = torch.tanh(linear(z)).square().sum()
        return 0.5 - 0.2 * torch.autograd.grad(energy, z, create_graph=True)[0]

    revdeq.solve(f, torch.zeros(3, 4), gradient="implicit", max_steps=30, check="raise").z.sum().backward()
    assert seen == {True}
    assert linear.weight.grad.norm() > 0


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_noise_from_other_generators_and_noise_that_starts_late_are_noticed(gradient):
    import numpy as np

    linear, calls = nn.Linear(4, 4), []

    def late(z):
        calls.append(1)
        return torch.tanh(0.3 * linear(z)) + (0.1 * torch.randn(3, 4) if len(calls) > 1 else 0)

    def foreign(z):
        return torch.tanh(0.3 * linear(z)) + 0.1 * torch.from_numpy(np.random.randn(3, 4)).float()

    for f in (late, foreign):
        z = revdeq.solve(f, torch.zeros(3, 4), gradient=gradient, check="raise").z
        with pytest.raises(revdeq.ReconstructionError):
            z.sum().backward()


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_a_scaled_loss_that_overflows_is_left_to_the_grad_scaler(gradient):
    linear = nn.Linear(4, 4)
    z = revdeq.solve(lambda z: torch.tanh(0.3 * linear(z)), torch.zeros(3, 4), gradient=gradient, check="raise").z
    (z.sum() * torch.inf).backward()
    assert not linear.weight.grad.isfinite().all()


def test_exploding_gradients_warn():
    torch.manual_seed(0)
    w, x = nn.Parameter(torch.randn(64, 64) / 8), torch.randn(8, 64)
    z = revdeq.solve(
        lambda z: F.rms_norm(z + torch.sin(30 * z @ w) + x, (64,)), torch.zeros(8, 64), beta=0.8, max_steps=50,
        check="raise",
    ).z  # fmt: skip
    with pytest.raises(revdeq.ConvergenceError, match="not finite .* gamma"):
        z.sum().backward()


def test_converging_to_two_points_is_noticed():
    with pytest.raises(revdeq.ConvergenceError, match=r"two different points.*gamma"):
        revdeq.solve(lambda z: -torch.tanh(2 * z), torch.full((3,), 0.1), tol=1e-6, max_steps=500, check="raise")


@pytest.mark.parametrize("beta", [0.995, 0.99, 0.98, 0.97, 1.01])
@pytest.mark.parametrize("max_steps", [2, 8])
def test_near_1_beta_is_the_same_with_and_without_a_gradient(beta, max_steps):
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)

    def run():
        return revdeq.solve(lambda z: torch.tanh(linear(z) + x), torch.zeros(4, 8), beta=beta, max_steps=max_steps)

    training = run()
    with torch.no_grad():
        assert run().beta == pytest.approx(training.beta, rel=2**-24)  # a fraction, or the fraction rounded to float32
    training.z.sum().backward()


def test_a_module_that_keeps_a_solution_is_copied():
    module = nn.Linear(4, 4)
    module.solution = revdeq.solve(lambda z: torch.tanh(0.3 * module(z)), torch.zeros(3, 4))
    z = copy.deepcopy(module).solution.z
    assert torch.equal(z, module.solution.z)
    assert not z.requires_grad
    torch.optim.swa_utils.AveragedModel(module)


def test_attributes_of_arguments_are_kept():
    seen = []
    for needs in (False, True):
        x = torch.randn(3, 4, requires_grad=needs)
        x.mask = torch.ones(4)
        revdeq.solve(lambda z, x: seen.append(hasattr(x, "mask")) or 0.5 * z + x, torch.zeros(3, 4), x)
    assert all(seen)


def test_averaged_models_keep_the_tuned_coefficients():
    """Averaged by torch, or by hand from a state dict."""
    deq = revdeq.RevDEQ(nn.Linear(4, 4))
    average, by_hand = torch.optim.swa_utils.AveragedModel(deq), copy.deepcopy(deq)
    for pair in ((0.75, 1.25), (0.5, 0.75)):
        deq.use(*pair)
        average.update_parameters(deq)
        with torch.no_grad():
            for mine, its in zip(by_hand.state_dict().values(), deq.state_dict().values(), strict=True):
                mine.copy_(its)
        for other in (average.module, by_hand):
            assert (other.options["beta"], other.options["gamma"]) == pair


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_parameters_thawed_or_frozen_before_the_backward_pass(gradient):
    """The gradient is that of the forward pass. torch discards it if the parameter is frozen by then."""
    f, grads = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 4)), []
    with torch.no_grad():
        f[0].weight.mul_(0.3)
    for change in (False, True):
        f.zero_grad()
        f.requires_grad_()
        f[0].requires_grad_(False)
        z = revdeq.solve(f, torch.ones(3, 4), gradient=gradient, max_steps=40, check="raise").z
        if change:
            f[0].requires_grad_(), f[3].requires_grad_(False)
        z.sum().backward()
        assert f[0].weight.requires_grad is change and f[0].weight.grad is None
        grads.append(f[2].weight.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double])
def test_converting_a_module_before_the_backward_pass_is_an_error(gradient, convert):
    f = nn.Linear(4, 4)
    with torch.no_grad():
        f.weight.mul_(0.3)
    z = revdeq.solve(f, torch.ones(3, 4), gradient=gradient, max_steps=40).z
    convert(f)
    with pytest.raises(RuntimeError, match=r"was changed between .*\.half\(\).*after the backward pass"):
        z.sum().backward()


def test_changing_an_argument_that_requires_a_gradient_is_refused():
    x = torch.randn(3, 4, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"args\[0\] in place.*clone"):
        revdeq.solve(lambda z, x: 0.5 * z + x.mul_(0.5), torch.zeros(3, 4), 2 * x)


def test_f_may_use_its_own_threads():
    grads = []
    with ThreadPoolExecutor(2) as pool:
        for map_ in (map, pool.map):
            linear = nn.Linear(4, 4, dtype=torch.float64)
            nn.init.eye_(linear.weight), nn.init.ones_(linear.bias)
            f = lambda z: torch.cat(list(map_(lambda x: torch.tanh(0.3 * linear(x)), z.chunk(2))))  # noqa: B023, E731
            z = revdeq.solve(f, torch.ones(4, 4, dtype=torch.float64), max_steps=4, check="raise").z
            grads.append(torch.autograd.grad(z.sum(), linear.weight)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("tol", [None, 1e-6])
def test_states_whose_squares_overflow_are_refused(tol):
    for size in (1e155, 1e300):
        with pytest.raises(FloatingPointError, match="so large after step 1 .*1e154.*scale"):
            revdeq.solve(lambda z: 0.5 * z + size, torch.zeros(3, dtype=torch.float64), tol=tol)  # noqa: B023


def test_tracers_that_cannot_trace_a_solve_get_an_error_with_a_remedy():
    deq = revdeq.RevDEQ(nn.Linear(4, 4))
    for model in (deq, nn.Sequential(deq)):
        with pytest.raises(TypeError, match=r"torch.fx.symbolic_trace.*torch.export"):
            torch.fx.symbolic_trace(model)


IMPORTS = """
    import sys, torch, revdeq
    from torch import nn
    before = set(sys.modules)
    f = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    revdeq.solve(f, torch.ones(3, 4), check=None).z.sum().backward()
    print({name.split(".")[0] for name in set(sys.modules) - before} - {"torch"}, "torch._dynamo" in sys.modules)
"""


def test_a_solve_imports_no_packages_and_no_compiler():
    """It may run in a signal handler, while something is being imported."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(IMPORTS)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set() False"


def test_a_growing_key_value_cache_is_refused():
    class Cache:
        def __init__(self):
            self.keys = []

        def get_seq_length(self):
            return len(self.keys)

    def f(z, x, cache, evaluation=None):
        cache.keys.append(z.detach())
        return 0.5 * z + x

    for call in ({"max_steps": 2}, {"max_steps": 2, "tol": 1e-3}):
        with torch.no_grad(), pytest.raises(RuntimeError, match="f appends to a cache.*indexed=True"):
            revdeq.solve(f, torch.zeros(3), torch.ones(3), Cache(), **call)
    cache = Cache()
    with torch.no_grad():
        revdeq.solve(f, torch.zeros(3), torch.ones(3), cache, max_steps=2, indexed=True)
    assert cache.get_seq_length() == 4


def test_spectral_norm_in_training_mode_has_its_own_remedy():
    f = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    x = torch.randn(2, 3)
    with pytest.raises(RuntimeError, match=r"parametrizations.*parametrize\.cached\(\)"):
        revdeq.solve(lambda z, x: torch.tanh(f(z)) + x, torch.zeros(2, 3), x)
    with nn.utils.parametrize.cached():
        revdeq.solve(lambda z, x: torch.tanh(f(z)) + x, torch.zeros(2, 3), x).z.sum().backward()


def block(width=4):
    torch.manual_seed(0)
    w = (0.3 * torch.eye(width)).requires_grad_()
    return w, lambda z, x: torch.tanh(z @ w + x)


def test_a_backward_pass_inside_another_one_through_the_same_solve_is_refused():
    """It would replace the adjoints of the first one."""
    w, f = block()
    calls, later = [], []

    def hook(g):
        calls.append(1)
        if len(calls) == 3:
            torch.autograd.grad(*later)

    def hooked(z, x):
        out = f(z, x)
        if out.requires_grad:
            out.register_hook(hook)
        return out

    z = revdeq.solve(hooked, torch.zeros(2, 4), torch.randn(2, 4), max_steps=4).z
    later += [z.square().sum(), w, None, True]
    with pytest.raises(RuntimeError, match="two backward passes .* one after the other"):
        z.sum().backward(retain_graph=True)
    grads = [torch.autograd.grad(z.sum(), w, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*grads)


def test_parameters_in_a_reentrant_checkpoint_get_a_gradient():
    """Autograd's graph does not show them."""
    linear, x = nn.Linear(4, 4), torch.randn(2, 4)
    z = revdeq.solve(
        lambda z, x: torch.tanh(checkpoint(linear, z, use_reentrant=True) + x), torch.zeros(2, 4), x, max_steps=3
    ).z
    z.sum().backward()
    expected = revdeq.solve(lambda z, x: torch.tanh(linear(z) + x), torch.zeros(2, 4), x, max_steps=3).z
    torch.testing.assert_close(linear.weight.grad, torch.autograd.grad(expected.sum(), linear.weight)[0])


def alive():
    gc.collect()
    return sum(type(x) is Tape for x in gc.get_objects())


def test_a_solve_that_fails_is_freed():
    w, f = block()
    before = alive()

    def fails(z, x):
        if z.abs().max() > 0.5:
            raise KeyError("f")
        return f(z, x)

    for _ in range(3):
        with pytest.raises(KeyError):
            revdeq.solve(fails, torch.zeros(2, 4), torch.ones(2, 4))
        with pytest.raises(FloatingPointError):
            revdeq.solve(lambda z, x: (w.sum() + 1e30) * z * z + x, torch.zeros(2, 4), torch.ones(2, 4), tol=1e-3)
        with pytest.raises(OverflowError):
            revdeq.solve(lambda z, x: 9 * w.sum() * z + x, torch.zeros(2, 4), torch.ones(2, 4), state="exact")
    assert alive() == before


@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_a_checkpoint_around_a_solve_frees_it(gradient):
    """It stops the repeated forward pass early, by an exception."""
    w, f = block()
    x, before = torch.randn(2, 4), alive()
    for _ in range(3):
        w.grad = None
        z = checkpoint(
            lambda x: revdeq.solve(f, torch.zeros(2, 4), x, gradient=gradient, max_steps=20).z, x, use_reentrant=False
        )
        z.sum().backward()
    del z
    assert alive() == before
    expected = revdeq.solve(f, torch.zeros(2, 4), x, gradient=gradient, max_steps=20).z
    torch.testing.assert_close(w.grad, torch.autograd.grad(expected.sum(), w)[0])


def test_only_auxiliary_outputs_have_a_gradient_that_is_not_zero():
    w, f = block()
    x = torch.randn(2, 4)
    s = revdeq.solve(lambda z, x: (f(z, x), f(z, x).square().mean()), torch.zeros(2, 4), x, aux=True, check="raise")
    ((s.z * 0).sum() + s.aux).backward()
    assert w.grad.abs().sum() > 0


def test_examples_of_one_number_each():
    s = revdeq.solve(
        lambda z, x: 0.5 * torch.tanh(z) + x, torch.zeros(4), torch.randn(4), tol=0.01, max_steps=50, per_example=True
    )
    assert s.steps.shape == (4,) and (s.change <= 0.01).all()


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_continuing_a_solution_in_half_precision_raises_no_alarm(dtype, state):
    """Its states have more bits than z0 shows."""
    torch.manual_seed(0)
    w, x = (0.1 * torch.randn(16, 16)).to(dtype).requires_grad_(), torch.randn(8, 16).to(dtype)
    s = revdeq.solve(lambda z, x: torch.tanh(z @ w + x), 0 * x, x, max_steps=2, state=state)
    s = revdeq.solve(lambda z, x: torch.tanh(z @ w + x), s, x, max_steps=2, state=state, check="raise")
    s.z.float().sum().backward()
    assert w.grad.isfinite().all()


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_a_loss_on_the_first_y_alone_raises_no_alarm(state):
    torch.manual_seed(2)
    w, z0, x = (0.2 * torch.randn(6, 6)).requires_grad_(), torch.randn(4, 6), torch.randn(4, 6)
    options = {"beta": 0.3, "gamma": 0.4, "state": state, "check": "raise", "max_steps": 3}
    s = next(revdeq.steps(lambda z, x: torch.tanh(z @ w + x), z0, x, **options))
    s.y.sum().backward()
    y = (1 - s.beta) * z0 + s.beta * ((1 - s.gamma) * z0 + s.gamma * torch.tanh(z0 @ w + x))
    torch.testing.assert_close(w.grad, torch.autograd.grad(y.sum(), w)[0])


def test_an_error_of_an_f_that_stores_its_graph_is_raised():
    """With torch.func inside f, the solve has started again."""
    calls = []

    def f(z):
        calls.append(1)
        out = torch.func.grad(lambda z: torch.cos(z).sum())(z)
        if len(calls) > 1:
            raise KeyError("f")
        return out

    with pytest.raises(KeyError):
        revdeq.solve(f, torch.zeros(3, requires_grad=True))
    assert len(calls) == 2
