"""The half-steps of a float64 state as torch operators: they can be compiled and exported, and check their arguments.

One implementation serves all devices: it asks the registry of backends. The solver calls the same half-steps without
torch's dispatcher, which takes 6 us.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.library import Library

from .backends import backend_for
from .checks import Inputs, check_kinds, check_memory, coefficients, inputs, read_next


def relax(
    y: Tensor, f_z: Tensor, beta: float, gamma: float = 1.0, z: Tensor | None = None, *, dtype: Any = None
) -> Tensor:
    """A half-step (equation 5): y <- (1 - beta) y + beta (gamma f(z) + (1 - gamma) z), in place.

    Args:
        y: The state, float64 and dense in memory, in any layout.
        f_z: f of the other state, of any floating dtype.
        beta: The relaxation, rounded to float32. It must not be 1, or the half-step would have no inverse.
        gamma: The damping of f.
        z: What f read, in the dtype that it reads. It is used only where gamma is not 1.
        dtype: What f reads next, f_z's dtype by default.

    Returns:
        What f reads next: the new y, in its dtype, in new memory.

    Raises:
        TypeError: A dtype, or a kind of tensor, is wrong. Nothing was written then, nor in the following cases.
        ValueError: A shape, a device, a memory layout or a coefficient is wrong, or tensors overlap in memory.

    Example:
        >>> y = torch.zeros(2).double()
        >>> revdeq.kernels.relax(y, torch.ones(2), 0.75)
        tensor([0.7500, 0.7500])
    """
    check_kinds(beta, gamma, dtype, y=y, f_z=f_z, z=z)
    return torch.ops.revdeq.relax.default(y, f_z, beta, gamma, z, dtype=dtype)


def invert(
    y: Tensor, f_z: Tensor, beta: float, gamma: float = 1.0, z: Tensor | None = None, *, dtype: Any = None
) -> Tensor:
    """The inverse of the same half-step (equation 6): y <- (y - beta (gamma f(z) + (1 - gamma) z)) / (1 - beta).

    Args:
        y: The state, float64 and dense in memory, in any layout.
        f_z: f of the other state, with the same bits as in `relax`.
        beta: The relaxation.
        gamma: The damping of f.
        z: What f read, where gamma is not 1.
        dtype: What f reads next, f_z's dtype by default.

    Returns:
        What f reads next: y before the half-step, in its dtype, in new memory.

    Raises:
        TypeError, ValueError: As for `relax`.

    Example:
        >>> y, f_z = torch.ones(2).double(), torch.zeros(2)
        >>> _ = revdeq.kernels.relax(y, f_z, 0.75)
        >>> revdeq.kernels.invert(y, f_z, 0.75)
        tensor([1., 1.])
    """
    check_kinds(beta, gamma, dtype, y=y, f_z=f_z, z=z)
    return torch.ops.revdeq.invert.default(y, f_z, beta, gamma, z, dtype=dtype)


def invert_adjoint(
    y: Tensor, f_z: Tensor, adjoint: Tensor, vjp: Tensor, beta: float, gamma: float = 1.0, z: Tensor | None = None,
    other: Tensor | None = None, *, dtype: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The inverse, and a half-step of the adjoint (Algorithm 1) in the same pass over memory, both in place.

    With a = 1 - beta, b = beta gamma and c = beta (1 - gamma), the adjoint of z becomes a adjoint + b vjp + c other.
    Adjoints are stored times b, so that each is the seed of the next vector-Jacobian product: begin with 0 for y, and
    with b times the gradient for z.

    Args:
        y: The state, float64 and dense in memory, in any layout.
        f_z: f of the other state, z, with the same bits as in `relax`.
        adjoint: The adjoint of z: float64 if f reads float64, otherwise float32, in y's memory layout.
        vjp: The product of the seed with the derivative of f at z, in the dtype that f reads.
        beta: The relaxation.
        gamma: The damping of f.
        z: What f read, where gamma is not 1.
        other: The adjoint of y, where gamma is not 1.
        dtype: What f reads next, f_z's dtype by default.

    Returns:
        What f reads next, y before the half-step, and the next seed: the adjoint, in f_z's dtype.

    Raises:
        TypeError, ValueError: As for `relax`.

    Example:
        A whole step back, with beta = 0.5, from y and z after the step and the gradient with respect to z:

        >>> def product(read, seed):  # f, and its vector-Jacobian product
        ...     f_read = torch.tanh(read.requires_grad_())
        ...     return f_read.detach(), *torch.autograd.grad(f_read, read, seed)
        >>> y, z, gradient = torch.full((2,), 0.3).double(), torch.full((2,), 0.2).double(), torch.ones(2)
        >>> y_bar, z_bar = torch.zeros(2), 0.5 * gradient  # times b
        >>> f_y, vjp = product(y.float(), z_bar)
        >>> read, seed = revdeq.kernels.invert_adjoint(z, f_y, y_bar, vjp, 0.5)
        >>> f_z, vjp = product(read, seed)
        >>> read, seed = revdeq.kernels.invert_adjoint(y, f_z, z_bar, vjp, 0.5)
        >>> (z_bar + 0.5 * y_bar) / 0.5  # the gradient with respect to z = y before the step
        tensor([0.9549, 0.9549])
    """
    check_kinds(beta, gamma, dtype, y=y, f_z=f_z, adjoint=adjoint, vjp=vjp, z=z, other=other)
    return torch.ops.revdeq.invert_adjoint.default(y, f_z, adjoint, vjp, beta, gamma, z, other, dtype=dtype)


