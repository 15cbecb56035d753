"""What real training code has inside f. Every gradient is compared with that of the unrolled iteration."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import revdeq
from revdeq.baselines import stored_graph
from revdeq.models import ConvBlock


def compare(f, z0, *args, inputs=(), tolerance=1e-6, **settings):
    """Compare solution and gradients with the stored graph. Returns the gradients."""
    parameters = list(f.parameters()) if isinstance(f, nn.Module) else []
    inputs = [*inputs, *(p for p in parameters if p.requires_grad)]
    expected_z = stored_graph(f, z0, *args, **settings)
    solution = revdeq.solve(f, z0, *args, **settings)
    assert torch.equal(solution.z, expected_z)
    if not inputs:
        return ()
    weight = torch.randn(expected_z.shape, generator=torch.Generator().manual_seed(3)).to(expected_z)
    ours = torch.autograd.grad(solution.z, inputs, weight, allow_unused=True)
    expected = torch.autograd.grad(expected_z, inputs, weight, allow_unused=True)
    for gradient, reference in zip(ours, expected, strict=True):
        assert (gradient is None) == (reference is None)
        if gradient is not None:
            assert (gradient - reference).norm() <= tolerance * reference.norm()
    return ours


class MLP(nn.Module):
    def __init__(self, d=6):
        super().__init__()
        self.inner, self.outer = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, z, x):
        return torch.tanh(self.outer(torch.tanh(self.inner(z) + 0)) + x)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# 1. captured tensors


def test_a_weight_used_in_two_places_and_a_tensor_given_twice():
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def f(z, a):
        return torch.tanh(z @ weight @ weight.t() * 0.1 + a + x)

    compare(f, torch.zeros(3, 4), x, inputs=[weight, x])


def test_a_custom_function_and_a_view_of_a_captured_tensor():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z, w):
            ctx.save_for_backward(z, w)
            return z * w

        @staticmethod
        def backward(ctx, g):
            z, w = ctx.saved_tensors
            return g * w, g * z

    weight, table = torch.rand(4, requires_grad=True), torch.randn(7, 4, requires_grad=True)
    compare(lambda z: torch.tanh(Scale.apply(z, weight) + table[2:5]), torch.zeros(3, 4), inputs=[weight, table])


def _by_index(z, new):
    out = torch.zeros_like(z)
    out[[0, 1]] = new
    return 0.5 * out


def _into_a_view(z, new):
    out = torch.zeros_like(z)
    out[0].add_(new[0])
    out[1].copy_(new[1])
    return 0.5 * out


@pytest.mark.parametrize("written", [_by_index, _into_a_view])
def test_f_may_write_its_result_in_place(written):
    layer, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    shift = x + 1  # a computed tensor that f captures

    def f(z):
        return written(z, torch.tanh(layer(z) + shift))

    compare(f, torch.zeros(2, 3), inputs=[*layer.parameters(), x], max_steps=4)


def test_a_frozen_parameter_stays_frozen():
    f = MLP()
    f.inner.weight.requires_grad_(False)
    x = torch.randn(3, 6)
    compare(f, torch.zeros(3, 6), x)
    revdeq.solve(f, torch.zeros(3, 6), x).z.sum().backward()
    assert f.inner.weight.grad is None
    assert f.outer.weight.grad is not None


@pytest.mark.parametrize("as_closure", [False, True])
def test_hooks_on_parameters_fire_once(as_closure):
    block, calls = MLP(), []
    x = torch.randn(3, 6, requires_grad=True)
    encoded = x * 2
    compare(block, torch.zeros(3, 6), x, inputs=[x])
    for name, parameter in block.named_parameters():
        parameter.register_hook(lambda g, name=name: calls.append(name) or 2 * g)
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"{name} accumulated"))
    encoded.register_hook(lambda g: calls.append("x") or g)
    f = (lambda z: block(z, encoded)) if as_closure else block
    solution = revdeq.solve(f, torch.zeros(3, 6), *(() if as_closure else (encoded,)))
    solution.z.sum().backward()
    names = [name for name, _ in block.named_parameters()]
    assert sorted(calls) == sorted([*names, *(f"{name} accumulated" for name in names), "x"])
    doubled = [p.grad for p in block.parameters()]
    for parameter in block.parameters():
        parameter._backward_hooks.clear()
    plain = torch.autograd.grad(revdeq.solve(block, torch.zeros(3, 6), x * 2).z.sum(), list(block.parameters()))
    assert all(torch.equal(d, 2 * p) for d, p in zip(doubled, plain, strict=True))


def test_a_captured_result_that_keeps_its_gradient():
    x = torch.randn(3, 6, requires_grad=True)
    encoded = x * 2
    encoded.retain_grad()
    block = MLP()
    revdeq.solve(lambda z: block(z, encoded), torch.zeros(3, 6)).z.sum().backward()
    torch.testing.assert_close(encoded.grad * 2, x.grad)


def test_a_parameter_that_is_first_used_later_gets_its_gradient():
    a, b = nn.Linear(6, 6), nn.Linear(6, 6)

    def switching(z):
        return torch.tanh((a if z.norm() < 1e-6 else b)(z) + 1)

    compare(switching, torch.zeros(3, 6), inputs=[*a.parameters(), *b.parameters()])

    def late(z):
        return torch.tanh(b(z)) if z.norm() > 1e-6 else torch.ones_like(z)

    compare(late, torch.zeros(3, 6), inputs=[*b.parameters()])


def test_a_result_that_is_first_used_later_gets_its_gradient():
    encoded = torch.randn(3, requires_grad=True) * 2
    compare(lambda z: encoded + 0.5 * z if z.norm() > 1e-6 else torch.ones_like(z), torch.zeros(3), inputs=[encoded])


def test_tensors_exchanged_between_the_passes_are_an_error():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x):
            return revdeq.solve(lambda z: torch.tanh(self.linear(z) + x), torch.zeros_like(x)).z

    model, x = Model(), torch.randn(3, 6)
    others = {name: (0.5 * p).detach().requires_grad_() for name, p in model.named_parameters()}
    z = torch.func.functional_call(model, others, (x,))
    with pytest.raises(RuntimeError, match="f used a different tensor of shape .6, 6. that requires a gradient"):
        z.sum().backward()
    total, linear = 0, nn.Linear(6, 6)
    for x in torch.randn(2, 3, 6, requires_grad=True).unbind():
        total = total + revdeq.solve(lambda z: torch.tanh(linear(z) + x), torch.zeros(3, 6), check="raise").z  # noqa: B023
    with pytest.raises(revdeq.ReconstructionError, match="f does not return the same"):
        total.sum().backward()
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))
    with nn.utils.parametrize.cached():
        z = revdeq.solve(lambda z: torch.tanh(normed(z)), normed(torch.ones(3, 6))).z
    with pytest.raises(RuntimeError, match="parametrization"):
        z.sum().backward()


def test_values_exchanged_between_the_passes_are_noticed():
    linear, x = nn.Linear(6, 6), torch.randn(3, 6)
    z = revdeq.solve(lambda z, x: torch.tanh(linear(z) + x), torch.zeros(3, 6), x, check="raise").z
    x.zero_()
    with pytest.raises(revdeq.ReconstructionError, match="f does not return the same"):
        z.sum().backward()


def test_a_parameter_may_be_frozen_between_the_passes():
    f, x = MLP(), torch.randn(3, 6, requires_grad=True)
    expected = torch.autograd.grad(revdeq.solve(f, torch.zeros(3, 6), x).z.sum(), x)
    z = revdeq.solve(f, torch.zeros(3, 6), x).z
    f.requires_grad_(False)
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], expected[0])


# 2. randomness


@pytest.mark.parametrize("max_steps", [1, 4])
def test_dropout_is_one_mask_per_solve(max_steps):
    f, x = MLP(), torch.randn(50, 6, requires_grad=True)

    def dropped(z, x):
        return f(F.dropout(z, 0.3), F.dropout(x, 0.3))

    state = torch.get_rng_state()

    def one_mask(z, x):
        torch.set_rng_state(state)
        return dropped(z, x)

    expected = stored_graph(one_mask, torch.zeros(50, 6), x, max_steps=max_steps)
    after_one = torch.get_rng_state()
    torch.set_rng_state(state)
    ours = revdeq.solve(dropped, torch.zeros(50, 6), x, max_steps=max_steps).z
    assert torch.equal(ours, expected)
    assert torch.equal(torch.get_rng_state(), after_one)
    torch.rand(3)
    before = torch.get_rng_state()
    gradients = torch.autograd.grad(ours.sum(), [x, *f.parameters()])
    assert torch.equal(torch.get_rng_state(), before)
    for g, e in zip(gradients, torch.autograd.grad(expected.sum(), [x, *f.parameters()]), strict=True):
        assert (g - e).norm() <= 1e-6 * e.norm()
    first, second = (revdeq.solve(dropped, torch.zeros(50, 6), x).z for _ in range(2))
    assert not torch.equal(first, second)


def test_a_function_that_draws_nothing_leaves_the_generator_alone(monkeypatch):
    calls = []
    original = torch.set_rng_state
    monkeypatch.setattr(torch, "set_rng_state", lambda s: calls.append(1) or original(s))
    revdeq.solve(MLP(), torch.zeros(3, 6), torch.randn(3, 6, requires_grad=True)).z.sum().backward()
    assert not calls


# 3. precision and context


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("where", ["around", "inside"])
def test_autocast_is_restored_in_the_backward_pass(dtype, where):
    block, x = MLP(32), torch.randn(8, 32, requires_grad=True)
    dtypes = set()

    def inside(z, x):
        with torch.autocast("cpu", dtype):
            return block(z, x)

    def around(z, x):
        dtypes.add(block.inner(z).dtype)
        return block(z, x)

    f = inside if where == "inside" else around
    inputs = [x, *block.parameters()]
    with torch.autocast("cpu", dtype, enabled=where == "around"):
        z = revdeq.solve(f, torch.zeros(8, 32), x).z
        expected = stored_graph(f, torch.zeros(8, 32), x)
    assert torch.equal(z, expected)
    assert z.dtype == torch.float32
    ours = torch.autograd.grad(z.sum(), inputs)
    theirs = torch.autograd.grad(expected.sum(), inputs)
    for g, e in zip(ours, theirs, strict=True):
        # the stored graph sums the gradients of its cast weights in the low precision
        assert (g - e).norm() <= 4 * torch.finfo(dtype).eps * e.norm()
    assert where == "inside" or dtypes == {dtype}


def test_weights_that_autocast_has_cast_before():
    deq, x = revdeq.RevDEQ(MLP()), torch.randn(3, 6)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            deq(x)
        deq.f(x, x)
        total = deq(x) + deq(x)
        total.sum().backward()  # also with autocast still on
        once = deq(x)
    twice = [p.grad.clone() for p in deq.parameters()]
    deq.zero_grad()
    once.sum().backward()
    for gradient, p in zip(twice, deq.parameters(), strict=True):
        torch.testing.assert_close(gradient, 2 * p.grad, rtol=1e-5, atol=1e-6)


def test_a_frozen_function_runs_in_one_grad_mode():
    """With grad mode on, a module must not switch to its fast path in the middle of a solve."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True).eval().requires_grad_(False)
    x = torch.randn(2, 5, 8)
    modes = set()

    def f(z):
        modes.add((torch.is_grad_enabled(), z.requires_grad))
        return 0.5 * layer(z + x)

    solution = revdeq.solve(f, torch.zeros_like(x))
    assert modes == {(True, True)}
    assert not solution.z.requires_grad


