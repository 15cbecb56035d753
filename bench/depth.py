"""The cost of depth in a looped model, and the growth of its gradients: the numbers of docs/looped.md.

    python bench/depth.py                           # some minutes: looped.csv, and pictures of it

depth: peak memory and processor time (interleaved) of a forward and a backward pass with N calls of one block, by each
method. The block is that of revdeq.examples.recursive, 64 wide, with 8 sequences of 64 tokens.
plain: how far revdeq.loop is from z <- f(z), for an f that contracts, one that keeps distances, and one that expands.
growth: the growth of the adjoint over N calls at initialisation, for each gamma.
"""

import argparse
import warnings
from pathlib import Path

import plots
import table
import torch
from torch.utils.checkpoint import checkpoint
from turns import one_thread, take_turns

import revdeq
from revdeq._device import peak_memory
from revdeq.examples.recursive import Network

DEPTHS = (8, 16, 32, 64, 128)
CALLS = 4
"""Calls of the block in a large f, and calls with a gradient if it is truncated."""
GAMMAS = (1.0, 0.5, 0.25)
LARGE = 3.4
"""The factor on the block's weights that makes it expand."""
PLAIN = (4, 16, 64)


class Block(torch.nn.Module):
    """f(z, x): `calls` calls of one block, each of them checkpointed if asked for."""

    def __init__(self, width, calls=1, checkpointed=False):
        super().__init__()
        self.network, self.calls, self.checkpointed = Network(width), calls, checkpointed

    def forward(self, z, x):
        for _ in range(self.calls):
            z = checkpoint(self.network, z + x, use_reentrant=False) if self.checkpointed else self.network(z + x)
        return z


def stored(block, z, x, depth):
    for _ in range(depth):
        z = block(z, x)
    return z


def truncated(block, z, x, depth):
    with torch.no_grad():
        z = stored(block, z, x, depth - CALLS)
    return stored(block, z, x, CALLS)


def reversible(block, z, x, depth):
    return revdeq.solve(block, z, x, gamma=0.5, max_steps=depth // 2 // block.calls, state="exact").z


def plain(block, z, x, depth):
    return revdeq.loop(block, z, x, times=depth).z


PROVIDERS = {
    "stored graph": (stored, {}),
    "checkpoint": (stored, {"checkpointed": True}),
    "truncated, last 4 calls": (truncated, {}),
    "reversible, f of 4 calls": (reversible, {"calls": CALLS}),
    "reversible, checkpoint in f": (reversible, {"calls": CALLS, "checkpointed": True}),
    "reversible": (reversible, {}),
    "revdeq.loop": (plain, {}),
}


def problem(width=64, tokens=64, batch=8, **settings):
    torch.manual_seed(0)
    block = Block(width, **settings)
    return block, torch.randn(batch, tokens, width), torch.randn(batch, tokens, width)


def measure_depth(results, depths, clock):
    print(f"{'':30}{'calls':>6}{'MiB':>10}{'ms':>10}")
    for depth in depths:
        runs = {}
        for name, (loop, settings) in PROVIDERS.items():
            block, z0, x = problem(**settings)

            def run(loop=loop, block=block, z0=z0, x=x, depth=depth):
                loop(block, z0, x, depth).square().mean().backward()
                block.zero_grad()

            runs[name] = run
        seconds = take_turns(runs, budget=20.0, rounds=(3, 5), clock=clock)
        for name, run in runs.items():
            size = peak_memory(run)
            results.add("looped, depth", name, depth, "seconds", seconds[name])
            results.add("looped, depth", name, depth, "bytes", [size])
            middle = table.percentiles(seconds[name])[1]
            print(f"{name:30}{depth:6}{size / 2**20:10.1f}{1e3 * middle:10.1f}", flush=True)


KINDS = {"contracts": 0.7, "keeps distances": 1.0, "expands": 1.4}
"""The factor by which f multiplies small distances, roughly."""


class Kind(torch.nn.Module):
    """tanh(factor U z + x), with U orthogonal. States are small, so that tanh is almost linear."""

    def __init__(self, factor, width=64):
        super().__init__()
        self.weight = torch.nn.Parameter(factor * torch.nn.init.orthogonal_(torch.empty(width, width)))

    def forward(self, z, x):
        return torch.tanh(z @ self.weight.T + x)


def gradient(loss, f):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(f.parameters()))])


def measure_plain(results, seeds=5):
    print(f"\nrevdeq.loop against z <- f(z)\n{'f':20}{'times':>6}{'distance':>12}{'cosine':>12}{'growth':>12}")
    for kind, factor in KINDS.items():
        for times in PLAIN:
            distances, cosines, growths = [], [], []
            for seed in range(seeds):
                torch.manual_seed(seed)
                f, z0, x, target = Kind(factor), *(0.1 * torch.randn(3, 16, 64))
                expected, solution = stored(f, z0, x, times), revdeq.loop(f, z0, x, times=times)
                distances.append(((solution.z - expected).norm() / expected.norm()).item())
                ours, theirs = (gradient((z * target).sum(), f) for z in (solution.z, expected))
                cosines.append(torch.nn.functional.cosine_similarity(ours, theirs, 0).item())
                growths.append(solution.adjoint.growth.item())
            for quantity, values in (("distance", distances), ("cosine", cosines), ("growth", growths)):
                results.add(f"looped, plain, {kind}", "revdeq.loop", times, quantity, values)
            middle = [table.percentiles(values)[1] for values in (distances, cosines, growths)]
            print(f"{kind:20}{times:6}{middle[0]:12.1e}{middle[1]:12.5f}{middle[2]:12.1e}", flush=True)


def measure_growth(results, depths, seeds=3):
    print(f"\ngrowth of the adjoint\n{'gamma':20}{'calls':>6}{'growth':>12}")
    for gamma in GAMMAS:
        for depth in depths:
            growths = []
            for seed in range(seeds):
                torch.manual_seed(seed)
                block, z0, x = Block(64), *torch.randn(2, 4, 16, 64)
                with torch.no_grad():
                    for parameter in block.parameters():
                        parameter.mul_(LARGE)
                solution = revdeq.solve(block, z0, x, gamma=gamma, max_steps=depth // 2)
                (solution.z * torch.randn(4, 16, 64)).sum().backward()
                growths.append(solution.adjoint.growth.item())
            results.add("looped, growth", f"gamma {gamma:g}", depth, "growth", growths)
            print(f"{gamma:<20g}{depth:6}{table.percentiles(growths)[1]:12.1e}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=table.results_folder() / "looped.csv", help="default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="two depths")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", revdeq.ConvergenceWarning)  # growth is what is measured
    depths = DEPTHS[:2] if arguments.quick else DEPTHS
    clock, results = one_thread(), table.Table(arguments.out)
    measure_plain(results)
    measure_growth(results, depths)
    measure_depth(results, depths, clock)
    plots.draw(table.read(arguments.out), arguments.out.parent)


if __name__ == "__main__":
    main()
