"""Traces without latencies (Azure LLM, Mooncake): what is read, what is refused."""

from __future__ import annotations

import csv
import gzip
import json
from datetime import datetime
from pathlib import Path

import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from blis_replay.base.errors import RecordingError
from blis_replay.ingest.readers.files import GZIP_MAGIC, ZSTD_MAGIC, RecordedFile
from blis_replay.ingest.readers.formats import RequestFormat
from blis_replay.ingest.readers.requests import RawPrompts, RequestsRead, in_send_order
from blis_replay_labs.formats.arrival_traces import AZURE_LLM, MOONCAKE, epoch_us

NOON = "2023-11-16 18:17:03"
AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def mooncake(timestamp_ms: object = 0, prompt: object = 600, output: object = 20, **more: object) -> str:
    return json.dumps({"timestamp": timestamp_ms, "input_length": prompt, "output_length": output, **more})


# Of each format the lines that begin a file, and a request.
SOUND = {
    "azure-llm": (AZURE_LLM, [AZURE_HEADER], f"{NOON},10,5"),
    "mooncake": (MOONCAKE, [], mooncake(1, hash_ids=[1, 2])),
}


def read(
    folder: Path, form: RequestFormat, *lines: str | bytes, end: bytes = b"\n"
) -> tuple[RequestsRead, RecordedFile]:
    path = folder / "trace"
    path.write_bytes(end.join(line.encode() if isinstance(line, str) else line for line in lines) + end)
    file = RecordedFile(path, path.name)
    return form.read(file, folder / "stamps"), file


def rows(found: RequestsRead) -> list[tuple[int, int, int]]:
    """Send time in us, prompt and output tokens."""
    return found.frame.select("sent_us", "prompt_tokens", "usage_output_tokens").rows()


def prompts(found: RequestsRead) -> RawPrompts:
    assert found.prefix is not None
    return found.prefix


@pytest.mark.parametrize(
    ("form", "lines", "expected"),
    [
        (AZURE_LLM, [AZURE_HEADER, f"{NOON}.9799600,4808,10"], [(1_700_158_623_979_960, 4808, 10)]),
        (MOONCAKE, [mooncake(1500), mooncake(1500.25)], [(1_500_000, 600, 20), (1_500_250, 600, 20)]),
    ],
)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_arrivals_and_lengths(
    tmp_path: Path, form: RequestFormat, lines: list[str], expected: list[tuple[int, int, int]], end: bytes
) -> None:
    found, file = read(tmp_path, form, *lines, end=end)
    assert rows(found) == expected
    assert found.frame["ttft_us"].null_count() == found.frame["e2e_us"].null_count() == len(found.frame)
    assert (found.model, file.tally.rejected_count) == (None, 0)
    assert found.clock_kind == ("epoch" if form is AZURE_LLM else "relative")


@pytest.mark.parametrize(
    ("stamp", "us"),
    [
        # 2023-11-16 18:17:03 UTC is 1,700,158,623 s of the epoch.
        (NOON, 1_700_158_623_000_000),
        ("2023-11-16T18:17:03Z", 1_700_158_623_000_000),
        ("2023-11-16 20:17:03.5+02:00", 1_700_158_623_500_000),
        ("2023-11-16 16:17:03.000001499-0200", 1_700_158_623_000_001),
        (f"{NOON}.0000005", 1_700_158_623_000_001),
        (f"{NOON}.9999999", 1_700_158_624_000_000),
        *((odd, None) for odd in ("", "0", "2023-13-16 18:17:03", "2023-11-16 25:17:03", "2023-11-16 18:17", "x" * 99)),
        ("٢٠٢٣-11-16 18:17:03", None),
    ],
)
def test_stamps_have_0_to_9_decimals_and_perhaps_an_offset(stamp: str, us: int | None) -> None:
    assert epoch_us(stamp) == us


