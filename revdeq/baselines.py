"""The same iteration by other means, to compare with: plain autograd, which stores the graph of every
evaluation of f, and `torch.utils.checkpoint`, which stores the input of every evaluation."""

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def stored_graph(f: Callable[..., Tensor], z0: Tensor, *args: Any, beta: float = 0.5, max_steps: int = 8) -> Tensor:
    """What `revdeq.solve(...).z` computes, bit for bit, differentiated by plain autograd."""
    beta = ctypes.c_float(beta).value
    y = z = z0.double()
    for _ in range(max_steps):
        y = (1 - beta) * y + beta * f(z.to(z0.dtype), *args).double()
        z = (1 - beta) * z + beta * f(y.to(z0.dtype), *args).double()
    return z.to(z0.dtype)


def checkpointed(f: Callable[..., Tensor], z0: Tensor, *args: Any, beta: float = 0.5, max_steps: int = 8) -> Tensor:
    """The same with a checkpoint around every half-step."""
    beta = ctypes.c_float(beta).value

    def half_step(state: Tensor, other: Tensor) -> Tensor:
        return (1 - beta) * state + beta * f(other.to(z0.dtype), *args).double()

    y = z = z0.double()
    for _ in range(max_steps):
        y = checkpoint(half_step, y, z, use_reentrant=False)
        z = checkpoint(half_step, z, y, use_reentrant=False)
    return z.to(z0.dtype)
