"""Tables of operator times, asked of a package that is made here: its formulas are known, so the tables are, too."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
from blis_runs import release_of
from recordings import make_recording

from blis_replay.base.errors import NothingToJudgeError, ReleaseError, ReplayError
from blis_replay.blis.latency.models import durations_us
from blis_replay.ingest.recording import Setting
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import EngineOverrides
from blis_replay.validate.what_if import what_if, whatif_answer
from blis_replay_labs.silicon.operators import OperatorModel
from blis_replay_labs.silicon.tabulate import Deployment, prompts_of, silicon_release, system_named, tabulate
from blis_replay_labs.synthetic.simulation import read_engine


class MadeHandle:
    """1 ms and 10 us a token, 2 us of which are all-reduces; attention 1 us per 10 tokens attended to."""

    compiled: ClassVar[list[tuple[str, str, dict[str, Any]]]] = []
    untimed = False

    @classmethod
    def compile(cls, folder: str, system: str, backend: str, **settings: Any) -> MadeHandle:
        if json.loads((Path(folder) / "config.json").read_text()).get("model_type") == "unheard":
            raise KeyError("unheard is no architecture\nof ours")
        cls.compiled.append((system, backend, settings))
        return cls()

    def mixed_step_breakdown(self, tokens: int, decodes: int, length: int, _out: int) -> tuple[float, ...]:
        if self.untimed:
            raise RuntimeError("no such table")
        products = 1 + (tokens + decodes) * 0.01
        prefill, decode = tokens * (length + 1) / 2 / 10_000, decodes * length / 10_000
        return products + prefill + decode, products, prefill, decode

    def mixed_step_breakdown_per_op(self, tokens: int, decodes: int, length: int, out: int) -> tuple[Any, ...]:
        (_all, products, *_attention), reduced = self.mixed_step_breakdown(tokens, decodes, length, out), tokens * 0.002
        return ([("context_gemm", products - reduced, 0.0, ""), ("context_ar_1", reduced, 0.0, "")], [], [])

    def decode_step_latency(self, decodes: int, context: int, _out: int) -> float:
        return 0.9 + decodes * 0.01 + decodes * context / 10_000

    def predict_prefill_latency(self, prompts: int, length: int, cached: int) -> float:
        tokens = prompts * (length - cached)
        return 1 + tokens * 0.01 + tokens * (cached + (length - cached + 1) / 2) / 10_000


@pytest.fixture
def made_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``aiconfigurator_core`` with two systems, one of which has no measurements."""
    package, sdk, engine = (ModuleType(f"aiconfigurator_core{part}") for part in ("", ".sdk", ".sdk.engine"))
    package.__file__ = str(tmp_path / "package" / "__init__.py")
    (tmp_path / "package" / "systems" / "data" / "h100_sxm" / "gemm").mkdir(parents=True)
    (tmp_path / "package" / "systems" / "data" / "l4").mkdir()
    engine.EngineHandle = MadeHandle  # type: ignore[attr-defined]
    for name, module in (("", package), (".sdk", sdk), (".sdk.engine", engine)):
        monkeypatch.setitem(sys.modules, f"aiconfigurator_core{name}", module)
    monkeypatch.setattr("blis_replay_labs.silicon.tabulate.version", lambda _name: "1.2.3")
    monkeypatch.setenv("AICONFIGURATOR_MODEL_CONFIGS_PATH", str(tmp_path))
    MadeHandle.compiled.clear()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text("{}")
    return path


def test_the_tables_are_the_package_s(made_package: None, config: Path) -> None:
    """Every formula is linear between knots, so nothing is lost but whole us of steps of 910 at least."""
    made = tabulate(Deployment(config, "H100-SXM", 2))
    assert made.tables.source == "aiconfigurator-core 1.2.3, h100_sxm, its current vLLM"
    assert (made.system, made.batches) == ("h100_sxm", 400)
    assert made.largest_error < 2e-3
    model = made.tables
    assert durations_us(model, [{"decode_tokens": 40, "context_tokens": 28_000}])[0] == 900 + 400 + 2_800
    mixed = {"prefill_tokens": 512, "prefill_requests": 1, "attended_tokens": 512 * 1_024}
    decodes = {"decode_tokens": 40, "context_tokens": 28_000}
    assert durations_us(model, [mixed | decodes])[0] == pytest.approx(1_000 + 5_520 + 52_429 + 2_800, rel=1e-3)


def test_the_deployment_is_asked_for(made_package: None, config: Path) -> None:
    """4 GPUs of which 2 split the experts: those left to split each expert are 2; a file of another name is copied."""
    other = config.rename(config.with_name("mine.json"))
    tabulate(Deployment(other, "NVIDIA H100 80GB HBM3", 4, 2, "fp8", "fp8"))
    ((system, backend, settings),) = MadeHandle.compiled
    assert (system, backend) == ("h100_sxm", "vllm")
    assert (settings["tp_size"], settings["moe_tp_size"], settings["moe_ep_size"]) == (4, 2, 2)
    assert (settings["gemm_quant_mode"], settings["kvcache_quant_mode"]) == ("fp8", "fp8")


@pytest.mark.parametrize(
    ("tokens", "attended", "prompts"),
    [(100, 300, (1, 100, 250)), (100, 50, (1, 100, 0)), (100, 13, (4, 25, 0)), (1, 8, (1, 1, 7))],
)
def test_prompts_that_attend_to_so_many(tokens: int, attended: int, prompts: tuple[int, int, int]) -> None:
    """One prompt of n tokens attends to (n + 1) / 2 and what is cached; shorter ones to less."""
    assert prompts_of(tokens, attended) == prompts