def test_a_gradient_scaler_scales():
    block, x = MLP(), torch.randn(3, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    plain = torch.autograd.grad(revdeq.solve(block, torch.zeros(3, 6), x).z.sum(), list(block.parameters()))
    scaler.scale(revdeq.solve(block, torch.zeros(3, 6), x).z.sum()).backward()
    scaler.unscale_(optimizer)
    for p, g in zip(block.parameters(), plain, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-6, atol=0)
    scaler.step(optimizer)


def recording(f):
    outputs = []

    def record(*args):
        out = f(*args)
        outputs.append(out.detach().clone())
        return out

    return record, outputs


def replay_is_identical(f, z0, *args, **settings):
    record, outputs = recording(f)
    solution = revdeq.solve(record, z0, *args, **settings)
    forward = list(outputs)
    outputs.clear()
    return solution, forward, outputs


@pytest.mark.parametrize("kind", ["attention", "encoder layer"])
def test_modules_with_a_fast_path_compute_the_same_in_both_passes(kind):
    if kind == "attention":
        module = nn.MultiheadAttention(16, 4, batch_first=True).eval()

        def f(z, x):
            return 0.5 * module(z + x, z + x, z + x, need_weights=False)[0]
    else:
        module = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()

        def f(z, x):
            return 0.5 * module(z + x)

    x = torch.randn(4, 10, 16)
    solution, forward, backward = replay_is_identical(f, torch.zeros_like(x), x, max_steps=4)
    solution.z.sum().backward()
    assert len(backward) == 8
    assert all(map(torch.equal, reversed(forward), backward))


def test_the_default_device_is_that_of_the_forward_pass():
    seen = []

    def f(z):
        seen.append(torch.empty(0).device.type)
        return 0.5 * z

    x = torch.zeros(3, requires_grad=True)
    with torch.device("meta"):
        z = revdeq.solve(f, x, max_steps=2).z
    backward = threading.Thread(target=lambda: torch.autograd.grad(z, x, torch.ones_like(x)))
    backward.start(), backward.join()
    assert seen == ["meta"] * 8
    assert torch.get_default_device().type == "cpu"


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_settings_are_those_of_the_forward_pass():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    seen = []

    def f(z, x):
        seen.append(
            (
                torch.backends.cuda.flash_sdp_enabled(),
                torch.get_default_dtype(),
                torch.are_deterministic_algorithms_enabled(),
                torch.backends.mkldnn.enabled,
                torch.get_float32_matmul_precision(),
            )
        )
        return 0.5 * F.scaled_dot_product_attention(z, z, z) + x + torch.ones(())

    x = torch.randn(2, 3, 5, 8, requires_grad=True)
    default = torch.get_default_dtype()
    try:
        with sdpa_kernel(SDPBackend.MATH), torch.backends.mkldnn.flags(enabled=False):
            torch.set_default_dtype(torch.float64)
            torch.use_deterministic_algorithms(True)
            torch.set_float32_matmul_precision("medium")
            solution = revdeq.solve(f, torch.zeros(2, 3, 5, 8, dtype=torch.float32), x)
            torch.set_default_dtype(default)
            torch.use_deterministic_algorithms(False)
            torch.set_float32_matmul_precision("highest")
        solution.z.sum().backward()
    finally:
        torch.set_default_dtype(default)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
    assert set(seen) == {(False, torch.float64, True, False, "medium")}
    assert len(seen) == 32
    assert torch.backends.cuda.flash_sdp_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("as_closure", [False, True])
def test_batch_norm_in_training_mode_is_refused(as_closure):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6)

        def forward(self, z):
            return torch.tanh(self.norm(self.linear(z)))

    block = Block()
    f = (lambda z: block(z)) if as_closure else block
    with pytest.raises(RuntimeError, match=r"GroupNorm.*eval\(\)"):
        revdeq.solve(f, torch.zeros(4, 6))
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"GroupNorm.*eval\(\)"):
        revdeq.solve(f, torch.zeros(4, 6))
    compare(block.eval(), torch.randn(4, 6))
    block.train().norm.track_running_stats = False
    block.norm.running_mean = block.norm.running_var = None
    compare(block, torch.randn(4, 6))


