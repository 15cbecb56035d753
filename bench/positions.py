"""Text with a tolerance: each position takes its own number of evaluations.

    REVDEQ_DATA=DIR python bench/positions.py

The model is `wikitext2-tiny`, trained as in bench/trained.py, with a tolerance for every position or with N steps for
all. It prints the mean number of evaluations of a position, the perplexity of validation text, and the tokens per
second of decoding that text with caches, for 1 and for 8 texts at once, with the same logits: processor time on one
thread, interleaved. A batch takes as many steps as the slowest of its positions.
"""

import functools
import itertools
import os
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import trained
from table import options
from turns import one_thread, take_turns

from revdeq.models.decoding import Decoder
from revdeq.training.presets import configured
from revdeq.training.restore import restored
from revdeq.training.run import train

PRESET, STEPS, TOLERANCES, MOST = "wikitext2-tiny", (1, 2, 3, 4, 6, 8), (0.5, 0.3, 0.2, 0.1, 0.05, 0.02), 8
TEXTS, PROMPT = (1, 8), 8


def model_and_text(batches):
    data, out = Path(os.environ["REVDEQ_DATA"]), trained.RUNS / PRESET
    train(configured(PRESET, trained.SETTINGS[PRESET]), data, out, resume=True, device="cpu")
    found = restored(out / "last.pt", data)
    return found.model.eval(), list(itertools.islice(found.dataset.evaluation("valid", 8), batches))


@torch.no_grad()
def perplexity(model, batches, tol):
    """The perplexity of the batches, and the mean number of evaluations of a position."""
    losses, evaluations = [], []
    for batch in batches:
        logits = model(batch.inputs, tol=tol)
        losses.append(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()))
        evaluations.append(2 * torch.as_tensor(model.equilibrium.last.steps).double().mean())
    return torch.stack(losses).mean().exp().item(), torch.stack(evaluations).mean().item()


@torch.no_grad()
def decode(model, texts, steps, tol):
    """A short prompt, and then the text, token by token."""
    model.equilibrium.max_steps = steps
    decoder = Decoder(model, list(texts[:, :PROMPT]), texts.shape[1], tol=tol)
    decoder.logits()
    for tokens in texts[:, PROMPT:].T:
        decoder.append(tokens)
        decoder.logits()


def main():
    table, quick = options(__doc__, "one batch")
    clock = one_thread()
    if not os.environ.get("REVDEQ_DATA"):
        print("positions are left out: set REVDEQ_DATA to a folder with WikiText-2")
        return
    model, batches = model_and_text(1 if quick else 4)
    ways = {f"N = {n}": (n, None) for n in STEPS} | {f"tol = {tol:g}": (MOST, tol) for tol in TOLERANCES}
    times = {}
    for count in TEXTS:
        texts = batches[0].inputs[:count]
        runs = {way: functools.partial(decode, model, texts, *given) for way, given in ways.items()}
        times[count] = take_turns(runs, 4.0 if quick else 40.0, rounds=(2, 25), clock=clock)
    header = "".join(f"{f'{count} texts':>12}" for count in TEXTS)
    print(f"{'':12}{'evaluations of a position':>27}{'perplexity':>12}   tokens per second:{header}")
    for way, (steps, tol) in ways.items():
        model.equilibrium.max_steps = steps
        value, evaluations = perplexity(model, batches, tol)
        tokens = {n: n * (batches[0].inputs.shape[1] - PROMPT) for n in TEXTS}
        speed = "".join(f"{tokens[n] / statistics.median(times[n][way]):12,.0f}" for n in TEXTS)
        print(f"{way:12}{evaluations:27.2f}{value:12.1f}{'':21}{speed}")
        if table is not None:
            case = "positions, wikitext2-tiny"
            table.add(case, way, steps, "perplexity", [value])
            table.add(case, way, steps, "evaluations of a position", [evaluations])
            for n in TEXTS:
                of_a_token = [seconds / tokens[n] for seconds in times[n][way]]
                table.add(f"{case}, {n} texts", way, steps, "seconds", of_a_token)


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - start:.0f} s")
