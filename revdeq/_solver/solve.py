"""revdeq.solve: the fixed point of f by the reversible iteration, with exact gradients in constant memory."""

import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_leaves, tree_map

from ..kernels.half_step import Coefficients
from . import captured
from .call import Call
from .context import undrawn, untraced
from .deferred import settle
from .implicit import Implicit
from .monitor import Adjoint, Monitor, call_site
from .norms import inner, relative_changes, relative_distance
from .options import options_from, with_options
from .scheme import Scheme, rounded_coefficients, scheme_for
from .state import State, checked_batch, checked_state, checked_y0, refuse_transformed, structured, versions_of
from .tape import End, Start, Tape
from .unchanged import is_compiled
from .unrolled import has_fakes, in_compiled_model, is_traced, unrolled


@dataclass(frozen=True)
class Solution:
    """The result of `revdeq.solve`, and of each step of `revdeq.steps`.

    Attributes:
        z, y: The final states, with the structure and dtype of z0, differentiable. z is the one to use.
        steps: The number of steps; with per_example=True, a tensor with an entry per example.
        nfe: The number of evaluations of f in the forward pass.
        norms: The squared norms of the last change of z and of z, from which `change` is computed when it is read.
        beta, gamma: The coefficients in use: rounded to float32, or with state="auto" and "exact" to a fraction.
        state: "float64" or "exact": the format of y and z.
        adjoint: Statistics of the backward pass, once it has run: the growth of the adjoint, and with
            gradient="implicit" its steps and its change.
        aux: With aux=True, the sum of f's auxiliary outputs; in `revdeq.steps`, of this step.
        carry: The solver's states, with which a solve continues if the solution is passed as z0. None in `revdeq.steps`
            and in a copy.

    A copy (copy.deepcopy) has no graph.

    Example:
        >>> solution = revdeq.solve(f, z0, x, max_steps=4)
        >>> solution.steps, solution.nfe, solution.state
        (4, 8, 'float64')
    """

    z: Any
    y: Any
    steps: Any
    nfe: int
    norms: Tensor = field(repr=False)
    beta: float
    gamma: float
    state: str
    adjoint: Adjoint
    aux: Any = None
    carry: "Carry | None" = field(default=None, repr=False, compare=False)

    @property
    def change(self) -> Tensor:
        """The relative change ‖z_N - z_{N-1}‖ / (‖z_N‖ + 1e-5) of the last step, a 0-d tensor without a
        gradient; with per_example=True, that of each example. Reading it may synchronize with the device. `tol`
        is compared with it, not with the residual ‖f(z) - z‖ / ‖z‖, which can be several times larger."""
        return relative_changes(self.norms)

    @property
    def gap(self) -> Tensor:
        """The relative distance ‖y - z‖ / (‖z‖ + 1e-5), a 0-d tensor. If y and z converge to two different points,
        neither is a fixed point."""
        y, z = tree_leaves(self.y), tree_leaves(self.z)
        return relative_distance([x.detach() for x in y], [x.detach() for x in z])

    @property
    def residual(self) -> Tensor:
        """The old name of `change`."""
        return renamed(self.change, "Solution.residual", "Solution.change")

    def __deepcopy__(self, memo: dict[int, Any]) -> "Solution":
        def copied(x: Any) -> Any:
            return x.detach().clone() if isinstance(x, Tensor) else x

        z, y, aux = (tree_map(copied, tree) for tree in (self.z, self.y, self.aux))
        return replace(self, z=z, y=y, aux=aux, norms=self.norms.clone(), adjoint=Adjoint(), carry=None)


def renamed(value: Any, old: str, new: str) -> Any:
    """Return a value, with a warning about its old name."""
    warnings.warn(f"{old} has been renamed to {new}", DeprecationWarning, stacklevel=3)
    return value


