"""The paper's models: their size, their function and their gradient."""

import copy
import inspect
import itertools
import json
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import revdeq
from revdeq._solver.forward import forward
from revdeq._solver.options import Options
from revdeq.models import (
    MODELS,
    ConvBlock,
    Equilibrium,
    LanguageModel,
    MultiScale,
    PuzzleModel,
    ResNet,
    SingleScale,
    Transformer,
    TransformerBlock,
    count_parameters,
)
from revdeq.models.blocks import LANGUAGE_FORMS
from revdeq.models.decoding import Decoder

try:
    import torchdeq
except ImportError:
    torchdeq = None

needs_torchdeq = pytest.mark.skipif(torchdeq is None, reason="torchdeq is not installed")

CLASSES, VOCABULARY, LENGTH = 7, 50, 12

SMALL = {
    "single-scale": {"channels": 16, "width": 2, "classes": CLASSES, "max_steps": 3},
    "multi-scale": {"channels": (8, 16, 16, 8), "widths": (1, 2, 2, 1), "max_steps": (1, 3, 2, 1), "classes": CLASSES},
    "language": {"vocabulary": VOCABULARY, "d": 16, "heads": 2, "length": LENGTH, "max_steps": 3},
    "puzzle": {"channels": 8, "classes": CLASSES, "max_steps": 3},
    "resnet": {"channels": (8, 16), "depth": 1, "classes": CLASSES},
    "transformer": {"vocabulary": VOCABULARY, "d": 16, "heads": 2, "length": LENGTH, "depth": 2},
    "puzzle-net": {"channels": 8, "classes": CLASSES, "depth": 3},
}
IMPLICIT = ["single-scale", "multi-scale", "language", "puzzle"]
EVALUATIONS = {"single-scale": 6, "multi-scale": 14, "language": 6, "puzzle": 6}
FORMS = [
    *((name, form) for name in ("single-scale", "multi-scale") for form in ("paper", "authors")),
    *(("language", form) for form in LANGUAGE_FORMS),
]
SOLVERS = ["reversible", "stored", "checkpointed", pytest.param("torchdeq", marks=needs_torchdeq)]


def small(name, **settings):
    torch.manual_seed(0)
    return MODELS[name](**{**SMALL[name], **settings})


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
    logits = model(inputs)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def gradients(model, inputs, targets, seed=2):
    torch.manual_seed(seed)  # of dropout
    loss = loss_of(model, inputs, targets)
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


# Size


@pytest.mark.parametrize(
    ("model", "settings", "parameters"),
    [
        (SingleScale, {}, 160_138),
        (MultiScale, {}, 171_498),
        (MultiScale, {"channels": (64, 128, 128, 256), "widths": (2, 4, 4, 2)}, 6_335_946),
        (MultiScale, {"channels": (128, 256, 256, 128), "widths": (1, 3, 3, 1), "max_steps": (4, 4, 4, 4)}, 10_319_754),
        (LanguageModel, {}, 93_987_840),
        (LanguageModel, {"wide_heads": False}, 64_627_712),
    ],
)
def test_parameter_counts(model, settings, parameters):
    with torch.device("meta"):
        assert count_parameters(model(**settings)) == parameters
    assert f"{parameters:,}" in model.__doc__


def test_parameters_of_the_language_model_by_hand():
    d, heads, vocabulary, length = 12, 2, 50, 7
    embedding, norms = (vocabulary + length) * d, 4 * d
    for wide_heads, inner in ((True, heads * d), (False, d)):
        model = LanguageModel(vocabulary, d, heads, length, wide_heads=wide_heads)
        perceptron = 2 * d * 4 * d + 4 * d + d
        assert count_parameters(model) == embedding + 4 * d * inner + perceptron + norms
    authors = LanguageModel(vocabulary, d, heads, length, form="authors")
    perceptron = d * 4 * d + 4 * d * 4 * d + 4 * d * d + 4 * d + 4 * d + d
    assert count_parameters(authors) == embedding + 4 * d * heads * d + perceptron + norms


def test_explicit_models_of_equal_size():
    """One unit of width more or less is 1 / width of a model's parameters, or 2 where both sides of a product grow."""
    for parameters in (160_138, 171_498, 6_335_946, 10_319_754):
        with torch.device("meta"):
            model = ResNet.sized(parameters, depth=2)
        assert abs(count_parameters(model) / parameters - 1) <= 1 / model.classify.in_features
        assert [2 * a - b for a, b in itertools.pairwise(block_widths(model))] == pytest.approx([0, 0, 0], abs=2)
    with torch.device("meta"):
        language = Transformer.sized(93_987_840, depth=3)
    assert abs(count_parameters(language) / 93_987_840 - 1) <= 1 / language.hidden
    with pytest.raises(ValueError, match="parameters = 100 .*1067.*smaller d or depth"):
        Transformer.sized(100, vocabulary=10, d=8, heads=2, length=4)


def block_widths(resnet):
    return list(dict.fromkeys(block.conv2.out_channels for block in resnet.blocks))


def test_resnet_18():
    """Like PreActResNet18 in well-known CIFAR-10 repositories, 11,171,146, with He's norm before the pooling."""
    with torch.device("meta"):
        assert count_parameters(ResNet()) == 11_171_146 + 2 * 512


