"""Refuses an f that modifies buffers or captured tensors: every evaluation would, in the backward pass too.

The buffers and frozen parameters of all modules that f can reach, and the tensors in attributes and closures, are
compared before and after the first evaluation. If one has changed, as with BatchNorm in training mode, the values are
restored and an error is raised. The search follows closures, partials, bound methods, plain objects and compiled
functions.

f may assign a new tensor to a plain attribute or a captured variable: a feature for a loss, or statistics. The backward
pass restores the tensors that it finds there.
"""

import collections
import functools
import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .. import _device
from .private import COMPILED_FROM, is_compiled_module

STATEFUL = (
    "every evaluation of f would change, in the backward pass too: move the layer out of f, as the paper does, use a "
    "normalization without state (GroupNorm, LayerNorm), or call .eval() on it"
)

OBSERVING = (
    "would be changed by every evaluation of f, in the backward pass too, and by .eval() they are not frozen: call "
    "f.apply(torch.ao.quantization.disable_observer)"
)

PARAMETRIZED = (
    "every evaluation of f would change, in the backward pass too: compute the parametrization once, with "
    "torch.nn.utils.parametrize.cached() around the forward and the backward pass, or call .eval() on it"
)

_COPIED = 1 << 16
"""Larger buffers are not compared: statistics are small, and tables and masks do not change."""

_SEARCHED = (nn.Module, Tensor, list, tuple, dict, types.FunctionType, functools.partial, types.NoneType)
"""The types of global variables that may lead to a tensor, or are None and may get one."""

_VISITED = 256
"""The maximum number of objects to search: a closure may contain a whole data set."""

_NORMALISING = {
    nn.modules.batchnorm._BatchNorm: "a BatchNorm",
    nn.modules.instancenorm._InstanceNorm: "an InstanceNorm",
}


Slot = tuple[Any, str]
"""Where f can put a tensor: a dict and a name, or the cell of a closure and its name."""


class _Tensor(NamedTuple):
    """A tensor that f can reach, as it was before the first evaluation. A buffer has a module and, if it is small, a
    copy."""

    name: str
    module: nn.Module | None
    value: Tensor
    version: tuple[int, int]
    copy: Tensor | None

    def is_changed(self) -> bool:
        return _version(self.value) != self.version or _differs(self.value, self.copy)


