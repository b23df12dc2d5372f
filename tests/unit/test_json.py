"""The JSON output of the commands: the schemas are current, and the output matches them."""

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
from hangwatch.model import CheckFirst, Fault, GpuSample, GpuSweep, Incident
from hangwatch.report import as_json
from hangwatch.state import status
from hangwatch.state.board import JobEntry, Snapshot
from tests import samples, schemas


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
