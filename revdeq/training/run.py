"""Training of a preset: `python -m revdeq train`.

The batch of an update is a function of the seed and the update's number, and of nothing else; so a run goes on from
its last checkpoint as if nothing had happened, bit for bit on the CPU with the same number of threads.
"""

import itertools
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

from .. import _device
from .._solver.layer import RevDEQ, tune_layers
from ..models import count_parameters
from . import checkpoint, data, record
from .checkpoint import CheckpointError
from .data import DataSet
from .data.dataset import Batch
from .presets import Preset, SettingError, Training
from .processes import Processes

PLATEAU_WINDOW = 200
PLATEAU_PATIENCE = 10
SMALLEST_LR = 1e-6


class Diverged(ArithmeticError):
    """A training diverged: its loss is NaN or infinite, or a solve overflowed. The message says what to try."""


class Stopped(Exception):
    """A signal ended the training, which was saved and can be continued. Its `number` is that of the signal."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class Score(NamedTuple):
    """What `evaluate` found.

    Attributes:
        loss: The mean loss of a target.
        metric: The accuracy, the perplexity, or whatever the data set is judged by.
        targets: The number of targets.
        evaluations: How often f was evaluated for an example, on average; None for an explicit model.
        residual: The mean residual; None for an explicit model.

    Example:
        >>> revdeq.training.Score(loss=0.5, metric=0.8, targets=100, evaluations=8.0, residual=1e-3).metric
        0.8
    """

    loss: float
    metric: float
    targets: int
    evaluations: float | None
    residual: float | None


def train(
    preset: Preset,
    folder: Path | None,
    out: Path,
    resume: bool = False,
    device: str | None = None,
    quiet: bool = False,
) -> list[dict[str, Any]]:
    """Train a preset. It leaves config.json, metrics.csv, metrics.png, last.pt and best.pt in a folder.

    Under torchrun every process calls it, and trains on its share of each batch.

    Args:
        preset: What to train, and how.
        folder: Where the files of the data set are; None, if it has none.
        out: The folder of the run.
        resume: Whether to continue from `last.pt` in that folder, if it is there.
        device: Such as "cpu" or "cuda:1". None is a GPU, if there is one.
        quiet: Whether to print nothing.

    Returns:
        The rows of metrics.csv.

    Raises:
        CheckpointError: There is a run in that folder already, or something cannot be written or read.
        DataError: The data set cannot be found or read.
        SettingError: The settings do not go together.
        Diverged: The loss is NaN or infinite.
        Stopped: A signal ended the training.

    Example:
        >>> preset = revdeq.training.configured("prefix-tiny", {"updates": 2, "channels": 4, "evaluation_batches": 1})
        >>> rows = revdeq.training.train(preset, None, Path("runs/prefix"), device="cpu", quiet=True)
        >>> rows[-1]["update"]
        2
    """
    processes = Processes(device)
    with processes.connected():
        return _train(preset, folder, out, resume, processes, quiet)  # nothing of it is left when they part


def _train(
    preset: Preset, folder: Path | None, out: Path, resume: bool, processes: Processes, quiet: bool
) -> list[dict[str, Any]]:
    last = out / "last.pt"
    saved = _saved(last, preset, resume)
    with processes.first_alone():
        dataset = data.load(preset.data, folder, preset.settings)
    run = Run(preset, dataset.to(processes.device), processes, folder, out, quiet or not processes.first)
    if processes.first:
        record.make_folder(out)
    if saved is not None:
        run.load(saved, last)
    return run.go(resume)


class Trained(NamedTuple):
    """What `restored` finds in a checkpoint.

    Attributes:
        preset: What was trained, with the changes that were asked for.
        dataset: The data.
        model: The model, with its weights.
        update: The number of updates that it was trained for.
        saved: All that the checkpoint holds.

    Example:
        >>> revdeq.training.Trained._fields
        ('preset', 'dataset', 'model', 'update', 'saved')
    """

    preset: Preset
    dataset: DataSet
    model: nn.Module
    update: int
    saved: Mapping[str, Any]


def restored(
    path: Path, folder: Path | None, changes: Mapping[str, Any] | None = None, device: str | torch.device = "cpu"
) -> Trained:
    """The model in a checkpoint, and the data that it was trained on.

    Args:
        path: Of the checkpoint: best.pt or last.pt in the folder of a run.
        folder: Where the files of the data set are; None, if it has none.
        changes: Settings to differ from those of the training, max_steps for example.
        device: Where to put the model and the data.

    Returns:
        A `Trained`.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged or of another program.
        SettingError: There is no such setting.

    Example:
        >>> preset = revdeq.training.configured("prefix-tiny", {"updates": 2, "channels": 4, "evaluation_batches": 1})
        >>> rows = revdeq.training.train(preset, None, Path("runs/prefix"), device="cpu", quiet=True)
        >>> trained = revdeq.training.restored(Path("runs/prefix/best.pt"), None, {"max_steps": 40})
        >>> trained.model.equilibrium.max_steps
        40
    """
    saved = checkpoint.load(path)
    preset = Preset.from_dict(saved["preset"]).changed(changes or {})
    dataset = data.load(preset.data, folder, preset.settings, saved.get("data", saved.get("vocabulary")))
    model = preset.build(**dataset.shapes)
    checkpoint.load_weights(model, path, saved)
    return Trained(preset, dataset.to(torch.device(device)), model.to(device), saved["update"], saved)


def _saved(last: Path, preset: Preset, resume: bool) -> dict[str, Any] | None:
    if not last.exists():
        return None
    if not resume:
        raise CheckpointError(f"{last} is there already: continue it with --resume, or choose another --out")
    saved = checkpoint.load(last)
    if "optimizer" not in saved:
        raise CheckpointError(
            f"{last} has weights only, as best.pt does: there is nothing to continue from; choose another --out"
        )
    before, now = Preset.from_dict(saved["preset"]).flat(), preset.flat()
    if before != now:
        keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        changes = ", ".join(f"{key}={before.get(key)} (asked for: {now.get(key)})" for key in keys)
        raise CheckpointError(f"{last} is of another run, with {changes}: repeat its settings, or choose another --out")
    return saved


class Run:
    """A training in progress: all that a checkpoint holds, and how to make an update."""

    def __init__(
        self, preset: Preset, dataset: DataSet, processes: Processes, folder: Path | None, out: Path, quiet: bool
    ) -> None:
        self.preset, self.training, self.dataset, self.processes = preset, preset.training, dataset, processes
        self.folder, self.out, self.quiet = None if folder is None else str(folder.resolve()), out, quiet
        training = self.training
        if training.batch % processes.size:
            raise SettingError(f"batch={training.batch}: it must be a multiple of the {processes.size} processes")
        if training.batch > dataset.size:
            raise SettingError(f"batch={training.batch}: it must not be larger than the training data, {dataset.size}")
        self.batches = dataset.size // training.batch
        self.total = min(training.epochs * self.batches, training.updates or sys.maxsize)

        torch.manual_seed(training.seed)
        model = preset.build(**dataset.shapes)
        if processes.size > 1 and processes.device.type != "cpu":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        self.model = model.to(processes.device)
        self.parameters = count_parameters(self.model)
        if training.compile:
            _compile_f(self.model)
        self.parallel = processes.wrapped(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.lr, weight_decay=training.weight_decay)
        self.schedule = _schedule(self.optimizer, training.schedule, training.warmup, self.total)
        self.scaler = torch.amp.GradScaler(processes.device.type, enabled=training.autocast == "float16")

        self.update, self.seconds = 0, 0.0
        self.losses: list[Tensor] = []  # since the last row
        self.window: list[float] = []  # since the plateau was last looked at
        self.rows: list[dict[str, Any]] = []
        self.best: float | None = None
        self.order: tuple[int, Tensor] | None = None
        self.signal = 0
        # Dropout differs between processes.
        seeds = [_seed(training.seed, "draws", processes.rank, n) for n in range(3)]
        torch.manual_seed(seeds[0])
        random.seed(seeds[1])
        np.random.seed(seeds[2] % 2**32)

    def go(self, resume: bool) -> list[dict[str, Any]]:
        dataset = self.dataset
        config = {**self.preset.to_dict(), "parameters": self.parameters, "folder": self.folder}
        progress = record.Progress(self.total, self.update, dataset.unit, dataset.metric.name, self.quiet)
        if self.processes.first:
            record.write_config(self.out, config)
            record.write_metrics(self.out, self.rows)
            progress.say(dataset.describe())
            quoted = f" ({self.preset.quoted} quoted)" if self.preset.quoted else ""
            progress.say(
                f"{self.preset.name}: {self.parameters:,} parameters{quoted}, {self.total:,} updates, in {self.out}"
            )
            if resume:
                at = f"continuing at update {self.update:,}" if self.update else "no checkpoint yet: from the beginning"
                progress.say(at)
        start = time.perf_counter() - self.seconds
        since, done = time.perf_counter(), self.update
        try:
            with _signals(self):
                while self.update < self.total and not self._settled():
                    try:
                        self.losses.append(self._step())
                    except (FloatingPointError, OverflowError) as error:  # of the solver, which looks sooner
                        raise self._diverged(self.update + 1, str(error)) from error
                    self.update += 1
                    progress.advance()
                    due = self._due()
                    if due:
                        row = self._row(scored=due == "evaluate")
                        now = time.perf_counter()
                        self.seconds = row["seconds"] = now - start
                        row["per_second"] = (self.update - done) * self._examples() / (now - since)
                        since, done = now, self.update
                        self._keep(row, progress)
                    stop = self.processes.largest(self.signal)
                    if stop or due == "evaluate" or self.update % self.training.save_every == 0:
                        self.seconds = time.perf_counter() - start
                        self._save()
                    if stop:
                        name = signal.Signals(stop).name
                        raise Stopped(f"{name}: saved at update {self.update:,}, continue with --resume", stop)
        finally:
            progress.close()
        if self.processes.first and self.rows:
            record.plot(self.out, self.rows, dataset.metric.name)
        return self.rows

    def _step(self) -> Tensor:
        """One update of the parameters; its loss, of this process."""
        inputs, targets = (self.processes.share(part) for part in self._batch()[:2])
        self._take_steps()
        self.parallel.train()
        if self.training.tune_every is not None and self.update % self.training.tune_every == 0:
            self._tune(inputs)
        device = self.processes.device.type
        with torch.autocast(device, **_autocast(self.training.autocast)):
            logits = self.parallel(inputs)
        loss = cross_entropy(logits, targets)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if self.training.clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.schedule is not None and not isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau):
            self.schedule.step()
        return loss.detach()

    def _tune(self, inputs: Tensor) -> None:
        """All processes take what the first one finds for its share of the batch."""
        self.model.eval()  # so that no running statistic moves
        if self.processes.first:
            with torch.autocast(self.processes.device.type, **_autocast(self.training.autocast)):
                tune_layers(self.model, inputs)
        for layer in self.model.modules():
            if isinstance(layer, RevDEQ):
                layer.use(*self.processes.all_of((layer.beta, layer.gamma))[0])
        self.model.train()

    def _take_steps(self, most: bool = False) -> None:
        """Where max_steps is a range, those of this update, or the most; the same on all processes."""
        if self.preset.range_of_steps is None:
            return
        low, high = self.preset.range_of_steps
        drawn = torch.randint(low, high + 1, (), generator=_generator(self.training.seed, "steps", self.update))
        for layer in self.model.modules():
            if isinstance(layer, RevDEQ):
                layer.max_steps = high if most else int(drawn)

    def _batch(self) -> Batch:
        epoch, i = divmod(self.update, self.batches)
        if self.order is None or self.order[0] != epoch:
            self.order = epoch, self.dataset.order(_generator(self.training.seed, "order", epoch))
        indices = self.order[1][i * self.training.batch : (i + 1) * self.training.batch]
        return self.dataset.batch(indices, _generator(self.training.seed, "augmentation", self.update))

    def _due(self) -> str:
        if self.update == self.total or self.update % (self.training.evaluate_every or self.batches) == 0:
            return "evaluate"
        return "log" if self.update % self.training.log_every == 0 else ""

    def _row(self, scored: bool) -> dict[str, Any]:
        losses = self._losses()
        row: dict[str, Any] = dict.fromkeys(record.COLUMNS, "")
        row.update(update=self.update, epoch=self.update / self.batches, lr=self.optimizer.param_groups[0]["lr"])
        row["loss"] = math.fsum(losses) / len(losses)
        last: Any = self.model.last
        if last is not None:
            row.update(evaluations=last.nfe, residual=float(last.residual))
        row["peak_memory_mib"] = peak_memory(self.processes.device) / 2**20
        self.losses = []
        if isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau):
            self.window += losses
            while len(self.window) >= PLATEAU_WINDOW:
                self.schedule.step(math.fsum(self.window[:PLATEAU_WINDOW]) / PLATEAU_WINDOW)
                del self.window[:PLATEAU_WINDOW]
        if scored:
            self.processes.same_buffers(self.model)
            self._take_steps(most=True)
            score = evaluate(self.model, self.dataset, self.dataset.validation, self.training, self.processes)
            row.update(evaluation_loss=score.loss, metric=score.metric)
        return row

    def _losses(self) -> list[float]:
        """Those since the last row, of all processes; none of them may be infinite or NaN."""
        mean = self.processes.total(torch.stack(self.losses)) / self.processes.size
        losses: list[float] = mean.tolist()
        for i, loss in enumerate(losses):
            if not math.isfinite(loss):
                raise self._diverged(self.update - len(losses) + i + 1, f"the loss is {loss}")
        return losses

    def _diverged(self, update: int, what: str) -> Diverged:
        last = self.out / "last.pt"
        return Diverged(
            f"update {update:,}: {what}. The training diverged: try a smaller lr (it was {self.training.lr}), clip=1.0,"
            f" a longer warmup, a smaller beta or fewer steps.{f' {last} is from before.' if last.exists() else ''}"
        )

    def _keep(self, row: dict[str, Any], progress: record.Progress) -> None:
        self.rows.append(row)
        if not self.processes.first:
            return
        record.append_metrics(self.out, row)
        progress.show(row)
        if row["metric"] == "":
            return
        better = self.best is None or (row["metric"] > self.best) == self.dataset.metric.higher_is_better
        if better and row["metric"] != self.best:
            self.best = row["metric"]
            checkpoint.save(self.out / "best.pt", self._weights())

    def _settled(self) -> bool:
        plateau = isinstance(self.schedule, lr_scheduler.ReduceLROnPlateau)
        return plateau and self.optimizer.param_groups[0]["lr"] < SMALLEST_LR

    def _examples(self) -> int:
        """Of the unit that is reported, per update."""
        return self.training.batch * self.dataset.units

    def _weights(self) -> dict[str, Any]:
        return {
            "preset": self.preset.to_dict(),
            "update": self.update,
            "metric": self.rows[-1]["metric"] if self.rows else "",
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
            "losses": losses,
            "window": self.window,
            "rows": self.rows,
            "best": self.best,
            "seconds": self.seconds,
        }
        checkpoint.save(self.out / "last.pt", state)

    def load(self, saved: Mapping[str, Any], path: Path) -> None:
        checkpoint.load_weights(self.model, path, saved)
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.schedule is not None:
            self.schedule.load_state_dict(saved["schedule"])
        self.scaler.load_state_dict(saved["scaler"])
        self.update, self.seconds, self.best = saved["update"], saved["seconds"], saved["best"]
        self.losses = [torch.tensor(loss, device=self.processes.device) for loss in saved["losses"]]
        self.window, self.rows = list(saved["window"]), list(saved["rows"])
        if self.processes.size == len(saved["generators"]):
            checkpoint.restore_generators(saved["generators"][self.processes.rank], self.processes.device)


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(
    model: nn.Module, dataset: DataSet, split: str, training: Training, processes: Processes | None = None
) -> Score:
    """The loss and the metric of a model on a split.

    Args:
        model: The model, which is put into evaluation mode.
        dataset: The data.
        split: One of `dataset.splits`.
        training: Its batch size, its autocast and the number of its evaluation_batches are used.
        processes: Each takes a share of the batches. None is those of torchrun, or this one.

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
        with torch.autocast(processes.device.type, **_autocast(training.autocast)):
            logits = model(batch.inputs)
        loss = cross_entropy(logits, batch.targets, "sum").item() + batch.surcharge
        count, examples = batch.targets.numel(), len(batch.targets)
        right = (logits.argmax(-1) == batch.targets).reshape(examples, -1).all(1).sum().item()
        last: Any = model.last
        nfe, residual = (last.nfe, float(last.residual)) if last is not None else (math.nan, math.nan)
        sums += torch.tensor([loss, right, count, examples, nfe * count, residual * count], dtype=torch.float64)
    loss, right, count, examples, nfe, residual = processes.total(sums).tolist()
    metric = dataset.metric.of(loss / count, right / examples)
    explicit = math.isnan(nfe)
    return Score(
        loss / count, metric, int(count), None if explicit else nfe / count, None if explicit else residual / count
    )


