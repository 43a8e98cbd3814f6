"""A vLLM server run under the recorder: its steps, its spans, its log and its metrics in one directory."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from io import RawIOBase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from blis_replay import recorder
from blis_replay.base.errors import RecordError, counted, printable, require_extra
from blis_replay.base.files import whole_file
from blis_replay.ingest.readers.files import RecordedFile, lines
from blis_replay.ingest.readers.step_log import MAX_LINE_BYTES
from blis_replay.recorder.plugin import DIRECTORY
from blis_replay.recorder.writer import FLUSH_S

LOG, BEFORE, AFTER = "vllm.log", "metrics-before.prom", "metrics-after.prom"
STEPS = "steps-*.jsonl.gz"
_PLUGIN, _GROUP = "blis_replay", "vllm.general_plugins"
_ENDPOINT = "--otlp-traces-endpoint"
_PROTOCOL = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_PORT, _HOST = 8000, "127.0.0.1"
_PIECE_BYTES = 64 << 10
_MOST_METRICS_BYTES = 64 << 20
_ANSWER_S = 3.0  # until /metrics begins to answer
_FETCHED_S = 10.0  # until all of it is there
_POLL_S = 1.0  # from one try to the next, while the server starts
_LEFT_S = 5.0  # after the server has ended, for what it started to end as well
_END = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# vLLM kills its engine right after a signal, and what the recorder has of the last moments would go with it.
_WRITTEN_S = 2 * FLUSH_S


@dataclass
class ServerRecording:
    """What became of a server: its exit code, and what of it was recorded; ``notes``: what was not, and why."""

    directory: Path
    exit_code: int = 0
    spans: int = 0
    step_logs: tuple[Path, ...] = ()
    metrics: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)


def new_directory(command: Sequence[str]) -> Path:
    """``runs/<date>-<time>-<model>-tp<n>-recorded``, as the names of experiments are put together."""
    behind = command[command.index("serve") + 1 :][:1] if "serve" in command else ()
    model = _value(command, "--model") or next((argument for argument in behind if argument[:1] != "-"), "model")
    short = re.sub(r"[^\w.]+", "-", model.rstrip("/").rsplit("/", 1)[-1], flags=re.ASCII).strip("-") or "model"
    parallel = _value(command, "--tensor-parallel-size") or _value(command, "-tp") or "1"
    return Path("runs") / f"{datetime.now():%Y%m%d-%H%M%S}-{short}-tp{parallel}-recorded"


async def record_server(
    command: Sequence[str],
    directory: Path,
    *,
    spans: bool,
    say: Callable[[str], None],
    output: BinaryIO | None = None,
) -> ServerRecording:
    """Run a server until it ends, and leave what it says of itself in ``directory``.

    Nothing is installed where the server runs: the plugin lies in a folder that its ``PYTHONPATH`` names.  SIGINT,
    SIGTERM and SIGHUP are passed on to it, after its last metrics were fetched.  ``spans``: whether to receive its
    OTLP spans.  ``say`` is called with a line for the operator; ``output`` takes what the server prints.  Raises
    :class:`RecordError` if the command cannot be started, or the directory has a recording.
    """
    if any(directory.glob(STEPS)) or (directory / LOG).exists():
        raise RecordError(f"{directory}: there is a recording in it; name another directory with --out")
    directory.mkdir(parents=True, exist_ok=True)
    made = ServerRecording(directory.resolve())
    with TemporaryDirectory(prefix="blis-replay-plugin-") as folder:
        install_plugin(Path(folder))
        if not spans or not _takes_spans(command, made.notes):
            await _Run(command, made, server_environment(folder, made.directory), output).until_it_ends()
        else:
            await _with_spans(command, folder, made, say, output)
    made.step_logs = tuple(sorted(made.directory.glob(STEPS)))
    return made


def install_plugin(folder: Path) -> None:
    """Lay the recorder into a folder as an installed distribution lies in one: modules, and an entry point."""
    shutil.copytree(
        Path(recorder.__file__).parent,
        folder / "blis_replay" / "recorder",
        ignore=shutil.ignore_patterns("__pycache__", "py.typed"),
    )
    information = folder / f"blis_replay_recorder-{version('blis-replay')}.dist-info"
    information.mkdir()
    named = f"Metadata-Version: 2.1\nName: blis-replay-recorder\nVersion: {version('blis-replay')}\n"
    (information / "METADATA").write_text(named, "utf-8")
    entry = f"[{_GROUP}]\n{_PLUGIN} = blis_replay.recorder.plugin:register\n"
    (information / "entry_points.txt").write_text(entry, "utf-8")


def server_environment(folder: str, directory: Path) -> dict[str, str]:
    """The environment of the server: this one, with the plugin on its path and the folder it writes to."""
    given = dict(os.environ)
    paths = [folder, *filter(None, [given.get("PYTHONPATH")])]
    told = {DIRECTORY: str(directory), "PYTHONPATH": os.pathsep.join(paths)}
    if allowed := given.get("VLLM_PLUGINS"):
        told["VLLM_PLUGINS"] = f"{allowed},{_PLUGIN}"
    # Spans are sent every 5 s otherwise, and those of the last seconds are lost when the server ends.
    told["OTEL_BSP_SCHEDULE_DELAY"] = given.get("OTEL_BSP_SCHEDULE_DELAY", "500")
    return {**given, **told}


async def _with_spans(
    command: Sequence[str],
    folder: str,
    made: ServerRecording,
    say: Callable[[str], None],
    output: BinaryIO | None,
) -> None:
    # What gRPC has to say on standard error is said here; it reads this when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    require_extra("record", "`record` with spans (--no-spans records without)", "grpc")
    from blis_replay.validate.span_receiver import SpanLog, receiving

    log = SpanLog(made.directory, say)
    environment = server_environment(folder, made.directory) | {_PROTOCOL: "grpc"}
    async with receiving(log) as address:
        await _Run([*command, _ENDPOINT, f"http://{address}"], made, environment, output).until_it_ends()
    made.spans = log.spans


@dataclass
class _Run:
    """One server under way."""

    command: Sequence[str]
    made: ServerRecording
    environment: Mapping[str, str]
    output: BinaryIO | None
    ending: list[signal.Signals] = field(default_factory=list)

    async def until_it_ends(self) -> None:
        """Start it, copy its output, fetch its metrics, and wait for its end."""
        try:
            # Before there is a server: one that is there already is another's, or a link.
            log = (self.made.directory / LOG).open("xb", buffering=0)
        except OSError as error:
            problem = f"{self.made.directory / LOG}: cannot be made ({error.strerror or error})"
            raise RecordError(f"{printable(problem)}; name another directory with --out") from error
        with log:
            await self._with_log(log)

    async def _with_log(self, log: RawIOBase) -> None:
        try:
            # In a session of its own Ctrl-C comes to us alone, and its last metrics can be fetched.
            server = await asyncio.create_subprocess_exec(
                *self.command,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(self.environment),
                start_new_session=True,
            )
        except OSError as error:
            (self.made.directory / LOG).unlink(missing_ok=True)
            problem = f"{printable(self.command[0])}: cannot be started ({error.strerror or error})"
            raise RecordError(f"{problem}; install it, or give its path behind --") from error
        loop = asyncio.get_running_loop()
        tasks = {loop.create_task(self._first_metrics()), loop.create_task(self._end_what_is_left(server))}

        def pass_on(number: signal.Signals) -> None:
            tasks.add(loop.create_task(self._end(server, number)))

        for number in _END:
            loop.add_signal_handler(number, pass_on, number)
        try:
            await self._copied(server, log)
            code = await server.wait()
        finally:
            for number in _END:
                loop.remove_signal_handler(number)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        # As a shell has it: 128 and the number of the signal that ended it.
        self.made.exit_code = 128 - code if code < 0 else code
        noted = {note.partition(":")[0] for note in self.made.notes}
        missing = [name for name in (BEFORE, AFTER) if name not in {*self.made.metrics, *noted}]
        if missing:
            self.made.notes.append(f"{' and '.join(missing)}: nothing answered at {self._url()}")

    async def _copied(self, server: asyncio.subprocess.Process, log: RawIOBase) -> None:
        """Its output, to where it is shown and into the log; a full disk ends the log and not the server."""
        output, shown, lost_bytes = server.stdout or asyncio.StreamReader(), self.output, 0
        while piece := await output.read(_PIECE_BYTES):
            written = 0
            with suppress(OSError):
                written = log.write(piece) or 0
            lost_bytes += len(piece) - written
            try:
                if shown is not None:
                    shown.write(piece)
                    shown.flush()
            except OSError:
                shown = None  # whoever read it is gone
        if lost_bytes:
            self.made.notes.append(f"{LOG}: {lost_bytes:,} bytes of it could not be written; make room")

    async def _end(self, server: asyncio.subprocess.Process, number: signal.Signals) -> None:
        """Pass a signal on; the first one after the metrics at the end were fetched and the last steps were written."""
        self.ending.append(number)
        if len(self.ending) == 1:
            await asyncio.gather(self._metrics(AFTER), asyncio.sleep(_WRITTEN_S))
        with suppress(ProcessLookupError):
            server.send_signal(number)

    async def _end_what_is_left(self, server: asyncio.subprocess.Process) -> None:
        """End what a server that was killed leaves behind: vLLM's engine goes on, and keeps its output open.

        A script that ends by itself may have started the server in the background.
        """
        while server.returncode is None:
            await asyncio.sleep(_POLL_S)
        if server.returncode >= 0:
            return
        await asyncio.sleep(_LEFT_S)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
            self.made.notes.append("server: it was killed and left processes behind; they were ended, too")

    async def _first_metrics(self) -> None:
        while not self.ending and not await self._metrics(BEFORE):
            await asyncio.sleep(_POLL_S)

    async def _metrics(self, name: str) -> bool:
        try:
            # Not ``wait_for``, in which Python 3.11 loses a cancellation that comes as the answer does.
            async with asyncio.timeout(_FETCHED_S):
                text = await asyncio.to_thread(_fetched, self._url())
        except TimeoutError:  # byte by byte: it would keep the server from its end
            return False
        try:
            if text:
                with whole_file(self.made.directory / name) as file:
                    file.write(text)
                self.made.metrics = (*self.made.metrics, name)
        except OSError as error:
            self.made.notes.append(f"{name}: cannot be written ({error.strerror or error})")
        return bool(text)

    def _url(self) -> str:
        host = _value(self.command, "--host") or _HOST
        shown = {"0.0.0.0": _HOST, "::": "[::1]"}.get(host, host)  # noqa: S104 (where it listens, not where we do)
        return f"http://{shown}:{_value(self.command, '--port') or _PORT}/metrics"


def _fetched(url: str) -> bytes:
    """What a server answers, nothing if it does not; proxies are for other machines."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=_ANSWER_S) as response:
            return bytes(response.read(_MOST_METRICS_BYTES))
    except (OSError, ValueError, urllib.error.URLError):
        return b""


