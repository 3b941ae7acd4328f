# SPDX-License-Identifier: Apache-2.0
"""How a command ends: with one line for what a user can put right, with a traceback for a defect."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from omnitrl.errors import OmniTRLError


@contextmanager
def one_line_errors() -> Iterator[None]:
    """
    Ends the process with one line instead of a traceback when something goes wrong that the user can put right.

    An [`~omnitrl.errors.OmniTRLError`] prints `error: …` and exits with 2; Ctrl-C prints `interrupted` and exits
    with 130. Everything else passes through.

    Example:

    ```python
    >>> from omnitrl.cli.exits import one_line_errors
    >>> with one_line_errors():
    ...     main()
    ```
    """
    try:
        yield
    except OmniTRLError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
