"""The output of a run: config.json, metrics.csv, metrics.png, and a progress bar."""

import csv
import io
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._atomic import replacing
from .checkpoint import CheckpointError, cannot_write

COLUMNS = (
    "update",
    "epoch",
    "lr",
    "loss",  # mean training loss of the last log_every updates
    "evaluation_loss",
    "metric",
    "evaluations",  # of f, per example
    "change",  # relative, of the last step
    "per_second",  # images or tokens per second, evaluations excluded
    "peak_memory_mib",
    "seconds",
)
QUIET_SECONDS = 10.0
"""Seconds between lines, without a terminal."""


def make_folder(out: Path) -> None:
    """Create the run's folder, and remove half-written files of a crash."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for part in out.glob("*.part"):
            part.unlink()
    except OSError as error:
        raise CheckpointError(f"--out {out} cannot be created: {error.strerror or error}") from error


def write_config(out: Path, config: Mapping[str, Any]) -> None:
    _write(out / "config.json", json.dumps(config, indent=2) + "\n")


def read_config(out: Path) -> dict[str, Any] | None:
    """The contents of config.json, or None."""
    path = out / "config.json"
    if not path.is_file():
        return None
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not {"name", "model", "training", "folder"} <= config.keys():
            raise ValueError("it does not belong to a run")
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be read: {error}; pass the preset and its settings again") from error
    return config


def write_metrics(out: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    _write(out / "metrics.csv", text.getvalue())


def append_metrics(out: Path, row: Mapping[str, Any]) -> None:
    path = out / "metrics.csv"
    try:
        with open(path, "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
    except OSError as error:
        raise CheckpointError(cannot_write(path, error)) from error


def _write(path: Path, text: str) -> None:
    try:
        with replacing(path) as file:
            file.write(text.encode("utf-8"))
    except OSError as error:
        raise CheckpointError(cannot_write(path, error)) from error


def plot(out: Path, rows: Sequence[Mapping[str, Any]], metric: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    losses, metrics = figure.subplots(1, 2)
    evaluated = [row for row in rows if row["metric"] != ""]
    losses.plot([row["update"] for row in rows], [row["loss"] for row in rows], label="training")
    losses.plot([r["update"] for r in evaluated], [r["evaluation_loss"] for r in evaluated], "o-", label="evaluation")
    losses.set(xlabel="updates", ylabel="loss")
    losses.legend()
    metrics.plot([row["update"] for row in evaluated], [row["metric"] for row in evaluated], "o-")
    metrics.set(xlabel="updates", ylabel=metric)
    for axes in (losses, metrics):
        axes.grid(alpha=0.3)
    image = io.BytesIO()
    figure.savefig(image, dpi=120, format="png")
    path = out / "metrics.png"
    try:
        with replacing(path) as file:
            file.write(image.getvalue())
    except OSError as error:
        raise CheckpointError(cannot_write(path, error)) from error


class Progress:
    """A progress bar; without a terminal, lines."""

    def __init__(self, total: int, done: int, unit: str, metric: str, quiet: bool = False) -> None:
        from tqdm import tqdm

        self.total, self.unit, self.metric, self.quiet = total, unit, metric, quiet
        self.terminal = sys.stderr.isatty() and not quiet
        self.bar = tqdm(total=total, initial=done, unit="update", dynamic_ncols=True, disable=not self.terminal)
        self.said = self.began = time.monotonic()
        self.done = self.before = done
        self.evaluated = ""

    def advance(self) -> None:
        self.done += 1
        self.bar.update()

    def show(self, row: Mapping[str, Any]) -> None:
        if row["metric"] != "":
            self.evaluated = f"{self.metric} {row['metric']:.4g}"
        parts = [f"loss {row['loss']:.4f}", self.evaluated]
        if row["evaluations"] != "":
            parts.append(f"{row['evaluations']:g} evaluations, change {row['change']:.1e}")
        parts += [f"{row['per_second']:,.0f} {self.unit}/s", f"{row['peak_memory_mib']:,.0f} MiB"]
        text = ", ".join(part for part in parts if part)
        if self.terminal:
            self.bar.set_postfix_str(text)
        elif not self.quiet and (row["metric"] != "" or time.monotonic() - self.said > QUIET_SECONDS):
            print(f"update {row['update']:,} of {self.total:,}: {text}{self._left()}", flush=True)
            self.said = time.monotonic()

    def _left(self) -> str:
        """Estimated remaining time, evaluations included."""
        if self.done in (self.before, self.total):
            return ""
        pace = (time.monotonic() - self.began) / (self.done - self.before)
        minutes, seconds = divmod(math.ceil(pace * (self.total - self.done)), 60)
        hours, minutes = divmod(minutes, 60)
        return f", {hours} h {minutes} min left" if hours else f", {minutes} min {seconds} s left"

    def say(self, text: str) -> None:
        if self.terminal:
            self.bar.write(text)
        elif not self.quiet:
            print(text, flush=True)

    def close(self) -> None:
        self.bar.close()
