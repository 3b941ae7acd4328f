# SPDX-License-Identifier: Apache-2.0
"""Three-letter words for the quickstart, in three splits that share no word, and a function that draws one."""

import functools
import random
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from omnitrl.errors import InputError


if TYPE_CHECKING:
    from PIL import Image, ImageFont

Split = Literal["train", "heldout", "unseen"]

WIDTH, HEIGHT = 64, 32  # pixels; 16 x 8 latents, 32 transformer tokens
FONT_SIZE = 30  # three letters of the monospaced font fill the width

# "train" and "heldout" were both drawn for pre-training, so "heldout" only says what reinforcement learning has not
# seen. "unseen" words were never drawn for pre-training either, not even as a chance string of letters.
WORDS: dict[str, tuple[str, ...]] = {
    "train": tuple(
        """NUT OAK PIG RAT SEA TOP VAN WEB YAK ZIP ANT BAT CAN DAY EAR FIG GUM HOP JET KIT LAP MOP NAP OIL PAN RIB SAW
        TIN URN VET WAX YES ZOO ART BAG COB DEN ELF FLY GAS HUT IVY JOB LID MIX NOD OAR PIE RUG SIX TOY USE VOW WIG
        YAM AXE BOW CRY DRY EEL FUN GYM HUG INN JOY LAW MAT ONE PAW ROW SHY TUB WHY""".split()
    ),
    "heldout": tuple(
        """CAT DOG SUN MAP RED SKY BOX CUP HAT PEN TEA KEY JAM OWL FOX ICE NET LOG BEE RUN BUS CAR COW EGG FAN GEM HEN
        INK JAR KID LEG MUD""".split()
    ),
    "unseen": tuple(
        """ACE BED CAP DUO ELM FOG GAP HIP IRE JOG KIN LIP MUG NEW OUR PIT QUO RAY SKI TAX ARC VIA WIN YEN ZEN BUN DIP
        FUR HEM LOT PUB WOK""".split()
    ),
}


def rows(split: Split) -> list[dict[str, str]]:
    """
    The words of one split as dataset rows.

    Args:
        split (`str`): `"train"` (73 words, for reinforcement learning), `"heldout"` (32 words that reinforcement
            learning never sees but pre-training did) or `"unseen"` (32 words that neither has seen).

    Returns:
        `list[dict[str, str]]`: one `{"prompt": word}` for each word, in a fixed order.

    Raises:
        `ValueError`: if there is no such split.

    Example:

    ```python
    >>> from omnitrl.quickstart import rows

    >>> rows("heldout")[0]
    {'prompt': 'CAT'}
    ```
    """
    if split not in WORDS:
        raise InputError(f"split={split!r} is not one of {', '.join(map(repr, WORDS))}: use 'train'.")
    return [{"prompt": word} for word in WORDS[split]]


def render_word(word: str, rng: random.Random | None = None, jitter: int = 1) -> "Image.Image":
    """
    Draw a word in DejaVu Sans Mono Bold, the font that comes with matplotlib.

    Args:
        word (`str`): what to draw; three letters fill the picture.
        rng (`random.Random`, *optional*): when given, it draws an offset and two colours, half of the time light on
            dark and else dark on light. By default the word is centred, black on white.
        jitter (`int`, defaults to `1`): largest offset in pixels, in each direction. Unused without `rng`.

    Returns:
        `PIL.Image.Image`: an RGB picture of 64 x 32 pixels.
    """
    from PIL import Image, ImageDraw

    dx = dy = 0
    background, ink = (255, 255, 255), (0, 0, 0)
    if rng is not None:
        dx, dy = rng.randint(-jitter, jitter), rng.randint(-jitter, jitter)
        dark, light = _colour(rng, 0, 70), _colour(rng, 185, 255)
        background, ink = (dark, light) if rng.random() < 0.5 else (light, dark)
    image = Image.new("RGB", (WIDTH, HEIGHT), background)
    position = (WIDTH / 2 + dx, HEIGHT / 2 + dy)
    ImageDraw.Draw(image).text(position, word, font=_font(), fill=ink, anchor="mm")
    return image


def _colour(rng: random.Random, low: int, high: int) -> tuple[int, int, int]:
    return rng.randint(low, high), rng.randint(low, high), rng.randint(low, high)


@functools.cache
def _font() -> "ImageFont.FreeTypeFont":
    import matplotlib  # not pyplot, which takes seconds and picks a window system
    from PIL import ImageFont

    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(fonts / "DejaVuSansMono-Bold.ttf"), FONT_SIZE)
