"""Random combinations of shapes, layouts, dtypes, structures and options, compared with the unrolled iteration."""

import ctypes

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
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
        narrow = leaves
        if like is not None:
            narrow = [
                torch.empty_like(o, dtype=t.dtype).copy_(s.to(t.dtype))
                for o, s, t in zip(like, state, leaves, strict=True)
            ]
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


class Options(nn.Module):
    """f with everything that an option may ask of it."""

    def __init__(self, options, drops):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(D, D), nn.LayerNorm(D), nn.Dropout(0.3 if drops else 0.0)
        self.biases = nn.Parameter(0.1 * torch.randn(5, D))
        self.options = options

    def forward(self, z, x, evaluation=0):
        u, v = z
        h = torch.tanh(0.5 * self.linear(u) + x + 0.1 * v + self.biases[evaluation % 5])
        h = self.drop(0.6 * self.norm(h))
        out = h, 0.5 * torch.sin(u + h)
        return (out, {"mean": h.mean()}) if self.options.get("aux") else out


def iterate(f, z0, y0, x, steps, ends):
    """The states after every step, and the auxiliary outputs, by plain autograd. Example i takes ends[i] half-steps."""
    beta, gamma = f.options["beta"], f.options["gamma"]
    y, z, rows, auxes = list(y0), list(z0), [], []
    for k in range(2 * steps):
        state, other = (y, z) if k % 2 == 0 else (z, y)
        torch.manual_seed(7)
        out = f(tuple(t.clone() for t in other), x, **({"evaluation": k} if f.options.get("indexed") else {}))
        if f.options.get("aux"):
            out, aux = out
            auxes.append(aux["mean"])
        mixed = [(1 - gamma) * r + gamma * o for r, o in zip(other, out, strict=True)]
        moved = [(1 - beta) * s + beta * m for s, m in zip(state, mixed, strict=True)]
        state = [torch.where((ends > k).view(-1, 1), m, s) for m, s in zip(moved, state, strict=True)]
        y, z = (state, z) if k % 2 == 0 else (y, state)
        rows += [(y, z)] if k % 2 else []
    return rows, auxes


D = 6
BETAS, GAMMAS = (0.25, 0.5, 0.75, 1.25), (0.5, 1.0, 1.5)  # and their products, numbers of float32


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data())
def test_any_combination_of_options(draw):
    """Gradients with respect to everything, by losses on y, z and the auxiliary outputs of all steps."""

    def choose(*values):
        return draw.draw(st.sampled_from(values))

    torch.manual_seed(choose(*range(20)))
    options = {"beta": choose(*BETAS), "gamma": choose(*GAMMAS), "max_steps": choose(1, 2, 3, 5), "check": None}
    options |= {"indexed": choose(False, True), "aux": choose(False, True, "list"), "keep": choose(0, 1, 3)}
    options |= choose({}, {"tol": 0.1, "max_steps": 8}, {"tol": 0.1, "max_steps": 8, "per_example": True})
    by_steps = choose(False, True)
    f = Options(options, drops=choose(False, True)).double()

    def state():
        return tuple(torch.randn(3, D, dtype=torch.float64).requires_grad_(choose(False, True)) for _ in range(2))

    z0, x = state(), torch.randn(3, D, dtype=torch.float64, requires_grad=True)
    y0 = choose(None, state())
    torch.manual_seed(7)
    if by_steps:
        solutions = list(revdeq.steps(f, z0, x, y0=y0, **options))
    else:
        solutions = [revdeq.solve(f, z0, x, y0=y0, **options)]
    taken = solutions[-1].steps
    ends = 2 * taken if options.get("per_example") else torch.full((3,), 2 * taken)
    steps = int(ends.max()) // 2
    known, auxes = iterate(f, z0, z0 if y0 is None else y0, x, steps, ends)

    def loss(states, auxes):
        weighted = [(i + 1) * t.sin().sum() for i, t in enumerate(t for pair in states for xs in pair for t in xs)]
        return sum(weighted) + sum((i + 1) * aux for i, aux in enumerate(auxes))

    ours = [
        aux["mean"] for s in solutions for aux in tree_flatten(s.aux, is_leaf=lambda x: isinstance(x, dict))[0] if aux
    ]
    if options["aux"] is True:
        auxes = [sum(auxes[2 * i : 2 * i + 2]) for i in range(steps)] if by_steps else [sum(auxes)]
    inputs = [t for t in (x, *f.parameters(), *z0, *(y0 or ())) if t.requires_grad]
    mine = loss([(s.y, s.z) for s in solutions], ours)
    expected = loss(known if by_steps else known[-1:], auxes)
    torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)
    again = choose(False, True)
    found = [torch.autograd.grad(mine, inputs, allow_unused=True, retain_graph=again)]
    if again:
        found.append(torch.autograd.grad(mine, inputs, allow_unused=True))
    grads = torch.autograd.grad(expected, inputs, allow_unused=True)
    scale = max(1.0, *(g.abs().max().item() for g in grads if g is not None))
    for g, e in ((g, e) for each in found for g, e in zip(each, grads, strict=True)):
        assert (g is None or not g.any()) if e is None else (g - e).abs().max() <= 1e-6 * scale
