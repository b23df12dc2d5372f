"""Replies of nodes, which are not trusted: valid ones, invalid ones, and the parts that are used."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hangwatch.formats import sighting
from hangwatch.report import as_json
from hangwatch.tools.fleet import nodeset, transports
from hangwatch.tools.fleet.node_replies import Replies
from hangwatch.tools.fleet.remote_run import Reply
from tests import samples

ANSWER = as_json.render(sighting.make_grouped_dump("liar", [samples.loader_hang()], 100.0)).encode()


def reply(output: bytes = ANSWER, status: int | None = 0, **changes: object) -> Reply:
    asked = Reply(node="n1", output=output, status=status, asked_unix_seconds=99.0, ended_unix_seconds=101.0)
    return asked._replace(**changes)


def failed(reply: Reply) -> str:
    """Return the reason why `reply` is invalid."""
    replies = Replies()
    assert replies.take(reply) is None
    assert (replies.answered, replies.silent) == ([], [])
    ((why, nodes),) = replies.failed
    assert nodes == ["n1"]
    return why


def test_a_node_speaks_under_the_name_by_which_it_was_asked() -> None:
    replies = Replies()
    dump = replies.take(reply())
    (one,) = dump.jobs
    assert (dump.node, one.node) == ("n1", "n1")
    assert {member.id.node for member in one.grouping.members} == {"n1"}
    assert replies.gathering.nodes(one.job.key) == {"n1"}


def test_what_a_login_prints_before_an_answer_is_passed_over() -> None:
    assert Replies().take(reply(b"Welcome {you}\n" + ANSWER)) is not None


@pytest.mark.parametrize("status", [124, 137, 255])
def test_a_command_that_was_ended_and_a_node_that_was_not_reached_are_silent(status: int) -> None:
    replies = Replies()
    assert replies.take(reply(b"", status)) is None
    assert (replies.silent, replies.failed) == (["n1"], [])


def test_late_reply_counts_as_no_response() -> None:
    replies = Replies()
    assert replies.take(reply(is_late=True)) is None
    assert replies.silent == ["n1"]


def test_why_a_reply_is_none() -> None:
    assert "PATH" in failed(reply(b"", 127))
    assert "exit code 70" in failed(reply(ANSWER, 70))
    assert "32 MiB" in failed(reply(b"", None, is_too_large=True))
    assert "sent no JSON" in failed(reply(b"hello"))
    assert "truncated" in failed(reply(ANSWER[:-20]))
    assert "is a dump without --grouped" in failed(
        reply(b'{"schema_version": 1, "node": "n1", "jobs": [{"job": null}]}')
    )
    strange = json.loads(ANSWER)
    strange["jobs"][0]["grouping"]["world_size"] = 1 << 40
    assert "ranks are accepted" in failed(reply(json.dumps(strange).encode()))
    assert failed(reply(b'{"jobs": ' + b"[" * 100_000))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(ANSWER)), st.integers(0, 40), st.binary(max_size=40))
def test_any_reply_is_parsed_or_reported_as_failed(at: int, cut: int, instead: bytes) -> None:
    replies = Replies()
    dump = replies.take(reply(ANSWER[:at] + instead + ANSWER[at + cut :]))
    assert (dump is None) == bool(replies.failed)
    assert replies.silent == []


@pytest.mark.parametrize(
    ("asked_at", "printed", "ended", "offset"),
    [(99.0, 100.0, 101.0, None), (90.0, 100.0, 95.0, 5.0), (110.0, 100.0, 112.0, -10.0), (100.5, 100.0, 101.0, None)],
)
def test_clock_differs_beyond_any_delay(asked_at: float, printed: float, ended: float, offset: float | None) -> None:
    replies = Replies()
    answer = as_json.render(sighting.make_grouped_dump("x", [], printed)).encode()
    replies.take(reply(answer, asked_unix_seconds=asked_at, ended_unix_seconds=ended))
    assert [one.seconds for one in replies.clocks] == ([] if offset is None else [offset])


def test_complaints_are_shown_once_and_without_escapes() -> None:
    replies = Replies()
    replies.complain({"n1": b"\n\x1b[2Jbad\n", "n2": b"\x1b[2Jbad", "n3": b"", "n4": b"\xff\n" * 99})
    assert replies.complaints[0] == ("\\x1b[2Jbad", ["n1", "n2"])
    assert replies.complaints[1][0].count("\n") == 7


def test_sets_of_nodes() -> None:
    racks = ["rack1a1", "rack1a2", "rack2a1", "rack2a2"]
    assert sorted(nodeset.expand("n[1-3,7],n1,rack[1-2]a[1-2]")) == ["n1", "n2", "n3", "n7", *racks]
    assert len(nodeset.expand("n[1-65536]")) == 65_536
    for strange in (
        "",
        "n[1-",
        "n[1-65538]",
        "n[0-9999999999999999999999]",
        "x[1-300]y[1-300]",
        "-v",
        "a;b",
        "@nonsense",
    ):
        with pytest.raises(nodeset.NodesError):
            nodeset.expand(strange)


def test_a_command_for_ssh_is_one_word_and_no_name_is_an_option() -> None:
    found = transports.ssh("hangwatch dump --job 'a b'", 7, ["-F", "x"]).command("n1")
    assert found[:3] == ["ssh", "-F", "x"]
    assert found[-3:-1] == ["--", "n1"]
    assert found[-1].startswith("sh -c '")
    assert "\n" not in found[-1]
    assert "-oBatchMode=yes" in found
