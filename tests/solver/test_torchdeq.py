"""Programs written for torchdeq, with the core changed."""

import argparse
import functools
import importlib
import logging
import pydoc
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

torchdeq = pytest.importorskip("torchdeq", reason="torchdeq is not installed")

from torchdeq.dropout import VariationalDropout1d  # noqa: E402
from torchdeq.loss import fp_correction, jac_reg  # noqa: E402
from torchdeq.norm import apply_norm, reset_norm  # noqa: E402
from torchdeq.solver.utils import solver_stat_from_final_step  # noqa: E402

import revdeq.torchdeq  # noqa: E402
from revdeq.baselines import stored_graph  # noqa: E402


class Program(nn.Module):
    """As in torchdeq's examples, the configuration selects the core."""

    def __init__(self, args=None, **kwargs):
        super().__init__()
        torch.manual_seed(0)
        self.inject, self.layer, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.deq = torchdeq.get_deq(args, **kwargs)

    def forward(self, x, **kwargs):
        u = self.inject(x)
        z_out, info = self.deq(lambda z: torch.tanh(self.layer(z) + u), torch.zeros_like(u), **kwargs)
        return [self.head(z) for z in z_out], info

    def unrolled(self, x, *steps, beta=0.5):
        """The same with the graph stored, and a new solve after each of these numbers of steps."""
        u = self.inject(x)
        z, states = torch.zeros_like(u), []
        for n in steps:
            z = stored_graph(lambda z: torch.tanh(self.layer(z) + u), z, beta=beta, max_steps=n)
            states.append(self.head(z))
        return states


def assert_equal_gradients(model, ours, theirs):
    parameters = list(model.parameters())
    ours = torch.autograd.grad(ours, parameters, allow_unused=True)
    theirs = torch.autograd.grad(theirs, parameters, allow_unused=True)
    for g, e in zip(ours, theirs, strict=True):
        assert (g is None) == (e is None)
        if g is not None:
            assert (g - e).norm() <= 1e-6 * e.norm()


def namespace(*flags, **program):
    """The parsed command line of a program: its own settings, and torchdeq's."""
    parser = argparse.ArgumentParser()
    torchdeq.utils.add_deq_args(parser)
    revdeq.torchdeq.add_args(parser)
    args = parser.parse_args(["--core", "reversible", *flags])
    vars(args).update(program)
    return args