@dataclass(frozen=True)
class Carry:
    """The final states of a solve, from which another one can continue bit for bit, and the number of evaluations until
    there. Unless the graph is retained, a backward pass inverts the steps in the same memory; the tensors' versions
    show that."""

    scheme: Scheme
    states: tuple[State, State]
    evaluations: int
    versions: list[int | None]

    @classmethod
    def of(cls, scheme: Scheme, states: tuple[State, State], evaluations: int) -> "Carry":
        return cls(scheme, states, evaluations, versions_of(*states))

    def for_(self, scheme: Scheme) -> tuple[State, State] | None:
        """The states, if they have this format; otherwise None, and the solve starts from their values."""
        if scheme.name != self.scheme.name or scheme.resolution != self.scheme.resolution:
            return None
        if self.versions != versions_of(*self.states):
            raise RuntimeError(
                "a backward pass has inverted the steps of the solution that this solve continues: continue it "
                "before backward, or start from its values, solve(f, s.z, x, y0=s.y)"
            )
        return self.states


class _Given(NamedTuple):
    """The arguments of a solve."""

    f: Callable[..., Any]
    z0: Any
    args: tuple[Any, ...]
    y0: Any
    kwargs: Mapping[str, Any] | None
    options: dict[str, Any]


@with_options()
def solve(
    f: Callable[..., Any], z0: Any, *args: Any, y0: Any = None, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> Solution:
    """Find z = f(z, *args) by the reversible fixed-point iteration (equation 5 of the paper)

        y' = (1 - beta) y + beta f(z)        z' = (1 - beta) z + beta f(y')

    from y = z = z0, unless y0 is given. The backward pass inverts each step, so memory does not grow with `max_steps`,
    and the gradient is that of the iteration that ran.

    Args:
        f: A module or any callable. It returns something with the structure of z, and must return the same result when
            it is called again with the same input.
        z0: A tensor, or a nested tuple, list, dict or dataclass of tensors, of dtype float32, float64, bfloat16 or
            float16, which is the dtype that f sees. (The solver's states are float64 or exact.) Or a `revdeq.Solution`
            of another solve, which is continued with the next index of the evaluation and the next pairs of the
            schedule: bit for bit, but for the last bit of the exact state with some beta.
        args: Further arguments of f. Gradients reach z0, y0, tensors in args, the parameters of f and tensors that f
            captures.
        y0: The initial y, if it is not z0.
        kwargs: Keyword arguments for f.
        {options}

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

    Memory, in addition to f's: 32 bytes per element in float32, for any `max_steps`, and on the host the nodes of the
    graph, about 10 KB per evaluation of a block of a few layers. The states have the memory layout of f's first output
    if that is dense (channels_last, for example), and so do later inputs of f. An output with another layout costs an
    additional pass over it.

    All evaluations of a solve, including those of the backward pass, see the same random numbers, autocast and torch
    settings; afterwards the generators are where one evaluation leaves them. Layers that update state in every
    evaluation, such as BatchNorm in training mode, are refused. Forward hooks on modules inside f, and all other side
    effects of f, run at every evaluation, in the backward pass too; hooks on tensors run once per backward pass. Losses
    on intermediate values of f, and on the states that f gets, have exact gradients. Tensors that f captures must not
    change before the backward pass: changed or replaced parameters raise an error there, and other changes are noticed
    by `check`, unless they affect only the gradient. Generators other than torch's default ones are not rewound.

    Compile f (f.compile(), or torch.compile(f)), even if the model around it is compiled: there a solve is a graph
    break, and f runs uncompiled. torch.export, torch.jit.trace and make_fx record a solve as unrolled operations. With
    tol=None no pass synchronizes with the device, so that both can be captured in a CUDA graph.
    """
    if in_compiled_model():
        _break_the_graph()
        return _solve_untraced(f, z0, args, y0, kwargs, options)
    given = _Given(f, z0, args, y0, kwargs, options)
    return _solve_traceably(given) if is_traced() or has_fakes(z0) else _solve(given)


def _solve(given: _Given) -> Solution:
    tape, spec = _tape(given)
    if tape.options.capture:
        end = captured.run(tape, spec, given.f, given.args, dict(given.kwargs or {}))
    else:
        end = tape.run()
    if tape.last is not None:  # implicit gradient
        last = Implicit.apply(tape, [*end.y, *end.z], *tape.last.outputs)
        end = end._replace(y=last[: len(end.y)], z=last[len(end.y) :])
    return _solution(tape, spec, end)


@with_options()
def steps(
    f: Callable[..., Any], z0: Any, *args: Any, y0: Any = None, kwargs: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[Solution]:
    """The iteration of `revdeq.solve`, step by step, with the same bits.

    Every step yields a `revdeq.Solution` with differentiable z and y: losses on intermediate states have exact
    gradients, in the memory of the states that you keep. You may leave the loop early.

    Args:
        f, z0, args, y0, kwargs: As for `revdeq.solve`.
        {options}

    Returns:
        An iterator over at most `max_steps` solutions; with a `tol`, it stops where `solve` would.

    Raises:
        ValueError: gradient is "implicit", or `backward_steps` is set: both refer to the last step.

    Example:
        >>> loss = sum(s.z.square().mean() for s in revdeq.steps(f, z0, x, max_steps=4))
        >>> loss.backward()
    """
    if in_compiled_model():
        _break_the_graph()
        return _steps_untraced(f, z0, args, y0, kwargs, options)
    if is_traced() or has_fakes(z0):
        raise RuntimeError("revdeq.steps cannot be traced or exported: use revdeq.solve, which is then unrolled")
    return _steps(_Given(f, z0, args, y0, kwargs, options))


def _steps(given: _Given) -> Iterator[Solution]:
    checked = options_from(given.options)
    for name, usual in (("gradient", "exact"), ("backward_steps", None)):
        if getattr(checked, name) != usual:
            raise ValueError(
                f"{name} = {getattr(checked, name)!r} refers to the last step, which revdeq.steps does not know in "
                f"advance: leave it out"
            )
    if checked.capture:
        captured.tell("revdeq.steps hands out every state: use revdeq.solve")
    tape, spec = _tape(given)
    return (_solution(tape, spec, end) for end in tape.stepwise())


def _tape(given: _Given) -> tuple[Tape, TreeSpec]:
    """Check the arguments, and create the tape of a solve and the structure of its state."""
    f, z0, args, y0, kwargs, keywords = given
    checked_f(f)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs = {kwargs!r} must be a dict, the keyword arguments of f")
    if isinstance(keywords.get("schedule"), Tensor):
        refuse_transformed(keywords["schedule"])
    options = options_from(keywords)
    settle()
    carry = None
    if isinstance(z0, Solution):
        if y0 is not None:
            raise ValueError("y0 is given, but z0 is a solution, which has its own y: leave y0 out")
        z0, y0, carry = z0.z, z0.y, z0.carry
    coefficients, before = learnt(keywords), 0 if carry is None else carry.evaluations
    if before > 0:  # the schedule goes on where it was
        options = replace(options, schedule=options.pairs[before:] or None)
        coefficients = None if coefficients is None else coefficients[before:]
    initial, spec = checked_state(z0)
    if options.per_example:
        checked_batch(initial, spec)
    y = [] if y0 is None else checked_y0(y0, initial, spec)
    scheme = scheme_for(options, initial)
    start = Start(initial, y, None if carry is None else carry.for_(scheme))
    monitor = None
    if options.check is not None:
        setting = f"beta = {scheme.beta:.6g}, N = {options.max_steps} steps"
        monitor = Monitor(options.check, call_site(), setting, scheme.name, scheme.resolution)
    call = Call(f, initial, spec, args, kwargs or {}, options.indexed, bool(options.aux), before)
    return Tape(call, start, scheme, options, monitor, coefficients), spec


def _solution(tape: Tape, spec: TreeSpec, end: End) -> Solution:
    assert tape.norms is not None
    norms, scheme, nfe = tape.norms, tape.scheme, 2 * tape.steps
    taken: Any = tape.steps
    if tape.ends is not None:
        norms, taken = norms.to(tape.ends.device), (tape.ends.clamp(max=nfe) // 2).to(torch.int64)
    z, y = structured(end.z, spec), structured(end.y, spec)
    carry = None if end.states is None else Carry.of(scheme, end.states, tape.f.before + nfe)
    known = scheme.beta, scheme.gamma, scheme.name, tape.adjoint
    return Solution(z, y, taken, nfe, norms, *known, aux=end.aux, carry=carry)


def learnt(keywords: dict[str, Any]) -> Tensor | None:
    """The schedule, if it requires a gradient."""
    schedule = keywords.get("schedule")
    return schedule if isinstance(schedule, Tensor) and schedule.requires_grad else None


def _in_compiled_model(run: Callable[..., Any]) -> Callable[..., Any]:
    """Inside a compiled model: one graph break. (torch.compiler.disable would import the compiler immediately.)"""

    def saying_so(*given: Any) -> Any:
        _say_once_what_is_not_compiled(given[0])
        return run(_Given(*given))

    return untraced(saying_so)


class _Untraced:
    """An iterator whose steps are not traced either: a compiled model calls them after the graph break."""

    def __init__(self, steps: Iterator[Solution]) -> None:
        self._steps = steps

    def __iter__(self) -> Iterator[Solution]:
        return self

    def __next__(self) -> Solution:
        return _next(self._steps)


_next = untraced(lambda steps: next(steps))
_solve_untraced = _in_compiled_model(_solve)
_steps_untraced = _in_compiled_model(lambda given: _Untraced(_steps(given)))


def _break_the_graph() -> None:
    """Its message is the reason that the compiler gives if it must not break the graph."""


_break_the_graph._torchdynamo_disable = True  # type: ignore[attr-defined]
_break_the_graph._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "a solve of revdeq cannot be part of a compiled graph: compile f, f.compile() or torch.compile(f), and the model "
    "around it without fullgraph=True"
)


def _say_once_what_is_not_compiled(f: Any) -> None:
    """Log instead of warn: nothing is wrong, and warnings may be errors."""
    global _said
    if not _said and not is_compiled(f):
        _said = True
        logging.getLogger("revdeq").warning(
            "f runs uncompiled inside a compiled model, because a solve is a graph break. To compile f, call "
            "f.compile() if it is a module, or pass torch.compile(f). This message is shown once"
        )


_said = False


def _solve_traceably(given: _Given) -> Solution:
    """In plain operations, because a tracer cannot record our kernels."""
    f, z0, args, y0, kwargs, keywords = given
    for name in ("tol", "per_example", "aux"):
        if keywords.get(name):
            raise ValueError(
                f"{name} = {keywords[name]!r}: a traced or exported model takes a fixed number of steps; leave "
                f"{name} out"
            )
    step, schedule, max_steps, indexed = _constants_of(**keywords)
    coefficients = [*schedule[: 2 * max_steps], *[step] * (2 * max_steps - len(schedule))]
    run = undrawn(checked_f(f)) if is_traced() else checked_f(f)
    if kwargs:
        run = functools.partial(run, **kwargs)
    y, z, before = unrolled(run, z0, args, coefficients, y0=y0, indexed=indexed)
    states = [x.detach().double() for x in tree_leaves(z)]
    changes = [new - old.detach().double() for new, old in zip(states, tree_leaves(before), strict=True)]
    norms = torch.stack([inner(changes, changes), inner(states, states)])
    return Solution(z, y, max_steps, 2 * max_steps, norms, step.beta, step.gamma, "float64", Adjoint())


def _constants_of(**keywords: Any) -> tuple[Coefficients, tuple[Coefficients, ...], int, bool]:
    """With float64 states, even if state is "exact": the same iteration up to its resolution."""
    options = options_from(keywords)
    return *rounded_coefficients(options), options.max_steps, options.indexed


_constants_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # or torch.export would trace into Fraction


def refuse_solution(z0: Any, of: str) -> None:
    if isinstance(z0, Solution):
        raise TypeError(f"z0 is a revdeq.Solution, which {of} does not continue: pass its z, {of}(f, solution.z, x)")


def checked_f(f: Any) -> Callable[..., Any]:
    if not callable(f):
        raise TypeError(f"f = {f!r} must be callable: a module, or a function f(z, *args)")
    if isinstance(f, type) and issubclass(f, nn.Module):
        raise TypeError(f"f is the class {f.__name__}: create an instance, {f.__name__}(...)")
    return f
