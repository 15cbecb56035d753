"""Text from a trained language model, token by token."""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from . import checkpoint
from .checkpoint import CheckpointError
from .data import encoding
from .data.wikitext import Vocabulary
from .presets import Preset, SettingError

if TYPE_CHECKING:
    import tiktoken

__all__ = ["generate"]


def generate(
    path: Path, folder: Path | None, prompt: str, tokens: int, temperature: float = 1.0, seed: int = 0
) -> Iterator[str]:
    """What a trained language model writes after a prompt.

    A model with a restricted vocabulary never writes a token outside of it.

    Args:
        path: Of the checkpoint.
        folder: Where GPT-2's encoding is. None is where the training found it.
        prompt: What the text begins with.
        tokens: How many to add.
        temperature: Of the draw; 0 always takes the likeliest token.
        seed: Of the draw.

    Returns:
        The text, piece by piece.

    Raises:
        CheckpointError: There is no such checkpoint, or it is not of a language model.
        SettingError: tokens or temperature is not possible.

    Example:
        >>> from revdeq.training.generate import generate
        >>> small = {"updates": 2, "d": 16, "heads": 2, "vocabulary": "full", "evaluation_batches": 1}
        >>> preset = revdeq.training.configured("wikitext2-tiny", small)
        >>> rows = revdeq.training.train(preset, Path("data"), Path("runs/text"), device="cpu", quiet=True)
        >>> text = "".join(generate(Path("runs/text/best.pt"), None, "The sea", tokens=20))
    """
    if tokens < 1:
        raise SettingError(f"tokens={tokens}: it must be 1 or larger")
    if not 0 <= temperature < float("inf"):
        raise SettingError(f"temperature={temperature}: it must be 0 or larger")
    saved = checkpoint.load(path)
    preset = Preset.from_dict(saved["preset"])
    if "length" not in preset.settings:
        raise CheckpointError(f"{path} is of {preset.name}: only a language model generates text")
    encoder = encoding.load(encoding.find(folder or Path(saved["folder"])))
    kept = saved.get("data", saved.get("vocabulary"))
    vocabulary = Vocabulary.full(encoder.n_vocab) if kept is None else Vocabulary.restored(kept)
    model = preset.build(vocabulary=vocabulary.size)
    checkpoint.load_weights(model, path, saved)
    context = encoder.encode_ordinary(prompt) or [encoder.eot_token]
    ids = torch.from_numpy(vocabulary.ids[context])
    return _pieces(model.eval(), encoder, vocabulary, ids, tokens, temperature, seed, preset.settings["length"])


def _pieces(
    model: nn.Module,
    encoder: "tiktoken.Encoding",
    vocabulary: Vocabulary,
    ids: torch.Tensor,
    tokens: int,
    temperature: float,
    seed: int,
    length: int,
) -> Iterator[str]:
    generator = torch.Generator().manual_seed(seed)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a letter may be more than one token
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(ids[None, -length:])[0, -1, : len(vocabulary.kept)].float()
        if temperature == 0:
            chosen = logits.argmax().view(1)
        else:
            chosen = torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
        ids = torch.cat([ids, chosen])
        token = int(vocabulary.kept[int(chosen)])
        yield decoder.decode(encoder.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)
