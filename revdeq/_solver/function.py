"""f(z, *args), called the same way every time.

The backward pass calls f again at inputs that it has reconstructed, and the gradient is exact only if f then
computes what it computed before. So f always runs in the same grad mode (some modules take another path
without one), under the settings it was first called under, with the tensors it had then; and every evaluation
within a solve sees the same random draw: f with dropout is one function, with one mask, and has a fixed point.
"""

import collections
import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from ..kernels.half_step import DTYPES
from .context import Draw, OnceMore, Settings
from .gate import Gate, hooked, standing_for
from .inputs import Inputs, Search, State, Substitution, Unreachable, alias
from .sharded import Shards
from .stateful import BackwardHooks, Buffers, is_compiled, reachable

Evaluation = tuple[State, State]
"""The leaves at which f was evaluated, and its outputs."""


class Function:
    """Calls f with a state given as a flat list of tensors.

    graph: whether a gradient may be asked for, so that f has to run in grad mode; it is called in the mode that the
        solve is in, which is not changed around every evaluation.
    inputs: what f depends on beside its state.
    shards: those of them that FSDP shards.
    run: f, or in the backward pass what stands in for it.
    changes_its_input: whether the first evaluation changed what f reads in place, or may have.
    kept: the last evaluations, with their graphs, if any are to be kept. The first one never is: what it depends on
        can be told only when its graph is gone.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        initial: State,
        state_spec: TreeSpec,
        args: tuple[Any, ...],
        keep: int = 0,
        reads_again: bool = False,
        first_only: bool = False,
    ) -> None:
        """With `reads_again`, what f read is needed after it: it must not change it in place. With `first_only`, the
        other evaluations need no graph, because none of them will be repeated."""
        self.f, self.state_spec, self._state_is_a_tensor = f, state_spec, state_spec.is_leaf()
        self.graph = torch.is_grad_enabled()
        self.settings, self.draw = Settings(initial[0].device), Draw(initial[0].device)
        self.backward_hooks = BackwardHooks([])
        self.arguments = Arguments(args)
        self.changes_its_input, self._reads_again, self._first_only = False, reads_again, first_only
        self.kept: collections.deque[Evaluation] = collections.deque(maxlen=int(keep))
        self.run: Callable[..., Any] = f
        self.shards = Shards()
        # What an outer solve has put in the place of captured tensors, and the tensors of a module, which may have been
        # called through `torch.func.functional_call`: both are needed again in the backward pass.
        self.modes = [mode for mode in _get_current_function_mode_stack() if isinstance(mode, Substitution)]
        self.module_tensors: dict[str, Tensor] = {}  # after the first evaluation, which may make tables
        if self.graph:
            # Casts of weights that autocast remembers from before the solve would look like dependencies of f.
            torch.clear_autocast_cache()
        self._gate = Gate()
        self._initial = [x for x in initial if x.requires_grad]
        self._beyond: tuple[int, Tensor | None] = 0, None  # so many tensors, and what stands for them
        aliases = self.arguments.use_aliases(self._argument) if self.graph else []
        self.inputs = Inputs(self.arguments.tensors, aliases)
        self.search = Search(aliases)
        self._watched: bool | None = None  # as it runs for the first time: not known before
        self._trouble: Exception | None = None  # with that

    def first(self, state: State) -> State:
        """f's outputs, without a graph, for the first time, when its dependencies can be seen as they enter."""
        versions = self.arguments.versions()
        beyond = standing_for(self._initial) if self.graph else None
        leaves = self._leaves(state) if beyond is None else self._gate.behind(state, beyond)
        self.search.begin()
        modules, compiled = reachable(self.f)
        if self._watched is None:
            self._watched = not compiled
        self.backward_hooks = BackwardHooks(modules if self.graph else [])
        watch = self.search if self._watched else contextlib.nullcontext()
        try:
            with Buffers(modules), self.draw, self._arguments(), self._gate, watch:
                result = self._call(_disguise(leaves) if self.graph else leaves)
            outputs = self._flattened(result, leaves)
            del result  # which holds the graph
            values = self._noted(leaves, outputs)
        except Exception as error:
            self._look_in_another_way(error)
            if isinstance(error, TypeError) and (wrong := self._wrong_signature(error)) is not None:
                raise wrong from None
            raise
        if self.graph:
            self.module_tensors = self.shards.without(module_tensors(self.f))
        self.changes_its_input = any(x.is_inference() or x._version > 0 for x in state)
        if self.changes_its_input and self._reads_again:
            values = [x.clone() for x in values]  # one of them may be the input
        self.arguments.refuse_changes(versions)
        return values

    def _look_in_another_way(self, error: Exception) -> None:
        """A part of f that is compiled would be compiled anew, differently, where it is watched as it runs, or does not
        bear it. But if it is not, results that f closes over cannot be found."""
        if self._watched:
            again = type(error).__module__.startswith("torch._dynamo")
        else:
            again = isinstance(error, Unreachable) and not is_compiled(self.f)
        if again and self._trouble is not None:  # in both ways
            raise self._trouble
        if again:
            self._watched, self._trouble = not self._watched, error.with_traceback(None)  # which holds the graph
            raise OnceMore

    def value(self, state: State, keep: bool = False, last: bool = False) -> State:
        """f's outputs. With `keep`, the graph is kept; otherwise, if there was one, it is gone. last: whether it may be
        the last evaluation."""
        if self._first_only and not last:
            with torch.no_grad():
                return [x.detach() for x in self.evaluate(state)[1]]
        keep = keep and self.graph
        state = self._spared([x.clone() for x in state] if keep else state)
        self._gate.overwritten()
        try:
            leaves, outputs = self._evaluated(self._given(state, keep))
        except RuntimeError as error:
            if not self._gate.stood_in_the_way(error):
                raise
            leaves, outputs = self._evaluated(self._given(state))
        if keep:
            self.kept.append((leaves, outputs))
        return self._noted(leaves, outputs)

    def evaluate(self, state: State) -> Evaluation:
        """The leaves at which f is evaluated, and its outputs, with the graph between them if there is one."""
        return self._evaluated(self._leaves(self._spared(state)))

    def _evaluated(self, leaves: State) -> Evaluation:
        self.search.begin()
        nodes = [x.grad_fn for x in leaves]
        with self.draw, self._arguments(), self._gate:
            disguise = self.graph and (self.changes_its_input or _has_any_global_hook())
            result = self._call(_disguise(leaves) if disguise else leaves)
        if any(x.grad_fn is not node for x, node in zip(leaves, nodes, strict=True)):
            raise RuntimeError(
                "f changes its input in place, and did not in its first evaluation: let it do so always, or never"
            )
        return leaves, self._flattened(result, leaves)

    def _spared(self, state: State) -> State:
        """What f may change."""
        return [x.clone() for x in state] if self.changes_its_input and self._reads_again else state

    def _given(self, state: State, keep: bool = False) -> State:
        """The state as f gets it in the forward pass, after the first evaluation. If it depends on nothing, there is no
        gradient to be lost; and a graph that is kept must be passable, for us."""
        if keep:
            return list(map(hooked, self._leaves(state)))
        if (beyond := self._all_beyond()) is None:
            return self._leaves(state)
        if self.changes_its_input:  # by how much is counted
            return self._gate.behind(state, beyond)
        return self._gate.behind_quickly(state, beyond)

    def _leaves(self, state: State) -> State:
        return [x.detach().requires_grad_(self.graph) for x in state]

    def _argument(self, x: Tensor) -> Tensor:
        """An argument as f gets it in the forward pass: in graphs that are kept, too."""
        return hooked(alias(x)) if self.kept.maxlen else self._gate.behind([x])[0]

    def _all_beyond(self) -> Tensor | None:
        """What stands for the initial state and for all inputs that are known yet."""
        count = len(self._initial) + len(self.inputs.tensors)
        if self.graph and count > self._beyond[0]:
            self._beyond = count, standing_for([*self._initial, *self.inputs.tensors])
        return self._beyond[1]

    def _arguments(self) -> contextlib.AbstractContextManager[None]:
        """Around a call of f. What watches all modules (torch.utils.flop_counter, say) may ask of each of their inputs
        whether the backward pass will reach it, and torch cannot tell that of a leaf: then f gets none."""
        watched = self.graph and _has_any_global_hook()
        return self.arguments.disguised() if watched else contextlib.nullcontext()

    def end(self) -> None:
        """After the last evaluation of the forward pass."""
        self.inputs.refuse_hooks_of_f()
        self._gate.forget()

    def release(self) -> None:
        """Forget f and the tensors: there will be no other backward pass."""
        del self._initial, self._beyond
        del self.f, self.run, self.inputs, self.arguments, self.search, self.modes, self.module_tensors, self.kept

    def _noted(self, leaves: State, outputs: State) -> State:
        values = [x.detach() for x in outputs]
        if self.graph:
            unknown = self.inputs.note(self.search.reached_from(leaves, outputs))
            if unknown:
                self.kept.clear()  # only an unbroken row of last evaluations is of use
                outputs.clear()  # and with them the graph
                self.inputs.adopt(unknown)
        return values

    def _call(self, state: State) -> Any:
        z = state[0] if self._state_is_a_tensor else tree_unflatten(state, self.state_spec)
        return self.run(z, *self.arguments.values)

    def _flattened(self, result: Any, state: State) -> State:
        """The tensors that f returned, if they are like those of the state."""
        if self._state_is_a_tensor:
            outputs, has_structure = [result], isinstance(result, Tensor)
        else:
            outputs, has_structure = self._flattened_like_state(result)
        if has_structure and all(map(_fits, outputs, state)):
            return outputs
        if not has_structure:
            expected = tree_unflatten(["Tensor"] * len(state), self.state_spec)
            returned = tree_map(lambda x: type(x).__name__, result)
            raise TypeError(f"f returned {returned}: it must have the structure of z0, {expected}")
        i = list(map(_fits, outputs, state)).index(False)
        raise _misfit(
            "f's output" if len(outputs) == 1 else f"f's output (leaf {i} of {len(outputs)})", outputs[i], state[i]
        )

    def _flattened_like_state(self, result: Any) -> tuple[State, bool]:
        """A dict may have its keys in another order."""
        try:
            return self.state_spec.flatten_up_to(result), True
        except ValueError:
            return [], False

    def _wrong_signature(self, error: TypeError) -> TypeError | None:
        """What to say instead of "takes 2 positional arguments but 3 were given", if that is the reason."""
        f = self.f.forward if isinstance(self.f, nn.Module) else self.f
        count = len(self.arguments.values)
        try:
            inspect.signature(f).bind(*[None] * (1 + count))
        except ValueError:  # it has no signature
            return None
        except TypeError:
            names = ", ".join(["z", *(("x",) if count == 1 else (f"args[{i}]" for i in range(count)))])
            return TypeError(
                f"f is called as f({names}), which it does not take ({error}): give f these arguments, or wrap it in a "
                "function or module that takes them"
            )
        return None


