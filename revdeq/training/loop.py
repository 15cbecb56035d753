"""The training loop: data, model, optimizer, updates, checkpoints.

All random numbers of an update follow from the seed and the update's number. So a resumed run continues as if it had
not been interrupted: on a CPU, with the same number of threads, bit for bit.
"""

import collections
import dataclasses
import math
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .. import _device
from ..models import count_parameters
from . import checkpoint, data
from .data.dataset import Batch
from .evaluation import equilibria, evaluate, loss_of, predicted, statistics
from .presets import Preset, SettingError, Training
from .processes import Processes
from .record import COLUMNS, Record

WINDOW, PATIENCE, SMALLEST_LR = 200, 10, 1e-6
"""Constants of the schedule "plateau"."""


class Diverged(ArithmeticError):
    """The loss is NaN or infinite, or a solve overflowed. The message says what to try."""


def train(
    preset: Preset, folder: Path | None, out: Path, resume: bool = False, device: str | None = None, quiet: bool = False
) -> list[dict[str, Any]]:
    """Train a preset. Writes config.json, metrics.csv, metrics.png, last.pt and best.pt into a folder. Under torchrun,
    every process calls this function and trains on its share of each batch.

    Args:
        preset: The result of `configured`.
        folder: The folder with the files of the data set, or None if it needs no files.
        out: The folder of the run.
        resume: Whether to continue from last.pt in that folder, if it exists. Only epochs and updates may differ.
        device: Such as "cpu" or "cuda:1". None is a GPU, if there is one.
        quiet: Whether to print nothing.

    Returns:
        The rows of metrics.csv.

    Raises:
        CheckpointError: The folder already contains a run, or one with other settings.
        DataError: The data set cannot be found or read.
        SettingError: A setting does not fit the data or the machine.
        Diverged: The loss is NaN or infinite.

    Example:
        >>> preset = revdeq.training.configured("prefix-tiny", {"updates": 4, "channels": 4, "evaluation_batches": 1})
        >>> rows = revdeq.training.train(preset, None, Path("runs/few"), device="cpu", quiet=True)
        >>> rows[-1]["update"]
        4
    """
    processes = Processes(device)
    saved = checkpoint.to_resume(out / "last.pt", preset, resume)
    with processes.connected():  # leaves the process group at the end
        run = Run(preset, folder, out, processes)
        if saved is not None:
            run.load(saved)
        return run.go(quiet or not processes.is_first)


