"""Runs tests with all supported versions of torch, Triton and Python: `make versions` writes docs/versions.md.

    python tests/tools/versions.py                      # every version of VERSIONS that has no row yet
    python tests/tools/versions.py 2.15.0               # these, again
    python tests/tools/versions.py 2.15.0 --python 3.12 # with another Python

Each version gets a virtual environment in .venv/versions (up to 7 GB), which is deleted when its row is written. It
runs the tests of solver and kernels, and cross-compiles every kernel. Triton 3.4 has no linker for AMD GPUs: set
TRITON_HIP_LLD_PATH to ROCm's, or to an ld.lld of LLVM 16 or later.
"""

import argparse
import contextlib
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE, FOLDER = ROOT / "docs" / "versions.md", ROOT / ".venv" / "versions"
VERSIONS = {"2.10.0": "3.10", "2.13.0": "3.12", "2.15.0": "3.15"}
"""From the oldest supported torch to the newest, with a Python for each."""

GPUS = ("sm_80", "sm_90", "gfx942")
"""A100, H100 and MI300."""

COLUMNS = ("torch", "Triton", "Python", "passed", "failed", "skipped", *GPUS, "date")
TEXT = """# Versions

The results of `make versions` for each torch, with its Triton and a Python: the tests of solver and kernels, without a
GPU, and how many of the Triton kernels compile for an A100 (sm_80), an H100 (sm_90) and an MI300 (gfx942). "In part"
means that the run was stopped after this many tests and has to be repeated.

"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", help="versions of torch (default: all that have no row yet)")
    parser.add_argument("--python", help="a version or path of Python (default: the one listed for the torch)")
    parser.add_argument("--keep", action="store_true", help="keep the virtual environments")
    parser.add_argument("--compile", action="store_true", help=argparse.SUPPRESS)  # in the environment itself
    arguments = parser.parse_args()
    if arguments.compile:
        print(json.dumps(compiled()))
        return
    done = {row["torch"] for row in rows() if row["passed"].replace(",", "").isdigit()}
    for torch in arguments.versions or [x for x in VERSIONS if x not in done]:
        python = interpreter(arguments.python or VERSIONS.get(torch, ""))
        environment = FOLDER / f"torch-{torch}-{Path(python).resolve().name}"
        install(torch, python, environment)
        if arguments.versions:
            shutil.rmtree(environment / "logs", ignore_errors=True)
        write(row(environment, torch))
        if not arguments.keep:
            shutil.rmtree(environment)


def interpreter(version: str) -> str:
    """A Python of this version from the path or from pyenv, or else the current one."""
    candidates = [
        version,
        shutil.which(f"python{version}"),
        *Path.home().glob(f".pyenv/versions/{version}.*/bin/python3"),
    ]
    for candidate in filter(None, candidates):
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            command = [candidate, "-c", "import sys; print(sys.executable)"]
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    return sys.executable


def install(torch: str, python: str, environment: Path) -> None:
    """Install torch and revdeq into a virtual environment, which may be left from an interrupted run."""
    subprocess.run([python, "-m", "venv", environment], check=True)
    pip = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-cache-dir", f"torch=={torch}", f"{ROOT}[test,torchdeq]"], check=True)


def row(environment: Path, torch: str) -> dict[str, str]:
    """The row of the table for an environment."""
    files = sorted([*ROOT.glob("tests/solver/test_*.py"), *ROOT.glob("tests/kernels/test_*.py")])
    with ThreadPoolExecutor(2) as pool:
        counts = sum(pool.map(functools.partial(tested, environment), files), Counter())
    command = [environment / "bin" / "python", __file__, "--compile"]
    path = {"PYTHONPATH": str(ROOT / "tests" / "tools")}
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | path).stdout
    return json.loads(output.splitlines()[-1]) | {
        "torch": torch,
        "passed": f"{counts['passed']:,}",
        "failed": f"{counts['failed'] + counts['error']}",
        "skipped": f"{counts['skipped']}",
        "date": time.strftime("%Y-%m-%d"),
    }


def tested(environment: Path, file: Path) -> Counter[str]:
    """The number of tests in a file that passed, failed and so on. Each file has its own process, so that a crash is
    one failure. It imports the installed package, not the clone. A file with a complete log is not run again."""
    log = environment / "logs" / f"{file.stem}.log"
    log.parent.mkdir(exist_ok=True)
    if not (log.exists() and log.read_text().endswith("done\n")):
        command = [environment / "bin" / "python", "-I", "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
        with log.open("w") as output:
            threads = {"OMP_NUM_THREADS": "1"}
            # Outside the clone, which subprocesses of tests would import otherwise.
            subprocess.run(command, cwd=environment, env=os.environ | threads, stdout=output, stderr=subprocess.STDOUT)
            output.write("\ndone\n")
    summary = re.findall(r"^(?:=+ )?(\d+ \w+.*) in [\d.]+s", log.read_text(), re.M)
    counts = Counter({kind.removesuffix("s"): int(n) for n, kind in re.findall(r"(\d+) (\w+)", "".join(summary[-1:]))})
    if not summary:
        counts["failed"] = 1
    if counts["failed"] or counts["error"]:
        print(f"{file.name}: {', '.join(summary[-1:]) or 'crashed'} ({log})", flush=True)
    return counts


def compiled() -> dict[str, str]:
    """How many of the kernels in budgets.py this environment's Triton compiles."""
    import triton
    from budgets import LAUNCHES
    from gpu_targets import TARGETS, compiling

    found = {"Triton": triton.__version__, "Python": ".".join(map(str, sys.version_info[:3]))}
    for target in GPUS:
        count = 0
        for kernel, launch in LAUNCHES.items():
            try:
                with compiling(TARGETS[target]):
                    launch()
                count += 1
            except Exception as error:
                print(f"{kernel} for {target}: {type(error).__name__}: {error}", file=sys.stderr)
        found[target] = f"{count} of {len(LAUNCHES)}"
    return found


def rows() -> list[dict[str, str]]:
    """The rows of the current table."""
    lines = [x for x in TABLE.read_text(encoding="utf-8").splitlines() if x.startswith("|")] if TABLE.exists() else []
    return [dict(zip(COLUMNS, (cell.strip() for cell in x.strip("|").split("|")), strict=True)) for x in lines[2:]]


def write(new: dict[str, str]) -> None:
    """Write the table with this row, which replaces one with the same torch and the same minor version of Python."""

    def key(row: dict[str, str]) -> tuple[tuple[int, ...], ...]:
        return tuple(map(int, row["torch"].split("."))), tuple(map(int, row["Python"].split(".")[:2]))

    table = sorted([*(row for row in rows() if key(row) != key(new)), new], key=key)
    lines = [COLUMNS, ["---"] * len(COLUMNS), *([row[column] for column in COLUMNS] for row in table)]
    text = TEXT + "".join(f"| {' | '.join(line)} |\n" for line in lines)
    TABLE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
