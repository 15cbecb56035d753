"""The iteration as a plain loop that stores its graph: what every gradient is compared with."""

from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

STEPS = 4


class Plain(NamedTuple):
    y: Any
    z: Any


def float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def reference(f, z0, *args, y0=None, beta=0.5, gamma=1.0, max_steps=STEPS, kwargs=None):
    """y and z after the steps of the paper, in float64, of an f that draws the same random numbers in each evaluation.

    As documented, the weights of f's output and of the other state are rounded to float32."""
    z, spec = tree_flatten(z0)
    dtypes, b, c = [x.dtype for x in z], float32(beta * gamma), float32(beta * (1 - gamma))
    z = [x.double() for x in z]
    y = z if y0 is None else [x.double() for x in spec.flatten_up_to(y0)]
    start = torch.get_rng_state()

    def read(state):
        return [x.to(dtype) for x, dtype in zip(state, dtypes, strict=True)]

    def relaxed(state, other):
        torch.set_rng_state(start)
        given = read(other)
        outputs = spec.flatten_up_to(f(tree_unflatten(given, spec), *args, **(kwargs or {})))
        parts = zip(state, outputs, given, strict=True)
        return [(1 - (b + c)) * x + b * out.double() + c * o.double() for x, out, o in parts]

    for _ in range(max_steps):
        y = relaxed(y, z)
        z = relaxed(z, y)
    return Plain(tree_unflatten(read(y), spec), tree_unflatten(read(z), spec))


def agree(ours, expected, tolerance=2e-6):
    """Two lists of gradients are equal, except for sums of a few float32 numbers in another order, and the 6e-8 that an
    exact state resolves."""
    assert any(x is not None for x in expected)
    for gradient, other in zip(ours, expected, strict=True):
        if gradient is None or other is None:
            assert gradient is other
        else:
            gradient, other = (x.to_dense() if x.layout is not torch.strided else x for x in (gradient, other))
            assert (gradient - other).abs().max() <= tolerance * other.abs().max() + 1e-12
