"""python -m revdeq train, evaluate and generate: the files of a run, resuming it, and errors."""

import csv
import dataclasses
import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sample_data import write_cifar_binary, write_encoding, write_wikitext
from torch import nn

import revdeq
from revdeq import __main__
from revdeq.training import checkpoint, presets, record, schedule
from revdeq.training import run as train
from revdeq.training.data import Cifar10, WikiText
from revdeq.training.presets import PRESETS, SettingError, Training, configured
from revdeq.training.processes import Processes

pytest.importorskip("tiktoken", reason="needs revdeq[train]")

IMAGES = {
    "model": "single-scale",
    "channels": 4,
    "width": 1,
    "max_steps": 1,
    "batch": 20,
    "epochs": 2,
    "log_every": 3,
    "save_every": 4,
    "warmup": 2,
}
TEXT = {
    "d": 8,
    "heads": 2,
    "length": 16,
    "max_steps": 2,
    "vocabulary": 20,
    "batch": 8,
    "updates": 14,
    "evaluate_every": 6,
    "log_every": 4,
    "save_every": 5,
    "warmup": 2,
}
SETTINGS = {"cifar10-tiny": IMAGES, "wikitext2-tiny": TEXT}
TIMES = ("per_second", "peak_memory_mib", "seconds")
"""Columns that differ between runs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_cifar_binary(folder), write_encoding(folder), write_wikitext(folder)
    return folder


@pytest.fixture(autouse=True)
def one_thread_and_own_cache(folder, monkeypatch):
    monkeypatch.setenv("REVDEQ_CACHE", str(folder / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    states = checkpoint.generators(torch.device("cpu"))
    yield
    checkpoint.restore_generators(states, torch.device("cpu"))
    torch.set_num_threads(threads)


def small(name="cifar10-tiny", **changes):
    return configured(name, {**SETTINGS[name], **changes})


def assignments(settings):
    return [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["revdeq", *map(str, arguments)])
    return __main__.main()


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a if key not in TIMES)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def assert_same_run(one, other):
    for name in ("last.pt", "best.pt"):
        a, b = (checkpoint.load(out / name) for out in (one, other))
        for key in a:
            assert equal(a[key], b[key]) or key == "seconds", f"{name} differs in {key}"
    rows = [list(csv.DictReader((out / "metrics.csv").read_text().splitlines())) for out in (one, other)]
    assert equal(*rows) and len(rows[0]) > 2


@pytest.mark.usefixtures("with_pictures")
@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_learns_and_writes_its_files(name, folder, tmp_path, capsys):
    more = {"epochs": 4, "lr": 0.01} if name == "cifar10-tiny" else {"updates": 30, "lr": 0.02}
    rows = train.train(small(name, **more), folder, tmp_path / "run")
    assert rows[-1]["loss"] < 0.95 * rows[0]["loss"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "best.pt",
        "config.json",
        "last.pt",
        "metrics.csv",
        "metrics.png",
    ]
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["name"] == name and config["training"]["lr"] == more["lr"] and config["parameters"] > 100
    table = list(csv.DictReader((tmp_path / "run/metrics.csv").read_text().splitlines()))
    assert [float(row["loss"]) for row in table] == [row["loss"] for row in rows]
    evaluated = [row["metric"] for row in rows if row["metric"] != ""]
    assert rows[-1]["evaluations"] == 2 * small(name).settings["max_steps"] and rows[-1]["change"] > 0
    best = checkpoint.load(tmp_path / "run/best.pt")
    assert best["metric"] == (max if name == "cifar10-tiny" else min)(evaluated)
    lines = capsys.readouterr().out
    assert "accuracy" in lines if name == "cifar10-tiny" else "perplexity" in lines
    for said in (f"{name}: {config['parameters']:,} parameters", "evaluations, change", "/s, ", " MiB"):
        assert said in lines
    assert (tmp_path / "run/metrics.png").read_bytes().startswith(b"\x89PNG")


class Crash(BaseException):
    """Like the end of the process: no code expects it."""


def crash_in_update(monkeypatch, at):
    batch = train.Run._batch
    monkeypatch.setattr(train.Run, "_batch", lambda run: _raise() if run.update == at else batch(run))


def crash_in_evaluation(monkeypatch, at):
    row = train.Run._row

    def evaluating(run, losses, scored):
        made = row(run, losses, scored)
        return _raise() if scored and run.update >= at else made

    monkeypatch.setattr(train.Run, "_row", evaluating)


def crash_between_best_and_last(monkeypatch, at):
    save = checkpoint.save

    def saving(path, state):
        if path.name == "last.pt" and state["update"] >= at:
            raise Crash
        save(path, state)

    monkeypatch.setattr(checkpoint, "save", saving)


def crash_in_the_middle_of_a_file(monkeypatch, at):
    save = torch.save

    def saving(state, file):
        if state["update"] >= at:
            file.write(b"half of it")
            raise Crash
        save(state, file)

    monkeypatch.setattr(torch, "save", saving)


def stop_by_signal(monkeypatch, at):
    batch = train.Run._batch

    def batching(run):
        if run.update == at:
            signal.raise_signal(signal.SIGTERM)  # os.kill would end the process on Windows
        return batch(run)

    monkeypatch.setattr(train.Run, "_batch", batching)


def _raise():
    raise Crash


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):
    """Runs without interruptions."""
    out = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVDEQ_CACHE", str(folder / "cache"))
        torch.set_num_threads(1)
        for name in SETTINGS:
            train.train(small(name), folder, out / name, quiet=True)
    return out


ENDS = [crash_in_evaluation, crash_between_best_and_last, crash_in_the_middle_of_a_file, stop_by_signal]


@pytest.mark.parametrize(
    ("name", "end"), [*((name, crash_in_update) for name in SETTINGS), *(("wikitext2-tiny", end) for end in ENDS)]
)
def test_a_run_resumes_bit_for_bit_wherever_it_ended(name, end, folder, whole, tmp_path):
    for at in (3, 11):
        with pytest.MonkeyPatch.context() as monkeypatch:
            end(monkeypatch, at)
            with pytest.raises((Crash, train.Stopped)):
                train.train(small(name), folder, tmp_path / "run", resume=True, quiet=True)
        random.random(), np.random.rand(), torch.rand(3)  # the generators of a new process
    train.train(small(name), folder, tmp_path / "run", resume=True, quiet=True)
    assert_same_run(whole / name, tmp_path / "run")
    assert not list((tmp_path / "run").glob("*.part"))


def test_resuming_a_plateau_bit_for_bit(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "PLATEAU_WINDOW", 4)
    monkeypatch.setattr(schedule, "PLATEAU_PATIENCE", 1)
    preset = small(schedule="plateau", lr=0.3, epochs=4)  # too large, so that the loss does not always fall
    rows = train.train(preset, folder, tmp_path / "whole", quiet=True)
    assert rows[-1]["lr"] < 0.3
    with pytest.MonkeyPatch.context() as patch:
        stop_by_signal(patch, 22)
        with pytest.raises(train.Stopped, match="SIGTERM: saved at update 23, continue with resume=True"):
            train.train(preset, folder, tmp_path / "run", quiet=True)
    train.train(preset, folder, tmp_path / "run", resume=True, quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_coefficients_are_tuned_during_training_and_resumed_bit_for_bit(folder, tmp_path, capsys):
    preset = small(tune_every=5)
    train.train(preset, folder, tmp_path / "whole")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tuned after update")]
    layer = revdeq.models.load(tmp_path / "whole/last.pt").equilibrium
    assert told[0].startswith("tuned after update 0: ") and told[1].startswith("tuned after update 5: ")
    assert told[-1].endswith(f": beta {layer.beta:.3g}, gamma {layer.gamma:.3g}")
    saved = checkpoint.load(tmp_path / "whole/last.pt")["model"]
    found = {name: x.tolist() for name, x in saved.items() if name.endswith("coefficients")}
    assert found and all(pair != [0.8, 1.0] for pair in found.values())
    with pytest.MonkeyPatch.context() as patch:
        stop_by_signal(patch, 7)  # between two searches
        with pytest.raises(train.Stopped):
            train.train(preset, folder, tmp_path / "run", quiet=True)
    train.train(preset, folder, tmp_path / "run", resume=True, quiet=True)
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def process(*arguments, launcher=("-m", "revdeq"), **more):
    """Run with the package under test, wherever it was imported from."""
    environment = {**os.environ, "PYTHONPATH": str(Path(revdeq.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, *map(str, arguments)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def wait_for(path, child, seconds=120):
    until = time.monotonic() + seconds
    while not path.exists() and child.poll() is None and time.monotonic() < until:
        time.sleep(0.02)
    assert path.exists(), child.communicate()


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_a_killed_run_resumes_bit_for_bit(folder, tmp_path, capsys):
    settings = {**IMAGES, "epochs": 8}
    train.train(configured("cifar10-tiny", settings), folder, tmp_path / "whole", quiet=True)
    arguments = [
        "train",
        "cifar10-tiny",
        "--data",
        folder,
        "--out",
        tmp_path / "run",
        "--resume",
        *assignments(settings),
    ]
    for number, code in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 128 + signal.SIGTERM)):
        child = process(*arguments)
        (tmp_path / "run/config.json").unlink(missing_ok=True)  # rewritten when training starts
        wait_for(tmp_path / "run/config.json", child)
        wait_for(tmp_path / "run/last.pt", child)
        time.sleep(random.uniform(0, 0.1))
        child.send_signal(number)
        _, errors = child.communicate()
        if child.returncode != 0:  # it may have been faster
            assert child.returncode == code, errors
            assert ("SIGTERM: saved at update" in errors) == (number == signal.SIGTERM)
    train.train(configured("cifar10-tiny", settings), folder, tmp_path / "run", resume=True)
    assert "continuing at update" in capsys.readouterr().out
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.parametrize("name", ["cifar10-tiny", pytest.param("wikitext2-tiny", marks=pytest.mark.full)])
def test_two_processes_train_as_one_does(name, folder, tmp_path):
    """With the same batch, half of it each, in two parts, and the same random number of steps per update. Dropout is
    off, because each process has its own masks."""
    changes = {"dropout": 0.0, "max_steps": (1, 6)} if name == "wikitext2-tiny" else {}
    settings = {**SETTINGS[name], **changes, "lr": 0.003}
    one = train.train(configured(name, settings), folder, tmp_path / "one", quiet=True)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "revdeq")
    arguments = ["--data", folder, "--out", tmp_path / "two", "--device", "cpu"]
    child = process("train", name, *arguments, *assignments({**settings, "accumulate": 2}), launcher=torchrun)
    out, errors = child.communicate()
    assert child.returncode == 0, errors
    assert out.count(" parameters, ") == 1  # only the first process prints
    two = checkpoint.load(tmp_path / "two/last.pt")
    assert len(two["generators"]) == 2
    for ours, expected in zip(two["rows"], one, strict=True):
        # float32 sums of halves: some roundings of 6e-8, which 14 to 20 updates let grow
        assert ours["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert two["rows"][-1]["metric"] == pytest.approx(one[-1]["metric"], rel=1e-4)


def test_evaluate_gives_the_metrics_of_the_training(folder, tmp_path, monkeypatch, capsys):
    for name, metric in (("cifar10-tiny", "accuracy"), ("wikitext2-tiny", "perplexity")):
        rows = train.train(small(name), folder, tmp_path / name, quiet=True)
        capsys.readouterr()
        last = tmp_path / name / "last.pt"
        assert command(monkeypatch, "evaluate", last, "--data", folder, "--split", "valid") == 0
        said = capsys.readouterr().out
        assert f"valid: {metric} {rows[-1]['metric']:.4f}" in said
        assert "evaluations of f, change" in said


def test_perplexity_of_a_restricted_vocabulary_is_that_of_all_tokens(folder):
    data = WikiText("wikitext-2", folder, 16, vocabulary=9)
    v = data.vocabulary
    logits = torch.randn(v.size, generator=torch.Generator().manual_seed(0))

    class Constant(torch.nn.Module):
        last = None

        def forward(self, tokens):
            return logits.expand(*tokens.shape, -1)

    found = revdeq.training.evaluate(Constant(), data, "valid", Training(batch=4))
    p = logits.double().softmax(0).numpy()[v.ids] * np.exp(-v.surcharge)
    assert len(p) == v.encoded == 263 and p.sum() == pytest.approx(1)
    expected = -np.log(p[data.tokens["valid"][1:]]).mean()
    assert found.loss == pytest.approx(expected, rel=1e-6)  # of float32 logits
    assert found.metric == pytest.approx(math.exp(expected), rel=1e-5)
    assert found.targets == len(data.tokens["valid"]) - 1 and found.evaluations is None


def test_a_part_of_a_split_counts_the_tokens_of_that_part(folder):
    """The loss of tokens outside the vocabulary is that of the tokens evaluated, not the mean over the split."""
    data = WikiText("wikitext-2", folder, 16, vocabulary=3)
    v = data.vocabulary

    class Certain(torch.nn.Module):
        """Predicts the next id perfectly, so that the loss is only that of unknown tokens."""

        last = None

        def forward(self, tokens):
            (targets,) = (b.targets for b in batches if torch.equal(b.inputs, tokens))
            return 1000.0 * torch.nn.functional.one_hot(targets, v.size)

    batches = list(data.evaluation("valid", 4))
    for count in (1, 2, None):
        score = revdeq.training.evaluate(Certain(), data, "valid", Training(batch=4, evaluation_batches=count))
        tokens = data.tokens["valid"][1 : 1 + 64 * count] if count else data.tokens["valid"][1:]
        assert score.targets == len(tokens) and score.loss == pytest.approx(v.surcharge[tokens].mean(), rel=1e-6)


def test_evaluate_uses_the_whole_split_by_default(folder, tmp_path, monkeypatch, capsys):
    preset = small("wikitext2-tiny", evaluation_batches=1)
    train.train(preset, folder, tmp_path / "run", quiet=True)
    data = WikiText("wikitext-2", folder, 16, vocabulary=20)
    capsys.readouterr()

    def said(*more):
        assert command(monkeypatch, "evaluate", tmp_path / "run/best.pt", "--data", folder, *more) == 0
        return capsys.readouterr().out

    assert f"({len(data.tokens['test']) - 1:,} tokens), 4 evaluations of f" in said()
    assert "(128 tokens), 4 evaluations of f" in said("--batches", 1)
    assert "(128 tokens), 10 evaluations of f" in said("--batches", 1, "--set", "steps=5")
    assert "(128 tokens), 4 evaluations of f" in said("--set", "evaluation_batches=1")
    for wrong, message in (
        (("--batches", 0), "--batches 0: it must be 1 or larger"),
        (("--set", "lr"), "key=value"),
        (("--set", "lr=1"), "lr=1: it applies to training only"),
    ):
        assert command(monkeypatch, "evaluate", tmp_path / "run/best.pt", "--data", folder, *wrong) == 1
        assert message in capsys.readouterr().err


def test_a_checkpoint_of_version_0_1_0_is_read(folder, tmp_path):
    """`steps` was the name of max_steps, the vocabulary a setting of the training, and no image was held out."""
    for name in SETTINGS:
        train.train(small(name, updates=4), folder, tmp_path / name, quiet=True)
        path = tmp_path / name / "best.pt"
        saved = checkpoint.load(path)
        expected = revdeq.training.restored(path, folder)
        preset = saved["preset"]
        preset["settings"]["steps"] = preset["settings"].pop("max_steps")
        preset["training"]["vocabulary"] = preset["settings"].pop("vocabulary", "full")
        saved["vocabulary"] = saved.pop("data")
        checkpoint.save(path, saved)
        trained = revdeq.training.restored(path, folder)
        assert equal(trained.model.state_dict(), expected.model.state_dict())
        assert trained.preset.settings["max_steps"] == SETTINGS[name]["max_steps"]
        if name == "cifar10-tiny":
            assert trained.dataset.splits == ("test",)
        else:
            assert equal(trained.dataset.saved(), expected.dataset.saved())


def test_steps_is_short_for_max_steps():
    assert small(steps=3) == small(max_steps=3)
    assert configured("cifar10-tiny", {"steps": (1, 2, 3, 4)}).build().last is None
    assert [layer.max_steps for layer in configured("cifar10-tiny", {"steps": (2, 5)}).build().equilibria] == [5] * 4


def test_a_number_of_steps_is_drawn_for_every_update(folder, tmp_path, monkeypatch):
    preset = small("wikitext2-tiny", max_steps=(2, 9), dropout=0.0)
    taken = []
    step = train.Run._step

    def stepping(run):
        loss = step(run)
        taken.append(run.model.last.steps)
        return loss

    monkeypatch.setattr(train.Run, "_step", stepping)
    rows = train.train(preset, folder, tmp_path / "whole", quiet=True)
    whole = list(taken)
    assert len(whole) == 14 and {*whole} <= {*range(2, 10)} and len({*whole}) > 3
    model = revdeq.training.restored(tmp_path / "whole/last.pt", folder).model
    assert model.equilibrium.max_steps == 9  # of an evaluation
    assert (
        revdeq.training.evaluate(model, WikiText("wikitext-2", folder, 16, 20), "valid", preset.training).loss
        == (rows[-1]["evaluation_loss"])
    )
    taken.clear()
    with pytest.MonkeyPatch.context() as patch:
        stop_by_signal(patch, 7)
        with pytest.raises(train.Stopped):
            train.train(preset, folder, tmp_path / "run", quiet=True)
    train.train(preset, folder, tmp_path / "run", resume=True, quiet=True)
    assert taken == whole
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_generate(folder, tmp_path, monkeypatch, capsys):
    train.train(small("wikitext2-tiny"), folder, tmp_path / "run", quiet=True)
    best = tmp_path / "run/best.pt"
    capsys.readouterr()

    def text(*more, data=()):
        assert command(monkeypatch, "generate", best, "--tokens", 30, *data, *more) == 0
        return capsys.readouterr().out

    prompt = ("--prompt", "the fox and the dog ran to a hill and then it sat")  # longer than the model reads
    first = text(*prompt, "--seed", 1)
    assert first.startswith(prompt[1]) and len(first) > len(prompt[1]) + 20
    assert text(*prompt, "--seed", 1) == first != text(*prompt, "--seed", 2)
    assert text("--temperature", 0, "--seed", 1) == text("--temperature", 0, "--seed", 2)
    assert text(*prompt, "--seed", 1, data=("--data", folder)) == first
    greedy = ("--temperature", 0, "--set", "max_steps=6")
    assert text(*greedy, "--tol", 1e-9) == text(*greedy)
    for wrong, message in (
        (("--tokens", 0), "tokens = 0"),
        (("--temperature", -1), "temperature = -1.0"),
        (("--tol", 0), "tol = 0.0"),
    ):
        assert command(monkeypatch, "generate", best, *wrong) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "changes",
    [
        {"autocast": "bfloat16"},
        {"autocast": "float16", "clip": 1.0},
        {"clip": 1e-3, "schedule": "constant"},
        {"model": "resnet", "channels": (4, 8), "depth": 1},
        {"model": "multi-scale", "channels": (4, 8), "widths": (1, 1), "max_steps": (1, 1)},
        {"solver": "stored"},
        {"state": "exact"},
    ],
    ids=str,
)
def test_options_of_a_run(changes, folder, tmp_path):
    settings = {**IMAGES, "updates": 12, **changes}
    if "model" in changes:
        settings = {k: v for k, v in settings.items() if k in changes or k not in ("channels", "width", "max_steps")}
    rows = train.train(configured("cifar10-tiny", settings), folder, tmp_path / "run", quiet=True)
    assert rows[-1]["update"] == 12 and math.isfinite(rows[-1]["loss"])
    assert (rows[-1]["evaluations"] == "") == (changes.get("model") == "resnet")


def test_the_solvers_train_alike(folder, tmp_path):
    """The gradient is that of the stored graph up to float32 rounding, and so is the trained model."""
    curves = []
    for i, changes in enumerate(({}, {"solver": "stored"}, {"state": "exact"})):
        rows = train.train(small(**changes, max_steps=2), folder, tmp_path / str(i), quiet=True)
        curves.append([row["loss"] for row in rows])
    assert curves[1] == pytest.approx(curves[0], rel=1e-5)
    assert curves[2] == pytest.approx(curves[0], rel=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo inspects it
def test_compiling_f_keeps_the_names_in_a_checkpoint(folder, tmp_path, monkeypatch):
    compile_ = torch.nn.Module.compile
    compiled = []

    def eager(module):
        compiled.append(type(module).__name__)
        compile_(module, backend="eager")

    monkeypatch.setattr(torch.nn.Module, "compile", eager)
    train.train(small(compile=True, updates=2), folder, tmp_path / "run", quiet=True)
    assert compiled == ["ConvBlock"]
    monkeypatch.undo()
    saved = checkpoint.load(tmp_path / "run/last.pt")
    assert saved["model"].keys() == small().build().state_dict().keys()


def test_the_plateau_halves_after_ten_windows_without_progress():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rate = schedule.scheduled(optimizer, "plateau", 0, 100)
    rates = []
    for loss in [3.0, 2.0, *[2.0] * 20, 1.0]:
        rate.step(loss)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0] * 11 + [0.5] * 10 + [0.25] * 2


def test_the_cosine_rises_and_falls():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    rate = schedule.scheduled(optimizer, "cosine", 4, 24)
    rates = []
    for _ in range(24):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        rate.step()
    expected = [0.2, 0.4, 0.6, 0.8] + [(1 + math.cos(math.pi * i / 20)) / 2 for i in range(20)]
    assert rates == pytest.approx(expected)


def test_training_ends_when_the_learning_rate_reaches_its_minimum(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "PLATEAU_WINDOW", 3)
    monkeypatch.setattr(schedule, "PLATEAU_PATIENCE", 1)
    rows = train.train(small(schedule="plateau", lr=2e-6, epochs=50), folder, tmp_path / "run", quiet=True)
    assert rows[-1]["lr"] >= 1e-6 and rows[-1]["update"] < 500


def test_batches_depend_on_the_seed_and_the_update_only(folder):
    data = Cifar10(folder)

    def batches(seed, updates):
        run = train.Run(small(seed=seed), data, Processes("cpu"), folder, folder, quiet=True)
        for run.update in updates:
            yield run._batch()

    forwards, backwards = list(batches(0, range(25))), list(batches(0, reversed(range(25))))[::-1]
    assert equal(forwards, backwards)
    assert not equal(forwards[0], next(batches(1, [0])))
    labels = torch.cat([batch.targets for batch in forwards[:9]])
    assert torch.equal(labels.sort().values, data.labels.sort().values)  # an epoch is every image once
    assert not torch.equal(labels, torch.cat([batch.targets for batch in forwards[9:18]]))


def test_presets_state_what_the_paper_does():
    another = PRESETS["prefix-tiny"].changed({"state": revdeq.Exact(20)})
    for preset in (*PRESETS.values(), another):
        assert presets.Preset.from_dict(json.loads(json.dumps(preset.to_dict()))).flat() == preset.flat()
        with torch.device("meta"):
            preset.build()
    assert presets.Preset.from_dict(another.to_dict()).settings["state"] == revdeq.Exact(20)
    language = PRESETS["wikitext103-94m"].training
    assert (language.lr, language.warmup, language.weight_decay, language.batch) == (1e-3, 4000, 0.1, 32)
    assert PRESETS["cifar10-single"].training.lr == 1e-3 and PRESETS["cifar10-5m"].training.lr == 3e-4


@pytest.mark.parametrize(
    "text, value",
    [
        ("8", 8),
        ("1e-3", 1e-3),
        ("none", None),
        ("true", True),
        ("(1, 2)", (1, 2)),
        ("exact", "exact"),
        ("a=b", "a=b"),
        ("Exact(20)", revdeq.Exact(20)),
        ("revdeq.Exact(fraction_bits=20)", revdeq.Exact(20)),
    ],
)
def test_values_on_the_command_line(text, value):
    assert presets.parsed([f"key={text}"]) == {"key": value}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["cifar10-tny"], "there is no preset 'cifar10-tny' (did you mean cifar10-tiny?): there are cifar10-single"),
        (["cifar10-tiny", "--set", "stepz=3"], "cifar10-tiny has no setting 'stepz' (did you mean steps?)"),
        (["cifar10-tiny", "--set", "weight_dcay=3"], "(did you mean weight_decay?)"),
        (["cifar10-tiny", "--set", "steps"], "--set steps: it must be key=value"),
        (["cifar10-tiny", "--set", "lr=fast"], "lr='fast': it must be float"),
        (["cifar10-tiny", "--set", "lr=-1"], "lr=-1: it must be larger than 0"),
        (["cifar10-tiny", "--set", "lr=nan"], "lr='nan'"),
        (["cifar10-tiny", "--set", "batch=1.5"], "batch=1.5: it must be int"),
        (["cifar10-tiny", "--set", "epochs=true"], "epochs=True: it must be int"),
        (["cifar10-tiny", "--set", "schedule=step"], "schedule='step': it must be one of plateau, cosine"),
        (["cifar10-tiny", "--set", "learning_rate=1"], "(did you mean lr?)"),
        (["cifar10-tiny", "--set", "seed=-1"], "seed=-1: it must be 0 or larger"),
        (["cifar10-tiny", "--set", "seed=99999999999999999999"], "seed=99999999999999999999: it must be below 2**63"),
        (["cifar10-tiny", "--set", "steps=(20,5)"], "max_steps=(20, 5): a range is two integers"),
        (["cifar10-tiny", "--set", "model=transformer"], "cannot be trained on cifar10: choose one of single-scale"),
        (["cifar10-tiny", "--set", "block=mine.py:Block"], "block='mine.py:Block': it must be module:Class"),
        (["cifar10-tiny", "--set", "beta=1"], "the model multi-scale cannot be created: beta = 1"),
        (["cifar10-tiny", "--set", "model=resnt"], "model='resnt': there is no such model (did you mean resnet?)"),
        (["cifar10-tiny", "--set", "batch=1000"], "batch=1000 is larger than the training data, 180"),
        (["wikitext2-tiny", "--set", "vocabulary=sene"], "vocabulary='sene'"),
        (["wikitext103-94m"], "no wikitext-103 in "),
    ],
)
def test_a_wrong_setting_is_named(arguments, message, folder, tmp_path, monkeypatch, capsys):
    assert command(monkeypatch, "train", *arguments, "--data", folder, "--out", tmp_path / "run") == 1
    assert message in capsys.readouterr().err


def test_missing_data_is_named(tmp_path, monkeypatch, capsys):
    for name, file in (("cifar10-tiny", "cifar-10-binary.tar.gz"), ("wikitext2-tiny", "wikitext-2-v1.zip")):
        assert command(monkeypatch, "train", name, "--data", tmp_path / "none", "--out", tmp_path / "run") == 1
        said = capsys.readouterr().err
        assert f"{tmp_path / 'none' / file}  from  https://" in said and "--download" in said
    assert not (tmp_path / "run").exists()


def test_a_folder_with_another_run_is_left_alone(folder, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    train.train(small(updates=3), folder, out, quiet=True)
    before = (out / "last.pt").read_bytes()
    settings = assignments({**IMAGES, "updates": 3})
    cases = [
        (
            ["cifar10-tiny", *settings],
            "already exists: continue it with resume=True (--resume), or choose another folder (--out)",
        ),
        (
            ["cifar10-tiny", *settings, "--set", "lr=0.1", "--resume"],
            "other settings, lr=0.003 (asked for: 0.1)",
        ),
        (["wikitext2-tiny", "--resume"], "preset=cifar10-tiny (asked for: wikitext2-tiny)"),
    ]
    for arguments, message in cases:
        assert command(monkeypatch, "train", *arguments, "--data", folder, "--out", out) == 1
        assert message in capsys.readouterr().err
    assert (out / "last.pt").read_bytes() == before
    file = tmp_path / "file"
    file.write_text("")
    assert command(monkeypatch, "train", "cifar10-tiny", *settings, "--data", folder, "--out", file) == 1
    assert "cannot be created" in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_used_is_named(folder, tmp_path, monkeypatch, capsys):
    train.train(small(updates=2), folder, tmp_path / "run", quiet=True)
    last = tmp_path / "run/last.pt"
    saved = checkpoint.load(last)

    def said(path, *more, action="evaluate"):
        where = ["--data", folder] if action == "evaluate" else []
        assert command(monkeypatch, action, path, *where, *more) == 1
        return capsys.readouterr().err

    assert "there is no checkpoint" in said(tmp_path / "none.pt")
    assert "only a language model generates text" in said(last, action="generate")
    assert "--split train: it must be valid or test" in said(last, "--split", "train")
    other = tmp_path / "other.pt"
    other.write_bytes(last.read_bytes()[:-3000])
    assert "not a readable checkpoint" in said(other)
    other.write_bytes(b"")
    assert "not a readable checkpoint" in said(other)
    torch.save({"weights": 1}, other)
    assert "is not a checkpoint of `python -m revdeq train`" in said(other)
    torch.save(torch.nn.Linear(2, 2), other)  # a pickled object, which might run anything
    assert "not a readable checkpoint" in said(other)
    checkpoint.save(other, {**saved, "model": torch.nn.Linear(2, 2).state_dict()})
    assert "has the weights of another model" in said(other)


def test_a_file_that_is_no_checkpoint_is_named(tmp_path):
    last = tmp_path / "last.pt"

    def said(path=last):
        with pytest.raises(checkpoint.CheckpointError) as told:
            checkpoint.load(path)
        return str(told.value)

    assert all(name in said(tmp_path) for name in ("best.pt", "last.pt", "model.safetensors"))
    last.write_bytes(b"hello")
    assert str(last) in said() and "another program" in said()
    with zipfile.ZipFile(last, "w") as archive:
        archive.writestr("notes.txt", "of another kind")
    assert "damaged" in said() and "copy it again" in said()
    torch.save({"f": nn.Linear}, last)
    assert "code" in said() and "trust" in said()
    torch.save({"format": checkpoint.FORMAT}, last)
    last.write_bytes(last.read_bytes()[: last.stat().st_size // 2])
    assert "it is truncated" in said() and "best.pt" not in said()
    (tmp_path / "best.pt").write_bytes(b"")
    assert str(tmp_path / "best.pt") in said()
    (tmp_path / "config.json").write_bytes(b"{")
    with pytest.raises(checkpoint.CheckpointError, match="config.json .*preset"):
        record.read_config(tmp_path)


def test_a_full_disk_leaves_the_old_checkpoint(folder, whole, tmp_path, capsys):
    out = tmp_path / "run"
    fsync, calls = os.fsync, []

    def full(file):
        calls.append(file)
        if len(calls) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        arguments = ["train", "cifar10-tiny", "--data", folder, "--out", out, *assignments(IMAGES)]
        assert command(patch, *arguments) == 1
    said = capsys.readouterr().err
    assert "cannot be written: No space left on device." in said and "is intact: free some space" in said
    assert checkpoint.load(out / "last.pt")["update"] > 0
    assert not list(out.glob("*.part"))
    train.train(small(), folder, out, resume=True, quiet=True)
    assert_same_run(whole / "cifar10-tiny", out)


def test_a_checkpoint_that_fills_the_disk_is_an_error(tmp_path):
    """The system refuses a write inside torch.save."""
    resource = pytest.importorskip("resource", reason="Windows has no limits of a process")
    path = tmp_path / "last.pt"
    checkpoint.save(path, {"update": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(checkpoint.CheckpointError, match="last.pt cannot be written: File too large. .* is intact"):
            checkpoint.save(path, {"update": 2, "model": torch.zeros(10_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert checkpoint.load(path)["update"] == 1 and [p.name for p in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("model", [{}, {"model": "resnet", "channels": (4,)}], ids=["equilibrium", "explicit"])
def test_a_diverging_loss_stops_the_training(model, folder, tmp_path, monkeypatch, capsys):
    batch = train.Run._batch

    def poisoned(run):
        made = batch(run)
        return made._replace(inputs=made.inputs * math.inf) if run.update == 7 else made

    monkeypatch.setattr(train.Run, "_batch", poisoned)
    out, settings = tmp_path / "run", {**IMAGES, **model}
    if model:
        del settings["width"], settings["max_steps"]
    assert command(monkeypatch, "train", "cifar10-tiny", "--data", folder, "--out", out, *assignments(settings)) == 1
    said = capsys.readouterr().err
    assert "update 8: " in said and "diverged: try a smaller lr (it was 0.003)" in said and "is intact" in said
    last = checkpoint.load(out / "last.pt")
    assert last["update"] == 4 and all(torch.isfinite(p).all() for p in last["model"].values())


def test_missing_packages_are_named(monkeypatch, capsys, folder):
    monkeypatch.setattr("revdeq.cli.commands.importlib.util.find_spec", lambda name: None)
    assert command(monkeypatch, "train", "cifar10-tiny", "--data", folder) == 1
    assert "pip install pillow matplotlib numpy tiktoken tqdm" in capsys.readouterr().err


def test_settings_are_checked_without_a_command_line_too():
    with pytest.raises(SettingError, match="clip=0: it must be larger than 0"):
        dataclasses.replace(Training(), clip=0)


class LooksAhead(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.conv = nn.Conv1d(d, d, 3, padding=1)

    def forward(self, z, x):
        return torch.tanh(self.conv(z.mT).mT + x)


class LooksBack(LooksAhead):
    def forward(self, z, x):
        return torch.tanh(self.conv(nn.functional.pad(z, (0, 0, 1, 0)).mT)[..., :-1].mT + x)


@pytest.mark.parametrize("options", [{}, {"tol": 1e-3}, {"tol": 1e-3, "per_example": True}], ids=str)
def test_a_block_that_sees_the_answer_is_refused(folder, tmp_path, options):
    settings = {**SETTINGS["wikitext2-tiny"], "updates": 1, **options}
    with pytest.raises(presets.SettingError, match="make it causal"):
        revdeq.train("wikitext2-tiny", folder, tmp_path / "a", device="cpu", quiet=True, block=LooksAhead, **settings)
    revdeq.train("wikitext2-tiny", folder, tmp_path / "b", device="cpu", quiet=True, block=LooksBack, **settings)


@pytest.mark.parametrize("name, setting, value", [("cifar10-tiny", "held_out", 3), ("wikitext2-tiny", "vocabulary", 9)])
def test_evaluate_cannot_change_the_training_data(folder, whole, name, setting, value):
    with pytest.raises(presets.SettingError, match=f"{setting}={value}: the model was trained with {setting}="):
        revdeq.training.restored(whole / name, folder, {setting: value})


@pytest.mark.parametrize("length", [0, -5, 1.5, "a"])
def test_a_bad_length(folder, length):
    with pytest.raises(revdeq.training.data.DataError, match="length=.*at least 1"):
        WikiText("wikitext-2", folder, length=length)
