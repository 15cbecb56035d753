"""python -m revdeq train and evaluate: the files of a run, resuming it, several processes, and errors."""

import csv
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import revdeq
from revdeq import __main__, training
from revdeq.models import count_parameters
from revdeq.training import checkpoint, loop, record
from revdeq.training.data import WikiText
from revdeq.training.presets import PRESETS, Training

SETTINGS = {
    "cifar10-tiny": {"channels": (4, 8), "widths": 1, "max_steps": 1, "batch": 20, "epochs": 2, "log_every": 3,
                     "save_every": 4, "warmup": 2},
    "wikitext2-tiny": {"d": 8, "heads": 2, "length": 16, "max_steps": 2, "vocabulary": 20, "batch": 8, "updates": 14,
                       "evaluate_every": 6, "log_every": 4, "save_every": 5, "warmup": 2},
    "prefix-tiny": {"channels": 4, "max_steps": (2, 9), "updates": 14, "evaluate_every": 6, "log_every": 4,
                    "save_every": 5, "evaluation_batches": 2},
}  # fmt: skip
TIMES = ("per_second", "seconds")
"""Columns that differ between runs."""


def small(name="cifar10-tiny", **changes):
    return training.configured(name, {**SETTINGS[name], **changes})


def trained(preset, folder, out, resume=False):
    return training.train(preset, folder, out, resume, device="cpu", quiet=True)


def assignments(settings):
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


@pytest.fixture
def command(monkeypatch, capsys):
    """Runs a command. Returns what it prints; of a command that fails, what it says."""

    def run(*arguments, fails=False):
        monkeypatch.setattr(sys, "argv", ["revdeq", *map(str, arguments)])
        capsys.readouterr()
        if not fails:
            assert __main__.main() == 0
            return capsys.readouterr().out
        with pytest.raises(SystemExit) as stopped:
            __main__.main()
        return stopped.value.code

    return run


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a.nan_to_num(), b.nan_to_num())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a if key not in TIMES)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def table(out):
    return list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))


def assert_same_run(one, other):
    for name in ("last.pt", "best.pt"):
        a, b = (checkpoint.load(out / name) for out in (one, other))
        assert [key for key in a if not equal(a[key], b[key]) and key not in TIMES] == []
    assert equal(table(one), table(other)) and len(table(one)) > 2


@pytest.mark.usefixtures("with_picture")
@pytest.mark.parametrize("name", ["cifar10-tiny", "wikitext2-tiny"])
def test_a_run_learns_and_writes_its_files(name, folder, tmp_path, command):
    more = {"epochs": 4, "lr": 0.01} if name == "cifar10-tiny" else {"updates": 30, "lr": 0.02}
    out = tmp_path / "run"
    settings = assignments({**SETTINGS[name], **more})
    said = command("train", name, "--data", folder, "--out", out, "--device", "cpu", *settings)
    assert sorted(p.name for p in out.iterdir()) == ["best.pt", "config.json", "last.pt", "metrics.csv", "metrics.png"]
    config = json.loads((out / "config.json").read_text())
    assert config["name"] == name and config["training"]["lr"] == more["lr"]
    rows = table(out)
    assert tuple(rows[0]) == record.COLUMNS and float(rows[-1]["loss"]) < 0.95 * float(rows[0]["loss"])
    assert float(rows[-1]["evaluations"]) == 2 * small(name).settings["max_steps"] and float(rows[-1]["change"]) > 0
    evaluated = [float(row["metric"]) for row in rows if row["metric"]]
    choose = max if name == "cifar10-tiny" else min
    best = checkpoint.load(out / "best.pt")
    assert best["update"] in [int(r["update"]) for r in rows if r["metric"] and float(r["metric"]) == choose(evaluated)]
    assert f" {'accuracy' if name == 'cifar10-tiny' else 'perplexity'} {evaluated[-1]:.4g}, loss " in said
    assert " parameters, on cpu" in said and said.count("update ") == len(evaluated)
    assert (out / "metrics.png").read_bytes().startswith(b"\x89PNG")


class Crash(BaseException):
    """Like the end of the process: no code expects it."""


def crash_in_an_update(monkeypatch, at):
    batch = loop.Run.batch
    monkeypatch.setattr(loop.Run, "batch", lambda run: crash() if run.update == at else batch(run))


