"""Decoding: the time of one more token at the end of a text, with and without key-value caches.

    python bench/decode.py

The model is a small `LanguageModel` of the form "pre-norm" with N = 4 steps, that is, 8 evaluations of its block. It is
compared, interleaved, with:

whole sequence     the same model without caches, which evaluates all positions for every token
explicit, looped   a pre-norm transformer whose 8 layers are one and the same: the same parameters, and as many
                   evaluations, so that the ratio of times is that of one evaluation (with its share of the embedding
                   and of the head)
explicit           a transformer of 2 layers with as many parameters in total: a quarter of the evaluations

Times are processor time on one thread, which is fastest for a single position, with greedy decoding. The table has the
memory of the caches; `explicit` needs a quarter, for a quarter of the evaluations.
"""

import time

import torch
from table import device, options
from torch import nn
from tqdm import tqdm
from turns import one_thread, ratio, take_turns

from revdeq.models import LanguageModel, Transformer, count_parameters
from revdeq.models.caches import Caches
from revdeq.models.decoding import Draw

DEVICE = device()
SIZES = {"vocabulary": 1024, "d": 256, "heads": 8}
STEPS = 4
PROMPTS, LENGTHS = (1, 8, 64), (64, 512)
OURS, WHOLE, LOOPED, EXPLICIT = "equilibrium", "whole sequence", "explicit, looped", "explicit"
LIKELIEST = Draw(0.0, None, None, None)


def models(length):
    torch.manual_seed(0)
    ours = LanguageModel(**SIZES, length=length, wide_heads=False, form="pre-norm", max_steps=STEPS)
    looped = Transformer(**SIZES, length=length, depth=1)
    looped.layers = nn.Sequential(*[looped.layers[0]] * 2 * STEPS)
    explicit = Transformer.sized(count_parameters(ours), **SIZES, length=length, depth=2)
    return {name: model.to(DEVICE).eval() for name, model in ((OURS, ours), (LOOPED, looped), (EXPLICIT, explicit))}


def at_the_end(model, prompts, length):
    """A function that computes the token after this many positions, and its caches."""
    tokens = torch.randint(SIZES["vocabulary"], (prompts, 1), device=DEVICE)
    caches = Caches(length, torch.zeros(prompts, dtype=torch.long, device=DEVICE))

    def token():
        caches.end = length - 1
        for cache in caches._each:
            cache._end = caches.end
        caches.advance(1)
        return LIKELIEST.of_each(model._decoded(tokens, caches))

    token()
    for cache in caches._each:  # as if the earlier positions had been evaluated
        for x in cache._kept():
            x.normal_()
    return token, caches


@torch.no_grad()
def measured(prompts, length, budget, clock):
    runs, memory = {}, {}
    each = models(length)
    for name, model in each.items():
        runs[name], caches = at_the_end(model, prompts, length)
        memory[name] = caches.bytes
    texts = torch.randint(SIZES["vocabulary"], (prompts, length), device=DEVICE)
    times = take_turns(runs, budget, rounds=(5, 50), clock=clock)
    both = {OURS: runs[OURS], WHOLE: lambda: LIKELIEST.of_each(each[OURS](texts)[:, -1])}
    against = take_turns(both, budget, rounds=(1, 9), clock=clock)
    times[WHOLE] = against[WHOLE]
    ratios = {name: ratio(times[name], times[LOOPED]) for name in runs}
    return times, memory, ratios, ratio(against[WHOLE], against[OURS])


def main():
    table, quick = options(__doc__, "short texts, and one or eight prompts")
    clock = one_thread()
    cases = [(prompts, length) for length in LENGTHS for prompts in PROMPTS]
    if quick:
        cases = [(prompts, 64) for prompts in (1, 8)]
    print(f"{'length':>6}{'prompts':>9}  {'':18}{'tokens per second':>18}{'of looped':>11}{'caches':>11}")
    for prompts, length in tqdm(cases, desc="tokens", leave=False, disable=None):
        times, memory, ratios, gain = measured(prompts, length, 1.0 if quick else 6.0, clock)
        for name, seconds in times.items():
            over = "" if name == WHOLE else f"{ratios[name]:.2f}"
            size = f"{memory[name] / 2**20:.1f} MiB" if name in memory else ""
            print(f"{length:6}{prompts:9}  {name:18}{prompts / min(seconds):18,.0f}{over:>11}{size:>11}")
            if table is None:
                continue
            case = f"decode, {prompts} prompts"
            table.add(case, name, length, "seconds", seconds)
            if name in memory:
                table.add(case, name, length, "bytes", [memory[name]])
                table.add(case, name, length, "of an explicit evaluation", [ratios[name]])
        print(f"{'':17}caches are {gain:.0f} times as fast")
        if table is not None:
            table.add(f"decode, {prompts} prompts", OURS, length, "times as fast as the whole sequence", [gain])


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - start:.0f} s")
