"""The first dead rank of a job, by the crash artifacts of all dead ranks."""

import json
import traceback
from typing import Any

import pytest
from msgspec.structs import replace

from hangwatch import crash
from hangwatch.crash import CrashArtifacts, collection
from hangwatch.crash.artifacts import Exit
from hangwatch.formats import incident_file, log_times, torchrun_exits
from hangwatch.logs import failures
from hangwatch.model import Confidence, EndedProcess, Incident, Job, KernelLine, ProcessId, RankId, Verdict
from hangwatch.probes.process import crash_artifacts
from hangwatch.report import html, text
from hangwatch.stacks import activity
from hangwatch.state import steps
from hangwatch.state.board import Snapshot
from hangwatch.tables import kernel_lines
from tests import secret_texts
from tests.conftest import load_table

CASES = load_table("crashes.toml")
NOW = 1.8e9
RESET = "RuntimeError: Connection closed by peer [127.0.0.1]:34688"


def make_artifacts(
    rank: int, *, error: str = "", at: float = 0.0, segfault: float | None = None, core: str = "", text: str = ""
) -> CrashArtifacts:
    pid = 1000 + rank
    failure = None
    if error:
        moment = log_times.Moment("unix", float(int(NOW + at)), "")
        said = failures.parse_error_file(f'{{"message": {{"message": "{error}"}}}}')
        failure = said._replace(moment=moment)
    lines: tuple[KernelLine, ...] = ()
    if segfault is not None:
        line = text or f"python[{pid}]: segfault at 0 ip 0 sp 0 error 4 in libnccl.so.2[0+1]"
        told = kernel_lines.find(line)
        lines = (
            KernelLine(name=told.name, text=line, unix_seconds=NOW + segfault, subject=told.subject, where=told.where),
        )
    return CrashArtifacts(
        RankId(node="n1", rank=rank, local_rank=rank, pid=pid),
        gone_unix_seconds=NOW + 10,
        lines=lines,
        failure=failure,
        core=crash_artifacts.Core(path="/core", unix_seconds=NOW + at, signal=core) if core else None,
    )


def job(*artifacts: CrashArtifacts, world_size: int | None = None) -> Job:
    ended = tuple(
        EndedProcess(
            id=ProcessId(pid=one.id.pid or 0, start_ticks=1),
            rank=one.id.rank,
            local_rank=one.id.local_rank,
            gone_unix_seconds=one.gone_unix_seconds,
        )
        for one in artifacts
    )
    return Job(
        job_id="42",
        launcher="torchrun",
        launcher_id=None,
        ranks=(),
        world_size=world_size or len(artifacts),
        local_world_size=len(artifacts),
        ended=ended,
    )


def judged(artifacts: list[CrashArtifacts], **sizes: int) -> Verdict:
    verdict = crash.judge(job(*artifacts, **sizes), artifacts)
    assert verdict is not None
    return verdict


def incident_of(artifacts: list[CrashArtifacts], at: float = NOW, **sizes: int) -> Incident:
    verdict = judged(artifacts, **sizes)
    return crash.make_incident(job(*artifacts, **sizes), "n1", artifacts, verdict, activity.load(), unix_now=at)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_first_dead_rank_is_named_by_its_artifacts(case: dict[str, Any]) -> None:
    verdict = judged([make_artifacts(**artifacts) for artifacts in case["artifacts"]])
    assert verdict.kind == "Crashed"
    assert [rank.rank for rank in verdict.named] == case["named"], verdict.message
    assert verdict.confidence == case["confidence"]
    assert case["says"] in verdict.message
    assert [rank.rank for rank in verdict.check_first] == ([] if case["named"] else [1])


