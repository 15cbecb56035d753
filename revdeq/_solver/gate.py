"""Where f gets its state and its arguments in the forward pass: behind a gate that lets no gradient out.

No graph of the steps is kept. A gradient that leaves an evaluation of f by another way than its result, through
something that f computed and kept (an auxiliary loss, a feature, a cache), would end there, and nobody would miss it.
So f is given its inputs behind a node that is connected with all that they depend on: whoever asks for a gradient by
any of that comes by, and is told. A hook on a leaf would run in `backward()` only, and not in `torch.autograd.grad`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

LOST = (
    "a gradient arrives at an input of f, through something that f computed inside a solve and kept (an auxiliary "
    "loss, a feature, a cache), and would be lost beyond it: compute it outside of f, before the solve or after it "
    "from solution.z, or make it a part of the state, or detach what f keeps"
)


class Gate:
    """Of one solve. Entered around an evaluation of f, where f itself may ask for derivatives (of an energy, say) by
    what it was given: those are partial ones, and end here."""

    def __init__(self) -> None:
        self._evaluating, self._f_differentiates = False, False
        self._given: list[Tensor] = []
        self._error: Any = None

    def __enter__(self) -> None:
        self._evaluating = True

    def __exit__(self, *exception: object) -> None:
        self._evaluating = False

    def behind(self, tensors: Sequence[Tensor], beyond: Tensor | None = None) -> list[Tensor]:
        """The same memory. beyond: stands for what the tensors depend on, if not they themselves do."""
        return list(_Behind.apply(self, beyond, *tensors))

    def behind_quickly(self, tensors: Sequence[Tensor], beyond: Tensor) -> list[Tensor]:
        """The same for 1 us in place of 12, by a node of torch's own that is an error for f, too, and whose tensors
        count their changes by themselves."""
        if self._f_differentiates or any(type(x) is not Tensor for x in tensors):
            return self.behind(tensors, beyond)
        if self._error is None:
            self._error = torch._C._functions.DelayedError(LOST, len(tensors) + 1)
        self._given = list(self._error(*tensors, beyond)[:-1])
        return self._given

    def overwritten(self) -> None:
        """What f was given quickly: tells torch, which then refuses a graph that f has kept of it."""
        for x in self._given:
            increment_version(x)
        self._given = []

    def forget(self) -> None:
        """What f was given last is not overwritten."""
        self._given = []

    def stood_in_the_way(self, error: RuntimeError) -> bool:
        """Whether it was f that asked, so that the evaluation is to be repeated. That will not happen again."""
        quickly = bool(self._given) and not self._f_differentiates
        self._f_differentiates |= quickly and LOST in str(error)
        return quickly and self._f_differentiates

    def refuse(self) -> None:
        if not self._evaluating:
            raise RuntimeError(LOST)


def standing_for(tensors: Sequence[Tensor]) -> Tensor | None:
    """A tensor that depends on all of these, if there are any."""
    return _StandIn.apply(*tensors) if tensors else None


def hooked(leaf: Tensor) -> Tensor:
    """A leaf that refuses a gradient by itself, for graphs that the solver keeps and goes through: it asks for
    gradients by such leaves and accumulates none."""
    leaf.register_post_accumulate_grad_hook(_refuse)
    return leaf


def _refuse(leaf: Tensor) -> None:
    leaf.grad = None
    raise RuntimeError(LOST)


class _Behind(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Gate, beyond: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.gate = gate
        ctx.set_materialize_grads(False)
        return tuple(x.detach() for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.gate.refuse()
        return (None, None, *[None] * len(grads))


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.size = len(tensors)
        ctx.set_materialize_grads(False)
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:
        return (None,) * ctx.size
