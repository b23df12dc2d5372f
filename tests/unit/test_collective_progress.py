"""The series about the collectives of a node's ranks: bounded, distinct, and only with known values."""

from collections.abc import Iterable

from msgspec.structs import replace

from hangwatch.detector import job_watch
from hangwatch.metrics import collective_progress
from hangwatch.metrics.collective_metrics import COLLECTIVES_OF_AN_OWNER
from hangwatch.metrics.collective_progress import Collective, JobProgress
from hangwatch.model import Frame, Group, Grouping, JobState, Member, RecorderFacts
from hangwatch.state.board import JobEntry, Snapshot
from tests import samples
from tests.unit.test_waitfor import WORLD, done, member, record, recorder, standing, waits

OWN = Frame(function="step", file="train.py", line=3)


def grouping(*members: Member, waits_for: str = "ranks") -> Grouping:
    group = Group(key="w", activity="collective_wait", waits_for=waits_for, frames=(OWN,), members=members)
    return Grouping(groups=(group,), world_size=len(members))


def find_progress(*members: Member, most: int = 100) -> JobProgress:
    return collective_progress.find_progress(grouping(*members), most)


def numbers(progress: JobProgress) -> dict[tuple[int, str], tuple[int, int | None]]:
    """Return the newest collective of each rank and group, and that in which the rank waits, or None."""
    return {
        (one.place.rank, one.group): (one.number, one.waits_in.number if one.waits_in else None)
        for one in progress.reached
    }


def scraped(entries: Iterable[JobEntry]) -> dict[str, list[tuple[dict[str, str], float]]]:
    snapshot = Snapshot(jobs={entry.job.key: entry for entry in entries})
    families = samples.metric_families(snapshot)
    return {one.name: [(sample.labels, sample.value) for sample in one.samples] for one in families}


def hung(key: str, *members: Member, share: str = "uid 1") -> JobEntry:
    job = replace(samples.job(range(2), 2), job_id=key, job_key=key, share=share)
    incident = replace(samples.all_waiting(), job=job, grouping=grouping(*members), state=JobState.HUNG)
    return JobEntry(job=job, watch=job_watch.begin_watch(job, 0.0), incident=incident)


def busy(rank: int, groups: int) -> Member:
    """Return a rank that has used `groups` groups, in the order of their names, and waits in the first of them."""
    pairs = {f"g{place:02}": (2, 2 if place == 0 else 3) for place in range(groups)}
    return standing(rank, {WORLD: (5, 6), **pairs})


def test_a_rank_shows_how_far_it_is_and_what_it_waits_in() -> None:
    # Rank 1 has enqueued collective 8 of the default group, and waits in collective 6.
    ahead = standing(1, {WORLD: (8, 6), "1": (2, 3)})
    told = find_progress(standing(0, waits(6)), ahead)
    assert numbers(told) == {(0, "gloo:default_pg"): (6, 6), (1, "gloo:default_pg"): (8, 6), (1, "gloo:1"): (2, None)}
    assert [one.place.has_open for one in told.reached] == [True, True, True]
    assert collective_progress.waited_since(told.reached) == {"gloo:default_pg": 6.0}
    assert collective_progress.count_collectives(told.reached) == {
        Collective("gloo:default_pg", "the default group", 6, "all_reduce", waits=True): 2,
        Collective("gloo:default_pg", "the default group", 8, "all_reduce", waits=False): 1,
    }


def test_ranks_with_one_number_are_merged_into_series_of_at_most_eight() -> None:
    ahead = standing(9, {WORLD: (8, 6), "1": (2, 3)})
    progress = find_progress(*(standing(rank, waits(6)) for rank in range(9)), ahead)
    merged = [
        (one.group, one.number, one.place.rank, more)
        for one, more in collective_progress.merge_ranks(progress.reached, "number")
    ]
    assert merged == [
        ("gloo:default_pg", 6, 0, "1 2 3 4 5 6 7"),
        ("gloo:default_pg", 6, 8, ""),
        ("gloo:default_pg", 8, 9, ""),
        ("gloo:1", 2, 9, ""),
    ]
    assert collective_progress.count_used(progress.reached) == {"gloo:default_pg": 10}
    assert collective_progress.count_waiting(progress.reached) == 10


