"""Tests and measures a GPU, and packs all results into one file: `make gpu`.

    make gpu                  # less than twenty minutes: doctor, the tests, the benchmarks
    make gpu QUICK=1          # a few minutes
    nohup make gpu &          # keeps running if you log out

Each part has its own log. If one fails or times out, the others still run; if all of it is stopped, the results so far
are kept. The last line says whether the package can be trusted on this machine. Without a GPU, it says so and runs on
the CPU.
"""

import argparse
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from table import Results

ROOT = Path(__file__).parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "--durations=20"]
ON_THE_GPU = ["tests/kernels/test_kernels.py", "tests/kernels/test_backends.py", "tests/solver", "-k", "not fakegpu"]
TOOLS = {"nvidia-smi": ["-q"], "rocm-smi": ["--showallinfo"], "xpu-smi": ["discovery"]}
"""The vendors' tools, with the flags for full output."""
LONGEST = 19 * 60
"""Seconds for all parts together. Later parts get what is left."""


def parts(quick, out):
    """Commands by name, with a timeout in seconds. The most informative come first."""
    bench = [sys.executable, "bench/run.py", "--out", str(out / "bench"), *["--quick"] * quick]
    tests = {} if quick else {"tests": ([*PYTEST, *ON_THE_GPU], 420)}
    return {
        "doctor": ([sys.executable, "-m", "revdeq", "doctor"], 300),
        "tests-gpu-only": ([*PYTEST, "tests/test_gpu_only.py"], 240),
        "packages": ([sys.executable, "-m", "pip", "freeze"], 60),
        **{name: ([program, *flags], 60) for name, flags in TOOLS.items() if (program := shutil.which(name))},
        **tests,
        "bench": (bench, 900),
    }


def run(command, limit, log):
    """Run a command with its output in a file. Returns how it ended."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return f"stopped after {limit} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its rows are written as they are measured
            process.wait()
    return "passed" if code == 0 else f"failed with code {code}"


def run_all(quick, out):
    """How each part ended, by name."""
    ended, until = {}, time.monotonic() + LONGEST
    try:
        for name, (command, limit) in parts(quick, out).items():
            print(f"{name:<16}", end="", flush=True)
            left, ended[name] = round(until - time.monotonic()), "interrupted"
            ended[name] = run(command, min(limit, left), out / f"{name}.txt") if left > 10 else "no time was left"
            print(ended[name], flush=True)
    except KeyboardInterrupt:
        print("interrupted: the results so far are kept", flush=True)
    return ended


def trusted(is_gpu, ended):
    """Whether results on this machine are correct, in one line."""
    if not is_gpu:
        return "not known: torch finds no GPU here"
    checks = {name: ended.get(name, "not run") for name in ("doctor", "tests-gpu-only", "tests")}
    if failed := [name for name, how in checks.items() if how.startswith("failed")]:
        return f"NO: {' and '.join(failed)} failed. Send the archive"
    rest = [name for name, how in checks.items() if how != "passed"]
    if "doctor" in rest:
        return "not known: doctor did not finish; its log says why"
    left = f" ({' and '.join(rest)} did not run to the end)" if rest else ""
    return f"yes: its bits are the reference's, and its gradients a stored graph's{left}"


def shares(path):
    """The share of a copy's bandwidth that each half-step reaches, at the largest size."""
    results = Results(path)
    cases = {row.benchmark: row.size for row in sorted(results.rows, key=lambda row: row.size)}
    return {name: results.median(name, "copy", size, "time over fused") for name, size in cases.items()}


def device():
    """The name of the device, and whether it is a GPU. In a separate process, because torch may crash."""
    code = "from revdeq import _device as d; x = d.best(); print(x.type, d.name(x), sep='\\n')"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    kind, name, *_ = result.stdout.splitlines() if result.returncode == 0 else ("unknown", "unknown device")
    return name, kind not in ("cpu", "unknown")


def interrupt(number, frame):
    raise KeyboardInterrupt


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="doctor, tests/test_gpu_only.py and quick benchmarks only")
    parser.add_argument("--out", type=Path, default=ROOT, help="the folder for the archive; default: %(default)s")
    arguments = parser.parse_args()
    name, is_gpu = device()
    print(f"{name}" + ("" if is_gpu else ": NO GPU was found, this is a dry run"), flush=True)
    if not is_gpu and any(map(shutil.which, TOOLS)):
        print("There is a GPU that this torch cannot use: docs/gpu.md says how to install another torch.", flush=True)
    title = re.sub(r"[^a-z0-9]+", "-", f"revdeq {name} {time.strftime('%Y%m%d %H%M%S')}".lower()).strip("-")
    out = arguments.out / title
    out.mkdir(parents=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell in the background ignores SIGINT
        signal.signal(number, interrupt)
    ended = run_all(arguments.quick, out)
    verdict, found = trusted(is_gpu, ended), shares(out / "bench" / "update.csv")
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    summary = {"device": name, "gpu": is_gpu, "commit": commit.stdout.strip(), "system": platform.platform()}
    summary |= {"python": platform.python_version(), "parts": ended, "trusted": verdict, "shares": found}
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    archive = arguments.out / f"{title}.tar.gz"
    with tarfile.open(archive, "w:gz") as file:
        file.add(out, title)
    shutil.rmtree(out)
    for kernel, share in found.items():
        print(f"  {kernel:32} {share:.2f} of a copy's bandwidth")
    print(f"The results are in {archive}: please attach it to an issue.")
    print(f"Can revdeq be trusted on {name}? {verdict}.")
    return 0 if ended and all(how == "passed" for how in ended.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
