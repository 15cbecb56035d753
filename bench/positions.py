"""Text with a tolerance: each position by its own number of evaluations.

    REVDEQ_DATA=DIR python bench/positions.py

The model is `wikitext2-tiny`, trained as bench/trained.py does it. Positions are the examples of a solve with
`per_example=True`: a position that has stopped still feeds those after it, and as the block is causal, it depends on
none of them. Beside it, all positions take N steps. Printed are the mean number of evaluations of a position and the
perplexity of validation text.
"""

import itertools
import os
import time
from pathlib import Path

import torch
import torch.nn.functional as F
import trained
from table import options

import revdeq
from revdeq.training.presets import configured
from revdeq.training.restore import restored
from revdeq.training.run import train

PRESET, STEPS, TOLERANCES, MOST = "wikitext2-tiny", (1, 2, 3, 4, 6, 8), (0.5, 0.3, 0.2, 0.1, 0.05, 0.02), 8


def model_and_text(batches):
    data, out = Path(os.environ["REVDEQ_DATA"]), trained.RUNS / PRESET
    train(configured(PRESET, trained.SETTINGS[PRESET]), data, out, resume=True, device="cpu")
    found = restored(out / "last.pt", data)
    return found.model.eval(), list(itertools.islice(found.dataset.evaluation("valid", 8), batches))


@torch.no_grad()
def perplexity(model, batches, **given):
    """Of the batches, and the mean number of evaluations of a position."""
    equilibrium, losses, evaluations = model.equilibrium, [], []
    for batch in batches:
        x = model.embed(batch.inputs)
        shape = x.shape

        def f(z, x, shape=shape):
            return equilibrium.f(z.view(shape), x.view(shape)).flatten(0, 1)

        positions = x.flatten(0, 1)
        coefficients = {"beta": equilibrium.beta, "gamma": equilibrium.gamma}
        solution = revdeq.solve(f, torch.zeros_like(positions), positions, **coefficients, **given)
        logits = model.embed.logits(solution.z.view(shape))
        losses.append(F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten()))
        evaluations.append(2 * torch.as_tensor(solution.steps).float().mean())
    return torch.stack(losses).mean().exp().item(), torch.stack(evaluations).mean().item()


def main():
    table, quick = options(__doc__, "one batch")
    torch.set_num_threads(1)
    if not os.environ.get("REVDEQ_DATA"):
        print("positions are left out: set REVDEQ_DATA to a folder with WikiText-2")
        return
    model, batches = model_and_text(1 if quick else 4)
    print(f"{'':24}{'evaluations of a position':>27}{'perplexity':>12}")
    ways = [(f"N = {n}", {"max_steps": n}) for n in STEPS]
    ways += [(f"tol = {tol:g}", {"tol": tol, "max_steps": MOST, "per_example": True}) for tol in TOLERANCES]
    for way, given in ways:
        value, evaluations = perplexity(model, batches, **given)
        print(f"{way:24}{evaluations:27.2f}{value:12.1f}")
        if table is not None:
            table.add("positions, wikitext2-tiny", way, given["max_steps"], "perplexity", [value])
            table.add("positions, wikitext2-tiny", way, given["max_steps"], "evaluations of a position", [evaluations])


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - start:.0f} s")
