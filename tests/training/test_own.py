"""Training with a custom model, data, block or callback; resuming, accumulating gradients and reporting."""

import csv
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import revdeq
from revdeq import __main__
from revdeq.training import checkpoint, record
from revdeq.training import run as train
from revdeq.training.checkpoint import CheckpointError
from revdeq.training.data import DataError, Examples
from revdeq.training.presets import SettingError, configured
from revdeq.training.processes import Processes

pytest.importorskip("tiktoken", reason="needs revdeq[train]")

PUZZLE = {"channels": 4, "updates": 6, "evaluation_batches": 1, "batch": 4, "max_steps": 2, "evaluate_every": 4}
BLOCKS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, channels, dimensions):
        super().__init__()
        self.conv = nn.Conv1d(channels, channels, 3, padding=1)

    def forward(self, z, x):
        return torch.tanh(self.conv(z) + x)

class WithoutX(Block):
    def forward(self, z):
        return torch.tanh(self.conv(z))

class OneSize(Block):
    def __init__(self, channels):
        super().__init__(channels, 1)

class Shorter(Block):
    def forward(self, z, x):
        return z[..., 1:]

class Normed(Block):
    def __init__(self, channels, dimensions):
        super().__init__(channels, dimensions)
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, z, x):
        return self.norm(super().forward(z, x))

def number(channels, dimensions):
    return 3
"""


class Block(nn.Module):
    def __init__(self, channels=8, dimensions=1):
        super().__init__()
        self.linear = nn.Linear(channels, channels)

    def forward(self, z, x):
        return torch.tanh(self.linear(z.movedim(1, -1)).movedim(-1, 1) + x)


@pytest.fixture(autouse=True)
def one_thread():
    threads, states = torch.get_num_threads(), checkpoint.generators(torch.device("cpu"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    checkpoint.restore_generators(states, torch.device("cpu"))
    torch.set_num_threads(threads)


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user's module in the current folder."""
    (tmp_path / "mine.py").write_text(BLOCKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("mine", None)


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["revdeq", *map(str, arguments)])
    return __main__.main()


def own_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 8), revdeq.RevDEQ(Linear(8), max_steps=4), nn.Linear(8, 2))


class Linear(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, z, x):
        return torch.tanh(self.linear(z) + x)


def circle(count=200):
    points = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return points, (points.norm(dim=1) < 1).long()


def train_quietly(model, data, out, **settings):
    return revdeq.train(model, data, out, device="cpu", quiet=True, **settings)


# custom models and data


def kind(thing):
    return type(thing).__name__


