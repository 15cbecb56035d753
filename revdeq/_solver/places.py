"""An autograd graph without its saved tensors.

Autograd keeps the graph of every evaluation of f, but a saved-tensor hook replaces each saved tensor by a number, its
place. In the backward pass f is evaluated again, saves the same tensors in the same order, and fills the places of that
evaluation.
"""

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .. import _device
from .context import OnceMore, untraced
from .monitor import ReconstructionError
from .state import State

if TYPE_CHECKING:
    from .call import Call
    from .tape import Tape

MODIFIED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation inside f: a tensor "
    "of shape {shape} was changed after an operation had saved it; write x = x.add(y) instead of x.add_(y)"
)

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor of shape "
    "{shape} that f uses was changed between the forward and the backward pass (by an optimizer step? by .half(), "
    ".double() or .to()?), so the gradient would be that of a different f; change it after the backward pass"
)

OTHER_TENSORS = (
    "f used a different tensor of shape {shape} that requires a gradient in the backward pass than in the forward pass "
    "(a closure whose variables changed after the solve? torch.func.functional_call or a cached parametrization around "
    "the forward pass only?): do not change captured tensors before the backward pass, pass them to f through `args`, "
    "or make f a module"
)

OTHER_COUNT = (
    "f does not return the same when it is called again: in evaluation {k} it saved {before} tensors for the backward "
    "pass in the forward pass, and {again} when it was repeated (a cache that its first evaluation fills? a cached "
    "parametrization around the forward pass only? a counter, or Python's random numbers? .eval() or requires_grad_() "
    "since then?): f must depend on its arguments only; fill a cache before the solve by calling f once, and get the "
    "index of the evaluation with indexed=True"
)

NOT_DIFFERENTIATED = (
    "a gradient flows into an evaluation of f that is not differentiated (gradient='implicit', backward_steps), "
    "through a tensor that f stored there (an auxiliary loss, a feature): use gradient='exact' without backward_steps, "
    "or compute it from solution.z"
)


class Differentiates(Exception):
    """f itself computes derivatives, and needs its saved tensors while it is being evaluated."""


class Home:
    """Refers to a tape: directly, or for a solve inside the f of another one, through a place of that evaluation, which
    is emptied and filled again like a saved tensor."""

    __slots__ = ("_around", "_place", "_tape")

    def __init__(self, tape: "Tape") -> None:
        around = _thread.around
        self._tape = tape if around is None else None
        if around is not None:
            self._around, self._place = around[0], around[1](tape)

    def __call__(self) -> "Tape":
        if self._tape is not None:
            return self._tape
        tape = self._around()
        return tape.places.held(self._place, tape, self._around)

    def unpack(self, place: int) -> Tensor:
        tape = self() if self._tape is None else self._tape
        begin, tensors = tape.places.now
        if 0 <= place - begin < len(tensors):
            return tensors[place - begin]
        # Also traced when a whole training step is compiled.
        return (_unpack_untraced if torch.compiler.is_compiling() else _unpack)(self, place)

    @property
    def is_within(self) -> bool:
        """Whether the solve is inside the f of another one."""
        return self._tape is None


def _unpack(home: Home, place: int) -> Tensor:
    tape = home()
    return tape.places.unpack(place, tape, home)


_unpack_untraced = untraced(_unpack)


class Within:
    """Context manager around evaluations of f: installs the saved-tensor hooks, and the function that finds a place for
    the tape of a solve inside f.

    count: a function that increases by the same number in every call, and by more if a tensor was packed.
    """

    __slots__ = ("_around", "_count", "_hooks", "_own")

    def __init__(
        self,
        home: Home,
        pack: Callable[[Any], Any],
        unpack: Callable[[Any], Any],
        hold: Callable[[Any], int],
        count: Callable[[], int],
    ) -> None:
        self._hooks, self._own, self._count = saved_tensors_hooks(pack, unpack), (home, hold), count
        self._around = _thread.around

    def __enter__(self) -> None:
        _thread.around = self._own
        self._hooks.__enter__()

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__()
        _thread.around = self._around

    def clean_up(self) -> None:
        """After an exception: remove our hooks if they are still there. An interrupt (Ctrl-C) may come when `__exit__`
        has begun and has not yet removed them."""
        _thread.around = self._around
        while True:
            before, now = self._count(), self._count()
            with torch.enable_grad():
                _LEAF.exp()  # saves its result
            if self._count() - now == now - before:
                return
            self._hooks.__exit__()


_LEAF = torch.zeros((), device="cpu", requires_grad=True)


