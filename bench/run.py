"""Runs all benchmarks. Writes a table (results.csv), plots and a description of the machine to bench/results/<device>/.

make bench                 # all of it: half an hour on two cores
make bench ONLY=update     # one of update, launch, host, step, breakdown, predict, convergence, decode,
                           # examples, positions
make bench QUICK=1         # a minute, into a separate table (quick.csv)
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import plots
import table
import torch

import revdeq

HERE = Path(__file__).parent
PARTS = {
    "update": [
        "-m",
        "pytest",
        str(HERE / "test_update.py"),
        "-q",
        "--benchmark-disable-gc",
        "--benchmark-columns=min,median",
    ],
    "launch": [str(HERE / "launch.py")],
    "host": [str(HERE / "host.py")],
    "step": [str(HERE / "step.py")],
    "breakdown": [str(HERE / "breakdown.py")],
    "predict": [str(HERE / "predict.py")],
    "convergence": [str(HERE / "convergence.py")],
    "decode": [str(HERE / "decode.py")],
    "examples": [str(HERE / "examples.py")],
    "positions": [str(HERE / "positions.py")],
}

BENCHMARKS = {
    "update": ("forward half-step", "backward half-step"),
    "launch": ("launch, ",),
    "host": ("host, ",),
    "step": ("step, ", "tolerance, "),
    "breakdown": ("breakdown, ", "own time of a half-step, ", "own time once, "),
    "predict": ("predicted ",),
    "convergence": ("residual", "gradient, ", "held out"),
    "decode": ("decode, ",),
    "examples": ("examples, ", "steps taken, "),
    "positions": ("positions, ",),
}
"""The prefixes of the names of a part's benchmarks."""


def machine():
    return {
        "device": table.device_name(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "revdeq": revdeq.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def merge(path, measured, finished=()):
    """Measurements replace the rows of an earlier run, and all rows of the parts that have finished. Rows that belong
    to no part are dropped: their benchmark no longer exists."""
    again = {row.benchmark for row in measured}
    others = tuple(start for part, starts in BENCHMARKS.items() if part not in finished for start in starts)
    earlier = table.read(path) if path.exists() else []
    kept = [row for row in earlier if row.benchmark not in again and row.benchmark.startswith(others)]
    table.write(path, kept + measured)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS, help="run one part")
    parser.add_argument("--quick", action="store_true", help="a minute: small sizes, few depths and rounds")
    parser.add_argument("--out", type=Path, default=table.results_folder(), help="default: %(default)s")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = arguments.out / ("quick.csv" if arguments.quick else "results.csv")
    # On a GPU, measurements replace predictions.
    parts = [arguments.only] if arguments.only else [p for p in PARTS if p != "predict" or table.device().type == "cpu"]
    start, finished, failed, took = time.perf_counter(), [], [], []
    with tempfile.TemporaryDirectory() as folder:
        part_table = Path(folder) / "part.csv"
        try:
            for name in parts:
                print(f"== {name}", flush=True)
                begin = time.perf_counter()
                command = [sys.executable, *PARTS[name], "--table", str(part_table)]
                code = subprocess.run(command + ["--quick"] * arguments.quick).returncode
                (failed if code else finished).append(name)
                took.append(f"{name} {time.perf_counter() - begin:.0f} s")
        except KeyboardInterrupt:
            failed.append("interrupted")
        if part_table.exists():
            merge(results, table.read(part_table), finished)
    if results.exists() and not arguments.quick:
        (arguments.out / "machine.json").write_text(json.dumps(machine(), indent=2) + "\n")
        plots.draw(table.read(results), arguments.out)
    print(f"\n{time.perf_counter() - start:.0f} s ({', '.join(took)}); {results}", end="")
    print(f"; FAILED: {', '.join(failed)}" if failed else "")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