def test_a_module_that_changes_its_buffers_is_refused():
    f = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), nn.Tanh())
    with pytest.raises(RuntimeError, match=r"f changes 0\.parametrizations\.weight\.0\._u"):
        revdeq.solve(f, torch.zeros(4, 6))
    compare(f.eval(), torch.randn(4, 6))


# 4. states


def test_nested_states_of_different_shapes_and_dtypes():
    weight = torch.randn(4, 4, requires_grad=True)

    def f(z, x):
        h, rest = z["h"], z["rest"]
        return {
            "h": torch.tanh(h @ (0.2 * weight) + rest[1].float().mean() + x),
            "rest": [0.5 * rest[0] + h.double().sum(0), (0.5 * rest[1] + 1)],
        }

    z0 = {"h": torch.zeros(3, 4), "rest": [torch.zeros(4, dtype=torch.float64), torch.zeros((), dtype=torch.bfloat16)]}
    z0["h"].requires_grad_()
    x = torch.randn(3, 4, requires_grad=True)
    solution = revdeq.solve(f, z0, x, max_steps=5)
    assert [solution.z["h"].dtype, solution.z["rest"][0].dtype, solution.z["rest"][1].dtype] == [
        torch.float32,
        torch.float64,
        torch.bfloat16,
    ]

    def unrolled():
        wide = y = {"h": z0["h"].double(), "rest": [r.double() for r in z0["rest"]]}

        def narrow(s):
            return {"h": s["h"].float(), "rest": [s["rest"][0], s["rest"][1].bfloat16()]}

        def relax(s, o):
            mixed = [0.5 * a + 0.5 * b.double() for a, b in zip(s["rest"], o["rest"], strict=True)]
            return {"h": 0.5 * s["h"] + 0.5 * o["h"].double(), "rest": mixed}

        for _ in range(5):
            y = relax(y, f(narrow(wide), x))
            wide = relax(wide, f(narrow(y), x))
        return narrow(wide)

    expected = unrolled()
    assert torch.equal(solution.z["h"], expected["h"])
    assert torch.equal(solution.z["rest"][0], expected["rest"][0])
    assert torch.equal(solution.z["rest"][1], expected["rest"][1])
    inputs = [weight, x, z0["h"]]
    ours = torch.autograd.grad(solution.z["h"].sum() + solution.z["rest"][0].sum(), inputs)
    theirs = torch.autograd.grad(expected["h"].sum() + expected["rest"][0].sum(), inputs)
    for g, e in zip(ours, theirs, strict=True):
        assert (g - e).norm() <= 1e-6 * e.norm()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (1, 1, 1)])
