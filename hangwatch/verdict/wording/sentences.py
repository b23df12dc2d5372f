"""Pure: the sentences of a verdict, written for a person who was woken by them. They decide nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from statistics import median

from hangwatch import words
from hangwatch.model import Group, Grouping, Member, Motion, RankId, Waiting
from hangwatch.stacks import activity
from hangwatch.stacks.user_code import caller, is_in_user_code, own_frame
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.measurements import OddGpu
from hangwatch.verdict.scene import Scene, count_ranks
from hangwatch.verdict.wording import clauses, guidance

_SHOWN = 4


def _ids(groups: Iterable[Group]) -> list[RankId]:
    return [member.id for group in groups for member in group.members]


def busy(group: Group, *, several: bool | None = None) -> str:
    """What a group does, as a clause."""
    plural = group.size > 1 if several is None else several
    doing = clauses.does(group, several=plural)
    if group.runs_python:
        where = str(group.frames[0]) if group.frames else "its code"
        doing = f"{'are' if plural else 'is'} running Python code in {where}"
    return f"{doing}, holding the GIL" if group.waits_for in {"unknown", "gpu"} and group.holds_gil else doing


def each(groups: Sequence[Group], shown: int = _SHOWN) -> list[str]:
    """One clause per group, largest first, the rest counted."""
    doings = [busy(group) for group in groups[:shown]]
    parts = [
        f"{words.who(_ids([group]))} {doing}"
        + (_apart_from(group, groups) if doings.count(doing) > 1 else _at(group, doing))
        for group, doing in zip(groups, doings, strict=False)
    ]
    if len(groups) > shown:
        parts.append(f"{words.count(count_ranks(groups[shown:]))} in {len(groups) - shown} other places")
    return parts


def one(group: Group) -> str:
    """What one rank of a group does, with the line of the user's code: "is loading data at train.py:38".

    Where no rule knows it, the frame in which it stands.
    """
    if group.activity == "unknown" and not (group.operation or group.runs_python) and group.frames:
        return f"is in {own_frame(group) or group.frames[0]}"
    doing = busy(group, several=False)
    return f"{doing}{_at(group, doing)}"


def _at(group: Group, doing: str) -> str:
    """The line of the user's code, unless it is said already."""
    at = clauses.at(group)
    return "" if at.removeprefix(" at ") in doing else at


def _apart_from(group: Group, others: Sequence[Group]) -> str:
    """Where a group stands of which the same is said as of another one: the innermost frame that differs from one."""
    for other in others:
        if other is not group and busy(other) == busy(group):
            pairs = zip_longest(group.frames, other.frames)
            frame = next((own for own, its in pairs if own is not None and own != its), None)
            return f" in {frame}" if frame is not None else ""
    return ""


def _all(number: int, what: str = "rank") -> str:
    return f"both {what}s" if number == 2 else f"all {words.count(number, what)}"


def others_wait(others: Sequence[Group]) -> str:
    """What the ranks that are not accused do: "all 15 other ranks wait in broadcast"."""
    behind = [group for group in others if group.waits_for == "gpu"]
    kinds = (
        ("wait in", [group for group in others if group.waits]),
        ("wait for their GPUs:" if any(map(clauses.has_gpu, behind)) else "are in", behind),
        ("wait for locks or threads:", [group for group in others if group.waits_for in {"lock", "thread"}]),
    )
    verb, waiting = next(((verb, groups) for verb, groups in kinds if groups), ("are in", list(others)))
    total, rest = count_ranks(waiting), count_ranks(others)
    if rest == 1:
        return f"the other rank {clauses.does(waiting[0])}"
    share = _all(rest, "other rank") if total == rest else f"{total:,} of the {rest:,} other ranks"
    if all(group.waits_for in {"lock", "thread"} for group in waiting) and len(waiting) == 1:
        return f"{share} {clauses.does(waiting[0], several=True)}"
    return f"{share} {verb} {clauses.operations(waiting)}{_during(waiting)}"


def _during(groups: Sequence[Group]) -> str:
    phases = {activity.phase_words(group.activity, group.phase) for group in groups}
    around = phases.pop() if len(phases) == 1 else ""
    return f" {around}" if around else ""


