"""Writes the tables of README.md, docs/speed.md and docs/gpu.md from bench/results.

    python bench/readme.py            # after make bench
    python bench/readme.py --check    # exit code 1 if a page is out of date

A table is between `<!-- numbers: NAME -->` and `<!-- /numbers -->`.
"""

import argparse
import functools
import json
import math
import re
import sys
from pathlib import Path

import table

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs/speed.md", ROOT / "docs/gpu.md")
RESULTS = Path(__file__).parent / "results" / "amd-epyc-2-threads"
"""The measurements that the pages quote."""

BLOCKS = ("conv block", "transformer block")


class Numbers:
    def __init__(self, folder):
        self._rows = {row.key: row for row in table.read(folder / "results.csv")}
        self.machine = json.loads((folder / "machine.json").read_text())

    def row(self, benchmark, provider, size, quantity="seconds"):
        return self._rows[benchmark, provider, size, "float32", quantity]

    def median(self, benchmark, provider, size, quantity="seconds"):
        return self.row(benchmark, provider, size, quantity).p50

    def by_size(self, benchmark, provider, quantity):
        """A dict of medians by size."""
        keys = [key for key in self._rows if key[:2] == (benchmark, provider) and key[-1] == quantity]
        return {key[2]: self._rows[key].p50 for key in sorted(keys, key=lambda key: key[2])}

    def providers(self, benchmark, quantity=None):
        keys = [key for key in self._rows if key[0] == benchmark and quantity in (None, key[-1])]
        return list(dict.fromkeys(key[1] for key in keys))

    def per_element(self, benchmark, provider, quantity):
        ((size, total),) = self.by_size(benchmark, provider, quantity).items()
        return total / size

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
        ("the same, in place", "forward", "unfused, in place"),
        ("`torch.compile` of it, in place", "forward", "torch.compile"),
        ("a copy of the same bytes", "forward", "copy"),
        ("ours with the exact state", "forward", "fused, exact state"),
        ("backward: unfused PyTorch", "backward", "unfused"),
        ("the same, in place", "backward", "unfused, in place"),
        ("`torch.compile` of it, in place", "backward", "torch.compile"),
        ("ours with the exact state", "backward", "fused, exact state"),
    ):
        ratios = [numbers.ratio(f"{direction} half-step", provider, "fused", 2**k) for k in exponents]
        rows.append([label, *(f"{r:.1f}x" for r in ratios)])
    return markdown(["slowdown relative to our fused half-step, by tensor size", *(f"2^{k}" for k in exponents)], rows)


SHORT_STEP = {
    "revdeq": "reversible",
    "revdeq, `keep=8`": "keep 8",
    "`torch.utils.checkpoint`": "checkpoint",
    "torchdeq (Anderson, IFT), 30 iterations": "torchdeq Anderson, IFT, 30 iterations",
    'revdeq, `gradient="implicit"`': "implicit",
}
STEP = {
    "the bare evaluations of f": "bare",
    "revdeq": "reversible",
    'revdeq, `state="exact"`': "reversible, exact state",
    **{f"revdeq, `keep={k}`": f"keep {k}" for k in (2, 4, 8, 12, 16)},
    "`torch.utils.checkpoint`": "checkpoint",
    'implicit gradient: revdeq, `gradient="implicit"`': "implicit",
    "implicit gradient: torchdeq (Anderson, IFT), 16 iterations": "torchdeq Anderson, IFT",
    "implicit gradient: torchdeq (Anderson, IFT), 30 iterations": "torchdeq Anderson, IFT, 30 iterations",
}


def training_step(numbers, methods, n=8):
    """Time with its spread over the rounds, and memory, both over the stored graph."""
    rows = []
    for label, provider in methods.items():
        cells = [label]
        for block in BLOCKS:
            time = numbers.row(f"step, {block}", provider, n, "time over stored graph")
            cells.append(f"{time.p50:.2f} ({time.p20:.2f} to {time.p80:.2f})")
            known = provider in numbers.providers(f"step, {block}", "bytes")
            memory = known and numbers.ratio(f"step, {block}", provider, "stored graph", n, "bytes")
            cells.append(f"{memory:.2f}" if known else "")
        rows.append(cells)
    header = [f"{block}: {what}" for block in BLOCKS for what in ("time", "memory")]
    return markdown([f"relative to the stored graph, N = {n}", *header], rows)


