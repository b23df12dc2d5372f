"""Docstrings, comments, messages, names and docs follow the writing rules of tests/prose.py."""

from pathlib import Path

import pytest

from tests import prose

BAD = (
    ("a.py", '"""Whether the socket is open."""\n', "1: opening"),
    ("a.py", '"""A module."""\n\ndef load():\n    """Who waits for the rank."""\n', "4: opening"),
    ("a.py", "x = 1\n# a rank whose stack is empty\n", "2: people"),
    ("a.py", 'print(f"{rank} waits: nobody has its lock")\n', "1: people"),
    ("a.py", '"""A sample.\n\nThe rank is accused\nby its peers."""\n', "3: phrase"),
    ("a.py", "class Queue:\n    def of(self, told: int) -> None:\n        pass\n", "2: name"),
    ("hangwatch/jobs/launch_utils.py", "x = 1\n", "1: name"),
    ("a.py", "class Job(Value):\n    found: int = 0\n", "2: name"),
    ("a.py", "def asked() -> None:\n    pass\n", "1: name"),
    ("hangwatch/a.py", 'class Kind(Enum):\n    LATE = "NotCome"\n', "2: name"),
    ("a.py", 'JOBS = Metric(name="jobs", help="jobs", labels=("who",))\n', "1: name"),
    ("hangwatch/a.py", 'REPORT = {"first_look": []}\n', "1: name"),
    ("a.toml", "told = 1\n", "1: name"),
    ("hangwatch/a.toml", '[Circle]\nmeans = "a deadlock"\n', "1: name"),
    ("hangwatch/jobs/a.py", "def load() -> None:\n    told = 1\n" + "    pass\n" * 14, "2: name"),
    (
        "hangwatch/jobs/a.py",
        "def load() -> None:\n" + "    pass\n" * 14 + "    print([one for one in ()])\n",
        "16: name",
    ),
    ("test_a.py", f"def test_{'a' * 76}():\n    pass\n", "1: name"),
    ("a.py", "# a rank of which the parent is none\n", "1: phrase"),
    ("a.toml", 'why = "rank 3 has not come"  # in a table\n', "1: phrase"),
    ("a.yaml", "rules:\n  # the job that somebody stopped\n  - alert: X\n", "2: people"),
    ("a.md", "# A page\n\n" + "word " * 20 + "\n" + "word " * 16 + "end.\n", "3: sentence"),
    ("a.md", f"A line\n{'word ' * 15}. {'word ' * 12}.\n", "2: line"),
)


@pytest.mark.parametrize(("file", "source", "expected"), BAD)
def test_planted_sentence_is_found(file: str, source: str, expected: str) -> None:
    found = [f"{finding.line}: {finding.rule}" for finding in prose.check(file, source)]
    assert expected in found


GOOD = (
    ("a.py", '"""True if the socket is open."""\n'),
    ("a.py", "# the engineer whose phone rings at night\n"),
    ("a.py", '"""Return the ranks that wait for `who`, and `nobody` otherwise."""\n'),
    ("a.py", 'USERS = ("root", "nobody")\n'),
    ("a.py", "# the number is None if the group is unknown\n"),
    ("a.py", "def load_table(path: str, *, seconds: float) -> None:\n    one = 1\n"),
    ("a.py", "#!/bin/sh whoami\nprint('there is none in the table')\n"),
    ("a.py", "# rank 3 has joined, rank 4 has not\n\n\n# a heartbeat of the rank\n"),
    ("hangwatch/jobs/launch_processes.py", "x = 1\n"),
    ("hangwatch/jobs/a.py", "def load() -> None:\n    told = 1\n" + "    pass\n" * 13),
    ("a.toml", 'why = "rank 3 has not joined the collective"\n'),
    ("a.md", f"A page.\n\n```\n{'word ' * 60}\nwho waits\n```\n\n| {'word ' * 40} |\n|---|\n"),
    (
        "a.md",
        "One sentence with `some code that has many many words` ends here. " + "word " * 9 + "\nword " * 20 + ".\n",
    ),
)


@pytest.mark.parametrize(("file", "source"), GOOD)
def test_plain_sentence_is_not_found(file: str, source: str) -> None:
    assert prose.check(file, source) == []


def test_folder_is_searched_and_data_is_not(tmp_path: Path) -> None:
    for name in ("docs/a.md", "tests/data/b.md", "tests/c.py", "tests/d.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    assert [path.name for path in prose.files(tmp_path)] == ["a.md", "c.py"]


def test_main_prints_findings_and_ends_with_1(tmp_path: Path, capsys, monkeypatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("The rank is accused.\n")
    monkeypatch.setattr("sys.argv", ["prose", str(page)])
    assert prose.main() == 1
    assert capsys.readouterr().out == f'{page}:1: phrase: "rank is accused .": write: suspect, culprit, check first\n'
    page.write_text("The rank is a suspect.\n")
    assert prose.main() == 0
