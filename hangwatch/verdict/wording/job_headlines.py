"""The headlines of findings about the whole job. They name no rank. Pure."""

from itertools import islice

from hangwatch import words
from hangwatch.model import Group, Member, Waiting
from hangwatch.stacks.completed_collectives import find_completed, find_pause
from hangwatch.stacks.user_code import find_caller
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.scene import Scene, count_ranks
from hangwatch.verdict.wording import clauses, guidance, sequence_numbers
from hangwatch.verdict.wording.check_first_reasons import differing_lines
from hangwatch.verdict.wording.group_text import (
    SHOWN,
    all_of,
    describe,
    describe_each,
    describe_stack,
    during,
    name_ranks,
    rank_ids,
)
from hangwatch.verdict.wording.rank_headlines import store_endpoint


def moving(finding: Finding) -> str:
    """Return the headline for a job that progresses."""
    members = finding.scene.grouping.members
    if (completed := find_completed(members)) is not None:
        count = words.count(completed.most, "collective")
        if completed.fewest < completed.most:
            count = f"{completed.fewest:,} to {count}"
        who = "every rank" if len(members) > 1 else "the rank"
        return f"no hang: {who} completed {count} in the {completed.seconds:.2g} s between two rounds."
    moved = f"{finding.scene.moving:,} of {words.count(finding.scene.stacks)}"
    return f"{moved} progressed between the rounds, so the job is working: {'; '.join(describe_each(finding.others))}."


def no_hang_seen(finding: Finding) -> str:
    """Return the headline for a job in which no rank is overdue."""
    pause = find_pause(finding.scene.grouping.members)
    assert pause is not None
    return f"no hang seen: last collective {_seconds(pause[0])} ago, usual gap {_seconds(pause[1])}."


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else words.duration(seconds)


def suspended(finding: Finding) -> str:
    """Return the headline for a job with all ranks stopped or frozen, or with a rank stopped by a debugger."""
    members = finding.scene.grouping.members
    traced = [(member.id, member.waits.tracer) for member in members if member.waits.tracer is not None]
    if traced:
        return f"{words.traced_ranks(traced)}: the job waits for a person."
    who = f"{all_of(len(members))} are" if len(members) > 1 else f"{words.name_ranks([members[0].id])} is"
    frozen = sorted({member.waits.frozen_cgroup for member in members if member.waits.frozen_cgroup})
    is_stopped = any(member.waits.frozen_cgroup is None for member in members)
    reasons = ["scontrol suspend, a gang scheduler, `kill -STOP` or a debugger may be the cause"] if is_stopped else []
    if frozen:
        groups, are = words.agree(frozen, "control group", "control groups"), words.agree(frozen, "is", "are")
        reasons.append(f"{groups} {words.join_words(frozen[:SHOWN])} {are} frozen")
    return f"{who} {'stopped' if is_stopped else 'frozen'}: {'; '.join(reasons)}."


def no_task(finding: Finding) -> str:
    """Return the headline for a worker group of Ray without a task."""
    who = _all_have(len(finding.scene.grouping.members))
    return f"{who} no task: this worker group of Ray waits for the driver, or for another group of the same Ray job."


def _all_have(number: int) -> str:
    return f"{all_of(number)} have" if number > 1 else "the rank has"


def no_ranks(finding: Finding) -> str:
    """Return the headline for launchers that have not started any rank."""
    launchers, groups = finding.scene.launchers, finding.scene.grouping.groups
    said = "; ".join(launcher(member) for member in launchers[:SHOWN])
    if len(launchers) > SHOWN:
        said = f"{said}; and {words.count(len(launchers) - SHOWN, 'other launcher')}"
    if len(launchers) == 1 and groups[0].frames:
        said = f"{said}. According to its stack, it {describe(groups[0], several=False)}"
    if any(member.waiting and member.waiting.needs_several_nodes for member in launchers):
        return f"{said}. Check the missing nodes: does a launcher run there, with the same address and run id?"
    return f"{said}."


def launcher(member: Member) -> str:
    """Return a clause on a launcher without ranks: its waiting time, its address, and the state of its sockets."""
    waiting = member.waiting
    assert waiting is not None
    where = f"pid {member.id.pid}" + (f" on {words.printable(member.id.node)}" if member.id.node else "")
    told = [where, f"run id {waiting.run_id}" if waiting.run_id else ""]
    told.append(f"{waiting.nodes} nodes expected" if waiting.needs_several_nodes else "")
    after = f" in {words.duration(waiting.seconds)}" if waiting.seconds is not None else ""
    clause = f"{waiting.launcher} ({', '.join(filter(None, told))}) has started no rank{after}"
    if not waiting.needs_several_nodes:
        return clause
    at = f" at {waiting.endpoint}" if waiting.endpoint else ""
    return f"{clause} and waits for other nodes{at}{_describe_sockets(waiting)}"


