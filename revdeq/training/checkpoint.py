"""Checkpoints: tensors and plain values, written atomically, and loaded without executing code."""

import inspect
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .._atomic import replacing
from . import data
from .data import DataSet
from .presets import Preset, SettingError, Training

FORMAT = "revdeq 2"
OF_TRAINING = {*inspect.signature(Training).parameters} - {"batch", "autocast", "evaluation_batches"}
"""The settings that make no difference to a trained model."""
LENGTH = ("epochs", "updates")
"""The settings that may change when a run is resumed."""


class CheckpointError(Exception):
    """A checkpoint cannot be read or used; the message says what to do."""


def save(path: Path, state: Mapping[str, Any]) -> None:
    with replacing(path) as file:
        torch.save({"format": FORMAT, **state}, file)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint, or the best one in the folder of a run."""
    file = path / "best.pt" if path.is_dir() else path
    if not file.is_file():
        raise CheckpointError(f"there is no {file}: pass the folder of a run, or its last.pt")
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} is damaged, or contains code, which is not run: copy it again") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{file} is no checkpoint of this release's `python -m revdeq train`: train again")
    return state


def preset_of(saved: Mapping[str, Any]) -> Preset:
    return Preset(**{**saved["preset"], "training": Training(**saved["preset"]["training"])})


def to_resume(last: Path, preset: Preset, resume: bool) -> dict[str, Any] | None:
    """The checkpoint to continue from; None if there is none."""
    if not last.exists():
        return None
    if not resume:
        raise CheckpointError(f"{last} already exists: continue with --resume, or choose another folder with --out")
    saved = load(last)
    before, now = preset_of(saved).flat(), preset.flat()
    for key in {**before, **now}:
        if key not in LENGTH and before.get(key) != now.get(key):
            raise CheckpointError(
                f"{key}={now.get(key)!r}: the run of {last} has {before.get(key)!r}; leave it out, or choose "
                "another folder with --out"
            )
    return saved


class Trained(NamedTuple):
    """The result of `restored`. update: how many updates the model was trained for."""

    preset: Preset
    dataset: DataSet
    model: nn.Module
    update: int


def restored(
    run: Path,
    folder: Path | None = None,
    changes: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
) -> Trained:
    """Load a trained model and its data.

    Args:
        run: The folder of a run, whose best checkpoint is loaded, or a checkpoint.
        folder: The folder of the data set's files. None is where the training found them.
        changes: Settings that override those of the training, max_steps for example.
        device: The device to load the model and the data to.

    Returns:
        A `Trained`: the preset with the changes, the data, the model in evaluation mode, and the update.

    Raises:
        CheckpointError: There is no such checkpoint, or it is damaged or not ours.
        SettingError: There is no such setting, or it applies to training only, such as lr.

    Example:
        >>> preset = revdeq.training.configured("prefix-tiny", {"updates": 2, "channels": 4, "evaluation_batches": 1})
        >>> rows = revdeq.training.train(preset, None, Path("runs/prefix"), device="cpu", quiet=True)
        >>> trained = revdeq.training.restored(Path("runs/prefix"), changes={"max_steps": 40})
        >>> trained.model.equilibrium.max_steps
        40
    """
    saved = load(run)
    preset = changed(saved, changes or {})
    dataset = data.load(preset.data, folder or (saved["folder"] and Path(saved["folder"])), preset.settings)
    dataset.to(torch.device(device))
    model = with_weights(saved, preset.build(**dataset.shapes), changes or {})
    return Trained(preset, dataset, model.to(device), saved["update"])


def model_of(run: Path, changes: Mapping[str, Any]) -> nn.Module:
    """The model of `restored`, without reading the data."""
    saved = load(run)
    return with_weights(saved, changed(saved, changes).build(**saved["shapes"]), changes)


def changed(saved: Mapping[str, Any], changes: Mapping[str, Any]) -> Preset:
    for name in OF_TRAINING & changes.keys():
        raise SettingError(f"{name}={changes[name]!r}: it applies to training, and this model is trained; leave it out")
    return preset_of(saved).changed(changes)


def with_weights(saved: Mapping[str, Any], model: nn.Module, changes: Mapping[str, Any]) -> nn.Module:
    try:
        model.load_state_dict(saved["model"])
    except RuntimeError as error:
        doubt = ", ".join(f"{name}={value!r}" for name, value in changes.items()) or "this data"
        raise CheckpointError(f"the weights of this run do not fit {doubt}: leave it out, or train again") from error
    return model.eval()
