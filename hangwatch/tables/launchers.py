"""Launchers of ranks, and the variables that identify a rank (launchers.toml).

`probes.process` reads only these variables, `jobs` interprets them. The table describes its columns.
"""

from collections.abc import Collection

import msgspec

from hangwatch import tables
from hangwatch.model import Value


class RankVariables(Value, frozen=True, forbid_unknown_fields=True):
    """The names of the variables that make a process a rank."""

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
    started_by_first: bool = False


class RendezvousOptions(Value, frozen=True, forbid_unknown_fields=True):
    """The command-line options (with --) or variables with which a launcher finds the other launchers of its job."""

    run_id: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    endpoint: tuple[str, ...] = ()
    address: tuple[str, ...] = ()
    port: tuple[str, ...] = ()


class Launcher(Value, frozen=True, forbid_unknown_fields=True):
    """One way to start ranks: what identifies the launcher's process, and the variables of its ranks.

    `ranks` is None if another row has the variables of these ranks.
    """

    name: str
    programs: tuple[str, ...] = ()
    comms: tuple[str, ...] = ()
    title: str = ""
    starts_only_ranks: bool = False
    is_shared: bool = False
    alone: tuple[str, ...] = ()
    rendezvous_options: RendezvousOptions | None = None
    ranks: RankVariables | None = None


class Scheduler(Value, frozen=True, forbid_unknown_fields=True):
    """A scheduler: the names of the variables with the job id, the step, and the allocated GPUs."""

    job_id: str
    step: str
    gpus: tuple[str, ...] = ()


class Rendezvous(Value, frozen=True, forbid_unknown_fields=True):
    """The names of the variables with the address at which the ranks of a job meet."""

    address: str
    port: str


class NameVariable(Value, frozen=True, forbid_unknown_fields=True):
    """A variable with the name of a job: its whole value, or the group of the first pattern that matches."""

    variable: str
    patterns: tuple[str, ...] = ()
    only_in_pod: bool = False
    is_host_name: bool = False


class Engine(Value, frozen=True, forbid_unknown_fields=True):
    """An inference engine: the marks of its workers, and of its other processes."""

    name: str
    comms: tuple[str, ...]
    server: str
    titles: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()


class Table(Value, frozen=True, forbid_unknown_fields=True):
    """The whole table."""

    launchers: tuple[Launcher, ...] = msgspec.field(name="launcher")
    schedulers: tuple[Scheduler, ...] = msgspec.field(name="scheduler")
    names: tuple[NameVariable, ...] = msgspec.field(name="name")
    engines: tuple[Engine, ...] = msgspec.field(name="engine")
    rendezvous: Rendezvous
    python_comms: tuple[str, ...]
    worker_titles: tuple[str, ...]
    idle_titles: tuple[str, ...]
    servers: tuple[str, ...]
    notebooks: tuple[str, ...]
    also_read: tuple[str, ...]
    shown: tuple[str, ...]


TABLE = tables.load("hangwatch.tables", "launchers.toml", Table)


def _variables(table: Table) -> frozenset[str]:
    names = {*table.also_read, table.rendezvous.address, table.rendezvous.port}
    names |= {row.variable for row in table.names}
    for scheduler in table.schedulers:
        names |= {scheduler.job_id, scheduler.step, *scheduler.gpus}
    for ranks in (launcher.ranks for launcher in table.launchers if launcher.ranks is not None):
        names |= {ranks.rank, ranks.node_id, ranks.attempt, ranks.job_id}
        names |= {*ranks.size, *ranks.local_rank, *ranks.local_size, *ranks.tasks_per_node}
    for options in (
        launcher.rendezvous_options for launcher in table.launchers if launcher.rendezvous_options is not None
    ):
        names |= {*options.run_id, *options.nodes, *options.endpoint, *options.address, *options.port}
    return frozenset(name for name in names if name and not name.startswith("--"))


def _candidates(table: Table) -> tuple[str, ...]:
    names = {name for launcher in table.launchers for name in (*launcher.programs, *launcher.comms)}
    names |= {name for engine in table.engines for name in (*engine.comms, *engine.titles)}
    return tuple(sorted({*table.python_comms, *table.worker_titles, *names}))


VARIABLES = _variables(TABLE)
"""The environment variables of other processes that hangwatch reads. Besides `SHOWN`, no other variable is kept."""

SHOWN = frozenset(TABLE.shown)
"""Variables that are only shown in incidents: settings of NCCL and PyTorch."""

_OF_RANKS = [row.ranks for row in TABLE.launchers if row.ranks is not None]

STARTED_BY_FIRST = frozenset(row.name for row in TABLE.launchers if row.ranks and row.ranks.started_by_first)
"""Launchers without a process of their own: the first rank starts the others."""

RANKS = frozenset(ranks.rank for ranks in _OF_RANKS if not ranks.started_by_first)
"""Variables that show the number of a rank without any other variable."""

_SIZES = frozenset(name for ranks in _OF_RANKS for name in ranks.size)
_SLOTS = {name for ranks in _OF_RANKS for name in (ranks.rank, *ranks.local_rank)}

SLOT_NAMES = tuple(sorted({*_SLOTS, *_SIZES, TABLE.rendezvous.port}))
"""Variables that make up a rank slot."""

CANDIDATES = _candidates(TABLE)
"""Beginnings of the names of programs that may belong to a job: Python and launchers. A comm may be truncated."""


def has_whole_slot(environ: Collection[str]) -> bool:
    """True if these variables include a rank, a world size and the address at which the ranks meet."""
    return TABLE.rendezvous.address in environ and not RANKS.isdisjoint(environ) and not _SIZES.isdisjoint(environ)
