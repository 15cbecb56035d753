"""revdeq.solve: the fixed point of f by the reversible iteration, with exact gradients in constant memory."""

import ctypes
import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from ..kernels.half_step import Coefficients
from .adjoint import NORM_FLOOR, Iteration, Reversible, iterate
from .deferred import settle
from .function import DTYPES, Function
from .inputs import Kept
from .monitor import CHECKS, Monitor, call_site
from .scheme import Exact, checked_radix, scheme_for
from .unrolled import is_fake, is_traced, unrolled


@dataclass(frozen=True)
class Solution:
    """The result of `revdeq.solve`.

    z, y: the final states, shaped like z0, in z0's dtype, differentiable.
    steps: the number of steps that were taken.
    residual: the relative change ‖z_N - z_{N-1}‖ / (‖z_N‖ + 1e-5) of the last step, a 0-d tensor without a
        gradient. Reading it may wait for the device.
    beta: the beta that was used: the one asked for, rounded to float32, or for state="exact" to a fraction.
    """

    z: Any
    y: Any
    steps: int
    residual: Tensor
    beta: float

    @property
    def nfe(self) -> int:
        """Evaluations of f in the forward pass."""
        return 2 * self.steps


def solve(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    beta: float = 0.5,
    max_steps: int = 8,
    tol: float | None = None,
    state: str | Exact = "float64",
    check: str | None = "warn",
) -> Solution:
    """Find z = f(z, *args) by the reversible fixed-point iteration (equation 5 of the paper)

        y' = (1 - beta) y + beta f(z)        z' = (1 - beta) z + beta f(y')

    from y = z = z0. The backward pass inverts each step, so its memory does not grow with `max_steps`, and
    the gradient is that of the very iteration that ran.

    f: a module or any callable. It returns something shaped like z, and it must compute the same when it is
        called again with the same input. Its input is only lent to it: clone what should outlive the call.
    z0: a tensor, or a nested tuple, list or dict of tensors, of dtype float32, float64, bfloat16 or float16,
        which is the dtype that f sees. The states of the solver are float64 whatever f computes in.
    args: passed on to f. Gradients reach z0, tensors in args, the parameters of f and tensors that f closes
        over.
    beta: the relaxation, in (0, 2) and not 1. The iteration converges if f contracts with a constant k and
        beta < 2 / (1 + k). It is rounded to float32 once, which makes beta * f exact in float64.
    max_steps: the number of steps N, each of which evaluates f twice.
    tol: None takes exactly `max_steps` steps and never waits for the device. With tol > 0 the iteration stops
        after the first step whose relative change, `Solution.residual`, is at most tol.
    state: "float64" is the paper's mixed precision. "exact" keeps integers, in the same 8 bytes, which no step
        changes beyond recovery: the gradient is that of a stored graph of the same steps, for every beta and every
        number of them. They resolve 6e-8 (2^-24), which is coarser than a float64 f. 1 - beta is taken
        as the nearest fraction with a denominator of at most 64. Magnitudes must stay below 128 (or set
        `revdeq.Exact(fraction_bits=...)`), and beyond some number of half-steps (beta .5: 32, .75: 16, .8: 13, .9:
        9) 4 more bytes per element are kept for every such number.
    check: what to do when the backward pass finds that it did not arrive at z0, so that its gradient is not to
        be trusted (float64 has its range: the error grows like |1 - beta|^-max_steps): "warn", once for each
        place that calls, "raise", or None, which does not look. On the CPU this happens at the end of the
        backward pass; on other devices, which are not waited for, at a later call of `solve`.

    Memory beside f's own: 28 bytes per element in float32, whatever `max_steps` is. A z0 or an output of f
    that is not laid out densely and in the same order costs one more pass over it.

    All evaluations within a solve, and their repetition in the backward pass, see the same random draw, the
    same autocast and the same settings of torch; the generators end where one evaluation leaves them. Layers
    with state that every evaluation would change, such as BatchNorm in training mode, are refused. Forward
    hooks on modules inside f run at every evaluation; hooks on tensors once per backward pass. What f closes
    over must stay what it was until the backward pass: other tensors with gradients are an error there, other
    values are noticed by `check`. A generator of f's own (torch.Generator, numpy) is not rewound.

    Compile f, not the model around it: in a compiled model a solve is a graph break, and what is inside it
    runs as it is. With tol=None no pass waits for the device, so that both can be captured in a CUDA graph.
    """
    if is_traced() or (isinstance(z0, Tensor) and is_fake(z0)):
        return _solve_traceably(f, z0, args, beta, max_steps, tol, state)
    run = _solve_untraced if torch.compiler.is_compiling() else _solve
    return run(f, z0, args, beta, max_steps, tol, state, check)


def _solve_traceably(
    f: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...],
    beta: float,
    max_steps: int,
    tol: float | None,
    state: str | Exact,
) -> Solution:
    """In plain operations: a tracer sees nothing of what a kernel computes."""
    if tol is not None:
        raise ValueError(
            f"tol = {tol!r}: a model that is traced or exported takes a fixed number of steps; use tol=None"
        )
    step = _step_of(state, beta)
    y, z, before = unrolled(checked_f(f), z0, args, step, checked_max_steps(max_steps))
    changes = [
        (a.double() - b.double()).square().sum() for a, b in zip(tree_leaves(z), tree_leaves(before), strict=True)
    ]
    values = [a.double().square().sum() for a in tree_leaves(z)]
    residual = torch.stack(changes).sum().sqrt() / (torch.stack(values).sum().sqrt() + NORM_FLOOR)
    return Solution(z=z, y=y, steps=max_steps, residual=residual.detach(), beta=step.beta)


