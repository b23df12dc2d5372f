"""The board remembers the hangs of this node, and an incident that pages does not recommend to wait."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch import store
from hangwatch.detector import job_watch
from hangwatch.model import Incident, JobState, PastHang, RecommendedAction, TimelineEntry
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.state.hang_history import MOST_HANGS, MOST_HANGS_OF_USER, find_history, remember_hang, restore_hangs
from hangwatch.state.incident_timeline import update_timeline
from tests import samples

NOW = samples.OPENED + 60.0


def incident(**verdict: object) -> Incident:
    found = samples.loader_hang()
    return replace(found, verdict=replace(found.verdict, fingerprint="aa", **verdict))


def entry(state: JobState = JobState.HUNG, *, page: bool = False, of: Incident | None = None) -> JobEntry:
    found = of or incident()
    watch = replace(job_watch.begin_watch(found.job, 0.0), state=state)
    return JobEntry(job=found.job, watch=watch, page=page, incident=found)


def hang(number: int, opened: float = samples.OPENED - 60) -> PastHang:
    return PastHang(
        incident_id=f"i{number}",
        node="n",
        opened_unix_seconds=opened,
        uid=number % 20,
        fingerprint="aa",
        action="restart",
    )


def test_hung_job_is_remembered_once_with_its_last_verdict() -> None:
    snapshot = Snapshot()
    for kind in ("investigate", "restart"):
        snapshot = remember_hang(snapshot, incident(action=RecommendedAction(kind=kind)))
    (only,) = snapshot.past_hangs
    assert (only.incident_id, only.action, only.fingerprint) == (samples.loader_hang().incident_id, "restart", "aa")


def test_history_of_a_job_excludes_its_open_incident() -> None:
    snapshot = restore_hangs(remember_hang(Snapshot(), incident()), [hang(1)])
    assert len(snapshot.past_hangs) == 2
    history = find_history(snapshot, incident().job, incident(), "n", NOW)
    assert [one.incident_id for one in history.hangs] == ["i1"]
    assert len(find_history(snapshot, incident().job, None, "n", NOW).hangs) == 2


@given(st.lists(st.floats(0, 1e9), max_size=2 * MOST_HANGS, unique=True))
def test_board_keeps_the_newest_hangs(times: list[float]) -> None:
    hangs = [hang(number, at) for number, at in enumerate(times)]
    kept = restore_hangs(restore_hangs(Snapshot(), hangs[::2]), hangs[1::2]).past_hangs
    assert [one.opened_unix_seconds for one in kept] == sorted(times)[-MOST_HANGS:]


def test_one_user_cannot_displace_the_hangs_of_others() -> None:
    others = restore_hangs(Snapshot(), [replace(hang(0), uid=7)])
    flooded = restore_hangs(others, [replace(hang(number, 1e300), uid=8) for number in range(1, 1000)])
    assert [one.uid for one in flooded.past_hangs] == [7] + [8] * MOST_HANGS_OF_USER


def test_store_returns_the_incidents_that_were_hung(tmp_path: Path) -> None:
    kept = store.open_writable(tmp_path)
    line = TimelineEntry(unix_seconds=1.0, state=JobState.HUNG, message="m")
    hung = replace(incident(), timeline=(line,))
    quiet = replace(line, state=JobState.QUIET)
    other = replace(hung, incident_id=hung.incident_id.replace("03", "04", 1), timeline=(quiet,))
    for one in (hung, other):
        kept.save(one, {})
    (only,) = kept.past_hangs()
    assert only == remember_hang(Snapshot(), hung).past_hangs[0]


def test_incident_that_pages_does_not_recommend_to_wait() -> None:
    waits = incident(action=RecommendedAction(kind="wait", reason="known pause"))
    for page, expected in ((False, "wait"), (True, "investigate")):
        stepped, _ = update_timeline(entry(page=page, of=waits), (), NOW)
        assert stepped.incident is not None and stepped.incident.verdict.action.kind == expected
