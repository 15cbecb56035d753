"""The half-steps as functions on tensors, registered with torch as `torch.ops.revdeq.*`.

The solver does not come through here: a registered operator costs some 50 us a call, a bound half-step
one or two. These are for those who trace, or who call a half-step themselves.
"""

import functools

import torch
from torch import Tensor

from . import half_step
from .backends import half_step_for
from .half_step import DTYPES, LANES, Coefficients, chunk_count, layout


@torch.library.custom_op("revdeq::relax", mutates_args=("state", "copy"))
def relax(state: Tensor, f: Tensor, copy: Tensor, beta: float, gamma: float = 1.0, read: Tensor | None = None) -> None:
    """state = (1 - beta) state + beta ((1 - gamma) read + gamma f), in place; copy = state in copy's dtype.

    Args:
        state: float64, dense; it is changed in place.
        f: What f returned, shaped like the state, in float32, float64, bfloat16 or float16. If it is laid out
            differently from the state, that costs one more pass over memory.
        copy: Laid out like the state, in the dtype that f reads; it is overwritten.
        beta: The relaxation, in (0, 2) and not 1. beta gamma and beta (1 - gamma) are rounded to float32.
        gamma: The damping of f, in (0, 2).
        read: What f was given, needed where gamma is not 1; it is taken in copy's dtype.

    Raises:
        TypeError, ValueError: A tensor or a coefficient is none of the above, or a tensor requires a gradient.

    Example:
        >>> state, copy = torch.zeros(4).double(), torch.zeros(4)
        >>> revdeq.kernels.relax(state, torch.ones(4), copy, beta=0.5)
        >>> copy
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    step = _step(beta, gamma)
    read = _needed(step, "read", read, copy.dtype)
    _bind(state, copy, f=f, read=read).relax(f, read, step)


@torch.library.custom_op("revdeq::relax_norms", mutates_args=("state", "copy"))
def relax_norms(
    state: Tensor, f: Tensor, copy: Tensor, beta: float, gamma: float = 1.0, read: Tensor | None = None
) -> Tensor:
    """`relax`, and in the same pass the partial sums of squares that norms are made of.

    Args:
        state: As for `relax`.
        f: As for `relax`.
        copy: As for `relax`.
        beta: As for `relax`.
        gamma: As for `relax`.
        read: As for `relax`.

    Returns:
        float64 of shape [2, chunks, lanes]: the partial sums of the squared change (index 0) and of the squared new
        state (index 1). They are deterministic.

    Example:
        >>> state, copy = torch.zeros(4).double(), torch.zeros(4)
        >>> change, value = revdeq.kernels.relax_norms(state, torch.ones(4), copy, beta=0.5).sum((1, 2)).sqrt()
        >>> change.item()
        1.0
    """
    step = _step(beta, gamma)
    read = _needed(step, "read", read, copy.dtype)
    return _bind(state, copy, f=f, read=read).relax_norms(f, read, step)


@torch.library.custom_op("revdeq::invert", mutates_args=("state", "copy"))
def invert(state: Tensor, f: Tensor, copy: Tensor, beta: float, gamma: float = 1.0) -> None:
    """Undo `relax`, in place; copy = state in copy's dtype.

    Args:
        state: As for `relax`.
        f: What f returned in the half-step that is undone.
        copy: As for `relax`. Where gamma is not 1, it must hold what f was given, until it is overwritten.
        beta: As for `relax`.
        gamma: As for `relax`.

    Example:
        >>> state, copy = torch.full((4,), 0.5).double(), torch.zeros(4)
        >>> revdeq.kernels.invert(state, torch.ones(4), copy, beta=0.5)
        >>> copy
        tensor([0., 0., 0., 0.])
    """
    _bind(state, copy, f=f).invert(f, _step(beta, gamma))


@torch.library.custom_op("revdeq::invert_adjoint", mutates_args=("state", "copy", "adjoint"))
def invert_adjoint(
    state: Tensor,
    f: Tensor,
    copy: Tensor,
    adjoint: Tensor,
    vjp: Tensor,
    beta: float,
    gamma: float = 1.0,
    other: Tensor | None = None,
) -> None:
    """`invert`, and in the same pass adjoint = (1 - beta) adjoint + beta ((1 - gamma) other + gamma vjp), in place.

    Args:
        state: As for `invert`.
        f: As for `invert`.
        copy: As for `invert`.
        adjoint: Laid out like the state; float64 if copy is, and float32 otherwise. It is changed in place.
        vjp: The vector-Jacobian product of f, in copy's dtype.
        beta: As for `relax`.
        gamma: As for `relax`.
        other: The adjoint of the other state, in the adjoint's dtype, needed where gamma is not 1.

    Raises:
        TypeError, ValueError: A tensor or a coefficient is none of the above.

    Example:
        >>> state, copy, adjoint = torch.full((4,), 0.5).double(), torch.zeros(4), torch.ones(4)
        >>> revdeq.kernels.invert_adjoint(state, torch.ones(4), copy, adjoint, torch.ones(4), beta=0.5)
        >>> adjoint
        tensor([1., 1., 1., 1.])
    """
    step = _step(beta, gamma)
    other = _needed(step, "other", other, adjoint.dtype)
    bound = _bind(state, copy, f=f, adjoint=adjoint, vjp=vjp, other=other)
    _check_adjoint(state, copy, adjoint, vjp)
    bound.invert_adjoint(f, adjoint, vjp, bound.in_order_or_none(other), step, step)


@torch.library.custom_op("revdeq::invert_compare", mutates_args=("adjoint",))
def invert_compare(
    state: Tensor,
    f: Tensor,
    initial: Tensor,
    adjoint: Tensor,
    vjp: Tensor,
    beta: float,
    floor: float = 1e-30,
    gamma: float = 1.0,
    read: Tensor | None = None,
    other: Tensor | None = None,
) -> Tensor:
    """Compare the result of `invert` with the initial state that it should arrive at, without storing it, and update
    the adjoint like `invert_adjoint`.

    Args:
        state: As for `invert`; it is not changed.
        f: As for `invert`.
        initial: The state to arrive at, in the dtype that f reads.
        adjoint: As for `invert_adjoint`.
        vjp: As for `invert_adjoint`, in initial's dtype.
        beta: As for `relax`.
        floor: The smallest magnitude that an error is taken relative to.
        gamma: As for `relax`.
        read: As for `relax`.
        other: As for `invert_adjoint`.

    Returns:
        int32 of shape [chunks, lanes]: the bits of the largest error, in float32, relative to the magnitude of its
        element of the state, or to `floor` where that is larger.

    Example:
        >>> state, initial, adjoint = torch.full((4,), 0.5).double(), torch.zeros(4), torch.ones(4)
        >>> bits = revdeq.kernels.invert_compare(state, torch.ones(4), initial, adjoint, torch.ones(4), beta=0.5)
        >>> bits.view(torch.float32).max().item()  # the way back arrived
        0.0
    """
    step = _step(beta, gamma)
    _check_adjoint(state, initial, adjoint, vjp)
    read, other = _needed(step, "read", read, initial.dtype), _needed(step, "other", other, adjoint.dtype)
    copy = initial if read is None else read
    bound = _bind(state, copy, f=f, initial=initial, adjoint=adjoint, vjp=vjp, other=other)
    other = bound.in_order_or_none(other)
    least = torch.full((), floor, dtype=torch.float32, device=state.device)
    return bound.invert_compare(f, initial, least, adjoint, vjp, other, step, step)


@relax.register_fake
@invert.register_fake
@invert_adjoint.register_fake
def _(*args: object, **settings: object) -> None:
    return None


@invert_compare.register_fake
def _(state: Tensor, *args: object, **settings: object) -> Tensor:
    return state.new_empty((chunk_count(state), LANES), dtype=torch.int32)


@relax_norms.register_fake
def _(state: Tensor, *args: object, **settings: object) -> Tensor:
    return state.new_empty((2, chunk_count(state), LANES))


for _operator in (relax, relax_norms, invert, invert_adjoint, invert_compare):
    functools.update_wrapper(_operator, _operator._init_fn)  # for help(), which would show torch's own wrapper


def _step(beta: float, gamma: float) -> Coefficients:
    if not 0 < beta < 2 or beta == 1:
        raise ValueError(f"beta is {beta}: it must be in (0, 2) and not 1, where the step has no inverse")
    if not 0 < gamma < 2:
        raise ValueError(f"gamma is {gamma}: it must be in (0, 2), where 1 is the paper's iteration")
    return Coefficients.rounded(beta, gamma)


def _needed(step: Coefficients, name: str, x: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What only a gamma other than 1 asks for."""
    if step.c == 0:
        return None
    if x is None:
        what = {"read": "what f was given", "other": "the adjoint of the other state"}[name]
        raise ValueError(f"{name} is None: where gamma is not 1 it must be {what}")
    return x.to(dtype)


