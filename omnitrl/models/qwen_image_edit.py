# SPDX-License-Identifier: Apache-2.0
"""Qwen-Image-Edit, for one condition image or for several."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omnitrl.errors import InputError
from omnitrl.models.base import given_images
from omnitrl.models.conditions import Conditions
from omnitrl.models.patches import packed
from omnitrl.models.qwen_image import QwenImageModel, grid_of
from omnitrl.models.size import CHECKPOINT_SIZE, MediaSize


MEGAPIXEL = 1024 * 1024
"""Area of condition images, and of media whose size follows from theirs."""

LONGEST_SIDE = 100
"""Of condition images, as a multiple of the other side: what is narrower is less than a token wide when resized."""


class QwenImageEditModel(QwenImageModel):
    """
    `QwenImageEditPipeline`: Qwen-Image-Edit, which edits one image.

    The image is resized to an area of 1024 × 1024 in its own aspect ratio, whatever the size of the media. The text
    encoder reads it with the prompt, and its latents are tokens beside those that are denoised.

    Example:

    ```python
    >>> model = load_flow_model("Qwen/Qwen-Image-Edit", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("QwenImageEditPipeline",)
    num_images = (1, 1)

    def encode_row(self, row: dict[str, Any], size: MediaSize) -> Conditions:
        """Those of the prompt, and `images` (1, L, 4C), tokens of the images; the layout is their grids."""
        given = self.images(row)
        latents = [self._latents(image) for image in given]
        tokens = torch.cat([packed(part) for part in latents], dim=1)
        mask = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        prompt = self._prompt(row["prompt"], image=self._read_with_the_prompt(given))
        layout = tuple(grid_of(part) for part in latents)
        return Conditions({**prompt, "images": tokens, "images_mask": mask}, layouts=(layout,))

    def _latents(self, image: Any) -> Tensor:
        width, height = self._dimensions(image, MEGAPIXEL)
        pixels = self.pipeline.image_processor.preprocess(image, height, width)
        return self.encode_pixels(pixels.to(self.device))

    def _read_with_the_prompt(self, images: list[Any]) -> Any:
        """The text encoder's view of the images."""
        (image,) = images
        width, height = self._dimensions(image, MEGAPIXEL)
        return self.pipeline.image_processor.resize(image, height, width)

    def _dimensions(self, image: Any, area: int) -> tuple[int, int]:
        """Width and height, multiples of 32, of about that area and the aspect ratio of the image."""
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit

        if max(image.size) > LONGEST_SIDE * min(image.size):
            raise InputError(
                f"A condition image has {image.size[0]} × {image.size[1]} pixels, but {type(self.pipeline).__name__} "
                f"takes none with one side more than {LONGEST_SIDE} times the other: leave the row out."
            )
        width, height, _ = pipeline_qwenimage_edit.calculate_dimensions(area, image.size[0] / image.size[1])
        return width, height

    def size_of(self, row: dict[str, Any], size: MediaSize = CHECKPOINT_SIZE) -> MediaSize:
        """
        The row's own columns, else `size`, else what the stock pipeline makes of the row's (last) image: a megapixel
        in its aspect ratio. The image is read as far as its header.
        """
        if not given_images(row):
            return super().size_of(row, size)
        image = self.images(row, whole=False)[-1]
        multiple = 2 * self.pipeline.vae_scale_factor
        width, height = (side // multiple * multiple for side in self._dimensions(image, MEGAPIXEL))
        return size.of_row(row).filled(MediaSize(height, width))


class QwenImageEditPlusModel(QwenImageEditModel):
    """
    `QwenImageEditPlusPipeline`: Qwen-Image-Edit-2509 and -2511, which take one to three images of any sizes.

    Images are resized one by one to an area of 1024 × 1024 for their latents and of 384 × 384 for the text encoder,
    each in its own aspect ratio.

    Example:

    ```python
    >>> model = load_flow_model("Qwen/Qwen-Image-Edit-2511", dtype=torch.bfloat16)
    ```
    """

    pipeline_classes = ("QwenImageEditPlusPipeline",)
    num_images = (1, 3)

    def _read_with_the_prompt(self, images: list[Any]) -> Any:
        from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import CONDITION_IMAGE_SIZE

        sizes = [self._dimensions(image, CONDITION_IMAGE_SIZE) for image in images]
        resize = self.pipeline.image_processor.resize
        return [resize(image, height, width) for image, (width, height) in zip(images, sizes, strict=True)]
