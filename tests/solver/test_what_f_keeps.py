"""What f keeps from inside a solve, and what changes between the passes: right, or refused."""

import contextlib
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

import revdeq
from revdeq import baselines
from revdeq._solver import context
from revdeq._solver.stateful import is_compiled
from revdeq._solver.verify import _Recorder

KEPT = "through something that f computed inside a solve and kept"


class Remembering(nn.Module):
    """Keeps something of every evaluation, or of the first one."""

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


@pytest.mark.parametrize("options", [{}, {"tol": 1e-3}, {"gradient": "implicit"}, {"keep": 3}])
@pytest.mark.parametrize("what", ["a loss of the last evaluation", "a loss of all", "a feature of x"])
def test_a_loss_of_what_f_keeps_is_refused(what, options):
    f, encoder = Remembering(what), nn.Linear(6, 6)
    z = revdeq.solve(f, torch.zeros(3, 6), encoder(torch.randn(3, 6)), **options).z
    with pytest.raises(RuntimeError, match=f"{KEPT}|modified by an inplace operation"):
        (z.sum() + sum(f.kept).sum()).backward()


@pytest.mark.parametrize("what", ["a projection of x", "a view of x"])
def test_a_cache_of_what_f_makes_of_its_arguments_is_refused(what):
    f, encoder = Remembering(what), nn.Linear(6, 6)
    z = revdeq.solve(f, torch.zeros(3, 6), encoder(torch.randn(3, 6))).z
    with pytest.raises(RuntimeError, match=KEPT):
        z.sum().backward()


ASKING = {
    "backward": lambda loss, weight: loss.backward(),
    "backward of some": lambda loss, weight: loss.backward(inputs=[weight]),
    "grad": lambda loss, weight: torch.autograd.grad(loss, weight),
}


@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize("asked", ASKING)
@pytest.mark.parametrize("i", [0, 1, 8, 12, 15])
def test_a_loss_of_any_evaluation_is_refused_however_its_gradient_is_asked_for(i, asked, keep):
    linear, start, x, kept = nn.Linear(6, 6), nn.Linear(6, 6), torch.randn(3, 6), []

    def f(z):
        kept.append(torch.tanh(0.5 * linear(z + x)))  # an addition saves nothing that could be overwritten
        return kept[-1]

    z = revdeq.solve(f, start(x), keep=keep).z
    kept_by_us = i >= 16 - keep
    if kept_by_us and asked != "backward":
        return  # there nobody comes by the leaf that f was given
    with pytest.raises(RuntimeError, match=KEPT + ("|graph a second time" if kept_by_us else "")):
        ASKING[asked](z.sum() + kept[i].square().sum(), start.weight)


def test_what_depends_on_a_start_that_needs_no_gradient_loses_none():
    linear, x, kept, grads = nn.Linear(6, 6), torch.randn(3, 6), [], []

    def f(z):
        kept.append(torch.tanh(0.5 * linear(z + x)))
        return kept[-1]

    for solve in (lambda *args: revdeq.solve(*args, check="raise").z, baselines.stored_graph):
        kept.clear()
        loss = solve(f, torch.zeros(3, 6)).sum() + kept[0].square().sum()
        grads.append(torch.autograd.grad(loss, linear.weight)[0])
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("asked", ASKING)
def test_a_cache_is_refused_however_its_gradient_is_asked_for(asked):
    f, encoder = Remembering("a projection of x"), nn.Linear(6, 6)
    z = revdeq.solve(f, torch.zeros(3, 6), encoder(torch.randn(3, 6))).z
    with pytest.raises(RuntimeError, match=KEPT):
        ASKING[asked](z.sum(), encoder.weight)


def test_what_a_solve_within_f_keeps_is_refused():
    inner, other, outer, x = *(nn.Linear(6, 6) for _ in range(3)), torch.randn(3, 6)

    def f(z, x):
        kept = {}

        def g(w, h):
            kept["feature"] = other(w + h)
            return torch.tanh(0.5 * inner(w) + h)

        s = revdeq.solve(g, torch.zeros(3, 6), z + x).z
        return torch.tanh(0.3 * s + 0.3 * outer(z) + kept["feature"])

    with pytest.raises(RuntimeError, match=KEPT):
        revdeq.solve(f, torch.zeros(3, 6), x).z.sum().backward()


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_f_may_ask_for_derivatives_by_its_state_and_by_what_that_depends_on(state):
    """They are partial: z counts as given. With a stored graph one has to say so."""
    weight, x, grads = torch.randn(6, 6, requires_grad=True), torch.randn(3, 6), []

    def f(z, detached=False):
        given = z.detach().requires_grad_() if detached else z
        energy = (torch.tanh(given @ weight) - x).square().sum()
        by_z, by_weight = torch.autograd.grad(energy, [given, weight])
        return torch.tanh(0.2 * z @ weight + 0.1 * by_z + 0.05 * z @ by_weight)

    for z in (
        revdeq.solve(f, torch.zeros(3, 6), state=state, check="raise").z,
        baselines.stored_graph(lambda z: f(z, detached=True), torch.zeros(3, 6)),
    ):
        grads.append(torch.autograd.grad(z.sum(), weight)[0])
    torch.testing.assert_close(*grads)


