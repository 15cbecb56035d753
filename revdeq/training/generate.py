"""Text from a trained language model."""

import codecs
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..models.decoding import DecodingModel, Draw, check, stream
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
    prompt: str | Sequence[str],
    tokens: int,
    temperature: float = 1.0,
    seed: int = 0,
    top_k: int | None = None,
    top_p: float | None = None,
    device: str | None = None,
    changes: Mapping[str, Any] | None = None,
    slide: int = 1,
    tol: float | None = None,
) -> Iterator[Any]:
    """Continue a prompt with a trained language model.

    A model with a reduced vocabulary generates only tokens in it.

    Args:
        run: As for `revdeq.models.load`.
        folder: The folder of GPT-2's encoding. None is where the training found it.
        prompt: The beginning of the text; or a list of prompts, to be continued in one batch.
        tokens: How many to add.
        temperature: Sampling temperature; 0 always takes the most likely token.
        seed: For sampling.
        top_k: Sample from the k most likely tokens only; None samples from all.
        top_p: Sample from the smallest set of most likely tokens with this total probability; None samples from all.
        device: Such as "cpu" or "cuda:1". None is a GPU, if there is one.
        changes: Settings that override those of the training, max_steps for example.
        slide: By how many positions the window moves when it is full, as for `LanguageModel.generate`.
        tol: The tolerance of every position, as for `LanguageModel.generate`.

    Returns:
        An iterator over pieces of the text; for a list of prompts, over lists of pieces.

    Raises:
        CheckpointError: There is no such checkpoint, or it is not a language model.
        SettingError: tokens, temperature, top_k, top_p, slide or tol is invalid.

    Example:
        >>> from revdeq.training.generate import generate
        >>> small = {"updates": 2, "d": 16, "heads": 2, "vocabulary": "full", "evaluation_batches": 1}
        >>> rows = revdeq.train("wikitext2-tiny", "data", "runs/text", device="cpu", quiet=True, **small)
        >>> text = "".join(generate("runs/text", None, "The sea", tokens=20, top_k=50))
    """
    if tokens < 1:
        raise SettingError(f"tokens = {tokens} must be 1 or larger")
    if isinstance(prompt, Sequence) and not prompt and not isinstance(prompt, str):
        raise SettingError("prompt is an empty list: pass at least one prompt")
    draw = Draw(temperature, top_k, top_p, torch.Generator().manual_seed(seed))
    where = Processes(device).device
    preset, model, saved = loaded(Path(run), None, changes, where)
    if "length" not in preset.settings:
        raise CheckpointError(f"{run} was trained as {preset.name}: only a language model generates text")
    assert isinstance(model, DecodingModel)
    try:
        check(model, tokens, draw, slide, tol)
    except ValueError as error:
        raise SettingError(str(error)) from error
    if folder is None and saved["folder"] is None:
        raise SettingError(f"{run} does not record the folder of GPT-2's encoding: pass it (--data DIR)")
    encoder = encoding.load(encoding.find(folder or Path(saved["folder"])))
    kept = saved.get("data", saved.get("vocabulary"))
    vocabulary = Vocabulary.full(encoder.n_vocab) if kept is None else Vocabulary.restored(kept)
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    contexts = [encoder.encode_ordinary(text) or [encoder.eot_token] for text in prompts]
    rows = [torch.from_numpy(vocabulary.ids[context]).to(where).long() for context in contexts]
    chosen = stream(model, rows, tokens, draw, len(vocabulary.kept), slide=slide, tol=tol)
    pieces = _pieces(chosen, encoder, vocabulary, len(rows))
    return (each for (each,) in pieces) if isinstance(prompt, str) else pieces


def _pieces(
    chosen: Iterator[torch.Tensor], encoder: "tiktoken.Encoding", vocabulary: Vocabulary, count: int
) -> Iterator[list[str]]:
    decoders = [codecs.getincrementaldecoder("utf-8")(errors="replace") for _ in range(count)]  # for split characters
    for tokens in chosen:
        written = [encoder.decode_single_token_bytes(int(vocabulary.kept[token])) for token in tokens.tolist()]
        yield [decoder.decode(piece) for decoder, piece in zip(decoders, written, strict=True)]
    yield [decoder.decode(b"", final=True) for decoder in decoders]
