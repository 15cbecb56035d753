"""revdeq.verify: is the gradient of a given f exact, and if not, why?"""

import contextlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Unpack

from .check import ATOMICS
from .options import Keywords, options_from
from .solve import checked_f, solve

LARGEST_GROWTH = 1000.0
"""Models that learned well had up to 250 at the start of training; one that learned nothing had 2,000."""


@dataclass
class Report:
    """The result of `revdeq.verify`. Print it for an explanation. Evaluations of f are counted from 1, in the order of
    the forward pass.

    Attributes:
        evaluations: The number of evaluations in each pass.
        setting: beta and the number of steps, as text.
        changed_input: The evaluations whose input was not reconstructed bit for bit.
        changed_output: The evaluations whose output differed for the same input, with the number of differing elements.
        growth: The growth of the gradient from the last z to z0. If it is large, f expands, and gradients explode.

    Example:
        >>> report = revdeq.verify(f, z0, x)
        >>> report.exact, report.evaluations
        (True, 16)
    """

    evaluations: int
    setting: str
    changed_input: list[int] = field(default_factory=list)
    changed_output: dict[int, int] = field(default_factory=dict)
    growth: float = 0.0

    @property
    def exact(self) -> bool:
        """Whether both passes computed the same bits, so that the gradient is that of the stored graph."""
        return not self.changed_input and not self.changed_output

    def __str__(self) -> str:
        if self.exact:
            return (
                f"exact: the backward pass gave f the same {self.evaluations} inputs as the forward pass, bit for bit, "
                f"and f returned the same outputs ({self.setting}). {self._growth}"
            )
        # In the order of the backward pass, the first difference is the cause of the others.
        first_output, first_input = max(self.changed_output, default=0), max(self.changed_input, default=0)
        if first_output >= first_input:
            elements = self.changed_output[first_output]
            text = (
                f"your f is not deterministic: evaluation {first_output} differs in {elements} elements when it is "
                "repeated with the same input (state inside f? its own generator? BatchNorm? cuDNN's autotuning, "
                f"changed torch settings?). {ATOMICS}"
            )
        else:
            text = (
                f"rounding: the float64 state did not reconstruct the input of evaluation {first_input} "
                f'({self.setting}); use state="exact"'
            )
        lost = len(self.changed_input)
        return f"{text}. {lost} of {self.evaluations} inputs were not reconstructed bit for bit. {self._growth}"

    @property
    def _growth(self) -> str:
        text = f"From the last z to z0 the gradient is multiplied by {self.growth:.1e}"
        if self.growth <= LARGEST_GROWTH:
            return text
        return f"{text}: f expands, and gradients explode; damp f with gamma < 1, or take fewer steps"


def verify(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[Keywords],
) -> Report:
    """Check whether the gradient of a given f is exact, and if not, why.

    Runs a forward and a backward pass, hashes every input and output of f, and compares both passes. It stores only 16
    bytes per evaluation. If an output differs, f is evaluated once more to count the differing elements. All steps are
    compared, regardless of `keep`.

    Args:
        f, z0, args, kwargs, options: As for `revdeq.solve`.

    Returns:
        A `revdeq.Report`: print it, or read its `exact`.

    Raises:
        ValueError: gradient is "implicit", which repeats no step.

    Example:
        >>> print(revdeq.verify(f, z0, x, beta=0.8))
        exact: the backward pass gave f the same 16 inputs as the forward pass, bit for bit, ...
    """
    checked = options_from(options)
    if checked.gradient != "exact":
        raise ValueError(f"gradient = {checked.gradient!r}: verify applies to gradient='exact' only; leave it out")
    recorder = _Recorder(checked_f(f))
    with torch.inference_mode(False), torch.enable_grad():
        initial = _requiring_grad(z0)
        settings: Keywords = {**options, "check": None, "keep": 0}
        solution = solve(recorder, initial, *args, kwargs=kwargs, **settings)
        recorder.turn_back(solution.nfe, f"beta = {solution.beta:.6g}, {solution.nfe // 2} steps")
        leaves = tree_leaves(solution.z)
        random = torch.Generator().manual_seed(0)  # e.g. the sum of a LayerNorm's output has no gradient
        seeds = [torch.randn(x.shape, generator=random).to(x) for x in leaves]
        grads = torch.autograd.grad(leaves, tree_leaves(initial), seeds, allow_unused=True)
    assert recorder.report is not None
    found = [g for g in grads if g is not None]
    recorder.report.growth = float(_norm(found) / _norm(seeds)) if found and leaves[0].numel() else 0.0
    return recorder.report


class _Recorder:
    """Wraps f, and records hashes of its inputs and outputs."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f = f
        with contextlib.suppress(TypeError, ValueError):  # some callables have no signature
            self.__signature__ = inspect.signature(f.forward if isinstance(f, nn.Module) else f)
        self.report: Report | None = None
        self._hashes: list[tuple[int, int]] = []

    def turn_back(self, evaluations: int, setting: str) -> None:
        self._hashes = self._hashes[-evaluations:]  # a solve may have restarted
        self.report = Report(evaluations, setting)

    def __call__(self, z: Any, *args: Any, **kwargs: Any) -> Any:
        given = bit_hash(z)
        before = tree_map(lambda x: x.detach().clone(), z) if self.report else None  # f may change z in place
        out = self.f(z, *args, **kwargs)
        if self.report is None:
            self._hashes.append((given, bit_hash(out)))
            return out
        evaluation = len(self._hashes)
        expected = self._hashes.pop()
        if given != expected[0]:
            self.report.changed_input.append(evaluation)
        elif bit_hash(out) != expected[1]:
            self.report.changed_output[evaluation] = self._count_changes(before, out, args, kwargs)
        return out

    def _count_changes(self, z: Any, out: Any, args: Any, kwargs: Any) -> int:
        with saved_tensors_hooks(lambda x: x, lambda x: x):  # the solver does not count these
            again = self.f(z, *args, **kwargs)
        return sum(int((a != b).sum()) for a, b in zip(tree_leaves(again), tree_leaves(out), strict=True))


_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


def bit_hash(tree: Any) -> int:
    """A 64-bit hash of all bits and their positions, independent of the order of summation."""
    total = 0
    for k, x in enumerate(tree_leaves(tree)):
        bits = x.detach().resolve_neg().contiguous().view(_INTEGERS[x.element_size()]).flatten().to(torch.int64)
        mixed = (bits + torch.arange(bits.numel(), device=bits.device) * 0x9E3779B97F4A7 + k) * 0x2545F4914F6CDD1D
        mixed = (mixed ^ (mixed >> 29)) * 0x369DEA0F31A53F85
        total ^= int((mixed ^ (mixed >> 32)).sum()) + k
    return total


def _norm(xs: list[Tensor]) -> Tensor:
    return torch.stack([x.float().norm() for x in xs]).norm()


def _requiring_grad(z0: Any) -> Any:
    def copied(x: Any) -> Any:
        return x.detach().clone().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x

    return tree_map(copied, z0)
