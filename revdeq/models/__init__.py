"""The paper's models, their blocks, and explicit models for comparison.

All of them have huggingface_hub's `save_pretrained`, `from_pretrained` and `push_to_hub`, which need
the extra `hub`.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .blocks import ConvBlock, TransformerBlock
from .caches import Cache
from .decoding import DecodingModel
from .equilibrium import Equilibrium
from .explicit import PuzzleNet, ResNet, Transformer, count_parameters
from .image import MultiScale, SingleScale
from .language import LanguageModel
from .puzzle import PuzzleBlock, PuzzleModel

MODELS: dict[str, type[nn.Module]] = {
    "single-scale": SingleScale,
    "multi-scale": MultiScale,
    "language": LanguageModel,
    "puzzle": PuzzleModel,
    "resnet": ResNet,
    "transformer": Transformer,
    "puzzle-net": PuzzleNet,
}
"""The models by their name in presets."""

__all__ = [
    "MODELS",
    "Cache",
    "ConvBlock",
    "DecodingModel",
    "Equilibrium",
    "LanguageModel",
    "MultiScale",
    "PuzzleBlock",
    "PuzzleModel",
    "PuzzleNet",
    "ResNet",
    "SingleScale",
    "Transformer",
    "TransformerBlock",
    "count_parameters",
    "load",
]


def load(
    run: str | Path, model: nn.Module | None = None, device: str | torch.device = "cpu", **changes: Any
) -> nn.Module:
    """Load a trained model, in evaluation mode.

    Files are never executed. Checkpoints contain no code, so pass a block of your own as `block`.

    Args:
        run: The folder of a run (its best checkpoint is loaded), a folder that `save_pretrained` wrote, or a
            checkpoint.
        model: A model of your own, to load the weights into. None creates the model that the run's settings describe.
        device: The device to load it to.
        changes: Settings that override those of the training, by name: `max_steps`, for example.

    Returns:
        The model.

    Raises:
        CheckpointError: There is no checkpoint, it is damaged or not ours, or it needs `model`.
        SettingError: There is no such setting or device.

    Example:
        >>> small = {"updates": 2, "channels": 4, "evaluation_batches": 1}
        >>> rows = revdeq.train("prefix-tiny", None, "runs/prefix", device="cpu", quiet=True, **small)
        >>> model = revdeq.models.load("runs/prefix", max_steps=40)
        >>> model(torch.randint(2, (1, 1, 100)).float()).shape  # a string of 100 bits
        torch.Size([1, 100, 2])
    """
    from ..training.processes import placed
    from ..training.restore import loaded  # needs the extra 'train'

    return loaded(Path(run), model, changes, placed(device)).model
