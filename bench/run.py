"""Runs the benchmarks: `make bench`. The rows, pictures and the machine's description are written to
bench/results/<device>/.

    make bench                 # all of them but the evidence: a quarter of an hour on two cores
    make bench ONLY=step       # one of update, step, depth, convergence, looped, host
    make bench QUICK=1         # some minutes; nothing is kept
"""

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from table import Results, device_name, results_folder

import revdeq

HERE = Path(__file__).parent
BENCHMARKS = {name: [str(HERE / f"{name}.py")] for name in ("update", "step", "depth", "convergence", "looped", "host")}
BENCHMARKS["update"] = ["-m", "pytest", str(HERE / "test_update.py"), "-q", "--benchmark-columns=min,median"]


def module(name):
    return importlib.import_module("test_update" if name == "update" else name)


def machine():
    return {
        "device": device_name(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "revdeq": revdeq.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def draw(name, out):
    """The picture of a benchmark, for light and for dark pages."""
    from matplotlib import style

    for suffix, look, color in (("", "default", "white"), ("-dark", "dark_background", "#0d1117")):
        background = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), color)
        with style.context([look, background, {"font.size": 9}]):
            module(name).picture(Results(out / f"{name}.csv")).savefig(out / f"{name}{suffix}.png", dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=BENCHMARKS, help="run one of them")
    parser.add_argument("--quick", action="store_true", help="few sizes, methods and rounds")
    parser.add_argument("--out", type=Path, help=f"default: {results_folder()}, or with --quick nowhere")
    arguments = parser.parse_args()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or (Path(folder) if arguments.quick else results_folder())
        out.mkdir(parents=True, exist_ok=True)
        for name in [arguments.only] if arguments.only else BENCHMARKS:
            print(f"\n== {name}", flush=True)
            start, part = time.perf_counter(), out / f"{name}.part"
            part.unlink(missing_ok=True)
            command = [sys.executable, *BENCHMARKS[name], "--out", str(part), *["--quick"] * arguments.quick]
            if subprocess.run(command).returncode:
                failed.append(name)
                continue
            part.replace(out / f"{name}.csv")
            if hasattr(module(name), "picture"):
                draw(name, out)
            print(f"{time.perf_counter() - start:.0f} s", flush=True)
        (out / "machine.json").write_text(json.dumps(machine(), indent=2) + "\n")
    print(f"\nFAILED: {', '.join(failed)}" if failed else "\nall done")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