@pytest.mark.parametrize("data", [circle(), TensorDataset(*circle()), Examples(circle(), valid=circle(20))], ids=kind)
def test_a_custom_model_is_trained_in_place_and_resumes_bit_for_bit(data, tmp_path):
    settings = {"epochs": 12, "batch": 20, "lr": 0.02, "schedule": "cosine", "log_every": 4, "save_every": 5}
    model = own_model()
    rows = train_quietly(model, data, tmp_path / "whole", **settings)
    assert rows[-1]["loss"] < 0.7 * rows[0]["loss"] and rows[-1]["metric"] > 0.7 and rows[-1]["evaluations"] == 8
    other = own_model()
    with pytest.MonkeyPatch.context() as patch:
        step = train.Run._step
        patch.setattr(train.Run, "_step", lambda run: step(run) if run.update < 33 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_quietly(other, data, tmp_path / "run", **settings)
    other = own_model()
    train_quietly(other, data, tmp_path / "run", resume=True)  # with its own settings
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    found = revdeq.models.load(tmp_path / "run/last.pt", own_model())
    assert torch.equal(found(circle()[0]), model.eval()(circle()[0])) and not found.training


def test_several_classes_per_example_are_solved_or_not(tmp_path):
    inputs = torch.randn(40, 3, 2)
    rows = train_quietly(nn.Linear(2, 2), (inputs, (inputs[..., 0] > 0).long()), tmp_path / "run", epochs=1, batch=8)
    assert Examples((inputs, torch.zeros(40, 3).long())).metric.name == "solved" and 0 <= rows[-1]["metric"] <= 1
    assert Examples((inputs, torch.zeros(40).long())).metric.name == "accuracy"


def test_float_targets_use_the_squared_error(tmp_path):
    points, _ = circle()
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
    rows = train_quietly(model, (points, points.prod(1, keepdim=True)), tmp_path / "run", epochs=40, lr=0.02)
    assert rows[-1]["metric"] == rows[-1]["evaluation_loss"] < 0.7 * rows[0]["evaluation_loss"]
    held_out = points[Examples((points, points)).parts["valid"][1]]
    with torch.no_grad():
        error = (model(held_out) - held_out.prod(1, keepdim=True)).square().mean()
    assert rows[-1]["metric"] == pytest.approx(error.item(), rel=1e-5)


class Pairs(Dataset):
    """As many examples as a circle has, computed from their index."""

    def __init__(self, example):
        self.example = example

    def __len__(self):
        return 200

    def __getitem__(self, i):
        return self.example(i)


def frozen():
    return own_model().requires_grad_(False)


@pytest.mark.parametrize(
    "model, data, error, message",
    [
        (
            nn.Linear(3, 2),
            circle(),
            SettingError,
            "model=Linear cannot be trained on this data (tried with inputs of shape (2, 2)",
        ),
        (nn.Linear(2, 1), circle(), SettingError, "the model has 1 classes, and targets range from 0 to 1"),
        (
            nn.Sequential(nn.Linear(2, 2), nn.Flatten(0)),
            circle(),
            SettingError,
            "it returns the shape (4,); it must return (2, classes)",
        ),
        (nn.LSTM(2, 2), circle(), SettingError, "it returns a tuple; it must return a tensor"),
        (nn.Linear(2, 2), (circle()[0], circle()[0][:, 0]), SettingError, "must return that of targets, (2,)"),
        (nn.Linear(2, 2), circle(5), DataError, "data has 5 examples: pass at least 10"),
        (nn.Linear(2, 2), (circle()[0], circle(3)[1]), DataError, "data has 200 inputs and 3 targets: pass one target"),
        (nn.Linear(2, 2), DataLoader(TensorDataset(*circle())), DataError, "data is a DataLoader: pass its dataset"),
        (nn.Linear(2, 2), 3, DataError, "data is of type int: pass a pair of tensors"),
        (
            own_model(),
            Pairs(lambda i: {"x": torch.ones(2), "y": 0}),
            DataError,
            "an example of data is of type dict ('x', 'y'): __getitem__ of the Dataset must return a pair, (input,",
        ),
        (
            own_model(),
            Pairs(lambda i: (torch.ones(2), 0, 0)),
            DataError,
            "is of type tuple (Tensor, int, int): __getit",
        ),
        (
            own_model(),
            Pairs(lambda i: (torch.ones(2), "a")),
            DataError,
            "its input and its target must be tensors, arr",
        ),
        (own_model(), Pairs(lambda i: (torch.ones(2 + i), 0)), DataError, "data cannot be stacked: stack exp"),
        (
            own_model(),
            tuple(part.numpy() for part in circle()),
            DataError,
            "data is of type tuple (ndarray, ndarray): pass a pair of tensors, (inputs, targets), or a torch.utils."
            "data.Dataset of pairs that has a length; torch.from_numpy(x) converts an array",
        ),
        (
            own_model(),
            (*circle(), circle()[1]),
            DataError,
            "data is of type tuple (Tensor, Tensor, Tensor): pass a pair",
        ),
        (
            own_model(),
            (circle()[0] * math.nan, circle()[1]),
            SettingError,
            "inputs in this batch contain NaN or infinity: clean the data",
        ),
        (nn.LazyLinear(2), circle(), SettingError, "model=LazyLinear has lazy layers"),
        (
            frozen(),
            circle(),
            SettingError,
            "model=Sequential has no parameters that require a gradient",
        ),
    ],
)
def test_bad_models_are_refused_before_anything_is_written(model, data, error, message, tmp_path):
    with pytest.raises(error) as told:
        train_quietly(model, data, tmp_path / "run")
    assert message in str(told.value) and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "model, message",
    [
        (own_model, "model is a function: call it, train(own_model(), ...)"),
        (nn.Linear, "model is the class Linear: create an instance, train(Linear(...), ...)"),
        (3, "model is of type int: pass a module, or the name of a preset"),
    ],
)
def test_an_object_that_is_not_a_model_is_refused(model, message, tmp_path):
    with pytest.raises(TypeError) as told:
        train_quietly(model, circle(), tmp_path / "run")
    assert str(told.value) == message


