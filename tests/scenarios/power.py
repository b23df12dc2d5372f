"""Scenarios in virtual time.

Each says what every rank does, second by second. The settings are the daemon's defaults.
"""

from dataclasses import dataclass, replace
from zlib import crc32

from hangwatch.config import Detector, Settings
from hangwatch.model import ActionKind, Awaited, Waiting
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
_SAVE = (
    "_write_item (torch/distributed/checkpoint/filesystem.py)",
    "save_checkpoint (pretrain.py)",
    *_MAIN[1:],
)
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
LINGERS = Doing((_DOWNLOAD[1:],), watts=110.0, utilization_ratio=0.0, peers=0, sleeps=True)
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


@dataclass(frozen=True)
class PowerScenario:
    """A scenario, which is a row of the table in docs/benchmarks.md.

    `truth` is `hang` or `healthy`. `trouble_at` is at or after the last progress of the last rank. `weakness`
    describes a known defect. The test of such a row is expected to fail.
    """

    name: str
    what: str
    truth: str
    node: Node
    expected: tuple[Expected, ...]
    seconds: float
    trouble_at: float = HOUR
    weakness: str = ""
    settings: Settings = SETTINGS


def _after(at: float, odd: int | None, stuck: Doing | None, others: Doing = WAITS, work: Doing = TRAINS) -> Node:
    """Return a node on which all ranks work until `at`. Then rank `odd` is stuck and the others wait for it.

    If `stuck` is None, the process of rank `odd` is gone.
    """

    def doing(gpu: int, t: float) -> Doing | None:
        if t < at:
            return work
        return stuck if gpu == odd else others

    return Node(doing)


def _between(begin: float, end: float, odd: int | None, odd_does: Doing, others: Doing = WAITS_AT_BARRIER) -> Node:
    """Return a node on which all ranks train, except from `begin` to `end` (seconds).

    Between these times rank `odd` does something else and the others wait for it.
    """

    def doing(gpu: int, t: float) -> Doing | None:
        if not begin <= t < end:
            return TRAINS
        return odd_does if gpu == odd else others

    return Node(doing)


def _cycle(*parts: tuple[Doing, float], shift_seconds: float = 0.0) -> Node:
    """Return a node on which all GPUs repeat the parts, given as (activity, seconds).

    GPU i is `i * shift_seconds` behind GPU 0.
    """
    length = sum(seconds for _, seconds in parts)

    def doing(gpu: int, t: float) -> Doing | None:
        at = (t - gpu * shift_seconds) % length
        for part, seconds in parts:
            if at < seconds:
                return part
            at -= seconds
        return parts[-1][0]

    return Node(doing)


def _startup(seconds: float, first: Doing, others: Doing) -> Node:
    """Return a node on which rank 0 does `first` and the other ranks `others` for `seconds`. Then all ranks train."""
    return Node(lambda gpu, t: TRAINS if t >= seconds else (first if gpu == 0 else others))


def _pauses(odd: Doing, seconds: float, every: float, hang: tuple[int, Doing] | None = None) -> Node:
    """Return a node on which rank 0 repeatedly does `odd` for `seconds`, while the others wait for it.

    `every` is the time from one pause to the next. If `hang` is given, its rank hangs from noon on.
    """

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


PLAIN_RULE = Settings(detector=Detector(confirming_captures=1, quiet_fraction=0.0, low_power_ratio_of_limit=0.12))


def _plain(watts: float, how: str, states: str) -> PowerScenario:
    """Return a hang in which every GPU draws `watts`. The limit of the plain rule is 84 W."""
    stuck = replace(LOCKED, watts=watts, utilization_ratio=0.0)
    node = replace(_after(HOUR, 5, stuck, replace(WAITS, watts=watts)), idle_watts=68.0, noise_ratio=0.0)
    return PowerScenario(
        f"plain rule, {watts:g} W",
        f"low_power_ratio_of_limit = 0.12 of 700 W and quiet_fraction = 0; a hang at {watts:g} W{how}",
        "hang",
        node,
        (Expected(states, True, (5,)),),
        HOUR + 300,
        settings=PLAIN_RULE,
    )


TRAINS_ON = "starting → training"
HANGS = "starting → training → quiet → suspected → hung"
WAITS_FOR_NODES = "starting → training → quiet → suspected → waits_elsewhere"
LOOKED_AT = "starting → training → quiet → suspected → stalled → recovered → training"
TAUGHT = "starting → training → quiet → suspected → training"

ASKED = "starting → training → quiet → suspected → training → suspected → stalled"

