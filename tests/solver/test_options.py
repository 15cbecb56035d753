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


def test_options_are_documented_and_declared_wherever_they_are_taken():
    for function in (revdeq.solve, revdeq.steps, revdeq.RevDEQ):
        parameters = inspect.signature(function).parameters
        for name in NAMES:
            assert parameters[name].default == getattr(Options(), name), (function, name)
            assert f"        {name}: " in inspect.getdoc(function).replace("\n    ", "\n        "), (function, name)


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


def test_a_device_without_float64_is_refused():
    with pytest.raises(ValueError, match="z0 .*mps.*float64.*CPU"):
        refuse_device("z0", torch.device("mps"))


@pytest.mark.parametrize(
    ("f", "z0", "error", "message"),
    [
        (3, Z, TypeError, "f = 3 .*callable"),
        (lambda z: z[:2], Z, ValueError, r"f's output .*\(2,\).*z0, \(3,\).*z0=\.\.\."),
        (lambda z: z[None], Z.clone().requires_grad_(), ValueError, r"f's output .*\(1, 3\).*z0, \(3,\)"),
        (lambda z: (z[0], z[1][:1]), TWO, ValueError, r"f's output \(leaf 1 of 2\) .*\(1,\).*z0, \(3,\)"),
        (lambda z: (z, z), Z, TypeError, r"f .*\('Tensor', 'Tensor'\).*z0, Tensor"),
        (list, (Z,), TypeError, r"f .*\['Tensor'\].*z0, \('Tensor',\)"),
        (lambda z: None, Z, TypeError, "f .*NoneType.*z0, Tensor"),
        (lambda z: (z[0], 3), TWO, TypeError, r"f's output \(leaf 1 of 2\) .*int.*tensor of shape \(3,\)"),
        (lambda z: z.to_sparse(), Z, TypeError, r"f's output .*sparse_coo.*to_dense\(\)"),
        (lambda z: z.long(), Z, TypeError, "f's output .*int64.*float32"),
        (lambda z: z.to("meta"), Z, ValueError, "f's output .*meta.*z0.*cpu"),
        (
            nn.InstanceNorm1d(2, track_running_stats=True),
            torch.zeros(2, 2, 3),
            RuntimeError,
            r"InstanceNorm.*GroupNorm.*eval\(\)",
        ),
    ],
)
def test_bad_functions_and_outputs(f, z0, error, message):
    with pytest.raises(error, match=message):
        revdeq.solve(f, z0)


def test_a_layer_needs_a_function():
    with pytest.raises(TypeError, match="f = None .*callable"):
        revdeq.RevDEQ(None)


@pytest.mark.parametrize(("x", "kind"), [(None, "NoneType"), (torch.arange(3), "int64")])
def test_a_layer_needs_z0_if_x_cannot_be_a_state(x, kind):
    with pytest.raises(TypeError, match=f"x .*{kind}.*z0"):
        revdeq.RevDEQ(torch.cos)(x)


def test_an_error_inside_f_passes_through_and_leaves_the_input_alone():
    z0 = torch.randn(3)
    before, calls = z0.clone(), []

    def fails(z):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("of f's own")
        return z.mul_(0.5)

    with pytest.raises(KeyError, match="of f's own"):
        revdeq.solve(fails, z0)
    assert torch.equal(z0, before) and torch.is_grad_enabled()


# gamma


