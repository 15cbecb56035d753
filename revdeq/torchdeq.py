"""The reversible solver in programs written for torchdeq.

    import revdeq.torchdeq
    deq = torchdeq.get_deq(core="reversible", f_max_iter=8, beta=0.5)
    z_out, info = deq(f, z0)          # z_out[-1] is the fixed point, info a SolverStat, as with any core

A program with torchdeq's command line runs with `--core reversible`. `add_args(parser)` adds flags for the settings of
`revdeq.solve`: `--rev_beta`, `--rev_state` and so on.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import functools
import logging
import math
import re
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

try:
    import torchdeq
except ModuleNotFoundError:
    raise ModuleNotFoundError("revdeq.torchdeq needs torchdeq: pip install torchdeq") from None
from torchdeq.core import DEQBase
from torchdeq.dropout import _VariationalDropoutNd
from torchdeq.solver.stat import SolverStat
from torchdeq.utils.config import DEQConfig
from torchdeq.utils.layer_utils import deq_decorator

from . import _device
from ._solver.repeatable import modules_of
from ._solver.options import Options
from ._solver.solve import solve

SETTINGS: dict[str, Any] = {
    option.name: option.default for option in dataclasses.fields(Options) if option.name not in ("max_steps", "tol")
}
"""Settings of `revdeq.solve`, except max_steps and tol, which have other names in torchdeq."""

USED = (
    "core", "f_max_iter", "f_tol", "eval_factor", "eval_f_max_iter", "no_stat",
    "n_states", "indexing", "grad", "sup_gap", "sup_loc",
)  # fmt: skip
"""Settings of torchdeq that this core uses."""

MEANINGLESS = {
    "f_solver": "fixed_point_iter",
    "f_stop_mode": "abs",
    "b_solver": "fixed_point_iter",
    "b_max_iter": 40,
    "b_tol": 1e-6,
    "b_stop_mode": "abs",
    "ift": False,
    "hook_ift": False,
    "tau": 1.0,
}
"""Settings, with torchdeq's defaults, that tune other solvers or an approximate gradient; ignored here."""

ELSEWHERE = ("norm_", "sn_", "jac_", "sradius_mode")
"""Prefixes of settings that other parts of torchdeq read from the same configuration."""

WORDS = {
    r"\bz0\b": "z_init",
    r"\ban f\b": "a func",
    r"\bf\b": "func",
    r"\bmax_steps\b": "f_max_iter / 2",
    r"\btol\b": "f_tol",
    r" \(which a layer makes .*\)": "",
}
"""Translates messages of `revdeq.solve` into torchdeq's terms."""

F_MAX_ITER = "f_max_iter, which counts evaluations of f, two per step"

__all__ = ["DEQReversible", "add_args"]

log = logging.getLogger(__name__)


def add_args(parser: argparse.ArgumentParser) -> None:
    """Add flags for the settings of `revdeq.solve` to those of `torchdeq.utils.add_deq_args`.

    They start with rev_, because programs may have their own --check or --gamma. torchdeq's gamma is the weight of
    earlier states in `torchdeq.loss.fp_correction`.

    Args:
        parser: The program's parser.

    Example:
        >>> import argparse, revdeq.torchdeq
        >>> parser = argparse.ArgumentParser()
        >>> revdeq.torchdeq.add_args(parser)
        >>> parser.parse_args(["--rev_beta", "0.8"]).rev_beta
        0.8
    """
    group = parser.add_argument_group("with --core reversible")
    for name, default in SETTINGS.items():
        words = f"{name} of revdeq.solve (default: {default})"
        group.add_argument(f"--rev_{name}", type=_value, default=argparse.SUPPRESS, help=words)


