"""Which hangs page, how fast, and which healthy jobs page: hangwatch beside the rules that operators use today.

    .venv/bin/python benchmarks/detection.py [--hung 600] [--healthy 600] [--seed 1] [--runs FILE] [--write]

The runs are synthetic traces in virtual time. Each run draws a kind of hang or of healthy pause, a GPU model (power
levels measured in public reports), the noise of its power, the number of ranks, the length of its steps, and whether
its collectives can be counted. In the kinds of benchmarks/rank_programs.py, ranks have flight recorders. hangwatch's
detector, grouping and verdict are the real ones, with the default settings. The rules of operators see the same traces.

The seconds of a hang run from its start, up to 15 s after the last collective. A suspicion is the request of a capture,
which is not yet a verdict. A hung job has not paused before, except in the runs that are shown apart: there it has
saved one checkpoint. A rule has 45 minutes to find a hang. The rules see the driver's readings of the GPUs. A job logs
a line for each step. Two kinds of healthy pauses may page by design, and are counted apart: those that show no progress
at all until `hold_seconds` after the last collective, and those in which all ranks wait for one until
`stalled_hold_seconds`.
`--runs` writes one line for each run. `--write` renews docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))


from benchmarks import rank_programs, results  # noqa: E402
from benchmarks.rank_programs import Make, Works  # noqa: E402
from hangwatch.config import Settings  # noqa: E402
from hangwatch.model import GpuSample  # noqa: E402
from tests.scenarios import power, progress  # noqa: E402
from tests.scenarios.power import TRAINS, WAITS, WAITS_AT_BARRIER  # noqa: E402
from tests.scenarios.simulation import Doing, Node, play  # noqa: E402

TRAINED_SECONDS = 1000
FROZEN_SECONDS = 100  # with the 15 s since the last collective of the longest step, still below the hold of 120 s
RULES_SECONDS = 2700.0
PAGE_SECONDS = 1800.0
PAUSED_AT = 400
EARLIER_SECONDS = (30, 60, 180)
EARLY_SECONDS = 60
SHOWN_MINUTES = range(46)
HUNG, HEALTHY, LONG, PAUSED = "hung", "healthy", "longer than a hold", "hung after a pause"


class GpuModel(NamedTuple):
    """Power levels of a GPU in watts: its limit, at work, while it waits for other ranks, and idle."""

    name: str
    limit: float
    working: float
    waiting: float
    idle: float

    def scale(self, doing: Doing) -> Doing:
        """Return the activity with this model's power. The activities of the scenarios are those of an H100."""
        levels = ((0.0, 0.0), (70.0, self.idle), (120.0, self.waiting), (600.0, self.working), (700.0, self.limit))
        for (low, low_here), (high, high_here) in itertools.pairwise(levels):
            if doing.watts <= high:
                ratio = (doing.watts - low) / (high - low)
                return replace(doing, watts=low_here + ratio * (high_here - low_here))
        return replace(doing, watts=self.limit)


GPU_MODELS = (
    GpuModel("H100", 700.0, 600.0, 115.0, 70.0),
    GpuModel("A100", 400.0, 330.0, 86.0, 56.0),
    GpuModel("H20", 400.0, 380.0, 118.0, 75.0),
    GpuModel("GB200", 1200.0, 984.0, 255.0, 180.0),
    GpuModel("V100", 300.0, 270.0, 70.0, 45.0),
)


class Hang(NamedTuple):
    """A kind of hang: what its rank does (None: its process is gone), and what the others do.

    `is_hidden`: the GPUs draw as much power as at work, so only the counters show this hang.
    """

    stuck: Doing | None
    others: Doing = WAITS
    is_hidden: bool = False