def peak_memory(device: torch.device) -> int:
    """In bytes: of the tensors on a GPU, of the whole process on the CPU."""
    if (allocated := _device.allocated(device)) is not None:
        return allocated
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _autocast(dtype: str | None) -> dict[str, Any]:
    return {"enabled": dtype is not None, "dtype": getattr(torch, dtype) if dtype else None}


def _schedule(
    optimizer: torch.optim.Optimizer, name: str, warmup: int, total: int
) -> lr_scheduler.LRScheduler | lr_scheduler.ReduceLROnPlateau | None:
    if name == "plateau":
        # torch counts the windows that are let pass, the paper the one at which lr is halved
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=PLATEAU_PATIENCE - 1)
    if name == "constant":
        return None
    warmup = min(warmup, total - 1)
    falling = lr_scheduler.CosineAnnealingLR(optimizer, T_max=total - warmup)
    if not warmup:
        return falling
    rising = lr_scheduler.LinearLR(optimizer, start_factor=1 / (warmup + 1), total_iters=warmup)
    return lr_scheduler.SequentialLR(optimizer, [rising, falling], [warmup])


def _compile_f(model: nn.Module) -> None:
    """In place, so that the names in a checkpoint stay the same."""
    functions = [m.f for m in model.modules() if isinstance(m, RevDEQ) and isinstance(m.f, nn.Module)]
    for module in functions or [model]:
        module.compile()


def _seed(*names: int | str) -> int:
    """A seed that differs in every bit for every sequence of names."""
    numbers = [n if isinstance(n, int) else int.from_bytes(n.encode(), "little") for n in names]
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0] >> 1)


def _generator(*names: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(_seed(*names))


class _signals:
    """SIGTERM and Ctrl-C end the training after the update that is being made; a second Ctrl-C at once."""

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