def test_scalars_and_empty_tensors(shape):
    x = torch.randn(shape, requires_grad=True)
    compare(lambda z, x: torch.tanh(0.5 * z + x), torch.zeros(shape), x, inputs=[x])


def test_channels_last_is_kept():
    f, x = ConvBlock(16).to(memory_format=torch.channels_last), torch.randn(2, 16, 6, 6)
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    seen = []

    def watch(z, x):
        seen.append(z.is_contiguous(memory_format=torch.channels_last))
        return f(z, x)

    solution = revdeq.solve(watch, torch.zeros_like(x), x)
    assert solution.z.is_contiguous(memory_format=torch.channels_last)
    (gradient,) = torch.autograd.grad(solution.z.sum(), x)
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    assert all(seen)


def test_subclasses_of_tensor_work_or_say_why_not():
    class Named(torch.Tensor):
        pass

    z0 = torch.zeros(3).as_subclass(Named)
    x = nn.Parameter(torch.randn(3))
    solution = revdeq.solve(lambda z: torch.tanh(0.5 * z + x), z0)
    assert torch.equal(solution.z.as_subclass(torch.Tensor), stored_graph(lambda z: torch.tanh(0.5 * z + x), z0.data))
    compare(lambda z: torch.tanh(0.5 * z + x), nn.Parameter(torch.zeros(3)), inputs=[x])

    from torch.testing._internal.two_tensor import TwoTensor

    with pytest.raises(TypeError, match="z0 is a TwoTensor, which wraps other tensors"):
        revdeq.solve(torch.cos, TwoTensor(torch.zeros(2), torch.zeros(2)))