HANGS = {
    "lock": Hang(power.LOCKED),
    "file lock": Hang(progress.FLOCK),
    "blocked write, D state": Hang(power.STUCK_SYNCING),
    "blocked in the driver": Hang(power.IN_DRIVER),
    "data loader": Hang(power.STUCK_LOADING),
    "stopped process": Hang(power.STOPPED),
    "dead process": Hang(None),
    **{f"stopped {name}": Hang(progress.stop_helper(doing)) for name, doing in progress.HELPED.items()},
    "endless loop": Hang(power.SPINS),
    "request without an answer": Hang(power.AWAITS_SERVER),
    "peer gone": Hang(power.PEER_GONE),
    "all ranks wait": Hang(WAITS),
    "others wait for their GPU": Hang(power.LOCKED, power.ITEM_IN_MODULE),
    "others poll the host": Hang(power.LOCKED, power.POLLS_THE_HOST),
    "all at full power": Hang(progress.LOCKED_AT_FULL_POWER, progress.WAITS_AT_FULL_POWER, is_hidden=True),
}


class Pause(NamedTuple):
    """A kind of healthy pause: what rank 0 does, what the others do, and its shortest and longest seconds."""

    odd: Doing
    others: Doing
    shortest: float
    longest: float
    begins_job: bool = False


_FREEZES = {
    "fsync": power.IN_FSYNC,
    "file lock": progress.FLOCK,
    "read in D state": power.STUCK_READING,
    "HTTP request": power.AWAITS_SERVER,
    "wait for a child": progress.AWAITS_CHILD,
    "wait for a traced child": progress.AWAITS_TRACED_CHILD,
    "wait for a local server": progress.AWAITS_ANSWER,
    "wait for a loader": progress.AWAITS_BATCH,
    "wait at 100 % GPU": progress.BEHIND_FULL_GPU,
}
_ALL_FULL = replace(TRAINS, enqueues=False)

PAUSES = {
    **{f"frozen in {name}": Pause(doing, WAITS, 20, FROZEN_SECONDS) for name, doing in _FREEZES.items()},
    "checkpoint": Pause(power.SAVES, WAITS_AT_BARRIER, 60, 840),
    "fsync, the device writes": Pause(power.SYNCS, WAITS_AT_BARRIER, 60, 840),
    "evaluation on rank 0": Pause(power.EVALUATES, WAITS_AT_BARRIER, 60, 840),
    "evaluation on all ranks": Pause(power.EVALUATES, power.EVALUATES, 60, 1800),
    "evaluation at full power": Pause(_ALL_FULL, _ALL_FULL, 60, 1800),
    "evaluation elsewhere": Pause(power.AWAITS_SSH, WAITS_AT_BARRIER, 60, 840),
    "shards into memory": Pause(power.RECEIVES, WAITS_AT_BARRIER, 60, 840),
    "upload": Pause(power.UPLOADS_PARTS, WAITS_AT_BARRIER, 60, 840),
    "polls for a file": Pause(power.ASKS_AGAIN, WAITS_AT_BARRIER, 60, 840),
    "a person in a debugger": Pause(power.DEBUGGED, WAITS_AT_BARRIER, 60, 840),
    "suspended": Pause(power.STOPPED, power.STOPPED, 60, 3600),
    "starved loader": Pause(power.LOADS, power.LOADS, 60, 1200),
    "first compile on rank 0": Pause(power.COMPILES, WAITS_AT_BARRIER, 60, 1500, begins_job=True),
    "first compile on all ranks": Pause(power.COMPILES, power.COMPILES, 60, 1500, begins_job=True),
    "download before the first step": Pause(power.STARTS, WAITS_AT_BARRIER, 60, 1500, begins_job=True),
}
_WORK_OF_ONE = (
    *("checkpoint", "fsync, the device writes", "evaluation on rank 0", "shards into memory", "upload"),
    *("evaluation elsewhere", "polls for a file", "a person in a debugger"),
)
_NOTHING_VISIBLE, _ONE_WORKS = "no visible progress, 100 to 600 s", "all wait for one rank, 14 to 60 min"
_LONG_PAUSES = (
    *((_NOTHING_VISIBLE, Pause(doing, WAITS, FROZEN_SECONDS, 600)) for doing in _FREEZES.values()),
    *((_ONE_WORKS, PAUSES[name]._replace(shortest=840, longest=3600)) for name in _WORK_OF_ONE),
)


