"""What cannot be trained, said before the training begins."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from . import checkpoint
from .data.dataset import Batch
from .evaluation import autocast, loss_of
from .presets import SettingError


def try_out(model: nn.Module, what: str, batch: Batch, dtype: str | None, device: torch.device) -> None:
    """What is wrong with a model or a block of one's own is said now, of two examples, and not in the middle.

    Args:
        model: It is copied first.
        what: How messages call it.
        batch: Of the training.
        dtype: Of its autocast.
        device: That of the model.
    """
    generators = checkpoint.generators(device)
    classes, doubt = batch.targets, not_finite(batch.inputs, batch.targets)
    inputs, targets = batch.inputs[:2], batch.targets[:2]
    model = copy.deepcopy(model).train()
    try:
        with torch.autocast(device.type, **autocast(dtype)):
            outputs = model(inputs)
        wrong = _misfit(outputs, targets) or _out_of_range(outputs, classes)
        if not wrong:
            loss_of(outputs, targets).backward()
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


def not_finite(inputs: Tensor, targets: Tensor) -> str:
    """Where a batch has NaN or infinity in it. Some models take these, and so they are looked for only in trouble."""
    for name, part in (("inputs", inputs), ("targets", targets)):
        if not bool(part.isfinite().all()):
            return f"{name} in this batch are NaN or infinite: clean the data, with {name}.isfinite(), for example"
    return ""


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


def _out_of_range(outputs: Tensor, targets: Tensor) -> str:
    if targets.is_floating_point() or 0 <= int(targets.min()) <= int(targets.max()) < outputs.shape[-1]:
        return ""
    low, high = int(targets.min()), int(targets.max())
    return f"it tells {outputs.shape[-1]} classes apart, and targets go from {low} to {high}: they are counted from 0"


def no_model(model: Any) -> str:
    """Why something that is neither a module nor a preset cannot be trained."""
    name = getattr(model, "__name__", "model")
    if isinstance(model, type) and issubclass(model, nn.Module):
        return f"model is the class {name}: make one, train({name}(...), ...)"
    if callable(model):
        return f"model is a function: call it, train({name}(), ...)"
    return f"model is of type {type(model).__name__}: pass a module, or the name of a preset"