@pytest.mark.parametrize(
    ("exits", "named", "confidence"),
    [
        ([None, crash.Exit(-11, by_kernel=True), None], [1], Confidence.HIGH),
        ([None, crash.Exit(-11, by_kernel=False), None], [1], Confidence.MEDIUM),
        ([crash.Exit(-15, by_kernel=False), crash.Exit(-9, by_kernel=False, is_first=True)], [1], Confidence.LOW),
        ([crash.Exit(1, by_kernel=False), crash.Exit(-9, by_kernel=False)], [], Confidence.NONE),
        ([crash.Exit(1, by_kernel=False), crash.Exit(1, by_kernel=False, is_first=True)], [], Confidence.NONE),
        ([crash.Exit(0, by_kernel=True), crash.Exit(-15, by_kernel=True)], [], Confidence.NONE),
    ],
)
def test_how_a_rank_ended_is_said_and_a_signal_is_a_reason(
    exits: list[crash.Exit | None], named: list[int], confidence: Confidence
) -> None:
    # A signal is a reason to name a rank, an exit code is not. Other ranks fail in the same second, and the
    # launcher may report any of them first.
    found = [make_artifacts(rank)._replace(exit=one) for rank, one in enumerate(exits)]
    verdict = judged([*found, make_artifacts(7, error=RESET)])
    assert ([rank.rank for rank in verdict.named], verdict.confidence) == (named, confidence)
    told = [rank for vote in verdict.evidence if vote.kind == "exit" for rank in vote.ranks]
    assert len(told) == sum(one is not None and one.code != 0 for one in exits)


KILLED = crash.Exit(-9, by_kernel=True)


@pytest.mark.parametrize(
    ("artifacts", "is_end"),
    [
        ([make_artifacts(0)._replace(exit=KILLED), make_artifacts(1)._replace(exit=KILLED)], True),
        ([make_artifacts(0)._replace(exit=KILLED), make_artifacts(1, error=RESET)], True),
        ([make_artifacts(0)._replace(exit=KILLED), make_artifacts(1, segfault=1)], False),
        ([make_artifacts(0)._replace(exit=KILLED), make_artifacts(1, error="ValueError: 7", at=1)], False),
        ([make_artifacts(0, error=RESET), make_artifacts(1, error=RESET)], False),
    ],
)
def test_kill_of_a_hung_job_is_its_end(artifacts: list[CrashArtifacts], is_end: bool) -> None:
    assert (crash.judge(job(*artifacts), artifacts, was_open=True) is None) is is_end
    assert crash.judge(job(*artifacts), artifacts) is not None, "of a job without an open incident it is a crash"


def test_torchrun_tells_how_its_ranks_ended() -> None:
    printed = """
E1122 19:36:08.192000 4894 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -11) local_rank: 1 (pid: 4924) of binary: /usr/bin/python
Failures:
[1]:
  time      : 2026-11-22_19:36:08
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 4923)  (SIGTERM)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_19:36:08
  rank      : 1 (local_rank: 1)
  exitcode  : -11 (pid: 4924)  (SIGSEGV)
"""
    whole = {4923: torchrun_exits.RankExit(-15, False), 4924: torchrun_exits.RankExit(-11, True)}
    assert torchrun_exits.exits(printed) == whole
    assert torchrun_exits.exits(printed.partition("Failures:")[0]) == {4924: whole[4924]}


def test_line_of_a_launcher_counts_in_its_first_1024_characters() -> None:
    told = "failed (exitcode: -11) local_rank: 1 (pid: 7) of binary: /usr/bin/python3"
    assert set(torchrun_exits.exits(f"{' ' * 900}{told}\n")) == {7}
    assert torchrun_exits.exits(f"{' ' * 1024}{told}\n") == {}


def test_that_a_container_took_its_files_with_it_is_said_once_for_all_its_ranks() -> None:
    gone = (make_artifacts(rank)._replace(refused=(collection._CONTAINER_GONE,)) for rank in (1, 2, 3))
    (told,) = (vote for vote in judged([make_artifacts(0, segfault=1), *gone]).evidence if vote.kind == "not_read")
    assert told.message.startswith("ranks 1-3 on n1: its container no longer exists")
    assert told.message.endswith("keep them")


def test_an_end_in_order_is_no_crash() -> None:
    found = [make_artifacts(0), make_artifacts(1)]
    assert crash.judge(job(*found), found) is None