def _step(
    name: str, fake: bool, y: Any, f_z: Any, beta: Any, gamma: Any = 1.0, z: Any = None, *, dtype: Any = None
) -> Tensor:
    half_step, read = _bound(fake, y, beta, gamma, dtype, inputs(gamma, f_z, z))
    if half_step:
        getattr(half_step, name)(f_z, z, read)
    return read


def _step_adjoint(
    fake: bool, y: Any, f_z: Any, adjoint: Any, vjp: Any, beta: Any, gamma: Any = 1.0, z: Any = None, other: Any = None,
    *, dtype: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    half_step, read = _bound(fake, y, beta, gamma, dtype, inputs(gamma, f_z, z, adjoint, vjp, other))
    seed = torch.empty_like(read, dtype=f_z.dtype)
    if half_step:
        half_step.invert_adjoint(f_z, z, read, adjoint, vjp, other, seed)
    return read, seed


def _bound(fake: bool, y: Tensor, beta: float, gamma: float, dtype: Any, used: Inputs) -> tuple[Any, Tensor]:
    """The half-steps of y, or None if a tracer's tensors are fake; and an empty tensor for what f reads next."""
    if y.dtype is not torch.float64:
        raise TypeError(f"y is {y.dtype}: the state must be torch.float64; convert it with y.double()")
    read = read_next(y, dtype, used)
    if fake:
        return None, read
    check_memory(y, used)
    half_step = backend_for(y.device).states["float64"](y, coefficients(beta, gamma))
    increment_version([x for x in (y, used.get("adjoint")) if x is not None and not x.is_inference()])
    return half_step, read


LIBRARY = Library("revdeq", "DEF")
STATE, STEP = "Tensor(a!) y, Tensor f_z", "float beta, float gamma=1.0, Tensor? z=None"
for schema, function in (
    (f"relax({STATE}, {STEP}, *, ScalarType? dtype=None) -> Tensor", partial(_step, "relax")),
    (f"invert({STATE}, {STEP}, *, ScalarType? dtype=None) -> Tensor", partial(_step, "invert")),
    (
        f"invert_adjoint({STATE}, Tensor(b!) adjoint, Tensor vjp, {STEP}, Tensor? other=None, "
        "*, ScalarType? dtype=None) -> (Tensor, Tensor)",
        _step_adjoint,
    ),
):
    name = LIBRARY.define(schema, tags=torch.Tag.pt2_compliant_tag)
    LIBRARY.impl(name, partial(function, False), "CompositeExplicitAutograd")
    torch.library.register_fake(f"revdeq::{name}", partial(function, True), lib=LIBRARY)