@dataclass(frozen=True)
class Run:
    """One run. `trouble_at` is the second of the hang or pause, `end` the last second of a healthy run."""

    kind: str
    truth: str
    gpu_model: GpuModel
    node: Node
    has_counters: bool
    trouble_at: float
    end: float
    ranks: int


class Outcome(NamedTuple):
    """Results of one run, in seconds after `trouble_at`; None if it did not happen. `alarms` are those of `RULES`."""

    kind: str
    truth: str
    gpu_model: str
    has_counters: bool
    ranks: int
    suspected: float | None
    judged: float | None
    paged: float | None
    alarms: tuple[float | None, ...]


def _list_kinds(truth: str, *, has_counters: bool) -> Sequence[tuple[str, Hang | Pause | Make]]:
    """Return the kinds of runs of this truth."""
    if truth == LONG:
        return _LONG_PAUSES
    if truth == HEALTHY:
        return (*PAUSES.items(), *rank_programs.HEALTHY.items())
    hangs = ((name, hang) for name, hang in HANGS.items() if has_counters or not hang.is_hidden)
    return (*hangs, *(rank_programs.DEADLOCKS.items() if truth == HUNG else ()))


def draw(truth: str, number: int, seed: int) -> Run:
    """Return run `number` of this truth. The kinds take turns, the rest is drawn."""
    dice = random.Random(f"{seed} {truth} {number}")
    gpu_model = dice.choice(GPU_MODELS)
    ranks = dice.choice((2, 4, 8))
    gap = dice.choice((1, 1, 2, 5, 15))
    has_counters = dice.random() < 0.75 or truth == PAUSED
    noise_ratio = dice.choice((0.01, 0.03, 0.06))
    scale = functools.cache(gpu_model.scale)
    begin = float(TRAINED_SECONDS + dice.randrange(15))

    def works(t: float) -> Doing:
        return TRAINS if t % gap < 1 else _ALL_FULL

    kinds = _list_kinds(truth, has_counters=has_counters)
    kind, drawn = kinds[number % len(kinds)]
    job: rank_programs.Job | None = None
    if isinstance(drawn, Hang):
        hang, odd = drawn, dice.randrange(ranks)
        paused_seconds = EARLIER_SECONDS[number % len(EARLIER_SECONDS)] if truth == PAUSED else 0
        if paused_seconds:
            kind = f"{paused_seconds} s"
        elif hang.stuck is None and has_counters:  # its recorders show that the rank is missed
            begin, job = float(rank_programs.TRAINED_STEPS), rank_programs.stays_away("nccl", ranks, odd)

        def doing(gpu: int, t: float) -> Doing | None:
            if job is not None:
                job.doing(gpu, t)
            if PAUSED_AT <= t < PAUSED_AT + paused_seconds:
                return scale(WAITS_AT_BARRIER if gpu else power.SAVES)
            now = works(t) if t < begin else hang.stuck if gpu == odd else hang.others
            return None if now is None else scale(now)

        end = begin + PAGE_SECONDS
    elif isinstance(drawn, Pause):
        pause = drawn
        begin = 0.0 if pause.begins_job else begin
        over = begin + float(dice.randint(int(pause.shortest), int(pause.longest)))

        def doing(gpu: int, t: float) -> Doing | None:
            if begin <= t < over:
                return scale(pause.others if gpu else pause.odd)
            return scale(works(t))

        end = over + 400.0
    else:
        begin, seconds = float(rank_programs.TRAINED_STEPS), dice.randint(20, FROZEN_SECONDS)
        does = Works(dice.choice(list(rank_programs.PAUSES.values())), seconds)
        job = played = drawn(dice.choice(("gloo", "nccl")), ranks, does)

        def doing(gpu: int, t: float) -> Doing | None:
            return scale(played.doing(gpu, t))

        end = begin + (PAGE_SECONDS if truth == HUNG else seconds + 400.0)
    node = _make_node(gpu_model, noise_ratio, ranks, doing, job)
    return Run(kind, truth, gpu_model, node, has_counters, begin, end, ranks)


