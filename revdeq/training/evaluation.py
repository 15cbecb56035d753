"""The loss and the metric of a model."""

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import RevDEQ
from .data import DataSet
from .presets import Training
from .processes import Processes


class Score(NamedTuple):
    """The result of `evaluate`. All but the metric and the number of targets are means over targets."""

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
        processes: Each evaluates a share of the batches. None is this process alone.

    Returns:
        A `Score`: the loss, the metric (accuracy, perplexity, or the share of puzzles that are solved), the number of
        targets, the evaluations of f and the relative change of the last step; None for an explicit model.

    Example:
        >>> preset = revdeq.training.configured("prefix-tiny", {"channels": 4, "evaluation_batches": 1})
        >>> dataset = revdeq.training.data.load(preset.data, None, preset.settings)
        >>> model = preset.build(**dataset.shapes)
        >>> score = revdeq.training.evaluate(model, dataset, "test", preset.training)
        >>> score.targets  # 32 strings of 16 bits
        512
    """
    rank, size = (processes.rank, processes.size) if processes else (0, 1)
    sums = torch.zeros(6, dtype=torch.float64)
    model.eval()
    for batch in itertools.islice(dataset.evaluation(split, training.batch), rank, training.evaluation_batches, size):
        outputs = predicted(model, batch.inputs, training)
        count, examples = batch.targets.numel(), len(batch.targets)
        loss = loss_of(outputs, batch.targets, "sum").item() + batch.surcharge
        right = (outputs.argmax(-1) == batch.targets).reshape(examples, -1).all(1).sum().item()
        nfe, change, _ = statistics(model)
        sums += torch.tensor([loss, right, count, examples, nfe * count, change * count], dtype=torch.float64)
    sums = processes.total(sums) if processes else sums
    loss, right, count, examples, nfe, change = sums.tolist()
    metric = dataset.metric.of(loss / count, right / examples)
    solves = (None, None) if math.isnan(nfe) else (nfe / count, change / count)
    return Score(loss / count, metric, int(count), *solves)


def predicted(model: nn.Module, inputs: Tensor, training: Training) -> Tensor:
    with torch.autocast(inputs.device.type, torch.bfloat16, enabled=training.autocast is not None):
        return model(inputs)


def loss_of(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten(), reduction=reduction)


def equilibria(model: nn.Module) -> list[RevDEQ]:
    return [layer for layer in model.modules() if isinstance(layer, RevDEQ)]


def statistics(model: nn.Module) -> tuple[float, Any, float]:
    """Means over the last solves of all equilibria: the evaluations of f, the change, and the share that reached its
    tol. The change is a tensor, so that nothing waits for the device. Without solves, or without a tol: NaN."""
    lasts: list[Any] = [layer.last for layer in equilibria(model) if layer.last is not None]
    if not lasts:
        return math.nan, math.nan, math.nan
    reached = [float(torch.as_tensor(last.converged).float().mean()) for last in lasts if last.converged is not None]
    share = sum(reached) / len(reached) if reached else math.nan
    return sum(last.nfe for last in lasts) / len(lasts), sum(last.change.mean() for last in lasts) / len(lasts), share