def _solve(
    f: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...],
    beta: float,
    max_steps: int,
    tol: float | None,
    state: str | Exact,
    check: str | None,
) -> Solution:
    checked_f(f)
    rounded = checked_beta(beta)
    max_steps = checked_max_steps(max_steps)
    tol = checked_tol(tol)
    check = checked_check(check)
    if forward_ad._current_level >= 0:
        raise RuntimeError(
            "solve has no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp), and a tangent would be "
            "lost: use reverse mode, or call solve outside of the dual level"
        )
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise TypeError(
            "solve is inside a transform of torch.func (grad, vmap, ...), which it cannot be: call it outside, with a "
            "batch dimension in place of vmap and with autograd in place of grad"
        )
    settle()
    initial, spec = checked_state(z0)
    device = initial[0].device
    scheme = scheme_for(state, rounded if state == "float64" else float(beta), 1.0, device)
    monitor = None
    if check is not None:
        setting = f"beta = {scheme.beta:.6g}, max_steps = {max_steps}"
        monitor = Monitor(check, call_site(), setting, scheme.remedy)
    it = Iteration(Function(f, spec, args, device), scheme, max_steps, tol, monitor)
    try:
        outcome = iterate(it, initial)
    except Kept:  # a cache that f has filled is there now, and its content is like any captured tensor
        it = Iteration(Function(f, spec, args, device), scheme, max_steps, tol, monitor)
        outcome = iterate(it, initial)
    last = (*outcome.y_copy, *outcome.z_copy)
    inputs = it.f.inputs.tensors
    if it.f.graph and (inputs or any(x.requires_grad for x in initial)):
        last = Reversible.apply(it, outcome, *initial, *inputs)

    y, z = last[: len(initial)], last[len(initial) :]
    assert it.norms is not None
    change, value = it.norms.sqrt()
    return Solution(
        z=tree_unflatten(z, spec),
        y=tree_unflatten(y, spec),
        steps=it.steps,
        residual=change / (value + NORM_FLOOR),
        beta=scheme.beta,
    )


def _step_of(state: str | Exact, beta: float) -> Coefficients:
    """With a state of float64 numbers, also where integers are asked for: their iteration, up to their resolution."""
    radix = checked_radix(state, float(beta))
    return Coefficients.rounded(checked_beta(beta) if radix is None else radix.beta)


_step_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.export would trace into its fractions

# In a compiled model the solve is one graph break. (torch.compiler.disable would import the compiler at once.)
_solve_untraced = _disable_dynamo(_solve)


def checked_f(f: Any) -> Callable[..., Any]:
    if not callable(f):
        raise TypeError(f"f = {f!r} must be callable: a module, or a function f(z, *args)")
    return f


def checked_beta(beta: float) -> float:
    if not isinstance(beta, Real):
        raise TypeError(f"beta = {beta!r} must be a number in (0, 2) and not 1")
    try:
        rounded = ctypes.c_float(float(beta)).value
    except OverflowError:
        rounded = math.inf
    if not 0 < rounded < 2 or rounded == 1:
        raise ValueError(
            f"beta = {beta!r} must lie in (0, 2) and not be 1, also after rounding to float32: 1 - beta is what the "
            "backward pass divides by; 0.5 to 0.9 work well"
        )
    return rounded


def checked_max_steps(max_steps: int) -> int:
    try:
        steps = operator.index(max_steps)
    except TypeError:
        raise TypeError(f"max_steps = {max_steps!r} must be an integer of at least 1") from None
    if steps < 1:
        raise ValueError(f"max_steps = {max_steps!r} must be at least 1: a step evaluates f twice")
    return steps


def checked_tol(tol: float | None) -> float | None:
    if tol is None:
        return None
    if not isinstance(tol, Real):
        raise TypeError(f"tol = {tol!r} must be a number, or None to take exactly max_steps steps")
    if not 0 < tol <= sys.float_info.max:
        raise ValueError(f"tol = {tol!r} must be positive and finite, or None to take exactly max_steps steps")
    return float(tol)


def checked_check(check: str | None) -> str | None:
    if check not in CHECKS:
        raise ValueError(f"check = {check!r} must be 'warn', 'raise' or None")
    return check


def checked_state(z0: Any) -> tuple[list[Tensor], Any]:
    """The tensors of z0, and its structure."""
    paths, spec = tree_flatten_with_path(z0)
    if not paths:
        raise ValueError(f"z0 = {z0!r} has no tensor in it: pass a tensor, or a tuple, list or dict of tensors")
    leaves = []
    for path, x in paths:
        name = f"z0{keystr(path)}"
        if not isinstance(x, Tensor):
            raise TypeError(
                f"{name} is of type {type(x).__name__}: it must be a tensor (or a tuple, list or dict of tensors)"
            )
        if x.dtype not in DTYPES:
            remedy = f"torch.view_as_real({name})" if x.is_complex() else f"{name}.float()"
            raise TypeError(f"{name} is {x.dtype}: it must be float32, float64, bfloat16 or float16; use {remedy}")
        if is_traceable_wrapper_subclass(x):
            raise TypeError(f"{name} is a {type(x).__name__}, which holds other tensors: solve for those")
        if x.layout != torch.strided:
            raise TypeError(f"{name} has layout {x.layout}: it must be dense; convert it with {name}.to_dense()")
        if x.device != paths[0][1].device:
            raise ValueError(
                f"{name} is on {x.device} and the first tensor of z0 on {paths[0][1].device}: use one device"
            )
        if x.device.type == "meta":
            raise ValueError(f"{name} is on the meta device, where nothing is computed: move it to a real one")
        # A tensor made in inference mode cannot be saved for the backward pass; its copy can.
        leaves.append(x.clone() if x.is_inference() and torch.is_grad_enabled() else x.resolve_neg())
    return leaves, spec