@pytest.mark.parametrize("name", MODELS)
def test_arguments_can_be_written_as_json(name):
    """Except for a custom block."""
    parameters = inspect.signature(MODELS[name]).parameters.items()
    defaults = {k: p.default for k, p in parameters if k != "block" and p.kind != p.VAR_KEYWORD}
    assert MODELS[name] is type(MODELS[name](**json.loads(json.dumps({**defaults, **SMALL[name]}))))


# Function


@pytest.mark.parametrize("form", ["paper", "authors"])
@pytest.mark.parametrize("name", ["single-scale", "multi-scale"])
def test_image_shapes(name, form):
    model = small(name, form=form)
    for shape in ((1, 3, 16, 16), (3, 3, 13, 17), (5, 3, 32, 20)):
        assert model(torch.randn(shape)).shape == (shape[0], CLASSES)
    assert small("resnet")(torch.randn(1, 3, 13, 17)).shape == (1, CLASSES)


@pytest.mark.parametrize("form", LANGUAGE_FORMS)
def test_language_shapes(form):
    model = small("language", form=form)
    for shape in ((1, LENGTH), (3, 1), (5, 7)):
        assert model(torch.randint(VOCABULARY, shape)).shape == (*shape, VOCABULARY)
        assert small("transformer")(torch.randint(VOCABULARY, shape)).shape == (*shape, VOCABULARY)


@pytest.mark.parametrize("model", [*(small("language", form=form) for form in LANGUAGE_FORMS), small("transformer")])
def test_no_logit_depends_on_a_later_token(model):
    model.double().eval()
    tokens = torch.randint(VOCABULARY, (2, LENGTH))
    before = model(tokens)
    for t in (1, 5, LENGTH - 1):
        changed = tokens.clone()
        changed[:, t] = (changed[:, t] + 1) % VOCABULARY
        after = model(changed)
        assert torch.equal(after[:, :t], before[:, :t])
        assert not torch.isclose(after[:, t:], before[:, t:]).all(-1).any()


def test_conv_block_by_its_equation():
    torch.manual_seed(0)
    z, x = torch.randn(2, 2, 16, 5, 6)
    paper, authors = ConvBlock(16, 2), ConvBlock(16, 2, form="authors")
    authors.load_state_dict(paper.state_dict())

    def norm(a, groups):
        a = a.unflatten(1, (groups, -1))
        variance, mean = torch.var_mean(a, (2, 3, 4), correction=0, keepdim=True)
        return ((a - mean) / (variance + 1e-5).sqrt()).flatten(1, 2)

    hidden = F.conv2d(z, paper.conv1.weight, padding=1)
    update = norm(x + F.conv2d(norm(hidden, 2).relu(), paper.conv2.weight, padding=1), 1)
    torch.testing.assert_close(paper(z, x), norm(z + update.relu(), 1))
    torch.testing.assert_close(authors(z, x), norm((z + update).relu(), 1))
    assert not torch.allclose(paper(z, x), authors(z, x), atol=0.1)


@pytest.mark.parametrize("wide_heads", [False, True])
def test_transformer_block_by_its_equation(wide_heads):
    torch.manual_seed(0)
    z, x = torch.randn(2, 2, 5, 8)

    def attention(block, h):
        q, k, v = (t.unflatten(-1, (2, -1)) for t in (h @ block.attention.qkv.weight.T).chunk(3, -1))
        weights = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
        weights = weights.masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf).softmax(-1)
        return torch.einsum("bhij,bjhd->bihd", weights, v).flatten(-2) @ block.attention.project.weight.T

    def norm(h):
        return F.layer_norm(h, (8,))

    def linear(layer, h):
        return h @ layer.weight.T + layer.bias

    paper = TransformerBlock(8, 2, wide_heads=wide_heads)
    first, _, second = paper.mlp
    h = norm(attention(paper, z + x))
    torch.testing.assert_close(paper(z, x), norm(linear(second, F.gelu(linear(first, h)))))

    authors = TransformerBlock(8, 2, wide_heads=wide_heads, form="authors")
    h = z + attention(authors, norm(z + x))
    update = norm(h)
    for layer in authors.mlp:
        update = linear(layer, update) if isinstance(layer, nn.Linear) else F.gelu(update, approximate="tanh")
    assert [m.weight.shape for m in authors.mlp if isinstance(m, nn.Linear)] == [(32, 8), (32, 32), (8, 32)]
    torch.testing.assert_close(authors(z, x), h + update)

    residual = TransformerBlock(8, 2, wide_heads=wide_heads, form="residual")
    residual.load_state_dict(paper.state_dict())
    h = norm(z + x + attention(residual, z + x))
    torch.testing.assert_close(residual(z, x), norm(h + linear(second, F.gelu(linear(first, h)))))

    before = TransformerBlock(8, 2, wide_heads=wide_heads, form="pre-norm")
    before.load_state_dict(paper.state_dict(), strict=False)
    h = z + x + attention(before, norm(z + x))
    torch.testing.assert_close(before(z, x), norm(h + linear(second, F.gelu(linear(first, norm(h))))))


