"""Pictures of commands in terminals of two widths."""

from __future__ import annotations

import os
import sys
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory

from terminal_shot import terminal_svg

_COMMAND = ["blis-replay", "validate", "--experiment", "34b-general"]


def shot(columns: int) -> str:
    """The picture, in SVG; the store is one of its own."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with TemporaryDirectory() as folder, chdir(folder):
        return terminal_svg(_COMMAND, columns)