def gone_first(finding: Finding) -> str:
    """The headline for ranks without a process that died first, and for others that are gone."""
    return gone(finding, finding.scene.gone)


def gone(finding: Finding, all_gone: Sequence[Group] = ()) -> str:
    """The headline for ranks without a process; `all_gone` are these and all others that are gone."""
    ids = _ids(finding.suspects)
    verb = "has no process any more" if len(ids) == 1 else "have no process any more"
    why = _why_gone(finding.members)
    told = {member.id for group in all_gone for member in group.members if member.died is not None}
    silent = [rank for rank in _ids(all_gone) if rank not in ids and rank not in told]
    too = f"; {words.who(silent)} {'has' if len(silent) == 1 else 'have'} none either, and nothing says why"
    return f"{words.who(ids)} {verb}{why}, while {others_wait(finding.others)}{too if silent else ''}."


def died(finding: Finding) -> str:
    """Why one is looked at first that is gone, where nothing shows that the others wait for it."""
    return f"it has no process any more{_why_gone(finding.members)}"


def _why_gone(members: Sequence[Member]) -> str:
    """In parentheses: by what they left, else by the kernel's log; empty where nothing says why."""
    died = [member for member in members if member.died is not None and not member.died.of_others]
    first = min(died, key=lambda member: member.died.unix_seconds if member.died else 0.0, default=None)
    if first is not None and first.died is not None:
        which = f"{words.who([first.id])} " if len(members) > 1 else ""
        return f" ({which}died first, at {words.utc(first.died.unix_seconds)}: {first.died.text})"
    ends = sorted({end for member in members if (end := clauses.ended_by(member))})
    return f" (by the kernel's log: {words.listing(ends[:_SHOWN])})" if ends else ""


def hung_task(finding: Finding) -> str:
    """Why one is looked at first of whom the kernel says that a thread is blocked."""
    return (
        "by the kernel's log a thread of it has been blocked in the kernel (state D) for minutes, and still is, "
        f"while {others_wait(finding.others)}"
    )


def lost_worker(finding: Finding) -> str:
    """Why one is looked at first a worker of which has crashed or was killed."""
    ranks, others = finding.suspects, finding.others
    ends = sorted({end for group in ranks for member in group.members if (end := clauses.ended_by(member))})
    return f"by the kernel's log a worker process of it has ended ({words.listing(ends)}), while {others_wait(others)}"


def blocked(finding: Finding) -> str:
    """The headline for ranks in a system call that does not return."""
    mounts = {member.silent_mount for member in finding.members if member.waits_for_mount}
    mount = next(iter(mounts)) if len(mounts) == 1 else None
    how = f"waiting in the kernel for {mount}, which gives no answer" if mount else "blocked in the kernel (state D)"
    return _held(finding, how)


def stopped(finding: Finding) -> str:
    """The headline for ranks that somebody stopped."""
    frozen = {member.frozen_cgroup for member in finding.members}
    if None not in frozen:
        return _held(finding, f"frozen (control group {words.listing(sorted(map(str, frozen)))})")
    return _held(finding, "stopped (state T: a debugger, a tracer or SIGSTOP holds it)")


def _held(finding: Finding, how: str) -> str:
    ids = _ids(finding.suspects)
    where = next((f", in {member.wchan}" for member in finding.members if member.wchan), "")
    stacks = [busy(group) for group in finding.suspects if group.frames]
    doing = f"; by its stack it {stacks[0]}" if len(ids) == 1 and stacks else ""
    verb = "is" if len(ids) == 1 else "are"
    return f"{words.who(ids)} {verb} {how}{where}{doing}; {others_wait(finding.others)}."


def mount_silent(finding: Finding) -> str:
    """The headline for ranks under whose program a file system gives no answer; `held` wait for it in the kernel."""
    shut, held = finding.scene.shut, [member for member in finding.scene.shut if member.waits_for_mount]
    mounts = sorted({member.silent_mount for member in shut if member.silent_mount is not None})
    verb = "gives" if len(mounts) == 1 else "give"
    wait = "waits" if len(held) == 1 else "wait"
    waiting = f"; {words.who([member.id for member in held])} {wait} for it in the kernel" if held else ""
    shut_out = words.who([member.id for member in shut])
    return (
        f"{words.listing(mounts)} {verb} no answer{waiting}. The Python of {shut_out} lies there, so that py-spy hangs "
        "on it and no stack can be read: mend the file system first."
    )


