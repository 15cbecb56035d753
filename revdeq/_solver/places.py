"""A graph without its tensors.

Autograd keeps the graph of every evaluation of f, but not what it would save there: a `Place` stands for each tensor
that is left out. On the way back f is evaluated again, saves the same tensors in the same order, and fills the places.
A place belongs to the node that would have saved the tensor, and dies with it: what is not needed is not put back, and
what has been used is freed.
"""

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .. import _device
from .monitor import ReconstructionError

if TYPE_CHECKING:
    from .tape import Tape

MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation inside f: a tensor "
    "of shape {shape} was changed after an operation had saved it; write x = x.add(y) in place of x.add_(y)"
)

OTHER_TENSORS = (
    "f used another tensor of shape {shape} that requires a gradient in the backward pass than in the forward pass, "
    "with other numbers (a closure whose variables were changed after the solve? torch.func.functional_call or a "
    "cached parametrization around the forward pass alone?): leave what f closes over as it is until the backward "
    "pass, or pass these tensors to f through `args`, or make f a module of its own"
)

OTHER_COUNT = (
    "f does not compute the same when it is called again: in the backward pass it saved {again} tensors for its "
    "derivative, and in the forward pass {before}, in evaluation {number} (a cache that its first evaluation fills? a "
    "cached parametrization around the forward pass alone? a choice by a counter, or by random numbers of Python? "
    ".eval() or requires_grad_() since then?): what f computes must depend on its arguments only; a cache is to be "
    "filled before the solve, by calling f once"
)

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
    "{shape}, on which f depends, was changed between the forward and the backward pass (a step of an optimizer?), so "
    "that the gradient would be that of another f; change it after the backward pass"
)


class Place:
    """Stands in the graph for something that is left out.

    value: the tensor, or the tape of a solve within f, while it is at hand. version: the tensor's, when it was saved.
    leaf: the tensor itself, if it is a leaf that needs a gradient, and its version in the forward pass.
    like: shape, dtype and device of the tensor, where no gradient may flow by.
    """

    __slots__ = ("__weakref__", "leaf", "like", "value", "version")

    def __init__(self, value: Any, version: int = 0) -> None:
        self.value, self.version = value, version
        self.leaf: tuple[Tensor, int] | None = None
        self.like: Any = None

    def zeros(self) -> Tensor:
        shape, dtype, device = self.like
        return torch.zeros((), dtype=dtype, device=device).expand(shape)


class Home:
    """Where a tape is: held by its graph, or where the solve is within an f, in a place of that evaluation, which
    forgets it like any tensor and gets another one when it is repeated."""

    __slots__ = ("_evaluation", "_place", "_tape")

    def __init__(self, tape: "Tape") -> None:
        around = getattr(_thread, "evaluation", None)
        self._evaluation: Evaluation | None = around
        self._place = None if around is None else around.hold(tape)
        self._tape = tape if around is None else None

    def __call__(self) -> "Tape":
        if self._place is None:
            return self._tape
        if self._place.value is None:
            assert self._evaluation is not None
            return self._evaluation.found(self._place)
        return self._place.value

    @property
    def is_within(self) -> bool:
        """Whether the solve is within the f of another one."""
        return self._evaluation is not None


