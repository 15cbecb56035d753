"""The iteration of `revdeq.solve` without gradients: the same bits, for an f that may write to caches.

There is no graph, no backward pass, no replay of random numbers and no check of buffers, which would take a third of
the time of a solve for one position."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .norms import relative_changes
from .options import Options
from .scheme import relax_norms, scheme_for
from .state import laid_out_like
from .tape import announced_steps


class Forward(NamedTuple):
    """y and z after the last step, in the dtype of f's input."""

    y: Tensor
    z: Tensor


@torch.no_grad()
def forward(f: Callable[[Tensor, int], Tensor], z0: Tensor, options: Options) -> Forward:
    """The iteration from y = z = z0. f is called with its input and the index of the evaluation. With a tolerance,
    each example stops separately.

    Infinite and NaN states are not detected here."""
    scheme = scheme_for(options, [z0])
    read, last = z0.clone(), 2 * options.max_steps
    half_steps: tuple[Any, ...] = ()
    tol = options.tol
    ends = None if tol is None else torch.full(z0.shape[:1], last, dtype=torch.int32, device=z0.device)
    for k in range(last):
        step = scheme.at(k)
        given = read.clone() if step.c else read  # f may modify its input, which this step needs again
        out = f(given, k)
        if not half_steps:
            like = laid_out_like([out], [z0])
            states = scheme.start_both([z0], like)
            half_steps = tuple(scheme.bind(i, states[i], like, announced_steps(options))[0] for i in (0, 1))
        half_step = half_steps[k % 2]
        copy = torch.empty_like(half_step.copy)
        half_step.write_to(copy)
        if ends is not None:
            half_step.each(ends, k)
        if ends is None or tol is None or k % 2 == 0 or k == last - 1:
            half_step.relax(out, read, step)
            read = copy
            continue
        norms = scheme.look(relax_norms([half_step], [out], [read], step), list(half_steps), k // 2 + 1)
        read = copy
        rests = relative_changes(norms.double()) <= tol  # on the host; includes those that stopped before
        ends.masked_fill_(rests.to(ends.device) & (ends > k), k + 1)
        if rests.all():
            break
    scheme.check(list(half_steps))
    (y,) = scheme.read([half_steps[0].state], [z0])  # f may have modified what it read
    return Forward(y, read)
