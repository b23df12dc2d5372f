"""Phrases that all reports share: the shown groups, their measurements, the state of the incident."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from msgspec import structs

from hangwatch.collectives import rank_records
from hangwatch.model import (
    CRASHED,
    CollectiveSeries,
    Confidence,
    Evidence,
    Fault,
    Feedback,
    Group,
    Grouping,
    Incident,
    Job,
    JobState,
    Member,
    Motion,
    ProcessDetails,
    RankId,
    Thread,
    Verdict,
)
from hangwatch.stacks.user_code import split_groups_by_line, user_frames
from hangwatch.verdict import kinds
from hangwatch.words import PROCESS_STATES, count, duration, elided, fold_ids, fold_nodes, name_ranks, printable, utc

_NAMED_LISTED = 4
_REASONS_LISTED = 4
_NO_RECORDER_EXPECTED = frozenset({"NoTorch", "ProcessGone"})
_FOLDED = 200  # characters of a list of ranks or nodes
_UNITS = {"%": 0.01, "W": 1.0, "kB/s": 1e3, "MB/s": 1e6}
_VOTES = {True: "for", False: "against", None: "context"}


def named(verdict: Verdict) -> list[str]:
    """Return the named ranks, one entry per rank; more than four as one folded entry. `["no rank"]` if none."""
    return _list_ranks(verdict.named) or ["no rank"]


def find_own_failure(verdict: Verdict) -> str:
    """Return the first failure of a named rank that its own log shows; "" if there is none."""
    failures = (evidence for evidence in verdict.evidence if evidence.kind == "log_failure")
    return next((failure.message for failure in failures if set(failure.ranks) & set(verdict.named)), "")


def heading(verdict: Verdict) -> tuple[str, str]:
    """Return the first sentence of a verdict, and the rest."""
    first, stop, rest = verdict.message.partition(". ")
    return (f"{first}.", rest) if stop else (verdict.message, "")


def judgement(verdict: Verdict) -> str:
    """Return the kind of a verdict with its meaning, and its confidence."""
    row = kinds.find(verdict.kind)
    means = f": {row.means}" if row.means else ""
    confidence = "" if verdict.confidence is Confidence.NONE else f"; {verdict.confidence.value} confidence"
    return f"{verdict.kind}{means}{confidence}"


def describe_feedback(feedback: Feedback, verdict: Verdict) -> str:
    """Return the feedback on a verdict as text, and the verdict that it is about if `verdict` is a later one."""
    culprit = f", the culprit is {name_ranks([feedback.culprit])}" if feedback.culprit else ""
    parts = [
        "the verdict was right" if feedback.is_right else f"the verdict was wrong{culprit}",
        f"cause: {feedback.cause}" if feedback.cause else "",
        f"given {utc(feedback.given_unix_seconds)} by uid {feedback.by_uid}",
    ]
    if (feedback.verdict, feedback.named) != (verdict.kind, verdict.named):
        names = name_ranks(feedback.named) if feedback.named else "no rank"
        parts.append(f"about an earlier verdict: {feedback.verdict}, which named {names}")
    return "; ".join(filter(None, parts))


def check_first(verdict: Verdict) -> list[str]:
    """Return the ranks to check first, in the same form as `named`. Empty if there are none."""
    return _list_ranks(verdict.check_first)


def _list_ranks(ids: Sequence[RankId]) -> list[str]:
    if len(ids) <= _NAMED_LISTED:
        return [name_ranks([rank]) for rank in ids]
    where = nodes(ids)
    return [f"{count(len(ids))}: {elided(fold_ids(ids), _FOLDED)}{f' on {where}' if where else ''}"]


def notes(grouping: Grouping) -> tuple[str, ...]:
    """Return the notes on the input, and the reasons why the sequence numbers of some ranks are missing."""
    return (*grouping.notes, *explain_faults("sequence numbers", _recorder_faults(grouping.members)))


def _recorder_faults(members: Iterable[Member]) -> Iterator[tuple[RankId, Fault]]:
    for member in members:
        yield from ((member.id, fault) for fault in member.recorder.faults if fault.reason not in _NO_RECORDER_EXPECTED)


def without(grouping: Grouping, job: Job | None = None) -> str:
    """Return the sources that a verdict lacked: `flight recorder (torch 2.16.0 is unknown), GPU power` of `job`."""
    members = grouping.members
    recorders = dict.fromkeys(fault.detail.partition(": ")[0] for _, fault in _recorder_faults(members))
    stacks = sum(group.size for group in grouping.groups if group.fault is not None and not group.gone)
    has_power = any(member.gpu.power_watts is not None for member in members)
    sources = [
        f"flight recorder ({'; '.join(list(recorders)[:_REASONS_LISTED])})" if recorders else "",
        f"stacks of {count(stacks)}" if stacks else "",
        "GPU power" if job is not None and job.gpu_uuids and not has_power else "",
    ]
    return ", ".join(filter(None, sources))


def explain_faults(kind: str, faults: Iterable[tuple[RankId, Fault]]) -> Iterator[str]:
    """Yield the reasons why ranks have no readings of this kind. Each reason comes once, with its ranks and remedy."""
    by_reason: dict[tuple[str, str], tuple[Fault, list[RankId]]] = {}
    for rank_id, fault in faults:
        backend = rank_records.find_library(fault)
        library = f" in {backend.replace('nccl', 'NCCL')}" if backend else ""
        by_reason.setdefault((fault.reason, library), (fault, []))[1].append(rank_id)
    for (reason, library), (fault, ids) in sorted(by_reason.items())[:_REASONS_LISTED]:
        ranks = elided(name_ranks(sorted(ids, key=RankId.sort_key)), _FOLDED)
        remedy = f"; {fault.remedy}" if fault.remedy else ""
        yield f"no {kind} of {ranks}{library}: {fault.detail} ({reason}){remedy}"


def nodes(ids: Iterable[RankId]) -> str:
    """Return the nodes of these ranks in folded form: `gpu[01-40]`. "" if no node is known."""
    names = {rank.node for rank in ids if rank.node}
    return elided(fold_nodes(names), _FOLDED) if names else ""


def group_ids(group: Group) -> list[RankId]:
    """Return the ranks of the group, sorted by rank."""
    return sorted((member.id for member in group.members), key=RankId.sort_key)


def split_groups(grouping: Grouping, verdict: Verdict) -> tuple[tuple[Group, ...], frozenset[str]]:
    """Return the groups by line, and the keys of those with a named rank, else of those with one to check first.

    Only the part of a group with the representative has its other threads: those of other ranks may be elsewhere.
    """
    with_threads = {group.members[0].id for group in grouping.groups}
    groups = tuple(
        part if part.members[0].id in with_threads else structs.replace(part, threads=())
        for part in split_groups_by_line(grouping).groups
    )
    ids = set(map(RankId.copy_from, verdict.named or verdict.check_first))
    return groups, frozenset(group.key for group in groups if any(member.id in ids for member in group.members))


def mark(verdict: Verdict) -> str:
    """Return the mark for the groups of suspects: "named", or "check first" if no rank is named."""
    return "named" if verdict.named else "check first"


def shown_groups(groups: Sequence[Group], odd: frozenset[str], limit: int) -> tuple[list[Group], list[Group]]:
    """Return the groups that a report shows, the largest first, and the groups that it only counts.

    If there are more groups than `limit`, odd groups are shown in preference to larger ones.
    """
    ordered = sorted(groups, key=lambda group: -len(group.members))
    first = {id(group) for group in sorted(ordered, key=lambda group: group.key not in odd)[:limit]}
    return [g for g in ordered if id(g) in first], [g for g in ordered if id(g) not in first]


def more_groups(rest: Sequence[Group], where: str = "see incident.json") -> str:
    """Return the sentence that counts the groups that are not shown."""
    ranks = sum(len(group.members) for group in rest)
    return f"and {count(len(rest), 'smaller group')} with {count(ranks, 'rank')}: {where}"


def own_places(groups: Iterable[Group]) -> frozenset[tuple[str, str]]:
    """Return the function and file of all frames of the user's program in the shown stacks of these groups."""
    found: set[tuple[str, str]] = set()
    for group in groups:
        own = [group.members[0].stack.user_frames] if group.members else []
        for stack in (*group.threads, *group.workers):
            own.append(user_frames(Thread(name=stack.name, thread_id="", frames=stack.frames)))
        found.update(frame.place for frames in own for frame in frames)
    return frozenset(found)