def test_a_dict_may_come_back_in_another_order():
    x = torch.randn(3, requires_grad=True)
    solution = revdeq.solve(lambda z: {"b": 0.5 * z["b"] + x, "a": z["b"]}, {"a": torch.zeros(3), "b": torch.zeros(3)})
    assert list(solution.z) == ["a", "b"]
    assert torch.equal(solution.z["b"], stored_graph(lambda z: 0.5 * z + x, torch.zeros(3)))


def test_a_z0_created_in_inference_mode():
    x = torch.randn(3, requires_grad=True)
    with torch.inference_mode():
        z0 = torch.ones(3)
    compare(lambda z: torch.tanh(z + x), z0, inputs=[x])


# 5. in-place changes and aliases


def test_f_may_change_its_input_in_place():
    weight = torch.rand(3, requires_grad=True)

    def in_place(z):
        z.mul_(0.5)
        return z.add_(weight)

    z0 = torch.randn(3, requires_grad=True)
    before = z0.detach().clone()
    solution = revdeq.solve(in_place, z0, beta=0.8, max_steps=4)
    expected = stored_graph(lambda z: 0.5 * z + weight, z0, beta=0.8, max_steps=4)
    assert torch.equal(solution.z, expected)
    assert torch.equal(z0, before)
    y = stored_graph_y(lambda z: 0.5 * z + weight, z0, beta=0.8, max_steps=4)
    assert torch.equal(solution.y, y)
    with torch.no_grad():
        assert torch.equal(revdeq.solve(in_place, z0, beta=0.8, max_steps=4).y, y)
    with torch.inference_mode():
        assert torch.equal(revdeq.solve(in_place, z0, beta=0.8, max_steps=4).y, y)
    ours = torch.autograd.grad(solution.z.square().sum(), [z0, weight])
    theirs = torch.autograd.grad(expected.square().sum(), [z0, weight])
    for g, e in zip(ours, theirs, strict=True):
        torch.testing.assert_close(g, e, rtol=1e-6, atol=1e-7)


def stored_graph_y(f, z0, beta, max_steps):
    beta = torch.tensor(beta, dtype=torch.float32).item()
    y = z = z0.double()
    for _ in range(max_steps):
        y = (1 - beta) * y + beta * f(z.to(z0.dtype)).double()
        z = (1 - beta) * z + beta * f(y.to(z0.dtype)).double()
    return y.to(z0.dtype)