def _make_node(
    gpu_model: GpuModel,
    noise_ratio: float,
    ranks: int,
    doing: Callable[[int, float], Doing | None],
    job: rank_programs.Job | None,
) -> Node:
    """Return the node of a run. The counters and flight recorders are those of `job`, if its ranks run programs."""
    return Node(
        doing,
        jobs=(("job", range(ranks)),),
        limit_watts=lambda _t: gpu_model.limit,
        idle_watts=gpu_model.idle,
        noise_ratio=noise_ratio,
        **({} if job is None else {"counter": job.count, "recorders": job.read_recorders}),
    )


# --- the rules of operators -------------------------------------------------------------------------------------------

_WAITS_FOR_RANKS = {one.stacks for one in (WAITS, WAITS_AT_BARRIER, power.ITEM_IN_MODULE, power.POLLS_THE_HOST)}
_TWO_MINUTES, _TEN_MINUTES, _TWENTY_MINUTES, _HALF_HOUR = 120, 600, 1200, 1800


class Rule(NamedTuple):
    """A rule of operators: it raises an alarm when `holds` was true for `seconds` without a break."""

    name: str
    holds: Callable[[Sequence[Doing], Sequence[GpuSample]], bool]
    seconds: int


def _any_gpu(holds: Callable[[GpuSample], bool]) -> Callable[[Sequence[Doing], Sequence[GpuSample]], bool]:
    return lambda _doings, gpus: any(map(holds, gpus))


def _is_waiting(doings: Sequence[Doing], _gpus: Sequence[GpuSample]) -> bool:
    return any(doing.stacks in _WAITS_FOR_RANKS for doing in doings)


def _watts(gpu: GpuSample) -> float:
    return gpu.power_watts or 0.0


RULES = (
    Rule("GPU utilisation < 5 % for 30 min", _any_gpu(lambda gpu: (gpu.utilization_ratio or 0.0) < 0.05), _HALF_HOUR),
    Rule(
        "power < 10 % of the limit for 2 min",
        _any_gpu(lambda gpu: _watts(gpu) < 0.1 * gpu.power_limit_watts),
        _TWO_MINUTES,
    ),
    Rule("power < 150 W for 20 min", _any_gpu(lambda gpu: _watts(gpu) < 150.0), _TWENTY_MINUTES),
    Rule(
        "no step, so no log line, for 10 min", lambda doings, _: not any(one.enqueues for one in doings), _TEN_MINUTES
    ),
    Rule("collective timeout of 10 min", _is_waiting, _TEN_MINUTES),
    Rule("collective timeout of 30 min", _is_waiting, _HALF_HOUR),
)


def find_alarms(run: Run, begin: int, end: int) -> tuple[float | None, ...]:
    """Return the second of the first alarm of each rule between `begin` and `end`. They see the driver's readings."""
    noise = random.Random(run.kind)
    held = [0] * len(RULES)
    alarms: list[float | None] = [None] * len(RULES)
    for t in range(begin, end):
        doings = [doing for gpu in range(run.ranks) if (doing := run.node.doing(gpu, float(t))) is not None]
        gpus = run.node.sweep(float(t), noise).gpus
        for index, rule in enumerate(RULES):
            held[index] = held[index] + 1 if rule.holds(doings, gpus) else 0
            if alarms[index] is None and held[index] >= rule.seconds:
                alarms[index] = t - run.trouble_at
    return tuple(alarms)


# --- runs and results -------------------------------------------------------------------------------------------------


