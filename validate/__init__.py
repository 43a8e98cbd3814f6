"""How far a simulator is from a recorded server, and why: the functions that the command line calls.

::

    import blis_replay.validate as br

    print(br.validate("34b-general"))                                 # the page of the command line
    br.validate("34b-general").frame                                  # its numbers, a polars frame
    br.attribute("34b-general", replay="scheduling=synchronous").document   # as --json has it

Most return an ``Answer``: printed it is the page of the command line, ``.frame`` are its rows, ``.document`` its JSON
values, and ``.exit_code`` is what the command ends with.  A notebook shows the verdict as the report does.

``name`` is a slug or alias of an experiment, stored or bundled; ``coefficients`` a release that ships or a YAML file
(None: the one that ships for it); ``replay`` a mode as ``validate --replay`` takes it.  ``store`` is the file of the
ground-truth store, by default that of the command line.  Errors are ``BlisReplayError``, one line each that says what
to do (``base/errors.py``).  Nothing heavy is imported before a function is called.  Each function has an example,
which tests run; ``mine`` stands for a recording of your own.

May import: base, blis, fixtures, ingest, recorder, replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from blis_replay.validate.face import (
        attribute,
        calibrate,
        compare,
        gate,
        ingest,
        inspect,
        list,
        load,
        replay,
        report_page,
        requests,
        segments,
        simulate,
        steps,
        timeline_window,
        validate,
    )

__all__ = [
    "attribute",
    "calibrate",
    "compare",
    "gate",
    "ingest",
    "inspect",
    "list",
    "load",
    "replay",
    "report_page",
    "requests",
    "segments",
    "simulate",
    "steps",
    "timeline_window",
    "validate",
]


def __getattr__(name: str) -> Any:
    """A public function; its module, which imports every part of the program, is imported on the first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from blis_replay.validate import face

    return getattr(face, name)
