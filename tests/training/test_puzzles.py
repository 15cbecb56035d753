"""Puzzles are correct, and follow from a seed."""

import itertools

import pytest
import torch

from revdeq.training.data import DATASETS, DataError, Mazes, PrefixSums


def made(puzzles, count=20, seed=0, training=False):
    return puzzles.made(count, torch.Generator().manual_seed(seed), training)


def test_prefix_sums():
    bits, parities = made(PrefixSums(9))
    assert bits.shape == (20, 1, 9) and parities.shape == (20, 9)
    for string, expected in zip(bits[:, 0].long().tolist(), parities.tolist(), strict=True):
        assert [total % 2 for total in itertools.accumulate(string)] == expected


def neighbours(pixel):
    row, column = pixel
    return {(row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)}


@pytest.mark.parametrize("cells", [2, 3, 8])
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


@pytest.mark.parametrize(("name", "size"), [("prefix-sums", {"bits": 8}), ("mazes", {"cells": 3})])
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


def test_a_puzzle_of_no_size_is_named():
    for make, wrong in ((PrefixSums, 1), (PrefixSums, 2.5), (Mazes, True)):
        with pytest.raises(DataError, match=f"={wrong}: it must be an integer of at least 2"):
            make(wrong)
    with pytest.raises(DataError, match="longest_of=0: it must be an integer of at least 1"):
        Mazes(4, longest_of=0)


def test_a_training_may_prefer_long_paths():
    long, fair = (made(Mazes(4, longest_of=8), 50, training=is_training)[1] for is_training in (True, False))
    assert long.sum() > 1.5 * fair.sum() and torch.equal(fair, made(Mazes(4), 50)[1])
