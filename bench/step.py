"""A whole step, forward and backward, of the paper's blocks against what it cannot do without, and others.

    python bench/step.py

`bare` is the limit: the 2 N evaluations of f of the forward pass and the 2 N evaluations with their
vector-Jacobian products of the backward pass, and nothing else. Providers take turns, so that whatever else
the machine does slows all of them down; a ratio is the median over the rounds.
"""

import argparse
import statistics
import time
import warnings

import torch
from tqdm import tqdm

import revdeq
from revdeq.baselines import checkpointed, stored_graph
from revdeq.measure import peak_memory
from revdeq.models import ConvBlock, TransformerBlock

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
N = 4


def blocks():
    torch.manual_seed(0)
    yield "conv block, C=32, 16x32x32", ConvBlock(32).to(DEVICE), torch.randn(16, 32, 32, 32, device=DEVICE)
    yield "transformer block, d=256, 8x128", TransformerBlock(256).to(DEVICE), torch.randn(8, 128, 256, device=DEVICE)


def bare(f, x, max_steps):
    z, seed, inputs = torch.zeros_like(x), torch.randn_like(x), [x, *f.parameters()]

    def run():
        for _ in range(2 * max_steps):
            f(z.detach().requires_grad_(), x)
        for _ in range(2 * max_steps):
            leaf = z.detach().requires_grad_()
            torch.autograd.grad(f(leaf, x), [leaf, *inputs], seed)

    return run


def step(solver, f, x, max_steps):
    z0, seed, inputs = torch.zeros_like(x), torch.randn_like(x), [x, *f.parameters()]

    def run():
        return torch.autograd.grad(solver(f, z0, x, beta=0.5, max_steps=max_steps), inputs, seed)

    return run


def reversible(*args, max_steps, **settings):
    # At N = 64 only the memory is looked at: that is beyond float64's range, and the check would say so.
    return revdeq.solve(*args, max_steps=max_steps, check="raise" if max_steps == N else "warn", **settings).z


def seconds(run):
    start = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def agree(f, x):
    """A comparison counts only if both sides compute the same."""
    torch.manual_seed(1)
    ours = step(reversible, f, x, N)()
    torch.manual_seed(1)
    stored = step(stored_graph, f, x, N)()
    error = max(((g - s).norm() / s.norm()).item() for g, s in zip(ours, stored, strict=True))
    assert error < 1e-6, f"the gradients differ by {error:.1e}: there is nothing to compare"
    return error


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore", revdeq.ReconstructionWarning)
    # A training run has long since grown the C library's threshold for returning memory to the system.
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
    for name, f, x in blocks():
        x.requires_grad_()
        error = agree(f, x)
        providers = {
            "bare": bare(f, x, N),
            "reversible": step(reversible, f, x, N),
            "checkpoint": step(checkpointed, f, x, N),
            "stored graph": step(stored_graph, f, x, N),
        }
        times = {provider: [] for provider in providers}
        for _ in tqdm(range(rounds), desc=name, leave=False):
            for provider, run in providers.items():
                times[provider].append(seconds(run))
        memory = {n: peak_memory(step(reversible, f, x, n), DEVICE) for n in (N, 64)}
        print(f"{name}, N = {N} (gradients agree to {error:.0e})")
        for provider in providers:
            ratio = statistics.median(t / b for t, b in zip(times[provider], times["bare"], strict=True))
            print(f"  {provider:14}{min(times[provider]) * 1e3:8.1f} ms (minimum){ratio:8.3f}x bare")
        pairs = zip(times["reversible"], times["checkpoint"], strict=True)
        print(f"  reversible over checkpoint {statistics.median(r / c for r, c in pairs):.3f}")
        print(f"  peak memory at N = 64 over N = {N}: {memory[64] / memory[N]:.3f}")


if __name__ == "__main__":
    main()
