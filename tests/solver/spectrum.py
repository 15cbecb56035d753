"""The theory of the coefficients, for an f with known eigenvalues."""

import math

import torch


def best_coefficients(p: float, q: float = 0.0, c: float = 0.0) -> tuple[float, float, float]:
    """The best beta and gamma, and the error reduction per evaluation, if the eigenvalues of f's Jacobian fill an
    ellipse with centre c and half-axes p (real) and q (imaginary)."""
    if not c + p < 1:
        raise ValueError(f"c + p = {c + p} must be below 1: otherwise no pair converges")
    gamma = 1 / (1 - c)
    p, q = gamma * p, gamma * q
    s = math.sqrt(1 + q * q - p * p)
    return 2 / (1 + s), gamma, (p + q) / (1 + s)


def rate(eigenvalues: torch.Tensor, beta: float, gamma: float = 1.0) -> float:
    """The asymptotic error reduction per evaluation, for these eigenvalues of f's Jacobian."""
    moved = beta * (1 - gamma + gamma * eigenvalues.to(torch.complex128))
    root = torch.sqrt(moved.square() + 4 * (1 - beta))
    return torch.stack([(moved + root).abs(), (moved - root).abs()]).max().item() / 2
