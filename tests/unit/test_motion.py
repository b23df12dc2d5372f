"""The signature of a rank, by measurement: its sleeps and system calls count, the names of functions do not."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch import config
from hangwatch.capture.connections import find_object
from hangwatch.model import (
    Awaited,
    CallObject,
    EnqueuedOperation,
    Fault,
    FileLock,
    Frame,
    Motion,
    PortUse,
    ProcessDump,
    RankDump,
    RankId,
    Signature,
    Sleep,
    Store,
    SystemCall,
    Thread,
    ThreadCounters,
    Waits,
    WorkerDump,
)
from hangwatch.stacks import activity, kernel_facts, progress
from hangwatch.stacks.activity import Table
from hangwatch.stacks.grouping import group_ranks
from hangwatch.stacks.process_activity import find_process_activity
from hangwatch.stacks.sleeps import find_sleep
from hangwatch.verdict.judge import judge
from tests.conftest import load_table
from tests.hangs import frames
from tests.samples import change_parts
from tests.unit.test_waitfor import record, recorder

NO_NAMES = Table(())
SETTINGS = config.Capture()
FAILED = Fault(subject="pid 1", reason="Timeout", detail="no stacks within 5 s")
HERE = ["step (mine.py:7)", "go (mine.py:30)"]
THERE = ["step (mine.py:8)", HERE[1]]
OPENS = SystemCall(number=257, name="openat", object="file")
READS = SystemCall(number=0, name="read", kind="receives", descriptors=(5,), object="file")
HTTP = Awaited(name="10.0.0.9 port 8000")


def measure(
    stack_dump: RankDump,
    settings: config.Capture = SETTINGS,
    table: Table = NO_NAMES,
    operations: tuple[EnqueuedOperation, ...] = (),
) -> progress.Measured:
    activities = [
        find_process_activity(dump.threads, table) if any(thread.frames for thread in dump.threads) else None
        for dump in stack_dump.rounds
    ]
    return progress.measure(stack_dump, activities, settings, operations=operations)


def dumps(  # noqa: PLR0913 - a counter each, and most tests set one
    stacks: list[list[str]],
    cpu: float = 0.0,
    io: float = 0.0,
    state: str = "S",
    *,
    main: float | None = None,
    system: float = 0.0,
    delay: float = 0.0,
    switches: float = 0.0,
    dump_switches: int = 0,
    gil: bool | None = None,
    main_io: float | None = None,
    faulted: float | None = None,
    **more: object,
) -> tuple[ProcessDump, ...]:
    """Return one round for each stack, 5 s apart. An empty stack is a failed dump.

    `cpu`, `main`, `system` and `delay` are in cores, `io` in bytes/s, `switches` and the numbers in `more` per
    second. Taking a dump adds `dump_switches` switches.
    """
    main = cpu if main is None else main

    def threads(lines: list[str]) -> tuple[Thread, ...]:
        installed = sum("library" in line for line in lines)
        thread = Thread("MainThread", "1", frames(lines), owns_gil=gil, is_main=True, installed_frames=installed)
        return (thread,) if lines else ()

    def counters(number: int, dumped: int) -> ThreadCounters:
        at = 5.0 * number
        return ThreadCounters(
            read_monotonic_seconds=at,
            cpu_seconds=main * at,
            system_seconds=system * at,
            delay_seconds=delay * at,
            voluntary_switches=int(switches * at) + dump_switches * dumped,
            io_bytes=None if main_io is None else int(main_io * at),
            faulted_bytes=None if faulted is None else int(faulted * at),
        )

    return tuple(
        change_parts(
            ProcessDump(taken_monotonic_seconds=5.0 * number, threads=threads(lines)),
            fault=None if lines else FAILED,
            state=state,
            cpu_seconds=100.0 + 5.0 * number * cpu,
            io_bytes=int(5.0 * number * io),
            before=counters(number, number),
            after=counters(number, number + 1),
            **{
                name: int(1e9 + 5.0 * number * value) if type(value) in (int, float) else value
                for name, value in more.items()
            },
        )
        for number, lines in enumerate(stacks)
    )


def rank(
    rounds: tuple[ProcessDump, ...],
    worker: tuple[ProcessDump, ...] = (),
    gone: bool = False,
    use: float | None = None,
    power: float | None = None,
    nvlink: float | None = None,
    pcie: float | None = None,
    light: bool = False,
) -> RankDump:
    """Return a rank with these rounds.

    `use` is the utilization ratio of its GPU; `nvlink` and `pcie` are bytes per second.

    `power` is the power of its GPU, as a ratio between idle (0) and busy (1).
    """
    workers = (WorkerDump(pid=2, comm="pt_data_worker", rounds=worker),) if worker else ()
    return change_parts(
        RankDump(id=RankId(rank=0), rounds=rounds, workers=workers, gone=gone),
        utilization_ratio=use,
        busy_power_ratio=power,
        works_lightly=light,
        nvlink_bytes_per_second=nvlink,
        pcie_bytes_per_second=pcie,
    )


STILL = [HERE] * 3
SPINNING = dumps(STILL, cpu=1.0)
IN_COLLECTIVE = [["all_reduce (torch/distributed/distributed_c10d.py:2810)", *HERE]] * 3
RECEIVES = replace(READS, name="recvfrom", object="socket")
AT_PIPE = replace(READS, object="pipe")
BESIDE = {"io": 1e5, "main_io": 0.0, "rank_bytes": 0.0}  # a side thread writes metrics
TABLES = load_table("signatures.toml")
STACKS = {
    "here": HERE,
    "there": THERE,
    "further": ["step (mine.py:9)", HERE[1]],
    "other": ["other (mine.py:9)", HERE[1]],
    "called elsewhere": [HERE[0], "go (mine.py:31)"],
    "inside": ["poll (library.py:40)", *HERE],
    "elsewhere inside": ["poll (library.py:44)", *HERE],
    "native": ["0x7f01 (libcuda.so)", *HERE],
    "other native": ["poll (libc.so.6)", *HERE],
    "collective": IN_COLLECTIVE[0],
    "loader": ["_try_get_data (torch/utils/data/dataloader.py:1284)", "__next__ (torch/utils/data/dataloader.py:701)", *HERE],
    "": [],
}  # fmt: skip
OBJECTS = {
    "sleeps": SystemCall(number=230, kind="sleeps"),
    "sleeps for a minute": SystemCall(number=230, kind="sleeps", left_seconds=60.0),
    "sleeps for 10 ms": SystemCall(number=230, kind="sleeps", left_seconds=0.01),
    "opens": OPENS,
    "reads": READS,
    "receives": RECEIVES,
    "at a pipe": AT_PIPE,
    "at the pipe of worker 2": replace(AT_PIPE, workers=(2,)),
    "at the pipe of worker 3": replace(AT_PIPE, workers=(3,)),
    "awaits a child": SystemCall(number=61, name="wait4", kind="awaits_child", object="child"),
    "another call": SystemCall(number=202, kind="other"),
    "a server": HTTP,
    "a lost server": replace(HTTP, end="lost"),
}


def read_rank(row: dict[str, Any]) -> RankDump:
    """Return the rank of a row of signatures.toml."""
    of_rank = {name: row[name] for name in ("use", "power", "nvlink", "pcie", "light", "gone") if name in row}
    of_rounds = {name: value for name, value in row.items() if name not in (*of_rank, "signature", "places", "worker")}
    return rank(read_rounds(of_rounds), read_rounds(row["worker"]) if "worker" in row else (), **of_rank)


def read_rounds(values: dict[str, Any]) -> tuple[ProcessDump, ...]:
    """Return one round for each system call, at one line, or one for each stack."""
    values = {name: OBJECTS[value] if name in ("call", "awaited") else value for name, value in values.items()}
    if calls := values.pop("calls", None):
        rounds = dumps([HERE] * len(calls), switches=0.1)
        return tuple(change_parts(dump, call=OBJECTS.get(call)) for dump, call in zip(rounds, calls, strict=True))
    beside = BESIDE if values.pop("beside", False) else {}
    stacks = values.pop("stacks", [values.pop("stack", "here")] * 3)
    return dumps([STACKS[name] for name in stacks], **beside, **values)


@pytest.mark.parametrize(("name", "row"), TABLES["without_names"].items(), ids=TABLES["without_names"])
def test_signature(name: str, row: dict[str, Any]) -> None:
    assert measure(read_rank(row)).signature == row["signature"], name


@pytest.mark.parametrize(("name", "row"), TABLES["with_names"].items(), ids=TABLES["with_names"])
def test_only_motion_of_what_main_thread_waits_for_counts(name: str, row: dict[str, Any]) -> None:
    assert measure(read_rank(row), table=activity.load()).signature == row["signature"], name


BACKWARD = [["_engine_run_backward (torch/autograd/graph.py:850)", *HERE]] * 3
ENQUEUED = EnqueuedOperation(number=6, operation="all_reduce", order=6, created_unix_seconds=0.0, stays_open=True)


@pytest.mark.parametrize(
    ("name", "stacks", "operation", "expected"),
    [
        ("the main thread has one open", STILL, ENQUEUED, Signature.BLOCKED),
        ("it has ended", STILL, replace(ENQUEUED, stays_open=False), Signature.TRANSFERS),
        ("another thread has one open", STILL, replace(ENQUEUED, by_main=False), Signature.TRANSFERS),
        ("a thread of autograd has one open", BACKWARD, replace(ENQUEUED, by_main=False), Signature.BLOCKED),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_rank_with_an_open_operation_moves_by_bytes_to_other_ranks_alone(
    name: str, stacks: list[list[str]], operation: EnqueuedOperation, expected: Signature
) -> None:
    """Compiled code that calls a collective shows no Python frame of it."""
    measured = measure(rank(dumps(stacks, **BESIDE)), table=activity.load(), operations=(operation,))
    assert measured.signature is expected, name


@pytest.mark.parametrize(
    ("world_size", "rate", "expected"),
    [(1, 1e5, Motion.MOVING), (1, 0.0, Motion.FROZEN), (2, 1e5, Motion.FROZEN)],
    ids=["it carries", "it stands still", "a connection may lead to a server in place of a rank of another node"],
)
def test_slow_collective_progresses_by_its_bytes(world_size: int, rate: float, expected: Motion) -> None:
    """Its open record alone shows a hang."""
    taken = dumps(IN_COLLECTIVE, main_io=0.0, rank_bytes=rate)
    rounds = tuple(replace(dump, recorders=(recorder(record(7, state="open")),)) for dump in taken)
    (member,) = group_ranks([rank(rounds)], activity.load(), SETTINGS, world_size).members
    assert member.motion is expected


WRITES = ["write_data (mine.py:40)", "save (mine.py:50)"]


@pytest.mark.parametrize(
    ("io", "user", "lines", "expected"),
    [
        (1e6, 8, WRITES, Motion.UNKNOWN),
        (0.0, 8, WRITES, Motion.FROZEN),
        (1e6, 7, WRITES, Motion.FROZEN),
        (1e6, 8, ["_worker (concurrent/futures/thread.py:81)"], Motion.FROZEN),
    ],
    ids=["", "it writes nothing", "it uses no group", "it is idle"],
)
def test_thread_that_saves_in_the_background_may_be_what_others_wait_for(
    io: float, user: int, lines: list[str], expected: Motion
) -> None:
    """The main thread waits in a step; a thread of a pool has used another group, and writes."""
    saver = Thread(name="Saver", thread_id="8", frames=frames(lines), pthread_id=8)
    recorded = recorder(record(1, "save", id=0, thread_id=user), record(7, id=1, state="open", thread_id=7))
    rounds = tuple(
        replace(dump, threads=(replace(dump.threads[0], pthread_id=7), saver), recorders=(recorded,))
        for dump in dumps(IN_COLLECTIVE, io=io, main_io=0.0, rank_bytes=0.0)
    )
    (member,) = group_ranks([rank(rounds)], activity.load(), SETTINGS, 2).members
    assert member.motion is expected


@pytest.mark.parametrize(
    ("trains", "lines", "awaited"),
    [
        (True, WRITES, ["Trainer"]),
        (True, IN_COLLECTIVE[0], ["Trainer"]),
        (True, ["poll_licence (mine.py:5)"], ["Trainer"]),
        (True, ["wait (threading.py:327)", *WRITES], []),
        (False, WRITES, []),
    ],
    ids=[
        "",
        "it waits for ranks",
        "its function is called like a service",
        "it waits for a thread",
        "other threads enqueue, too",
    ],
)
def test_thread_that_trains_decides(trains: bool, lines: list[str], awaited: list[str]) -> None:
    main = Thread("MainThread", "7", frames(["serve (mine.py:3)"]), is_main=True)
    threads = (main, Thread("Trainer", "8", frames(lines), trains=trains))
    place = find_process_activity(threads, activity.load())
    assert [threads[index].name for index in place.awaited] == awaited
    assert (place.telling == 1) is bool(awaited)


@pytest.mark.parametrize(
    ("lines", "is_alone"),
    [([], True), (["run (tqdm/_monitor.py:60)"], True), (["wait (threading.py:327)", *WRITES], False)],
    ids=["no other thread", "a progress bar", "a thread that waits, maybe with a timeout"],
)
def test_rank_is_alone_without_a_thread_that_may_work(lines: list[str], is_alone: bool) -> None:
    other = Thread(name="other", thread_id="8", frames=frames(lines))
    rounds = tuple(replace(dump, threads=(*dump.threads, other)) for dump in dumps(IN_COLLECTIVE))
    (member,) = group_ranks([rank(rounds)], activity.load(), SETTINGS, 2).members
    assert member.stack.is_alone is is_alone


@pytest.mark.parametrize(
    ("expected", "signatures"),
    [
        (Motion.FROZEN, {"gone", "stopped", "blocked", "behind_gpu"}),
        (Motion.MOVING, {"computes", "transfers", "gpu_works"}),
        (Motion.UNKNOWN, {"spins", "polls", "awaits_outside", "unknown"}),
    ],
)
def test_motion_follows_from_the_signature(expected: Motion, signatures: set[str]) -> None:
    assert {one.value for one in Signature if one.motion is expected} == signatures


SILENT = "/mnt/jfs (fuse.juicefs)"


def shut(
    cpu: float = 0.0, io: float = 0.0, state: str = "S", rounds: int = 3, mount: str | None = SILENT, held: bool = False
) -> RankDump:
    """Return a rank without any stack, because its program is on a file system that does not respond."""
    found = dumps([[]] * rounds, cpu=cpu, io=io, state=state)
    return replace(rank(found), silent_mount=mount, waits_for_mount=held)


@pytest.mark.parametrize(
    ("name", "stack_dump", "mount_holds_job", "expected"),
    [
        ("asleep through three rounds", shut(), False, Motion.FROZEN),
        ("asleep, and no file system is known to be silent", shut(mount=None), False, Motion.UNKNOWN),
        ("nor then, where another rank waits for one", shut(mount=None), True, Motion.UNKNOWN),
        ("two rounds are too few", shut(rounds=2), True, Motion.UNKNOWN),
        ("computes, maybe", shut(cpu=1.0, state="R"), False, Motion.UNKNOWN),
        ("spins, and another rank waits for the file system", shut(cpu=1.0, state="R"), True, Motion.FROZEN),
        ("reads", shut(io=1e6), True, Motion.UNKNOWN),
        ("waits for the file system itself", shut(held=True), True, Motion.FROZEN),
    ],
)
def test_rank_that_silent_mount_hides(name: str, stack_dump: RankDump, mount_holds_job: bool, expected: Motion) -> None:
    measured = progress.measure(stack_dump, [None] * len(stack_dump.rounds), SETTINGS, mount_holds_job=mount_holds_job)
    assert measured.signature.motion is expected, name


def test_rates_count_the_workers_and_sockets() -> None:
    found = rank(dumps(STILL, cpu=0.25, io=1000.0, socket_bytes=500), dumps(STILL, cpu=0.5, io=2000.0))
    measured = measure(found)
    assert measured.usage.cpu_ratio == pytest.approx(0.75)
    assert measured.usage.io_bytes_per_second == pytest.approx(3500.0)


def test_without_any_counter_a_line_that_stays_is_blocked() -> None:
    rounds = tuple(ProcessDump(taken_monotonic_seconds=float(n), threads=dumps([HERE])[0].threads) for n in range(2))
    assert measure(rank(rounds)) == progress.Measured(signature=Signature.BLOCKED)


def test_without_counters_of_threads_those_of_the_process_tell() -> None:
    rounds = tuple(change_parts(dump, before=None, after=None) for dump in SPINNING)
    assert measure(rank(rounds)).signature is Signature.SPINS


def test_thresholds_come_from_the_configuration() -> None:
    found = rank(dumps([HERE] * 2, cpu=0.1, main=0.0))
    assert measure(found, config.Capture(motion_cpu_ratio=0.05)).signature is Signature.UNKNOWN
    assert measure(found, config.Capture(motion_cpu_ratio=0.2)).signature is Signature.BLOCKED


def test_frozen_rank_is_stopped_in_any_process_state() -> None:
    def held(state: str, *cgroups: str | None) -> RankDump:
        rounds = dumps(STILL, state=state)
        pairs = zip(rounds, cgroups, strict=True)
        return rank(tuple(change_parts(dump, frozen_cgroup=cgroup) for dump, cgroup in pairs))

    for state in ("S", "D"):
        assert measure(held(state, "/job", "/job", "/job")).signature is Signature.STOPPED
    assert kernel_facts.read_waits(held("S", "/job", "/job", "/job")).frozen_cgroup == "/job"
    assert measure(held("S", "/job", None, "/job")).signature is Signature.BLOCKED


ASLEEP = {"call": SystemCall(number=230, name="clock_nanosleep", kind="sleeps")}
LOCK = {**ASLEEP, "file_lock": FileLock(path="/data/l", holder_pid=77)}
ROUNDS = st.lists(
    st.builds(
        Waits,
        server=st.sampled_from([None, 1, 2]),
        frozen_cgroup=st.sampled_from([None, "/job", "/other"]),
        shares_lock=st.booleans(),
        waits_in_torch=st.sampled_from([None, False, True]),
        stuck_on=st.sampled_from([None, "/a", "/b"]),
    ),
    max_size=3,
)


@given(ROUNDS)
def test_a_fact_of_a_rank_is_what_all_of_its_rounds_show(rounds: list[Waits]) -> None:
    dumped = tuple(ProcessDump(taken_monotonic_seconds=0.0, waits=waits) for waits in rounds)
    facts = kernel_facts.read_waits(rank(dumped))
    for name in ("server", "waits_in_torch"):
        shown = {getattr(waits, name) for waits in rounds}
        assert getattr(facts, name) == (shown.pop() if len(shown) == 1 else None)
    cgroups = [waits.frozen_cgroup for waits in rounds]
    assert facts.frozen_cgroup == (cgroups[-1] if cgroups and None not in cgroups else None)
    assert facts.shares_lock == any(waits.shares_lock for waits in rounds)
    files = {waits.stuck_on for waits in rounds}
    assert facts.stuck_on == (files.pop() if len(files) == 1 and len(rounds) > 1 else None)


@pytest.mark.parametrize(
    ("rounds", "is_known"), [((LOCK, None, LOCK), True), ((LOCK, ASLEEP, LOCK), False), ((None, None), False)]
)
def test_rank_that_runs_between_two_looks_at_a_lock_still_wants_it(rounds: tuple[object, ...], is_known: bool) -> None:
    """In one round it tries to take the lock, so it runs. A round in which it sleeps without the lock denies it."""
    dumped = [change_parts(one, **(facts or {})) for one, facts in zip(dumps(STILL), rounds, strict=False)]
    assert (kernel_facts.read_waits(rank(tuple(dumped))).file_lock is not None) is is_known


@pytest.mark.parametrize(
    ("peers", "expected"),
    [
        ((None, None), Signature.AWAITS_OUTSIDE),
        ((None, 0), Signature.BLOCKED),
        ((0, None), Signature.BLOCKED),
    ],
)
def test_round_with_unread_connections_tells_no_peer(peers: tuple[int | None, int | None], expected: Signature) -> None:
    """The first round shows an HTTP server. The other rounds show no peer: their connections were or were not read."""
    first, *others = dumps(STILL, call=RECEIVES)
    later = [change_parts(dump, peers=count) for dump, count in zip(others, peers, strict=True)]
    stack_dump = rank((change_parts(first, awaited=HTTP, peers=0), *later))
    assert measure(stack_dump).signature is expected


@pytest.mark.parametrize(
    ("unsearched_rounds", "children_bytes", "expected"),
    [
        (1, 0, Signature.BLOCKED),
        (1, 1_000_000, Signature.TRANSFERS),
        (2, 1_000_000, Signature.UNKNOWN),
        (3, 1_000_000, Signature.UNKNOWN),
    ],
)
def test_peer_that_was_not_found_is_unknown_unless_two_rounds_show_it(
    unsearched_rounds: int, children_bytes: int, expected: Signature
) -> None:
    not_found = Awaited(name="a process", end="unknown")
    rounds = [
        change_parts(dump, peers=0, awaited=not_found)
        if number < unsearched_rounds
        else change_parts(dump, peers=0, children_bytes=number * children_bytes, children_cpu_seconds=0.0)
        for number, dump in enumerate(dumps(STILL, call=RECEIVES))
    ]
    assert measure(rank(tuple(rounds))).signature is expected


def test_workers_seen_in_two_rounds_are_measured_where_their_rank_was_seen_in_one() -> None:
    found = measure(rank(dumps([HERE]), dumps([HERE] * 2, cpu=0.5)))
    assert (found.signature, found.usage.cpu_ratio) == (Signature.UNKNOWN, pytest.approx(0.5))


@pytest.mark.parametrize(("name", "row"), TABLES["stays"].items(), ids=TABLES["stays"])
def test_where_rank_stays_if_one_capture_cannot_tell(name: str, row: dict[str, Any]) -> None:
    stay = measure(read_rank(row)).stay
    assert (len(stay.places) if stay else 0) == row.get("places", 0), name


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        (["retries", "retries", "retries"], "retries"),
        (["retries", "none", "retries"], "retries"),
        (["retries", "retries", "none"], "retries"),
        (["none", "none", "none"], "none"),
        (["connected", "retries", "retries"], "none"),
        (["silent", "retries", "retries"], "none"),
        (["retries", "retries", "connected"], "connected"),
        ([], None),
    ],
)
def test_rank_without_store_connection_in_any_round_is_refused(rounds: list[PortUse], expected: PortUse | None) -> None:
    stores = (Waits(store=Store("master:1", use)) for use in rounds)
    found = kernel_facts.read_waits(rank(tuple(ProcessDump(taken_monotonic_seconds=0.0, waits=one) for one in stores)))
    assert (found.store.socket if found.store else None) == expected


TABLE = activity.load()
USER = Frame("wait_for_file", "train.py", 48)
EVENT = (Frame("wait", "threading.py", 655), Frame("wait", "threading.py", 1003))
TORCH = Frame("_try_get_data", "torch/utils/data/dataloader.py", 1251)
NANOSLEEP = SystemCall(number=230, name="clock_nanosleep", kind="sleeps", left_seconds=30.0, until_unix_seconds=1030.0)
FUTEX = SystemCall(number=202, name="futex", left_seconds=30.0, until_unix_seconds=1030.0)


def dump(call: SystemCall | None, *frames: Frame, in_torch: bool | None = False, line: int = 48) -> ProcessDump:
    user = replace(USER, line=line)
    main = Thread("MainThread", "1", (*frames, user), is_main=True, installed_frames=len(frames))
    return change_parts(ProcessDump(taken_monotonic_seconds=0.0, threads=(main,)), call=call, waits_in_torch=in_torch)


def sleep_in(*rounds: ProcessDump) -> Sleep | None:
    activities = [find_process_activity(one.threads, TABLE) for one in rounds]
    return find_sleep(RankDump(id=RankId(rank=0), rounds=rounds), activities)


@pytest.mark.parametrize(
    "taken",
    [
        dump(NANOSLEEP),
        dump(NANOSLEEP, Frame("sleep", "tenacity/nap.py", 31)),
        dump(FUTEX, *EVENT),
        dump(FUTEX, Frame("get", "queue.py", 180)),
        dump(FUTEX),
    ],
    ids=["time.sleep", "time.sleep of a library", "Event.wait", "queue.get", "Lock.acquire"],
)
def test_sleep_tells_its_end(taken: ProcessDump) -> None:
    sleep = sleep_in(taken, taken)
    assert (sleep.until_unix_seconds, sleep.seconds, sleep.is_polling) == (1030.0, 30.0, False)


OTHER_WAITS = {
    "stopped": replace(dump(NANOSLEEP), state="T"),
    "no end": dump(replace(NANOSLEEP, left_seconds=None, until_unix_seconds=None)),
    "a timed wait in a loop of a library": dump(FUTEX, *EVENT, TORCH),
    "work.wait()": dump(FUTEX, in_torch=True),
    "unknown compiled code": dump(FUTEX, in_torch=None),
    "NCCL polls with nanosleep": dump(NANOSLEEP, in_torch=True),
    "waits for ranks": dump(NANOSLEEP, Frame("_store_based_barrier", "torch/distributed/distributed_c10d.py", 900)),
    "receives from a rank": change_parts(dump(FUTEX, *EVENT), asks_rank="main"),
    "receives from the store": change_parts(dump(FUTEX, *EVENT), awaits_store="main"),
    "receives from a server": change_parts(dump(FUTEX, *EVENT), awaited=Awaited(name="10.0.0.9 port 8000")),
}


@pytest.mark.parametrize("taken", OTHER_WAITS.values(), ids=OTHER_WAITS)
def test_other_wait_is_no_sleep(taken: ProcessDump) -> None:
    assert sleep_in(taken, taken) is None


def test_sleep_of_a_capture_is_that_of_its_last_round_and_the_longest() -> None:
    later = replace(NANOSLEEP, left_seconds=12.0, until_unix_seconds=1031.0)
    first, last = dump(NANOSLEEP), dump(later)
    assert sleep_in(first, dump(None, line=49), last) == sleep_in(first, last)
    sleep = sleep_in(first, last)
    assert (sleep.until_unix_seconds, sleep.seconds) == (1031.0, 30.0)


def test_sleeps_at_different_lines_are_no_sleep() -> None:
    assert sleep_in(dump(NANOSLEEP), dump(NANOSLEEP, line=60)) is None
    assert sleep_in(dump(NANOSLEEP), dump(NANOSLEEP, line=48)) is not None
    assert sleep_in(dump(None), dump(None)) is None


READ = SystemCall(number=0, name="read", kind="receives", descriptors=(5,))
FLOCK = SystemCall(number=73, name="flock", kind="locks", descriptors=(5,))
OPEN = SystemCall(number=257, name="openat")


@pytest.mark.parametrize(
    ("call", "link", "expected"),
    [
        (READ, "/data/shard-3", "file"),
        (READ, "pipe:[77]", "pipe"),
        (READ, "socket:[78]", "socket"),
        (READ, "anon_inode:[eventfd]", None),
        (READ, "/dev/nvidia0", None),
        (READ, "/dev/shm/psm_1", None),
        (READ, "/memfd:ring (deleted)", None),
        (READ, "", None),
        (FLOCK, "/data/lock", "lock"),
        (OPEN, "", "file"),
        (SystemCall(number=61, name="wait4", kind="awaits_child"), "", "child"),
        (SystemCall(number=74, name="fsync", kind="writes", descriptors=(5,)), "/data/x", "file"),
        (SystemCall(number=42, name="connect", kind="receives", descriptors=(5,)), "socket:[78]", "socket"),
        (SystemCall(number=16, name="ioctl", descriptors=(5,)), "/data/x", None),
        (SystemCall(number=202, name="futex"), "", None),
        (SystemCall(number=7, name="poll", kind="receives", descriptors=(5,)), "socket:[78]", None),
        (SystemCall(number=9999), "", None),
    ],
    ids=lambda value: value.name or "unknown call" if isinstance(value, SystemCall) else value or "-",
)
def test_object_of_a_call(call: SystemCall, link: str, expected: CallObject | None) -> None:
    assert find_object(call, link, is_own=False) == expected
    assert find_object(call, link, is_own=True) is None


def test_rank_blocked_in_open_is_named_despite_a_busy_gpu() -> None:
    def blocked(number: int, stacks: list[list[str]], call: SystemCall | None = None) -> RankDump:
        identity = RankId(node="n1", rank=number, pid=100 + number)
        return replace(rank(dumps(stacks, call=call), use=1.0, power=0.1), id=identity)

    others = [blocked(number, IN_COLLECTIVE) for number in range(3)]
    for call, named in ((OPENS, [3]), (SystemCall(number=202, name="futex"), [])):
        seen = group_ranks([*others, blocked(3, STILL, call)], activity.load(), config.Capture(), world_size=4)
        (member,) = (one for one in seen.members if one.id.rank == 3)
        assert member.signature is (Signature.BLOCKED if named else Signature.BEHIND_GPU)
        assert [one.rank for one in judge(seen, 4).named] == named
