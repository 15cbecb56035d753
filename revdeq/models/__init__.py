"""The paper's models, their blocks, and explicit models for comparison."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from .blocks import ConvBlock, TransformerBlock
from .caches import Cache
from .decoding import DecodingModel
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


def load(run: str | Path, device: str | torch.device = "cpu", **changes: Any) -> nn.Module:
    """Load a trained model, in evaluation mode. Checkpoints contain no code, and nothing in them is executed.

    Args:
        run: The folder of a run, whose best checkpoint is loaded, or a checkpoint.
        device: The device to load it to.
        changes: Settings of the model that override those of the training, by name: `max_steps`, for example.

    Returns:
        The model.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged or not ours.
        SettingError: There is no such setting.

    Example:
        >>> preset = revdeq.training.configured("prefix-tiny", {"updates": 2, "channels": 4, "evaluation_batches": 1})
        >>> rows = revdeq.training.train(preset, None, Path("runs/prefix"), device="cpu", quiet=True)
        >>> model = revdeq.models.load("runs/prefix", max_steps=40)
        >>> model(torch.randint(2, (1, 1, 100)).float()).shape  # a string of 100 bits
        torch.Size([1, 100, 2])
    """
    from ..training.checkpoint import model_of  # needs the extra 'train'

    return model_of(Path(run), changes).to(device)
