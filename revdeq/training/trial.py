"""What cannot be trained, said before the training begins."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .._solver.layer import RevDEQ
from . import checkpoint
from .data.dataset import Batch
from .evaluation import autocast, loss_of, not_finite, out_of_range
from .presets import SettingError


def try_out(
    model: nn.Module, what: str, batch: Batch, dtype: str | None, device: torch.device, text: bool = False
) -> None:
    """What is wrong with a model or a block of one's own is said now, of two examples, and not in the middle.

    Args:
        model: It is copied first.
        what: How messages call it.
        batch: Of the training.
        dtype: Of its autocast.
        device: That of the model.
        text: Whether it predicts the next token of each, and so may not see it.
    """
    generators = checkpoint.generators(device)
    classes, doubt = batch.targets, not_finite(batch.inputs, batch.targets)
    inputs, targets = batch.inputs[:2], batch.targets[:2]
    model = copy.deepcopy(model).train()
    try:
        with torch.autocast(device.type, **autocast(dtype)):
            outputs = model(inputs)
        wrong = _misfit(outputs, targets) or out_of_range(outputs, classes)
        if not wrong:
            loss_of(outputs, targets).backward()
            wrong = _looks_ahead(model, inputs, outputs.shape[-1]) if text else ""
    except (RuntimeError, TypeError, ValueError, IndexError, ArithmeticError) as error:
        wrong = f"{type(error).__name__}: {error}"
        wrong = f"{doubt} ({wrong})" if doubt else wrong
    finally:
        checkpoint.restore_generators(generators, device)
    if wrong:
        raise SettingError(
            f"{what} cannot be trained on this data, inputs of shape {tuple(inputs.shape)}, tried with two examples: "
            f"{wrong}"
        )


def check_parameters(model: nn.Module) -> None:
    name = type(model).__name__
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise SettingError(
            f"model={name} has lazy layers, whose parameters are not there yet: call it with a batch of inputs once, "
            "and train it then"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise SettingError(
            f"model={name} has no parameter that requires a gradient, and so nothing to train: use "
            "model.requires_grad_() on what is to learn"
        )


@torch.no_grad()
def _looks_ahead(model: nn.Module, inputs: Tensor, vocabulary: int) -> str:
    """Why what it learns would be worthless: it need only copy."""
    model.eval()
    for layer in model.modules():
        if isinstance(layer, RevDEQ):
            layer.tol = None  # all would stop when the last of them has arrived
    other = inputs.clone()
    other[:, -1] = (other[:, -1] + 1) % vocabulary
    before, after = (model(tokens)[:, :-1].float() for tokens in (inputs, other))
    if (after - before).abs().max() <= 1e-3 * before.abs().max():
        return ""
    return "what it says of a token depends on the token after it, which is the answer: make it causal"


def _misfit(outputs: Any, targets: Tensor) -> str:
    """Why there is no loss of these."""
    if not isinstance(outputs, Tensor):
        return f"it returns a {type(outputs).__name__}, and must return a tensor"
    shape, expected = tuple(outputs.shape), tuple(targets.shape)
    if targets.is_floating_point():
        return "" if shape == expected else f"it returns the shape {shape}, and must return that of targets, {expected}"
    if shape[:-1] != expected:
        return f"it returns the shape {shape}, and must return {(*expected, 'classes')} for targets of shape {expected}"
    return ""


def no_model(model: Any) -> str:
    """Why something that is neither a module nor a preset cannot be trained."""
    name = getattr(model, "__name__", "model")
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f"model is the class {name}: make one, train({name}(...), ...)"
    if callable(model):
        return f"model is a function: call it, train({name}(), ...)"
    return f"model is of type {type(model).__name__}: pass a module, or the name of a preset"