def deaf_master(finding: Finding) -> str:
    """The headline for rank 0 where it does something else than to serve the store."""
    ranks, others, members = finding.suspects, finding.others, finding.members
    return (
        f"{words.who(_ids(ranks))} does not listen at {_endpoint(members)}, where the others look for it: "
        f"it {'; '.join(busy(group) + clauses.at(group) for group in ranks)}; {others_wait(others)}, refused there."
        f"{clauses.may_come(members)}"
    )


def enclosed(finding: Finding) -> str:
    """The headline for ranks that wait for others where no other node can reach them."""
    ranks, of = finding.scene.enclosed, finding.scene.stacks
    places = sorted({str(member.enclosed_at) for member in ranks})
    more = f" and {len(places) - 2} more places" if len(places) > 2 else ""
    subject = _all(of) if len(ranks) == of > 1 else words.who([member.id for member in ranks])
    verb = "waits" if len(ranks) == 1 else "wait"
    return (
        f"{subject} {verb} for the others at {words.listing(places[:2])}{more}, which no other node can reach, and the "
        "job has ranks on others: correct MASTER_ADDR, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, or this node's name in "
        f"/etc/hosts.{of_this_node(finding.scene)}"
    )


def refused(finding: Finding) -> str:
    """The headline for ranks of which each attempt to connect to their store fails at once."""
    ranks, serving = finding.scene.refused, finding.scene.store_servers
    if serving:
        who = words.who([member.id for member in serving])
        where = f"{who} serves that port, so the address leads elsewhere: correct MASTER_ADDR."
    elif any(member.id.rank == 0 for member in ranks):
        where = "Rank 0 is among them: the launcher that was to serve it does not, or at another port."
    elif any(member.store is not None and member.store.is_on_loopback for member in ranks):
        where = "That address is each node's own, and rank 0 is on another one: set MASTER_ADDR to that of its node."
    else:
        where = "Rank 0, which is to serve it, is not in view: look at its node first."
    subject = words.who([ranks[0].id]) if len(ranks) == 1 else _all(len(ranks), "other rank" if serving else "rank")
    them = "it has no connection, and sleeps" if len(ranks) == 1 else "they have no connection, and sleep"
    verb = "is" if len(ranks) == 1 else "are"
    return (
        f"{subject} {verb} refused at {_endpoint(ranks)}, where the ranks of the job meet: {them} between attempts "
        f"that fail at once. {where}{of_this_node(finding.scene)}"
    )


def _endpoint(members: Iterable[Member]) -> str:
    return next((f"MASTER_ADDR:MASTER_PORT ({one.store.endpoint})" for one in members if one.store), "the store")


def undumpable(finding: Finding) -> str:
    """The headline for ranks that gave no stack, and how many on the same node gave theirs."""
    neighbours = finding.fewest_neighbours
    also = f", although {words.count(neighbours, 'other rank')} of its node could" if neighbours else ""
    return f"{words.who(_ids(finding.suspects))} cannot be dumped{also}, while {others_wait(finding.others)}."


def outside(finding: Finding) -> str:
    """The headline for ranks that are not where the others wait."""
    ranks, others = finding.suspects, finding.others
    if not any(group.motion is Motion.MOVING for group in ranks):
        return f"{words.listing(each(ranks))}, while {others_wait(others)}."
    ids = _ids(ranks)
    alone = len(ids) == 1
    doing = words.listing([busy(group, several=not alone) for group in ranks[:_SHOWN]])
    return (
        f"the job waits for {words.who(ids)}: {'it' if alone else 'they'} {doing} and still "
        f"{'moves' if alone else 'move'}; {others_wait(others)}."
    )


def moving(finding: Finding) -> str:
    """The headline for a job at work."""
    moved = f"{finding.scene.moving:,} of {words.count(finding.scene.stacks)}"
    return f"{moved} moved between the rounds, the job is at work: {'; '.join(each(finding.others))}."


