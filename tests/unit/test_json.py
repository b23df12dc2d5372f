"""The JSON output of the commands.

Schemas are current, output matches them, and incidents of earlier versions can be read.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from msgspec.structs import replace

from hangwatch import store
from hangwatch.detector import job_watch
from hangwatch.formats import incident_file
from hangwatch.formats.incident_file import Incidents
from hangwatch.model import INCIDENT_VERSION, Awaited, CheckFirst, Fault, GpuSample, GpuSweep, Incident
from hangwatch.report import as_json, text
from hangwatch.state import status
from hangwatch.state.board import JobEntry, Snapshot
from hangwatch.tools.fleet.merge import merge_all
from hangwatch.verdict import judge
from tests import samples, schemas
from tests.conftest import DATA

EARLIER = sorted((DATA / "incidents").glob("version-*.json"))


def validate(form: str, document: Any) -> None:
    jsonschema.Draft202012Validator(json.loads(schemas.path(form).read_text())).validate(document)


@pytest.mark.golden
@pytest.mark.parametrize("form", schemas.FORMS)
def test_the_schemas_in_docs_are_current(form: str, golden: Callable[[str, str], None]) -> None:
    golden(f"../../../docs/{form}.schema.json", schemas.schema(form))


@pytest.mark.parametrize("name", [name for name in samples.SAMPLES if samples.SAMPLES[name]().captures])
def test_answers_meet_their_schema(name: str) -> None:
    incident = samples.SAMPLES[name]()
    answer = json.loads(as_json.render(as_json.answer(incident.grouping, incident.verdict)))
    validate("answer", answer)
    assert (answer["job"], answer["capture"]) == (None, None)
    dump = json.loads(as_json.render(as_json.dump("n1", [incident])))
    validate("dump", dump)
    (job,) = dump["jobs"]
    validate("answer", job)
    assert {**job, "job": None, "capture": None} == answer
    assert len(job["capture"]["ranks"]) == len(incident.captures[-1].ranks)


def test_an_answer_without_one_of_its_fields_does_not_meet_the_schema() -> None:
    incident = samples.loader_hang()
    answer = json.loads(as_json.render(as_json.answer(incident.grouping, incident.verdict)))
    for field in ("check_first", "named"):
        bare = {**answer, "verdict": {key: value for key, value in answer["verdict"].items() if key != field}}
        with pytest.raises(jsonschema.ValidationError, match=field):
            validate("answer", bare)
    with pytest.raises(jsonschema.ValidationError):
        validate("answer", {**answer, "absent": [1, 2]})


def test_ranks_to_look_at_first_stand_beside_the_named() -> None:
    incident = samples.all_waiting()
    first = CheckFirst(node="gpu-a12", rank=3, why="it is a call behind", settle="the sequence numbers of all ranks")
    verdict = replace(incident.verdict, check_first=(first,))
    answer = json.loads(as_json.render(as_json.answer(incident.grouping, verdict)))
    validate("answer", answer)
    (shown,) = answer["verdict"]["check_first"]
    assert shown == {
        "node": "gpu-a12",
        "rank": 3,
        "local_rank": None,
        "pid": None,
        "title": None,
        "why": "it is a call behind",
        "settle": "the sequence numbers of all ranks",
    }
    again = msgspec.json.decode(incident_file.encode(replace(incident, verdict=verdict)), type=Incident)
    assert again.verdict.check_first == (first,)


@pytest.mark.parametrize("name", samples.SAMPLES)
def test_incidents_meet_their_schema(name: str) -> None:
    validate("incident", json.loads(incident_file.encode(samples.SAMPLES[name]())))


def test_the_list_of_incidents_meets_its_schema(tmp_path: Path) -> None:
    kept = store.open_writable(tmp_path)
    kept.save(samples.loader_hang(), {})
    (kept.incidents / "20260101T000000Z-x").mkdir()
    listed = Incidents(schema_version=1, incidents=kept.summaries())
    validate("incidents", json.loads(msgspec.json.encode(listed)))
    assert len(listed.incidents) == 2


def test_the_status_meets_its_schema() -> None:
    incident = samples.loader_hang()
    entry = JobEntry(job=incident.job, watch=job_watch.begin_watch(incident.job, 5.0, 0.0), incident=incident)
    sweep = GpuSweep(
        taken_monotonic_seconds=6.0,
        taken_unix_seconds=1e9,
        gpus=(GpuSample(index=1, uuid=incident.job.gpu_uuids[0]),),
        faults=(Fault(subject="gpu 0", reason="NoAnswer", detail="the driver did not answer"),),
    )
    seen = status.build_status(Snapshot(sweep=sweep, jobs={incident.job.job_id: entry}), "n1", 7.0)
    found = json.loads(msgspec.json.encode(seen))
    validate("status", found)
    assert found["jobs"][0]["incident"] == incident.incident_id
    assert [(gpu["index"], gpu["fault"]) for gpu in found["gpus"]] == [
        (0, "NoAnswer: the driver did not answer"),
        (1, None),
    ]


# --- incidents of earlier versions -----------------------------------------------------------------------------------


@pytest.fixture(params=EARLIER, ids=lambda path: path.stem)
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of an incident that an earlier version of hangwatch wrote."""
    folder = tmp_path / "incidents" / "20260314T031500Z-2180718"
    folder.mkdir(parents=True)
    (folder / incident_file.INCIDENT_FILE).write_bytes(request.param.read_bytes())
    return folder


