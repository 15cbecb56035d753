"""f(z, *args), evaluated the same way twice.

The backward pass calls f again at inputs that it has reconstructed, and the gradient is exact only if f then
computes what it computed before. So f always runs in the same grad mode (some modules take another path
without one), under the settings it was first called under, with the tensors it had then; and every evaluation
within a solve sees the same random draw: f with dropout is one function, with one mask, and has a fixed point.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from .context import Draw, Settings
from .inputs import Buffers, Search, Substitution, Unreachable, alias, is_compiled, module_tensors, needs_alias

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

State = list[Tensor]

_engine = torch.autograd.Variable._execution_engine


class Evaluation:
    """Calls f with a state given as a flat list of tensors, and remembers what that takes.

    graph: whether a gradient may be asked for, so that f has to run in grad mode; it is called in the mode that the
        solve is in, which is not changed around every evaluation.
    inputs: what f depends on beside its state: tensors in `args`, then those found while it was evaluated.
    """

    def __init__(
        self, f: Callable[..., Any], state_spec: TreeSpec, args: tuple[Any, ...], device: torch.device
    ) -> None:
        self.f, self.state_spec, self._state_is_a_tensor = f, state_spec, state_spec.is_leaf()
        self.graph = torch.is_grad_enabled()
        self._args = args
        self._arg_leaves, self._args_spec = tree_flatten(args)
        self._arg_positions = [i for i, x in enumerate(self._arg_leaves) if isinstance(x, Tensor) and x.requires_grad]
        self.inputs = [self._arg_leaves[i] for i in self._arg_positions]
        self._reached: list[frozenset[int]] = []  # by each evaluation: indices into inputs
        self._last_reached: frozenset[int] = frozenset()  # the same once more, as it usually is, and its tensors' ids
        self._last_found: frozenset[int] = frozenset()
        self._by = {id(x): (i, x) for i, x in enumerate(self._use_as_args(self.inputs))} if self.graph else {}
        self._changes_its_input = False
        self._settings, self._draw = Settings(device), Draw(device)
        self._module_tensors = module_tensors(f)
        self._run: Callable[..., Any] = f
        self._usual: dict[int, tuple[int, Tensor]] | None = None  # inputs by index, once the graph has been looked at
        if self.graph:
            # Casts of weights that autocast remembers from before the solve would look like dependencies of f.
            torch.clear_autocast_cache()
        self._search = Search()

    def first(self, state: State) -> State:
        """f's outputs, without a graph, for the first time, when its dependencies can be seen as they enter."""
        buffers = Buffers(self.f)
        leaves = [alias(x) if self.graph else x.detach() for x in state]
        with self._draw, contextlib.nullcontext() if is_compiled(self.f) else self._search:
            outputs = self._call(_disguise(leaves) if self.graph else leaves)
        if self.graph:
            self._note_inputs(leaves, outputs)
            self._changes_its_input = any(x._version > 0 for x in state)
        buffers.check()
        return [x.detach() for x in outputs]

    def value(self, state: State) -> State:
        """f's outputs; the graph, if there was one, is gone."""
        leaves, outputs = self._evaluate(state)
        if self.graph:
            self._note_inputs(leaves, outputs)
        return [x.detach() for x in outputs]

    def vjp(
        self, state: State, seeds: State, by_state: bool = True
    ) -> tuple[State, list[Tensor | None], list[Tensor | None]]:
        """f's outputs, and the products of the seeds with its Jacobians by the state and by `inputs`."""
        leaves, outputs = self._evaluate(state)
        expected = self._reached.pop()
        if self._usual is None:
            by = self._inputs_reached_again(leaves, outputs, expected)
        else:
            by = [self._usual[i] for i in expected]
        targets = [*(leaves if by_state else ()), *(x for _, x in by)]
        sources = [i for i, x in enumerate(outputs) if x.requires_grad]
        products: Sequence[Tensor | None] = [None] * len(targets)
        if sources and targets:
            seeds = [seeds[i].to(outputs[i].dtype) for i in sources]
            # What torch.autograd.grad calls, which spends 30 us on checks that cannot fail here.
            products = _engine.run_backward(
                tuple(outputs[i] for i in sources), tuple(seeds), False, False, tuple(targets),
                allow_unreachable=True, accumulate_grad=False,
            )  # fmt: skip
        if self._usual is not None and any(x is None for x in products[len(targets) - len(by) :]):
            self._inputs_reached_again(leaves, outputs, expected)
        by_inputs: list[Tensor | None] = [None] * len(self.inputs)
        for (i, _), product in zip(by, products[len(targets) - len(by) :], strict=True):
            so_far = by_inputs[i]
            by_inputs[i] = product if so_far is None else so_far if product is None else so_far + product
        return [x.detach() for x in outputs], list(products[: len(leaves)]) if by_state else [], by_inputs

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around the evaluations of a backward pass: f runs as it ran in the forward pass."""
        reached, by, search = self._reached, self._by, self._search
        self._reached = list(reached)
        split = len(self._arg_positions)
        args, captured = self.inputs[:split], self.inputs[split:]
        targets = [*enumerate(self._use_as_args(args)), *enumerate(captured, split)]
        now = module_tensors(self.f)
        swapped = any(now.get(name) is not x for name, x in self._module_tensors.items())
        if swapped or any(map(needs_alias, captured)):
            targets += enumerate(self._use_aliases(captured), split)
        self._by = {id(x): (i, x) for i, x in targets}
        torch.clear_autocast_cache()
        self._search = Search(captured)
        try:
            with torch.enable_grad(), self._settings.restored(), self._draw.rewound():
                yield
        finally:
            self._run, self._reached, self._by, self._search = self.f, reached, by, search
            self._usual = None

    def release(self) -> None:
        """Forget the tensors: there will be no other backward pass."""
        self.inputs, self._args, self._arg_leaves, self._module_tensors, self._by = [], (), [], {}, {}
        del self._search

    def _note_inputs(self, leaves: State, outputs: State) -> None:
        found = self._reached_from(leaves, outputs)
        if found.keys() != self._last_found:
            for key, x in found.items():
                if key not in self._by:
                    self._by[key] = len(self.inputs), x
                    self.inputs.append(x)
            self._last_found = frozenset(found)
            self._last_reached = frozenset([self._by[key][0] for key in found])
        self._reached.append(self._last_reached)

    def _inputs_reached_again(
        self, leaves: State, outputs: State, expected: frozenset[int]
    ) -> list[tuple[int, Tensor]]:
        """The tensors to differentiate by, found in the graph: those of the forward pass, or it is an error."""
        try:
            by = [self._by[key] for key in self._reached_from(leaves, outputs)]
            same = {i for i, _ in by} == expected
        except (Unreachable, KeyError):
            same = False
        if not same:
            raise RuntimeError(
                "f used other tensors that require a gradient in the backward pass than in the forward pass, so that "
                "their gradient would be lost (a closure whose variables were changed after the solve? torch.func."
                "functional_call or a cached parametrization around the forward pass alone?): pass these tensors to f "
                "through `args`, or make f a module of its own"
            )
        if self._run is self.f:  # from now on, a look at the gradients will do
            self._usual = {i: (i, x) for i, x in self._by.values()}
        return by

    def _reached_from(self, leaves: State, outputs: State) -> dict[int, Tensor]:
        reached = self._search.reached_from(outputs)
        for x in leaves:
            reached.pop(id(x), None)
        return reached

    def _use_aliases(self, captured: State) -> State:
        """Puts aliases in the place of captured tensors, so that hooks fire only when the whole gradient is
        there. A module gets all the parameters and buffers that it had in the forward pass, when it may have
        been called through `torch.func.functional_call`. A custom autograd function takes its inputs past a
        mode: there the gradient flows to the tensor itself."""
        aliases = {id(x): alias(x) for x in captured}
        names = {name: aliases.get(id(x), x) for name, x in self._module_tensors.items()}
        module_ids = {id(x) for x in self._module_tensors.values()}
        others = [x for x in captured if id(x) not in module_ids]

        def run(*args: Any) -> Any:
            with Substitution(others, [aliases[id(x)] for x in others]) if others else contextlib.nullcontext():
                module: Any = self.f
                return torch.func.functional_call(module, names, args) if names else module(*args)

        self._run = run
        return [aliases[id(x)] for x in captured]

    def _use_as_args(self, tensors: State) -> State:
        aliases = [alias(x) for x in tensors]
        if aliases:
            for i, x in zip(self._arg_positions, aliases, strict=True):
                self._arg_leaves[i] = x
            self._args = tree_unflatten(self._arg_leaves, self._args_spec)
        return aliases

    def _evaluate(self, state: State) -> tuple[State, State]:
        """The leaves at which f is evaluated, and its outputs, with the graph between them if there is one."""
        leaves = [x.detach().requires_grad_(self.graph) for x in state]
        with self._draw:
            return leaves, self._call(_disguise(leaves) if self.graph and self._changes_its_input else leaves)

    def _call(self, state: State) -> State:
        if self._state_is_a_tensor:
            result = self._run(state[0], *self._args)
            outputs, has_structure = [result], isinstance(result, Tensor)
        else:
            result = self._run(tree_unflatten(state, self.state_spec), *self._args)
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


class _Disguise(torch.autograd.Function):
    """The same memory, no longer a leaf: f may change its input in place."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.detach() for x in leaves)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _disguise(leaves: State) -> State:
    return list(_Disguise.apply(*leaves))


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
        return ValueError(f"{name} has shape {tuple(out.shape)}: it must be shaped like z0, {tuple(x.shape)}")
    if out.device != x.device:
        return ValueError(f"{name} is on {out.device}: it must be where z0 is, on {x.device}")
    if out.layout != torch.strided:
        return TypeError(f"{name} has layout {out.layout}: it must be dense; use to_dense()")
    return TypeError(f"{name} is {out.dtype}: it must be float32, float64, bfloat16 or float16; convert it inside f")
