"""The tables of the benchmarks: writing, reading, comparing and quoting them. (`make bench` measures.)"""

import dataclasses
import importlib.util
import json
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import compare
import pytest
import run
import schedules
import torch
from compare import verdict
from readme import RESULTS, Numbers, filled, least, markdown, over, predicted, time_to
from table import Row, Table, percentiles, read, write
from turns import ratio, take_turns

BENCH = Path(__file__).parent.parent / "bench"


def row(p20, p50, p80, **fields):
    columns = {
        "benchmark": "b",
        "provider": "p",
        "size": 1,
        "dtype": "float32",
        "quantity": "seconds",
        "bytes_moved": None,
    }
    where = {"device": "d", "torch": "2", "triton": "3", "revdeq": "0", "commit": "c"}
    return Row(p20=p20, p50=p50, p80=p80, **{**columns, **where, **fields})


def test_a_table_is_read_as_it_was_written(tmp_path):
    table = Table(tmp_path / "a.csv")
    table.add("half-step, forward", "fused", 1024, "seconds", [3.0, 1.0, 2.0, 5.0, 4.0], "bfloat16", bytes_moved=24)
    table.add("step", "a, b", 4, "error", [0.0])
    rows = read(tmp_path / "a.csv")
    assert [(r.benchmark, r.provider, r.size, r.p50, r.bytes_moved) for r in rows] == [
        ("half-step, forward", "fused", 1024, 3.0, 24),
        ("step", "a, b", 4, 0.0, None),
    ]
    write(tmp_path / "b.csv", rows)
    assert read(tmp_path / "b.csv") == rows


def test_percentiles():
    assert percentiles([float(x) for x in range(101)]) == (20.0, 50.0, 80.0)
    assert percentiles([7.0]) == (7.0, 7.0, 7.0)


def test_a_change_counts_only_beyond_the_noise():
    noisy, quiet = row(0.8, 1.0, 1.4), row(0.99, 1.0, 1.01)
    assert verdict(noisy, row(1.2, 1.3, 1.5), 0.1) is None
    assert verdict(quiet, row(1.2, 1.3, 1.5), 0.1) == "worse"
    assert verdict(quiet, row(1.04, 1.05, 1.06), 0.1) is None
    assert verdict(quiet, row(0.5, 0.6, 0.7), 0.1) == "better"
    assert verdict(row(0, 0, 0), row(1e-9, 1e-9, 1e-9), 0.1) == "worse", "an error that was 0 is no longer"
    assert verdict(row(0, 0, 0), row(0, 0, 0), 0.1) is None


@pytest.mark.parametrize(("factor", "code", "words"), [(1.0, 0, "0 worse"), (2.0, 1, "worse  b, p, 1, float32")])
def test_the_comparison_of_two_tables(tmp_path, monkeypatch, capsys, factor, code, words):
    before = row(0.99, 1.0, 1.01)
    after = dataclasses.replace(before, p20=0.99 * factor, p50=factor, p80=1.01 * factor)
    write(tmp_path / "before.csv", [before]), write(tmp_path / "after.csv", [after])
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path / "before.csv"), str(tmp_path / "after.csv")])
    assert compare.main() == code
    assert words in capsys.readouterr().out


