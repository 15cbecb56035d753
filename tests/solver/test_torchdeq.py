"""A program written for torchdeq, with the core changed."""

import argparse

import pytest
import torch
from torch import nn

torchdeq = pytest.importorskip("torchdeq", reason="torchdeq is not installed: pip install 'revdeq[torchdeq]'")

import revdeq.torchdeq  # noqa: E402, F401
from revdeq.baselines import stored_graph  # noqa: E402


class Program(nn.Module):
    """As in torchdeq's own examples: the core is given by the configuration."""

    def __init__(self, args=None, **kwargs):
        super().__init__()
        torch.manual_seed(0)
        self.inject, self.layer, self.head = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 2)
        self.deq = torchdeq.get_deq(args, **kwargs)

    def forward(self, x):
        u = self.inject(x)
        z_out, info = self.deq(lambda z: torch.tanh(self.layer(z) + u), torch.zeros_like(u))
        return [self.head(z) for z in z_out], info


def test_a_program_runs_unchanged_with_the_exact_gradient():
    program, x = Program(core="reversible", f_max_iter=8, beta=0.5), torch.randn(4, 3)
    (out,), info = program(x)
    u = program.inject(x)
    expected = program.head(stored_graph(lambda z: torch.tanh(program.layer(z) + u), torch.zeros_like(u), max_steps=4))
    assert torch.equal(out, expected)
    ours = torch.autograd.grad(out.sum(), list(program.parameters()))
    theirs = torch.autograd.grad(expected.sum(), list(program.parameters()))
    for g, e in zip(ours, theirs, strict=True):
        assert (g - e).norm() <= 1e-6 * e.norm()
    assert info["nstep"].tolist() == [8.0] * 4
    assert info["abs_trace"].shape == (4, 1)
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


def test_the_arguments_of_a_whole_program():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", default=0.1)
    torchdeq.utils.add_deq_args(parser)
    args = parser.parse_args(["--core", "reversible", "--f_max_iter", "6"])
    with pytest.warns(UserWarning, match="does not use lr: it takes core, beta"):
        program = Program(args)
    assert program.deq.tol == 1e-3
    args = parser.parse_args(["--core", "reversible", "--f_max_iter", "6", "--ift"])
    del args.lr
    with pytest.warns(UserWarning, match="ift = True means nothing to the core 'reversible'"):
        Program(args)


def test_keywords_are_never_ignored():
    with pytest.raises(TypeError, match="unknown keyword f_maxiter = 4: did you mean f_max_iter"):
        torchdeq.get_deq(core="reversible", f_maxiter=4)
    with pytest.raises(ValueError, match="n_states = 3: the core 'reversible' keeps no states"):
        torchdeq.get_deq(core="reversible", n_states=3)
    with pytest.raises(ValueError, match="f_max_iter = 7 must be even"):
        torchdeq.get_deq(core="reversible", f_max_iter=7)
    with pytest.raises(ValueError, match="beta = 1 must lie"):
        torchdeq.get_deq(core="reversible", beta=1)
    deq = torchdeq.get_deq(core="reversible", f_max_iter=4)
    with pytest.raises(TypeError, match="does not take lam"):
        deq(torch.cos, torch.zeros(2, 2), solver_kwargs={"lam": 1e-4})
    with pytest.warns(UserWarning, match="backward_writer is not called"):
        deq(torch.cos, torch.zeros(2, 2), backward_writer=print)