def suspended(finding: Finding) -> str:
    """The headline for a job of which every rank is stopped or frozen, and what may have done that."""
    members = finding.scene.grouping.members
    who = f"{_all(len(members))} are" if len(members) > 1 else f"{words.who([members[0].id])} is"
    frozen = sorted({member.frozen_cgroup for member in members if member.frozen_cgroup})
    is_stopped = any(member.frozen_cgroup is None for member in members)
    reasons = ["scontrol suspend, a gang scheduler, `kill -STOP`, or a debugger"] if is_stopped else []
    if frozen:
        groups = "control group {} is" if len(frozen) == 1 else "control groups {} are"
        reasons += [f"{groups.format(words.listing(frozen[:_SHOWN]))} frozen"]
    return f"{who} {'stopped' if is_stopped else 'frozen'}: {'; '.join(reasons)}."


def over(finding: Finding) -> str:
    """The headline for a job whose ranks have nothing to do with each other any more."""
    doing = f"; {'; '.join(each(finding.others))}" if finding.others else ""
    return f"no rank is connected to another one or waits for one: training is over, or has not begun{doing}."


def serving(finding: Finding) -> str:
    """The headline for a service to which no request comes."""
    doing = "; ".join(each(finding.others))
    return f"all ranks wait for clients: a service without requests, and no job that trains; {doing}."


def mismatch(finding: Finding) -> str:
    """The headline for ranks that wait in different places."""
    groups, has_numbers = finding.others, finding.scene.has_numbers
    tells = (
        "what the sequence numbers tell of it is in the evidence"
        if has_numbers
        else "sequence numbers (flight recorder) can"
    )
    return (
        f"the ranks wait in {len(groups)} different places: {'; '.join(each(groups))}. "
        f"Stacks alone cannot tell who is ahead and who is behind: {tells}."
    )


def together(finding: Finding) -> str:
    """The headline for ranks that all stand at one place, and where to look."""
    return _together(finding.others[0], finding.scene) + guidance.where_to_look(finding.scene.grouping)


def _together(group: Group, scene: Scene) -> str:
    answered, world_size = scene.answered, scene.grouping.world_size
    if answered == 1 and world_size == 1:
        return f"the only rank of the job, {words.who(_ids([group]))}, {busy(group, several=False)}{_during([group])}."
    if answered == 1:
        return (
            f"only {words.who(_ids([group]))} gave a stack; it {busy(group, several=False)}. "
            "One rank alone tells nothing of the others."
        )
    return (
        f"{_all(answered)} that answered stand at the same place, no odd rank among them: "
        f"each {busy(group, several=False)}{_during([group])}."
    )


def roles(finding: Finding) -> str:
    """The headline for the sender and the receivers of one collective, and where to look."""
    groups = finding.others
    root = min(groups, key=lambda group: group.size)
    return (
        f"{_all(finding.scene.answered)} that answered wait in {clauses.operations(groups)}; "
        f"{words.who(_ids([root]))} differs only by its role in it.{guidance.where_to_look(finding.scene.grouping)}"
    )


def no_ranks(finding: Finding) -> str:
    """The headline for launchers that have started no rank."""
    launchers, groups = finding.scene.launchers, finding.scene.grouping.groups
    said = "; ".join(launcher(member) for member in launchers[:_SHOWN])
    if len(launchers) > _SHOWN:
        said = f"{said}; and {words.count(len(launchers) - _SHOWN, 'other launcher')}"
    if len(launchers) == 1 and groups[0].frames:
        said = f"{said}. By its stack it {busy(groups[0], several=False)}"
    if any(member.waiting and member.waiting.is_for_nodes for member in launchers):
        return f"{said}. Look at the nodes that are missing: does a launcher run there, with the same address and run?"
    return f"{said}."


def launcher(member: Member) -> str:
    """One launcher without ranks, as a clause: for how long, where it waits, and what its sockets show of that."""
    waiting = member.waiting
    assert waiting is not None
    where = f"pid {member.id.pid}" + (f" on {words.printable(member.id.node)}" if member.id.node else "")
    told = [where, f"run id {waiting.run_id}" if waiting.run_id else ""]
    told.append(f"{waiting.nodes} nodes wanted" if waiting.is_for_nodes else "")
    after = f" {words.duration(waiting.seconds)} after its start" if waiting.seconds is not None else ""
    clause = f"{waiting.launcher} ({', '.join(filter(None, told))}) has no rank{after}"
    if not waiting.is_for_nodes:
        return clause
    at = f" at {waiting.endpoint}" if waiting.endpoint else ""
    return f"{clause} and waits{at} for other nodes{_shown_by_sockets(waiting)}"


