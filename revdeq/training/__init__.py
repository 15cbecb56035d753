"""Training of the presets: the models of the paper, and small ones for a CPU. A model of your own trains in a plain
PyTorch loop.

Needs the extra `train`.
"""

import importlib.util

if missing := [name for name in ("matplotlib", "numpy", "tiktoken", "tqdm") if importlib.util.find_spec(name) is None]:
    raise ImportError(f"revdeq.training needs {', '.join(missing)}: pip install {' '.join(missing)}")

from . import data
from .checkpoint import CheckpointError, Trained, restored
from .evaluation import Score, evaluate
from .loop import Diverged, train
from .presets import PRESETS, Preset, SettingError, Training, configured

__all__ = [
    "PRESETS",
    "CheckpointError",
    "Diverged",
    "Preset",
    "Score",
    "SettingError",
    "Trained",
    "Training",
    "configured",
    "data",
    "evaluate",
    "restored",
    "train",
]