def _value(command: Sequence[str], option: str) -> str | None:
    """The value of an option of a command line, the last one given."""
    found = None
    for place, argument in enumerate(command):
        if argument == option and place + 1 < len(command):
            found = command[place + 1]
        elif argument.startswith(f"{option}="):
            found = argument.partition("=")[2]
    return found


def _takes_spans(command: Sequence[str], notes: list[str]) -> bool:
    """Whether the server can send its spans here; if not, a note says why."""
    if _value(command, _ENDPOINT):
        notes.append(f"spans: they go where its own {_ENDPOINT} says")
        return False
    if "serve" not in command and not any("api_server" in argument for argument in command):
        notes.append("spans: no `vllm serve`, so its arguments were left alone")
        return False
    if not _has_opentelemetry(command[0]):
        notes.append("spans: opentelemetry-sdk and opentelemetry-exporter-otlp are not installed where the server runs")
        return False
    return True


def _has_opentelemetry(program: str) -> bool:
    """Whether the interpreter of a script has what vLLM needs to send spans; true where that cannot be found out."""
    path = shutil.which(program)
    if path is None:
        return True
    with Path(path).open("rb") as script:
        first = script.readline(1024).decode("utf-8", "replace")
    interpreter = first.removeprefix("#!").strip() if first.startswith("#!") else path
    if not Path(interpreter).name.startswith("python"):
        return True
    # Of the folder that it is in, a Python that is asked so would prefer the modules; the server does not.
    wanted = "import sys; sys.path[:] = filter(None, sys.path); import opentelemetry.sdk, opentelemetry.exporter.otlp"
    return subprocess.run([interpreter, "-c", wanted], capture_output=True, check=False).returncode == 0  # noqa: S603


def step_counts(path: Path) -> str:
    """In words, what a step log says of itself at its end, or why it says nothing."""
    last = b""
    file = RecordedFile(path, path.name)
    for _number, line in lines(file, MAX_LINE_BYTES):
        last = line if line.startswith((b'["c"', b'["end"')) else last
    try:
        counts = json.loads(last)[2]
        steps, cost_us = counts["steps"], counts["wrapper_ns"] / 1000
        dropped = f", {counts['dropped']:,} dropped" if counts["dropped"] else ", none dropped"
        cost = f"; {cost_us / steps:.0f} us per step in the engine's way" if steps else ""
        return f"{counted(steps, 'step')}, {counted(counts['arrivals'], 'request')}{dropped}{cost}"
    except (ValueError, LookupError, TypeError):
        return "no step yet"
