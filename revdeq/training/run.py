"""Training of a preset (`python -m revdeq train`) or of a user's model (`revdeq.train`).

The batch of an update depends only on the seed and the update's number. So a resumed run continues as if it had not
been interrupted; on the CPU, with the same number of threads, bit for bit.
"""

import dataclasses
import math
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from .. import _device
from .._solver.layer import RevDEQ, tune_layers
from ..models import count_parameters
from ..models.blocks import name_of
from ..models.equilibrium import OPTIONS, last_of
from ..models.model import coefficients
from . import checkpoint, record
from . import data as datasets
from .checkpoint import CheckpointError
from .data import DataError, DataSet
from .data.dataset import PERPLEXITY, Batch
from .evaluation import autocast, evaluate, loss_of, not_finite
from .presets import Preset, SettingError, Training, configured, nearest
from .processes import Processes
from .restore import described
from .schedule import scheduled
from .trial import check_parameters, no_model, try_out

PLATEAU_WINDOW = 200
SMALLEST_LR = 1e-6
LENGTH = ("epochs", "updates")
"""Settings that may change when a run is resumed."""


class Diverged(ArithmeticError):
    """The training diverged: the loss is NaN or infinite, or a solve overflowed. The message says what to try."""


class Stopped(Exception):
    """A signal stopped the training, after a checkpoint was saved. `number` is the signal's number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


Callback = Callable[[dict[str, Any]], object]


def train(
    model: nn.Module | Preset | str,
    data: Any,
    out: str | Path,
    resume: bool = False,
    device: str | None = None,
    quiet: bool = False,
    callback: Callback | None = None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Train a model of your own, or a preset. Writes config.json, metrics.csv, metrics.png, last.pt and best.pt into a
    folder.

    A model of your own is trained in place. Afterwards it is in evaluation mode, with the weights of the last update.
    If the targets are integers, the model returns logits with the classes in the last dimension, and the loss is
    cross-entropy; otherwise it returns a tensor with the shape of the targets, and the loss is the mean squared error.
    Under torchrun, every process calls this function and trains on its share of each batch.

    Args:
        model: A module, the name of a preset, or the result of `configured`.
        data: For a module: a pair of tensors, inputs and targets; a `torch.utils.data.Dataset` of such pairs; or any
            `revdeq.training.data.DataSet`, such as `Examples`. For a preset: the folder with the files of its data
            set, or None if it needs no files.
        out: The folder of the run.
        resume: Whether to continue from `last.pt` in that folder, if it exists, with the settings of the run. Only
            `epochs` and `updates` may change.
        device: Such as "cpu" or "cuda:1". None is a GPU, if there is one.
        quiet: Whether to print nothing.
        callback: A function that is called with every row of metrics.csv, a dict; for example `TensorBoard(out)`.
        settings: The fields of `Training`, by name; for a preset, any of its settings.

    Returns:
        The rows of metrics.csv.

    Raises:
        CheckpointError: The folder already contains a run, or a file cannot be written or read.
        DataError: The data set cannot be found or read.
        SettingError: The settings contradict each other, or the model does not fit the data.
        Diverged: The loss is NaN or infinite.
        Stopped: A signal stopped the training.
        TypeError: model or callback has the wrong type.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 8), revdeq.RevDEQ(Block(8)), nn.Linear(8, 2))
        >>> points = torch.randn(200, 2)
        >>> inside = (points.norm(dim=1) < 1).long()
        >>> rows = revdeq.train(model, (points, inside), "runs/circle", device="cpu", quiet=True, epochs=2)
        >>> rows[-1]["update"]
        4
    """
    if callback is not None and not callable(callback):
        raise TypeError(f"callback = {callback!r} must be a function of a row of metrics.csv, a dict")
    processes = Processes(device)
    with processes.connected():  # leaves the process group at the end
        before = record.read_config(Path(out)) if resume else None
        if isinstance(model, nn.Module):
            name = type(model).__name__
            if before is not None and before["name"] == name:
                settings = {**before["training"], **settings}
            preset = Preset(name, "", name, {}, _training(settings))
            return _train(model, preset, data, None, Path(out), resume, processes, quiet, callback)
        if not isinstance(model, (str, Preset)):
            raise TypeError(no_model(model))
        if data is not None and not isinstance(data, (str, os.PathLike)):
            raise DataError(
                f"data is of type {type(data).__name__}: for a preset, pass the folder with the files of its data set; "
                "to train on your own data, pass a module as model"
            )
        if before is not None and before["name"] == model:
            preset = described(Path(out), Preset.from_dict(before), settings)
        else:
            preset = configured(model, settings) if isinstance(model, str) else model.changed(settings)
        folder = None if data is None else Path(data)
        return _train(None, preset, None, folder, Path(out), resume, processes, quiet, callback)


