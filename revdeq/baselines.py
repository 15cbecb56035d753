"""The same iteration by other means, to compare with: plain autograd, which stores the graph of every
evaluation of f, and `torch.utils.checkpoint`, which stores the input of every evaluation."""

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from ._solver.unrolled import unrolled
from .kernels.half_step import Coefficients


def stored_graph(
    f: Callable[..., Any], z0: Any, *args: Any, beta: float = 0.5, gamma: float = 1.0, max_steps: int = 8
) -> Any:
    """What `revdeq.solve(...).z` computes, bit for bit, differentiated by plain autograd."""
    return unrolled(f, z0, args, Coefficients.rounded(beta, gamma), max_steps)[1]


def checkpointed(
    f: Callable[..., Any], z0: Any, *args: Any, beta: float = 0.5, gamma: float = 1.0, max_steps: int = 8
) -> Any:
    """The same with a checkpoint around every half-step."""
    around = functools.partial(checkpoint, use_reentrant=False)
    return unrolled(f, z0, args, Coefficients.rounded(beta, gamma), max_steps, around)[1]
