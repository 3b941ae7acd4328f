# SPDX-License-Identifier: Apache-2.0
"""What the maths in this package shares: precision, means over a sample, and one value per row."""

import torch
from torch import Tensor


def at_least_float32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast to float32, or to float64 where a tensor has it. Half precision loses the mean of a transition."""
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    return tuple(tensor.to(dtype) for tensor in tensors)


def sample_mean(values: Tensor) -> Tensor:
    """Mean over every dimension but the first: `(B, ...)` to `(B,)`."""
    return values.flatten(1).mean(1)


def per_row(value: Tensor | float, like: Tensor, name: str) -> Tensor:
    """A scalar, `(B,)` or `(B, 1, ..., 1)` as `(B,)` or `(1,)` beside `like` of shape `(B, ...)`."""
    rows = torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1)
    if rows.numel() not in (1, like.shape[0]):
        raise ValueError(
            f"`{name}` has one value for all rows or one per row, got shape {tuple(torch.as_tensor(value).shape)} for "
            f"{like.shape[0]} rows: pass a scalar or shape ({like.shape[0]},)."
        )
    return rows


def check_same_shape(**tensors: Tensor) -> None:
    """Refuse tensors that would broadcast: a silent `(B, 1)` against `(B,)` is a `(B, B)` loss."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"`{name}` {shape}" for name, shape in shapes.items())
        first = next(iter(shapes.values()))
        raise ValueError(f"These tensors must have one shape, got {listed}: reshape them to {first}.")
