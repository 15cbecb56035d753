"""Private names of torch, six of them: why each is needed, and what happens where it is not there."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize


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
    """Whether x is a gradient under vmap, which no kernel can take the address of. Without it, torch refuses that."""
    return _functorch is not None and (
        _functorch.is_functorch_wrapped_tensor(x) or _functorch.is_legacy_batchedtensor(x)
    )


def is_transformed() -> bool:
    """Whether a transform of torch.func is around. Without it, torch's own words are about hooks."""
    return _functorch is not None and _functorch.peek_interpreter_stack() is not None


_functorch: Any = getattr(torch._C, "_functorch", None)


def has_tangents() -> bool:
    """Whether there may be tensors with forward-mode derivatives, which would be lost. Without it, torch refuses those
    where a gradient is recorded, too."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def caches_parametrizations() -> bool:
    """Whether `parametrize.cached()` is around, so that a first evaluation would compute what others find. Without it,
    that is an error on the way back, which says what to do."""
    return bool(getattr(parametrize, "_cache_enabled", 0))


def is_compiled_module(module: nn.Module) -> bool:
    """Whether torch.compile has made it, or its method compile() was called. Without it, the hint that f runs as it is
    inside a compiled model is given once too often."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
