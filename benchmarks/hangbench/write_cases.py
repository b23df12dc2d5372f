"""Write the cases of hangbench: write_cases.py FOLDER.

FOLDER/cases has a folder for each case, FOLDER/answers.json the right answers. The cases are numbered in a shuffled
order that is always the same, and all files have the same time, so neither names nor times tell an answer.

The stacks are those of tests/data/hangs.toml, if these have the answer: other measurements than stacks are missing, and
a rank that stands out is in no such case unless it is known to be guilty or innocent. The recorder dumps are drawn:
jobs in which one rank or two are in their own code, skip a collective, or in which all have joined; jobs in which an
innocent rank has enqueued less than others, because it waits for the guilty one outside of all groups, reads a tensor
behind its GPU, or because the guilty one skips a barrier; in kinds of their own, jobs in which a rank that waits has
enqueued as few collectives of the default group as the rank for which it waits, and steps of 1F1B on a grid of
pipeline, data and tensor ranks. All files of such a case have the same size. The traces are runs of
benchmarks/detection.py, all of the same length. A hang or a healthy pause ends them, because a trace that goes on shows
its answer. Exception: after a pause that begins the job, the job trains.
"""

from __future__ import annotations

import csv
import io
import json
import os
import random
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import detection  # noqa: E402
from hangwatch.report import dump_text  # noqa: E402
from tests import robustness  # noqa: E402
from tests.hangs import CASES  # noqa: E402
from tests.unit import test_fronts  # noqa: E402
from tests.unit.test_flight_dump import CREATED_NS, OWN, WORLD, Program, entry, recorder  # noqa: E402

RECORDER_CASES, INNOCENT_CASES, SUBGROUP_CASES, PARALLEL_CASES, TRACES = 60, 30, 30, 30, 40
RANKS = range(4)
TAKEN_UNIX_SECONDS = CREATED_NS // 10**9 + 605  # torch writes its dumps after a timeout
TRACE_SECONDS = 3700
AFTER_PAUSE_SECONDS = 400  # of a run of benchmarks/detection.py
IN_TEXT = {"ranks", "frames", "threads", "gil", "workers", "node"}
"""The keys of hangs.toml that a text of py-spy has, too."""
STACKS, RECORDERS, SUBGROUPS, PARALLEL, TRACE = ("stacks", "recorders", "subgroups", "parallel", "traces")


class Case(NamedTuple):
    """A case: its kind and name, the right answer, and its files."""

    kind: str
    name: str
    answer: Mapping[str, Any]
    files: Mapping[str, str]


def _has_answer_in_text(case: robustness.Case) -> bool:
    """True if the stacks of a case suffice: for its answer, no measurement and no world size is needed.

    False also if a rank is only to be checked first, and the case does not state if it is guilty.
    """
    row = next(row for row in CASES if row["name"] == case.name)
    is_open = "check_first" in row and not case.guilty
    return not is_open and "world_size" not in row and all(set(ranks) <= IN_TEXT for ranks in row["stands"])


def make_stacks() -> Iterator[Case]:
    for case in robustness.known_cases():
        numbers = [rank.id.rank for rank in case.ranks]
        if case.numbers != "rank" or None in numbers or not _has_answer_in_text(case):
            continue
        files = {}
        for rank in case.ranks:
            lead = dump_text.prefix(rank.id)
            lines = (line.removeprefix(lead) for line in dump_text.rank_lines(rank, "python train.py"))
            files[f"rank-{rank.id.rank}.txt"] = "".join(f"{line}\n" for line in lines)
        guilty = sorted(rank for _, rank in case.guilty if rank is not None)
        yield Case(STACKS, case.name, {"guilty": guilty}, files)


def _dump(programs: Sequence[tuple[Program, int]]) -> dict[str, str]:
    """Return the files of a case with the program of each rank, and the number of its operations that have ended."""
    return _write_dumps([recorder(rank, program, ended) for rank, (program, ended) in enumerate(programs)])


