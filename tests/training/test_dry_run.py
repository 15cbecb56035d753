"""Predictions for a GPU, compared with what can be counted on the CPU."""

import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from revdeq import __main__
from revdeq._device import peak_memory
from revdeq.models import Equilibrium
from revdeq.training import data, dry_run
from revdeq.training.evaluation import loss_of
from revdeq.training.presets import PRESETS, configured

pytest.importorskip("tiktoken", reason="needs revdeq[train]")
BATCH = 8
SMALL = {"wikitext2-tiny": {"d": 64, "vocabulary": 500}, "cifar10-tiny": {}, "maze-tiny": {"max_steps": 6}}


def update(preset, **more):
    batch, shapes = data.example(preset.data, preset.settings)
    inputs, targets = (x.expand(BATCH, *x.shape[1:]).contiguous() for x in batch[:2])
    model = preset.changed(more).build(**shapes)
    return lambda: loss_of(model(inputs), targets).backward()


# The example input is zero, which a norm amplifies.
pytestmark = pytest.mark.filterwarnings("ignore:the gradient grew:revdeq.ConvergenceWarning")


@pytest.mark.parametrize("name", SMALL)
def test_operations_are_those_of_a_checkpointed_update(name):
    """It evaluates f again in the backward pass, like a reversible solve. The first layer computes no gradient of its
    input, which is a tenth. (The fused attention of CPUs is not counted.)"""
    preset = configured(name, SMALL[name])
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        update(preset, solver="checkpointed")()
    predicted = dry_run.predicted(preset).one.operations * BATCH
    assert predicted == pytest.approx(counter.get_total_flops(), rel=0.1)


@pytest.mark.parametrize("name", SMALL)
def test_memory_is_what_an_update_allocates(name):
    """Within a half: temporaries are not counted, and all equilibria are, though they do not run at the same time."""
    preset = configured(name, {**SMALL[name], "batch": BATCH})
    run = update(preset)
    run()
    found = dry_run.predicted(preset)
    predicted = BATCH * (found.one.activations + found.one.states)
    assert 0.5 < predicted / peak_memory(run) < 1.5


@pytest.mark.parametrize("name", SMALL)
def test_launches_are_about_the_operators_of_an_update(name):
    """Within a half: some operators have two backward operators, or none. On a CPU, half-steps are no operators."""
    preset = configured(name, SMALL[name])
    run = update(preset)
    with dry_run._Launches() as counted, sdpa_kernel(SDPBackend.MATH):
        run()
    assert 0.5 < dry_run.predicted(preset).one.launches / counted.count < 1.5


def test_a_small_update_takes_the_launches_of_its_kernels_and_a_large_one_its_operations():
    small, large = configured("prefix-tiny"), configured("cifar10-10m")
    for preset, bound in ((small, True), (large, False)):
        found = dry_run.predicted(preset)
        for gpu in dry_run.GPUS:
            least = dry_run.LAUNCH * found.one.launches
            assert (found.seconds(preset.training, gpu) == least) == bound
    said = dry_run.report(small)
    assert "float32 without TF32" in said and " or 5 us for each of the " in said and "Predicted, not" in said
    assert "us for each" not in dry_run.report(configured("prefix-tiny", {"compile": True}))
    assert f"{2 * dry_run.predicted(small).one.launches:,} kernel launches" in dry_run.report(
        configured("prefix-tiny", {"accumulate": 2})
    )


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_predicted(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["revdeq", "train", name, "--dry-run"])
    before = Equilibrium.forward
    assert __main__.main() == 0
    said = capsys.readouterr().out
    assert f"{dry_run.predicted(PRESETS[name]).parameters:,} parameters" in said and "H100, 80 GB" in said
    assert Equilibrium.forward is before
    assert torch.get_default_device() == torch.device("cpu")


def test_a_batch_that_does_not_fit(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["revdeq", "train", "wikitext103-94m", "--dry-run", "--set", "batch=100"])
    assert __main__.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "GB " in line and "," in line]
    assert ["need 2 GPUs" in lines[-3], "fit" in lines[-2], "fit" in lines[-1]] == [True] * 3


def test_a_batch_in_parts_takes_the_memory_of_one():
    whole = configured("wikitext103-94m", {"batch": 100})
    parts = configured("wikitext103-94m", {"batch": 100, "accumulate": 4})
    one = dry_run.predicted(whole).memory(25) / 1e9
    assert "need 2 GPUs" in dry_run.report(whole) and "need" not in dry_run.report(parts)
    assert f"TFLOP and {one:.3g} GB" in dry_run.report(parts)