class Run:
    """A training in progress."""

    def __init__(self, preset: Preset, folder: Path | None, out: Path, processes: Processes) -> None:
        self.preset, self.folder, self.out, self.processes = preset, folder, out, processes
        self.training = training = preset.training
        self.dataset = data.load(preset.data, folder, preset.settings)
        self.dataset.to(processes.device)
        if training.batch % processes.size or training.batch > self.dataset.size:
            raise SettingError(
                f"batch={training.batch}: it must be a multiple of {processes.size}, the number of processes, and at "
                f"most {self.dataset.size:,}, the number of training examples"
            )
        self.epoch = self.dataset.size // training.batch  # in updates
        self.total = min(training.epochs * self.epoch, training.updates or sys.maxsize)

        torch.manual_seed(training.seed)
        self.model = preset.build(**self.dataset.shapes)
        self.parallel = processes.parallel(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
        # The paper's patience includes the window at which lr is halved, torch's does not.
        self.plateau = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=PATIENCE - 1)

        self.update, self.seconds, self.best = 0, 0.0, -math.inf
        self.rows: list[dict[str, Any]] = []
        self.recent: collections.deque[Tensor] = collections.deque(maxlen=max(WINDOW, training.log_every))
        self.order: tuple[int, Tensor] | None = None

    def go(self, quiet: bool) -> list[dict[str, Any]]:
        training, device, record = self.training, self.processes.device, None
        if self.processes.is_first:
            record = Record(self.out, self.preset, self.rows, self.total, self.dataset, quiet)
            paper = f" ({self.preset.quoted} in the paper)" if self.preset.quoted else ""
            record.say(f"{self.preset.name}: {count_parameters(self.model):,} parameters{paper}, on {device}")
            record.say(f"{self.dataset.size:,} training examples, updates {self.update:,} to {self.total:,}")
        clock, targets = time.perf_counter(), 0
        while self.update < self.total and not self.has_settled():
            try:
                targets += self.step()
            except (FloatingPointError, OverflowError) as error:  # from the solver, which notices first
                raise self.diverged(error) from error
            if training.schedule == "plateau" and self.update % WINDOW == 0:
                self.plateau.step(self.mean_of_recent(WINDOW)[0])
            is_end = self.update == self.total or self.has_settled()
            evaluates = is_end or self.update % (training.evaluate_every or self.epoch) == 0
            if evaluates or self.update % training.log_every == 0:
                means = self.mean_of_recent(training.log_every)  # waits for the device
                speed = targets / (time.perf_counter() - clock)
                score = self.score() if evaluates else (math.nan, math.nan)
                self.seconds += time.perf_counter() - clock
                clock, targets = time.perf_counter(), 0
                memory = (_device.allocated(device) or math.nan) / 2**20
                values = (self.update, self.update / self.epoch, self.lr, *means, *score, speed, memory, self.seconds)
                row = zip(COLUMNS, ("" if math.isnan(x) else x for x in values), strict=True)
                self.rows.append(dict(row))
                if record:
                    record.add(self.rows[-1])
            if record and (evaluates or self.update % training.save_every == 0):
                self.save(is_scored=evaluates)
        if record:
            record.close(self.rows)
        return self.rows

    def step(self) -> int:
        """An update of the parameters. Returns the number of targets."""
        training, processes = self.training, self.processes
        batch = self.batch()
        inputs, targets = processes.share(batch.inputs), processes.share(batch.targets)
        torch.manual_seed(number(training.seed, "noise", self.update, processes.rank))  # for dropout, too
        if steps := self.preset.range_of_steps:
            self.set_steps(random.Random(number(training.seed, "steps", self.update)).randint(*steps))
        if training.schedule == "cosine":
            self.optimizer.param_groups[0]["lr"] = rate(training, self.update, self.total)
        loss = loss_of(predicted(self.parallel.train(), inputs, training), targets)
        self.optimizer.zero_grad()
        loss.backward()
        if training.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), training.clip)
        self.optimizer.step()
        found = (torch.as_tensor(x, dtype=torch.float32, device=loss.device) for x in statistics(self.model))
        self.recent.append(processes.total(torch.stack([loss.detach(), *found]) / processes.size))
        self.update += 1
        return batch.targets.numel()

    def batch(self) -> Batch:
        epoch, i = divmod(self.update, self.epoch)
        if self.order is None or self.order[0] != epoch:
            self.order = epoch, self.dataset.order(generator(self.training.seed, "order", epoch))
        indices = self.order[1][i * self.training.batch : (i + 1) * self.training.batch]
        return self.dataset.batch(indices, generator(self.training.seed, "batch", self.update))

    def set_steps(self, steps: int) -> None:
        for layer in equilibria(self.model):
            layer.max_steps = steps

    def score(self) -> tuple[float, float]:
        self.processes.same_buffers(self.model)
        if steps := self.preset.range_of_steps:
            self.set_steps(steps[1])
        return evaluate(self.model, self.dataset, self.dataset.splits[0], self.training, self.processes)[:2]

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]

    def has_settled(self) -> bool:
        return self.training.schedule == "plateau" and self.lr < SMALLEST_LR

    def mean_of_recent(self, count: int) -> list[float]:
        """The loss and the statistics of the solves."""
        means: list[float] = torch.stack([*self.recent][-count:]).mean(0).tolist()
        if not math.isfinite(means[0]):
            raise self.diverged(f"the loss is {means[0]}")
        return means

    def diverged(self, what: object) -> Diverged:
        return Diverged(
            f"update {self.update:,}: {what}. The training diverged: try a smaller lr (it was {self.training.lr}), "
            "clip=1.0, a longer warmup, a smaller beta or fewer steps"
        )

    def save(self, is_scored: bool) -> None:
        weights = {
            "preset": dataclasses.asdict(self.preset),
            "update": self.update,
            "shapes": self.dataset.shapes,
            "folder": self.folder and str(self.folder.resolve()),
            "model": self.model.state_dict(),
        }
        sign = 1 if self.dataset.metric.higher_is_better else -1
        if is_scored and sign * self.rows[-1]["metric"] >= self.best:
            self.best = sign * self.rows[-1]["metric"]
            checkpoint.save(self.out / "best.pt", weights)
        state = {name: getattr(self, name) for name in ("rows", "best", "seconds")}
        state |= {name: getattr(self, name).state_dict() for name in ("optimizer", "plateau")}
        checkpoint.save(self.out / "last.pt", {**weights, **state, "recent": [*self.recent]})

    def load(self, saved: Mapping[str, Any]) -> None:
        for name in ("update", "rows", "best", "seconds"):
            setattr(self, name, saved[name])
        for name in ("model", "optimizer", "plateau"):
            getattr(self, name).load_state_dict(saved[name])
        self.recent.extend(x.to(self.processes.device) for x in saved["recent"])


def rate(training: Training, update: int, total: int) -> float:
    """The learning rate of an update, by the schedule "cosine"."""
    warmup = min(training.warmup, total - 1)
    if update < warmup:
        return training.lr * (update + 1) / (warmup + 1)
    return training.lr * (1 + math.cos(math.pi * (update - warmup) / (total - warmup))) / 2


def number(*names: int | str) -> int:
    """A seed that follows from these names."""
    return random.Random(repr(names)).getrandbits(63)


def generator(*names: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(number(*names))