@pytest.mark.parametrize(
    ("name", "broken", "reason"),
    [
        ("azure-llm", NOON, "1 columns where the header has 3"),
        ("azure-llm", "yesterday,10,5", "no usable arrival time"),
        ("azure-llm", f"{NOON},0,5", "a prompt length of '0'"),
        ("azure-llm", f"{NOON},10,-5", "an output length of '-5'"),
        ("azure-llm", f"{NOON},1e1,5", "a prompt length of '1e1'"),
        ("azure-llm", b"\xff\xfe,10,5", "no usable arrival time"),
        ("mooncake", '{"timestamp": 1, "input_length": 5', "truncated"),
        ("mooncake", "[1, 2]", "Expected `object`"),
        ("mooncake", b"\xff\xfe\x00", "malformed"),
        ("mooncake", b'{"timestamp": ' + b"[" * 100_000, "recursion"),
        *(("mooncake", mooncake(at), "no usable arrival time") for at in (-1, 1e300, True)),
        ("mooncake", '{"session_id": "s", "delay": 500, "input_length": 10}', "no usable arrival time"),
        ("mooncake", '{"timestamp": 9, "text_input": "no length"}', "a prompt length of 'None'"),
        ("mooncake", mooncake(output=2**40), "an output length"),
        *(("mooncake", mooncake(hash_ids=odd), "hash_ids") for odd in ("1 2", [1, -2], [1, 2**63], [1, True])),
    ],
)
def test_a_row_that_cannot_be_served_is_counted_and_costs_itself_only(
    tmp_path: Path, name: str, broken: str | bytes, reason: str
) -> None:
    form, head, good = SOUND[name]
    found, file = read(tmp_path, form, *head, good, broken, good)
    assert len(found.frame) == 2
    ((place, why),) = file.tally.rejected
    assert (place, reason in why) == (f"line {len(head) + 2}", True)


@pytest.mark.parametrize(
    ("head", "known"),
    [
        *(("\n".join([*head, good]).encode(), form) for form, head, good in SOUND.values()),
        (b"\xef\xbb\xbf" + AZURE_HEADER.encode(), AZURE_LLM),
        (b"\xef\xbb\xbf" + mooncake(hash_ids=[1]).encode(), MOONCAKE),
        ((mooncake()[:-1] + ', "text_input": "' + "x" * 70_000).encode()[: 64 << 10], MOONCAKE),
        *((odd, None) for odd in (b"", b"a\n" + AZURE_HEADER.encode(), b"Timestamp,Model\n1,2\n", b"\x89PNG\r\n")),
        *((odd, None) for odd in (b'{"resourceSpans": []}\n', b'[{"input_length": 1, "timestamp": 2}]')),
        (b'{"note": "\\"input_length\\": \\"timestamp\\":"}\n', None),
        (b"request_id,phase_type,t_start,t_end\nA,prefill,0.0,2.0\n", None),
    ],
)
def test_each_is_known_by_its_first_lines(head: bytes, known: RequestFormat | None) -> None:
    recognised = [form for form, _head, _good in SOUND.values() if form.recognises and form.recognises(head)]
    assert recognised == ([] if known is None else [known])


CELLS = st.sampled_from([f"{NOON}.1", "5", "0", "", "x", "-1", "1e400", "é", "9" * 40, '"[1, 2]"', "[]"])
VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers()))
OBJECTS = st.fixed_dictionaries({}, optional=dict.fromkeys(("timestamp", "input_length", "hash_ids"), VALUES))
LINES = st.one_of(
    st.binary(max_size=40).map(lambda raw: raw.translate(None, b'\r\n"')),
    st.lists(CELLS, min_size=1, max_size=9).map(",".join),
    OBJECTS.map(json.dumps),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
@settings(max_examples=100, deadline=None)
@given(lines=st.lists(LINES, max_size=20))
def test_every_line_is_read_or_rejected(
    tmp_path_factory: pytest.TempPathFactory, name: str, lines: list[str | bytes]
) -> None:
    form, head, good = SOUND[name]
    found, file = read(tmp_path_factory.mktemp("any"), form, *head, good, *lines)
    written = [line for line in file.path.read_bytes().split(b"\n")[len(head) :] if line.strip()]
    # White space alone is a row of one cell to the reader of CSV.
    assert len(found.frame) + file.tally.rejected_count >= len(written)
    assert len(found.frame) + file.tally.rejected_count <= 1 + sum(map(bool, lines))
    if found.prefix is not None:
        assert len(found.prefix.prompt) == len(found.frame)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND)
@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=300))
def test_any_bytes_are_rejected_or_a_recording_error(
    tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes
) -> None:
    assume(not content.startswith((GZIP_MAGIC, ZSTD_MAGIC)))
    if name == "azure-llm":  # without its columns there is nothing to read
        with pytest.raises(RecordingError, match="line 1"):
            read(tmp_path_factory.mktemp("bytes"), SOUND[name][0], content)
    else:
        found, _file = read(tmp_path_factory.mktemp("bytes"), SOUND[name][0], content)
        assert len(found.frame) <= content.count(b"\n")


