"""Comparison of the sequence numbers in the logs of all ranks, to find ranks that have not joined a collective. Pure.

If ranks of a process group timed out at a number, and another rank of the group has only enqueued lower numbers, that
rank has not joined. NCCL counts point-to-point operations separately, so a group with such operations is not compared.
If there is doubt, the numbers are evidence, and no rank is checked first.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from hangwatch import words
from hangwatch.formats.log_times import Moment, earlier, first_moment
from hangwatch.limits import MOST_RANKS
from hangwatch.logs import merged_logs, rank_reports
from hangwatch.logs.rank_log import Log, Work
from hangwatch.logs.rank_reports import FEWEST_SEEN, RankWork, WorkFinding
from hangwatch.logs.work_lines import DEFAULT_GROUP, WorkLine, is_collective
from hangwatch.model import RankId, list_by_key

_SHOWN = 4
_OF_ANY_GROUP = "any group"
_UNEVEN = ("ALLTOALL", "GATHER", "SCATTER")  # their sizes may differ between ranks
_ROOTED = ("BROADCAST", "REDUCE", "GATHER", "SCATTER")  # some ranks leave these before the others have joined
# Numbers this much older than another rank's timeout still count as written after it
_CLOCK_SECONDS = 1.0


class _Standing(NamedTuple):
    """The last sequence numbers of one rank in one process group, and the call in which it waits.

    `timed_out` is the number of the operation that timed out, None if none did. `is_answer` is true if the rank wrote
    its numbers because another rank timed out. `member` is the rank's number in the group.
    """

    id: RankId
    timed_out: int | None
    timed_out_at: Moment | None
    enqueued: int
    written_at: Moment | None = None
    is_answer: bool = False
    call: WorkLine | None = None
    member: int | None = None

    @property
    def reached(self) -> int:
        """The number of the operation in which the rank waits, else that of its last one."""
        return self.enqueued if self.timed_out is None else self.timed_out

    @property
    def began_at(self) -> Moment | None:
        """The time at which the operation that timed out began."""
        seconds = self.call.ran_seconds if self.call else 0.0
        return earlier(self.timed_out_at, seconds) if self.timed_out_at and seconds else None


def read_works(source: str, rank: RankId, log: Log) -> Iterator[RankWork]:
    """Yield the sequence numbers in a log, with the rank that wrote them.

    A line contains the rank's number within a process group. It is the rank of the job only in the default group.
    """
    is_of_rank = merged_logs.is_of_process(rank)
    if rank.rank is None and log.told_rank is not None:
        rank = replace(rank, rank=log.told_rank)
    for work in log.works.values():
        told = RankId(rank=work.line.writer) if work.line.writer is not None else None
        yield RankWork(rank if is_of_rank else told, source, work)
    for difference in log.ras.compare() if log.ras else ():
        line = WorkLine("ras", name=difference.text, operation=difference.why)
        yield RankWork(None, source, Work(line._replace(processes=difference.behind), None, 0))


def find_processes(works: Sequence[RankWork]) -> Iterator[RankId]:
    """Yield the rank of each process (node and pid) in the communicator of NCCL that contains all of them."""
    members = {
        (writer.node, writer.pid): (line.enqueued, line.ranks[0])
        for writer, _, (line, *_) in sorted(works, key=lambda one: one.work.line.enqueued or 0)
        if line.kind == "setup" and line.ranks and writer is not None and writer.pid is not None
    }
    if len({rank for _, rank in members.values()}) == len(members):
        for (node, pid), (size, rank) in members.items():
            if size == len(members):
                yield RankId(node=node, pid=pid, rank=rank)


def find_gpus(works: Sequence[RankWork]) -> dict[str, RankId]:
    """Return the rank that uses each GPU, keyed by the digits of its PCI address up to the device.

    {} unless the logs show all ranks of NCCL's largest communicator. Ranks of several nodes with a GPU at one address
    are left out.
    """
    numbered = {(process.node, process.pid): process for process in find_processes(works)}
    setups = {
        (line.name[:-1], line.enqueued or 0, numbered.get((writer.node, writer.pid), writer))
        for writer, _, (line, *_) in works
        if line.kind == "setup" and line.name and writer is not None
    }
    if len({rank for *_, rank in setups}) < max((size for _, size, _ in setups), default=0):
        return {}
    users = list_by_key({(address, rank) for address, _, rank in setups})
    return {address: ranks[0] for address, ranks in users.items() if len(ranks) == 1}


def compare(works: Sequence[RankWork], world_size: int | None, ranks: Collection[int] = ()) -> list[WorkFinding]:
    """Compare the numbers of all `ranks` with logs. Return findings; those with ranks to check first come first."""
    waits: dict[RankId, set[str]] = defaultdict(set)
    for rank, _, (line, *_) in works:
        if rank is not None and line.kind == "work" and (line.timed_out is not None or line.is_own_timeout):
            waits[rank].add(_OF_ANY_GROUP if line.timed_out is None else line.group)
    is_of_job = rank_reports.is_of_job(works)
    compared = (_compare_group(group, waits, world_size, ranks, is_of_job=is_of_job) for group in _gather_groups(works))
    findings = list(filter(None, compared))
    groups = {work.line.group for _, _, work in works if work.line.kind == "work"}
    findings += rank_reports.compare_reports(works, groups, ranks)
    findings += [
        WorkFinding(line.name, line.processes, line.processes, line.operation)
        for _, _, (line, *_) in works
        if line.kind == "ras"
    ]
    sources = {rank: source for rank, source, _ in works}
    findings = [
        finding._replace(source=sources.get(finding.behind[0], finding.source)) if finding.behind else finding
        for finding in findings
    ]
    return sorted(findings, key=lambda finding: not finding.behind)


class _Group(NamedTuple):
    """The standings of the ranks of a process group. `key` is "" if the lines do not name the group.

    `are_compared` is true if the ranks have compared their calls themselves (ProcessGroupWrapper).
    """

    key: str
    name: str
    ranks: dict[RankId, _Standing]
    are_compared: bool = False


def _gather_groups(works: Sequence[RankWork]) -> list[_Group]:
    groups: dict[str, _Group] = {}
    calls: dict[tuple[RankId, int], Work] = {}
    compared = _Group("", "the group", {}, are_compared=True)
    ids = {rank.rank: rank for rank, _, _ in works if rank is not None}
    for rank, _, work in works:
        line = work.line
        if line.kind == "work" and rank is not None:
            group = groups.setdefault(line.group, _Group(line.group, line.name, {}))
            group.ranks[rank] = _update_standing(group.ranks.get(rank), rank, work)
        elif line.kind == "operation" and line.timed_out is not None and rank is not None:
            calls[rank, line.timed_out] = work
        elif line.kind == "running":
            number = -1 if line.timed_out is None else line.timed_out
            is_own = line.writer == line.ranks[0]
            caller = rank if is_own and rank else ids.get(line.ranks[0], RankId(rank=line.ranks[0]))
            if is_own or not (caller in compared.ranks or rank_reports.is_within_group(rank, line)):
                compared.ranks[caller] = _Standing(caller, number, None, number, call=line)
    for group in groups.values():
        for rank, standing in group.ranks.items():
            if standing.timed_out is not None and (rank, standing.timed_out) in calls:
                group.ranks[rank] = standing._replace(call=calls.pop((rank, standing.timed_out)).line)
    without_group = _Group("", "a process group", {})
    only = next(iter(groups.values())) if len(groups) == 1 else without_group
    for (rank, number), work in sorted(calls.items(), key=lambda item: -item[0][1]):  # the first operation counts
        place = only if rank not in only.ranks or only.ranks[rank].timed_out is None else without_group
        place.ranks[rank] = _Standing(rank, number, work.moment, number, work.moment, call=work.line)
    return [group for group in (*groups.values(), without_group, compared) if group.ranks]


def _update_standing(before: _Standing | None, rank: RankId, work: Work) -> _Standing:
    line = work.line
    is_timeout = line.timed_out is not None
    return _Standing(
        id=rank,
        timed_out=line.timed_out if is_timeout else before.timed_out if before else None,
        timed_out_at=work.moment if is_timeout else before.timed_out_at if before else None,
        enqueued=line.enqueued if line.enqueued is not None else -1,
        written_at=work.moment,
        is_answer=line.is_answer or (before.is_answer if before else False),
        member=line.ranks[0] if line.ranks else None,
    )


def _compare_group(
    group: _Group, waits: Mapping[RankId, set[str]], world_size: int | None, logged: Collection[int], *, is_of_job: bool
) -> WorkFinding | None:
    """Compare the ranks of a group. A rank with a lower number is behind; equal numbers may be of different calls."""
    timed = [standing for standing in group.ranks.values() if standing.timed_out is not None]
    if not timed:
        return None
    number = max(standing.reached for standing in timed)
    ahead = [standing for standing in timed if standing.timed_out == number]
    behind = [standing for standing in group.ranks.values() if standing.reached < number]
    with_place = all(standing.call and standing.call.place for standing in timed)
    by_call = list_by_key(
        (_describe_call(standing.call, with_place=with_place), standing.id)
        for standing in (ahead if behind and not group.are_compared else timed)
        if standing.call is not None
    )
    are_collectives = all(is_collective(standing.call.operation) for standing in timed if standing.call)
    if len(by_call) > 1 and (group.are_compared or (not behind and are_collectives)):
        return _compare_calls(group, by_call, behind, is_of_job=is_of_job)
    if group.are_compared:
        return None
    doubt = _find_doubt(group, ahead, behind, waits, world_size)
    return _find_late(group, ahead, behind, doubt, world_size, logged)


def _find_late(
    group: _Group,
    ahead: Sequence[_Standing],
    behind: Sequence[_Standing],
    doubt: str,
    world_size: int | None,
    logged: Collection[int],
) -> WorkFinding:
    names = {standing.call.operation for standing in ahead if standing.call}
    number = ahead[0].reached
    operation = f"{min(names)} #{number:,}" if len(names) == 1 else f"#{number:,}"
    ids, late = tuple(standing.id for standing in ahead), tuple(standing.id for standing in behind)
    began = first_moment(standing.began_at for standing in ahead)
    places = {standing.call.place for standing in ahead if standing.call} - {""}
    operation += f" called by {words.join_words(sorted(places)[:_SHOWN])}" if places else ""
    since = f", which began at {words.printable(began.text)}" if began else ""
    name = words.printable(group.name)
    text = f"in {name}, {words.name_ranks(ids)} timed out in {operation}{since}"
    absent = _find_absent(group.ranks, world_size, logged)
    if not behind and absent and not doubt:
        lack = f"no such line of {words.name_ranks(absent)} is in the logs"
        are_known = world_size or {rank.rank for rank in absent} <= {*logged}
        is_clear = len(absent) < FEWEST_SEEN and are_known and group.key in ("", DEFAULT_GROUP)
        why = f"{words.count(len(ids))} timed out in {operation}, and {lack}"
        return WorkFinding(
            text=f"{text}; {lack}: read its own log",
            ranks=absent,
            behind=absent if is_clear else (),
            why=why,
            is_absent=len(absent) == 1 and group.key == DEFAULT_GROUP,
        )
    if not behind:
        seen = len(group.ranks)
        if seen > 1 and not doubt:
            of = f"{seen:,} of {world_size:,}" if world_size and seen < world_size else f"all {seen:,}"
            text += f"; {of} ranks seen have joined it, and none finished: check the network and the GPUs"
        elif seen > 1:
            text += f"; the numbers show no rank to check first: {doubt}"
        return WorkFinding(text, ids, all_joined=seen > 1 and not doubt)
    numbers = words.fold(standing.reached for standing in behind if standing.reached >= 0)
    counts = f"only {numbers}" if numbers else "nothing"
    has = "has" if len(late) == 1 else "have"
    does = "timed out in" if all(standing.timed_out is not None for standing in behind) else f"{has} enqueued"
    text += f"; {words.name_ranks(late)} {does} {counts}"
    if doubt:
        return WorkFinding(f"{text}; the numbers show no rank to check first: {doubt}", (*late, *ids))
    had = f"it had enqueued {counts} when {words.count(len(ids))} timed out in it"
    return WorkFinding(
        text=text,
        ranks=(*late, *ids),
        behind=late,
        why=f"it has not joined {operation} of {name}: {had}{since}",
        since=first_moment(standing.timed_out_at for standing in ahead),
    )


def _find_absent(ranks: Iterable[RankId], world_size: int | None, logged: Collection[int]) -> tuple[RankId, ...]:
    """Return the few ranks without a line, if most ranks from 0 on have one; () if more than a quarter is absent."""
    seen = {rank.rank for rank in ranks if rank.rank is not None}
    absent = [number for number in range(world_size or max({*seen, *logged}, default=-1) + 1) if number not in seen]
    return tuple(RankId(rank=number) for number in absent) if len(absent) * 3 <= len(seen) <= MOST_RANKS else ()


def _compare_calls(
    group: _Group, by_call: Mapping[str, list[RankId]], behind: Sequence[_Standing], *, is_of_job: bool
) -> WorkFinding:
    """Return the different calls of the ranks. The lower number is behind, else a lone call counts."""
    ordered = sorted(by_call.items(), key=lambda item: (len(item[1]), item[1][0].sort_key()))
    parts = [f"{words.name_ranks(ids)} {'runs' if len(ids) == 1 else 'run'} {call}" for call, ids in ordered[:_SHOWN]]
    text = f"ranks call different collectives{f' in {words.printable(group.name)}' if group.key else ''}"
    text += f": {', '.join(parts)}"
    few, most = ordered[0][1], ordered[-1][1]
    is_clear = is_of_job and (group.are_compared or bool(group.key))
    if behind and is_clear:
        late = tuple(standing.id for standing in behind)
        return WorkFinding(f"{text}; the lower number is behind", late, late, f"it is behind: {', '.join(parts)}")
    is_clear = is_clear and len(by_call) == 2 and len(few) == 1 < len(most)
    return WorkFinding(text, tuple(few), tuple(few) if is_clear else (), f"its call differs: {', '.join(parts)}")


def _describe_call(call: WorkLine, *, with_place: bool) -> str:
    number = f" #{call.timed_out:,}" if call.timed_out is not None else ""
    is_sized = call.size and not call.operation.startswith(_UNEVEN)
    place = f" called by {call.place}" if with_place else ""
    return f"{call.operation}{number}{f' ({call.size})' if is_sized else ''}{place}"


def _find_doubt(
    group: _Group,
    ahead: Sequence[_Standing],
    behind: Sequence[_Standing],
    waits: Mapping[RankId, set[str]],
    world_size: int | None,
) -> str:
    """Return the reason why the numbers decide nothing; "" if there is no doubt."""
    calls = [standing.call for standing in group.ranks.values() if standing.call]
    if not any(standing.call for standing in ahead):
        return "the operation is not in the logs"
    if not all(is_collective(call.operation) for call in calls):
        return "point-to-point operations are counted separately"
    if len(group.ranks) < FEWEST_SEEN and len(group.ranks) != world_size:
        return f"only {words.count(len(group.ranks))} seen"
    if behind and not group.key:
        return "the lines do not name the process group"
    if any(standing.call.operation in _ROOTED for standing in behind if standing.call):
        return "a rank may leave a broadcast, reduce, gather or scatter before the others"
    members = [standing.member for standing in group.ranks.values() if standing.member is not None]
    if len(set(members)) < len(members):
        return "several process groups have this name"
    if any(waits.get(standing.id, set()) - {group.key} for standing in behind):
        return "a rank that is behind timed out itself, so it waits, too"
    if not all(standing.timed_out is not None or _is_recent(standing, ahead) for standing in behind):
        return "the last number of a rank that is behind is older than the timeout"
    return "most ranks are behind" if 2 * len(behind) > len(group.ranks) else ""


def _is_recent(standing: _Standing, timed: Sequence[_Standing]) -> bool:
    """True if the rank wrote its number as an answer to a timeout of another rank, or not before the first timeout."""
    moment = standing.written_at
    return standing.is_answer or any(
        moment.seconds >= other.timed_out_at.seconds - _CLOCK_SECONDS
        for other in timed
        if moment and other.timed_out_at and other.timed_out_at.clock == moment.clock
    )
