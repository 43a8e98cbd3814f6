"""Other people's simulators under the contract of ``replay/command.py``: how each is told what a replay is.

This file is also a program: ``PYTHON adapters.py NAME [OPTION] FOLDER``, run by the Python in which that simulator is
installed, so it imports nothing of this package, and of others only what the simulator needs.  An adapter reads the
requests and the engine arguments in the folder, and leaves the answers there.
"""

from __future__ import annotations

import bisect
import csv
import gzip
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

# A closed form has no time, only so many requests at once: found by so many rounds of Little's law.
_ROUNDS = 6
_US_PER_MS = 1_000.0
_NS_PER_US = 1_000
# Of a profile of Dynamo: points on each of the two axes of its decode table.
_PROFILE_POINTS = 300

Answer = tuple[int, float, float, float | None]  # request_index, and us from its send: first token, end, scheduled


class AdapterError(Exception):
    """What an adapter cannot do; one line for the user."""


@dataclass(frozen=True)
class Told:
    """What a replay gives: a dict a request (integers by name), and ``engine.json``.

    ``blocks``: of each request the ids of its prompt's full blocks, empty where no prefix is known.
    """

    folder: Path
    requests: list[dict[str, int]]
    blocks: list[list[int]]
    served: dict[str, Any]

    @property
    def arguments(self) -> dict[str, Any]:
        """The engine arguments by vLLM's names."""
        found: dict[str, Any] = self.served["arguments"]
        return found

    @property
    def model(self) -> str:
        """A folder with the model's ``config.json`` where its dimensions are known, else its name."""
        return str(self.folder) if (self.folder / "config.json").exists() else str(self.served["model"])

    def gpu_of(self, names: Iterable[tuple[str, str]]) -> str:
        """The GPU as a simulator names it, by the first part of a name that fits; raises ``AdapterError`` if none."""
        words = str(self.served["hardware"] or "").lower()
        for part, name in names:
            if part in words:
                return name
        raise AdapterError(f"no system is known for the hardware {self.served['hardware']!r}")


# Of NVIDIA's tools.
_SYSTEMS = (
    *(("h200", "h200_sxm"), ("gb200", "gb200"), ("b200", "b200_sxm"), ("b300", "b300_sxm"), ("h100", "h100_sxm")),
    *(("a100", "a100_sxm"), ("l40s", "l40s"), ("rtx pro 6000", "rtx_pro_6000_server"), ("a30", "a30"), ("l4", "l4")),
)


@dataclass(frozen=True)
class Adapter:
    """A simulator of others.

    ``package``: on PyPI, ``""`` for none.  ``tried``: the version that the mapping was made with.  ``takes``: how the
    engine arguments are passed on.  ``lacks``: what cannot be.  ``run``: the told and an option to answers.
    ``fitted``: the option with which it takes our coefficients.  ``checkout``: a file by which a folder is known as a
    checkout of its repository, which it can run from as well; ``""`` if it cannot.
    """

    name: str
    package: str
    tried: str
    takes: str
    lacks: tuple[str, ...]
    run: Callable[[Told, str], Iterator[Answer]]
    fitted: str = ""
    checkout: str = ""

    def in_checkout(self, given: str) -> bool:
        """Whether it is run from a checkout, by what was given for it."""
        return bool(self.checkout) and (Path(given) / self.checkout).is_file()