def test_block_ids_are_those_of_512_tokens_the_last_one_partial(tmp_path: Path) -> None:
    """Format notes, section 5.4: ids = ceil(input_length / 512); 600 tokens have 2, 1,300 have 3."""
    lines = mooncake(5, hash_ids=[7, 9]), mooncake(0, 1300, hash_ids=[7, 8, 2**63 - 1])
    found, _file = read(tmp_path, MOONCAKE, *lines)
    _ordered, order, _zero_us = in_send_order(found.rows)
    tree = prompts(found).in_order(order)
    assert (tree.requests.rows(), found.remarks) == ([(0, 1), (1, 0)], ())
    assert tree.prompts.rows() == [(0, None, 0, 1024), (1, 0, 512, 1536)]  # both begin with block 7


@pytest.mark.parametrize(
    ("prompt", "ids", "block_tokens"),
    [(40, [1, 2, 3], 16), (1000, [1, 2, 3, 4, 5], None)],  # 1,000 tokens are 2 blocks of 512 or 63 of 16, never 5
)
def test_the_size_of_a_block_follows_from_the_number_of_ids(
    tmp_path: Path, prompt: int, ids: list[int], block_tokens: int | None
) -> None:
    found, _file = read(tmp_path, MOONCAKE, *[mooncake(prompt=prompt, hash_ids=ids)] * 3)
    assert (found.prefix is None, bool(found.remarks)) == (block_tokens is None, block_tokens is None)
    assert block_tokens is None or prompts(found).tokens.tolist() == [len(ids) * block_tokens]


@pytest.mark.parametrize(
    ("name", "count", "last_us"),
    [
        # First and last stamp by eye: 18:17:03.97996 to 19:14:19.928016, 18:15:46.68059 to 19:14:08.402527.
        ("code", 8_819, 3_435_948_056),
        ("conv", 19_366, 3_501_721_937),
    ],
)
def test_the_azure_traces_of_2023(data_pack: Path, tmp_path: Path, name: str, count: int, last_us: int) -> None:
    """Sums by another reader of CSV, times by Python's own parser of dates."""
    path = data_pack / "public-traces" / "azure-2023" / f"AzureLLMInferenceTrace_{name}.csv.gz"
    truth = list(csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines()))
    file = RecordedFile(path, path.name)
    frame = AZURE_LLM.read(file, tmp_path).frame
    assert (len(frame), file.tally.rejected_count) == (count, 0) == (len(truth), 0)
    assert frame["prompt_tokens"].sum() == sum(int(row["ContextTokens"]) for row in truth)
    assert frame["usage_output_tokens"].sum() == sum(int(row["GeneratedTokens"]) for row in truth)
    first_us = frame["sent_us"][0]
    assert int(frame["sent_us"].max()) - first_us == last_us  # type: ignore[arg-type]
    begin = datetime.fromisoformat(truth[0]["TIMESTAMP"][:26])
    for row, sent_us in zip(truth[::97], frame["sent_us"][::97], strict=True):
        elapsed = datetime.fromisoformat(row["TIMESTAMP"][:26]) - begin
        assert abs(elapsed.total_seconds() * 1e6 - (sent_us - first_us)) <= 1  # the 7th decimal is cut here


def test_the_conversation_trace_of_mooncake(data_pack: Path, tmp_path: Path) -> None:
    """Its lines read by another library; the first is 6,758 tokens with ids 0 to 13."""
    path = data_pack / "public-traces" / "mooncake" / "conversation_trace.jsonl.gz"
    truth = pl.read_ndjson(gzip.decompress(path.read_bytes()))
    file = RecordedFile(path, path.name)
    found = MOONCAKE.read(file, tmp_path)
    assert (len(found.frame), file.tally.rejected_count) == (12_031, 0) == (len(truth), 0)
    assert found.frame["sent_us"].to_list() == (truth["timestamp"] * 1000).to_list()
    assert found.frame["sent_us"].max() == 3_536_999_000
    assert found.frame["prompt_tokens"].sum() == truth["input_length"].sum()
    assert found.frame["usage_output_tokens"].sum() == truth["output_length"].sum()
    ids = [tuple(keys) for keys in truth["hash_ids"].to_list()]
    distinct = list(dict.fromkeys(ids))
    assert (distinct[0], found.remarks) == (tuple(range(14)), ())
    assert [distinct[prompt] for prompt in prompts(found).prompt] == ids
    assert prompts(found).tokens.tolist() == [512 * len(keys) for keys in distinct]
