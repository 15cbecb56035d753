"""Random combinations of shapes, layouts, dtypes, structures, beta and N, compared with the unrolled iteration."""

import ctypes

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

import revdeq

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
LAYOUTS = ("contiguous", "transposed", "strided", "expanded")


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype, layout = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(LAYOUTS))
    x = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(dtype)
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "strided":
        return torch.stack([x, -x], -1)[..., 0]
    if layout == "expanded" and x.dim() > 0 and x.shape[0] > 0:
        return x[:1].expand(x.shape)
    return x


def states(leaf):
    return st.recursive(
        leaf,
        lambda inner: st.one_of(
            st.lists(inner, min_size=1, max_size=2),
            st.tuples(inner, inner),
            st.fixed_dictionaries({"a": inner}, optional={"b": inner}),
        ),
        max_leaves=3,
    )


def function(weight, f_dtype, f_transposes):
    """Mixes all tensors of the state a little, and may return another dtype and layout."""

    def f(z, x):
        leaves, spec = tree_flatten(z)
        mean = sum(t.float().mean() if t.numel() else t.float().sum() for t in leaves)
        outputs = []
        for t, u in zip(leaves, tree_flatten(x)[0], strict=True):
            out = torch.tanh(0.5 * t * weight.to(t.dtype) + u + (0.1 * mean).to(t.dtype))
            out = out if f_dtype is None else out.to(f_dtype)
            if f_transposes and out.dim() > 1:
                out = out.transpose(0, 1).contiguous().transpose(0, 1)
            outputs.append(out)
        return tree_unflatten(outputs, spec)

    return f


def unrolled(f, z0, x, beta, max_steps):
    beta = ctypes.c_float(beta).value
    leaves, spec = tree_flatten(z0)
    like = None  # f's first outputs, in whose layout it reads all but z0: a mean has other bits in another

    def evaluate(state):
        nonlocal like
        narrow = [s.to(t.dtype) for s, t in zip(state, leaves, strict=True)]
        if like is not None:
            narrow = [torch.empty_like(o, dtype=t.dtype).copy_(t) for o, t in zip(like, narrow, strict=True)]
        outputs = tree_flatten(f(tree_unflatten(narrow, spec), x))[0]
        like = outputs if like is None else like
        return outputs

    def relax(state, outputs):
        return [(1 - beta) * s + beta * o.double() for s, o in zip(state, outputs, strict=True)]

    y = z = [t.double() for t in leaves]
    for _ in range(max_steps):
        y = relax(y, evaluate(z))
        z = relax(z, evaluate(y))
    return [[s.to(t.dtype) for s, t in zip(state, leaves, strict=True)] for state in (y, z)]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    z0=states(tensors()),
    beta=st.sampled_from([0.3, 0.5, 0.6, 0.75, 0.8, 1.2]),
    max_steps=st.integers(1, 4),
    f_dtype=st.sampled_from([None, *DTYPES]),
    f_transposes=st.booleans(),
    by_y=st.booleans(),
)
def test_any_state_any_dtype_any_layout(z0, beta, max_steps, f_dtype, f_transposes, by_y):
    leaves, spec = tree_flatten(z0)
    leaves = [t.detach().requires_grad_() for t in leaves]
    z0 = tree_unflatten(leaves, spec)
    x = tree_map(lambda t: (0.5 * t.detach() - 0.1).requires_grad_(), z0)
    weight = torch.tensor(0.9, requires_grad=True)
    f = function(weight, f_dtype, f_transposes)
    solution = revdeq.solve(f, z0, x, beta=beta, max_steps=max_steps)
    y, z = unrolled(f, z0, x, beta, max_steps)
    ours_y, ours_z = tree_flatten(solution.y)[0], tree_flatten(solution.z)[0]
    assert tree_flatten(solution.z)[1] == spec
    assert all(map(torch.equal, ours_y, y))
    assert all(map(torch.equal, ours_z, z))

    inputs = [weight, *leaves, *tree_flatten(x)[0]]

    def loss(y, z):
        return sum((t.double() * (1 + i)).sum() for i, t in enumerate([*z, *(y if by_y else ())]))

    ours = torch.autograd.grad(loss(ours_y, ours_z), inputs, allow_unused=True)
    expected = torch.autograd.grad(loss(y, z), inputs, allow_unused=True)
    # Products in f's precision, and in that of its weight, are rounded at each of the 4 N evaluations, in both.
    narrowest = max(
        torch.finfo(dtype).eps for dtype in (weight.dtype, f_dtype or weight.dtype, *(t.dtype for t in leaves))
    )
    scale = max([1.0, *(e.double().abs().max().item() for e in expected if e is not None and e.numel())])
    for g, e in zip(ours, expected, strict=True):
        e = torch.zeros_like(g) if e is None and g is not None else e
        g = torch.zeros_like(e) if g is None else g
        assert (g.double() - e.double()).abs().max().item() <= 8 * max_steps * narrowest * scale if g.numel() else True