def test_the_comparison_names_a_file_that_is_not_a_table(tmp_path, monkeypatch, capsys):
    (tmp_path / "x.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(sys, "argv", ["compare.py", str(tmp_path / "x.csv"), str(tmp_path / "missing.csv")])
    with pytest.raises(SystemExit) as end:
        compare.main()
    assert end.value.code == 2
    assert "x.csv has the columns ['a', 'b']" in capsys.readouterr().err


def test_providers_take_turns():
    order = []
    runs = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = take_turns(runs, 1.0, least=0.0, rounds=(3, 3))
    assert "".join(order).endswith("ababab")
    assert {name: len(values) for name, values in times.items()} == {"a": 3, "b": 3}
    assert len(take_turns(runs, 0.0, rounds=(3, 3))["a"]) == 3  # the first calls count, too
    assert ratio([2.0, 9.0, 4.0], [1.0, 1.0, 2.0]) == 2.0


def test_the_gradient_that_others_are_compared_with():
    convergence = pytest.importorskip("convergence", reason="torchdeq is not installed", exc_type=ImportError)
    torch.manual_seed(0)

    class Affine(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(0.2 * torch.randn(6, 6, dtype=torch.float64))

        def forward(self, z, x):
            return z @ self.weight.T + x

    f, x, seed = Affine(), torch.randn(3, 6), torch.randn(3, 6)
    inverse = torch.linalg.inv(torch.eye(6, dtype=torch.float64) - f.weight.detach())
    expected = (seed.double() @ inverse).T @ (x.double() @ inverse.T)
    (found,) = convergence.fixed_points_gradient(f, x, seed, 0.9, 0.9)
    assert convergence.worst([found], [expected]) < 1e-8  # the residual is 1e-10
    assert convergence.worst([expected, 1.5 * expected], [expected, expected]) == pytest.approx(0.5)
    with pytest.raises(ArithmeticError, match="no fixed point was reached"):
        convergence.settled(lambda z: 1 + z, torch.ones(2), 0.9, 1.0)


def test_the_least_time_to_a_distance(tmp_path):
    measured = (("ours", 8, 1.0, 1e-1), ("ours", 16, 2.0, 1e-3), ("a", 8, 3.0, 1e-2), ("b", 8, 4.0, 1e-2))
    rows = [
        row(value, value, value, benchmark="gradient, b", provider=name, size=k, quantity=quantity)
        for name, k, seconds, distance in measured
        for quantity, value in (("seconds", seconds), ("distance", distance))
    ]
    write(tmp_path / "results.csv", rows)
    (tmp_path / "machine.json").write_text("{}")
    numbers = Numbers(tmp_path)
    ours, theirs = (time_to(numbers, "gradient, b", names, 1e-2) for names in (["ours"], ["a", "b", "c"]))
    assert (ours, theirs) == (pytest.approx(1.5), 3.0)  # halfway between 1e-1 and 1e-3
    assert over(ours, theirs) == "0.50"
    nobody = time_to(numbers, "gradient, b", ["a", "b"], 1e-3)
    assert (over(None, theirs), over(ours, nobody), over(nobody, nobody)) == ("slower", "faster", "-")
    assert least(numbers, "gradient, b", ["a", "b"], "seconds") == 3.0


def test_numbers_are_filled_in_between_their_marks():
    text = "a\n<!-- numbers: machine -->\nold\n<!-- /numbers -->\nb\n"

    class Numbers:
        machine = {"cores": 2, "device": "X, 2 threads", "torch": "2.13.0+cpu"}  # noqa: RUF012

    assert "Measured on 2 cores of an X with torch 2.13.0." in filled(text, Numbers())
    assert markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"
    with pytest.raises(SystemExit, match="numbers: nothing"):
        filled(text.replace("machine", "nothing"), Numbers())


def test_a_prediction_is_the_longest_of_its_limits(tmp_path):
    predict = pytest.importorskip("predict", reason="Triton is not installed", exc_type=ImportError)
    gpu = predict.Gpu("sm_86", bandwidth=24e9, multiprocessors=10, clock=1e9)
    work = predict.Work(moved=24, issued=128, arithmetic=3, conversions=2, integers=16)
    expected = {"bandwidth": 1e-9, "issue": 1e-10, "float64": 2.5e-10, "integers": 2.5e-11}
    assert predict.seconds(work, gpu) == pytest.approx(expected)
    assert {g.target for g in predict.GPUS.values()} == predict.RATES.keys()
    slow = {"relax": (8e-9, 2e-9), "relax_norms": (1e-9, 1e-9), "invert_adjoint": (4e-9, 2e-9)}
    rows = []
    for kernel, states in slow.items():
        for prefix, seconds in zip(("", "exact "), states, strict=True):
            for limit in predict.LIMITS:
                value = 4 * {"float64": seconds, "bandwidth": 1e-9}.get(limit, 0.0)
                name, quantity = f"predicted {prefix}{kernel}", f"predicted seconds by {limit}"
                rows.append(row(value, value, value, benchmark=name, provider="G", size=4, quantity=quantity))
    write(tmp_path / "results.csv", rows)
    (tmp_path / "machine.json").write_text("{}")
    (line,) = predicted(Numbers(tmp_path)).splitlines()[2:]
    float64 = "8000.0 (float64: 12%) | 1000.0 | 4000.0 (float64: 25%)"
    exact = "2000.0 (float64: 50%) | 1000.0 | 2000.0 (float64: 50%)"
    assert line == f"| G | {float64} | {exact} | exact, 3.0x |"


def test_the_host_time_per_half_step_is_a_slope_above_bare():
    import host

    seconds = {("bare", n): (2 * n * 1.0, 2 * n * 3.0) for n in (2, 8)}
    seconds |= {("ours", n): (2 * n * 1.5 + 10, 2 * n * 2.0 + 20) for n in (2, 8)}
    per_half_step, once = (0.5, -1.0), (10, 20)
    expected = dict(zip(host.COLUMNS, (*per_half_step, *once, (16 * 3.5 + 30) / 16), strict=True))
    assert host.quantities(seconds, "ours", (2, 8)) == pytest.approx(expected)
    of_bare = {"forward seconds per half-step": 1.0, "backward seconds per half-step": 3.0, host.TOTAL: 4.0}
    assert host.quantities(seconds, "bare", (2, 8)) == pytest.approx(of_bare)


@pytest.mark.parametrize("state", ["float64", "exact"])
def test_a_whole_solve_is_launched_by_a_stubbed_driver(state):
    import host

    if trouble := host.no_stub():
        pytest.skip(trouble)
    problem = host.Problem(host.Small)
    with host.stubbed() as launches:
        run = host.inside(host.launching, lambda: host.of_solver(host.reversible(state, 1.0), problem, 3))
        # One launch per half-step and per inverse; integers are encoded and decoded, too.
        assert launches.during(run) == 2 * (2 * 3) + 2 * (state == "exact")
    assert not host.zero_fill().value


def test_rows_of_benchmarks_that_no_longer_exist_are_dropped(tmp_path):
    names = ("step, conv block", "step, old block", "tolerance, conv block", "predicted relax", "own time, tiny f")
    write(tmp_path / "results.csv", [row(1, 1, 1, benchmark=name) for name in names])
    measured = [row(2, 2, 2, benchmark="step, conv block")]

    run.merge(tmp_path / "results.csv", measured)  # its part was interrupted, so rows that it did not measure are kept
    kept = {r.benchmark: r.p50 for r in read(tmp_path / "results.csv")}
    assert kept == {"step, conv block": 2, "step, old block": 1, "tolerance, conv block": 1, "predicted relax": 1}

    run.merge(tmp_path / "results.csv", measured, finished=["step"])
    assert [r.benchmark for r in read(tmp_path / "results.csv")] == ["predicted relax", "step, conv block"]


def test_every_committed_row_is_of_a_part_and_of_a_commit():
    rows = read(RESULTS / "results.csv")
    starts = tuple(start for starts in run.BENCHMARKS.values() for start in starts)
    assert run.BENCHMARKS.keys() == run.PARTS.keys()
    assert all(r.benchmark.startswith(starts) for r in rows)
    assert not [r for r in rows if r.commit.endswith("-dirty")]


def test_the_theory_page_says_what_schedules_were_worth_in_training():
    """If the rows have changed, copy the output of python bench/schedules.py to docs/theory.md."""
    assert schedules.tables(schedules.read()) in (BENCH.parent / "docs" / "theory.md").read_text(encoding="utf-8")


@pytest.fixture
def in_the_background():
    """Like a background process of a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("in_the_background")
def test_a_part_that_fails_or_times_out_on_a_gpu_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    import gpu

    def python(code):
        return [sys.executable, "-c", code]

    chosen = {
        "slow": (python("import time; print('begun', flush=True); time.sleep(60)"), 2),
        "broken": (python("raise SystemExit(3)"), 60),
        "fine": (python("print('all is well')"), 60),
    }
    monkeypatch.setattr(gpu, "parts", lambda quick, out: chosen)
    monkeypatch.setattr(gpu, "device", lambda: ("Some GPU (80 GB)", True))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--out", str(tmp_path)])
    assert gpu.main() == 1
    (archive,) = tmp_path.iterdir()
    assert archive.name.startswith("revdeq-some-gpu-80-gb-") and str(archive) in capsys.readouterr().out
    with tarfile.open(archive) as file:
        texts = {Path(m.name).name: file.extractfile(m).read().decode() for m in file.getmembers() if m.isfile()}
    assert texts["slow.txt"].startswith("begun\n") and "KeyboardInterrupt" in texts["slow.txt"]  # it may save first
    assert texts["fine.txt"] == "all is well\n"
    ended = {name: part["how"] for name, part in json.loads(texts["summary.json"])["parts"].items()}
    assert ended == {"slow": "stopped after 2 s", "broken": "failed with code 3", "fine": "passed"}


def test_make_gpu_keeps_its_results_when_it_is_stopped(tmp_path):
    """Like the shutdown of a rented machine."""
    code = (
        "import sys, gpu; gpu.parts = lambda quick, out: {"
        "'fine': ([sys.executable, '-c', 'print(1)'], 60), 'slow': ([sys.executable, '-c', 'import time; "
        "time.sleep(60)'], 60), 'never': (['no such program'], 60)}; gpu.device = lambda: ('a GPU', True); "
        "sys.exit(gpu.main())"
    )
    command = [sys.executable, "-c", code, "--out", str(tmp_path)]
    with subprocess.Popen(command, cwd=BENCH, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("fine"):
                break
        time.sleep(0.5)
        process.terminate()
        *_, last = process.stdout.read().splitlines()
    assert process.returncode == 1
    assert last == "Can revdeq be trusted on a GPU? not known: doctor did not finish; its log says why."
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as file:
        names = {Path(name).name for name in file.getnames()}
    assert {"fine.txt", "slow.txt", "summary.json"} <= names and "never.txt" not in names


def test_the_last_line_says_whether_a_gpu_can_be_trusted():
    import gpu

    fine, broken = {"ready": True, "verdict": "ready"}, {"ready": False, "verdict": "not ready: update Triton"}
    passed = {"doctor": "passed", "tests-gpu-only": "passed", "tests": "passed"}
    assert gpu.trusted(True, fine, passed).startswith("yes") and "did not run" not in gpu.trusted(True, fine, passed)
    assert "tests did not run to the end" in gpu.trusted(True, fine, {**passed, "tests": "stopped after 420 s"})
    assert gpu.trusted(True, fine, {**passed, "tests": "failed with code 1"}) == "NO: tests failed. Send the archive"
    assert gpu.trusted(True, broken, passed) == "NO: not ready: update Triton. Send the archive"
    assert gpu.trusted(True, None, {}).startswith("not known")
    assert gpu.trusted(False, fine, passed) == "not known: torch finds no GPU here"
    bandwidth = {"numbers": {"bytes_per_second": {"copy": 2e12, "float64 relax": 1.8e12}}}
    assert gpu.shares({"findings": {"cuda:0 bandwidth": bandwidth}}) == {"float64 relax": 0.9}


def test_the_parts_of_make_gpu_exist(tmp_path):
    import gpu

    named = [x for command, _ in gpu.parts(False, tmp_path).values() for x in command if x.startswith("tests/")]
    assert len(named) == 4 and all((BENCH.parent / name).exists() for name in named)
    assert gpu.device()[0] != "unknown device"


def test_the_share_of_a_copys_bandwidth():
    spec = importlib.util.spec_from_file_location("bench_conftest", BENCH / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    ratios = {"fused": 1.0, "fused with norms": 2.0, "unfused": 9.0, "copy": 0.9}
    assert module.bandwidth_shares(ratios) == {"fused": 0.9, "fused with norms": 0.45}


def test_the_zoo_asks_for_a_checkout_of_torchdeq(tmp_path, monkeypatch, capsys):
    zoo = pytest.importorskip("zoo", reason="torchdeq is not installed", exc_type=ImportError)
    monkeypatch.setattr(sys, "argv", ["zoo.py", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        zoo.main()
    assert end.value.code == 2
    assert "has no deq-zoo: is it a clone of torchdeq?" in capsys.readouterr().err


def test_every_program_of_the_zoo_was_run_with_every_solver():
    zoo = pytest.importorskip("zoo", reason="torchdeq is not installed", exc_type=ImportError)
    measured = {(r.benchmark, r.provider, r.quantity) for r in read(RESULTS / "zoo.csv")}
    quantities = ("seconds", "loss", "bytes")
    assert measured == {(f"zoo, {p}", s, q) for p in zoo.PROGRAMS for s in zoo.SOLVERS for q in quantities}