@pytest.mark.parametrize("gamma", [0.3, 0.8, 1.4])
@pytest.mark.parametrize("beta", [0.5, 0.8, 1.2])
def test_gamma_against_numbers_computed_by_hand(beta, gamma):
    x = torch.randn(4, dtype=torch.float64)
    solution = revdeq.solve(lambda z: torch.cos(z) + x, x, beta=beta, gamma=gamma, max_steps=3)

    def g(z):
        return (1 - solution.gamma) * z + solution.gamma * (torch.cos(z) + x)

    y = z = x
    for _ in range(3):
        y = (1 - solution.beta) * y + solution.beta * g(z)
        z = (1 - solution.beta) * z + solution.beta * g(y)
    torch.testing.assert_close(solution.z, z, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(solution.y, y, rtol=1e-13, atol=1e-13)
    assert abs(solution.beta - beta) < 1e-7 and abs(solution.gamma - gamma) < 1e-6


@pytest.mark.parametrize("gamma", [0.7, 1.3])
@pytest.mark.parametrize("beta", [0.5, 0.8, 1.3])
def test_gradcheck_with_gamma(beta, gamma):
    def function(z0, x, weight):
        solution = revdeq.solve(
            lambda z, x: torch.tanh(z @ weight + x), z0, x, beta=beta, gamma=gamma, max_steps=3, state="float64"
        )
        return solution.z, solution.y

    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (2, 3), (3, 3))]
    assert torch.autograd.gradcheck(function, inputs)


@STATES
@pytest.mark.parametrize("block", [ConvBlock, TransformerBlock])
def test_both_passes_compute_the_same_with_gamma(state, block):
    f = block(16) if block is ConvBlock else block(16, heads=2)
    x = torch.randn(2, 16, 6, 6) if block is ConvBlock else torch.randn(2, 5, 16)
    settings = {"beta": 0.8, "gamma": 0.75, "max_steps": 4, "state": state}
    report = revdeq.verify(f, torch.zeros_like(x), x, **settings)
    assert report.exact, str(report)
    z = revdeq.solve(f, torch.zeros_like(x), x, check="raise", **settings).z
    expected = stored_graph(f, torch.zeros_like(x), x, beta=0.8, gamma=0.75, max_steps=4)
    if state == "float64":
        assert torch.equal(z, expected)
    weight = torch.randn_like(z)
    ours = torch.autograd.grad(z, list(f.parameters()), weight)
    theirs = torch.autograd.grad(expected, list(f.parameters()), weight)
    # the exact state computes with the fraction .8 and other roundings of 6e-8, which this f amplifies a little
    assert relative(ours, theirs) <= (1e-6 if state == "float64" else 1e-4)


def test_every_backend_gives_the_same_with_gamma(backend):
    f, x = Block(16), torch.randn(20, 16)

    def run(state):
        f.zero_grad()
        solution = revdeq.solve(f, torch.zeros_like(x), x, beta=0.8, gamma=0.6, max_steps=4, tol=1e-8, state=state)
        solution.z.square().sum().backward()
        return [solution.z, solution.y, solution.change, *(p.grad.clone() for p in f.parameters())]

    for state in ("float64", "exact"):
        with revdeq.kernels.backend("reference"):
            expected = run(state)
        with revdeq.kernels.backend(backend):
            assert all(map(torch.equal, run(state), expected))


@STATES
@pytest.mark.parametrize("grad", [True, False])
def test_f_may_change_its_input_in_place_with_gamma(state, grad):
    weight = torch.rand(3, requires_grad=True)

    def gradient(f):
        with torch.set_grad_enabled(grad):
            solution = revdeq.solve(f, torch.ones(3), gamma=0.7, max_steps=4, state=state, check="raise")
        if not grad:
            return solution.z, solution.y
        return solution.z, solution.y, *torch.autograd.grad(solution.z.sum(), weight)

    ours = gradient(lambda z: z.mul_(0.5).add_(weight.detach() if not grad else weight))
    expected = gradient(lambda z: 0.5 * z + weight)
    assert all(map(torch.equal, ours, expected))


# state="auto"