def noun(members: Sequence[Member]) -> str:
    """Return "rank", or "launcher" if the members are launchers that have started no rank."""
    return "launcher" if members and all(member.waiting for member in members) else "rank"


def motion(group: Group) -> str:
    """Return `frozen`, `moving` or `3 of 8 moving`. "" if the motion is unknown or the processes do not exist."""
    if group.gone:
        return ""
    moving = sum(member.motion is Motion.MOVING for member in group.members)
    if 0 < moving < len(group.members):
        return f"{moving} of {len(group.members)} moving"
    return "" if group.motion is Motion.UNKNOWN else group.motion.value


def numbers(members: Sequence[Member]) -> tuple[tuple[str, str], ...]:
    """Return the measurements of some ranks as pairs of name and range: ("GPU power", "95-102 W")."""
    states = Counter(
        PROCESS_STATES.get(member.kernel.state, member.kernel.state) for member in members if member.kernel.state
    )
    uses = [member.gpu.use for member in members if member.gpu.use is not None]
    wchans = Counter(
        printable(member.kernel.wchan) for member in members if member.kernel.wchan and member.kernel.wchan != "0"
    )
    ports = [member.gpu.ports for member in members if member.gpu.ports]
    readings: tuple[tuple[str, str, Iterable[float | None]], ...] = (
        ("CPU", "%", (member.usage.cpu_ratio for member in members)),
        ("I/O", "kB/s", (member.usage.io_bytes_per_second for member in members)),
        ("GPU power", "W", (member.gpu.power_watts for member in members)),
        ("GPU utilisation", "%", (member.gpu.utilization_ratio for member in members)),
        ("NVLink", "MB/s", (member.gpu.nvlink_bytes_per_second for member in members)),
        ("PCIe", "MB/s", (member.gpu.pcie_bytes_per_second for member in members)),
        ("SMs with a kernel", "%", (use.sm_ratio for use in uses)),
        ("tensor cores", "%", (use.tensor_ratio for use in uses)),
        ("GPU memory bandwidth", "%", (use.dram_ratio for use in uses)),
        ("RDMA ports of the node", "MB/s", (port.bytes_per_second for port in ports)),
    )
    rows = (
        ("state", _describe_counts(states, len(members))),
        ("wchan", _describe_counts(wchans, len(members))),
        ("GIL", _describe_gil(members)),
        *((name, _format_range(values, unit)) for name, unit, values in readings),
    )
    return tuple((name, text) for name, text in rows if text)