class Evaluation:
    """One evaluation of f, and the places of what it saved.

    k: its number, from 0. values: what f returned, if what it saved is kept.
    """

    def __init__(self, home: Home | None, k: int, may_be_left_out: bool = False) -> None:
        """Without a home, nothing can be put back: no gradient may come here. may_be_left_out: whether it is not known
        yet if this evaluation is one of those that are differentiated."""
        self._home, self.k, self._may_be_left_out = home, k, may_be_left_out
        self._places: list[weakref.ref[Place]] = []
        self._filled: int | None = None  # so many of them, while f is evaluated again
        self._trouble: RuntimeError | None = None  # that came up then
        self.values: list[Tensor] | None = None

    @property
    def is_recorded(self) -> bool:
        return self._home is not None

    @property
    def is_within_another(self) -> bool:
        """Whether its solve is within the f of another one."""
        return self._home is not None and self._home.is_within

    def __enter__(self) -> None:
        """Around the first time."""
        self._enter(saved_tensors_hooks(self._pack, self._unpack))

    def _enter(self, hooks: Any) -> None:
        self._around, _thread.evaluation = getattr(_thread, "evaluation", None), self
        self._hooks = hooks
        hooks.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        _thread.evaluation = self._around
        del self._hooks, self._around

    def again(self) -> "_Again":
        """Around every other time."""
        self._filled = 0
        return _Again(self)

    def _pack(self, x: Tensor) -> Place:
        version = x._version
        place = Place(x, version)
        if x.requires_grad:
            leaf = x if x.is_leaf else x._base  # a weight is mostly saved transposed
            if leaf is not None and leaf.is_leaf:
                place.leaf = leaf, version
        if self._may_be_left_out:
            place.like = x.shape, x.dtype, x.device
        self._places.append(_ref(place))
        return place

    def _unpack(self, place: Place) -> Tensor:
        x = place.value
        if x is None:
            return self.found(place)
        if x._version != place.version:
            raise RuntimeError(MODIFIED.format(shape=tuple(x.shape)))
        return x

    def _fill(self, x: Tensor) -> Tensor:
        value = x.detach()
        place = self._next()
        if place is not None:
            place.value, place.version = value, x._version
            if place.leaf is not None and self._trouble is None:
                self._trouble = _trouble(*place.leaf, x if x.is_leaf else x._base, place.version)
        return value

    def _next(self) -> Place | None:
        assert self._filled is not None
        self._filled += 1
        return self._places[self._filled - 1]() if self._filled <= len(self._places) else None

    def hold(self, tape: "Tape") -> Place:
        """A place for a solve within f."""
        if self._filled is None:
            place = Place(tape)
            self._places.append(_ref(place))
            return place
        before = self._next()
        if before is not None:
            before.value = tape
        return Place(tape)

    def found(self, place: Place) -> Any:
        """What belongs to a place that is empty: undoes steps until it is there."""
        if self._home is None:
            raise RuntimeError(
                "a gradient arrives inside an evaluation of f that is not differentiated (gradient='implicit', "
                "backward_steps), through something that f computed there and kept (an auxiliary loss, a feature): use "
                "gradient='exact' without backward_steps, or compute it from solution.z"
            )
        if not self._home().reaches(self):
            return place.zeros()
        if place.value is None:
            raise ReconstructionError(OTHER_COUNT.format(again="fewer", before=len(self._places), number=self.k + 1))
        return place.value

    def leaves(self) -> list[Tensor]:
        """Those that need a gradient, of which f saved something."""
        leaves = [place.leaf[0] for ref in self._places if (place := ref()) is not None and place.leaf is not None]
        return list({id(x): x for x in leaves}.values())

    def check_filled(self) -> None:
        """After f was evaluated again."""
        again, trouble = self._filled, self._trouble
        self._filled = self._trouble = None
        if again != len(self._places):
            raise ReconstructionError(OTHER_COUNT.format(again=again, before=len(self._places), number=self.k + 1))
        if trouble is not None:
            raise trouble

    def keep(self, outputs: list[Tensor]) -> None:
        """Keep what was saved, and what f returned."""
        self.values = [x.detach() for x in outputs]
        for ref in self._places:
            place = ref()
            if place is not None and isinstance(place.value, Tensor):
                place.value = place.value.detach()  # whose graph would hold the place

    def empty(self, device: torch.device | None = None) -> None:
        """Forget what is in the places. With a device, only what is there: nodes of another one may be late, and then
        still ask."""
        for ref in self._places:
            place = ref()
            if place is not None and (device is None or getattr(place.value, "device", device) == device):
                place.value = None
        self.values = None


class _Again:
    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation

    def __enter__(self) -> None:
        self._evaluation._enter(saved_tensors_hooks(self._evaluation._fill, _as_it_is))

    def __exit__(self, kind: object, *exception: object) -> None:
        self._evaluation.__exit__(kind, *exception)
        if kind is None:
            self._evaluation.check_filled()
        else:
            self._evaluation._filled = None


def _trouble(before: Tensor, version: int, now: Tensor | None, version_now: int) -> RuntimeError | None:
    """Of leaves. f may make one itself in every evaluation, but its numbers must be the same, which is asked where a
    look does not wait for the device."""
    if now is before:
        return None if version_now == version else RuntimeError(CHANGED.format(shape=tuple(before.shape)))
    alike = now is not None and (before.shape, before.dtype, before.device) == (now.shape, now.dtype, now.device)
    if not alike or (_device.can_look(before) and not torch.equal(before, now)):  # type: ignore[arg-type]
        return RuntimeError(OTHER_TENSORS.format(shape=tuple(before.shape)))
    return None


def _as_it_is(x: Tensor) -> Tensor:
    return x


_ref = weakref.ref
_thread = threading.local()
"""evaluation: the one of f that this thread is in, if it is."""
