"""The paper's models: their size, their function and their gradient."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import revdeq
from revdeq.baselines import stored_graph
from revdeq.examples import text
from revdeq.models import (
    MODELS,
    Cache,
    ConvBlock,
    LanguageModel,
    ResNet,
    TransformerBlock,
    count_parameters,
)

CLASSES, VOCABULARY, LENGTH = 7, 50, 12
SMALL = {
    "single-scale": {"channels": 16, "width": 2, "classes": CLASSES, "max_steps": 3},
    "multi-scale": {"channels": (8, 16, 16, 8), "widths": (1, 2, 2, 1), "max_steps": (1, 3, 2, 1), "classes": CLASSES},
    "language": {"vocabulary": VOCABULARY, "d": 16, "heads": 2, "length": LENGTH, "max_steps": 3, "dropout": 0.0},
    "puzzle": {"channels": 8, "classes": CLASSES, "max_steps": 3},
    "resnet": {"channels": (8, 16), "depth": 1, "classes": CLASSES},
    "transformer": {"vocabulary": VOCABULARY, "d": 16, "heads": 2, "length": LENGTH, "depth": 2, "dropout": 0.0},
    "puzzle-net": {"channels": 8, "classes": CLASSES, "depth": 3},
}
IMPLICIT = ["single-scale", "multi-scale", "language", "puzzle"]
LANGUAGE_FORMS = ["paper", "authors", "residual", "pre-norm"]
FORMS = [
    *((name, {"form": form}) for name in ("single-scale", "multi-scale") for form in ("paper", "authors")),
    *(("language", {"form": form}) for form in LANGUAGE_FORMS),
    ("puzzle", {}),
]


def small(name, **settings):
    torch.manual_seed(0)
    return MODELS[name](**{**SMALL[name], **settings})


def layers(model):
    return [m for m in model.modules() if isinstance(m, revdeq.RevDEQ)]


def batch(name, size=3):
    """Inputs and targets."""
    generator = torch.Generator().manual_seed(1)
    if name in ("language", "transformer"):
        tokens = torch.randint(VOCABULARY, (size, LENGTH + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    images = torch.randn(size, 3, 16, 16, generator=generator)
    if name in ("puzzle", "puzzle-net"):
        return images[..., :4, :5], torch.randint(CLASSES, (size, 4, 5), generator=generator)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def loss_of(model, inputs, targets):
    return F.cross_entropy(model(inputs).float().flatten(0, -2), targets.flatten())


def gradients(model, inputs, targets):
    loss = loss_of(model, inputs, targets)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


# Size and function


@pytest.mark.parametrize(
    ("model", "settings", "parameters"),
    [
        (LanguageModel, {"wide_heads": False}, 64_627_712),
        (ResNet, {}, 11_171_146 + 2 * 512),  # PreActResNet18 of well-known repositories, with He's norm before pooling
    ],
)
def test_parameter_counts(model, settings, parameters):
    """Those of the paper's models are tested with the presets."""
    assert count_parameters(model(**settings)) == parameters


def test_conv_block_by_its_equation():
    torch.manual_seed(0)
    z, x = torch.randn(2, 2, 16, 5, 6)
    paper, authors = ConvBlock(16, 2), ConvBlock(16, 2, form="authors")
    authors.load_state_dict(paper.state_dict())

    norm, hidden = F.group_norm, F.conv2d(z, paper.conv1.weight, padding=1)
    update = norm(x + F.conv2d(norm(hidden, 2).relu(), paper.conv2.weight, padding=1), 1)
    torch.testing.assert_close(paper(z, x), norm(z + update.relu(), 1))
    torch.testing.assert_close(authors(z, x), norm((z + update).relu(), 1))


@pytest.mark.parametrize("wide_heads", [False, True])
@pytest.mark.parametrize("form", LANGUAGE_FORMS)
def test_transformer_block_by_its_equation(form, wide_heads):
    torch.manual_seed(0)
    z, x = torch.randn(2, 2, 5, 8)
    block = TransformerBlock(8, 2, wide_heads=wide_heads, form=form)

    def attention(h):
        q, k, v = (t.unflatten(-1, (2, -1)) for t in (h @ block.attention.qkv.weight.T).chunk(3, -1))
        weights = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5 + torch.full((5, 5), -math.inf).triu(1)
        attended = torch.einsum("bhij,bjhd->bihd", weights.softmax(-1), v)
        return attended.flatten(-2) @ block.attention.project.weight.T

    u, norm, mlp = z + x, lambda h: F.layer_norm(h, (8,)), block.mlp
    h = {"paper": lambda: norm(attention(u)), "authors": lambda: z + attention(norm(u)),
         "residual": lambda: norm(u + attention(u)), "pre-norm": lambda: u + attention(norm(u))}[form]()  # fmt: skip
    out = {"paper": norm(mlp(h)), "authors": h + mlp(norm(h)),
           "residual": norm(h + mlp(h)), "pre-norm": norm(h + mlp(norm(h)))}[form]  # fmt: skip
    torch.testing.assert_close(block(z, x), out)


