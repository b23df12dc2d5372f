"""xid: real lines of the kernel's log, from a fixture file and from the real /dev/kmsg."""

import os
import secrets
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hangwatch.model import Fault
from hangwatch.probes.node import kmsg
from hangwatch.probes.node.machine import Node
from hangwatch.tables import kernel_lines, xids
from tests.conftest import DATA
from tests.node_tree import Checked, NodeTree, expect, refuse_open, run, status_and_reason, values

FELL_OFF = "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
PAGE_FAULT = "NVRM: Xid (PCI:0000:04:00): 31, pid=4711, name=python, Ch 00000010, intr 00000000. MMU Fault"
CLEANUP = "NVRM: Xid (PCI:0000:04:00): 45, pid=4711, name=python, Ch 00000010"
NO_PREFIX = "NVRM: Xid (0000:01:00): 13, 0005 00000000 0000502d 00000104"
SXID = "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress non-posted PRIV error (First)"
SXID_FATAL = "nvidia-nvswitch3: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
LOST = "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."
LINK_EVENT = "NVRM: Xid (PCI:0000:01:00): 149, NETIR_LINK_EVT {} XC0 i0 Link 00 (0x026001c6)"
HUNG = "INFO: task python:4711 blocked for more than 120 seconds."
OOM = "Out of memory: Killed process 4712 (pt_data_worker) total-vm:123kB, anon-rss:99kB"


def test_a_quiet_log(tree: NodeTree) -> None:
    tree.log("Linux version 6.1.0", "eth0: link up")
    expect(("OK", "KernelLogQuiet"), "xid", tree.node())


@pytest.mark.parametrize(
    ("line", "expected", "words"),
    [
        (FELL_OFF, ("CRITICAL", "GpuError"), ["0000:3b:00", "XID 79", "10 s ago", "fallen off the bus"]),
        (PAGE_FAULT, ("WARNING", "GpuWarning"), ["0000:04:00", "XID 31"]),
        (NO_PREFIX, ("WARNING", "GpuWarning"), ["0000:01:00", "XID 13"]),
        (CLEANUP, ("OK", "KernelLogQuiet"), []),
        (SXID, ("WARNING", "SwitchWarning"), ["0000:c1:00.0", "SXID 12028", "Link 32"]),
        (SXID_FATAL, ("CRITICAL", "SwitchError"), ["SXID 20034"]),
        (HUNG, ("WARNING", "HungTask"), ["python", "pid 4711"]),
        (OOM, ("OK", "KernelLogQuiet"), []),
        (LOST, ("CRITICAL", "DeviceError"), ["GPU 0000:3b:00.0", "10 s ago"]),
        ("NVRM: RmInitAdapter failed! (0x26:0xffff:1290)", ("CRITICAL", "DeviceError"), ["GPU unknown"]),
        ("NETDEV WATCHDOG: ib0 (mlx5_core): transmit queue 3 timed out", ("WARNING", "DeviceError"), ["ib0"]),
        ("INFO: task python:4711 blocked in I/O wait for more than 122 seconds.", ("WARNING", "HungTask"), ["4711"]),
    ],
)
def test_what_a_line_means(tree: NodeTree, line: str, expected: tuple[str, str], words: list[str]) -> None:
    tree.log(line)
    result = expect(expected, "xid", tree.node())
    for word in words:
        assert word in result.verdict.message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("NVRM: Xid (PCI:0000:01:00): 144, SAW_MVB Nonfatal XC0 i0 Link 0 (0x1 0x8)", "WARNING"),
        ("NVRM: Xid (PCI:0000:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00 (0x026001c6)", "CRITICAL"),
        (
            "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot)",
            "CRITICAL",
        ),
        ("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset) to 0x0 (None)", "OK"),
        ("NVRM: Xid (PCI:0000:01:00): 999, something new", "WARNING"),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:01 GPU-CI:02): 999, of a MIG instance", "WARNING"),
    ],
)
def test_xids_that_say_themselves_how_bad_they_are(tree: NodeTree, line: str, expected: str) -> None:
    tree.log(line)
    assert run("xid", tree.node()).verdict.status.name == expected


def test_what_is_long_past_counts_no_more(tree: NodeTree) -> None:
    tree.log(FELL_OFF, PAGE_FAULT, HUNG, boot_seconds=10.0)
    tree.time.now_monotonic = 10 + 3601
    expect(("CRITICAL", "GpuError"), "xid", tree.node())
    tree.time.now_monotonic = 10 + 86401
    result = expect(("OK", "KernelLogQuiet"), "xid", tree.node())
    assert values(result, "xid_errors_total") == {("0000:3b:00", "79"): 1, ("0000:04:00", "31"): 1}


