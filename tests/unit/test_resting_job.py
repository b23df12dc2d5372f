"""A job at rest: the training has ended or the job serves requests.

One rank more or less, one connection or one signature decides.
"""

import pytest
from msgspec.structs import replace

from hangwatch.model import (
    EnqueuedOperation,
    Fault,
    FileLock,
    Frame,
    GpuReadings,
    Group,
    Grouping,
    GroupRecords,
    JobState,
    KernelFacts,
    Member,
    RankId,
    RecorderFacts,
    RecorderState,
    Signature,
    Stack,
    Store,
    Usage,
    Waits,
)
from hangwatch.stacks.idle_reasons import find_refused, find_resting_state, has_no_task, is_serving
from hangwatch.state.on_diagnosis import count_motion
from hangwatch.verdict.judge import judge

LINGERS = Member(
    id=RankId(node="n1"),
    signature=Signature.BLOCKED,
    motion=Signature.BLOCKED.motion,
    kernel=KernelFacts(state="S", rests="sleep"),
    waits=Waits(peers=0, active_peers=0),
    most_peers=3,
)
STOPPED = replace(LINGERS, signature=Signature.STOPPED, kernel=replace(LINGERS.kernel, state="T"))
GONE = replace(LINGERS, signature=Signature.GONE, waits=replace(LINGERS.waits, peers=None))
NEVER_MET = replace(LINGERS, most_peers=0)
IDLE_PAIR = replace(LINGERS, waits=replace(LINGERS.waits, peers=2))
AT_A_CALL = replace(LINGERS, kernel=replace(LINGERS.kernel, rests=None))
AT_A_THREAD = replace(LINGERS, kernel=replace(LINGERS.kernel, rests="thread"))
RECORDED = RecorderFacts(libraries=(RecorderState(library="gloo", groups=(GroupRecords("gloo", "0", "", 7),)),))
OPEN = EnqueuedOperation(7, "all_reduce", 7, 0.0, stays_open=True)


def with_operation(facts: RecorderFacts) -> RecorderFacts:
    (library,) = facts.libraries
    (group,) = library.groups
    return replace(facts, libraries=(replace(library, groups=(replace(group, operations=(OPEN,)),)),))


def group_ranks(*members: Member, world_size: int | None = 2) -> Grouping:
    group = tuple(
        replace(one, id=RankId(node="n1", rank=rank, pid=100 + rank), motion=one.signature.motion)
        for rank, one in enumerate(members)
    )
    return Grouping(groups=(Group(key="k", activity="unknown", members=group),), world_size=world_size)


def resting(*members: Member, world_size: int | None = 2) -> JobState | None:
    return find_resting_state(group_ranks(*members, world_size=world_size))


@pytest.mark.parametrize(
    ("name", "members", "expected"),
    [
        ("all stopped", (STOPPED, STOPPED), JobState.SUSPENDED),
        ("one stopped", (STOPPED, LINGERS), None),
        ("all linger", (LINGERS, LINGERS), JobState.OVER),
        ("rank 0 alone is left", (LINGERS, GONE), JobState.OVER),
        ("all ranks are gone", (GONE, GONE), None),
        (
            "one is connected to another",
            (LINGERS, replace(LINGERS, waits=replace(LINGERS.waits, peers=1, active_peers=1))),
            None,
        ),
        ("one is unknown", (LINGERS, replace(LINGERS, waits=Waits())), None),
        ("one spins", (LINGERS, replace(LINGERS, signature=Signature.SPINS)), None),
        ("one waits for its GPU", (LINGERS, replace(LINGERS, signature=Signature.BEHIND_GPU)), None),
        ("one is blocked in the kernel", (LINGERS, replace(LINGERS, kernel=replace(LINGERS.kernel, state="D"))), None),
        ("one GPU is in use", (LINGERS, replace(LINGERS, gpu=replace(LINGERS.gpu, utilization_ratio=0.05))), None),
        (
            "one waits for the lock of a file",
            (LINGERS, replace(LINGERS, waits=replace(LINGERS.waits, file_lock=FileLock(path="/data/l")))),
            None,
        ),
        (
            "one waits for a lock that another has, too",
            (LINGERS, replace(LINGERS, waits=replace(LINGERS.waits, shares_lock=True))),
            None,
        ),
        ("they never met", (NEVER_MET, NEVER_MET), None),
        ("they never met, and one has left", (NEVER_MET, GONE), JobState.OVER),
        ("the last one is in a call on a file", (AT_A_CALL, GONE), None),
        ("DDP left an idle pair", (IDLE_PAIR, IDLE_PAIR), JobState.OVER),
        ("one receives on its pair", (replace(IDLE_PAIR, waits=replace(IDLE_PAIR.waits, active_peers=1)), GONE), None),
        ("one polls, and no recorder tells for what", (replace(IDLE_PAIR, signature=Signature.POLLS), GONE), None),
        (
            "one polls, and its recorder shows no open operation",
            (replace(IDLE_PAIR, signature=Signature.POLLS, recorder=RECORDED), GONE),
            JobState.OVER,
        ),
        ("one has an operation open", (replace(IDLE_PAIR, recorder=with_operation(RECORDED)), GONE), None),
        ("they communicated by their recorders", (replace(NEVER_MET, recorder=RECORDED),) * 2, JobState.OVER),
        ("one asks a server", (replace(LINGERS, signature=Signature.AWAITS_OUTSIDE), GONE), None),
        ("one waits for a thread", (AT_A_THREAD, GONE), None),
        ("one uploads", (LINGERS, replace(LINGERS, signature=Signature.TRANSFERS)), JobState.OVER),
        ("two of three compute", (LINGERS, *[replace(LINGERS, signature=Signature.COMPUTES)] * 2), None),
    ],
)
def test_resting_members_are_recognized(name: str, members: tuple[Member, ...], expected: JobState | None) -> None:
    assert resting(*members) is expected, name