def crash_in_the_middle_of_a_file(monkeypatch, at):
    save = torch.save
    half = lambda file: file.write(b"half of it") and crash()  # noqa: E731
    monkeypatch.setattr(torch, "save", lambda state, file: half(file) if state["update"] >= at else save(state, file))


def crash():
    raise Crash


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """Runs without interruptions."""
    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("whole")
    for name in SETTINGS:
        trained(small(name), folder, out / name)
    return out


@pytest.mark.parametrize(
    ("name", "end"),
    [*((name, crash_in_an_update) for name in SETTINGS), ("prefix-tiny", crash_in_the_middle_of_a_file)],
)
def test_a_run_resumes_bit_for_bit_wherever_it_ended(name, end, folder, whole, tmp_path):
    """With dropout, augmentation, noise and random numbers of steps."""
    for at in (3, 11):
        with pytest.MonkeyPatch.context() as monkeypatch:
            end(monkeypatch, at)
            with pytest.raises(Crash):
                trained(small(name), folder, tmp_path, resume=True)
        torch.rand(3)  # the generator of a new process
    trained(small(name), folder, tmp_path, resume=True)
    assert_same_run(whole / name, tmp_path)
    assert not list(tmp_path.glob("*.part"))


def test_a_finished_run_can_be_extended_with_its_own_settings(folder, tmp_path, command):
    out = tmp_path / "run"
    command("train", "prefix-tiny", "--out", out, *assignments({**SETTINGS["prefix-tiny"], "noise": 0.5}))
    command("train", "prefix-tiny", "--out", out, "--resume", "--set", "updates=20")
    last = checkpoint.load(out / "last.pt")
    assert last["update"] == 20 and last["preset"]["settings"]["noise"] == 0.5
    assert [row["update"] for row in table(out)][-2:] == ["18", "20"]


