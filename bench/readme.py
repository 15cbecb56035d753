"""Writes the README's numbers from the table that they were measured in, so that they cannot drift.

    python bench/readme.py            # after make bench
    python bench/readme.py --check    # as the tests do: fails if the README says something else

A table stands in the README between `<!-- numbers: NAME -->` and `<!-- /numbers -->`.
"""

import argparse
import json
import re
import sys
from pathlib import Path

import table

README = Path(__file__).parent.parent / "README.md"
RESULTS = Path(__file__).parent / "results" / "amd-epyc-2-threads"
"""The measurements that the README quotes."""

BLOCKS = ("conv block", "transformer block")


class Numbers:
    def __init__(self, folder):
        self._rows = {row.key: row for row in table.read(folder / "results.csv")}
        self.machine = json.loads((folder / "machine.json").read_text())

    def median(self, benchmark, provider, size, quantity="seconds", dtype="float32"):
        return self._rows[benchmark, provider, size, dtype, quantity].p50

    def ratio(self, benchmark, over, under, size, quantity="seconds"):
        return self.median(benchmark, over, size, quantity) / self.median(benchmark, under, size, quantity)


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def machine(numbers):
    m = numbers.machine
    return f"Measured on {m['cores']} cores of an {m['device'].split(',')[0]} with torch {m['torch'].split('+')[0]}."


def half_step(numbers):
    exponents = (12, 16, 20, 22, 24)
    rows = []
    for label, direction, provider in (
        ("forward: unfused PyTorch", "forward", "unfused"),
        ("`torch.compile` of it, in place", "forward", "torch.compile"),
        ("a copy of the same bytes", "forward", "copy"),
        ("ours with the exact state", "forward", "fused, exact state"),
        ("backward: unfused PyTorch", "backward", "unfused"),
        ("`torch.compile` of it, in place", "backward", "torch.compile"),
        ("ours with the exact state", "backward", "fused, exact state"),
    ):
        ratios = [numbers.ratio(f"{direction} half-step", provider, "fused", 2**k) for k in exponents]
        rows.append([label, *(f"{r:.1f}x" for r in ratios)])
    return markdown(["slowdown relative to our fused half-step, by tensor size", *(f"2^{k}" for k in exponents)], rows)


def whole_step(numbers, n=8):
    rows = []
    for label, provider, quantity in (
        ("time, over the bare evaluations of f", "bare", "seconds"),
        ("time, over the stored graph", "stored graph", "seconds"),
        ("time, over `torch.utils.checkpoint`", "checkpoint", "seconds"),
        ("time, over torchdeq (Anderson, IFT), as many iterations", "torchdeq Anderson, IFT", "seconds"),
        ("memory, over the stored graph", "stored graph", "bytes"),
        ("memory, over `torch.utils.checkpoint`", "checkpoint", "bytes"),
    ):
        cells = [numbers.ratio(f"step, {block}", "reversible", provider, n, quantity) for block in BLOCKS]
        rows.append([label, *(f"{x:.2f}" for x in cells)])
    name = "torchdeq Anderson, IFT, 30 iterations"
    for quantity, label in (("seconds", "time"), ("bytes", "memory")):
        cells = [numbers.ratio(f"step, {block}", "reversible", name, n, quantity) for block in BLOCKS]
        rows.append([f"{label}, over torchdeq (Anderson, IFT) with 30 iterations", *(f"{x:.2f}" for x in cells)])
    exact = "reversible, exact state"
    deep = [numbers.ratio(f"step, {block}", exact, "stored graph", 64, "bytes") for block in BLOCKS]
    rows.append(["memory, exact state over the stored graph, N = 64", *(f"{x:.3f}" for x in deep)])
    return markdown([f"our training step, N = {n}", *BLOCKS], rows)


def reversal(numbers):
    depths = (1, 4, 8, 16, 32, 64)
    rows = []
    for block in BLOCKS:
        for label, provider in (("float64", "reversible"), ("exact", "reversible, exact state")):
            errors = [numbers.median(f"step, {block}", provider, n, "reversal error") for n in depths]
            rows.append([f"{block}, {label}", *("0" if e == 0 else f"{e:.0e}" for e in errors)])
    title = "gradient error introduced by running the solve backwards, beta .5"
    return markdown([title, *(f"N = {n}" for n in depths)], rows)


TABLES = {"machine": machine, "half-step": half_step, "whole-step": whole_step, "reversal": reversal}


def filled(text, numbers):
    def block(match):
        name = match[1]
        if name not in TABLES:
            raise SystemExit(f"README.md asks for the numbers {name!r}: there are {', '.join(TABLES)}")
        return f"<!-- numbers: {name} -->\n{TABLES[name](numbers)}\n<!-- /numbers -->"

    return re.sub(r"<!-- numbers: (\S+) -->\n.*?<!-- /numbers -->", block, text, flags=re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    arguments = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    new = filled(text, Numbers(RESULTS))
    if arguments.check and new != text:
        print("The README's numbers are not those of bench/results: run python bench/readme.py", file=sys.stderr)
        return 1
    if not arguments.check:
        README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
