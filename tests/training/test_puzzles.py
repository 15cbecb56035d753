"""Puzzles are correct, and a model solves larger ones than in training by taking more steps."""

import itertools

import pytest
import torch

import revdeq
from revdeq.models import PuzzleModel, PuzzleNet, count_parameters
from revdeq.training import run as train
from revdeq.training.data import DATASETS, DataError, Entry, Mazes, PrefixSums
from revdeq.training.data.dataset import ACCURACY, Batch
from revdeq.training.presets import Preset, Training, configured

pytest.importorskip("tqdm", reason="needs revdeq[train]")


def made(puzzles, count=20, seed=0):
    return puzzles.made(count, torch.Generator().manual_seed(seed))


def test_prefix_sums():
    bits, parities = made(PrefixSums(9))
    assert bits.shape == (20, 1, 9) and parities.shape == (20, 9)
    for string, expected in zip(bits[:, 0].long().tolist(), parities.tolist(), strict=True):
        assert [total % 2 for total in itertools.accumulate(string)] == expected


def neighbours(pixel):
    row, column = pixel
    return {(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)}


@pytest.mark.parametrize("cells", [2, 3, 5, 8])
def test_mazes_are_perfect_and_the_path_leads_from_end_to_end(cells):
    images, targets = made(Mazes(cells))
    assert images.shape == (20, 3, 2 * cells + 1, 2 * cells + 1)
    for image, target in zip(images, targets, strict=True):
        free, start, end, path = ({tuple(p) for p in x.nonzero().tolist()} for x in (*image, target))
        # A tree: one passage less than cells, and every cell can be reached.
        assert {(2 * r + 1, 2 * c + 1) for r in range(cells) for c in range(cells)} <= free
        assert len(free) == 2 * cells**2 - 1
        reached, new = set(), {next(iter(free))}
        while new:
            reached |= new
            new = {n for pixel in new for n in neighbours(pixel)} & free - reached
        assert reached == free
        # In a tree, a connected set whose only ends are the start and the end is the path.
        assert len(start) == len(end) == 1 and start != end and start | end <= path <= free
        assert all(len(neighbours(pixel) & path) == (1 if pixel in start | end else 2) for pixel in path)


