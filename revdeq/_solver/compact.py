"""compact=True: f is evaluated only for the examples of a batch that have not stopped.

They are selected from the states and from the arguments of f whenever that leaves at most half of them. Sizes are
powers of two, filled up with frozen examples, so that f is not compiled again for every size.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from .state import State


def size_for(moving: int) -> int:
    """The size of the selection if this many examples have not stopped."""
    return 1 << max(moving - 1, 0).bit_length()


def rows_of(x: Tensor, rows: Tensor) -> Tensor:
    """Some examples of a tensor, in its memory layout: with another layout, f could compute other bits."""
    if not torch.ops.aten.is_non_overlapping_and_dense(x) or x.stride(0) * len(x) != x.numel():
        return x.index_select(0, rows)
    out = torch.empty_strided((len(rows), *x.shape[1:]), x.stride(), dtype=x.dtype, device=x.device)
    return torch.index_select(x, 0, rows, out=out)


def cut(given: Any, size: int, rows: Tensor) -> Any:
    """Arguments of f, with these rows of the tensors whose first dimension has this size."""

    def of(x: Any) -> Any:
        return rows_of(x.detach(), rows.to(x.device)) if _has_batch(x, size) else x

    return tree_map(of, given)


def refuse_ambiguous(args: Any, kwargs: Any, initial: State) -> None:
    """Raise if it is unclear whether the first dimension of an argument is the batch."""
    size = len(initial[0])
    others = [n for x in initial for n in x.shape[1:]]
    if size < 2 or size not in others:
        return
    for kind, given in (("args", args), ("kwargs", kwargs)):
        for path, x in tree_flatten_with_path(given)[0]:
            if _has_batch(x, size) and not any(_is_spread_over(x, leaf) for leaf in initial):
                raise ValueError(
                    f"{kind}{keystr(path)} has shape {tuple(x.shape)}, and {size} is the size of the batch and of "
                    "another dimension of z0: with compact=True it is unclear whether to select from it; use another "
                    "batch size, or compact=False"
                )


def _has_batch(x: Any, size: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == size


def _is_spread_over(x: Tensor, leaf: Tensor) -> bool:
    """Whether it has the shape of the state, or 1 in some dimensions, so that its first dimension is the batch."""
    return x.dim() == leaf.dim() and all(n in (1, m) for n, m in zip(x.shape, leaf.shape, strict=True))


class Whole:
    """All examples, while only some of them are stepped.

    rows: the indices of those, on the host.
    """

    def __init__(self, parts: State) -> None:
        """Takes all per-example tensors."""
        self._parts, self.rows = parts, torch.arange(len(parts[0]), device="cpu")

    def put_back(self, parts: State) -> State:
        """All examples, with the current values of those that were stepped."""
        for whole, part in zip(self._parts, parts, strict=True):
            whole.index_copy_(0, self.rows.to(whole.device), part)
        return self._parts

    def cut(self, moving: Tensor, size: int) -> Tensor:
        """Keep the examples that have not stopped, and others to fill up the size. Returns their previous indices."""
        kept = moving.to(torch.int8).argsort(descending=True, stable=True)[:size].sort().values
        self.rows = self.rows[kept]
        return kept