def test_a_fatal_sxid_is_one_event_with_its_lines_of_registers(tree: NodeTree) -> None:
    switch = "nvidia-nvswitch3: SXid (PCI:0000:c4:00.0): 20034, "
    details = ("Severity 1 Engine instance 48 Sub-engine instance 00", "Data {0x50610002, 0x10100030, 0x00000000}")
    tree.log(f"{switch}Fatal, Link 48 LTSSM Fault Up", *(switch + detail for detail in details))
    result = expect(("CRITICAL", "SwitchError"), "xid", tree.node())
    assert "Link 48 LTSSM" in result.verdict.message
    assert values(result, "sxid_errors_total") == {("0000:c4:00.0", "20034"): 1}


@pytest.mark.parametrize(
    ("worse", "later"),
    [
        (SXID_FATAL, SXID_FATAL.replace("Fatal", "Non-fatal")),
        (LINK_EVENT.format("Fatal"), LINK_EVENT.format("Nonfatal")),
    ],
)
def test_later_line_of_an_error_does_not_hide_a_fatal_one(tree: NodeTree, worse: str, later: str) -> None:
    tree.log(worse)
    tree.log(later, boot_seconds=995.0, first=2)
    result = run("xid", tree.node())
    assert result.verdict.status.name == "CRITICAL"
    assert "10 s ago" in result.verdict.message
    assert worse in [line.text for line in tree.read_log().lines]


def test_recovered_gpu_replaces_its_recovery_action(tree: NodeTree) -> None:
    action = "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x{} to 0x{}"
    tree.log(action.format("0 (None)", "1 (GPU Reset)"), action.format("1 (GPU Reset)", "0 (None)"))
    expect(("OK", "KernelLogQuiet"), "xid", tree.node())


def test_ignored_xids_are_counted_and_no_finding(tree: NodeTree) -> None:
    tree.log(PAGE_FAULT)
    result = expect(("OK", "KernelLogQuiet"), "xid", tree.node(), ignored_xids=(31,))
    assert values(result, "xid_errors_total") == {("0000:04:00", "31"): 1}


def test_equal_events_are_one_finding_and_counted(tree: NodeTree) -> None:
    tree.log(*[PAGE_FAULT] * 5)
    result = run("xid", tree.node())
    assert result.verdict.message.count("XID 31") == 1
    assert values(result, "xid_errors_total") == {("0000:04:00", "31"): 5}


def test_each_run_reads_only_what_is_new_and_forgets_nothing(tree: NodeTree) -> None:
    tree.log(PAGE_FAULT)
    check, node = Checked("xid"), tree.node()
    assert values(check.run(node), "xid_errors_total") == {("0000:04:00", "31"): 1}
    tree.log(PAGE_FAULT, FELL_OFF, first=2)
    result = check.run(node)
    assert values(result, "xid_errors_total") == {("0000:04:00", "31"): 2, ("0000:3b:00", "79"): 1}
    assert status_and_reason(result) == ("CRITICAL", "GpuError")


def test_records_that_were_overwritten_are_counted(tree: NodeTree) -> None:
    tree.log("one")
    check, node = Checked("xid"), tree.node()
    check.run(node)
    tree.log("two", first=2)
    assert values(check.run(node), "kernel_log_missed_total") == {(): 0}
    tree.log("forty-three", first=43)
    assert values(check.run(node), "kernel_log_missed_total") == {(): 40}


def test_a_flood_is_bounded(tree: NodeTree) -> None:
    for number in range(3):
        tree.log(*(f"NVRM: Xid (PCI:{at:04x}:00:00): 31, flood" for at in range(700)), first=1 + number * 700)
    events = tree.read_log()
    assert len(events.lines) == kmsg.LINES_KEPT
    assert len(events.counts) == kmsg.KEYS_KEPT


def test_a_flood_of_one_kind_hides_no_other(tree: NodeTree) -> None:
    tree.log(FELL_OFF)
    tree.log(*(f"INFO: task python:{pid} blocked for more than 120 seconds." for pid in range(1000)), first=2)
    result = expect(("CRITICAL", "GpuError"), "xid", tree.node())
    assert values(result, "hung_tasks_total") == {("python",): 1000}


@pytest.mark.parametrize("line", [FELL_OFF, SXID_FATAL])
def test_a_process_cannot_name_itself_an_xid(tree: NodeTree, line: str) -> None:
    tree.log(f"audit: comm={line}", f"x {line}")
    expect(("OK", "KernelLogQuiet"), "xid", tree.node())


def test_terminal_escapes_continuations_and_garbage(tree: NodeTree) -> None:
    (tree.dev / "kmsg").write_bytes(
        b"4,1,5,-;NVRM: X\\x1b[31mid (PCI:0000:3b:00): 79, red\\x1b[0m\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n"
        b"no record at all\n4,2,zz,-;bad\n\xff\xfe\n6,3,7,c;" + HUNG.encode() + b"\n"
    )
    events = tree.read_log()
    assert [line.name for line in events.lines] == ["xid", "hung_task"]
    assert "\x1b" not in events.lines[0].text and "x1b" not in events.lines[0].text