def test_f_may_return_its_input_a_view_or_an_expanded_tensor():
    x = torch.randn(4, 4, requires_grad=True)
    z0 = torch.randn(4, 4, requires_grad=True)
    compare(lambda z: z, z0, inputs=[z0])
    compare(lambda z: z.t(), z0, inputs=[z0])
    compare(lambda z: x.t(), torch.zeros(4, 4), inputs=[x])
    compare(lambda z: x[1:2].expand(4, 4), torch.zeros(4, 4), inputs=[x])
    compare(lambda z: x, torch.zeros(4, 4), inputs=[x])
    compare(lambda z: (z + x)[:, :1].expand(4, 4), torch.zeros(4, 4), inputs=[x])
    before = x.detach().clone()
    revdeq.solve(lambda z: x, torch.zeros(4, 4)).z.sum().backward()
    assert torch.equal(x, before)


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("passed_on", [lambda z: z, lambda z: z.contiguous(), nn.Dropout().eval(), lambda z: z[:]])
def test_f_may_return_one_part_of_its_state_as_another(state, passed_on):
    weight, x = (0.4 * torch.randn(4, 4)).requires_grad_(), torch.randn(3, 4, requires_grad=True)

    def gradients(passed_on):
        def f(z, x):
            return passed_on(z[1]), torch.tanh(z[2] @ weight) + x, passed_on(z[0])

        z0 = (torch.zeros(3, 4), torch.zeros(3, 4), torch.ones(3, 4))
        solution = revdeq.solve(f, z0, x, beta=0.75, state=state, check="raise")
        return torch.autograd.grad(sum(part.sum() for part in solution.z), [weight, x])

    for ours, expected in zip(gradients(passed_on), gradients(torch.clone), strict=True):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("shape", [(), (3,)])
def test_f_may_return_a_negative_view(shape):
    x = torch.rand(shape, requires_grad=True)
    compare(lambda z: torch.complex(z, 0.5 * z + x).conj().imag, torch.ones(shape), inputs=[x])
    compare(lambda z: torch._neg_view(0.5 * z + x), torch._neg_view(torch.ones(shape)), inputs=[x])


def test_f_that_returns_a_stored_input():
    kept = []

    def f(z):
        kept.append(z)
        return 0.5 * kept[0] if len(kept) > 1 else 0.5 * z

    z = revdeq.solve(f, torch.ones(3)).z  # what f keeps may change, but nothing else breaks
    assert z.shape == (3,) and z.isfinite().all() and z.eq(z[0]).all()


# 6. compilation and synchronisation

compiled = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo inspects it


@compiled
@pytest.mark.parametrize("kind", ["function", "module", "in place", "closure"])
def test_a_compiled_f(kind):
    block, x = MLP(), torch.randn(3, 6, requires_grad=True)
    if kind == "module":
        f = torch.compile(block, backend="aot_eager")
    elif kind == "in place":
        f = copy.deepcopy(block)
        f.compile(backend="aot_eager")
        block = f
    elif kind == "function":
        f = torch.compile(lambda z, x: block(z, x), backend="aot_eager")
    else:
        compiled = torch.compile(block, backend="aot_eager")
        encoded = x + 1

        def f(z, _):
            return compiled(z, encoded)

    compare(f, torch.zeros(3, 6), x, inputs=[x, *block.parameters()])


@compiled
def test_a_compiled_model_around_the_solve_breaks_its_graph_once():
    from torch._dynamo.testing import CompileCounter

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.deq, self.head = nn.Linear(6, 6), revdeq.RevDEQ(MLP()), nn.Linear(6, 2)

        def forward(self, x):
            return self.head(self.deq(self.encoder(x)))

    torch._dynamo.reset()
    model, counter, x = Model(), CompileCounter(), torch.randn(3, 6)
    compiled = torch.compile(model, backend=counter)
    out = compiled(x)
    assert torch.equal(out, model(x))
    ours = torch.autograd.grad(out.sum(), list(model.parameters()))
    assert all(map(torch.equal, ours, torch.autograd.grad(model(x).sum(), list(model.parameters()))))
    graphs = "before the solve", "for the zeros it starts from", "after it"
    assert counter.frame_count == len(graphs)


@pytest.mark.cpu
@compiled
@pytest.mark.parametrize(
    "kind",
    ["as it is", "in a closure", *(pytest.param(kind, marks=pytest.mark.full) for kind in ("module", "in place"))],
)
def test_a_compiled_model_logs_once_that_f_is_not_compiled(kind, caplog, monkeypatch):
    monkeypatch.setattr("revdeq._solver.solve._said", False)
    torch._dynamo.reset()
    block, x = MLP(), torch.randn(3, 6)
    f = torch.compile(block, backend="eager") if kind in ("module", "in a closure") else block
    if kind == "in place":
        block.compile(backend="eager")
    used = (lambda z, x: f(z, x)) if kind == "in a closure" else f
    revdeq.solve(used, torch.zeros(3, 6), x)
    assert "f.compile()" not in caplog.text  # without a model that is compiled there is nothing to say
    model = torch.compile(lambda x: revdeq.solve(used, torch.zeros(3, 6), x).z, backend="eager")
    model(x), model(x)
    torch.compile(lambda x: [s.z for s in revdeq.steps(used, torch.zeros(3, 6), x)], backend="eager")(x)
    said = [record.message for record in caplog.records if record.name == "revdeq"]
    assert ["f.compile()" in message for message in said] == [True] * (kind == "as it is")


