"""The reasons to check a rank first: one function for each reason in the table of `check_first`. Pure."""

from collections.abc import Sequence

from hangwatch import words
from hangwatch.model import Group, median
from hangwatch.stacks.user_code import call_lines, find_caller
from hangwatch.verdict.findings import Finding
from hangwatch.verdict.measurements import OddGpu
from hangwatch.verdict.scene import count_ranks, lock_holder, process_of
from hangwatch.verdict.wording import clauses
from hangwatch.verdict.wording.group_text import common_line, describe_suspects, name_ranks, others_wait, rank_ids


def stopped(finding: Finding) -> str:
    """Describe ranks that are stopped or frozen."""
    it_is = words.agree(finding.members, "it is", "they are")
    return f"{it_is} {clauses.describe_stop(finding.members)}; {others_wait(finding.others)}"


def lost_worker(finding: Finding) -> str:
    """Describe ranks with a worker process that crashed or was killed."""
    ranks, others = finding.suspects, finding.others
    ends = sorted({end for group in ranks for member in group.members if (end := clauses.ended_by(member))})
    return f"it has lost a worker process (kernel log: {words.join_words(ends)}); {others_wait(others)}"


def holds_lock(finding: Finding) -> str:
    """Describe ranks that hold a file lock, and the ranks that wait for it."""
    others, members = finding.others, finding.members
    held = set(map(process_of, members))
    found = [member for group in others for member in group.members if lock_holder(member) in held]
    waiting = [member.id for member in found]
    path = next(member.waits.file_lock.path for member in found if member.waits.file_lock)
    return (
        f"{words.agree(members, 'it', 'they')} {_describe_activity(finding.suspects)} "
        f"and {words.agree(members, 'holds', 'hold')} the lock of {path}, "
        f"for which {words.name_ranks(waiting)} {words.agree(waiting, 'waits', 'wait')}"
    )


def differs_from_others(finding: Finding) -> str:
    """Describe the activity of the suspects, and the different activity in which the other ranks wait."""
    ranks, others = finding.suspects, finding.others
    return f"{describe_suspects(ranks)}; {others_wait(others)}{common_line(others)}"


def other_line(finding: Finding) -> str:
    """Describe the lines of all ranks, which are in the same functions at different lines."""
    (_, line), *rest = differing_lines((*finding.suspects, *finding.others))
    others = words.join_words([f"{name_ranks([group])} at {other}" for group, other in rest])
    return f"{words.agree(finding.members, 'it is', 'they are')} at {line}; in the same functions: {others}"


def differing_lines(groups: Sequence[Group]) -> list[tuple[Group, str]]:
    """Return each group with the innermost of its `call_lines` that is not the same in all groups."""
    stacks = [call_lines(group.members[0].stack) for group in groups]
    differs = next((depth for depth, same in enumerate(zip(*stacks, strict=False)) if len(set(same)) > 1), 0)
    return [(group, clauses.place(stack[differs])) for group, stack in zip(groups, stacks, strict=True)]


def without_a_thread(finding: Finding) -> str:
    """Describe ranks that have no thread in a collective, although all main threads are in the same place."""
    others = finding.others
    inside = {thread.frames[0].function for group in others for thread in group.threads[:1] if thread.frames}
    where = f" ({min(inside)})" if len(inside) == 1 else ""
    return (
        f"{words.agree(finding.members, 'it has', 'they have')} no thread in a collective, "
        f"but {name_ranks(others)} have{where}; the main threads are in the same place"
    )


def has_not_joined(finding: Finding) -> str:
    """Describe ranks that wait for something outside the job, and the collective in which the others wait for them."""
    it = words.agree(finding.members, "it", "they")
    return f"{it} {_describe_activity(finding.suspects)}, and {_describe_wait(finding)}"


def awaits_orders(finding: Finding) -> str:
    """Describe ranks that wait for their next order, and the collective in which the others wait for them."""
    loop = find_caller(finding.suspects[0].frames)
    it_waits = words.agree(finding.members, "it waits", "they wait")
    return f"{it_waits} for the next order in {loop}, and {_describe_wait(finding)}"


def _describe_wait(finding: Finding) -> str:
    others = finding.others
    wait = words.agree(rank_ids(others), "waits", "wait")
    joined = f"{clauses.operations(others)}{common_line(others)}"
    return f"{words.agree(finding.members, 'has', 'have')} not joined {joined}, where {name_ranks(others)} {wait}"


def _describe_activity(ranks: Sequence[Group]) -> str:
    several = count_ranks(ranks) > 1
    return words.join_words(
        [clauses.describe_activity(group, several=several) + clauses.describe_line(group) for group in ranks]
    )


def low_power(finding: Finding) -> str:
    """Describe ranks with GPUs that draw less power than the working GPUs of the other ranks."""
    ranks, others = finding.suspects, finding.others
    own, rest = ([m.gpu.power_watts or 0.0 for g in groups for m in g.members] for groups in (ranks, others))
    works = f"the GPUs of {name_ranks(others)} work ({min(rest):.0f} W or more)"
    return f"{describe_suspects(ranks)}, with {max(own):.0f} W or less on the GPU; {works}"


def odd_gpu(odd: OddGpu) -> str:
    """Return a clause on the GPU that differs: "its GPU draws 98 W, the others draw 640 to 655 W"."""
    if odd.number == "power":
        drawn = f"the others draw {min(odd.others):.0f} to {max(odd.others):.0f} W"
        return f"its GPU draws {odd.value:.0f} W, {drawn}"
    if odd.number == "utilization":
        return f"its GPU is at {odd.value:.0%}, the others are at {median(odd.others):.0%}"
    return f"its GPU runs no kernel, the others run kernels on {ratios(odd.others)} of their SMs"


def ratios(values: Sequence[float]) -> str:
    """Return the range of the ratios in percent: "0.1% to 2.0%"; one number if all are equal."""
    low, high = f"{min(values):.1%}", f"{max(values):.1%}"
    return low if low == high else f"{low} to {high}"