def test_a_log_that_may_not_be_read(tree: NodeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_open(monkeypatch, "kmsg")
    result = expect(("UNKNOWN", "PermissionDenied"), "xid", tree.node())
    assert "CAP_SYSLOG" in result.verdict.remedy


def test_a_reader_that_fell_behind_goes_on(tree: NodeTree, monkeypatch: pytest.MonkeyPatch) -> None:
    """After EPIPE, continue with the oldest record. The kernel returns EPIPE if it has overwritten the next record."""
    record = f"4,900,1000000,-;{FELL_OFF}\n".encode()
    answers: list[Any] = [b"4,1,5,-;first\n", BrokenPipeError(32, "Broken pipe"), record, BlockingIOError(11, "again")]

    def read(descriptor: int, size: int) -> bytes:
        assert size >= 8192, "the kernel refuses smaller buffers"
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return bytes(answer)

    (tree.dev / "kmsg").write_text("")
    monkeypatch.setattr(kmsg.os, "read", read)
    events = tree.read_log()
    monkeypatch.undo()
    assert events.missed == 898
    assert [line.code for line in events.lines] == [79]


def test_line_that_a_program_writes_into_the_kernel_log_does_not_count() -> None:
    device = Path("/dev/kmsg")
    if not os.access(device, os.R_OK | os.W_OK):
        pytest.skip("needs root and a /dev/kmsg that can be written")
    mark = f"{secrets.token_hex(2)}:{secrets.token_hex(1)}:00"
    check, node = Checked("xid"), Node()
    device.write_text(f"NVRM: Xid (PCI:{mark}): 45, written by hangwatch's test\n")
    started = time.monotonic()
    result = check.run(node)
    assert time.monotonic() - started < 30, "the device never blocks us"
    assert (mark, "45") not in values(result, "xid_errors_total")


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (149, "149, NETIR_LINK_EVT Fatal XC0 i0 Link 08", "critical"),
        (149, "149, pid=7, name=Fatal, NETIR_LINK_EVT Nonfatal XC0 i0 Link 08", "warning"),
        (149, "149, pid=7, name=x, x, Fatal, NETIR_LINK_EVT Nonfatal XC0", "warning"),
    ],
)
def test_process_name_does_not_decide_the_severity(code: int, text: str, expected: str) -> None:
    assert xids.severity(code, f"NVRM: Xid (PCI:0000:3b:00): {text}") == expected


def test_a_real_log_of_a_node_that_lost_a_gpu(tree: NodeTree) -> None:
    (tree.dev / "kmsg").write_bytes((DATA / "checks" / "kmsg_gpu_lost.txt").read_bytes())
    result = expect(("CRITICAL", "GpuError"), "xid", tree.node())
    assert values(result, "xid_errors_total") == {
        ("0000:3b:00", "79"): 1,
        ("0000:3b:00", "154"): 1,
        ("0000:86:00", "45"): 2,
    }
    assert values(result, "hung_tasks_total") == {("python3",): 1}
    assert len(result.table) == 6, "equal events are one row, the newest"


def test_the_table_is_complete_where_it_matters() -> None:
    unlisted = xids.find_meaning(9999)
    table = {code: row for code in range(1, 1000) if (row := xids.find_meaning(code)) != unlisted}
    for code in (13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119, 120, 140, 154):
        assert table[code].meaning
    for code, row in table.items():
        assert row.severity == "notice" or row.action, f"XID {code} says nothing to do"


@given(st.integers(0, 1 << 60), st.integers(0, 1 << 60), st.text(max_size=80))
def test_a_record_keeps_its_number_and_time(sequence: int, microseconds: int, text: str) -> None:
    record = kmsg.parse_record(f"6,{sequence},{microseconds},-;{text}")
    assert (record.sequence, record.boot_seconds) == (sequence, microseconds / 1e6)


def test_kernel_line_is_looked_at_in_its_first_1024_characters() -> None:
    """Ignore text after the first 1,024 characters: matching time grows with the square of the length of a line."""
    said = "NVRM: GPU 0000:3b:00.0: GPU"
    records = [kmsg.parse_record(f"6,1,1,-;{said}{' ' * blanks}fallen off the bus") for blanks in (100, 1020)]
    assert [record is not None and kernel_lines.find(record.text) is not None for record in records] == [True, False]


def test_a_log_that_is_gone_is_none_again(tree: NodeTree) -> None:
    assert kmsg.KernelLog().read(tree.dev / "nothing") is None
    assert isinstance(kmsg.KernelLog().read(tree.dev), Fault), "a folder is not a log"