def settings_of(deq):
    """The options that the core passes to the solver in a call."""
    seen = []

    def spy(f, z0, **settings):
        seen.append(settings)
        return revdeq.solve(f, z0, max_steps=1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(revdeq.torchdeq, "solve", spy)
        deq(torch.cos, torch.zeros(2, 2))
    return seen[0]


def test_a_program_runs_unchanged_with_the_exact_gradient():
    program, x = Program(core="reversible", f_max_iter=8, beta=0.5), torch.randn(4, 3)
    (out,), info = program(x)
    (expected,) = program.unrolled(x, 4)
    assert torch.equal(out, expected)
    assert_equal_gradients(program, out.sum(), expected.sum())
    assert info["nstep"].tolist() == [8.0] * 4
    assert info["abs_trace"].shape == (4, 1)
    u = program.inject(x)
    z = stored_graph(lambda z: torch.tanh(program.layer(z) + u), torch.zeros_like(u), max_steps=4)
    residual = (torch.tanh(program.layer(z) + u) - z).norm(dim=1)
    torch.testing.assert_close(info["abs_lowest"], residual)


def test_it_solves_what_torchdeq_solves():
    x = torch.randn(4, 3)
    theirs, _ = Program(core="sliced", f_solver="anderson", f_max_iter=60, f_tol=1e-6)(x)
    ours, info = Program(core="reversible", f_max_iter=200, f_tol=1e-6)(x)
    torch.testing.assert_close(ours[-1], theirs[-1], rtol=1e-4, atol=1e-4)
    assert info["nstep"][0] < 200


@pytest.mark.parametrize("container", [tuple, list])
def test_states_of_several_tensors(container):
    torch.manual_seed(0)
    layer = nn.Linear(5, 5)

    def f(a, b):
        return torch.tanh(layer(a) + b), [0.5 * b + a.sum(1, keepdim=True)][0]

    deq = torchdeq.get_deq(core="reversible", f_max_iter=8)
    z_out, info = deq(f, container([torch.zeros(4, 5), torch.zeros(4, 1)]))
    classical, _ = torchdeq.get_deq(core="sliced", f_max_iter=8)(f, container([torch.zeros(4, 5), torch.zeros(4, 1)]))
    assert type(z_out[-1]) is type(classical[-1])
    assert [z.shape for z in z_out[-1]] == [z.shape for z in classical[-1]]
    assert info["rel_lowest"].shape == (4,)
    sum(z.sum() for z in z_out[-1]).backward()
    assert layer.weight.grad is not None


def test_evaluation_and_settings_of_one_call():
    program, x = Program(core="reversible", f_max_iter=8, eval_factor=2), torch.randn(4, 3)
    assert program(x)[1]["nstep"][0] == 8
    program.eval()
    assert program(x)[1]["nstep"][0] == 16
    f, z0 = (lambda z: 0.5 * z + 1), torch.zeros(4, 2)
    assert program.deq(f, z0, solver_kwargs={"f_max_iter": 4})[1]["nstep"][0] == 4
    assert program.deq(f, z0, solver_kwargs={"f_max_iter": 400, "tol": 1e-2})[1]["nstep"][0] < 400
    program.deq.no_stat = True
    assert program.deq(f, z0)[1]["nstep"].tolist() == [16]
    radius = program.deq(lambda z: 0.5 * z + 1, z0, sradius_mode=True)[1]["sradius"]
    torch.testing.assert_close(radius.flatten()[0], torch.tensor(0.5), rtol=1e-3, atol=0)
    of_two = program.deq(lambda a, b: (0.5 * a + 1, 0.25 * b), (z0, z0), sradius_mode=True)[1]["sradius"]
    torch.testing.assert_close(of_two.flatten()[0], torch.tensor(0.5), rtol=1e-3, atol=0)


# Settings of a program


def test_unknown_arguments_of_a_program_are_ignored(caplog):
    names = {
        "lr": 0.1, "seed": 1, "max_train_iters": 60, "eval_interval": 5000, "max_step": 150000, "eval_n_layer": 24,
        "eta": 0.0, "betas": (0.9, 0.999), "max_iter": 3, "tol": 1.0, "num_cores": 8, "check": True, "state": "train",
    }  # fmt: skip
    with caplog.at_level(logging.INFO):
        deq = torchdeq.get_deq(namespace("--f_max_iter", "6", **names))
    assert settings_of(deq) == {"max_steps": 3, "tol": 1e-3, **revdeq.torchdeq.SETTINGS}
    assert [r.levelname for r in caplog.records] == ["INFO"]  # state and check, whose values are not valid here
    caplog.clear()
    with caplog.at_level(logging.INFO):
        torchdeq.get_deq(namespace("--f_solver", "anderson", "--ift", "--tau", "0.5", "--gamma", "0.7"))
    (line,) = caplog.messages
    assert line.endswith("does not use f_solver = 'anderson', ift = True, tau = 0.5")


def test_keywords_by_name_are_checked_for_their_spelling(caplog):
    for name, meant in (("f_maxiter", "f_max_iter"), ("max_iter", "f_max_iter"), ("betas", "beta"), ("staet", "state")):
        with pytest.raises(TypeError, match=f"unknown keyword {name} = 4: did you mean {meant}"):
            torchdeq.get_deq(core="reversible", **{name: 4})
        with pytest.raises(TypeError, match=f"did you mean {meant}"):
            torchdeq.get_deq(namespace(), **{name: 4})
        with pytest.raises(TypeError, match=f"did you mean {meant}"):
            revdeq.torchdeq.DEQReversible(namespace(), **{name: 4})
    with caplog.at_level(logging.INFO):
        torchdeq.get_deq(core="reversible", hidden=4)
    assert "does not use hidden = 4" in caplog.text
    with pytest.raises(ValueError, match="beta = 1 must not be 1"):
        torchdeq.get_deq(core="reversible", beta=1)


def test_settings_of_the_solver_by_name_and_from_a_command_line():
    assert settings_of(torchdeq.get_deq(core="reversible", state="exact", check="raise"))["state"] == "exact"
    by_flags = settings_of(
        torchdeq.get_deq(namespace("--rev_state", "exact", "--rev_beta", "0.8", "--rev_check", "None"))
    )
    assert (by_flags["state"], by_flags["beta"], by_flags["check"]) == ("exact", 0.8, None)
    plain = settings_of(torchdeq.get_deq(argparse.Namespace(core="reversible", state="exact", beta=0.75)))
    assert (plain["state"], plain["beta"]) == ("exact", 0.75)
    both = settings_of(torchdeq.get_deq(namespace("--rev_beta", "0.8", beta=0.75)))
    assert both["beta"] == 0.8
    assert settings_of(torchdeq.get_deq(namespace("--rev_beta", "0.8"), beta=0.9))["beta"] == 0.9
    with pytest.raises(ValueError, match="state = 'exat' must be"):
        torchdeq.get_deq(namespace("--rev_state", "exat"))
    with pytest.raises(ValueError, match="check = 'yes' must be"):
        torchdeq.get_deq(core="reversible", check="yes")


def test_every_option_of_the_solver_can_be_given():
    program, x = Program(namespace("--f_max_iter", "8", "--f_tol", "0")), torch.randn(4, 3)
    given = {**revdeq.torchdeq.SETTINGS, "beta": 0.75, "gamma": 0.8, "state": "exact", "check": "raise", "keep": 3}
    given["backward_steps"] = 2
    assert given.keys() == revdeq.torchdeq.SETTINGS.keys()
    for name, value in given.items():
        flags = [] if value is None else [f"--rev_{name}", str(value)]
        assert settings_of(torchdeq.get_deq(namespace(*flags)))[name] == value
        assert settings_of(torchdeq.get_deq(core="reversible", **{name: value}))[name] == value
        assert program(x, solver_kwargs={name: value})[1]["nstep"][0] == 8


def test_the_implicit_gradient_is_torchdeqs():
    ours = Program(core="reversible", f_max_iter=200, f_tol=1e-6, gradient="implicit")
    theirs, x = Program(ift=True, f_max_iter=200, b_max_iter=200, f_tol=1e-6, b_tol=1e-6), torch.randn(4, 3)
    gradients = [torch.autograd.grad(program(x)[0][-1].sum(), list(program.parameters())) for program in (ours, theirs)]
    for g, e in zip(*gradients, strict=True):
        assert (g - e).norm() <= 1e-4 * e.norm()


def test_gamma_in_a_namespace_is_torchdeqs_and_by_name_ours():
    assert settings_of(torchdeq.get_deq(namespace("--gamma", "0.7")))["gamma"] == 1.0
    assert settings_of(torchdeq.get_deq(namespace("--gamma", "0.7", "--rev_gamma", "0.2")))["gamma"] == 0.2
    assert settings_of(torchdeq.get_deq(core="reversible", gamma=0.3))["gamma"] == 0.3


def test_the_exact_state_is_that_of_the_solver():
    program, x = Program(core="reversible", f_max_iter=40, beta=0.8, state="exact", check="raise"), torch.randn(4, 3)
    (out,), _ = program(x)
    u = program.inject(x)
    f = lambda z: torch.tanh(program.layer(z) + u)  # noqa: E731
    expected = program.head(revdeq.solve(f, torch.zeros_like(u), beta=0.8, max_steps=20, state="exact").z)
    assert torch.equal(out, expected)
    out.sum().backward()


def test_settings_of_one_call():
    deq, z0 = torchdeq.get_deq(core="reversible", f_max_iter=4, beta=0.75), torch.zeros(2, 2)
    plain = deq(torch.cos, z0)[0][-1]
    anderson = {"m": 5, "lam": 1e-3, "tau": 0.5, "beta": 1.0}
    assert torch.equal(deq(torch.cos, z0, anderson, writer=None, backward_writer=print)[0][-1], plain)
    relaxed = deq(torch.cos, z0, solver_kwargs={"beta": 0.5})[0][-1]
    assert torch.equal(relaxed, revdeq.solve(torch.cos, z0, beta=0.5, max_steps=2).z)
    with pytest.raises(TypeError, match="z_init = 3 must be a tensor"):
        deq(torch.cos, 3)
    for name, meant in (("betta", "beta"), ("max_iter", "f_max_iter"), ("f_tol", "tol"), ("max_steps", "f_max_iter")):
        with pytest.raises(
            TypeError, match=f"unknown keyword {name} = 4: (did you mean|in solver_kwargs it is called) {meant}"
        ):
            deq(torch.cos, z0, solver_kwargs={name: 4})


def test_the_numbers_of_evaluations(caplog):
    revdeq.torchdeq._say_it_is_rounded.cache_clear()
    z0 = torch.zeros(2, 2, requires_grad=True)
    deq = torchdeq.get_deq(core="reversible", f_max_iter=7)
    for _ in range(3):
        assert deq(torch.cos, z0)[1]["nstep"][0] == 8
    deq.eval()(torch.cos, z0)
    assert caplog.messages == ["f_max_iter = 7 is rounded up to 8: a reversible step evaluates f twice"]
    deq.train()

    z_out, info = deq(torch.cos, z0, solver_kwargs={"f_max_iter": 0})
    assert z_out == [z0]
    assert info["nstep"].tolist() == [0, 0]
    (gradient,) = torch.autograd.grad(z_out[-1].sum(), z0)
    assert torch.equal(gradient, torch.ones(2, 2))

    # What torchdeq does then in training: the evaluations of its approximate gradient, which are real ones here.
    deq = torchdeq.get_deq(core="reversible", f_max_iter=20, grad=[3])
    assert deq(torch.cos, z0, solver_kwargs={"f_max_iter": 0})[1]["nstep"][0] == 4
    assert deq.eval()(torch.cos, z0, solver_kwargs={"f_max_iter": 0})[1]["nstep"][0] == 0

    for no_tolerance in (None, 0, 0.0):
        assert (
            torchdeq.get_deq(core="reversible", f_max_iter=60, f_tol=no_tolerance)(torch.cos, z0)[1]["nstep"][0] == 60
        )


@pytest.mark.parametrize(
    ("setting", "error", "message"),
    [
        ({"f_max_iter": -1}, ValueError, "f_max_iter = -1 .*at least 0"),
        ({"f_max_iter": 2.5}, ValueError, "f_max_iter = 2.5 .*integer"),
        ({"f_tol": -1}, ValueError, "f_tol = -1 .*0 or None"),
        ({"max_steps": 4}, TypeError, "max_steps = 4: .*f_max_iter"),
        ({"tol": 0.1}, TypeError, "tol = 0.1: .*f_tol"),
    ],
)
def test_bad_settings_by_torchdeqs_names(setting, error, message):
    with pytest.raises(error, match=message):
        torchdeq.get_deq(core="reversible", **setting)


@pytest.mark.parametrize(
    ("func", "z_init", "error", "message"),
    [
        (torch.cos, torch.zeros(2).long(), TypeError, r"z_init .*int64.*z_init.float\(\)"),
        (lambda a, b: a, (torch.zeros(2, 2),) * 2, TypeError, "func .*z_init has 2 parts"),
        (lambda z: z[:1], torch.zeros(2), ValueError, r"func's output .*\(1,\).*z_init, \(2,\)"),
        (lambda z: z + torch.nan, torch.zeros(2), FloatingPointError, "step 1 of at most 4.*func .*beta"),
    ],
)
def test_bad_states_by_torchdeqs_names(func, z_init, error, message):
    with pytest.raises(error, match=message):
        torchdeq.get_deq(core="reversible", f_max_iter=8, f_tol=1e-3)(func, z_init)


def test_torchdeq_itself_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdeq", None)
    with pytest.raises(ModuleNotFoundError, match="pip install torchdeq"):
        importlib.reload(revdeq.torchdeq)


def test_help_is_about_this_core():
    text = pydoc.plain(pydoc.render_doc(torchdeq.get_deq(core="reversible").forward))
    assert "by the reversible iteration" in text
    assert "overridden" not in text


# Intermediate states


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ({"n_states": 3}, (2, 2, 2)),
        ({"n_states": 5}, (2, 1, 1, 1, 1)),
        ({"indexing": [4, 10]}, (2, 3, 1)),
        ({"indexing": [3]}, (2, 4)),
        ({"grad": 6, "sup_gap": 2}, (4, 1, 1)),
        ({"grad": [4], "sup_loc": [2]}, (5, 1)),
        ({"n_states": 2, "grad": [2, 4], "sup_gap": 2}, (3, 2, 1)),
    ],
)
def test_intermediate_states_have_exact_gradients(asked, steps):
    program, x = Program(core="reversible", f_max_iter=12, check="raise", **asked), torch.randn(4, 3)
    outs, info = program(x)
    expected = program.unrolled(x, *steps)
    assert all(torch.equal(o, e) for o, e in zip(outs, expected, strict=True))
    assert info["nstep"][0] == 12
    weights = [0.8**k for k in range(len(steps))]
    ours = sum(w * o.square().sum() for w, o in zip(weights, outs, strict=True))
    theirs = sum(w * o.square().sum() for w, o in zip(weights, expected, strict=True))
    assert_equal_gradients(program, ours, theirs)
    assert len(program.eval()(x)[0]) == 1


