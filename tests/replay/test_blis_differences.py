"""Where BLIS is known to behave unlike vLLM: said of the runs that it touches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from blis_runs import release_of, run_with, small_recording
from blis_stand_in import HELP_BLACKBOX, write_stand_in
from recordings import make_recording

from blis_replay.blis.latency.models import LatencyModel, Lifecycle
from blis_replay.replay.blis_binary import overlapping_last_steps
from blis_replay.replay.driver import replay


class TestKnownDifferences:
    def test_overlapping_last_step(self) -> None:
        """A finishes at 100 with a last step of 10.

        Queued at 95, B comes in the last step; at 85 it does not; at 100 the server is idle.
        """
        finished, last, both = np.array([100, 200]), np.array([10, 10]), np.array([True, True])
        counts = [overlapping_last_steps(np.array([0, at]), finished, last, both) for at in (85, 95, 100)]
        assert counts == [0, 1, 0]

    def test_the_overlap_of_the_worked_example(self, tmp_path: Path) -> None:
        """blis-semantics 11, V2: step 3205-4210 is A's last when B is queued at 3300.

        Blackbox 1000 + 10 per prefill + 5 per decode token, delays 100 + 1 per prompt token
        and 20 per token: A has TTFT 2220 and E2E 4270, B 2220 and 2220.
        """
        recording = make_recording(
            {
                "arrival_us": [0, 3100],
                "prompt_tokens": [100, 100],
                "output_tokens": [3, 1],
                "ttft_us": [2220, 2220],
                "e2e_us": [4270, 2220],
            }
        )
        behaviour = "a, b = plain()\nwrite([a | dict(ttft_us=2220, e2e_us=4270), b | dict(ttft_us=2220, e2e_us=2220)])"
        release = release_of(
            LatencyModel("blackbox", 1_000_000, 10_000, 5_000, rounding="truncate"), Lifecycle(100.0, 1.0, 20.0)
        )
        run = run_with(write_stand_in(tmp_path, behaviour, HELP_BLACKBOX), recording, release)
        assert any(
            "about 1 requests came while the server ran nothing but a last step" in d for d in run.simulated.differences
        )
        # Our engine starts B's step when A's last has ended, at 4210 and not at 3300.
        assert (replay(recording, release).ttft_us - run.ttft_us).tolist() == [0, 910]

    def test_preemptions_are_taken_from_the_metrics(self, tmp_path: Path) -> None:
        behaviour = 'json.dump({"preemption_count": 3}, open(option["--metrics-path"], "w"))\nwrite(plain())'
        run = run_with(write_stand_in(tmp_path, behaviour), small_recording())
        assert any("BLIS preempted 3 times; it generates the output" in d for d in run.simulated.differences)

    def test_a_whole_prompt_in_the_cache(self, tmp_path: Path) -> None:
        """96 tokens are 6 blocks; vLLM computes the last of them again, BLIS would not."""
        recording = make_recording(
            {"arrival_us": [0, 1], "prompt_tokens": [96, 96], "output_tokens": [5, 5], "cached_prompt_tokens": [80, 80]}
        )
        run = run_with(write_stand_in(tmp_path), recording)
        assert any(d.startswith("2 prompts could be in the cache as a whole") for d in run.simulated.differences)

    def test_none_applies(self, tmp_path: Path) -> None:
        assert run_with(write_stand_in(tmp_path), small_recording()).simulated.differences == ()
