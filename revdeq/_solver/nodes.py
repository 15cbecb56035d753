"""The nodes of a solve in autograd's graph: where it begins, its half-steps, and where it ends."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .context import untraced
from .places import Home
from .state import TRANSFORMED, State, has_memory

if TYPE_CHECKING:
    from .tape import Tape


def states(ctx: Any) -> State:
    """The tensors that `_End` saved, after a check: a hook may return different ones, and kernels use their address."""
    return [_restored(x, *like) for x, like in zip(ctx.saved_tensors, ctx.like, strict=True)]


def _restored(x: Tensor, dtype: torch.dtype, shape: torch.Size, device: torch.device, stride: Any) -> Tensor:
    if (x.dtype, x.shape, x.device) != (dtype, shape, device):
        raise RuntimeError(
            f"a saved-tensor hook returned {x.dtype} of shape {tuple(x.shape)} on {x.device} instead of {dtype} of "
            f"shape {tuple(shape)} on {device}: exclude the solve from it "
            "(torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x) around the solve), or return the "
            "tensor that was packed"
        )
    if x.stride() == stride:
        return x
    return torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(x)


_UNKNOWN = torch.empty(0, device="cpu", requires_grad=True)
"""Stands for leaves that the graph does not show."""


def leaves_behind(outputs: Sequence[Tensor], read: Sequence[Tensor] = ()) -> Iterator[Tensor]:
    """The leaves that tensors depend on other than through `read`."""
    yield from (x for x in outputs if x.requires_grad and x.is_leaf)
    seen, left = {x.grad_fn for x in read}, [x.grad_fn for x in outputs]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        elif node.name() == "CheckpointFunctionBackward":  # a reentrant checkpoint, which hides what it depends on
            yield _UNKNOWN
        left += [following for following, _ in node.next_functions]


def backward(function: Callable[..., Any]) -> Any:
    """Decorator of our backward passes: leaves inference mode, in which f would have no graph, and disables the
    compiler, which in a compiled training step would compile f differently than in the forward pass."""

    outside = untraced(function)

    def run(ctx: Any, *grads: Tensor | None) -> Any:
        if torch.compiler.is_compiling():
            return outside(ctx, *grads)
        if not torch.is_inference_mode_enabled():
            return function(ctx, *grads)
        with torch.inference_mode(False), torch.no_grad():
            return function(ctx, *grads)

    return staticmethod(run)


def refuse_other_derivatives(grads: Sequence[Tensor | None]) -> None:
    """Raise for backward passes that a solve does not support."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "revdeq.solve has no second derivative: call backward without create_graph=True, or differentiate an "
            "unrolled iteration"
        )
    if not all(g is None or g.layout is not torch.strided or has_memory(g) for g in grads):
        raise RuntimeError(
            "the gradients of this backward pass are batched (is_grads_batched=True, or vmap around autograd.grad), "
            "which a solve does not support: call it once per gradient"
        )


class _Begin(torch.autograd.Function):
    """The input of f at the beginning of a graph. With a home, gradients with respect to the initial state and the
    coefficients end here.

    origin: the coefficients, if they are trained, or a dummy leaf.
    """

    @staticmethod
    def forward(ctx: Any, home: Home | None, origin: Tensor, size: int, *start: Tensor) -> tuple[Tensor, ...]:
        ctx.home, ctx.inputs = home, len(start)
        ctx.set_materialize_grads(False)
        return tuple([x.detach() if home is None else x.clone() for x in start[:size]])

    @backward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if ctx.home is None:
            return (None, None, None, *[None] * ctx.inputs)
        needed, apart = any(ctx.needs_input_grad[3:]), ctx.inputs > len(grads)
        by_coefficients, by_start = ctx.home().arrive(grads, needed, apart)
        return (None, by_coefficients, None, *by_start)


def begin(*args: Any) -> State:
    try:
        return list(_Begin.apply(*args))
    except RuntimeError as error:
        if "setup_context" in str(error):  # which functions need inside a transform
            raise TypeError(TRANSFORMED) from None
        raise


class _Relax(torch.autograd.Function):
    """A half-step. The input of f is among its inputs, so that the engine visits the nodes in order, whatever f depends
    on; the gradient of that input is part of the adjoints and not of the graph."""

    @staticmethod
    def forward(
        ctx: Any, tape: "Tape", home: Home, k: int, norms: bool, read: State, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.home, ctx.k = home, k
        ctx.set_materialize_grads(False)
        return tuple(tape.moved(k, tensors[: len(tensors) // 2], read, norms))

    @backward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        home = ctx.home
        return (None, None, None, None, None, *home().back(home, ctx.k, grads), *[None] * len(grads))


class _End(torch.autograd.Function):
    """The last y and z, and the auxiliary outputs. It saves the states through autograd, so that saved-tensor hooks
    around the solve see them."""

    @staticmethod
    def forward(ctx: Any, tape: "Tape", home: Home, values: State, size: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        own = tape.own()
        ctx.home, ctx.size = home, size
        ctx.like = [(x.dtype, x.shape, x.device, x.stride()) for x in own]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*own)
        tape.end_node = weakref.ref(ctx)
        return (*values, *tensors[size:])

    @backward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        ctx.home().turn(ctx, grads[: 2 * ctx.size])
        return (None, None, None, None, *[None] * ctx.size, *grads[2 * ctx.size :])


# Skips checks for torch.func transforms, which take 2 us and do not apply.
relax = super(torch.autograd.Function, _Relax).apply
end = super(torch.autograd.Function, _End).apply
