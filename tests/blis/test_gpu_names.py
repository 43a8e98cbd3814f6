"""When two names mean the same GPU: nvidia-smi's, cloud catalogues' and datasheets' spellings."""

from __future__ import annotations

import pytest

from blis_replay.blis.errors import ReleaseError
from blis_replay.blis.latency.gpu import gpu_named, same_gpu


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


def test_a_datasheet_is_found_by_any_spelling_that_means_one_gpu() -> None:
    assert gpu_named("NVIDIA H100 80GB HBM3") == gpu_named("H100-SXM-80GB") == gpu_named("H100-SXM")
    assert gpu_named("NVIDIA H100 NVL").name == "H100-NVL"
    with pytest.raises(ReleaseError, match="no datasheet of the hardware H100;"):
        gpu_named("H100")  # SXM or NVL