class Filled:
    """The tensors in the places of an evaluation.

    versions: those of the tensors when they were saved, if later changes by f matter.
    outputs: the outputs of f, once they are known.
    """

    __slots__ = ("outputs", "tensors", "versions")

    def __init__(self, versions: list[int] | None) -> None:
        self.tensors: list[Any] = []
        self.versions = versions
        self.outputs: list[Tensor] | None = None

    def append(self, x: Any) -> int:
        """Add x, and return its index."""
        if self.versions is not None:
            self.versions.append(x._version if isinstance(x, Tensor) else 0)
        self.tensors.append(x)
        return len(self.tensors) - 1

    def is_changed(self, i: int) -> bool:
        x = self.tensors[i]
        return self.versions is not None and isinstance(x, Tensor) and x._version != self.versions[i]


class Places:
    """The places of a solve, and the tensors of a few evaluations.

    filled: the tensors by the index of the evaluation.
    running: the index of the evaluation that is running, or -1.
    needs_versions: whether f computes derivatives itself, or modifies saved tensors in place, which is an error only if
        a gradient flows there.
    devices: those of the tensors that the first evaluation saved.
    now: the first place and the tensors of the evaluation whose graph the engine is in, for fast lookup.
    """

    def __init__(self) -> None:
        self._next = itertools.count()
        self._begins: list[int] = []  # the first place of each evaluation
        self._counts: list[int] = []  # the number of places of each
        self._leaves: dict[int, tuple[Tensor, Any]] = {}  # saved by the first evaluation, with what they were
        self.filled: dict[int, Filled] = {}
        self.running, self.needs_versions = -1, False
        self.devices: set[torch.device] = set()
        self.now: tuple[int, list[Any]] = (0, [])

    # Forward

    def leaving_out(self, home: Home) -> Within:
        """Count the tensors that f saves, and drop them. All in C: the hook is `next` of a counter, which takes the
        tensor as its default."""
        number = functools.partial(next, self._next)
        return Within(home, number, home.unpack, number, number)

    def noting(self, home: Home, k: int) -> Within:
        """Store the tensors that evaluation k saves."""
        filled = self.filled[k] = Filled([])

        def hold(x: Any) -> int:
            filled.append(x)
            return next(self._next)

        def pack(x: Tensor) -> int:
            if k == 0:
                self._note(len(filled.tensors), x)
            return hold(x.detach())

        return Within(home, pack, home.unpack, hold, functools.partial(next, self._next))

    def _note(self, i: int, x: Tensor) -> None:
        self.devices.add(x.device)
        leaf = _leaf(x)
        if leaf is not None and leaf.requires_grad and not hasattr(leaf, "fake_mode"):  # a tracer's
            self._leaves[i] = leaf, _kind(leaf)

    def begin(self, k: int) -> None:
        """Start evaluation k of the forward pass; an evaluation may be repeated."""
        self.running = k
        del self._begins[k:], self._counts[k:]
        self._begins.append(next(self._next) + 1)

    def end(self, k: int) -> None:
        self._counts.append(next(self._next) - self._begins[k])
        filled = self.filled.get(k)
        if filled is not None and not self.needs_versions:
            self.needs_versions = any(map(filled.is_changed, range(len(filled.tensors))))

    def keep(self, k: int, outputs: list[Tensor]) -> None:
        """Keep the tensors and outputs of evaluation k, which is then not repeated."""
        self.filled.setdefault(k, Filled(None)).outputs = [x.detach() for x in outputs]

    def empty(self, k: int, only: torch.device | None = None) -> None:
        """Empty the places, or those of one device: nodes on another device run in another thread, now or later, and
        find theirs at any moment."""
        filled, self.now = self.filled.get(k), (0, [])
        if filled is None:
            return
        if only is not None:
            filled.outputs = None
            for i, x in enumerate(filled.tensors):
                if not isinstance(x, Tensor) or x.device == only:
                    filled.tensors[i] = None
        else:
            del self.filled[k]
            filled.tensors.clear()  # the hook still refers to the list

    # Backward

    @property
    def leaves(self) -> list[Tensor]:
        """The leaves that f depends on, as far as they are known."""
        return [leaf for leaf, _ in self._leaves.values()]

    def refuse_changes(self) -> None:
        """Called when the backward pass begins."""
        for leaf, before in self._leaves.values():
            if _kind(leaf) != before:
                raise RuntimeError(CHANGED.format(shape=tuple(leaf.shape)))

    def unpack(self, place: int, tape: "Tape", home: Home) -> Tensor:
        k = self._evaluation(place)
        x = self.held(place, tape, home)
        filled = self.filled.get(k)
        if filled is not None and filled.is_changed(place - self._begins[k]):
            raise RuntimeError(MODIFIED.format(shape=tuple(x.shape)))
        if k == self.running:
            self.needs_versions = True
        return x

    def _evaluation(self, place: int) -> int:
        """The evaluation of a place. A bisection in Python, because torch.compile cannot trace the library's."""
        low, high = 0, len(self._begins)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._begins[middle] <= place else (low, middle)
        return low

    def held(self, place: int, tape: "Tape", home: Home) -> Any:
        """The tensor of a place. If it is empty, steps are inverted until it is filled."""
        k = self._evaluation(place)
        i, filled = place - self._begins[k], self.filled.get(k)
        if filled is not None and 0 <= i < len(filled.tensors) and filled.tensors[i] is not None:
            return filled.tensors[i]
        if k == self.running:
            raise Differentiates
        counts = k < len(self._counts) and 0 <= i < self._counts[k]  # not if f raised an error, or was called again
        if not counts or not tape.reaches(home, k):
            raise RuntimeError(NOT_DIFFERENTIATED)
        return self.filled[k].tensors[i]

    def again(
        self, home: Home, k: int, f: "Call", read: State, around: Callable[[], contextlib.AbstractContextManager[None]]
    ) -> State:
        """Repeat evaluation k, in the context of `around`: the tensors that f saves fill its places. Returns the
        outputs of f."""
        while True:
            leaves = [x.clone() if f.changes_its_input else x.detach() for x in read]
            for x in leaves:
                x.requires_grad_()
            try:
                with around():
                    return self._again(home, k, f, list(map(_no_leaf, leaves)) if f.changes_its_input else leaves)
            except Differentiates:
                self.needs_versions = True
            except OnceMore:
                continue

    def _again(self, home: Home, k: int, f: "Call", read: State) -> State:
        begin, filled = self._begins[k], Filled([] if self.needs_versions else None)

        def hold(x: Any) -> int:
            return begin + filled.append(x)

        pack: Callable[[Any], Any] = filled.tensors.append
        unpack: Callable[[Any], Any] = _differentiates
        if self.needs_versions:
            pack, unpack, self.filled[k] = lambda x: hold(_without_graph(x)), home.unpack, filled
        within, self.running = Within(home, pack, unpack, hold, filled.tensors.__len__), k
        try:
            with within:
                outputs = [x.detach() for x in f(read, k)]
        except (Differentiates, OnceMore):
            raise
        except BaseException:
            within.clean_up()
            raise
        finally:
            self.running = -1
            self.filled.pop(k, None)
        if filled.versions is None:  # the unused graph of this repetition refers to the list
            held, filled.tensors = filled.tensors, filled.tensors.copy()
            held.clear()
            self.now = begin, filled.tensors
        if len(filled.tensors) != self._counts[k]:
            raise ReconstructionError(OTHER_COUNT.format(again=len(filled.tensors), before=self._counts[k], k=k + 1))
        if k == 0:
            self._compare_leaves(filled.tensors)
        self.filled[k] = filled
        return outputs

    def _compare_leaves(self, tensors: list[Any]) -> None:
        """f may create leaves itself, but with the same values, which are compared if that does not synchronize with
        the device."""
        for i, (before, _) in self._leaves.items():
            now = _leaf(tensors[i])
            if now is before:
                continue
            likes = [None if x is None else (x.shape, x.dtype, x.device) for x in (before, now)]
            same = likes[0] == likes[1] and (not _device.can_look(before) or torch.equal(before, now))  # type: ignore[arg-type]
            if not same:
                raise RuntimeError(OTHER_TENSORS.format(shape=tuple(before.shape)))


class _NoLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _no_leaf(x: Tensor) -> Tensor:
    """An alias of the memory, which f may modify in place."""
    return _NoLeaf.apply(x)


def _differentiates(nothing: None) -> Tensor:
    raise Differentiates


def _leaf(x: Tensor) -> Tensor | None:
    """x or its base, if that is a leaf: weights are usually saved transposed."""
    if x.is_leaf:
        return x
    base = x._base
    return base if base is not None and base.is_leaf else None


def _kind(x: Tensor) -> tuple[int, torch.dtype, torch.device]:
    return x._version, x.dtype, x.device


def _without_graph(x: Tensor) -> Tensor:
    """A view of a leaf, which has no history, refers to its base."""
    return x.detach() if _leaf(x) is None else x


class _Thread(threading.local):
    """around: the solve whose f this thread is evaluating, if any, and the function that finds a place in it."""

    around: tuple[Home, Callable[[Any], int]] | None = None


_thread = _Thread()
