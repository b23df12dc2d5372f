"""The hooks of docs/hooks.md, run as the daemon runs them. Fake programs of a site record how they are called."""

import json
import os
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from hangwatch import config, hooks
from hangwatch.formats import incident_file
from hangwatch.hooks import due_hook
from hangwatch.model import JobState
from hangwatch.model.verdicts import RecommendedAction
from tests import samples
from tests.commands import finished, write_program
from tests.servers import WebhookReceiver

ROOT = Path(__file__).parents[2]
HOOKS = ROOT / "deploy" / "hooks"
PAGE = ROOT / "docs" / "hooks.md"
LINE = re.compile(r"^#?\s+(on_\w+)\s*= \[(.*)\]$", re.MULTILINE)


class Site:
    """A folder with fake programs of a site. `calls` are the command lines that they have recorded."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._bin, self._log = folder, folder / "bin", folder / "calls"
        self._bin.mkdir()

    def program(self, name: str, prints: str = "", status: int = 0) -> None:
        write_program(self._bin / name, f'echo "{name} $*" >> {self._log}\nprintf %s "{prints}"\nexit {status}')

    @property
    def calls(self) -> list[str]:
        return self._log.read_text().splitlines() if self._log.exists() else []

    def call(
        self, name: str, *arguments: str, moved_to: JobState = JobState.HUNG, status: int = 0, **job: object
    ) -> str:
        """Run the hook `name` for an incident of this job. Return its output if its exit status is `status`."""
        found = samples.mismatch()
        verdict = replace(found.verdict, action=RecommendedAction(kind="restart"))
        found = replace(found, job=replace(found.job, **job), verdict=verdict)
        incident = self.folder / "incidents" / "20260314T031500Z-42"
        incident.mkdir(parents=True, exist_ok=True)
        (incident / "incident.json").write_bytes(incident_file.encode(found))
        every = (str(HOOKS / name), *arguments)
        called = due_hook(config.Hooks(on_hung=every, on_recovered=every), found, moved_to, incident)
        environ = {**called.environ, "PATH": f"{self._bin}:{called.environ['PATH']}"}
        done = finished(*called.command, env=environ)
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def squeue_prints(state: str, start: str = "2026-03-14T02:00:00", user: int = 1004) -> str:
    return f"4711|4711|{state}|{start}|gpu|1|||{user}"


def test_of_many_nodes_one_requeues(site: Site) -> None:
    claims = site.folder / "requeued"
    claims.mkdir()
    site.program("scontrol")
    site.program("squeue", squeue_prints("RUNNING"))
    printed = [site.call("requeue-slurm.sh", str(claims), owner="Slurm job 4711") for _ in range(3)]
    assert [call for call in site.calls if call.startswith("scontrol")] == ["scontrol requeue 4711"]
    assert printed == ["requeued job 4711\n"] + ["another node has requeued job 4711\n"] * 2
    site.program("squeue", squeue_prints("RUNNING", "2026-03-14T09:00:00"))
    printed = [site.call("requeue-slurm.sh", str(claims), owner="Slurm job 4711")]
    assert printed == ["job 4711 is not requeued again: limit 1\n"], "it hangs again after it was requeued"
    site.call("requeue-slurm.sh", str(claims), "recommended", "2", owner="Slurm job 4711")
    assert site.calls[-1] == "scontrol requeue 4711", "a site may allow more"
    refused = site.call("requeue-slurm.sh", str(claims), "recommended", "x", owner="Slurm job 4711", status=1)
    assert refused == "x, 10: must be whole numbers\n"


@pytest.mark.parametrize(("user", "status"), [(1004, 0), (1005, 1)])
def test_job_of_a_sluid_is_requeued_only_for_its_user(site: Site, user: int, status: int) -> None:
    """The number is from the environment of the job, which may contain that of another user's job."""
    site.program("scontrol")
    site.program("squeue", squeue_prints("RUNNING", user=user))
    job = {"owner": "Slurm job s00A1B2C3D4E5F", "uid": 1004, "environ": {"SLURM_JOB_ID": "4711"}}
    said = site.call("requeue-slurm.sh", str(site.folder), status=status, **job)
    assert said == ("job 4711 is of uid 1005\n" if status else "requeued job 4711\n")
    assert [call for call in site.calls if call.startswith("scontrol")] == ["scontrol requeue 4711"] * (not status)