def measure(truth: str, number: int, seed: int) -> Outcome:
    """Play one run."""
    run = draw(truth, number, seed)
    job = play(run.node, run.end, Settings(), seed=number, has_counters=run.has_counters)["job"]
    is_hung = truth in (HUNG, PAUSED)
    begin, end = (run.trouble_at, run.trouble_at + RULES_SECONDS) if is_hung else (0.0, run.end)

    def after(seconds: Iterable[float]) -> float | None:
        return next((at - run.trouble_at for at in seconds if at >= begin), None)

    return Outcome(
        kind=run.kind,
        truth=truth,
        gpu_model=run.gpu_model.name,
        has_counters=run.has_counters,
        ranks=run.ranks,
        suspected=after(job.requested_at),
        judged=after(job.suspected_at),
        paged=after(job.pages),
        alarms=find_alarms(run, int(begin), int(end)),
    )


def _median(seconds: Iterable[float | None]) -> str:
    values = [value for value in seconds if value is not None]
    return f"{statistics.median(values):.0f}" if values else "none"


def _alarms(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, list[float | None]]]:
    """Yield the alarms of hangwatch and of each rule, one for each outcome."""
    yield "hangwatch: page", [one.paged for one in outcomes]
    for index, rule in enumerate(RULES):
        yield rule.name, [one.alarms[index] for one in outcomes]


