"""SECURITY.md is true: its links exist, and the code has the settings and defaults that it lists."""

import ast
import re
from pathlib import Path

from hangwatch.config import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()


def test_every_file_that_it_names_is_there() -> None:
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]+)\)", PAGE)]
    assert len(links) > 20
    assert [link for link in links if not (ROOT / link).exists()] == []
    attacks = PAGE.partition("## What a hostile user can write")[2].partition("\n## ")[0].splitlines()[4:]
    assert [row for row in attacks if row and "](tests/" not in row] == []


def test_every_setting_that_it_names_has_that_default() -> None:
    rows = re.findall(r"^\|[^|]*\| `\[(\w+)\] (\w+)`(?:; `(\w+)`)? \| ([^|]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 8
    said = {}
    for section, first, second, defaults in rows:
        for key, default in zip(filter(None, (first, second)), defaults.split("; "), strict=True):
            said[section, key] = float(default.strip().replace(" GiB", "")) * (1 << 30 if "GiB" in default else 1)
    assert said == {(section, key): float(getattr(getattr(Settings(), section), key)) for section, key in said}


def test_every_setting_in_its_text_exists() -> None:
    named = re.findall(r"`\[(\w+)\] (\w+)", PAGE)
    assert [name for name in named if not hasattr(getattr(Settings(), name[0]), name[1])] == []


def test_readers_are_led_to_it() -> None:
    for page in ("README.md", "docs/architecture.md"):
        assert "SECURITY.md" in (ROOT / page).read_text(), page


def test_only_sigcont_is_sent_to_processes_that_are_not_children() -> None:
    """SIGCONT is for ranks that a dump left stopped."""
    sent = set()
    for path in (ROOT / "hangwatch").rglob("*.py"):
        if "demo" in path.parts:  # a simulated node: all its processes are its own
            continue
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            if name in {"killpg", "pidfd_send_signal", "tgkill"} or ast.unparse(call.func) == "os.kill":
                sent.add((str(path.relative_to(ROOT / "hangwatch")), *map(ast.unparse, call.args)))
    children = {
        ("tools/selftest/launch.py", "process.pid", "signal.SIGKILL"),
        ("probes/base/child.py", "self.pid", "signal.SIGKILL"),
        ("hook_process.py", "int(pid)", "signal.SIGKILL"),
    }
    assert sent == {("probes/process/pyspy.py", "target.pid", "signal.SIGCONT"), *children}
