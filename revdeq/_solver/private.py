"""The private torch APIs in use: why each is needed, and the fallback without it."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize


def current_pass() -> int:
    """The id of the running backward pass, -1 outside of one. Several passes may go through the graph of a solve, and
    one that does not start at its end cannot be recognized otherwise. Without it, all count as one."""
    return _graph_task() if _graph_task is not None else -1


_graph_task: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)


def graph_is_kept() -> bool:
    """Whether the running backward pass has retain_graph=True, so that saved tensors must not be changed and f may be
    needed again. Without it, True is assumed: the states are copied, and f is freed with the graph."""
    return _keep_graph() if _keep_graph is not None else True


_autograd: Any = getattr(torch._C, "_autograd", None)
_keep_graph: Callable[[], bool] | None = getattr(_autograd, "_get_current_graph_task_keep_graph", None)


def is_batched(x: Tensor) -> bool:
    """Whether x is a batched gradient under vmap, which has no address. Without it, torch raises."""
    return _functorch is not None and (
        _functorch.is_functorch_wrapped_tensor(x) or _functorch.is_legacy_batchedtensor(x)
    )


def is_transformed() -> bool:
    """Whether a torch.func transform is active. Without it, torch raises a less helpful error about hooks."""
    return _functorch is not None and _functorch.peek_interpreter_stack() is not None


_functorch: Any = getattr(torch._C, "_functorch", None)


def is_exporting() -> bool:
    """Whether torch.export is tracing. torch.compiler.is_exporting, the fallback, is always True where torch.compile
    traces it, before torch 2.13."""
    return torch.compiler._is_exporting_flag if _has_flag else torch.compiler.is_exporting()


_has_flag = hasattr(torch.compiler, "_is_exporting_flag")


def has_tangents() -> bool:
    """Whether forward-mode AD is active, whose tangents would be lost. Without it, torch raises only if a gradient is
    recorded, too."""
    return getattr(forward_ad, "_current_level", -1) >= 0


def caches_parametrizations() -> bool:
    """Whether `parametrize.cached()` is active. Without it, the backward pass raises an error that says what to do."""
    return bool(getattr(parametrize, "_cache_enabled", 0))


def is_compiled_module(module: nn.Module) -> bool:
    """Whether it was compiled, by torch.compile or by its method compile(). Without it, the log may say once that a
    compiled f is not compiled."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def saved_tensor_hooks() -> Any:
    """The innermost saved-tensor hooks, or None. Without it, an interrupt in the wrong moment leaves ours behind."""
    return None if _top_hooks is None else _top_hooks(False)


def remove_saved_tensor_hooks() -> None:
    """Remove the innermost saved-tensor hooks."""
    _autograd._pop_saved_tensors_default_hooks()


_top_hooks: Callable[[bool], Any] | None = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


def not_refusing_to_overwrite() -> Any:
    """Context manager in which compiled functions that overwrite their saved tensors can be differentiated with
    retain_graph=True, for those who give them copies. Without it, torch's error says what to set."""
    config: Any = sys.modules.get("torch._functorch.config")
    return config.patch(donated_buffer=False) if hasattr(config, "donated_buffer") else contextlib.nullcontext()
