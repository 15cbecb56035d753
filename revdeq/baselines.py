"""The same iteration for comparison: with plain autograd, which stores the graph of every evaluation of f, and with
`torch.utils.checkpoint`, which stores the input of every evaluation."""

import functools
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint

from ._solver.options import options_from
from ._solver.precision import coefficients
from ._solver.unrolled import unrolled
from .kernels.half_step import Coefficients

__all__ = ["checkpointed", "stored_graph"]


def stored_graph(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    beta: float = 0.5,
    gamma: float = 1.0,
    max_steps: int = 8,
    schedule: Any = None,
) -> Any:
    """The same bits as `revdeq.solve(...).z` with a float64 state, differentiated by plain autograd.

    Memory grows with `max_steps`: the graph of every evaluation is stored.

    Args:
        f: As for `revdeq.solve`, except that dropout draws a new mask in every evaluation.
        z0: As for `revdeq.solve`.
        args: As for `revdeq.solve`.
        beta: As for `revdeq.solve`.
        gamma: As for `revdeq.solve`.
        max_steps: As for `revdeq.solve`.
        schedule: As for `revdeq.solve`, without a gradient.

    Returns:
        z, shaped like z0.

    Example:
        >>> z = revdeq.baselines.stored_graph(f, z0, x, max_steps=4)
        >>> torch.equal(z, revdeq.solve(f, z0, x, max_steps=4).z)
        True
    """
    return unrolled(f, z0, args, _coefficients(beta, gamma, max_steps, schedule))[1]


def checkpointed(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    beta: float = 0.5,
    gamma: float = 1.0,
    max_steps: int = 8,
    schedule: Any = None,
) -> Any:
    """The same as `stored_graph`, with `torch.utils.checkpoint` around every half-step: only the states are stored, and
    the backward pass computes the rest again.

    Args:
        f: As for `stored_graph`.
        z0: As for `stored_graph`.
        args: As for `stored_graph`.
        beta: As for `stored_graph`.
        gamma: As for `stored_graph`.
        max_steps: As for `stored_graph`.
        schedule: As for `stored_graph`.

    Returns:
        z, shaped like z0.

    Example:
        >>> z = revdeq.baselines.checkpointed(f, z0, x, max_steps=4)
        >>> torch.equal(z, revdeq.solve(f, z0, x, max_steps=4).z)
        True
    """
    around = functools.partial(checkpoint, use_reentrant=False)
    return unrolled(f, z0, args, _coefficients(beta, gamma, max_steps, schedule), around)[1]


def _coefficients(beta: float, gamma: float, max_steps: int, schedule: Any) -> list[Coefficients]:
    """The coefficients of every half-step, as rounded for a float64 state."""
    options = options_from({"beta": beta, "gamma": gamma, "schedule": schedule, "state": "float64"})
    step, *first = coefficients(options)[0]
    return [*first, *[step] * (2 * max_steps)][: 2 * max_steps]
