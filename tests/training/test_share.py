"""A trained model is loaded in one line, evaluated with other settings, shared, and used on text and images."""

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from sample_data import write_cifar_binary, write_encoding, write_wikitext
from torch import nn

import revdeq
from revdeq import __main__
from revdeq.models import LanguageModel, MultiScale, PuzzleModel, ResNet, SingleScale
from revdeq.training import checkpoint
from revdeq.training.checkpoint import CheckpointError
from revdeq.training.classify import classify, read
from revdeq.training.data import DataError
from revdeq.training.data.cifar10 import NAMES, normalise
from revdeq.training.generate import Draw, generate
from revdeq.training.presets import SettingError

pytest.importorskip("tiktoken", reason="needs revdeq[train]")
Image = pytest.importorskip("PIL.Image", reason="needs revdeq[train]")
hub = pytest.importorskip("huggingface_hub", reason="needs revdeq[hub]")
pytest.importorskip("safetensors", reason="needs revdeq[hub]")

SMALL = {
    "cifar10-tiny": {"batch": 20, "updates": 6, "channels": (4, 8), "widths": 1, "max_steps": (1, 2)},
    "wikitext2-tiny": {"d": 8, "heads": 2, "length": 16, "vocabulary": 20, "batch": 8, "updates": 6, "max_steps": 2},
    "prefix-tiny": {"channels": 4, "batch": 4, "updates": 6, "evaluation_batches": 1},
    "maze-tiny": {"channels": 4, "batch": 4, "updates": 4, "evaluation_batches": 1, "tune_every": 3},
}
INPUTS = {
    "cifar10-tiny": lambda: torch.randn(2, 3, 32, 32),
    "wikitext2-tiny": lambda: torch.randint(20, (2, 12)),
    "prefix-tiny": lambda: torch.randint(2, (2, 1, 40)).float(),
    "maze-tiny": lambda: torch.randn(2, 3, 9, 9),
}
KINDS = {
    "cifar10-tiny": MultiScale,
    "wikitext2-tiny": LanguageModel,
    "prefix-tiny": PuzzleModel,
    "maze-tiny": PuzzleModel,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_cifar_binary(folder), write_encoding(folder), write_wikitext(folder)
    return folder


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory):
    """A short run of each kind of model."""
    out = tmp_path_factory.mktemp("runs")
    states = checkpoint.generators(torch.device("cpu"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REVDEQ_CACHE", str(data / "cache"))
        for name, settings in SMALL.items():
            revdeq.train(name, data, out / name, device="cpu", quiet=True, **settings)
    checkpoint.restore_generators(states, torch.device("cpu"))
    return out


@pytest.fixture(autouse=True)
def own_cache(data, monkeypatch):
    monkeypatch.setenv("REVDEQ_CACHE", str(data / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def command(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["revdeq", *map(str, arguments)])
    return __main__.main()


def said(monkeypatch, capsys, *arguments):
    capsys.readouterr()
    code = command(monkeypatch, *arguments)
    captured = capsys.readouterr()
    return captured.out if code == 0 else captured.err


# loading


@pytest.mark.parametrize("name", SMALL)
def test_a_run_is_loaded_in_one_line_as_its_training_left_it(name, runs, data):
    model, x = revdeq.models.load(runs / name), INPUTS[name]()
    expected = revdeq.training.restored(runs / name / "best.pt", data).model
    assert isinstance(model, KINDS[name]) and not model.training
    with torch.no_grad():
        assert torch.equal(model(x), expected.eval()(x))
    assert torch.equal(revdeq.models.load(str(runs / name / "best.pt"))(x), model(x))
    assert [layer.max_steps for layer in revdeq.models.load(runs / name, max_steps=3).equilibria] == [3] * len(
        model.equilibria
    )


def test_given_coefficients_replace_tuned_ones(runs, tmp_path, monkeypatch, capsys):
    tuned = revdeq.models.load(runs / "maze-tiny")
    tuned.save_pretrained(tmp_path / "tuned")
    assert tuned.equilibrium.beta != 0.8
    for model in (
        revdeq.models.load(runs / "maze-tiny", beta=0.6),
        revdeq.models.load(tmp_path / "tuned", beta=0.6),
        PuzzleModel.from_pretrained(tmp_path / "tuned", beta=0.6),
    ):
        assert (model.equilibrium.beta, model.equilibrium.gamma) == (0.6, tuned.equilibrium.gamma)
        assert "metric" not in model.trained and model.trained["preset"]["settings"]["beta"] == 0.6
        model.save_pretrained(tmp_path / "other")
        assert PuzzleModel.from_pretrained(tmp_path / "other").equilibrium.beta == 0.6
    # also if they are those at the start of the training
    assert revdeq.models.load(runs / "maze-tiny", beta=0.8).equilibrium.beta == 0.8
    assert "metric" not in revdeq.models.load(runs / "maze-tiny", beta=0.8).trained
    evaluated = [
        said(monkeypatch, capsys, "evaluate", runs / "maze-tiny", "--batches", 1, "--device", "cpu", *more)
        for more in ((), ("--set", "beta=0.2"))
    ]
    assert evaluated[0] != evaluated[1]


def test_what_cannot_be_loaded_is_named(runs, tmp_path):
    with pytest.raises(SettingError, match="prefix-tiny has no setting 'max_step' \\(did you mean max_steps"):
        revdeq.models.load(runs / "prefix-tiny", max_step=3)
    with pytest.raises(SettingError, match="seed=3: it applies to training only"):
        revdeq.models.load(runs / "prefix-tiny", seed=3)
    with pytest.raises(SettingError, match="device=cuda:77 .*: this machine has .*; use cpu, or leave it out"):
        revdeq.models.load(runs / "prefix-tiny", device="cuda:77")
    assert next(revdeq.models.load(runs / "prefix-tiny", device="meta").parameters()).is_meta
    with pytest.raises(CheckpointError, match=r"of another model \(was it trained without channels=8\?\): E"):
        revdeq.models.load(runs / "prefix-tiny", channels=8)
    with pytest.raises(CheckpointError, match="max_steps cannot be changed for a model that you pass"):
        revdeq.models.load(runs / "prefix-tiny", PuzzleModel(channels=4), max_steps=3)
    with pytest.raises(CheckpointError, match="has the weights of another model"):
        revdeq.models.load(runs / "prefix-tiny", nn.Linear(2, 2))
    points = torch.randn(20, 2)
    revdeq.train(
        nn.Linear(2, 1), (points, points[:, :1]), tmp_path / "run", device="cpu", quiet=True, epochs=1, batch=5
    )
    with pytest.raises(CheckpointError, match="Linear: create it, and call revdeq.models.load"):
        revdeq.models.load(tmp_path / "run")
    with pytest.raises(CheckpointError, match="weights of your own model, Linear"):
        revdeq.training.restored(tmp_path / "run")


def test_a_checkpoint_without_its_shapes_is_loaded(runs, tmp_path):
    """As written by version 0.1.0."""
    for name in SMALL:
        saved = checkpoint.load(runs / name)
        for key in ("shapes", "metric_name", "split", "fresh"):
            saved.pop(key, None)
        del saved["format"]
        checkpoint.save(tmp_path / "best.pt", saved)
        x = INPUTS[name]()
        with torch.no_grad():
            assert torch.equal(revdeq.models.load(tmp_path)(x), revdeq.models.load(runs / name)(x))


def test_folders_are_evaluated_where_the_training_found_its_data(runs, data, monkeypatch, capsys):
    for name, metric in (("cifar10-tiny", "accuracy"), ("wikitext2-tiny", "perplexity"), ("prefix-tiny", "solved")):
        line = said(monkeypatch, capsys, "evaluate", runs / name, "--batches", 1, "--device", "cpu")
        assert f"{name} at update 6, test: {metric} " in line
        more = said(
            monkeypatch, capsys, "evaluate", runs / name, "--batches", 1, "--device", "cpu", "--set", "max_steps=8"
        )
        assert f"{16 * len(revdeq.models.load(runs / name).equilibria)} evaluations of f" in more


# sharing


@pytest.mark.parametrize("name", SMALL)
def test_a_shared_model_is_the_one_that_was_saved(name, runs, data, tmp_path, monkeypatch, capsys):
    model, x, out = revdeq.models.load(runs / name), INPUTS[name](), tmp_path / "shared"
    model.save_pretrained(out)
    files = {path.name for path in out.iterdir()}
    assert files == {"config.json", "model.safetensors", "README.md"} | (
        {"data.safetensors"} if name == "wikitext2-tiny" else set()
    )
    with torch.no_grad():
        expected = model(x)
        found = KINDS[name].from_pretrained(out)
        assert not found.training and torch.equal(found(x), expected)
        assert torch.equal(revdeq.models.load(out)(x), expected)
        assert KINDS[name].from_pretrained(out, max_steps=3).equilibria[0].max_steps == 3
    found.save_pretrained(tmp_path / "again")
    a, b = (json.loads((tmp_path / place / "config.json").read_text()) for place in ("shared", "again"))
    assert a == b and a["trained"]["preset"]["name"] == name and str(data) not in json.dumps(a)
    capsys.readouterr()
    where = () if name in ("prefix-tiny", "maze-tiny") else ("--data", data)
    lines = [
        said(monkeypatch, capsys, "evaluate", place, *where, "--batches", 1, "--device", "cpu")
        for place in (runs / name, out)
    ]
    assert lines[0] == lines[1] and "evaluations of f" in lines[0]


def test_the_card_says_how_good_the_model_is(runs, tmp_path):
    model = revdeq.models.load(runs / "wikitext2-tiny")
    model.save_pretrained(tmp_path)
    card = hub.ModelCard.load(tmp_path / "README.md")
    metric = checkpoint.load(runs / "wikitext2-tiny")["metric"]
    assert f"Trained for 6 updates on wikitext-2 (preset wikitext2-tiny): perplexity {metric:.4g} on the" in card.text
    assert "revdeq.models.LanguageModel.from_pretrained(" in card.text and "| max_steps | 2 |" in card.text
    assert card.data.library_name == "revdeq" and "deep-equilibrium-model" in card.data.tags


def test_the_card_and_the_settings_state_the_coefficients_in_use(runs, tmp_path):
    model = revdeq.models.load(runs / "maze-tiny")
    model.save_pretrained(tmp_path / "one")
    beta, gamma = model.equilibrium.beta, model.equilibrium.gamma
    card, config = ((tmp_path / "one" / name).read_text() for name in ("README.md", "config.json"))
    assert beta != 0.8 and f"| beta | {beta} |" in card and f"| gamma | {gamma} |" in card
    assert (json.loads(config)["beta"], json.loads(config)["gamma"]) == (beta, gamma)
    several = revdeq.models.load(runs / "cifar10-tiny")
    for tuned in (False, True):  # set by hand, or tuned
        several.equilibria[1].beta = 0.7
        if tuned:
            several.equilibria[0].use(0.6, 1.1)
        several.save_pretrained(tmp_path / f"several {tuned}")
        assert (
            f"| beta | {[layer.beta for layer in several.equilibria]} |"
            in (tmp_path / f"several {tuned}/README.md").read_text()
        )
        found = MultiScale.from_pretrained(tmp_path / f"several {tuned}")
        assert [(layer.beta, layer.gamma) for layer in found.equilibria] == [
            (layer.beta, layer.gamma) for layer in several.equilibria
        ]
        assert "metric" in found.trained
        other = MultiScale.from_pretrained(tmp_path / f"several {tuned}", beta=0.5)
        assert [layer.beta for layer in other.equilibria] == [0.5, 0.5] and "metric" not in other.trained


def test_the_card_claims_no_metric_for_settings_that_were_not_evaluated(runs, tmp_path):
    revdeq.models.load(runs / "prefix-tiny").save_pretrained(tmp_path / "as it was")
    revdeq.models.load(runs / "prefix-tiny", max_steps=7).save_pretrained(tmp_path / "loaded")
    PuzzleModel.from_pretrained(tmp_path / "as it was", max_steps=7).save_pretrained(tmp_path / "again")
    assert "solved 0 on the first 1 batches of the split 'valid'." in (tmp_path / "as it was/README.md").read_text()
    for place in ("loaded", "again"):
        card = (tmp_path / place / "README.md").read_text()
        assert "no evaluation with these settings is known" in card
        assert "solved" not in card and "| max_steps | 7 |" in card
        assert revdeq.models.load(tmp_path / place).equilibrium.max_steps == 7


def test_a_model_is_loaded_from_the_hub_with_all_its_files(runs, tmp_path):
    """A folder replaces the Hub: names refer to what was saved there."""
    model = revdeq.models.load(runs / "wikitext2-tiny")
    model.save_pretrained(tmp_path / "hub")

    def download(repo_id, filename, **_):
        assert repo_id == "someone/text"
        return str(tmp_path / "hub" / filename)

    with mock.patch("huggingface_hub.hub_mixin.hf_hub_download", download):
        with mock.patch("huggingface_hub.hf_hub_download", download):
            found = LanguageModel.from_pretrained("someone/text")
    found.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors", "data.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "hub" / name).read_bytes()


def test_a_model_without_a_training_can_be_shared(tmp_path):
    torch.manual_seed(0)
    exact = SingleScale(channels=4, state=revdeq.Exact(fraction_bits=20), max_steps=2)
    x = torch.randn(1, 3, 32, 32)
    for i, model in enumerate((exact, ResNet(channels=(4, 8), depth=1))):
        model.save_pretrained(tmp_path / str(i))
        found = type(model).from_pretrained(tmp_path / str(i))
        assert torch.equal(found(x), model.eval()(x))
        with pytest.raises(CheckpointError, match="no training settings.*from_pretrained"):
            revdeq.models.load(tmp_path / str(i))
    assert found.trained is None
    assert SingleScale.from_pretrained(tmp_path / "0").equilibrium.state == revdeq.Exact(20)


class Tanh(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, z, x):
        return torch.tanh(self.conv(z) + x)


def test_a_custom_block_is_named_but_not_shared(tmp_path):
    model = SingleScale(channels=4, block=Tanh)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["block"].endswith(":Tanh")
    with pytest.raises(TypeError, match=r"was saved with block='.*:Tanh'.*, block=Tanh\)"):
        SingleScale.from_pretrained(tmp_path)
    with pytest.raises(TypeError, match="must be a class or function"):
        SingleScale.from_pretrained(tmp_path, block="mine:Tanh")
    found = SingleScale.from_pretrained(tmp_path, block=Tanh)
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(found(x), model.eval()(x))


def test_a_model_of_another_kind_is_an_error(tmp_path):
    class Mine(SingleScale):
        pass

    SingleScale(channels=4).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="SingleScale, not a PuzzleModel: use SingleScale.from_pretrained"):
        PuzzleModel.from_pretrained(tmp_path)
    assert Mine.from_pretrained(tmp_path).classify is not None


def test_weights_that_are_missing_are_an_error(tmp_path):
    from safetensors.torch import load_file, save_file

    SingleScale(channels=4).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["classify.bias"]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match="classify.bias"):
        SingleScale.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("config.json", None, "there is no config.json in it"),
        ("config.json", b"{", "Expecting property name"),
        ("config.json", b"\xff\xfe{", "'utf-8' codec can't decode"),
        ("model.safetensors", None, "No such file"),
        ("model.safetensors", b"12345678", "header"),
    ],
)
def test_a_damaged_shared_folder_gives_the_error_of_a_damaged_run(name, content, message, tmp_path):
    SingleScale(channels=4).save_pretrained(tmp_path)
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"not a model that save_pretrained wrote: .*{message}"):
        SingleScale.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["sharde", "someone/sharde", "runs/of/mine"])
