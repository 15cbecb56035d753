"""The iteration of `revdeq.solve` without gradients: the same bits, for an f that may write to caches.

There is no graph, no backward pass, no replay of random numbers and no check of buffers, which would take a third of
the time of a solve for one position."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .options import Options
from .scheme import scheme_for
from .state import laid_out_like


@torch.no_grad()
def forward(f: Callable[[Tensor, int], Tensor], z0: Tensor, options: Options) -> Tensor:
    """The z after `max_steps` steps, from y = z = z0. f is called with its input and the index of the evaluation.

    Infinite and NaN states are not detected here."""
    scheme = scheme_for(options, [z0])
    read = z0.clone()
    half_steps: tuple[Any, ...] = ()
    for k in range(2 * options.max_steps):
        step = scheme.at(k)
        given = read.clone() if step.c else read  # f may modify its input, which this step needs again
        out = f(given, k)
        if not half_steps:
            like = laid_out_like([out], [z0])
            z = scheme.start([z0], like)
            states = [x.clone() for x in z], z
            half_steps = tuple(scheme.bind(i, states[i], like, options.max_steps)[0] for i in (0, 1))
        half_step = half_steps[k % 2]
        copy = torch.empty_like(half_step.copy)
        half_step.write_to(copy)
        half_step.relax(out, read, step)
        read = copy
    scheme.check(list(half_steps))
    return read
