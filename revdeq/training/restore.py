"""Loading of trained models."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..models import MODELS
from ..models.model import Model, as_changed, use
from . import checkpoint, evaluation
from . import data as datasets
from .checkpoint import CheckpointError
from .data import DataSet
from .presets import Preset, SettingError, Training, keywords, renamed


class Loaded(NamedTuple):
    """A trained model in evaluation mode, its preset, and the contents of the checkpoint."""

    preset: Preset
    model: nn.Module
    saved: Mapping[str, Any]


def loaded(
    path: Path,
    model: nn.Module | None = None,
    changes: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
) -> Loaded:
    changes = dict(changes or {})
    _refuse_of_training(changes)
    return _built(path, checkpoint.load(path), model, changes, device)


def _refuse_of_training(changes: Mapping[str, Any], still_used: Collection[str] = ()) -> None:
    """still_used: the settings of `Training` that still apply."""
    of_training = {field.name for field in dataclasses.fields(Training)}.difference(still_used)
    for name, value in changes.items():
        if name in of_training:
            raise SettingError(
                f"{name}={value!r}: it applies to training only, and this model is already trained; leave it out"
            )


def _refuse_other_examples(before: Preset, now: Preset) -> None:
    """The data set and the classes of a trained model cannot be changed."""
    for name, default in (("held_out", 10), ("vocabulary", "full")):
        was, asked = before.settings.get(name, default), now.settings.get(name, default)
        if asked != was:
            raise SettingError(f"{name}={asked!r}: the model was trained with {name}={was!r}; leave it out")


def _built(
    path: Path,
    saved: Mapping[str, Any],
    model: nn.Module | None,
    changes: Mapping[str, Any],
    device: torch.device | str,
    shapes: Mapping[str, Any] | None = None,
) -> Loaded:
    """shapes: those of the data set, if it is available."""
    before = Preset.from_dict(saved["preset"])
    if model is None:
        preset = described(path, before, changes)
        model = preset.build(**(shapes or shapes_of(preset, saved)))
    elif changes:
        raise CheckpointError(
            f"{path}: {', '.join(changes)} cannot be changed for a model that you pass: change them in the model, "
            "beta and gamma after loading, because the weights may include them"
        )
    else:
        preset = before
    checkpoint.load_weights(model, path, saved, _of_the_model(preset, changes))
    used = use(model, changes)
    if isinstance(model, Model) and preset.model in MODELS:
        known = {key: saved.get(key) for key in ("update", "metric", "metric_name", "split", "shapes", "data")}
        known = {key: value for key, value in known.items() if value is not None and value != ""}
        was, now = before.to_dict(), preset.to_dict()
        changed = {key: now["settings"].get(key) for key in now["settings"] | was["settings"]}
        changed = {key: value for key, value in changed.items() if value != was["settings"].get(key)} | used
        model.trained = as_changed({"preset": {**now, "training": was["training"]}, **known}, changed)
    return Loaded(preset, model.to(device).eval(), saved)


def described(path: Path, preset: Preset, changes: Mapping[str, Any]) -> Preset:
    """The preset of a checkpoint with some changes. Checkpoints are not trusted: no code that they name is imported."""
    if preset.model not in MODELS:
        raise CheckpointError(
            f"{path} has weights of your own model, {preset.model}: create it, and call "
            f"revdeq.models.load({str(path)!r}, model)"
        )
    block = preset.settings.get("block")
    if block is not None and "block" not in changes:
        raise CheckpointError(
            f"{path} was trained with block={block!r}, and checkpoints contain no code: pass the class as block, "
            f"or --block {block} on the command line"
        )
    return preset.changed(changes)


def _of_the_model(preset: Preset, changes: Mapping[str, Any]) -> dict[str, Any]:
    known = keywords(preset.model) | {"model"} if preset.model in MODELS else set()
    return {key: value for key, value in renamed(changes).items() if key in known}


def shapes_of(preset: Preset, saved: Mapping[str, Any]) -> Mapping[str, Any]:
    if "shapes" in saved:
        return saved["shapes"]
    _, shapes = datasets.example(preset.data, preset.settings)  # a checkpoint of version 0.1.0
    kept = saved.get("data", saved.get("vocabulary"))
    return shapes if kept is None else {"vocabulary": len(kept["kept"]) + 1}


class Trained(NamedTuple):
    """The result of `restored`.

    Attributes:
        preset: The preset, with the changes applied.
        dataset: The data.
        model: The model, with its weights.
        update: The number of updates that it was trained for.
        saved: The contents of the checkpoint.

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
    path: Path,
    folder: Path | None = None,
    changes: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
) -> Trained:
    """Load a trained model and its data.

    Args:
        path: The folder of a run, a folder that `save_pretrained` wrote, or a checkpoint.
        folder: The folder of the data set's files. None is where the training found them.
        changes: Settings that override those of the training, max_steps for example.
        device: The device to load the model and the data to.

    Returns:
        A `Trained`.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged or not ours.
        SettingError: There is no such setting, or it applies to training only, such as lr.

    Example:
        >>> small = {"updates": 2, "channels": 4, "evaluation_batches": 1}
        >>> rows = revdeq.train("prefix-tiny", None, "runs/prefix", device="cpu", quiet=True, **small)
        >>> trained = revdeq.training.restored(Path("runs/prefix"), changes={"max_steps": 40})
        >>> trained.model.equilibrium.max_steps
        40
    """
    changes = dict(changes or {})
    _refuse_of_training(changes, still_used=evaluation.SETTINGS)
    saved = checkpoint.load(path)
    before = Preset.from_dict(saved["preset"])
    preset = described(path, before, changes)
    _refuse_other_examples(before, preset)
    folder = folder or (Path(saved["folder"]) if saved["folder"] else None)
    dataset = datasets.load(preset.data, folder, preset.settings, saved.get("data", saved.get("vocabulary")))
    model = _built(path, saved, None, changes, device, dataset.shapes).model
    return Trained(preset, dataset.to(torch.device(device)), model, saved["update"], saved)
