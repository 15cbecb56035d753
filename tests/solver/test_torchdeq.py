"""Programs written for torchdeq, with the core changed."""

import argparse
import math

import pytest
import torch
from plain import agree
from torch import nn

torchdeq = pytest.importorskip("torchdeq", reason="torchdeq is not installed")


import revdeq.torchdeq  # noqa: E402
from revdeq.baselines import stored_graph  # noqa: E402

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


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

    def stored(self, x, steps):
        """The state after so many steps, with the graph stored."""
        u = self.inject(x)
        return self.head(stored_graph(lambda z: torch.tanh(self.layer(z) + u), torch.zeros_like(u), max_steps=steps))


def compare(ours, theirs, tolerance=1e-6):
    """Gradients of pairs of a loss and its model."""
    agree(*(torch.autograd.grad(loss, list(model.parameters())) for loss, model in (ours, theirs)), tolerance=tolerance)


def namespace(*flags, **program):
    """The parsed command line of a program: its own settings, and torchdeq's."""
    parser = argparse.ArgumentParser()
    torchdeq.utils.add_deq_args(parser)
    args = parser.parse_args(["--core", "reversible", *flags])
    vars(args).update(program)
    return args


def test_a_program_runs_unchanged_with_the_exact_gradient():
    program = Program(core="reversible", f_max_iter=8, beta=0.5)
    (out,), info = program(X)
    expected = program.stored(X, 4)
    assert torch.equal(out, expected)
    compare((out.sum(), program), (expected.sum(), program))
    assert info["nstep"].tolist() == [8.0] * 4
    u = program.inject(X)
    z = stored_graph(lambda z: torch.tanh(program.layer(z) + u), torch.zeros_like(u), max_steps=4)
    torch.testing.assert_close(info["abs_lowest"], (torch.tanh(program.layer(z) + u) - z).norm(dim=1))


@pytest.mark.parametrize("container", [tuple, list])
def test_states_of_several_tensors(container):
    torch.manual_seed(0)
    layer, z0 = nn.Linear(5, 5), container([torch.zeros(4, 5), torch.zeros(4, 1)])

    def f(a, b):
        return container([torch.tanh(layer(a) + b), 0.1 * b + 0.1 * a.sum(1, keepdim=True)])

    z_out, info = torchdeq.get_deq(core="reversible", f_max_iter=80, state="exact")(f, z0)
    classical, _ = torchdeq.get_deq(core="sliced", f_max_iter=80)(f, z0)
    assert type(z_out[-1]) is type(classical[-1])
    for ours, theirs in zip(z_out[-1], classical[-1], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)
    assert info["rel_lowest"].shape == (4,)
    sum(z.sum() for z in z_out[-1]).backward()
    assert layer.weight.grad.norm() > 0


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"state": "exact", "check": "raise"}, {"state": "exact", "check": "raise"}),
        ({"args": namespace("--gamma", "0.7", beta=0.75)}, {"beta": 0.75}),  # gamma: the weight of earlier states
        ({"args": namespace(rev_beta=0.8, rev_gamma=0.6, rev_check=None, beta="adam")},
         {"beta": 0.8, "gamma": 0.6, "check": None}),
        ({"args": namespace(lr=0.1, dropout=0.1), "beta": 0.9, "keep": 2}, {"beta": 0.9, "keep": 2}),
        ({"core": "reversible", "f_solver": "anderson", "ift": True, "tau": 0.5}, {}),
    ],
)  # fmt: skip
def test_options_by_name_and_from_a_command_line(config, expected):
    program = Program(**{"core": "reversible", **config, "f_max_iter": 6, "f_tol": None})
    u = program.inject(X)
    z = revdeq.solve(lambda z: torch.tanh(program.layer(z) + u), torch.zeros_like(u), max_steps=3, **expected).z
    assert torch.equal(program(X)[0][-1], program.head(z))


def test_the_fixed_point_and_the_implicit_gradient_are_torchdeqs():
    ours = Program(core="reversible", f_max_iter=200, f_tol=1e-6, gradient="implicit")
    theirs = Program(ift=True, f_max_iter=200, b_max_iter=200, f_tol=1e-6, b_tol=1e-6)
    (z, info), (expected, _) = ours(X), theirs(X)
    torch.testing.assert_close(z[-1], expected[-1], rtol=1e-4, atol=1e-4)
    assert info["nstep"][0] < 200
    compare((z[-1].sum(), ours), (expected[-1].sum(), theirs), 1e-4)


# Intermediate states


@pytest.mark.parametrize(
    ("asked", "evaluations"),
    [({"n_states": 5}, (4, 6, 8, 10, 12)), ({"indexing": [3, 10]}, (3, 10, 12))],
)
def test_intermediate_states_have_exact_gradients(asked, evaluations):
    program = Program(core="reversible", f_max_iter=12, check="raise", **asked)
    outs, info = program(X)
    assert len(outs) == len(Program(core="indexing", f_max_iter=12, f_tol=0.0, **asked)(X)[0])
    expected = [program.stored(X, math.ceil(n / 2)) for n in evaluations]
    assert all(torch.equal(o, e) for o, e in zip(outs, expected, strict=True))
    assert info["nstep"][0] == 12
    ours, theirs = (sum(0.8**k * o.square().sum() for k, o in enumerate(each)) for each in (outs, expected))
    compare((ours, program), (theirs, program))
    assert len(program.eval()(X)[0]) == 1