def test_requeue_refused_by_slurm_releases_the_claims(site: Site) -> None:
    """A claim that is left would block a later requeue that Slurm permits."""
    claims = site.folder / "requeued"
    claims.mkdir()
    site.program("squeue", squeue_prints("RUNNING"))
    site.program("scontrol", "Access/permission denied", status=1)
    for _ in range(2):
        said = site.call("requeue-slurm.sh", str(claims), status=1, owner="Slurm job 4711")
        assert "another node" not in said and "denied" in said
        assert list(claims.iterdir()) == []
    site.program("scontrol")
    site.call("requeue-slurm.sh", str(claims), owner="Slurm job 4711")
    assert len(list(claims.iterdir())) == 2


def test_where_squeue_fails_the_job_is_not_said_to_be_gone(site: Site) -> None:
    site.program("scontrol")
    site.program("squeue", status=1)
    assert "gone" not in site.call("requeue-slurm.sh", str(site.folder), status=1, owner="Slurm job 4711")
    assert not any(call.startswith("scontrol") for call in site.calls)


@pytest.mark.parametrize(
    ("owner", "state", "says"),
    [("Slurm job 4711", "COMPLETING", "job 4711 is COMPLETING"), ("uid 1004", "RUNNING", "not a Slurm job")],
)
def test_nothing_else_is_requeued(site: Site, owner: str, state: str, says: str) -> None:
    site.program("scontrol")
    site.program("squeue", squeue_prints(state))
    assert says in site.call("requeue-slurm.sh", str(site.folder), owner=owner, job_id="4711")
    assert not any(call.startswith("scontrol") for call in site.calls)


def test_an_incident_is_copied_to_a_folder_and_to_an_object_store(site: Site) -> None:
    site.program("aws")
    site.call("copy-incident.sh", "{incident}", str(site.folder / "shared"))
    (copied,) = (site.folder / "shared").glob("*/*/incident.json")
    assert incident_file.load(copied.parent).node == copied.parts[-3] == samples.NODE
    assert copied.parent.stat().st_mode & 0o777 == 0o700
    site.call("copy-incident.sh", "{incident}", "s3://bucket/hangwatch")
    (call,) = site.calls
    assert call.startswith("aws s3 cp --recursive")
    assert call.endswith(f" s3://bucket/hangwatch/{samples.NODE}/20260314T031500Z-42")


def test_slack_message_has_the_verdict_and_hostile_names_mention_nobody(site: Site) -> None:
    with WebhookReceiver() as slack:
        url = site.folder / "slack-url"
        url.write_text(f"{slack.url}/services/T0/B0\n")
        site.call("post-to-slack.py", "{incident}", str(url), job_id="<!channel>", owner="uid <!here>")
    (message,) = slack.received("/services/T0/B0")
    assert "uid &lt;!here&gt;) is hung on" in message["text"] and "<" not in message["text"]
    assert samples.mismatch().verdict.message.split(":")[0] in message["text"]


def test_the_lines_of_examples_and_page_are_such_as_the_daemon_takes() -> None:
    examples = {path.name: path.read_text() for path in HOOKS.iterdir() if path.is_file()}
    lines = [match.groups() for text in (*examples.values(), PAGE.read_text()) for match in LINE.finditer(text)]
    assert len(lines) >= 2 * len(examples)
    for key, items in lines:
        program, *arguments = json.loads(f"[{items}]")
        assert os.access(HOOKS / Path(program).name, os.X_OK), program
        settings = config.decode({"hooks": {key: ["/usr/bin/env", *arguments]}}, config.Settings, "page", ())
        hooks.refuse_unusable(settings.hooks, "page")
    assert {Path(json.loads(f"[{items}]")[0]).name for _, items in lines} == examples.keys()
