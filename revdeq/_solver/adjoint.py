"""The reversible iteration and its adjoint: one autograd function.

Forward, from y_0 = z_0 and with a = 1 - beta, b = beta gamma and c = beta (1 - gamma) (equation 5 of the paper, where
gamma = 1):

    y_{n+1} = a y_n + b f(z_n) + c z_n        z_{n+1} = a z_n + b f(y_{n+1}) + c y_{n+1}

Backward, the half-steps are undone in the opposite order (equation 6) while the adjoints follow
(Algorithm 1). Nothing is kept between the passes but the last state, and no more than one graph of f is
alive at a time.
"""

import contextlib
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.autograd.graph import increment_version

from .. import _device
from ..kernels.backends import together
from ..kernels.half_step import HalfStep, layout
from .context import OnceMore
from .function import Function
from .inputs import State
from .monitor import Monitor, typical_magnitude
from .options import Options
from .replay import Replay
from .scheme import Scheme

NORM_FLOOR = 1e-5
"""Added to the norm of the state in the relative change, so that a solution of zero can be reached."""

ANNOUNCED = 32
"""Steps that a solve with a tolerance is prepared for at first: it may be content long before `max_steps`."""


@dataclass
class Iteration:
    """What to iterate, and after the forward pass: the steps that were taken, the squared 2-norms of the last change of
    z and of z, and whether f read all but the initial state in another layout."""

    f: Function
    scheme: Scheme
    options: Options
    monitor: Monitor | None
    steps: int = 0
    norms: Tensor | None = None
    relaid: bool = False


@dataclass
class Outcome:
    """The last states, as the solver keeps them and in the dtypes that f reads, what it put aside, and where the way
    back ends if not at the initial state: z there, as f read it, if it is known."""

    y: State
    z: State
    y_copy: State
    z_copy: State
    spilled: list[State]
    end: State


def iterate(it: Iteration, initial: State) -> Outcome:
    """The forward pass. Where divergence can be seen without waiting for the device it is an error."""
    initial = [x.detach() for x in initial]
    outcome = _iterate(it, initial, look=it.options.tol is not None)
    if it.options.tol is None and _device.can_look(initial[0]):
        assert it.norms is not None
        if not math.isfinite(relative_change(*it.norms.tolist())):
            it.steps = 0
            return _iterate(it, initial, look=True)  # once more, to say at which step
    return outcome


def _iterate(it: Iteration, initial: State, look: bool) -> Outcome:
    """If `look`, test for convergence after each step (synchronises)."""
    max_steps, keep = it.options.max_steps, it.options.keep
    # With a tolerance, any evaluation may turn out to be one of the last.
    kept_from = 2 * max_steps - keep if it.options.tol is None or not keep else 0
    f_z, z_copy = _first(it.f, initial)
    step = it.scheme.step
    if step.c and it.f.changes_its_input:
        for c, x in zip(z_copy, initial, strict=True):
            c.copy_(x)
    z_copy, it.relaid = _laid_out_like(f_z, z_copy)
    if it.options.tol is not None:
        it.f.shards.refuse_tolerance()
    y_copy = [torch.empty_like(c) for c in z_copy]
    y = it.scheme.start(initial, z_copy)
    z = [x.clone() for x in y]
    announced = max_steps if it.options.tol is None else min(max_steps, ANNOUNCED)
    relax_y, relax_z = it.scheme.bind(y, y_copy, announced), it.scheme.bind(z, z_copy, announced)
    if it.options.tol is None:
        it.scheme.make_room([*relax_y, *relax_z])
    # With a tolerance nobody knows yet where that will be.
    turn = max_steps - (it.options.backward_steps or max_steps) if it.f.graph and it.options.tol is None else 0
    end: State = []
    while True:
        it.steps += 1
        last = it.steps == max_steps
        relax(relax_y, f_z, z_copy, step)
        del f_z
        f_y = it.f.value(y_copy, keep=2 * it.steps - 1 >= kept_from, last=look or last)
        if look or last:
            it.norms = relax_norms(relax_z, f_y, y_copy, step)
        else:
            relax(relax_z, f_y, y_copy, step)
        del f_y
        if look:
            assert it.norms is not None
            norms = it.scheme.look(it.norms, [*relax_y, *relax_z], it.steps)
            if _has_arrived(it, norms, initial):
                break
        if last:
            break
        if it.steps == turn:
            end = [c.clone() for c in z_copy]
        f_z = it.f.value(z_copy, keep=2 * it.steps >= kept_from)
    if any(c.is_inference() or c._version > it.steps for c in y_copy):  # f changed its input in place, or may have
        y_copy = it.scheme.read(y, y_copy)
    if not look:
        it.scheme.check([*relax_y, *relax_z])
    return Outcome(y, z, y_copy, z_copy, [h.spilled for h in (*relax_y, *relax_z)], end)


