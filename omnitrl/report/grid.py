# SPDX-License-Identifier: Apache-2.0
"""Grids of pictures with captions, as one PNG that can be looked at, sent and pasted anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from omnitrl.errors import InputError
from omnitrl.report.records import THUMBNAIL_SIDE, thumbnail


if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

    Font = FreeTypeFont | ImageFont

MIN_TILE_WIDTH = 128
TIMELINE_COLUMNS = 8
MARGIN = 16
GAP = 8
CAPTION_LINES = 3  # two of the prompt, one of the reward
CAPTION_SIZE, TITLE_SIZE = 12, 16
TEXT, MUTED, LINE, EMPTY = "#1f2328", "#59636e", "#d1d9e0", "#eff2f5"


def image_grid(
    images: Sequence[Image | None],
    captions: Sequence[str] | None = None,
    columns: int = 8,
    scale: int | None = None,
    title: str | None = None,
) -> Image:
    """
    Pictures in rows, row by row from the top left, each with its caption under it.

    Args:
        images (`Sequence[PIL.Image.Image | None]`):
            The pictures, of any modes and sizes. `None` draws an empty tile.
        captions (`Sequence[str]`, *optional*):
            One for each picture. A caption is wrapped to the width of its tile and cut after three lines; `"\\n"`
            starts a line.
        columns (`int`, *optional*, defaults to 8):
            Pictures in a row.
        scale (`int`, *optional*):
            Enlarge every picture by this whole number, without smoothing. By default pictures narrower than 128 pixels
            are enlarged to at least 128, and those with a side above 256 pixels are shrunk to 256.
        title (`str`, *optional*):
            Heading above the grid.

    Returns:
        `PIL.Image.Image`: an RGB picture.

    Raises:
        InputError: no pictures, a wrong number of captions, or `columns` or `scale` below 1.

    Example:

    ```python
    >>> image_grid(images, captions=["CAT", "DOG"], columns=2, title="step 0").save("grid.png")
    ```
    """
    _check_tiles(images, captions, "captions")
    if columns < 1:
        raise InputError(f"columns={columns} draws nothing: use 1 or more, for example columns=8.")
    if scale is not None and scale < 1:
        raise InputError(f"scale={scale} must be a whole number of at least 1, for example scale=2.")
    columns = min(columns, len(images))
    tiles = [_tile(image, scale) for image in images]
    width, height = _cell_size(tiles)
    texts = _wrap_captions(captions, width)
    text_height = _text_height(texts)
    rows = -(-len(tiles) // columns)
    row_height = height + text_height + GAP
    top = MARGIN + (_line_height(TITLE_SIZE) + GAP if title else 0)
    size = (2 * MARGIN + columns * width + (columns - 1) * GAP, top + rows * row_height - GAP + MARGIN)
    canvas, draw = _canvas(size)
    if title:
        draw.text((MARGIN, MARGIN), title, fill=TEXT, font=_font(TITLE_SIZE, bold=True))
    for index, tile in enumerate(tiles):
        x = MARGIN + index % columns * (width + GAP)
        y = top + index // columns * row_height
        _paste(canvas, draw, tile, (x, y, width, height))
        if texts:
            draw.multiline_text((x, y + height + 3), texts[index], fill=MUTED, font=_font(CAPTION_SIZE), spacing=2)
    return canvas


def before_after(
    before: Sequence[Image | None],
    after: Sequence[Image | None],
    captions: Sequence[str],
    before_title: str = "before",
    after_title: str = "after",
    after_captions: Sequence[str] | None = None,
    columns: int = 8,
) -> Image:
    """
    Two grids, one above the other: the same prompts before and after training.

    Args:
        before (`Sequence[PIL.Image.Image | None]`):
            Pictures before training.
        after (`Sequence[PIL.Image.Image | None]`):
            Pictures after it, of the same prompts in the same order.
        captions (`Sequence[str]`):
            One for each pair.
        before_title (`str`, *optional*, defaults to `"before"`):
            Heading of the upper grid.
        after_title (`str`, *optional*, defaults to `"after"`):
            Heading of the lower grid.
        after_captions (`Sequence[str]`, *optional*):
            Captions of the lower grid where they differ, for example in the reward. By default those of the upper.
        columns (`int`, *optional*, defaults to 8):
            Pictures in a row.

    Returns:
        `PIL.Image.Image`: an RGB picture.

    Raises:
        InputError: the numbers of pictures and captions differ.
    """
    if len(before) != len(after):
        raise InputError(
            f"before has {len(before)} pictures and after has {len(after)}: give one of each for every prompt, in the "
            "same order."
        )
    upper = image_grid(before, captions, columns=columns, title=before_title)
    lower = image_grid(after, captions if after_captions is None else after_captions, columns, title=after_title)
    canvas, draw = _canvas((max(upper.width, lower.width), upper.height + lower.height))
    canvas.paste(upper, (0, 0))
    canvas.paste(lower, (0, upper.height))
    draw.line((MARGIN, upper.height, canvas.width - MARGIN, upper.height), fill=LINE)
    return canvas


def timeline(
    rows: Sequence[tuple[str, Sequence[Image | None]]], captions: Sequence[str] | None = None, title: str | None = None
) -> Image:
    """
    The same prompts over the course of training: a row for each evaluation, a column for each prompt.

    Args:
        rows (`Sequence[tuple[str, Sequence[PIL.Image.Image | None]]]`):
            Label and pictures of each row, for example `("step 20", images)`.
        captions (`Sequence[str]`, *optional*):
            One for each column, written above it.
        title (`str`, *optional*):
            Heading above the grid.

    Returns:
        `PIL.Image.Image`: an RGB picture.

    Raises:
        InputError: no rows, or rows or captions of different lengths.

    Example:

    ```python
    >>> timeline([("step 0", before), ("step 60", after)], captions=["CAT", "DOG"]).save("timeline.png")
    ```
    """
    if not rows:
        raise InputError("rows is empty: give at least one, for example [('step 0', images)].")
    columns = len(rows[0][1])
    for label, images in rows:
        if len(images) != columns:
            raise InputError(f"Row {label!r} has {len(images)} pictures and row {rows[0][0]!r} has {columns}: give "
                             "every row one picture for each prompt, None where there is none.")  # fmt: skip
        _check_tiles(images, captions, f"captions for row {label!r}")
    tiles = [[_tile(image, None) for image in images] for _, images in rows]
    width, height = _cell_size([tile for row in tiles for tile in row])
    texts = _wrap_captions(captions, width)
    label_font = _font(CAPTION_SIZE, bold=True)
    left = MARGIN + max(int(label_font.getlength(label)) for label, _ in rows) + 2 * GAP
    heading = MARGIN + (_line_height(TITLE_SIZE) + GAP if title else 0)
    top = heading + _text_height(texts) + (GAP // 2 if texts else 0)
    size = (left + columns * (width + GAP) - GAP + MARGIN, top + len(rows) * (height + GAP) - GAP + MARGIN)
    canvas, draw = _canvas(size)
    if title:
        draw.text((MARGIN, MARGIN), title, fill=TEXT, font=_font(TITLE_SIZE, bold=True))
    for column, text in enumerate(texts):
        draw.multiline_text(
            (left + column * (width + GAP), heading), text, fill=MUTED, font=_font(CAPTION_SIZE), spacing=2
        )
    for index, (label, _) in enumerate(rows):
        y = top + index * (height + GAP)
        draw.text((MARGIN, y + height // 2), label, fill=TEXT, font=label_font, anchor="lm")
        for column, tile in enumerate(tiles[index]):
            _paste(canvas, draw, tile, (left + column * (width + GAP), y, width, height))
    return canvas


def _check_tiles(images: Sequence[Image | None], captions: Sequence[str] | None, what: str) -> None:
    if not images:
        raise InputError("images is empty: give at least one picture.")
    if captions is not None and len(captions) != len(images):
        raise InputError(
            f"{len(captions)} {what} for {len(images)} pictures: give {len(images)}, or captions=None for none."
        )


def _tile(image: Image | None, scale: int | None) -> Image | None:
    if image is None:
        return None
    from PIL import Image as pil

    tile = thumbnail(image, side=THUMBNAIL_SIDE if scale is None else max(image.size))
    # Whole factors and no smoothing: what the model drew is what is shown, pixel by pixel.
    factor = scale or (-(-MIN_TILE_WIDTH // tile.width) if max(image.size) <= THUMBNAIL_SIDE else 1)
    if factor == 1:
        return tile
    return tile.resize((tile.width * factor, tile.height * factor), pil.Resampling.NEAREST)


def _cell_size(tiles: Sequence[Image | None]) -> tuple[int, int]:
    drawn = [tile for tile in tiles if tile is not None]
    if not drawn:
        return MIN_TILE_WIDTH, MIN_TILE_WIDTH
    return max(tile.width for tile in drawn), max(tile.height for tile in drawn)


def _canvas(size: tuple[int, int]) -> tuple[Image, ImageDraw]:
    from PIL import Image as pil
    from PIL import ImageDraw as pil_draw

    canvas = pil.new("RGB", size, "white")
    return canvas, pil_draw.Draw(canvas)


def _paste(canvas: Image, draw: ImageDraw, tile: Image | None, box: tuple[int, int, int, int]) -> None:
    x, y, width, height = box
    if tile is None:
        draw.rectangle((x, y, x + width - 1, y + height - 1), fill=EMPTY)
        draw.text((x + width // 2, y + height // 2), "no picture", fill=MUTED, font=_font(CAPTION_SIZE), anchor="mm")
        return
    left, top = x, y + height - tile.height  # at the caption below, where the pictures differ in size
    canvas.paste(tile, (left, top))
    # A frame one pixel outside: a white picture on the white page would otherwise have no edge.
    draw.rectangle((left - 1, top - 1, left + tile.width, top + tile.height), outline=LINE)


def _wrap_captions(captions: Sequence[str] | None, width: int) -> list[str]:
    if captions is None or not any(captions):
        return []
    return ["\n".join(_wrap(caption, width)) for caption in captions]


def _text_height(texts: Sequence[str]) -> int:
    lines = max((text.count("\n") + 1 for text in texts), default=0)
    return lines * _line_height(CAPTION_SIZE) + 4 if lines else 0


def _line_height(size: int) -> int:
    return round(size * 1.4)


def _wrap(caption: str, width: int) -> list[str]:
    """Lines that fit `width`; of the text before a reward all but two are cut, and the cut is shown."""
    *body, last = caption.split("\n")[:CAPTION_LINES]
    limit = CAPTION_LINES - 1 if body else CAPTION_LINES
    lines: list[str] = []
    for part in body or [last]:
        lines += _wrap_line(part, width)
    if len(lines) > limit:
        lines = lines[: limit - 1] + [_shorten(" ".join(lines[limit - 1 :]), width)]
    return lines + [_shorten(last, width)] if body else lines


def _wrap_line(text: str, width: int) -> list[str]:
    font = _font(CAPTION_SIZE)
    lines, line = [], ""
    for word in text.split():
        longer = f"{line} {word}".strip()
        if line and font.getlength(longer) > width:
            lines.append(line)
            line = word
        else:
            line = longer
    return [_shorten(line, width) for line in [*lines, line]]


def _shorten(text: str, width: int) -> str:
    font = _font(CAPTION_SIZE)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"


@lru_cache
def _font(size: int, bold: bool = False) -> Font:
    from matplotlib import get_data_path
    from PIL import ImageFont as pil_font

    # Matplotlib ships DejaVu, so the pictures look the same on every machine.
    file = Path(get_data_path()) / "fonts" / "ttf" / ("DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf")
    return pil_font.truetype(str(file), size)
