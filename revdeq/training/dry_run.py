"""Predicts the memory and time of training a preset on GPUs: `python -m revdeq train PRESET --dry-run`.

Predicted, not measured. Nothing is computed: the model runs on the meta device, with one evaluation of f in place of
each equilibrium, while its operations and saved tensors are counted.
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
"""Bytes per parameter: value, gradient, and AdamW's two moments, in float32."""
STATE_BYTES = 28
"""Bytes per element of z, in addition to f's memory: see `revdeq.solve`."""
USED = 0.4
"""Share of the peak rate that well-written training reaches."""
LAUNCH = 5e-6
"""Seconds that Python takes to launch a kernel: a lower limit for the time of a kernel."""


class Gpu(NamedTuple):
    """memory in GB, and peak rates of dense matrix multiplication in TFLOP/s, float32 and bfloat16."""

    name: str
    memory: int
    float32: float
    bfloat16: float


GPUS = (Gpu("RTX 4090", 24, 82.6, 165.2), Gpu("A100", 40, 19.5, 312.0), Gpu("H100", 80, 66.9, 989.4))


class Count(NamedTuple):
    """The cost of an update with some number of examples.

    operations: of both passes. activations: bytes of saved tensors. states: bytes of the solver. launches: the minimum
    number of kernels, independent of the number of examples.
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
        """In bytes, proportional to the number of examples."""
        return self.fixed + batch * (self.one.activations + self.one.states)

    def largest_part(self, gpu: Gpu) -> int:
        """The largest number of examples that fits into memory."""
        return max(0, int((gpu.memory * 1e9 - self.fixed) // (self.one.activations + self.one.states)))

    def gpus(self, training: Training, gpu: Gpu) -> int | None:
        """The number of GPUs that a batch needs; None if a single example does not fit."""
        largest = self.largest_part(gpu)
        return math.ceil(part_of(training) / largest) if largest else None

    def seconds(self, training: Training, gpu: Gpu) -> float:
        """Time of an update on as many GPUs as it needs: that of its operations, or of its kernel launches if that is
        longer."""
        rate = gpu.float32 if training.autocast is None else gpu.bfloat16
        examples = training.batch / (self.gpus(training, gpu) or 1)
        computing = examples * self.one.operations / (USED * rate * 1e12)
        return max(computing, LAUNCH * self.launches(training))

    def launches(self, training: Training) -> int:
        """Kernel launches of an update; unknown for a compiled f, which has fewer."""
        return 0 if training.compile else training.accumulate * self.one.launches


def part_of(training: Training) -> int:
    """Examples per accumulated part."""
    return math.ceil(training.batch / training.accumulate)


def predicted(preset: Preset) -> Prediction:
    batch, shapes = data.example(preset.data, preset.settings)
    with torch.device("meta"):
        model = preset.build(**shapes)
    parameters = count_parameters(model)
    counted = _counted(model, batch.inputs.to("meta"), batch.targets.to("meta"))
    return Prediction(parameters, OPTIMISER_BYTES * parameters, counted)


def report(preset: Preset) -> str:
    """The prediction as a printable table."""
    training, found = preset.training, predicted(preset)
    batch, part = training.batch, part_of(training)
    at_a_time = f", {part} at a time," if part < batch else ""
    gigabytes = found.memory(part) / 1e9
    quoted = f" ({preset.quoted} in the paper)" if preset.quoted else ""
    precision = training.autocast or "float32 without TF32"
    operations = batch * found.one.operations / 1e12
    fixed, activations, states = (
        f"{n / 1e9:.3g}" for n in (found.fixed, part * found.one.activations, part * found.one.states)
    )
    lines = [
        f"{preset.name}: {found.parameters:,} parameters{quoted}. Predicted, not measured:",
        f"  an update of {batch} examples{at_a_time} takes {operations:.3g} TFLOP and {gigabytes:.3g} GB: {fixed} for "
        "parameters,",
        f"  gradients and AdamW, {activations} for the saved tensors of one evaluation of each f and of the rest of "
        f"the model, and {states} for the solver.",
        f"  {'GPU':18}{'largest batch':>20}{f'{part} examples':>16}{'per update':>14}   "
        f"({precision}, {USED:.0%} of the peak rate)",
    ]
    for gpu in GPUS:
        largest, needed = found.largest_part(gpu), found.gpus(training, gpu)
        fits = "fit" if needed == 1 else f"need {needed:,} GPUs" if needed else "do not fit"
        time = f"{found.seconds(training, gpu):>12.3g} s" if needed else ""
        lines.append(f"  {f'{gpu.name}, {gpu.memory} GB':18} {largest:>19,} {fits:>15}{time}")
    if training.autocast is not None:
        lines.append("  Memory is predicted for float32; autocast needs less.")
    if launches := found.launches(training):
        lines.append(
            f"  The time is that of the operations, or {LAUNCH * 1e6:g} us for each of the {launches:,} kernel "
            "launches if that is longer."
        )
    return "\n".join(lines)


def _counted(model: nn.Module, inputs: Tensor, targets: Tensor) -> Count:
    saved: dict[int, Tensor] = {}
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    repeated = states = launches = 0

    def keep(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in parameters:
            saved[storage._cdata] = x  # kept alive, so that its address is not reused
        return x

    def once(layer: Equilibrium, x: Tensor, z0: Tensor | None = None) -> Tensor:
        nonlocal repeated, states, launches
        z0 = torch.zeros_like(x)
        with FlopCounterMode(display=False) as counter, _Launches() as launched:
            z = layer.f(z0, x)
        # Per evaluation: one in the forward pass, one more in the backward pass, and a backward that costs two. One of
        # the 2 N is counted with the rest of the model, three times.
        repeated += (4 * 2 * layer.max_steps - 3) * counter.get_total_flops()
        # Kernels of f forward, again, and backward, and a half-step in each pass.
        launches += (3 * 2 * layer.max_steps - 2) * launched.count + 2 * 2 * layer.max_steps
        states += STATE_BYTES * x.numel()
        return z

    with _replaced(once), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        with FlopCounterMode(display=False) as counter, _Launches() as launched:
            logits = model(inputs)
            loss_of(logits, targets)
    activations = sum(x.untyped_storage().nbytes() for x in saved.values())
    # The largest other tensor is the gradient of the logits.
    return Count(
        3 * counter.get_total_flops() + repeated,
        activations + 4 * logits.numel(),
        states,
        2 * launched.count + launches,
    )


class _Launches(TorchDispatchMode):
    """Counts operators, except views and factories: each launches at least one kernel."""

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
