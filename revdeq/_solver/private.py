"""The private torch APIs in use: why each is needed, and the fallback without it."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


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


def is_exporting() -> bool:
    """Whether torch.export is tracing. torch.compiler.is_exporting, the fallback, is always True where torch.compile
    traces it, before torch 2.13."""
    return torch.compiler._is_exporting_flag if _has_flag else torch.compiler.is_exporting()


_has_flag = hasattr(torch.compiler, "_is_exporting_flag")


def is_compiled_module(module: nn.Module) -> bool:
    """Whether it was compiled, by torch.compile or by its method compile(). Without it, the log may say once that a
    compiled f is not compiled."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


COMPILED_FROM = "_torchdynamo_orig_callable"
"""The attribute of torch.compile(f) that is f. Without it, what f captures is not checked for changes, and the log may
say once that f is not compiled."""


def not_refusing_to_overwrite() -> Any:
    """Context manager in which compiled functions that overwrite their saved tensors can be differentiated with
    retain_graph=True, for those who give them copies. Without it, torch's error says what to set."""
    config: Any = sys.modules.get("torch._functorch.config")
    return config.patch(donated_buffer=False) if hasattr(config, "donated_buffer") else contextlib.nullcontext()
