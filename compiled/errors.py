"""The root of all errors that a user can cause, and the tree that grows from it.

::

    BlisReplayError                     exit code 3: bad data, or nothing to judge
    ├── IngestError                     a recording or a store
    │   ├── RecordingError              a recorded file: place, problem, remedy
    │   ├── CollectorError              the live collector cannot start
    │   ├── ReconstructionError         steps and batches that a recording does not tell
    │   ├── UnknownCheckError           exit code 2: no such instrument check
    │   └── StoreError                  the store is locked, newer, or damaged
    │       └── UnknownExperimentError  exit code 2: no such experiment, or several
    └── ExperimentError                 one experiment: the others go on
        ├── SimulatorError              the input of the simulator
        │   ├── TraceError              a request trace or an engine configuration
        │   ├── ReleaseError            a coefficient release
        │   └── WorkloadError           a workload to be generated
        ├── ReplayError                 a replay that cannot be made from a recording
        │   ├── BlisError               the BLIS binary
        │   ├── RequestTableError       a table of requests
        │   ├── FileExistsAlreadyError  exit code 2: a file would be overwritten
        │   └── UnknownNameError        exit code 2: no such replay mode or release
        └── ValidateError               nothing to judge, or nothing to fit
            ├── NothingToJudgeError     no request is left to compare
            ├── PolicyError             a gate policy
            ├── RecordError             a server that cannot be recorded
            ├── StudyError              a study
            └── UnknownStudyError       exit code 2: no such study
"""

from __future__ import annotations

from typing import ClassVar

WRONG_USE, BAD_DATA = 2, 3


class BlisReplayError(Exception):
    """An error that a user can act on; its text is one line that says what is wrong, where, and what to do.

    ``exit_code``: what the command line ends with.
    """

    exit_code: ClassVar[int] = BAD_DATA


class ExperimentError(BlisReplayError):
    """One experiment cannot be simulated, replayed or judged; a verb that is about several names it and goes on.

    A store or a file that cannot be read is none of these: it ends the verb.
    """
