"""The paper's models, their equilibrium functions, and explicit models to compare with."""

from torch import nn

from .blocks import ConvBlock, TransformerBlock
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
    "ConvBlock",
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
]
