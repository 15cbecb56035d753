"""The functions f(z, x) of the paper's models, and their layers.

form="paper" is as printed; form="authors" is as in the code that the paper's authors published; form="residual" and
form="pre-norm" are language blocks with residual paths.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .caches import Cache

CHANNELS_PER_GROUP = 16
"""For GroupNorm: as in the authors' code; the paper does not state it."""

FORMS = {"paper": "as printed", "authors": "as in the authors' code"}
LANGUAGE_FORMS = {
    **FORMS,
    "residual": "with residual paths",
    "pre-norm": "with residual paths and a norm before each of them",
}


class ConvBlock(nn.Module):
    """The residual block of the image models (equation 8 of the paper), f(z, x) =

        norm(z + ReLU(norm(x + W2 * ReLU(norm(W1 * z)))))

    with 3x3 convolutions and group norms.

    Args:
        channels: Of z and x.
        width: The factor by which the inner channels are wider.
        form: "paper", or "authors": norm(ReLU(z + norm(x + W2 * ReLU(norm(W1 * z))))), with the same parameters.

    Raises:
        ValueError: The channels cannot be split into groups of 16, or an argument has an invalid value.

    Example:
        >>> images = torch.randn(2, 16, 8, 8)
        >>> revdeq.RevDEQ(revdeq.models.ConvBlock(16), beta=0.8)(images).shape
        torch.Size([2, 16, 8, 8])
    """

    def __init__(self, channels: int, width: int = 1, form: str = "paper") -> None:
        super().__init__()
        inner = checked_size("width", width) * checked_size("channels", channels)
        self.form = checked_form(form, FORMS)
        self.conv1 = nn.Conv2d(channels, inner, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(inner, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2, self.norm3 = group_norm(inner), group_norm(channels), group_norm(channels)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        inner = F.relu(self.norm1(self.conv1(z)))
        update = self.norm2(x + self.conv2(inner))
        return self.norm3(F.relu(z + update) if self.form == "authors" else z + F.relu(update))


class TransformerBlock(nn.Module):
    """The block of the language model (equation 7 of the paper), f(z, x) =

        LN(MLP(LN(SelfAttention(W_QKV (z + x)))))

    with causal attention, an output projection after it, an MLP with one hidden layer of 4 d units, and dropout after
    the attention and after the MLP.

    As printed, a position of an untrained model hardly depends on its own token; with residual paths it does.

    Args:
        d: The size of a position.
        heads: The number of attention heads.
        dropout: The dropout probability.
        wide_heads: Whether each head has size d instead of d / heads, with `heads` times the parameters.
        form: "paper", as above. "authors": h = z + SelfAttention(LN(z + x)), then h + MLP(LN(h)), with two hidden
            layers in the MLP; without a final norm, it may have no fixed point. "residual":
            u = z + x, h = LN(u + SelfAttention(u)), then LN(h + MLP(h)), with the parameters of "paper". "pre-norm":
            h = u + SelfAttention(LN(u)), then LN(h + MLP(LN(h))), which learns best.

    Raises:
        ValueError: d is not a multiple of heads, or an argument has an invalid value.

    Example:
        >>> positions = torch.randn(2, 10, 32)
        >>> revdeq.RevDEQ(revdeq.models.TransformerBlock(32, heads=4))(positions).shape
        torch.Size([2, 10, 32])
    """

    def __init__(
        self, d: int, heads: int = 8, dropout: float = 0.0, wide_heads: bool = False, form: str = "paper"
    ) -> None:
        super().__init__()
        self.form = checked_form(form, LANGUAGE_FORMS)
        self.attention = CausalAttention(d, heads, wide_heads)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = mlp(d, 4 * d, 4 * d, d, approximate="tanh") if form == "authors" else mlp(d, 4 * d, d)
        if form == "pre-norm":
            self.norm3 = nn.LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, z: Tensor, x: Tensor, cache: Cache | None = None) -> Tensor:
        if self.form == "authors":
            h = z + self.dropout(self.attention(self.norm1(z + x), cache))
            return h + self.dropout(self.mlp(self.norm2(h)))
        u = z + x
        if self.form == "residual":
            h = self.norm1(u + self.dropout(self.attention(u, cache)))
            return self.norm2(h + self.dropout(self.mlp(h)))
        if self.form == "pre-norm":
            h = u + self.dropout(self.attention(self.norm1(u), cache))
            return self.norm3(h + self.dropout(self.mlp(self.norm2(h))))
        h = self.norm1(self.dropout(self.attention(u, cache)))
        return self.norm2(self.dropout(self.mlp(h)))


class CausalAttention(nn.Module):
    """Multi-head causal attention. wide_heads: each head has size d instead of d / heads."""

    def __init__(self, d: int, heads: int = 8, wide_heads: bool = False) -> None:
        super().__init__()
        self.heads = checked_size("heads", heads)
        if checked_size("d", d) % heads and not wide_heads:
            raise ValueError(
                f"d = {d} is not a multiple of heads = {heads}: change one of them, or use wide_heads=True"
            )
        inner = d * heads if wide_heads else d
        self.qkv = nn.Linear(d, 3 * inner, bias=False)
        self.project = nn.Linear(inner, d, bias=False)

    def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if cache is None:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = cache.attend(q, k, v)
        return self.project(attended.transpose(1, 2).flatten(-2))


class PreActivation(nn.Module):
    """The residual block of He et al. (2016, "Identity mappings"): twice BatchNorm, ReLU and a 3x3 convolution.

    If the shape changes, the residual path has a 1x1 convolution.
    """

    def __init__(self, channels: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(channels, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        same = stride == 1 and channels == outputs
        self.residual = nn.Identity() if same else nn.Conv2d(channels, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.relu(self.norm1(x)))
        return self.residual(x) + self.conv2(F.relu(self.norm2(h)))


def mlp(*sizes: int, approximate: str = "none") -> nn.Sequential:
    """Linear layers with GELU between them."""
    layers: list[nn.Module] = [nn.Linear(sizes[0], sizes[1])]
    for inner, outer in itertools.pairwise(sizes[1:]):
        layers += [nn.GELU(approximate), nn.Linear(inner, outer)]
    return nn.Sequential(*layers)


def group_norm(channels: int) -> nn.GroupNorm:
    groups = max(1, channels // CHANNELS_PER_GROUP)
    if channels % groups:
        raise ValueError(
            f"{channels} channels (channels, or width times channels) cannot be split into {groups} groups for "
            f"GroupNorm: use a multiple of {CHANNELS_PER_GROUP}, or fewer than {2 * CHANNELS_PER_GROUP}"
        )
    return nn.GroupNorm(groups, channels)


def unrounded(x: Tensor) -> Tensor:
    """The input of an equilibrium: autocast applies inside f, and not to the state."""
    return x.float() if torch.is_autocast_enabled(x.device.type) else x


def checked_size(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} = {value!r} must be an integer of at least 1")
    return value


def checked_form(form: str, forms: Mapping[str, str]) -> str:
    if form not in forms:
        known = ", ".join(f"{name!r} ({meaning})" for name, meaning in forms.items())
        raise ValueError(f"form = {form!r} must be one of {known}")
    return form
