"""Bad input gets an error that names the argument, the value and the remedy, before anything is lost."""

import pytest
import torch
from torch import nn

import revdeq


def f(z):
    return 0.5 * z


@pytest.mark.parametrize("beta", [0, -0.5, 1, 1.0, 2, 2.5, float("nan"), float("inf"), 1 + 1e-9, 1e-60, 10**400])
def test_beta(beta):
    with pytest.raises(ValueError, match=r"beta = .* must lie in \(0, 2\) and not be 1"):
        revdeq.solve(f, torch.zeros(3), beta=beta)
    with pytest.raises(ValueError, match="beta = "):
        revdeq.RevDEQ(f, beta=beta)


@pytest.mark.parametrize("beta", ["0.5", None, 1j, torch.zeros(2)])
def test_beta_is_a_number(beta):
    with pytest.raises(TypeError, match="beta = .* must be a number"):
        revdeq.solve(f, torch.zeros(3), beta=beta)


@pytest.mark.parametrize(
    ("max_steps", "error"), [(0, ValueError), (-3, ValueError), (2.5, TypeError), ("4", TypeError)]
)
def test_max_steps(max_steps, error):
    with pytest.raises(error, match="max_steps = .*at least 1"):
        revdeq.solve(f, torch.zeros(3), max_steps=max_steps)
    with pytest.raises(error, match="max_steps = "):
        revdeq.RevDEQ(f, max_steps=max_steps)


@pytest.mark.parametrize("tol", [0, -1e-3, float("nan"), float("inf"), 10**400])
def test_tol(tol):
    with pytest.raises(ValueError, match="tol = .* must be positive and finite, or None"):
        revdeq.solve(f, torch.zeros(3), tol=tol)


def test_tol_is_a_number():
    with pytest.raises(TypeError, match="tol = '1e-3' must be a number"):
        revdeq.solve(f, torch.zeros(3), tol="1e-3")


def test_unknown_keywords():
    with pytest.raises(TypeError, match="steps"):
        revdeq.solve(f, torch.zeros(3), steps=3)
    with pytest.raises(TypeError, match="betta"):
        revdeq.RevDEQ(f, betta=0.5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_the_state_is_real(dtype):
    with pytest.raises(TypeError, match=rf"z0 is {dtype}: it must be float32.*use (z0\.float\(\)|torch\.view_as_real)"):
        revdeq.solve(f, torch.zeros(3, dtype=dtype))


def test_the_state_is_made_of_tensors():
    with pytest.raises(TypeError, match=r"z0\['h'\]\[1\] is torch.int64"):
        revdeq.solve(f, {"h": [torch.zeros(1), torch.zeros(1).long()]})
    with pytest.raises(TypeError, match=r"z0\[1\] is a float: it must be a tensor"):
        revdeq.solve(f, (torch.zeros(1), 0.0))
    with pytest.raises(ValueError, match=r"z0 = \(\) has no tensor in it"):
        revdeq.solve(f, ())
    with pytest.raises(TypeError, match="z0 has layout torch.sparse_coo.*to_dense"):
        revdeq.solve(f, torch.eye(3).to_sparse())


def test_the_state_is_on_one_device():
    with pytest.raises(ValueError, match=r"z0\[1\] is on meta and the first tensor of z0 on cpu"):
        revdeq.solve(f, [torch.zeros(1), torch.zeros(1, device="meta")])


def test_the_state_is_somewhere():
    with pytest.raises(ValueError, match="z0 is on the meta device, where nothing is computed"):
        revdeq.solve(f, torch.zeros(3, device="meta"))
    with pytest.raises(TypeError, match="z0 is inside a transform of torch.func"):
        torch.func.vmap(lambda z: revdeq.solve(f, z).z)(torch.zeros(2, 3))
    with pytest.raises(TypeError, match="x is a NoneType: where it is not a tensor, pass z0"):
        revdeq.RevDEQ(f)(None)


def test_f_is_callable():
    with pytest.raises(TypeError, match="f = 3 must be callable"):
        revdeq.solve(3, torch.zeros(1))
    with pytest.raises(TypeError, match="f = None must be callable"):
        revdeq.RevDEQ(None)


@pytest.mark.parametrize("grad", [True, False])
def test_what_f_returns(grad):
    z0 = torch.zeros(3, requires_grad=grad)
    with pytest.raises(ValueError, match=r"f's output has shape \(2,\): it must be shaped like z0, \(3,\)"):
        revdeq.solve(lambda z: z[:2], z0)
    with pytest.raises(ValueError, match=r"f's output has shape \(1, 3\)"):
        revdeq.solve(lambda z: z[None], z0)
    with pytest.raises(TypeError, match=r"f returned \('Tensor', 'Tensor'\): it must have the structure of z0, Tensor"):
        revdeq.solve(lambda z: (z, z), z0)
    with pytest.raises(TypeError, match=r"f returned NoneType: it must have the structure of z0, Tensor"):
        revdeq.solve(lambda z: None, z0)
    with pytest.raises(TypeError, match=r"f returned \['Tensor'\]: it must have the structure of z0, \('Tensor',\)"):
        revdeq.solve(list, (z0,))
    with pytest.raises(TypeError, match=r"f's output \(leaf 1 of 2\) is a int: it must be a tensor of shape \(3,\)"):
        revdeq.solve(lambda z: (z[0], 3), (z0, z0))
    with pytest.raises(TypeError, match="f's output has layout torch.sparse_coo: it must be dense"):
        revdeq.solve(lambda z: z.to_sparse(), z0)
    with pytest.raises(TypeError, match="f's output is torch.int64"):
        revdeq.solve(lambda z: z.long(), z0)
    with pytest.raises(ValueError, match="f's output is on meta: it must be where z0 is, on cpu"):
        revdeq.solve(lambda z: z.to("meta"), z0)
    with pytest.raises(ValueError, match=r"f's output \(leaf 1 of 2\) has shape"):
        revdeq.solve(lambda z: (z[0], z[1][:1]), (z0, z0))


def test_an_error_inside_f_passes_through_and_leaves_the_input_alone():
    z0 = torch.randn(3)
    before = z0.clone()
    count = 0

    def fails(z):
        nonlocal count
        count += 1
        if count == 3:
            raise KeyError("something of the user's own")
        return z.mul_(0.5)

    with pytest.raises(KeyError, match="something of the user's own"):
        revdeq.solve(fails, z0)
    assert torch.equal(z0, before)
    assert torch.is_grad_enabled()


def test_a_layer_needs_a_start_that_is_real():
    embedding = nn.Embedding(5, 4)
    layer = revdeq.RevDEQ(lambda z, tokens: 0.5 * z + embedding(tokens))
    tokens = torch.tensor([1, 2])
    with pytest.raises(TypeError, match="z0 is torch.int64"):
        layer(tokens)
    layer(tokens, z0=torch.zeros(2, 4)).sum().backward()
    assert embedding.weight.grad is not None
