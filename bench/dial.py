"""The dial between time and memory: a training step that keeps the graphs of some of its evaluations (`keep`), beside
the stored graph, torch.utils.checkpoint and torchdeq, on one thread and in turns.

    python bench/dial.py
"""

import functools
import multiprocessing
import time

import torch
from step import PRELOADED, SHAPES, SOLVERS, gradient, peak_of, problem, reversible
from table import options
from tqdm import tqdm
from turns import one_thread, ratio, take_turns

N = 8
KEPT = (0, 2, 4, 8, 12, 16)
OTHERS = ("stored graph", "checkpoint", "torchdeq Anderson, IFT")
"""Of as many evaluations. torchdeq's gradient is another, that of the fixed point as far as it was reached; beside it
stands ours of the same kind, "implicit"."""


def solver(provider):
    if provider in OTHERS:
        return SOLVERS[provider]
    if provider == "implicit":
        return functools.partial(reversible, gradient="implicit", check=None)
    return functools.partial(reversible, keep=int(provider.removeprefix("keep ")))


def peak(provider, block):
    """Run in a fresh process."""
    torch.set_num_threads(1)
    return peak_of(solver(provider), block, N)


def main():
    table, quick = options(__doc__, "the conv block, three points, few rounds")
    clock = one_thread()
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    providers = ["keep 0", "keep 8", "stored graph"] if quick else [*(f"keep {k}" for k in KEPT), *OTHERS, "implicit"]
    for block in tqdm(["conv block"] if quick else SHAPES, desc="dial", leave=False, disable=None):
        f, x, seed = problem(block)
        runs = {name: functools.partial(gradient, solver(name), f, x, N, seed) for name in providers}
        times = take_turns(runs, 2.0 if quick else 10.0, rounds=(3, 15), clock=clock)
        print(
            f"\n{block}, N = {N}\n  {'':26}{'time':>12}{'over stored graph':>20}{'memory':>14}{'over stored graph':>20}"
        )
        with processes.Pool(1, maxtasksperchild=1) as pool:
            memory = {name: pool.apply(peak, (name, block)) for name in providers}
        for name in providers:
            slower, larger = ratio(times[name], times["stored graph"]), memory[name] / memory["stored graph"]
            took, size = f"{min(times[name]) * 1e3:.1f} ms", f"{memory[name] / 2**20:.1f} MiB"
            print(f"  {name:26}{took:>12}{slower:20.3f}{size:>14}{larger:20.3f}")
            if table:
                table.add(f"dial, {block}", name, N, "seconds", times[name])
                table.add(f"dial, {block}", name, N, "time over stored graph", [slower])
                table.add(f"dial, {block}", name, N, "bytes", [memory[name]])


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"\n{time.perf_counter() - start:.0f} s")