class Unchanged:
    """Context manager around the first evaluation: notices changed buffers and captured tensors, and new hooks on
    them."""

    def __init__(self, modules: list[nn.Module], tensors: dict[str, Tensor], slots: list[Slot], args: Any) -> None:
        self._before: list[_Tensor] = []
        inputs: list[Any] = [x for x in args if isinstance(x, Tensor) and x.requires_grad]
        for name, x in tensors.items():
            if x.requires_grad:
                inputs.append(x)
            else:
                self._note(name, None, x)
        slots = list(slots)
        for outermost in modules:
            for path, module in outermost.named_modules():
                path = f"{path}." if path else ""
                for name, x in module._parameters.items():
                    if x is not None and x.requires_grad:
                        inputs.append(x)
                    elif x is not None:
                        self._note(path + name, None, x)
                for name, x in module._buffers.items():
                    slots.append((module._buffers, name))
                    if x is not None:
                        self._note(path + name, module, x)
                for name, x in module.__dict__.items():
                    if isinstance(x, Tensor):
                        self._note(path + name, None, x)
                    if isinstance(x, Tensor) or x is None:
                        slots.append((module.__dict__, name))
        self._slots, self._contents = slots, contents(slots)
        self._hooks: list[tuple[Tensor, int]] = []
        self._inputs = inputs if torch.is_grad_enabled() else []

    def _note(self, name: str, module: nn.Module | None, x: Tensor) -> None:
        if x.is_inference() or x.layout is not torch.strided or x.is_nested or x.requires_grad:
            return
        copied = module is not None and module.training and x.numel() <= _COPIED
        self._before.append(_Tensor(name, module, x, _version(x), x.clone() if copied else None))

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, *exception: object) -> None:
        changed = [x for x in self._before if x.is_changed()]
        if not torch.is_grad_enabled():  # no backward pass follows: f may fill caches, but not update statistics
            changed = [x for x in changed if isinstance(x.module, tuple(_NORMALISING))]
        with torch.no_grad():
            for x in changed:
                if x.copy is not None:
                    x.value.copy_(x.copy)
        if kind is not None:
            return
        for x in changed:
            for family, name in _NORMALISING.items():
                if isinstance(x.module, family):
                    raise RuntimeError(f"f contains {name} in training mode, whose running statistics {STATEFUL}")
        if changed:
            why = STATEFUL
            if any(hasattr(x.module, "observer_enabled") for x in changed):
                why = OBSERVING
            elif any(".parametrizations." in f".{x.name}" for x in changed):
                why = PARAMETRIZED
            lost = [x.name for x in changed if x.copy is None]
            not_restored = f" (not restored: {', '.join(lost)})" if lost else ""
            raise RuntimeError(f"f changes {', '.join(x.name for x in changed)}, which {why}{not_restored}")
        self._hooks = [(x, len(x._backward_hooks or ())) for x in self._inputs]

    def without_grad(self) -> list[Tensor]:
        """Tensors that f can get at and that needed no gradient."""
        return [x.value for x in self._before]

    def hooked(self) -> list[Tensor]:
        """The tensors on which evaluations have registered hooks."""
        return [x for x, count in self._hooks if len(x._backward_hooks or ()) > count]

    def used(self) -> list[Slot]:
        """Where evaluations have put tensors."""
        rows = zip(self._slots, self._contents, contents(self._slots), strict=True)
        return [slot for slot, before, now in rows if before is not now]


def contents(slots: list[Slot]) -> list[Any]:
    return [holder.get(name) if isinstance(holder, dict) else holder.cell_contents for holder, name in slots]


def put_back(slots: list[Slot], values: list[Any]) -> None:
    for (holder, name), value in zip(slots, values, strict=True):
        if isinstance(holder, dict):
            holder[name] = value
        else:
            holder.cell_contents = value


def _version(x: Tensor) -> tuple[int, int]:
    """A frozen parameter may also get other memory (x.data = ...), which autograd does not count."""
    return x._version, x.data_ptr() if type(x) is nn.Parameter else 0


def _differs(x: Tensor, copy: Tensor | None) -> bool:
    """Compares values, because autograd does not count all changes (x.data.add_), unless that would synchronize."""
    return copy is not None and _device.can_look(x) and not torch.equal(x, copy) and not bool(x.isnan().any())


def fill_caches(modules: list[nn.Module]) -> None:
    """With `parametrize.cached()`, only the first evaluation would compute parametrizations: compute them before."""
    found = [module for outermost in modules for module in outermost.modules() if parametrize.is_parametrized(module)]
    if not found or not _caches_parametrizations():
        return
    for module in found:
        for name in module.parametrizations:  # type: ignore[union-attr]
            getattr(module, name)


def _caches_parametrizations() -> bool:
    """Whether `parametrize.cached()` is active: a parametrization then returns the same tensor twice."""
    probe = nn.Module()
    probe.register_parameter("x", nn.Parameter(torch.zeros((), device="cpu")))
    parametrize.register_parametrization(probe, "x", nn.ReLU())
    return probe.x is probe.x