@pytest.mark.parametrize(
    "asked",
    [
        {"n_states": 6}, {"n_states": 5}, {"n_states": 100}, {"indexing": [3, 8]}, {"grad": 5, "sup_gap": 2},
        {"grad": 5, "sup_loc": [1, 3]}, {"grad": [5], "sup_loc": [5]}, {"n_states": 2, "grad": [1, 3], "sup_gap": 1},
    ],
)  # fmt: skip
def test_as_many_states_as_torchdeq_gives(asked):
    x = torch.randn(4, 3)
    theirs, _ = Program(core="indexing", f_max_iter=12, f_tol=0.0, **asked)(x)
    ours, _ = Program(core="reversible", f_max_iter=12, **asked)(x)
    assert len(ours) == len(theirs)


def test_intermediate_states_after_the_tolerance_is_reached():
    program, x = Program(core="reversible", f_max_iter=400, f_tol=1e-3, n_states=4), torch.randn(4, 3)
    outs, info = program(x)
    assert len(outs) == 4
    assert info["nstep"][0] < 100
    assert torch.equal(outs[0], outs[3])
    assert torch.equal(outs[0], Program(core="reversible", f_max_iter=100, f_tol=1e-3)(x)[0][-1])


def test_intermediate_states_share_one_random_draw():
    masks = set()

    def f(z):
        mask = torch.rand(3)
        masks.add(tuple(mask.tolist()))
        return 0.5 * z + mask

    deq = torchdeq.get_deq(core="reversible", f_max_iter=8, n_states=2, no_stat=True)
    deq(f, torch.zeros(2, 3))
    assert len(masks) == 1