def vote(evidence: Evidence) -> str:
    """Return "for" if the evidence supports the verdict, "against" if it contradicts it, else "context"."""
    return _VOTES[evidence.supports]


def ranks_row(job: Job) -> str:
    """Return the number of ranks on this node: `8 ranks`, `7 ranks, 1 ended`, `3 ranks, all ended`, or `none yet`."""
    ended = sum(not one.is_worker for one in job.ended)
    if not job.ranks:
        return f"{count(ended, 'rank')}, all ended" if ended else "none yet"
    return count(len(job.ranks), "rank") + (f", {ended:,} ended" if ended else "")


def state_row(incident: Incident) -> tuple[str, str]:
    """Return the state of the job as the name and text of a row: `State` and `hung since ...`.

    For a dump by hand, return `Taken` and its time.
    """
    opened, first = utc(incident.opened_unix_seconds), utc(incident.captured_unix_seconds, "%H:%M:%S")
    page = f", paged at {utc(at, '%H:%M:%S')}" if (at := incident.paged_unix_seconds) is not None else ""
    if incident.verdict.kind == CRASHED:
        return "State", f"crashed; found {opened}"
    if incident.closed_unix_seconds is not None:
        after = duration(incident.closed_unix_seconds - incident.opened_unix_seconds)
        return "State", f"{incident.state.value} after {after}; no progress since {opened}{page}"
    if incident.timeline or incident.state is not JobState.SUSPECTED:
        return "State", f"{incident.state.value}; no progress since {opened}, first capture at {first}{page}"
    return "Taken", opened