def _value(text: str) -> Any:
    """A number, None, or the text itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


class DEQReversible(DEQBase):
    """A torchdeq core with the exact gradient of its iteration (see `revdeq.solve`).

    Create it with `torchdeq.get_deq(core="reversible", ...)`, which takes these settings by name, or in `args`:

    - f_max_iter: The number of evaluations of f, two per step; an odd number is rounded up. 0 skips the solver, as in
      torchdeq: in training only the evaluations of `grad`, if given, are made, and otherwise z_init is returned.
    - f_tol: Stop after the first step whose relative change is at most this. By default, or with 0 or None, all
      evaluations are made.
    - eval_factor, eval_f_max_iter: As in torchdeq.
    - n_states, indexing: In training, also return the states after these evaluations, as torchdeq counts them. The
      gradient goes through all of them. As in torchdeq's core "sliced", the solver restarts at each, from y = z, which
      converges faster; memory grows with their number.
    - grad, sup_gap, sup_loc: In training, also return the states that torchdeq would return from its last `grad`
      evaluations.
    - no_stat: Skip the statistics, which cost one more evaluation of f; f_solver="simple_fixed_point_iter" does so,
    too. - beta, state, check and all other options of `revdeq.solve`, by name.

    Args:
        args: A configuration of torchdeq: a Namespace, a dict or a DEQConfig.
        kwargs: Settings by name.

    Raises:
        TypeError: A keyword looks like a misspelled setting.
        ValueError: A setting has an invalid value.

    Example:
        >>> import torchdeq
        >>> import revdeq.torchdeq
        >>> deq = torchdeq.get_deq(core="reversible", f_max_iter=8, beta=0.5)
        >>> states, info = deq(lambda z: f(z, x), z0)
        >>> int(info["nstep"].max())
        8

    From a Namespace, which may be that of a whole program, only these names are read. Settings of `revdeq.solve` may
    have the prefix rev_ (`add_args`), which takes precedence; gamma needs it, because torchdeq has a gamma. A name
    without prefix whose value is not valid here is assumed to be the program's own.
    """

    def __init__(self, args: Any = None, **kwargs: Any) -> None:
        # get_deq merges its arguments into the configuration; only its frame still has them separately.
        caller = sys._getframe(1)
        named = caller.f_locals["kwargs"] if caller.f_code is torchdeq.core.get_deq.__code__ else kwargs
        config = {**DEQConfig(args).config, **kwargs}
        super().__init__(args=config)
        unknown = _checked_spelling(named)
        self.settings, foreign = _settings(config, named)
        _say_what_is_ignored(config, [*unknown, *foreign])
        given = {name: config[name] for name in USED if config.get(name) is not None}
        self.f_max_iter = given.get("f_max_iter", 40)
        self.f_tol = given.get("f_tol")
        _steps(self.f_max_iter, "f_max_iter")
        scaled = int(self.f_max_iter * given.get("eval_factor", 1))
        self.eval_f_max_iter = given.get("eval_f_max_iter") or scaled
        self.no_stat = bool(given.get("no_stat", config.get("f_solver") == "simple_fixed_point_iter"))
        self.n_states = given.get("n_states", 1)
        self.indexing = list(given.get("indexing", []))
        grad = given.get("grad", [])
        self.grad = [grad] if isinstance(grad, int) else list(grad)
        self.sup_gap, self.sup_loc = given.get("sup_gap", -1), list(given.get("sup_loc", []))
        _steps(self.eval_f_max_iter, "eval_f_max_iter"), _tolerance(self.f_tol)
        Options(**self.settings)

    def forward(
        self,
        func: Callable[..., Any],
        z_init: Any,
        solver_kwargs: dict[str, Any] | None = None,
        sradius_mode: bool = False,
        backward_writer: Any = None,
        **kwargs: Any,
    ) -> tuple[list[Any], SolverStat]:
        """Solve z = func(z) from z_init by the reversible iteration.

        Args:
            func: A function of the state, or of as many tensors as z_init has, that returns as many.
            z_init: A tensor, or a tuple or list of tensors.
            solver_kwargs: f_max_iter, tol and settings of `revdeq.solve` for this call. Settings of other solvers (tau,
                m, lam) are ignored, and so is beta = 1, Anderson's default, which is not a valid beta here.
            sradius_mode: In evaluation, add the spectral radius of func's Jacobian to the statistics.
            backward_writer: Ignored: there is no backward solver.
            kwargs: Ignored.

        Returns:
            The states, of which the last is the fixed point (in evaluation, that one only), and the statistics of the
            solver, whose nstep counts evaluations of func.
        """
        several = isinstance(z_init, (tuple, list))
        if not several and not isinstance(z_init, Tensor):
            raise TypeError(f"z_init = {z_init!r} must be a tensor, or a tuple or list of tensors")
        given = dict(solver_kwargs or {})
        _refuse_misspelt(
            given, (*SETTINGS, "f_max_iter", "tol"), {"f_tol": "tol", "max_steps": F_MAX_ITER}, "solver_kwargs"
        )
        f_max_iter = given.get("f_max_iter")
        if f_max_iter is None:
            f_max_iter = self.f_max_iter if self.training else self.eval_f_max_iter
        settings = {**self.settings, **{name: given[name] for name in SETTINGS if name in given}}
        if settings["beta"] == 1:
            settings["beta"] = self.settings["beta"]

        modules = [module for outermost in modules_of(func) for module in outermost.modules()]
        _refuse_hooks(modules)
        memory: list[tuple[nn.Module, str, Any]] = []

        def f(z: Any) -> Any:
            with _remembered(memory):
                if not several:
                    return func(z)
                out = func(*z)
            if isinstance(out, Tensor) or len(out) != len(z):
                what = "a tensor" if isinstance(out, Tensor) else f"{len(out)} parts"
                raise TypeError(f"func returned {what}: z_init has {len(z)} parts, and func must return as many")
            return tuple(out)

        z = tuple(z_init) if several else z_init
        ends, device = self._ends(f_max_iter), (z_init[0] if several else z_init).device
        draw = _device.generator_states(device)
        with _in_torchdeqs_words():
            states, nfe = _solved(f, z, ends, _tolerance(given.get("tol", self.f_tol)), settings, draw)
        memory += _computed(modules)
        with _drawing(device, draw):
            info = self._statistics(f, states[-1], nfe)
        if not self.training:
            info["sradius"] = torch.zeros(1, device=info["abs_lowest"].device)
            if sradius_mode:
                wrapped, _ = deq_decorator(func, z_init, no_stat=False)
                info["sradius"] = self._sradius(wrapped, wrapped.list2vec(states[-1]).detach().clone())
        return [list(z) if several else z for z in states], info

    def _ends(self, f_max_iter: Any) -> list[int]:
        """The steps whose states are returned, including the last step."""
        if not self.training:
            return [_steps(f_max_iter, "eval_f_max_iter")]
        if _steps(f_max_iter, "f_max_iter") == 0 and self.grad:
            f_max_iter = max(self.grad)
        if self.n_states > 1:
            n = max(1, min(math.ceil(f_max_iter), self.n_states))
            samples = [f_max_iter - (n - 1 - k) * (f_max_iter // n) for k in range(n)]
        else:
            samples = [*(i for i in self.indexing if 0 < i < f_max_iter), f_max_iter]
        grads = self.grad if len(self.grad) == len(samples) else (self.grad or [1])[:1] * len(samples)
        evaluations: list[Any] = []
        for sample, grad in zip(samples, grads, strict=True):
            inner = [grad]
            if self.sup_gap > 0:
                inner = list(range(self.sup_gap, grad + 1, self.sup_gap)) or inner
            elif self.sup_loc:
                inner = [i for i in range(1, grad + 1) if i in self.sup_loc] + inner
            evaluations += [max(sample - grad + i, 0) for i in inner]
        return [math.ceil(n / 2) for n in evaluations]

    def _statistics(self, f: Callable[..., Any], z: Any, nfe: int) -> SolverStat:
        if self.no_stat:
            return SolverStat(nstep=torch.tensor([float(nfe)]))
        # With grad mode as it is: an f that registers hooks (hook_ift) needs a graph.
        # On a copy, because f may modify its input in place.
        copy = tuple(x.detach().clone() for x in z) if isinstance(z, tuple) else z.detach().clone()
        return SolverStat.from_final_step(_by_sample(z).detach(), _by_sample(f(copy)).detach(), nfe)


def _solved(
    f: Callable[..., Any],
    z: Any,
    ends: list[int],
    tol: float | None,
    settings: dict[str, Any],
    draw: list[Tensor],
) -> tuple[list[Any], int]:
    """The states after these steps, and the number of evaluations."""
    leaf = z[0] if isinstance(z, tuple) else z
    states, steps, nfe, arrived = {0: z}, 0, 0, False
    for end in sorted(set(ends)):
        if end > steps and not arrived:
            if nfe:  # all solves use the same random numbers
                _device.set_generator_states(leaf.device, draw)
            solution = solve(f, z, max_steps=end - steps, tol=tol, **settings)
            z, nfe = solution.z, nfe + solution.nfe
            arrived = tol is not None and bool((solution.change <= tol).all())
            steps = end
        states[end] = z
    return [states[end] for end in ends], nfe


@contextlib.contextmanager
def _in_torchdeqs_words() -> Iterator[None]:
    """Context manager: translates errors of the solver, but not those of func, into torchdeq's terms."""
    try:
        yield
    except Exception as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        own = innermost.f_globals["__name__"].startswith("revdeq._solver")
        if own and len(error.args) == 1 and isinstance(error.args[0], str):
            text = error.args[0]
            for ours, theirs in WORDS.items():
                text = re.sub(ours, theirs, text)
            error.args = (text,)
        raise


