"""Values that f keeps from inside a solve, and changes between the passes: the gradient is right, or it is an error."""

import contextlib
import functools
import types
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import revdeq
from revdeq import baselines
from revdeq._solver import context


class Remembering(nn.Module):
    """Stores a value of every evaluation, or of the first one."""

    def __init__(self, what):
        super().__init__()
        self.linear, self.other, self.what, self.kept = nn.Linear(6, 6), nn.Linear(6, 6), what, []

    def forward(self, z, x):
        if self.what == "a loss of the last evaluation":
            self.kept = [self.other(z).square().mean()]
        elif self.what == "a loss of all":
            self.kept.append(self.other(z).square().mean())
        elif self.what == "a feature of x":
            self.kept = [self.other(x)]
        elif not self.kept:
            self.kept.append({"a projection of x": self.other, "a view of x": lambda x: x[:]}[self.what](x))
        used = self.kept[0] if self.what in ("a projection of x", "a view of x") else 0
        return torch.tanh(self.linear(z) + x) + used


def as_z(**options):
    return lambda *args: revdeq.solve(*args, check="raise", **options).z


def same(ours, expected):
    for a, b in zip(ours, expected, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            assert (a - b).norm() <= 2e-6 * b.norm() + 1e-12


EXACT = [{}, {"state": "exact"}, {"keep": 3}, {"gamma": 0.8}]


@pytest.mark.parametrize("options", EXACT, ids=str)
@pytest.mark.parametrize("what", ["a loss of the last evaluation", "a loss of all", "a feature of x"])
def test_a_loss_on_values_that_f_keeps(what, options):
    grads = []
    for solve in (as_z(**options), functools.partial(baselines.stored_graph, gamma=options.get("gamma", 1.0))):
        torch.manual_seed(0)
        f, encoder = Remembering(what), nn.Linear(6, 6)
        z = solve(f, torch.zeros(3, 6), encoder(torch.randn(3, 6)))
        (z.sum() + sum(f.kept).sum()).backward()
        grads.append([p.grad for p in (*f.parameters(), *encoder.parameters())])
    same(*grads)


def test_a_loss_on_values_that_f_keeps_with_a_tolerance():
    torch.manual_seed(0)
    f, encoder, x = Remembering("a loss of all"), nn.Linear(6, 6), torch.randn(3, 6)
    solution = revdeq.solve(f, torch.zeros(3, 6), encoder(x), tol=1e-3, max_steps=50, check="raise")
    (solution.z.sum() + sum(f.kept)).backward()
    ours = [p.grad for p in (*f.parameters(), *encoder.parameters())]
    f.kept.clear()
    for p in (*f.parameters(), *encoder.parameters()):
        p.grad = None
    z = baselines.stored_graph(f, torch.zeros(3, 6), encoder(x), max_steps=solution.steps)
    (z.sum() + sum(f.kept)).backward()
    same(ours, [p.grad for p in (*f.parameters(), *encoder.parameters())])


@pytest.mark.parametrize(
    "options",
    [
        {"gradient": "implicit", "max_steps": 40},
        {"backward_steps": 2},
        {"backward_steps": 2, "tol": 1e-3, "max_steps": 50},
        {"backward_steps": 40, "tol": 1e-3, "max_steps": 50},  # all steps are taken twice
    ],
    ids=str,
)
def test_a_loss_on_an_evaluation_that_is_not_differentiated_is_refused(options):
    f, encoder = Remembering("a loss of all"), nn.Linear(6, 6)
    z = revdeq.solve(f, torch.zeros(3, 6), encoder(torch.randn(3, 6)), **options).z
    with pytest.raises(RuntimeError, match="an evaluation of f that is not differentiated"):
        (z.sum() + f.kept[3]).backward()


def test_a_cache_that_the_first_evaluation_fills_is_refused():
    """f would depend on more than its arguments. If it is filled before the solve, it is like any captured tensor."""
    f, encoder = Remembering("a projection of x"), nn.Linear(6, 6)
    x = encoder(torch.randn(3, 6))
    z = revdeq.solve(f, torch.zeros(3, 6), x).z
    with pytest.raises(revdeq.ReconstructionError, match="cache.*calling f once"):
        z.sum().backward()
    grads = []
    for solve in (as_z(), baselines.stored_graph):
        f.kept.clear()
        f.zero_grad()
        f(torch.zeros(3, 6), x)
        solve(f, torch.zeros(3, 6), x).sum().backward(retain_graph=True)
        grads.append([p.grad for p in f.parameters()])
    same(*grads)


def test_a_cached_view_of_an_argument():
    grads = []
    for solve in (as_z(), baselines.stored_graph):
        torch.manual_seed(0)
        f, encoder = Remembering("a view of x"), nn.Linear(6, 6)
        solve(f, torch.zeros(3, 6), encoder(torch.randn(3, 6))).sum().backward()
        grads.append([encoder.weight.grad, f.linear.weight.grad])
    same(*grads)


ASKING = {
    "backward": lambda loss, weight: (loss.backward(), weight.grad)[1],
    "backward of some": lambda loss, weight: (loss.backward(inputs=[weight]), weight.grad)[1],
    "grad": lambda loss, weight: torch.autograd.grad(loss, weight)[0],
}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize("asked", ASKING)
@pytest.mark.parametrize("i", [0, 1, 8, 12, 15])
def test_a_loss_on_any_evaluation_by_backward_or_grad(i, asked, keep, alone):
    """Even without a loss on the solution: later steps are then inverted without vector-Jacobian products."""
    grads = []
    for solve in (as_z(keep=keep), baselines.stored_graph):
        torch.manual_seed(0)
        linear, start, x, kept = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(3, 6), []

        def f(z):
            kept.append(torch.tanh(0.5 * linear(z + x)))  # noqa: B023
            return kept[-1]  # noqa: B023

        z = solve(f, start(x))
        grads.append(ASKING[asked](kept[i].square().sum() + (0 if alone else z.sum()), start.weight))
    same(grads[:1], grads[1:])


def test_a_loss_on_kept_values_after_the_solution_is_gone():
    linear, kept = nn.Linear(6, 6), []

    def f(z):
        kept.append(torch.tanh(linear(z)))
        return kept[-1]

    revdeq.solve(f, torch.ones(3, 6))
    with pytest.raises(RuntimeError, match="keep .*solution"):
        kept[3].sum().backward()


def test_two_losses_one_after_the_other():
    grads = []
    for solve in (as_z(), as_z(keep=5), as_z(state="exact"), baselines.stored_graph):
        torch.manual_seed(0)
        linear, x, kept = nn.Linear(6, 6), torch.randn(3, 6), []

        def f(z):
            kept.append(torch.tanh(0.5 * linear(z + x)))  # noqa: B023
            return kept[-1]  # noqa: B023

        z = solve(f, torch.zeros(3, 6))
        for loss in (kept[9].sum(), z.sum(), kept[4].square().sum(), z.square().sum() + kept[11].sum()):
            loss.backward(retain_graph=True)
        grads.append([p.grad for p in linear.parameters()])
    for ours in grads[:-1]:
        same(ours, grads[-1])


def test_kept_values_that_depend_on_a_z0_without_gradient():
    linear, x, kept, grads = nn.Linear(6, 6), torch.randn(3, 6), [], []

    def f(z):
        kept.append(torch.tanh(0.5 * linear(z + x)))
        return kept[-1]

    for solve in (lambda *args: revdeq.solve(*args, check="raise").z, baselines.stored_graph):
        kept.clear()
        loss = solve(f, torch.zeros(3, 6)).sum() + kept[0].square().sum()
        grads.append(torch.autograd.grad(loss, linear.weight)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_values_that_a_solve_inside_f_keeps(state):
    grads = []
    for solve in (as_z(state=state), baselines.stored_graph):
        torch.manual_seed(0)
        inner, other, outer, x = *(nn.Linear(6, 6) for _ in range(3)), torch.randn(3, 6)

        def f(z, x):
            kept = {}

            def g(w, h):
                kept["feature"] = other(w + h)  # noqa: B023
                return torch.tanh(0.5 * inner(w) + h)  # noqa: B023

            s = solve(g, torch.zeros(3, 6), z + x)  # noqa: B023
            return torch.tanh(0.3 * s + 0.3 * outer(z) + kept["feature"])  # noqa: B023

        solve(f, torch.zeros(3, 6), x).sum().backward()
        grads.append([p.grad for m in (inner, other, outer) for p in m.parameters()])
    same(*grads)


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_f_may_take_derivatives_with_respect_to_its_state(state):
    weight, x, grads = torch.randn(6, 6, requires_grad=True), torch.randn(3, 6), []

    def f(z, by_weight):
        given = z.detach().requires_grad_() if by_weight else z
        energy = (torch.tanh(given @ weight) - x).square().sum()
        if not by_weight:
            (by_z,) = torch.autograd.grad(energy, given, create_graph=True)
            return torch.tanh(0.2 * z @ weight + 0.1 * by_z)
        by_z, by_weight = torch.autograd.grad(energy, [given, weight])
        return torch.tanh(0.2 * z @ weight + 0.1 * by_z + 0.05 * z @ by_weight)

    for by_weight in (False, True):
        for solve in (as_z(state=state), baselines.stored_graph):
            grads.append(
                torch.autograd.grad(solve(f, torch.zeros(3, 6, requires_grad=True), by_weight).sum(), weight)[0]
            )
    same(grads[::2], grads[1::2])


def test_a_derivative_through_all_evaluations_is_refused():
    weight = torch.randn(6, 6, requires_grad=True)

    def f(z):
        (by_weight,) = torch.autograd.grad(torch.tanh(z @ weight).sum(), weight)
        return torch.tanh(0.2 * z @ weight + 0.05 * z @ by_weight)

    with pytest.raises(RuntimeError, match=r"derivative.*z\.detach\(\)"):
        revdeq.solve(f, torch.ones(3, 6))


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_f_that_changes_its_input_in_some_evaluations(state):
    def f(z, x):
        if z.detach().norm() > 0:
            z.mul_(0.5)
        return torch.tanh(z) + x

    x, grads = torch.randn(3, 6, requires_grad=True), []
    for solve in (as_z(state=state), baselines.stored_graph):
        grads.append(torch.autograd.grad(solve(f, torch.zeros(3, 6), x).sum(), x)[0])
    same(grads[:1], grads[1:])
    with pytest.raises(RuntimeError, match="modifies its input in place, but did not in its first"):
        revdeq.solve(f, torch.zeros(3, 6), x, gamma=0.8, state=state)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own
@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_compiling_a_whole_training_step_changes_neither_pass(gradient):
    """In a compiled one, dropout would draw another mask."""
    linear, x, compiled = nn.Linear(6, 6), torch.randn(3, 6), []

    def f(z, x):
        compiled.append(torch.compiler.is_compiling())
        return torch.tanh(0.3 * linear(z) + x)

    def step(x):
        loss = revdeq.solve(f, torch.zeros(3, 6), x, gradient=gradient, check=None).z.square().sum()
        loss.backward()
        return loss

    torch.compile(step, backend="eager")(x)
    assert len(compiled) > 16 and not any(compiled)


def test_a_probe_on_the_states():
    """Every evaluation has its own memory for the input of f."""
    grads = []
    for solve in (as_z(max_steps=3), functools.partial(baselines.stored_graph, max_steps=3)):
        torch.manual_seed(0)
        linear, probe, losses = nn.Linear(6, 6), nn.Linear(6, 2), []

        def f(z, x):
            losses.append(probe(z.detach()).square().sum())  # noqa: B023
            return torch.tanh(linear(z)) + x  # noqa: B023

        z = solve(f, torch.zeros(3, 6), torch.randn(3, 6))
        sum(losses).backward()
        del z
        grads.append([p.grad for p in probe.parameters()])
    same(*grads)


class Growing(nn.Module):
    """A table that grows as needed, as for rotary embeddings."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.zeros(0, 6), persistent=False)

    def forward(self, z, x):
        if len(self.table) < len(z):
            self.table = torch.linspace(0, 1, len(z))[:, None].expand(-1, 6).clone()
        return torch.tanh(self.linear(z) + x + self.table)


def test_a_table_that_the_first_evaluation_creates():
    x, grads = torch.randn(3, 6), []
    f = Growing()
    for solve in (lambda *args: revdeq.solve(*args, check="raise").z, baselines.stored_graph):
        f.table = torch.zeros(0, 6)
        grads.append(torch.autograd.grad(solve(f, torch.zeros(3, 6), x).sum(), f.linear.weight)[0])
    torch.testing.assert_close(*grads)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("codes", torch.zeros(6))

    def forward(self, z, x):
        self.codes.data.add_(1)  # autograd does not count this
        return torch.tanh(self.linear(z) + x)


def test_changing_a_buffer_through_data_is_refused_and_undone():
    f = Counting()
    with pytest.raises(RuntimeError, match="f changes codes"):
        revdeq.solve(f, torch.zeros(3, 6), torch.randn(3, 6))
    assert not f.codes.any()


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("change", ["dropout", "weights"])
def test_changes_between_the_passes_are_noticed_with_backward_steps(change, state):
    f = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3))
    solution = revdeq.solve(
        lambda z, x: f(z) + x, torch.zeros(3, 6), torch.randn(3, 6), backward_steps=5, state=state, check="raise"
    )
    if change == "dropout":
        f.eval()
    else:
        f[0].weight.data.mul_(1.1)
    with pytest.raises(revdeq.ReconstructionError):
        solution.z.sum().backward()


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("k", [1, 3, 7, 8])
def test_the_gradient_of_the_last_steps_passes_its_check(k, state):
    f, x = nn.Linear(6, 6), torch.randn(3, 6)
    z = revdeq.solve(
        lambda z, x: torch.tanh(f(z) + x), torch.zeros(3, 6), x, backward_steps=k, state=state, check="raise"
    ).z
    z.sum().backward()
    assert f.weight.grad.isfinite().all()


@pytest.mark.parametrize("size", [1e-7, 1e-8, 1e-10])
def test_numbers_below_the_resolution_of_the_exact_state_are_noticed(size):
    z = revdeq.solve(
        lambda z, x: 0.5 * z + x, torch.zeros(50), torch.full((50,), size, requires_grad=True), state="exact",
        check="raise",
    ).z  # fmt: skip
    with pytest.raises(revdeq.ReconstructionError, match="coarse"):
        z.sum().backward()


def test_warnings_can_be_turned_into_errors(recwarn):
    for _ in range(2):
        x = torch.full((50,), 1e-9, requires_grad=True)
        z = revdeq.solve(lambda z, x: 0.5 * z + x, torch.zeros(50), x, state="exact").z
        with warnings.catch_warnings(), pytest.raises(revdeq.ReconstructionWarning):
            warnings.simplefilter("error")
            z.sum().backward()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


def test_the_coefficients_of_a_layer_as_part_of_its_state():
    tuned, untuned = revdeq.RevDEQ(Block()), revdeq.RevDEQ(Block())
    tuned.tune(torch.randn(3, 6))
    assert "coefficients" in get_model_state_dict(tuned)  # of torch.distributed.checkpoint
    with torch.device("meta"):
        assert tuned.state_dict()["coefficients"].tolist() == [[tuned.beta, tuned.gamma]]
    before = tuned.beta
    tuned.load_state_dict(untuned.state_dict())
    assert tuned.beta == before and tuned.state_dict()["coefficients"][0, 0] == before
    for pair in ((1, 1), (5, 1), (0.5, float("nan")), ("a", 1)):
        with pytest.raises((TypeError, ValueError), match="must"):
            untuned.use(*pair)
    assert untuned.beta == 0.5 and not untuned.state_dict()["coefficients"].any()


def test_a_beta_that_rounds_to_1_with_gamma():
    with pytest.raises(ValueError, match="must not be 1"):
        revdeq.solve(Block(), torch.zeros(3, 6), torch.zeros(3, 6), beta=0.99999995, gamma=1.68)


IMPLICIT = {"gradient": "implicit", "max_steps": 40, "check": "raise"}


def test_changes_between_the_passes_are_noticed_with_an_implicit_gradient():
    linear, total, x = nn.Linear(6, 6), 0, torch.randn(3, 6)
    for y in torch.randn(2, 3, 6).unbind():
        total = total + revdeq.solve(lambda z: torch.tanh(0.5 * linear(z) + y), torch.zeros(3, 6), **IMPLICIT).z  # noqa: B023
    with pytest.raises(
        revdeq.ReconstructionError, match="does not return in the backward pass what it returned in the"
    ):
        total.sum().backward()
    z = revdeq.solve(lambda z, x: torch.tanh(0.5 * linear(z) + x), torch.zeros(3, 6), x, **IMPLICIT).z
    x.copy_(torch.randn(3, 6))
    with pytest.raises(revdeq.ReconstructionError, match="f reads"):
        z.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("pair", [(0.5, 1.0), (0.8, 1.0), (1.2, 0.6), (0.9, 0.3), (0.05, 1.0)])
@pytest.mark.parametrize("max_steps", [1, 4, 60])
def test_what_does_not_change_is_not_reported(dtype, pair, max_steps):
    torch.manual_seed(0)
    f, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)).to(dtype), torch.randn(3, 6, dtype=dtype)
    options = {"beta": pair[0], "gamma": pair[1], "max_steps": max_steps, "gradient": "implicit", "check": "raise"}
    z = revdeq.solve(lambda z, x: f(z) + x, torch.zeros_like(x), x, **options).z
    with contextlib.suppress(revdeq.ConvergenceError):  # which is another matter
        z.sum().backward()


def test_with_an_implicit_gradient_f_may_branch_on_its_state():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)

    def f(z):
        return torch.tanh(0.3 * (a if z.norm() < 1e-6 else b)(z) + 1)

    z = revdeq.solve(f, torch.zeros(2, 3), **IMPLICIT).z
    by_a, by_b = torch.autograd.grad(z.sum(), [a.weight, b.weight], allow_unused=True)
    assert (by_a is None or not by_a.any()) and by_b.norm() > 0


def test_changing_z0_before_the_backward_pass_is_an_error():
    linear, start = nn.Linear(6, 6), torch.zeros(3, 6)
    z = revdeq.solve(lambda z: torch.tanh(0.5 * linear(z)), start).z
    start.copy_(z.detach())
    with pytest.raises(RuntimeError, match="z0 was modified in place after the solve.*solve from z0.clone()"):
        z.sum().backward()


def test_an_expanded_z0_packed_by_a_saved_tensor_hook():
    linear, start, grads = nn.Linear(6, 6), nn.Parameter(torch.randn(1, 6)), []

    def packed(x):
        return x.clone(memory_format=torch.contiguous_format)

    for solve in (lambda *args: revdeq.solve(*args, check="raise").z, baselines.stored_graph):
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda x: x):
            z = solve(lambda z: torch.tanh(0.5 * linear(z)), start.expand(3, 6))
        grads.append(torch.autograd.grad(z.sum(), start)[0])
    torch.testing.assert_close(*grads)


def test_an_f_that_waits_for_a_solve_in_another_thread_raises_instead_of_hanging(monkeypatch):
    monkeypatch.setattr(context, "PATIENCE", 0.5)
    linear, x = nn.Linear(6, 6), torch.randn(3, 6)

    with ThreadPoolExecutor(1) as pool:

        def f(z, x):
            x = nn.functional.dropout(x, 0.5)
            inner = pool.submit(revdeq.solve, lambda w: torch.tanh(0.5 * linear(w) + x), torch.zeros(3, 6))
            return torch.tanh(inner.result().z + x)

        with pytest.raises(RuntimeError, match="timeout after 0.5 s.*random generators.*in the thread of f"):
            revdeq.solve(f, torch.zeros(3, 6), x)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_verify_of_a_compiled_f():
    f = torch.compile(nn.Sequential(nn.Linear(6, 6)), backend="eager")
    assert revdeq.verify(f, torch.zeros(3, 6)).exact


def test_verify_explains_a_wrong_signature():
    with pytest.raises(TypeError, match="f = None must be callable"):
        revdeq.verify(None, torch.ones(3))
    with pytest.raises(TypeError, match=r"f is called as f\(z, x\), but"):
        revdeq.verify(nn.Linear(3, 3), torch.ones(3), torch.ones(3))


def test_tune_passes_on_an_error_of_f():
    with pytest.raises(ZeroDivisionError):
        revdeq.tune(lambda z: z / (1 // 0), torch.ones(3))


PARTS = {
    "a module": lambda part: torch.compile(part, backend="eager", fullgraph=True),
    "a function": lambda part: torch.compile(lambda z: part(z), backend="eager", fullgraph=True),
    "a module in a module": lambda part: nn.Sequential(torch.compile(part, backend="eager", fullgraph=True)),
    "cond": lambda part: lambda z: torch.cond(z.sum() > 1e9, lambda z: z.clone(), lambda z: part(z), (z,)),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("what", PARTS)
def test_a_part_of_f_may_be_compiled(what):
    part, x, grads = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), torch.randn(3, 6, requires_grad=True), []
    compiled = PARTS[what](part)
    for solve in (lambda *args: revdeq.solve(*args, check="raise").z, baselines.stored_graph):
        z = solve(lambda z, x: 0.5 * compiled(z) + x, torch.zeros(3, 6), x)
        grads.append(torch.autograd.grad(z.sum(), [x, part[0].weight]))
    torch.testing.assert_close(*grads)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_captured_tensors_get_their_gradient_next_to_a_compiled_part(whole):
    part, encoder, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6), torch.randn(3, 6)
    compiled, grads = torch.compile(part, backend="eager", fullgraph=whole), []
    for solve in (as_z(), baselines.stored_graph):
        h = encoder(x)
        z = solve(lambda z: 0.5 * compiled(z) + h, torch.zeros(3, 6))  # noqa: B023
        grads.append(torch.autograd.grad(z.sum(), [encoder.weight, part[0].weight]))
    same(*grads)


class Held:
    """Neither a module nor callable."""

    def __init__(self):
        self.net = Counting()


def test_buffers_of_modules_in_plain_objects_are_checked():
    held = Held()
    with pytest.raises(RuntimeError, match="f changes codes"):
        revdeq.solve(lambda z: held.net(z, 0), torch.zeros(3, 6))


def test_what_f_keeps_in_variables_that_were_none_survives_the_backward_pass():
    """In a closure, an attribute of a plain object, and a global variable."""
    w, inside, box = torch.tensor(0.5, requires_grad=True), None, types.SimpleNamespace(last=None)
    names = {"kept": None, "torch": torch, "w": w}
    exec("def g(z):\n global kept\n kept = torch.cos(w * z)\n return kept", names)

    def f(z):
        nonlocal inside
        inside = box.last = names["g"](z)
        return inside

    for function, read in ((f, lambda: (inside, box.last)), (names["g"], lambda: (names["kept"],))):
        solution = revdeq.solve(function, torch.zeros(3), max_steps=4)
        before = read()
        solution.z.sum().backward()
        assert all(a is b for a, b in zip(read(), before, strict=True))
