"""Finding the tensors that f's gradient flows to, with no declaration."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointFunction

_Leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The node that a leaf's gradient arrives at."""

_Reentrant = CheckpointFunction._backward_cls
"""The node of a checkpoint that calls `backward` by itself, past whoever asks for a gradient."""


class Unreachable(RuntimeError):
    """A gradient flows out of f to where it cannot be caught."""


class Search(TorchFunctionMode):
    """Finds the tensors that the gradient of f flows to.

    Entered as a mode around an evaluation of f, it sees every tensor that enters an operation, and keeps
    those that require a gradient and are older than `start`: autograd numbers its nodes as they are made.
    """

    def __init__(self, candidates: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._start = _sequence_number()
        self._candidates = {id(x): x for x in candidates}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in _tensors((*args, *kwargs.values())):
            if x.requires_grad and self._is_older(x.grad_fn):
                self._candidates[id(x)] = x
        _refuse_running_statistics(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_older(self, node: Any) -> bool:
        return node is None or node._sequence_nr() < self._start

    def reached_from(self, outputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """Follows the graph of f back from its outputs to the tensors it begins with, by their ids. One that was not
        seen on its way in is an error if it is the result of an operation: its gradient would be lost."""
        reached: dict[int, Tensor] = {}
        edges: list[tuple[Any, int]] = []
        start, visited = self._start, set()
        for x in outputs:
            if x.requires_grad and x.grad_fn is None:
                reached[id(x)] = x
            elif x.requires_grad:
                if self._is_older(x.grad_fn):
                    self._candidates[id(x)] = x
                edges.append((x.grad_fn, x.output_nr))
        for node, output_nr in edges:  # which grows on the way; this runs at every evaluation, and microseconds count
            if node is None or node in visited:
                continue
            if type(node) is _Leaf:
                x = node.variable
                reached[id(x)] = x
            elif type(node) is _Reentrant:
                raise RuntimeError(
                    "f contains torch.utils.checkpoint with use_reentrant=True, which keeps the gradients of what is "
                    "inside from the solver: use checkpoint(..., use_reentrant=False)"
                )
            elif node._sequence_nr() >= start:
                visited.add(node)
                edges += node.next_functions
            else:
                x = self._made_at(node, output_nr)
                reached[id(x)] = x
        return reached

    def _made_at(self, node: Any, output_nr: int) -> Tensor:
        for x in self._candidates.values():
            if x.grad_fn is node and x.output_nr == output_nr:
                return x
        raise Unreachable(
            f"f depends on a tensor that {node.name()} made before the solve, and that cannot be found from outside "
            "(is f compiled, or did it not use this tensor when it was evaluated for the first time?), so its gradient "
            "would be lost: pass this tensor to f through `args`"
        )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among the arguments of an operation. (tree_leaves takes five times as long.)"""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(x)
        elif isinstance(x, dict):
            yield from _tensors(x.values())


def _sequence_number() -> int:
    """Of the next node that autograd makes in this thread."""
    if torch.is_inference_mode_enabled():
        return 0
    with torch.enable_grad():
        node = torch.empty((), requires_grad=True).view(()).grad_fn
    assert node is not None
    return node._sequence_nr() + 1


class Substitution(TorchFunctionMode):
    """Puts other tensors in the place of some, wherever they enter an operation."""

    def __init__(self, replaced: Sequence[Tensor], replacements: Sequence[Tensor]) -> None:
        super().__init__()
        self._by_id = {id(old): new for old, new in zip(replaced, replacements, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: self._by_id.get(id(x), x), (args, kwargs or {}))
        return func(*args, **kwargs)


STATEFUL = (
    "would be changed by every evaluation of f, in the backward pass too: put the layer outside f, as the paper does, "
    "or use a normalisation without state (GroupNorm, LayerNorm), or call .eval() on it"
)


def _refuse_running_statistics(func: Any, args: Any, kwargs: Any) -> None:
    if func is nn.functional.batch_norm and args[1] is not None and kwargs["training"]:
        raise RuntimeError(f"f contains a BatchNorm in training mode, whose running statistics {STATEFUL}")
    if func is nn.functional.instance_norm and kwargs["running_mean"] is not None and kwargs["use_input_stats"]:
        raise RuntimeError(f"f contains an InstanceNorm in training mode, whose running statistics {STATEFUL}")


class Buffers:
    """Notices when an evaluation changes a module's buffers."""

    def __init__(self, f: Any) -> None:
        buffers = f.named_buffers() if isinstance(f, nn.Module) else ()
        self._versions = [(name, b, b._version) for name, b in buffers if not b.is_inference()]

    def check(self) -> None:
        changed = [name for name, buffer, version in self._versions if buffer._version != version]
        if changed:
            raise RuntimeError(f"f changes its buffers {', '.join(changed)}, which {STATEFUL}")


def is_compiled(f: Any) -> bool:
    """Whether torch.compile made f: a mode around it would have it compiled a second time, differently."""
    return any(getattr(f, name, None) for name in ("_torchdynamo_orig_callable", "_orig_mod", "_compiled_call_impl"))


def needs_alias(x: Tensor) -> bool:
    """Whether a gradient by x itself would run something of the user's, or has become impossible."""
    return bool(x._backward_hooks) or (not x.is_leaf and x.retains_grad) or not x.requires_grad


def module_tensors(f: Any) -> dict[str, Tensor]:
    """Parameters and buffers by name, if f is a module."""
    if not isinstance(f, nn.Module):
        return {}
    return {**dict(f.named_parameters(remove_duplicate=False)), **dict(f.named_buffers(remove_duplicate=False))}


def alias(x: Tensor) -> Tensor:
    """The same values in a leaf of its own: gradients stop there, and hooks on x stay silent."""
    return x.detach().requires_grad_()
