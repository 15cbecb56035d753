"""The options of a solve and of a layer, and what is said about wrong ones."""

import copy
import io
import math
import pickle
import subprocess
import sys

import pytest
import torch
from plain import Block, float32

import revdeq

Z = torch.zeros(3)
WRONG = [
    *({"beta": beta} for beta in (1, 1 + 1e-9, 0, 2, 1e-60, math.nan, None, True)),
    *({"gamma": gamma} for gamma in (0, 3.5, "1")),
    *({"max_steps": n} for n in (0, 2.5, True)),
    *({"tol": tol} for tol in (0, math.nan, "1e-3")),
    *({"state": state} for state in ("auto", 24)),
    *({"keep": -1}, {"check": "ignore"}, {"gradient": "ift"}, {"aux": "sum"}, {"indexed": 0}, {"per_example": True}),
    *({"keep": 2, "gradient": "implicit"}, {"aux": True, "gradient": "implicit"}),
]


@pytest.mark.parametrize("keywords", WRONG, ids=str)
def test_a_wrong_value_is_named_with_what_would_be_right(keywords):
    name, value = next(iter(keywords.items()))
    with pytest.raises((TypeError, ValueError)) as told:
        revdeq.solve(torch.cos, torch.zeros(1), **keywords)
    assert f"{name} = {value!r} must" in str(told.value)
    with pytest.raises(type(told.value)):
        revdeq.RevDEQ(torch.cos, **keywords)


@pytest.mark.parametrize("function", [revdeq.solve, revdeq.steps, revdeq.verify, revdeq.tune, revdeq.RevDEQ])
def test_an_unknown_keyword_is_an_error(function):
    with pytest.raises(TypeError, match="unknown keyword max_step = 3: there are beta, gamma, max_steps"):
        function(torch.cos, *([] if function is revdeq.RevDEQ else [Z]), max_step=3)


def test_true_is_no_number_of_steps_after_a_solve_with_1():
    revdeq.solve(torch.cos, Z, max_steps=1)
    with pytest.raises((TypeError, ValueError), match="max_steps = True"):
        revdeq.solve(torch.cos, Z, max_steps=True)


def start(z0):
    return lambda: revdeq.solve(lambda z: z, z0)


CALLS = {
    "no state": (start(()), "z0 = .*tensor"),
    "a number in a state": (start((Z, 0.0)), "z0 = .*tensor"),
    "integers in a state": (start({"h": [Z, Z.long()]}), "z0.*int64"),
    "complex numbers": (start(Z + 0j), "z0.*complex64"),
    "a sparse state": (start(torch.eye(3).to_sparse()), "z0.*sparse"),
    "two devices": (start([Z, Z.to("meta")]), "z0.*meta.*one device"),
    "a solution": (lambda: start(revdeq.solve(torch.cos, Z))(), "z0 = .*tensor"),
    "no function": (lambda: revdeq.solve(3, Z), "f = 3 must be callable"),
    "a layer of none": (lambda: revdeq.RevDEQ(None), "f = None must be callable"),
    "a class": (lambda: revdeq.RevDEQ(Block), "class Block.*instance"),
    "no x": (lambda: revdeq.RevDEQ(torch.cos)(None), "x .*NoneType.*z0"),
    "integers": (lambda: revdeq.RevDEQ(torch.cos)(torch.arange(3)), "x .*int64.*z0"),
    "an option of a call": (lambda: revdeq.RevDEQ(Block())(torch.zeros(2, 6), tol=1e-3), "tol"),
    "y0": (lambda: revdeq.solve(torch.cos, Z, y0=Z[:2]), "y0 must have the structure, shapes"),
    "another structure": (lambda: revdeq.solve(lambda z: z[0], (Z, Z)), "f must return the structure of z0"),
    "an error of f": (lambda: revdeq.solve(lambda z: (_ for _ in ()).throw(TypeError("f's")), Z), "^f's$"),
}


@pytest.mark.parametrize("what", CALLS)
def test_common_mistakes_are_named(what):
    call, text = CALLS[what]
    with pytest.raises((TypeError, ValueError), match=f"(?s){text}"):
        call()


# the coefficients, as they are used


