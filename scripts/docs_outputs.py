"""Whether a command still prints what its page says.

A line `...` stands for any number of lines.  What differs from run to run is written as one of
``VARYING`` in the page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

ELISION = "..."
VARYING = {
    "<seconds>": r"\d[\d,]*(?:\.\d+)?",
    "<version>": r"\d+(?:\.\w+)+",
    "<size>": r"\d[\d,]*(?:\.\d+)?",
    "<path>": r"[\w./~-]+",
    "<processors>": r"\d+",
}
_VARYING = re.compile("|".join(map(re.escape, VARYING)))
_NUMBERS = re.compile(r"[-+]?\d[\d.,]*| +|-{3,}")


def is_current(documented: Sequence[str], printed: Sequence[str]) -> bool:
    """Whether the lines of a page stand for these lines of output."""
    pattern = "".join(r"(?:[^\n]*\n)*?" if line == ELISION else _pattern(line) + r"\n" for line in documented)
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in printed)) is not None


def refreshed(documented: Sequence[str], printed: Sequence[str]) -> list[str]:
    """What should stand in the page: as it is where that is current, else the output, with its elisions kept.

    Lines of the page and of the output are paired by all but their numbers; of a new line it is enough to
    write how it begins.
    """
    if is_current(documented, printed):
        return list(documented)
    return list(_merged([_completed(line, printed) for line in documented], printed))


def _completed(line: str, printed: Sequence[str]) -> str:
    if line == ELISION or not line.strip():
        return line
    return next((whole for whole in printed if whole.startswith(line)), line)


def _merged(documented: Sequence[str], printed: Sequence[str]) -> Iterator[str]:
    pairing = SequenceMatcher(None, [*map(_skeleton, documented)], [*map(_skeleton, printed)], autojunk=False)
    for kind, a, b, c, d in pairing.get_opcodes():
        if kind == "equal":
            pairs = zip(documented[a:b], printed[c:d], strict=True)
            yield from (old if re.fullmatch(_pattern(old), new) else new for old, new in pairs)
        elif ELISION in documented[a:b]:
            yield ELISION
        else:
            yield from printed[c:d]


def _pattern(line: str) -> str:
    parts = _VARYING.split(line)
    varying = [VARYING[name] for name in _VARYING.findall(line)]
    return "".join(re.escape(part) + then for part, then in zip(parts, [*varying, ""], strict=True))


def _skeleton(line: str) -> str:
    return line if line == ELISION else _NUMBERS.sub("#", _VARYING.sub("0", line))
