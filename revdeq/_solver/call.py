"""f(z, *args), called the same way every time.

The backward pass evaluates f again at reconstructed inputs, and the gradient is exact only if f returns the same
results. So f always runs in the same grad mode (without it, some modules take a different path), under the settings and
with the tensors of the forward pass; and all evaluations of a solve see the same random numbers: f with dropout is one
function with one mask, and has a fixed point.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_leaves, tree_map

from .compact import cut, refuse_ambiguous
from .context import Draw, Settings, WithoutBenchmark
from .options import NAMES
from .state import State, flattened, structured
from .unchanged import Unchanged, contents, fill_caches, put_back, reachable, refuse_sharded


class Call:
    """Calls f with a state given as a flat list of tensors.

    before: the number of evaluations of the solve that this one continues.
    changes_its_input: whether an evaluation has modified, or may have modified, its input in place.
    aux: the auxiliary output of the last evaluation, if any.
    """

    def __init__(
        self,
        f: Callable[..., Any],
        initial: State,
        spec: TreeSpec,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        indexed: bool,
        has_aux: bool,
        before: int = 0,
    ) -> None:
        self.f, self._run, self._spec = f, f, spec
        plain = not kwargs and all(isinstance(x, Tensor) for x in args)
        given: tuple[Any, dict[str, Any]] = (args, dict(kwargs))
        given, self._leaves = (given, list(args)) if plain else _own(given)
        self._args, self._kwargs = given
        self._caches = [] if plain or indexed else [x for x in (*args, *kwargs.values()) if _cached(x) is not None]
        self.settings, self.draw = Settings(initial[0].device), Draw(initial[0].device)
        self.autocasts = self.settings.autocasts
        self.changes_its_input = False
        self._indexed, self.has_aux, self.before = indexed, has_aux, before
        self.aux: Any = None
        self._counts_changes = not torch.is_inference_mode_enabled()
        x = initial[0]
        self._is_tensor = spec.is_leaf()
        self._like = (x.dtype, x.shape, x.device, torch.strided) if self._is_tensor else None
        self._tensors: list[tuple[dict[str, Any], str, Tensor]] = []
        self._whole: tuple[Any, Any] | None = None  # the arguments of the whole batch, while f gets a part of it

    def __call__(self, state: State, k: int) -> State:
        """Evaluation k."""
        before = [x._version for x in state] if self._counts_changes else None
        z = state[0] if self._is_tensor else structured(state, self._spec)
        if self._indexed:
            self._kwargs["evaluation"] = self.before + k
        if self.draw.draws is False:
            result = self._run(z, *self._args, **self._kwargs)
        else:
            result = self.draw(self._run, z, *self._args, **self._kwargs)
        if self.has_aux:
            result, self.aux = _pair(result)
        if before is None or before != [x._version for x in state]:
            self.changes_its_input = True
        if type(result) is Tensor and (result.dtype, result.shape, result.device, result.layout) == self._like:
            return [result]
        return flattened(result, state, self._spec)

    def refuse_ambiguous(self, initial: State) -> None:
        """Raise if it is unclear which arguments have a batch dimension."""
        refuse_ambiguous(self._args, self._kwargs, initial)

    def cut(self, size: int, rows: Tensor) -> None:
        """Evaluate f only on these examples of a batch from now on."""
        if self._whole is None:
            self._whole = self._args, self._kwargs
        self._args, self._kwargs = cut(self._whole, size, rows)
        self._like = None

        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return self.f(*args, **kwargs)
            except RuntimeError as error:
                raise RuntimeError(
                    f"f failed with {len(rows)} of {size} examples, because of compact=True: pass per-example tensors "
                    f"as arguments, solve(f, z0, x), or use compact=False ({error})"
                ) from error

        self._run = run

    def prepare(self, look: bool) -> None:
        """Called before the first evaluation. `look`: whether there is a tolerance."""
        self._reachable = reachable(self.f)
        refuse_sharded(self._reachable[0], look)
        fill_caches(self._reachable[0])

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Context manager around the first evaluation: checks whether f can be repeated."""
        versions, cached = self._versions(), [_cached(x) for x in self._caches]
        try:
            self._unchanged = Unchanged(*self._reachable, self._leaves)
            with self._unchanged:
                yield
        except TypeError as error:
            wrong = self._wrong_signature(error)
            if wrong is None:
                raise
            raise wrong from None
        if torch.is_grad_enabled():
            self._tensors = module_tensors(self.f)
        self._refuse_changes(versions)
        if cached != [_cached(x) for x in self._caches]:
            raise RuntimeError(
                "f appends to a cache of keys and values, which every evaluation would repeat: use indexed=True and a "
                "cache for each evaluation, as revdeq.models.Equilibrium does, or pass a copy that f does not append to"
            )

    def not_finite(self) -> str | None:
        """The name of an argument with NaN or infinity, if any."""
        given = tree_flatten_with_path((self._args, self._kwargs))[0]
        found = [path for path, x in given if isinstance(x, Tensor) and not x.isfinite().all()]
        return _name_of(found[0]) if found else None

    def end(self) -> None:
        """Called after the last evaluation of the forward pass."""
        seen = self._unchanged
        self.hooked, self.slots, self.without_grad = seen.hooked(), seen.used(), seen.without_grad()

    def _versions(self) -> list[int]:
        """Versions of the tensors that f could modify in place."""
        return [x._version for x in self._leaves if _can_change(x)]

    def _refuse_changes(self, versions: list[int]) -> None:
        if self._versions() == versions or not torch.is_grad_enabled():  # no backward pass follows
            return
        paths = [path for path, x in tree_flatten_with_path((self._args, self._kwargs))[0] if _can_change(x)]
        rows = zip(paths, versions, self._versions(), strict=False)  # f may also have appended to a list
        names = [_name_of(path) for path, old, new in rows if old != new]
        if names:
            raise RuntimeError(
                f"f modifies {' and '.join(names)} in place, which every evaluation would repeat: clone it inside f"
            )

    def _wrong_signature(self, error: TypeError) -> TypeError | None:
        """A better message than "takes 2 positional arguments but 3 were given", if that is the problem."""
        f = self.f.forward if isinstance(self.f, nn.Module) else self.f
        count = len(self._args)
        try:
            inspect.signature(f).bind(*[None] * (1 + count), **self._kwargs)
        except ValueError:  # it has no signature
            return None
        except TypeError as wrong:
            names = ["z", *(("x",) if count == 1 else (f"args[{i}]" for i in range(count)))]
            called = ", ".join([*names, *(f"{name}=..." for name in self._kwargs)])
            options = [name for name in self._kwargs if name in NAMES]
            if str(wrong).startswith("missing"):
                remedy = "pass what is missing after z0, as in solve(f, z0, x)"
            elif options:
                remedy = f"{options[0]} is an option of the solver: set it on the layer, deq.{options[0]} = ..."
            else:
                remedy = "add them to f, or wrap it in a function or module that takes them"
            return TypeError(f"f is called as f({called}), but it does not take these arguments ({error}): {remedy}")
        return None