def test_a_preset_takes_no_custom_data(tmp_path):
    with pytest.raises(DataError, match="data is of type tuple: for a preset, pass the folder"):
        train_quietly("prefix-tiny", circle(), tmp_path / "run")


def test_the_error_for_an_infinite_loss_blames_bad_data(tmp_path):
    points, _ = circle()
    targets = points.clone()
    targets[7] = math.inf
    with pytest.raises(
        train.Diverged, match=r"update \d has bad data: targets in this batch contain NaN .*the loss is inf"
    ):
        train_quietly(nn.Linear(2, 2), (points, targets), tmp_path / "run", epochs=1, batch=20)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
def test_classes_may_be_integers_of_any_size(dtype, tmp_path):
    points, inside = circle()
    losses = [
        train_quietly(own_model(), (points, targets), tmp_path / name, epochs=1)[-1]["evaluation_loss"]
        for name, targets in (("long", inside), ("other", inside.to(dtype)))
    ]
    assert losses[0] == losses[1]


def test_an_unknown_setting_of_a_training_is_named(tmp_path):
    with pytest.raises(
        SettingError, match="there is no setting 'epoch' \\(did you mean epochs\\?\\): there are epochs,"
    ):
        train_quietly(own_model(), circle(), tmp_path, epoch=3)
    for name, meant in (("learning_rate", "lr"), ("batch_size", "batch"), ("steps", "updates")):
        with pytest.raises(SettingError, match=f"there is no setting '{name}' \\(did you mean {meant}\\?\\)"):
            train_quietly(own_model(), circle(), tmp_path, **{name: 3})
    with pytest.raises(SettingError, match="max_steps=2 is an option of the layers in your model, not of the training"):
        train_quietly(own_model(), circle(), tmp_path, max_steps=2)


def test_a_name_that_is_not_public():
    with pytest.raises(AttributeError, match="'revdeq.training' has no attribute 'run_away'"):
        revdeq.training.run_away  # noqa: B018


def test_importing_the_package_imports_no_training():
    code = "import sys, revdeq; print({'revdeq.training', 'revdeq.models', 'huggingface_hub'} & sys.modules.keys())"
    environment = {"PYTHONPATH": str(Path(revdeq.__file__).parent.parent)}
    said = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "set()"


# blocks


@pytest.mark.parametrize(
    "block, message",
    [
        ("mine:WithoutX", "block = mine:WithoutX returned an f that cannot be called as f(z, x): too many positional"),
        ("mine:OneSize", "block = mine:OneSize cannot be called as block(channels, dimensions): too many positional"),
        (
            "mine:number",
            "block = mine:number returned a int: block(channels, dimensions) must return",
        ),
        ("mine:Shorter", "block=mine:Shorter cannot be trained on this data (tried with inputs of shape (2, 1, 16)"),
        ("mine:Normed", "f contains a BatchNorm in training mode"),
        ("mine:Other", "block='mine:Other' cannot be imported: module 'mine' has no attribute 'Other'. Run from the"),
        ("nowhere:Block", "block='nowhere:Block' cannot be imported: No module named 'nowhere'. Run from the folder"),
        ("Block", "block='Block': it must be module:Class"),
    ],
)
def test_a_block_that_does_not_fit_is_refused_before_anything_is_written(block, message, mine, monkeypatch, capsys):
    arguments = [part for key, value in PUZZLE.items() for part in ("--set", f"{key}={value}")]
    assert command(monkeypatch, "train", "prefix-tiny", "--device", "cpu", "--block", block, *arguments) == 1
    assert message in capsys.readouterr().err and not Path("runs").exists()


