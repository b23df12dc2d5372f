"""Scenarios in virtual time: what every rank does, second by second, under the daemon's default settings."""

from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from hangwatch.config import Detector, Settings
from hangwatch.model import ActionKind, Awaited, SystemCall, WaitEnd, Waiting
from tests.scenarios.simulation import SETTINGS, Doing, Node

HOUR = 3600.0
START_SECONDS = 360.0  # from the start of a job to the page, if it hangs at its start
NOON = 12 * HOUR + 120.0  # all ranks train at this time
DAY = 24 * HOUR

_MAIN = ("train_step (pretrain.py)", "main (pretrain.py)", "<module> (pretrain.py)")
_REDUCE = (
    "all_reduce (torch/distributed/distributed_c10d.py)",
    "wrapper (torch/distributed/c10d_logger.py)",
    "sync_gradients (pretrain.py)",
    *_MAIN,
)
_BARRIER = (
    "barrier (torch/distributed/distributed_c10d.py)",
    "wrapper (torch/distributed/c10d_logger.py)",
    "wait_for_all (pretrain.py)",
    *_MAIN[1:],
)
_FORWARD = ("forward (torch/nn/modules/linear.py)", "_call_impl (torch/nn/modules/module.py)", *_MAIN)
_BACKWARD = ("_engine_run_backward (torch/autograd/graph.py)", "backward (torch/_tensor.py)", *_MAIN)
_OPTIMIZER = ("adamw (torch/optim/adamw.py)", "step (torch/optim/optimizer.py)", *_MAIN)
_SAVE = ("_write_item (torch/distributed/checkpoint/filesystem.py)", "save_checkpoint (pretrain.py)", *_MAIN[1:])
_EVALUATE = ("forward (torch/nn/modules/linear.py)", "evaluate (pretrain.py)", *_MAIN[1:])
_METRICS = ("score (metrics.py)", "evaluate (pretrain.py)", *_MAIN[1:])
_NEXT_BATCH = ("_try_get_data (torch/utils/data/dataloader.py)", "__next__ (torch/utils/data/dataloader.py)", *_MAIN)
_LOCK = ("acquire (threading.py)", "log_metrics (metrics.py)", *_MAIN)
_SPIN = ("pack (packing.py)", *_MAIN)
_SYNCHRONIZE = ("synchronize (torch/cuda/__init__.py)", *_MAIN)
_COMPILE = ("compile_file (torch/_inductor/codecache.py)", "compile_fx (torch/_inductor/compile_fx.py)", *_MAIN)
_LOWERING = ("run (torch/_inductor/graph.py)", "compile_fx (torch/_inductor/compile_fx.py)", *_MAIN)
_INIT = (
    "_store_based_barrier (torch/distributed/distributed_c10d.py)",
    "init_process_group (torch/distributed/distributed_c10d.py)",
    "main (pretrain.py)",
    "<module> (pretrain.py)",
)
_SERVE = (
    "select (selectors.py)",
    "serve_forever (socketserver.py)",
    "serve_forever (werkzeug/serving.py)",
    "run (flask/app.py)",
    "main (run_text_generation_server.py)",
    "<module> (run_text_generation_server.py)",
)
_BROADCAST = (
    "broadcast (torch/distributed/distributed_c10d.py)",
    "wrapper (torch/distributed/c10d_logger.py)",
    "main (run_text_generation_server.py)",
    "<module> (run_text_generation_server.py)",
)
_ROLLOUTS = ("get (ray/_private/worker.py)", "generate_rollouts (ppo.py)", "fit (ppo.py)", "<module> (ppo.py)")
_GENERATE = (
    "recv_into (socket.py)",
    "readinto (socket.py)",
    "generate (rollouts.py)",
    "fit (grpo.py)",
    "<module> (grpo.py)",
)
_READ_SHARD = ("read_exactly (shards.py)", "next_shard (shards.py)", *_MAIN[1:])
_MEET = (
    "_create_tcp_store (torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py)",
    "create_backend (torch/distributed/elastic/rendezvous/c10d_rendezvous_backend.py)",
    "launch_agent (torch/distributed/launcher/api.py)",
    "run (torch/distributed/run.py)",
    "<module> (torchrun)",
)
_OWN_LOOP = ("next_question (answers.py)", "main (answers.py)", "<module> (answers.py)")
_LOAD = ("get_tensor (safetensors/torch.py)", "load_model (pretrain.py)", *_MAIN[1:])
_POLL = ("wait_for_file (pretrain.py)", *_MAIN[1:])
_DOWNLOAD = ("read (ssl.py)", "download_shards (prepare.py)", *_MAIN[1:])

_ITEM_IN_MODULE = ("<module> (train.py)",)
_ITEM_IN_MAIN = ("main (train_unet.py)", "<module> (train_unet.py)")
_ITEM_IN_UPDATE = ("update (agent.py)", "learn (agent.py)", "<module> (agent.py)")
_ADD_SCALAR = ("add_scalar (torch/utils/tensorboard/writer.py)", *_MAIN)
_TORCH_SAVE = ("_save (torch/serialization.py)", "save (torch/serialization.py)", *_MAIN)
_HTTP = (
    "readinto (socket.py)",
    "send (requests/adapters.py)",
    "post (requests/api.py)",
    "generate (rollouts.py)",
    "fit (ppo.py)",
)
_REMOTE = ("wait (subprocess.py)", "run (subprocess.py)", "evaluate_remotely (pretrain.py)", *_MAIN[1:])
_FSYNC = ("sync_to_disk (checkpointing.py)", "save_checkpoint (pretrain.py)", *_MAIN[1:])
_RECEIVE = ("recv_exactly (shards.py)", "next_shard (shards.py)", *_MAIN[1:])
_UPLOAD = ("wait (threading.py)", "result (concurrent/futures/_base.py)", "upload (checkpointing.py)", *_MAIN[1:])
_PROMPT = ("readline (pdb.py)", "interaction (pdb.py)", "trace_dispatch (bdb.py)", *_MAIN)
_ASK_AGAIN = ("until_there (flags.py)", *_MAIN[1:])

