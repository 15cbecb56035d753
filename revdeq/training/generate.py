"""Text from a trained language model, token by token."""

import codecs
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from .checkpoint import CheckpointError
from .data import encoding
from .data.wikitext import Vocabulary
from .presets import SettingError
from .processes import Processes
from .restore import loaded

if TYPE_CHECKING:
    import tiktoken

__all__ = ["generate"]


def generate(
    run: str | Path,
    folder: Path | None,
    prompt: str,
    tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    top_k: int | None = None,
    top_p: float | None = None,
    device: str | None = None,
    changes: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """What a trained language model writes after a prompt.

    A model with a restricted vocabulary never writes a token outside of it.

    Args:
        run: As for `revdeq.models.load`.
        folder: Where GPT-2's encoding is. None is where the training found it.
        prompt: What the text begins with.
        tokens: How many to add.
        temperature: Of the draw; 0 always takes the likeliest token.
        seed: Of the draw.
        top_k: Draw from so many of the likeliest tokens only; None draws from all.
        top_p: Draw from the fewest likeliest tokens that have this probability together; None draws from all.
        device: Such as "cpu" or "cuda:1". None is a GPU, if there is one.
        changes: Settings to differ from those of the training, max_steps for example.

    Returns:
        The text, piece by piece.

    Raises:
        CheckpointError: There is no such checkpoint, or it is not of a language model.
        SettingError: tokens, temperature, top_k or top_p is not possible.

    Example:
        >>> from revdeq.training.generate import generate
        >>> small = {"updates": 2, "d": 16, "heads": 2, "vocabulary": "full", "evaluation_batches": 1}
        >>> rows = revdeq.train("wikitext2-tiny", "data", "runs/text", device="cpu", quiet=True, **small)
        >>> text = "".join(generate("runs/text", None, "The sea", tokens=20, top_k=50))
    """
    if tokens < 1:
        raise SettingError(f"tokens={tokens}: it must be 1 or larger")
    if not 0 <= temperature < float("inf"):
        raise SettingError(f"temperature={temperature}: it must be 0 or larger")
    if top_k is not None and top_k < 1:
        raise SettingError(f"top_k={top_k}: it must be 1 or larger")
    if top_p is not None and not 0 < top_p <= 1:
        raise SettingError(f"top_p={top_p}: it must be larger than 0 and at most 1")
    where = Processes(device).device
    preset, model, saved = loaded(Path(run), None, changes, where)
    if "length" not in preset.settings:
        raise CheckpointError(f"{run} is of {preset.name}: only a language model generates text")
    if folder is None and saved["folder"] is None:
        raise SettingError(f"{run} does not say where GPT-2's encoding is: pass the folder (--data DIR)")
    encoder = encoding.load(encoding.find(folder or Path(saved["folder"])))
    kept = saved.get("data", saved.get("vocabulary"))
    vocabulary = Vocabulary.full(encoder.n_vocab) if kept is None else Vocabulary.restored(kept)
    context = encoder.encode_ordinary(prompt) or [encoder.eot_token]
    ids = torch.from_numpy(vocabulary.ids[context])
    draw = Draw(temperature, top_k, top_p, torch.Generator().manual_seed(seed))
    return _pieces(model, encoder, vocabulary, ids.to(where), tokens, draw, preset.settings["length"])


class Draw(NamedTuple):
    """How the next token is chosen. All of it happens on the CPU, so that a seed is the same everywhere."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator

    def __call__(self, logits: Tensor) -> int:
        if self.temperature == 0:
            return int(logits.argmax())
        probabilities, tokens = (logits / self.temperature).softmax(0).sort(descending=True, stable=True)
        if self.top_k is not None:
            probabilities = probabilities[: self.top_k]
        if self.top_p is not None:  # those before which less than top_p is gathered: the first one always is
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities[before < self.top_p * probabilities.sum()]
        return int(tokens[torch.multinomial(probabilities, 1, generator=self.generator)])


def _pieces(
    model: nn.Module,
    encoder: "tiktoken.Encoding",
    vocabulary: Vocabulary,
    ids: torch.Tensor,
    tokens: int,
    draw: Draw,
    length: int,
) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")  # a letter may be more than one token
    for _ in range(tokens):
        with torch.no_grad():
            logits = model(ids[None, -length:])[0, -1, : len(vocabulary.kept)]
        chosen = draw(logits.float().cpu())
        ids = torch.cat([ids, ids.new_tensor([chosen])])
        yield decoder.decode(encoder.decode_single_token_bytes(int(vocabulary.kept[chosen])))
    yield decoder.decode(b"", final=True)