def _write_dumps(recorders: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    dumps = list(map(json.dumps, recorders))
    longest = max(map(len, dumps))
    files = {f"fr-rank-{rank}.json": dump.ljust(longest) for rank, dump in enumerate(dumps)}
    return {**files, "taken.json": json.dumps({"unix_seconds": TAKEN_UNIX_SECONDS})}


def make_recorders() -> Iterator[Case]:
    dice = random.Random("hangbench")
    for _ in range(RECORDER_CASES):
        steps, name = dice.randrange(2, 9), dice.choice(("own code", "two in own code", "skips one", "all joined"))
        count = {"own code": 1, "two in own code": 2, "skips one": 1, "all joined": 0}[name]
        guilty = sorted(dice.sample(RANKS, count))
        programs = []
        for rank in RANKS:
            program = [WORLD, OWN[rank]] * steps
            last = [] if rank in guilty else [WORLD]
            skipped = [OWN[rank]] if rank in guilty and name == "skips one" else last
            programs.append(([*program, *skipped], len(program)))
        yield Case(RECORDERS, name, {"guilty": guilty}, _dump(programs))


Operation = test_fronts.Operation
EIGHT = tuple(range(8))
BARRIER, REDUCES = Operation(EIGHT, "barrier"), Operation(EIGHT, "all_reduce")


def _dump_job(job: test_fronts.Simulation, started: Collection[int] = ()) -> dict[str, str]:
    """Return the files of a simulated job. The oldest open operation of the ranks in `started` is on their GPUs."""
    whole = tuple(range(len(job.programs)))
    others = sorted({one.group for program in job.programs for one in program} - {whole})
    job.names = {group: str(number) for number, group in enumerate((whole, *others))}
    recorders = []
    for rank in whole:
        groups = [whole, *(group for group in others if rank in group)]
        config, statuses = {}, {}
        for index, group in enumerate(groups):
            name, status = job.names[group], job._status(rank, index, group)
            config[name] = {"name": name, "desc": DESCRIPTIONS.get(name, "group"), "ranks": str(list(group))}
            statuses[str(index)] = {f"last_{what}_collective": getattr(status, f"last_{what}") for what in LAST}
        entries = [_make_entry(job, rank, place, groups) for place in range(job.enqueued[rank])]
        opened = [one for one in entries if one["state"] == "scheduled"]
        if opened and rank in started:
            opened[0]["state"] = "started"
        recorders.append({"version": "2.10", "entries": entries, "pg_config": config, "pg_status": statuses})
    return _write_dumps(recorders)


def _make_entry(
    job: test_fronts.Simulation, rank: int, place: int, groups: Sequence[tuple[int, ...]]
) -> dict[str, object]:
    record, members = job._record(rank, place, groups), len(job.programs[rank][place].group)
    is_open = {"state": "scheduled", "retired": False, "time_discovered_completed_ns": None}
    return entry(
        place,
        pg_id=record.group_id,
        process_group=(record.group_name, DESCRIPTIONS.get(record.group_name, "group")),
        collective_seq_id=record.collective_seq,
        p2p_seq_id=record.p2p_seq,
        profiling_name=record.operation,
        time_created_ns=record.created_unix_ns,
        **(is_open if record.is_open else {"time_discovered_completed_ns": record.created_unix_ns + 5}),
        is_p2p=record.is_p2p,
        input_sizes=[[4 * (members if "reduce_scatter" in record.operation else 1)]],
        output_sizes=[[4 * (members if "all_gather" in record.operation else 1)]],
    )


LAST = ("enqueued", "started", "completed")
DESCRIPTIONS = {"0": "default_pg"}


def make_innocents() -> Iterator[Case]:
    """Yield cases in which an innocent rank has enqueued less than others, or less than the guilty rank."""
    dice = random.Random("innocents of hangbench")
    for number in range(INNOCENT_CASES):
        name = ("waits outside", "skips a barrier", "reads a tensor")[number % 3]
        steps, (guilty, victim) = dice.randrange(3, 9), dice.sample(EIGHT, 2)
        programs = []
        for rank in EIGHT:
            own = Operation((rank & ~1, rank | 1), "all_reduce")
            last = [REDUCES] if name == "skips a barrier" and rank == guilty else [BARRIER, REDUCES]
            programs.append([own, REDUCES] * steps + (last + [own, REDUCES] * 4 if name != "waits outside" else []))
        job = test_fronts.Simulation(programs, [dice.randint(0, 6) for _ in EIGHT])
        at = 2 * steps
        if name == "waits outside":  # a file lock or a key of the store, which the guilty rank has not reached
            job.run({guilty: at - 1, victim: at - 2}, {})
        elif name == "skips a barrier":
            job.run({}, dict.fromkeys(EIGHT, at))
        else:  # a kernel that is not recorded holds one GPU, and the program of the victim reads a tensor behind it
            job.run({victim: at + 1}, dict.fromkeys(EIGHT, at))
        started = set(EIGHT) - {guilty} if name == "reads a tensor" else ()
        yield Case(RECORDERS, name, {"guilty": [guilty]}, _dump_job(job, started))


def make_parallel() -> Iterator[Case]:
    """Yield jobs with tensor, pipeline, expert and data parallel groups, of which programs or GPUs are behind."""
    dice = random.Random("parallel jobs of hangbench")
    for _ in range(PARALLEL_CASES):
        job, culprits = test_fronts.hang(dice, dice.choice(test_fronts.SIZES[:4]))
        (kind,) = set(culprits.values())
        yield Case(PARALLEL, f"{kind} is behind", {"guilty": sorted(culprits)}, _dump_job(job))


def make_subgroups() -> Iterator[Case]:
    """Yield cases in which one rank is in its own code, its pair waits for it, and the other pair waits for both."""
    dice = random.Random("subgroups of hangbench")
    for _ in range(SUBGROUP_CASES):
        steps, guilty = dice.randrange(2, 9), dice.choice(RANKS)
        programs = []
        for rank in RANKS:
            program = [WORLD, OWN[rank]] * steps + [WORLD]
            is_pair = OWN[rank] == OWN[guilty]
            last = [] if rank == guilty else [OWN[rank]] if is_pair else [OWN[rank], WORLD]
            programs.append(([*program, *last], len(program) + (not is_pair)))
        yield Case(SUBGROUPS, "own code, awaited in a subgroup", {"guilty": [guilty]}, _dump(programs))


def _find_end(run: detection.Run, number: int) -> float:
    """Return the last second of a trace: in the hang, or in a healthy pause that does not begin the job."""
    if run.truth == detection.HUNG:
        return run.trouble_at + random.Random(f"hang {number}").uniform(detection.RULES_SECONDS, TRACE_SECONDS - 100)
    return TRACE_SECONDS if run.trouble_at == 0 else run.end - AFTER_PAUSE_SECONDS


def make_traces() -> Iterator[Case]:
    for truth in (detection.HUNG, detection.HEALTHY):
        for number in range(TRACES // 2):
            run = detection.draw(truth, number, seed=2)
            begin = _find_end(run, number) - TRACE_SECONDS
            noise = random.Random(number)
            text = io.StringIO(newline="")
            table = csv.writer(text, lineterminator="\n")
            table.writerow(("second", "gpu", "power_watts", "utilization_ratio"))
            for second in range(TRACE_SECONDS):
                for gpu in run.node.sweep(begin + second, noise).gpus:
                    table.writerow((second, gpu.index, f"{gpu.power_watts:06.1f}", f"{gpu.utilization_ratio:.2f}"))
            yield Case(TRACE, run.kind, {"hung": truth == detection.HUNG}, {"power.csv": text.getvalue()})


def write(folder: Path) -> None:
    """Write all cases and their answers into `folder`."""
    recorders = [*make_recorders(), *make_innocents(), *make_subgroups(), *make_parallel()]
    cases = [*make_stacks(), *recorders, *make_traces()]
    random.Random("the order of hangbench").shuffle(cases)
    answers = {}
    for number, case in enumerate(cases):
        place = folder / "cases" / f"{number:03}"
        place.mkdir(parents=True)
        answers[place.name] = {"kind": case.kind, "name": case.name, **case.answer}
        for file, text in case.files.items():
            (place / file).write_text(text)
        for path in (*place.iterdir(), place):
            os.utime(path, (TAKEN_UNIX_SECONDS, TAKEN_UNIX_SECONDS))
    (folder / "answers.json").write_text(json.dumps(answers, indent=1) + "\n")


def main() -> None:
    if len(sys.argv) != 2 or Path(sys.argv[1]).exists():
        sys.exit("usage: write_cases.py FOLDER, a folder that does not exist yet")
    write(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
