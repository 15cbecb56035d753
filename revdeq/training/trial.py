"""Checks that a model can be trained, before the training begins."""

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
    """Try a model on two examples, and raise if it cannot be trained.

    Args:
        model: The model; a copy of it is tried.
        what: Its name in messages.
        batch: A batch of the training.
        dtype: The dtype of autocast.
        device: The device of the model.
        text: Whether it predicts the next token, and so must be causal.
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
            f"{what} cannot be trained on this data (tried with inputs of shape {tuple(inputs.shape)}): {wrong}"
        )


def check_parameters(model: nn.Module) -> None:
    name = type(model).__name__
    if any(nn.parameter.is_lazy(p) for p in model.parameters()):
        raise SettingError(
            f"model={name} has lazy layers with uninitialized parameters: call it once with a batch of inputs "
            "before training"
        )
    if not any(p.requires_grad for p in model.parameters()):
        raise SettingError(
            f"model={name} has no parameters that require a gradient: call model.requires_grad_() on those to train"
        )


@torch.no_grad()
def _looks_ahead(model: nn.Module, inputs: Tensor, vocabulary: int) -> str:
    """Why the model is not causal, or an empty string."""
    model.eval()
    for layer in model.modules():
        if isinstance(layer, RevDEQ):
            # A stopping test depends on all positions.
            layer.tol, layer.per_example, layer.compact = None, False, False
    other = inputs.clone()
    other[:, -1] = (other[:, -1] + 1) % vocabulary
    before, after = (model(tokens)[:, :-1].float() for tokens in (inputs, other))
    if (after - before).abs().max() <= 1e-3 * before.abs().max():
        return ""
    return "its prediction of a token depends on that token: make it causal"


def _misfit(outputs: Any, targets: Tensor) -> str:
    """Why no loss can be computed from these, or an empty string."""
    if not isinstance(outputs, Tensor):
        return f"it returns a {type(outputs).__name__}; it must return a tensor"
    shape, expected = tuple(outputs.shape), tuple(targets.shape)
    if targets.is_floating_point():
        if shape == expected:
            return ""
        classes = (
            "; if the targets are classes, pass targets.long()" if bool((targets == targets.round()).all()) else ""
        )
        return f"it returns the shape {shape}; it must return that of targets, {expected}{classes}"
    if shape[:-1] != expected:
        wanted = ", ".join([*map(str, expected), "classes"])
        return f"it returns the shape {shape}; it must return ({wanted}) for targets of shape {expected}"
    return ""


def no_model(model: Any) -> str:
    """The message for a model that is neither a module nor a preset."""
    name = getattr(model, "__name__", "model")
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f"model is the class {name}: create an instance, train({name}(...), ...)"
    if callable(model):
        return f"model is a function: call it, train({name}(), ...)"
    return f"model is of type {type(model).__name__}: pass a module, or the name of a preset"