def _refuse_hooks(modules: list[nn.Module]) -> None:
    for module in modules:
        if isinstance(module, DEQBase) and not isinstance(module, DEQReversible) and module.args.get("hook_ift"):
            raise RuntimeError(
                "func contains a core of torchdeq's with hook_ift=True, whose hook keeps the graph of every evaluation "
                "of func alive: use ift=True there, which computes the same gradient"
            )


def _computed(modules: list[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    """The tensors that `torchdeq.reset_deq` recomputes before each forward pass: normalized weights, dropout masks."""
    weights = [
        (module, name) for module in modules for name in getattr(getattr(module, "_deq_norm", None), "names", ())
    ]
    masks = [(module, "mask") for module in modules if isinstance(module, _VariationalDropoutNd)]
    return [(module, name, getattr(module, name)) for module, name in (*weights, *masks)]


@contextlib.contextmanager
def _remembered(memory: list[tuple[nn.Module, str, Any]]) -> Iterator[None]:
    """Context manager for evaluations in the backward pass: restores those tensors of the forward pass."""
    changed = [(module, name, getattr(module, name)) for module, name, x in memory if getattr(module, name) is not x]
    if not changed:
        yield
        return
    for module, name, x in memory:
        setattr(module, name, x)
    try:
        yield
    finally:
        for module, name, x in changed:
            setattr(module, name, x)


@contextlib.contextmanager
def _drawing(device: torch.device, states: list[Tensor]) -> Iterator[None]:
    """Context manager: f sees the random numbers of the solve; the generators are restored afterwards."""
    after = _device.generator_states(device)
    _device.set_generator_states(device, states)
    try:
        yield
    finally:
        _device.set_generator_states(device, after)


def _by_sample(state: Any) -> Tensor:
    """The state as one vector per sample."""
    parts = state if isinstance(state, tuple) else (state,)
    return torch.cat([x.flatten(1) if x.dim() > 1 else x.reshape(-1, 1) for x in parts], 1)


def _steps(f_max_iter: Any, name: str) -> int:
    if not isinstance(f_max_iter, (int, float)) or not 0 <= f_max_iter < math.inf or f_max_iter % 1:
        raise ValueError(f"{name} = {f_max_iter!r} must be a number of evaluations of f, an integer of at least 0")
    steps = math.ceil(f_max_iter / 2)
    if 2 * steps != f_max_iter:
        _say_it_is_rounded(float(f_max_iter))
    return steps


@functools.cache
def _say_it_is_rounded(evaluations: float) -> None:
    even = 2 * math.ceil(evaluations / 2)
    log.warning("f_max_iter = %g is rounded up to %d: a reversible step evaluates f twice", evaluations, even)


def _tolerance(f_tol: Any) -> float | None:
    if f_tol is None or f_tol == 0:
        return None
    if not isinstance(f_tol, (int, float)) or not 0 < f_tol < math.inf:
        raise ValueError(f"f_tol = {f_tol!r} must be positive and finite; 0 or None makes all f_max_iter evaluations")
    return float(f_tol)


def _settings(config: dict[str, Any], named: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The settings of `revdeq.solve`, and the names that belong to the program."""
    settings, foreign = dict(SETTINGS), []
    for name in SETTINGS:
        if name in named:
            settings[name] = named[name]
        elif f"rev_{name}" in config:
            settings[name] = config[f"rev_{name}"]
        elif name != "gamma" and config.get(name) is not None:
            try:
                Options(**{name: config[name]})
                settings[name] = config[name]
            except (TypeError, ValueError):
                foreign.append(name)
    return settings, foreign


def _checked_spelling(named: dict[str, Any]) -> list[str]:
    """The names of ignored keywords. Raises if one looks like a misspelled setting."""
    known = (*USED, *SETTINGS, *(f"rev_{name}" for name in SETTINGS), *MEANINGLESS)
    unknown = [name for name in named if name not in known and not name.startswith(ELSEWHERE)]
    elsewhere = {"tol": "f_tol", "max_steps": F_MAX_ITER}
    _refuse_misspelt({name: named[name] for name in unknown}, known, elsewhere, "torchdeq")
    return unknown


def _refuse_misspelt(named: dict[str, Any], known: Collection[str], elsewhere: dict[str, str], here: str) -> None:
    """elsewhere: names from other interfaces, and their equivalents here."""
    for name, value in named.items():
        if name in elsewhere:
            raise TypeError(f"unknown keyword {name} = {value!r}: in {here} it is called {elsewhere[name]}")
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if close and name not in known:
            raise TypeError(f"unknown keyword {name} = {value!r}: did you mean {close[0]}?")


def _say_what_is_ignored(config: dict[str, Any], names: list[str]) -> None:
    tuned = [name for name, default in MEANINGLESS.items() if config.get(name, default) != default]
    if rows := [f"{name} = {config[name]!r}" for name in (*tuned, *names)]:
        log.info("the core 'reversible', whose gradient is exact, does not use %s", ", ".join(rows))


torchdeq.register_deq("reversible", DEQReversible)