def deep_memory(numbers, n=64):
    exact = "reversible, exact state"
    ours = [numbers.ratio(f"step, {block}", exact, "stored graph", n, "bytes") for block in BLOCKS]
    parts = [f"{ratio:.1%} ({block})" for ratio, block in zip(ours, BLOCKS, strict=True)]
    return f"At N = {n}, with the exact state, memory is {' and '.join(parts)} of the stored graph's."


def reversal(numbers):
    depths = (1, 4, 8, 16, 32, 64)
    rows = []
    for block in BLOCKS:
        for label, provider in (("float64", "reversible"), ("exact", "reversible, exact state")):
            errors = [numbers.median(f"step, {block}", provider, n, "reversal error") for n in depths]
            rows.append([f"{block}, {label}", *("0" if e == 0 else f"{e:.0e}" for e in errors)])
    title = "gradient error introduced by running the solve backwards, beta .5"
    return markdown([title, *(f"N = {n}" for n in depths)], rows)


FOUR = ("conv block", "transformer block", "trained conv block", "trained transformer block")
ANDERSON = ("Anderson", "Anderson as it is")
IMPLICIT = ("Anderson, IFT", "Anderson as it is, IFT", "Broyden, IFT")


def evaluations_to(numbers, block, names):
    """The fewest evaluations by any of the methods to a residual of 1e-2 / 1e-3 / 1e-4."""
    cells = []
    for target in (1e-2, 1e-3, 1e-4):
        found = [numbers.by_size(f"residual, {block}", name, "residual") for name in names]
        reached = [k for sizes in found for k, size in sizes.items() if size <= target]
        cells.append(str(min(reached)) if reached else "-")
    return " / ".join(cells)


def least(numbers, benchmark, names, quantity):
    """The least by any of the methods; None if there is none."""
    return min((v for name in names for v in numbers.by_size(benchmark, name, quantity).values()), default=None)


def time_to(numbers, benchmark, names, target):
    """The least time by any of the methods to reach a distance, interpolated linearly in its logarithm; None if none
    reaches it."""
    found = []
    for name in names:
        seconds, distances = (numbers.by_size(benchmark, name, quantity) for quantity in ("seconds", "distance"))
        points = [(seconds[k], math.log(distances[k] / target)) for k in seconds]
        for before, (time, height) in zip([None, *points], points, strict=False):
            if height <= 0:
                first = before is None
                found.append(time if first else before[0] + before[1] / (before[1] - height) * (time - before[0]))
                break
    return min(found, default=None)


def over(ours, theirs):
    """Their ratio; "slower" or "faster" if only one is known, and a dash if none is."""
    if ours is None:
        return "-" if theirs is None else "slower"
    return "faster" if theirs is None else f"{ours / theirs:.2f}"


def convergence(numbers):
    rows = []
    for label, names in (
        ("ours, tuned", ["ours, tuned"]),
        ("ours, the paper's beta .8", ["ours, beta .8"]),
        ("ours, the paper's beta .5", ["ours, beta .5"]),
        ("torchdeq's Anderson, tuned or as it is", ANDERSON),
        ("torchdeq's Broyden", ["Broyden"]),
    ):
        rows.append([label, *(evaluations_to(numbers, block, names) for block in FOUR)])
    for quantity, label in (("seconds", "time"), ("bytes", "memory")):
        cells = []
        for block in FOUR:
            benchmarks = [f"residual {target}, {block}" for target in ("1e-2", "1e-3", "1e-4")]
            pairs = [
                (least(numbers, b, ["ours, tuned"], quantity), least(numbers, b, ANDERSON, quantity))
                for b in benchmarks
            ]
            cells.append(" / ".join(over(*pair) for pair in pairs))
        rows.append([f"{label} of ours, tuned, over Anderson's", *cells])
    cells = []
    for block in FOUR:  # schedules were made for up to 16 evaluations of trained blocks
        benchmarks = [f"residual {target}, {block}" for target in ("1e-2", "1e-3")]
        scheduled = [least(numbers, b, ["ours, schedule"], "seconds") for b in benchmarks]
        theirs = [least(numbers, b, ANDERSON, "seconds") for b in benchmarks]
        cells.append(" / ".join(over(*pair) for pair in zip(scheduled, theirs, strict=True)) if any(scheduled) else "")
    rows.append(["time of ours, with a schedule, over Anderson's, to 1e-2 / 1e-3", *cells])
    return markdown(["evaluations to a residual of 1e-2 / 1e-3 / 1e-4", *FOUR], rows)


