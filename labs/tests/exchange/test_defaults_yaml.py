"""BLIS's own defaults.yaml: written, read, and what neither form can say of the other."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.kernel import state as k
from blis_replay.blis.kernel.step_time import step_duration_us
from blis_replay.blis.latency.models import Latency, LatencyModel, Lifecycle, PrefillBeyond, Regime, RegimeModel
from blis_replay.blis.releases.release import CoefficientRelease, ModelEntry, bundled_releases, parse_release
from blis_replay_labs.exchange.defaults import format_defaults, parse_defaults, rows_of

# Rows of the file as published in March 2026 (blis-semantics, section 8).
PUBLISHED = """
defaults:
  meta-llama/llama-3.1-8b-instruct:
    GPU: H100
    tensor_parallelism: 2
    vllm_version: vllm/vllm-openai:v0.8.4
    hf_repo: meta-llama/Llama-3.1-8B-Instruct
workloads:
  chatbot: {prompt_tokens: 256}
models:
- {GPU: H100, id: meta-llama/llama-3.1-8b-instruct, tensor_parallelism: 2, total_kv_blocks: 132139, best_loss: 424.5,
   vllm_version: v0.8.4, alpha_coeffs: [1601.350510688092, 3.512476196805965, 1805.5430360826988],
   beta_coeffs: [6910.420479880494, 17.67057489844186, 2.8377471109943855]}
- {GPU: A100-80, id: meta-llama/llama-3.1-8b-instruct, tensor_parallelism: 2, vllm_version: v0.8.4,
   alpha_coeffs: [2943.6134268743335, 2.151286397723518, 14229.18244730705],
   beta_coeffs: [8001.630597822392, 26.362876080324924, 14.969035206354745]}
- {GPU: H100, id: codellama/codellama-34b-instruct-hf, tensor_parallelism: 1, vllm_version: v0.8.4,
   alpha_coeffs: [13450.510995636703, 0.041813767451373045, 0.0],
   beta_coeffs: [26595.2781995357, 96.28441960829817, 56.58626882402723]}
