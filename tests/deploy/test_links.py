"""Every link of a page leads to an existing file of the repository, and to an existing heading."""

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("[!.]*/**/*.md")])
LINK = re.compile(r"\]\(<?([^)\s>]+)>?\)")
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


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
