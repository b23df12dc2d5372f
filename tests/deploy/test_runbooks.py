"""The runbooks and docs/tuning.md: commands and keys that exist, and the steps for a job's author on a real torchrun."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import msgspec
import pytest

from hangwatch import config
from hangwatch.cli import hangwatch as hangwatch_command
from tests.deploy.promql import ROOT

PAGES = [*sorted((ROOT / "docs/runbooks").glob("*.md")), ROOT / "docs/tuning.md"]
AUTHOR = ROOT / "docs/runbooks/when-the-verdict-is-not-enough.md"

MISMATCH = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(4)
for step in range(3):
    print(f"step {step}", flush=True)
    if MISMATCH and dist.get_rank() == 1 and step == 2:
        dist.broadcast(x, 0)
    else:
        dist.all_reduce(x)
dist.destroy_process_group()
"""


def commands(text: str) -> list[str]:
    """Every `hangwatch ...` command of a page, in code blocks and in the text."""
    blocks = [line for block in re.findall(r"```\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [line for line in (*blocks, *inline) if line.startswith("hangwatch ")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page_exist(page: Path) -> None:
    assert isinstance(hangwatch_command, click.Group)
    for line in commands(page.read_text()):
        _, name, *arguments = shlex.split(line)
        command = hangwatch_command.get_command(click.Context(hangwatch_command), name)
        assert command is not None, f"{page.name}: {line}: no such command"
        options = {text for parameter in command.params for text in parameter.opts}
        for argument in arguments:
            assert not argument.startswith("-") or argument in options, f"{page.name}: {line}: no option {argument}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = {_anchor(line) for line in text.splitlines() if line.startswith("#")}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        assert not path or (page.parent / path).exists(), f"{page.name}: {target}"
        assert not anchor or path or anchor in headings, f"{page.name}: {target}"


def test_the_reasons_that_a_runbook_explains_are_those_of_the_check() -> None:
    checks = dict(
        re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", (ROOT / "docs/checks.md").read_text(), re.DOTALL | re.MULTILINE)
    )
    runbook = (ROOT / "docs/runbooks/HangwatchNodeUnhealthy.md").read_text()
    seen = 0
    for check, section in re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", runbook, re.DOTALL | re.MULTILINE):
        for reasons in re.findall(r"^\* \*([^*]+)\*:", section, re.MULTILINE):
            for reason in reasons.split(", "):
                assert f"`{reason}`" in checks[check], f"{check} has no reason {reason}"
                seen += 1
    assert seen >= 10


def test_the_keys_of_the_tuning_page_exist_with_these_defaults() -> None:
    text = (ROOT / "docs/tuning.md").read_text()
    seen = set()
    sections = {
        "[detector]": config.Detector(),
        "[capture]": config.Capture(),
        "[crashes]": config.Crashes(),
        "[hooks]": config.Hooks(),
        "[socket]": config.Socket(),
    }
    for heading, section in sections.items():
        part = text.split(f"### `{heading}`")[1].split("\n###")[0]
        for names, values in re.findall(
            r"^\| (`[^|]+`) \| ([\d., \[\]]+|true|false|\"[^\"]+\") \|", part, re.MULTILINE
        ):
            keys = re.findall(r"`(\w+)`", names)
            defaults = json.loads(msgspec.json.encode([getattr(section, key) for key in keys]))
            assert defaults == json.loads(f"[{values}]"), names
            seen.update(keys)
        assert {field.name for field in msgspec.structs.fields(section)} <= seen, f"{heading}: a key is not explained"


@pytest.mark.torch
def test_logs_say_who_speaks_and_pytorch_compares_the_collectives(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MISMATCH.replace("MISMATCH", "True", 1))
    done = _torchrun(
        tmp_path,
        ["--log-dir", "logs", "--tee", "3", "train.py"],
        TORCH_DISTRIBUTED_DEBUG="DETAIL",
        TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="[node-1:${rank}] ",
    )
    assert done.returncode != 0
    assert {"[node-1:0] step 2", "[node-1:1] step 2"} <= set(done.stdout.splitlines())
    assert "Detected mismatch between collectives on ranks" in done.stderr
    assert len(list(tmp_path.glob("logs/*/attempt_0/[01]/stdout.log"))) == 2


@pytest.mark.torch
def test_the_line_tracer_of_the_page_follows_one_file(tmp_path: Path) -> None:
    (source,) = re.findall(r"```python\n(\"\"\"Print every line.*?)```", AUTHOR.read_text(), re.DOTALL)
    (tmp_path / "follow.py").write_text(source)
    (tmp_path / "train.py").write_text(MISMATCH.replace("MISMATCH", "False", 1))
    done = _torchrun(tmp_path, ["-m", "follow", "train.py"], FOLLOW="train.py")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = re.findall(r"\[\S+:([01])\] [\d.]+ <module> \S*train\.py:(\d+) line", done.stderr)
    assert {rank for rank, _ in lines} == {"0", "1"}
    assert "distributed_c10d.py" not in done.stderr


def _torchrun(folder: Path, arguments: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def _anchor(heading: str) -> str:
    words = re.sub(r"[^\w\- ]", "", heading.lstrip("# ").lower())
    return words.replace(" ", "-")