def _shown_by_sockets(waiting: Waiting) -> str:
    peers = words.listing(waiting.peers) if waiting.peers else ""
    if waiting.socket == "serving":
        came = f"{peers} {'is' if len(waiting.peers) == 1 else 'are'}" if peers else "nobody else is"
        return f": it serves this address itself, and {came} connected"
    answers = {
        "connected": f": it is connected to {peers}",
        "silent": f": {peers} gives no answer to its request to connect (SYN_SENT)",
        "none": ": it has no connection there (nothing serves it, its name has no address, or it has not asked yet)",
    }
    return answers.get(waiting.socket or "", "")


def cannot_tell(finding: Finding) -> str:
    """The headline where the groups allow no answer, and where to look."""
    scene, groups = finding.scene, finding.others
    where = guidance.where_to_look(scene.grouping)
    if not groups:
        return f"no rank gave a stack that tells anything.{where}"
    waiting = count_ranks(group for group in groups if group.waits)
    few = "no rank is in a wait for others that is known"
    if scene.answered * 2 < scene.existing:
        few = f"only {scene.answered:,} of {scene.existing:,} ranks answered"
    elif waiting:
        few = f"only {waiting:,} of {scene.answered:,} ranks wait for other ranks"
    return f"{few}, which is too little to accuse anybody: {'; '.join(each(groups))}.{where}"


SEQUENCE_NUMBERS = "sequence numbers (flight recorder, NCCL RAS): who is a call behind, or took another branch or group"
DIED = "whether the others wait for it: a job that goes on without a rank stands still at the next thing they share"
HUNG_TASK = "`dmesg -T | grep -A20 'blocked for more'`: where in the kernel it stands; `hangwatch check storage`"
BEHIND_CALL = "look at what is behind the call in which it stands, by the evidence: a file, a peer, a process, a lock"
NUMBERS_BELOW = (
    "which call comes next on each side (a branch, a step or a group differs); the sequence numbers in the evidence "
    "say who has come to which collective"
)
ORDERS = "what it was told last: it has not joined, so no sequence number shows it"
LOOP = (
    "what was to come to that loop, or to end it (a service without requests is idle): it has not joined, so no "
    "sequence number shows it"
)
THREAD = "what that thread does, which may wait for another rank itself"
LOCK = "whether it can go on without them: a collective inside of a lock that each rank takes never ends"
SLOW_CALL = "whether that call returns: its file system or service, state D and wchan of these ranks"


def numbers(finding: Finding) -> str:
    """What would settle it, by sequence numbers."""
    return NUMBERS_BELOW if finding.scene.has_numbers else SEQUENCE_NUMBERS


def look_at(finding: Finding) -> str:
    """What to look at where ranks are in one activity of their own, as what would settle it."""
    said = activity.known(finding.suspects[0].activity).look_at
    return f"{said[:1].lower()}{said[1:]}".rstrip(".") if said else SLOW_CALL


def native_frames(finding: Finding) -> str:
    """What shows in which call a rank stands that Python does not show."""
    return _native_frames(finding.members)


def _native_frames(members: Sequence[Member]) -> str:
    pids = [member.id.pid for member in members if member.id.pid is not None]
    return f"`hangwatch dump --native{f' --pid {pids[0]}' if pids else ''}` shows the call in which it stands"


def what_holds(finding: Finding) -> str:
    """What shows why ranks stand where they do; native frames add nothing where the kernel has named it."""
    untold = [member for member in finding.members if not clauses.tells_what_holds(member)]
    return _native_frames(untold) if untold else BEHIND_CALL


def whether_it_waits(finding: Finding) -> str:
    """What shows whether ranks still wait for a worker process that they have lost."""
    is_told = all(map(clauses.tells_call, finding.members))
    shown = "the call in which it stands" if is_told else "`hangwatch dump --native`"
    return f"whether it still waits for that worker: {shown}, and its log"


