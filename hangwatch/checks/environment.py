"""Combinations of environment variables and versions that are known to hang, from public reports.

The table is `environment.toml`; each row names its source. Versions of NCCL and PyTorch are taken from the libraries
that the ranks have loaded: from the name of the file, or of the Python package that it lies in.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec
from msgspec import Meta

from hangwatch import tables
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, ok, warning, worst
from hangwatch.model import CheckVerdict, Fault, Job, JobName, Point, Value
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import proc_pid

KNOWN_HANG = Metric(
    name="environment_known_hang", help="1 for each known cause of hangs that the job's environment holds",
    labels=(*contract.JOB, "rule"),
)  # fmt: skip
DEADLINE_SECONDS = 2.0

_LIBRARIES = re.compile(r"/libnccl\.so|/libtorch_cpu\.so")
_NCCL_FILE = re.compile(r"/libnccl\.so\.(\d+\.\d+[\d.]*)$")
_COMPARISONS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


class Settings(contract.Settings, frozen=True):
    """Which rules do not apply here."""

    ignored_rules: Annotated[tuple[str, ...], Meta(description="names of rules in environment.toml")] = ()


class Rule(Value, frozen=True):
    """One row of environment.toml."""

    name: str
    message: str
    remedy: str
    sources: tuple[str, ...]
    variables: dict[str, str] = msgspec.field(default_factory=dict)
    nccl: str = ""
    torch: str = ""
    multi_node: bool = False


class JobEnvironment(Value, frozen=True):
    """What a job runs with: the variables that rules ask for, and versions where they can be told."""

    job: JobName
    variables: dict[str, str]
    nccl: str | None
    torch: str | None
    multi_node: bool


class Sample(contract.Sample, frozen=True):
    """The environments of all jobs."""

    jobs: tuple[JobEnvironment, ...]


@cache
def rules() -> tuple[Rule, ...]:
    """The table."""
    return tables.load("hangwatch.checks", "environment.toml", dict[str, tuple[Rule, ...]])["rules"]


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read variables and libraries of the first rank of each job that can be read."""
    if not node.jobs:
        return None
    wanted = frozenset(name for rule in rules() for name in rule.variables)
    jobs, faults = [], []
    for job in node.jobs:
        answers = [_job(node, job, rank.id.pid, wanted) for rank in job.ranks[:2]]
        found = [answer for answer in answers if isinstance(answer, JobEnvironment)]
        jobs += found[:1]
        faults += [] if found else [answer for answer in answers if isinstance(answer, Fault)][:1]
    return Sample(jobs=tuple(jobs), faults=tuple(faults))


def _job(node: Node, job: Job, pid: int, wanted: frozenset[str]) -> JobEnvironment | Fault | None:
    variables = proc_pid.variables(node.proc_root, pid, wanted)
    libraries = proc_pid.mapped_files(node.proc_root, pid, _LIBRARIES)
    if not isinstance(variables, dict):
        return variables
    if not isinstance(libraries, tuple):
        return libraries
    nccl, torch = _versions(node, pid, libraries)
    local = job.local_world_size or len(job.ranks)
    return JobEnvironment(
        job=job.name,
        variables=variables,
        nccl=nccl,
        torch=torch,
        multi_node=job.world_size is not None and job.world_size > local,
    )


def _versions(node: Node, pid: int, libraries: tuple[str, ...]) -> tuple[str | None, str | None]:
    """NCCL's and PyTorch's versions: by file name, else by the `.dist-info` beside the package that holds the file.

    Packages may lie on a file system that is dead: a child process looks, and not for long.
    """
    by_file = next((found.group(1) for path in libraries if (found := _NCCL_FILE.search(path))), None)
    folders = {folder for path in libraries if (folder := packages_of(path))}
    roots = {folder: str(Path(node.proc_root) / str(pid) / "root") + folder for folder in folders}
    answers = node.filesystems.names(list(roots.values()), DEADLINE_SECONDS) if roots else {}
    names = [name for answer in answers.values() if isinstance(answer, tuple) for name in answer]
    return by_file or version_in(names, r"nvidia_nccl_cu\d+"), version_in(names, "torch")


def packages_of(library: str) -> str | None:
    """The site-packages folder that a library lies in, None for one that the system installed."""
    parts = PurePosixPath(library).parts
    for place in ("site-packages", "dist-packages"):
        if place in parts:
            return str(PurePosixPath(*parts[: parts.index(place) + 1]))
    return None


def version_in(names: Iterable[str], package: str) -> str | None:
    """The version of a package by the name of its `.dist-info` folder, without a local part such as `+cu126`."""
    pattern = re.compile(rf"{package}-(\d[\d.]*)[^-]*\.dist-info")
    return next((found.group(1).rstrip(".") for name in names if (found := pattern.fullmatch(name))), None)


def satisfies(version: str | None, wanted: str) -> bool:
    """Whether a version meets comparisons such as `>=2.13,<2.17`; false where the version is not known."""
    if not wanted:
        return True
    return version is not None and all(_compare(version, one.strip()) for one in wanted.split(","))


def _compare(version: str, comparison: str) -> bool:
    for sign, compare in _COMPARISONS.items():
        if comparison.startswith(sign):
            left, right = _numbers(version), _numbers(comparison.removeprefix(sign))
            return bool(compare(left, right))
    raise ValueError(f"{comparison!r} is no comparison of versions")


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in version.split(".") if part.isdecimal()]
    return tuple(numbers + [0] * (4 - len(numbers)))


def matching(job: JobEnvironment) -> list[Rule]:
    """The rules that a job's environment meets."""
    return [
        rule
        for rule in rules()
        if all(job.variables.get(name, "") == value for name, value in rule.variables.items())
        and satisfies(job.nccl, rule.nccl)
        and satisfies(job.torch, rule.torch)
        and (job.multi_node or not rule.multi_node)
    ]


def points(sample: Sample) -> Iterable[Point]:
    """One number for each rule that is met."""
    for job in sample.jobs:
        for rule in matching(job):
            yield KNOWN_HANG.point(1, **job.job.labels, rule=rule.name)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Every rule that is met is a warning, with its source."""
    sample = window[-1]
    findings = [
        warning("KnownToHang", f"job {job.job}: {_message(rule, job)}", f"{rule.remedy} (see {rule.sources[0]})")
        for job in sample.jobs
        for rule in matching(job)
        if rule.name not in settings.ignored_rules
    ]
    versions = contract.listed(
        [f"job {job.job} runs NCCL {job.nccl or 'unknown'}, PyTorch {job.torch or 'unknown'}" for job in sample.jobs]
    )
    return worst(findings, ok("NothingKnown", f"none of {len(rules())} known causes of hangs; {versions}"))


def _message(rule: Rule, job: JobEnvironment) -> str:
    return rule.message.format(nccl=job.nccl, torch=job.torch)


def table(sample: Sample) -> contract.Rows:
    """What was found of each job."""
    rows = [("job", "NCCL", "PyTorch", "variables")]
    for job in sample.jobs:
        variables = " ".join(f"{name}={value}" for name, value in sorted(job.variables.items()))
        rows.append((str(job.job), job.nccl or "unknown", job.torch or "unknown", variables))
    return rows


CHECK = Check(
    name="environment",
    every_seconds=300,
    settings=Settings,
    observe=observe,
    points=points,
    judge=judge,
    metrics=(KNOWN_HANG,),
    table=table,
    absent="no training job runs on this node",
)