# What torchdeq does to the modules that f calls


@pytest.mark.parametrize("norm_type", ["weight_norm", "spectral_norm"])
def test_several_forward_passes_before_one_backward_pass(norm_type):
    torch.manual_seed(0)
    deq, x = torchdeq.get_deq(core="reversible", f_max_iter=8, check="raise"), torch.randn(2, 3, 6)
    decoder = Decoder(argparse.Namespace(norm_type=norm_type), 6)
    decoder.drop.dropout = 0.5

    def loss(x):
        torchdeq.reset_deq(decoder)
        return deq(lambda z: decoder(z, x), torch.zeros_like(x))[0][-1].square().sum()

    def after(seed, losses):
        torch.manual_seed(seed)
        decoder.load_state_dict(start)  # spectral_norm updates its vectors
        return torch.autograd.grad(sum(losses()), list(decoder.parameters()), allow_unused=True)

    start = {name: value.clone() for name, value in decoder.state_dict().items()}
    both = after(1, lambda: [loss(x), loss(2 * x)])
    weight, mask = decoder.mix.weight, decoder.drop.mask
    first = after(1, lambda: [loss(x)])

    def second():
        loss(x)
        yield loss(2 * x)

    for b, f, s in zip(both, first, after(1, second), strict=True):
        assert (b - f - s).norm() <= 1e-5 * b.norm()
    assert weight is not decoder.mix.weight and mask is not decoder.drop.mask