def look_first(ranks: Sequence[Group], why: str, settle: str) -> str:
    """The headline for ranks to look at first, who are not accused."""
    stop = "" if settle.endswith("?") else "."
    return f"look first at {words.who(_ids(ranks))}: {why}. What would settle it: {settle}{stop} Nobody is accused."


def named(ranks: Sequence[Group], why: str) -> str:
    """The headline for ranks that stand apart, and that the machine tells from the others, too."""
    return f"{words.who(_ids(ranks))}: {why}"


def odd_gpu(odd: OddGpu) -> str:
    """Why to check a rank whose GPU stands out, which says "its"."""
    if odd.number == "power":
        drawn = f"those of the others {min(odd.others):.0f} to {max(odd.others):.0f} W"
        return f"its GPU draws {odd.own:.0f} W, {drawn}"
    if odd.number == "utilization":
        return f"its GPU is at {odd.own:.0%}, those of the others at {median(odd.others):.0%}"
    return f"its GPU runs no kernel, those of the others on {ratios(odd.others)} of their SMs"


def ratios(values: Sequence[float]) -> str:
    """The lowest and the highest of some ratios: "0.5%", "0.1% to 2.0%"."""
    low, high = f"{min(values):.1%}", f"{max(values):.1%}"
    return low if low == high else f"{low} to {high}"


def stuck_task(member: Member) -> str:
    """Why to look at a rank whose main thread stands as those of all others do."""
    rounds = words.count(member.rounds, "round")
    return f"a task of its ThreadPoolExecutor stands in {member.task}, code of the program itself, in each of {rounds}"


def stands_apart(finding: Finding) -> str:
    """Ranks that do something of their own, and what the others wait for."""
    ranks, others = finding.suspects, finding.others
    return f"{'; '.join(map(_alone, ranks))}, while {others_wait(others)}{_call(others)}"


def _alone(group: Group) -> str:
    own = own_frame(group)
    it, ending = ("it", "s") if group.size == 1 else ("they", "")
    if own is not None and is_in_user_code(group) and group.waits_for in {"unknown", "gpu"}:
        phase = f" {around}" if (around := activity.phase_words(group.activity, group.phase)) else ""
        return f"{it} stand{ending} in {own}, code of the program itself{phase}"
    return f"{it} {clauses.does(group, several=group.size > 1)}{clauses.at(group)}"


def _call(groups: Sequence[Group]) -> str:
    return clauses.at(groups[0]) if len(groups) == 1 else ""


def other_call(finding: Finding) -> str:
    """Ranks in another wait than the others, both sides."""
    ranks, others = finding.suspects, finding.others
    return f"{'; '.join(map(_alone, ranks))}; {others_wait(others)}{_call(others)}"


def other_line(finding: Finding) -> str:
    """Ranks at another line of the same functions."""
    ranks, others = finding.suspects, finding.others
    rest = words.listing([f"{words.who(_ids([group]))} at {line}" for group, line in _lines((*ranks, *others))[1:]])
    it = "it stands" if count_ranks(ranks) == 1 else "they stand"
    return f"{it} at {_lines((*ranks, *others))[0][1]}, {rest}, in the same functions"


def parted(finding: Finding) -> str:
    """The headline for ranks that stand in the same functions, at lines that differ."""
    groups = finding.others
    stand = [f"{words.who(_ids([group]))} at {line}" for group, line in _lines(groups)]
    doing = busy(groups[0], several=True)
    return f"all ranks {doing}, but not at the same place: {words.listing(stand)}."


def _lines(groups: Sequence[Group]) -> list[tuple[Group, str]]:
    """The innermost line of the user's code that is not the same for all."""
    stacks = [group.members[0].user_frames for group in groups]
    differs = next((depth for depth, same in enumerate(zip(*stacks, strict=False)) if len(set(same)) > 1), 0)
    return [(group, clauses.place(stack[differs])) for group, stack in zip(groups, stacks, strict=True)]