@pytest.mark.parametrize(("beta", "gamma"), [(0.53, 1.0), (0.8, 0.7), (1.2, 1.9)])
def test_float64_takes_the_beta_that_was_given_rounded_to_float32(beta, gamma):
    """The weights of f's output and of the other state are float32, so that products with float32 numbers are exact."""
    solution = revdeq.solve(torch.cos, Z, beta=beta, gamma=gamma)
    assert solution.state == "float64"
    b, c = float32(beta * gamma), float32(beta * (1 - gamma))
    assert (solution.beta, solution.gamma) == (b + c, b / (b + c))
    assert abs(solution.beta - beta) < 1e-7 and abs(solution.gamma - gamma) < 1e-6


@pytest.mark.parametrize("tol", [None, 0.3, 1e-9])
def test_converged_says_whether_the_tolerance_was_reached(tol):
    deq = revdeq.RevDEQ(Block(), max_steps=4, tol=tol)
    x = torch.ones(2, 6)
    solution = revdeq.solve(deq.f, torch.zeros_like(x), x, max_steps=4, tol=tol)
    deq(x)
    assert solution.converged is deq.last.converged is {None: None, 0.3: True, 1e-9: False}[tol]
    assert (solution.steps < 4) == bool(solution.converged) and deq.last.steps == solution.steps


# layers


def test_a_layers_options_are_plain_attributes_that_may_change_between_calls():
    deq, x = revdeq.RevDEQ(Block(), beta=0.8, max_steps=4), torch.randn(3, 6)
    expected = {"beta": 0.8, "gamma": 1.0, "max_steps": 4, "tol": None, "state": "float64", "keep": 0}
    assert expected.items() <= vars(deq).items() and "__getattr__" not in vars(revdeq.RevDEQ)
    deq(x)
    assert deq.last.steps == 4
    deq.max_steps, deq.gamma = 6, 0.9
    assert torch.equal(deq(x), revdeq.solve(deq.f, torch.zeros(3, 6), x, beta=0.8, gamma=0.9, max_steps=6).z)
    z = revdeq.solve(deq.f, torch.zeros(3, 6), x, beta=0.8, gamma=0.9, max_steps=5).z
    assert torch.equal(deq(x, max_steps=5), z)
    assert deq.last.steps == 5 and deq.max_steps == 6
    assert repr(deq).startswith("RevDEQ(\n  beta=0.8, gamma=0.9, max_steps=6\n")
    deq.max_steps = 0
    with pytest.raises(ValueError, match="max_steps = 0 must be"):
        deq(x)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda deq: pickle.loads(pickle.dumps(deq))], ids=["copy", "pickle"])
def test_layers_are_copied_and_pickled_after_a_call(copied):
    deq, x = revdeq.RevDEQ(Block(), beta=0.7, tol=1e-4), torch.randn(3, 6)
    expected = deq(x)
    other = copied(deq)
    assert torch.equal(other(x), expected) and other.f is not deq.f


def saved_and_loaded(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("state", ["float64", "exact", revdeq.Exact(17)], ids=str)
def test_a_layer_saves_and_loads_its_coefficients_and_its_state(state):
    deq, other, x = revdeq.RevDEQ(Block()), revdeq.RevDEQ(Block()), torch.randn(3, 6)
    untouched = saved_and_loaded(deq.state_dict())
    deq.use(0.75, 1.25, state)
    other.load_state_dict(saved_and_loaded(deq.state_dict()))
    assert (other.beta, other.gamma, other.state) == (0.75, 1.25, state)
    assert torch.equal(other(x), deq(x))
    other.load_state_dict(untouched)
    assert (other.beta, other.gamma) == (0.75, 1.25), "a state in which nothing was found leaves them alone"


def test_a_bad_pair_is_not_used():
    deq = revdeq.RevDEQ(Block())
    with pytest.raises(ValueError, match="beta = 1 must"):
        deq.use(1, 1.0, "float64")
    assert (deq.beta, deq.gamma, deq.state) == (0.5, 1.0, "float64")


IMPORTS = """
import sys, torch
before = set(sys.modules)
import revdeq
from torch import nn
f = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
revdeq.solve(f, torch.ones(3, 4), check=None).z.sum().backward()
revdeq.RevDEQ(lambda z, x: f(z) + x, tol=1e-2)(torch.ones(3, 4)).sum().backward()
print("torch._dynamo" in set(sys.modules) - before)
"""


def test_a_solve_imports_no_compiler():
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