def test_a_hook_inside_f_is_refused_and_its_alternative_is_right():
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)

    def gradient(inner, outer):
        def f(z):
            w, _ = inner(lambda v: 0.3 * torch.tanh(layer(v) + z), torch.zeros(3, 4))
            return torch.tanh(w[-1] + x)

        return torch.autograd.grad(outer(f, torch.zeros(3, 4))[0][-1].sum(), list(layer.parameters()))

    outer = torchdeq.get_deq(core="reversible", f_max_iter=12)
    with pytest.raises(RuntimeError, match="func contains a core of torchdeq's with hook_ift=True"):
        gradient(torchdeq.get_deq(hook_ift=True), outer)
    converged = {"f_max_iter": 60, "b_max_iter": 60, "f_tol": 1e-7, "b_tol": 1e-7}
    ours = gradient(torchdeq.get_deq(ift=True, **converged), outer)
    theirs = gradient(torchdeq.get_deq(core="reversible", f_max_iter=40), outer)
    for g, e in zip(ours, theirs, strict=True):
        assert (g - e).norm() <= 1e-4 * e.norm()


# Programs of torchdeq's zoo that need a GPU or data of gigabytes: what they call, with their arguments


class Decoder(nn.Module):
    def __init__(self, args, width):
        super().__init__()
        self.mix, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = VariationalDropout1d(dropout=0.05)
        apply_norm(self, args=args)

    def forward(self, z, u):
        return torch.tanh(self.out(self.drop(F.relu(self.mix(z) + u))))