def test_a_block_from_the_command_line_is_trained_resumed_and_loaded_by_name_only(mine, monkeypatch, capsys):
    arguments = [part for key, value in PUZZLE.items() for part in ("--set", f"{key}={value}")]
    assert command(monkeypatch, "train", "prefix-tiny", "--device", "cpu", "--block", "mine:Block", *arguments) == 0
    longer = ("train", "--resume", "runs/prefix-tiny", "--device", "cpu", "--set", "updates=8")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mine", None)  # importing it would be an error
        assert command(monkeypatch, *longer) == 1
        assert "runs/prefix-tiny was trained with block='mine:Block'" in capsys.readouterr().err
    assert command(monkeypatch, *longer, "--block", "mine:Block") == 0
    assert "continuing at update 6" in capsys.readouterr().out
    assert command(monkeypatch, "evaluate", "runs/prefix-tiny", "--batches", 1, "--device", "cpu") == 1
    said = "was trained with block='mine:Block', and checkpoints contain no code: pass the class as block"
    assert said in capsys.readouterr().err
    more = ("--batches", 1, "--device", "cpu", "--block", "mine:Block")
    assert command(monkeypatch, "evaluate", "runs/prefix-tiny/last.pt", *more) == 0
    assert "prefix-tiny at update 8" in capsys.readouterr().out
    import mine as module

    model = revdeq.models.load("runs/prefix-tiny", block=module.Block)
    assert isinstance(model.equilibrium.f, module.Block)


def test_a_block_may_be_a_class_or_its_name(tmp_path):
    train_quietly("prefix-tiny", None, tmp_path / "run", block=Block, **PUZZLE)
    train_quietly("prefix-tiny", None, tmp_path / "run", resume=True, block=Block, **PUZZLE)
    assert isinstance(revdeq.models.load(tmp_path / "run", block=Block).equilibrium.f, Block)
    with pytest.raises(CheckpointError, match="block="):
        revdeq.models.load(tmp_path / "run")


def test_the_trial_of_a_block_does_not_change_the_training(tmp_path, monkeypatch):
    train_quietly("prefix-tiny", None, tmp_path / "with", block=Block, **PUZZLE)
    monkeypatch.setattr(train, "try_out", lambda *_: None)
    train_quietly("prefix-tiny", None, tmp_path / "without", block=Block, **PUZZLE)
    a, b = (checkpoint.load(tmp_path / name / "last.pt")["model"] for name in ("with", "without"))
    assert all(torch.equal(a[key], b[key]) for key in a)


# resuming


def test_a_resumed_run_keeps_its_settings_and_can_be_extended(tmp_path, monkeypatch, capsys):
    settings = {**PUZZLE, "schedule": "constant", "max_steps": (2, 5)}
    train_quietly("prefix-tiny", None, tmp_path / "whole", **{**settings, "updates": 11})
    train_quietly("prefix-tiny", None, tmp_path / "run", **settings)
    assert command(monkeypatch, "train", "--resume", tmp_path / "run", "--device", "cpu", "--set", "updates=11") == 0
    assert "continuing at update 6" in capsys.readouterr().out
    a, b = (checkpoint.load(tmp_path / name / "last.pt") for name in ("whole", "run"))
    assert a["update"] == b["update"] == 11
    assert all(torch.equal(a["model"][key], b["model"][key]) for key in a["model"])
    for arguments in (["prefix-tiny", "--out", tmp_path / "run", "--resume"], ["--resume", tmp_path / "run"]):
        assert command(monkeypatch, "train", *arguments, "--device", "cpu") == 0  # there is nothing left to do
        assert "finished at update 11: to continue, set updates to 12 or more" in capsys.readouterr().out
    assert command(monkeypatch, "train", "--resume", tmp_path / "run", "--device", "cpu", "--set", "updates=3") == 0
    assert "finished at update 11, more than the requested 3: to continue, " in capsys.readouterr().out
    assert command(monkeypatch, "train", "--resume", tmp_path / "run", "--set", "lr=1", "--device", "cpu") == 1
    assert "other settings, lr=0.004 (asked for: 1)" in capsys.readouterr().err


def test_resuming_a_finished_run_says_what_limits_it(tmp_path, capsys):
    settings = {"epochs": 2, "batch": 20}
    for more in ({}, {"schedule": "cosine"}):
        out = tmp_path / str(len(more))
        train_quietly(own_model(), circle(), out, **settings, **more)
        if not more:  # as where the loss no longer improves
            saved = checkpoint.load(out / "last.pt")
            saved["optimizer"]["param_groups"][0]["lr"] = 1e-7
            checkpoint.save(out / "last.pt", saved)
        model = own_model()
        revdeq.train(model, circle(), out, resume=True, device="cpu", **settings, **more)
        assert not model.training
    told = capsys.readouterr().out
    assert "finished at update 18: lr fell below 1e-06" in told
    assert "finished at update 18: to continue, set epochs to 3 or more" in told