def test_how_much_an_untrained_language_model_depends_on_each_token():
    """How far the equilibrium at the last position moves if the token there changes, and if all others do: the numbers
    in the docstring of `TransformerBlock`, which vary by a tenth between seeds."""
    moved = {}
    for form in ("paper", "residual", "pre-norm"):
        torch.manual_seed(0)
        model = LanguageModel(4097, 128, 4, 64, dropout=0.0, wide_heads=False, form=form)
        tokens, others = torch.randint(4097, (2, 16, 64))
        own = tokens.clone()
        own[:, -1], others[:, -1] = others[:, -1].clone(), tokens[:, -1]
        with torch.no_grad():
            before, *after = (model.equilibrium(model.embed(x))[:, -1] for x in (tokens, own, others))
        moved[form] = [((z - before).norm() / before.norm()).item() for z in after]
    assert moved["paper"] == pytest.approx([0.09, 0.74], abs=0.15)
    assert moved["residual"] == pytest.approx([0.98, 0.17], abs=0.15)
    assert moved["pre-norm"] == pytest.approx([0.99, 0.06], abs=0.15)


def test_the_multi_scale_model_matches_the_papers_figure():
    """At each scale, there is an identity path around the equilibrium, and a convolution around the downsampling."""
    model = small("multi-scale").eval()
    images, _ = batch("multi-scale")
    x = F.relu(model.encode[1](model.encode[0](images)))
    for i, scale in enumerate(model.scales):
        x = x + revdeq.solve(scale.f, torch.zeros_like(x), x, beta=0.8, max_steps=(1, 3, 2, 1)[i]).z
        if i < 3:
            down = model.downsample[i]
            h = F.conv2d(F.relu(down.norm1(x)), down.conv1.weight, stride=2, padding=1)
            h = F.conv2d(F.relu(down.norm2(h)), down.conv2.weight, padding=1)
            x = h + F.conv2d(x, down.residual.weight, stride=2)
    torch.testing.assert_close(model(images), x.mean((2, 3)) @ model.classify.weight.T + model.classify.bias)


def test_single_scale_pools_to_four_by_four():
    model = small("single-scale")
    images, _ = batch("single-scale")
    z = revdeq.solve(model.equilibrium.f, torch.zeros(3, 16, 16, 16), model.encode(images), beta=0.8, max_steps=3).z
    pooled = z.unflatten(3, (4, 4)).unflatten(2, (4, 4)).mean((3, 5))
    torch.testing.assert_close(model(images), pooled.flatten(1) @ model.classify.weight.T + model.classify.bias)


@pytest.mark.parametrize("name", MODELS)
def test_an_untrained_model_predicts_uniformly(name):
    """Its loss is near that of a guess, and its block contracts: steps get smaller."""
    model, (inputs, targets) = small(name), batch(name, 16)
    classes = VOCABULARY if name in ("language", "transformer") else CLASSES
    assert abs(loss_of(model, inputs, targets).item() - math.log(classes)) < 0.4
    if name in IMPLICIT:
        residuals = []
        for max_steps in (2, 8):
            for layer in model.equilibria:
                layer.max_steps = max_steps
            model(inputs)
            residuals.append(max(layer.last.change.item() for layer in model.equilibria))
        assert residuals[1] < 0.5 * residuals[0]


# Gradient


@pytest.mark.parametrize(("name", "form"), [*FORMS, ("puzzle", None)])
def test_gradient_is_that_of_the_stored_graph(name, form):
    """The logits are the same, bit for bit, with dropout too. A parameter's gradient is a sum of at most 2 * 3
    products, added up in another order: 2^-24 for each, and as much for the adjoint that goes into it, over the up
    to four blocks that it passes."""
    (inputs, targets), chosen = batch(name), {"form": form} if form else {}
    loss, ours = gradients(small(name, **chosen), inputs, targets)
    stored_loss, stored = gradients(small(name, **chosen, solver="stored"), inputs, targets)
    assert torch.equal(loss, stored_loss)
    for g, e in zip(ours, stored, strict=True):
        assert (g - e).norm() <= 4 * 2 * 6 * 2**-24 * e.norm()
    checkpointed_loss, again = gradients(small(name, **chosen, solver="checkpointed"), inputs, targets)
    assert torch.equal(loss, checkpointed_loss)
    assert all(torch.equal(a, b) for a, b in zip(again, stored, strict=True))


@pytest.mark.parametrize("name", IMPLICIT)
def test_exact_state(name):
    """Both passes give f the same inputs, bit for bit, far beyond the range of float64."""
    deep = {"max_steps": 24, "beta": 0.9, "check": "raise", "dropout": 0.0}
    if name != "language":
        del deep["dropout"]
    model, (inputs, targets) = small(name, state="exact", **deep), batch(name, 2)
    calls = []
    for layer in model.equilibria:
        layer.f.register_forward_pre_hook(lambda f, args: calls.append(args[0].detach().clone()))
    loss = loss_of(model, inputs, targets)
    forward = list(calls)
    calls.clear()
    loss.backward()
    assert len(forward) == len(calls) == 48 * len(model.equilibria) == model.last.nfe
    for before, again in zip(reversed(forward), calls, strict=True):
        assert torch.equal(before, again)
    model = small(name, state="float64", **deep)
    with pytest.raises(revdeq.ReconstructionError):
        loss_of(model, inputs, targets).backward()


