"""Random combinations of shapes, layouts, dtypes, structures and options, compared with the unrolled iteration."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain import iterate, reference
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_structure

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


STRUCTURES = [
    tensors(),
    st.tuples(tensors(), st.lists(tensors(), min_size=1, max_size=2)),
    st.fixed_dictionaries({"a": tensors()}, optional={"b": tensors()}),
]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    z0=st.one_of(STRUCTURES),
    beta=st.sampled_from([0.3, 0.5, 0.8, 1.2]),
    max_steps=st.integers(1, 4),
    f_dtype=st.sampled_from([None, *DTYPES]),
    by_y=st.booleans(),
)
def test_any_state_any_dtype_any_layout(z0, beta, max_steps, f_dtype, by_y):
    z0 = tree_map(lambda t: t.detach().requires_grad_(), z0)
    x = tree_map(lambda t: (0.5 * t.detach() - 0.1).requires_grad_(), z0)
    weight, leaves = torch.tensor(0.9, requires_grad=True), tree_leaves(z0)

    def f(z, x):
        """Mixes all tensors of the state a little, and may return another dtype and layout."""
        mean = sum(t.float().mean() if t.numel() else t.float().sum() for t in tree_leaves(z))

        def one(t, u):
            out = torch.tanh(0.5 * t * weight.to(t.dtype) + u + (0.1 * mean).to(t.dtype)).to(f_dtype or t.dtype)
            return out.transpose(0, 1).contiguous().transpose(0, 1) if by_y and out.dim() > 1 else out

        return tree_map(one, z, x)

    solution = revdeq.solve(f, z0, x, beta=beta, max_steps=max_steps)
    expected = reference(f, z0, x, beta=beta, max_steps=max_steps)
    assert tree_structure(solution.z) == tree_structure(solution.y) == tree_structure(z0)
    narrowest = max(torch.finfo(t).eps for t in (weight.dtype, f_dtype or weight.dtype, *(t.dtype for t in leaves)))
    found = [[*tree_leaves(s.z), *tree_leaves(s.y)] for s in (solution, expected)]
    inputs = [weight, *leaves, *tree_leaves(x)]

    def gradients(states):
        loss = sum((t.double() * (1 + i)).sum() for i, t in enumerate(states[: (1 + by_y) * len(leaves)]))
        grads = torch.autograd.grad(loss, inputs, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, inputs, strict=True)]

    for ours, theirs in (found, map(gradients, found)):
        # Products in f's precision, and in that of its weight, are rounded at each of the 4 N evaluations, in both.
        limit = 8 * max_steps * narrowest * max([1.0, *(t.double().abs().max().item() for t in theirs if t.numel())])
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype and ((a.double() - b.double()).abs() <= limit).all()


class Everything(nn.Module):
    """f with all that an option may ask of it."""

    def __init__(self, drops, aux):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(D, D), nn.LayerNorm(D), nn.Dropout(0.3 if drops else 0.0)
        self.biases, self.aux = nn.Parameter(0.1 * torch.randn(5, D)), aux

    def forward(self, z, x, evaluation=0):
        u, v = z
        h = torch.tanh(0.5 * self.linear(u) + x + 0.1 * v + self.biases[evaluation % 5])
        h = self.drop(0.6 * self.norm(h))
        out = h, 0.5 * torch.sin(u + h)
        return (out, {"mean": h.mean()}) if self.aux else out


D = 6
BETAS, GAMMAS = (0.25, 0.5, 0.75, 1.25), (0.5, 1.0, 1.5)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(draw=st.data())
def test_any_combination_of_options(draw):
    """Gradients with respect to everything, by losses on y, z and the auxiliary outputs of all steps."""

    def choose(*values):
        return draw.draw(st.sampled_from(values))

    torch.manual_seed(choose(*range(20)))
    given = {"beta": choose(*BETAS), "gamma": choose(*GAMMAS), "indexed": choose(False, True)}
    options = {"aux": choose(False, True, "list"), "keep": choose(0, 1, 3), "check": None}
    options |= choose(
        *({"max_steps": n} for n in (1, 2, 3, 5)),
        *({"tol": 0.1, "max_steps": 8, "per_example": p} for p in (False, True)),
    )
    by_steps, aux = choose(False, True), options["aux"]
    f = Everything(choose(False, True), aux).double()

    def state():
        return tuple(torch.randn(3, D, dtype=torch.float64).requires_grad_(choose(False, True)) for _ in range(2))

    z0, x, y0 = state(), torch.randn(3, D, dtype=torch.float64, requires_grad=True), choose(None, state())
    torch.manual_seed(7)
    found = (
        revdeq.steps(f, z0, x, y0=y0, **given, **options)
        if by_steps
        else [revdeq.solve(f, z0, x, y0=y0, **given, **options)]
    )
    solutions = list(found)
    taken = solutions[-1].steps
    stops = taken if options.get("per_example") else torch.full((3,), taken)
    torch.manual_seed(7)
    rows = iterate(f, z0, x, y0=y0, max_steps=int(stops.max()), stops=stops, aux=bool(aux), **given)

    def loss(rows, auxes):
        weighted = [
            (i + 1) * t.sin().sum() for i, t in enumerate(t for row in rows for xs in (row.y, row.z) for t in xs)
        ]
        return sum(weighted) + sum((i + 1) * each["mean"] for i, each in enumerate(auxes))

    def summed(auxes):
        return [{"mean": sum(each["mean"] for each in auxes)}] if aux is True else auxes if aux else []

    ours = loss(solutions, [each for s in solutions if aux for each in (s.aux if aux == "list" else [s.aux])])
    if by_steps:
        expected = loss(rows, [each for row in rows for each in summed(row.aux)])
    else:
        expected = loss(rows[-1:], summed([each for row in rows for each in row.aux]))
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
    inputs = [t for t in (x, *f.parameters(), *z0, *(y0 or ())) if t.requires_grad]
    again = choose(False, True)
    found = [torch.autograd.grad(ours, inputs, allow_unused=True, retain_graph=again)]
    if again:
        found.append(torch.autograd.grad(ours, inputs, allow_unused=True))
    grads = torch.autograd.grad(expected, inputs, allow_unused=True)
    scale = max(1.0, *(g.abs().max().item() for g in grads if g is not None))
    for g, e in ((g, e) for each in found for g, e in zip(each, grads, strict=True)):
        assert (g is None or not g.any()) if e is None else (g - e).abs().max() <= 1e-6 * scale
