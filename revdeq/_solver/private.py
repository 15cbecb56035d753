"""Private names of torch: why each is needed, and what happens where it is not there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def current_pass() -> int:
    """The number of the backward pass that is running, -1 outside of one. A solve's graph may be walked by several, and
    one that does not begin at its end has no other sign. Without it all count as one."""
    return _graph_task() if _graph_task is not None else -1


_graph_task: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)


def graph_is_kept() -> bool:
    """Whether the backward pass that is running has retain_graph=True, so that what was saved may not be changed, and f
    may be needed once more. Without it, it counts as kept: the states are copied, and f is freed with the graph."""
    return _keep_graph() if _keep_graph is not None else True


_keep_graph: Callable[[], bool] | None = getattr(
    getattr(torch._C, "_autograd", None), "_get_current_graph_task_keep_graph", None
)


def is_batched(x: Tensor) -> bool:
    """Whether x is a gradient under vmap, whose address no kernel can take. Without it, torch refuses the address."""
    functorch = getattr(torch._C, "_functorch", None)
    return functorch is not None and (functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x))


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Not to be compiled where a compiled function calls it: torch.compiler.disable imports the compiler at once, which
    takes two seconds."""
    try:
        from torch._compile import _disable_dynamo
    except ImportError:
        return torch.compiler.disable(function)
    return _disable_dynamo(function)