def _done(words: Sequence[str], what: str, **settings: Any) -> None:
    """Run a program to its end; raises ``AdapterError`` with its last words if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, **settings)  # noqa: S603 (no shell)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()] or ["it said nothing"]
        raise AdapterError(f"{what}: {said[-1].strip()}")


def _dynamo(told: Told, option: str) -> Iterator[Answer]:
    """The trace in Mooncake's form, a hash id a block; the report has a line a request, in order of arrival."""
    block = int(told.arguments["block_size"])
    own = 1 + max((key for keys in told.blocks for key in keys), default=0)
    trace = []
    for request, keys in zip(told.requests, told.blocks, strict=True):
        count = -(-request["prompt_tokens"] // block)
        # A prefix known as a number of tokens only is one that all requests share.
        cached = (request["prompt_tokens"] - request["prefill_tokens"]) // block
        ids = (keys or [own + i for i in range(cached)])[:count]
        first = own + 10_000_000 + request["request_index"] * 100_000
        ids = ids + [first + i for i in range(count - len(ids))]
        lengths = {"input_length": request["prompt_tokens"], "output_length": request["output_tokens"]}
        trace.append({"timestamp": request["arrival_us"] / _US_PER_MS, **lengths, "hash_ids": ids})
    engine = {name: told.arguments[name] for name in ("block_size", "max_num_seqs", "max_num_batched_tokens")}
    engine |= {"enable_prefix_caching": bool(told.arguments.get("enable_prefix_caching", True))}
    engine |= {"enable_chunked_prefill": bool(told.arguments.get("enable_chunked_prefill", True))}
    engine |= {"max_model_len": told.arguments["max_model_len"]}
    engine |= {"num_gpu_blocks": told.arguments.get("num_gpu_blocks") or 1_000_000}
    if option == "fitted":
        engine["planner_profile_data"] = str(_profile(told))
    (told.folder / "trace.jsonl").write_text("".join(json.dumps(line) + "\n" for line in trace), "utf-8")
    report, lines = told.folder / "report.json", told.folder / "report.jsonl"
    command = [sys.executable, "-m", "dynamo.replay", str(told.folder / "trace.jsonl"), "--replay-mode", "offline"]
    command += ["--trace-block-size", str(block), "--extra-engine-args", json.dumps(engine)]
    command += ["--report-json", str(report), "--report-jsonl", str(lines)]
    _done(command, "dynamo.replay")
    if not lines.exists():
        raise AdapterError("dynamo.replay wrote no report")
    answers = [json.loads(line) for line in lines.read_text("utf-8").splitlines()]
    answers = sorted((a for a in answers if a["terminal_status"] == "completed"), key=lambda a: a["arrival_time_ms"])
    if len(answers) != len(told.requests):
        raise AdapterError(f"dynamo.replay completed {len(answers)} of {len(told.requests)} requests")
    for index, answer in enumerate(answers):
        admitted_ms = answer["first_admit_ms"] - answer["arrival_time_ms"]
        yield (
            index,
            _US_PER_MS * answer["ttft_ms"],
            _US_PER_MS * max(answer["e2e_latency_ms"], answer["ttft_ms"]),
            _US_PER_MS * admitted_ms,
        )


def _step_times(told: Told) -> tuple[list[int], list[int], Any, list[tuple[int, int]]]:
    """The step times of the coefficients, in us.

    Numbers of decodes; their mean contexts; an array of contexts by numbers; and of prompt tokens what they add to a
    step, without its fixed part.
    """
    import numpy as np

    table = told.folder / "step_times.csv"
    if not table.exists():
        raise AdapterError("the coefficients have no step times for this recording; ask it without them")
    with table.open(encoding="utf-8") as file:
        rows = [{name: int(value) for name, value in row.items()} for row in csv.DictReader(file)]
    decode_us = {(row["decode_requests"], row["context_tokens"]): row["duration_us"] for row in rows}
    counts = sorted({count for count, _ in decode_us if count})
    contexts = sorted({tokens // count for count, tokens in decode_us if count})
    by_context = np.array([[decode_us[count, count * context] for count in counts] for context in contexts])
    alone_us = decode_us[counts[0], counts[0] * contexts[0]]
    prefill = [(r["prefill_tokens"], max(r["duration_us"] - alone_us, 0)) for r in rows if r["prefill_tokens"]]
    return counts, contexts, by_context, prefill


def _profile(told: Told) -> Path:
    """The step times of the coefficients as the tables of a profile of Dynamo's planner.

    A pass of its engine takes the sum of the two tables, and a prompt that it completes is among its decodes.  So the
    prefill table is what prompt tokens add to a step, without the fixed part, which the decode table has.  That one is
    asked by KV tokens and their mean a request; how many requests that are is the quotient.
    """
    import numpy as np

    counts, contexts, by_context, prefill = _step_times(told)
    most = counts[-1] * contexts[-1]
    totals, means = np.linspace(0, most, _PROFILE_POINTS), np.geomspace(1, contexts[-1], _PROFILE_POINTS)
    itl = np.empty((len(totals), len(means)))
    for i, mean in enumerate(means):
        at_mean = [np.interp(mean, contexts, of_count) for of_count in by_context.T]
        itl[:, i] = np.interp(totals / mean, counts, at_mean) / _US_PER_MS
    path = told.folder / "profile.npz"
    np.savez(
        path,
        prefill_isl=np.array([float(tokens) for tokens, _ in prefill]),
        prefill_ttft_ms=np.array([us / _US_PER_MS for _, us in prefill]),
        decode_active_kv_tokens=totals,
        decode_context_length=means,
        decode_itl=itl,
    )
    return path


def _aiconfigurator(told: Told, option: str) -> Iterator[Answer]:
    """Its aggregated estimate at the mean lengths, and as many requests at once as Little's law makes of its answer."""
    del option
    from aiconfigurator.cli.api import cli_estimate  # type: ignore[import-not-found,unused-ignore]

    logging.disable(logging.WARNING)
    requests, arguments = told.requests, told.arguments
    count = len(requests)
    prompt, output = (
        max(1, round(sum(request[name] for request in requests) / count)) for name in ("prompt_tokens", "output_tokens")
    )
    cached = min(_cached_tokens(told), prompt - 1)
    span_s = max((requests[-1]["arrival_us"] - requests[0]["arrival_us"]) / 1e6, 1e-3)
    most = int(arguments["max_num_seqs"])
    at_once, estimate = min(8, most), None
    tp = int(told.served["tensor_parallelism"] or 1)
    config = json.loads((told.folder / "config.json").read_text("utf-8")) if told.model == str(told.folder) else {}
    moe = {"moe_tp_size": tp, "moe_ep_size": 1} if config.get("num_local_experts") else {}
    for _ in range(_ROUNDS):
        estimate = cli_estimate(
            model_path=told.model,
            system_name=told.gpu_of(_SYSTEMS),
            backend_name="vllm",
            isl=prompt,
            osl=max(output, 2),
            prefix=cached,
            batch_size=at_once,
            tp_size=tp,
            **moe,
        )
        wanted = min(max(round(count / span_s * float(estimate.request_latency) / 1e3), 1), most)
        if wanted == at_once:
            break
        at_once = wanted
    if estimate is None:
        raise AdapterError("aiconfigurator made no estimate")
    for request in requests:
        ttft_us = _US_PER_MS * float(estimate.ttft)
        rest_us = _US_PER_MS * float(estimate.tpot) * (request["output_tokens"] - 1)
        yield request["request_index"], ttft_us, ttft_us + rest_us, None


def _cached_tokens(told: Told) -> int:
    """Of a mean prompt those that an unbounded prefix cache holds: a block is held once it was seen."""
    block, seen, cached = int(told.arguments["block_size"]), set[int](), 0
    for request, keys in zip(told.requests, told.blocks, strict=True):
        cached += request["prompt_tokens"] - request["prefill_tokens"] + block * sum(key in seen for key in keys)
        seen.update(keys)
    return round(cached / len(told.requests)) if told.arguments.get("enable_prefix_caching", True) else 0


_VIDUR_DEVICES = (("h100", "h100"), ("a100", "a100"), ("a40", "a40"))
_VIDUR_NODES = {"h100": "h100_dgx", "a100": "a100_dgx", "a40": "a40_pairwise_nvlink"}
# A checkout interpolates its own profiles up to here unless it is told otherwise.
_VIDUR_TOKENS, _VIDUR_BATCH = 4096, 128


def _vidur(told: Told, option: str) -> Iterator[Answer]:
    """The package of PyPI, or a checkout; both leave a table of seconds a request."""
    (_vidur_package if option in ("", "fitted") else _vidur_checkout)(told, option)
    tables = list(told.folder.glob("vidur/**/request_metrics.csv"))
    if not tables:
        raise AdapterError("vidur wrote no request_metrics.csv")
    with tables[0].open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            ttft_us, e2e_us, waited_us = (
                1e6 * float(row[name]) for name in ("prefill_e2e_time", "request_e2e_time", "request_scheduling_delay")
            )
            yield int(float(row["Request Id"])), ttft_us, max(e2e_us, ttft_us), waited_us


def _vidur_trace(told: Told, header: str, before: str = "") -> str:
    trace = told.folder / "vidur.csv"
    lines = [f"{before}{r['arrival_us'] / 1e6:.6f},{r['prompt_tokens']},{r['output_tokens']}" for r in told.requests]
    trace.write_text("\n".join([header, *lines, ""]), "utf-8")
    return str(trace)


def _vidur_package(told: Told, option: str) -> None:
    """In this process; ``fitted``: each batch takes as long as the coefficients say.

    Sarathi's chunks are what vLLM V1 does with chunked prefill.  The model is asked for its own step times and for the
    size of the KV cache only, and both are given where step times are ours.
    """
    import vidur.config as config  # type: ignore[import-not-found,unused-ignore]
    from vidur.simulator import Simulator  # type: ignore[import-not-found,unused-ignore]

    given, fitted = told.arguments, option == "fitted"
    predictor = config.LinearRegressionExecutionTimePredictorConfig
    replica: dict[str, Any] = {"tensor_parallel_size": 1}
    profiles = {"cache_dir": str(told.folder / "cache")}
    if fitted:
        _give_vidur_step_times(told)
    else:
        device = told.gpu_of(_VIDUR_DEVICES)
        node, model = _VIDUR_NODES[device], str(told.served["model"])
        replica = {"tensor_parallel_size": told.served["tensor_parallelism"] or 1, "model_name": model}
        replica |= {"device": device, "network_device": node}
        predictor = config.RandomForrestExecutionTimePredictorConfig
        named = "project-vajra/dev-staging-" + model.lower().replace("/", "-")
        profiles |= {"model_profiling_dataset": f"{named}-{device}"}
        profiles |= {"network_profiling_dataset": "project-vajra/dev-staging-" + node.replace("_", "-")}
    blocks = given.get("num_gpu_blocks") or (1_000_000 if fitted else None)
    cluster = config.ClusterConfig(
        replica_config=config.ReplicaConfig(num_pipeline_stages=1, **replica),
        # vLLM V1 keeps no blocks back.
        cache_config=config.CacheConfig(block_size=given["block_size"], num_blocks=blocks, watermark_blocks_fraction=0),
        replica_scheduler_config=config.SarathiSchedulerConfig(
            batch_size_cap=given["max_num_seqs"], chunk_size=given["max_num_batched_tokens"]
        ),
    )
    trace = config.TraceRequestGeneratorConfig(
        trace_file=_vidur_trace(told, "Date,Time,PromptTokenCount,CompletionTokenCount", before="all,"),
        date="all",
        prefill_scale_factor=1,
        time_scale_factor=1,
        max_tokens=given["max_model_len"],
    )
    metrics = {"store_plots": False, "enable_chrome_trace": False, "output_dir": str(told.folder / "vidur")}
    simulator = Simulator(
        config.SimulationConfig(
            cluster_config=cluster,
            request_generator_config=trace,
            execution_time_predictor_config=predictor(**profiles),
            metrics_config=config.MetricsConfig(**metrics),
        )
    )
    try:
        simulator.run()
    except AssertionError:
        raise AdapterError("its own check of a request's tokens fails, as where one is preempted") from None


def _give_vidur_step_times(told: Told) -> None:
    """Put the step times of the coefficients in place of its regression.

    A batch takes what its decodes take, and what its prompt tokens add to a step without its fixed part.
    """
    from vidur._native.entities import ExecutionTime  # type: ignore[import-not-found,unused-ignore]
    from vidur.execution_time_predictor import (  # type: ignore[import-not-found,unused-ignore]
        ExecutionTimePredictorRegistry,
    )
    from vidur.types import ExecutionTimePredictorType  # type: ignore[import-not-found,unused-ignore]

    counts, contexts, by_context, prefill = _step_times(told)
    rows = by_context.tolist()
    prompts, added = [0, *(tokens for tokens, _ in prefill)], [0, *(us for _, us in prefill)]

    class StepTimes:
        def __init__(self, **settings: object) -> None:
            del settings

        def get_execution_time(self, batch: Any, stage: int) -> Any:
            del stage
            asked = list(zip(batch.requests, batch.num_q_tokens, batch.num_kv_tokens, strict=True))
            held = [tokens for request, _, tokens in asked if request.is_prefill_complete]
            prompt_tokens = sum(batch.num_q_tokens) - len(held)
            at, part = _place(sum(held) / len(held) if held else 0, contexts)
            fewer, more = (_interpolated(len(held), counts, rows[row]) for row in (at, at + 1))
            step_us = fewer + part * (more - fewer) + _interpolated(prompt_tokens, prompts, added)
            # One layer whose attention takes the whole step, in ms; its other eleven operators take no time.
            return ExecutionTime(1, 0.0, 0.0, step_us / _US_PER_MS, *([0.0] * 11))

    kind = ExecutionTimePredictorType.LINEAR_REGRESSION
    ExecutionTimePredictorRegistry.unregister(kind)
    ExecutionTimePredictorRegistry.register(kind, StepTimes)


def _place(value: float, grid: Sequence[float]) -> tuple[int, float]:
    """The interval of a rising grid and the place in it, 0 to 1; what lies outside is put on its end."""
    at = min(max(bisect.bisect_right(grid, value) - 1, 0), len(grid) - 2)
    return at, min(max((value - grid[at]) / (grid[at + 1] - grid[at]), 0.0), 1.0)


def _interpolated(value: float, grid: Sequence[float], values: Sequence[float]) -> float:
    at, part = _place(value, grid)
    return values[at] + part * (values[at + 1] - values[at])


def _vidur_checkout(told: Told, option: str) -> None:
    """A checkout of its repository, run in its folder by its own Python, with the profiles that it holds."""
    checkout = Path(option).absolute()
    pythons = (checkout / folder / "bin" / "python" for folder in (".venv", "env"))
    python = next((str(path) for path in pythons if path.exists()), sys.executable)
    trace = _vidur_trace(told, "arrived_at,num_prefill_tokens,num_decode_tokens")
    options = [word for name, value in _vidur_options(told, trace).items() for word in (f"--{name}", str(value))]
    off = [f"--no-metrics_config_{name}" for name in ("store_plots", "enable_chrome_trace")]
    surroundings = os.environ | {"WANDB_MODE": "disabled"}
    _done([python, "-m", "vidur.main", *options, *off], "vidur.main", cwd=checkout, env=surroundings)


def _vidur_options(told: Told, trace: str) -> dict[str, object]:
    """Sarathi's chunks are what vLLM V1 does with chunked prefill; without it, its scheduler of vLLM V0."""
    given, device = told.arguments, told.gpu_of(_VIDUR_DEVICES)
    chunked = bool(given.get("enable_chunked_prefill", True))
    tokens, seqs, longest = (given[name] for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len"))
    name, budget = ("sarathi", "chunk_size") if chunked else ("vllm", "max_tokens_in_batch")
    scheduler = {"batch_size_cap": seqs, "block_size": given["block_size"], budget: tokens}
    scheduler |= {"num_blocks": given["num_gpu_blocks"]} if given.get("num_gpu_blocks") else {}
    replica = {"device": device, "network_device": _VIDUR_NODES[device], "model_name": told.served["model"]}
    replica |= {"tensor_parallel_size": told.served["tensor_parallelism"] or 1, "num_pipeline_stages": 1}
    most = {"prefill_chunk_size": max(tokens, _VIDUR_TOKENS), "batch_size": max(seqs, _VIDUR_BATCH)}
    most |= {"tokens_per_request": max(longest, _VIDUR_TOKENS)}
    predictor = "random_forrest_execution_time_predictor_config_prediction_max"  # its own spelling
    return {
        **{f"replica_config_{key}": value for key, value in replica.items()},
        "cluster_config_num_replicas": 1,
        "request_generator_config_type": "trace_replay",
        "trace_request_generator_config_trace_file": trace,
        "trace_request_generator_config_max_tokens": longest,
        "replica_scheduler_config_type": name,
        **{f"{name}_scheduler_config_{key}": value for key, value in scheduler.items()},
        **{f"{predictor}_{key}": value for key, value in most.items()},
        "metrics_config_output_dir": told.folder / "vidur",
    }


def _llmservingsim(told: Told, option: str) -> Iterator[Answer]:
    """Its own table of a run that was made before, matched by order of arrival and checked by lengths."""
    if not option:
        raise AdapterError("name its table: llmservingsim:PATH/sim.csv.gz")
    with _opened(Path(option)) as file:
        csv.field_size_limit(1 << 24)
        rows = sorted(csv.DictReader(file), key=lambda row: int(row["request id"]))
    if len(rows) != len(told.requests):
        raise AdapterError(f"{option} has {len(rows)} requests, the recording {len(told.requests)}")
    by_arrival = sorted(rows, key=lambda row: int(row["arrival"]))
    for request, row in zip(told.requests, by_arrival, strict=True):
        # Its output counts the prompt too in some releases; what it generated is the number of gaps and one.
        if int(row["input"]) != request["prompt_tokens"]:
            raise AdapterError(f"{option}: request {row['request id']} has another prompt than was recorded")
        ttft_us, e2e_us = int(row["TTFT"]) / _NS_PER_US, int(row["latency"]) / _NS_PER_US
        yield request["request_index"], ttft_us, max(e2e_us, ttft_us), int(row["queuing_delay"]) / _NS_PER_US


def _opened(path: Path) -> TextIO:
    if not path.is_file():
        raise AdapterError(f"{path}: no such file")
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


_OPEN_LOOP = "arrivals: it estimates a fixed number of requests at once, here by Little's law from its own latency"
ADAPTERS = {
    adapter.name: adapter
    for adapter in (
        Adapter(
            "dynamo",
            "ai-dynamo",
            "1.4.2",
            "block_size, num_gpu_blocks, max_num_seqs, max_num_batched_tokens, max_model_len, prefix caching, chunked "
            "prefill; prefixes as hash ids; step times: its own polynomial, or (dynamo-fitted) a profile made of the "
            "step times of the coefficients",
            (
                "asynchronous scheduling",
                "the client's and the server's delays outside of the engine",
                "clients that give up",
                "prompts beside decodes: a pass takes the sum of two times; its KV tokens count a shared block once",
                "the model and the GPU, without a profile: its polynomial is the same for all",
            ),
            _dynamo,
            fitted="fitted",
        ),
        Adapter(
            "aiconfigurator",
            "aiconfigurator",
            "0.12.0",
            "model, GPU, tensor parallelism, max_num_seqs, mean lengths, mean cached prefix",
            (_OPEN_LOOP, "queues, KV blocks, single requests", "delays outside of the GPU"),
            _aiconfigurator,
        ),
        Adapter(
            "vidur",
            "vidur",
            "0.0.26",
            "model, GPU, tensor parallelism, block_size, num_gpu_blocks, max_num_seqs, max_num_batched_tokens (as the "
            "chunk size of its Sarathi scheduler), max_model_len; arrivals and lengths; step times: its own, or "
            "(vidur-fitted) those of the coefficients",
            (
                "prefix caching: every prompt is computed whole",
                "asynchronous scheduling",
                "delays outside of the engine",
                "clients that give up",
                "preemptions: a run that needs one ends with an error",
                "models and GPUs that it has no profile of, without ours",
            ),
            _vidur,
            fitted="fitted",
            checkout="vidur/main.py",
        ),
        Adapter(
            "llmservingsim",
            "",
            "5daddb2",
            "nothing: its own table of a run that was made before",
            ("engine arguments of a replay: the table is of the run that was made",),
            _llmservingsim,
        ),
    )
}


def _told(folder: Path) -> Told:
    with (folder / "requests.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    blocks = [[int(key) for key in row.pop("prefix_blocks", "").split()] for row in rows]
    requests = [{name: int(value) for name, value in row.items()} for row in rows]
    return Told(folder, requests, blocks, json.loads((folder / "engine.json").read_text("utf-8")))


def _write(adapter: Adapter, option: str, folder: Path, answers: Iterable[Answer]) -> None:
    with (folder / "results.csv").open("w", encoding="utf-8") as file:
        file.write("request_index,ttft_us,e2e_us,scheduled_us\n")
        for index, ttft_us, e2e_us, scheduled_us in answers:
            at = "" if scheduled_us is None else f"{min(max(scheduled_us, 0.0), ttft_us):.1f}"
            file.write(f"{index},{ttft_us:.1f},{e2e_us:.1f},{at}\n")
    installed = adapter.package and not adapter.in_checkout(option)
    version = importlib.metadata.version(adapter.package) if installed else adapter.tried
    variant = [option] if option and option == adapter.fitted else []  # else it is a path of this machine
    header = {"name": " ".join([adapter.name, *variant]), "version": version, "not_modelled": list(adapter.lacks)}
    (folder / "simulator.json").write_text(json.dumps(header), "utf-8")


def main(words: Sequence[str]) -> int:
    """Run an adapter on a folder; the exit code, and one line on standard error if it is not 0."""
    name, option, folder = words[0], words[1] if len(words) > 2 else "", Path(words[-1])
    adapter = ADAPTERS[name]
    try:
        if adapter.package and not adapter.in_checkout(option):
            importlib.metadata.version(adapter.package)
        _write(adapter, option, folder, adapter.run(_told(folder), option))
    except importlib.metadata.PackageNotFoundError:
        print(f"{adapter.package} is not installed for {sys.executable}", file=sys.stderr)
        return 1
    except Exception as error:
        print(f"{name}: {' '.join(str(error).split()) or type(error).__name__}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
