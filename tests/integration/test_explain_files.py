"""`hangwatch explain DIR` on folders in which others may write, and on files that are none."""

from __future__ import annotations

import os
import string
import subprocess
import sys
from pathlib import Path

from tests.conftest import DATA

LOG = "2026-11-22 12:00:02,100 INFO backward 812\n"
SECRET = "ValueError: the password of root"


def explain(*paths: Path | str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hangwatch", "explain", *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_log_folder_of_torchrun() -> None:
    done = explain(DATA / "explain" / "failed")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("First to fail: rank 1 (local rank 1) at 2026-11-22 02:51:31 UTC: ValueError")


def test_no_link_in_a_folder_is_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    (secret / "attempt_0" / "1").mkdir(parents=True)
    (secret / "attempt_0" / "1" / "stderr.log").write_text(f"Traceback (most recent call last):\n{SECRET}\n")
    logs = tmp_path / "logs"
    (logs / "run" / "attempt_0" / "0").mkdir(parents=True)
    (logs / "run" / "attempt_0" / "0" / "stdout.log").write_text(LOG)
    (logs / "run" / "attempt_0" / "1").symlink_to(secret / "attempt_0" / "1")
    (logs / "rank2.log").symlink_to(secret / "attempt_0" / "1" / "stderr.log")
    os.mkfifo(logs / "rank3.log")
    done = explain(logs)
    assert (done.returncode, done.stderr) == (0, "")
    assert "password" not in done.stdout
    assert "local rank 0 ends at 'INFO backward 812'" in " ".join(done.stdout.split())
    named = explain(logs / "rank2.log")
    assert "password" in named.stdout, "what a person names is read, link or not"


def test_what_cannot_be_read_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "attempt_0" / "0" / "error.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"message": {"message": "torn')
    done = explain(path)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{path}:1: is no error.json of torchelastic" in done.stderr
    long = tmp_path / "rank0.log"
    long.write_bytes(LOG.encode() * 3 + b"x" * (17 << 20))
    done = explain(long)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{long}:4: a line is longer than 16 MiB" in done.stderr


def test_a_progress_bar_longer_than_any_line_is_read(tmp_path: Path) -> None:
    bar = b"".join(
        b"\r%3d%%|###| %d/400000 [00:00<00:00, 123.4it/s, loss=3.14159]" % (n // 4000, n) for n in range(400_000)
    )
    (tmp_path / "rank0.log").write_bytes(bar)
    done = explain(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(bar) > 16 << 20
    assert "399999/400000" in done.stdout


def test_a_project_folder_is_read_for_its_dumps_and_the_rest_is_counted(tmp_path: Path) -> None:
    (tmp_path / "dump.txt").write_text((DATA / "explain" / "pgrep.txt").read_text())
    for letter in string.ascii_lowercase:
        (tmp_path / f"module_{letter}.py").write_text("import os\n")
    (tmp_path / "checkpoint.pt").write_bytes(b"PK\x03\x04\x00\x00" + bytes(1 << 20))
    hidden = tmp_path / ".venv"
    hidden.mkdir()
    (hidden / "activate").write_text("# not asked for\n")
    done = explain(tmp_path)
    assert "26 files hold no stack dump that hangwatch knows" in " ".join(done.stdout.split())
    assert "without text, left out: 1 file" in done.stdout
    assert "activate" not in done.stdout