def test_a_longer_run_follows_the_schedule_of_its_new_length(tmp_path):
    settings = {**PUZZLE, "warmup": 2, "log_every": 1}
    whole = train_quietly("prefix-tiny", None, tmp_path / "whole", **{**settings, "updates": 12})
    train_quietly("prefix-tiny", None, tmp_path / "run", **settings)
    longer = train_quietly("prefix-tiny", None, tmp_path / "run", resume=True, updates=12)
    rates = [{row["update"]: row["lr"] for row in rows} for rows in (whole, longer)]
    assert [rates[1][update] for update in range(7, 13)] == [rates[0][update] for update in range(7, 13)]
    assert abs(rates[1][6]) < 1e-12 < rates[1][7]  # where the shorter run ended


@pytest.mark.parametrize(
    "other, message",
    [
        (circle(100), "was trained on 180 examples, and data has 90: to continue, pass the same data"),
        (
            tuple(part.flip(0) for part in circle()),
            "was trained on other examples, or in another order: to continue, pass",
        ),
        (TensorDataset(*(part.flip(0) for part in circle())), "was trained on other examples, or in another order"),
        (Examples(circle(180), valid=circle(20)), "was trained on other examples"),
    ],
    ids=["fewer", "others", "others of a Dataset", "another valid"],
)
def test_a_run_cannot_resume_with_other_data(other, message, tmp_path):
    train_quietly(own_model(), circle(), tmp_path / "run", epochs=1)
    with pytest.raises(DataError) as told:
        train_quietly(own_model(), other, tmp_path / "run", resume=True, epochs=2)
    assert message in str(told.value)
    last = tmp_path / "run/last.pt"
    saved = checkpoint.load(last)
    del saved["examples"]  # as before they were kept
    checkpoint.save(last, saved)
    assert len(train_quietly(own_model(), other, tmp_path / "run", resume=True, epochs=2))