def _describe_sockets(waiting: Waiting) -> str:
    peers = words.join_words(waiting.peers) if waiting.peers else ""
    if waiting.socket == "serving":
        came = f"{peers} {words.agree(waiting.peers, 'is', 'are')}" if peers else "no other launcher is"
        return f", which it serves; {came} connected"
    answers = {
        "connected": f": it is connected to {peers}",
        "silent": f": {peers} does not answer its connection request (SYN_SENT)",
        "none": ": it has no connection there (no process serves it, its name has no address, or it has not tried yet)",
    }
    return answers.get(waiting.socket or "", "")


def mount_silent(finding: Finding) -> str:
    """Return the headline for a file system that contains the program and does not respond."""
    shut = finding.scene.without_stack
    held = [member.id for member in shut if member.kernel.waits_for_mount]
    mounts = sorted({member.kernel.silent_mount for member in shut if member.kernel.silent_mount is not None})
    wait = words.agree(held, "waits", "wait")
    waiting = f"; {words.name_ranks(held)} {wait} for it in the kernel" if held else ""
    return (
        f"{words.join_words(mounts)} {words.agree(mounts, 'does', 'do')} not respond{waiting}. "
        f"The Python of {words.name_ranks([member.id for member in shut])} is installed there, so "
        "py-spy hangs and no stack can be read: repair the file system first."
    )


def wrong_interface(finding: Finding) -> str:
    """Return the headline for ranks that wait for others at an address that no other node can reach."""
    ranks, of = finding.scene.at_unreachable_address, finding.scene.stacks
    places = sorted({str(member.waits.enclosed_at) for member in ranks})
    more = f" and {len(places) - 2} more places" if len(places) > 2 else ""
    subject = all_of(of) if len(ranks) == of > 1 else words.name_ranks([member.id for member in ranks])
    return (
        f"{subject} {words.agree(ranks, 'waits', 'wait')} for the others at {words.join_words(places[:2])}{more}, "
        "which no other node can reach. "
        "The job has ranks on other nodes: correct MASTER_ADDR, NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME, or this "
        f"node's name in /etc/hosts.{limit_to_node(finding.scene)}"
    )


def refused(finding: Finding) -> str:
    """Return the headline for ranks that the store refuses."""
    ranks, serving = finding.scene.refused, finding.scene.store_servers
    if serving:
        names = words.name_ranks([member.id for member in serving])
        where = (
            f"{words.sentence(names)} serves that port, so the address belongs to another host: correct MASTER_ADDR."
        )
    elif any(member.id.rank == 0 for member in ranks):
        where = "Rank 0 is among them: the launcher does not serve that address, or uses another port."
    elif any(member.waits.store is not None and member.waits.store.is_on_loopback for member in ranks):
        where = "That address is local to each node: set MASTER_ADDR to the address of the node with rank 0."
    else:
        where = "Rank 0 should serve that address, but was not captured: check its node first."
    subject = (
        words.name_ranks([ranks[0].id]) if len(ranks) == 1 else all_of(len(ranks), "other rank" if serving else "rank")
    )
    return (
        f"{store_endpoint(ranks)} refuses the connections of {subject}: each attempt fails at once, and "
        f"{words.agree(ranks, 'it sleeps', 'they sleep')} between attempts. {where}{limit_to_node(finding.scene)}"
    )


def mismatch(finding: Finding) -> str:
    """Return the headline for ranks that wait in different places."""
    groups, has_numbers = finding.others, finding.scene.has_numbers
    tells = "see the sequence numbers in the evidence" if has_numbers else "compare sequence numbers (flight recorder)"
    return (
        f"no rank can be named: the ranks wait in {len(groups)} different places: {'; '.join(describe_each(groups))}. "
        f"Stacks alone do not show which ranks are ahead: {tells}."
        f"{sequence_numbers.different_operations(finding.answer)}"
    )


