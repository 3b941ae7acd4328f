# SPDX-License-Identifier: Apache-2.0
"""Which combinations `test_matrix.py` runs, and the table of all of them in the documentation."""

import itertools
from pathlib import Path

from omnitrl.models import FAMILIES
from omnitrl.trainer import TRAINERS, get_trainer


PAGE = Path(__file__).parents[2] / "docs" / "source" / "matrix.md"
GUIDANCE = {"unguided": 1.0, "guided": 4.0}
AXES = (tuple(TRAINERS), tuple(FAMILIES), ("lora", "full"), tuple(GUIDANCE))
CASES = tuple(itertools.product(*AXES))
COLUMNS = tuple(itertools.product(*AXES[2:]))


def pairs(case):
    """Every two values of a case, with the axes that they are of."""
    return set(itertools.combinations(enumerate(case), 2))


def covering(cases):
    """Few of the cases, in which any two values that a case has occur together: each time the one with most new."""
    missing = set().union(*map(pairs, cases))
    chosen, left = [], list(cases)
    while missing:
        best = max(left, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        left.remove(best)
        missing -= pairs(best)
    return chosen


def few(cases):
    """The first of the cases of each algorithm, and of each family."""
    first = {}
    for case in cases:
        for axis in (0, 1):
            first.setdefault((axis, case[axis]), case)
    return set(first.values())


def rows(measured):
    """
    The table's rows, header first: a pipeline in each, and what its worst case gave for each trainer.

    Args:
        measured (`dict[tuple, float]`):
            What each case gave.
    """
    yield ["pipeline", *(get_trainer(name).__name__.removesuffix("Trainer") for name in AXES[0])]
    for family in AXES[1]:
        worst = [max(measured[name, family, *column] for column in COLUMNS) for name in AXES[0]]
        yield [f"`{family}`", *("0" if figure == 0 else f"{figure:.0e}" for figure in worst)]


def parts_of(page):
    """The page before the table, the lines of the table, and the page after it."""
    before, _, rest = page.partition("<!-- table -->\n")
    table, _, after = rest.partition("<!-- end of the table -->\n")
    return before + "<!-- table -->\n", table.strip().splitlines(), "<!-- end of the table -->\n" + after


def write_table(measured, path=PAGE):
    """
    Puts the table of `measured` in place of that of the page.

    Args:
        measured (`dict[tuple, float]`):
            What each case gave.
    """
    header, *body = rows(measured)
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *body)]
    before, _, after = parts_of(path.read_text("utf-8"))
    path.write_text(before + "\n" + "\n".join(lines) + "\n\n" + after, "utf-8")
