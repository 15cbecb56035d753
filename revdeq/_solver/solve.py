"""revdeq.solve: the fixed point of f by the reversible iteration, with exact gradients in constant memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_unflatten

from ..kernels.half_step import Coefficients
from .call import Call
from .context import untraced
from .deferred import settle
from .implicit import Adjoint, Implicit
from .monitor import Monitor, call_site
from .options import options_from, with_options
from .private import has_tangents, is_transformed
from .scheme import rounded_coefficients, scheme_for
from .state import checked_state
from .tape import NORM_FLOOR, Tape
from .unrolled import has_fakes, is_traced, unrolled


@dataclass(frozen=True)
class Solution:
    """The result of `revdeq.solve`.

    Attributes:
        z, y: The final states, shaped like z0, in z0's dtype, differentiable. z is the one to use.
        steps: The number of steps that were taken.
        residual: The relative change ‖z_N - z_{N-1}‖ / (‖z_N‖ + 1e-5) of the last step, a 0-d tensor without a
            gradient. Reading it may wait for the device.
        beta, gamma: The coefficients that were used: those asked for, rounded to float32, or for the exact state to a
            fraction.
        state: "float64" or "exact": how y and z were kept.
        adjoint: With gradient="implicit", the steps and the residual of the backward pass, once it has run.

    Example:
        >>> solution = revdeq.solve(f, z0, x, max_steps=4)
        >>> solution.steps, solution.nfe, solution.state
        (4, 8, 'float64')
    """

    z: Any
    y: Any
    steps: int
    residual: Tensor
    beta: float
    gamma: float
    state: str
    adjoint: Adjoint | None = None

    @property
    def nfe(self) -> int:
        """The number of evaluations of f in the forward pass."""
        return 2 * self.steps


@with_options
def solve(f: Callable[..., Any], z0: Any, *args: Any, **options: Any) -> Solution:
    """Find z = f(z, *args) by the reversible fixed-point iteration (equation 5 of the paper)

        y' = (1 - beta) y + beta f(z)        z' = (1 - beta) z + beta f(y')

    from y = z = z0. The backward pass inverts each step, so its memory does not grow with `max_steps`, and
    the gradient is that of the very iteration that ran.

    Args:
        f: A module or any callable. It returns something shaped like z, and it must compute the same when it is
            called again with the same input.
        z0: A tensor, or a nested tuple, list or dict of tensors, of dtype float32, float64, bfloat16 or float16,
            which is the dtype that f sees. The solver's own states are float64 or exact, whatever f computes in.
        args: Passed on to f. Gradients reach z0, tensors in args, the parameters of f and tensors that f closes
            over.
        {options}

    Returns:
        A `revdeq.Solution`, with the states z and y, the number of steps and the residual.

    Raises:
        FloatingPointError: f returns NaN or infinity, or the iteration diverges.
        OverflowError: A magnitude does not fit the exact state.
        RuntimeError: f contains what cannot be repeated in the backward pass, such as BatchNorm in training mode.
        TypeError, ValueError: An argument is of the wrong kind, or f returns something that is not shaped like z0.
        ReconstructionError, ConvergenceError: In the backward pass, with check="raise".

    Example:
        >>> f = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> solution = revdeq.solve(lambda z, x: f(z) + x, torch.zeros(4, 8), torch.randn(4, 8))
        >>> solution.z.sum().backward()

    Memory beside f's own: 28 bytes per element in float32, whatever `max_steps` is, and on the host the nodes of the
    graph, about 10 KB for each evaluation of a block of a few layers. The states, and z and y, are laid
    out in memory like what f returns first, if that is dense (channels_last, say), and so is what f is given from then
    on. An output that is laid out differently costs one more pass over it.

    All evaluations within a solve, and their repetition in the backward pass, see the same random draw, the
    same autocast and the same settings of torch; the generators end where one evaluation leaves them. Layers
    with state that every evaluation would change, such as BatchNorm in training mode, are refused. Forward
    hooks on modules inside f run at every evaluation, in the backward pass too, and so does whatever else f does
    beside computing; hooks on tensors run once per backward pass. Losses of what f computes inside, and of the states
    that it is given, have exact gradients, too. What f closes over must stay what it was until the backward pass:
    parameters that were changed or exchanged are an error there, other values are noticed by `check`, unless the
    gradient alone depends on them. A generator of f's own (torch.Generator, numpy) is not rewound.

    Compile f, not the model around it: in a compiled model a solve is a graph break, and what is inside it
    runs as it is. torch.export, torch.jit.trace and make_fx record a solve as plain operations, unrolled.
    With tol=None no pass waits for the device, so that both can be captured in a CUDA graph.
    """
    if is_traced() or has_fakes(z0):
        return _solve_traceably(f, z0, args, options)
    run = _solve_untraced if torch.compiler.is_compiling() else _solve
    return run(f, z0, args, options)


def _solve(f: Callable[..., Any], z0: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Solution:
    checked_f(f)
    options = options_from(keywords)
    if has_tangents():
        raise RuntimeError(
            "solve has no forward-mode derivative (torch.autograd.forward_ad, torch.func.jvp), and a tangent would be "
            "lost: use reverse mode, or call solve outside of the dual level"
        )
    if is_transformed():
        raise TypeError(
            "solve is inside a transform of torch.func (grad, vmap, ...), which it cannot be: call it outside, with a "
            "batch dimension in place of vmap and with autograd in place of grad"
        )
    settle()
    initial, spec = checked_state(z0)
    scheme = scheme_for(options, initial)
    monitor = None
    if options.check is not None:
        setting = f"beta = {scheme.beta:.6g}, N = {options.max_steps} steps"
        monitor = Monitor(options.check, call_site(), setting, scheme.name, scheme.resolution, scheme.remedy)

    tape = Tape(Call(f, initial, spec, args), initial, scheme, options, monitor)
    y, z, adjoint = *tape.run(initial), None
    if tape.last is not None:  # the gradient is that of the fixed point
        adjoint = Adjoint()
        last = Implicit.apply(tape, adjoint, [*y, *z], *tape.last.outputs)
        y, z = last[: len(initial)], last[len(initial) :]
    assert tape.norms is not None
    change, value = tape.norms.sqrt()
    return Solution(
        z=tree_unflatten(z, spec),
        y=tree_unflatten(y, spec),
        steps=tape.steps,
        residual=change / (value + NORM_FLOOR),
        beta=scheme.beta,
        gamma=scheme.gamma,
        state=scheme.name,
        adjoint=adjoint,
    )


# In a compiled model the solve is one graph break. (torch.compiler.disable would import the compiler at once.)
_solve_untraced = untraced(_solve)


def _solve_traceably(f: Callable[..., Any], z0: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Solution:
    """In plain operations: a tracer sees nothing of what a kernel computes."""
    if keywords.get("tol") is not None:
        raise ValueError(
            f"tol = {keywords['tol']!r}: a model that is traced or exported takes a fixed number of steps; use tol=None"
        )
    step, max_steps = _constants_of(**keywords)
    y, z, before = unrolled(checked_f(f), z0, args, step, max_steps)
    pairs = zip(tree_leaves(z), tree_leaves(before), strict=True)
    changes = [(new.double() - old.double()).square().sum() for new, old in pairs]
    values = [x.double().square().sum() for x in tree_leaves(z)]
    residual = torch.stack(changes).sum().sqrt() / (torch.stack(values).sum().sqrt() + NORM_FLOOR)
    return Solution(
        z=z, y=y, steps=max_steps, residual=residual.detach(), beta=step.beta, gamma=step.gamma, state="float64"
    )


def _constants_of(**keywords: Any) -> tuple[Coefficients, int]:
    """With a state of float64 numbers, also where integers are asked for: their iteration, up to their resolution."""
    options = options_from(keywords)
    return rounded_coefficients(options), options.max_steps


_constants_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # torch.export would trace into its fractions


def checked_f(f: Any) -> Callable[..., Any]:
    if not callable(f):
        raise TypeError(f"f = {f!r} must be callable: a module, or a function f(z, *args)")
    return f