class LanguageModel(nn.Module):
    """deq-lm and deq-seq, whose models differ in what they read from `info` and in the loss of the Jacobian."""

    def __init__(self, args, tokens=11, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.args = args
        self.embed, self.inject, self.func = nn.Embedding(tokens, width), nn.Linear(width, width), Decoder(args, width)
        self.deq = torchdeq.get_deq(args)
        self.drop = VariationalDropout1d(dropout=0.05)
        self.head = nn.Linear(width, tokens)

    def forward(self, data, target, writer=None):
        torchdeq.reset_deq(self)
        u = self.inject(self.embed(data))

        def deq_func(z):
            return self.func(z, u)

        z_out, info = self.deq(deq_func, torch.zeros_like(u), sradius_mode=False, backward_writer=writer)
        with torch.no_grad():
            final = solver_stat_from_final_step(z_out[-1], deq_func(z_out[-1]), self.args.grad[-1])
        jac_loss = jac_reg(deq_func(z_out[-1]), z_out[-1]) if self.training else 0.0
        logits = [self.head(self.drop(z)).flatten(0, 1) for z in z_out]
        loss = fp_correction(F.cross_entropy, (logits, target.flatten()), gamma=self.args.gamma)
        return loss + self.args.jac_loss_weight * jac_loss, info, final


LANGUAGE = {
    "data": "data/wikitext-103/", "dataset": "wt103", "adaptive": True, "div_val": 4, "n_layer": 3, "d_embed": 700,
    "d_model": 700, "n_head": 10, "d_head": 70, "d_inner": 14800, "dropout": 0.05, "dropatt": 0.0, "optim": "Adam",
    "lr": 0.00025, "warmup_step": 8000, "eval_interval": 5000, "max_step": 150000, "tgt_len": 150, "mem_len": 150,
    "eval_tgt_len": 150, "mem": True, "global_batch_size": 56, "eval_n_layer": 24, "multi_gpu": True, "gpu0_bsz": 14,
    "batch_size": 56, "max_eval_steps": -1, "start_train_steps": 0, "eta_min": 0.0, "clip": 0.25, "scheduler": "cosine",
}  # fmt: skip
LM = "--norm_type weight_norm --f_solver fixed_point_iter --f_stop_mode rel --f_tol 1e-3 --f_max_iter 0 --grad 12 " \
     "--eval_f_max_iter 12"  # fmt: skip
SEQUENCE = "--norm_type weight_norm --ift --f_solver broyden --b_solver broyden --f_stop_mode rel --b_stop_mode rel " \
           "--f_tol 1e-3 --b_tol 1e-3 --f_max_iter 35 --b_max_iter 35 --jac_loss_weight 0.1 --jac_loss_freq 0.4 " \
           "--jac_incremental 30000"  # fmt: skip


@pytest.mark.parametrize(("flags", "evaluations", "in_evaluation"), [(LM, 12, 12), (SEQUENCE, 36, 36)])
def test_language_models(flags, evaluations, in_evaluation):
    model = LanguageModel(namespace(*flags.split(), **LANGUAGE))
    data, target = torch.randint(11, (2, 7)), torch.randint(11, (2, 7))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    losses = []
    for _ in range(15):
        loss, info, final = model(data, target, writer=print)
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert 2 <= info["nstep"][0] <= evaluations
    assert final["rel_lowest"].mean() < 0.1
    with torch.no_grad():
        assert model.eval()(data, target)[1]["nstep"][0] <= in_evaluation


class Flow(nn.Module):
    """deq-flow: a hidden state and coordinates, whose gradient stops at each update unless it is asked for."""

    def __init__(self, args):
        super().__init__()
        torch.manual_seed(0)
        self.args = args
        self.inject, self.mask = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.update_block = nn.ModuleDict({"h": nn.Conv2d(10, 4, 3, padding=1), "flow": nn.Conv2d(4, 2, 3, padding=1)})
        apply_norm(self.update_block, args=args)
        self.deq = torchdeq.get_deq(args)

    def forward(self, image, flow=None, fc_loss=None, writer=None, sradius_mode=False, **kwargs):
        inp = torch.relu(self.inject(image))
        rows, columns = torch.meshgrid(*(torch.arange(float(n)) for n in image.shape[2:]), indexing="ij")
        coords0 = torch.stack([columns, rows]).expand(len(image), -1, -1, -1)
        reset_norm(self.update_block)

        def func(h, c):
            if not self.args.all_grad:
                c = c.detach()
            with torch.autocast("cpu", enabled=self.args.mixed_precision):
                new_h = torch.tanh(self.update_block["h"](torch.cat([h, inp, c - coords0], 1)))
                delta = 0.3 * (torch.tanh(self.update_block["flow"](new_h)) - 0.1 * (c - coords0))
            return new_h, c + delta

        z_out, info = self.deq(
            func, (torch.zeros_like(inp), coords0), sradius_mode=sradius_mode, backward_writer=writer, **kwargs
        )
        predictions = [c - coords0 + self.mask(h) for h, c in z_out]
        return (fc_loss(predictions, flow), info) if self.training else (predictions[-1], z_out[-1], info)


FLOW = {
    "total_run": 1, "start_run": 1, "name": "deq-flow-B-C-36-6-1", "stage": "chairs", "validation": ["chairs", "kitti"],
    "gpus": [0, 1], "num_steps": 120000, "eval_interval": 20000, "batch_size": 12, "lr": 0.0004, "wdecay": 0.0001,
    "image_size": [368, 496], "mixed_precision": False, "epsilon": 1e-8, "clip": 1.0, "dropout": 0.0, "corr_radius": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "all_grad", "states"),
    [("--f_max_iter 36 --n_states 6", False, 6), ("--f_max_iter 40 --n_states 2 --grad 3", True, 2)],
)
def test_optical_flow(flags, all_grad, states):
    args = namespace("--f_solver", "simple_fixed_point_iter", *flags.split(), **FLOW, all_grad=all_grad)
    model, image, flow = Flow(args), torch.randn(2, 3, 5, 6), torch.randn(2, 2, 5, 6)
    seen = []

    def loss(predictions, truth, gamma):
        seen.append(len(predictions))
        return fp_correction(lambda p, t: (p - t).abs().mean(), (predictions, truth), gamma=gamma)

    total, _ = model(image, flow, functools.partial(loss, gamma=args.gamma), writer=functools.partial(print, "writer"))
    total.backward()
    assert seen == [states]
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad():
        prediction, (hidden, coordinates), info = model.eval()(image, sradius_mode=True)
    assert prediction.shape == flow.shape
    assert hidden.shape[1] == 4 and coordinates.shape[1] == 2
    assert info["sradius"].numel() == 2