def test_the_multi_scale_model_matches_the_papers_figure():
    """At each scale, there is an identity path around the equilibrium, and a convolution around the downsampling."""
    model, (images, _) = small("multi-scale").eval(), batch("multi-scale")
    x = F.relu(model.encode[1](model.encode[0](images)))
    for scale, down, steps in zip(model.scales, model.downsample, (1, 3, 2, 1), strict=True):
        x = x + revdeq.solve(scale.f, torch.zeros_like(x), x, beta=0.8, max_steps=steps).z
        if down is not model.downsample[-1]:
            h = F.conv2d(F.relu(down.norm1(x)), down.conv1.weight, stride=2, padding=1)
            h = F.conv2d(F.relu(down.norm2(h)), down.conv2.weight, padding=1)
            x = h + F.conv2d(x, down.residual.weight, stride=2)
    torch.testing.assert_close(model(images), x.mean((2, 3)) @ model.classify.weight.T + model.classify.bias)


def test_the_single_scale_model_pools_to_four_by_four():
    model, (images, _) = small("single-scale"), batch("single-scale")
    z = revdeq.solve(model.equilibrium.f, torch.zeros(3, 16, 16, 16), model.encode(images), beta=0.8, max_steps=3).z
    pooled = z.unflatten(3, (4, 4)).unflatten(2, (4, 4)).mean((3, 5))
    torch.testing.assert_close(model(images), pooled.flatten(1) @ model.classify.weight.T + model.classify.bias)


# Gradient and training


def stored(layer, x, z0=None):
    return stored_graph(layer.f, torch.zeros_like(x), x, beta=layer.beta, max_steps=layer.max_steps)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_gradient_is_that_of_the_stored_graph(name, form, monkeypatch):
    """The loss has the same bits. A parameter's gradient is a sum of at most 2 * 3 products, added up in another order:
    2^-24 for each, and as much for the adjoint that goes into it, over the up to four blocks that it passes."""
    model = small(name, **form)
    loss, ours = gradients(model, *batch(name))
    monkeypatch.setattr(revdeq.RevDEQ, "forward", stored)
    expected, theirs = gradients(model, *batch(name))
    assert torch.equal(loss, expected)
    for g, e in zip(ours, theirs, strict=True):
        assert (g - e).norm() <= 4 * 2 * 6 * 2**-24 * e.norm()


@pytest.mark.parametrize("name", MODELS)
def test_a_small_model_begins_with_a_guess_and_memorizes_a_small_batch(name):
    model, (inputs, targets) = small(name), batch(name, 4)
    classes = VOCABULARY if name in ("language", "transformer") else CLASSES
    assert abs(loss_of(model, inputs, targets).item() - math.log(classes)) < 0.5
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = loss_of(model, inputs, targets)
        if loss < 0.05:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


@pytest.mark.parametrize("name", IMPLICIT)
def test_bfloat16_autocast(name):
    """bfloat16 has 8 bits: a relative error of 2^-9 in each of some ten roundings in a row, in each evaluation."""
    model, (inputs, targets) = small(name), batch(name)
    loss = loss_of(model, inputs, targets)
    with torch.autocast("cpu", torch.bfloat16):
        lower = loss_of(model, inputs, targets)
    lower.backward()
    assert lower.item() != loss.item() and abs(lower.item() / loss.item() - 1) < 10 * 2**-9
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


# Settings


@pytest.mark.parametrize("name", IMPLICIT)
def test_models_hand_their_options_to_the_layer(name):
    other = {"beta": 0.7, "gamma": 0.9, "tol": 1e-2, "state": "exact", "check": None, "keep": 1, "gradient": "exact"}
    for layer in layers(small(name, **other)):
        assert {key: getattr(layer, key) for key in other} == other
    with pytest.raises(TypeError, match="betta"):
        small(name, betta=0.5)


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_mode_and_copies(name):
    """Training mode changes BatchNorm only, and examples do not depend on each other in evaluation mode."""
    model, (inputs, _) = small(name), batch(name)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    model(inputs)
    moved = {name.rsplit(".", 1)[0] for name, x in model.named_buffers() if not torch.equal(x, buffers[name])}
    assert moved == {name for name, x in model.named_modules() if isinstance(x, nn.BatchNorm2d)}
    assert not any(name.startswith(("equilibrium.", "scales.")) for name in moved)
    together = model.eval()(inputs)
    torch.testing.assert_close(together, torch.cat([model(x[None]) for x in inputs]), rtol=1e-3, atol=1e-4)
    other = small(name).eval()
    other.load_state_dict(model.state_dict())
    assert torch.equal(copy.deepcopy(model)(inputs), together) and torch.equal(other(inputs), together)


