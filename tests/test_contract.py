"""Adding a check takes one file and one test: a copy of the tree gets these, and nothing else changes."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.commands import Finished, finished
from tests.conftest import wait_for
from tests.servers import free_port

PACKAGE = Path(__file__).parents[1] / "hangwatch"

TEA = '''"""Whether there is tea.

A node without tea trains as well as any other. It does not page.
"""

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, critical, ok
from hangwatch.model import CheckVerdict
from hangwatch.probes.base import pseudo_files as pseudofiles
from hangwatch.probes.node.machine import Node


class Settings(contract.Settings, frozen=True):
    """How much tea there must be."""

    minimum_bytes: Annotated[int, Meta(ge=0, description="less tea than this is critical")] = 1


class Sample(contract.Sample, frozen=True):
    """The tea."""

    left_bytes: int


def observe(node: Node, _: Settings) -> Sample | None:
    """Look at the tea."""
    text = pseudofiles.read(node.proc_root / "self" / "comm", "tea")
    return Sample(left_bytes=len(text)) if isinstance(text, str) else None


METRICS = (Metrics[Sample, Sample](Metric("tea_left_bytes", "tea that is left", lambda sample: sample.left_bytes)),)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Enough is enough."""
    left = window[-1].left_bytes
    if left < settings.minimum_bytes:
        return critical("TeaLow", f"{left} bytes of tea are left", "put the kettle on")
    return ok("TeaThere", f"{left} bytes of tea are there")


CHECK = Check(observe, METRICS, judge, settings=Settings)
'''


class Tree:
    """A copy of the package, and commands that run in it as a user would run them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        shutil.copytree(PACKAGE, root / "hangwatch", ignore=shutil.ignore_patterns("__pycache__"))

    def add_check(self, name: str, text: str) -> None:
        (self.root / "hangwatch" / "checks" / f"{name}.py").write_text(text)

    def command(self, *arguments: str) -> list[str]:
        program = "from hangwatch.cli import main; main()"
        return [sys.executable, "-c", program, *arguments]

    def environ(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}

    def run(self, *arguments: str) -> Finished:
        return finished(*self.command(*arguments), env=self.environ(), cwd=self.root)

    def python(self, program: str) -> str:
        return finished(sys.executable, "-c", program, env=self.environ(), cwd=self.root, check=True).stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    tree = Tree(tmp_path_factory.mktemp("tree"))
    tree.add_check("tea", TEA)
    return tree


def test_it_is_a_copy_that_runs(tree: Tree) -> None:
    where = tree.python("import hangwatch; print(hangwatch.__file__)").strip()
    assert where == str(tree.root / "hangwatch" / "__init__.py")


def test_one_file_is_all_that_was_added(tree: Tree) -> None:
    def files(root: Path) -> dict[str, bytes]:
        kept = (one for one in root.rglob("*") if one.is_file() and "__pycache__" not in one.parts)
        return {str(one.relative_to(root)): one.read_bytes() for one in kept}

    ours, theirs = files(PACKAGE), files(tree.root / "hangwatch")
    assert theirs.keys() - ours.keys() == {"checks/tea.py"}


def test_hangwatch_check_runs_it(tree: Tree) -> None:
    answer = tree.run("check", "tea", "--json")
    report = json.loads(answer.stdout)
    assert answer.returncode == 0, answer.stderr
    assert [one["reason"] for one in report["checks"]] == ["TeaThere"]
    assert report["checks"][0]["points"][0]["name"] == "hangwatch_tea_left_bytes"
    everything = json.loads(tree.run("check", "--json").stdout)
    assert "tea" in {one["check"] for one in everything["checks"]}


def test_its_settings_are_in_the_configuration(tree: Tree, tmp_path: Path) -> None:
    sample = tree.run("config", "--sample").stdout
    assert "[checks.tea]" in sample
    assert "minimum_bytes = 1  # less tea than this is critical" in sample
    wrong = tmp_path / "wrong.toml"
    wrong.write_text("[checks.tea]\nminimum_byte = 3\n")
    answer = tree.run("config", "--check", str(wrong))
    assert answer.returncode == 2
    assert "[checks.tea]" in answer.stderr and "did you mean 'minimum_bytes'" in answer.stderr
    thirsty = tmp_path / "thirsty.toml"
    thirsty.write_text("[checks.tea]\nminimum_bytes = 1000\n")
    answer = tree.run("check", "tea", "--config", str(thirsty))
    assert answer.returncode == 2
    assert "TeaLow" in answer.stdout and "put the kettle on" in answer.stdout


def test_it_is_in_the_page_of_checks(tree: Tree) -> None:
    page = tree.python(
        f"import sys; sys.path.append({str(Path(__file__).parents[1])!r})\n"
        "from hangwatch.checks.framework import registry\n"
        "from tests import checks_page\n"
        "print(checks_page.page(registry.checks()))"
    )
    assert "## tea" in page
    assert "Whether there is tea." in page
    assert "CRITICAL: `TeaLow`" in page
    assert "| `minimum_bytes` | `1` | less tea than this is critical |" in page
    assert "| `hangwatch_tea_left_bytes` | tea that is left |" in page


@contextmanager
def daemon(tree: Tree, folder: Path) -> Iterator[str]:
    """Start `hangwatch run` from the copy. Yield the address at which it serves."""
    port = free_port()
    settings = folder / "hangwatch.toml"
    settings.write_text(f'[http]\nlisten = "127.0.0.1"\nport = {port}\n[store]\ndirectory = "{folder / "state"}"\n')
    with (folder / "log").open("w") as log:
        running = subprocess.Popen(
            tree.command("run", "--config", str(settings)), stdout=log, stderr=log, env=tree.environ(), cwd=tree.root
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        running.terminate()
        running.wait(60)


def fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return str(answer.read().decode())
    except urllib.error.URLError:
        return ""


def test_the_daemon_runs_it_and_exports_its_numbers(tree: Tree, tmp_path: Path) -> None:
    with daemon(tree, tmp_path) as address:
        text = wait_for(
            lambda: found if "hangwatch_tea_left_bytes" in (found := fetch(f"{address}/metrics")) else "",
            "the tea in /metrics",
            60,
        )
    assert re.search(r"^# HELP hangwatch_tea_left_bytes tea that is left$", text, re.M)
    assert re.search(r"^# TYPE hangwatch_tea_left_bytes gauge$", text, re.M)
    assert re.search(r"^hangwatch_tea_left_bytes [1-9]", text, re.M)
    assert re.search(r'^hangwatch_check_status\{.*check="tea".*\}', text, re.M)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("CHECK = None\n", "has no CHECK = Check(...)"),
        (TEA, "metric 'tea_left_bytes' belongs to milk.py"),
    ],
)
def test_a_file_that_is_no_check_is_named_without_a_traceback(tree: Tree, text: str, problem: str) -> None:
    tree.add_check("milk", text)
    try:
        answer = tree.run("check")
    finally:
        (tree.root / "hangwatch" / "checks" / "milk.py").unlink()
    assert answer.returncode == 2
    assert problem in answer.stderr
    assert "hangwatch/checks/" in answer.stderr and "Traceback" not in answer.stderr