def has_recovered(incident: Incident) -> bool:
    """True if the job works again: its verdict is about the past."""
    return incident.closed_unix_seconds is not None and incident.state in (JobState.RECOVERED, JobState.TRAINING)


def past_verdict(incident: Incident) -> Verdict:
    """Return the verdict. If the job has recovered, its message begins with that: the rest was so before."""
    if not has_recovered(incident) or incident.closed_unix_seconds is None:
        return incident.verdict
    after = duration(incident.closed_unix_seconds - incident.opened_unix_seconds)
    return structs.replace(
        incident.verdict, message=f"It works again after {after}. Before: {incident.verdict.message}"
    )


def time_out(incident: Incident) -> str:
    """Return the sentence when torch.distributed will end the job; "" if that is unknown."""
    # Imported late, because it imports the rules, which other parts of a report do not need.
    from hangwatch.verdict import timeout_forecast as ending

    forecast = ending.forecast_timeout(incident)
    if forecast is None:
        return ""
    if forecast.at_unix_seconds is None:
        return f"ends the job after {duration(forecast.seconds)} of waiting for other ranks ({forecast.source})"
    looked = incident.captures[-1].started_unix_seconds + incident.captures[-1].duration_seconds
    remaining_seconds = forecast.at_unix_seconds - looked
    if remaining_seconds <= 0:
        return f"of {duration(forecast.seconds)} had passed before this capture ({forecast.source})"
    after = duration(remaining_seconds)
    return f"ends the job at {utc(forecast.at_unix_seconds)}, {after} after this capture ({forecast.source})"


def _describe_counts(counts: Counter[str], members: int) -> str:
    if len(counts) == 1 and counts.total() == members:
        return next(iter(counts))
    return ", ".join(f"{number} {name}" for name, number in counts.most_common(4))


def _describe_gil(members: Sequence[Member]) -> str:
    holders = sum(member.stack.owns_gil is True for member in members)
    if not holders:
        return ""
    return "held" if holders == len(members) else f"held by {holders} of {len(members)}"


def _format_range(values: Iterable[float | None], unit: str) -> str:
    readings = [value / _UNITS[unit] for value in values if value is not None]
    if not readings:
        return ""
    low, high = round(min(readings)), round(max(readings))
    return f"{low} {unit}" if low == high else f"{low}-{high} {unit}"


def details(process: ProcessDetails) -> Iterator[str]:
    """Yield the details of a process, one line for each kind of detail."""
    sizes = (("resident", process.resident_bytes), ("shared", process.shared_bytes), ("swapped", process.swap_bytes))
    parts = [f"{size / (1 << 20):,.0f} MiB {name}" for name, size in sizes if size is not None]
    counts = (("thread", process.threads), ("descriptor", process.descriptors))
    parts += [count(number, noun) for noun, number in counts if number is not None]
    parts += [] if process.niceness is None else [f"niceness {process.niceness}"]
    parts += [f"on CPUs {process.cpus}"] if process.cpus else []
    if parts:
        yield ", ".join(parts)
    for name in ("files", "connections", "children"):
        if listed := getattr(process, name):
            yield f"{name}: {'; '.join(listed)}"


def variables(common: Iterable[tuple[str, str]]) -> str:
    """Return the variables that are equal on all ranks, written like shell assignments."""
    return " ".join(f"{name}={value or repr(value)}" for name, value in common)


def describe_collectives(counted: CollectiveSeries) -> str:
    """Return a phrase with the collectives of a rank, and for how long it has enqueued none."""
    times, totals = counted.unix_seconds, counted.totals
    last = next((at for at, total in zip(times, totals, strict=True) if total >= totals[-1]), times[-1])
    return f"{totals[-1] - totals[0]:,.0f} collectives of a rank, none in the last {duration(times[-1] - last)}"