def test_a_plateau_halves_the_rate_resumes_bit_for_bit_and_ends_the_training(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "WINDOW", 4)
    monkeypatch.setattr(loop, "PATIENCE", 1)
    preset = small(schedule="plateau", lr=0.3, epochs=4)  # too large, so that the loss does not always fall
    rows = trained(preset, folder, tmp_path / "whole")
    assert rows[-1]["lr"] < 0.3
    with pytest.MonkeyPatch.context() as patch:
        crash_in_an_update(patch, 22)
        with pytest.raises(Crash):
            trained(preset, folder, tmp_path / "run")
    trained(preset, folder, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")
    short = trained(small(schedule="plateau", lr=1.9e-6, epochs=50), folder, tmp_path / "short")
    assert 0.9e-6 < short[-1]["lr"] < 1e-6 and short[-1]["update"] < 450 and short[-1]["metric"] != ""


@pytest.mark.skipif(not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="no gloo")
def test_two_processes_train_as_one_does(folder, tmp_path):
    """With the same batch, half of it each, and the same random number of steps per update. Dropout is off, because
    each process has its own masks. No thread of the process group is left: at the exit of the interpreter it would
    abort the process."""
    settings = {**SETTINGS["wikitext2-tiny"], "dropout": 0.0, "max_steps": "(1,6)", "lr": 0.003}
    one = trained(small("wikitext2-tiny", **{**settings, "max_steps": (1, 6)}), folder, tmp_path / "one")
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "revdeq")
    arguments = ["train", "wikitext2-tiny", "--data", folder, "--out", tmp_path / "two", "--device", "cpu"]
    words = [sys.executable, "-m", *torchrun, *map(str, arguments), *assignments(settings)]
    environment = {**os.environ, "PYTHONPATH": str(Path(revdeq.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(" parameters, ") == 1  # only the first process prints
    two = checkpoint.load(tmp_path / "two/last.pt")["rows"]
    for ours, expected in zip(two, one, strict=True):
        # float32 sums of halves: some roundings of 6e-8, which 14 updates let grow
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert ours["evaluations"] == expected["evaluations"]
    assert two[-1]["metric"] == pytest.approx(one[-1]["metric"], rel=1e-4)


@pytest.mark.parametrize(("name", "metric"), [("cifar10-tiny", "accuracy"), ("wikitext2-tiny", "perplexity")])
def test_evaluate_gives_the_metrics_of_the_training(name, metric, folder, whole, command):
    last, row = whole / name / "last.pt", table(whole / name)[-1]
    said = command("evaluate", last, "--split", "valid")
    assert f"valid: {metric} {float(row['metric']):.4f}, loss {float(row['evaluation_loss']):.4f} (" in said


def test_evaluate_takes_other_settings(folder, whole, command):
    run = whole / "wikitext2-tiny"
    count = len(WikiText("wikitext-2", folder, 16, vocabulary=20).tokens["test"]) - 1
    assert f"({count:,} tokens), 4 evaluations of f, change " in command("evaluate", run)
    assert "(128 tokens), 10 evaluations" in command("evaluate", run, "--batches", 1, "--set", "max_steps=5")
    assert "(500 bits), 18 evaluations" in command(
        "evaluate", whole / "prefix-tiny", "--set", "bits=10", "--set", "batch=25", "--batches", 2
    )
    for wrong, message in (
        (("--set", "evaluation_batches=0"), "evaluation_batches=0: it must be an integer of at least 1 or none"),
        (("--split", "train"), "--split train: it must be valid or test"),
        (("--set", "lr=1"), "lr=1: it applies to training"),
    ):
        assert message in command("evaluate", run, *wrong, fails=True)


def test_a_trained_model_is_loaded_with_other_settings(whole):
    model = revdeq.models.load(whole / "prefix-tiny", max_steps=40, beta=0.5)
    assert model.equilibrium.max_steps == 40 and model.equilibrium.beta == 0.5 and not model.training
    saved = checkpoint.load(whole / "prefix-tiny/best.pt")["model"]
    assert equal(model.state_dict(), saved)
    with pytest.raises(training.SettingError, match="colour=1: prefix-tiny has no such setting; it has autocast"):
        revdeq.models.load(whole / "prefix-tiny", colour=1)
    with pytest.raises(training.CheckpointError, match="the weights of this run do not fit channels=5: leave it out"):
        revdeq.models.load(whole / "prefix-tiny", channels=5)


class Fixed(nn.Module):
    """A model whose outputs do not depend on its inputs, or are given for each of them."""

    def __init__(self, outputs):
        super().__init__()
        self.outputs = outputs

    def forward(self, tokens):
        return self.outputs(tokens)


@pytest.mark.parametrize("count", [2, None])
def test_perplexity_of_a_restricted_vocabulary_is_that_of_all_tokens(count, folder):
    """In a part of the split, too."""
    data = WikiText("wikitext-2", folder, 16, vocabulary=9)
    v, encoded = data.vocabulary, data.encoding.n_vocab
    logits, recipe = torch.randn(v.size), Training(batch=4, evaluation_batches=count)
    found = training.evaluate(Fixed(lambda x: logits.expand(*x.shape, -1)), data, "valid", recipe)
    p = logits.double().softmax(0).numpy()[v.ids] * np.exp(-v.surcharge)
    assert len(p) == encoded == 263 and p.sum() == pytest.approx(1)
    tokens = data.tokens["valid"][1 : 1 + 64 * count if count else None]
    expected = -np.log(p[tokens]).mean()
    assert found.loss == pytest.approx(expected, rel=1e-6)  # of float32 logits
    assert found.metric == pytest.approx(math.exp(expected), rel=1e-5)
    assert found.targets == len(tokens) and found.evaluations is None


def test_a_number_of_steps_is_drawn_for_every_update(folder, tmp_path, monkeypatch):
    taken, step = [], loop.Run.step

    def stepping(run):
        count = step(run)
        taken.append(run.model.equilibrium.last.steps)
        return count

    monkeypatch.setattr(loop.Run, "step", stepping)
    rows = trained(small("prefix-tiny"), None, tmp_path / "run")
    assert len(taken) == 14 and {*taken} <= {*range(2, 10)} and len({*taken}) > 3
    assert rows[-1]["evaluations"] == pytest.approx(2 * np.mean(taken[-4:]))
    model = training.restored(tmp_path / "run/last.pt").model
    assert model.equilibrium.max_steps == 9  # of an evaluation


@pytest.mark.parametrize(("tol", "share"), [(0.9, 1.0), (1e-9, 0.0), (None, "")])
def test_the_share_of_solves_that_converge_is_recorded(tol, share, folder, tmp_path):
    rows = trained(small(tol=tol, max_steps=6, updates=3), folder, tmp_path)
    assert [row["converged"] for row in rows] == [share]
    assert (rows[0]["evaluations"] < 12) == (share == 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"widths": 1, "max_steps": 1, "autocast": "bfloat16"},
        {"widths": 1, "max_steps": 1, "clip": 1e-3, "state": "exact", "held_out": None},
        {"model": "resnet", "depth": 1},
        {"widths": 1, "max_steps": 1, "solver": "torchdeq", "evaluations": 9, "tol": 1e-9, "autocast": "bfloat16"},
        {"widths": 1, "max_steps": 2, "tol": 1e-9, "per_example": True},
        {"model": "single-scale", "channels": 4, "width": 1, "max_steps": 1},
    ],
    ids=str,
)
def test_options_of_a_run(changes, folder, tmp_path):
    if "solver" in changes:
        pytest.importorskip("torchdeq", reason="torchdeq is not installed")
    small_of_any_model = {"channels": (4, 8), "batch": 20, "updates": 3}
    rows = trained(training.configured("cifar10-tiny", {**small_of_any_model, **changes}), folder, tmp_path)
    assert rows[-1]["update"] == 3 and math.isfinite(rows[-1]["loss"])
    assert (rows[-1]["evaluations"] == "") == (changes.get("model") == "resnet")
    if "tol" in changes:
        assert rows[-1]["converged"] == 0 and rows[-1]["evaluations"] == (10 if "solver" in changes else 4)


def test_every_epoch_and_seed_has_another_order(folder, tmp_path):
    one, same, other = (
        loop.Run(small(seed=seed), folder, tmp_path, training.evaluation.Processes("cpu")) for seed in (0, 0, 1)
    )
    assert equal(one.batch(), same.batch()) and not equal(one.batch(), other.batch())
    same.update = same.epoch
    assert not equal(one.batch().targets, same.batch().targets)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("cifar10-single", 160_138),
        ("cifar10-170k", 171_498),
        ("cifar10-5m", 6_335_946),
        ("cifar10-10m", 10_319_754),
        ("wikitext103-94m", 93_987_840),
        ("cifar10-tiny", 175_122),
        ("prefix-tiny", 16_658),
        ("maze-tiny", 20_578),
    ],
)
def test_presets_build_and_are_exact_where_a_float64_state_would_lose_bits(name, parameters):
    preset = PRESETS[name]
    shapes = {"prefix-sums": {"features": 1, "dimensions": 1}, "mazes": {"features": 3, "dimensions": 2}}
    with torch.device("meta"):
        model = preset.build(**shapes.get(preset.data, {}))
    assert count_parameters(model) == parameters
    for layer in training.evaluation.equilibria(model):
        bits = 2 * layer.max_steps * math.log2((1 + layer.beta) / abs(1 - layer.beta))
        assert (layer.state == "exact") == (bits > 32)
    assert checkpoint.preset_of({"preset": dataclasses.asdict(preset)}) == preset