TRAINS = Doing((_FORWARD, _BACKWARD, _OPTIMIZER), watts=600.0, utilization_ratio=0.98, cpu_ratio=0.9, enqueues=True)
WAITS = Doing((_REDUCE,), watts=120.0, cpu_ratio=1.0)
WAITS_AT_BARRIER = Doing((_BARRIER,), watts=118.0, cpu_ratio=1.0)
SAVES = Doing((_SAVE,), watts=85.0, utilization_ratio=0.0, cpu_ratio=0.3, io_bytes_per_second=2e8)
STUCK_SAVING = Doing((_SAVE,), watts=84.0, utilization_ratio=0.0, state="D")
EVALUATES = Doing((_EVALUATE, _METRICS), watts=160.0, utilization_ratio=0.3, cpu_ratio=0.9)
COMPILES = Doing((_COMPILE, _LOWERING), watts=115.0, utilization_ratio=0.0, cpu_ratio=1.0)
LOADS = Doing((_NEXT_BATCH,), watts=90.0, utilization_ratio=0.0, cpu_ratio=0.05, io_bytes_per_second=5e6)
STUCK_LOADING = replace(LOADS, cpu_ratio=0.0, io_bytes_per_second=0.0, watts=84.0)
LOCKED = Doing((_LOCK,), watts=84.0, utilization_ratio=0.0)
SPINS = Doing((_SPIN,), watts=84.0, utilization_ratio=0.0, cpu_ratio=1.0, state="R")
IN_DRIVER = Doing((_SYNCHRONIZE,), watts=68.0, utilization_ratio=0.0, state="D")
STARTS = Doing((_DOWNLOAD,), watts=72.0, utilization_ratio=0.0, cpu_ratio=0.1, io_bytes_per_second=1e6)
READS_MAPPED = Doing((_LOAD,), watts=78.0, utilization_ratio=0.0, state="D", faulted_bytes_per_second=4e6)
STUCK_READING = Doing((_READ_SHARD,), watts=84.0, utilization_ratio=0.0, state="D")
MEETS = Doing((_MEET,), watts=0.0, utilization_ratio=0.0, switches_per_second=1.0, peers=0)
SERVES_ITSELF = Doing((_OWN_LOOP,), watts=80.0, utilization_ratio=0.0, peers=0, serves=True)
SERVES = Doing((_SERVE,), watts=118.0, utilization_ratio=0.0, switches_per_second=2.0, serves=True)
AWAITS_BROADCAST = Doing((_BROADCAST,), watts=119.0, cpu_ratio=1.0)
# ray.get checks for signals once a second (RAY_get_check_signal_interval_milliseconds).
AWAITS_ROLLOUTS = Doing((_ROLLOUTS,), watts=90.0, utilization_ratio=0.0, switches_per_second=1.0)
STOPPED = Doing((_FORWARD,), watts=84.0, utilization_ratio=0.0, state="T")
# A server on another node, or an idle child: nothing on this node shows that it works.
AWAITS_GENERATION = Doing((_GENERATE,), watts=90.0, utilization_ratio=0.0)
AWAITS_EVALUATION = Doing((_REMOTE,), watts=88.0, utilization_ratio=0.0, awaited=Awaited(name="its child 78 (sbatch)"))
IN_FSYNC = Doing((_FSYNC,), watts=85.0, utilization_ratio=0.0, state="D")
POLLS = Doing((_POLL,), watts=85.0, utilization_ratio=0.0, switches_per_second=0.5)
SLEEPS_CALL = SystemCall(number=230, name="clock_nanosleep", kind="sleeps")
LINGERS = Doing((_DOWNLOAD[1:],), watts=110.0, utilization_ratio=0.0, peers=0, call=SLEEPS_CALL)
UPLOADS = replace(STARTS, peers=0)
JOINS = Doing((_INIT,), watts=80.0, utilization_ratio=0.0, cpu_ratio=0.001)
# Ranks that wait for NCCL: a core spins in one C call without the GIL; the GPU is busy in a waiting kernel.
ITEM_IN_MODULE = replace(WAITS, stacks=(_ITEM_IN_MODULE,))
ITEM_IN_MAIN = replace(WAITS, stacks=(_ITEM_IN_MAIN,))
ITEM_IN_UPDATE = replace(WAITS, stacks=(_ITEM_IN_UPDATE,))
# Ranks that poll in Python for the end of the collective, with pauses: their lines alternate.
ASKS_GPU = replace(
    WAITS,
    stacks=tuple((f"until_done (comm.py:{line})", "update (agent.py:80)", *_MAIN[1:]) for line in (41, 42)),
    switches_per_second=2.0,
)
ASKS_GPU_AT_ZERO = replace(ASKS_GPU, utilization_ratio=0.0)
# numpy in two lines: looks the same from outside.
RESAMPLES = replace(
    ASKS_GPU_AT_ZERO,
    stacks=tuple((f"resample (data.py:{line})", *_MAIN[1:]) for line in (20, 21)),
    watts=90.0,
    switches_per_second=0.0,
)
REDUCES_SLOWLY = replace(ITEM_IN_MAIN, enqueues=True, nvlink_bytes_per_second=1e9, pcie_bytes_per_second=2.4e9)
POLLS_THE_HOST = replace(ITEM_IN_MAIN, nvlink_bytes_per_second=0.0, pcie_bytes_per_second=0.8e9)
SPINS_AT_ZERO = replace(ITEM_IN_MAIN, utilization_ratio=0.0)
ADDS_SCALAR = replace(WAITS, stacks=(_ADD_SCALAR,))
SAVES_BEHIND_GPU = replace(WAITS, stacks=(_TORCH_SAVE,))
PEER_GONE = Doing((_HTTP,), watts=84.0, utilization_ratio=0.0, awaited=Awaited(name="10.0.0.9 port 8000", end="lost"))
AWAITS_SERVER = replace(PEER_GONE, awaited=Awaited(name="10.0.0.9 port 8000"))
AWAITS_SSH = replace(
    AWAITS_SERVER, stacks=(_REMOTE,), awaited=Awaited(name="its child 77 (ssh), connected to 10.0.0.8 port 22")
)
# A rank that waits for a process of its job, which does not wait for another process: the end of the wait.
RECEIVES_CALL = SystemCall(number=45, name="recvfrom", kind="receives", descriptors=(9,), object="socket")
AWAITS_PROCESS = Doing((_NEXT_BATCH,), watts=84.0, utilization_ratio=0.0, call=RECEIVES_CALL)
AWAITS_WORK = replace(AWAITS_PROCESS, behind_cpu_ratio=1.0)
AWAITS_RANK = replace(AWAITS_PROCESS, stacks=(_OWN_LOOP,), asks_rank="child")
OPENS_CALL = SystemCall(number=257, name="openat", kind="opens", object="file")
OPENS = Doing((_READ_SHARD,), watts=84.0, utilization_ratio=0.0, call=OPENS_CALL)
SYNCS = Doing((_FSYNC,), watts=84.0, utilization_ratio=0.0, state="D", device_bytes_per_second=8e7)
STUCK_SYNCING = replace(SYNCS, device_bytes_per_second=0.0)
RECEIVES = Doing((_RECEIVE,), watts=84.0, utilization_ratio=0.0, cpu_ratio=0.01, socket_bytes_per_second=4e5)
UPLOADS_PARTS = replace(RECEIVES, stacks=(_UPLOAD,))
DEBUGGED = replace(AWAITS_SERVER, stacks=(_PROMPT,), awaited=Awaited(name="a person at the terminal /dev/pts/3"))
ASKS_AGAIN = Doing((_ASK_AGAIN,), watts=84.0, utilization_ratio=0.0, switches_per_second=0.5)
EVALUATES_SLOWLY = replace(EVALUATES, cpu_ratio=0.005, switches_per_second=3.0)
LIGHT = replace(TRAINS, watts=250.0)
VERY_LIGHT = replace(TRAINS, watts=150.0, utilization_ratio=0.4)
LIGHTEST = replace(TRAINS, watts=130.0)
LIGHTEST_AT_ITEM = replace(ITEM_IN_MAIN, watts=130.0)


