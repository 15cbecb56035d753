"""What training a preset would take on a GPU, without one: `python -m revdeq train PRESET --dry-run`.

Predicted, not measured. Nothing is computed: the model runs on the meta device, with one evaluation of f in place of
each equilibrium, while its operations and what they save for the backward pass are counted.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ..models import count_parameters
from ..models.equilibrium import Equilibrium
from . import data
from .evaluation import loss_of
from .presets import Preset, Training

OPTIMISER_BYTES = 16
"""Per parameter: itself, its gradient, and AdamW's two moments, in float32."""
STATE_BYTES = 28
"""Per element of z, beside f's own memory: see `revdeq.solve`."""
USED = 0.4
"""Of the published rate of multiplications; well-written training reaches about this."""
LAUNCH = 5e-6
"""Seconds that Python takes to launch a kernel. A GPU that computes faster than that waits."""


class Gpu(NamedTuple):
    """memory in GB, and published rates of dense multiplication in TFLOP/s, of float32 and of bfloat16."""

    name: str
    memory: int
    float32: float
    bfloat16: float


GPUS = (Gpu("RTX 4090", 24, 82.6, 165.2), Gpu("A100", 40, 19.5, 312.0), Gpu("H100", 80, 66.9, 989.4))


class Count(NamedTuple):
    """Of an update with some number of examples.

    operations: in the forward and the backward pass. activations: bytes that both passes share. states: bytes of the
    solver's own. launches: of kernels, at least, however many examples there are.
    """

    operations: float
    activations: int
    states: int
    launches: int


class Prediction(NamedTuple):
    parameters: int
    fixed: int
    one: Count

    def memory(self, batch: int) -> int:
        """In bytes; every example takes as much."""
        return self.fixed + batch * (self.one.activations + self.one.states)

    def largest_part(self, gpu: Gpu) -> int:
        """Examples that fit at a time."""
        return max(0, int((gpu.memory * 1e9 - self.fixed) // (self.one.activations + self.one.states)))

    def gpus(self, training: Training, gpu: Gpu) -> int | None:
        """That share a batch; None if even one example is too much for each of them."""
        largest = self.largest_part(gpu)
        return math.ceil(part_of(training) / largest) if largest else None

    def seconds(self, training: Training, gpu: Gpu) -> float:
        """Of an update by as many GPUs as it needs: what its operations take, or the launches of its kernels if that is
        more."""
        rate = gpu.float32 if training.autocast is None else gpu.bfloat16
        examples = training.batch / (self.gpus(training, gpu) or 1)
        computing = examples * self.one.operations / (USED * rate * 1e12)
        return max(computing, LAUNCH * self.launches(training))

    def launches(self, training: Training) -> int:
        """Of an update; a compiled f has fewer, nobody knows how many."""
        return 0 if training.compile else training.accumulate * self.one.launches


def part_of(training: Training) -> int:
    """Examples that are computed at a time."""
    return math.ceil(training.batch / training.accumulate)


def predicted(preset: Preset) -> Prediction:
    batch, shapes = data.example(preset.data, preset.settings)
    with torch.device("meta"):
        model = preset.build(**shapes)
    parameters = count_parameters(model)
    counted = _counted(model, batch.inputs.to("meta"), batch.targets.to("meta"))
    return Prediction(parameters, OPTIMISER_BYTES * parameters, counted)


def report(preset: Preset) -> str:
    """A table for people."""
    training, found = preset.training, predicted(preset)
    batch, part = training.batch, part_of(training)
    at_a_time = f", {part} at a time," if part < batch else ""
    gigabytes = found.memory(part) / 1e9
    quoted = f" ({preset.quoted} quoted)" if preset.quoted else ""
    precision = training.autocast or "float32 without TF32"
    operations = batch * found.one.operations / 1e12
    fixed, activations, states = (
        f"{n / 1e9:.3g}" for n in (found.fixed, part * found.one.activations, part * found.one.states)
    )
    lines = [
        f"{preset.name}: {found.parameters:,} parameters{quoted}. Predicted, not measured:",
        f"  an update of {batch} examples{at_a_time} takes {operations:.3g} TFLOP and {gigabytes:.3g} GB: {fixed} for "
        "parameters,",
        f"  gradients and AdamW, {activations} for what one evaluation of each f and the rest of the model save, and "
        f"{states} for the solver.",
        f"  {'GPU':18}{'at a time, at most':>20}{f'{part} examples':>16}{'per update':>14}   "
        f"({precision}, {USED:.0%} of the published rate)",
    ]
    for gpu in GPUS:
        largest, needed = found.largest_part(gpu), found.gpus(training, gpu)
        fits = "fit" if needed == 1 else f"need {needed:,} GPUs" if needed else "do not fit"
        time = f"{found.seconds(training, gpu):>12.3g} s" if needed else ""
        lines.append(f"  {f'{gpu.name}, {gpu.memory} GB':18} {largest:>19,} {fits:>15}{time}")
    if training.autocast is not None:
        lines.append("  Memory is that of float32, and less with autocast.")
    if launches := found.launches(training):
        lines.append(
            f"  The time is that of the operations, or {LAUNCH * 1e6:g} us for each of the {launches:,} kernels that "
            "are launched, if that is more."
        )
    return "\n".join(lines)


def _counted(model: nn.Module, inputs: Tensor, targets: Tensor) -> Count:
    saved: dict[int, Tensor] = {}
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    repeated = states = launches = 0

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = x  # kept alive, so that no other storage has its address
        return x

    def once(layer: Equilibrium, x: Tensor, z0: Tensor | None = None) -> Tensor:
        nonlocal repeated, states, launches
        z0 = torch.zeros_like(x)
        with FlopCounterMode(display=False) as counter, _Launches() as launched:
            z = layer.f(z0, x)
        # An evaluation in the forward pass is repeated in the backward pass, and its gradients take twice as much. One
        # of the 2 N is counted with the rest of the model, three times.
        repeated += (4 * 2 * layer.max_steps - 3) * counter.get_total_flops()
        # As many kernels forward, repeated, and backward, and a half-step each way.
        launches += (3 * 2 * layer.max_steps - 2) * launched.count + 2 * 2 * layer.max_steps
        states += STATE_BYTES * x.numel()
        return z

    with _replaced(once), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        with FlopCounterMode(display=False) as counter, _Launches() as launched:
            logits = model(inputs)
            loss_of(logits, targets)
    activations = sum(x.untyped_storage().nbytes() for x in saved.values())
    # The largest tensor beside them is the gradient of the logits.
    return Count(
        3 * counter.get_total_flops() + repeated,
        activations + 4 * logits.numel(),
        states,
        2 * launched.count + launches,
    )


class _Launches(TorchDispatchMode):
    """Counts operators, each of which launches a kernel at least, unless it only views or makes a tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aliases = [value.alias_info for value in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in aliases)
        self.count += not is_view and func._opname not in ("_unsafe_view", "empty")
        return func(*args, **(kwargs or {}))


@contextmanager
def _replaced(forward: Callable[..., Tensor]) -> Iterator[None]:
    before = Equilibrium.forward
    Equilibrium.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        Equilibrium.forward = before  # type: ignore[method-assign]