WRONG = [
    (["cifar10-tny"], "there is no preset 'cifar10-tny': there are cifar10-single"),
    (["cifar10-tiny", "--set", "stepz=3"], "stepz=3: cifar10-tiny has no such setting; it has autocast"),
    (["cifar10-tiny", "--set", "tol"], "--set tol: it must be key=value"),
    (["cifar10-tiny", "--set", "lr=fast"], "lr='fast': it must be a positive number"),
    (["cifar10-tiny", "--set", "clip=0"], "clip=0: it must be a positive number or none"),
    (["cifar10-tiny", "--set", "batch=1.5"], "batch=1.5: it must be an integer of at least 1"),
    (["cifar10-tiny", "--set", "seed=-1"], "seed=-1: it must be an integer of at least 0"),
    (["cifar10-tiny", "--set", "schedule=step"], "schedule='step': it must be plateau or cosine"),
    (["cifar10-tiny", "--set", "autocast=true"], "autocast=True: it must be bfloat16 or none"),
    (["prefix-tiny", "--set", "max_steps=(20,5)"], "max_steps=(20, 5): a range is two integers"),
    (["cifar10-tiny", "--set", "model=transformer"], "model='transformer' cannot be created for cifar10"),
    (["cifar10-tiny", "--set", "model=resnt"], "model='resnt': there are single-scale"),
    (["cifar10-tiny", "--set", "solver=broyden"], "solver='broyden': it must be reversible or torchdeq"),
    (["cifar10-tiny", "--set", "evaluations=9"], "evaluations=9: it applies to solver=torchdeq; set max_steps"),
    (["cifar10-tiny", "--set", "beta=1"], "cannot be created for cifar10: beta = 1 must not be 1"),
    (["cifar10-tiny", "--set", "batch=1000"], "batch=1000: it must be a multiple of 1, the number of processes"),
    (["wikitext2-tiny", "--set", "vocabulary=sene"], "vocabulary='sene': it must be full, or the number"),
    (["wikitext103-94m"], "has no wiki.train.tokens: put these files there, packed or unpacked, or pass --download"),
    (["cifar10-tiny", "--device", "gpu"], "--device gpu: this machine has cpu"),
    (["cifar10-tiny", "--device", "cuda:99"], "--device cuda:99: this machine has "),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_a_wrong_setting_is_named(arguments, message, folder, tmp_path, command):
    where = ["--data", folder / "wikitext-2/.." if "wikitext2-tiny" in arguments else folder / "cifar-10-batches-bin"]
    assert message in command("train", *arguments, *where, "--out", tmp_path / "run", fails=True)
    assert not (tmp_path / "run").exists()


def test_missing_data_is_named(tmp_path, command):
    assert "--data DIR" in command("train", "cifar10-tiny", fails=True)
    assert "--data DIR" in command("train", "cifar10-tiny", "--download", fails=True)
    said = command("train", "wikitext2-tiny", "--data", tmp_path, fails=True)
    assert f"{tmp_path / 'wikitext-2-v1.zip'}  from  https://" in said and "--download" in said


def test_a_folder_with_another_run_is_left_alone(folder, tmp_path, command):
    out = tmp_path / "run"
    trained(small(updates=3), folder, out)
    before = (out / "last.pt").read_bytes()
    for arguments, message in (
        (["cifar10-tiny", "--data", folder], "already exists: continue with --resume, or choose another"),
        (["cifar10-tiny", "--resume", "--set", "lr=0.1"], "lr=0.1: the run of .* has 0.003; leave it out"),
        (["wikitext2-tiny", "--data", folder, "--resume"], "preset='wikitext2-tiny': the run of .* has 'cifar10-tiny'"),
    ):
        assert message.partition(".*")[0] in command("train", *arguments, "--out", out, fails=True)
    assert (out / "last.pt").read_bytes() == before
    (tmp_path / "file").write_text("")
    said = command("train", "cifar10-tiny", "--data", folder, "--out", tmp_path / "file", fails=True)
    assert str(tmp_path / "file") in said


def test_a_checkpoint_that_cannot_be_used_is_named(whole, tmp_path, command):
    assert "there is no " in command("evaluate", tmp_path, fails=True)
    other, good = tmp_path / "other.pt", (whole / "prefix-tiny/last.pt").read_bytes()
    for content in (good[:-3000], b"", b"<html>"):
        other.write_bytes(content)
        assert f"{other} is damaged, or contains code" in command("evaluate", other, fails=True)
    torch.save(nn.Linear(2, 2), other)  # a pickled object, which might run anything
    assert "contains code, which is not run" in command("evaluate", other, fails=True)
    torch.save({"weights": 1}, other)
    assert "is no checkpoint of this release's" in command("evaluate", other, fails=True)


@pytest.mark.parametrize("settings", [{"lr": 1e30}, {"lr": 1e30, "state": "exact"}], ids=str)
def test_a_training_that_diverges_says_what_to_try(settings, folder, tmp_path):
    with pytest.raises(training.Diverged, match=r"The training diverged: try a smaller lr \(it was 1e\+30\), clip=1.0"):
        trained(small(**settings, warmup=0), folder, tmp_path)


def test_an_interruption_says_how_to_continue(monkeypatch, capsys):
    monkeypatch.setattr(training, "train", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(sys, "argv", ["revdeq", "train", "prefix-tiny"])
    assert __main__.main() == 130 and "--resume" in capsys.readouterr().err
