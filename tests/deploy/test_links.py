"""Every link of a page leads to an existing file and heading, and every hangwatch command of a page exists."""

import re
import shlex
from functools import cache
from pathlib import Path

import click
import pytest

from hangwatch.checks.framework import registry
from hangwatch.cli import hangwatch as hangwatch_command
from tests.deploy.promql import ROOT, RULES

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[!.]*/**/*.md")])
WITH_COMMANDS = [
    ROOT / "README.md",
    *(ROOT / f"docs/{name}.md" for name in ("faq", "from-page-to-cause", "many-nodes", "tuning")),
    *sorted((ROOT / "docs").glob("install-*.md")),
    *sorted((ROOT / "docs/runbooks").glob("*.md")),
]
LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)

LEAST_COMMANDS = {"README": 10, "install-systemd": 3, "install-slurm": 3, "install-kubernetes": 3, "many-nodes": 3}


def links(page: Path) -> list[str]:
    return LINK.findall(CODE.sub("", page.read_text()))


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives the headings of a page."""
    found: set[str] = set()
    for heading in re.findall(
        r"^#{1,6} (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    ):
        text = re.sub(r"\]\([^)]*\)", "", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        number = 0
        while (name := anchor if not number else f"{anchor}-{number}") in found:
            number += 1
        found.add(name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in links(page):
        if re.match(r"(https?|mailto):", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            wrong.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{link}: no such heading")
    assert not wrong


def test_there_are_pages_and_links() -> None:
    assert len(PAGES) > 30 and sum(len(links(page)) for page in PAGES) > 100


def blocks(page: Path, language: str = "") -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    return [text for spoken, text in found if spoken == language]


def typed(page: Path) -> list[str]:
    """Return every shell line on the page, with continuation lines joined, and every command in its text."""
    shell = "".join(blocks(page) + blocks(page, "sh")).replace("\\\n", " ")
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    return [*shell.splitlines(), *(found.replace("\n", " ") for found in re.findall(r"`([^`]+)`", text))]


def assert_exists(arguments: list[str]) -> None:
    """Assert that hangwatch has this command with these options, and that its checks exist."""
    assert isinstance(hangwatch_command, click.Group)
    name, *rest = arguments
    command = hangwatch_command.get_command(click.Context(hangwatch_command), name)
    assert command is not None, f"{arguments}: no such command"
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    names = {text for option in options for text in option.opts}
    assert {word for word in rest if word.startswith("-") and word != "-"} <= names, arguments
    if name == "check":
        with_value = {text for option in options if not option.is_flag for text in option.opts}
        pairs = zip(["", *rest], rest, strict=False)
        named = {word for before, word in pairs if word[0] not in "-0123456789" and before not in with_value}
        assert named <= {*registry.checks(), "NAME"}, arguments


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_commands_options_and_checks_of_a_page_exist(page: Path) -> None:
    """For pods, the hangwatch command follows a kubectl command."""
    assert isinstance(hangwatch_command, click.Group)
    names = "|".join(hangwatch_command.list_commands(click.Context(hangwatch_command)))
    calls = []
    for line in typed(page):
        own = re.findall(r"^(?:sudo )?hangwatch ([a-z][^|&>#;]*)", line)
        calls += own or re.findall(rf"[\s'/(]hangwatch ((?:{names})\b[^|&>#;`')]*)", line)
    assert len(calls) >= LEAST_COMMANDS.get(page.stem, 0)
    for call in calls:
        assert_exists(shlex.split(call))


def test_command_of_the_alert_rules_exists() -> None:
    """The page texts of the alert rules give the job by its key."""
    found = set(re.findall(r"hangwatch (report [^`\n]+)`", re.sub(r"\{\{.*?\}\}", "KEY", RULES.read_text())))
    assert found == {"report --job KEY"}
    assert_exists(shlex.split(*found))
