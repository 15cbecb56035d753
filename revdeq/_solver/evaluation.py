"""One evaluation of f in autograd's graph, without the tensors that it saves.

Autograd keeps the graph of every evaluation, but a saved-tensor hook puts the tensors beside it, and they are dropped
when the evaluation ends. In the backward pass f is evaluated again and saves the same tensors in the same order, and
the nodes of the graph find them there. torch.utils.checkpoint does the same, but stores the input, which is
reconstructed here.
"""

from operator import attrgetter
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .repeatable import Repeatable, version
from .state import State

if TYPE_CHECKING:
    from .iteration import Iteration

MODIFIED = "one of the variables needed for gradient computation has been modified by an inplace operation"
"""torch's own words."""

requires_grad = attrgetter("requires_grad")


class Evaluation(dict[int, Tensor]):
    """Evaluation k of f: the tensors that it saved, in order, while they exist.

    outputs: the outputs, if they are kept together with the saved tensors.
    """

    __slots__ = ("_count", "_iteration", "_needs", "_versions", "k", "outputs")

    def __init__(self, k: int, iteration: "Iteration | None" = None) -> None:
        self.k, self._iteration = k, iteration
        self.outputs: State | None = None
        self._needs: list[bool] = []  # whether f's inputs required gradients, if not all did
        self._count, self._versions = -1, 0

    def run(self, f: Repeatable, read: State) -> State:
        """Evaluate f in the forward pass. Until the end its tensors exist: f itself may compute derivatives."""
        if not all(map(requires_grad, read)):
            self._needs = list(map(requires_grad, read))
        try:
            with saved_tensors_hooks(self._pack, self.__getitem__ if self.k else self._first_unpack):
                outputs = f(read, self.k)
            if sum(map(version, self.values())) != self._versions:
                how = "inside f, after an operation had saved it: write x = x.add(y) instead of x.add_(y)"
                raise RuntimeError(f"{MODIFIED} {how}")
        except BaseException:
            self.clear()  # they refer to the graph, and the graph to this object
            raise
        self._count = len(self)
        if self.k < 2:
            f.spreads = f.spreads or any(x.device != read[0].device for x in self.values())
        return outputs

    def repeat(self, f: Repeatable, read: State) -> State:
        """Evaluate f once more in the backward pass, to have its saved tensors. Return its outputs."""
        if self._needs or not read[0].requires_grad:
            needs = self._needs or [True] * len(read)
            read = [x.detach().requires_grad_(needed) for x, needed in zip(read, needs, strict=True)]
        # Only an f that computes derivatives uses the graph of its repetition. Autocast would share the cast of a leaf,
        # which sums gradients in its precision; what f read was a leaf only in the first evaluation.
        if f.differentiates and self.k:
            read = [x.view_as(x) for x in read]
        saved: Any = Evaluation(self.k) if f.differentiates else []
        hooks = (saved._pack, saved.__getitem__) if f.differentiates else (saved.append, _gone)
        try:
            with saved_tensors_hooks(*hooks):
                outputs = f(read, self.k)
            f.aux = None
            self.update(saved if f.differentiates else enumerate(saved))
        finally:
            saved.clear()  # otherwise a cycle through C++, which leaks
        if self._count not in (-1, len(self)):
            raise RuntimeError(
                "f does not return the same when it is called again (a cache that its first evaluation fills? state "
                f"inside f? parametrize.cached around the forward pass only?): evaluation {self.k + 1} saved "
                f"{self._count} tensors for the backward pass, and {len(self)} when it was repeated"
            )
        return outputs

    def keep(self, outputs: State) -> None:
        """Keep tensors and outputs, but not their graph, which refers to this object."""
        self.update((place, x.detach()) for place, x in self.items())
        self.outputs = [x.detach() for x in outputs]
        self._versions = sum(map(version, (*self.values(), *self.outputs)))

    def take_kept(self) -> State:
        """The outputs that were kept."""
        assert self.outputs is not None
        if sum(map(version, (*self.values(), *self.outputs))) != self._versions:
            raise RuntimeError(f"{MODIFIED} after the forward pass, and keep > 0 needs it")
        outputs, self.outputs = self.outputs, None
        return outputs

    def drop(self) -> None:
        """Forget what was kept."""
        self.clear()
        self.outputs = None

    def leaves(self) -> list[tuple[Tensor, int]]:
        """Parameters and other leaves that it saved, usually transposed, with their versions."""
        bases = [x if x._base is None else x._base for x in self.values()]
        return [(x, x._version) for x in bases if x.is_leaf and x.requires_grad]

    def _pack(self, x: Tensor) -> int:
        place = len(self)
        self[place] = x
        self._versions += x._version
        return place

    def _first_unpack(self, place: int) -> Tensor:
        """While f is running, only its own derivatives unpack."""
        if self._count < 0 and self._iteration is not None:
            self._iteration.f.differentiates = True
        return self[place]

    def __missing__(self, place: int) -> Tensor:
        """The graph asks for a tensor of an evaluation that the backward pass has not reached yet."""
        if self._iteration is None:
            return _gone(place)
        self._iteration.backward_pass().reach(self)
        return self[place]


def _gone(place: int | None) -> Tensor:
    raise RuntimeError("f stored a tensor in the backward pass, and its graph is gone: detach it")
