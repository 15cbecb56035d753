"""Loggers for the metrics of a training, in addition to metrics.csv."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


class TensorBoard:
    """A callback for `train` that writes the metrics for TensorBoard: `tensorboard --logdir runs` shows them.

    Args:
        out: The folder to write in, that of the run for example.

    Raises:
        ImportError: tensorboard is not installed.

    Example:
        >>> log = revdeq.training.TensorBoard("runs/prefix")
        >>> log({"update": 20, "loss": 0.5, "metric": ""})
    """

    def __init__(self, out: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard needs tensorboard: pip install tensorboard") from error
        self._make, self._out = SummaryWriter, str(out)
        self._writer: SummaryWriter | None = None

    def __call__(self, row: Mapping[str, Any]) -> None:
        if self._writer is None:  # what a run that went on from an earlier checkpoint wrote later is not shown
            self._writer = self._make(self._out, purge_step=row["update"])
        for name, value in row.items():
            if value != "" and name != "update":
                self._writer.add_scalar(name, value, row["update"])
        self._writer.flush()


LOGS = {"tensorboard": TensorBoard}
"""What `--log` names."""
