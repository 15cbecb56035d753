"""The equilibrium functions of the paper."""

from .blocks import ConvBlock, TransformerBlock

__all__ = ["ConvBlock", "TransformerBlock"]