def test_auto_chooses_the_exact_state_if_the_device_has_no_float64(monkeypatch):
    assert revdeq.solve(Block(), torch.zeros(6), torch.ones(6)).state == "float64"
    monkeypatch.setattr(_device, "has_float64", lambda device: False)
    assert revdeq.solve(Block(), torch.zeros(6), torch.ones(6)).state == "exact"
    monkeypatch.undo()
    for properties, has in ((SimpleNamespace(has_fp64=True), True), (SimpleNamespace(has_fp64=False), False)):
        monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device, found=properties: found)
        assert _device.has_float64(torch.device("xpu", 0)) == has
        assert _device.has_float64(torch.device("cuda", 0)) and _device.has_float64(torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "state"),
    [
        ({"beta": 0.5, "max_steps": 8}, "float64"),  # 16 log2(1.5 / .5) = 25 bits
        ({"beta": 0.8, "max_steps": 4}, "float64"),  # 25 bits
        ({"beta": 0.8, "max_steps": 8}, "exact"),  # 51
        ({"beta": 0.5, "max_steps": 11}, "exact"),  # 35
        ({"beta": 0.8, "max_steps": 8, "gamma": 0.5}, "exact"),  # 16 log2(1.4 / .2) = 45
        ({"beta": 0.8, "max_steps": 64, "backward_steps": 4}, "float64"),
        ({"beta": 0.8, "max_steps": 64, "gradient": "implicit"}, "float64"),
        ({"beta": 0.999, "max_steps": 8}, "exact"),  # 1 - beta is rounded to 1/64
    ],
)
def test_auto_chooses_the_state_by_the_bits_that_float64_would_lose(settings, state):
    f, x = Block(), torch.randn(3, 6)
    assert revdeq.solve(f, torch.zeros(3, 6), x, **settings).state == state
    with torch.no_grad():
        assert revdeq.solve(f, torch.zeros(3, 6), x, **settings).state == "float64"
    wide = Block(dtype=torch.float64)
    assert revdeq.solve(wide, torch.zeros(3, 6).double(), x.double(), **settings).state == "float64"


@pytest.mark.parametrize("beta", [0.5, 0.8, 0.9, 1.2])
def test_the_default_state_never_gives_a_wrong_gradient(beta):
    f, x = ConvBlock(16), torch.randn(2, 16, 6, 6)
    for max_steps in (1, 4, 8, 12, 40):
        assert revdeq.verify(f, torch.zeros_like(x), x, beta=beta, max_steps=max_steps).exact


def test_a_solve_with_an_enormous_max_steps_allocates_only_what_it_uses():
    x = torch.randn(4)
    run = lambda: revdeq.solve(lambda z: 0.5 * z + x, torch.zeros(4), max_steps=10**6, tol=1e-5, state="exact")  # noqa: E731
    assert run().steps < 100
    assert peak_memory(run) < 1 << 20


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


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, z, x):
        return self.block(F.dropout(z, 0.3), x)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, z, x):
        z.mul_(0.5)
        return self.block(z, x)


