# SPDX-License-Identifier: Apache-2.0
"""Text against text: what a prompt wants to be written, and how much of it was."""

import re
import unicodedata
from collections.abc import Sequence
from typing import Literal

from omnitrl.errors import InputError

from .contract import RewardError


# An opening quote, the text, a closing one. Curly quotes are often paired the wrong way round, so any two make a pair.
_QUOTED = re.compile(
    r"""
    "([^"]*)" | ＂([^＂]*)＂ | [“”„‟]([^“”„‟]*)[“”‟] | 〝([^〞〟]*)[〞〟]
    | «([^»]*)» | »([^«]*)« | 「([^」]*)」 | 『([^』]*)』
    """,
    re.VERBOSE,
)

# Letters of scripts that have apostrophes, which Chinese, Japanese and Korean have not.
_LETTER = r"[^\W\u1100-\u11ff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]"

# Single quotes are apostrophes as well: they stand at the edges of words, and those within a word belong to the text.
_SINGLE_QUOTED = re.compile(
    rf"""
    (?<!{_LETTER})['‘‚](?=\S) ((?: [^'‘’‚] | (?<={_LETTER})['’](?={_LETTER}) )+?) (?<=\S)['’‘](?!{_LETTER})
    | ‹([^›]*)›
    """,
    re.VERBOSE,
)


def quoted_text(prompt: str) -> str | None:
    """
    First text between quotes in a prompt: `"…"`, `“…”`, `„…“`, `«…»`, `「…」`, `『…』` and their kin.

    Single ones (`'…'`, `‘…’`, `‹…›`) count in prompts without double ones, and where they are not apostrophes. An inch
    mark is taken for a quote: give prompts that hold one a column `text`.

    Args:
        prompt (`str`):
            The prompt.

    Returns:
        `str` or `None`: the first text that is not blank, stripped; `""` if there are only blank ones; `None` if the
        prompt has no quotes.

    Example:

    ```python
    >>> from omnitrl.rewards import quoted_text

    >>> quoted_text("a sign that says “Hello World” in red")
    'Hello World'
    ```
    """
    for quotes in (_QUOTED, _SINGLE_QUOTED):
        found = [match[match.lastindex or 0].strip() for match in quotes.finditer(prompt)]
        if found:
            return next((text for text in found if text), "")
    return None


def wanted_text(prompt: str, text: str | None) -> str:
    """
    What a picture should say: the row's `text`, else what its prompt quotes, else the whole prompt.

    Raises:
        [`RewardError`]: the row's `text` is none.
    """
    if text is not None:
        if not isinstance(text, str):  # a file of numbers is read as such
            raise RewardError(
                f"the column 'text' has the wanted texts, and has {text!r:.80} of type {type(text).__name__}: make it "
                f"a text, for example {str(text)!r:.80}."
            )
        return text
    quoted = quoted_text(prompt)
    return prompt if quoted is None else quoted


def plain_text(text: str, strip: str) -> str:
    """A text as it is compared: without white space or spaces, in lower case, accented letters in one form."""
    if strip == "whitespace":
        text = "".join(text.split())
    elif strip == "spaces":
        text = text.replace(" ", "")
    else:
        raise InputError(f"strip={strip!r} must be 'whitespace' or 'spaces'.")
    # One form for letters with accents, whether typed as one character or as two.
    return unicodedata.normalize("NFC", text).lower()


def edit_distance(a: Sequence[str], b: Sequence[str]) -> int:
    """Levenshtein distance of two texts or two lists of words, one row of the table at a time."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, start=1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, start=1):
            substituted = diagonal + (x != y)
            diagonal = row[j]
            row[j] = min(row[j] + 1, row[j - 1] + 1, substituted)
    return row[-1]


def text_score(
    recognised: str,
    target: str,
    *,
    substring: bool = False,
    strip: Literal["whitespace", "spaces"] = "whitespace",
    empty_target: Literal["error", "match"] = "error",
) -> float:
    r"""
    How much of the target text was rendered, in [0, 1].

    $$ s = \max\left(0,\; 1 - \frac{d(\text{recognised}, \text{target})}{|\text{target}|}\right) $$

    with the Levenshtein distance \\( d \\), both texts without white space and in lower case: the reward of
    [Flow-GRPO](https://huggingface.co/papers/2505.05470). The public implementations add an exemption for targets that
    occur *within* the recognised text; it is off by default, because the paper has none and because a policy learns to
    cover the picture with text where extra text costs nothing.

    | project | options |
    |---|---|
    | the paper | the defaults |
    | flow_grpo, DiffusionNFT, Flow-Factory | `substring=True, strip="spaces"` |
    | verl-omni | `substring=True, empty_target="match"` |

    Args:
        recognised (`str`):
            What was read.
        target (`str`):
            What should be there.
        substring (`bool`, *optional*, defaults to `False`):
            Whether a target within the recognised text scores 1.
        strip (`str`, *optional*, defaults to `"whitespace"`):
            `"whitespace"` removes every white space, `"spaces"` the space character only.
        empty_target (`str`, *optional*, defaults to `"error"`):
            For a target without a character, `"error"` raises, `"match"` gives 1 if nothing was recognised and else 0.

    Returns:
        `float`: the score.

    Raises:
        `ValueError`: for an empty target with `empty_target="error"`, and for an unknown option.

    Example:

    ```python
    >>> from omnitrl.rewards import text_score

    >>> text_score("hellowor1d", "Hello World")
    0.9
    >>> text_score("SALE Hello World 50% OFF", "Hello World")
    0.0
    >>> text_score("SALE Hello World 50% OFF", "Hello World", substring=True)
    1.0
    ```
    """
    if empty_target not in ("error", "match"):
        raise InputError(f"empty_target={empty_target!r} must be 'error' or 'match'.")
    read, wanted = plain_text(recognised, strip), plain_text(target, strip)
    if not wanted:
        if empty_target == "error":
            raise InputError(
                f"the target text {target!r} has no characters to compare with: give for example 'Hello'."
            )
        return float(not read)
    if substring and wanted in read:
        return 1.0
    distance = min(edit_distance(read, wanted), len(wanted))
    return 1.0 - distance / len(wanted)
