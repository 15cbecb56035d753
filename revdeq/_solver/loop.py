"""revdeq.loop: z <- f(z), repeated, as nearly as it can be undone."""

import operator
from collections.abc import Callable
from typing import Any

from .solve import Solution, solve

NEARLY = 1 - 1 / 64
"""The beta nearest to 1 that the exact state has a fraction for."""


def loop(f: Callable[..., Any], z0: Any, *args: Any, times: int = 16, **options: Any) -> Solution:
    """Plain looping, z <- f(z, *args), as nearly as a step can be undone: `revdeq.solve` with beta = 63/64,
    state="exact" and times / 2 steps.

    In place of f(z) every pass takes 63/64 f(z) and 1/64 of the state two passes before. Gradients are exact, those of
    what ran. docs/looped.md has how near to plain looping the result and its gradient are, for an f that
    contracts, one that keeps distances and one that expands. The integers put 8 bytes per element of z0 aside
    whenever 5 more steps (10 passes) are taken: a fifth of what storing float32 states would take.

    Args:
        f: As for `revdeq.solve`.
        z0: As for `revdeq.solve`.
        args: As for `revdeq.solve`.
        times: How often f is applied, an even number: a step is two passes.
        options: Those of `revdeq.solve`, but for max_steps, which `times` stands for; y0 and kwargs, too.

    Returns:
        A `revdeq.Solution`, in whose z f was applied `times` times, and in y once less.

    Raises:
        TypeError, ValueError: times is not an even number of at least 2, or max_steps is given.

    Example:
        >>> solution = revdeq.loop(f, z0, x, times=16)
        >>> solution.nfe, solution.state
        (16, 'exact')
    """
    try:
        number = operator.index(times)
    except TypeError:
        raise TypeError(f"times = {times!r} must be an even integer of at least 2: a step is two passes") from None
    if isinstance(times, bool) or number < 2 or number % 2:
        raise ValueError(
            f"times = {times!r} must be an even number of at least 2, because a step is two passes: take "
            f"{max(2, number + number % 2)}, or apply f once more yourself"
        )
    if "max_steps" in options:
        raise TypeError(f"max_steps = {options['max_steps']!r} is times / 2 here: leave it out, and set times")
    return solve(f, z0, *args, **{"beta": NEARLY, "state": "exact", **options}, max_steps=number // 2)