@compiled
def test_with_fullgraph_the_error_says_to_compile_f():
    def model(x):
        return revdeq.solve(lambda z, x: torch.tanh(z + x), torch.zeros(3, 6), x).z

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile f, f.compile\(\).*without fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(3, 6))


class NoWaiting(torch.utils._python_dispatch.TorchDispatchMode):
    """Raises for operations that would synchronize, or that cannot be captured in a graph."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select", "unique")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in self.WAITING, f"{name} waits for the device"
        assert name != "_to_copy" or (kwargs or {}).get("device") is None, (
            "_to_copy moves a tensor and waits for the device"
        )
        return func(*args, **(kwargs or {}))


def test_without_tolerance_nothing_waits_for_the_device(monkeypatch):
    monkeypatch.setattr("revdeq._device.can_look", lambda x: False)
    # The generators' states are on the host, whatever the device.
    monkeypatch.setattr("revdeq._solver.context.Draw.__call__", lambda self, f, *args, **kwargs: f(*args, **kwargs))

    def wait(self, *args):
        raise AssertionError("waits for the device")

    f, x = MLP(), torch.randn(3, 6, requires_grad=True)
    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, wait)
    with NoWaiting():
        solution = revdeq.solve(f, torch.zeros(3, 6), x)
        solution.z.sum().backward()
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        revdeq.solve(f, torch.zeros(3, 6), x, tol=1e-3)


# 7. what training code does with modules


def test_activation_checkpointing_around_a_layer():
    from torch.utils.checkpoint import checkpoint

    encoder, deq, x = nn.Linear(6, 6), revdeq.RevDEQ(MLP()), torch.randn(3, 6)
    closure = MLP()

    def model(x):
        encoded = encoder(x)
        return deq(encoded) + revdeq.solve(lambda z: closure(z, encoded), torch.zeros_like(x)).z

    parameters = [*encoder.parameters(), *deq.parameters(), *closure.parameters()]
    plain = torch.autograd.grad(model(x).sum(), parameters)
    again = torch.autograd.grad(checkpoint(model, x, use_reentrant=False).sum(), parameters)
    assert all(map(torch.equal, plain, again))


def test_saved_tensors_may_be_moved():
    encoder, block, x = nn.Linear(6, 6), MLP(), torch.randn(3, 6)
    parameters = [*encoder.parameters(), *block.parameters()]

    def gradients():
        encoded = encoder(x)
        z = revdeq.solve(lambda z: block(z, encoded), torch.zeros_like(x)).z
        return torch.autograd.grad(z.sum(), parameters)

    plain = gradients()
    with torch.autograd.graph.save_on_cpu():
        assert all(map(torch.equal, plain, gradients()))


def test_gradients_accumulate_over_micro_batches():
    deq, x = revdeq.RevDEQ(MLP()), torch.randn(8, 6)
    deq(x).sum().backward()
    whole = [p.grad.clone() for p in deq.parameters()]
    deq.zero_grad()
    for part in x.split(2):
        deq(part).sum().backward()
    for p, g in zip(deq.parameters(), whole, strict=True):
        torch.testing.assert_close(p.grad, g, rtol=1e-5, atol=1e-6)


def test_functional_call_differentiates_the_given_tensors():
    deq, x = revdeq.RevDEQ(MLP()), torch.randn(3, 6)
    others = {name: (0.5 * p).detach().requires_grad_() for name, p in deq.named_parameters()}
    z = torch.func.functional_call(deq, others, (x,))
    ours = torch.autograd.grad(z.sum(), list(others.values()))
    with torch.no_grad():
        for name, p in deq.named_parameters():
            p.copy_(others[name])
    expected = torch.autograd.grad(deq(x).sum(), list(deq.parameters()))
    assert all(map(torch.equal, ours, expected))


def test_an_in_place_change_of_a_weight_between_the_passes_is_an_error():
    f, x = MLP(), torch.randn(3, 6)
    z = revdeq.solve(f, torch.zeros(3, 6), x).z
    with torch.no_grad():
        f.inner.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


def test_layers_are_copied_saved_and_pickled():
    deq, x = revdeq.RevDEQ(MLP(), beta=0.7, max_steps=3, tol=1e-4), torch.randn(3, 6)
    expected = deq(x)
    assert torch.equal(copy.deepcopy(deq)(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(deq))(x), expected)
    other = revdeq.RevDEQ(MLP(), beta=0.7, max_steps=3, tol=1e-4)
    other.load_state_dict(deq.state_dict())
    assert torch.equal(other(x), expected)
    assert "beta=0.7, max_steps=3, tol=0.0001" in repr(deq) and "gamma" not in repr(deq)


def test_a_solve_inside_a_solve():
    inner, x = nn.Linear(6, 6), torch.randn(3, 6, requires_grad=True)

    def f(z, x, solver):
        w = solver(lambda w: torch.tanh(inner(w) + z), torch.zeros(3, 6), max_steps=3)
        return 0.5 * getattr(w, "z", w) + x

    inputs = [x, *inner.parameters()]
    ours = torch.autograd.grad(revdeq.solve(f, torch.zeros(3, 6), x, revdeq.solve, max_steps=3).z.sum(), inputs)
    expected = torch.autograd.grad(stored_graph(f, torch.zeros(3, 6), x, stored_graph, max_steps=3).sum(), inputs)
    for g, e in zip(ours, expected, strict=True):
        assert (g - e).norm() <= 1e-6 * e.norm()


# 9. threads and interruption


def test_two_solves_in_two_threads_do_not_disturb_each_other():
    def job(seed):
        torch.manual_seed(seed)
        f, x = MLP(), torch.randn(40, 6, requires_grad=True)
        settings = {"beta": 0.5 + 0.1 * seed, "max_steps": 3 + seed}

        def run():
            z = revdeq.solve(f, torch.zeros(40, 6), x, **settings).z
            return [z.detach(), *torch.autograd.grad(z.sum(), [x, *f.parameters()])]

        return run

    jobs = [job(0), job(1)]
    expected = [job() for job in jobs]
    failures = []

    def repeat(job, expected):
        for _ in range(30):
            if not all(map(torch.equal, job(), expected)):
                failures.append(job)

    threads = [threading.Thread(target=repeat, args=pair) for pair in zip(jobs, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_two_solves_with_dropout_in_two_threads_each_keep_their_mask():
    failures = []

    def repeat():
        for _ in range(30):
            x = torch.ones(500)
            z = revdeq.solve(lambda z, x=x: F.dropout(x) + 0 * z, torch.zeros(500), max_steps=12).z
            if not torch.isin((z * 2**12).round(), torch.tensor([0.0, 2 * (2**12 - 1)])).all():
                failures.append(z)

    threads = [threading.Thread(target=repeat) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("when", ["forward", "backward", "a step"])
def test_an_interruption_of_exit_leaves_no_hooks(monkeypatch, when):
    """Ctrl-C may come before the first line of an __exit__."""

    def interrupted(*_):
        patch.undo()
        raise KeyboardInterrupt

    block, x = MLP(), torch.randn(3, 6, requires_grad=True)
    solution = revdeq.solve(block, torch.zeros(3, 6), x)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: seen.append(x) or x, lambda x: x):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(torch.autograd.graph.saved_tensors_hooks, "__exit__", interrupted)
            if when == "forward":
                revdeq.solve(block, torch.zeros(3, 6), x)
            elif when == "a step":
                next(revdeq.steps(block, torch.zeros(3, 6), x))
            else:
                solution.z.sum().backward()
        seen.clear()
        x.exp()
        assert len(seen) == 1  # the hooks of others stay
    x.exp().sum().backward()
    compare(block, torch.zeros(3, 6), x, inputs=[x])


@pytest.mark.parametrize("evaluation", [1, 2, 5, 9, 12])
def test_an_interruption_leaves_everything_as_it_was(evaluation):
    """Ctrl-C in the first evaluation, later, and in the backward pass (8 evaluations each). The generator is in the
    state after one whole evaluation."""
    block, x, calls = MLP(), torch.randn(3, 6, requires_grad=True), 0

    def interrupted(z, x):
        nonlocal calls
        calls += 1
        out = F.dropout(block(z, x), 0.1)
        if calls == evaluation:
            raise KeyboardInterrupt
        return out

    torch.manual_seed(5)
    solution = None
    if evaluation > 1:
        F.dropout(x, 0.1)
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    with pytest.raises(KeyboardInterrupt):
        with torch.autocast("cpu", torch.bfloat16):
            solution = revdeq.solve(interrupted, torch.zeros(3, 6), x, max_steps=4)
        solution.z.sum().backward()
    assert (solution is None) == (evaluation <= 8)
    assert torch.equal(torch.get_rng_state(), expected)
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    compare(block, torch.zeros(3, 6), x, inputs=[x])
    if solution is not None:
        calls = 100
        with pytest.raises(RuntimeError, match="a second time"):
            solution.z.sum().backward()