def test_rank_without_error_is_not_suspected_if_other_nodes_exist() -> None:
    verdict = judged([make_artifacts(0, error=RESET), make_artifacts(1), make_artifacts(2, error=RESET)], world_size=8)
    assert not verdict.named and not verdict.check_first


def test_a_worker_that_was_killed_is_told_and_is_not_the_end_of_its_rank() -> None:
    line = "Memory cgroup out of memory: Killed process 9001 (pt_data_worker) total-vm:1kB"
    complains = make_artifacts(0, error="RuntimeError: DataLoader worker is killed", at=5)
    verdict = judged([complains, make_artifacts(1, segfault=1, text=line)])
    assert [rank.rank for rank in verdict.named] == [0]
    assert any("Killed process 9001" in vote.message for vote in verdict.evidence)


def test_what_was_not_read_is_said_once_something_tells_of_a_crash() -> None:
    unread = make_artifacts(1)._replace(refused=("its core /dev/zero: is not a regular file",))
    verdict = judged([make_artifacts(0, error="ValueError: a"), unread])
    assert any(vote.kind == "not_read" and "is not a regular file" in vote.message for vote in verdict.evidence)


def test_words_of_the_owner_are_printable_and_bounded() -> None:
    verdict = judged([make_artifacts(0, error="ValueError: \\u001b[31m\\u202e" + "x" * 5000)])
    assert verdict.message.isprintable() and len(verdict.message) < 1000


def test_the_incident_is_closed_and_can_be_shown() -> None:
    found = [make_artifacts(0, error=RESET), make_artifacts(1, segfault=1.0), make_artifacts(2)]
    incident = incident_of(found)
    assert incident.closed_unix_seconds == incident.opened_unix_seconds == NOW
    assert all("segfault in libnccl.so.2" in render(incident) for render in (text.render, html.render))


def test_crash_report_lists_dead_ranks_and_causes_in_all_forms() -> None:
    # A crash report lists no missing or differing ranks and no stacks, because there was no capture.
    found = [make_artifacts(0, error=RESET), make_artifacts(1, segfault=1.0), make_artifacts(2)]
    incident = incident_of(found, world_size=8)
    report, page = text.render(incident), html.render(incident)
    assert "  3 ranks, all ended on n1, world size 8" in report
    assert "<dt>Ranks</dt><dd>3 ranks, all ended, world size 8</dd>" in page
    for form in (report, page):
        assert "none yet" not in form and "Captures" not in form and "Stacks of the capture" not in form
        assert "crashed; found 2027-01-15 08:00:00 UTC" in form
        assert "has ended: segfault in libnccl.so.2" in form
    exit_only = make_artifacts(0)._replace(exit=Exit(-15, by_kernel=False))
    ended = incident_of([make_artifacts(1, segfault=1.0), exit_only])
    assert "1 rank: 0  has ended: SIGTERM, by its launcher's log" in text.render(ended)
    assert "cause is unknown" not in text.render(ended)
    assert "> 1 rank: 1  has ended: segfault" in report and "2 ranks: 0,2  have ended: RuntimeError" in report


def test_lost_connection_recommends_a_restart_once_a_day() -> None:
    found = [crashed_by("torch.distributed.DistNetworkError: The server socket has closed", 0), make_artifacts(1)]
    snapshot, actions = Snapshot(), []
    for number, hours in enumerate((0.0, 2.0, 40.0)):
        ended = [one._replace(id=replace(one.id, pid=100 * number + (one.id.rank or 0) + 1)) for one in found]
        incident = incident_of(ended, NOW + hours * 3600)
        snapshot, _ = steps.record_crash(snapshot, incident, now=hours * 3600)
        actions.append(snapshot.past_hangs[-1].action)
    assert actions == ["restart", "investigate", "restart"]


@pytest.mark.parametrize("error", ["Preempted: checkpoint written", "ImportError: no flash"])
def test_equal_errors_in_one_second_name_no_rank(error: str) -> None:
    verdict = judged([make_artifacts(rank, error=error, at=1) for rank in range(3)])
    assert (verdict.named, verdict.check_first, verdict.confidence) == ((), (), Confidence.NONE)
    assert "No rank can be named: 3 ranks ended in the same second (" in verdict.message
    assert f": {error.partition(':')[0]}, according to its error file" in verdict.message