@pytest.mark.parametrize(
    ("name", "doing", "function", "expected"),
    [
        ("it joins a thread", "thread_wait", "join", JobState.OVER),
        ("it waits in the interpreter's shutdown", "exiting", "_shutdown", JobState.OVER),
        ("it waits for a lock", "lock", "acquire", None),
    ],
)
def test_thread_that_is_joined_rests_and_lock_of_program_does_not(
    name: str, doing: str, function: str, expected: JobState | None
) -> None:
    (group,) = group_ranks(AT_A_THREAD, GONE).groups
    frame = Frame(function=function, file="/usr/lib/python3.12/threading.py", line=1)
    group = replace(group, activity=doing, frames=(frame,))
    assert find_resting_state(Grouping(groups=(group,), world_size=2)) is expected, name


@pytest.mark.parametrize("world_size", [None, 1])
def test_job_of_one_or_unknown_size_is_never_over(
    world_size: int | None,
) -> None:
    assert resting(LINGERS, world_size=world_size) is None


def test_ranks_waiting_for_a_stale_lock_file_are_not_over() -> None:
    """Recognize the wait for a lock file by the stack: torch's FileBaton polls for the file and uses no kernel lock."""
    asking = replace(LINGERS, signature=Signature.POLLS)
    (group,) = group_ranks(asking, asking).groups
    assert find_resting_state(Grouping(groups=(group,), world_size=2)) is JobState.OVER
    waits = replace(group, activity="lock_file", operation="lock file", waits_for="lock")
    verdict = judge(Grouping(groups=(waits,), world_size=2))
    assert (find_resting_state(Grouping(groups=(waits,), world_size=2)), verdict.kind) == (None, "AllAlike")
    assert "a lock file that no live process holds is stale: remove it" in verdict.message


def test_ranks_polling_a_file_store_are_not_over() -> None:
    # Ranks that poll a store in a file have no connections. They have not ended: one rank has not joined.
    (late,), (meets,) = (
        group_ranks(LINGERS).groups,
        group_ranks(LINGERS, *[replace(LINGERS, signature=Signature.POLLS)] * 3).groups,
    )
    meets = replace(meets, key="m", members=meets.members[1:])
    assert find_resting_state(Grouping(groups=(late, meets), world_size=4)) is JobState.OVER
    joining = replace(meets, activity="rendezvous", operation="init_process_group", waits_for="ranks")
    assert find_resting_state(Grouping(groups=(late, joining), world_size=4)) is None


def test_rank_without_a_stack_prevents_the_state_over() -> None:
    fault = Fault(subject="pid 1", reason="DumperStuck", detail="py-spy hangs")
    groups = tuple(
        Group(
            key=str(rank), activity="unknown", members=(replace(LINGERS, id=RankId(node="n1", rank=rank)),), fault=why
        )
        for rank, why in enumerate((None, fault))
    )
    assert find_resting_state(Grouping(groups=groups, world_size=2)) is None
    assert (
        find_resting_state(Grouping(groups=(groups[0], replace(groups[1], fault=None)), world_size=2)) is JobState.OVER
    )


PARENT, RANK_0, RANK_1 = 99, 100, 101
AT_PARENT = replace(LINGERS, waits=replace(LINGERS.waits, server=PARENT))
ACCEPTS = replace(LINGERS, waits=replace(LINGERS.waits, server=RANK_0, peers=3))
AT_RANK_0 = replace(LINGERS, waits=replace(LINGERS.waits, server=RANK_0))
BEHIND_GPU = replace(
    LINGERS,
    signature=Signature.BEHIND_GPU,
    gpu=replace(LINGERS.gpu, utilization_ratio=1.0),
    waits=replace(LINGERS.waits, peers=2),
)


