"""A graph without its tensors.

Autograd keeps the graph of every evaluation of f, but not what it would save there: a number, the place, stands for
each tensor that is left out. On the way back f is evaluated again, saves the same tensors in the same order, and fills
the places.
"""

import functools
import itertools
import threading
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

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
    "{shape}, on which f depends, was changed between the forward and the backward pass (a step of an optimizer?), so "
    "that the gradient would be that of another f; change it after the backward pass"
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


class Differentiates(Exception):
    """f itself asks for derivatives, so that what it saves is needed while it is evaluated."""


class Home:
    """Where a tape is: held by its graph, or where the solve is within an f, in a place of that evaluation, which
    forgets it like any tensor and gets another one when it is repeated."""

    __slots__ = ("_evaluation", "_place", "_tape")

    def __init__(self, tape: "Tape") -> None:
        around: _Running | None = getattr(_thread, "running", None)
        self._tape = tape if around is None else None
        self._evaluation = None if around is None else around.evaluation
        self._place = None if around is None else around.hold(tape)

    def __call__(self) -> "Tape":
        if self._tape is not None:
            return self._tape
        assert self._evaluation is not None and self._place is not None
        return self._evaluation.held(self._place)

    @property
    def is_within(self) -> bool:
        """Whether the solve is within the f of another one."""
        return self._evaluation is not None


class Notes:
    """What the first evaluation of a solve tells about f.

    needed: whether every evaluation has to note what it saves: because f asks for derivatives itself, or changes in
        place what was saved, which is an error only if a gradient flows there.
    leaves: those that need a gradient, by their places, with their versions.
    devices: of all that was saved.
    """

    def __init__(self) -> None:
        self.needed = False
        self.leaves: dict[int, tuple[Tensor, int]] = {}
        self.devices: set[torch.device] = set()

    def refuse_changes(self) -> None:
        """Before the way back."""
        for leaf, version in self.leaves.values():
            if leaf._version != version:
                raise RuntimeError(CHANGED.format(shape=tuple(leaf.shape)))

    def compare(self, leaves: dict[int, Tensor | None]) -> None:
        """With those of the first evaluation when it was repeated. f may make a leaf itself, but its numbers must be
        the same, which is asked where a look does not wait for the device."""
        for i, (before, _) in self.leaves.items():
            now = leaves[i]
            if now is before:
                continue
            likes = [None if x is None else (x.shape, x.dtype, x.device) for x in (before, now)]
            same = likes[0] == likes[1] and (not _device.can_look(before) or torch.equal(before, now))  # type: ignore[arg-type]
            if not same:
                raise RuntimeError(OTHER_TENSORS.format(shape=tuple(before.shape)))


def _leaf(x: Tensor) -> Tensor | None:
    """x, or what it is a view of, if that is a leaf: a weight is mostly saved transposed."""
    if x.is_leaf:
        return x
    base = x._base
    return base if base is not None and base.is_leaf else None


class Evaluation:
    """One evaluation of f, and what belongs to its places while that is at hand.

    k: its number, from 0. count: of its places. values: what f returned, if what it saved is kept.
    """

    __slots__ = ("__weakref__", "_home", "_likes", "count", "k", "notes", "tensors", "values", "versions")

    def __init__(self, home: Home | None, k: int) -> None:
        """Without a home, nothing can be put back: no gradient may come here."""
        self._home, self.k, self.count = home, k, 0
        self.tensors: list[Any] | None = None
        self.versions: list[int] | None = None
        self.values: list[Tensor] | None = None
        self._likes: list[Any] | None = None
        self.notes: Notes | None = None  # while it is evaluated, and noted

    @property
    def is_recorded(self) -> bool:
        return self._home is not None

    @property
    def is_within_another(self) -> bool:
        """Whether its solve is within the f of another one."""
        return self._home is not None and self._home.is_within

    def note_shapes(self) -> None:
        """It may turn out later that this evaluation is not to be differentiated."""
        self._likes = [(x.shape, x.dtype, x.device) if isinstance(x, Tensor) else None for x in self.tensors or []]

    def empty(self, only: torch.device | None = None) -> None:
        """Forget what is in the places, or what is on one device: nodes of another one may be late, and still ask."""
        self.values = None
        if only is None or self.tensors is None:
            self.tensors = self.versions = None
        else:
            self.tensors = [x if isinstance(x, Tensor) and x.device != only else None for x in self.tensors]

    def unpack(self, place: int) -> Tensor:
        x = self.held(place)
        if self.versions is not None and x._version != self.versions[place]:
            raise RuntimeError(MODIFIED.format(shape=tuple(x.shape)))
        if self.notes is not None:
            self.notes.needed = True
        return x

    def held(self, place: int) -> Any:
        x = None if self.tensors is None else self.tensors[place]
        return self._found(place) if x is None else x

    def _found(self, place: int) -> Any:
        """What belongs to a place that is empty: steps are undone until it is there."""
        running = getattr(_thread, "running", None)
        if running is not None and running.evaluation is self:
            raise Differentiates
        if self._home is None:
            raise RuntimeError(
                "a gradient arrives inside an evaluation of f that is not differentiated (gradient='implicit', "
                "backward_steps), through something that f computed there and kept (an auxiliary loss, a feature): use "
                "gradient='exact' without backward_steps, or compute it from solution.z"
            )
        if self._home().reaches(self):
            assert self.tensors is not None
            return self.tensors[place]
        assert self._likes is not None
        shape, dtype, device = self._likes[place]
        return torch.zeros((), dtype=dtype, device=device).expand(shape)