@pytest.mark.parametrize(
    "error",
    [
        "ConnectionRefusedError: [Errno 111] Connection refused",
        "redis.exceptions.ConnectionError: Error 111 connecting to 10.0.0.9:6379. Connection refused.",
        "requests.exceptions.ConnectTimeout: HTTPSConnectionPool(host='hf.co', port=443): timed out. (connect timeout=10)",
        "urllib3.exceptions.ProtocolError: ('Connection aborted.', ConnectionResetError(104, 'Connection reset by peer'))",
        "http.client.RemoteDisconnected: Remote end closed connection without response",
        "BrokenPipeError: [Errno 32] Broken pipe",
        "filelock.Timeout: timed out waiting for /data/cache.lock",
        "RuntimeError: Failed to connect to huggingface.co port 443: Connection refused",
        "RuntimeError: connection refused by peer api.example.com:443",
        "CurlError: Failed to connect to [2606:4700::6810:84e5]:8443 after 12 ms: Connection refused",
        "requests.exceptions.ReadTimeout: HTTPSConnectionPool(host='feature-store.io', port=443): Read timed out in store",
    ],
)
def test_lost_connection_to_outside_is_an_error_of_the_rank(error: str) -> None:
    errors = enumerate((RESET, error, RESET))
    verdict = judged([make_artifacts(rank, error=told, at=rank + 1) for rank, told in errors])
    assert ([rank.rank for rank in verdict.named], verdict.confidence) == ([1], Confidence.MEDIUM)


@pytest.mark.parametrize(
    "error",
    [
        "RuntimeError: DataLoader worker (pid 77) is killed by signal: Terminated.",
        "RuntimeError: Application timeout caused pair closure",
        "torch.distributed.elastic.rendezvous.api.RendezvousClosedError",
        "RuntimeError: Detected mismatch between collectives on ranks",
        "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:34688",
        "RuntimeError: [pair.cc:598] writev [10.0.0.1]:4444: Connection reset by peer",
        "RuntimeError: [unbound_buffer.cc:81] gloo: Timed out waiting 1800000ms for recv operation to complete",
        "TimeoutError: The client socket has timed out after 900000ms while trying to connect to (10.0.0.1, 29500).",
        "RuntimeError: Connection reset by peer",
        "RuntimeError: Broken pipe",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "RuntimeError: connection refused (this error originated at tensorpipe/transport/uv/connection_impl.cc:141)",
    ],
)
def test_terminated_or_disconnected_rank_is_not_named(error: str) -> None:
    verdict = judged([make_artifacts(0, error=error, at=1), make_artifacts(1)])
    assert (verdict.named, verdict.confidence) == ((), Confidence.NONE), verdict.message


def crashed_by(error: str, at: float) -> crash.CrashArtifacts:
    """Return the artifacts of a rank that was gone at time NOW. It wrote its error file `at` seconds after NOW."""
    told = json.dumps({"message": {"message": error, "extraInfo": {"timestamp": str(int(NOW + at))}}})
    return collection._with_error_file(
        make_artifacts(0)._replace(gone_unix_seconds=NOW), crash_artifacts.ErrorFile(text=told)
    )


def test_an_error_from_long_before_its_end_or_after_it_is_not_what_it_died_of() -> None:
    """`@record` writes one for a caught exception, too."""
    assert [at for at in (-3600, -10, 0, 3600) if crashed_by("OSError: busy", at).failure is not None] == [-10, 0]


def test_what_an_exception_says_of_secrets_is_not_told() -> None:
    found = crashed_by("curl -H 'Authorization: Bearer hf_1' https://u:hunter2@host/?token=t3", -1).failure
    assert not any(secret in found.text for secret in ("hf_1", "hunter2", "t3"))


