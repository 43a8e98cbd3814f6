"""When two names mean the same GPU: nvidia-smi's, cloud catalogues' and datasheets' spellings."""

from __future__ import annotations

import pytest

from blis_replay.base.errors import ReleaseError
from blis_replay.blis.latency.datasheets import Architecture, gpu_named, gpus_of
from blis_replay.blis.latency.gpu_names import another_gpu, same_gpu
from blis_replay.blis.latency.physical import most_kv_blocks


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("H100", "H100-SXM-80GB"),
        ("h100", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),  # what nvidia-smi prints of the SXM form
        ("H100-SXM5-80GB", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("AMD Instinct MI300X", "MI300X"),
        ("A100-SXM4-80GB, H100-SXM-80GB", "H100"),  # a release for two
        ("8xH100", "H100-SXM-80GB"),
        ("4x A100-80GB", "NVIDIA A100-SXM4-80GB"),
        ("H100x8", "H100SXM"),
        ("RTX4090", "NVIDIA GeForce RTX 4090"),
        ("AMD EPYC 9654", "CPU"),
    ],
)
def test_the_same_gpu(one: str, other: str) -> None:
    assert same_gpu(one, other)
    assert same_gpu(other, one)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("H100-PCIe", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA H100 NVL", "H100-SXM-80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM4-80GB"),
        ("H200", "H100"),
        ("MI300A", "MI300X"),
        ("not recorded", "H100-SXM-80GB"),
        ("", "H100"),
    ],
)
def test_another_gpu(one: str, other: str) -> None:
    assert not same_gpu(one, other)
    assert not same_gpu(other, one)


@pytest.mark.parametrize(
    ("one", "other", "sure"),
    [
        ("A100-80GB", "H100-SXM-80GB", True),
        ("H100-PCIe", "H100-SXM-80GB", True),
        ("CPU", "H100", True),
        ("H200", "H100-SXM-80GB", True),
        ("a3-highgpu-8g", "H100", False),  # a machine of eight H100s
        ("unknown", "H100", False),
        ("8xH100", "H100", False),
    ],
)
def test_names_that_are_of_different_gpus_for_sure(one: str, other: str, sure: bool) -> None:
    assert another_gpu(one, other) == another_gpu(other, one) == sure


def test_a_datasheet_is_found_by_any_spelling_that_means_one_gpu() -> None:
    assert gpu_named("NVIDIA H100 80GB HBM3") == gpu_named("H100-SXM-80GB") == gpu_named("H100-SXM")
    assert gpu_named("NVIDIA H100 NVL").name == "H100-NVL"
    with pytest.raises(ReleaseError, match="no datasheet of the hardware H100;"):
        gpu_named("H100")  # SXM or NVL


SHEET = """
RTX-4090:
  source: NVIDIA Ada whitepaper
  memory_bandwidth: 1.008 TB/s
  compute: 165.2 TFLOP/s
  compute_8_bit: 330.3 TFLOP/s
  link_bandwidth: 32 GB/s
  memory: 24 GB
"""


def test_a_file_of_datasheets_says_what_a_gpu_can_do() -> None:
    """8-bit products at their own peak; 32-bit ones, of which the sheet says nothing, as those of 16 bits."""
    gpus = gpus_of(SHEET, "mine.yaml")
    gpu = gpu_named("NVIDIA GeForce RTX 4090", gpus)
    assert (gpu.memory_bytes_per_s, gpu.link_bytes_per_s, gpu.memory_bytes) == (1.008e12, 32e9, 24e9)
    assert [gpu.flops_at(width) for width in (1, 2, 4)] == [330.3e12, 165.2e12, 165.2e12]
    assert gpu.source == "NVIDIA Ada whitepaper"


def test_the_memory_of_a_gpu_bounds_its_kv_blocks() -> None:
    """Llama-3.1-8B on an RTX 4090: (0.9 * 24 GB - 16.06 GB) / (16 * 131,072 bytes); a recorded server had 2,588."""
    llama = Architecture(32, 4096, 32, 8, 128, 14336, 128256)
    assert most_kv_blocks(llama, gpu_named("RTX-4090", gpus_of(SHEET, "mine.yaml")), 1) == 2641
    assert most_kv_blocks(llama, gpu_named("H100-SXM"), 1) is None  # the sheet that ships has no memory


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("32 GB/s", "32", "field RTX-4090.link_bandwidth: is 32, and not a number with a unit"),
        ("32 GB/s", "-32 GB/s", "field RTX-4090.link_bandwidth: is -32 GB/s; write a number with a unit above 0"),
        ("  link_bandwidth: 32 GB/s\n", "", "field RTX-4090.link_bandwidth: is missing"),
        ("link_bandwidth", "link", "field RTX-4090.link: is not a field of a datasheet; remove it, or use one of"),
        (SHEET, "{}", "has no GPU"),
        (SHEET, "- 1", "mine.yaml"),
    ],
)
def test_what_is_wrong_with_a_datasheet_is_named(old: str, new: str, complaint: str) -> None:
    with pytest.raises(ReleaseError, match=r"mine\.yaml") as refused:
        gpus_of(SHEET.replace(old, new), "mine.yaml")
    assert complaint in str(refused.value)
