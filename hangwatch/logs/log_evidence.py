"""Evidence from the logs of all ranks. The rank that fails first is to be checked first; it is never named. Pure."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hangwatch import words
from hangwatch.formats.log_times import Moment, seconds_until
from hangwatch.logs import enqueued_work, log_ends, nccl_lines, work_lines
from hangwatch.logs.failure_order import FailureKind, find_first_failure, group_failures
from hangwatch.logs.failures import Failure
from hangwatch.logs.log_ends import SHOWN, TIMES_AS_MANY, End
from hangwatch.logs.merged_logs import RankLog
from hangwatch.logs.nccl_lines import Trouble
from hangwatch.logs.rank_reports import RankWork, WorkFinding
from hangwatch.model import CheckFirst, Evidence, RankId, Supplement
from hangwatch.tables import nccl_messages

_TEXT_CHARACTERS = 160
_UNRANKED_SHOWN = 8
_LAUNCHER_SIGNAL = "launcher_signal"  # nccl_messages.toml
_SIGNALS = {"2": "2 (SIGINT, Ctrl-C)", "15": "15 (SIGTERM)", "1": "1 (SIGHUP, the terminal was closed)"}
_OF_LIVE_JOB = "Take stacks: `hangwatch dump`, or py-spy on each live rank"
_OF_DEAD_JOB = "Ranks have failed: read all logs, core files, and torch's recorder dumps (comm_lib_trace_rank_*)"
_NOT_FLUSHED = "without PYTHONUNBUFFERED=1, the last output may still be in a buffer of the process"


def supplement(
    logs: Sequence[RankLog],
    works: Sequence[RankWork] = (),
    world_size: int | None = None,
    unranked: Sequence[RankLog] = (),
) -> Supplement:
    """Return the facts in the logs of ranks, with or without stacks.

    The rank that fails first is checked first, never named. If no rank fails first, the rank that has not joined a
    collective, by the sequence numbers in `works`, is checked first. `unranked` logs are only evidence.
    """
    kinds, ends = group_failures(logs), log_ends.fold(logs)
    ranks = [log.id.rank for log in logs if log.id.rank is not None]
    numbers = enqueued_work.compare(works, world_size, ranks)
    hint = _find_hint(logs, kinds, ends, numbers, unranked) or _find_signal([*unranked, *logs])
    caveat = log_ends.caveat([log.id for log in logs if not (hint and log.failures)], log_ends.find_unwritten(logs))
    is_explained = hint or not all(kind.failure.of_others for kind in kinds)
    about = ("self", "peer", "job", *(() if kinds else ("other",)), *(() if numbers else ("timeout",)))
    troubles = {} if is_explained else nccl_lines.find_troubles([*logs, *unranked], about)
    if troubles:
        meanings = sorted({row.meaning for row in troubles.values()})[:SHOWN]
        numbered = "; ".join(["", *(finding.text for finding in numbers[:1])])
        text = f"{words.name_ranks(list(troubles))}: {words.join_words(meanings)}{numbered}"
    else:
        text = hint.text if hint else _describe_without_hint(logs, kinds, ends, unranked, numbers)
    failed = sum(len(kind.logs) for kind in kinds) if logs else sum(bool(log.failures) for log in unranked)
    advice = _OF_DEAD_JOB if failed * 2 > len(logs) else _OF_LIVE_JOB
    return Supplement(
        evidence=(
            *_evidence(logs, kinds, ends),
            *(Evidence(kind="log_numbers", message=finding.text, ranks=finding.ranks) for finding in numbers),
            *_describe_unranked_logs(unranked),
        ),
        headline=f"{words.sentence(text)}{caveat}. Logs alone cannot name a rank. {advice}",
        sentence=f"By the logs, {hint.text}{caveat}." if hint and hint.is_sure else "",
        check_first=tuple(
            CheckFirst.copy_from(rank, why=f"{hint.why}{caveat}", settle=hint.settle) for rank in hint.ranks
        )
        if hint
        else (),
        next_step=next((row.remedy for row in troubles.values()), ""),
    )


def supplement_of_live_job(logs: Sequence[RankLog], ranks_here: int) -> Supplement:
    """Return the facts in the logs of a live job with `ranks_here` ranks on this node.

    A rank that alone fails or reports a problem is checked first, if at least half of the ranks have a log. The
    sentence quotes no line of a log, because metrics and pages show it.
    """
    kinds = group_failures(logs)
    ranks = _find_first_error(kinds, logs) if len(logs) * 2 >= max(ranks_here, 3) else ()
    are = "are" if len(ranks) > 1 else "is"
    return Supplement(
        evidence=tuple(_evidence(logs, kinds, log_ends.fold(logs))),
        sentence=f"By the logs {words.name_ranks(ranks)} {are} the first with an error (see the evidence)."
        if ranks
        else "",
        check_first=ranks,
        only_if_stuck=True,
    )


def _find_first_error(kinds: Sequence[FailureKind], logs: Sequence[RankLog]) -> tuple[CheckFirst, ...]:
    """Return the ranks that failed first. If none did, return the only rank with a line of NCCL about a problem.

    There must be at least three times as many other ranks.
    """
    first, lone = find_first_failure(kinds, logs), nccl_lines.find_lone_trouble(logs, ("self", "peer"))
    if first is not None:
        hint = _hint_at_failure(first, logs)._replace(settle=f"read the end of {first.logs[0].source}")
    else:
        hint = _hint_at_trouble(lone) if lone else _Hint("", (), "", "")
    return tuple(CheckFirst.copy_from(rank, why=hint.why, settle=hint.settle) for rank in hint.ranks)


class _Hint(NamedTuple):
    """The ranks to check first. `text` is for the headline, `why` is the reason, `settle` the check that would decide.

    `ranks` is empty if too many ranks are alike. If `is_sure` is true, the hint is added to a verdict by stacks that
    names no rank.
    """

    text: str
    ranks: tuple[RankId, ...]
    why: str
    settle: str
    is_sure: bool = True


def _hint_at_failure(first: FailureKind, logs: Sequence[RankLog]) -> _Hint:
    are_few = len(first.ids) == 1 or len(first.ids) * (TIMES_AS_MANY + 1) <= len(logs)
    return _Hint(
        text=_describe_first_failure(first),
        ranks=first.ids if are_few else (),
        why=f"its log shows the first failure: {_describe_failure(first.failure)}",
        settle=f"read {words.printable(first.logs[0].source)} up to line {first.failure.number}",
    )


def _hint_at_trouble(trouble: Trouble) -> _Hint:
    row, log, message = trouble
    return _Hint(
        text=f"only the log of {words.name_ranks([log.id])} has an error of its own: {row.meaning}",
        ranks=(log.id,),
        why=f"only its log has an error: {row.meaning} ({nccl_lines.quote(message)})",
        settle=row.remedy,
    )


def _find_hint(
    logs: Sequence[RankLog],
    kinds: Sequence[FailureKind],
    ends: Sequence[End],
    numbers: Sequence[WorkFinding],
    unranked: Sequence[RankLog],
) -> _Hint | None:
    """Return the strongest hint on a rank to check first; None if there is none.

    Hints by strength: the first failure, sequence numbers, a failure without a rank if only one rank has no timeout, a
    rank that all others complain of, the end of a log. A failure of ranks that have joined a collective is not the
    reason why another rank has not joined it.
    """
    first = find_first_failure(kinds, logs)
    pointing = next((finding for finding in numbers if finding.behind), None)
    if first is not None and not (
        pointing
        and (
            seconds_until(pointing.since, first.failure.moment) > 0
            or {*first.ids} <= {*pointing.ranks} - {*pointing.behind}
        )
    ):
        return _hint_at_failure(first, logs)
    if pointing is not None:
        return _Hint(
            text=pointing.text,
            ranks=pointing.behind,
            why=pointing.why,
            settle=f"read {words.printable(pointing.source)} before that time, or dump its stack "
            "(`hangwatch dump --pid N`)",
        )
    unknown_failures = [
        (failure, log.source) for log in unranked for failure in log.failures[:1] if not failure.of_others
    ]
    if len(unknown_failures) == 1 and (absent := next((finding for finding in numbers if finding.is_absent), None)):
        (failure, source), *_ = unknown_failures
        why = f"{absent.why}; one failure is of an unknown rank: {_describe_failure(failure)}"
        return _Hint(why, absent.ranks, why, f"read {words.printable(source)} up to line {failure.number}")
    have_joined = any(finding.all_joined for finding in numbers)
    if lone := nccl_lines.find_lone_trouble(logs, ("self", "peer") if have_joined else ("self",)):
        return _hint_at_trouble(lone)
    if have_joined:
        return None
    if (silent := _find_silent(logs, kinds)) is not None:
        return silent
    behind = log_ends.find_behind(ends)
    if behind is None or work_lines.parse(behind.text):  # a number that the watchdog wrote is not a step of the program
        return None
    why = f"its log ends at '{log_ends.shorten(behind.text)}', before the other logs"
    text = f"the log of {words.name_ranks(behind.ids)} ends before the other logs: {log_ends.describe_ends(ends)}"
    return _Hint(text, behind.ids, why, f"dump its stack (`hangwatch dump --pid N`): {_NOT_FLUSHED}", is_sure=False)


def _find_silent(logs: Sequence[RankLog], kinds: Sequence[FailureKind]) -> _Hint | None:
    """Return a hint on the few ranks without a failure, if all other ranks report failures of others; else None.

    The hint is sure if the logs of these ranks continue until after such a report. If they end before, these ranks
    hang, or were ended before they could write: by torchrun, after all others have timed out.
    """
    others = [log for log in logs if log.failures and not log.failures[0].text.startswith("exit code -15 ")]
    have_timed_out = all("timed out" in log.failures[0].text.lower() for log in others)
    silent = [log for log in logs if not log.failures or (have_timed_out and log not in others)]
    complaining = len(logs) - len(silent)
    if not 0 < TIMES_AS_MANY * len(silent) <= complaining or not all(kind.failure.of_others for kind in kinds):
        return None
    lasts = [log.last.moment if log.last else None for log in silent]
    goes_on = all(any(seconds_until(kind.failure.moment, last) > 0 for kind in kinds) for last in lasts)
    ids = tuple(log.id for log in silent)
    return _Hint(
        text=f"all {words.count(complaining)} with a failure blame others; no failure of {words.name_ranks(ids)}",
        ranks=ids,
        why=f"all other ranks blame others, and its log {'continues' if goes_on else 'ends'} without a failure",
        settle=f"read {silent[0].source}",
        is_sure=goes_on,
    )


def _find_signal(logs: Sequence[RankLog]) -> _Hint | None:
    """Return a hint on the signal by which a person or a scheduler has ended the launcher; None without a signal."""
    signals = {log.messages[_LAUNCHER_SIGNAL].value for log in logs if _LAUNCHER_SIGNAL in log.messages}
    if not signals:
        return None
    names = words.join_words([f"signal {_SIGNALS.get(number, number)}" for number in sorted(signals)[:SHOWN]])
    return _Hint(f"the launcher got {names}: a person or the scheduler ended the job", (), "", "")


def _describe_without_hint(
    logs: Sequence[RankLog],
    kinds: Sequence[FailureKind],
    ends: Sequence[End],
    unranked: Sequence[RankLog],
    numbers: Sequence[WorkFinding],
) -> str:
    """Return a summary of logs that show no rank to check first: their numbers, or their failures and their ends.

    If no rank has a failure of its own, one in a log of an unknown rank comes first, unless all blame others.
    """
    own_failures = sum(not kind.failure.of_others for kind in kinds)
    unowned = [_own_or_first(log.failures) for log in unranked if log.failures]
    if unowned and not own_failures and (not _own_or_first(unowned).of_others or not (kinds or numbers)):
        return f"{words.count(len(unranked), 'log')} of unknown ranks: {_describe_failure(_own_or_first(unowned))}"
    if numbers and not own_failures:
        return numbers[0].text
    if own_failures:
        failures = f"it is unknown which of {words.count(own_failures, 'failure')} was first"
    elif kinds:
        failures = f"each failure blames other ranks: {_describe_failure(kinds[0].failure)}"
    else:
        failures = "none reports a failure"
    if not logs:
        return f"{words.count(len(unranked), 'log')} of unknown ranks: {failures}"
    return f"logs of {words.count(len(logs))}: {failures}{f'; {log_ends.describe_ends(ends)}' if ends else ''}"


def _own_or_first(failures: Sequence[Failure]) -> Failure:
    """Return the first failure that does not blame other ranks, else the first one."""
    return next((failure for failure in failures if not failure.of_others), failures[0])


# --- the first failure -----------------------------------------------------------------------------------------------


def _describe_first_failure(first: FailureKind) -> str:
    """Return a clause on the first failure: `first to fail: rank 7 at 2026-...: ValueError: ...`."""
    failure, ids = first.failure, first.ids
    several = f", {words.count(len(ids))} alike," if len(ids) > 1 else ""
    when = _describe_time(failure.moment) + (f" ({first.order})" if first.order else "")
    return f"first to fail: {words.name_ranks(ids[:1])}{several}{when}: {_describe_failure(failure)}"


def _describe_failure(failure: Failure) -> str:
    where = f", in {failure.where}" if failure.where else ""
    return f"{log_ends.shorten(failure.text, _TEXT_CHARACTERS).rstrip('.')}{words.printable(where)}"


# --- evidence --------------------------------------------------------------------------------------------------------


def _evidence(logs: Sequence[RankLog], kinds: Sequence[FailureKind], ends: Sequence[End]) -> Iterator[Evidence]:
    for kind in kinds[:SHOWN]:
        blames = ", which blames other ranks" if kind.failure.of_others else ""
        first = f", {words.name_ranks(kind.ids[:1])} first" if len(kind.ids) > 1 else ""
        text = f"{words.name_ranks(kind.ids)}{first}{_describe_time(kind.failure.moment)}"
        yield Evidence(kind="log_failure", message=f"{text}: {_describe_failure(kind.failure)}{blames}", ranks=kind.ids)
    if len(kinds) > SHOWN:
        yield Evidence(
            kind="log_failure",
            message=words.count(len(kinds) - SHOWN, "other failure"),
            ranks=tuple(rank for kind in kinds[SHOWN:] for rank in kind.ids),
        )
    if silent := _find_silent(logs, kinds):
        yield Evidence(kind="log_failure", message=silent.text, ranks=silent.ranks)
    if ends:
        yield Evidence(kind="log_end", message=log_ends.describe_ends(ends))
    yield from nccl_lines.describe_lines(logs)


def _describe_unranked_logs(logs: Sequence[RankLog]) -> Iterator[Evidence]:
    """Yield the first failure and the lines of NCCL in each log of an unknown rank."""
    rows = nccl_messages.load()
    for log in logs[:_UNRANKED_SHOWN]:
        where = words.printable(log.source) + (f", {words.name_ranks([log.id])}" if log.id.pid is not None else "")
        if log.failures:
            failure = _own_or_first(log.failures)
            text = f"{where}, line {failure.number}{_describe_time(failure.moment)}: {_describe_failure(failure)}"
            yield Evidence(kind="log_failure", message=f"{text} (rank not known)")
        for name, message in log.messages.items():
            if (row := rows[name]).about != "setup":
                meaning = f"{row.meaning} ({nccl_lines.quote(message)}); {row.remedy}"
                yield Evidence(kind="nccl_message", message=f"{where}, line {message.number}: {meaning}")
    if len(logs) > _UNRANKED_SHOWN:
        yield Evidence(
            kind="log_failure", message=f"{words.count(len(logs) - _UNRANKED_SHOWN, 'other log')} of unknown ranks"
        )


def _describe_time(moment: Moment | None) -> str:
    return f" at {words.printable(moment.text)}" if moment else ""
