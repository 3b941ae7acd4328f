# SPDX-License-Identifier: Apache-2.0
"""Numbers that the public reference implementations produce, one folder a case in `tests/golden`."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor


def load_case(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """
    Load a golden case.

    Args:
        name (`str`):
            Folder in `tests/golden`, or the number it starts with, such as `"02b"`.

    Returns:
        `tuple` of what `case.json` says (definition, parameters, sources, tolerance), and the stored tensors by name.
    """
    root = Path(__file__).parent / "golden"
    folder = root / name if (root / name).is_dir() else next(root.glob(f"{name}_*"))
    return json.loads((folder / "case.json").read_text()), load_file(folder / "tensors.safetensors")
