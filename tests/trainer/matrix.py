# SPDX-License-Identifier: Apache-2.0
"""Which combinations `test_matrix.py` runs, and the table of all of them in the documentation."""

import itertools
from pathlib import Path

from omnitrl.models import FAMILIES
from omnitrl.trainer import TRAINERS, get_trainer
from tests.trainer.helpers import WITH_REPLAY


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


def rows():
    """Names of the table's rows: trainer, pipeline, what is compared."""
    for algorithm, family in itertools.product(*AXES[:2]):
        compared = "ratio" if algorithm in WITH_REPLAY else "gradient"
        yield algorithm, family, (f"[`{get_trainer(algorithm).__name__}`]", f"`{family}`", compared)


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
    names = ["trainer", "pipeline", "compared", *(f"{weights}, {guidance}" for weights, guidance in COLUMNS)]
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for algorithm, family, cells in rows():
        figures = (f"{measured[algorithm, family, *column]:.0e}" for column in COLUMNS)
        lines.append("| " + " | ".join([*cells, *(figure.replace("0e+00", "0") for figure in figures)]) + " |")
    before, _, after = parts_of(path.read_text("utf-8"))
    path.write_text(before + "\n" + "\n".join(lines) + "\n\n" + after, "utf-8")
