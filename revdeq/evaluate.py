"""f(z, *args), evaluated the same way twice.

The backward pass calls f again at inputs it has reconstructed, and the gradient is exact only if f then
computes what it computed before. So f always runs in the same grad mode (modules take other code paths
without one), under the autocast it was called in, and every evaluation within a solve sees the same random
draw: f with dropout is one function, with one mask, and has a fixed point.

f's dependencies need no declaration. Tensors in `args` are known; what else requires a gradient and was
not made inside f (parameters, tensors that a closure holds) is found while f is evaluated for the first
time.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


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
        self._changes_its_input = False
        self._arg_positions = [i for i, x in enumerate(self._arg_leaves) if isinstance(x, Tensor) and x.requires_grad]
        self._autocast = [_autocast_settings(kind) for kind in sorted({"cpu", device.type})]
        self._draw = Draw(device)

    def first(self, state: Sequence[Tensor], state_needs_grad: bool) -> list[Tensor]:
        """f's outputs, without a graph. Finds `inputs` and settles `graph`."""
        if not self.graph:
            return self.value(state)
        originals = [self._arg_leaves[i] for i in self._arg_positions]
        aliases = self._use_as_args(originals)
        with torch.enable_grad(), self._draw:
            leaves = [x.detach().requires_grad_() for x in state]
            inside = _disguise(leaves)
            with Search([*leaves, *aliases], inside[0]) as search:
                outputs = self._call(inside)
            self.inputs = originals + search.reached_from(outputs)
        self._changes_its_input = any(x._version > 0 for x in state)
        self.graph = state_needs_grad or bool(self.inputs)
        return [x.detach() for x in outputs]

    def __call__(self, state: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The leaves at which f is evaluated, and its outputs, with the graph between them."""
        with torch.set_grad_enabled(self.graph), self._draw:
            leaves = [x.detach().requires_grad_(self.graph) for x in state]
            return leaves, self._call(_disguise(leaves) if self.graph and self._changes_its_input else leaves)

    def value(self, state: Sequence[Tensor]) -> list[Tensor]:
        """f's outputs; the graph, if there was one, is gone."""
        return [x.detach() for x in self(state)[1]]

    @contextlib.contextmanager
    def again(self, inputs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Around the evaluations of the backward pass: restores the context of the forward pass, and gives
        the tensors to differentiate f by, one for each of `inputs`."""
        split = len(self._arg_positions)
        aliases = self._use_as_args(inputs[:split])
        with contextlib.ExitStack() as stack:
            for settings in self._autocast:
                stack.enter_context(torch.autocast(**settings))
            stack.enter_context(self._draw.rewound())
            yield [*aliases, *inputs[split:]]

    def _use_as_args(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Gradients stop at an alias, and hooks on the tensor itself stay silent until the whole solve has
        its gradient."""
        aliases = [x.detach().requires_grad_() for x in tensors]
        if aliases:
            for i, alias in zip(self._arg_positions, aliases, strict=True):
                self._arg_leaves[i] = alias
            self._args = tree_unflatten(self._arg_leaves, self._args_spec)
        return aliases

    def _call(self, state: Sequence[Tensor]) -> list[Tensor]:
        if self.state_spec.is_leaf():
            result = self.f(state[0], *self._args)
            outputs, fits = [result], isinstance(result, Tensor)
        else:
            result = self.f(tree_unflatten(state, self.state_spec), *self._args)
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


def _disguise(leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _Disguise.apply(*leaves)


class Search(TorchFunctionMode):
    """Finds the tensors that f's gradient flows to, beside those `known`.

    As a mode it sees every tensor that enters an operation, and keeps those that require a gradient and are
    older than f's input: autograd numbers its nodes as they are made.
    """

    def __init__(self, known: Sequence[Tensor], f_input: Tensor) -> None:
        super().__init__()
        self._known = {id(x) for x in known}
        assert f_input.grad_fn is not None
        self._start = f_input.grad_fn._sequence_nr()
        self._candidates: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and x.requires_grad and self._is_older(x.grad_fn):
                self._candidates[id(x)] = x
        return func(*args, **kwargs)

    def _is_older(self, node: Any) -> bool:
        return node is None or node._sequence_nr() < self._start

    def reached_from(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Follows the graph of f back from its outputs to the tensors outside f. One that was not seen on
        its way in is an error if it is the result of an operation: its gradient would be lost."""
        for x in outputs:
            if x.requires_grad and self._is_older(x.grad_fn):
                self._candidates[id(x)] = x
        made = {(x.grad_fn, x.output_nr): x for x in self._candidates.values() if not x.is_leaf}
        reached: dict[int, Tensor] = {}
        edges: list[tuple[Any, int]] = [(x.grad_fn, x.output_nr) for x in outputs]
        reached.update((id(x), x) for x in outputs if x.requires_grad and x.is_leaf)
        visited = set()
        while edges:
            node, _ = edge = edges.pop()
            if node is None or edge in visited:
                continue
            visited.add(edge)
            if hasattr(node, "variable"):  # a leaf
                reached[id(node.variable)] = node.variable
            elif not self._is_older(node):
                edges.extend(node.next_functions)
            elif edge in made:
                reached[id(made[edge])] = made[edge]
            else:
                raise RuntimeError(
                    f"f depends on a tensor that {node.name()} made before the solve, and that cannot be found from "
                    "outside (is f compiled?), so its gradient would be lost: pass this tensor to f through `args`"
                )
        return [x for key, x in reached.items() if key not in self._known]


class Draw:
    """One random draw, seen by every evaluation of f in a solve and in its backward pass.

    A first evaluation that leaves the generators as they were draws nothing, and the others pay nothing.
    """

    _turn = threading.RLock()  # the default generators are shared by all threads

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = _generator_states(device)
        self._draws: bool | None = None  # not known before the first evaluation

    def __enter__(self) -> None:
        if self._draws is not False:
            self._turn.acquire()
        if self._draws:
            _set_generator_states(self._device, self._start)

    def __exit__(self, kind: object, *exception: object) -> None:
        if self._draws is False:
            return
        try:
            if kind is not None:
                _set_generator_states(self._device, self._start)
            elif self._draws is None:
                now = _generator_states(self._device)
                self._draws = not all(map(torch.equal, self._start, now))
        finally:
            self._turn.release()

    @contextlib.contextmanager
    def rewound(self) -> Iterator[None]:
        """Around the backward pass: the generators end where they were."""
        if not self._draws:
            yield
            return
        now = _generator_states(self._device)
        try:
            yield
        finally:
            _set_generator_states(self._device, now)


def _generator_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        states.append(torch.cuda.get_rng_state(device))
    elif device.type == "xpu":
        states.append(torch.xpu.get_rng_state(device))
    return states


def _set_generator_states(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    for state in states[1:]:
        getattr(torch, device.type).set_rng_state(state, device)


def _autocast_settings(device_type: str) -> dict[str, Any]:
    return {
        "device_type": device_type,
        "enabled": torch.is_autocast_enabled(device_type),
        "dtype": torch.get_autocast_dtype(device_type),
        "cache_enabled": torch.is_autocast_cache_enabled(),
    }
