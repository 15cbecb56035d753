"""What a run writes and shows: config.json, metrics.csv, metrics.png, and a progress bar."""

import csv
import dataclasses
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .._atomic import replacing
from .data import DataSet
from .presets import Preset

COLUMNS = (
    "update",
    "epoch",
    "lr",
    "loss",  # the mean over the last log_every updates, as the next three
    "evaluations",  # of f
    "change",  # relative, of the last step
    "converged",  # the share of solves that reached their tol
    "evaluation_loss",
    "metric",
    "per_second",  # targets per second, evaluations excluded
    "peak_memory_mib",  # of a GPU
    "seconds",
)
Rows = Sequence[Mapping[str, Any]]


class Record:
    """The files of a run, and its progress; without a terminal, a line for every evaluation."""

    def __init__(self, out: Path, preset: Preset, rows: Rows, total: int, dataset: DataSet, quiet: bool) -> None:
        self.out, self.total, self.quiet = out, total, quiet
        self.unit, self.metric = dataset.unit, dataset.metric.name
        self.terminal = sys.stderr.isatty() and not quiet
        out.mkdir(parents=True, exist_ok=True)
        self._write("config.json", json.dumps(dataclasses.asdict(preset), indent=2) + "\n")
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        self._write("metrics.csv", text.getvalue())
        done = rows[-1]["update"] if rows else 0
        self.bar = tqdm(total=total, initial=done, unit=" updates", dynamic_ncols=True, disable=not self.terminal)

    def _write(self, name: str, text: str) -> None:
        with replacing(self.out / name) as file:
            file.write(text.encode("utf-8"))

    def say(self, text: str) -> None:
        if not self.quiet:
            self.bar.write(text) if self.terminal else print(text, flush=True)

    def add(self, row: Mapping[str, Any]) -> None:
        with open(self.out / "metrics.csv", "a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(row)
        parts = [f"loss {row['loss']:.4f}", f"{row['per_second']:,.0f} {self.unit}/s"]
        if row["evaluations"] != "":
            parts.append(f"{row['evaluations']:g} evaluations, change {row['change']:.1e}")
        self.bar.set_postfix_str(", ".join(parts), refresh=False)
        self.bar.update(row["update"] - self.bar.n)
        if row["metric"] != "":
            parts.insert(0, f"update {row['update']:,} of {self.total:,}: {self.metric} {row['metric']:.4g}")
            self.say(", ".join(parts))

    def close(self, rows: Rows) -> None:
        self.bar.close()
        if rows:
            plot(self.out / "metrics.png", rows, self.metric)


def plot(path: Path, rows: Rows, metric: str) -> None:
    from matplotlib.figure import Figure  # half a second, at the end of a run

    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, metrics = figure.subplots(1, 2)
    evaluated = [row for row in rows if row["metric"] != ""]
    updates = [row["update"] for row in evaluated]
    losses.plot([row["update"] for row in rows], [row["loss"] for row in rows], label="training")
    losses.plot(updates, [row["evaluation_loss"] for row in evaluated], "o-", label="evaluation")
    losses.set(xlabel="updates", ylabel="loss")
    losses.legend()
    metrics.plot(updates, [row["metric"] for row in evaluated], "o-")
    metrics.set(xlabel="updates", ylabel=metric)
    for axes in (losses, metrics):
        axes.grid(alpha=0.3)
    with replacing(path) as file:
        figure.savefig(file, dpi=120, format="png")
