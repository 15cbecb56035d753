"""revdeq.solve: the fixed point of f by the reversible iteration, with exact gradients in almost constant memory."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves
from typing_extensions import Unpack

from .check import Check, Statistics, call_site, settle
from .implicit import with_implicit_gradient
from .iteration import Iteration, relative_change
from .options import Keywords, Options, options_from
from .per_example import ByExample
from .precision import coefficients, precision_for
from .repeatable import Repeatable, thread
from .state import State, flattened_state, is_traced, structured
from .unrolled import sum_of_squares, unrollable, unrolled


@dataclass(eq=False)
class Solution:
    """The result of `revdeq.solve`, and of each step of `revdeq.steps`.

    Attributes:
        z, y: The final states, with the structure and dtype of z0, differentiable. z is the one to use.
        steps: The number of steps; with per_example=True, a tensor with an entry per example.
        nfe: The number of evaluations of f in the forward pass.
        norms: The squared norms of the last change of z and of z, from which `change` is computed when it is read.
        converged: With a tol, whether it was reached; with per_example=True, for each example. None without.
        beta, gamma: The coefficients in use, after rounding.
        state: "float64" or "exact": the format of y and z.
        adjoint: Statistics of the backward pass, once it has run: `growth`, from the last states to those of the first
            step; and with gradient="implicit", `steps` and `change` of the adjoint.
        aux: With aux=True, the sum of f's auxiliary outputs; in `revdeq.steps`, of this step.

    Example:
        >>> solution = revdeq.solve(f, z0, x, max_steps=4)
        >>> solution.steps, solution.nfe, solution.state
        (4, 8, 'float64')
    """

    z: Any = field(repr=False)
    y: Any = field(repr=False)
    steps: Any
    nfe: int
    norms: Tensor = field(repr=False)
    converged: Any
    beta: float
    gamma: float
    state: str
    adjoint: Statistics
    aux: Any = field(default=None, repr=False)

    @property
    def change(self) -> Tensor:
        """The relative change ‖z_N - z_{N-1}‖ / (‖z_N‖ + 1e-5) of the last step, a 0-d tensor without a gradient; with
        per_example=True, that of each example. Reading it may wait for the device."""
        return relative_change(self.norms)

    @property
    def gap(self) -> Tensor:
        """The relative distance ‖y - z‖ / (‖z‖ + 1e-5), a 0-d tensor without a gradient. If y and z converge to two
        different points, neither is a fixed point."""
        return _distance(tree_leaves(self.y), tree_leaves(self.z))


def solve(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    y0: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[Keywords],
) -> Solution:
    """Find z = f(z, *args) by the reversible fixed-point iteration (equation 5 of the paper)

        y' = (1 - beta) y + beta f(z)        z' = (1 - beta) z + beta f(y')

    from y = z = z0, unless y0 is given. The backward pass inverts each step, so memory hardly grows with `max_steps`,
    and the gradient is that of the iteration that ran.

    Args:
        f: A module or any callable. It returns something with the structure of z, and must return the same result when
            it is called again with the same input.
        z0: A tensor, or a nested tuple, list, dict or dataclass of tensors, of dtype float32, float64, bfloat16 or
            float16, which is the dtype that f sees. To continue another solve, pass its z, and its y as y0.
        args: Further arguments of f. Gradients reach z0, y0, tensors in args, the parameters of f and tensors that f
            captures.
        y0: The initial y, if it is not z0.
        kwargs: Keyword arguments for f.
        options: The coefficients beta and gamma, max_steps, tol and others: see `revdeq.Options`.

    Returns:
        A `revdeq.Solution`, with the states z and y, the number of steps and the change of the last one.

    Raises:
        FloatingPointError: f returns NaN or infinity, or the iteration diverges.
        OverflowError: A magnitude exceeds the range of the exact state.
        RuntimeError: f cannot be repeated in the backward pass, for example BatchNorm in training mode.
        TypeError, ValueError: An argument is invalid, or f does not return the structure of z0.
        ReconstructionError, ConvergenceError: In the backward pass, with check="raise".

    Example:
        >>> f = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        >>> solution = revdeq.solve(lambda z, x: f(z) + x, torch.zeros(4, 8), torch.randn(4, 8))
        >>> solution.z.sum().backward()
    """
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=UNCOMPILED)
        return torch.compiler.disable(_solve)(f, z0, args, y0, kwargs, options)
    return _solve(f, z0, args, y0, kwargs, options)


def _solve(f: Any, z0: Any, args: tuple[Any, ...], y0: Any, kwargs: Any, keywords: Any) -> Solution:
    options = options_from(keywords)
    z, y, spec = _initial(f, z0, y0)
    if thread.evaluates or is_traced(z):
        run, step = unrollable(f, z, spec, args, kwargs, options), coefficients(options.beta, options.gamma)
        y, z, count, norms = unrolled(run, z, y, step, options)
        converged = None if options.tol is None else bool(relative_change(norms) <= options.tol)
        states, pair = (structured(z, spec), structured(y, spec)), (step.beta, step.gamma)
        return Solution(*states, count, 2 * count, norms, converged, *pair, "float64", Statistics())
    iteration, aux = _iteration(f, z, y, spec, args, kwargs, options), None
    for y, z, aux in iteration.run(z, y):  # noqa: B007, B020
        pass
    if options.gradient == "implicit" and torch.is_grad_enabled():
        y, z = with_implicit_gradient(iteration, y, z)
    else:
        y = iteration.result_of(2 * iteration.steps - 2, y)
    if iteration.check is not None and options.tol is not None and iteration.converged is True:
        iteration.check.judge_gap(_distance(y, z).item())
    return _solution(iteration, y, z, aux, spec)


def steps(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    y0: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[Keywords],
) -> Iterator[Solution]:
    """The iteration of `revdeq.solve`, step by step, with the same bits.

    Every step yields a `revdeq.Solution` with differentiable z and y: losses on intermediate states have exact
    gradients, in the memory of the states that you keep. You may leave the loop early. What `retain_grad` records on a
    state is the gradient of your loss alone, without that through later steps.

    Args:
        f, z0, args, y0, kwargs, options: As for `revdeq.solve`.

    Returns:
        An iterator over at most `max_steps` solutions; with a `tol`, it stops where `solve` would.

    Raises:
        ValueError: gradient is "implicit", which refers to the last step.

    Example:
        >>> loss = sum(s.z.square().mean() for s in revdeq.steps(f, z0, x, max_steps=4))
        >>> loss.backward()
    """
    checked = options_from(options)
    z, y, spec = _initial(f, z0, y0)
    if thread.evaluates or is_traced(z):
        raise ValueError("revdeq.steps does not work in a traced model or inside the f of a solve: use revdeq.solve")
    if checked.gradient == "implicit":
        raise ValueError("gradient = 'implicit' refers to the last step: leave it out of revdeq.steps")
    iteration = _iteration(f, z, y, spec, args, kwargs, checked)
    enabled, run = torch.is_grad_enabled(), iteration.run(z, y, stepwise=True)

    def every() -> Iterator[Solution]:
        while True:
            with torch.set_grad_enabled(enabled):
                if (each := next(run, None)) is None:
                    return
                (y, z, aux), k = each, 2 * iteration.steps
                results = iteration.result_of(k - 2, y), iteration.result_of(k - 1, z)
                solution = _solution(iteration, *results, aux, spec)
            versions = [x._version for x in (*y, *z) if not x.is_inference()]
            yield solution
            if versions != [x._version for x in (*y, *z) if not x.is_inference()]:
                raise RuntimeError("z or y of a step was modified in place, and the next step needs it: clone it")

    return every()


def _initial(f: Any, z0: Any, y0: Any) -> tuple[State, State, TreeSpec]:
    """The initial z and y, and their structure."""
    checked_f(f)
    z, spec = flattened_state(z0)
    if y0 is None:
        return z, z, spec
    y, structure = flattened_state(y0, "y0")
    if structure != spec or [(x.shape, x.dtype, x.device) for x in y] != [(x.shape, x.dtype, x.device) for x in z]:
        raise ValueError("y0 must have the structure, shapes, dtypes and device of z0")
    return z, y, spec


def _iteration(f: Any, z: State, y: State, spec: TreeSpec, args: Any, kwargs: Any, options: Options) -> Iteration:
    settle()
    precision = precision_for(options, z[0].device)
    check = Check(options, call_site(), precision) if options.check is not None else None
    run = Repeatable(f, z, spec, args, kwargs, options.indexed, bool(options.aux))
    return (ByExample if options.per_example else Iteration)(run, z, y, precision, options, check)


def _solution(it: Iteration, y: State, z: State, aux: Any, spec: TreeSpec) -> Solution:
    states, step, name = (structured(z, spec), structured(y, spec)), it.precision.step, it.precision.name
    taken = it.steps_taken(), 2 * it.steps, it.norms, it.converged
    return Solution(*states, *taken, step.beta, step.gamma, name, it.statistics, aux)


def _distance(y: State, z: State) -> Tensor:
    apart = [a.detach().double() - b.detach().double() for a, b in zip(y, z, strict=True)]
    return relative_change(torch.stack([sum_of_squares(apart), sum_of_squares([x.detach() for x in z])]))


def checked_f(f: Any) -> Callable[..., Any]:
    if not callable(f):
        raise TypeError(f"f = {f!r} must be callable: a module, or a function f(z, *args)")
    if isinstance(f, type) and issubclass(f, nn.Module):
        raise TypeError(f"f is the class {f.__name__}: create an instance, {f.__name__}(...)")
    return f


UNCOMPILED = (
    "a solve of revdeq cannot be part of a compiled graph: compile f, f.compile() or torch.compile(f), and the model "
    "around it without fullgraph=True, or export it with strict=False"
)
"""A compiled model runs the solve, and f in it, uncompiled. The compiler gives this as the reason."""
