"""Log lines for the systemd journal: each line has its priority. Other outputs get no priorities."""

import logging
import os
import sys
import threading

import pytest

from hangwatch.probes.node.journal import JournalFormatter, NonBlockingHandler, is_journal


def formatted(level: int, message: str, exc_info: object = None) -> list[str]:
    record = logging.LogRecord("hangwatch.daemon", level, __file__, 1, message, None, exc_info)  # type: ignore[arg-type]
    return JournalFormatter().format(record).split("\n")


@pytest.mark.parametrize(
    ("level", "prefix"),
    [
        (logging.DEBUG, "<7>"),
        (logging.INFO, "<6>"),
        (logging.WARNING, "<4>"),
        (logging.ERROR, "<3>"),
        (logging.CRITICAL, "<2>"),
    ],
)
def test_a_level_becomes_its_syslog_priority(level: int, prefix: str) -> None:
    assert formatted(level, "GPU 3 is lost") == [f"{prefix}hangwatch.daemon: GPU 3 is lost"]


def test_every_line_of_a_traceback_has_the_priority() -> None:
    try:
        raise ValueError("a bug")
    except ValueError:
        lines = formatted(logging.ERROR, "check clock raised", sys.exc_info())
    assert len(lines) > 3
    assert all(line.startswith("<3>") for line in lines)
    assert lines[-1] == "<3>ValueError: a bug"


def test_a_log_that_nothing_reads_blocks_no_thread_and_counts_lost_lines() -> None:
    read_end, write_end = os.pipe()
    log = logging.Logger("hangwatch.daemon")
    with os.fdopen(read_end) as lines, os.fdopen(write_end, "w") as stream:
        log.addHandler(NonBlockingHandler(stream))
        writing = threading.Thread(target=lambda: [log.info("x" * 10_000) for _ in range(20)], daemon=True)
        writing.start()
        writing.join(30)
        assert not writing.is_alive(), "it waits for a reader"
        os.set_blocking(read_end, False)
        written = lines.read().count("x\n")
        log.info("again")
        assert lines.read() == f"\n{20 - written} log lines lost: nothing read the log\nagain\n"
    assert 0 < written < 20


def test_the_journal_is_known_by_device_and_inode() -> None:
    read_end, write_end = os.pipe()
    try:
        stat = os.fstat(write_end)
        assert is_journal({"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"}, write_end)
        assert not is_journal({"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino + 1}"}, write_end)
        assert not is_journal({}, write_end)
    finally:
        os.close(read_end)
        os.close(write_end)
    assert not is_journal({"JOURNAL_STREAM": "1:2"}, write_end)
