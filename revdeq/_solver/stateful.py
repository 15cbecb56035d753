"""Layers with state that every evaluation of f would change, in the backward pass too: they are refused.

BatchNorm in training mode is seen as it runs, before it changes anything. Whatever else changes a buffer, and
BatchNorm in a function that was compiled, is noticed after the first evaluation: by the buffers of all modules
that f can get at, through closures, partials, bound methods and compiled functions. They get their values back.
"""

import collections
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import _device

STATEFUL = (
    "would be changed by every evaluation of f, in the backward pass too: put the layer outside f, as the paper does, "
    "or use a normalisation without state (GroupNorm, LayerNorm), or call .eval() on it"
)

_COPIED = 1 << 16
"""Elements of the largest buffer that is worth a copy: statistics are small, and tables and masks do not change."""

_VISITED = 256
"""The most objects to look into for modules: a closure may hold a whole data set."""


def refuse_running_statistics(func: Any, args: Any, kwargs: Any) -> None:
    """Takes an operation that is about to run."""
    if func is nn.functional.batch_norm and args[1] is not None and kwargs["training"]:
        raise RuntimeError(f"f contains a BatchNorm in training mode, whose running statistics {STATEFUL}")
    if func is nn.functional.instance_norm and kwargs["running_mean"] is not None and kwargs["use_input_stats"]:
        raise RuntimeError(f"f contains an InstanceNorm in training mode, whose running statistics {STATEFUL}")


class Buffers:
    """Around the first evaluation: notices when it changes a buffer that f can get at."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._before: list[tuple[str, Tensor, int, Tensor | None]] = []
        for outermost in modules:
            for path, module in outermost.named_modules():
                for name, x in module._buffers.items():
                    if x is not None and not x.is_inference():
                        copy = x.clone() if module.training and x.numel() <= _COPIED else None
                        self._before.append((f"{path}.{name}" if path else name, x, x._version, copy))

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, *exception: object) -> None:
        changed = [row for row in self._before if row[1]._version != row[2] or _differs(row[1], row[3])]
        with torch.no_grad():
            for _, buffer, _, copy in changed:
                if copy is not None:
                    buffer.copy_(copy)
        if changed and kind is None:
            raise RuntimeError(f"f changes its buffers {', '.join(name for name, *_ in changed)}, which {STATEFUL}")


def _differs(x: Tensor, copy: Tensor | None) -> bool:
    """Also after a change that autograd does not count (x.data.add_), unless a look would wait for the device."""
    return copy is not None and _device.can_look(x) and not torch.equal(x, copy) and not bool(x.isnan().any())


class BackwardHooks:
    """Those on the modules of f in the forward pass. The graphs of a stored iteration would have them; those of the
    backward pass have what is there then."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._before = [
            (hooks, tuple(hooks))
            for outermost in modules
            for module in outermost.modules()
            for hooks in (module._backward_hooks, module._backward_pre_hooks)
        ]

    def refuse_changes(self) -> None:
        if any(tuple(hooks) != before for hooks, before in self._before):
            raise RuntimeError(
                "backward hooks on modules in f were added or removed after the solve, and they can change its "
                "gradient, in which f is evaluated again: add them before the solve, and remove them after its "
                "backward pass"
            )


def modules_of(f: Any) -> list[nn.Module]:
    """The outermost modules that f can get at: itself, or those that it closes over, is bound to or was made from."""
    return reachable(f)[0]


def reachable(f: Any) -> tuple[list[nn.Module], bool]:
    """The same, and whether any part of f that was seen on the way there is compiled."""
    found: dict[int, nn.Module] = {}
    seen: set[int] = set()
    compiled = False
    left = collections.deque([f])  # what is near comes first
    while left and len(seen) < _VISITED:
        x = left.popleft()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, nn.Module):
            found[id(x)] = x
            compiled = compiled or any(map(is_compiled, x.modules()))
        else:
            compiled = compiled or is_compiled(x)
            left += _held_by(x)
    return list(found.values()), compiled


def is_compiled(f: Any) -> bool:
    """Whether torch.compile made f: a mode around it would have it compiled a second time, differently."""
    if isinstance(f, nn.Module):  # which takes a microsecond to say that it has no such attribute
        return "_orig_mod" in f._modules or f._compiled_call_impl is not None
    return any(getattr(f, name, None) is not None for name in ("_torchdynamo_orig_callable", "_orig_mod"))


def _held_by(x: Any) -> Iterator[Any]:
    """What a callable or a container holds that may lead to a module."""
    if hasattr(x, "_torchdynamo_orig_callable"):
        yield x._torchdynamo_orig_callable
    elif isinstance(x, types.FunctionType):
        if (x.__module__ or "").split(".")[0] == "torch":  # exec may have made a function without one
            return
        for cell in x.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        for name in x.__code__.co_names:
            value = x.__globals__.get(name)
            if isinstance(value, (nn.Module, list, tuple, dict, types.FunctionType, functools.partial)):
                yield value
    elif isinstance(x, types.MethodType):
        yield from (x.__self__, x.__func__)
    elif isinstance(x, functools.partial):
        yield from (x.func, *x.args, *x.keywords.values())
    elif isinstance(x, (dict, list, tuple)):
        yield from itertools.islice(x.values() if isinstance(x, dict) else x, _VISITED)
    elif hasattr(x, "__dict__") and not isinstance(x, (type, types.BuiltinFunctionType, types.ModuleType, Tensor)):
        yield from vars(x).values()