HANG_SCENARIOS = (
    PowerScenario(
        "lock", "rank 5 waits for a lock", "hang", _after(HOUR, 5, LOCKED), (Expected(HANGS, True, (5,)),), HOUR + 300
    ),
    PowerScenario(
        "a hang until its timeout",
        "rank 5 waits for a lock; ten minutes later the collective times out, and all ranks end",
        "hang",
        Node(
            lambda gpu, t: TRAINS if t < HOUR else None if t >= HOUR + 600 else LOCKED if gpu == 5 else WAITS,
        ),
        (Expected(f"{HANGS} → ended", True, (5,)),),
        HOUR + 700,
    ),
    PowerScenario(
        "lock, and its GPU reads 98 %",
        "rank 5 waits for a lock while a kernel that it started before waits for the others",
        "hang",
        _after(HOUR, 5, replace(LOCKED, utilization_ratio=0.98)),
        (Expected(HANGS, True, (5,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "stuck loader",
        "rank 2 waits for a data loader that gives nothing",
        "hang",
        _after(HOUR, 2, STUCK_LOADING),
        (Expected(HANGS, True, (2,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "blocked in the driver",
        "rank 0 is blocked in D state",
        "hang",
        _after(HOUR, 0, IN_DRIVER),
        (Expected(HANGS, True, (0,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "rank gone",
        "the process of rank 7 is gone, the others wait for it",
        "hang",
        _after(HOUR, 7, None),
        (Expected(HANGS, True, (7,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "culprit elsewhere",
        "all ranks of this node wait for another node, and nothing says that there is one",
        "hang",
        _after(HOUR, None, None),
        (Expected(HANGS, True),),
        HOUR + 300,
    ),
    PowerScenario(
        "culprit on a node that is gone",
        "all ranks wait for other nodes, of which none is left to say so: two minutes before the collective times out",
        "hang",
        replace(_after(HOUR, None, None), elsewhere=8),
        (Expected(WAITS_FOR_NODES, True, within_seconds=495.0),),
        HOUR + 600,
    ),
    PowerScenario(
        "a rank of this node hangs, of a job on two nodes",
        "rank 3 waits for a lock, the others for it: that is a hang of this node",
        "hang",
        replace(_after(HOUR, 3, LOCKED), elsewhere=8),
        (Expected(HANGS, True, (3,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "endless loop",
        "rank 4 loops in Python: it moves, so the page waits for stalled_hold_seconds",
        "hang",
        _after(HOUR, 4, SPINS),
        (Expected("starting → training → quiet → suspected → stalled", True, (4,), 1050.0),),
        HOUR + 1200,
    ),
    PowerScenario(
        "storage fails during a checkpoint",
        "rank 0 writes for 3 minutes, then its writes block",
        "hang",
        Node(
            lambda gpu, t: (
                TRAINS if t < HOUR else WAITS_AT_BARRIER if gpu else SAVES if t < HOUR + 180 else STUCK_SAVING
            )
        ),
        (Expected("starting → training → quiet → suspected → stalled → hung", True, (0,), 240.0),),
        HOUR + 600,
        trouble_at=HOUR + 180,
    ),
    PowerScenario(
        "hang at start",
        "rank 6 never joins; the job never drew any power",
        "hang",
        Node(lambda gpu, _t: LOCKED if gpu == 6 else JOINS),
        (Expected("starting → suspected → hung", True, (6,), START_SECONDS),),
        1200.0,
        trouble_at=0.0,
    ),
    PowerScenario(
        "ranks that never come",
        "2 of 8 ranks never have a process, the others wait for them to join",
        "hang",
        Node(lambda gpu, _t: JOINS if gpu < 6 else None),
        (Expected("starting → suspected → stalled → hung", True, (6, 7), 8130.0),),
        2.5 * HOUR,
        trouble_at=0.0,
    ),
    PowerScenario(
        "a server that hangs in a request",
        "two hours without requests; then rank 3 waits for a lock and all others for it, at the same power",
        "hang",
        Node(
            lambda gpu, t: (
                LOCKED if gpu == 3 and t >= 2 * HOUR else AWAITS_BROADCAST if gpu or t >= 2 * HOUR else SERVES
            )
        ),
        (Expected("starting → suspected → training → suspected → hung", True, (3,), HOUR),),
        4 * HOUR,
        trouble_at=2 * HOUR,
    ),
    PowerScenario(
        "a rank that dies at the start",
        "rank 7 ends while all join",
        "hang",
        Node(lambda gpu, t: JOINS if gpu < 7 or t < 60 else None),
        (Expected("starting → suspected → hung", True, (7,), START_SECONDS),),
        1200.0,
        trouble_at=0.0,
    ),
    PowerScenario(
        "eleven jobs, one dead file system",
        "eleven jobs of two ranks; of each, rank 0 blocks in a read at the same second",
        "hang",
        Node(
            lambda gpu, t: TRAINS if t < HOUR else WAITS if gpu % 2 else STUCK_READING,
            jobs=tuple((f"job-{number}", range(2 * number, 2 * number + 2)) for number in range(11)),
        ),
        (Expected(HANGS, True, (0,)),) * 11,
        HOUR + 300,
    ),
    PowerScenario(
        "hangwatch is started again in a hang",
        "rank 5 waits for a lock; hangwatch is started again after four minutes, and after eight",
        "hang",
        replace(_after(HOUR, 5, LOCKED), daemon=lambda t: max(0, int((t - HOUR) // 240))),
        (Expected(HANGS, True, (5,)),),
        HOUR + 700,
    ),
    PowerScenario(
        "a launcher that waits for another node",
        "torchrun for two nodes; the other one never comes",
        "hang",
        Node(
            lambda _gpu, _t: MEETS,
            jobs=(("job", range(0)),),
            waiting=Waiting(launcher="torchrun", run_id="pretrain", nodes="2", endpoint="10.0.0.1:29400"),
        ),
        (Expected("starting → suspected → stalled", True, (), 600.0),),
        HOUR,
        trouble_at=0.0,
    ),
    PowerScenario(
        "ranks that wait for those of another node",
        "eight of sixteen ranks wait in the rendezvous; the other node never comes",
        "hang",
        Node(lambda _gpu, _t: JOINS, elsewhere=8),
        (Expected("starting → suspected → waits_elsewhere", True, (), 600.0),),
        HOUR,
        trouble_at=0.0,
    ),
    PowerScenario(
        "hang in the first collective",
        "after a minute of loading rank 3 waits for a lock, and the others wait for it in the first collective",
        "hang",
        Node(lambda gpu, t: STARTS if t < 60 else LOCKED if gpu == 3 else WAITS),
        (Expected("starting → suspected → hung", True, (3,), START_SECONDS),),
        HOUR,
        trouble_at=60.0,
    ),
    PowerScenario(
        "light job hangs",
        "a job that drew 250 of 700 W; waiting ranks draw 120 W",
        "hang",
        _after(HOUR, 5, LOCKED, work=LIGHT),
        (Expected(HANGS, True, (5,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "small cards hang",
        "A100 of 400 W: 330 W at work, 86 W waiting",
        "hang",
        replace(
            _after(HOUR, 1, replace(IN_DRIVER, watts=68.0), replace(WAITS, watts=86.0), replace(TRAINS, watts=330.0)),
            limit_watts=lambda _t: 400.0,
            idle_watts=56.0,
        ),
        (Expected(HANGS, True, (1,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "waiting at 29 % of the limit",
        "H20 of 400 W: 118 W in the hang",
        "hang",
        replace(
            _after(HOUR, 3, replace(LOCKED, watts=90.0), replace(WAITS, watts=118.0), replace(TRAINS, watts=380.0)),
            limit_watts=lambda _t: 400.0,
        ),
        (Expected(HANGS, True, (3,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "GPU lost, and the job hangs on it",
        "GPU 3 falls off the bus; rank 3 blocks in the driver",
        "hang",
        _gpu_lost(IN_DRIVER, WAITS),
        (Expected(HANGS, True, (3,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "victims at module level",
        "rank 5 waits for a lock; the others spin behind NCCL in `.item()` of a program without functions",
        "hang",
        _after(HOUR, 5, LOCKED, ITEM_IN_MODULE),
        (Expected(HANGS, True, (5,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "victims in main",
        "the same, in `main`",
        "hang",
        _after(HOUR, 5, LOCKED, ITEM_IN_MAIN),
        (Expected(HANGS, True, (5,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "victims that poll the host",
        "the same, and the kernels of the victims poll through a network proxy: 0.8 GB/s over PCIe",
        "hang",
        _after(HOUR, 5, LOCKED, POLLS_THE_HOST),
        (Expected(HANGS, True, (5,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "victims in update",
        "the same, in `update` of `learn`",
        "hang",
        _after(HOUR, 5, LOCKED, ITEM_IN_UPDATE),
        (Expected(HANGS, True, (5,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "victims with GPUs at 0 %",
        "the same in `main`, and nothing tells them from ranks that compute: the page waits for stalled_hold_seconds",
        "hang",
        _after(HOUR, 5, LOCKED, SPINS_AT_ZERO),
        (Expected("starting → training → quiet → suspected → stalled", True, (), 1050.0),),
        HOUR + 1200,
    ),
    PowerScenario(
        "a victim inside add_scalar",
        "rank 0 waits for its GPU in a call that logs; rank 3 asks a server that is gone",
        "hang",
        Node(lambda gpu, t: TRAINS if t < HOUR else {0: ADDS_SCALAR, 3: PEER_GONE}.get(gpu, WAITS)),
        (Expected(HANGS, True, (3,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "a victim inside torch.save",
        "rank 0 waits for its GPU in a call that saves; rank 3 is stuck in fsync",
        "hang",
        Node(lambda gpu, t: TRAINS if t < HOUR else {0: SAVES_BEHIND_GPU, 3: STUCK_SYNCING}.get(gpu, ITEM_IN_MAIN)),
        (Expected(HANGS, True, (3,)),),
        HOUR + 300,
    ),
    PowerScenario(
        "a victim inside add_scalar, the culprit elsewhere",
        "rank 0 waits for its GPU in a call that logs; no rank of this node blocks the job",
        "hang",
        Node(lambda gpu, t: TRAINS if t < HOUR else ADDS_SCALAR if gpu == 0 else WAITS),
        (Expected(HANGS, True),),
        HOUR + 300,
    ),
    PowerScenario(
        "a request without a timeout",
        "rank 0 asks a server that never answers, and is blocked: the page waits for stalled_hold_seconds",
        "hang",
        _after(HOUR, 0, AWAITS_SERVER),
        (Expected("starting → training → quiet → suspected → stalled", True, (0,), 1050.0),),
        HOUR + 1200,
    ),
    PowerScenario(
        "two jobs, one hangs",
        "rank 2 of one job waits for a lock; the other job trains",
        "hang",
        _two_jobs(),
        (Expected(HANGS, True, (2,)), Expected(TRAINS_ON)),
        HOUR + 300,
    ),
    PowerScenario(
        "light job hangs over its line",
        "250 W at work, 140 W in the hang, and the line at 133 W: power alone would never tell",
        "hang",
        _after(HOUR, 5, replace(LOCKED, watts=140.0), replace(WAITS, watts=140.0), LIGHT),
        (Expected("starting → training → suspected → hung", True, (5,), 150.0),),
        HOUR + 300,
    ),
    PowerScenario(
        "victims that ask in Python",
        "rank 5 waits for a lock; the others ask in two lines of Python whether their collective is over: they seem to move,"
        " until two more captures find them there, and the page waits for stalled_hold_seconds from then on",
        "hang",
        _after(HOUR, 5, LOCKED, ASKS_GPU),
        (Expected(ASKED, True, (), 1450.0),),
        HOUR + 1800,
    ),
    PowerScenario(
        "victims that ask in Python, their GPUs at 0 %",
        "the same, and the driver says that nothing runs on their GPUs",
        "hang",
        _after(HOUR, 5, LOCKED, ASKS_GPU_AT_ZERO),
        (Expected(ASKED, True, (), 1450.0),),
        HOUR + 1800,
    ),
    PowerScenario(
        "victims that ask, over the line of their job",
        "a job of 250 W; its ranks ask in Python at 140 W, and no line tells",
        "hang",
        _after(HOUR, 5, replace(LOCKED, watts=140.0), replace(ASKS_GPU, watts=140.0), LIGHT),
        (Expected("starting → training → suspected → stalled", True, (), 1450.0),),
        HOUR + 1800,
    ),
    PowerScenario(
        "spinning at 0 %, over the line of their job",
        "a job of 250 W; its ranks spin at 140 W with their GPUs at 0 %: only captures minutes apart tell",
        "hang",
        _after(HOUR, None, None, replace(SPINS_AT_ZERO, watts=140.0), LIGHT),
        (Expected("starting → training → suspected → stalled", True, (), 1700.0),),
        HOUR + 1800,
    ),
    PowerScenario(
        "lightest job hangs",
        "a job of 130 W, and 120 W in the hang: its power proves nothing, and only captures up to an hour apart can tell",
        "hang",
        _after(2 * HOUR, 5, replace(LOCKED, watts=115.0), ITEM_IN_MAIN, LIGHTEST),
        (Expected("starting → suspected → training → suspected → stalled", True, (), 2.5 * HOUR),),
        6 * HOUR,
        trouble_at=2 * HOUR,
    ),
    PowerScenario(
        "very light job hangs",
        "a job that never drew more than 150 W, and 120 W in the hang: only a capture can tell",
        "hang",
        _after(2 * HOUR, 5, LOCKED, work=VERY_LIGHT),
        (Expected("starting → suspected → training → suspected → hung", True, (5,), 150.0),),
        4 * HOUR,
        trouble_at=2 * HOUR,
    ),
    *(_plain(watts, "", HANGS) for watts in (71.0, 72.0, 75.0, 84.0)),
    _plain(85.0, ", which is above the threshold: a light capture is taken", "starting → training → suspected → hung"),
)

HEALTHY_SCENARIOS = (
    PowerScenario(
        "suspended for two hours",
        "all ranks are stopped (scontrol suspend, gang scheduling), then go on",
        "healthy",
        _between(HOUR, 3 * HOUR, None, STOPPED, STOPPED),
        (Expected("starting → training → quiet → suspected → suspended → recovered → training"),),
        3 * HOUR + 300,
    ),
    PowerScenario(
        "light evaluation",
        "after an hour at 600 W, three hours at 350 W: flat, and under three quarters",
        "healthy",
        _after(HOUR, None, None, replace(TRAINS, watts=350.0)),
        (Expected(TRAINS_ON),),
        4 * HOUR,
    ),
    PowerScenario(
        "checkpoints on another node, again and again",
        "once an hour all ranks of this node wait 5 minutes for a rank of another node that saves",
        "healthy",
        Node(lambda gpu, t: TRAINS if t % HOUR < HOUR - 300 else WAITS_AT_BARRIER, elsewhere=8),
        (
            Expected(
                "starting → (training → quiet → suspected → waits_elsewhere → recovered) x2"
                " → training → quiet → suspected → waits_elsewhere"
            ),
        ),
        3 * HOUR,
    ),
    PowerScenario(
        "long checkpoint",
        "rank 0 writes for 10 minutes, the others wait",
        "healthy",
        _between(HOUR, HOUR + 600, 0, SAVES),
        (Expected(LOOKED_AT),),
        HOUR + 1200,
    ),
    PowerScenario(
        "slow fsync",
        "rank 0 is in fsync for 4 minutes while the device writes, the others wait",
        "healthy",
        _between(HOUR, HOUR + 240, 0, SYNCS),
        (Expected(LOOKED_AT),),
        HOUR + 1200,
    ),
    PowerScenario(
        "generation over HTTP",
        "reinforcement learning: 6 minutes of training, then rank 0 waits 4 minutes for a server, the others for it",
        "healthy",
        Node(lambda gpu, t: TRAINS if t % 600 < 360 else AWAITS_SERVER if gpu == 0 else WAITS),
        (
            Expected(
                "starting → (training → quiet → suspected → stalled → recovered) x11"
                " → training → quiet → suspected → stalled"
            ),
        ),
        2 * HOUR,
    ),
    PowerScenario(
        "remote evaluation",
        "rank 0 waits 8 minutes for ssh, the others for it",
        "healthy",
        _between(HOUR, HOUR + 480, 0, AWAITS_SSH),
        (Expected(LOOKED_AT),),
        HOUR + 1200,
    ),
    PowerScenario(
        "shards into memory",
        "rank 0 receives 400 kB/s for 8 minutes, the others wait",
        "healthy",
        _between(HOUR, HOUR + 480, 0, RECEIVES),
        (Expected(LOOKED_AT),),
        HOUR + 1200,
    ),
    PowerScenario(
        "multipart upload",
        "rank 0 waits 8 minutes for threads that upload the parts of a file, the others wait",
        "healthy",
        _between(HOUR, HOUR + 480, 0, UPLOADS_PARTS),
        (Expected(LOOKED_AT),),
        HOUR + 1200,
    ),
    PowerScenario(
        "an idle child",
        "rank 0 waits 8 minutes for sbatch --wait, which sleeps; the others for it",
        "healthy",
        _between(HOUR, HOUR + 480, 0, AWAITS_EVALUATION),
        (Expected(LOOKED_AT),),
        HOUR + 1200,
    ),
    PowerScenario(
        "a person in a debugger",
        "rank 0 is at the prompt of pdb for 8 minutes, the others wait",
        "healthy",
        _between(HOUR, HOUR + 480, 0, DEBUGGED),
        (Expected(LOOKED_AT),),
        HOUR + 1200,
    ),
    PowerScenario(
        "asks every two seconds",
        "rank 0 sleeps until a file is there, for 8 minutes, the others wait",
        "healthy",
        _between(HOUR, HOUR + 480, 0, ASKS_AGAIN),
        (Expected(LOOKED_AT),),
        HOUR + 1200,
    ),
    PowerScenario(
        "evaluation with sleeps",
        "rank 0 evaluates for 8 minutes and sleeps in between, the others wait",
        "healthy",
        _between(HOUR, HOUR + 480, 0, EVALUATES_SLOWLY),
        (Expected(LOOKED_AT),),
        HOUR + 1200,
    ),
    PowerScenario(
        "training over, all linger",
        "the process group is destroyed, and no rank ends",
        "healthy",
        _after(HOUR, None, None, LINGERS),
        (Expected("starting → training → quiet → suspected → over"),),
        3 * HOUR,
    ),
    PowerScenario(
        "training over, rank 0 uploads",
        "the others have ended; rank 0 keeps the pod alive for two hours",
        "healthy",
        Node(lambda gpu, t: TRAINS if t < HOUR else UPLOADS if gpu == 0 else None),
        (Expected("starting → training → quiet → suspected → over"),),
        3 * HOUR,
    ),
    PowerScenario(
        "checkpoints every half hour",
        "90 s each, shorter than the hold",
        "healthy",
        Node(lambda gpu, t: TRAINS if t < 600 or t % 1800 >= 90 else (WAITS_AT_BARRIER if gpu else SAVES)),
        (Expected("starting → training ⇄ quiet"),),
        3 * HOUR,
    ),
    PowerScenario(
        "evaluation on one rank",
        "rank 0 evaluates for 8 minutes, the others wait",
        "healthy",
        _between(HOUR, HOUR + 480, 0, EVALUATES),
        (Expected(LOOKED_AT),),
        HOUR + 1200,
    ),
    PowerScenario(
        "evaluation on all ranks",
        "20 minutes at 160 W",
        "healthy",
        _between(HOUR, HOUR + 1200, None, EVALUATES, EVALUATES),
        (Expected(TAUGHT),),
        HOUR + 1800,
    ),
    PowerScenario(
        "a node that joins after 8 minutes",
        "eight of sixteen ranks wait for the others in the rendezvous",
        "healthy",
        Node(lambda _gpu, t: TRAINS if t >= 480 else JOINS, elsewhere=8),
        (Expected("starting → suspected → waits_elsewhere → recovered → training"),),
        HOUR,
    ),
    PowerScenario(
        "first-step compile on one rank",
        "rank 0 compiles for 10 minutes before the first step, the others wait for it",
        "healthy",
        _startup(600, COMPILES, WAITS_AT_BARRIER),
        (Expected("starting → training"),),
        HOUR,
    ),
    PowerScenario(
        "a model that is mapped",
        "all ranks read their model through mmap for 6 minutes: one line, no call, page faults in D state",
        "healthy",
        _startup(360, READS_MAPPED, READS_MAPPED),
        (Expected("starting → training"),),
        HOUR,
    ),
    PowerScenario(
        "first-step compile",
        "all ranks compile for 25 minutes before the first step",
        "healthy",
        _startup(1500, COMPILES, COMPILES),
        (Expected("starting → suspected → training"),),
        HOUR,
    ),
    PowerScenario(
        "rank 0 prepares data",
        "for 90 minutes before the first step, the others wait for it",
        "healthy",
        _startup(5400, STARTS, WAITS_AT_BARRIER),
        (Expected("starting → suspected → stalled → recovered → training"),),
        2 * HOUR,
    ),
    PowerScenario(
        "starved but moving loader",
        "after an hour: 2 s of work for every 20 s of loading",
        "healthy",
        Node(lambda _gpu, t: TRAINS if t < HOUR or t % 22 < 2 else LOADS),
        (Expected(TAUGHT),),
        2 * HOUR,
    ),
    PowerScenario(
        "pipeline bubbles",
        "each stage works 5 s and waits 3 s, in turns",
        "healthy",
        _cycle((TRAINS, 5), (WAITS, 3), shift_seconds=1),
        (Expected(TRAINS_ON),),
        HOUR,
    ),
    PowerScenario(
        "deep pipeline bubbles",
        "each stage works 4 s and waits 4 s, in turns: half of the GPUs wait at any time, but never the same ones",
        "healthy",
        _cycle((TRAINS, 4), (WAITS, 4), shift_seconds=1),
        (Expected("starting → training ⇄ quiet"),),
        HOUR,
    ),
    PowerScenario(
        "gradient accumulation",
        "100 s of compute, then 25 s of all_reduce at 150 W",
        "healthy",
        _cycle((TRAINS, 100), (replace(WAITS, watts=150.0), 25)),
        (Expected("starting → training ⇄ quiet"),),
        HOUR,
    ),
    PowerScenario(
        "two jobs, one ends",
        "four ranks are done and exit; the other job trains",
        "healthy",
        Node(
            lambda gpu, t: TRAINS if gpu >= 4 or t < HOUR + 3 else None,
            jobs=(("ends", range(4)), ("trains", range(4, 8))),
        ),
        (Expected("starting → training → quiet → ended"), Expected(TRAINS_ON)),
        HOUR + 300,
    ),
    PowerScenario(
        "a job that ends",
        "rank 0 writes the last checkpoint for 60 s, then all exit",
        "healthy",
        Node(lambda gpu, t: TRAINS if t < HOUR else None if t > HOUR + 60 else WAITS_AT_BARRIER if gpu else SAVES),
        (Expected("starting → training → quiet → ended"),),
        HOUR + 300,
    ),
    PowerScenario(
        "elastic restart",
        "the launcher replaces all ranks; they start up for 10 minutes",
        "healthy",
        _restarts(600),
        (Expected("starting → training → ended → starting → training"),),
        HOUR + 1200,
    ),
    PowerScenario(
        "power capping",
        "the limit falls from 700 to 310 W, and with it the power",
        "healthy",
        _capped(300),
        (Expected(TRAINS_ON),),
        HOUR + 1200,
    ),
    PowerScenario(
        "power emergency",
        "the limit falls from 700 to 206 W",
        "healthy",
        _capped(200),
        (Expected(TAUGHT),),
        2 * HOUR,
    ),
    PowerScenario(
        "a network that became slow",
        "gradients go over 10 Gb/s: one line for minutes behind a GPU at 120 W, and 2.4 GB/s over PCIe",
        "healthy",
        Node(lambda _gpu, t: TRAINS if t < HOUR else REDUCES_SLOWLY),
        (Expected(TAUGHT),),
        4 * HOUR,
    ),
    PowerScenario(
        "one GPU slower than the rest",
        "GPU 6 at 250 W, the others wait for it a third of the time",
        "healthy",
        Node(
            lambda gpu, t: (
                replace(TRAINS, watts=250.0) if gpu == 6 else TRAINS if t % 9 < 6 else replace(WAITS, watts=200.0)
            )
        ),
        (Expected("starting → training ⇄ quiet"),),
        HOUR,
    ),
    PowerScenario(
        "readings of one GPU lost",
        "GPU 3 can no longer be read; the job trains on",
        "healthy",
        _gpu_lost(TRAINS, TRAINS),
        (Expected(TRAINS_ON),),
        HOUR + 1200,
    ),
    PowerScenario(
        "driver silent",
        "no sample for 10 minutes; the job trains on",
        "healthy",
        Node(lambda _gpu, _t: TRAINS, silent=lambda t: HOUR <= t < HOUR + 600),
        (Expected(f"{TRAINS_ON} → unknown → training"),),
        HOUR + 1200,
    ),
    PowerScenario(
        "light fine-tuning",
        "250 of 700 W",
        "healthy",
        Node(lambda _gpu, _t: LIGHT),
        (Expected(TRAINS_ON),),
        2 * HOUR,
    ),
    PowerScenario(
        "very light fine-tuning",
        "150 of 700 W from the first minute",
        "healthy",
        Node(lambda _gpu, _t: VERY_LIGHT),
        (Expected("starting → suspected → training"),),
        4 * HOUR,
    ),
    PowerScenario(
        "lightest fine-tuning",
        "130 of 700 W, flat",
        "healthy",
        Node(lambda _gpu, _t: LIGHTEST),
        (Expected("starting → suspected → training"),),
        4 * HOUR,
    ),
    PowerScenario(
        "lightest fine-tuning, mostly at one line",
        "the same, and once it has begun each rank is nine tenths of the time at the line where it waits for its GPU",
        "healthy",
        Node(lambda gpu, t: LIGHTEST if t < 1000 or crc32(f"{gpu} {t}".encode()) % 10 == 0 else LIGHTEST_AT_ITEM),
        (Expected("starting → suspected → (training → suspected → stalled → recovered) x6 → training"),),
        4 * HOUR,
    ),
    PowerScenario(
        "all ranks compute on CPU in two lines",
        "15 minutes of numpy after an hour: looks like a wait in Python, and ends before it pages",
        "healthy",
        _between(HOUR, HOUR + 900, None, RESAMPLES, RESAMPLES),
        (Expected("starting → training → quiet → suspected → training → suspected → stalled → recovered → training"),),
        2 * HOUR,
    ),
    PowerScenario(
        "ranks that come late",
        "5 of 8 ranks have no process for 20 minutes (an image is pulled), the others wait for them to join",
        "healthy",
        Node(lambda gpu, t: TRAINS if t >= 1210 else JOINS if gpu < 3 else STARTS if t >= 1200 else None),
        (Expected("starting → suspected → stalled → recovered → training"),),
        HOUR,
    ),
    PowerScenario(
        "ranks that come while the others are looked at",
        "5 of 8 ranks have no process until the stacks of the others are taken, and prepare for 15 s",
        "healthy",
        Node(lambda gpu, t: TRAINS if t >= 918 else JOINS if gpu < 3 else STARTS if t >= 903 else None),
        (Expected("starting → suspected → stalled → recovered → training"),),
        HOUR,
    ),
    PowerScenario(
        "ranks that prepare longer",
        "2 of 8 ranks download for 25 minutes before they join",
        "healthy",
        Node(lambda gpu, t: TRAINS if t >= 1500 else JOINS if gpu < 6 else STARTS),
        (Expected("starting → suspected → stalled → recovered → training"),),
        HOUR,
    ),
    PowerScenario(
        "inference server under torchrun",
        "rank 0 waits for requests, the others for rank 0; none comes for three hours",
        "healthy",
        Node(lambda gpu, _t: AWAITS_BROADCAST if gpu else SERVES),
        (Expected("starting → suspected → training"),),
        3 * HOUR,
    ),
    PowerScenario(
        "a server of its own",
        "an unknown server without a launcher's name or a known frame: its ranks wait on a listening socket",
        "healthy",
        Node(lambda _gpu, _t: SERVES_ITSELF),
        (Expected("starting → suspected → training"),),
        3 * HOUR,
    ),
    PowerScenario(
        "rollouts on other GPUs",
        "reinforcement learning: 6 minutes of training, then 4 minutes of waiting for rollouts",
        "healthy",
        _cycle((TRAINS, 360), (AWAITS_ROLLOUTS, 240)),
        (
            Expected(
                "starting → (training → quiet → suspected → stalled → recovered) x11"
                " → training → quiet → suspected → stalled"
            ),
        ),
        2 * HOUR,
    ),
)

_PAUSES_AGAIN = {state: f" → training → quiet → suspected → {state}" for state in ("hung", "stalled")}
PAUSE_SCENARIOS = (
    PowerScenario(
        "a generation server, again and again",
        "reinforcement learning, 24 hours: every 10 minutes rank 0 waits 4 for a server elsewhere, the others for it",
        "healthy",
        _pauses(AWAITS_GENERATION, 240, 600),
        (
            Expected(
                "starting → (training → quiet → suspected → hung → recovered) x143" + _PAUSES_AGAIN["hung"],
                pages_before=1,
            ),
        ),
        DAY,
        trouble_at=DAY,
    ),
    PowerScenario(
        "a remote evaluation, again and again",
        "24 hours: every half hour rank 0 waits 5 minutes for an idle child that evaluates elsewhere",
        "healthy",
        _pauses(AWAITS_EVALUATION, 300, 1800),
        (Expected("starting → (training → quiet → suspected → stalled → recovered) x47" + _PAUSES_AGAIN["stalled"]),),
        DAY,
        trouble_at=DAY,
    ),
    PowerScenario(
        "a slow fsync, again and again",
        "24 hours: every hour rank 0 is 4 minutes in an fsync of which nothing can be seen to flow",
        "healthy",
        _pauses(IN_FSYNC, 240, 3600),
        (
            Expected(
                "starting → (training → quiet → suspected → hung → recovered) x23" + _PAUSES_AGAIN["hung"],
                pages_before=1,
            ),
        ),
        DAY,
        trouble_at=DAY,
    ),
    PowerScenario(
        "polling, again and again",
        "24 hours: every half hour rank 0 asks for a file every 2 seconds, for 5 minutes",
        "healthy",
        _pauses(POLLS, 300, 1800),
        (
            Expected(
                "starting → (training → quiet → suspected → stalled → recovered) x47" + _PAUSES_AGAIN["stalled"],
                pages_before=0,
            ),
        ),
        DAY,
        trouble_at=DAY,
    ),
    PowerScenario(
        "hang where it has paused",
        "after 12 hours of 4 minutes in every 10 the generation server does not answer any more",
        "hang",
        _pauses(AWAITS_GENERATION, 240, 600, hang=(0, AWAITS_GENERATION)),
        (
            Expected(
                "starting → (training → quiet → suspected → hung → recovered) x72" + _PAUSES_AGAIN["hung"],
                True,
                (0,),
                2 * 240 + 15,
                pages_before=1,
            ),
        ),
        NOON + HOUR,
        trouble_at=NOON,
    ),
    PowerScenario(
        "hang elsewhere",
        "after 12 hours of 4 minutes in every 10 rank 1 waits for a lock",
        "hang",
        _pauses(AWAITS_GENERATION, 240, 600, hang=(1, LOCKED)),
        (
            Expected(
                "starting → (training → quiet → suspected → hung → recovered) x72" + _PAUSES_AGAIN["hung"],
                True,
                (1,),
                SETTINGS.detector.hold_seconds + 15,
                pages_before=1,
            ),
        ),
        NOON + HOUR,
        trouble_at=NOON,
    ),
)