def test_a_name_that_is_neither_a_folder_nor_on_the_hub_is_an_error(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OSError, match=f"there is no folder {name}, and it cannot be read from the Hub: "):
        SingleScale.from_pretrained(name, local_files_only=True)


def test_pushing_sends_the_weights_the_settings_and_the_card(runs):
    sent = {}

    def upload(repo_id, folder_path, **more):
        sent.update({path.name: path.read_bytes() for path in Path(folder_path).iterdir()}, repository=repo_id)
        return "https://example.invalid/commit"

    api = mock.MagicMock()
    api.create_repo.return_value.repo_id = "someone/prefix"
    api.upload_folder.side_effect = upload
    with mock.patch("huggingface_hub.hub_mixin.HfApi", return_value=api):
        revdeq.models.load(runs / "prefix-tiny").push_to_hub("someone/prefix")
    assert {"model.safetensors", "config.json", "README.md"} <= sent.keys() and sent["repository"] == "someone/prefix"
    assert b"solved" in sent["README.md"] and b'"channels": 4' in sent["config.json"]
    assert b'PuzzleModel.from_pretrained("someone/prefix")' in sent["README.md"]


def test_save_pretrained_does_not_overwrite_a_run(runs):
    before = (runs / "prefix-tiny/config.json").read_bytes()
    with pytest.raises(ValueError, match="prefix-tiny' is the folder of a run, whose config.json would be overwritten"):
        revdeq.models.load(runs / "prefix-tiny").save_pretrained(runs / "prefix-tiny")
    assert (runs / "prefix-tiny/config.json").read_bytes() == before


