"""Files that a command writes at a path of the user: only this user can read them, and no link is followed."""

import os
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from hangwatch.cli.usage_errors import InputError
from hangwatch.tools.commands.output_files import write_new, write_page, write_text
from tests.other_users import needs_root


@pytest.mark.parametrize("write", [lambda path: write_text(path, "page"), lambda path: write_new(path, b"page")])
@pytest.mark.usefixtures("no_umask")
def test_written_file_is_private_whatever_the_umask(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "page")
    assert (tmp_path / "page").read_text() == "page"
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600


def test_earlier_file_is_replaced_and_becomes_private(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("a longer page of yesterday")
    (tmp_path / "page").chmod(0o644)
    write_text(tmp_path / "page", "page")
    assert (tmp_path / "page").read_text() == "page"
    assert (tmp_path / "page").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("write", [lambda path: write_text(path, "page"), lambda path: write_new(path, b"page")])
def test_file_that_does_not_fit_is_deleted(tmp_path: Path, write: Callable[[Path], None]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2, limits[1]))
    try:
        with pytest.raises(InputError, match="page: cannot be written: File too large"):
            write(tmp_path / "page")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not (tmp_path / "page").exists()


def test_link_in_place_of_the_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    (tmp_path / "page").symlink_to("other")
    with pytest.raises(InputError, match="it is a link: give the file itself"):
        write_text(tmp_path / "page", "page")
    assert (tmp_path / "other").read_text() == "kept"


def test_page_does_not_replace_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "incident.json").write_text("kept")
    with pytest.raises(InputError, match=r"incident\.json: exists and is no \.html file: give a new file"):
        write_page(tmp_path / "incident.json", "page")
    assert (tmp_path / "incident.json").read_text() == "kept"


@needs_root
def test_file_of_another_user_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "page").write_text("kept")
    os.chown(tmp_path / "page", 65534, 65534)
    with pytest.raises(InputError, match="belongs to another user"):
        write_text(tmp_path / "page", "page")
    assert (tmp_path / "page").read_text() == "kept"


def test_device_that_is_no_regular_file_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    write_text(Path("/dev/stdout"), "page\n")
    assert capfd.readouterr().out == "page\n"