@pytest.mark.parametrize(
    ("name", "settings", "inputs", "message"),
    [
        ("single-scale", {"channels": 56}, None, r"56 channels \(.*\) cannot be split into 3 groups.*multiple of 16"),
        ("multi-scale", {"max_steps": (1, 4, 0, 1)}, None, r"max_steps\[2\] = 0 must be an integer of at least 1"),
        ("language", {"d": 30, "heads": 8, "wide_heads": False}, None, "d = 30 is not a multiple of heads = 8"),
        ("resnet", {}, torch.zeros(3, 16, 16), r"images of shape \(3, 16, 16\).*\(B, 3, H, W\)"),
        ("language", {}, torch.zeros(2, 13).long(), "tokens of length 13.*length = 12.*truncate"),
        ("language", {}, torch.tensor([[0, 50]]), "tokens from 0 to 50: .* vocabulary - 1 = 49"),
    ],
)
def test_bad_arguments_and_inputs(name, settings, inputs, message):
    with pytest.raises((ValueError, IndexError), match=message):
        small(name, **settings)(inputs)


# Text generation


CACHED = [
    *(("language", {"form": form}) for form in LANGUAGE_FORMS),
    ("language", {"state": "exact", "gamma": 0.7}),
    ("language", {"block": text.Block, "indexed": True}),
    ("transformer", {}),
]


@pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 6, 3)])
@pytest.mark.parametrize(("name", "settings"), CACHED)
@torch.no_grad()
def test_caches_give_the_logits_of_the_whole_sequence(name, settings, lengths):
    """Which depends on no later token. A position is 2 N evaluations of float32 in another order of summation, each of
    some 1e-7 relative, which a block a few times as steep as the identity makes at most tens of times as large."""
    model, texts, longest = small(name, **settings).eval(), batch(name)[0], max(lengths)
    padding = torch.tensor([longest - n for n in lengths])
    rows = torch.stack([F.pad(row, (p, 0))[:LENGTH] for row, p in zip(texts, padding.tolist(), strict=True)])
    cache = Cache(LENGTH, padding)
    found = [model._decoded(rows[:, :longest], cache.advance(longest))]
    found += [model._decoded(rows[:, i : i + 1], cache.advance(1)) for i in range(longest, LENGTH)]
    for row, n, whole in zip(torch.stack(found, 1), lengths, model(texts), strict=True):
        expected = whole[n - 1 : n - 1 + len(row)]
        assert ((row - expected).norm(dim=-1) <= 1e-5 * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("name", ["language", "transformer"])
def test_greedy_text_is_that_of_the_whole_sequence(name):
    """Also beyond the window, from prompts of different lengths, one of them longer than the window."""
    model, texts = small(name, dropout=0.5), batch(name)[0]
    prompts = [texts[0][:3], texts[1][:1], torch.cat([texts[2], texts[0]])]
    found, whole = (model.generate(prompts, 2 * LENGTH, use_cache=use_cache) for use_cache in (True, False))
    assert all(module.training for module in model.modules())
    for row, other, prompt in zip(found, whole, prompts, strict=True):
        assert torch.equal(row, other) and torch.equal(row, model.generate([prompt], 2 * LENGTH)[0])
        assert torch.equal(row[: len(prompt)], prompt) and len(row) == len(prompt) + 2 * LENGTH
    first = found[0]
    with torch.no_grad():
        chosen = [model.eval()(first[None, max(0, i - LENGTH) : i])[0, -1].argmax() for i in range(3, len(first))]
    assert torch.equal(first[3:], torch.stack(chosen))


def test_sampling_takes_the_usual_arguments():
    model, prompt = small("language"), torch.tensor([[3, 4], [0, 5]])

    def drawn(seed=0, **settings):
        torch.manual_seed(seed)
        return model.generate(prompt, 6, do_sample=True, **settings)

    likeliest = model.generate(prompt, 6)
    assert drawn().shape == (2, 8) and torch.equal(drawn(), drawn()) and not torch.equal(drawn(), drawn(1))
    assert torch.equal(likeliest, drawn(top_k=1)) and torch.equal(likeliest, drawn(top_p=1e-6))
    assert torch.equal(likeliest, drawn(temperature=1e-6)) and not torch.equal(likeliest, drawn(temperature=9.0))
    with pytest.raises(ValueError, match="apply to sampling only: pass do_sample=True"):
        model.generate(prompt, temperature=0.5)


def test_a_text_stops_at_its_end_token():
    model, prompt = small("language"), torch.tensor([[3, 4], [7, 5]])
    free = model.generate(prompt, 10)
    end = free[0, 5].item()
    lasts = [row[2:].tolist().index(end) if end in row[2:] else 9 for row in free]  # where each text ends
    found = model.generate(prompt, 10, eos_token_id=end)
    assert found.shape[1] == 3 + max(lasts)
    for row, all_of_it, last in zip(found, free, lasts, strict=True):
        assert torch.equal(row[: 3 + last], all_of_it[: 3 + last]) and (row[3 + last :] == end).all()
    assert [len(row) for row in model.generate(list(prompt), 10, eos_token_id=end)] == [3 + last for last in lasts]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"block": lambda d: nn.Bilinear(d, d, d)}, "Bilinear takes no cache"), ({"tol": 1e-3}, "with tol = 0.001")],
)
def test_without_a_cache_every_token_evaluates_the_whole_sequence(settings, message):
    model = small("language", **settings)
    with pytest.warns(UserWarning, match=f"whole sequence: {message}"):
        found = model.generate([[3, 4]], 4)[0]
    assert torch.equal(found, model.generate([[3, 4]], 4, use_cache=False)[0])