def _training(settings: Mapping[str, Any]) -> Training:
    known = [field.name for field in dataclasses.fields(Training)]
    for name, value in settings.items():
        if name in OPTIONS and isinstance(value, (tuple, list)):
            raise SettingError(f"{name}={value!r}: a range is for presets only; set layer.{name} in your model")
        if name in OPTIONS:
            raise SettingError(
                f"{name}={value!r} is an option of the layers in your model, not of the training: set it there, "
                f"RevDEQ(f, {name}={value!r})"
            )
        if name not in known:
            raise SettingError(f"there is no setting {name!r}{nearest(name, known)}: there are {', '.join(known)}")
    return Training(**settings)


def _train(
    model: nn.Module | None,
    preset: Preset,
    examples: Any,
    folder: Path | None,
    out: Path,
    resume: bool,
    processes: Processes,
    quiet: bool,
    callback: Callback | None,
) -> list[dict[str, Any]]:
    last = out / "last.pt"
    saved = _saved(last, preset, resume)
    with processes.first_alone():
        dataset = datasets.load(preset.data, folder, preset.settings) if model is None else datasets.of(examples)
    quiet = quiet or not processes.first
    run = Run(preset, dataset.to(processes.device), processes, folder, out, quiet, model, callback)
    if processes.first:
        record.make_folder(out)
    if saved is not None:
        run.load(saved, last)
    return run.go(resume)


def _saved(last: Path, preset: Preset, resume: bool) -> dict[str, Any] | None:
    if not last.exists():
        if resume and (best := last.with_name("best.pt")).exists():
            raise CheckpointError(
                f"{best} belongs to a run whose last.pt is missing, so that it cannot be resumed: choose another "
                "folder (--out)"
            )
        return None
    if not resume:
        raise CheckpointError(
            f"{last} already exists: continue it with resume=True (--resume), or choose another folder (--out)"
        )
    saved = checkpoint.load(last)
    if "optimizer" not in saved:
        raise CheckpointError(
            f"{last} contains only weights, like best.pt, and cannot be resumed: choose another folder (--out)"
        )
    before, now = Preset.from_dict(saved["preset"]).flat(), preset.flat()
    if keys := [key for key in {**before, **now} if before.get(key) != now.get(key) and key not in LENGTH]:
        changes = ", ".join(f"{key}={before.get(key)} (asked for: {now.get(key)})" for key in keys)
        raise CheckpointError(
            f"{last} is from a run with other settings, {changes}: use the same settings, or choose another folder "
            "(--out)"
        )
    return saved


