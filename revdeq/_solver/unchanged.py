"""What f must leave as it is: whatever an evaluation changes would be changed by every one, in the backward pass too.

Buffers of all modules that f can get at, and tensors that it closes over, are compared around the first evaluation.
They get their values back, and f is refused: a BatchNorm in training mode, say. f is looked into through closures,
partials, bound methods, plain objects and compiled functions.
"""

import collections
import functools
import itertools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import _device
from .private import caches_parametrizations, is_compiled_module

STATEFUL = (
    "would be changed by every evaluation of f, in the backward pass too: put the layer outside f, as the paper does, "
    "or use a normalisation without state (GroupNorm, LayerNorm), or call .eval() on it"
)

_COPIED = 1 << 16
"""Elements of the largest buffer that is worth a copy: statistics are small, and tables and masks do not change."""

_VISITED = 256
"""The most objects to look into for modules: a closure may hold a whole data set."""

_NORMALISING = {
    nn.modules.batchnorm._BatchNorm: "a BatchNorm",
    nn.modules.instancenorm._InstanceNorm: "an InstanceNorm",
}


class Unchanged:
    """Around the first evaluation: notices when it changes what f can get at, or registers hooks there."""

    def __init__(self, modules: list[nn.Module], tensors: dict[str, Tensor], args: Iterable[Any]) -> None:
        self._before: list[tuple[str, nn.Module | None, Tensor, int, Tensor | None]] = []
        inputs: list[Any] = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        for name, x in tensors.items():
            if x.requires_grad:
                inputs.append(x)
            else:
                self._note(name, None, x)
        for outermost in modules:
            for path, module in outermost.named_modules():
                inputs += module._parameters.values()
                for name, x in module._buffers.items():
                    if x is not None:
                        self._note(f"{path}.{name}" if path else name, module, x)
        self._hooks: list[tuple[Tensor, int]] = []
        self._inputs = [x for x in inputs if x is not None] if torch.is_grad_enabled() else []

    def _note(self, name: str, module: nn.Module | None, x: Tensor) -> None:
        if x.is_inference() or x.layout is not torch.strided or x.is_nested:
            return
        copied = module is not None and module.training and x.numel() <= _COPIED
        self._before.append((name, module, x, x._version, x.clone() if copied else None))

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, *exception: object) -> None:
        changed = [row for row in self._before if row[2]._version != row[3] or _differs(row[2], row[4])]
        if not torch.is_grad_enabled():  # no backward pass follows: f may fill its caches, but not count statistics
            changed = [row for row in changed if isinstance(row[1], tuple(_NORMALISING))]
        with torch.no_grad():
            for _, _, buffer, _, copy in changed:
                if copy is not None:
                    buffer.copy_(copy)
        if kind is not None:
            return
        for _, module, *_ in changed:
            for family, name in _NORMALISING.items():
                if isinstance(module, family):
                    raise RuntimeError(f"f contains {name} in training mode, whose running statistics {STATEFUL}")
        if changed:
            raise RuntimeError(f"f changes its buffers {', '.join(name for name, *_ in changed)}, which {STATEFUL}")
        self._hooks = [(x, len(x._backward_hooks or ())) for x in self._inputs]

    def hooked(self) -> list[Tensor]:
        """Tensors on which evaluations after the first have registered hooks."""
        return [x for x, count in self._hooks if len(x._backward_hooks or ()) > count]


def _differs(x: Tensor, copy: Tensor | None) -> bool:
    """Also after a change that autograd does not count (x.data.add_), unless a look would wait for the device."""
    return copy is not None and _device.can_look(x) and not torch.equal(x, copy) and not bool(x.isnan().any())


def fill_caches(modules: list[nn.Module]) -> None:
    """Where `parametrize.cached()` is active, the first evaluation would compute what the others find."""
    if not caches_parametrizations():
        return
    for outermost in modules:
        for module in outermost.modules():
            if parametrize.is_parametrized(module):
                for name in module.parametrizations:  # type: ignore[union-attr]
                    getattr(module, name)


def refuse_tolerance(modules: list[nn.Module]) -> None:
    """Of a solve with a `tol`."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", ())
    found = any(isinstance(module, sharded) for outermost in modules for module in outermost.modules())
    if found and torch.distributed.get_world_size() > 1:
        raise ValueError(
            "tol with an f that fully_shard has sharded over several processes would not end: they would stop "
            "after different numbers of steps, and each step needs all of them. Use tol=None, or shard the "
            "module around the solve (fully_shard(deq))"
        )


def modules_of(f: Any) -> list[nn.Module]:
    """The outermost modules that f can get at: itself, or those that it closes over, is bound to or was made from."""
    return reachable(f)[0]


def reachable(f: Any) -> tuple[list[nn.Module], dict[str, Tensor]]:
    """The same, and tensors that it closes over, by name."""
    found: list[nn.Module] = []
    tensors: dict[str, Tensor] = {}
    for name, x in _held(f):
        if isinstance(x, nn.Module):
            found.append(x)
        elif isinstance(x, Tensor):
            tensors.setdefault(name, x)
    return found, tensors


def is_compiled(f: Any) -> bool:
    """Whether f, or a part of it, is compiled."""
    for _, x in _held(f):
        if hasattr(x, "_torchdynamo_orig_callable"):
            return True
        if isinstance(x, nn.Module) and any(map(is_compiled_module, x.modules())):
            return True
    return False


def _held(f: Any) -> Iterator[tuple[str, Any]]:
    """f, and what it can get at, by name. Modules are not looked into."""
    seen: set[int] = set()
    left = collections.deque([("f", f)])  # what is near comes first
    while left and len(seen) < _VISITED:
        name, x = left.popleft()
        if id(x) in seen:
            continue
        seen.add(id(x))
        yield name, x
        if not isinstance(x, (nn.Module, Tensor)):
            left += _held_by(name, x)


def _held_by(of: str, x: Any) -> Iterator[tuple[str, Any]]:
    """What a callable or a container holds that may lead to a module, by name. An object may answer to any name, or
    raise any error."""
    compiled = _attribute(x, "_torchdynamo_orig_callable")
    if callable(compiled):
        yield of, compiled
    elif isinstance(x, types.FunctionType):
        if (x.__module__ or "").split(".")[0] == "torch":  # exec may have made a function without one
            return
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # not assigned yet
                continue
        for name in x.__code__.co_names:
            value = x.__globals__.get(name)
            if isinstance(value, (nn.Module, list, tuple, dict, types.FunctionType, functools.partial)):
                yield name, value
    elif isinstance(x, types.MethodType):
        yield from ((of, x.__self__), (of, x.__func__))
    elif isinstance(x, functools.partial):
        yield from ((of, y) for y in (x.func, *x.args, *x.keywords.values()))
    elif isinstance(x, dict):
        yield from ((f"{of}[{key!r}]", y) for key, y in itertools.islice(x.items(), _VISITED))
    elif isinstance(x, (list, tuple)):
        yield from ((f"{of}[{i}]", y) for i, y in enumerate(x[:_VISITED]))
    elif not isinstance(x, (type, types.BuiltinFunctionType, types.ModuleType)):
        held = _attribute(x, "__dict__")
        if isinstance(held, dict):
            yield from ((f"{of}.{name}", y) for name, y in list(held.items()))


def _attribute(x: Any, name: str) -> Any:
    try:
        return getattr(x, name, None)
    except Exception:
        return None