@pytest.mark.parametrize("name, size", [("prefix-sums", {"bits": 8}), ("mazes", {"cells": 3})])
def test_puzzles_follow_from_the_generator_and_splits_never_change(name, size):
    puzzles = DATASETS[name].make(**size)
    one, same, other = (puzzles.batch(torch.arange(16), torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(one.inputs, same.inputs) and torch.equal(one.targets, same.targets)
    assert not torch.equal(one.inputs, other.inputs)
    valid, again, test = (
        torch.cat([batch.inputs for batch in DATASETS[name].make(**size).evaluation(split, 64)])
        for split in ("valid", "valid", "test")
    )
    assert len(valid) == 500 and torch.equal(valid, again) and not torch.equal(valid, test)
    assert one.targets[0].numel() == puzzles.units


def test_a_puzzle_of_no_size_is_named():
    for make, wrong in ((PrefixSums, 1), (PrefixSums, 2.5), (Mazes, True)):
        with pytest.raises(DataError, match=f"={wrong}: it must be an integer of at least 2"):
            make(wrong)
    with pytest.raises(DataError, match="longest_of=0: it must be an integer of at least 1"):
        Mazes(4, longest_of=0)


def test_a_training_may_prefer_long_paths():
    mazes = Mazes(4, longest_of=8)
    long, fair = (mazes.made(50, torch.Generator().manual_seed(0), training)[1] for training in (True, False))
    assert long.sum() > 1.5 * fair.sum() and torch.equal(fair, Mazes(4).made(50, torch.Generator().manual_seed(0))[1])


def test_a_model_reads_puzzles_of_every_size():
    model = PuzzleModel(channels=8, max_steps=2)
    assert model(torch.zeros(2, 3, 5, 9)).shape == (2, 5, 9, 2)
    strings = PuzzleModel(features=1, dimensions=1, channels=8, max_steps=2)
    assert strings(torch.zeros(2, 1, 11)).shape == (2, 11, 2)
    with pytest.raises(ValueError, match=r"puzzles of shape \(2, 11\).*\(B, 1, T\)"):
        strings(torch.zeros(2, 11))
    with pytest.raises(ValueError, match="dimensions = 3 must be 1, for strings, or 2, for images"):
        PuzzleModel(dimensions=3)


def test_every_second_training_puzzle_starts_from_noise():
    torch.manual_seed(0)
    quiet, noisy = PuzzleModel(channels=8, max_steps=1), PuzzleModel(channels=8, max_steps=1, noise=1.0)
    noisy.load_state_dict(quiet.state_dict())
    puzzles = torch.randn(6, 3, 5, 5)
    expected = quiet(puzzles)
    torch.manual_seed(1)
    trained, generator = noisy(puzzles), torch.get_rng_state()
    same = (trained == expected).flatten(1).all(1)
    assert same.tolist() == [False, True] * 3
    torch.manual_seed(1)
    assert torch.equal(noisy(puzzles), trained) and torch.equal(torch.get_rng_state(), generator)
    assert torch.equal(noisy.eval()(puzzles), expected)


def test_an_explicit_network_of_equal_size():
    with torch.device("meta"):
        parameters = count_parameters(PuzzleModel(channels=32))
        model = PuzzleNet.sized(parameters, depth=4)
    width = model.classify[0].in_features
    assert abs(count_parameters(model) / parameters - 1) <= 2 / width  # one channel more or less


def test_a_custom_data_set_is_a_class_and_an_entry(tmp_path, monkeypatch):
    """With only the attributes that `DataSet` requires."""

    class Complement:
        unit, units, metric, splits, validation, size = "bits", 5, ACCURACY, ("held out",), "held out", 64
        shapes = {"features": 1, "dimensions": 1}  # noqa: RUF012

        def __init__(self, ones: float = 0.5) -> None:
            self.ones = ones

        def describe(self):
            return "bits, to be flipped"

        def to(self, device):
            return self

        def order(self, generator):
            return torch.randperm(self.size, generator=generator)

        def batch(self, indices, generator):
            bits = (torch.rand(len(indices), 1, 5, generator=generator) < self.ones).float()
            return Batch(bits, 1 - bits[:, 0].long())

        def evaluation(self, split, batch):
            yield self.batch(torch.arange(20), torch.Generator().manual_seed(7))

        def saved(self):
            return None

    monkeypatch.setitem(DATASETS, "complement", Entry(Complement))
    training = Training(updates=60, batch=16, lr=0.01, schedule="constant")
    preset = Preset("complement-tiny", "complement", "puzzle", {"channels": 8, "max_steps": 2}, training)
    rows = train.train(preset.changed({"ones": 0.4}), None, tmp_path / "run", quiet=True)
    assert rows[-1]["metric"] == 1.0
    trained = revdeq.training.restored(tmp_path / "run/best.pt", None)
    assert trained.dataset.ones == 0.4 and trained.dataset.splits == ("held out",)


def test_more_steps_solve_larger_puzzles_than_those_of_the_training(tmp_path):
    settings = {"bits": 8, "channels": 24, "noise": 0.0, "max_steps": (4, 10), "updates": 200, "lr": 6e-3, "seed": 1}
    train.train(configured("prefix-tiny", settings), None, tmp_path / "run", quiet=True)

    def solved(bits, max_steps):
        changes = {"bits": bits, "max_steps": max_steps, "evaluation_batches": 4}
        trained = revdeq.training.restored(tmp_path / "run/last.pt", None, changes)
        return revdeq.training.evaluate(trained.model, trained.dataset, "test", trained.preset.training).metric

    assert solved(8, 8) > 0.98
    assert solved(24, 3) < 0.1
    assert solved(24, 24) > 0.4  # three seeds, on two kinds of machines: .67, .73, .70 and .14, .57, .59