def test_rank_without_default_group_record_shows_since_when() -> None:
    """Report since when each rank without a record in the default group would have one.

    The time is 0 if its buffer has not wrapped, else the time of its oldest record. A rank with a second library is
    not reported.
    """
    kept = record(900, "9")
    wrapped = member(1, recorder(kept, is_wrapped=True))
    empty = member(2, recorder(is_wrapped=True))
    both = member(3, recorder(record(3), library="nccl"), recorder())
    told = find_progress(
        member(0, recorder()),
        wrapped,
        empty,
        both,
        replace(standing(4, {}), recorder=RecorderFacts(libraries=())),
    )
    assert [(one.place.rank, one.group, one.since_unix_seconds) for one in told.unseen] == [
        (0, "gloo:default_pg", 0.0),
        (1, "gloo:default_pg", 900.0),
    ]


def test_nothing_is_told_where_two_ranks_bear_one_number_or_none() -> None:
    assert find_progress(standing(0, waits(6)), standing(0, waits(6))) == JobProgress()
    one = standing(0, waits(6))
    nameless = replace(one, id=replace(one.id, rank=None))
    assert find_progress(nameless, nameless) == JobProgress()


def test_of_many_groups_the_waited_one_the_default_one_and_those_last_used_are_told() -> None:
    told = find_progress(busy(0, 20))
    assert [one.group for one in told.reached] == [
        "gloo:g00",
        "gloo:default_pg",
        *(f"gloo:g{place}" for place in range(19, 13, -1)),
    ]
    assert told.left_out == 21 - collective_progress.MOST_GROUPS_OF_A_RANK


def test_collectives_beyond_the_limit_are_omitted_and_counted() -> None:
    told = find_progress(busy(0, 3), busy(1, 3), member(2, recorder()), most=6)
    assert (len(told.reached), told.left_out, told.unseen) == (6, 2, ())


def test_shortened_group_names_stay_distinct() -> None:
    """Replace a group name by a hash if it is too long, is not plain text, or looks like the default group."""
    names = ["7", "x" * 40, "x" * 41, "x" * 42, "a\nb", "a b", "default_pg", "é", "~ab"]
    told = find_progress(standing(0, dict.fromkeys(names[:8], (2, 2))), standing(1, {names[8]: (1, 1)}))
    groups = [one.group for one in told.reached]
    assert len(set(groups)) == len(names) and {"gloo:7", f"gloo:{'x' * 40}"} <= set(groups)
    assert all(one.isascii() and one.isprintable() and len(one) <= 45 for one in groups)
    assert sum(one.startswith("gloo:~") for one in groups) == 7
    assert not any(one.is_default for one in told.reached)


def test_what_a_job_wrote_is_short_and_printable() -> None:
    evil = record(3, "1", group_description="\x1b[31m" + "d" * 500, operation="gloo:" + "o\n" * 500, state="open")
    ((one, _),) = collective_progress.count_collectives(find_progress(member(0, recorder(evil))).reached).items()
    assert len(one.operation) <= 40 and len(one.description) <= 60
    assert one.operation.isprintable() and one.description.isprintable()


def test_owners_share_what_a_node_shows() -> None:
    """Limit the exported collectives per owner. An owner at its limit takes nothing from another owner's job."""
    theirs = [hung(f"j{place}", *(busy(rank, 8) for rank in range(64))) for place in range(12)]
    families = scraped([*theirs, hung("mine", busy(0, 3), busy(1, 3), share="uid 2")])
    shown: dict[str, int] = {}
    for labels, _ in families["hangwatch_job_collective_number"]:
        shown[labels["job_key"]] = shown.get(labels["job_key"], 0) + 1 + len(labels["more_ranks"].split())
    assert shown.pop("mine") == 8
    assert set(shown.values()) == {COLLECTIVES_OF_AN_OWNER // 12}
    left_out = {labels["job_key"]: value for labels, value in families["hangwatch_job_collective_left_out"]}
    assert left_out.pop("mine") == 0
    assert set(left_out.values()) == {64 * 9 - COLLECTIVES_OF_AN_OWNER // 12}


def test_without_an_open_incident_there_is_no_series() -> None:
    entry = hung("j", standing(0, waits(6)), standing(1, done(5)))
    assert entry.incident is not None
    closed = replace(entry, incident=replace(entry.incident, closed_unix_seconds=9.0))
    for one, is_there in ((entry, True), (closed, False), (replace(entry, incident=None), False)):
        collective = {name: rows for name, rows in scraped([one]).items() if "_collective_" in name}
        assert len(collective) == 10
        assert any(collective.values()) == is_there