def schedule(numbers):
    """Residuals on held-out batches, by the number of evaluations."""
    rows, counts = [], []
    for block in (b for b in FOUR if numbers.providers(f"held out, {b}")):
        found = {
            name: numbers.by_size(f"held out, {block}", name, "residual")
            for name in ("ours, schedule", "ours, tuned", "Anderson")
        }
        counts = list(found["ours, schedule"])
        for name, label in (
            ("ours, schedule", "a pair for every half-step"),
            ("ours, tuned", "the best pair for all"),
            ("Anderson", "torchdeq's Anderson, best of 24 settings"),
        ):
            rows.append([f"{block}: {label}", *(f"{found[name][k]:.1e}" for k in counts)])
        ratios = [found["ours, schedule"][k] / found["Anderson"][k] for k in counts]
        rows.append([f"{block}: schedule over Anderson", *(f"{r:.2f}" for r in ratios)])
    return markdown(["residual on held-out batches, by evaluations", *map(str, counts)], rows)


def implicit(numbers):
    """Time and memory to reach the same distance from the fixed point's gradient."""
    rows = []
    ours, exact = ["ours, tuned, implicit"], ["ours, tuned, exact"]
    comparisons = (
        ("torchdeq's Anderson as it is", ours, ["Anderson as it is, IFT"]),
        ("the best of torchdeq's, tuned as well", ours, IMPLICIT),
        ('the same, ours with gradient="exact"', exact, IMPLICIT),
    )
    for label, mine, theirs in comparisons:
        cells = []
        for block in FOUR:
            ratios = []
            for target in (1e-1, 1e-2, 1e-3):
                times = [time_to(numbers, f"gradient, {block}", names, target) for names in (mine, theirs)]
                ratios.append(over(*times))
            cells.append(" / ".join(ratios))
        rows.append([f"time over {label}", *cells])
    for kind in ("implicit", "exact"):
        cells = []
        for block in FOUR:  # schedules were made for up to 16 evaluations of trained blocks
            mine, benchmark = f"ours, schedule, {kind}", f"gradient, {block}"
            times = [[time_to(numbers, benchmark, names, t) for names in ([mine], IMPLICIT)] for t in (1e-1, 1e-2)]
            known = mine in numbers.providers(benchmark, "seconds")
            cells.append(" / ".join(over(*pair) for pair in times) if known else "")
        rows.append([f'time to 1e-1 / 1e-2 over the same, ours with a schedule and gradient="{kind}"', *cells])
    for label, mine, theirs in comparisons:
        both = [[least(numbers, f"gradient, {block}", names, "bytes") for names in (mine, theirs)] for block in FOUR]
        rows.append([f"memory over {label}", *(over(*pair) for pair in both)])
    return markdown(["to a distance of 1e-1 / 1e-2 / 1e-3 from the fixed point's gradient, by IFT", *FOUR], rows)


def examples(numbers):
    kinds = ("mazes", "prefix sums")
    ways = ("all steps", "whole batch", "per example", "per example, compact")

    def cell(kind, way, quantity):
        return next(iter(numbers.by_size(f"examples, {kind}", way, quantity).values()))

    rows = [
        [
            way,
            *(
                text
                for kind in kinds
                for text in (
                    f"{cell(kind, way, 'evaluations of an example'):.0f}",
                    f"{cell(kind, way, 'of all steps'):.2f}",
                    f"{cell(kind, way, 'solved'):.1%}",
                )
            ),
        ]
        for way in ways
    ]
    header = [f"{kind}: {what}" for kind in kinds for what in ("evaluations of an example", "time", "solved")]
    return markdown(["", *header], rows)


def positions(numbers):
    case, counted = "positions, wikitext2-tiny", "evaluations of a position"

    def value(way, quantity, case=case):
        return next(iter(numbers.by_size(case, way, quantity).values()))

    def columns(start):
        return [way for way in numbers.providers(case) if way.startswith(start)]

    rows = []
    for label, ways in (
        ("all positions take N steps", columns("N")),
        ("each position stops separately", columns("tol")),
    ):
        rows.append([f"{label}: evaluations", *(f"{value(way, counted):.1f}" for way in ways)])
        rows.append(["perplexity", *(f"{value(way, 'perplexity'):.1f}" for way in ways)])
        for texts in (1, 8):
            speeds = (1 / value(way, "seconds", f"{case}, {texts} texts") for way in ways)
            rows.append([f"tokens per second, {texts} text{'s' * (texts > 1)}", *(f"{x:,.0f}" for x in speeds)])
    return markdown(
        ["N, or tol", *(f"{n[4:]} / {tol[6:]}" for n, tol in zip(columns("N"), columns("tol"), strict=True))], rows
    )