class Arguments:
    """What f is called with beside its state. Where a gradient is needed, f gets an alias in place of a tensor: the
    gradient stops there, and hooks on the tensor stay silent. Containers without such tensors are passed as they are.

    values: what f is called with.
    tensors: those that need a gradient.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.values = args
        self._leaves, self._spec = tree_flatten(args, is_leaf=_needs_no_alias)
        self._positions = [i for i, x in enumerate(self._leaves) if isinstance(x, Tensor) and x.requires_grad]
        self.tensors = [self._leaves[i] for i in self._positions]

    def use_aliases(self, make: Callable[[Tensor], Tensor] = alias) -> State:
        aliases = [make(x) for x in self.tensors]
        if aliases:
            for i, x in zip(self._positions, aliases, strict=True):
                self._leaves[i] = x
            self.values = tree_unflatten(self._leaves, self._spec)
        return aliases

    @contextlib.contextmanager
    def disguised(self) -> Iterator[None]:
        """Within, the aliases are no leaves."""
        aliases = self.values
        if self._positions:
            leaves = list(self._leaves)
            for i, x in zip(self._positions, _disguise([leaves[i] for i in self._positions]), strict=True):
                leaves[i] = x
            self.values = tree_unflatten(leaves, self._spec)
        try:
            yield
        finally:
            self.values = aliases

    def versions(self) -> list[int]:
        """Of what f could change in place: autograd protects tensors that need a gradient."""
        return [x._version for x in tree_leaves(self.values) if _can_change(x)] if self.values else []

    def refuse_changes(self, versions: list[int]) -> None:
        if self.versions() == versions:
            return
        paths = [path for path, x in tree_flatten_with_path(self.values)[0] if _can_change(x)]
        rows = zip(paths, versions, self.versions(), strict=False)  # f may also have appended to a list
        names = [f"args{keystr(path)}" for path, old, new in rows if old != new]
        if not names:
            return
        raise RuntimeError(
            f"f changed {' and '.join(names)} in place, and would again at every evaluation: clone it inside f"
        )


def _can_change(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.requires_grad and not x.is_inference()


def _needs_no_alias(node: Any) -> bool:
    """Whether a subtree of args can be passed to f as it is: a list that f appends to is the caller's own."""
    if isinstance(node, Tensor):
        return True
    return not any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(node))


