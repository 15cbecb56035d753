"""f evaluated again, on the way back, with the products of its Jacobians."""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _device
from .context import autocast_as
from .function import Function, module_tensors
from .inputs import CarriedOver, Search, State, Substitution, Unreachable, alias

_engine = torch.autograd.Variable._execution_engine

OTHER_TENSORS = (
    "f used other tensors that require a gradient in the backward pass than in the forward pass, so that their "
    "gradient would be lost (a closure whose variables were changed after the solve? requires_grad switched on since? "
    "torch.func.functional_call or a cached parametrization around the forward pass alone? a tensor that f makes and "
    "keeps?): pass these tensors to f through `args`, or make f a module of its own"
)


class Replay:
    """The evaluations of one backward pass, from the last to the first. What was kept is not evaluated again."""

    def __init__(self, function: Function, keep_graph: bool = False) -> None:
        """With `keep_graph`, there may be another backward pass."""
        self._function, self._keep_graph = function, keep_graph
        self._kept = list(function.kept)
        self._inputs = function.inputs.tensors
        self._reached = function.inputs.by_evaluation()
        self._by: dict[int, tuple[int, Tensor]] = {}  # by the id of a tensor: its index among the inputs, and itself
        self._usual: dict[int, tuple[int, Tensor]] | None = None  # by index, once the graph has been looked at
        self._autocast = function.settings.autocast_now()  # of the backward pass
        self._f_spares_seeds: bool | None = None  # not known before the first product
        self._entangled: set[int] = set()  # the ids of captured tensors of which one is made from another

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager: replay f under the forward pass's settings."""
        function = self._function
        function.backward_hooks.refuse_changes()
        split = len(function.arguments.tensors)
        captured = self._inputs[split:]
        targets = [*enumerate(function.arguments.use_aliases()), *enumerate(captured, split)]
        now = module_tensors(function.f)
        swapped = any(now.get(name) is not x for name, x in function.module_tensors.items())
        before = function.run, function.search
        self._entangled = _made_from_each_other(captured)
        if swapped or self._entangled or any(map(_needs_alias, captured)):
            targets += enumerate(self._use_aliases(captured), split)
            self._kept = []  # their graphs lead to the tensors themselves
        self._by = {id(x): (i, x) for i, x in targets}
        torch.clear_autocast_cache()
        function.search = Search(captured)
        try:
            with contextlib.ExitStack() as stack:
                for mode in function.modes:
                    stack.enter_context(mode)
                stack.enter_context(torch.enable_grad())
                stack.enter_context(function.settings.restored())
                stack.enter_context(function.draw.rewound())
                yield
        finally:
            function.run, function.search = before

    def vjp(
        self, state: State, seeds: State, by_state: bool = True
    ) -> tuple[State, list[Tensor | None], list[Tensor | None]]:
        """f's outputs, and the products of the seeds with its Jacobians by the state and by `function.inputs`."""
        expected = self._reached.pop()
        unknown: list[weakref.ref[Tensor]] = []
        kept = bool(self._kept)
        leaves, outputs = self._kept.pop() if kept else self._function.evaluate(state)
        if kept:
            by = [(i, self._function.inputs.in_graph(i)) for i in expected]
        elif self._usual is None:
            by, unknown = self._reached_again(leaves, outputs, expected)
        else:
            by = [self._usual[i] for i in expected]
        targets = [*(leaves if by_state else ()), *(x for _, x in by)]
        sources = [i for i, x in enumerate(outputs) if x.requires_grad]
        products: Sequence[Tensor | None] = [None] * len(targets)
        if sources and targets:
            sources_seeds = [seeds[i] for i in sources]
            products = self._run_backward([outputs[i] for i in sources], sources_seeds, targets, kept)
        if not kept and self._usual is not None and any(x is None for x in products[len(targets) - len(by) :]):
            _, unknown = self._reached_again(leaves, outputs, expected)
        by_inputs = _by_index(by, products[len(targets) - len(by) :], len(self._inputs))
        by_leaves = list(products[: len(leaves)]) if by_state else []
        values = [x.detach() for x in outputs]
        if unknown:
            outputs.clear()  # and with them the graph
            if any(ref() is not None for ref in unknown):
                raise RuntimeError(OTHER_TENSORS)
        return values, by_leaves, by_inputs

    def linearise(self, state: State) -> "Linearisation":
        """f at a state, with its graph, for any number of products."""
        leaves, outputs = self._function.evaluate(state)
        by, unknown = self._reached_again(leaves, outputs, None)
        return Linearisation(leaves, outputs, by, unknown, len(self._inputs), self._autocast)

    def _run_backward(self, outputs: State, seeds: State, targets: State, kept: bool) -> Sequence[Tensor | None]:
        """The seeds are the solver's own adjoints. A hook or a custom function in f that changes its gradient in place
        would change them: after the first product it is known whether that happens."""
        if self._f_spares_seeds:
            given = [s.to(out.dtype) for s, out in zip(seeds, outputs, strict=True)]
            versions = [s._version for s in seeds]
        else:
            given = [s.to(out.dtype, copy=True) for s, out in zip(seeds, outputs, strict=True)]
            versions = [s._version for s in given]
        with autocast_as(self._autocast):
            products = _run_engine(outputs, given, targets, kept and self._keep_graph)
        if self._f_spares_seeds is None:
            self._f_spares_seeds = versions == [s._version for s in given] and all(map(_equal, given, seeds))
        elif self._f_spares_seeds and versions != [s._version for s in seeds]:
            raise RuntimeError(
                "f changes its gradient in place, and not in every evaluation (a hook, or the backward of a custom "
                "function?), so that the solver's own adjoint was changed: write g.clamp(...) in place of g.clamp_(...)"
            )
        return products

    def _reached_again(
        self, leaves: State, outputs: State, expected: frozenset[int] | None
    ) -> tuple[list[tuple[int, Tensor]], list[weakref.ref[Tensor]]]:
        """The tensors to differentiate by, found in the graph: those of the forward pass, if it was at this state, or
        it is an error. Other leaves must have been made by f itself, and die with the graph."""
        try:
            found = self._function.search.reached_from(leaves, outputs)
        except (Unreachable, CarriedOver):
            raise RuntimeError(OTHER_TENSORS) from None
        by = [self._by[key] for key in found if key in self._by]
        unknown = [x for key, x in found.items() if key not in self._by]
        if (expected is not None and {i for i, _ in by} != expected) or any(x.grad_fn is not None for x in unknown):
            raise RuntimeError(OTHER_TENSORS)
        if any(_needs_alias(x) for _, x in by):
            raise RuntimeError(
                "f gives a tensor with a hook (register_hook, retain_grad) to a custom autograd function or to "
                "torch.func.vmap, where the solver cannot put another in its place, and the hook would run at every "
                "evaluation instead of once, on the whole gradient: pass this tensor to f through `args`, or make f a "
                "module that holds it, or remove the hook"
            )
        if any(id(x) in self._entangled for _, x in by):
            raise RuntimeError(
                "f closes over two tensors of which one is made from the other, and gives them to a custom autograd "
                "function or to torch.func.vmap, or is compiled, where the solver cannot keep their gradients apart: "
                "pass these tensors to f through `args`"
            )
        if self._function.run is self._function.f:  # from now on, a look at the gradients will do
            self._usual = {i: (i, x) for i, x in self._by.values()}
        return by, list(map(weakref.ref, unknown))

    def _use_aliases(self, captured: State) -> State:
        """Puts aliases in the place of captured tensors, so that hooks fire only when the whole gradient is
        there. A module gets all the parameters and buffers that it had in the forward pass, when it may have
        been called through `torch.func.functional_call`. A custom autograd function takes its inputs past a
        mode: there the gradient flows to the tensor itself, which must then have no hook."""
        aliases = {id(x): alias(x) for x in captured}
        names = {name: aliases.get(id(x), x) for name, x in self._function.module_tensors.items()}
        module_ids = {id(x) for x in self._function.module_tensors.values()}
        others = [x for x in captured if id(x) not in module_ids]
        module: Any = self._function.f

        def run(*args: Any) -> Any:
            with Substitution(others, [aliases[id(x)] for x in others]) if others else contextlib.nullcontext():
                return torch.func.functional_call(module, names, args) if names else module(*args)

        self._function.run = run
        return [aliases[id(x)] for x in captured]


