"""Tests and measures a GPU, and packs all results into one file: `make gpu`.

    make gpu                  # about twenty minutes: doctor, the tests, the benchmarks
    make gpu QUICK=1          # a few minutes

Each part has its own log. If one fails or times out, the others still run. It also runs without a GPU, and says so.
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

ROOT = Path(__file__).parent.parent
PYTEST = [sys.executable, "-m", "pytest", "-q", "--durations=20"]
ON_THE_GPU = ["tests/kernels/test_kernels.py", "tests/kernels/test_backends.py", "tests/solver", "-k", "not fakegpu"]
"""The tests that use a GPU."""


TOOLS = {"nvidia-smi": ["-q"], "rocm-smi": ["--showallinfo"], "xpu-smi": ["discovery"]}
"""The vendors' tools, with the flags for full output."""


def parts(quick, out):
    """Commands by name, with a timeout in seconds."""
    bench = [sys.executable, str(ROOT / "bench/run.py"), "--out", str(out / "bench"), *["--quick"] * quick]
    chosen = {
        "packages": ([sys.executable, "-m", "pip", "freeze"], 60),
        "doctor": ([sys.executable, "-m", "revdeq", "doctor"], 300),
        "doctor-json": ([sys.executable, "-m", "revdeq", "doctor", "--json"], 300),
        "tests-gpu-only": ([*PYTEST, "tests/test_gpu_only.py"], 300),
        "bench": (bench, 900),
        "tests": ([*PYTEST, *ON_THE_GPU], 600),
    }
    for name, arguments in TOOLS.items():
        if program := shutil.which(name):
            chosen[name] = ([program, *arguments], 60)
    if quick:
        del chosen["tests"]
    return chosen


INTERRUPTIBLE = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
"""Runs a command that reacts to SIGINT: processes that a shell starts in the background ignore it, and so would their
children."""


def run(command, limit, log):
    """Run a command with its output in a file. Returns a description of how it ended."""
    command = [sys.executable, "-c", INTERRUPTIBLE, *command]
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # benchmarks then save their results so far
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"stopped after {limit} s"
    return "passed" if code == 0 else f"failed with code {code}"


def device():
    """The name of the device, and whether it is a GPU. In a separate process, because torch may crash."""
    code = "from revdeq import _device as d; x = d.best(); print(x.type, d.name(x), sep='\\n')"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    kind, name, *_ = result.stdout.splitlines() if result.returncode == 0 else ("unknown", "unknown device")
    return name, kind not in ("cpu", "unknown")


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
    commit = subprocess.run(["git", "-C", ROOT, "describe", "--always", "--dirty"], capture_output=True, text=True)
    summary = {
        "device": name,
        "gpu": is_gpu,
        "commit": commit.stdout.strip(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "parts": {},
    }
    try:
        for part, (command, limit) in parts(arguments.quick, out).items():
            print(f"{part:<16}", end="", flush=True)
            start = time.perf_counter()
            how = run(command, limit, out / f"{part}.txt")
            seconds = round(time.perf_counter() - start)
            summary["parts"][part] = {"how": how, "seconds": seconds}
            print(f"{how}, {seconds} s", flush=True)
    finally:
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        archive = arguments.out / f"{title}.tar.gz"
        with tarfile.open(archive, "w:gz") as file:
            file.add(out, title)
        shutil.rmtree(out)
        print(f"The results are in {archive}: CONTRIBUTING.md says where to send it.")
    return 0 if all(part["how"] == "passed" for part in summary["parts"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