def test_the_layer_passes_its_state_on():
    """An exact solve with 1 - beta = p / d is not the float64 one."""
    x = torch.randn(2, 16, 4, 4)
    f = ConvBlock(16)
    z = revdeq.RevDEQ(f, beta=0.8, max_steps=4, state="exact")(x)
    assert torch.equal(z, revdeq.solve(f, torch.zeros_like(x), x, beta=0.8, max_steps=4, state="exact").z)
    assert not torch.equal(z, revdeq.RevDEQ(f, beta=0.8, max_steps=4)(x))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("name", IMPLICIT)
def test_bfloat16_autocast(name, solver):
    """bfloat16 has 8 bits: a relative error of 2^-9 in each of some ten roundings in a row, in each evaluation."""
    model, (inputs, targets) = small(name, solver=solver, evaluations=None if solver != "torchdeq" else 6), batch(name)
    loss, _ = gradients(model, inputs, targets)
    torch.manual_seed(2)
    with torch.autocast("cpu", torch.bfloat16):
        lower = loss_of(model, inputs, targets)
    lower.backward()
    assert lower.item() != loss.item()
    assert abs(lower.item() / loss.item() - 1) < 10 * 2**-9
    for parameter in model.parameters():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad.isfinite().all()


@pytest.mark.parametrize("name", MODELS)
def test_a_small_model_memorizes_a_small_batch(name):
    model, (inputs, targets) = small(name, **({"dropout": 0.0} if name == "language" else {})), batch(name, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = loss_of(model, inputs, targets)
        if loss < 0.05:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05


# Other solvers


class Contraction(nn.Module):
    def __init__(self, d, width=1):
        super().__init__()
        self.weight, self.width = nn.Parameter(0.5 * torch.rand(d)), width

    def forward(self, z, x):
        return torch.tanh(z * self.weight.view((-1, 1, 1) if z.dim() == 4 else -1) + x)


@needs_torchdeq
@pytest.mark.parametrize("name", IMPLICIT)
def test_torchdeq_finds_the_same_fixed_point_and_gradient(name):
    """If f contracts by 1/2, 50 steps leave an error of 3/4^50 = 6e-7 (beta = 1/2). torchdeq's Anderson acceleration is
    regularised, and finally takes the mean of the last six iterates, 3.5 evaluations old: 2^-(60 / 3.5) = 7e-6."""
    settings = {"max_steps": 50, "beta": 0.5, "state": "exact", "block": Contraction}
    model, reference = small(name, block=Contraction, solver="torchdeq", evaluations=60), small(name, **settings)
    inputs, targets = batch(name)
    inputs = inputs.double() if inputs.is_floating_point() else inputs
    loss, theirs = gradients(model.double(), inputs, targets)
    expected_loss, expected = gradients(reference.double(), inputs, targets)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    for g, e in zip(theirs, expected, strict=True):
        assert (g - e).norm() <= 5e-5 * e.norm()


@needs_torchdeq
@pytest.mark.parametrize("name", IMPLICIT)
def test_torchdeq_trains(name):
    model, (inputs, targets) = small(name, solver="torchdeq", evaluations=8), batch(name, 2)
    optimizer, losses = torch.optim.Adam(model.parameters(), lr=1e-2), []
    for _ in range(12):
        losses.append(loss_of(model, inputs, targets))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.8 * losses[0]
    assert model.last.nfe == 9 * len(model.equilibria)
    with torch.no_grad():
        model(inputs)
    assert model.last.nfe == 8 * len(model.equilibria)


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_solve_has_one_dropout_mask(solver):
    """And the generator continues from its state after one evaluation, with every solver and backward pass."""
    masks = []
    model = small("language", solver=solver, dropout=0.5, max_steps=3)
    block = model.equilibrium.f
    for module in (block.attention, block.mlp):
        module.register_forward_hook(lambda module, args, out: 0 * out + 1)
    block.norm1.register_forward_pre_hook(lambda module, args: masks.append(args[0].detach().clone()))
    inputs, targets = batch("language")
    torch.manual_seed(3)
    loss = loss_of(model, inputs, targets)
    after_forward = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), after_forward)
    assert len(masks) >= 6
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    assert 0.3 < (masks[0] == 0).float().mean() < 0.7
    masks.clear()
    loss_of(model, inputs, targets)
    torch.manual_seed(3)
    block(torch.zeros(3, LENGTH, 16), torch.zeros(3, LENGTH, 16))
    assert torch.equal(torch.get_rng_state(), after_forward)
    assert not torch.equal(masks[0], masks[-1])


@pytest.mark.parametrize("solver", ["reversible", "stored", "checkpointed"])
@pytest.mark.parametrize("name", IMPLICIT)
def test_last(name, solver):
    model, (inputs, _) = small(name, solver=solver), batch(name)
    assert model.last is None
    with torch.no_grad():
        model(inputs)
    assert model.last.nfe == 2 * model.last.steps == EVALUATIONS[name]
    reference = small(name)
    reference(inputs)
    for ours, theirs in zip(model.equilibria, reference.equilibria, strict=True):
        torch.testing.assert_close(ours.last.change.double(), theirs.last.change, rtol=1e-5, atol=1e-7)
    assert small("resnet").last is small("transformer").last is None


