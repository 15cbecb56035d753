"""The iteration of `revdeq.solve` where nothing will be differentiated: the same bits, for f that may write to caches.

There is no graph, no way back, no random draw to repeat, and no look at what f changes, which a solve of one position
would spend a third of its time on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .options import Options
from .scheme import scheme_for
from .state import laid_out_like


@torch.no_grad()
def forward(f: Callable[[Tensor, int], Tensor], z0: Tensor, options: Options) -> Tensor:
    """The last z of all `max_steps` steps, from y = z = z0; f is called with what it reads and the evaluation's number.

    A state that is not finite is not noticed here."""
    scheme = scheme_for(options, [z0])
    read = z0.clone()
    half_steps: tuple[Any, ...] = ()
    for k in range(2 * options.max_steps):
        step = scheme.at(k)
        given = read.clone() if step.c else read  # f may change its input, and this step reads it once more
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
