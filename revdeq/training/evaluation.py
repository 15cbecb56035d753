"""The loss and the metric of a model."""

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.equilibrium import last_of
from .data import DataError, DataSet
from .presets import Training
from .processes import Processes

SETTINGS = ("batch", "autocast", "evaluation_batches")
"""The fields of `Training` that `evaluate` uses."""


class Score(NamedTuple):
    """The result of `evaluate`.

    Attributes:
        loss: The mean loss per target.
        metric: The accuracy, the perplexity, or the data set's own metric. With several classes per example, "solved":
            the share of examples whose classes are all right.
        targets: The number of targets.
        evaluations: The mean number of evaluations of f per example; None for an explicit model.
        change: The mean of `Solution.change`; None for an explicit model.

    Example:
        >>> revdeq.training.Score(loss=0.5, metric=0.8, targets=100, evaluations=8.0, change=1e-3).metric
        0.8
    """

    loss: float
    metric: float
    targets: int
    evaluations: float | None
    change: float | None


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: DataSet, split: str, training: Training, processes: Processes | None = None
) -> Score:
    """The loss and the metric of a model on a split.

    Args:
        model: The model; it is switched to evaluation mode.
        dataset: The data.
        split: One of `dataset.splits`.
        training: Its batch, autocast and evaluation_batches are used.
        processes: Each evaluates a share of the batches. None is those of torchrun, or this process alone.

    Returns:
        A `Score`.

    Example:
        >>> preset = revdeq.training.configured("prefix-tiny", {"channels": 4, "evaluation_batches": 1})
        >>> dataset = revdeq.training.data.load(preset.data, None, preset.settings)
        >>> model = preset.build(**dataset.shapes)
        >>> score = revdeq.training.evaluate(model, dataset, "test", preset.training)
        >>> score.targets  # 32 strings of 16 bits
        512
    """
    processes = processes or Processes()
    model.eval()
    sums = torch.zeros(6, dtype=torch.float64)
    batches = dataset.evaluation(split, training.batch)
    for batch in itertools.islice(batches, processes.rank, training.evaluation_batches, processes.size):
        outputs = None
        try:
            with torch.autocast(processes.device.type, **autocast(training.autocast)):
                outputs = model(batch.inputs)
            loss = loss_of(outputs, batch.targets, "sum").item() + batch.surcharge
        except (ArithmeticError, IndexError, RuntimeError) as error:
            doubt = not_finite(batch.inputs, batch.targets)
            if not doubt and outputs is not None:
                doubt = out_of_range(outputs, batch.targets)
            if not doubt:
                raise
            raise DataError(f"{split} has bad data: {doubt} ({type(error).__name__}: {error})") from error
        count, examples = batch.targets.numel(), len(batch.targets)
        found = outputs if batch.targets.is_floating_point() else outputs.argmax(-1)
        right = (found == batch.targets).reshape(examples, -1).all(1).sum().item()
        last = last_of(model)
        nfe, change = (last.nfe, float(last.change)) if last is not None else (math.nan, math.nan)
        sums += torch.tensor([loss, right, count, examples, nfe * count, change * count], dtype=torch.float64)
    loss, right, count, examples, nfe, change = processes.total(sums).tolist()
    metric = dataset.metric.of(loss / count, right / examples)
    explicit = math.isnan(nfe)
    return Score(
        loss / count, metric, int(count), None if explicit else nfe / count, None if explicit else change / count
    )


def loss_of(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    """Cross-entropy if the targets are classes, otherwise the squared error."""
    if targets.is_floating_point():
        return F.mse_loss(outputs.float(), targets.float(), reduction=reduction)
    return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten().long(), reduction=reduction)


def not_finite(inputs: Tensor, targets: Tensor) -> str:
    """NaN or infinity in a batch. Checked only after an error, because some models accept them."""
    for name, part in (("inputs", inputs), ("targets", targets)):
        if not bool(part.isfinite().all()):
            return f"{name} in this batch contain NaN or infinity: clean the data, for example with {name}.isfinite()"
    return ""


def out_of_range(outputs: Tensor, targets: Tensor) -> str:
    if targets.is_floating_point() or 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[-1]:
        return ""
    classes, low, high = outputs.shape[-1], int(targets.min()), int(targets.max())
    range_of = f"targets range from {low} to {high}: they must be 0 to {classes - 1}, without an ignore_index"
    return f"the model has {classes} classes, and {range_of}"


def autocast(dtype: str | None) -> dict[str, Any]:
    """Arguments of torch.autocast."""
    return {"enabled": dtype is not None, "dtype": getattr(torch, dtype) if dtype else None}
