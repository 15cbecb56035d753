"""The paper's models, their equilibrium functions, and explicit models to compare with.

All of them have `save_pretrained`, `from_pretrained` and `push_to_hub` of huggingface_hub, with what
`pip install 'revdeq[hub]'` installs.
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
"""The models by the name that a preset gives."""

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
    """A trained model, in evaluation mode, from the folder of its run.

    Nothing in a file is executed. A block of your own is code, which no checkpoint holds: pass it as `block`.

    Args:
        run: The folder that `train` or `save_pretrained` wrote (of a run, the best checkpoint in it), or a checkpoint.
        model: A model of your own, which gets the weights. None makes the model that the run's settings describe.
        device: Where to put it.
        changes: Settings to differ from those of the training, by name: `max_steps`, for example.

    Returns:
        The model.

    Raises:
        CheckpointError: There is no checkpoint, or it is damaged, of another program, or of a model of your own.
        SettingError: There is no such setting, or no such device.

    Example:
        >>> small = {"updates": 2, "channels": 4, "evaluation_batches": 1}
        >>> rows = revdeq.train("prefix-tiny", None, "runs/prefix", device="cpu", quiet=True, **small)
        >>> model = revdeq.models.load("runs/prefix", max_steps=40)
        >>> model(torch.randint(2, (1, 1, 100)).float()).shape  # a string of 100 bits
        torch.Size([1, 100, 2])
    """
    from ..training.processes import placed
    from ..training.restore import loaded  # which needs what 'revdeq[train]' installs

    return loaded(Path(run), model, changes, placed(device)).model