def test_tol_ends_a_solve():
    model = small("multi-scale", max_steps=50, tol=1e-2)
    model(batch("multi-scale")[0])
    assert all(1 < layer.last.steps < 50 and layer.last.change <= 1e-2 for layer in model.equilibria)


# Modules


@pytest.mark.parametrize("name", MODELS)
def test_modes(name):
    """Evaluation is deterministic, for one image or many, and training mode only changes BatchNorm."""
    model, (inputs, _) = small(name), batch(name)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    model(inputs)
    moved = {name.rsplit(".", 1)[0] for name, x in model.named_buffers() if not torch.equal(x, buffers[name])}
    assert moved == {name for name, x in model.named_modules() if isinstance(x, nn.BatchNorm2d)}
    assert not any(name.startswith(("equilibrium.", "scales.")) for name in moved)
    model.eval()
    together = model(inputs)
    assert torch.equal(together, model(inputs))
    apart = torch.cat([model(x[None]) for x in inputs])
    torch.testing.assert_close(together, apart, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_copies_and_checkpoints(name):
    model, (inputs, targets) = small(name), batch(name)
    gradients(model, inputs, targets)
    twin = copy.deepcopy(model)
    torch.manual_seed(9)
    other = MODELS[name](**SMALL[name])
    other.load_state_dict(model.state_dict())
    loss, expected = gradients(model, inputs, targets)
    for again in (twin, other):
        again_loss, ours = gradients(again, inputs, targets)
        assert torch.equal(loss, again_loss)
        assert all(torch.equal(g, e) for g, e in zip(ours, expected, strict=True))
    if name in IMPLICIT:  # with every solver
        stored = small(name, solver="stored")
        assert stored.load_state_dict(model.state_dict()).missing_keys == []


@pytest.mark.parametrize("name", IMPLICIT)
def test_models_pass_every_option_on(name):
    """A new option of `revdeq.solve` is an option of the models, without changing them."""
    other = {"beta": 0.7, "gamma": 0.9, "tol": 1e-2, "state": "exact", "check": None, "keep": 1, "backward_steps": 2}
    model = small(name, **other)
    for layer in model.equilibria:
        assert {key: layer.options[key] for key in other} == other
    learnt = small(name, learn_coefficients=True)
    assert all(len(layer.learnt) == 2 * layer.max_steps for layer in learnt.equilibria)
    with pytest.raises(TypeError, match="unknown keyword betta = 0.5: did you mean beta?"):
        small(name, betta=0.5)
    for solver, option in (
        ("torchdeq", {"gamma": 0.9}),
        ("stored", {"keep": 2}),
        ("stored", {"learn_coefficients": True}),
        ("checkpointed", {"state": "exact"}),
    ):
        if solver != "torchdeq" or torchdeq:
            with pytest.raises(ValueError, match=f"belongs to solver = 'reversible'; with '{solver}' leave it out"):
                small(name, solver=solver, **option)


def test_a_custom_block():
    for name in IMPLICIT:
        model = small(name, block=Contraction)
        _, ours = gradients(model, *batch(name))
        assert all(isinstance(layer.f, Contraction) for layer in model.equilibria)
        assert all(g.norm() > 0 for g in ours)
    assert [layer.f.width for layer in small("multi-scale", block=Contraction).equilibria] == [1, 2, 2, 1]


# Bad input


def test_bad_arguments():
    for model, settings, message in [
        (SingleScale, {"channels": 0}, "channels = 0 must be an integer of at least 1"),
        (SingleScale, {"channels": 56}, r"56 channels \(.*\) cannot be split into 3 groups.*multiple of 16"),
        (SingleScale, {"max_steps": 0}, "max_steps = 0 must be at least 1"),
        (SingleScale, {"classes": 2.5}, "classes = 2.5 must be an integer"),
        (SingleScale, {"beta": 1}, "beta = 1 must not be 1"),
        (SingleScale, {"state": "float32"}, "state = 'float32' must be 'auto', 'float64', 'exact'"),
        (SingleScale, {"check": "maybe"}, "check = 'maybe' must be 'warn'"),
        (SingleScale, {"solver": "newton"}, "solver = 'newton' must be one of 'reversible', 'stored'"),
        (SingleScale, {"solver": "stored", "tol": 1e-3}, "tol = 0.001: solver = 'stored'.*tol=None"),
        (SingleScale, {"solver": "torchdeq", "state": "exact"}, "state = 'exact' belongs to solver = 'reversible'"),
        (SingleScale, {"solver": "torchdeq", "evaluations": 2}, "evaluations = 2 must be at least 3"),
        (SingleScale, {"form": "code"}, r"form = 'code' must be one of 'paper' \(as printed\), 'authors' \(as in"),
        (MultiScale, {"channels": 32}, "channels = 32 must be a list of numbers"),
        (MultiScale, {"widths": (1, 2)}, r"widths = \(1, 2\) must be 4 numbers, one for each scale"),
        (MultiScale, {"max_steps": (1, 4, 0, 1)}, r"max_steps\[2\] = 0 must be an integer of at least 1"),
        (LanguageModel, {"d": 30, "wide_heads": False}, "d = 30 is not a multiple of heads = 8"),
        (LanguageModel, {"dropout": 1.0, "d": 8}, r"dropout = 1.0 must be a probability in \[0, 1\)"),
        (LanguageModel, {"vocabulary": -1}, "vocabulary = -1 must be an integer"),
        (LanguageModel, {"d": 8, "heads": 2, "wide_heads": "no"}, "wide_heads = 'no' .*true or false"),
        (PuzzleModel, {"noise": -1}, "noise = -1 .*at least 0"),
        (Transformer, {"depth": 0, "d": 8}, "depth = 0 must be an integer"),
        (ResNet, {"depth": (1, 2)}, r"depth = \(1, 2\) must be 4 numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            model(**settings)


def test_bad_inputs():
    image, language = small("single-scale"), small("language")
    for model in (image, small("multi-scale"), small("resnet")):
        with pytest.raises(ValueError, match=r"images of shape \(3, 16, 16\).*\(B, 3, H, W\)"):
            model(torch.zeros(3, 16, 16))
        with pytest.raises(TypeError, match="images are torch.uint8.*floating point"):
            model(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
    for model in (language, small("transformer")):
        with pytest.raises(ValueError, match="tokens of length 13.*length = 12.*truncate"):
            model(torch.zeros(2, 13, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"tokens of shape \(12,\)"):
            model(torch.zeros(12, dtype=torch.int64))
        with pytest.raises(TypeError, match="tokens are torch.float32"):
            model(torch.zeros(2, 12))
        with pytest.raises(IndexError, match="tokens from 0 to 50: they must lie between 0 and vocabulary - 1 = 49"):
            model(torch.tensor([[0, 50]]))


def test_without_torchdeq(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchdeq", None)
    with pytest.raises(ImportError, match=r"pip install torchdeq, or use solver='reversible'"):
        small("language", solver="torchdeq")


def test_repr_says_how_it_is_solved():
    assert "beta=0.5, max_steps=4" in repr(Equilibrium(ConvBlock(16), max_steps=4))
    assert "solver='stored'" in repr(Equilibrium(ConvBlock(16), solver="stored"))


# Text, position by position

ROUNDING = 1e-5
"""Of logits: a position is 2 N evaluations of float32 in another order of summation, each of some 1e-7 relative, which
a block that is at most a few times as steep as the identity does not make more than tens of times as large."""
SCHEDULE = [(0.4, 1.0), (0.6, 0.8), (0.5, 1.1)]
DECODING = [
    *(("language", {"form": form, "state": state}) for form in LANGUAGE_FORMS for state in ("float64", "exact")),
    *(("language", {"schedule": SCHEDULE, "state": state}) for state in ("float64", "exact")),
    ("language", {"gamma": 0.7, "wide_heads": False}),
    ("transformer", {}),
]


class Numbered(nn.Module):
    """Two attentions, a different scale in every evaluation, rotated positions, and an auxiliary output."""

    def __init__(self, d):
        super().__init__()
        self.first, self.second = TransformerBlock(d, 2), TransformerBlock(d, 2)
        self.scale = nn.Parameter(torch.rand(12) + 0.5)

    def forward(self, z, x, cache=None, evaluation=0):
        positions = torch.arange(z.shape[1]) if cache is None else cache.positions
        z = self.first(self.scale[evaluation] * z, x + positions.sin()[..., None], cache)
        return self.second(z, x, cache), z.mean()


OWN = {"block": Numbered, "indexed": True, "aux": True}


def fed(model, texts, lengths, **given):
    """The logits at every position from the last one of each prompt, (B, positions, vocabulary): for prompts of these
    lengths, and then token by token."""
    decoder = Decoder(model, [text[:n] for text, n in zip(texts, lengths, strict=True)], LENGTH, **given)
    logits = [decoder.logits()]
    for i in range(LENGTH - max(lengths)):
        decoder.append(torch.stack([text[n + i] for text, n in zip(texts, lengths, strict=True)]))
        logits.append(decoder.logits())
    return torch.stack(logits, 1)


@pytest.mark.parametrize("lengths", [(1, 1, 1), (5, 5, 5), (2, 6, 3)])
@pytest.mark.parametrize(("name", "settings"), DECODING)
@torch.no_grad()
def test_caches_give_the_logits_of_the_whole_sequence(name, settings, lengths):
    model, texts = small(name, **settings).eval(), batch(name)[0]
    whole, found = model(texts), fed(model, texts, lengths)
    for row, n, expected in zip(found, lengths, whole, strict=True):
        expected = expected[n - 1 : n - 1 + len(row)]
        assert ((row - expected).norm(dim=-1) <= ROUNDING * expected.norm(dim=-1)).all()
        assert len(row) == LENGTH - max(lengths) + 1


@pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 6, 3)])
@pytest.mark.parametrize(("name", "settings"), [*DECODING[:-1], ("language", OWN)])
@torch.no_grad()
def test_with_a_tolerance_caches_give_the_logits_of_each_position_by_itself(name, settings, lengths):
    """Frozen positions are evaluated late, if a later one takes more steps. Also for a block with two attentions, whose
    second one depends on the positions that still change."""
    model, texts = small(name, check=None, **settings).eval(), batch(name)[0]
    model(texts, tol=1e-9)
    changes = model.equilibrium.last.change.flatten().sort().values[9:27]
    widest = changes.diff().argmax()  # so that rounding changes no number of steps
    model.equilibrium.max_steps, tol = 6, changes[widest : widest + 2].mean().item()
    whole = model(texts, tol=tol)
    steps = model.equilibrium.last.steps
    assert steps.shape == texts.shape and 3 in steps and steps.max() > 3
    for row, n, expected in zip(fed(model, texts, lengths, tol=tol), lengths, whole, strict=True):
        expected = expected[n - 1 : n - 1 + len(row)]
        assert ((row - expected).norm(dim=-1) <= ROUNDING * expected.norm(dim=-1)).all()


@pytest.mark.parametrize("state", ["float64", "exact"])
@pytest.mark.parametrize("schedule", [None, SCHEDULE])
@pytest.mark.parametrize("gamma", [1.0, 0.7])
@torch.no_grad()
def test_the_iteration_without_a_graph_has_the_bits_of_a_solve(state, schedule, gamma):
    torch.manual_seed(0)
    block, x = TransformerBlock(16, 2, form="pre-norm"), torch.randn(2, 5, 16)
    options = {"max_steps": 40, "beta": 0.9, "gamma": gamma, "state": state, "schedule": schedule}  # remainders spill
    seen = []

    def f(z, k):
        seen.append(k)
        return block(z, x).transpose(0, 1).contiguous().transpose(0, 1)  # another layout

    found = forward(f, torch.zeros_like(x), Options(**options)).z
    expected = revdeq.solve(lambda z: f(z, 0), torch.zeros_like(x), **options).z
    assert torch.equal(found, expected) and found.stride() == expected.stride()
    assert seen[:80] == list(range(80))


def test_the_iteration_without_a_graph_notices_an_overflow():
    with pytest.raises(OverflowError, match="fraction_bits"):
        forward(lambda z, k: z + 1000, torch.zeros(3), Options(state="exact"))


@pytest.mark.parametrize("settings", [{}, {"slide": LENGTH // 2}, {"slide": LENGTH}])
@pytest.mark.parametrize("name", ["language", "transformer"])
def test_greedy_text_is_that_of_the_whole_sequence(name, settings):
    """Also beyond the window, from prompts of different lengths, one of them longer than the window."""
    model = small(name, dropout=0.5)
    texts = batch(name)[0]
    prompts = [texts[0][:3], texts[1][:1], torch.cat([texts[2], texts[0]])]
    found = model.generate(prompts, 2 * LENGTH, **settings)
    assert model.training and all(module.training for module in model.modules())
    for a, b, prompt in zip(
        found, model.generate(prompts, 2 * LENGTH, use_cache=False, **settings), prompts, strict=True
    ):
        assert torch.equal(a, b) and torch.equal(a[: len(prompt)], prompt) and len(a) == len(prompt) + 2 * LENGTH
        assert torch.equal(a, model.generate([prompt], 2 * LENGTH, **settings)[0])  # independent of the other texts
    if not settings:  # the window moves by one token, so that each token is the model's choice after those before it
        with torch.no_grad():
            text = found[0]
            for i in range(3, len(text)):
                assert model.eval()(text[None, max(0, i - LENGTH) : i])[0, -1].argmax() == text[i]


def test_greedy_text_with_a_tolerance():
    """Each text is generated as if it were alone, also beyond the window."""
    model, prompts = small("language", max_steps=6, check=None), [[3, 4, 5], [7]]
    settings = {"max_new_tokens": LENGTH, "slide": 4, "tol": 0.1}
    found = model.generate(prompts, **settings)
    assert not torch.equal(found[0], model.generate(prompts[:1], LENGTH, slide=4)[0])
    for prompt, text, whole in zip(prompts, found, model.generate(prompts, use_cache=False, **settings), strict=True):
        assert torch.equal(text, whole) and torch.equal(text, model.generate([prompt], **settings)[0])
    with pytest.raises(ValueError, match="tol = 0.1.*no equilibrium"):
        small("transformer").generate(prompts, tol=0.1)
    with pytest.raises(ValueError, match="tol = 0.1.*'stored'.*'reversible'"):
        small("language", solver="stored")(torch.tensor(prompts[:1]), tol=0.1)


def test_a_larger_slide_evaluates_the_window_less_often(monkeypatch):
    widths, model = [], small("language")
    decoded = LanguageModel._decoded
    monkeypatch.setattr(
        LanguageModel, "_decoded", lambda self, x, caches: widths.append(x.shape[1]) or decoded(self, x, caches)
    )
    model.generate([[1]], LENGTH + 8, slide=4)
    assert widths == [1] * LENGTH + [LENGTH - 3, 1, 1, 1] * 2
    widths.clear()
    model.generate([[1]], LENGTH + 2)
    assert widths == [1] * LENGTH + [LENGTH] * 2


def test_sampling_takes_the_usual_arguments():
    model, prompt = small("language"), torch.tensor([[3, 4], [0, 5]])

    def drawn(seed=0, **settings):
        generator = torch.Generator().manual_seed(seed)
        return model.generate(prompt, 6, do_sample=True, generator=generator, **settings)

    assert drawn().shape == (2, 8) and torch.equal(drawn(), drawn()) and not torch.equal(drawn(), drawn(1))
    likeliest = model.generate(prompt, 6)
    assert torch.equal(likeliest, drawn(top_k=1)) and torch.equal(likeliest, drawn(top_p=1e-6))
    assert torch.equal(likeliest, drawn(temperature=1e-6)) and not torch.equal(likeliest, drawn(temperature=9.0))
    assert torch.equal(prompt, likeliest[:, :2]) and likeliest.dtype == prompt.dtype
    mask = torch.tensor([[1, 1], [0, 1]])
    assert torch.equal(model.generate(prompt, 6, attention_mask=mask)[1, 2:], model.generate([[5]], 6)[0][1:])
    for settings, message in (
        ({"temperature": 0.5}, "temperature = 0.5.*do_sample=True"),
        ({"do_sample": True, "temperature": -1.0}, "temperature = -1.0"),
        ({"do_sample": True, "top_k": 0}, "top_k = 0"),
        ({"do_sample": True, "top_p": 1.5}, "top_p = 1.5"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"slide": LENGTH + 1}, f"slide = {LENGTH + 1}.*length = {LENGTH}"),
        ({"tol": 0.0}, "tol = 0.0.*None"),
        ({"attention_mask": mask.flip(1)}, "attention_mask.*left"),
        ({"attention_mask": mask[:1]}, "attention_mask.*shape of tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(prompt, **settings)
    for tokens, error in (([], ValueError), ([[]], ValueError), (prompt[0], ValueError), (prompt.float(), TypeError)):
        with pytest.raises(error, match="tokens"):
            model.generate(tokens)


def test_a_text_stops_at_its_end_token():
    model, prompt = small("language"), torch.tensor([[3, 4], [7, 5]])
    free = model.generate(prompt, 10)
    end = free[0, 5].item()
    ends = [row[2:].tolist().index(end) if end in row[2:] else 9 for row in free]  # where each text ends
    found = model.generate(prompt, 10, eos_token_id=end, pad_token_id=49)
    assert found.shape[1] == 3 + max(ends)
    for row, all_of_it, last in zip(found, free, ends, strict=True):
        assert torch.equal(row[: 3 + last], all_of_it[: 3 + last]) and (row[3 + last :] == 49).all()
    listed = model.generate(list(prompt), 10, eos_token_id=[end])
    assert [len(text) for text in listed] == [3 + last for last in ends]


class Blind(nn.Module):
    """It takes no cache."""

    def __init__(self, d):
        super().__init__()
        self.inner = TransformerBlock(d, 2)

    def forward(self, z, x):
        return self.inner(z, x)


@needs_torchdeq
def test_blocks_without_caches_evaluate_the_whole_sequence_and_warn():
    for settings, message in (
        ({"block": Blind}, "Blind takes no cache.*cache=None"),
        ({"tol": 1e-3}, r"tol = 0.001.*tol=None.*generate\(tol="),
        ({"solver": "torchdeq"}, "solver = 'torchdeq'.*'reversible'"),
    ):
        model = small("language", **settings)
        with pytest.warns(UserWarning, match=f"whole sequence: {message}"):
            text = model.generate([[3, 4]], 4)[0]
        assert torch.equal(text, model.generate([[3, 4]], 4, use_cache=False)[0])


@torch.no_grad()
def test_a_custom_block_with_caches_indices_and_aux():
    model, texts = small("language", **OWN).eval(), batch("language")[0]
    whole, lengths = model(texts), (2, 6, 3)
    for row, n, expected in zip(fed(model, texts, lengths), lengths, whole, strict=True):
        expected = expected[n - 1 : n - 1 + len(row)]
        assert ((row - expected).norm(dim=-1) <= ROUNDING * expected.norm(dim=-1)).all()


def test_text_under_autocast():
    model = small("language", form="pre-norm")
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        model.eval()
        whole, found = model(batch("language")[0]), fed(model, batch("language")[0], (4, 4, 4))
    # A few roundings of bfloat16, of 2^-9 each, in each of 6 evaluations, which a norm at the end keeps in bounds.
    assert ((found - whole[:, 3:]).norm() / whole[:, 3:].norm()).item() <= 6 * 4 * 2**-9


def test_the_memory_of_the_caches():
    model = small("language")
    decoder = Decoder(model, [torch.tensor([1, 2])] * 3, 5)
    with torch.no_grad():
        decoder.logits()
    wide = 2 * 16  # two heads of the full size
    assert decoder.caches.bytes == 6 * 2 * 3 * (2 + 5) * wide * 4  # evaluations, keys and values, texts, positions


def test_a_logit_that_is_not_finite_is_an_error():
    model = small("language")
    with torch.no_grad():
        model.equilibrium.f.norm2.bias.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="token 0 is not finite.*beta"):
        model.generate([[1]])
