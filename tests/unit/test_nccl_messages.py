"""The explanations of NCCL's messages. Each row matches lines that versions of NCCL and PyTorch print."""

import time

import pytest

from hangwatch.tables import nccl_messages
from tests.unit.test_explain_logs import judged, messages_of

WARN = "gpu-07:5776:5898 [1] transport/net_ib.cc:1296 NCCL WARN "
INFO = "gpu-07:5776:5898 [1] NCCL INFO "
TC = "[rank3]:[E1128 12:00:31.794110034 WorkNCCL.cpp:180] [TC][rank=3][name=default_pg] "
LINES = {
    "timeout_of_nccl2": (
        TC + "Operation timed out after 30794 ms",
        TC + "Aborting process on rank 3 due to timeout - timeout watchdog detected operation timeout",
        TC + "Aborting process on rank 3 due to timeout - collective operation timed out",
    ),
    "watchdog_stuck": (
        "[rank7]:[E218 11:54:18.495933619 ProcessGroupNCCL.cpp:1484] [PG ID 0 PG GUID 0(default_pg) Rank 7] "
        "ProcessGroupNCCL's watchdog got stuck for 480 seconds without making progress in monitoring enqueued",
    ),
    "launcher_signal": ("torch.distributed.elastic.multiprocessing.api.SignalException: Process 4711 got signal: 2",),
    "xid": (
        "[Sun Nov 22 03:12:09 2026] NVRM: Xid (PCI:0000:4e:00): 79, pid=4711, GPU has fallen off the bus.",
        "[Sun Nov 22 03:12:09 2026] NVRM: Xid (PCI:0000:4e:00 GPU-I:01 GPU-CI:02): 79, pid=4711",
    ),
    "gpu_memory_error": (
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution",
    ),
    "stale_file": ("OSError: [Errno 116] Stale file handle: '/data/shard-3'",),
    "input_output_error": ("OSError: [Errno 5] Input/output error",),
    "ib_pair_unreachable": (
        WARN + "NET/IB : Got completion with error 12, opcode 0, len 0, vendor err 129",
        WARN
        + "NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, opcode 0, len 0, vendor err 129 (Recv)",
        WARN + "NET/IB: Got completion from peer 10.2.0.5<33092> with status=12 opcode=129 len=524288 vendor err 129",
        WARN
        + "NET/IB: Got completion from peer 10.2.0.5<3> with status=IBV_WC_RETRY_EXC_ERR(12) opcode=IBV_WC_SEND(0)",
    ),
    "ib_flushed": (
        WARN + "NET/IB: Got completion from peer 10.2.0.5<33092> with status=5 opcode=0 len=0 vendor err 249",
    ),
    "ib_memory_refused": (WARN + "NET/IB: Got completion from peer 10.2.0.5<5> with status=4 opcode=0 vendor err 81",),
    "ib_other_completion": (WARN + "NET/IB : Got completion with error 9, opcode 1, len 32, vendor err 138",),
    "ib_queue_pair_refused": (
        WARN + "Call to ibv_modify_qp failed with error Connection timed out",
        "Call to ibv_modify_qp failed with 110 Connection timed out, on dev mlx5_0:1, curr state INIT, next state RTR",
    ),
    "locked_memory": (
        WARN + "Call to ibv_reg_mr_iova2 failed with error Cannot allocate memory",
        WARN + "Call to ibv_create_cq failed with error Cannot allocate memory",
    ),
    "ib_device_closed": (WARN + "NET/IB : Unable to open device mlx5_0",),
    "small_shared_memory": (
        "Error while creating shared memory segment /dev/shm/nccl-cjY8K5 (size 10617216), error: No space left on device",
    ),
    "extend_shared_memory": (WARN + "Error: failed to extend /dev/shm/nccl-UbzKZ9 to 9637892 bytes",),
    "no_interface": (WARN + "Bootstrap : no socket interface found",),
    "same_gpu_twice": (WARN + "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000",),
    "mixed_versions": (WARN + "Message truncated : received 1024 bytes instead of 256",),
    "rank_count_differs": (WARN + "Bootstrap Root : mismatch in rank count from procs 16 : 8",),
    "rank_twice": (WARN + "Bootstrap Root : rank 3 of 16 ranks has already checked in",),
    "multicast": (
        "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401 'the operation cannot be "
        "performed in the present state'.",
    ),
    "no_route": (WARN + "socketStartConnect: Connect to 10.0.0.7<45123> failed : No route to host",),
    "ib_port_event": (
        "a2:108:300 [1] transport/net_ib.cc:2200 NCCL WARN NET/IB : mlx5_1:1 Got async event : port error",
    ),
    "connection_refused": (
        WARN + "socketStartConnect: Connect to 172.17.0.1<41123> failed : Connection refused",
        "gpu-07:1:1 [0] include/socket.h:403 NCCL WARN Connect to 10.0.0.1<1> failed : Connection refused",
    ),
    "peer_closed": (
        WARN + "socketProgress: Connection closed by remote peer gpu-03<52100>",
        "ncclRemoteError: Connection closed by remote peer gpu-03<52100>",
    ),
    "peer_reset": (WARN + "socketProgressOpt: Call to recv from 10.0.0.3<52100> failed : Connection reset by peer",),
    "wrong_magic": (
        WARN + "socketFinalizeAccept: wrong magic 74656d2f20544547 != 7970663b906d70b9",
        ":166:1226 [0] misc/socket.cc:484 NCCL WARN socketFinalizeAccept: wrong magic 4 != 6",
    ),
    "remote_process": (
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
    ),
    "watchdog": (
        "[E ProcessGroupNCCL.cpp:414] Some NCCL operations have failed or timed out. Due to the asynchronous nature of",
    ),
    "collective_timeout": (
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=812, OpType=ALLREDUCE, Timeout(ms)=600000)",
    ),
    "gpu_out_of_memory": (WARN + "Cuda failure 'out of memory'", WARN + "Cuda failure 2 'out of memory'"),
    "cuda_failure": (WARN + "Cuda failure 'an illegal memory access was encountered'",),
    "no_ib_device": (INFO + "NET/IB : No device found.",),
    "network": (INFO + "Using network Socket", INFO + "Initialized NET plugin IBext_v8. Using network IBext_v8"),
    "bootstrap_interface": (
        INFO + "Bootstrap : Using eth0:10.2.0.4<0>",
        INFO + "Bootstrap: Using eth0:10.2.0.4<0>",
        INFO + "Bootstrap : Using [0]eth0:10.2.0.4<0>",
    ),
    "socket_interface": (INFO + "NET/Socket : Using [0]eth0:100.64.47.75<0> [1]docker0:172.17.0.1<0>",),
}
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
    lines = [f"[rank{rank}]: step 812" for rank in range(4)] + [f"[rank3]: {LINES[name][0]}"]
    verdict = judged(*lines)
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
