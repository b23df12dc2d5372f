"""The event of an incident, for programs that act on it: the input of a hook and the file `event.json`. Pure."""

from typing import Literal

from hangwatch.model import CheckFirst, Confidence, Incident, RankId, Value
from hangwatch.model.verdicts import ActionKind
from hangwatch.report.as_json import JobHead, render
from hangwatch.report.phrases import without

SCHEMA_VERSION = 1
Blame = Literal["program", "node", "storage", "network", "unknown"]
Restart = Literal["here", "elsewhere", "stop", "wait", "unknown"]

_ADVICE: dict[ActionKind, tuple[Blame, Restart]] = {
    "wait": ("unknown", "wait"),
    "restart": ("unknown", "here"),
    "restart_elsewhere": ("node", "elsewhere"),
    "fix_storage": ("storage", "stop"),
    "fix_network": ("network", "stop"),
    "fix_program": ("program", "stop"),
    "investigate": ("unknown", "unknown"),
}


class HangEvent(Value, frozen=True, kw_only=True):
    """The facts by which a program decides on a job: what is to blame, and whether a restart helps.

    `named` are the ranks that block the job, `check_first` those to look at if none is named. `blame` is the cause.
    `restart` is "here", "elsewhere" (without `exclude_nodes`), "stop" (a restart would hang again), "wait" (it goes on
    by itself) or "unknown". `since_unix_seconds` is the last progress of the job. `missing` are the sources that the
    verdict did not have, "" if it had all. `schema_version` rises if a field is removed or changes its meaning.
    """

    schema_version: int
    incident_id: str
    state: str
    node: str
    job: JobHead
    since_unix_seconds: float
    kind: str
    message: str
    confidence: Confidence
    named: tuple[RankId, ...]
    check_first: tuple[CheckFirst, ...]
    blame: Blame
    restart: Restart
    exclude_nodes: tuple[str, ...]
    evidence: tuple[str, ...]
    missing: str


def make_event(incident: Incident) -> HangEvent:
    """Return the event of an incident in its present state."""
    verdict = incident.verdict
    blame, restart = _ADVICE[verdict.action.kind]
    return HangEvent.copy_from(
        incident,
        verdict,
        schema_version=SCHEMA_VERSION,
        state=incident.state.value,
        job=JobHead.copy_from(incident.job),
        since_unix_seconds=incident.opened_unix_seconds,
        blame=blame,
        restart=restart,
        exclude_nodes=verdict.action.exclude_nodes,
        evidence=tuple(evidence.message for evidence in verdict.evidence),
        missing=without(incident.grouping, incident.job),
    )


def render_event(incident: Incident) -> str:
    """Return the event of an incident as JSON text."""
    return render(make_event(incident))
