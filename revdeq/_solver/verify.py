"""revdeq.verify: is the gradient of a given f exact, and if not, why?"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Unpack

from .check import ATOMICS
from .options import Keywords, options_from
from .solve import checked_f, solve


@dataclass
class Report:
    """The result of `revdeq.verify`. Print it for an explanation. Evaluations of f are counted from 1, in the order of
    the forward pass.

    Attributes:
        evaluations: The number of evaluations in each pass.
        setting: beta and the number of steps, as text.
        changed_input: The evaluations whose input was not reconstructed bit for bit.
        changed_output: The evaluations whose output differed for the same input.

    Example:
        >>> report = revdeq.verify(f, z0, x)
        >>> report.exact, report.evaluations
        (True, 16)
    """

    evaluations: int
    setting: str
    changed_input: list[int] = field(default_factory=list)
    changed_output: list[int] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether both passes computed the same bits, so that the gradient is that of the stored graph."""
        return not self.changed_input and not self.changed_output

    def __str__(self) -> str:
        if self.exact:
            return (
                f"exact: the backward pass gave f the same {self.evaluations} inputs as the forward pass, bit for bit, "
                f"and f returned the same outputs ({self.setting})"
            )
        # In the order of the backward pass, the first difference is the cause of the others.
        first_output, first_input = max(self.changed_output, default=0), max(self.changed_input, default=0)
        if first_output >= first_input:
            text = (
                f"your f is not deterministic: evaluation {first_output} differs when it is repeated with the same "
                "input (state inside f? its own generator? BatchNorm? cuDNN's autotuning, changed torch settings?). "
                f"{ATOMICS}"
            )
        else:
            text = (
                f"rounding: the float64 state did not reconstruct the input of evaluation {first_input} "
                f'({self.setting}); use state="exact"'
            )
        return f"{text}. {len(self.changed_input)} of {self.evaluations} inputs were not reconstructed bit for bit"


def verify(
    f: Callable[..., Any],
    z0: Any,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    **options: Unpack[Keywords],
) -> Report:
    """Check whether the gradient of a given f is exact, and if not, why.

    Runs a forward and a backward pass, hashes every input and output of f, and compares both passes. All steps are
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
    recorded = Recorded(checked_f(f))
    settings: Keywords = {**options, "check": None, "keep": 0}
    with torch.inference_mode(False), torch.enable_grad():
        initial = tree_map(lambda x: x.detach().clone().requires_grad_(), z0)
        solution = solve(recorded, initial, *args, kwargs=kwargs, **settings)
        recorded.report = Report(solution.nfe, f"beta = {solution.beta:.6g}, {solution.nfe // 2} steps")
        leaves = tree_leaves(solution.z)
        torch.autograd.grad(leaves, tree_leaves(initial), [torch.ones_like(x) for x in leaves], allow_unused=True)
    return recorded.report


class Recorded:
    """f, with hashes of its inputs and outputs in the forward pass, and then a report of those that differ."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self.f, self.report, self._hashes = f, None, list[tuple[int, int]]()

    report: Report | None

    def __call__(self, z: Any, *args: Any, **kwargs: Any) -> Any:
        given = bit_hash(z)
        out = self.f(z, *args, **kwargs)
        if self.report is None:
            self._hashes.append((given, bit_hash(out)))
            return out
        evaluation, expected = len(self._hashes), self._hashes.pop()
        if given != expected[0]:
            self.report.changed_input.append(evaluation)
        elif bit_hash(out) != expected[1]:
            self.report.changed_output.append(evaluation)
        return out


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