class Linearisation:
    """The Jacobians of f at one state, as products with seeds."""

    def __init__(
        self,
        leaves: State,
        outputs: State,
        by: list[tuple[int, Tensor]],
        unknown: list[weakref.ref[Tensor]],
        size: int,
        autocast: list[dict[str, Any]],
    ) -> None:
        self._leaves, self._by, self._unknown, self._size, self._autocast = leaves, by, unknown, size, autocast
        self._outputs, self._sources = outputs, [i for i, x in enumerate(outputs) if x.requires_grad]

    def distance(self) -> Tensor:
        """Of f's outputs from the state, in the 2-norm."""
        pairs = zip(self._outputs, self._leaves, strict=True)
        return torch.stack([(x.detach() - z.detach()).float().square().sum() for x, z in pairs]).sum().sqrt()

    def by_state(self, seeds: State) -> list[Tensor | None]:
        return list(self._products(seeds, self._leaves, keep_graph=True))

    def by_inputs(self, seeds: State) -> list[Tensor | None]:
        """The last product: the graph is gone afterwards."""
        result = _by_index(self._by, self._products(seeds, [x for _, x in self._by], False), self._size)
        self._outputs.clear()
        if any(ref() is not None for ref in self._unknown):
            raise RuntimeError(OTHER_TENSORS)
        return result

    def _products(self, seeds: State, targets: State, keep_graph: bool) -> Sequence[Tensor | None]:
        if not self._sources or not targets:
            return [None] * len(targets)
        outputs = [self._outputs[i] for i in self._sources]
        # The seeds are copied: a hook in f may change its gradient in place.
        given = [seeds[i].to(x.dtype, copy=True) for i, x in zip(self._sources, outputs, strict=True)]
        with autocast_as(self._autocast):
            return _run_engine(outputs, given, targets, keep_graph)