@pytest.mark.parametrize(
    ("name", "members", "serves"),
    [
        ("all at a parent that accepts", (AT_PARENT, AT_PARENT), True),
        ("one at a lock", (AT_PARENT, LINGERS), False),
        ("one gone", (AT_PARENT, GONE), False),
        ("one connected to another", (AT_PARENT, replace(AT_PARENT, waits=replace(AT_PARENT.waits, peers=1))), False),
        ("one is unknown", (AT_PARENT, replace(AT_PARENT, waits=replace(AT_PARENT.waits, peers=None))), False),
        ("one GPU in use", (AT_PARENT, replace(AT_PARENT, gpu=replace(AT_PARENT.gpu, utilization_ratio=0.05))), False),
        ("one spins", (AT_PARENT, replace(AT_PARENT, signature=Signature.SPINS)), False),
        ("all stopped meanwhile", (replace(AT_PARENT, signature=Signature.STOPPED),) * 2, False),
        ("each accepts", (ACCEPTS, replace(ACCEPTS, waits=replace(ACCEPTS.waits, server=RANK_1))), True),
        ("rank 0 polls for clients", (replace(ACCEPTS, signature=Signature.POLLS), AT_RANK_0), True),
        ("rank 0 accepts, the others wait for their GPUs", (ACCEPTS, BEHIND_GPU, BEHIND_GPU), True),
        ("one of these waits for something else", (ACCEPTS, BEHIND_GPU, LINGERS), False),
        ("all wait for their GPUs", (BEHIND_GPU, BEHIND_GPU), False),
        ("one waits for its GPU, one for its parent", (AT_PARENT, BEHIND_GPU), False),
        ("nobody", (), False),
    ],
)
def test_ranks_waiting_for_clients_are_serving(name: str, members: tuple[Member, ...], serves: bool) -> None:
    assert is_serving(group_ranks(*members)) is serves, name


def test_serving_job_names_no_rank() -> None:
    verdict = judge(group_ranks(*[ACCEPTS, *[BEHIND_GPU] * 7], world_size=8))
    assert (verdict.kind, verdict.named) == ("Serving", ())
    assert verdict.message.startswith("All ranks are idle and wait for requests")


MAIN_LOOP = Frame(function="main_loop", file="ray/_private/worker.py", line=1069)
METHOD = Frame(function="actor_method_executor", file="ray/_private/function_manager.py", line=700)
AT_LOOP = replace(LINGERS, signature=Signature.POLLS, kernel=KernelFacts(state="S", receives=True))


def of_ray(*members: Member, frame: Frame = MAIN_LOOP, thread: Frame | None = None) -> Grouping:
    slots = group_ranks(*members)
    threads = () if thread is None else (Stack(name="pool", frames=(thread,)),)
    groups = tuple(replace(one, activity="rpc_wait", frames=(frame,), threads=threads) for one in slots.groups)
    return replace(slots, groups=groups)


@pytest.mark.parametrize(
    ("name", "grouping", "is_idle"),
    [
        ("all in the loop that takes tasks", of_ray(AT_LOOP, AT_LOOP), True),
        ("a thread rests", of_ray(AT_LOOP, thread=Frame(function="_bootstrap", file="threading.py", line=1)), True),
        ("one gone", of_ray(AT_LOOP, GONE), False),
        ("one computes", of_ray(AT_LOOP, replace(AT_LOOP, signature=Signature.COMPUTES)), False),
        ("one GPU in use", of_ray(AT_LOOP, replace(AT_LOOP, gpu=GpuReadings(utilization_ratio=1.0))), False),
        ("one uses a CPU", of_ray(AT_LOOP, replace(AT_LOOP, usage=Usage(cpu_ratio=0.5))), False),
        ("one uses a connection", of_ray(AT_LOOP, replace(AT_LOOP, waits=Waits(active_peers=1))), False),
        ("a thread is in a method", of_ray(AT_LOOP, thread=METHOD), False),
        ("the main thread waits for an object", of_ray(AT_LOOP, frame=replace(MAIN_LOOP, function="get")), False),
    ],
)
def test_ranks_that_take_tasks_of_ray_have_no_task(name: str, grouping: Grouping, is_idle: bool) -> None:
    assert has_no_task(grouping) is is_idle, name
    assert (judge(grouping).kind == "NoTask") is is_idle, name
    assert count_motion(grouping).serves is is_idle, name


def test_suspended_job_names_no_rank() -> None:
    members = tuple(replace(STOPPED, id=RankId(node="n1", rank=rank)) for rank in range(8))
    verdict = judge(Grouping(groups=(Group(key="k", activity="unknown", members=members),), world_size=8))
    assert (verdict.kind, verdict.named) == ("Suspended", ())
    assert verdict.message.startswith("All 8 ranks are stopped: scontrol suspend")


def test_ranks_that_are_refused_at_the_store_are_not_over() -> None:
    # Ranks have not ended if the store refuses their connections: they still try to connect.
    store = Store(endpoint="10.0.0.1:29500", socket="retries")
    meet = group_ranks(*[replace(LINGERS, waits=replace(LINGERS.waits, store=store))] * 2)
    assert find_resting_state(meet) is JobState.OVER, "they sleep anywhere"
    for function, refused in (("_env_rendezvous_handler", True), ("_tcp_rendezvous_handler", False)):
        frame = Frame(function=function, file="/opt/torch/distributed/rendezvous.py", line=280)
        group = replace(meet.groups[0], activity="rendezvous", frames=(frame,))
        assert find_resting_state(replace(meet, groups=(group,))) is None
        assert bool(find_refused(group)) is refused, "at another address than MASTER_ADDR"