"""


def duration_us(latency: Latency, prefill: int, decode: int) -> int:
    batch = np.zeros(1, k.BATCH)
    batch["prefill_tokens"], batch["decode_tokens"] = prefill, decode
    return int(step_duration_us(*latency.for_kernel(), batch, 0))


def release_of(*entries: ModelEntry, hardware: str = "H100-SXM-80GB") -> CoefficientRelease:
    return CoefficientRelease("mine", "valid", "s", "t", hardware, "", entries, fitted_on=())


def linear(intercept: int, prefill: int, decode: int, **others: object) -> LatencyModel:
    return LatencyModel("blackbox", intercept, prefill, decode, **others)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_published_row_gives_the_published_step() -> None:
    """Worked vector V6 of blis-semantics: trunc(6910.42 + 17.670575 * 512) = 15,957 us; delays as they stand."""
    row = rows_of(parse_defaults(PUBLISHED, "defaults.yaml"), "H100", None, "defaults.yaml")[0]
    assert duration_us(row.entry.latency, 512, 0) == 15_957
    assert row.entry.lifecycle == Lifecycle(1601.350510688092, 3.512476196805965, 1805.5430360826988)
    assert (row.entry.model, row.gpu) == ("meta-llama/Llama-3.1-8B-Instruct", "H100")


@pytest.mark.parametrize(
    ("gpu", "version", "complaint"),
    [
        (None, None, "has 3 rows, of several GPUs, and a release is of one; choose with --gpu (A100-80, H100)"),
        ("TPU", None, "none is of that GPU and version of vLLM"),
        ("H100", "v0.9", "none is of that GPU and version of vLLM; choose with --gpu (A100-80, H100) and --vllm-ver"),
    ],
)
def test_a_release_is_of_one_gpu(gpu: str | None, version: str | None, complaint: str) -> None:
    with pytest.raises(ReleaseError) as refused:
        rows_of(parse_defaults(PUBLISHED, "defaults.yaml"), gpu, version, "defaults.yaml")
    assert complaint in str(refused.value)


def test_two_versions_of_a_model_leave_a_choice() -> None:
    twice = PUBLISHED.replace("GPU: A100-80", "GPU: H100").replace("26.362876080324924", "1")
    with pytest.raises(ReleaseError, match="several for one model and tensor parallelism"):
        rows_of(parse_defaults(twice, "d"), "H100", None, "d")


COEFFICIENT_NS = st.integers(0, 10**8)


@pytest.mark.slow
@given(
    st.tuples(COEFFICIENT_NS, COEFFICIENT_NS, COEFFICIENT_NS),
    st.sampled_from(["round_half_up", "truncate"]),
    st.tuples(*[st.integers(0, 10**7)] * 3),
    st.integers(0, 2048),
    st.integers(0, 256),
)
def test_what_is_written_is_read_again(
    beta: tuple[int, int, int], rounding: str, alpha: tuple[int, int, int], prefill: int, decode: int
) -> None:
    """Equal step times, whatever the rounding: truncating half a us more is rounding half up."""
    latency = linear(*beta, rounding=rounding)
    delays = Lifecycle(*(value / 1000 for value in alpha))
    text = format_defaults(release_of(ModelEntry("Org/Model-7B", 2, latency, delays))).text
    (row,) = parse_defaults(text, "defaults.yaml")
    assert duration_us(row.entry.latency, prefill, decode) == duration_us(latency, prefill, decode)
    assert (row.entry.model, row.entry.tensor_parallelism, row.entry.lifecycle) == ("Org/Model-7B", 2, delays)


def test_the_file_has_the_keys_that_blis_reads_and_no_other() -> None:
    document = yaml.safe_load(format_defaults(release_of(ModelEntry("A/B", 1, linear(1, 1, 1), Lifecycle()))).text)
    assert set(document) == {"defaults", "models"}
    assert set(document["models"][0]) == {
        *("id", "GPU", "tensor_parallelism", "vllm_version", "alpha_coeffs", "beta_coeffs")
    }
    assert document["defaults"] == {
        "a/b": {"GPU": "H100", "tensor_parallelism": 1, "vllm_version": "not stated", "hf_repo": "A/B"}
    }


@pytest.mark.parametrize(("hardware", "gpu"), [("H100-SXM", "H100"), ("A100-SXM-80GB", "A100-80"), ("TPU", "TPU")])
def test_gpus_have_their_names_in_blis(hardware: str, gpu: str) -> None:
    entry = ModelEntry("A/B", 1, linear(1, 1, 1), Lifecycle())
    assert yaml.safe_load(format_defaults(release_of(entry, hardware=hardware)).text)["models"][0]["GPU"] == gpu


def test_the_cost_of_a_context_goes_into_the_decode() -> None:
    """18.4 us and 700 tokens of 29 ns are 38.7 us a decode, and that is said."""
    entry = ModelEntry("A/B", 1, linear(13_614_000, 42_900, 18_400, per_context_token_ns=29), Lifecycle())
    written = format_defaults(release_of(entry), context_tokens=700)
    assert yaml.safe_load(written.text)["models"][0]["beta_coeffs"] == [13_614.5, 42.9, 38.7]
    assert written.not_carried[0] == "A/B tp 1: the cost of a context is that of 700 tokens, whatever a request has"


def test_what_blis_does_not_have_is_named() -> None:
    delays = Lifecycle(1, 2, 3, post_request_us=4, scheduling_us=5, preemption_us=6, first_token_per_decode_us=7)
    latency = replace(linear(1, 1, 1), prefill_beyond=PrefillBeyond(100, 1))
    line = ModelEntry("A/Line", 1, latency, delays, applies_to=("x-*",))
    bent = ModelEntry("A/Bent", 1, RegimeModel((Regime("all", 1.0, ()),)), Lifecycle())
    told = " | ".join(format_defaults(release_of(line, bent)).not_carried)
    for what in ("first_token_per_decode", "post_request", "scheduling", "preemption", "prefill_beyond"):
        assert f"A/Line tp 1: BLIS has no {what}" in told
    assert "A/Line tp 1: BLIS applies it to every experiment" in told
    assert "A/Bent tp 1 has no line for its step time: left out" in told
    assert "total_kv_blocks are not in a release" in told


def test_nothing_to_write_is_an_error_with_the_reasons() -> None:
    """The bundled release has context costs and bent lines throughout."""
    release = parse_release(bundled_releases()["h100-vllm-0.15.1"], "h100-vllm-0.15.1")
    with pytest.raises(ReleaseError, match=r"70b-hf tp 4 has no line .*tp 2 has a cost per context token"):
        format_defaults(release)


def test_entries_that_blis_cannot_tell_apart_are_refused() -> None:
    entry = ModelEntry("A/B", 1, linear(1, 1, 1), Lifecycle())
    with pytest.raises(ReleaseError, match="several entries for a/b tp 1"):
        format_defaults(release_of(entry, replace(entry, applies_to=("b-*",))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[1, 2", "not YAML"),
        ("- a\n", "is a list of 1; write key: value pairs"),
        ("[" * 5_000, "not YAML"),
        ("defaults: {}\ntrained_physics_coefficients: {}\n", "field models: is missing; only files of builds with"),
        ("models: 3\n", "field models: is 3; write a list"),
        ("models: [3]\n", "field models[0]: is 3; write key: value pairs"),
        ("models:\n- !!python/object/apply:os.system ['true']\n", "not YAML"),
        (PUBLISHED.replace("6910.420479880494", ".nan"), "field models[0].beta_coeffs[0]: is nan; write a number"),
        (PUBLISHED.replace("6910.420479880494", ".inf"), "field models[0].beta_coeffs[0]: is inf; write a number"),
        (
            PUBLISHED.replace("17.67057489844186, ", ""),
            "models[0].beta_coeffs: is a list of 2; write a list of 3",
        ),
        (PUBLISHED.replace("tensor_parallelism: 2, t", "tensor_parallelism: -2, t"), "models[0].tensor_parallelism"),
        (PUBLISHED.replace("hf_repo: meta-llama/Llama-3.1-8B-Instruct", "hf_repo: 3"), "hf_repo: is 3; write text"),
        (PUBLISHED.replace("GPU: H100, id", "GPU: [H100], id"), "field models[0].GPU: is a list of 1; write text"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(text: str, complaint: str) -> None:
    with pytest.raises(ReleaseError) as refused:
        parse_defaults(text, "defaults.yaml")
    assert str(refused.value).startswith("defaults.yaml")
    assert complaint in str(refused.value)
    assert "\n" not in str(refused.value)