def test_f_that_changes_its_input_in_some_evaluations_is_refused():
    def f(z, x):
        if z.detach().norm() > 0:
            z.mul_(0.5)
        return torch.tanh(z) + x

    with pytest.raises(RuntimeError, match="changes its input in place, and did not in its first evaluation"):
        revdeq.solve(f, torch.zeros(3, 6), torch.randn(3, 6, requires_grad=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own
@pytest.mark.parametrize("gradient", ["exact", "implicit"])
def test_a_training_step_that_is_compiled_as_a_whole_leaves_both_passes_as_they_are(gradient):
    """In one that is compiled, dropout would draw another mask."""
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


def test_a_probe_on_states_that_are_overwritten_is_refused_by_torch():
    linear, probe, losses = nn.Linear(6, 6), nn.Linear(6, 2), []

    def f(z, x):
        losses.append(probe(z.detach()).square().sum())
        return torch.tanh(linear(z)) + x

    revdeq.solve(f, torch.zeros(3, 6), torch.randn(3, 6), max_steps=3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        sum(losses).backward()


class Growing(nn.Module):
    """A table that becomes as long as it has to be, as rotary embeddings have it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.zeros(0, 6), persistent=False)

    def forward(self, z, x):
        if len(self.table) < len(z):
            self.table = torch.linspace(0, 1, len(z))[:, None].expand(-1, 6).clone()
        return torch.tanh(self.linear(z) + x + self.table)


def test_a_table_that_the_first_evaluation_makes():
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
        self.codes.data.add_(1)  # which autograd does not count
        return torch.tanh(self.linear(z) + x)


def test_a_buffer_that_is_changed_behind_autograds_back_is_refused_and_restored():
    f = Counting()
    with pytest.raises(RuntimeError, match="f changes its buffers codes"):
        revdeq.solve(f, torch.zeros(3, 6), torch.randn(3, 6))
    assert not f.codes.any()


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("change", ["dropout", "weights"])
def test_changes_between_the_passes_are_noticed_where_the_way_back_ends_early(change, state):
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


def test_where_warnings_are_errors_each_of_them_is_one(recwarn):
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
        assert tuned.state_dict()["coefficients"].tolist() == [tuned.beta, tuned.gamma]
    with pytest.raises(RuntimeError, match='Missing key.*"coefficients"'):
        tuned.load_state_dict(untuned.state_dict())
    for pair in ((1, 1), (5, 1), (0.5, float("nan")), ("a", 1)):
        with pytest.raises((TypeError, ValueError), match="must"):
            untuned.use(*pair)
    assert untuned.beta == 0.5 and "coefficients" not in untuned.state_dict()


def test_beta_so_close_to_1_that_it_is_1_with_gamma():
    with pytest.raises(ValueError, match="must not be 1"):
        revdeq.solve(Block(), torch.zeros(3, 6), torch.zeros(3, 6), beta=0.99999995, gamma=1.68)


IMPLICIT = {"gradient": "implicit", "max_steps": 40, "check": "raise"}


def test_with_an_implicit_gradient_what_changes_between_the_passes_is_noticed():
    linear, total, x = nn.Linear(6, 6), 0, torch.randn(3, 6)
    for y in torch.randn(2, 3, 6).unbind():
        total = total + revdeq.solve(lambda z: torch.tanh(0.5 * linear(z) + y), torch.zeros(3, 6), **IMPLICIT).z  # noqa: B023
    with pytest.raises(revdeq.ReconstructionError, match="does not compute in the backward pass what it did in the"):
        total.sum().backward()
    z = revdeq.solve(lambda z, x: torch.tanh(0.5 * linear(z) + x), torch.zeros(3, 6), x, **IMPLICIT).z
    x.copy_(torch.randn(3, 6))
    with pytest.raises(revdeq.ReconstructionError, match="Leave what f closes over and reads as it is"):
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


def test_with_an_implicit_gradient_f_may_choose_what_it_uses_by_its_state():
    a, b = nn.Linear(3, 3), nn.Linear(3, 3)

    def f(z):
        return torch.tanh(0.3 * (a if z.norm() < 1e-6 else b)(z) + 1)

    z = revdeq.solve(f, torch.zeros(2, 3), **IMPLICIT).z
    by_a, by_b = torch.autograd.grad(z.sum(), [a.weight, b.weight], allow_unused=True)
    assert (by_a is None or not by_a.any()) and by_b.norm() > 0


def test_with_an_implicit_gradient_a_tensor_that_only_the_last_state_needs_is_an_error():
    a, b = torch.ones(1, requires_grad=True), torch.zeros(1, requires_grad=True)
    solution = revdeq.solve(lambda z: 0.5 * z + a, torch.zeros(1), max_steps=3)
    middle = (solution.y.item() + solution.z.item()) / 2

    def f(z):
        return 0.5 * z + a + (b if z.item() > middle else 0)

    z = revdeq.solve(f, torch.zeros(1), max_steps=3, gradient="implicit", check=None).z
    with pytest.raises(RuntimeError, match="f used other tensors"):
        z.sum().backward()


def test_a_start_that_is_changed_before_the_backward_pass_is_named():
    linear, start = nn.Linear(6, 6), torch.zeros(3, 6)
    z = revdeq.solve(lambda z: torch.tanh(0.5 * linear(z)), start).z
    start.copy_(z.detach())
    with pytest.raises(RuntimeError, match="z0 was changed in place after the solve.*solve from z0.clone()"):
        z.sum().backward()


def test_an_expanded_start_that_a_hook_has_packed():
    linear, start, grads = nn.Linear(6, 6), nn.Parameter(torch.randn(1, 6)), []

    def packed(x):
        return x.clone(memory_format=torch.contiguous_format)

    for solve in (lambda *args: revdeq.solve(*args, check="raise").z, baselines.stored_graph):
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda x: x):
            z = solve(lambda z: torch.tanh(0.5 * linear(z)), start.expand(3, 6))
        grads.append(torch.autograd.grad(z.sum(), start)[0])
    torch.testing.assert_close(*grads)


def test_f_that_waits_for_a_solve_in_another_thread_is_told_and_does_not_hang(monkeypatch):
    monkeypatch.setattr(context, "PATIENCE", 0.5)
    linear, x = nn.Linear(6, 6), torch.randn(3, 6)

    with ThreadPoolExecutor(1) as pool:

        def f(z, x):
            x = nn.functional.dropout(x, 0.5)
            inner = pool.submit(revdeq.solve, lambda w: torch.tanh(0.5 * linear(w) + x), torch.zeros(3, 6))
            return torch.tanh(inner.result().z + x)

        with pytest.raises(RuntimeError, match="has waited 0.5 s for its turn to draw random numbers"):
            revdeq.solve(f, torch.zeros(3, 6), x)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_what_verify_records_counts_as_compiled_if_f_is():
    f = torch.compile(nn.Sequential(nn.Linear(6, 6)), backend="eager")
    assert is_compiled(f) and is_compiled(_Recorder(f)) and not is_compiled(_Recorder(nn.Linear(6, 6)))
    assert revdeq.verify(f, torch.zeros(3, 6)).exact


def test_verify_says_what_f_is_called_with():
    with pytest.raises(TypeError, match="f = None must be callable"):
        revdeq.verify(None, torch.ones(3))
    with pytest.raises(TypeError, match=r"f is called as f\(z, x\), which it does not take"):
        revdeq.verify(nn.Linear(3, 3), torch.ones(3), torch.ones(3))


def test_tune_tells_of_an_error_of_fs_own():
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
def test_beside_a_compiled_part_results_that_f_closes_over_are_found_or_missed(whole):
    """With graph breaks it can be looked at, and is then compiled once more for that."""
    part, encoder, x = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Linear(6, 6), torch.randn(3, 6)
    compiled, h = torch.compile(part, backend="eager", fullgraph=whole), encoder(x)

    def gradient(solve):
        return torch.autograd.grad(solve(lambda z: 0.5 * compiled(z) + h, torch.zeros(3, 6)).sum(), encoder.weight,
                                   retain_graph=True)[0]  # fmt: skip

    if whole:
        with pytest.raises(RuntimeError, match="its gradient would be lost: pass this tensor to f through `args`"):
            gradient(lambda *args: revdeq.solve(*args, check="raise").z)
    else:
        ours = gradient(lambda *args: revdeq.solve(*args, check="raise").z)
        torch.testing.assert_close(ours, gradient(baselines.stored_graph))


class Held:
    """No module, and not called."""

    def __init__(self):
        self.net = Counting()


def test_buffers_of_modules_that_a_plain_object_holds_are_seen():
    held = Held()
    with pytest.raises(RuntimeError, match="f changes its buffers codes"):
        revdeq.solve(lambda z: held.net(z, 0), torch.zeros(3, 6))
