"""The HTML report: self-contained, escaped, bounded, with the same content as the text report."""

import base64
import hashlib
import re
from html import unescape
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch import words
from hangwatch.model import (
    CollectiveSeries,
    Difference,
    Environment,
    Frame,
    Group,
    Grouping,
    JobState,
    PowerSeries,
    Setting,
    Stack,
    TimelineEntry,
    Verdict,
)
from hangwatch.report import html, sparklines
from hangwatch.report.phrases import describe_collectives
from hangwatch.state.board import extend_collectives
from tests import samples
from tests.unit.test_report_text import _hostile, hostile

VOID = {"meta", "br", "line", "rect", "path"}  # the SVG elements close themselves
BAD_TAGS = {
    "script",
    "link",
    "iframe",
    "object",
    "embed",
    "img",
    "base",
    "form",
    "button",
    "input",
    "a",
    "use",
    "image",
}


class Page(HTMLParser):
    """The tags of an HTML page with attributes, and its visible text. All tags must be closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.style = ""
        self.open: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.style += data
        else:
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", "".join(self.words))

    def texts_of(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


EVERY = {**samples.SAMPLES, "fleet": samples.fleet}


@pytest.mark.parametrize("name", EVERY)
def test_nothing_comes_from_outside(name: str) -> None:
    source = html.render(EVERY[name]())
    page = Page(source)
    assert not {tag for tag, _ in page.tags} & BAD_TAGS
    for _, attributes in page.tags:
        assert not {"src", "href", "style", "xlink:href", "srcset", "action"} & attributes.keys()
        assert not [key for key in attributes if key.startswith("on")]
    assert "url(" not in page.style
    assert "@import" not in page.style
    assert "http://" not in source
    assert "https://" not in source


def test_the_policy_allows_this_style_and_nothing_else() -> None:
    page = Page(html.render(samples.loader_hang()))
    (policy,) = [a["content"] for tag, a in page.tags if tag == "meta" and a.get("http-equiv")]
    digest = base64.b64encode(hashlib.sha256(page.style.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


@pytest.mark.parametrize("name", EVERY)
def test_the_headline_is_the_verdict(name: str) -> None:
    incident = EVERY[name]()
    source = html.render(incident)
    heading = re.search(r"<h1>(.*?)</h1>", source, re.DOTALL)
    assert heading
    first, _, rest = incident.verdict.message.partition(". ")
    assert unescape(heading.group(1)).rstrip(".") == first.rstrip(".")
    assert rest in " ".join(Page(source).text.split())
    assert Page(source).texts_of("h1") == 1


@pytest.mark.parametrize("name", EVERY)
def test_only_named_ranks_are_marked_as_named(name: str) -> None:
    incident = EVERY[name]()
    assert ('class="flag">named<' in html.render(incident)) == bool(incident.verdict.named)


def test_every_raw_stack_is_there_at_eight_ranks() -> None:
    page = Page(html.render(samples.loader_hang()))
    for rank in range(8):
        assert f"[gpu-a12:{rank}]Thread 4120{rank} (active)" in page.text
    assert "[gpu-a12:7] read_shard (ourdata/shards.py:58)" in page.text


def test_power_and_collectives_are_drawn_as_in_the_text_report() -> None:
    incident = replace(samples.loader_hang(), collectives=samples.collectives())
    for shown in (incident, replace(incident, power=()), replace(incident, collectives=None)):
        assert (rows := "\n".join(sparklines.draw_all(shown, 110)))
        assert rows in "".join(Page(html.render(shown)).words)
    assert 'id="power"' not in html.render(replace(incident, power=(), collectives=None))


def test_sixteen_thousand_ranks_fit() -> None:
    source = html.render(samples.fleet())
    assert len(source) < 200_000
    page = Page(source)
    assert "16,376 ranks 0-615,624-16383" in page.text
    assert "1 rank 9731 ◀" not in page.text  # the mark comes from the style sheet
    assert page.texts_of("li") < 20


def test_a_hostile_amount_of_everything_fits() -> None:
    def stack(number: int) -> tuple[Frame, ...]:
        return tuple(Frame(function=f"f{number}_{depth}" + "<" * 500, file="a.py") for depth in range(1000))

    aside = Stack(name="t" * 3000, frames=stack(1))
    groups = tuple(
        Group(
            key=f"g{number}",
            activity="unknown",
            members=tuple(samples.member(4 * number + other) for other in range(4)),
            frames=stack(number),
            threads=(aside,) * 9,
            workers=(aside,) * 9,
        )
        for number in range(60)
    )
    dumps = tuple(samples.rank_dump(4 * number, groups[number].frames) for number in range(60))
    seconds = tuple(samples.OPENED + number for number in range(5000))
    gpus = tuple(
        PowerSeries(
            uuid=f"u{at}", index=at, unix_seconds=seconds, watts=tuple(100.0 + (at + s) % 7 for s in range(5000))
        )
        for at in range(64)
    )
    incident = replace(
        samples.incident(
            groups=groups,
            verdict=Verdict(kind="CannotTell", message="m" * 5000),
            dumps=dumps,
            notes=("n" * 9000,) * 500,
        ),
        power=gpus,
        timeline=tuple(
            TimelineEntry(unix_seconds=samples.OPENED + n, state=JobState.QUIET, message="q" * 5000)
            for n in range(2000)
        ),
        host_facts=(("k", "v" * 10_000),) * 1000,
    )
    source = html.render(incident)
    assert len(source.encode()) < html.MAX_BYTES
    assert "more frames" in Page(source).text


def test_lateness_of_each_rank_before_the_hang_is_a_bar() -> None:
    page = html.render(replace(samples.loader_hang(), arrival=samples.arrival()))
    section = page.partition('id="lateness"')[2].partition("</section>")[0]
    assert samples.arrival().message in section and "-1 ms" in section
    assert re.findall(r'<rect width="(\d+)"', section) == ["100", "0"]
    level = replace(samples.arrival(), is_named=False, reason="NoneLate")
    for other in (None, level):
        assert 'id="lateness"' not in html.render(replace(samples.loader_hang(), arrival=other))


@given(st.lists(st.integers(0, 50), min_size=2, max_size=40), st.lists(st.integers(0, 50), min_size=2, max_size=40))
def test_progress_goes_on_after_a_restart_of_the_daemon(before: list[int], after: list[int]) -> None:
    """The counter of a new daemon begins at 0. It must look neither like a fall nor like progress."""

    def series(steps: list[int], first_second: int) -> CollectiveSeries:
        totals = [float(sum(steps[: number + 1])) for number in range(len(steps))]
        return CollectiveSeries(tuple(float(first_second + number) for number in range(len(steps))), tuple(totals))

    whole = series([1000, *before], 0)
    assert extend_collectives(whole, series([1000, *before], 0)) == whole
    joined = extend_collectives(whole, series(after, 100))
    assert list(joined.totals) == sorted(joined.totals)
    assert joined.totals[-1] - joined.totals[0] == sum(before) + sum(after[1:])
    if sum(after[1:]) == 0 and before[-1]:
        seconds = joined.unix_seconds[-1] - whole.unix_seconds[-1]
        assert describe_collectives(joined).endswith(f"none in the last {words.duration(seconds)}")


@given(function=hostile, file=hostile, command=hostile, message=hostile, node=hostile)
@settings(deadline=None)
def test_what_a_process_says_is_only_text(function: str, file: str, command: str, message: str, node: str) -> None:
    mark = "<img src=x onerror=alert(1)>"
    page = Page(html.render(_hostile(function + mark, file + mark, command + mark, message + mark, node + mark)))
    assert not {tag for tag, _ in page.tags} & BAD_TAGS
    assert page.text.count("onerror=alert(1)") > 5
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", "".join(page.words))


def test_a_verdict_without_an_incident() -> None:
    incident = samples.mismatch()
    page = Page(html.render_grouping(incident.grouping, incident.verdict))
    assert "4 ranks 0-3" in page.text
    assert "no rank" in page.text
    assert "GPU power and collectives" not in page.text


def test_nothing_at_all_is_still_a_page() -> None:
    page = Page(html.render_grouping(Grouping(groups=()), Verdict(kind="CannotTell", message="No dump was found.")))
    assert "No dump was found." in page.text
    bare = replace(
        samples.loader_hang(), captures=(), power=(), timeline=(), host_facts=(), grouping=Grouping(groups=())
    )
    Page(html.render(bare))


def test_page_with_environment_difference_describes_it() -> None:
    settings_of_ranks = (
        Setting(value="eth1", ranks=(samples.rank_id(3),), count=1),
        Setting(value="eth0", ranks=tuple(map(samples.rank_id, (0, 1, 2))), count=3),
    )
    difference = Difference(name="NCCL_SOCKET_IFNAME", why="the interface of NCCL", settings=settings_of_ranks)
    incident = samples.loader_hang()
    capture = replace(incident.captures[-1], environment=Environment(differences=(difference,)))
    page = Page(html.render(replace(incident, captures=(capture,))))
    assert "NCCL_SOCKET_IFNAME differs: eth1 on rank 3" in page.text
    assert "eth0 on 3 others" in page.text


def test_it_is_over_when_it_is_over() -> None:
    over = replace(samples.loader_hang(), state=JobState.RECOVERED, closed_unix_seconds=samples.OPENED + 600)
    page = Page(html.render(over))
    assert ("header", {"class": "over"}) in page.tags
    assert "recovered after 10 min 00 s" in page.text


def test_the_same_incident_gives_the_same_page() -> None:
    assert html.render(samples.fleet()) == html.render(samples.fleet())
