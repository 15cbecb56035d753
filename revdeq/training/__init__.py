"""Training of presets and of your own models, used by `revdeq.train` and the command line.

Needs the extra `train`.
"""

import importlib as _importlib
from typing import Any as _Any

_PLACES = {
    "checkpoint": ("CheckpointError",),
    "evaluation": ("Score", "evaluate"),
    "log": ("TensorBoard",),
    "presets": ("PRESETS", "Preset", "SettingError", "Training", "configured"),
    "restore": ("Trained", "restored"),
    "run": ("Diverged", "Stopped", "train"),
}
"""Public names and their modules, which are imported on first use: `--help` needs no NumPy."""

__all__ = [
    "PRESETS",
    "CheckpointError",
    "Diverged",
    "Preset",
    "Score",
    "SettingError",
    "Stopped",
    "TensorBoard",
    "Trained",
    "Training",
    "classify",
    "configured",
    "data",
    "evaluate",
    "generate",
    "restored",
]


def __getattr__(name: str) -> _Any:
    if name in ("classify", "data", "generate"):
        return _importlib.import_module(f".{name}", __name__)
    for module, names in _PLACES.items():
        if name in names:
            return getattr(_importlib.import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