def awaits(end: WaitEnd) -> Doing:
    """Return the activity of a rank that waits for its data-loader worker, and that waits for something else."""
    return replace(AWAITS_PROCESS, awaited=Awaited(name="its worker 72 (python)", end=end))


@dataclass(frozen=True)
class Expected:
    """The expected result of one job. `named` are the named ranks.

    `action` is the recommended action. `within_seconds` is the longest permitted time from the fault to the page. `pages_before` is the number of
    permitted pages before the fault, for pauses that are not learned yet.
    """

    states: str
    page: bool = False
    named: tuple[int, ...] = ()
    within_seconds: float = SETTINGS.detector.hold_seconds + 30.0
    pages_before: int = 0
    action: ActionKind = "investigate"


def truth_of(expected: tuple[Expected, ...]) -> str:
    """Return `hang` if a job is expected to page, else `healthy`."""
    return "hang" if any(job.page for job in expected) else "healthy"


def with_names(rows: dict[str, Any]) -> tuple[Any, ...]:
    """Return the rows of a table, each with its key as its name."""
    return tuple(replace(row, name=name) for name, row in rows.items())


@dataclass(frozen=True)
class PowerScenario:
    """A row of the table in docs/benchmarks.md. `trouble_at` is not before the last progress of a rank."""

    node: Node
    expected: tuple[Expected, ...]
    seconds: float
    trouble_at: float = HOUR
    settings: Settings = SETTINGS
    name: str = ""

    @property
    def truth(self) -> str:
        return truth_of(self.expected)


def _after(at: float, odd: int | None, stuck: Doing | None, others: Doing = WAITS, work: Doing = TRAINS) -> Node:
    """Return a node on which rank `odd` is stuck, or its process gone if `stuck` is None, from `at` on."""

    def doing(gpu: int, t: float) -> Doing | None:
        if t < at:
            return work
        return stuck if gpu == odd else others

    return Node(doing)


TRAINING = Node(lambda _gpu, _t: TRAINS)


def between(
    begin: float, end: float, odd: int | None, odd_does: Doing, others: Doing = WAITS_AT_BARRIER, node: Node = TRAINING
) -> Node:
    """Return the node with a rank that does something else from `begin` to `end`, while the others wait for it."""

    def doing(gpu: int, t: float) -> Doing | None:
        if not begin <= t < end:
            return node.doing(gpu, t)
        return odd_does if gpu == odd else others

    return replace(node, doing=doing)


def _cycle(*parts: tuple[Doing, float], shift_seconds: float = 0.0) -> Node:
    """Return a node with GPUs that repeat (activity, seconds), GPU i `i * shift_seconds` behind GPU 0."""
    length = sum(seconds for _, seconds in parts)

    def doing(gpu: int, t: float) -> Doing | None:
        at = (t - gpu * shift_seconds) % length
        for part, seconds in parts:
            if at < seconds:
                return part
            at -= seconds
        return parts[-1][0]

    return Node(doing)


def _pauses(odd: Doing, seconds: float, every: float, hang: tuple[int, Doing] | None = None) -> Node:
    """Return a node on which rank 0 does `odd` for `seconds` in each `every`, and rank `hang` hangs from noon on."""

    def doing(gpu: int, t: float) -> Doing | None:
        if hang is not None and t >= NOON:
            return hang[1] if gpu == hang[0] else WAITS_AT_BARRIER
        if t % every < every - seconds:
            return TRAINS
        return WAITS_AT_BARRIER if gpu else odd

    return Node(doing, jobs=(("job", range(2)),))


def _two_jobs() -> Node:
    def doing(gpu: int, t: float) -> Doing | None:
        if gpu >= 4 or t < HOUR:
            return TRAINS
        return LOCKED if gpu == 2 else WAITS

    return Node(doing, jobs=(("hangs", range(4)), ("trains", range(4, 8))))


def _restarts(pause_seconds: float) -> Node:
    def doing(_gpu: int, t: float) -> Doing | None:
        return STARTS if HOUR <= t < HOUR + pause_seconds else TRAINS

    return Node(doing, generation=lambda t: int(t >= HOUR))


