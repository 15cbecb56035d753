"""The same iteration for comparison: with plain autograd, which stores the graph of every evaluation of f, and with
`torch.utils.checkpoint`, which stores the input of every evaluation."""

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from ._solver.options import options_from
from ._solver.precision import coefficients
from ._solver.state import State, flattened_like, flattened_state, structured
from ._solver.unrolled import unrolled

__all__ = ["checkpointed", "stored_graph"]


def stored_graph(
    f: Callable[..., Any], z0: Any, *args: Any, beta: float = 0.5, gamma: float = 1.0, max_steps: int = 8
) -> Any:
    """The same bits as `revdeq.solve(...).z` with a float64 state, differentiated by plain autograd.

    Memory grows with `max_steps`: the graph of every evaluation is stored.

    Args:
        f: As for `revdeq.solve`, except that dropout draws a new mask in every evaluation.
        z0, args, beta, gamma, max_steps: As for `revdeq.solve`.

    Returns:
        z, shaped like z0.

    Example:
        >>> z = revdeq.baselines.stored_graph(f, z0, x, max_steps=4)
        >>> torch.equal(z, revdeq.solve(f, z0, x, max_steps=4).z)
        True
    """
    return _unrolled(f, z0, args, beta, gamma, max_steps)


def checkpointed(
    f: Callable[..., Any], z0: Any, *args: Any, beta: float = 0.5, gamma: float = 1.0, max_steps: int = 8
) -> Any:
    """The same as `stored_graph`, with `torch.utils.checkpoint` around every half-step: only the states are stored, and
    the backward pass computes the rest again.

    Args:
        f, z0, args, beta, gamma, max_steps: As for `stored_graph`.

    Returns:
        z, shaped like z0.

    Example:
        >>> z = revdeq.baselines.checkpointed(f, z0, x, max_steps=4)
        >>> torch.equal(z, revdeq.solve(f, z0, x, max_steps=4).z)
        True
    """
    around = functools.partial(checkpoint, use_reentrant=False)
    return _unrolled(f, z0, args, beta, gamma, max_steps, around=around)


def _unrolled(
    f: Callable[..., Any], z0: Any, args: tuple[Any, ...], beta: float, gamma: float, max_steps: int, **around: Any
) -> Any:
    options = options_from({"beta": beta, "gamma": gamma, "max_steps": max_steps})
    z, spec = flattened_state(z0)

    def called(state: State, k: int) -> State:
        return flattened_like(f(structured(state, spec), *args), state, spec)

    step = coefficients(options.beta, options.gamma)
    return structured(unrolled(called, z, z, step, options.max_steps, **around)[1], spec)
