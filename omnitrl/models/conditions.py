# SPDX-License-Identifier: Apache-2.0
"""What a network is conditioned on, as one batch that can be sliced, joined and moved."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


MASK_SUFFIX = "_mask"


def _pad_to(tensor: Tensor, length: int) -> Tensor:
    """Zero-pads dim 1 of `tensor` to `length`."""
    missing = length - tensor.shape[1]
    if missing == 0:
        return tensor
    padding = tensor.new_zeros(tensor.shape[0], missing, *tensor.shape[2:])
    return torch.cat([tensor, padding], dim=1)


def _join(key: str, parts: list[Tensor], masked: bool) -> Tensor:
    """Concatenates along the batch; masked sequences of unequal length are padded to the longest."""
    lengths = {part.shape[1] for part in parts if part.dim() > 1}
    if masked and len(lengths) > 1:
        parts = [_pad_to(part, max(lengths)) for part in parts]
    elif len({part.shape[1:] for part in parts}) > 1:
        shapes = sorted({tuple(part.shape[1:]) for part in parts})
        raise ValueError(
            f"Conditions '{key}' have the unequal shapes {shapes} and no '{key}{MASK_SUFFIX}', so padding them would "
            "change what the network sees: encode all prompts with the same `max_sequence_length`."
        )
    return torch.cat(parts, dim=0)


@dataclass
class Conditions:
    """
    A batch of network inputs that come from the prompt (and, for editing models, from images).

    Args:
        positive (`dict[str, Tensor]`):
            Named tensors, each with the batch as first dimension. A tensor `x` of shape `(B, L, ...)` whose rows have
            unequal lengths comes with a boolean `x_mask` of shape `(B, L)`; such tensors are padded when batches of
            different lengths are joined.
        negative (`dict[str, Tensor]`, *optional*):
            The same names for the negative prompt; empty when no classifier-free guidance is used.
        layouts (`tuple`, *optional*):
            For each row what the network must know beside tensors, such as the sizes of condition images: anything
            hashable. Rows of different layouts need network calls of their own.

    Example:

    ```python
    >>> conditions = Conditions({"prompt_embeds": torch.randn(4, 77, 64)})
    >>> len(conditions[[0, 0, 2]])
    3
    ```
    """

    positive: dict[str, Tensor]
    negative: dict[str, Tensor] = field(default_factory=dict)
    layouts: tuple[Hashable, ...] = ()

    def __post_init__(self) -> None:
        sizes = {key: tensor.shape[0] for key, tensor in (*self.positive.items(), *self.negative.items())}
        if len(set(sizes.values())) != 1:
            raise ValueError(f"Conditions need one batch size in all tensors, got {sizes or 'no tensors'}.")
        if self.layouts and len(self.layouts) != len(self):
            raise ValueError(
                f"Conditions have {len(self)} rows but {len(self.layouts)} layouts: give one for each row."
            )

    def __len__(self) -> int:
        return next(iter(self.positive.values())).shape[0]

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> Conditions:
        if isinstance(index, int):
            index = [index]
        rows: slice | Tensor
        if isinstance(index, slice):
            layouts, rows = self.layouts[index], index
        else:
            chosen = index.tolist() if isinstance(index, Tensor) else index
            layouts = tuple(self.layouts[i] for i in chosen) if self.layouts else ()
            rows = torch.as_tensor(index, device=next(iter(self.positive.values())).device)
        positive, negative = (
            trimmed({key: tensor[rows] for key, tensor in part.items()}) for part in (self.positive, self.negative)
        )
        return Conditions(positive, negative, layouts)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Conditions:
        """Moves all tensors to `device`; `dtype` applies to the floating-point ones."""
        return self._map(
            lambda tensor: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None),
        )

    @property
    def num_bytes(self) -> int:
        """Size of all tensors, in bytes."""
        tensors = [*self.positive.values(), *self.negative.values()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @staticmethod
    def cat(parts: Sequence[Conditions]) -> Conditions:
        """Joins batches; sequences with a mask are padded to the longest, others must have equal shapes."""

        def join(dicts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
            names = {tuple(sorted(d)) for d in dicts}
            if len(names) > 1:
                raise ValueError(f"Conditions to be joined have different tensors: {sorted(names)}.")
            return {key: _join(key, [d[key] for d in dicts], _is_masked(key, dicts[0])) for key in dicts[0]}

        layouts = tuple(layout for part in parts for layout in part.layouts)
        return Conditions(join([part.positive for part in parts]), join([part.negative for part in parts]), layouts)

    def guided(self) -> dict[str, Tensor]:
        """Negative and positive rows as one batch of `2B`, negatives first, as the stock pipelines order them."""
        if not self.negative:
            raise ValueError("Guidance needs negative conditions: call `encode(rows, guidance=True)`.")
        both = Conditions.cat([Conditions(self.negative), Conditions(self.positive)])
        return both.positive

    def _map(self, function: Callable[[Tensor], Tensor]) -> Conditions:
        return Conditions(
            {key: function(tensor) for key, tensor in self.positive.items()},
            {key: function(tensor) for key, tensor in self.negative.items()},
            self.layouts,
        )


def trimmed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Masked sequences cut to the longest of these rows: what is padding in all of them costs time for nothing."""
    result = dict(tensors)
    for name, mask in tensors.items():
        if not name.endswith(MASK_SUFFIX):
            continue
        length = int(mask.any(dim=0).nonzero().max()) + 1 if bool(mask.any()) else 1
        for key in (name, name.removesuffix(MASK_SUFFIX)):
            result[key] = tensors[key][:, :length]
    return result


def _is_masked(key: str, tensors: dict[str, Tensor]) -> bool:
    return key.endswith(MASK_SUFFIX) or key + MASK_SUFFIX in tensors