def test_without_huggingface_hub_models_work_and_say_what_is_missing():
    code = """
import sys
sys.modules["huggingface_hub"] = None
import torch, revdeq
model = revdeq.models.SingleScale(channels=4)
model(torch.randn(1, 3, 32, 32))
for act in (model.save_pretrained, type(model).from_pretrained, model.push_to_hub):
    try:
        act("x")
    except ImportError as error:
        print(error)
"""
    environment = {"PYTHONPATH": str(Path(revdeq.__file__).parent.parent)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    remedy = "needs huggingface_hub and safetensors: pip install huggingface_hub safetensors"
    names = ("save_pretrained", "from_pretrained", "push_to_hub")
    assert result.stdout.splitlines() == [f"{name} {remedy}" for name in names]


def test_a_shared_folder_without_safetensors_says_what_is_missing(runs, tmp_path, monkeypatch):
    revdeq.models.load(runs / "prefix-tiny").save_pretrained(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(CheckpointError, match="needs safetensors: pip install safetensors"):
        revdeq.models.load(tmp_path)


# text


def test_sampling_takes_only_the_likeliest_tokens():
    logits = torch.tensor([0.1, 0.2, 0.4, 0.25, 0.05]).log()

    def drawn(top_k=None, top_p=None, temperature=1.0):
        draw = Draw(temperature, top_k, top_p, torch.Generator().manual_seed(0))
        return torch.tensor([draw(logits) for _ in range(2000)]).bincount(minlength=5) / 2000

    torch.testing.assert_close(drawn(), logits.exp(), atol=0.04, rtol=0)
    torch.testing.assert_close(drawn(top_k=2), torch.tensor([0, 0, 0.4, 0.25, 0]) / 0.65, atol=0.04, rtol=0)
    torch.testing.assert_close(drawn(top_p=0.7), torch.tensor([0, 0.2, 0.4, 0.25, 0]) / 0.85, atol=0.04, rtol=0)
    assert drawn(top_p=0.39)[2] == 1 and drawn(top_k=1)[2] == 1 and drawn(temperature=0)[2] == 1
    assert (drawn(top_k=3, top_p=0.5) > 0).tolist() == [False, False, True, True, False]


def test_texts_of_many_prompts_from_a_file(runs, tmp_path, monkeypatch, capsys):
    """In a batch, each is the same as alone, also beyond the window. The speed is not printed into the text."""
    run, prompts = runs / "wikitext2-tiny", tmp_path / "prompts.txt"
    prompts.write_text("the fox\n\nthe dog ran to a hill and\n")
    options = ("--tokens", 40, "--temperature", 0, "--device", "cpu")
    capsys.readouterr()
    assert command(monkeypatch, "generate", run, "--batch", prompts, *options) == 0
    told = capsys.readouterr()
    texts = [json.loads(line) for line in told.out[:-1].split("\n")]
    alone = [said(monkeypatch, capsys, "generate", run, "--prompt", text, *options) for text in ("the fox", "")]
    assert [text + "\n" for text in texts[:2]] == alone and len(texts) == 3
    assert re.fullmatch(r"120 tokens in [\d.]+ s, [\d,]+ per second\n", told.err)
    moved = said(monkeypatch, capsys, "generate", run, "--prompt", "the fox", "--slide", 5, *options)
    assert moved.startswith("the fox") and len(moved) > 40
    for wrong, message in (
        (("--batch", tmp_path / "none"), "none cannot be read"),
        (("--batch", prompts, "--prompt", "the"), "--prompt and --batch"),
        (("--slide", 10**6), "slide = 1000000"),
    ):
        assert message in said(monkeypatch, capsys, "generate", run, *wrong)
    prompts.write_text("")
    assert "empty" in said(monkeypatch, capsys, "generate", run, "--batch", prompts)


def test_text_from_a_folder(runs, data, tmp_path, monkeypatch, capsys):
    run = runs / "wikitext2-tiny"
    options = ("--tokens", 12, "--prompt", "the fox", "--device", "cpu")
    plain = said(monkeypatch, capsys, "generate", run, *options)
    assert plain.startswith("the fox") and plain == said(monkeypatch, capsys, "generate", run / "best.pt", *options)
    likeliest = said(monkeypatch, capsys, "generate", run, *options, "--temperature", 0)
    assert likeliest == said(monkeypatch, capsys, "generate", run, *options, "--top-k", 1)
    assert likeliest == said(monkeypatch, capsys, "generate", run, *options, "--top-p", 1e-6)
    assert plain != said(monkeypatch, capsys, "generate", run, *options, "--top-k", 2, "--set", "max_steps=5")
    revdeq.models.load(run).save_pretrained(tmp_path)
    assert "GPT-2's encoding: pass it (--data DIR)" in said(monkeypatch, capsys, "generate", tmp_path, *options)
    assert plain == said(monkeypatch, capsys, "generate", tmp_path, *options, "--data", data)
    for wrong, message in (
        ("--top-k", "top_k = 0 must be"),
        ("--top-p", "top_p = 0.0 must be larger than 0"),
    ):
        assert message in said(monkeypatch, capsys, "generate", run, wrong, 0)
    assert "device=cdua (--device): it must be a device" in said(
        monkeypatch, capsys, "generate", run, "--device", "cdua"
    )
    with pytest.raises(CheckpointError, match="only a language model generates text"):
        generate(runs / "prefix-tiny", None, "", 3)


# images


@pytest.fixture
def pictures(tmp_path):
    """Images of several kinds and sizes, and something else."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.new("RGB", (32, 32), (10, 200, 30)).save(folder / "a.png")
    Image.new("RGB", (300, 200), (200, 10, 30)).save(folder / "b.JPG")
    Image.new("L", (20, 50), 90).save(folder / "c.png")
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(folder / "d.png")
    Image.new("P", (40, 40)).save(folder / "e.gif")
    (folder / "notes.txt").write_text("not an image")
    return folder


def test_custom_images_are_classified(runs, pictures, monkeypatch, capsys):
    table = said(monkeypatch, capsys, "classify", runs / "cifar10-tiny", pictures, "--device", "cpu").splitlines()
    assert table[0].split() == ["file", "class", "probability"] and len(table) == 6
    assert [Path(line.split()[0]).name for line in table[1:]] == ["a.png", "b.JPG", "c.png", "d.png", "e.gif"]
    model = revdeq.models.load(runs / "cifar10-tiny")
    pixels = torch.tensor([10, 200, 30], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 32, 32)
    with torch.no_grad():
        chances = model(normalise(pixels)).softmax(1)[0]
    assert table[1].split()[1:] == [NAMES[int(chances.argmax())], f"{chances.max():.3f}"]
    guesses = list(classify(runs / "cifar10-tiny", [pictures], device="cpu", batch=2))
    assert [f"{guess.probability:.3f}" for guess in guesses] == [line.split()[2] for line in table[1:]]
    one = said(monkeypatch, capsys, "classify", runs / "cifar10-tiny", pictures / "b.JPG", "--device", "cpu")
    assert len(one.splitlines()) == 2


def test_images_are_cropped_to_the_centre(tmp_path):
    image = Image.new("RGB", (96, 64), "red")
    image.paste("blue", (16, 0, 80, 64))  # the square in the middle
    image.save(tmp_path / "wide.png")
    pixels = read(tmp_path / "wide.png")
    assert pixels.shape == (3, 32, 32) and pixels.dtype == torch.uint8
    assert torch.equal(pixels, torch.tensor([0, 0, 255], dtype=torch.uint8).view(3, 1, 1).expand(3, 32, 32))
    exact = Image.frombytes("RGB", (32, 32), bytes(range(256)) * 12)
    exact.save(tmp_path / "exact.png")  # nothing is resampled
    assert bytes(read(tmp_path / "exact.png").permute(1, 2, 0).flatten().tolist()) == exact.tobytes()
    Image.new("RGBA", (50, 50), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    assert (read(tmp_path / "clear.png") == 255).all()


def test_what_cannot_be_classified_is_named(runs, pictures, tmp_path, monkeypatch, capsys):
    (pictures / "f.png").write_bytes(b"nothing")
    run = runs / "cifar10-tiny"
    cases = [
        ((run, pictures), "f.png is not a readable image: "),
        ((run, tmp_path / "none"), "there is no image or folder "),
        ((run, runs), "contains no image: expected files that end in .png, .jpg, .jpeg"),
        (
            (runs / "prefix-tiny", pictures),
            "was trained as prefix-tiny: only models for cifar10 classify images",
        ),
    ]
    for arguments, message in cases:
        assert message in said(monkeypatch, capsys, "classify", *arguments, "--device", "cpu")
    with pytest.raises(DataError):
        classify(run, [tmp_path / "none"])
    told = []
    with pytest.raises(DataError, match="not a readable image"):
        told.extend(classify(run, [pictures], device="cpu"))
    readable = {file.name for file in pictures.iterdir() if file.suffix != ".txt"} - {"f.png"}
    assert {guess.file.name for guess in told} == readable


@pytest.mark.parametrize("batch", [1, 64])
def test_damaged_images_are_reported_after_the_readable_ones(batch, runs, pictures):
    whole = (pictures / "a.png").read_bytes()
    damaged = {
        "0 empty.png": b"",
        "1 header.png": whole.replace(b"\0\0\0\rIHDR", b"\0\0\0\0IHDR"),  # a ValueError of its decoder
        "2 cut.png": whole[: len(whole) // 2],
    }
    for name, content in damaged.items():
        (pictures / name).write_bytes(content)
    told = []
    with pytest.raises(DataError) as error:
        told.extend(classify(runs / "cifar10-tiny", [pictures], device="cpu", batch=batch))
    assert [guess.file.name for guess in told] == ["a.png", "b.JPG", "c.png", "d.png", "e.gif"]
    lines = str(error.value).splitlines()
    assert len(lines) == 3 and all(
        f"{name} is not a readable image" in line for name, line in zip(damaged, lines, strict=True)
    )


def test_a_16_bit_image_is_read_like_its_8_bit_version(tmp_path):
    image = pytest.importorskip("PIL.Image")
    ramp = torch.arange(0, 256, 8).expand(32, 32).numpy().astype("uint16")
    image.fromarray(ramp.astype("uint8")).save(tmp_path / "8.png")
    image.fromarray(ramp * 257).save(tmp_path / "16.png")
    assert torch.equal(*(revdeq.training.classify.read(tmp_path / name) for name in ("8.png", "16.png")))
