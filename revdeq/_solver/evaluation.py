"""An evaluation of f in autograd's graph, without the tensors that it saves.

Autograd keeps the graph of every evaluation, but a saved-tensor hook puts the tensors into a list beside it, which is
cleared when the evaluation ends. In the backward pass f is evaluated again, saves the same tensors in the same order,
and so fills the list again. torch.utils.checkpoint does the same, but stores the input, which is reconstructed here.
"""

import threading
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from .state import State

if TYPE_CHECKING:
    from .iteration import Iteration

_version = attrgetter("_version")


class _Thread(threading.local):
    """evaluates: whether this thread is inside of an evaluation. A solve there is unrolled: its tensors belong to it."""

    evaluates = False


thread = _Thread()


class Evaluation:
    """Evaluation k of f, and the tensors that it saved, while they exist.

    outputs: its outputs, if they are kept together with the saved tensors.
    """

    __slots__ = ("_count", "_iteration", "_needs", "_versions", "k", "outputs", "saved")

    def __init__(self, k: int, iteration: "Iteration | None") -> None:
        self.k, self._iteration = k, iteration
        self.saved: list[Tensor] = []
        self.outputs: State | None = None
        self._versions, self._count, self._needs = 0, -1, []

    def run(self, iteration: "Iteration", read: State) -> State:
        """Evaluate f. Until the end its tensors exist: f itself may compute derivatives."""
        self._needs, around = [x.requires_grad for x in read], thread.evaluates
        thread.evaluates = True
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                outputs = iteration.f(read, self.k)
            if sum(map(_version, self.saved)) != self._versions:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation "
                    "inside f, after an operation had saved it: write x = x.add(y) instead of x.add_(y)"
                )
        except BaseException:
            self.saved.clear()  # they refer to the graph, and the graph to this object
            raise
        finally:
            thread.evaluates = around
        self._count = len(self.saved)
        return outputs

    def repeat(self, iteration: "Iteration", read: State) -> State:
        """Evaluate f once more, to have its saved tensors. Returns its outputs."""
        again = Evaluation(self.k, None)  # the new graph is not used, and refers to that object, not to this one
        needs = self._needs or [True] * len(read)
        read = [x if x.requires_grad == n else x.detach().requires_grad_(n) for x, n in zip(read, needs, strict=True)]
        outputs = again.run(iteration, read)
        if self._count not in (-1, again._count):
            raise RuntimeError(
                f"f does not return the same when it is called again: in evaluation {self.k + 1} it saved {self._count} "
                f"tensors for the backward pass, and {again._count} when it was repeated (a cache that its first "
                "evaluation fills? a counter? Python's random numbers? .eval() or requires_grad_() since then?)"
            )
        self.saved, again.saved = again.saved, []
        iteration.f.aux = None
        return outputs

    def keep(self, outputs: Sequence[Tensor]) -> None:
        """Keep tensors and outputs, without their graph, which refers to this object."""
        self.saved = [x.detach() for x in self.saved]
        self.outputs = [x.detach() for x in outputs]

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
        if not self.saved:
            if self._iteration is None:
                raise RuntimeError("f stored a tensor in the backward pass, and its graph is gone: detach it")
            self._iteration.backward_pass().reach(self)
        return self.saved[place]