def _first(f: Function, initial: State) -> tuple[State, State]:
    """f's outputs at the initial state, and the copy of that which it read, and perhaps changed."""
    while True:
        copy = [x.clone() for x in initial]
        with contextlib.suppress(OnceMore):
            return f.first(copy), copy


def relax(half_steps: list[HalfStep], outputs: State, read: State, step: Any) -> None:
    with together(len(half_steps)):
        for half_step, out, x in zip(half_steps, outputs, read, strict=True):
            half_step.relax(out, x, step)
    _count_change(half_steps)


def relax_norms(half_steps: list[HalfStep], outputs: State, read: State, step: Any) -> Tensor:
    """The squared 2-norms of the change and of the new state, of all leaves."""
    with together(len(half_steps)):
        partial = [h.relax_norms(out, x, step) for h, out, x in zip(half_steps, outputs, read, strict=True)]
    _count_change(half_steps)
    return functools.reduce(torch.add, [x.sum((1, 2)) for x in partial])


def _count_change(half_steps: list[HalfStep]) -> None:
    """Tells autograd that what f read is overwritten, in case that f has kept a graph of it."""
    for half_step in half_steps:
        increment_version(half_step.copy)


def _laid_out_like(outputs: State, copy: State) -> tuple[State, bool]:
    """The copies in the layout of f's outputs, where they are dense: otherwise each output would have to be brought
    into the state's layout. And whether that is another one."""

    def relaid(out: Tensor, c: Tensor) -> Tensor:
        if layout(out) == layout(c) or c.numel() == 0 or not torch.ops.aten.is_non_overlapping_and_dense(out):
            return c
        return c.new_empty_strided(c.shape, out.stride()).copy_(c)

    result = list(map(relaid, outputs, copy))
    return result, any(a is not b for a, b in zip(result, copy, strict=True))