class Run:
    """A training in progress: the state that a checkpoint saves, and the update."""

    def __init__(
        self,
        preset: Preset,
        dataset: DataSet,
        processes: Processes,
        folder: Path | None,
        out: Path,
        quiet: bool,
        model: nn.Module | None = None,
        callback: Callback | None = None,
    ) -> None:
        self.callback = callback
        self.preset, self.training, self.dataset, self.processes = preset, preset.training, dataset, processes
        self.folder, self.out, self.quiet = None if folder is None else str(folder.resolve()), out, quiet
        training = self.training
        if training.batch % processes.size:
            raise SettingError(f"batch={training.batch}: it must be a multiple of the {processes.size} processes")
        if training.batch // processes.size % training.accumulate:
            raise SettingError(
                f"accumulate={training.accumulate}: it must divide the {training.batch // processes.size} examples of "
                f"a process"
            )
        if training.batch > dataset.size:
            raise SettingError(
                f"batch={training.batch} is larger than the training data, {dataset.size} examples: set a smaller batch"
            )
        self.batches = dataset.size // training.batch
        self.total = min(training.epochs * self.batches, training.updates or sys.maxsize)

        torch.manual_seed(training.seed)
        of_others = model is not None or preset.settings.get("block") is not None
        model = model if model is not None else preset.build(**dataset.shapes)
        if processes.size > 1 and processes.device.type != "cpu":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if of_others:
            check_parameters(model)
        self.model = model.to(processes.device)
        self.order: tuple[int, Tensor] | None = None
        if of_others:
            block = preset.settings.get("block")
            what = f"model={type(model).__name__}" if block is None else f"block={name_of(block)}"
            text = dataset.metric is PERPLEXITY
            try_out(self.model, what, self._batch_of(0), training.autocast, processes.device, text)
        if training.tune_every is not None and not any(isinstance(m, RevDEQ) for m in self.model.modules()):
            raise SettingError(f"tune_every={training.tune_every}: the model has no equilibrium to tune; leave it out")
        if training.tune == "schedule" and preset.range_of_steps is not None:
            raise SettingError(
                f"tune='schedule': a schedule needs a fixed number of steps, and max_steps={preset.range_of_steps} is "
                f"a range: "
                "use tune='pair'"
            )
        self.parameters = count_parameters(self.model)
        if training.compile:
            _compile_f(self.model)
        self.parallel = processes.wrapped(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
        self.schedule = scheduled(self.optimizer, training.schedule, training.warmup, self.total)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=training.autocast == "float16")

        self.update, self.seconds = 0, 0.0
        self.losses: list[Tensor] = []  # since the last row, and the log_every before it
        self.fresh = 0  # how many of them came after the last row
        self.window: list[float] = []  # since the last check for a plateau
        self.rows: list[dict[str, Any]] = []
        self.best: float | None = None
        self.signal = 0
        self.progress: record.Progress | None = None
        # Dropout differs between processes.
        seeds = [_seed(training.seed, "draws", processes.rank, n) for n in range(3)]
        torch.manual_seed(seeds[0])
        random.seed(seeds[1])
        np.random.seed(seeds[2] % 2**32)

    def go(self, resume: bool) -> list[dict[str, Any]]:
        dataset = self.dataset
        config = {**self.preset.to_dict(), "parameters": self.parameters, "folder": self.folder}
        self.progress = record.Progress(self.total, self.update, dataset.unit, dataset.metric.name, self.quiet)
        progress = self.progress
        if self.processes.first:
            if self.update < self.total:  # a run that is already longer is left as it is
                record.write_config(self.out, config)
            record.write_metrics(self.out, self.rows)
            progress.say(dataset.describe())
            quoted = f" ({self.preset.quoted} in the paper)" if self.preset.quoted else ""
            progress.say(
                f"{self.preset.name}: {self.parameters:,} parameters{quoted}, {self.total:,} updates, in {self.out}"
            )
            if resume:
                progress.say(self._where_it_goes_on())
        start = time.perf_counter() - self.seconds
        since, done = time.perf_counter(), self.update  # of the updates since the last row
        try:
            with _signals(self):
                while self.update < self.total and not self._settled():
                    try:
                        self.losses.append(self._step())
                    except (FloatingPointError, OverflowError) as error:  # from the solver, which notices first
                        raise self._diverged(self.update + 1, str(error)) from error
                    self.update, self.fresh = self.update + 1, self.fresh + 1
                    progress.advance()
                    due = self._due()
                    save = due == "evaluate" or self.update % self.training.save_every == 0
                    losses = self._losses() if due or save else []  # synchronizes with the device
                    paused = time.perf_counter()  # the speed excludes evaluation and saving
                    if due:
                        row = self._row(losses, scored=due == "evaluate")
                        row["per_second"] = (self.update - done) * self._examples() / (paused - since)
                        self.seconds = row["seconds"] = time.perf_counter() - start
                        self._keep(row, progress)
                        since, done = paused, self.update
                    stop = self.processes.largest(self.signal)
                    if save or stop:
                        self.seconds = time.perf_counter() - start
                        self._save()
                    since += time.perf_counter() - paused
                    if stop:
                        name = signal.Signals(stop).name
                        raise Stopped(
                            f"{name}: saved at update {self.update:,}, continue with resume=True (--resume)", stop
                        )
        finally:
            progress.close()
        if self.processes.first and self.rows:
            record.plot(self.out, self.rows, dataset.metric.name)
        self.model.eval()  # also if there was nothing left to do
        return self.rows

    def _where_it_goes_on(self) -> str:
        if not self.update:
            return "no checkpoint yet: starting from the beginning"
        if self._settled():
            return f"finished at update {self.update:,}: lr fell below {SMALLEST_LR}, which ends this schedule"
        if self.update < self.total:
            return f"continuing at update {self.update:,}"
        fewer = f", more than the requested {self.total:,}" if self.update > self.total else ""
        limit = "epochs" if self.training.epochs * self.batches == self.total else "updates"
        least = self.update // self.batches + 1 if limit == "epochs" else self.update + 1
        return f"finished at update {self.update:,}{fewer}: to continue, set {limit} to {least:,} or more"

    def _step(self) -> Tensor:
        """One update of the parameters. Returns the loss of this process."""
        count = self.training.accumulate
        inputs, targets = (self.processes.share(part).chunk(count) for part in self._batch()[:2])
        self._take_steps()
        self.parallel.train()
        if self.training.tune_every is not None and self.update % self.training.tune_every == 0:
            self._tune(inputs[0])
        self.optimizer.zero_grad()
        losses = []
        for i in range(count):
            with self.processes.apart(self.parallel, i + 1 < count):
                with torch.autocast(self.processes.device.type, **autocast(self.training.autocast)):
                    outputs = self.parallel(inputs[i])
                losses.append(loss_of(outputs, targets[i]) / count)
                self.scaler.scale(losses[-1]).backward()
        loss = torch.stack(losses).detach().sum()
        if self.training.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.schedule is not None and not isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau):
            self.schedule.step()
        return loss

    def _tune(self, inputs: Tensor) -> None:
        """All processes use the coefficients that the first one finds."""
        self.model.eval()  # so that running statistics do not change
        with torch.autocast(self.processes.device.type, **autocast(self.training.autocast)):
            tune_layers(self.model, inputs, schedule=self.training.tune == "schedule")
        self.model.train()
        if self.progress is not None and self.processes.first:
            found = ", ".join(f"{name} {_rounded(value)}" for name, value in coefficients(self.model).items())
            each = ", and a pair for each half-step" if self.training.tune == "schedule" else ""
            self.progress.say(f"tuned after update {self.update:,}: {found}{each}")

    def _take_steps(self, most: bool = False) -> None:
        """If max_steps is a range: the number of steps of this update, the same on all processes, or the maximum."""
        if self.preset.range_of_steps is None:
            return
        low, high = self.preset.range_of_steps
        drawn = torch.randint(low, high + 1, (), generator=_generator(self.training.seed, "steps", self.update))
        for layer in self.model.modules():
            if isinstance(layer, RevDEQ):
                layer.max_steps = high if most else int(drawn)

    def _batch(self) -> Batch:
        return self._batch_of(self.update)

    def _batch_of(self, update: int) -> Batch:
        """The learning rate of an update, counted from 0."""
        epoch, i = divmod(update, self.batches)
        if self.order is None or self.order[0] != epoch:
            self.order = epoch, self.dataset.order(_generator(self.training.seed, "order", epoch))
        indices = self.order[1][i * self.training.batch : (i + 1) * self.training.batch]
        return self.dataset.batch(indices, _generator(self.training.seed, "augmentation", update))

    def _due(self) -> str:
        if self.update == self.total or self.update % (self.training.evaluate_every or self.batches) == 0:
            return "evaluate"
        return "log" if self.update % self.training.log_every == 0 else ""

    def _row(self, losses: list[float], scored: bool) -> dict[str, Any]:
        row: dict[str, Any] = dict.fromkeys(record.COLUMNS, "")
        row.update(update=self.update, epoch=self.update / self.batches, lr=self.optimizer.param_groups[0]["lr"])
        # Every row averages log_every updates, wherever evaluations fall; the first rows may have fewer.
        window = losses[-self.training.log_every :]
        row["loss"] = math.fsum(window) / len(window)
        last = last_of(self.model)
        if last is not None:
            row.update(evaluations=last.nfe, change=float(last.change))
        row["peak_memory_mib"] = peak_memory(self.processes.device) / 2**20
        if isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau):
            self.window += losses[len(losses) - self.fresh :]
            while len(self.window) >= PLATEAU_WINDOW:
                self.schedule.step(math.fsum(self.window[:PLATEAU_WINDOW]) / PLATEAU_WINDOW)
                del self.window[:PLATEAU_WINDOW]
        self.losses, self.fresh = self.losses[-self.training.log_every :], 0
        if scored:
            self.processes.same_buffers(self.model)
            self._take_steps(most=True)
            score = evaluate(self.model, self.dataset, self.dataset.validation, self.training, self.processes)
            row.update(evaluation_loss=score.loss, metric=score.metric)
        return row

    def _losses(self) -> list[float]:
        """`self.losses`, averaged over all processes. Raises if one is infinite or NaN."""
        mean = self.processes.total(torch.stack(self.losses)) / self.processes.size
        losses: list[float] = mean.tolist()
        for i, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise self._diverged(self.update - len(losses) + i + 1, f"the loss is {loss}")
        return losses

    def _diverged(self, update: int, what: str) -> Diverged:
        last = self.out / "last.pt"
        inputs, targets, _ = self._batch_of(update - 1)
        if doubt := not_finite(inputs, targets):
            return Diverged(f"update {update:,} has bad data: {doubt} ({what})")
        return Diverged(
            f"update {update:,}: {what}. The training diverged: try a smaller lr (it was {self.training.lr}), clip=1.0,"
            f" a longer warmup, a smaller beta or fewer steps.{f' {last} is intact.' if last.exists() else ''}"
        )

    def _keep(self, row: dict[str, Any], progress: record.Progress) -> None:
        self.rows.append(row)
        if not self.processes.first:
            return
        record.append_metrics(self.out, row)
        progress.show(row)
        if self.callback is not None:
            self.callback(dict(row))
        if row["metric"] == "":
            return
        better = self.best is None or (row["metric"] > self.best) == self.dataset.metric.higher_is_better
        if better or row["metric"] == self.best:  # a tie goes to the later one
            self.best = row["metric"]
            checkpoint.save(self.out / "best.pt", self._weights())

    def _settled(self) -> bool:
        plateau = isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau)
        return plateau and self.optimizer.param_groups[0]["lr"] < SMALLEST_LR

    def _examples(self) -> int:
        """Units (examples or tokens) per update, for the reported speed."""
        return self.training.batch * self.dataset.units

    def _weights(self) -> dict[str, Any]:
        return {
            "preset": self.preset.to_dict(),
            "update": self.update,
            "metric": self.rows[-1]["metric"] if self.rows else "",
            "metric_name": self.dataset.metric.name,
            "split": self.dataset.validation,
            "shapes": self.dataset.shapes,
            "folder": self.folder,
            "data": self.dataset.saved(),
            "model": self.model.state_dict(),
        }

    def _save(self) -> None:
        losses = self._losses() if self.losses else []
        generators = self.processes.all_of(checkpoint.generators(self.processes.device))
        if not self.processes.first:
            return
        state = {
            **self._weights(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict() if self.schedule is not None else None,
            "scaler": self.scaler.state_dict(),
            "generators": generators,
            "examples": self._examples_known(),
            "losses": losses,
            "fresh": self.fresh,
            "window": self.window,
            "rows": self.rows,
            "best": self.best,
            "seconds": self.seconds,
        }
        checkpoint.save(self.out / "last.pt", state)

    def _examples_known(self) -> dict[str, Any]:
        """A fingerprint of the training data."""
        return {"size": self.dataset.size, "fingerprint": getattr(self.dataset, "fingerprint", None)}

    def load(self, saved: Mapping[str, Any], path: Path) -> None:
        now = self._examples_known()
        before = saved.get("examples", now)  # not in checkpoints of earlier versions
        if before != now:
            other = f"on {before['size']:,} examples, and data has {now['size']:,}"
            same = "on other examples, or in another order"
            raise DataError(
                f"{path} was trained {other if before['size'] != now['size'] else same}: to continue, pass the same "
                "data, or held-out examples would be trained on; or choose another folder (--out)"
            )
        checkpoint.load_weights(self.model, path, saved)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.update, self.seconds, self.best = saved["update"], saved["seconds"], saved["best"]
        if self.schedule is not None:
            self._go_on_with_schedule(saved)
        self.scaler.load_state_dict(saved["scaler"])
        self.losses = [torch.tensor(loss, device=self.processes.device) for loss in saved["losses"]]
        self.fresh = saved.get("fresh", len(self.losses))
        self.window = list(saved["window"])
        old = {"residual": "change"}  # the name of the column before version 0.3
        self.rows = [{old.get(name, name): value for name, value in row.items()} for row in saved["rows"]]
        if self.processes.size == len(saved["generators"]):
            checkpoint.restore_generators(saved["generators"][self.processes.rank], self.processes.device)

    def _go_on_with_schedule(self, saved: Mapping[str, Any]) -> None:
        """Restore the learning-rate schedule; if the length of the run has changed, that of the new length."""
        assert self.schedule is not None
        training, before = self.training, Preset.from_dict(saved["preset"]).training
        total = min(before.epochs * self.batches, before.updates or sys.maxsize)
        if total == self.total or training.schedule != "cosine":
            self.schedule.load_state_dict(saved["schedule"])
            return
        stand_in = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=training.lr)
        schedule = scheduled(stand_in, training.schedule, training.warmup, self.total)
        assert isinstance(schedule, lr_scheduler.LRScheduler)
        for _ in range(min(self.update, self.total)):
            stand_in.step()
            schedule.step()
        self.schedule.load_state_dict(schedule.state_dict())
        self.optimizer.param_groups[0]["lr"] = stand_in.param_groups[0]["lr"]


def _rounded(value: float | list[float]) -> str:
    return f"({', '.join(map(_rounded, value))})" if isinstance(value, list) else f"{value:.3g}"


def peak_memory(device: torch.device) -> int:
    """Peak memory in bytes: of tensors on a GPU, of the process on a CPU."""
    if (allocated := _device.allocated(device)) is not None:
        return allocated
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _compile_f(model: nn.Module) -> None:
    """Compile in place, so that the names in a checkpoint stay the same."""
    functions = [m.f for m in model.modules() if isinstance(m, RevDEQ) and isinstance(m.f, nn.Module)]
    for module in functions or [model]:
        module.compile()


def _seed(*names: int | str) -> int:
    """A hash of the names, as a seed."""
    numbers = [n if isinstance(n, int) else int.from_bytes(n.encode(), "little") for n in names]
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def _generator(*names: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(_seed(*names))


class _signals:
    """SIGTERM and Ctrl-C stop the training after the current update; a second Ctrl-C immediately."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> None:
        self.before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self.before[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.run.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.run.signal = number

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)