def _by_index(by: list[tuple[int, Tensor]], products: Sequence[Tensor | None], size: int) -> list[Tensor | None]:
    """Products by tensors, as a list by the inputs that they stand for: several may stand for one."""
    totals: list[Tensor | None] = [None] * size
    for (i, _), product in zip(by, products, strict=True):
        so_far = totals[i]
        totals[i] = product if so_far is None else so_far if product is None else so_far + product
    return totals


def _run_engine(outputs: State, seeds: State, targets: State, keep_graph: bool) -> Sequence[Tensor | None]:
    """What torch.autograd.grad calls, which spends 30 us on checks that cannot fail here."""
    return _engine.run_backward(
        tuple(outputs), tuple(seeds), keep_graph, False, tuple(targets), allow_unreachable=True, accumulate_grad=False
    )


def _made_from_each_other(captured: State) -> set[int]:
    """The ids of all of them, if the graph of one leads to another: a product by both would go on from the first to
    the second, and that path would be walked once more, by the backward pass of the whole model."""
    dense = [x for x in captured if x.requires_grad and x.layout is torch.strided]  # torch finds no node of a sparse leaf
    nodes = {torch.autograd.graph.get_gradient_edge(x).node for x in dense}
    left = [node for x in captured if x.grad_fn is not None for node, _ in x.grad_fn.next_functions]
    seen: set[Any] = set()
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        if node in nodes:
            return set(map(id, captured))
        seen.add(node)
        left += [following for following, _ in node.next_functions]
    return set()


def _equal(given: Tensor, seed: Tensor) -> bool:
    """Also after a change that autograd does not count, unless a look would wait for the device."""
    return not _device.can_look(seed) or torch.equal(given, seed.to(given.dtype))


def _needs_alias(x: Tensor) -> bool:
    """Whether a gradient by x itself would run something of the user's, or has become impossible."""
    return bool(x._backward_hooks) or (not x.is_leaf and x.retains_grad) or not x.requires_grad
