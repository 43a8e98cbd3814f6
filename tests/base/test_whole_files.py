"""Outputs appear whole: on a full disk, or when making them fails, the file that was there stays."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from full_disk import files_of_at_most

from blis_replay.base.files import whole_file, whole_files, write_whole


def test_a_full_disk_leaves_the_good_file_and_names_it(tmp_path: Path) -> None:
    """Nothing half-written lies beside it either."""
    report = tmp_path / "report.html"
    assert write_whole(report, "good: ä") == 8  # bytes, of which ä has two
    with (
        files_of_at_most(100),
        pytest.raises(OSError, match="too large; the file that was there is as it was") as caught,
    ):
        write_whole(report, "x" * 101)
    assert caught.value.filename == str(report)
    assert report.read_text("utf-8") == "good: ä"
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_what_fails_while_it_is_made_does_not_appear(tmp_path: Path) -> None:
    """An error of the maker leaves as it is."""
    with pytest.raises(ZeroDivisionError), whole_file(tmp_path / "new") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert not list(tmp_path.iterdir())


def test_a_file_keeps_its_permissions_and_a_link_what_it_points_to(tmp_path: Path) -> None:
    """A new one has what the user's umask leaves, as any file."""
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before", "utf-8")
    target.chmod(0o640)
    link.symlink_to(target)
    write_whole(link, "after")
    write_whole(tmp_path / "new", "")
    mask = os.umask(0)
    os.umask(mask)
    assert (link.is_symlink(), target.read_text("utf-8")) == (True, "after")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o666 & ~mask


def test_a_device_is_written_to(tmp_path: Path) -> None:
    """``--out /dev/null`` must not become a file of that name."""
    write_whole("/dev/null", "gone")
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    with pytest.raises(OSError, match=r"^\[Errno \d+\] No such file or directory: '.*none/report.html'$"):
        write_whole(tmp_path / "none" / "report.html", "")


def test_a_disk_that_fills_up_at_the_second_table_leaves_nothing_of_the_first(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "requests").write_text("of before", "utf-8")
    for folder, left in ((tmp_path / "there", ["requests"]), (tmp_path / "new", [])):
        with pytest.raises(OSError, match="No space left") as error, whole_files(folder) as scratch:
            write_whole(scratch / "requests", "of now")
            raise OSError(28, "No space left on device", str(scratch / "steps"))
        assert error.value.filename == str(folder)
        assert [path.name for path in folder.glob("*")] == left
    assert (tmp_path / "there" / "requests").read_text("utf-8") == "of before"
    assert not (tmp_path / "new").exists()


def test_whole_tables_take_the_place_of_earlier_ones_and_leave_the_rest(tmp_path: Path) -> None:
    for name in ("requests", "notes"):
        (tmp_path / name).write_text("of before", "utf-8")
    with whole_files(tmp_path) as scratch:
        write_whole(scratch / "requests", "of now")
        write_whole(scratch / "steps", "of now")
    assert {path.name: path.read_text("utf-8") for path in tmp_path.iterdir()} == {
        "requests": "of now",
        "steps": "of now",
        "notes": "of before",
    }