def as_forward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Around a backward pass: where it was started in inference mode, f would have no graph. And in a training step
    that is compiled as a whole f would be compiled, which it was not when it ran before."""

    @functools.wraps(backward)
    def run(*args: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return backward(*args)
        with torch.inference_mode(False), torch.no_grad():
            return backward(*args)

    return _disable_dynamo(run)


class Reversible(torch.autograd.Function):
    """The outcome of an iteration as a function of the initial state and of f's inputs: the last y, then the
    last z. It is only now, when f has been evaluated, that all of its inputs are known."""

    @staticmethod
    def forward(ctx: Any, it: Iteration, outcome: Outcome, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.it, ctx.size, ctx.spills, ctx.spent = it, len(outcome.y), len(outcome.spilled[0]), False
        ctx.set_materialize_grads(False)
        own = [*itertools.chain(outcome.y, outcome.z, *outcome.spilled), *tensors[: len(outcome.y)], *outcome.end]
        ctx.layouts = [_Layout.of(x) for x in own]
        ctx.z0 = [(weakref.ref(x), x._version) for x in tensors[: len(outcome.y)]]
        ctx.save_for_backward(*own, *tensors[len(outcome.y) :])
        return (*outcome.y_copy, *outcome.z_copy)

    @staticmethod
    @as_forward
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_unsupported(grads)
        if ctx.spent:
            raise RuntimeError(
                "this backward pass was interrupted and cannot run a second time: it had begun to undo the steps. "
                "Solve again, or call backward with retain_graph=True"
            )
        it, size, step = ctx.it, ctx.size, ctx.it.scheme.step
        try:
            saved = list(ctx.saved_tensors)  # all of them, for autograd's check that none was changed in place
        except RuntimeError:
            if all((x := ref()) is None or x._version == version for ref, version in ctx.z0):
                raise
            raise RuntimeError(
                "z0 was changed in place after the solve, and is where the backward pass ends: solve from z0.clone(), "
                "or change z0 after the backward pass"
            ) from None
        saved = [layout.restored(x) for layout, x in zip(ctx.layouts, saved, strict=False)]
        last, given = saved[: 2 * size], [x.detach() for x in saved[2 * size * (1 + ctx.spills) :]]
        initial, end = given[:size], given[size:]
        spilled = [saved[2 * size + i * ctx.spills :][: ctx.spills] for i in range(2 * size)]
        keep = graph_is_kept()
        ctx.spent = not keep
        if keep:
            last = [x.clone() for x in last]
        y, z = last[:size], last[size:]
        copy = it.scheme.read(y, initial)
        invert_y = it.scheme.bind(y, copy, it.steps, spilled[:size])
        invert_z = it.scheme.bind(z, copy, it.steps, spilled[size:])

        # An adjoint is kept multiplied by b, to be the seed of the next product, and its decay by a waits
        # for the pass that adds to it: the first such pass must find the gradient of y divided by a.
        y_adjoint = [scaled(g, step.b / step.a, c) for g, c in zip(grads[:size], copy, strict=True)]
        z_adjoint = [scaled(g, step.b, c) for g, c in zip(grads[size:], copy, strict=True)]
        first = it.steps - min(it.options.backward_steps or it.steps, it.steps)
        initial_needs_grad = first == 0 and any(ctx.needs_input_grad[2 : 2 + size])
        inputs = it.f.inputs.tensors
        totals = Totals(inputs)
        maxima: State = []
        sizes = [typical_magnitude(c) for c in copy] if first == 0 or end else []
        seen = sizes
        replay = Replay(it.f, keep_graph=keep)
        with replay.running():
            for n in reversed(range(first, it.steps)):
                # copy is y_{n+1}; undo z_{n+1} = a z_n + b f(y_{n+1}) + c y_{n+1}
                out, by_state, by_inputs = replay.vjp(copy, z_adjoint)
                if n == it.steps - 1 and sizes and it.scheme.resolution:
                    # A state too small for its own resolution is 0; what f made of it need not be.
                    seen = [torch.maximum(size, typical_magnitude(x)) for size, x in zip(sizes, out, strict=True)]
                out, vjp = _apart(out, copy), dense(by_state, copy)
                totals.add(by_inputs)
                if n > 0:
                    _undo(invert_z, out, y_adjoint, vjp, z_adjoint, step)
                    if n == first and end:
                        maxima += map(_apart_by, copy, end, sizes)
                else:  # the initial state is known: use it, not its reconstruction
                    maxima += _undo_and_compare(invert_z, out, initial, sizes, y_adjoint, vjp, z_adjoint, step)
                    for c, x in zip(copy, initial, strict=True):
                        c.copy_(x)
                # copy is z_n; undo y_{n+1} = a y_n + b f(z_n) + c z_n
                go_on = n > first or initial_needs_grad
                # In another layout, f could compute other bits than it did.
                read = [x.clone() for x in initial] if n == 0 and it.relaid else copy
                out, by_state, by_inputs = replay.vjp(read, y_adjoint, go_on)
                out, vjp = _apart(out, copy), dense(by_state, copy) if go_on else []
                totals.add(by_inputs)
                if n > first:
                    _undo(invert_y, out, z_adjoint, vjp, y_adjoint, step)
                elif n == 0:
                    maxima += _undo_and_compare(invert_y, out, initial, sizes, z_adjoint, vjp, y_adjoint, step)
        if it.monitor is not None:
            assert it.norms is not None
            it.monitor.judge(maxima, it.norms, seen)

        initial_grads: list[Tensor | None] = [None] * size
        if initial_needs_grad:  # z_0 starts both y and z
            initial_grads = [
                ((zb + step.a * yb) / step.b).to(x.dtype)
                for yb, zb, x in zip(y_adjoint, z_adjoint, initial, strict=True)
            ]
        input_grads = it.f.shards.deliver(inputs, totals.rounded())
        if not keep:
            it.f.release()
        ctx.spent = False  # autograd frees what it saved, and says so the next time; after an interruption it does not
        return (None, None, *initial_grads, *input_grads)


@dataclass(frozen=True)
class _Layout:
    """What a tensor is like that was saved: a kernel gets its address, and a hook may give back another."""

    dtype: torch.dtype
    shape: torch.Size
    device: torch.device
    stride: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> "_Layout":
        return cls(x.dtype, x.shape, x.device, x.stride())

    def restored(self, x: Tensor) -> Tensor:
        if (x.dtype, x.shape, x.device) != (self.dtype, self.shape, self.device):
            raise RuntimeError(
                f"a saved-tensor hook gave back {_described(x)} in place of {_described(self)}, from which the steps "
                "cannot be undone: leave the solve out of it (torch.autograd.graph.saved_tensors_hooks(lambda x: x, "
                "lambda x: x) around the solve), or give back what was packed"
            )
        if x.stride() == self.stride or 0 in self.stride:  # an expanded z0, which no kernel gets the address of
            return x
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).copy_(x)


def _described(x: Any) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)} on {x.device}"


def refuse_unsupported(grads: Sequence[Tensor | None]) -> None:
    """What a backward pass may be asked for and cannot do. Takes the gradients that it starts from."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            "revdeq.solve has no second derivative: call backward without create_graph=True, or differentiate "
            "an iteration that you unroll yourself"
        )
    if any(g is not None and _is_batched(g) for g in grads):
        raise RuntimeError(
            "the gradients that this backward pass starts from are batched (is_grads_batched=True, or vmap around "
            "autograd.grad), and a solve has no batched derivative: call it once for each of them"
        )


