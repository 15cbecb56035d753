"""One evaluation of f in autograd's graph, without the tensors that it saves.

Autograd keeps the graph of every evaluation, but a saved-tensor hook puts the tensors into a list beside it, which is
cleared when the evaluation ends. In the backward pass f is evaluated again, saves the same tensors in the same order,
and so fills the list again. torch.utils.checkpoint does the same, but stores the input, which is reconstructed here.
"""

from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .repeatable import Repeatable
from .state import State

if TYPE_CHECKING:
    from .iteration import Iteration

_version = attrgetter("_version")


class Evaluation:
    """Evaluation k of f, and the tensors that it saved, while they exist.

    outputs: the outputs, if they are kept together with the saved tensors.
    """

    __slots__ = ("_count", "_iteration", "_needs", "_versions", "k", "outputs", "saved")

    def __init__(self, k: int, iteration: "Iteration | None" = None) -> None:
        self.k, self._iteration = k, iteration
        self.saved: list[Tensor] = []
        self.outputs: State | None = None
        self._count, self._versions, self._needs = -1, 0, [True]

    def run(self, f: Repeatable, read: State) -> State:
        """Evaluate f in the forward pass. Until the end its tensors exist: f itself may compute derivatives."""
        self._needs = [x.requires_grad for x in read]
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                outputs = f(read, self.k)
            if sum(map(_version, self.saved)) != self._versions:
                raise _modified("inside f, after an operation had saved it: write x = x.add(y) instead of x.add_(y)")
        except BaseException:
            self.saved.clear()  # they refer to the graph, and the graph to this object
            raise
        self._count = len(self.saved)
        return outputs

    def repeat(self, f: Repeatable, read: State) -> State:
        """Evaluate f once more in the backward pass, to have its saved tensors. Returns its outputs."""
        needs = self._needs * (len(read) // len(self._needs))
        given = [x if x.requires_grad == n else x.detach().requires_grad_(n) for x, n in zip(read, needs, strict=True)]
        saved = _Saved()
        # The graph of the repetition is used by an f that computes derivatives, and by no other.
        with saved_tensors_hooks(saved.pack if f.differentiates else saved.append, saved.unpack):
            try:
                outputs = f(given, self.k)
            except BaseException:
                saved.clear()
                raise
        f.aux = None
        if self._count not in (-1, len(saved)):
            saved.clear()
            raise RuntimeError(
                f"f does not return the same when it is called again: in evaluation {self.k + 1} it saved {self._count} "
                f"tensors for the backward pass, and {len(saved)} when it was repeated (a cache that its first "
                "evaluation fills? state inside f? parametrize.cached around the forward pass only?)"
            )
        self.saved = saved
        return outputs

    def keep(self, outputs: State) -> None:
        """Keep tensors and outputs, without their graph, which refers to this object."""
        self.saved, self.outputs = [x.detach() for x in self.saved], [x.detach() for x in outputs]
        self._versions = sum(map(_version, (*self.saved, *self.outputs)))

    def take_kept(self) -> State | None:
        """The outputs, if they were kept and are unchanged."""
        outputs, self.outputs = self.outputs, None
        if outputs is not None and sum(map(_version, (*self.saved, *outputs))) != self._versions:
            raise _modified("after the forward pass, and keep > 0 needs it")
        return outputs

    def discard(self) -> None:
        self.saved.clear()
        self.outputs = None

    def leaves(self) -> list[tuple[Tensor, int]]:
        """Parameters and other leaves that it saved, usually transposed, with their versions."""
        bases = [x if x._base is None else x._base for x in self.saved]
        return [(x, x._version) for x in bases if x.is_leaf and x.requires_grad]

    def _pack(self, x: Tensor) -> int:
        saved = self.saved
        saved.append(x)
        self._versions += x._version
        return len(saved) - 1

    def _unpack(self, place: int) -> Tensor:
        assert self._iteration is not None
        if self._count < 0:  # f is still running
            self._iteration.f.differentiates = True
        elif not self.saved:
            self._iteration.backward_pass().reach(self)
        return self.saved[place]


class _Saved(list[Tensor]):
    """The saved tensors of a repetition of f."""

    def pack(self, x: Tensor) -> int:
        self.append(x)
        return len(self) - 1

    def unpack(self, place: int | None) -> Tensor:
        if place is None or not self:
            raise RuntimeError("f stored a tensor in the backward pass, and its graph is gone: detach it")
        return self[place]


def _modified(how: str) -> RuntimeError:
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation {how}"
    )
