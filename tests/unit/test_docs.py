"""Length limits of the pages: written by hand in total, per decision, and of the architecture's reading list."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page for page in ROOT.rglob("*.md") if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
)
GENERATED = {
    ROOT / name for name in ("docs/checks.md", "docs/commands.md", "docs/outside-facts.md", "findings/README.md")
}
MOST_BYTES = 245_000


def test_all_pages_written_by_hand_are_short_together() -> None:
    assert sum(page.stat().st_size for page in PAGES if page not in GENERATED) <= MOST_BYTES


@pytest.mark.parametrize("page", sorted((ROOT / "docs/adr").glob("*.md")), ids=lambda page: page.stem)
def test_decision_is_one_short_page(page: Path) -> None:
    text = page.read_text()
    assert len(text.splitlines()) <= 15
    assert re.fullmatch(r"\d{3}-[a-z-]+", page.stem) and text.startswith(f"# {page.stem[:3]}: ")
    assert re.findall(r"^\*\*(\w+)\*\*: ", text, re.MULTILINE) == ["Context", "Decision", "Consequence"]


def test_reading_list_of_the_architecture_is_short() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    (part,) = re.findall(r"<!-- reading list: begin -->(.*?)<!-- reading list: end -->", text, re.DOTALL)
    modules = re.findall(r"\]\(\.\./(hangwatch/[\w/]+\.py)\)", part)
    assert len(modules) >= 5
    assert sum(len((ROOT / module).read_text().splitlines()) for module in modules) <= 500
    assert len(text.splitlines()) <= 100