def _capped(watts: float) -> Node:
    capped = replace(TRAINS, watts=watts)
    return Node(
        lambda _gpu, t: TRAINS if t < HOUR else capped,
        limit_watts=lambda t: 700.0 if t < HOUR else watts * 1.03,
    )


def _gpu_lost(then: Doing, others: Doing) -> Node:
    node = _after(HOUR, 3, then, others)
    return replace(node, lost=lambda gpu, t: gpu == 3 and t >= HOUR)


TRAINS_ON = "starting → training"
TRAINS_LATER = "starting → suspected → training"
JOINS_LATE = "starting → suspected → stalled → recovered → training"
HANGS_AT_START = "starting → suspected → hung"
HANGS = "starting → training → quiet → suspected → hung"
STALLS = "starting → training → quiet → suspected → stalled"
WAITS_FOR_NODES = "starting → training → quiet → suspected → waits_elsewhere"
LOOKED_AT = "starting → training → quiet → suspected → stalled → recovered → training"
TAUGHT = "starting → training → quiet → suspected → training"
ENDS = "starting → training → quiet → ended"
IS_OVER = "starting → training → quiet → suspected → over"
DIPS = "starting → training ⇄ quiet"
WAITS_AGAIN = (
    "starting → (training → quiet → suspected → stalled → recovered) x11 → training → quiet → suspected → stalled"
)
ASKED = "starting → training → quiet → suspected → training → suspected → stalled"
LIGHT_HANGS = "starting → training → suspected → hung"
LIGHT_STALLS = "starting → training → suspected → stalled"


def _hang(
    node: Node,
    named: tuple[int, ...] = (),
    states: str = HANGS,
    within_seconds: float = Expected.within_seconds,
    seconds: float = HOUR + 300,
    pages_before: int = 0,
    **options: Any,
) -> PowerScenario:
    """Return the scenario of one job that hangs. The options are those of `PowerScenario`."""
    expected = Expected(states, True, named, within_seconds, pages_before)
    return PowerScenario(node, (expected,), seconds, **options)


def _stuck(
    rank: int, stuck: Doing | None, others: Doing = WAITS, work: Doing = TRAINS, **options: Any
) -> PowerScenario:
    """Return the scenario of one job in which all ranks wait for one, which is named. The options are those of `_hang`."""
    return _hang(_after(HOUR, rank, stuck, others, work), (rank,), **options)


def _healthy(
    node: Node, states: str = LOOKED_AT, seconds: float = HOUR + 1200, pages_before: int = 0, **options: Any
) -> PowerScenario:
    """Return the scenario of one job that works, or will. The options are those of `PowerScenario`."""
    return PowerScenario(node, (Expected(states, pages_before=pages_before),), seconds, **options)


def _pause(odd: Doing, lasts: float = 480) -> PowerScenario:
    """Return the scenario of one job in which rank 0 does something else for some seconds."""
    return _healthy(between(HOUR, HOUR + lasts, 0, odd))


PLAIN_RULE = Settings(detector=Detector(confirming_captures=1, quiet_fraction=0.0, low_power_ratio_of_limit=0.12))


def _plain(watts: float, states: str = HANGS) -> PowerScenario:
    """Return a hang in which every GPU draws `watts`. The limit of the plain rule is 84 W: 0.12 of 700 W."""
    stuck = replace(LOCKED, watts=watts, utilization_ratio=0.0)
    node = replace(_after(HOUR, 5, stuck, replace(WAITS, watts=watts)), idle_watts=68.0, noise_ratio=0.0)
    return _hang(node, (5,), states, settings=PLAIN_RULE)


# What a hang may have in common with others: states, the longest time to the page, and the length of the script.
_LATE: dict[str, Any] = {"states": STALLS, "within_seconds": 1050.0, "seconds": HOUR + 1200}
_AFTER_LOOKS: dict[str, Any] = {"states": ASKED, "within_seconds": 1450.0, "seconds": HOUR + 1800}
_AT_START: dict[str, Any] = {
    "states": HANGS_AT_START,
    "within_seconds": START_SECONDS,
    "seconds": 1200.0,
    "trouble_at": 0.0,
}
_FOR_NODES: dict[str, Any] = {"within_seconds": 600.0, "seconds": HOUR, "trouble_at": 0.0}