def without_a_thread(finding: Finding) -> str:
    """Ranks whose main thread stands where all others' do, but without a thread in a collective."""
    ranks, others = finding.suspects, finding.others
    has = "it has" if count_ranks(ranks) == 1 else "they have"
    inside = {thread.frames[0].function for group in others for thread in group.threads[:1] if thread.frames}
    where = f" ({min(inside)})" if len(inside) == 1 else ""
    return f"{has} no thread in a collective, as {words.who(_ids(others))} have{where}; all main threads stand alike"


def holds_lock(finding: Finding) -> str:
    """Ranks that hold a lock for which others wait, and what they do in the meantime."""
    ranks, others = finding.suspects, finding.others
    held = {(member.id.node, member.id.pid) for group in ranks for member in group.members}
    locks = [(member.id, member.file_lock) for group in others for member in group.members if member.file_lock]
    found = [(rank, lock.path) for rank, lock in locks if (rank.node, lock.holder_pid) in held]
    waiting, path = [rank for rank, _ in found], found[0][1]
    it, hold = ("it", "holds") if count_ranks(ranks) == 1 else ("they", "hold")
    doing = words.listing([clauses.does(group, several=count_ranks(ranks) > 1) + clauses.at(group) for group in ranks])
    verb = "waits" if len(waiting) == 1 else "wait"
    return f"{it} {hold} the lock of {path}, for which {words.who(waiting)} {verb}, and {doing}"


def has_not_joined(finding: Finding) -> str:
    """Ranks that wait for whatever comes from outside, while others have gone on."""
    ranks, others = finding.suspects, finding.others
    it, has = ("it", "has") if count_ranks(ranks) == 1 else ("they", "have")
    doing = words.listing([clauses.does(group, several=count_ranks(ranks) > 1) + clauses.at(group) for group in ranks])
    joined = f"{clauses.operations(others)}{_call(others)}"
    return f"{it} {doing}, and {has} not joined {joined}, {_where_others_wait(others)}"


def _where_others_wait(others: Sequence[Group]) -> str:
    return f"where {words.who(_ids(others))} {'waits' if count_ranks(others) == 1 else 'wait'}"


def awaits_orders(finding: Finding) -> str:
    """Ranks that wait to be told what to do, while others have gone on."""
    ranks, others = finding.suspects, finding.others
    loop = caller(ranks[0].frames)
    it, wait, have = ("it", "waits", "has") if count_ranks(ranks) == 1 else ("they", "wait", "have")
    return (
        f"{it} {wait} for the next order in {loop}, and {have} not joined {clauses.operations(others)}{_call(others)}, "
        f"{_where_others_wait(others)}"
    )


def low_power(finding: Finding) -> str:
    """Ranks whose GPUs draw less than those of the others, which work."""
    ranks, others = finding.suspects, finding.others
    own, rest = ([m.power_watts or 0.0 for g in groups for m in g.members] for groups in (ranks, others))
    works = f"those of {words.who(_ids(others))} work ({min(rest):.0f} W and more)"
    return f"{'; '.join(map(_alone, ranks))}, with {max(own):.0f} W or less on the GPU, while {works}"


def apart_too(groups: Sequence[Group]) -> str:
    """Who else stands apart, without a rule that accuses it."""
    return f" Look at others that stand apart, too: {'; '.join(each(groups))}." if groups else ""


def whole_nodes(named: Sequence[Member], grouping: Grouping) -> str:
    """That the named are all ranks in view of their nodes, where these hold several and others are not among them."""
    odd = Counter(member.id.node for member in named)
    ranks = Counter(member.id.node for member in grouping.members)
    nodes = sorted(words.printable(node) for node in odd if node is not None)
    if len(nodes) < len(odd) or len(odd) == len(ranks) or any(odd[node] < max(2, ranks[node]) for node in odd):
        return ""
    if len(nodes) > _SHOWN:
        return f" These are all ranks of {words.count(len(nodes), 'node')}: look at the nodes."
    return f" These are all ranks of {words.listing(nodes)}: look at the node{'s' if len(nodes) > 1 else ''}."


def of_this_node(scene: Scene) -> str:
    """Of which ranks a verdict speaks that was made on one node of several; empty for one on the whole job."""
    if not scene.is_part:
        return ""
    here, whole = words.count(scene.existing), f"{scene.grouping.ranks_known:,}"
    return f" This is said of the {here} on this node; the job has {whole}."