def as_before(call: Call, leaves: State) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A context manager for the evaluations of a backward pass: applies the settings of the forward pass, and restores
    what f assigns to attributes and variables. Takes the leaves that f depends on, as far as they are known.

    A module that was called through `torch.func.functional_call` gets the tensors of that call. Leaves that were frozen
    or thawed since require a gradient as before. Hooks that f registers on leaves are removed, because the graph has
    them already.
    """
    settings = call.settings.unless_current()
    changed = [x for x in leaves if not x.requires_grad]
    changed += [x for x in call.without_grad if x.requires_grad and x.is_leaf]
    swapped = any(d.get(name) is not x and not _is_sharded(d.get(name), x) for d, name, x in call._tensors)
    if not (settings or changed or swapped or torch.backends.cudnn.benchmark or call.hooked or call.slots):
        return torch.enable_grad
    run = _with_tensors(call.f, call._tensors) if swapped else call.f

    @contextlib.contextmanager
    def restored() -> Iterator[None]:
        hooks, kept = [(x, set(x._backward_hooks or ())) for x in call.hooked], contents(call.slots)
        call._run = run
        _change(changed)
        try:
            with settings.restored() if settings else contextlib.nullcontext(), WithoutBenchmark(), torch.enable_grad():
                yield
        finally:
            call._run = call.f
            _change(changed)
            put_back(call.slots, kept)
            for x, before in hooks:
                for key in set(x._backward_hooks or ()) - before:
                    del x._backward_hooks[key]  # type: ignore[union-attr]

    return restored


def _change(leaves: State) -> None:
    """Flip requires_grad of each."""
    for x in leaves:
        x.requires_grad_(not x.requires_grad)


def _cached(x: Any) -> int | None:
    """The number of positions in a cache of Hugging Face's."""
    length = getattr(x, "get_seq_length", None)
    return int(length()) if callable(length) else None


def _name_of(path: Any) -> str:
    """The name of a tensor in (args, kwargs)."""
    return f"{('args', 'kwargs')[path[0].idx]}{keystr(path[1:])}"


def _pair(result: Any) -> tuple[Any, Any]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise TypeError(f"f returned {type(result).__name__}: with aux=True it must return a pair (state, aux)")
    return result


def _own(args: tuple[Any, dict[str, Any]]) -> tuple[tuple[Any, dict[str, Any]], list[Any]]:
    """Copy the containers of tensors that require a gradient, since the caller may modify them; returns also their
    leaves. Other containers are passed on: f may append to the caller's list."""
    own = tree_map(lambda x: x, args, is_leaf=lambda x: isinstance(x, Tensor) or not _needs_grad(x))
    return own, tree_leaves(own)


def _needs_grad(tree: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(tree))


def _can_change(x: Any) -> bool:
    return isinstance(x, Tensor) and not x.is_inference()


def module_tensors(f: Any) -> list[tuple[dict[str, Any], str, Tensor]]:
    """The parameters and buffers of a module, with the dict and the name of each."""
    modules = f.modules() if isinstance(f, nn.Module) else ()
    dicts = [d for module in modules for d in (module._parameters, module._buffers)]
    return [(d, name, x) for d in dicts for name, x in d.items() if x is not None]


def _with_tensors(f: Any, tensors: list[tuple[dict[str, Any], str, Tensor]]) -> Callable[..., Any]:
    """Call a module with the given parameters and buffers."""
    paths = {id(d): path for path, module in f.named_modules() for d in (module._parameters, module._buffers)}
    named = {f"{paths[id(d)]}.{name}".lstrip("."): x for d, name, x in tensors}
    return lambda *args, **kwargs: torch.func.functional_call(f, named, args, kwargs)


def _is_sharded(*tensors: Any) -> bool:
    """Whether FSDP manages these parameters: it swaps shards and full parameters itself."""
    return any(hasattr(x, "placements") for x in tensors)