LEFT_OUT = {"waits", "nccl_ras"}
"""Fields of earlier versions that are computed from other fields, or removed: `nccl_ras` with its client."""


RENAMED_FIELDS = {"own": "user_frame", "who": "name"}
RENAMED = {"kernel_lines": "lines", "recorded": "libraries", "kernel_call": "call", "gpu_use": "use"}
RENAMED |= {"recorder_faults": "faults", "main_before": "before", "main_after": "after"}
PARTS = ("stack", "kernel", "usage", "main", "traffic", "waits", "gpu", "recorder")


def side_by_side(value: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a member or a process in one flat dictionary, as in earlier versions."""
    fields = {key: field for part in PARTS for key, field in value.get(part, {}).items()}
    return {**value, **fields, **{old: fields[new] for old, new in RENAMED.items() if new in fields}}


def _get_renamed(fields: dict[str, Any], key: str) -> Any:
    return fields.get(key, fields.get(RENAMED_FIELDS.get(key, ""), "missing"))


def lost(before: Any, after: Any, path: str = "") -> list[str]:
    """Return the paths of values of `before` that `after` lacks. New fields in `after` do not count."""
    if isinstance(before, dict) and isinstance(after, dict):
        if before.keys() & {"motion", "taken_monotonic_seconds", "rounds"}:
            after = side_by_side(after)
        kept = {key: value for key, value in before.items() if key not in LEFT_OUT}
        return [one for key, value in kept.items() for one in lost(value, _get_renamed(after, key), f"{path}.{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [one for number, (old, new) in pairs for one in lost(old, new, f"{path}[{number}]")]
    return [] if before == after else [path]


def test_an_incident_of_an_earlier_version_is_read_whole(earlier: Path) -> None:
    written = json.loads((earlier / incident_file.INCIDENT_FILE).read_text())
    incident = incident_file.load(earlier)
    now = {**written, "schema_version": INCIDENT_VERSION}
    assert lost(now, json.loads(incident_file.encode(incident))) == []
    groups = zip(written["grouping"]["groups"], incident.grouping.groups, strict=True)
    assert all(old.get("waits", group.waits) == group.waits for old, group in groups)


def test_an_incident_of_an_earlier_version_is_of_this_one_once_read(earlier: Path) -> None:
    content = json.loads((earlier / incident_file.INCIDENT_FILE).read_text())
    (earlier / incident_file.INCIDENT_FILE).write_text(json.dumps({**content, "schema_version": 0}))
    assert json.loads(incident_file.encode(incident_file.load(earlier)))["schema_version"] == INCIDENT_VERSION


def test_absent_local_ranks_of_version_1_were_numbers(earlier: Path) -> None:
    content = json.loads((earlier / incident_file.INCIDENT_FILE).read_text())
    content["job"]["absent_local_ranks"] = [1, 2, 5]
    content["schema_version"] = 1
    (earlier / incident_file.INCIDENT_FILE).write_text(json.dumps(content))
    assert incident_file.load(earlier).job.absent_local_ranks == ((1, 2), (5, 5))


def test_renamed_fields_of_version_2_are_read(earlier: Path) -> None:
    content = json.loads((earlier / incident_file.INCIDENT_FILE).read_text())
    group = content["grouping"]["groups"][0]
    group["workers"] = [{"name": "worker", "frames": [], "own": {"function": "load", "file": "a.py", "line": 3}}]
    group["members"][0]["awaited"] = {"who": "10.0.0.9 port 443"}
    dump = {"taken_monotonic_seconds": 1.0, "awaited": {"who": "its child 7 (ssh)"}}
    rank = {"id": group["members"][0]["id"], "rounds": [dump]}
    content["captures"] = [
        {"job_id": "7", "node": "n", "started_unix_seconds": 1.0, "duration_seconds": 9.0, "rounds": 1, "ranks": [rank]}
    ]
    (earlier / incident_file.INCIDENT_FILE).write_text(json.dumps({**content, "schema_version": 2}))
    incident = incident_file.load(earlier)
    (group,) = incident.grouping.groups[:1]
    assert str(group.workers[0].user_frame) == "load (a.py:3)"
    assert group.members[0].waits.awaited == Awaited(name="10.0.0.9 port 443")
    assert incident.captures[0].ranks[0].rounds[0].waits.awaited == Awaited(name="its child 7 (ssh)")


def test_an_incident_of_an_earlier_version_meets_the_schema(earlier: Path) -> None:
    validate("incident", json.loads((earlier / incident_file.INCIDENT_FILE).read_text()))


def test_an_incident_of_an_earlier_version_serves_as_a_new_one(earlier: Path) -> None:
    incident = incident_file.load(earlier)
    assert incident.verdict.message.split(",")[0] in " ".join(text.render(incident).split())
    assert set(judge.judge(merge_all([incident.grouping])).named) <= set(incident.verdict.named)
    (listed,) = store.Store(earlier.parents[1]).summaries()
    assert (listed.incident_id, listed.problem) == (incident.incident_id, "")
