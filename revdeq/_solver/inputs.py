"""What f depends on beside its state: the tensors that its gradient flows to, found with no declaration.

The graph of an evaluation is followed back from f's outputs to where it begins: at leaves, and at results of
operations that ran before the solve. These are captured, and the gradient stops there: whatever made them is
walked once, by the backward pass of the whole model, and not at every step.
"""

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointFunction

from .stateful import refuse_running_statistics

State = list[Tensor]

_Leaf = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
"""The node that a leaf's gradient arrives at."""

_Reentrant = CheckpointFunction._backward_cls
"""The node of a checkpoint that calls `backward` by itself, past whoever asks for a gradient."""

_CAST = "ToCopyBackward0"
"""The node of a cast. Autocast keeps those of weights from one evaluation to the next."""

_next_number = torch._C._autograd._get_sequence_nr
"""The number of the next node that autograd makes in this thread."""


_functorch: Any = torch._C._functorch


class Unreachable(RuntimeError):
    """A gradient flows out of f to where it cannot be caught."""


class CarriedOver(RuntimeError):
    """An evaluation used what an earlier one of the same solve had computed and kept."""

    def __init__(self, maker: str) -> None:
        super().__init__(
            f"f keeps a tensor that {maker} made in one evaluation and uses it in a later one (a state of its own, a "
            "cache that it fills?), which no backward pass could repeat: detach what f keeps, or compute it before the "
            "solve"
        )


class Inputs:
    """The tensors that the gradient of f flows to, as they are found, evaluation by evaluation.

    tensors: all of them, those given as arguments first.
    """

    def __init__(self, arguments: Sequence[Tensor], aliases: Sequence[Tensor]) -> None:
        self.tensors = list(arguments)
        self._index = {id(x): i for i, x in enumerate(aliases)}
        self._aliases = aliases  # an id is that of a tensor only while the tensor lives
        self._hooks = [0] * len(aliases)  # as many as each tensor in the graph had when it was found
        self._reached: list[frozenset[int]] = []  # by each evaluation: indices into tensors
        self._last_found: frozenset[int] = frozenset()  # usually the same again: the ids of its tensors, and indices
        self._last_reached: frozenset[int] = frozenset()

    def note(self, found: dict[int, Tensor]) -> list[weakref.ref[Tensor]]:
        """Takes what an evaluation reached. Returns the leaves that are not known yet, to be given to `adopt` when the
        graph is gone."""
        if found.keys() == self._last_found:
            self._reached.append(self._last_reached)
            return []
        unknown = []
        for key, x in found.items():
            if key not in self._index and x.grad_fn is None:
                unknown.append(weakref.ref(x))
            elif key not in self._index:
                self._add(x)
        self._reached.append(frozenset())
        self._remember(frozenset(key for key in found if key in self._index))
        return unknown

    def adopt(self, unknown: list[weakref.ref[Tensor]]) -> None:
        """Of these leaves, f depends on those that somebody still holds. The others f has made by itself, like the
        `z.detach().requires_grad_()` of an energy or a score: no gradient leaves them."""
        held = [x for ref in unknown if (x := ref()) is not None]
        for x in held:
            self._add(x)
        self._remember(self._last_found | {id(x) for x in held})

    def _add(self, x: Tensor) -> None:
        self._index[id(x)] = len(self.tensors)
        self.tensors.append(x)
        self._hooks.append(_hooks_on(x))

    def _remember(self, keys: frozenset[int]) -> None:
        self._last_found, self._last_reached = keys, frozenset([self._index[key] for key in keys])
        self._reached[-1] = self._last_reached

    def in_graph(self, index: int) -> Tensor:
        """The tensor that stands for one of `tensors` in the graphs of the forward pass."""
        return self._aliases[index] if index < len(self._aliases) else self.tensors[index]

    def refuse_hooks_of_f(self) -> None:
        """Hooks on f's own results are part of its graph, and welcome."""
        for i, count in enumerate(self._hooks):
            if _hooks_on(self.in_graph(i)) > count:
                name = f"a tensor of shape {tuple(self.tensors[i].shape)} that is given to it or that it closes over"
                raise RuntimeError(
                    f"f registers a hook on {name}, and would register another one at every evaluation: register it "
                    "before the solve, where it sees the whole gradient, once"
                )

    def by_evaluation(self) -> list[frozenset[int]]:
        """Which of `tensors` each evaluation depends on, as their indices."""
        return list(self._reached)


