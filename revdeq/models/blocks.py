"""The functions f(z, x) whose fixed points the paper's models compute."""

import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS_PER_GROUP = 16
"""Of GroupNorm, as in the authors' code; the paper does not say."""


class ConvBlock(nn.Module):
    """The residual block of the image models (equation 8 of the paper):

    norm(z + ReLU(norm(x + W2 * ReLU(norm(W1 * z)))))

    with 3x3 convolutions, which widen `channels` by the factor `width` between them, and group norms.
    """

    def __init__(self, channels: int, width: int = 1) -> None:
        super().__init__()
        inner = width * channels
        self.conv1 = nn.Conv2d(channels, inner, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(inner, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2, self.norm3 = group_norm(inner), group_norm(channels), group_norm(channels)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(z)))
        return self.norm3(z + F.relu(self.norm2(x + self.conv2(inner))))


class TransformerBlock(nn.Module):
    """The block of the language model (equation 7 of the paper):

    LN(MLP(LN(SelfAttention(W_QKV (z + x)))))

    with causal attention, an output projection after it, and an MLP with one hidden layer of 4 d units.
    """

    def __init__(self, d: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.project = nn.Linear(d, d, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(z + x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        return self.norm2(self.mlp(self.norm1(self.project(attended))))


def group_norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(1, channels // CHANNELS_PER_GROUP), channels)
