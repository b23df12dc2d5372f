"""The explanations of NCCL's messages. Each row matches lines that versions of NCCL and PyTorch print."""

import re
import time

import pytest

from hangwatch.tables import nccl_messages
from tests.conftest import load_table
from tests.unit.test_explain_logs import judged, messages_of

INFO = "gpu-07:5776:5898 [1] NCCL INFO "
LINES: dict[str, list[str]] = load_table("log_lines.toml")["nccl"]
INNOCENT = (
    "step 812 loss 3.2",
    INFO + "NCCL_SOCKET_IFNAME set by environment to eth0",
    INFO + "Channel 00/0 : 0[0] -> 1[1] via P2P/IPC",
    "resuming: failed to extend the vocabulary",
    "CUDA failure of the user's own kernel: out of memory",
)


def test_every_row_has_its_lines() -> None:
    assert set(LINES) == set(nccl_messages.load())


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in LINES.items() for line in lines])
def test_a_line_is_of_its_row(name: str, line: str) -> None:
    found = nccl_messages.find(line)
    assert found is not None and found.name == name


@pytest.mark.parametrize("line", INNOCENT)
def test_other_lines_are_of_none(line: str) -> None:
    assert nccl_messages.find(line) is None


@pytest.mark.parametrize("holds", sorted({row.holds for row in nccl_messages.load().values()}))
def test_no_line_takes_long(holds: str) -> None:
    began = time.process_time()
    for line in (
        holds * 1_000_000,
        f"NCCL WARN {holds} with " * 100_000,
        f"NCCL INFO {holds}" + " with error " * 100_000,
    ):
        nccl_messages.find(line)
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize("name", sorted(name for name, row in nccl_messages.load().items() if row.about != "setup"))
def test_nccl_message_is_explained_in_evidence_that_names_no_rank(name: str) -> None:
    row = nccl_messages.load()[name]
    line = re.sub(r"^(\[rank\d+\]:?)?", "[rank3]: ", LINES[name][0], count=1)
    verdict = judged(*(f"[rank{rank}]: step 812" for rank in range(4)), line)
    (said,) = messages_of(verdict, "nccl_message")
    assert said.startswith("rank 3: ") and row.meaning in said and said.endswith(row.remedy)
    assert not verdict.named and all(one.supports is None for one in verdict.evidence)


def test_the_same_words_of_many_ranks_are_told_once() -> None:
    lines = [f"[rank{rank}]: {LINES['ib_pair_unreachable'][1]}" for rank in range(1, 64)]
    (said,) = messages_of(judged("[rank0]: step 812", *lines), "nccl_message")
    assert said.startswith("ranks 1-63: an InfiniBand or RoCE peer did not respond")


def test_the_interface_of_the_few_is_told_and_one_that_all_have_is_not() -> None:
    lines = [f"[rank{rank}]: {INFO}Bootstrap : Using eth0:10.2.0.{rank}<0>" for rank in range(4)]
    assert messages_of(judged(*lines), "nccl_message") == []
    lines[3] = f"[rank3]: {INFO}Bootstrap : Using docker0:172.17.0.1<0>"
    (said,) = messages_of(judged(*lines), "nccl_message")
    assert said.startswith("interface of NCCL's bootstrap: docker0 on rank 3, eth0 on ranks 0-2; docker0, lo")


def test_where_all_use_an_interface_that_leads_nowhere_it_is_told() -> None:
    lines = [f"[rank{rank}]: {INFO}NET/Socket : Using [0]lo:127.0.0.1<0>" for rank in range(2)]
    (said,) = messages_of(judged(*lines), "nccl_message")
    assert said.startswith("interface of NCCL's sockets: lo on ranks 0-1; ")
