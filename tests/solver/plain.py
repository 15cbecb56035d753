"""The iteration as a plain loop that stores its graph: what every gradient is compared with."""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class Block(nn.Module):
    def __init__(self, d=6, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(d, d, dtype=dtype)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


class Plain(NamedTuple):
    """The states after a step, and the auxiliary outputs of its two evaluations."""

    y: Any
    z: Any
    aux: Any


def float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def iterate(f, z0, *args, y0=None, kwargs=None, beta=0.5, gamma=1.0, max_steps=4, indexed=False, aux=False, stops=None):
    """Every step of the paper, in float64, of an f that draws the same random numbers in each evaluation. Example i
    stops after stops[i] steps.

    As documented, the weights of f's output and of the other state are rounded to float32."""
    z, spec = tree_flatten(z0)
    dtypes, b, c = [x.dtype for x in z], float32(beta * gamma), float32(beta * (1 - gamma))
    z = [x.double() for x in z]
    y = z if y0 is None else [x.double() for x in spec.flatten_up_to(y0)]
    start, rows = torch.get_rng_state(), []

    def narrow(state):
        return [x.to(dtype) for x, dtype in zip(state, dtypes, strict=True)]

    def relaxed(k, state, other):
        torch.set_rng_state(start)
        read = narrow(other)
        found = f(tree_unflatten(read, spec), *args, **(kwargs or {}), **({"evaluation": k} if indexed else {}))
        out, more = found if aux else (found, None)
        parts = zip(state, spec.flatten_up_to(out), read, strict=True)
        moved = [(1 - (b + c)) * x + b * new.double() + c * o.double() for x, new, o in parts]
        if stops is not None:
            moves = [(stops > k // 2).view(-1, *[1] * (x.dim() - 1)) for x in state]
            moved = [torch.where(m, new, x) for m, new, x in zip(moves, moved, state, strict=True)]
        return moved, more

    for n in range(max_steps):
        y, first = relaxed(2 * n, y, z)
        z, second = relaxed(2 * n + 1, z, y)
        rows.append(Plain(tree_unflatten(narrow(y), spec), tree_unflatten(narrow(z), spec), [first, second]))
    return rows


def reference(*args, **settings):
    """The last step."""
    return iterate(*args, **settings)[-1]


def gradients(solution, *of):
    """Of a loss on z and y, with respect to tensors and modules."""
    inputs = [p for x in of for p in (x.parameters() if isinstance(x, nn.Module) else [x]) if p.requires_grad]
    return torch.autograd.grad(solution.z.square().sum() + 0.3 * solution.y.sum(), inputs, allow_unused=True)


def agree(ours, *expected, tolerance=2e-6):
    """Lists of gradients are equal, except for sums of a few float32 numbers in another order, and the 6e-8 that an
    exact state resolves."""
    assert expected and any(x is not None for x in ours)
    for theirs in expected:
        for gradient, other in zip(ours, theirs, strict=True):
            if gradient is None or other is None:
                assert gradient is other
            else:
                gradient, other = (x.to_dense() if x.layout is not torch.strided else x for x in (gradient, other))
                assert (gradient - other).abs().max() <= tolerance * other.abs().max() + 1e-12