def decode(numbers):
    cases = [(prompts, length) for length in (64, 512) for prompts in (1, 8, 64)]

    def row(label, text):
        return [label, *(text(f"decode, {prompts} prompts", prompts, length) for prompts, length in cases)]

    def speed(provider):
        return lambda case, prompts, length: f"{prompts / numbers.median(case, provider, length):,.0f}"

    def ratio(case, _, length):
        return f"{numbers.median(case, 'equilibrium', length, 'of an explicit evaluation'):.2f}"

    def gain(case, _, length):
        return f"{numbers.median(case, 'equilibrium', length, 'times as fast as the whole sequence'):.0f}x"

    def memory(case, _, length):
        return f"{numbers.median(case, 'equilibrium', length, 'bytes') / 2**20:,.0f} MiB"

    rows = [
        row("equilibrium, 8 evaluations, with caches", speed("equilibrium")),
        row("the same without caches", speed("whole sequence")),
        row("explicit, 8 evaluations of one layer, with caches", speed("explicit, looped")),
        row("explicit, 2 layers, as many parameters, with caches", speed("explicit")),
        row("our time for an evaluation over the explicit one's", ratio),
        row("caches make it faster by", gain),
        row("our caches", memory),
    ]
    header = [f"{length} positions, {prompts} prompt{'s' * (prompts > 1)}" for prompts, length in cases]
    return markdown(["tokens per second", *header], rows)


PREDICTED = "relax", "relax_norms", "invert_adjoint"
LIMITS = "bandwidth", "issue", "float64", "integers"


def predicted(numbers):
    """Per element, the longest time that any hardware limit gives; and the state that is faster in both passes."""
    rows = []
    for gpu in numbers.providers("predicted relax"):
        cells, both = [gpu], []
        for prefix in ("", "exact "):
            longest = []
            for kernel in PREDICTED:
                name = f"predicted {prefix}{kernel}"
                times = {limit: numbers.per_element(name, gpu, f"predicted seconds by {limit}") for limit in LIMITS}
                limit = max(times, key=times.get)
                longest.append(times[limit])
                share = "" if limit == "bandwidth" else f" ({limit}: {times['bandwidth'] / times[limit]:.0%})"
                cells.append(f"{times[limit] * 1e12:.1f}{share}")
            both.append(longest[0] + longest[2])
        faster = both[0] / both[1]
        cells.append("either" if 0.95 < faster < 1.05 else f"exact, {faster:.1f}x" if faster > 1 else "float64")
        rows.append(cells)
    names = [f"{state} {kernel}" for state in ("float64", "exact") for kernel in PREDICTED]
    return markdown(["**predicted**, ps per element", *names, "faster state"], rows)


TABLES = {
    "machine": machine,
    "half-step": half_step,
    "step": functools.partial(training_step, methods=STEP),
    "short-step": functools.partial(training_step, methods=SHORT_STEP),
    "deep-memory": deep_memory,
    "reversal": reversal,
    "convergence": convergence,
    "schedule": schedule,
    "implicit": implicit,
    "decode": decode,
    "examples": examples,
    "positions": positions,
    "predicted": predicted,
}


def filled(text, numbers):
    def block(match):
        name = match[1]
        if name not in TABLES:
            raise SystemExit(f"a page has <!-- numbers: {name} -->: known are {', '.join(TABLES)}")
        return f"<!-- numbers: {name} -->\n{TABLES[name](numbers)}\n<!-- /numbers -->"

    return re.sub(r"<!-- numbers: (\S+) -->\n.*?<!-- /numbers -->", block, text, flags=re.DOTALL)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if something would change")
    arguments = parser.parse_args()
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = filled(text, Numbers(RESULTS))
        if arguments.check and new != text:
            print(
                f"{page.name}: its numbers are not those of bench/results: run python bench/readme.py", file=sys.stderr
            )
            return 1
        if not arguments.check:
            page.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
