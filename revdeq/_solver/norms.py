"""Norms of states, which are lists of tensors."""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .state import State

NORM_FLOOR = 1e-5
"""Added to the norm of the state in the relative change, which is then defined at zero."""


def inner(xs: State, ys: State) -> Tensor:
    """The inner product of two states, in float64."""
    products = [(x.double() * y.double()).sum() for x, y in zip(xs, ys, strict=True)]
    return functools.reduce(torch.add, products)


def norm(xs: Sequence[Tensor]) -> Tensor:
    """The 2-norm of all tensors together."""
    norms = [torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).float() for x in xs]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def relative_change(change: float, value: float) -> float:
    return math.sqrt(change) / (math.sqrt(value) + NORM_FLOOR) if math.isfinite(value) else math.inf


def relative_changes(norms: Tensor) -> Tensor:
    """The same of squared norms in a tensor, with a first dimension of 2."""
    change, value = norms.sqrt()
    return change / (value + NORM_FLOOR)


def relative_distances(y: Sequence[Tensor], z: Sequence[Tensor]) -> Tensor:
    """‖y - z‖ / (‖z‖ + 1e-5) of each example."""
    rows = ([x.detach().double().unsqueeze(-1).flatten(1) for x in xs] for xs in (y, z))
    pairs = list(zip(*rows, strict=True))
    sums = [torch.stack([(a - b).square().sum(1), b.square().sum(1)]) for a, b in pairs]
    return relative_changes(functools.reduce(torch.add, sums))


def relative_distance(y: Sequence[Tensor], z: Sequence[Tensor]) -> Tensor:
    """‖y - z‖ / (‖z‖ + 1e-5), a 0-d tensor."""
    return norm([a.detach() - b.detach() for a, b in zip(y, z, strict=True)]) / (norm(z) + NORM_FLOOR)