def test_runs_on_generated_examples_can_resume(tmp_path):
    class Noisy(Dataset):
        def __len__(self):
            return 40

        def __getitem__(self, i):
            return torch.randn(2), i % 2

    for epochs in (1, 2):
        train_quietly(own_model(), Noisy(), tmp_path / "run", resume=True, epochs=epochs, batch=4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "pass the name of a preset, or --resume RUN"),
        (["--resume", "none"], "--resume none: there is no run to resume, no none/config.json"),
        (["prefix-tiny", "--resume", "one", "--out", "two"], "--resume one --out two: pass one folder"),
        (["--resume", "broken"], "broken/config.json cannot be read"),
        (["--resume", "shared"], "shared/config.json cannot be read: it does not belong to a run"),
        (["--resume", "own"], "own is a run of your own model, Linear: continue with revdeq.train(..., resume=True)"),
    ],
)
def test_resume_needs_a_run(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    Path("shared").mkdir()
    Path("shared/config.json").write_text('{"channels": 8}')
    train_quietly(nn.Linear(2, 2), circle(), "own", epochs=1)
    assert command(monkeypatch, "train", *arguments) == 1
    assert message in capsys.readouterr().err


def test_resume_before_the_name_of_a_preset(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [part for key, value in PUZZLE.items() for part in ("--set", f"{key}={value}")]
    assert command(monkeypatch, "train", "--resume", "prefix-tiny", "--device", "cpu", *arguments) == 0
    assert "no checkpoint yet" in capsys.readouterr().out and Path("runs/prefix-tiny/last.pt").exists()


# accumulated gradients


@pytest.mark.parametrize("parts", [2, 8])
def test_accumulated_gradients_are_those_of_the_whole_batch(parts, tmp_path):
    def gradients(accumulate):
        preset = configured("prefix-tiny", {**PUZZLE, "batch": 8, "noise": 0.0, "accumulate": accumulate})
        data = revdeq.training.data.load(preset.data, None, preset.settings)
        run = train.Run(preset, data, Processes("cpu"), None, tmp_path, quiet=True)
        loss = run._step()
        return loss, [p.grad.clone() for p in run.model.parameters()]

    (loss, whole), (other, summed) = gradients(1), gradients(parts)
    assert other.item() == pytest.approx(loss.item(), rel=1e-6)
    for a, b in zip(whole, summed, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-7)  # float32 sums in another order
        assert b.abs().max() > 0


def test_accumulation_divides_the_batch(tmp_path):
    message = "accumulate=3: it must divide the 4 examples"
    with pytest.raises(SettingError, match=message):
        train_quietly("prefix-tiny", None, tmp_path, **PUZZLE, accumulate=3)


# reports


def test_every_loss_averages_as_many_updates(tmp_path, monkeypatch):
    monkeypatch.setattr(train.Run, "_step", lambda run: torch.tensor(float(run.update)))
    rows = train_quietly(nn.Linear(2, 2), circle(), tmp_path, epochs=3, batch=20, log_every=4, evaluate_every=5)
    expected = {u: (u - 4 + u - 1) / 2 for u in range(4, 28)}  # of the updates u - 4 to u - 1, counted from 0
    assert len(rows) > 8 and {row["update"]: row["loss"] for row in rows} == {
        r["update"]: expected[r["update"]] for r in rows
    }
    assert {5, 10} <= {row["update"] for row in rows}


def test_the_speed_excludes_evaluations(tmp_path, monkeypatch):
    """With a clock that only evaluations, checkpoints and updates advance."""
    now = [0.0]
    step, evaluate, save = train.Run._step, revdeq.training.evaluate, train.Run._save

    def taking(seconds, function):
        def timed(*args):
            now[0] += seconds
            return function(*args)

        return timed

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(train.Run, "_step", taking(2.0, step))
    monkeypatch.setattr(train, "evaluate", taking(1000.0, evaluate))
    monkeypatch.setattr(train.Run, "_save", taking(100.0, save))
    rows = train_quietly(
        nn.Linear(2, 2), circle(), tmp_path, epochs=3, batch=20, log_every=4, evaluate_every=5, save_every=3
    )
    assert {row["per_second"] for row in rows} == {10.0}
    assert rows[-1]["seconds"] > 5000


def test_the_remaining_time_is_printed_without_a_terminal(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = record.Progress(1000, 100, "images", "accuracy")
    row = {**dict.fromkeys(record.COLUMNS, ""), "loss": 1.0, "metric": 0.5, "per_second": 9, "peak_memory_mib": 7}
    for now[0], updates in ((30.0, 10), (3600.0, 10)):
        for _ in range(updates):
            progress.advance()
        progress.show({**row, "update": progress.done})
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("update 110 of 1,000: loss 1.0000") and first.endswith("44 min 30 s left")
    assert second.endswith("44 h 0 min left")


def test_a_callback_gets_every_row(tmp_path):
    seen = []
    rows = train_quietly("prefix-tiny", None, tmp_path, **PUZZLE, log_every=2, callback=seen.append)
    assert seen == rows and [row["update"] for row in seen] == [2, 4, 6]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_shows_what_the_table_has(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="needs revdeq[tensorboard]")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    arguments = [part for key, value in PUZZLE.items() for part in ("--set", f"{key}={value}")]
    out = tmp_path / "run"
    for updates in (6, 8):
        more = ["--set", f"updates={updates}", "--resume", "--log", "tensorboard", "--device", "cpu"]
        assert command(monkeypatch, "train", "prefix-tiny", "--out", out, *arguments, *more) == 0
    events = EventAccumulator(str(out))
    events.Reload()
    table = list(csv.DictReader((out / "metrics.csv").read_text().splitlines()))
    for name in ("loss", "lr", "metric"):
        shown = {event.step: event.value for event in events.Scalars(name)}
        expected = {int(row["update"]): float(row[name]) for row in table if row[name] != ""}
        assert shown.keys() == expected.keys() and len(shown) > 1
        assert all(math.isclose(shown[u], expected[u], rel_tol=1e-6, abs_tol=1e-12) for u in shown)


def test_a_missing_tensorboard_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert command(monkeypatch, "train", "prefix-tiny", "--out", tmp_path / "run", "--log", "tensorboard") == 1
    assert "TensorBoard needs tensorboard: pip install tensorboard" in capsys.readouterr().err


# what would damage a run


def test_a_held_out_class_that_the_model_lacks_is_an_error(tmp_path):
    points, classes = circle()
    with pytest.raises(DataError, match="valid has bad data: the model has 2 classes, and targets range from"):
        train_quietly(own_model(), Examples((points, classes), (points, classes + 3)), tmp_path / "a", epochs=1)
    with pytest.raises(DataError, match="valid has bad data: inputs in this batch contain NaN"):
        train_quietly(own_model(), Examples((points, classes), (points / 0, classes)), tmp_path / "b", epochs=1)


def test_alternating_classes_are_all_in_both_splits():
    parts = Examples((torch.randn(1000, 2), torch.arange(1000) % 10)).parts
    for part, count in (("train", 900), ("valid", 100)):
        (_, targets), chosen = parts[part]
        assert len(chosen) == count and len(targets[chosen].unique()) == 10


def test_a_run_cannot_be_made_shorter_than_it_is(tmp_path):
    small = {"channels": 4, "evaluation_batches": 1, "save_every": 3}

    def stop(row):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_quietly("prefix-tiny", None, tmp_path, updates=8, log_every=4, callback=stop, **small)
    assert checkpoint.load(tmp_path / "last.pt")["update"] == 3
    before = (tmp_path / "config.json").read_bytes()
    train_quietly("prefix-tiny", None, tmp_path, updates=2, log_every=4, resume=True, **small)
    assert (tmp_path / "config.json").read_bytes() == before


def test_a_run_without_its_last_checkpoint_is_not_overwritten(tmp_path):
    small = {"channels": 4, "evaluation_batches": 1, "updates": 2}
    train_quietly("prefix-tiny", None, tmp_path, **small)
    (tmp_path / "last.pt").unlink()
    with pytest.raises(CheckpointError, match="best.pt .*last.pt is missing"):
        train_quietly("prefix-tiny", None, tmp_path, resume=True, **small)


def test_a_damaged_or_empty_checkpoint_is_not_loaded(tmp_path):
    train_quietly("prefix-tiny", None, tmp_path, channels=4, evaluation_batches=1, updates=2)
    path = tmp_path / "last.pt"
    content = bytearray(path.read_bytes())
    content[content.index(b"data/0") + 200] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="it is damaged .the checksum of .* is wrong.; copy it again"):
        revdeq.models.load(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="it is empty; copy it again"):
        revdeq.models.load(path)


def test_a_callback_that_is_not_callable_is_refused(tmp_path):
    with pytest.raises(TypeError, match="callback = 3 must be a function"):
        train_quietly("prefix-tiny", None, tmp_path, callback=3)


def test_max_steps_of_a_custom_model_is_one_number(tmp_path):
    with pytest.raises(SettingError, match="a range is for presets only; set layer.max_steps"):
        train_quietly(own_model(), circle(), tmp_path, max_steps=(4, 10))


def test_a_model_without_an_equilibrium_cannot_be_tuned(tmp_path):
    with pytest.raises(SettingError, match="tune_every=2: the model has no equilibrium to tune"):
        train_quietly(nn.Linear(2, 2), circle(), tmp_path, tune_every=2)


def test_a_schedule_found_in_training_is_saved_with_the_weights(tmp_path, monkeypatch):
    monkeypatch.setattr("revdeq._solver.schedule.UPDATES", 4)
    model, settings = own_model(), {"tune_every": 2, "tune": "schedule", "updates": 3, "epochs": 1, "batch": 20}
    train_quietly(model, circle(), tmp_path / "run", **settings)
    (layer,) = [m for m in model.modules() if isinstance(m, revdeq.RevDEQ)]
    assert len(layer.schedule) == 2 * layer.max_steps
    other = own_model()
    other.load_state_dict(model.state_dict())
    assert [m.schedule for m in other.modules() if isinstance(m, revdeq.RevDEQ)] == [layer.schedule]
    with pytest.raises(SettingError, match="tune='both': it must be one of pair, schedule"):
        configured("prefix-tiny", {"tune": "both"})
    with pytest.raises(SettingError, match="tune='schedule'.* is a range: use tune='pair'"):
        train_quietly("prefix-tiny", None, tmp_path / "range", tune="schedule", tune_every=2)


def test_sizes_given_by_the_data_are_not_settings():
    with pytest.raises(SettingError, match="prefix-tiny has no setting 'features'"):
        configured("prefix-tiny", {"features": 3})
