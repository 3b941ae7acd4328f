# SPDX-License-Identifier: Apache-2.0
"""Rules of size and length: whether a sample has the form that was asked for."""

from collections.abc import Sequence
from typing import Any, Literal

from omnitrl.errors import InputError

from .answer_texts import completion_text
from .media import sizes
from .ocr import read_text
from .traits import RewardTraits


Column = Sequence[float | None] | None


class SizeReward:
    """
    Rewards images and videos of the very size that is asked for: 1.0, and 0.0 for any other.

    For models that choose a size themselves. A row's columns `height` and `width` count before what is given here; one
    of them alone is enough, and a row with neither has no reward (`None`). Range 0 or 1.

    Args:
        height (`int`, *optional*):
            Pixels, for rows without a column `height`.
        width (`int`, *optional*):
            Pixels, for rows without a column `width`.

    Example:

    ```python
    >>> from PIL import Image
    >>> from omnitrl.rewards import SizeReward

    >>> SizeReward(height=32)(completions=[Image.new("RGB", (64, 32)), Image.new("RGB", (64, 48))])
    [1.0, 0.0]
    ```
    """

    traits = RewardTraits(media=("image", "video"), deterministic=True)

    def __init__(self, height: int | None = None, width: int | None = None):
        _check_positive("height", height, 512)
        _check_positive("width", width, 512)
        self.height, self.width = height, width

    def __call__(
        self, completions: Sequence[Any], height: Column = None, width: Column = None, **kwargs: Any
    ) -> list[float | None]:
        """
        Scores images and videos.

        Args:
            completions (`list`):
                Images or videos.
            height (`list[int]`, *optional*):
                The dataset's column of wanted heights.
            width (`list[int]`, *optional*):
                The dataset's column of wanted widths.
            **kwargs:
                Ignored.

        Returns:
            `list[float | None]`: 0.0 or 1.0 per row, `None` where no size is asked for.
        """
        count = len(completions)
        asked = zip(_filled(height, self.height, count), _filled(width, self.width, count), strict=True)
        return [
            None if wanted == (None, None) else float(all(w in (None, g) for w, g in zip(wanted, given, strict=True)))
            for wanted, given in zip(asked, sizes(completions), strict=True)
        ]


class AspectRatioReward:
    r"""
    Rewards images and videos of the shape that is asked for: \\( \min(a / w, w / a) \\) of their width over height and
    the wanted one.

    Range (0, 1]: 1 for the very ratio, 0.5 for twice or half of it. A row's columns `width` and `height`, if it has
    both, count before what is given here; a row without a wanted ratio has no reward (`None`).

    Args:
        ratio (`float`, *optional*):
            Width over height, for rows without the columns.

    Example:

    ```python
    >>> from PIL import Image
    >>> from omnitrl.rewards import AspectRatioReward

    >>> AspectRatioReward(ratio=1.0)(completions=[Image.new("RGB", (64, 32)), Image.new("RGB", (64, 64))])
    [0.5, 1.0]
    ```
    """

    traits = RewardTraits(media=("image", "video"), deterministic=True)

    def __init__(self, ratio: float | None = None):
        _check_positive("ratio", ratio, 1.78)
        self.ratio = ratio

    def __call__(
        self, completions: Sequence[Any], height: Column = None, width: Column = None, **kwargs: Any
    ) -> list[float | None]:
        """
        Scores images and videos.

        Args:
            completions (`list`):
                Images or videos.
            height (`list[float]`, *optional*):
                The dataset's column of wanted heights.
            width (`list[float]`, *optional*):
                The dataset's column of wanted widths.
            **kwargs:
                Ignored.

        Returns:
            `list[float | None]`: one number per row, `None` where no ratio is asked for.
        """
        count = len(completions)
        asked = zip(_filled(height, None, count), _filled(width, None, count), strict=True)
        return [self._score(*given, *wanted) for given, wanted in zip(sizes(completions), asked, strict=True)]

    def _score(self, height: int, width: int, wanted_height: float | None, wanted_width: float | None) -> float | None:
        wanted = wanted_width / wanted_height if wanted_width and wanted_height else self.ratio
        if wanted is None:
            return None
        return min(width / height / wanted, wanted * height / width)


class TextLengthReward:
    r"""
    Rewards texts of the length that is asked for.

    For a text of \\( n \\) characters or words, a wanted length \\( w \\) and a tolerance \\( t \\):

    $$ r = \max\left(0,\; 1 - \frac{\max(0,\; |n - w| - t)}{w}\right) $$

    Range [0, 1]: 1 within the tolerance, 0 for an empty text if there is none. The text is the completion itself where
    it is a string. Of an image it is what the OCR reads in it, which needs `pip install "omnitrl[ocr]"`: a guard
    against pictures that are covered with text.

    Args:
        target (`int`, *optional*):
            The wanted length, for rows without a column `text_length`. A row with neither has no reward (`None`).
        tolerance (`int`, *optional*, defaults to `0`):
            What a text may be too long or too short.
        unit (`str`, *optional*, defaults to `"characters"`):
            `"characters"`, white space at the ends left out, or `"words"`, which are what white space parts.

    Raises:
        [`~omnitrl.errors.InputError`]: for a target below 1, a tolerance below 0 or an unknown unit.

    Example:

    ```python
    >>> from omnitrl.rewards import TextLengthReward

    >>> TextLengthReward(target=4, tolerance=1, unit="words")(completions=["a red cat", "a cat", ""])
    [1.0, 0.75, 0.25]
    ```
    """

    traits = RewardTraits(deterministic=True)

    def __init__(
        self, target: int | None = None, tolerance: int = 0, unit: Literal["characters", "words"] = "characters"
    ):
        _check_positive("target", target, 40)
        if tolerance < 0:
            raise InputError(f"tolerance={tolerance} must be at least 0: use 0 for the very length.")
        if unit not in ("characters", "words"):
            raise InputError(f"unit={unit!r} must be 'characters' or 'words'.")
        self.target, self.tolerance, self.unit = target, tolerance, unit

    def __call__(self, completions: Sequence[Any], text_length: Column = None, **kwargs: Any) -> list[float | None]:
        """
        Scores texts.

        Args:
            completions (`list`):
                Strings, lists of messages, of which the last one counts, or images with text in them.
            text_length (`list[int]`, *optional*):
                The dataset's column of wanted lengths.
            **kwargs:
                Ignored.

        Returns:
            `list[float | None]`: one number per row, `None` where no length is asked for.
        """
        asked = _filled(text_length, self.target, len(completions))
        texts = [completion_text(completion) for completion in completions]
        images = [completion for completion, text in zip(completions, texts, strict=True) if text is None]
        read = iter(read_text(images) if images else [])
        found = [next(read) if text is None else text for text in texts]
        return [self._score(row, text, wanted) for row, (text, wanted) in enumerate(zip(found, asked, strict=True))]

    def _score(self, row: int, text: str, wanted: float | None) -> float | None:
        if wanted is None:
            return None
        _check_positive(f"text_length[{row}]", wanted, 40)
        length = len(text.split()) if self.unit == "words" else len(text.strip())
        beyond = max(0.0, abs(length - wanted) - self.tolerance)
        return max(0.0, 1.0 - beyond / wanted)


def _filled(column: Column, default: float | None, count: int) -> list[float | None]:
    """The values of a column, with the default in rows that have none."""
    return [default if value is None else value for value in (column or [None] * count)]


def _check_positive(name: str, value: float | None, example: float) -> None:
    if value is not None and not value > 0:
        raise InputError(f"{name}={value} must be above 0: give for example {example}.")