def refuse_sharded(modules: list[nn.Module], has_tolerance: bool) -> None:
    """Raise for sharded modules: with a `tol`, and for those whose parameters exist only temporarily."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    found = [module for outermost in modules for module in outermost.modules()]
    if any(isinstance(module, getattr(fsdp, "FullyShardedDataParallel", ())) for module in found):
        raise TypeError(
            "f contains a FullyShardedDataParallel module, whose parameters do not exist when f is evaluated again: "
            "shard f with torch.distributed.fsdp.fully_shard, or wrap the module around the solve"
        )
    sharded = any(isinstance(module, fsdp.FSDPModule) for module in found)
    if has_tolerance and sharded and torch.distributed.get_world_size() > 1:
        raise ValueError(
            "tol does not work with an f that fully_shard has sharded over several processes: they would stop after "
            "different numbers of steps, and each step needs all of them. Use tol=None, or shard the module around "
            "the solve (fully_shard(deq))"
        )


def reachable(f: Any) -> tuple[list[nn.Module], dict[str, Tensor], list[Slot]]:
    """The outermost modules that f can reach (itself, or those that it captures, is bound to or was made from), the
    tensors that it captures, by name, and the slots that have a tensor, or None, which f may replace by one."""
    found: list[nn.Module] = []
    tensors: dict[str, Tensor] = {}
    slots: list[Slot] = []
    for name, x, slot in _held(f):
        if isinstance(x, nn.Module):
            found.append(x)
        elif isinstance(x, Tensor):
            tensors.setdefault(name, x)
        if slot is not None and (x is None or isinstance(x, Tensor)):
            slots.append(slot)
    return found, tensors, slots


def is_compiled(f: Any) -> bool:
    """Whether f, or a part of it, is compiled."""
    for _, x, _ in _held(f):
        if _attribute(x, COMPILED_FROM) is not None:
            return True
        if isinstance(x, nn.Module) and any(map(is_compiled_module, x.modules())):
            return True
    return False


def _held(f: Any) -> Iterator[tuple[str, Any, Slot | None]]:
    """f and the objects that it can reach, by name, with the slot that f could assign to. Modules are not searched."""
    seen: set[int] = set()
    left: collections.deque[tuple[str, Any, Slot | None]] = collections.deque([("f", f, None)])  # breadth first
    while left and len(seen) < _VISITED:
        name, x, slot = left.popleft()
        if id(x) in seen and x is not None:
            continue
        seen.add(id(x))
        yield name, x, slot
        if not isinstance(x, (nn.Module, Tensor)):
            left += _held_by(name, x)


def _held_by(of: str, x: Any) -> Iterator[tuple[str, Any, Slot | None]]:
    """The contents of a callable or container that may lead to a module. Objects may have any attribute, or raise any
    error."""
    compiled = _attribute(x, COMPILED_FROM)
    if callable(compiled):
        yield of, compiled, None
    elif isinstance(x, types.FunctionType):
        if (x.__module__ or "").split(".")[0] == "torch":  # a function made by exec may have no module
            return
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents, (cell, name)
            except ValueError:  # an unassigned cell
                continue
        for name in x.__code__.co_names:
            value = x.__globals__.get(name, ())
            if isinstance(value, _SEARCHED):
                yield name, value, (x.__globals__, name)
    elif isinstance(x, types.MethodType):
        yield from ((of, x.__self__, None), (of, x.__func__, None))
    elif isinstance(x, functools.partial):
        yield from ((of, y, None) for y in (x.func, *x.args, *x.keywords.values()))
    elif isinstance(x, dict):
        yield from ((f"{of}[{key!r}]", y, (x, key)) for key, y in itertools.islice(x.items(), _VISITED))
    elif isinstance(x, (list, tuple)):
        yield from ((f"{of}[{i}]", y, None) for i, y in enumerate(x[:_VISITED]))
    elif not isinstance(x, (type, types.BuiltinFunctionType, types.ModuleType)):
        held = _attribute(x, "__dict__")
        if isinstance(held, dict):
            yield from ((f"{of}.{name}", y, (held, name)) for name, y in list(held.items()))


def _attribute(x: Any, name: str) -> Any:
    try:
        return getattr(x, name, None)
    except Exception:
        return None
