"""Checkpoints: tensors and plain values, written atomically, loaded without executing code."""

import json
import os
import pickle
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from .. import _device
from .._atomic import replacing
from ..models.model import DATA

FORMAT = "revdeq 1"


class CheckpointError(Exception):
    """A checkpoint cannot be written, read or used; the message says what to do."""


def save(path: Path, state: Mapping[str, Any]) -> None:
    try:
        with replacing(path) as file:
            torch.save({"format": FORMAT, **state}, file)
    except (OSError, RuntimeError) as error:
        # torch raises this when it closes the archive after a failed write
        cause = error.__context__ if isinstance(error, RuntimeError) else error
        if not isinstance(cause, OSError):
            raise
        raise CheckpointError(cannot_write(path, cause)) from error


def cannot_write(path: Path, error: OSError) -> str:
    intact = f" {path} is intact: free some space and pass --resume." if path.exists() else ""
    return f"{path} cannot be written: {error.strerror or error}.{intact}"


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint, the best one in the folder of a run, or the files of `save_pretrained`."""
    if path.is_dir():
        names = ("best.pt", "last.pt", "model.safetensors")
        file = next((path / name for name in names if (path / name).is_file()), None)
        if file is None:
            raise CheckpointError(f"there is no trained model in {path}: none of {', '.join(names)}")
        return load(file) if file.suffix == ".pt" else _pretrained(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint {path}: a run folder has last.pt and best.pt")
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:  # torch does not verify checksums
                if (part := archive.testzip()) is not None:
                    raise zipfile.BadZipFile(f"the checksum of {part} is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint: {_reason(path, error)}{_beside(path)}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of `python -m revdeq train` (format {FORMAT!r})")
    return state


def _reason(path: Path, error: Exception) -> str:
    """A better reason than torch's message, which suggests to let the file run code."""
    if not os.access(path, os.R_OK):
        return "permission denied; change its permissions"
    if path.stat().st_size == 0:
        return "it is empty; copy it again"
    with path.open("rb") as file:
        archive = file.read(2) == b"PK"
    if not archive:
        return "another program wrote it; pass a checkpoint of `python -m revdeq train`"
    if not zipfile.is_zipfile(path):
        return "it is truncated; copy it again"
    if isinstance(error, pickle.UnpicklingError):
        return "it is damaged, or contains code, which is not run; get it again from a trusted source"
    return f"it is damaged ({(str(error) or type(error).__name__).partition(chr(10))[0]}); copy it again"


def _beside(path: Path) -> str:
    other = path.with_name({"last.pt": "best.pt", "best.pt": "last.pt"}.get(path.name, path.name))
    return f". {other} is in the same folder" if other != path and other.is_file() else ""


def _pretrained(folder: Path) -> dict[str, Any]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(f"{folder} needs safetensors: pip install safetensors") from error
    try:
        trained = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("trained")
        if trained is None:
            raise CheckpointError(f"{folder} has no training settings: load it with from_pretrained of its class")
        kept = {"data": load_file(folder / DATA)} if "data" in trained else {}
        return {"metric": "", "folder": None, **trained, **kept, "model": load_file(folder / "model.safetensors")}
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a model that save_pretrained wrote: {error}") from error


def load_weights(
    model: nn.Module, path: Path, state: Mapping[str, Any], changes: Mapping[str, Any] | None = None
) -> None:
    """changes: settings that override those of the training."""
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        doubt = ", ".join(f"{key}={value!r}" for key, value in (changes or {}).items())
        doubt = f" (was it trained without {doubt}?)" if doubt else ""
        raise CheckpointError(f"{path} has the weights of another model{doubt}: {error}") from error


def generators(device: torch.device) -> dict[str, Any]:
    """The states of torch's, Python's and NumPy's generators; "cuda" is that of the device in use."""
    states = _device.generator_states(device)
    name, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": states[0],
        "cuda": None if device.type == "cpu" else states[1],
        "python": random.getstate(),
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest],
    }


def restore_generators(state: Mapping[str, Any], device: torch.device) -> None:
    _device.set_generator_states(device, [state["torch"], *([] if device.type == "cpu" else [state["cuda"]])])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