class Search(TorchFunctionMode):
    """Finds the tensors that the gradient of f flows to.

    Entered as a mode around an evaluation of f, it sees every tensor that enters an operation, and keeps those that
    require a gradient and were made before. Autograd numbers the nodes that it makes, in each thread for itself: a
    node of this thread is older than the search if its number is smaller. One of another thread (the backward
    passes of a GPU have one of their own) may have any number, but no operation in here was seen to make it.
    """

    def __init__(self, captured: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._start = self._evaluation = _next_number()
        self._captured: dict[Any, dict[int, Tensor]] = {}  # by the node that made it, and the place among its results
        for x in captured:
            self._add(x)
        self._made: set[Any] = set()  # nodes that made the results of operations
        self._numbers: set[int] = set()  # of all nodes that operations made

    def begin(self) -> None:
        """Before every evaluation."""
        self._evaluation = _next_number()

    def __exit__(self, *exception: Any) -> None:
        self._made, self._numbers = set(), set()
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [_innermost(x) for x in _tensors((*args, *kwargs.values()))]
        for x in given:
            if x.requires_grad and self._is_captured(x.grad_fn):
                self._add(x)
        given += [x._base for x in given if x._base is not None]
        before = [x.grad_fn for x in given]
        refuse_running_statistics(func, args, kwargs)
        first = _next_number()
        out = func(*args, **kwargs)
        self._numbers.update(range(first, _next_number()))
        results = map(_innermost, _tensors((out,)))
        self._made.update(x.grad_fn for x in results if x.requires_grad)
        # x[i] = y returns nothing, and x[i].add_(y) not x.
        self._made.update(x.grad_fn for x, node in zip(given, before, strict=True) if x.grad_fn is not node)
        return out

    def _add(self, x: Tensor) -> None:
        if x.grad_fn is not None:  # a leaf is found by its node
            self._captured.setdefault(x.grad_fn, {})[x.output_nr] = x

    def _is_captured(self, node: Any) -> bool:
        if node is None or node in self._made:
            return False
        number = node._sequence_nr()
        # What nothing was seen to return may be the result of a custom function, which is not seen.
        return number < self._start or number >= _next_number() or number in self._numbers

    def reached_from(self, leaves: State, outputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """Follows the graph of f back from its outputs to the tensors it begins with, by their ids. One that was not
        seen on its way in is an error if it is the result of an operation: its gradient would be lost."""
        reached: dict[int, Tensor] = {}
        edges: list[tuple[Any, int]] = []
        start, evaluation, captured = self._start, self._evaluation, self._captured
        visited = {x.grad_fn for x in leaves}
        for x in outputs:
            if x.requires_grad and x.grad_fn is None:
                reached[id(x)] = x
            elif x.requires_grad:
                if x.grad_fn._sequence_nr() < start:  # type: ignore[union-attr]  # f returns a captured tensor
                    self._add(x)
                edges.append((x.grad_fn, x.output_nr))
        for node, output_nr in edges:  # which grows on the way; this runs at every evaluation, and microseconds count
            if node is None or node in visited:
                continue
            if type(node) is _Leaf:
                x = node.variable
                reached[id(x)] = x
            elif node in captured:
                x = self._made_at(node, output_nr)
                reached[id(x)] = x
            elif type(node) is _Reentrant:
                raise RuntimeError(
                    "f contains torch.utils.checkpoint with use_reentrant=True, which keeps the gradients of what is "
                    "inside from the solver: use checkpoint(..., use_reentrant=False)"
                )
            elif (number := node._sequence_nr()) >= evaluation:
                visited.add(node)
                edges += node.next_functions
            elif number >= start and node.name() == _CAST:
                edges += node.next_functions
            elif number >= start:
                raise CarriedOver(node.name())
            else:
                self._made_at(node, output_nr)
        for x in leaves:
            reached.pop(id(x), None)
        return reached

    def _made_at(self, node: Any, output_nr: int) -> Tensor:
        if (x := self._captured.get(node, {}).get(output_nr)) is not None:
            return x
        raise Unreachable(
            f"f depends on a tensor that {node.name()} made before the solve, and that cannot be found from outside "
            "(is f compiled, or did it not use this tensor when it was evaluated for the first time?), so its gradient "
            "would be lost: pass this tensor to f through `args`"
        )


class Substitution(TorchFunctionMode):
    """Puts other tensors in the place of some, wherever they enter an operation."""

    def __init__(self, replaced: Sequence[Tensor], replacements: Sequence[Tensor]) -> None:
        super().__init__()
        self._by_id = {id(old): new for old, new in zip(replaced, replacements, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: self._by_id.get(id(x), x), (args, kwargs or {}))
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among the arguments of an operation. (tree_leaves takes five times as long.)"""
    for x in values:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _tensors(x)
        elif isinstance(x, dict):
            yield from _tensors(x.values())


def _hooks_on(x: Tensor) -> int:
    return len(x._backward_hooks or ())


def _innermost(x: Tensor) -> Tensor:
    """The tensor that transforms of torch.func inside f (vmap, grad, ...) wrap: the graph of f is made of those."""
    if torch.compiler.is_dynamo_compiling():  # a part of f, where there are no others
        return x
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return x


def alias(x: Tensor) -> Tensor:
    """The same values in a leaf of its own: gradients stop there, and hooks on x stay silent."""
    return x.detach().requires_grad_()
