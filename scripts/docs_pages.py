"""The pages of the documentation and their order; each is a Markdown file of the repository."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Section of the navigation -> its pages, in the order of a first visit.
NAVIGATION: dict[str, tuple[str, ...]] = {
    "Start": ("README.md", "docs/quick-start.md", "docs/your-recording.md", "docs/case-study.md"),
    "Why is it off?": (
        "docs/attribution.md",
        "docs/timeline.md",
        "docs/report.md",
        "docs/workload-spec.md",
    ),
    "Coefficients": (
        "docs/cookbook.md",
        "docs/calibration.md",
        "docs/gating.md",
        "docs/physical.md",
        "docs/roofline.md",
        "docs/trees.md",
    ),
    "What is measured": ("docs/metrics.md", "docs/checks.md", "docs/load-generators.md"),
    "Recordings": ("docs/formats.md", "docs/collector.md", "docs/fuzzing.md"),
    "The simulator": ("docs/engine.md", "docs/workloads.md", "docs/cluster.md", "docs/studies.md"),
    "Using it": ("docs/commands.md", "docs/terminal.md", "docs/json.md", "docs/python.md"),
    "Inside": ("docs/architecture.md", "docs/extending.md", "docs/documentation.md", "docs/benchmarks.md"),
}


@dataclass(frozen=True)
class Page:
    """One page: its source, and the name of its HTML file."""

    source: Path
    html: str

    @property
    def text(self) -> str:
        """The Markdown as it stands in the repository."""
        return self.source.read_text("utf-8")

    @property
    def title(self) -> str:
        """The first heading."""
        return next(line[2:].strip() for line in self.text.splitlines() if line.startswith("# ")).replace("`", "")


def page_of(name: str) -> Page:
    """The page of a source such as ``docs/gating.md``; the README is the first one."""
    return Page(ROOT / name, "index.html" if name == "README.md" else f"{Path(name).stem}.html")


def all_pages() -> list[Page]:
    """Every page, in the order of the navigation."""
    return [page_of(name) for names in NAVIGATION.values() for name in names]