_HANG = {
    # rank 5 waits for a lock
    "lock": _stuck(5, LOCKED),
    # rank 5 waits for a lock; ten minutes later the collective times out, and all ranks end
    "a hang until its timeout": _hang(
        Node(lambda gpu, t: TRAINS if t < HOUR else None if t >= HOUR + 600 else LOCKED if gpu == 5 else WAITS),
        (5,),
        f"{HANGS} → ended",
        seconds=HOUR + 700,
    ),
    # rank 5 waits for a lock while a kernel that it started before waits for the others
    "lock, and its GPU reads 98 %": _stuck(5, replace(LOCKED, utilization_ratio=0.98)),
    # rank 2 waits for a data loader that gives nothing
    "stuck loader": _stuck(2, STUCK_LOADING),
    # rank 0 is blocked in D state
    "blocked in the driver": _stuck(0, IN_DRIVER),
    # the process of rank 7 is gone, the others wait for it
    "rank gone": _stuck(7, None),
    # all ranks of this node wait for another node, and nothing says that there is one
    "culprit elsewhere": _hang(_after(HOUR, None, None)),
    # all ranks wait for other nodes, of which none is left to say so: two minutes before the collective times out
    "culprit on a node that is gone": _hang(
        replace(_after(HOUR, None, None), elsewhere=8), states=WAITS_FOR_NODES, within_seconds=495.0, seconds=HOUR + 600
    ),
    # rank 3 waits for a lock, the others for it: that is a hang of this node
    "a rank of this node hangs, of a job on two nodes": _hang(replace(_after(HOUR, 3, LOCKED), elsewhere=8), (3,)),
    # rank 4 loops in Python: it moves, so the page waits for stalled_hold_seconds
    "endless loop": _stuck(4, SPINS, **_LATE),
    # rank 0 writes for 3 minutes, then its writes block
    "storage fails during a checkpoint": _hang(
        Node(
            lambda gpu, t: (
                TRAINS if t < HOUR else WAITS_AT_BARRIER if gpu else SAVES if t < HOUR + 180 else STUCK_SAVING
            )
        ),
        (0,),
        "starting → training → quiet → suspected → stalled → hung",
        within_seconds=240.0,
        seconds=HOUR + 600,
        trouble_at=HOUR + 180,
    ),
    # rank 6 never joins; the job never drew any power
    "hang at start": _hang(Node(lambda gpu, _t: LOCKED if gpu == 6 else JOINS), (6,), **_AT_START),
    # 2 of 8 ranks never have a process, the others wait for them to join
    "ranks that never come": _hang(
        Node(lambda gpu, _t: JOINS if gpu < 6 else None),
        (6, 7),
        "starting → suspected → stalled → hung",
        within_seconds=8130.0,
        seconds=2.5 * HOUR,
        trouble_at=0.0,
    ),
    # two hours without requests; then rank 3 waits for a lock and all others for it, at the same power
    "a server that hangs in a request": _hang(
        Node(
            lambda gpu, t: (
                LOCKED if gpu == 3 and t >= 2 * HOUR else AWAITS_BROADCAST if gpu or t >= 2 * HOUR else SERVES
            )
        ),
        (3,),
        "starting → suspected → training → suspected → hung",
        within_seconds=HOUR,
        seconds=4 * HOUR,
        trouble_at=2 * HOUR,
    ),
    # rank 7 ends while all join
    "a rank that dies at the start": _hang(
        Node(lambda gpu, t: JOINS if gpu < 7 or t < 60 else None), (7,), **_AT_START
    ),
    # eleven jobs of two ranks; of each, rank 0 blocks in a read at the same second
    "eleven jobs, one dead file system": PowerScenario(
        Node(
            lambda gpu, t: TRAINS if t < HOUR else WAITS if gpu % 2 else STUCK_READING,
            jobs=tuple((f"job-{number}", range(2 * number, 2 * number + 2)) for number in range(11)),
        ),
        (Expected(HANGS, True, (0,)),) * 11,
        HOUR + 300,
    ),
    # rank 5 waits for a lock; hangwatch is started again after four minutes, and after eight
    "hangwatch is started again in a hang": _hang(
        replace(_after(HOUR, 5, LOCKED), daemon=lambda t: max(0, int((t - HOUR) // 240))), (5,), seconds=HOUR + 700
    ),
    # torchrun for two nodes; the other one never comes
    "a launcher that waits for another node": _hang(
        Node(
            lambda _gpu, _t: MEETS,
            jobs=(("job", range(0)),),
            waiting=Waiting(launcher="torchrun", run_id="pretrain", nodes="2", endpoint="10.0.0.1:29400"),
        ),
        states="starting → suspected → stalled",
        **_FOR_NODES,
    ),
    # eight of sixteen ranks wait in the rendezvous; the other node never comes
    "ranks that wait for those of another node": _hang(
        Node(lambda _gpu, _t: JOINS, elsewhere=8), states="starting → suspected → waits_elsewhere", **_FOR_NODES
    ),
    # after a minute of loading rank 3 waits for a lock, and the others wait for it in the first collective
    "hang in the first collective": _hang(
        Node(lambda gpu, t: STARTS if t < 60 else LOCKED if gpu == 3 else WAITS),
        (3,),
        HANGS_AT_START,
        within_seconds=START_SECONDS,
        seconds=HOUR,
        trouble_at=60.0,
    ),
    # a job that drew 250 of 700 W; waiting ranks draw 120 W
    "light job hangs": _stuck(5, LOCKED, work=LIGHT),
    # A100 of 400 W: 330 W at work, 86 W waiting
    "small cards hang": _hang(
        replace(
            _after(HOUR, 1, replace(IN_DRIVER, watts=68.0), replace(WAITS, watts=86.0), replace(TRAINS, watts=330.0)),
            limit_watts=lambda _t: 400.0,
            idle_watts=56.0,
        ),
        (1,),
    ),
    # H20 of 400 W: 118 W in the hang
    "waiting at 29 % of the limit": _hang(
        replace(
            _after(HOUR, 3, replace(LOCKED, watts=90.0), replace(WAITS, watts=118.0), replace(TRAINS, watts=380.0)),
            limit_watts=lambda _t: 400.0,
        ),
        (3,),
    ),
    # GPU 3 falls off the bus; rank 3 blocks in the driver
    "GPU lost, and the job hangs on it": _hang(_gpu_lost(IN_DRIVER, WAITS), (3,)),
    # rank 5 waits for a lock; the others spin behind NCCL in `.item()` of a program without functions
    "victims at module level": _stuck(5, LOCKED, ITEM_IN_MODULE),
    # the same, in `main`
    "victims in main": _stuck(5, LOCKED, ITEM_IN_MAIN),
    # the same, and the kernels of the victims poll through a network proxy: 0.8 GB/s over PCIe
    "victims that poll the host": _stuck(5, LOCKED, POLLS_THE_HOST),
    # the same, in `update` of `learn`
    "victims in update": _stuck(5, LOCKED, ITEM_IN_UPDATE),
    # the same in `main`, and nothing tells them from ranks that compute: the page waits for stalled_hold_seconds
    "victims with GPUs at 0 %": _hang(_after(HOUR, 5, LOCKED, SPINS_AT_ZERO), **_LATE),
    # rank 0 waits for its GPU in a call that logs; rank 3 asks a server that is gone
    "a victim inside add_scalar": _hang(
        Node(lambda gpu, t: TRAINS if t < HOUR else {0: ADDS_SCALAR, 3: PEER_GONE}.get(gpu, WAITS)), (3,)
    ),
    # rank 0 waits for its GPU in a call that saves; rank 3 is stuck in fsync
    "a victim inside torch.save": _hang(
        Node(lambda gpu, t: TRAINS if t < HOUR else {0: SAVES_BEHIND_GPU, 3: STUCK_SYNCING}.get(gpu, ITEM_IN_MAIN)),
        (3,),
    ),
    # rank 0 waits for its GPU in a call that logs; no rank of this node blocks the job
    "a victim inside add_scalar, the culprit elsewhere": _hang(
        Node(lambda gpu, t: TRAINS if t < HOUR else ADDS_SCALAR if gpu == 0 else WAITS)
    ),
    # rank 0 asks a server that never answers, and is blocked: the page waits for stalled_hold_seconds
    "a request without a timeout": _stuck(0, AWAITS_SERVER, **_LATE),
    # rank 0 waits for its worker, which is stopped, has lost its connection, or waits for rank 0
    **{f"a wait for a worker: {end}": _stuck(0, awaits(end)) for end in ("held", "lost", "cycle")},
    # the same, and the worker sleeps, asks a server, waits for a program or was not found
    **{
        f"a wait for a worker, for good: {end}": _stuck(0, awaits(end), **_LATE)
        for end in ("sleeps", "outside", "program", "unknown")
    },
    # the ranks wait for their driver, which waits for rank 2; rank 2 opens a FIFO
    "actors behind one that opens a FIFO": _stuck(2, OPENS, AWAITS_RANK),
    # rank 2 of one job waits for a lock; the other job trains
    "two jobs, one hangs": PowerScenario(_two_jobs(), (Expected(HANGS, True, (2,)), Expected(TRAINS_ON)), HOUR + 300),
    # 250 W at work, 140 W in the hang, and the line at 133 W: power alone would never tell
    "light job hangs over its line": _stuck(
        5, replace(LOCKED, watts=140.0), replace(WAITS, watts=140.0), LIGHT, states=LIGHT_HANGS, within_seconds=150.0
    ),
    # rank 5 waits for a lock; the others ask in two lines of Python whether their collective is over: they seem to
    # move, until two more captures find them there, and the page waits for stalled_hold_seconds from then on
    "victims that ask in Python": _hang(_after(HOUR, 5, LOCKED, ASKS_GPU), **_AFTER_LOOKS),
    # the same, and the driver says that nothing runs on their GPUs
    "victims that ask in Python, their GPUs at 0 %": _hang(_after(HOUR, 5, LOCKED, ASKS_GPU_AT_ZERO), **_AFTER_LOOKS),
    # a job of 250 W; its ranks ask in Python at 140 W, and no line tells
    "victims that ask, over the line of their job": _hang(
        _after(HOUR, 5, replace(LOCKED, watts=140.0), replace(ASKS_GPU, watts=140.0), LIGHT),
        states=LIGHT_STALLS,
        within_seconds=1450.0,
        seconds=HOUR + 1800,
    ),
    # a job of 250 W; its ranks spin at 140 W with their GPUs at 0 %: only captures minutes apart tell
    "spinning at 0 %, over the line of their job": _hang(
        _after(HOUR, None, None, replace(SPINS_AT_ZERO, watts=140.0), LIGHT),
        states=LIGHT_STALLS,
        within_seconds=1700.0,
        seconds=HOUR + 1800,
    ),
    # a job of 130 W, and 120 W in the hang: its power proves nothing, and only captures up to an hour apart can tell
    "lightest job hangs": _hang(
        _after(2 * HOUR, 5, replace(LOCKED, watts=115.0), ITEM_IN_MAIN, LIGHTEST),
        states="starting → suspected → training → suspected → stalled",
        within_seconds=2.5 * HOUR,
        seconds=6 * HOUR,
        trouble_at=2 * HOUR,
    ),
    # a job that never drew more than 150 W, and 120 W in the hang: only a capture can tell
    "very light job hangs": _hang(
        _after(2 * HOUR, 5, LOCKED, work=VERY_LIGHT),
        (5,),
        "starting → suspected → training → suspected → hung",
        within_seconds=150.0,
        seconds=4 * HOUR,
        trouble_at=2 * HOUR,
    ),
    **{f"plain rule, {watts:g} W": _plain(watts) for watts in (71.0, 72.0, 75.0, 84.0)},
    # above the threshold: a light capture is taken
    "plain rule, 85 W": _plain(85.0, LIGHT_HANGS),
}

_HEALTHY = {
    # all ranks are stopped (scontrol suspend, gang scheduling), then go on
    "suspended for two hours": _healthy(
        between(HOUR, 3 * HOUR, None, STOPPED, STOPPED),
        "starting → training → quiet → suspected → suspended → recovered → training",
        seconds=3 * HOUR + 300,
    ),
    # after an hour at 600 W, three hours at 350 W: flat, and under three quarters
    "light evaluation": _healthy(_after(HOUR, None, None, replace(TRAINS, watts=350.0)), TRAINS_ON, seconds=4 * HOUR),
    # once an hour all ranks of this node wait 5 minutes for a rank of another node that saves
    "checkpoints on another node, again and again": _healthy(
        Node(lambda gpu, t: TRAINS if t % HOUR < HOUR - 300 else WAITS_AT_BARRIER, elsewhere=8),
        "starting → (training → quiet → suspected → waits_elsewhere → recovered) x2"
        " → training → quiet → suspected → waits_elsewhere",
        seconds=3 * HOUR,
    ),
    # rank 0 writes for 10 minutes, the others wait
    "long checkpoint": _pause(SAVES, 600),
    # rank 0 is in fsync for 4 minutes while the device writes, the others wait
    "slow fsync": _pause(SYNCS, 240),
    # reinforcement learning: 6 minutes of training, then rank 0 waits 4 minutes for a server, the others for it
    "generation over HTTP": _healthy(
        Node(lambda gpu, t: TRAINS if t % 600 < 360 else AWAITS_SERVER if gpu == 0 else WAITS),
        WAITS_AGAIN,
        seconds=2 * HOUR,
    ),
    # rank 0 waits 8 minutes for ssh, the others for it
    "remote evaluation": _pause(AWAITS_SSH),
    # rank 0 receives 400 kB/s for 8 minutes, the others wait
    "shards into memory": _pause(RECEIVES),
    # rank 0 waits 8 minutes for threads that upload the parts of a file, the others wait
    "multipart upload": _pause(UPLOADS_PARTS),
    # rank 0 waits 8 minutes for sbatch --wait, which sleeps; the others for it
    "an idle child": _pause(AWAITS_EVALUATION),
    # rank 0 waits 8 minutes for its worker, which sleeps, asks a server or was not found; the others for it
    **{f"a worker that answers late: {end}": _pause(awaits(end)) for end in ("sleeps", "outside", "unknown")},
    # all ranks wait 8 minutes for their driver, which computes
    "actors of a driver that computes": _healthy(between(HOUR, HOUR + 480, None, AWAITS_WORK, AWAITS_WORK)),
    # rank 0 is at the prompt of pdb for 8 minutes, the others wait
    "a person in a debugger": _pause(DEBUGGED),
    # rank 0 sleeps until a file is there, for 8 minutes, the others wait
    "asks every two seconds": _pause(ASKS_AGAIN),
    # rank 0 evaluates for 8 minutes and sleeps in between, the others wait
    "evaluation with sleeps": _pause(EVALUATES_SLOWLY),
    # the process group is destroyed, and no rank ends
    "training over, all linger": _healthy(_after(HOUR, None, None, LINGERS), IS_OVER, seconds=3 * HOUR),
    # the others have ended; rank 0 keeps the pod alive for two hours
    "training over, rank 0 uploads": _healthy(
        Node(lambda gpu, t: TRAINS if t < HOUR else UPLOADS if gpu == 0 else None), IS_OVER, seconds=3 * HOUR
    ),
    # 90 s each, shorter than the hold
    "checkpoints every half hour": _healthy(
        Node(lambda gpu, t: TRAINS if t < 600 or t % 1800 >= 90 else (WAITS_AT_BARRIER if gpu else SAVES)),
        DIPS,
        seconds=3 * HOUR,
    ),
    # rank 0 evaluates for 8 minutes, the others wait
    "evaluation on one rank": _pause(EVALUATES),
    # 20 minutes at 160 W
    "evaluation on all ranks": _healthy(
        between(HOUR, HOUR + 1200, 0, EVALUATES, EVALUATES), TAUGHT, seconds=HOUR + 1800
    ),
    # eight of sixteen ranks wait for the others in the rendezvous
    "a node that joins after 8 minutes": _healthy(
        Node(lambda _gpu, t: TRAINS if t >= 480 else JOINS, elsewhere=8),
        "starting → suspected → waits_elsewhere → recovered → training",
        seconds=HOUR,
    ),
    # rank 0 compiles for 10 minutes before the first step, the others wait for it
    "first-step compile on one rank": _healthy(between(0, 600, 0, COMPILES, WAITS_AT_BARRIER), TRAINS_ON, seconds=HOUR),
    # all ranks read their model through mmap for 6 minutes: one line, no call, page faults in D state
    "a model that is mapped": _healthy(between(0, 360, 0, READS_MAPPED, READS_MAPPED), TRAINS_ON, seconds=HOUR),
    # all ranks compile for 25 minutes before the first step
    "first-step compile": _healthy(between(0, 1500, 0, COMPILES, COMPILES), TRAINS_LATER, seconds=HOUR),
    # for 90 minutes before the first step, the others wait for it
    "rank 0 prepares data": _healthy(between(0, 5400, 0, STARTS, WAITS_AT_BARRIER), JOINS_LATE, seconds=2 * HOUR),
    # after an hour: 2 s of work for every 20 s of loading
    "starved but moving loader": _healthy(
        Node(lambda _gpu, t: TRAINS if t < HOUR or t % 22 < 2 else LOADS), TAUGHT, seconds=2 * HOUR
    ),
    # each stage works 5 s and waits 3 s, in turns
    "pipeline bubbles": _healthy(_cycle((TRAINS, 5), (WAITS, 3), shift_seconds=1), TRAINS_ON, seconds=HOUR),
    # each stage works 4 s and waits 4 s, in turns: half of the GPUs wait at any time, but never the same ones
    "deep pipeline bubbles": _healthy(_cycle((TRAINS, 4), (WAITS, 4), shift_seconds=1), DIPS, seconds=HOUR),
    # 100 s of compute, then 25 s of all_reduce at 150 W
    "gradient accumulation": _healthy(_cycle((TRAINS, 100), (replace(WAITS, watts=150.0), 25)), DIPS, seconds=HOUR),
    # four ranks are done and exit; the other job trains
    "two jobs, one ends": PowerScenario(
        Node(
            lambda gpu, t: TRAINS if gpu >= 4 or t < HOUR + 3 else None,
            jobs=(("ends", range(4)), ("trains", range(4, 8))),
        ),
        (Expected(ENDS), Expected(TRAINS_ON)),
        HOUR + 300,
    ),
    # rank 0 writes the last checkpoint for 60 s, then all exit
    "a job that ends": _healthy(
        Node(lambda gpu, t: TRAINS if t < HOUR else None if t > HOUR + 60 else WAITS_AT_BARRIER if gpu else SAVES),
        ENDS,
        seconds=HOUR + 300,
    ),
    # the launcher replaces all ranks; they start up for 10 minutes
    "elastic restart": _healthy(_restarts(600), "starting → training → ended → starting → training"),
    # the limit falls from 700 to 310 W, and with it the power
    "power capping": _healthy(_capped(300), TRAINS_ON),
    # the limit falls from 700 to 206 W
    "power emergency": _healthy(_capped(200), TAUGHT, seconds=2 * HOUR),
    # gradients go over 10 Gb/s: one line for minutes behind a GPU at 120 W, and 2.4 GB/s over PCIe
    "a network that became slow": _healthy(
        Node(lambda _gpu, t: TRAINS if t < HOUR else REDUCES_SLOWLY), TAUGHT, seconds=4 * HOUR
    ),
    # GPU 6 at 250 W, the others wait for it a third of the time
    "one GPU slower than the rest": _healthy(
        Node(
            lambda gpu, t: (
                replace(TRAINS, watts=250.0) if gpu == 6 else TRAINS if t % 9 < 6 else replace(WAITS, watts=200.0)
            )
        ),
        DIPS,
        seconds=HOUR,
    ),
    # GPU 3 can no longer be read; the job trains on
    "readings of one GPU lost": _healthy(_gpu_lost(TRAINS, TRAINS), TRAINS_ON),
    # no sample for 10 minutes; the job trains on
    "driver silent": _healthy(
        Node(lambda _gpu, _t: TRAINS, silent=lambda t: HOUR <= t < HOUR + 600), f"{TRAINS_ON} → unknown → training"
    ),
    # 250 of 700 W
    "light fine-tuning": _healthy(Node(lambda _gpu, _t: LIGHT), TRAINS_ON, seconds=2 * HOUR),
    # 150 of 700 W from the first minute
    "very light fine-tuning": _healthy(Node(lambda _gpu, _t: VERY_LIGHT), TRAINS_LATER, seconds=4 * HOUR),
    # 130 of 700 W, flat
    "lightest fine-tuning": _healthy(Node(lambda _gpu, _t: LIGHTEST), TRAINS_LATER, seconds=4 * HOUR),
    # the same, and once it has begun each rank is nine tenths of the time at the line where it waits for its GPU
    "lightest fine-tuning, mostly at one line": _healthy(
        Node(lambda gpu, t: LIGHTEST if t < 1000 or crc32(f"{gpu} {t}".encode()) % 10 == 0 else LIGHTEST_AT_ITEM),
        "starting → suspected → (training → suspected → stalled → recovered) x6 → training",
        seconds=4 * HOUR,
    ),
    # 15 minutes of numpy after an hour: looks like a wait in Python, and ends before it pages
    "all ranks compute on CPU in two lines": _healthy(
        between(HOUR, HOUR + 900, 0, RESAMPLES, RESAMPLES),
        "starting → training → quiet → suspected → training → suspected → stalled → recovered → training",
        seconds=2 * HOUR,
    ),
    # 5 of 8 ranks have no process for 20 minutes (an image is pulled), the others wait for them to join
    "ranks that come late": _healthy(
        Node(lambda gpu, t: TRAINS if t >= 1210 else JOINS if gpu < 3 else STARTS if t >= 1200 else None),
        JOINS_LATE,
        seconds=HOUR,
    ),
    # 5 of 8 ranks have no process until the stacks of the others are taken, and prepare for 15 s
    "ranks that come while the others are looked at": _healthy(
        Node(lambda gpu, t: TRAINS if t >= 918 else JOINS if gpu < 3 else STARTS if t >= 903 else None),
        JOINS_LATE,
        seconds=HOUR,
    ),
    # 2 of 8 ranks download for 25 minutes before they join
    "ranks that prepare longer": _healthy(
        Node(lambda gpu, t: TRAINS if t >= 1500 else JOINS if gpu < 6 else STARTS), JOINS_LATE, seconds=HOUR
    ),
    # rank 0 waits for requests, the others for rank 0; none comes for three hours
    "inference server under torchrun": _healthy(
        Node(lambda gpu, _t: AWAITS_BROADCAST if gpu else SERVES), TRAINS_LATER, seconds=3 * HOUR
    ),
    # an unknown server without a launcher's name or a known frame: its ranks wait on a listening socket
    "a server of its own": _healthy(Node(lambda _gpu, _t: SERVES_ITSELF), TRAINS_LATER, seconds=3 * HOUR),
    # reinforcement learning: 6 minutes of training, then 4 minutes of waiting for rollouts
    "rollouts on other GPUs": _healthy(_cycle((TRAINS, 360), (AWAITS_ROLLOUTS, 240)), WAITS_AGAIN, seconds=2 * HOUR),
}

_PAUSES_AGAIN = {state: f" → training → quiet → suspected → {state}" for state in ("hung", "stalled")}


def _again(odd: Doing, seconds: float, every: float, state: str) -> PowerScenario:
    """Return the scenario of a day in which rank 0 repeatedly does `odd` (see `_pauses`), which looks like `state`."""
    life = f"(training → quiet → suspected → {state} → recovered) x{DAY / every - 1:.0f}{_PAUSES_AGAIN[state]}"
    is_paged = int(state == "hung")
    return _healthy(
        _pauses(odd, seconds, every), f"starting → {life}", seconds=DAY, pages_before=is_paged, trouble_at=DAY
    )


_PAUSE = {
    # reinforcement learning, 24 hours: every 10 minutes rank 0 waits 4 for a server elsewhere, the others for it
    "a generation server, again and again": _again(AWAITS_GENERATION, 240, 600, "hung"),
    # 24 hours: every half hour rank 0 waits 5 minutes for an idle child that evaluates elsewhere
    "a remote evaluation, again and again": _again(AWAITS_EVALUATION, 300, 1800, "stalled"),
    # 24 hours: every hour rank 0 is 4 minutes in an fsync of which nothing can be seen to flow
    "a slow fsync, again and again": _again(IN_FSYNC, 240, 3600, "hung"),
    # 24 hours: every half hour rank 0 asks for a file every 2 seconds, for 5 minutes
    "polling, again and again": _again(POLLS, 300, 1800, "stalled"),
    # after 12 hours of 4 minutes in every 10 the generation server does not answer any more
    "hang where it has paused": _hang(
        _pauses(AWAITS_GENERATION, 240, 600, hang=(0, AWAITS_GENERATION)),
        (0,),
        "starting → (training → quiet → suspected → hung → recovered) x72" + _PAUSES_AGAIN["hung"],
        within_seconds=2 * 240 + 15,
        seconds=NOON + HOUR,
        pages_before=1,
        trouble_at=NOON,
    ),
    # after 12 hours of 4 minutes in every 10 rank 1 waits for a lock
    "hang elsewhere": _hang(
        _pauses(AWAITS_GENERATION, 240, 600, hang=(1, LOCKED)),
        (1,),
        "starting → (training → quiet → suspected → hung → recovered) x72" + _PAUSES_AGAIN["hung"],
        within_seconds=SETTINGS.detector.hold_seconds + 15,
        seconds=NOON + HOUR,
        pages_before=1,
        trouble_at=NOON,
    ),
}

HANG_SCENARIOS: tuple[PowerScenario, ...] = with_names(_HANG)
HEALTHY_SCENARIOS: tuple[PowerScenario, ...] = with_names(_HEALTHY)
PAUSE_SCENARIOS: tuple[PowerScenario, ...] = with_names(_PAUSE)
