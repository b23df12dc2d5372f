"""Sightings: the groups of one job on one node, without most stacks. They are read from dumps and incident.json."""

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec.structs import replace

from hangwatch import __version__
from hangwatch.formats import bounded_read, decoding, incident_file
from hangwatch.model import INCIDENT_VERSION, Capture, Grouping, Incident, Job, Value

SWITCH_ADDRESS = "SLURM_TOPOLOGY_ADDR"
"""The variable with the switches from the root to the node. See srun(1)."""


class Sighting(Value, frozen=True):
    """The groups of one job on one node, at the time when its incident was opened or the job was dumped."""

    node: str
    job: Job
    opened_unix_seconds: float
    grouping: Grouping


class GroupedDump(Value, frozen=True):
    """The output of `hangwatch dump --json --grouped`: every job on a node, with one stack for each group.

    `printed_unix_seconds` is the time of the output, by the node's clock. `schema_version` is the version of an
    incident. With --stacks, `captures` has all stacks of these jobs; merging ignores them.
    """

    schema_version: int
    hangwatch_version: str
    node: str
    printed_unix_seconds: float
    jobs: tuple[Sighting, ...]
    captures: tuple[Capture, ...] = ()


class _Found(msgspec.Struct):
    """The fields of a grouped dump, or of an incident without its captures, power and timeline."""

    node: str
    job: Job | None = None
    grouping: Grouping | None = None
    opened_unix_seconds: float = 0.0
    printed_unix_seconds: float = 0.0
    jobs: tuple[Sighting, ...] | None = None
    schema_version: int = INCIDENT_VERSION
    hangwatch_version: str = ""


class _Captures(msgspec.Struct):
    captures: tuple[Capture, ...] = ()


class _WithJobs(msgspec.Struct):
    """The output of `hangwatch dump --json` without --grouped, or of an earlier version with --grouped."""

    jobs: tuple[msgspec.Raw, ...]
    schema_version: int = 0


_DECODER = decoding.decoder(_Found)


def make_sighting(incident: Incident) -> Sighting:
    """Return the sighting in an incident. Of the job's environment it has only SLURM_TOPOLOGY_ADDR."""
    environ = {name: value for name, value in incident.job.environ.items() if name == SWITCH_ADDRESS}
    return Sighting.copy_from(incident, job=replace(incident.job, environ=environ, waiting=None))


def make_grouped_dump(
    node: str, incidents: Sequence[Incident], printed_unix_seconds: float, *, with_stacks: bool = False
) -> GroupedDump:
    """Return a grouped dump of incidents that were made now, in memory. `with_stacks` adds their last captures."""
    return GroupedDump(
        schema_version=INCIDENT_VERSION,
        hangwatch_version=__version__,
        node=node,
        printed_unix_seconds=printed_unix_seconds,
        jobs=tuple(map(make_sighting, incidents)),
        captures=tuple(found.captures[-1] for found in incidents) if with_stacks else (),
    )


def read(path: Path, file: BinaryIO) -> GroupedDump:
    """Parse an open file. Of an incident.json, only the part before the captures is read if possible.

    Raises StoreError as `parse` does, and FileError if reading fails.
    """
    head = incident_file.read_head(file)
    if head is not None:
        with contextlib.suppress(incident_file.StoreError):
            return parse(path, head)
    file.seek(0)
    return parse(path, bounded_read.read_rest(file, path, incident_file.MAX_INCIDENT_BYTES))


def parse(path: Path, content: bytes) -> GroupedDump:
    """Parse an incident, or the output of `hangwatch dump --json --grouped`. Errors name `path`.

    Raises StoreError if `content` is neither, has a newer version, or contains impossible rank numbers.
    """
    try:
        document = _DECODER.decode(content)
    except (msgspec.DecodeError, ValueError, RecursionError):
        document = None
    if (
        document is None
        or document.schema_version != INCIDENT_VERSION
        or (document.jobs is None and (document.job is None or document.grouping is None))
    ):
        # Parse a whole incident to a grouped dump. Raises StoreError for anything else.
        try:
            incident = incident_file.parse(path, content)
        except incident_file.StoreError:
            if not _is_dump(content):
                raise
            raise incident_file.StoreError(
                f"{path}: is a dump without --grouped, or of another version of hangwatch\n"
                "  to merge, dump with `hangwatch dump --json --grouped`, and install the same version on all nodes"
            ) from None
        return make_grouped_dump(incident.node, [incident], incident.opened_unix_seconds)
    jobs = document.jobs if document.jobs is not None else (Sighting.copy_from(document),)
    for sighting in jobs:
        incident_file.check_rank_numbers(path, incident_file.rank_numbers(sighting.job, sighting.grouping))
    return GroupedDump.copy_from(document, jobs=jobs)


def captures(path: Path, content: bytes) -> tuple[Capture, ...]:
    """Return the captures in the output of `hangwatch dump --json --grouped --stacks`. Raises StoreError."""
    found = incident_file.decode(path, content, _Captures).captures
    numbers = (number for one in found for rank in one.ranks for number in (rank.id.rank, rank.id.local_rank))
    incident_file.check_rank_numbers(path, numbers)
    return found


def _is_dump(content: bytes) -> bool:
    """True for the output of `hangwatch dump --json` of this version or an earlier one."""
    try:
        return decoding.decode_json(content, _WithJobs).schema_version <= INCIDENT_VERSION
    except (msgspec.DecodeError, ValueError, RecursionError):
        return False