def test_what_the_package_has_not_is_one_line(made_package: None, config: Path) -> None:
    with pytest.raises(ReleaseError, match="no operator times of L4; aiconfigurator-core has h100_sxm"):
        system_named("L4")
    config.write_text('{"model_type": "unheard"}')
    with pytest.raises(ReleaseError, match="has no such deployment: 'unheard is no architecture") as refused:
        tabulate(Deployment(config, "H100-SXM"))
    assert "\n" not in str(refused.value)


def test_a_deployment_without_times_is_one_line(
    made_package: None, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package knows some data types of a GPU by name only."""
    monkeypatch.setattr(MadeHandle, "untimed", True)
    with pytest.raises(ReleaseError, match="has no times of it; try another --dtype"):
        tabulate(Deployment(config, "H100-SXM"))


def test_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    monkeypatch.setitem(sys.modules, "aiconfigurator_core", None)
    with pytest.raises(ReplayError, match=r"pip install 'blis-replay-labs\[silicon\]'"):
        tabulate(Deployment(config, "H100-SXM"))


def test_a_release_of_them_needs_no_package(made_package: None, config: Path) -> None:
    release, made = silicon_release("mine", "org/model", Deployment(config, "H100-SXM", 2))
    (entry,) = release.models
    assert isinstance(entry.latency, OperatorModel)
    assert entry.latency == made.tables
    assert (release.hardware, entry.tensor_parallelism) == ("H100-SXM", 2)


def test_captured_sizes_come_from_the_recorded_server(made_package: None, config: Path) -> None:
    """A log that prints [4] makes a decode of one request cost as much as 4: 3 tokens of 10 us more; no prefill."""
    release, _made = silicon_release("mine", "some/Model", Deployment(config, "H100-SXM"))
    recording = make_recording({"arrival_us": [0], "prompt_tokens": [10], "output_tokens": [3]})
    logged = recording.engine | {"cudagraph_capture_sizes": Setting("[4]", "server log")}
    padded, plain = (
        replay(replace(recording, engine=engine), release).result.steps for engine in (logged, recording.engine)
    )
    longer = [(steps["end_us"] - steps["start_us"]).tolist() for steps in (padded, plain)]
    assert [a - b for a, b in zip(*longer, strict=True)] == [0, 30, 30]


def test_captured_sizes_that_an_earlier_release_cut_short_pad_nothing(made_package: None, config: Path) -> None:
    """``1..512 (67 sizes)`` says two of 67; a batch of 3 would have cost as much as one of 67."""
    release, _made = silicon_release("mine", "some/Model", Deployment(config, "H100-SXM"))
    recording = make_recording({"arrival_us": [0], "prompt_tokens": [10], "output_tokens": [3]})
    stored = recording.engine | {"cudagraph_capture_sizes": Setting("1..512 (67 sizes)", "server log")}
    steps = [replay(replace(recording, engine=engine), release).result.steps for engine in (stored, recording.engine)]
    assert steps[0]["end_us"].tolist() == steps[1]["end_us"].tolist()


def test_other_captured_sizes_are_replayed_where_the_coefficients_know_padding(
    made_package: None, config: Path
) -> None:
    """With graphs of 4 only a decode of one request costs as much as 4: 3 tokens of 10 us more in two steps.

    A line through the tokens of a batch has no such time: it is refused instead of being replayed unchanged.
    """
    release, _made = silicon_release("mine", "some/Model", Deployment(config, "H100-SXM"))
    recording = make_recording({"arrival_us": [0], "prompt_tokens": [10], "output_tokens": [3]})
    changes: list[EngineOverrides] = [(("cudagraph_capture_sizes", sizes),) for sizes in ("4", "1", "1 2 4")]
    found = what_if(recording, release, changes, workers=1)
    means = [(point.values or {})["itl_mean_ms"] for point in (found.recorded, *found.points)]
    assert [round(1e3 * ((mean or 0) - (means[0] or 0))) for mean in means[1:]] == [30, 0, 0]
    assert "(cudagraph_capture_sizes not recorded)" in str(whatif_answer(found)).replace("\n  ", " ")
    with pytest.raises(NothingToJudgeError, match="ours has no times of padded batches, so other cudagraph_capture"):
        what_if(recording, release_of(), changes, workers=1)


def test_captured_sizes_come_from_a_file_of_engine_arguments(made_package: None, config: Path, tmp_path: Path) -> None:
    """They were read over by ``simulate --engine``: with graphs of 16 only, 9 decodes cost as much as 16."""
    release, _made = silicon_release("mine", "org/model", Deployment(config, "H100-SXM", 2))
    needed = "max_num_seqs: 8\nmax_num_batched_tokens: 64\nmax_model_len: 99\nasync_scheduling: false\n"
    (tmp_path / "e.yaml").write_text(f"{needed}tensor_parallel_size: 2\ncudagraph_capture_sizes: [16]\n")
    entry = read_engine(tmp_path / "e.yaml").entry(release, None)
    assert isinstance(entry.latency, OperatorModel)
    batches = [{"decode_tokens": count, "context_tokens": 90} for count in (9, 16)]
    nine, sixteen = durations_us(replace(release.models[0].latency, captured_sizes=(16,)), batches)
    assert durations_us(entry.latency, batches).tolist() == [nine, sixteen]
    assert nine > durations_us(release.models[0].latency, batches)[0]
