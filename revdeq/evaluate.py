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
from .dependencies import Buffers, Search, Substitution, alias, has_hooks, is_compiled, module_tensors

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

State = list[Tensor]


class Evaluation:
    """Calls f with a state given as a flat list of tensors, and remembers what that takes.

    graph: whether a gradient will be asked for, so that f has to run in grad mode.
    inputs: what f depends on beside its state: tensors in `args`, then those found by `first`.
    """

    def __init__(
        self, f: Callable[..., Any], state_spec: TreeSpec, args: tuple[Any, ...], device: torch.device
    ) -> None:
        self.f, self.state_spec = f, state_spec
        self.graph = torch.is_grad_enabled()
        self.inputs: list[Tensor] = []
        self._args = args
        self._arg_leaves, self._args_spec = tree_flatten(args)
        self._arg_positions = [i for i, x in enumerate(self._arg_leaves) if isinstance(x, Tensor) and x.requires_grad]
        self._changes_its_input = False
        self._settings, self._draw = Settings(device), Draw(device)
        self._module_tensors = module_tensors(f)
        self._run: Callable[..., Any] = f
        self._by: list[tuple[int, Tensor]] = []
        self._search: Search | None = None

    def first(self, state: State, state_needs_grad: bool) -> State:
        """f's outputs, without a graph. Finds `inputs` and settles `graph`."""
        buffers = Buffers(self.f)
        if self.graph:
            args = [self._arg_leaves[i] for i in self._arg_positions]
            aliases = self._use_as_args(args)
            with torch.enable_grad(), self._draw:
                leaves = [alias(x) for x in state]
                inside = _disguise(leaves)
                search = Search([*leaves, *aliases], inside[0])
                with contextlib.nullcontext() if is_compiled(self.f) else search:
                    outputs = self._call(inside)
                self.inputs = args + search.reached_from(outputs)
            self._changes_its_input = any(x._version > 0 for x in state)
            self.graph = state_needs_grad or bool(self.inputs)
            outputs = [x.detach() for x in outputs]
        else:
            outputs = self.value(state)
        buffers.check()
        return outputs

    def value(self, state: State) -> State:
        """f's outputs; the graph, if there was one, is gone."""
        return [x.detach() for x in self._evaluate(state)[1]]

    def vjp(
        self, state: State, seeds: State, by_state: bool = True
    ) -> tuple[State, list[Tensor | None], list[Tensor | None]]:
        """f's outputs, and the products of the seeds with its Jacobians by the state and by `inputs`."""
        leaves, outputs = self._evaluate(state)
        if self._search is not None:
            reached = {id(x) for x in self._search.reached_from(outputs)}
            self._by += [(i, x) for i, x in enumerate(self.inputs) if id(x) in reached]
            self._search = None
        targets = [*(leaves if by_state else ()), *(x for _, x in self._by)]
        sources = [i for i, x in enumerate(outputs) if x.requires_grad]
        products: Sequence[Tensor | None] = [None] * len(targets)
        if sources and targets:
            seeds = [seeds[i].to(outputs[i].dtype) for i in sources]
            products = torch.autograd.grad([outputs[i] for i in sources], targets, seeds, allow_unused=True)
        by_inputs: list[Tensor | None] = [None] * len(self.inputs)
        for (i, _), product in zip(self._by, products[len(targets) - len(self._by) :], strict=True):
            so_far = by_inputs[i]
            by_inputs[i] = product if so_far is None else so_far if product is None else so_far + product
        return [x.detach() for x in outputs], list(products[: len(leaves)]) if by_state else [], by_inputs

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Around the evaluations of a backward pass: f runs as it ran in the forward pass."""
        split = len(self._arg_positions)
        self._by = list(enumerate(self._use_as_args(self.inputs[:split])))
        captured = list(enumerate(self.inputs))[split:]
        now = module_tensors(self.f)
        swapped = any(now.get(name) is not x for name, x in self._module_tensors.items())
        try:
            with self._settings.restored(), self._draw.rewound():
                if swapped or any(has_hooks(x) for _, x in captured):
                    self._by += self._use_aliases(captured)
                else:
                    self._by += captured
                yield
        finally:
            self._run, self._by, self._search = self.f, [], None

    def release(self) -> None:
        """Forget the tensors: there will be no other backward pass."""
        self.inputs, self._args, self._arg_leaves, self._module_tensors = [], (), [], {}

    def _use_aliases(self, captured: list[tuple[int, Tensor]]) -> list[tuple[int, Tensor]]:
        """Puts aliases in the place of captured tensors, so that hooks fire only when the whole gradient is
        there. A module gets all the parameters and buffers that it had in the forward pass, when it may have
        been called through `torch.func.functional_call`."""
        aliases = {id(x): alias(x) for _, x in captured}
        names = {name: aliases.get(id(x), x) for name, x in self._module_tensors.items()}
        module_ids = {id(x) for x in self._module_tensors.values()}
        others = [x for _, x in captured if id(x) not in module_ids]

        def run(*args: Any) -> Any:
            with Substitution(others, [aliases[id(x)] for x in others]) if others else contextlib.nullcontext():
                module: Any = self.f
                return torch.func.functional_call(module, names, args) if names else module(*args)

        self._run = run
        # A custom autograd function takes its inputs past a mode. What is still reached is differentiated as it is.
        with torch.enable_grad():
            (marker,) = _disguise([alias(torch.empty(()))])
        self._search = Search([], marker, [x for _, x in captured])
        return [(i, aliases[id(x)]) for i, x in captured]

    def _use_as_args(self, tensors: State) -> State:
        aliases = [alias(x) for x in tensors]
        if aliases:
            for i, x in zip(self._arg_positions, aliases, strict=True):
                self._arg_leaves[i] = x
            self._args = tree_unflatten(self._arg_leaves, self._args_spec)
        return aliases

    def _evaluate(self, state: State) -> tuple[State, State]:
        """The leaves at which f is evaluated, and its outputs, with the graph between them."""
        with torch.set_grad_enabled(self.graph), self._draw:
            leaves = [x.detach().requires_grad_(self.graph) for x in state]
            return leaves, self._call(_disguise(leaves) if self.graph and self._changes_its_input else leaves)

    def _call(self, state: State) -> State:
        if self.state_spec.is_leaf():
            result = self._run(state[0], *self._args)
            outputs, fits = [result], isinstance(result, Tensor)
        else:
            result = self._run(tree_unflatten(state, self.state_spec), *self._args)
            outputs, spec = tree_flatten(result)
            fits = spec == self.state_spec
        if not fits:
            expected = tree_unflatten(["Tensor"] * len(state), self.state_spec)
            returned = tree_map(lambda x: type(x).__name__, result)
            raise TypeError(f"f returned {returned}: it must have the structure of z0, {expected}")
        for i, (out, x) in enumerate(zip(outputs, state, strict=True)):
            if isinstance(out, Tensor) and out.shape == x.shape and out.device == x.device and out.dtype in DTYPES:
                continue
            name = "f's output" if len(outputs) == 1 else f"f's output (leaf {i} of {len(outputs)})"
            if not isinstance(out, Tensor):
                raise TypeError(f"{name} is a {type(out).__name__}: it must be a tensor of shape {tuple(x.shape)}")
            if out.shape != x.shape:
                raise ValueError(f"{name} has shape {tuple(out.shape)}: it must be shaped like z0, {tuple(x.shape)}")
            if out.device != x.device:
                raise ValueError(f"{name} is on {out.device}: it must be where z0 is, on {x.device}")
            raise TypeError(f"{name} is {out.dtype}: it must be float32, float64, bfloat16 or float16")
        return outputs


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