class _Running:
    """Context manager around an evaluation. Solves within f find it here."""

    def __init__(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation

    def _enter(self, pack: Any, unpack: Any) -> None:
        self._around, _thread.running = getattr(_thread, "running", None), self
        self._hooks = saved_tensors_hooks(pack, unpack)
        self._hooks.__enter__()

    def _exit(self) -> None:
        self._hooks.__exit__()
        _thread.running = self._around
        del self._hooks, self._around  # which hold this

    def hold(self, tape: "Tape") -> int:
        """A place for a solve within f."""
        raise NotImplementedError


class LeavingOut(_Running):
    """What f saves is counted, and forgotten at once."""

    def __enter__(self) -> None:
        self._count = itertools.count()
        # All in C: `next` takes a tensor for what it shall return after the last number, and there is none.
        self._enter(functools.partial(next, self._count), self.evaluation.unpack)

    def __exit__(self, *exception: object) -> None:
        self._exit()
        self.evaluation.count = next(self._count)

    def hold(self, tape: "Tape") -> int:
        return next(self._count)


class Noting(_Running):
    """What f saves is noted, and there until the evaluation is emptied."""

    def __init__(self, evaluation: Evaluation, notes: Notes, again: bool = False) -> None:
        super().__init__(evaluation)
        self._notes, self._again = notes, again

    def __enter__(self) -> None:
        it = self.evaluation
        it.tensors, it.versions, it.notes = [], [], self._notes
        self._leaves: dict[int, Tensor | None] = {}
        self._enter(self._pack, it.unpack)

    def _pack(self, x: Tensor) -> int:
        version, place = x._version, self._hold(x.detach(), x._version)
        if self.evaluation.k == 0 and self._again:
            self._leaves[place] = _leaf(x)
        elif self.evaluation.k == 0:
            self._notes.devices.add(x.device)
            leaf = _leaf(x)
            if leaf is not None and leaf.requires_grad and not hasattr(leaf, "fake_mode"):  # a tracer's
                self._notes.leaves[place] = leaf, version
        return place

    def _hold(self, value: Any, version: int) -> int:
        tensors, versions = self.evaluation.tensors, self.evaluation.versions
        assert tensors is not None and versions is not None
        tensors.append(value)
        versions.append(version)
        return len(tensors) - 1

    def __exit__(self, kind: object, *exception: object) -> None:
        self._exit()
        it, it.notes = self.evaluation, None
        if kind is not None:
            it.tensors = None
            return
        assert it.tensors is not None and it.versions is not None
        if self._again:
            _check(it, len(it.tensors))
            if it.k == 0:
                self._notes.compare(self._leaves)
            return
        it.count = len(it.tensors)
        pairs = zip(it.tensors, it.versions, strict=True)
        self._notes.needed |= any(isinstance(x, Tensor) and x._version != version for x, version in pairs)

    def hold(self, tape: "Tape") -> int:
        return self._hold(tape, 0)


class Filling(_Running):
    """What f saves, when it is evaluated again, fills the places."""

    def __init__(self, evaluation: Evaluation, notes: Notes) -> None:
        super().__init__(evaluation)
        self._notes = notes

    def __enter__(self) -> None:
        self._tensors: list[Any] = []
        self._enter(self._tensors.append, _differentiates)

    def __exit__(self, kind: object, *exception: object) -> None:
        self._exit()
        tensors = list(self._tensors)
        self._tensors.clear()  # the graph of this repetition, which nobody walks, holds it
        if kind is None:
            _check(self.evaluation, len(tensors))
            if self.evaluation.k == 0:
                self._notes.compare({i: _leaf(tensors[i]) for i in self._notes.leaves})
            self.evaluation.tensors, self.evaluation.versions = tensors, None

    def hold(self, tape: "Tape") -> int:
        self._tensors.append(tape)
        return len(self._tensors) - 1


def _check(evaluation: Evaluation, again: int) -> None:
    if again != evaluation.count:
        raise ReconstructionError(OTHER_COUNT.format(again=again, before=evaluation.count, number=evaluation.k + 1))


def _differentiates(nothing: None) -> Tensor:
    raise Differentiates


_thread = threading.local()
"""running: around the evaluation of f that this thread is in, if it is."""