def test_diffusion_inverted():
    """deq-ddim: all states of a trajectory at once, written in place, and the parameters of Anderson's solver."""
    program = {
        "config": "cifar10_ls_opt.yml", "model": "DiffusionInversion", "exp": "cifar10-orig-exp", "doc": "doc",
        "ls_opt": True, "timesteps": 1000, "ni": True, "method": "default", "lambda1": 1, "lambda2": 0, "lambda3": 0,
        "use_wandb": True, "no_augmentation": True, "use_pretrained": True, "skip_type": "quad", "seed": 1, "eta": 0.0,
        "sequence": False, "verbose": "info", "sample_type": "generalized", "image_folder": "images", "test": False,
    }  # fmt: skip
    deq = torchdeq.get_deq(namespace("--f_solver", "anderson", "--f_max_iter", "15", "--tau", "0.1", **program))
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 3, 3, padding=1), torch.randn(5, 3, 4, 4, requires_grad=True)

    def func(xt):
        change = (0.1 * torch.tanh(model(xt[:-1]))).cumsum(0)
        everything = torch.zeros_like(xt)
        everything[[0]] = x[:1]
        everything[[1, 2, 3, 4]] = x[:1] + change
        return everything

    x_pred, info = deq(func, x, solver_kwargs={"m": 5, "lam": 1e-3, "beta": 1.0})
    assert info["nstep"][0] <= 16
    x_pred[-1][-1].square().mean().backward()
    assert x.grad is not None and model.weight.grad is not None


def test_statistics_leave_the_fixed_point_and_the_random_draw_alone():
    torch.manual_seed(0)
    linear, dropout, x = nn.Linear(5, 5), nn.Dropout(0.3), torch.randn(3, 5)
    deq = torchdeq.get_deq(core="reversible", f_max_iter=60, beta=0.8).train()

    def solved(func):
        torch.manual_seed(1)
        (z,), info = deq(func, torch.zeros(3, 5))
        return z, info, torch.get_rng_state()

    z, info, after = solved(lambda z: torch.tanh(dropout(0.3 * linear(z)) + x))
    torch.manual_seed(1)
    solution = revdeq.solve(
        lambda z: torch.tanh(dropout(0.3 * linear(z)) + x), torch.zeros(3, 5), max_steps=30, beta=0.8
    )
    assert torch.equal(z, solution.z) and torch.equal(after, torch.get_rng_state())
    assert info["rel_lowest"].max() < 1e-5, "f was evaluated with the mask of the solve"
    in_place, apart = solved(lambda z: torch.tanh(z.mul_(0.5) + x)), solved(lambda z: torch.tanh(0.5 * z + x))
    assert torch.equal(in_place[0], apart[0])
