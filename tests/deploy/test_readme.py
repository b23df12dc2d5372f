"""README.md and docs/faq.md: targets and pictures exist, and the tools and questions of users are there."""

import re

import pytest

from tests.deploy.promql import ROOT

README = (ROOT / "README.md").read_text()
QUESTIONS = (ROOT / "docs/faq.md").read_text()


def test_every_target_that_it_names_can_be_made() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([\w-]+)", README))
    assert {"test", "dist", "deb", "image", "chart"} <= named <= targets


def test_first_screen_shows_dump_and_installation() -> None:
    before, dump, after = README.split("```", 3)[:3]
    assert {"Verdict", "Stuck", "Groups,"} <= set(dump.split())
    assert len((before + dump).splitlines()) < 40
    assert "pip install ." in after.partition("\n## ")[0]


def test_it_shows_a_report_and_a_dashboard() -> None:
    shown = {what: ROOT / path for what, path in re.findall(r"!\[The (\w+)[^\]]*\]\(([^)]+)\)", README)}
    assert {"report", "dashboard"} <= set(shown)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in shown.values())


@pytest.mark.parametrize(
    "tool", ["py-spy", "dcgm-exporter", "gpud", "nvitop", "NVIDIA Resiliency Extension", "flight recorder", "Ray"]
)
def test_it_says_what_a_tool_that_people_know_does_better_and_what_it_does_not(tool: str) -> None:
    (row,) = re.findall(rf"^\| *\[?(?:PyTorch's )?{re.escape(tool)}\b.*\|$", README, re.MULTILINE)
    _, _, *cells, _ = row.split("|")
    assert len(cells) == 3 and all(len(cell.split()) >= 2 or cell.strip() for cell in cells), row


@pytest.mark.parametrize(
    "question",
    [
        "slow my job", "be root", "ptrace_scope", "Docker", "Kubernetes", "dcgm-exporter", "know that it works",
        "NCCL ends my job",
    ],
)  # fmt: skip
def test_what_people_ask_has_an_answer(question: str) -> None:
    # Each question is on the page in bold, and more than one word follows.
    asked = re.findall(r"\*\*((?:(?!\*\*).)+[?.])\*\*\s+(.*?)(?=\n\n|\*\*)", QUESTIONS, re.DOTALL)
    (answer,) = [told for words, told in asked if question in words]
    assert len(answer.split()) > 5


def test_in_pods_it_is_told_how_a_job_gets_its_number_and_name() -> None:
    page = (ROOT / "docs/install-kubernetes.md").read_text()
    table = (ROOT / "hangwatch/tables/launchers.toml").read_text()
    assert "torchrun --rdzv-id=NAME" in page
    for variable in re.findall(r"`([A-Z]+_?NAME)`", page):
        assert f'"{variable}"' in table, variable
