"""Scenarios in virtual time for jobs with progress counters: hangs to find in seconds, and look-alikes.

The settings are the daemon's defaults. Before the fault, the longest gap between collectives is 1 s, unless a
scenario says otherwise.
"""

from dataclasses import dataclass, replace
from typing import Any

from msgspec import structs

from hangwatch.model import Awaited, FileLock, KernelCall
from tests.scenarios import power
from tests.scenarios.power import HOUR, TRAINS, WAITS, WAITS_AT_BARRIER
from tests.scenarios.simulation import MAIN_PTHREAD_ID, Doing, Node
from tests.unit.test_waitfor import record, recorder

HOLD_SECONDS = 120.0
STALLED_SECONDS = 900.0
WAITS_AT_FULL_POWER = replace(WAITS, watts=600.0, cpu_ratio=0.0, main_cpu_ratio=0.0)
LOCKED_AT_FULL_POWER = replace(power.LOCKED, watts=600.0)
BEHIND_FULL_GPU = replace(power.ITEM_IN_MAIN, watts=420.0)


def _in_call(doing: Doing, name: str, **facts: Any) -> Doing:
    """Return the activity of a rank that waits in a system call for a living process, as a capture shows it."""
    return replace(doing, kernel_call=KernelCall(name=name, says=f"{name}() on", rounds=3, **facts))


def stop_helper(doing: Doing, **facts: Any) -> Doing:
    """Return the same wait after SIGSTOP to the awaited process. No chain is followed from a lock to its holder."""
    awaited = Awaited(name="its child 72 (python), which is stopped", end="held")
    call = structs.replace(doing.kernel_call, is_held=True, **facts)
    return replace(doing, awaited=None if call.file_lock else awaited, kernel_call=call)


FLOCK = _in_call(
    replace(power.LOCKED, stacks=(("lock_cache (shards.py)", "next_shard (shards.py)", "main (pretrain.py)"),)),
    "flock",
    descriptors=1,
    file_lock=FileLock("/scratch/cache.lock", 72, "python"),
)
AWAITS_CHILD = _in_call(power.AWAITS_EVALUATION, "wait4", child_pid=72, child_state="S")
AWAITS_ANSWER = _in_call(
    replace(power.AWAITS_SERVER, awaited=Awaited("its child 72", "program")), "recvfrom", descriptors=1
)
AWAITS_BATCH = _in_call(power.AWAITS_PROCESS, "poll", descriptors=1, may_time_out=True)
HELPED = {"child": AWAITS_CHILD, "server": AWAITS_ANSWER, "loader": AWAITS_BATCH, "lock holder": FLOCK}
AWAITS_TRACED_CHILD = replace(
    stop_helper(AWAITS_CHILD), kernel_call=structs.replace(AWAITS_CHILD.kernel_call, child_state="t")
)
ENQUEUES_LIGHTLY = replace(power.VERY_LIGHT, enqueues=True)
TRAINS_ALONE = replace(TRAINS, enqueues=False)
REPLAYS, LAUNCHES = BEHIND_FULL_GPU, replace(BEHIND_FULL_GPU, enqueues=True)


@dataclass(frozen=True)
class Hang:
    """A hang. All times are in seconds after the last collective. `states`: the last state of the job."""

    name: str
    node: Node
    page_within: float
    named: tuple[int, ...]
    suspected_within: float = 45.0
    state: str = "hung"


def after(odd: int | None, stuck: Doing | None, others: Doing = WAITS, work: Doing = TRAINS) -> Node:
    """Return a node on which all ranks train for an hour. Then one rank is stuck and the others wait for it.

    If it has ended (`stuck` is None), the flight recorders of the others show that they need it.
    """
    open_one = (recorder(record(7, state="open", thread_id=MAIN_PTHREAD_ID)),)
    node = Node(lambda gpu, t: work if t < HOUR else stuck if gpu == odd else others)
    return node if stuck is not None else replace(node, recorders=lambda _gpu, t: open_one if t >= HOUR else ())


def without_power(node: Node) -> Node:
    """Return the same node without a GPU that can be read."""
    return replace(node, silent=lambda _t: True)


def with_gap(node: Node, seconds: float) -> Node:
    """Return the same node with an earlier gap: half an hour before the fault, rank 0 saves for some seconds."""
    return power.between(HOUR / 2, HOUR / 2 + seconds, 0, power.SAVES, node=node)


