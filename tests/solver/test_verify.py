"""revdeq.verify finds errors and names their cause."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import revdeq
from revdeq._solver.verify import bit_hash
from revdeq.models import ConvBlock, TransformerBlock

pytestmark = pytest.mark.usefixtures("on_device")


def test_verify_confirms_the_blocks_of_the_paper():
    torch.manual_seed(0)
    for f, x in ((ConvBlock(16), torch.randn(2, 16, 8, 8)), (TransformerBlock(32), torch.randn(2, 8, 32))):
        report = revdeq.verify(f, torch.zeros_like(x), x, beta=0.5, max_steps=8)
        assert report.exact
        assert str(report).startswith("exact: the backward pass gave f the same 16 inputs")


def test_verify_reports_rounding_and_where_it_began():
    torch.manual_seed(0)
    f, x = ConvBlock(16), torch.randn(2, 16, 8, 8)
    report = revdeq.verify(f, torch.zeros_like(x), x, beta=0.9, max_steps=12, state="float64")
    assert not report.exact
    assert not report.changed_output
    first = max(report.changed_input)
    assert f"the float64 state did not reconstruct the input of evaluation {first} " in str(report)
    assert "beta = 0.9, 12 steps" in str(report)


@pytest.mark.cpu
def test_verify_reports_a_nondeterministic_function_and_counts_elements():
    torch.manual_seed(0)
    linear, generator = nn.Linear(50, 50), torch.Generator().manual_seed(0)

    def noisy(z):
        noise = torch.zeros(4, 50)
        noise.view(-1)[:12] = torch.rand(12, generator=generator)
        return torch.tanh(linear(z)) + noise

    report = revdeq.verify(noisy, torch.randn(4, 50), max_steps=4)
    assert report.changed_output[8] == 12
    assert str(report).startswith("your f is not deterministic: evaluation 8 differs in 12 elements")
    assert "torch.use_deterministic_algorithms(True) replaces them" in str(report)


def test_dropout_is_deterministic_within_a_solve():
    linear = nn.Linear(20, 20)
    assert revdeq.verify(lambda z: F.dropout(torch.tanh(linear(z))), torch.randn(4, 20), max_steps=4).exact


def test_verify_takes_the_arguments_of_solve():
    def f(z, x):
        return {"a": 0.5 * z["a"].mul_(1.0) + x, "b": [0.5 * z["b"][0]]}

    z0 = {"a": torch.zeros(3), "b": [torch.zeros((), dtype=torch.bfloat16)]}
    report = revdeq.verify(f, z0, torch.ones(3, requires_grad=True), tol=1e-2, max_steps=20)
    assert report.exact
    assert 2 < report.evaluations < 40
    with torch.no_grad():
        assert revdeq.verify(torch.cos, torch.zeros(3)).exact
    with pytest.raises(TypeError, match="z0 is torch.int64"):
        revdeq.verify(torch.cos, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="gradient = 'implicit'.*gradient='exact'"):
        revdeq.verify(torch.cos, torch.zeros(3), gradient="implicit")


def test_the_hash_depends_on_every_bit_and_its_position():
    x = torch.randn(1000)
    assert bit_hash(x) == bit_hash(x.clone())
    assert bit_hash(x) == bit_hash(x.view(20, 50).t().contiguous().t())
    for changed in (x.flip(0), x.roll(1), torch.where(torch.arange(1000) == 77, torch.nextafter(x, x + 1), x), -x):
        assert bit_hash(changed) != bit_hash(x)
    assert bit_hash(torch.zeros(3)) != bit_hash(-torch.zeros(3))
    assert bit_hash((x, x + 1)) != bit_hash((x + 1, x))


def test_a_solution_is_refused_as_an_initial_state():
    solution = revdeq.solve(torch.cos, torch.zeros(3), max_steps=2)
    for function in (revdeq.verify, revdeq.tune):
        with pytest.raises(TypeError, match=r"z0 .*solution\.z"):
            function(torch.cos, solution, max_steps=2)