def servers(finding: Finding) -> str:
    """Return the headline for processes that all wait for other processes, and none in a collective."""
    groups = finding.others
    return (
        f"no rank can be named: none of these {count_ranks(groups):,} processes is in a collective: "
        f"{'; '.join(describe_each(groups))}."
    )


def at_different_lines(finding: Finding) -> str:
    """Return the headline for ranks in the same functions, at different lines."""
    groups = finding.others
    stand = [f"{name_ranks([group])} at {line}" for group, line in differing_lines(groups)]
    doing = describe(groups[0], several=True)
    return f"no rank can be named: all ranks {doing}, but at different lines: {words.join_words(stand)}."


def at_one_place(finding: Finding) -> str:
    """Return the headline for ranks that are all in one place, with hints on what to check."""
    if finding.scene.is_one_process:
        return _describe_one_process(finding.others[0], finding.scene)
    return _describe_together(finding.others[0], finding.scene) + (
        sequence_numbers.different_operations(finding.answer) or guidance.where_to_look(finding.scene.grouping)
    )


def _describe_one_process(group: Group, scene: Scene) -> str:
    """Return what the only captured process does, its system call, and what its other threads do."""
    doing = f"{describe(group, several=False)}{during([group])}{clauses.describe_line(group)}"
    threads = (f"{describe_stack(one, group)} in {find_caller(one.frames) or 'native code'}" for one in group.threads)
    member = group.members[0]
    call = f" It is blocked in {clauses.blocked_call(member, scene.grouping)}." if member.kernel.tells_object else ""
    return f"{'; '.join([f'{name_ranks([group])} {doing}', *islice(threads, SHOWN)])}.{call}"


def _describe_together(group: Group, scene: Scene) -> str:
    answered, world_size = scene.answered, scene.grouping.world_size
    if answered == 1 and world_size == 1:
        return f"the only rank of the job, {name_ranks([group])}, {describe(group, several=False)}{during([group])}."
    if answered == 1:
        return (
            f"no rank can be named: only {name_ranks([group])} has a stack; it {describe(group, several=False)}. "
            "One stack shows nothing about the other ranks."
        )
    return (
        f"no rank can be named: {all_of(answered)}{'' if answered == scene.existing else ' that responded'} "
        f"{describe(group, several=True)}{during([group])}{clauses.describe_line(group)}."
    )


def roles(finding: Finding) -> str:
    """Return the headline for the root and the other ranks of one collective, with hints on what to check."""
    groups = finding.others
    root = min(groups, key=lambda group: group.size)
    return (
        f"no rank can be named: {all_of(finding.scene.answered)} that responded wait in "
        f"{clauses.operations(groups)}; {words.name_ranks(rank_ids([root]))} differs only by its role in it."
        f"{guidance.where_to_look(finding.scene.grouping)}"
    )


def cannot_tell(finding: Finding) -> str:
    """Return the headline for groups that do not show the cause, with hints on what to check."""
    scene, groups = finding.scene, finding.others
    where = guidance.where_to_look(scene.grouping)
    if scene.have_all_ended:
        return f"{_all_have(scene.existing)} ended: no hang is shown.{limit_to_node(scene)}"
    if not groups:
        return f"no rank can be named: {_describe_no_stacks(scene)}.{where}"
    waiting = count_ranks(group for group in groups if group.waits)
    few = "no rank is known to wait for others"
    if scene.answered * 2 < scene.existing:
        few = f"only {scene.answered:,} of {scene.existing:,} ranks responded"
    elif waiting:
        few = f"only {waiting:,} of {scene.answered:,} ranks {'waits' if waiting == 1 else 'wait'} for other ranks"
    return f"no rank can be named: {few}. {words.sentence('; '.join(describe_each(groups)))}.{where}"


def _describe_no_stacks(scene: Scene) -> str:
    """Return the cause if all ranks without a stack have one cause with a known remedy, which is the next step."""
    causes = {fault.reason: fault for group in scene.grouping.groups if (fault := group.fault)}
    fault = causes.popitem()[1] if len(causes) == 1 else None
    if fault is None or not fault.remedy:
        return "no rank has a stack"
    return f"no stack could be read: {fault.detail.partition(': ')[0].removesuffix('.')}"


def limit_to_node(scene: Scene) -> str:
    """Return a sentence that only one node of several was captured; "" if the whole job was captured."""
    if not scene.is_part:
        return ""
    here, whole = words.count(scene.existing), f"{scene.grouping.expected_rank_count:,}"
    return f" This verdict is on the {here} of this node; the job has {whole}."
