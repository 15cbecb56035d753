"""Tests and measures a GPU, and packs all results into one file: `make gpu`.

    make gpu                  # less than twenty minutes: doctor, the tests, the benchmarks
    make gpu QUICK=1          # a few minutes
    nohup make gpu &          # keeps running if you log out

Each part has its own log. If one fails or times out, the others still run; if all of it is stopped (SIGINT, SIGTERM),
the results so far are kept. The last line says whether the package can be trusted on this machine. Without a GPU, it
says so and runs on the CPU.
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


LONGEST = 19 * 60
"""Seconds for all parts together. Later parts get what is left."""


def parts(quick, out):
    """Commands by name, with a timeout in seconds. The most informative come first."""
    bench = [sys.executable, str(ROOT / "bench/run.py"), "--out", str(out / "bench"), *["--quick"] * quick]
    chosen = {
        "doctor": ([sys.executable, "-m", "revdeq", "doctor", "--json"], 300),
        "tests-gpu-only": ([*PYTEST, "tests/test_gpu_only.py"], 240),
        "packages": ([sys.executable, "-m", "pip", "freeze"], 60),
    }
    for name, arguments in TOOLS.items():
        if program := shutil.which(name):
            chosen[name] = ([program, *arguments], 60)
    if not quick:
        chosen["tests"] = ([*PYTEST, *ON_THE_GPU], 420)
    chosen["bench"] = (bench, 600)
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
            stop(process, patience=30)
            return f"stopped after {limit} s"
        except KeyboardInterrupt:
            stop(process, patience=10)
            raise
    return "passed" if code == 0 else f"failed with code {code}"


def stop(process, patience):
    os.killpg(process.pid, signal.SIGINT)  # benchmarks then save their results so far
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def interrupt(number, frame):
    raise KeyboardInterrupt


def examined(out):
    """The findings of the doctor, if it finished. They are also written to a file as text."""
    with contextlib.suppress(OSError, ValueError):
        report = json.loads((out / "doctor.txt").read_text().splitlines()[-1])
        lines = [f"{about:<18} {finding['text']}" for about, finding in report["findings"].items()]
        (out / "doctor.json").write_text(json.dumps(report, indent=2) + "\n")
        (out / "doctor.txt").write_text("\n".join([*lines, report["verdict"]]) + "\n")
        return report
    return None


def shares(report):
    """The share of a copy's bandwidth by kernel, on the first device."""
    rates = next((f["numbers"]["bytes_per_second"] for a, f in report["findings"].items() if "bandwidth" in a), {})
    return {name: rate / rates["copy"] for name, rate in rates.items() if name != "copy"}


def trusted(is_gpu, report, ended):
    """Whether results on this machine are correct, in one line."""
    if not is_gpu:
        return "not known: torch finds no GPU here"
    if report is None:
        return "not known: doctor did not finish; its log says why"
    failed = [name for name, how in ended.items() if name.startswith("tests") and how.startswith("failed")]
    if not report["ready"] or failed:
        why = [*([] if report["ready"] else [report["verdict"]]), *(f"{name} failed" for name in failed)]
        return f"NO: {'; '.join(why)}. Send the archive"
    open_ = [name for name in ("tests-gpu-only", "tests") if ended.get(name) != "passed"]
    rest = f" ({' and '.join(open_)} did not run to the end)" if open_ else ""
    return f"yes: its bits are the reference's, and its gradients a stored graph's{rest}"


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
    # A shell in the background ignores SIGINT.
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    ended, report, begin = {}, None, time.monotonic()
    try:
        for part, (command, limit) in parts(arguments.quick, out).items():
            left = round(begin + LONGEST - time.monotonic())
            print(f"{part:<16}", end="", flush=True)
            start = time.perf_counter()
            ended[part] = "interrupted"
            ended[part] = run(command, min(limit, left), out / f"{part}.txt") if left > 10 else "no time was left"
            seconds = round(time.perf_counter() - start)
            summary["parts"][part] = {"how": ended[part], "seconds": seconds}
            print(f"{ended[part]}, {seconds} s", flush=True)
    except KeyboardInterrupt:
        print("interrupted: the results so far are kept", flush=True)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        report = examined(out)
        summary["trusted"] = trusted(is_gpu, report, ended)
        summary["shares"] = shares(report) if report else {}
        (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        archive = arguments.out / f"{title}.tar.gz"
        with tarfile.open(archive, "w:gz") as file:
            file.add(out, title)
        shutil.rmtree(out)
    for kernel, share in summary["shares"].items():
        print(f"  {kernel:24} {share:.2f} of a copy's bandwidth")
    print(f"The results are in {archive}: CONTRIBUTING.md says where to send it.")
    print(f"Can revdeq be trusted on {name}? {summary['trusted']}.")
    return 0 if ended and all(how == "passed" for how in ended.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
