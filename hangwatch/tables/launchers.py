"""The table of launchers (launchers.toml): what starts ranks, and the variables that tell which rank a process is.

It stands on the ground since two rooms read it: `probes.procs`, to know what may be read of a process, and `hang`, to
know what it means. The comments of the table say what its columns are.
"""

from __future__ import annotations

import msgspec

from hangwatch import tables
from hangwatch.model import Value


class RankVariables(Value, frozen=True, forbid_unknown_fields=True):
    """The variables by which a rank knows its place."""

    rank: str
    size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    node_id: str = ""
    tasks_per_node: tuple[str, ...] = ()
    attempt: str = ""
    job_id: str = ""
    no_job_id: str = ""
    only_below: bool = False
    read_by_torch: bool = False
    led_by_first: bool = False


class Told(Value, frozen=True, forbid_unknown_fields=True):
    """Where a launcher reads what it waits for: options of its command line (with --), or variables."""

    run_id: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    endpoint: tuple[str, ...] = ()
    address: tuple[str, ...] = ()
    port: tuple[str, ...] = ()


class Launcher(Value, frozen=True, forbid_unknown_fields=True):
    """One way to start ranks: how its own process is known, and what it tells its ranks (None: as another one)."""

    name: str
    programs: tuple[str, ...] = ()
    comms: tuple[str, ...] = ()
    title: str = ""
    starts_only_ranks: bool = False
    alone: tuple[str, ...] = ()
    told: Told | None = None
    ranks: RankVariables | None = None


class Scheduler(Value, frozen=True, forbid_unknown_fields=True):
    """What gives jobs their numbers: the variables of the job, of its step, and of the GPUs that it was given."""

    job_id: str
    step: str
    gpus: tuple[str, ...] = ()


class Rendezvous(Value, frozen=True, forbid_unknown_fields=True):
    """The variables of the address at which the ranks of a job meet."""

    address: str
    port: str


class NameVariable(Value, frozen=True, forbid_unknown_fields=True):
    """Where the name of a job may stand: all of a variable's value, or the group of the first pattern that fits."""

    variable: str
    patterns: tuple[str, ...] = ()
    only_in_pod: bool = False
    is_host_name: bool = False


class Table(Value, frozen=True, forbid_unknown_fields=True):
    """The whole table."""

    launchers: tuple[Launcher, ...] = msgspec.field(name="launcher")
    schedulers: tuple[Scheduler, ...] = msgspec.field(name="scheduler")
    names: tuple[NameVariable, ...] = msgspec.field(name="name")
    rendezvous: Rendezvous
    users: tuple[str, ...]
    python_comms: tuple[str, ...]
    servers: tuple[str, ...]
    also_read: tuple[str, ...]
    shown: tuple[str, ...]


TABLE = tables.load("hangwatch.tables", "launchers.toml", Table)


def _variables(table: Table) -> frozenset[str]:
    found = {*table.users, *table.also_read, table.rendezvous.address, table.rendezvous.port}
    found |= {row.variable for row in table.names}
    for scheduler in table.schedulers:
        found |= {scheduler.job_id, scheduler.step, *scheduler.gpus}
    for ranks in (launcher.ranks for launcher in table.launchers if launcher.ranks is not None):
        found |= {ranks.rank, ranks.node_id, ranks.attempt, ranks.job_id}
        found |= {*ranks.size, *ranks.local_rank, *ranks.local_size, *ranks.tasks_per_node}
    for told in (launcher.told for launcher in table.launchers if launcher.told is not None):
        names = (*told.run_id, *told.nodes, *told.endpoint, *told.address, *told.port)
        found |= {name for name in names if not name.startswith("--")}
    return frozenset(found - {""})


def _candidates(table: Table) -> tuple[str, ...]:
    names = {name for launcher in table.launchers for name in (*launcher.programs, *launcher.comms)}
    return tuple(sorted({*table.python_comms, *names}))


VARIABLES = _variables(TABLE)
"""The variables of another process's environment that tell what it is; no other is ever kept, beside `SHOWN`."""

SHOWN = frozenset(TABLE.shown)
"""Those that only a reader of an incident wants: what NCCL and PyTorch were told."""

RANKS = frozenset(row.ranks.rank for row in TABLE.launchers if row.ranks is not None and not row.ranks.led_by_first)
"""Those that alone hold the number of a rank."""

CANDIDATES = _candidates(TABLE)
"""How the names begin of programs that may belong to a job: Python and launchers. A comm may cut them short."""