def _check_adjoint(state: Tensor, copy: Tensor, adjoint: Tensor, vjp: Tensor) -> None:
    wide = torch.float64 if copy.dtype == torch.float64 else torch.float32
    if adjoint.dtype != wide or vjp.dtype != copy.dtype:
        raise TypeError(
            f"adjoint is {adjoint.dtype} and vjp is {vjp.dtype}: where f reads {copy.dtype} they must be "
            f"{wide} and {copy.dtype}"
        )
    if layout(adjoint) != layout(state) and adjoint.numel() > 1:
        raise ValueError(f"adjoint has strides {adjoint.stride()}: it must be laid out like state, {state.stride()}")


def _bind(state: Tensor, copy: Tensor, **others: Tensor | None) -> half_step.HalfStep:
    if state.dtype != torch.float64:
        raise TypeError(f"state is {state.dtype}: it must be torch.float64")
    if not torch.ops.aten.is_non_overlapping_and_dense(state):
        raise ValueError(f"state has shape {tuple(state.shape)} and strides {state.stride()}: it must be dense")
    for key, x in {"state": state, "copy": copy, **others}.items():
        if x is None:
            continue
        if x.shape != state.shape or x.device != state.device:
            raise ValueError(
                f"{key} has shape {tuple(x.shape)} on {x.device}: it must be shaped like state, "
                f"{tuple(state.shape)}, and be on {state.device}"
            )
        if x.dtype not in DTYPES:
            raise TypeError(f"{key} is {x.dtype}: it must be float32, float64, bfloat16 or float16")
        if x.requires_grad:  # within an operator torch.is_grad_enabled() is always false
            raise ValueError(f"{key} requires a gradient, which does not flow through a half-step: use {key}.detach()")
    if layout(copy) != layout(state) and copy.numel() > 1:
        raise ValueError(f"copy has strides {copy.stride()}: it must be laid out like state, {state.stride()}")
    return half_step_for(state.device)(state, copy)
