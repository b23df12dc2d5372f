"""Hooks: which hook runs, its arguments, its deadline, and that it has no capabilities."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from msgspec.structs import replace

from hangwatch import config, hooks
from hangwatch.config import ConfigError
from hangwatch.formats.incident_file import StoreError
from hangwatch.hook_process import MOST_OUTPUT_BYTES
from hangwatch.hooks import HookResult, Hooks, due_hook
from hangwatch.model import CRASHED, Incident, JobState, ProcessId, Rank, RankId, RecommendedAction
from hangwatch.model.verdicts import ActionKind
from hangwatch.report.event import HangEvent
from hangwatch.schedule.owner_limits import RateLimit
from hangwatch.store import Store
from tests import samples
from tests.commands import spawn, write_program
from tests.conftest import wait_for
from tests.other_users import as_user, needs_root

Script = Callable[[str], str]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(lines: str) -> str:
        path = write_program(tmp_path / "hook.sh", f"{lines}")
        return str(path)

    return write


def incident(**changes: object) -> Incident:
    return samples.change_parts(samples.mismatch(), **changes)


def ran(program: str, *arguments: str, deadline_seconds: float = 60.0) -> HookResult:
    call = due_hook(
        config.Hooks(on_hung=(program, *arguments)), incident(), JobState.HUNG, Path("/state/incidents/one")
    )
    assert call is not None
    return hooks.run(call, deadline_seconds)


# --- refused at the start --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["notify.sh"], "on_hung[0]: 'notify.sh': must be an absolute path"),
        (["/usr/bin/env", "--to={job}"], "on_hung[1]: '--to={job}': a placeholder must be a whole argument"),
        (
            ["/usr/bin/env", "{job_id}"],
            "allowed after the program: {incident}, {name}, {job}, {job_name}, {job_key}, {state}",
        ),
        (["{incident}"], "on_hung[0]: '{incident}': a placeholder"),
        (["/no/such/program"], "cannot be read: No such file or directory"),
        (["/usr/bin"], "is not a file"),
    ],
)
def test_hook_that_cannot_run_is_refused_with_its_key(command: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        hooks.refuse_unusable(config.Hooks(on_hung=tuple(command)), "h.toml")
    assert str(error.value).startswith("h.toml: [hooks]: on_hung")
    assert says in str(error.value)


def test_braces_without_placeholder_are_plain_text(script: Script) -> None:
    text = '{"text": "a job has hung"}'
    program = script('printf %s "$1"')
    hooks.refuse_unusable(config.Hooks(on_hung=(program, text)), "h.toml")
    assert ran(program, text).output == text.encode()


def test_hook_program_writable_by_others_is_refused(tmp_path: Path, script: Script) -> None:
    path = Path(script("true"))

    def problem() -> str:
        try:
            hooks.refuse_unusable(config.Hooks(on_ended=(str(path),)), "h.toml")
        except ConfigError as error:
            return str(error)
        return ""

    assert problem() == ""
    path.chmod(0o775)
    assert f"{path} is writable by other users" in problem()
    path.chmod(0o644)
    assert f"may not execute it\n  chmod 755 {path}" in problem()
    path.chmod(0o755)
    tmp_path.chmod(0o777)
    assert f"{tmp_path} is writable by other users" in problem()
    tmp_path.chmod(0o700)
    path.rename(tmp_path / "real.sh")
    path.symlink_to("real.sh")
    assert "contains a symbolic link" in problem() and f"without links: '{tmp_path}/real.sh'" in problem()


@needs_root
def test_hook_program_of_another_user_is_refused(script: Script) -> None:
    path = script("true")
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        hooks.refuse_unusable(config.Hooks(on_hung=(path,)), "h.toml")


# --- selection and arguments -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("moved_to", "kind", "key"),
    [
        (JobState.HUNG, "OddRank", "on_hung"),
        (JobState.STALLED, "OddRank", "on_stalled"),
        (JobState.RECOVERED, "OddRank", "on_recovered"),
        (JobState.TRAINING, "OddRank", "on_recovered"),
        (JobState.ENDED, "OddRank", "on_ended"),
        (JobState.ENDED, CRASHED, "on_crashed"),
        (JobState.WAITS_ELSEWHERE, "OddRank", None),
        (None, "OddRank", None),
        (None, CRASHED, None),
    ],
)
def test_state_change_selects_its_hook(moved_to: JobState | None, kind: str, key: str | None) -> None:
    all_of_them = config.Hooks(
        **dict.fromkeys(("on_hung", "on_stalled", "on_recovered", "on_ended", "on_crashed"), ("/usr/bin/true",))
    )
    call = due_hook(all_of_them, incident(kind=kind), moved_to, None)
    assert (call and call.key) == key
    assert due_hook(config.Hooks(), incident(), moved_to, None) is None


def test_text_of_a_job_owner_is_neither_option_nor_shell_code(script: Script) -> None:
    names = ("incident", "name", "job", "job_name", "job_key", "state", "owner", "owner_uid", "slurm_job", "node")
    command = ("/usr/bin/true", *(f"{{{name}}}" for name in names))
    hostile = incident(job_id="--rm; $(x)\n`y`", job_name="../-a b", job_key="k1", owner="Slurm job 4711", uid=1004)
    call = due_hook(config.Hooks(on_hung=command), hostile, JobState.HUNG, Path("/state/incidents/one"))
    assert call.command[1:] == (
        "/state/incidents/one", "one", "_-rm____x___y_", "_._-a_b", "k1", "hung", "Slurm job 4711", "1004", "4711", samples.NODE,
    )  # fmt: skip
    assert call.environ["HANGWATCH_JOB"] == "_-rm____x___y_"
    assert {f"HANGWATCH_{name.upper()}" for name in names} <= call.environ.keys()
    claims = due_hook(config.Hooks(on_hung=command), incident(owner="uid 4711", job_id="4711"), JobState.HUNG, None)
    assert claims is not None and "HANGWATCH_SLURM_JOB" not in claims.environ, "a name is not the kernel's word"


def test_pods_are_those_of_the_named_ranks() -> None:
    def pods(named: tuple[int, ...]) -> str | None:
        ranks = [Rank(id=ProcessId(pid, 1), rank=pid, local_rank=pid, pod=f"0a1b2c3{pid}") for pid in (1, 2, 3)]
        ids = tuple(RankId(node=samples.NODE, rank=pid, pid=pid) for pid in named)
        found = incident(ranks=tuple(ranks), named=ids)
        call = due_hook(config.Hooks(on_hung=("/usr/bin/true",)), found, JobState.HUNG, None)
        return call.environ.get("HANGWATCH_PODS")

    assert pods((2,)) == "0a1b2c32"
    assert pods(()) == "0a1b2c31,0a1b2c32,0a1b2c33"
    assert pods((9,)) == "0a1b2c31,0a1b2c32,0a1b2c33", "the pod of a rank that is gone is unknown"


def test_verdict_has_no_character_that_ends_a_string() -> None:
    text = "Rank 3 is blocked in \"$(x)\\`y`\n' at a.py:7. " + "x" * 600
    hostile = incident(message=text)
    call = due_hook(config.Hooks(on_hung=("/usr/bin/true", "{message}", "{kind}")), hostile, JobState.HUNG, None)
    message, kind = call.command[1:]
    assert message.startswith("Rank 3 is blocked in __(x)__y___ at a.py:7. xxx") and len(message) == 500
    assert (call.environ["HANGWATCH_MESSAGE"], kind) == (message, hostile.verdict.kind)


def test_hook_gets_the_address_of_the_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """kubectl in a pod reads it from the environment."""
    command = config.Hooks(on_hung=("/usr/bin/true",))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    outside = due_hook(command, incident(), JobState.HUNG, None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    inside = due_hook(command, incident(), JobState.HUNG, None)
    assert outside is not None and "KUBERNETES_SERVICE_HOST" not in outside.environ
    assert inside is not None and inside.environ["KUBERNETES_SERVICE_HOST"] == "10.96.0.1"


# --- execution -------------------------------------------------------------------------------------------------------


def test_hook_has_no_capability_secret_or_open_file_of_the_daemon(
    script: Script, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "xyzzy")
    with (tmp_path / "secret").open("w") as secret:
        os.set_inheritable(secret.fileno(), True)
        ended = ran(script("grep -E '^(Cap|NoNew)' /proc/self/status; env; ls -l /proc/self/fd; pwd"))
    assert ended.outcome == "ok" and ended.output is not None
    text = ended.output.decode()
    rights = dict(line.split(":\t") for line in text.splitlines()[:6])
    bounding = rights.pop("CapBnd")
    assert rights.pop("NoNewPrivs") == "1"
    assert set(map(int, rights.values())) == {0}, rights
    if os.geteuid() == 0:
        assert int(bounding, 16) == 0
    assert "xyzzy" not in text and "secret" not in text.split("HANGWATCH_STATE")[1]
    assert "HANGWATCH_INCIDENT=/state/incidents/one" in text and "HANGWATCH_STATE=hung" in text
    assert "PATH=/usr/local/sbin:" in text and text.endswith("/\n")


@needs_root
def test_hook_without_cap_setpcap_has_no_capabilities() -> None:
    """Run the hook as under deploy/systemd/hangwatch.service: separate user, ambient capabilities, no CAP_SETPCAP."""
    rights = "-all,+sys_ptrace,+kill"
    caps = [f"--{kind}={rights}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
    child = [sys.executable, "-I", "-S", hooks.__file__.replace("hooks.py", "hook_process.py"), "60"]
    status = ["/usr/bin/grep", "-E", "^(Cap|NoNew)", "/proc/self/status"]
    user = [*as_user(12345)[:-1], *caps]
    before, after = (
        dict(line.split(":\t") for line in subprocess.check_output([*user, *command], text=True).splitlines())
        for command in (status, [*child, *status])
    )
    assert int(before["CapEff"], 16) != 0
    assert after["NoNewPrivs"] == "1"
    assert {int(after[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {0}


def test_background_process_of_a_hook_is_killed_when_it_ends(script: Script, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    ended = ran(
        script(f"mkfifo {fifo}; setsid sh -c 'sleep 1000 & echo $!; echo >{fifo}; wait' & read _ <{fifo}; echo done")
    )
    assert ended.outcome == "ok" and ended.output is not None
    pid, word = ended.output.split()
    assert word == b"done"
    wait_for(lambda: not Path(f"/proc/{int(pid)}").exists(), "the process that was left to be gone")


def test_hook_at_its_deadline_is_killed_with_its_children(script: Script) -> None:
    ended = ran(script("trap '' TERM; sleep 1000 & echo $! $$; wait; sleep 1000"), deadline_seconds=1.0)
    assert ended.outcome == "timed_out" and "was killed at its deadline of 1 s" in ended.message
    for pid in map(int, ended.output.split()):
        wait_for(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"{pid} to be gone")


def test_killed_daemon_leaves_no_hook_running(script: Script, tmp_path: Path) -> None:
    program = script(f"sleep 1000 & echo $! $$ > {tmp_path}/written; mv {tmp_path}/written {tmp_path}/pids; wait")
    runs = "import sys; from hangwatch import hooks; from tests import samples; hooks.run(hooks.HookCall('on_hung', (sys.argv[1],), {}, samples.mismatch(), None), 600)"
    with spawn(sys.executable, "-c", runs, program):
        wait_for((tmp_path / "pids").exists, "the hook")
    for pid in map(int, (tmp_path / "pids").read_text().split()):
        wait_for(lambda pid=pid: not Path(f"/proc/{pid}").exists(), f"{pid} to be gone")


@pytest.mark.parametrize("action", get_args(ActionKind))
def test_input_of_a_hook_is_the_event_of_its_incident(action: ActionKind, script: Script) -> None:
    moves = RecommendedAction(action, exclude_nodes=("gpu-07",) if action == "restart_elsewhere" else ())
    found = incident(action=moves)
    call = due_hook(config.Hooks(on_hung=(script("cat"),)), found, JobState.HUNG, None)
    assert call is not None
    event = msgspec.json.decode(hooks.run(call, 60.0).output or b"", type=HangEvent)
    assert (event.restart == "elsewhere", event.blame == "node") == (bool(event.exclude_nodes),) * 2
    assert event.schema_version == 1 and event.evidence and event.job.job_key == found.job.job_key


def test_long_output_of_a_hook_keeps_only_its_beginning(script: Script) -> None:
    ended = ran(script("head -c 30000000 /dev/zero; echo ended >&2"))
    assert ended.outcome == "ok" and ended.output is not None
    assert MOST_OUTPUT_BYTES < len(ended.output) < MOST_OUTPUT_BYTES + 100
    assert ended.output.endswith(b"... the rest of the output was dropped\n")


@pytest.mark.parametrize(
    ("lines", "says", "outcome"),
    [
        ("exit 0", "ended with status 0", "ok"),
        ("exit 3", "ended with status 3", "failed"),
        ("kill -9 $$", "was killed", "killed"),
    ],
)
def test_hook_result_has_outcome_and_message(script: Script, lines: str, says: str, outcome: str) -> None:
    ended = ran(script(lines))
    assert ended.outcome == outcome
    assert f"hook on_hung (hook.sh) {says} after" in ended.message


def test_hook_with_missing_interpreter_is_not_run(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/no/such/shell\n")
    broken.chmod(0o755)
    ended = ran(str(broken))
    assert ended.outcome == "not_run" and "could not be run" in ended.message
    assert b"No such file" in ended.output


# --- number of runs --------------------------------------------------------------------------------------------------


def test_hook_limit_of_one_owner_does_not_limit_other_owners() -> None:
    now = [100.0]
    pace = RateLimit(5, 2, lambda: now[0])
    assert [pace.begin("a") is None for _ in range(4)] == [True, True, False, False]
    assert (pace.begin("a"), pace.begin("b")) == ("per_minute_of_owner", None)
    assert [pace.begin(owner) is None for owner in "cde"] == [True, True, False]
    assert pace.begin("e") == "per_minute"
    now[0] += 60.0
    assert pace.begin("a") is None


def test_slow_hook_of_one_owner_does_not_delay_other_owners(tmp_path: Path, script: Script) -> None:
    door = tmp_path / "door"
    os.mkfifo(door)
    program = script(f'[ "$HANGWATCH_OWNER" != slow ] || cat {door}')
    ended: list[HookResult] = []
    threads: list[threading.Thread] = []

    def begin(call: Callable[[], None]) -> None:
        threads.append(threading.Thread(target=call))
        threads[-1].start()

    called = Hooks(config.Hooks(on_hung=(program,)), begin, ended.append)
    for _ in range(2):
        called.call(incident(owner="slow", share="slow"), JobState.HUNG, None)
    called.call(incident(owner="quick", share="quick"), JobState.HUNG, None)
    wait_for(lambda: ended, "the hook of the other owner")
    assert ended[0].call.incident.job.owner == "quick"
    for number in (2, 3):
        door.write_text("go")
        wait_for(lambda number=number: len(ended) == number, f"hook {number}")
    assert all(one.outcome == "ok" for one in ended)
    for thread in threads:
        thread.join()


def test_hook_that_needs_the_incident_folder_is_not_called_without_it() -> None:
    ended: list[HookResult] = []
    called = Hooks(config.Hooks(on_hung=("/usr/bin/true", "{incident}")), lambda call: call(), ended.append)
    called.call(incident(), JobState.HUNG, None)
    assert "was not called: it needs {incident}" in ended[0].message and ended[0].output is None
    assert ended[0].outcome == "not_called"


def test_hook_counters_begin_at_zero() -> None:
    begun = hooks.zero_counts(config.Hooks(on_hung=("/bin/true",), on_crashed=("/bin/true",)))
    assert set(begun.values()) == {0}
    assert {event for event, _ in begun} == {"hung", "crashed"}
    assert {outcome for _, outcome in begun} == {"ok", "failed", "killed", "timed_out", "not_run", "not_called"}


# --- kept results ----------------------------------------------------------------------------------------------------


def test_hook_output_is_stored_and_not_readable_by_the_job_owner(tmp_path: Path) -> None:
    kept = Store(tmp_path, shared=True)
    kept.make_writable()
    found = replace(incident(uid=12345), incident_id="20260314T031500Z-42")
    folder = kept.save(found, {"report.txt": "report"})
    for content in (b"first", b"second"):
        kept.add_output(folder.name, "on_hung.txt", content)
    file = folder / "hooks" / "on_hung.txt"
    assert file.read_bytes() == b"second"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert os.listxattr(file) == os.listxattr(file.parent) == []
    with_group = Store(tmp_path, config.Store(group="4711"), shared=True)
    with_group.make_writable()
    with_group.add_output(folder.name, "on_hung.txt", b"third")
    assert os.listxattr(file) == ["system.posix_acl_access"]
    assert os.listxattr(folder / "report.txt") == os.listxattr(folder) == ["system.posix_acl_access"]


def test_symlink_in_place_of_the_hooks_folder_is_not_followed(tmp_path: Path) -> None:
    kept = Store(tmp_path / "state")
    kept.make_writable()
    folder = kept.save(incident(), {})
    (tmp_path / "elsewhere").mkdir()
    (folder / "hooks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        kept.add_output(folder.name, "on_hung.txt", b"x")
    assert list((tmp_path / "elsewhere").iterdir()) == []