class _Disguise(torch.autograd.Function):
    """The same memory, no longer a leaf: f may change it in place."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _disguise(leaves: State) -> State:
    return list(_Disguise.apply(*leaves))


def module_tensors(f: Any) -> dict[str, Tensor]:
    """Parameters and buffers by name, if f is a module."""
    if not isinstance(f, nn.Module):
        return {}
    return {**dict(f.named_parameters(remove_duplicate=False)), **dict(f.named_buffers(remove_duplicate=False))}


def _fits(out: Any, x: Tensor) -> bool:
    return (
        isinstance(out, Tensor)
        and out.dtype in DTYPES
        and out.shape == x.shape
        and out.device == x.device
        and out.layout is torch.strided
    )


def _misfit(name: str, out: Any, x: Tensor) -> Exception:
    if not isinstance(out, Tensor):
        return TypeError(f"{name} is of type {type(out).__name__}: it must be a tensor of shape {tuple(x.shape)}")
    if out.shape != x.shape:
        return ValueError(
            f"{name} has shape {tuple(out.shape)}: it must be shaped like z0, {tuple(x.shape)} (which a layer makes "
            "from x unless it is given: deq(x, z0=...))"
        )
    if out.device != x.device:
        return ValueError(f"{name} is on {out.device}: it must be where z0 is, on {x.device}")
    if out.layout != torch.strided:
        return TypeError(f"{name} has layout {out.layout}: it must be dense; use to_dense()")
    return TypeError(f"{name} is {out.dtype}: it must be float32, float64, bfloat16 or float16; convert it inside f")
