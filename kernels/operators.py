"""The half-steps as functions on tensors, registered with torch as `torch.ops.revdeq.*`.

The solver does not come through here: a registered operator costs some 50 us a call, a bound half-step
one or two. These are for those who trace, or who call a half-step themselves.
"""

import torch
from torch import Tensor

from .backends import half_step
from .reference import LANES, HalfStep, chunk_count

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


@torch.library.custom_op("revdeq::relax", mutates_args=("state", "copy"))
def relax(state: Tensor, f: Tensor, copy: Tensor, beta: float) -> None:
    """state = (1 - beta) state + beta f, in place; copy = state in copy's dtype.

    state is float64, and f and copy are shaped like it, in float32, float64, bfloat16 or float16. All must
    be dense; an f that is laid out differently from the state costs one more pass over memory.
    """
    _bind(state, copy, beta, f=f).relax(f)


@torch.library.custom_op("revdeq::relax_norms", mutates_args=("state", "copy"))
def relax_norms(state: Tensor, f: Tensor, copy: Tensor, beta: float) -> Tensor:
    """`relax`, and in the same pass the partial sums, float64 of shape [2, chunks, lanes], of the squared
    change (index 0) and of the squared new state (index 1). They are deterministic."""
    return _bind(state, copy, beta, f=f).relax_norms(f)


@torch.library.custom_op("revdeq::invert", mutates_args=("state", "copy"))
def invert(state: Tensor, f: Tensor, copy: Tensor, beta: float) -> None:
    """state = (state - beta f) / (1 - beta), in place; copy = state in copy's dtype. Undoes `relax`."""
    _bind(state, copy, beta, f=f).invert(f)


@torch.library.custom_op("revdeq::invert_adjoint", mutates_args=("state", "copy", "adjoint"))
def invert_adjoint(state: Tensor, f: Tensor, copy: Tensor, adjoint: Tensor, vjp: Tensor, beta: float) -> None:
    """`invert`, and in the same pass adjoint = (1 - beta) adjoint + beta vjp, in place.

    The adjoint is float64 if copy is and float32 otherwise; vjp has copy's dtype.
    """
    step = _bind(state, copy, beta, f=f, adjoint=adjoint, vjp=vjp)
    _check_adjoint(state, copy, adjoint, vjp)
    step.invert_adjoint(f, adjoint, vjp)


@torch.library.custom_op("revdeq::invert_compare", mutates_args=("adjoint",))
def invert_compare(state: Tensor, f: Tensor, initial: Tensor, adjoint: Tensor, vjp: Tensor, beta: float) -> Tensor:
    """Compare the result of `invert` with the initial state that it should arrive at, without storing it, and
    update the adjoint like `invert_adjoint`.

    initial and vjp have one dtype, that of the copy. Returns int32 of shape [2, chunks, lanes]: the bits of the
    largest magnitude, in float32, of the error (index 0) and of the state (index 1), by lanes.
    """
    _check_adjoint(state, initial, adjoint, vjp)
    return _bind(state, initial, beta, name="initial", f=f, adjoint=adjoint, vjp=vjp).invert_compare(
        f, initial, adjoint, vjp
    )


@relax.register_fake
@invert.register_fake
@invert_adjoint.register_fake
def _(*args: object) -> None:
    return None


@invert_compare.register_fake
def _(state: Tensor, f: Tensor, initial: Tensor, adjoint: Tensor, vjp: Tensor, beta: float) -> Tensor:
    return state.new_empty((2, chunk_count(state), LANES), dtype=torch.int32)


@relax_norms.register_fake
def _(state: Tensor, f: Tensor, copy: Tensor, beta: float) -> Tensor:
    return state.new_empty((2, chunk_count(state), LANES))


def _check_adjoint(state: Tensor, copy: Tensor, adjoint: Tensor, vjp: Tensor) -> None:
    wide = torch.float64 if copy.dtype == torch.float64 else torch.float32
    if adjoint.dtype != wide or vjp.dtype != copy.dtype:
        raise TypeError(
            f"adjoint is {adjoint.dtype} and vjp is {vjp.dtype}: where f reads {copy.dtype} they must be "
            f"{wide} and {copy.dtype}"
        )
    if adjoint.stride() != state.stride() and adjoint.numel() > 1:
        raise ValueError(f"adjoint has strides {adjoint.stride()}: it must be laid out like state, {state.stride()}")


def _bind(state: Tensor, copy: Tensor, beta: float, name: str = "copy", **others: Tensor) -> HalfStep:
    if state.dtype != torch.float64:
        raise TypeError(f"state is {state.dtype}: it must be torch.float64")
    if not 0 < beta < 2 or beta == 1:
        raise ValueError(f"beta is {beta}: it must be in (0, 2) and not 1, where the step has no inverse")
    if not torch.ops.aten.is_non_overlapping_and_dense(state):
        raise ValueError(f"state has shape {tuple(state.shape)} and strides {state.stride()}: it must be dense")
    for key, x in {"state": state, name: copy, **others}.items():
        if x.shape != state.shape or x.device != state.device:
            raise ValueError(
                f"{key} has shape {tuple(x.shape)} on {x.device}: it must be shaped like state, "
                f"{tuple(state.shape)}, and be on {state.device}"
            )
        if x.dtype not in FLOATS:
            raise TypeError(f"{key} is {x.dtype}: it must be float32, float64, bfloat16 or float16")
        if x.requires_grad:  # within an operator torch.is_grad_enabled() is always false
            raise ValueError(f"{key} requires a gradient, which does not flow through a half-step: use {key}.detach()")
    if copy.stride() != state.stride() and copy.numel() > 1:
        raise ValueError(f"{name} has strides {copy.stride()}: it must be laid out like state, {state.stride()}")
    return half_step(state.device)(state, copy, beta)
