# SPDX-License-Identifier: Apache-2.0
"""The errors that a user can cause, and the sentence that helps with a misspelt name.

The command line prints these as one line, without a traceback. Anything else that escapes is a defect of omnitrl and
keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class OmniTRLError(Exception):
    """Base of all errors that omnitrl raises for something that a user can put right."""


class InputError(OmniTRLError, ValueError):
    """A value, file, dataset or key that omnitrl cannot use; the message says what would have worked."""


class RunError(OmniTRLError, RuntimeError):
    """Something that failed while running, such as a reward server that went away; the message says what to do."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """
    Suggests the choice nearest to a misspelt name, as a sentence to append to an error.

    Args:
        name (`str`):
            What was given.
        choices (`Iterable[str]`):
            What would have been accepted.

    Returns:
        `str`: `" Did you mean 'beta'?"`, with the leading space, or `""` when nothing is near.

    Example:

    ```python
    >>> did_you_mean("bta", ["beta", "epsilon"])
    " Did you mean 'beta'?"
    ```
    """
    near = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""