def _everywhere(name: str, stuck: Doing | None, page_within: float, odd: int = 3) -> tuple[Hang, ...]:
    """Return a hang at low power, at full power, of a light job, and without power readings."""
    hot = None if stuck is None else replace(stuck, watts=600.0)
    hang = Hang(name, after(odd, stuck), page_within, (odd,))
    return (
        hang,
        replace(
            hang,
            name=f"{name}, full power",
            node=after(odd, hot, WAITS_AT_FULL_POWER),
            page_within=page_within if page_within < HOLD_SECONDS else STALLED_SECONDS + 15,
            state="hung" if page_within < HOLD_SECONDS else "stalled",
        ),
        replace(hang, name=f"{name}, light job", node=after(odd, stuck, WAITS, ENQUEUES_LIGHTLY)),
        replace(hang, name=f"{name}, no power readings", node=without_power(after(odd, stuck))),
    )


HANGS = (
    *_everywhere("lock", power.LOCKED, HOLD_SECONDS + 15),
    *_everywhere("flock", FLOCK, HOLD_SECONDS + 15),
    *_everywhere("D state", power.STUCK_SYNCING, HOLD_SECONDS + 15),
    *_everywhere("stopped", power.STOPPED, 60.0),
    *_everywhere("gone", None, 60.0),
    *(Hang(f"stopped {name}", after(3, stop_helper(doing)), 60.0, (3,)) for name, doing in HELPED.items()),
    *(
        replace(hang, state="stalled", named=(3,))
        for hang in _everywhere("endless loop", power.SPINS, STALLED_SECONDS + 15)
    ),
    *(
        replace(
            hang,
            name=f"lock after a gap of {gap:g} s",
            node=with_gap(hang.node, gap),
            suspected_within=30 + min(120.0, 1.5 * gap),
        )
        for hang in _everywhere("lock", power.LOCKED, HOLD_SECONDS + 15)[:1]
        for gap in (15.0, 30.0, 60.0, 100.0)
    ),
)


@dataclass(frozen=True)
class Healthy:
    """A job that works, or will. It is played from second `begin` to second `seconds`."""

    name: str
    node: Node
    seconds: float = HOUR + 1800
    begin: float = 0.0


def between(odd_does: Doing, seconds: float, others: Doing = WAITS, begin: float = HOUR) -> Node:
    """Return a node on which rank 0 does something else for some seconds, and the others wait for it."""
    return power.between(begin, begin + seconds, 0, odd_does, others)


_AWAITED: tuple[tuple[str, Doing], ...] = (
    ("fsync", power.IN_FSYNC),
    ("a wait for a traced child", AWAITS_TRACED_CHILD),
    ("a wait for a stopped child with a timeout", stop_helper(AWAITS_CHILD, may_time_out=True)),
    *((f"a wait for a living {name}", doing) for name, doing in HELPED.items()),
    ("D state", power.STUCK_READING),
    ("HTTP", power.AWAITS_SERVER),
    ("wait at 100 % GPU", BEHIND_FULL_GPU),
)


def _checkpoints() -> Node:
    """Return a node that saves 8 s every 10 minutes, and 80 s once."""

    def doing(gpu: int, t: float) -> Doing | None:
        length = 80.0 if HOUR <= t < HOUR + 600 else 8.0
        return TRAINS if t % 600 >= length or t < 600 else WAITS_AT_BARRIER if gpu else power.IN_FSYNC

    return Node(doing)


LOOK_ALIKES = (
    *(
        Healthy(f"rank 0 in {name} for {seconds} s{detail}", read(between(doing, seconds)), HOUR + 600, HOUR - 1000)
        for detail, read in (("", replace), (", no power readings", without_power))
        for name, doing in _AWAITED
        for seconds in (40, 100)
    ),
    Healthy("evaluation without collectives", between(power.EVALUATES, 1200, power.EVALUATES)),
    Healthy("evaluation without collectives at full power", between(TRAINS_ALONE, 1200, TRAINS_ALONE)),
    Healthy("accumulation", Node(lambda _gpu, t: TRAINS if t % 90 < 2 else TRAINS_ALONE)),
    Healthy("a checkpoint ten times longer than ever", _checkpoints()),
    Healthy(
        "a node that joins after 8 minutes", Node(lambda _gpu, t: TRAINS if t >= 480 else power.JOINS, elsewhere=8)
    ),
    Healthy("a first compile of 10 minutes", Node(lambda _gpu, t: TRAINS if t >= 600 else power.COMPILES)),
    Healthy("a CUDA graph that replays", Node(lambda _gpu, t: LAUNCHES if t < HOUR else REPLAYS)),
)