class Energy(nn.Module):
    """Creates a leaf tensor."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1, bias=False))

    def forward(self, z, x):
        point = z.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.net(point + x).sum(), point, create_graph=True)
        return 0.5 * z - force


@STATES
@pytest.mark.parametrize("gamma", [1.0, 0.7])
@pytest.mark.parametrize("kind", [Dropped, InPlace, Energy])
def test_kept_graphs_with_typical_functions(state, kind, gamma):
    f, x = kind(), torch.randn(3, 6, requires_grad=True)
    settings = {"max_steps": 4, "state": state, "gamma": gamma}
    assert all(map(torch.equal, gradients(f, x, keep=5, **settings), gradients(f, x, **settings)))


@STATES
def test_kept_graphs_and_a_parameter_that_is_first_used_on_the_way(state):
    """Evaluations before it cannot be kept, because only the last ones in a row can."""
    a, b, x = nn.Linear(6, 6), nn.Linear(6, 6), torch.ones(3, 6)
    parameters = [*a.parameters(), *b.parameters()]
    uses_b = []

    def f(z):
        uses_b.append(bool(z.norm() > 2.5))
        return torch.tanh((b if uses_b[-1] else a)(z) + x)

    def gradient(keep):
        uses_b.clear()
        z = revdeq.solve(f, torch.zeros(3, 6), max_steps=4, keep=keep, state=state, check="raise").z
        assert uses_b[1] is False and uses_b[-1] is True
        return torch.autograd.grad(z.sum(), parameters)

    assert all(map(torch.equal, gradient(100), gradient(0)))


def test_kept_graphs_with_hooks_autocast_and_a_second_backward_pass():
    f, x, calls = Block(), torch.randn(3, 6, requires_grad=True), []
    with torch.autocast("cpu", torch.bfloat16):
        kept = revdeq.solve(f, torch.zeros(3, 6), x, keep=6).z
        plain = revdeq.solve(f, torch.zeros(3, 6), x).z
    first = torch.autograd.grad(kept.sum(), [x, *f.parameters()], retain_graph=True)
    second = torch.autograd.grad(kept.sum(), [x, *f.parameters()])
    expected = torch.autograd.grad(plain.sum(), [x, *f.parameters()])
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, expected))
    z = revdeq.solve(f, torch.zeros(3, 6), x, keep=6).z
    f.linear.weight.register_hook(lambda g: calls.append(1) or 2 * g)
    z.sum().backward()
    assert calls == [1]


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


@STATES
@pytest.mark.parametrize("steps", [1, 2, 4, 9])
@pytest.mark.parametrize(
    "options", [{}, {"tol": 0.1, "max_steps": 30}, {"tol": 0.1, "max_steps": 30, "keep": 3}], ids=str
)
def test_truncated_gradients_are_those_of_the_last_steps(state, steps, options):
    """Also those of the auxiliary outputs. The solution has the bits of an untruncated one."""
    f, x = Block(), torch.randn(3, 6, requires_grad=True)
    z0 = torch.randn(3, 6, requires_grad=True)

    def with_aux(z, x):
        out = f(z, x)
        return out, out.square().mean()

    options = {"beta": 0.8, "max_steps": 4, "state": state, "aux": True, "check": "raise", **options}
    solution = revdeq.solve(with_aux, z0, x, backward_steps=steps, **options)
    whole = revdeq.solve(with_aux, z0, x, **options)
    assert torch.equal(solution.z, whole.z) and torch.equal(solution.y, whole.y) and solution.steps == whole.steps
    assert torch.equal(solution.aux, whole.aux) and torch.equal(solution.change, whole.change)
    inputs, total = [x, *f.parameters(), z0], solution.steps
    (solution.z.sum()).backward(retain_graph=True)  # without the auxiliary outputs
    loss = solution.z.sum() + solution.y.square().sum() + solution.aux
    ours = torch.autograd.grad(loss, inputs, allow_unused=True)

    beta = solution.beta
    y = z = z0.double()
    aux = torch.zeros(())
    for n in range(total):
        if n == total - steps > 0:
            y, z, aux = y.detach(), z.detach(), aux.detach()
        out, more = with_aux(z.float(), x)
        y, aux = (1 - beta) * y + beta * out.double(), aux + more
        out, more = with_aux(y.float(), x)
        z, aux = (1 - beta) * z + beta * out.double(), aux + more
    loss = z.float().sum() + y.float().square().sum() + aux
    expected = torch.autograd.grad(loss, inputs, allow_unused=True)
    assert (ours[-1] is None or not ours[-1].any()) == (steps < total)
    assert relative(ours[:-1], expected[:-1]) <= 2e-6
    if steps >= total:
        assert relative(ours[-1:], expected[-1:]) <= 2e-6


def test_truncated_gradients_evaluate_f_only_where_they_need_it():
    block, calls = Block(), []

    def f(z, x):
        calls.append(1)
        return block(z, x)

    z = revdeq.solve(f, torch.zeros(3, 6), torch.randn(3, 6), max_steps=10, backward_steps=3).z
    calls.clear()
    z.sum().backward()
    assert len(calls) == 6


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
