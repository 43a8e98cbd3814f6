"""What a page says below its numbers: on what they rest, and why some are missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from blis_replay.blis.releases.release import FittedOn
from blis_replay.fixtures.bundled import bundled_recording
from blis_replay.ingest.recording import Setting
from blis_replay.replay.driver import replay
from blis_replay.replay.mode import ReplayMode
from blis_replay.replay.release_file import load_release
from blis_replay.validate.comparison.compare import compare_replay
from blis_replay.validate.comparison.comparison import Comparison
from blis_replay.validate.comparison.pages import notes
from blis_replay.validate.experiment import DEFAULT_RELEASE
from blis_replay.validate.judgement import remark
from blis_replay.validate.text.messages import words

SLUG = "20260218-150304-codellama-34b-tp2-general"


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    run = replay(bundled_recording(SLUG), load_release(DEFAULT_RELEASE), ReplayMode())
    return compare_replay(run)


def on(comparison: Comparison, hardware: str | None) -> list[str]:
    """The notes, had the recording named this hardware."""
    named = replace(comparison, recording=replace(comparison.recording, hardware=hardware))
    return [words(note) for note in notes(named)]


def test_coefficients_of_another_gpu_are_said(comparison: Comparison) -> None:
    assert "hardware: A100-SXM4-80GB; the coefficients are for H100-SXM-80GB" in on(comparison, "A100-SXM4-80GB")
    assert "hardware: not recorded; the coefficients are for H100-SXM-80GB" in on(comparison, None)
    fitted = remark("hardware", recorded="CPU", release=None)
    assert words(fitted) == "hardware: CPU; the coefficients are for a GPU that their recordings do not name"


@pytest.mark.parametrize("hardware", ["H100-SXM-80GB", "H100", "h100"])
def test_the_same_gpu_by_a_shorter_name_is_no_other(comparison: Comparison, hardware: str) -> None:
    assert not [note for note in on(comparison, hardware) if note.startswith("hardware")]


def test_a_data_type_that_the_coefficients_do_not_name_is_said(comparison: Comparison) -> None:
    """The release that ships names none; a recording of its own weights in 16 bits is no other."""

    def shown(dtype: str) -> list[str]:
        engine = {**comparison.recording.engine, "dtype": Setting(dtype, "log")}
        other = replace(comparison.recording, slug="other", content_hash="other", engine=engine)
        return [words(n) for n in notes(replace(comparison, recording=other, use="held out")) if n.code == "data_type"]

    assert shown("fp8") == ["data type: fp8; the coefficients do not say theirs, and 16 bits are usual"]
    assert shown("bfloat16") == []


def test_coefficients_of_another_vllm_are_said(comparison: Comparison) -> None:
    """The release that ships was fitted on servers of 0.15.1: a repair of it is no other."""

    def shown(version: str | None) -> list[dict[str, object]]:
        engine = {name: value for name, value in comparison.recording.engine.items() if name != "vllm_version"}
        engine |= {} if version is None else {"vllm_version": Setting(version, "log")}
        named = replace(comparison, recording=replace(comparison.recording, engine=engine))
        return [dict(n.values) for n in notes(named) if n.code == "other_vllm"]

    assert shown("0.11.0") == [{"recorded": "0.11.0", "fitted": ("0.15.1",)}]
    for alike in ("0.15.2", "v0.15.1", "0.15+cpu", "unknown", None):
        assert shown(alike) == []


def test_coefficients_fitted_with_other_layers_are_said(comparison: Comparison) -> None:
    """A release says it of each recording that it was fitted on, or it is an older one."""

    def shown(*layers: str | None) -> list[dict[str, object]]:
        fits = tuple(FittedOn(f"run {i}", "h", "steps", layers=said) for i, said in enumerate(layers))
        run = replace(comparison.run, release=replace(comparison.run.release, fitted_on=fits))
        return [dict(n.values) for n in notes(replace(comparison, replay=run)) if n.code == "other_layers"]

    assert shown("window 512 x5, full") == [{"replayed": "full", "fitted": ("window 512 x5, full",)}]
    assert shown("window 512 x5, full", "full") == shown("window 512 x5, full", None) == shown() == []


def test_numbers_that_are_missing_for_one_reason_share_a_line(comparison: Comparison) -> None:
    """Published quantiles bracket the gaps of 34b-general; without them, all are named at once."""
    cells = comparison.metrics["itl"]
    stripped = {
        name: replace(cell, a_us=None, reason="no token times recorded") if name != "mean" else cell
        for name, cell in cells.items()
    }
    shown = notes(replace(comparison, metrics={**comparison.metrics, "itl": stripped}))
    assert [words(note) for note in shown if note.code == "missing"] == [
        "ITL p50, p90, p99 not observed: no token times recorded"
    ]
