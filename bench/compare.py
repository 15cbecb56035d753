"""Compares two tables of measurements, and reports changes beyond the noise.

    python bench/compare.py before.csv after.csv

A change counts if the ranges from the 20th to the 80th percentile do not overlap, and the medians differ by more than
--threshold. (Memory, evaluations and errors hardly vary between runs, so that only the threshold matters.) The exit
code is 1 if something got worse.
"""

import argparse
import sys
from pathlib import Path

import table


def verdict(before, after, threshold):
    """`worse`, `better` or None."""
    if after.p50 == before.p50:
        return None
    smaller, larger = sorted((before.p50, after.p50))
    if smaller > 0 and larger / smaller <= 1 + threshold:
        return None
    if after.p50 > before.p50:
        return "worse" if after.p20 > before.p80 else None
    return "better" if after.p80 < before.p20 else None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--threshold", type=float, default=0.1, help="relative (default: %(default)s)")
    arguments = parser.parse_args()
    tables = []
    for path in (arguments.before, arguments.after):
        try:
            tables.append({row.key: row for row in table.read(path)})
        except (OSError, ValueError) as error:
            parser.error(f"{path}: {error}")
    before, after = tables
    common = [key for key in before if key in after]
    if not common:
        parser.error(f"{arguments.before} and {arguments.after} have no measurement in common")
    if before[common[0]].device != after[common[0]].device:
        print(f"Different devices: {before[common[0]].device} and {after[common[0]].device}", file=sys.stderr)
    verdicts = {key: verdict(before[key], after[key], arguments.threshold) for key in common}
    for kind in ("worse", "better"):
        for key in (key for key in common if verdicts[key] == kind):
            benchmark, provider, size, dtype, quantity = key
            b, a = before[key].p50, after[key].p50
            change = f"{a / b:.2f}x" if b else "from 0"
            print(f"{kind:7}{benchmark}, {provider}, {size}, {dtype}: {quantity} {b:.3g} -> {a:.3g} ({change})")
    counts = {kind: sum(v == kind for v in verdicts.values()) for kind in ("worse", "better")}
    missing = len(before) + len(after) - 2 * len(common)
    print(f"{len(common)} compared: {counts['worse']} worse, {counts['better']} better; {missing} in one table only")
    return 1 if counts["worse"] else 0


if __name__ == "__main__":
    sys.exit(main())
