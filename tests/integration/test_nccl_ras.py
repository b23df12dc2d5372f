"""NCCL's RAS in real processes with a fake server: which sockets are queried, the limits, and the verdicts."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from msgspec import structs

from hangwatch import config
from hangwatch.capture.diagnosis import diagnose_job
from hangwatch.capture.request import CaptureRequest
from hangwatch.capture.rounds import job_of_pids
from hangwatch.model import Fault
from hangwatch.probes.network import nccl_ras
from hangwatch.probes.process import procfs
from hangwatch.report import phrases
from hangwatch.stacks import activity
from hangwatch.verdict.diagnosis import Diagnosis
from tests.conftest import identity
from tests.nccl_ras import TEXT, as_json, communicator, needs_networks, process, rank

SETTINGS = config.Capture(
    nccl_ras=True,
    rounds=2,
    pause_seconds=0.1,
    dump_deadline_seconds=60.0,
    nccl_ras_pause_seconds=0.1,
    nccl_ras_deadline_seconds=120.0,
    nccl_ras_min_age_seconds=0.0,
)
FOUR = as_json(communicator([rank(number, 100 + number, AllReduce=7) for number in range(4)]))


def door(*pids: int) -> nccl_ras.RasEndpoint | Fault:
    return nccl_ras.find_endpoint([identity(pid) for pid in pids], procfs.PROC)


def read_requests(folder: Path) -> list[str]:
    return (folder / "asked").read_text().split("\n")[:-1] if (folder / "asked").exists() else []


@needs_networks
def test_a_rank_is_asked_in_its_own_network(tmp_path: Path) -> None:
    """Query a rank in its network namespace: this port is not open in the namespace of the test.

    The server gets only a STATUS request.
    """
    (tmp_path / "answer").write_text(FOUR)
    with process(tmp_path) as pid:
        found = door(pid)
        assert isinstance(found, nccl_ras.RasEndpoint)
        status = nccl_ras.ask_status(found, "us", 60.0, threading.Event(), procfs.PROC)
    assert not isinstance(status, Fault)
    assert status.communicators[0].size == 4
    assert read_requests(tmp_path) == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "STATUS"]


@needs_networks
def test_an_older_nccl_answers_in_text(tmp_path: Path) -> None:
    (tmp_path / "answer").write_text("NCCL version 2.26.2 compiled with CUDA 12.6\n")
    with process(tmp_path, "text") as pid:
        found = door(pid)
        assert isinstance(found, nccl_ras.RasEndpoint)
        status = nccl_ras.ask_status(found, "us", 60.0, threading.Event(), procfs.PROC)
    assert not isinstance(status, Fault)
    assert status.version == "2.26.2"
    assert "VERBOSE STATUS" not in read_requests(tmp_path)


@needs_networks
@pytest.mark.parametrize(
    ("how", "seconds", "reasons"),
    [
        ("silent", 2.0, {"NoAnswer"}),
        ("endless", 2.0, {"NoAnswer"}),
        ("gigabyte", 2.0, {"TooLarge", "NoAnswer"}),
        ("garbage", 60.0, {"BadAnswer"}),
        ("answer", 60.0, {"BadAnswer"}),
    ],
)
def test_ras_response_is_bounded_in_size_and_time(how: str, seconds: float, reasons: set[str], tmp_path: Path) -> None:
    """Limit every response in size and in time."""
    (tmp_path / "answer").write_text('{"nccl_version": NaN' + "[" * 100_000)
    with process(tmp_path, how) as pid:
        found = door(pid)
        assert isinstance(found, nccl_ras.RasEndpoint)
        fault = nccl_ras.ask_status(found, "us", seconds, threading.Event(), procfs.PROC)
    assert isinstance(fault, Fault)
    assert fault.reason in reasons


@needs_networks
def test_ras_socket_of_another_user_is_not_queried(tmp_path: Path) -> None:
    """Query only a socket of the rank's owner: any user can listen on this port.

    If a socket of another user listens, too, the rank is not queried at all.
    """
    with process(tmp_path / "rank", "mute") as pid:
        assert door(pid) == Fault(subject="NCCL RAS", reason="NoListener", detail=nccl_ras.NOBODY)
        with process(tmp_path / "stranger", network_of_pid=pid):
            fault = door(pid)
            assert isinstance(fault, Fault)
            assert fault.reason == "AnothersListener"
            with process(tmp_path / "own", network_of_pid=pid) as own:
                both = door(own)
                assert isinstance(both, Fault)
                assert both.reason == "AnothersListener"
    assert read_requests(tmp_path / "stranger") == []


@needs_networks
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("metadata.internal:80", "NoListener"),
        ("localhost:99999", "NoListener"),
        ("localhost:28028\u0660", "NoListener"),
        ("", "NoListener"),
    ],
)
def test_an_address_in_the_environment_is_a_port_at_most(address: str, reason: str, tmp_path: Path) -> None:
    with process(tmp_path, "answer", NCCL_RAS_ADDR=address) as pid:
        fault = door(pid)
        assert isinstance(fault, Fault)
        assert fault.reason == reason


@needs_networks
def test_the_host_of_that_address_does_not_count(tmp_path: Path) -> None:
    with process(tmp_path, "answer", NCCL_RAS_ADDR="192.0.2.1:28028") as pid:
        found = door(pid)
    assert isinstance(found, nccl_ras.RasEndpoint)
    assert (found.address, found.port) == ("127.0.0.1", 28028)


def test_a_socket_at_an_address_that_is_not_its_own_is_not_asked() -> None:
    """Do not query a socket at an address of another host: the connection would lead to that host.

    Any user may bind such a socket, see IP_FREEBIND in ip(7).
    """
    with socket.socket() as listening:
        listening.setsockopt(socket.IPPROTO_IP, 15, 1)  # IP_FREEBIND
        listening.bind(("192.0.2.1", 0))
        listening.listen()
        me = identity(os.getpid())
        spaces = nccl_ras.NamespaceCache(procfs.PROC)
        fault = nccl_ras.find_listener(me, listening.getsockname()[1], spaces.held([me]), spaces)
    assert isinstance(fault, Fault)
    assert fault.reason == "NotOwnAddress"


def answers(pid: int, *, min_age_seconds: float) -> object:
    return nccl_ras.collect_statuses(
        [identity(pid)],
        "us",
        wanted=2,
        pause_seconds=0.1,
        min_age_seconds=min_age_seconds,
        end=time.monotonic() + 120,
        stop=threading.Event(),
        proc_root=procfs.PROC,
    )


@needs_networks
def test_rank_with_ras_disabled_or_just_started_is_not_queried(tmp_path: Path) -> None:
    with process(tmp_path, "answer", NCCL_RAS_ENABLE="0") as pid:
        fault = door(pid)
    assert isinstance(fault, Fault)
    assert fault.reason == "RasDisabled"
    (tmp_path / "answer").write_text(FOUR)
    with process(tmp_path) as pid:
        young = answers(pid, min_age_seconds=1e6)
    assert isinstance(young, Fault)
    assert young.reason == "TooYoung"
    assert read_requests(tmp_path) == []


@needs_networks
def test_what_is_too_large_as_json_is_asked_as_text(tmp_path: Path) -> None:
    """Request text if JSON is too large: for thousands of ranks, JSON lists all, text only the ranks that differ."""
    (tmp_path / "answer").write_text(TEXT.format(pid=7, host="10.0.0.7"))
    with process(tmp_path, "gigabyte") as pid:
        found = answers(pid, min_age_seconds=0.0)
    assert isinstance(found, list)
    assert [one.version for _, one in found] == ["2.26.2", "2.26.2"]
    assert read_requests(tmp_path).count("SET FORMAT json") == 1


# --- from RAS to the verdict -----------------------------------------------------------------------------------------


def looked(stack: contextlib.ExitStack, folder: Path, *answers: list[int], ask_nccl: bool = True) -> Diagnosis:
    """Diagnose four ranks with the same stack.

    RAS runs in the first rank. Each of `answers` is one response: the number of launched collectives for each rank.
    """
    told = [{"RANK": str(number), "WORLD_SIZE": "4", "LOCAL_RANK": str(number)} for number in range(4)]
    hows = ["answer", "mute", "mute", "mute"]
    pids = [
        stack.enter_context(process(folder / str(number), how, **environ))
        for number, (how, environ) in enumerate(zip(hows, told, strict=True))
    ]
    for number, counts in enumerate(answers):
        ranks = [rank(place, pid, AllReduce=count) for place, (pid, count) in enumerate(zip(pids, counts, strict=True))]
        (folder / "0" / f"answer{number}").write_text(as_json(communicator(ranks)))
    job = job_of_pids(pids)
    return diagnose_job(job, CaptureRequest(settings=SETTINGS, node="here", ask_nccl=ask_nccl), activity.load())


@needs_networks
def test_rank_with_lower_nccl_count_among_equal_stacks_is_checked_first(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        look = looked(stack, tmp_path, [6650, 6650, 6649, 6650])
    assert len(look.grouping.groups) == 1, "by their stacks they are alike"
    verdict = look.verdict
    assert [one.rank for one in verdict.check_first] == [2]
    assert "It has not joined AllReduce #6650" in verdict.message
    quoted = [vote.message for vote in verdict.evidence if vote.kind == "nccl_ras"]
    assert len(quoted) == 1
    assert "NCCL 2.28.9 (RAS), unchanged in 3 answers" in quoted[0]
    assert "rank 2 has launched 6,649 AllReduce; ranks 0-1,3 have launched 6,650 AllReduce" in quoted[0]


@needs_networks
@pytest.mark.parametrize("ask_nccl", [True, False])
def test_rising_nccl_counts_point_at_no_rank(ask_nccl: bool, tmp_path: Path) -> None:
    """Let the counts increase, as between two steps of a healthy job. A light capture does not query RAS."""
    with contextlib.ExitStack() as stack:
        look = looked(stack, tmp_path, [9, 9, 8, 9], [9, 9, 9, 9], [10, 10, 9, 10], ask_nccl=ask_nccl)
    assert look.verdict.check_first == look.verdict.named == ()
    assert "nccl_ras" not in {vote.kind for vote in look.verdict.evidence}
    assert ("STATUS" in read_requests(tmp_path / "0")) is ask_nccl


@needs_networks
@pytest.mark.parametrize(("how", "seconds", "reason"), [("garbage", 60.0, "BadAnswer"), ("silent", 1.0, "NoAnswer")])
def test_reason_of_missing_nccl_counts_is_in_the_notes(how: str, seconds: float, reason: str, tmp_path: Path) -> None:
    """End the capture at its deadline, even if the RAS server never responds."""
    settings = structs.replace(SETTINGS, nccl_ras_deadline_seconds=seconds)
    with process(tmp_path, how) as pid:
        look = diagnose_job(
            job_of_pids([pid]), CaptureRequest(settings=settings, node="here", ask_nccl=True), activity.load()
        )
    notes = phrases.notes(look.grouping)
    assert any("no NCCL operation counts of pid" in note and f"({reason})" in note for note in notes), notes


@needs_networks
def test_nccl_by_default_is_not_asked(tmp_path: Path) -> None:
    """Do not query RAS by default: some versions of NCCL crash when queried, and no default may harm a job."""
    settings = structs.replace(SETTINGS, nccl_ras=config.Capture().nccl_ras)
    (tmp_path / "answer").write_text(FOUR)
    with process(tmp_path) as pid:
        look = diagnose_job(
            job_of_pids([pid]), CaptureRequest(settings=settings, node="here", ask_nccl=True), activity.load()
        )
    assert look.grouping.members[0].recorder.nccl_ras is None
    assert read_requests(tmp_path) == []