def _found_by(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Yield a row for hangwatch and for each rule: the share of all hangs that it has found after each minute."""
    hung = [one for one in outcomes if one.truth == HUNG]
    for name, alarms in _alarms(hung):
        shares = (sum(at is not None and at <= 60 * minutes for at in alarms) / len(hung) for minutes in SHOWN_MINUTES)
        yield name, *(f"{share:.3f}" for share in shares)


def _comparison(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Yield a row for hangwatch and for each rule: recall, false alarms, precision, median seconds."""
    for name, alarms in _alarms(outcomes):
        pairs = list(zip(outcomes, alarms, strict=True))
        found = [alarm for one, alarm in pairs if one.truth == HUNG and alarm is not None]
        hung = sum(one.truth == HUNG for one in outcomes)
        false = sum(one.truth == HEALTHY and alarm is not None for one, alarm in pairs)
        by_design = sum(one.truth == LONG and alarm is not None for one, alarm in pairs)
        alarmed = len(found) + false + by_design
        precision = len(found) / alarmed if alarmed else 0.0
        yield name, f"{len(found)} of {hung}", str(false), str(by_design), f"{precision:.3f}", _median(found)


def _by_kind(outcomes: Sequence[Outcome], truth: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for the kinds with the same seconds: kinds, pages, to suspicion and verdict, to the page, longest."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for kind in dict.fromkeys(one.kind for one in outcomes if one.truth == truth):
        same = [one for one in outcomes if one.kind == kind and one.truth == truth]
        paged = [one.paged for one in same if one.paged is not None]
        seen = [one for one in same if one.has_counters]
        verdict = f"{_median(one.suspected for one in seen)}, {_median(one.judged for one in seen)}"
        alike.setdefault((verdict, _median(paged), f"{max(paged, default=0.0):.0f}"), []).append(kind)
    for seconds, kinds in alike.items():
        same = [one for one in outcomes if one.kind in kinds and one.truth == truth]
        paged_count = sum(one.paged is not None for one in same)
        yield ", ".join(kinds), f"{paged_count} of {len(same)}", *seconds


def _after_pause(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each length of an earlier pause: seconds to the suspicion, the verdict and the page."""
    for seconds in EARLIER_SECONDS:
        same = [one for one in outcomes if one.truth == PAUSED and one.kind == f"{seconds} s"]
        medians = (
            _median(column) for column in zip(*((one.suspected, one.judged, one.paged) for one in same), strict=True)
        )
        yield str(seconds), str(len(same)), *medians


def _report(outcomes: Sequence[Outcome]) -> tuple[results.Table, ...]:
    healthy = [one for one in outcomes if one.truth == HEALTHY]
    long = len([one for one in outcomes if one.truth == LONG])
    alarms = f"false alarms, {len(healthy)} healthy runs", f"of {long} with a long pause"
    rules = ("rule", "hangs found", *alarms, "precision of all", "median seconds")
    kinds = (
        "kind of hang",
        "paged",
        "seconds to suspicion, verdict (counter readable)",
        "seconds to the page",
        "longest",
    )
    by_design = ("healthy pause that may page by design", *(column for column in kinds[1:] if "verdict" not in column))
    return (
        results.Table(rules, tuple(_comparison(outcomes))),
        results.Table(kinds, tuple(_by_kind(outcomes, HUNG))),
        results.Table(by_design, tuple((row[0], row[1], *row[3:]) for row in _by_kind(outcomes, LONG))),
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a number of runs, at least 1")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--hung", type=_positive, default=600)
    parser.add_argument("--healthy", type=_positive, default=600)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=None)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    wanted = [(HUNG, number) for number in range(options.hung)]
    wanted += [(HEALTHY, number) for number in range(options.healthy)]
    wanted += [(LONG, number) for number in range(options.healthy // 5)]
    wanted += [(PAUSED, number) for number in range(options.hung // 5)]
    truths, numbers = zip(*wanted, strict=True)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        outcomes = list(pool.map(measure, truths, numbers, [options.seed] * len(wanted), chunksize=8))
    if options.runs is not None:
        options.runs.write_text("".join(f"{outcome}\n" for outcome in outcomes))
    hung = [one for one in outcomes if one.truth == HUNG]
    recall = sum(one.paged is not None for one in hung) / len(hung)
    false = sum(one.truth == HEALTHY and one.paged is not None for one in outcomes)
    suspicions = [one.suspected for one in hung if one.has_counters and one.suspected is not None]
    verdicts = [one.judged for one in hung if one.has_counters and one.judged is not None]
    figures = {
        "hung runs": len(hung),
        "healthy runs": options.healthy,
        "recall": round(recall, 4),
        "hangs without a page, ratio": round(1 - recall, 4),
        "false pages": false,
        "long pauses": sum(one.truth == LONG for one in outcomes),
        "pages of long pauses": sum(one.truth == LONG and one.paged is not None for one in outcomes),
        "found in 3 minutes": sum(one.paged is not None and one.paged <= 180 for one in hung) / len(hung),
        "median seconds to the suspicion, counter readable": statistics.median(suspicions),
        "median seconds to the verdict, counter readable": statistics.median(verdicts),
        "median seconds to the page": statistics.median([one.paged for one in hung if one.paged is not None]),
    }
    of_kind = {kind: [one.paged or math.inf for one in hung if one.kind == kind] for kind in {one.kind for one in hung}}
    figures["kinds of hangs without a page in a minute"] = sum(
        statistics.median(seconds) > EARLY_SECONDS for seconds in of_kind.values()
    )
    found_by = results.Table(("hangs found after minutes", *map(str, SHOWN_MINUTES)), tuple(_found_by(outcomes)))
    after_pause = tuple(_after_pause(outcomes))
    pauses, verdict_seconds = (", ".join(row[column] for row in after_pause) for column in (0, 3))
    return results.report(
        "detection",
        _report(outcomes),
        figures,
        summary=[
            f"After a checkpoint of {pauses} s, the verdict takes {verdict_seconds} s.",
            f"Of {len(of_kind)} kinds of hangs, {figures['kinds of hangs without a page in a minute']} page later than "
            f"{EARLY_SECONDS} s, by the median.",
        ],
        details=[found_by, results.Table(("checkpoint, s", "runs", "suspicion", "verdict", "page"), after_pause)],
        is_kept=options.write,
    )


if __name__ == "__main__":
    sys.exit(main())