def _is_batched(x: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._C._functorch.is_legacy_batchedtensor(x)


def _apart(out: State, copy: State) -> State:
    """f may return one part of its state as another, and the half-steps overwrite the parts one after the other."""
    if len(copy) == 1:
        return out
    memory = {c.untyped_storage().data_ptr() for c in copy}
    return [o.clone() if o.untyped_storage().data_ptr() in memory else o for o in out]


def _undo(half_steps: list[HalfStep], out: State, adjoint: State, vjp: State, other: State, step: Any) -> None:
    with together(len(half_steps)):
        for half_step, o, a, v, b in zip(half_steps, out, adjoint, vjp, other, strict=True):
            half_step.invert_adjoint(o, a, v, b, step, step)


def _undo_and_compare(
    half_steps: list[HalfStep], out: State, initial: State, floors: State, adjoint: State, vjp: State, other: State,
    step: Any,
) -> list[Tensor]:  # fmt: skip
    """The last time: without a product, no adjoint is asked for."""
    adjoints: Any = zip(adjoint, vjp, other, strict=True) if vjp else itertools.repeat((None, None, None), len(out))
    rows = zip(half_steps, out, initial, floors, adjoints, strict=True)
    with together(len(half_steps)):
        return [h.invert_compare(o, x, floor, a, v, b, step, step) for h, o, x, floor, (a, v, b) in rows]


def _apart_by(x: Tensor, expected: Tensor, floor: Tensor) -> Tensor:
    """As `invert_compare` has it: the largest distance, relative to each element's own size, as the bits of a float."""
    if x.numel() == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    x, expected = x.float(), expected.float()
    return ((x - expected).abs() / torch.maximum(expected.abs(), floor)).amax().view(torch.int32)


class Totals:
    """Sums of gradients, in float32 or better: in bfloat16 they would be off by half a percent."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._dtypes = [x.dtype for x in tensors]
        self._totals: list[Tensor | None] = [None] * len(tensors)

    def add(self, grads: Sequence[Tensor | None]) -> None:
        sums, addends = [], []
        for i, grad in enumerate(grads):
            total = self._totals[i]
            if grad is None:
                continue
            if total is None:  # copied: a gradient may share memory with a seed or with another gradient
                wide = torch.promote_types(grad.dtype, torch.float32)
                self._totals[i] = grad.to(wide, copy=True)
            elif grad.layout != torch.strided or total.layout != torch.strided:
                self._totals[i] = total + grad
            else:
                sums.append(total)
                addends.append(grad)
        if sums:
            torch._foreach_add_(sums, addends)

    def rounded(self) -> list[Tensor | None]:
        return [t if t is None else t.to(dtype) for t, dtype in zip(self._totals, self._dtypes, strict=True)]


def _has_arrived(it: Iteration, norms: Sequence[float], initial: State) -> bool:
    residual = relative_change(*norms)
    if not math.isfinite(residual):
        if not all(x.isfinite().all() for x in initial):
            raise FloatingPointError("z0 is not finite: start from finite numbers")
        raise FloatingPointError(
            f"the norm of the state is not finite after step {it.steps} of at most {it.options.max_steps} (beta = "
            f"{it.scheme.beta:.6g}): f returns NaN or infinity, or the iteration diverges; try a smaller beta, or an f "
            "that contracts"
        )
    return it.options.tol is not None and residual <= it.options.tol


def relative_change(change: float, value: float) -> float:
    return math.sqrt(change) / (math.sqrt(value) + NORM_FLOOR)


def scaled(grad: Tensor | None, factor: float, like: Tensor) -> Tensor:
    wide = torch.promote_types(like.dtype, torch.float32)
    if grad is None:
        return torch.zeros_like(like, dtype=wide)
    return torch.empty_like(like, dtype=wide).copy_(grad).mul_(factor)


def dense(vjp: Sequence[Tensor | None], like: State) -> State:
    """f need not depend on all of its state, and a gradient may be sparse."""
    return [torch.zeros_like(x) if g is None else g.to_dense() for g, x in zip(vjp, like, strict=True)]


def graph_is_kept() -> bool:
    """Whether this backward pass runs with retain_graph=True, so that the saved state may not be consumed."""
    return torch._C._autograd._get_current_graph_task_keep_graph()
