"""Comparison of the environment variables of a job's ranks: variables that differ, and variables that are equal. Pure.

No rank is named for a variable that differs.
"""

from collections.abc import Collection, Iterator, Mapping

from hangwatch import words
from hangwatch.model import Difference, Environment, Evidence, RankId, Setting, list_by_key
from hangwatch.tables import environment_names

_MOST_DIFFERENCES = 32
_MOST_RANKS = 64
_MOST_VALUES = 4
_MOST_IN_EVIDENCE = 8
_VALUE_CHARACTERS = 200


def compare(environs: Mapping[RankId, Mapping[str, str]]) -> Environment | None:
    """Return the variables that differ among the ranks, and the variables that are equal on all ranks.

    The variable with the rarest value comes first. None if no environment was read. Only variables in the table
    `environment_names` are compared. A variable is not reported if the table says that it differs in healthy jobs, or
    if it has more than two values and more values than half the number of ranks.
    """
    if not environs:
        return None
    differences: list[Difference] = []
    common: list[tuple[str, str]] = []
    for name in sorted({name for variables in environs.values() for name in variables}):
        row = environment_names.find_row(name)
        if row is None:
            continue
        by_value = list_by_key((variables.get(name), rank) for rank, variables in environs.items())
        if len(by_value) == 1:
            common += [(name, words.elided(value, _VALUE_CHARACTERS)) for value in by_value if value is not None]
        elif not row.differs and len(by_value) <= max(2, len(environs) // 2):
            differences.append(_make_difference(name, row.why, by_value))
    differences.sort(
        key=lambda difference: (sum(setting.count for setting in difference.settings[:-1]), difference.name)
    )
    return Environment(differences=tuple(differences[:_MOST_DIFFERENCES]), common=tuple(common))


def _make_difference(name: str, why: str, by_value: Mapping[str | None, list[RankId]]) -> Difference:
    settings = tuple(
        Setting(
            value=None if value is None else words.elided(value, _VALUE_CHARACTERS),
            ranks=tuple(sorted(ranks, key=RankId.sort_key)[:_MOST_RANKS]),
            count=len(ranks),
        )
        for value, ranks in sorted(by_value.items(), key=lambda entry: (len(entry[1]), entry[0] or ""))
    )
    return Difference(name=name, why=why, settings=(*settings[:-1][: _MOST_VALUES - 1], settings[-1]))


def as_evidence(environment: Environment, pointed: Collection[RankId]) -> Iterator[Evidence]:
    """Yield the differences as evidence, first those on ranks in `pointed`, which the verdict names or checks."""
    pids = {(rank.node, rank.rank, rank.pid) for rank in pointed}

    def is_about_pointed(difference: Difference) -> bool:
        minority = {(rank.node, rank.rank, rank.pid) for rank in difference.minority}
        return bool(minority) and minority <= pids

    differences = sorted(environment.differences, key=is_about_pointed, reverse=True)
    for difference in differences[:_MOST_IN_EVIDENCE]:
        message = f"{describe_difference(difference)}; {difference.why}"
        yield Evidence(kind="environment", message=message, ranks=difference.minority)


def describe_difference(difference: Difference) -> str:
    """Return the text of a difference: `NCCL_SOCKET_IFNAME differs: eth1 on rank 3, eth0 on 7 others`."""
    *odd, most = difference.settings
    told = [f"{_value(setting)} on {words.name_ranks(setting.ranks)}" for setting in odd]
    rest = f"{_value(most)} on {words.count(most.count, 'other')}"
    return f"{difference.name} differs: {', '.join([*told, rest])}"


def _value(setting: Setting) -> str:
    return "not set" if setting.value is None else setting.value or "empty"