def raised(code: str) -> str:
    """Run the failing program `code` under torchelastic's `record`. Return the text of its error file."""
    try:
        exec(compile(code, "/data/train.py", "exec"), {})
    except Exception as error:
        extra = {"py_callstack": traceback.format_exc(), "timestamp": str(int(NOW))}
        return json.dumps({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}})
    raise AssertionError(code)


_FAILS = "def load(text):\n    raise ValueError(text)\n"
_AS_TRACEBACK = (
    "remote failure:\n"
    "Traceback (most recent call last):\n"
    '  File "/data/hunter2.py", line 1, in load_hunter2\n'
    "ValueError: remote failure:\n"
    '  File "https://hub/x?token=hunter2", line 1, in load_hunter2\n'
)


@pytest.mark.parametrize(
    ("code", "where"),
    [
        ("load('bad shard')", "load (train.py:2)"),
        ("load('')", "load (train.py:2)"),
        (f"load({_AS_TRACEBACK!r})", "load (train.py:2)"),
        (
            f"try:\n    load({_AS_TRACEBACK!r})\nexcept ValueError as e:\n    raise OSError from e",
            "<module> (train.py:6)",
        ),
        (f"error = ValueError('a')\nerror.__notes__ = [{_AS_TRACEBACK!r}]\nraise error", "<module> (train.py:5)"),
        ("exec(compile('1/0', 'https://hub/x?token=hunter2', 'exec'))", "<module> (train.py:3)"),
        ("exec(compile('1/0', '/data/hf_hunter2hunter2Qz9a.py', 'exec'))", "<module> (train.py:3)"),
        ("exec('(', {})", ""),
    ],
)
def test_place_of_an_exception_is_of_its_own_traceback(code: str, where: str) -> None:
    """Ignore tracebacks of other processes in the text of an exception. DataLoader, Ray and RPC add them."""
    assert failures.parse_error_file(raised(_FAILS + code)).where == where


@pytest.mark.parametrize("name", secret_texts.FORMS | secret_texts.MORE)
def test_verdict_has_the_type_of_an_exception_and_the_incident_its_text(name: str) -> None:
    # The verdict goes to metrics, pages and the log: it has only the exception's type. The incident has the text
    # without secrets.
    case = (secret_texts.FORMS | secret_texts.MORE)[name]
    found = [crashed_by(f"ShardError: zebra {case.text}", -1)]
    incident = incident_of(found)
    verdict = incident.verdict
    assert ": ShardError, according to its error file" in verdict.message and "zebra" not in verdict.message
    assert not any("zebra" in entry.message for entry in incident.timeline)
    died = incident.job.ended[0].died
    assert died is not None and "zebra" not in died.text
    content = incident_file.encode(incident).decode()
    assert "ShardError: zebra " in content and "ShardError: zebra " in text.render(incident)
    assert not any(secret in content for secret in case.secrets)


@pytest.mark.parametrize(
    "error_text",
    [
        '"hunter2"',
        '"Hunter2: is the password"',
        '{"message": "hunter2"}',
        '{"message": "Hunter 2: x"}',
        '{"message": "hf_hunter2hunter2: x"}',
    ],
)
def test_verdict_on_an_exception_without_a_type_has_none_of_its_text(error_text: str) -> None:
    failure = failures.parse_error_file(f'{{"message": {error_text}}}')
    failure = failure._replace(moment=log_times.Moment("unix", NOW, ""))
    verdict = judged([make_artifacts(0)._replace(failure=failure)])
    assert ": an exception, according to its error file" in verdict.message and "unter" not in verdict.message


@pytest.mark.parametrize(
    ("signal", "at", "counts"),
    [("SIGSEGV", -5, True), ("SIGSEGV", -3600, False), ("SIGQUIT", -5, False), ("", -5, False), ("SIGABRT", -1, True)],
)
def test_a_core_counts_where_it_is_of_this_end_and_of_a_fault(signal: str, at: float, counts: bool) -> None:
    core = crash_artifacts.Core(path="/core", unix_seconds=NOW + at, signal=signal)
    dead = collection._with_core(make_artifacts(0)._replace(gone_unix_seconds=NOW), core)
    assert dead.core == (core if counts else None)
