"""Environment variables and library versions of each job that are known to cause hangs, from public reports.

The table is `environment.toml`. Each row names its source. The versions of NCCL and PyTorch come from the libraries
that the ranks have loaded: from the name of the file, or from the Python package that contains the file.
"""

import operator
import re
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated

import msgspec

from hangwatch import tables
from hangwatch.checks.framework import contract
from hangwatch.checks.framework.contract import Check, Metric, Metrics, ok, warning, worst
from hangwatch.config import describe
from hangwatch.model import CheckVerdict, Fault, Job, JobName, Value
from hangwatch.probes.node.machine import Node
from hangwatch.probes.process import proc_pid

DEADLINE_SECONDS = 2.0

_LIBRARIES = re.compile(r"/libnccl\.so|/libtorch_cpu\.so")
_NCCL_FILE = re.compile(r"/libnccl\.so\.(\d+\.\d+[\d.]*)$")
_COMPARISONS = {">=": operator.ge, "<=": operator.le, "==": operator.eq, ">": operator.gt, "<": operator.lt}


class Settings(contract.Settings, frozen=True):
    """Rules to ignore."""

    ignored_rules: Annotated[tuple[str, ...], describe("names of rules in environment.toml to ignore")] = ()


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
    """The variables of a job that rules use, and the library versions. A version is None if it is not known."""

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
    """Return the rows of environment.toml."""
    return tables.load("hangwatch.checks", "environment.toml", dict[str, tuple[Rule, ...]])["rules"]


def observe(node: Node, _: Settings) -> Sample | Fault | None:
    """Read variables and libraries of the first readable rank of each job."""
    if not node.jobs:
        return None
    wanted = frozenset(name for rule in rules() for name in rule.variables)
    jobs, faults = [], []
    for job in node.jobs:
        answers = [_job(node, job, rank.id.pid, wanted) for rank in job.ranks[:2]]
        environments = [answer for answer in answers if isinstance(answer, JobEnvironment)]
        jobs += environments[:1]
        faults += [] if environments else [answer for answer in answers if isinstance(answer, Fault)][:1]
    return Sample(jobs=tuple(jobs), faults=tuple(faults))


def _job(node: Node, job: Job, pid: int, wanted: frozenset[str]) -> JobEnvironment | Fault | None:
    variables = proc_pid.variables(node.proc_root, pid, wanted)
    libraries = proc_pid.mapped_files(node.proc_root, pid, _LIBRARIES)
    if not isinstance(variables, dict):
        return variables
    if not isinstance(libraries, tuple):
        return libraries
    # A version of NCCL or PyTorch is None if it is not known. The version is in the name of the
    # library's file or of the package's `.dist-info` directory. A child process with a deadline lists the packages,
    # because they may be on a file system that does not respond.
    by_file = next((match.group(1) for path in libraries if (match := _NCCL_FILE.search(path))), None)
    folders = {folder for path in libraries if (folder := packages_of(path))}
    roots = {folder: str(Path(node.proc_root) / str(pid) / "root") + folder for folder in folders}
    answers = node.filesystems.list_names(list(roots.values()), DEADLINE_SECONDS) if roots else {}
    names = [name for answer in answers.values() if isinstance(answer, tuple) for name in answer]
    nccl, torch = by_file or version_in(names, r"nvidia_nccl_cu\d+"), version_in(names, "torch")
    return JobEnvironment(
        job=job.name,
        variables=variables,
        nccl=nccl,
        torch=torch,
        multi_node=job.world_size is not None and job.world_size > (job.local_world_size or len(job.ranks)),
    )


def packages_of(library: str) -> str | None:
    """Return the site-packages directory that contains a library; None if no such directory contains it."""
    parts = PurePosixPath(library).parts
    for name in ("site-packages", "dist-packages"):
        if name in parts:
            return str(PurePosixPath(*parts[: parts.index(name) + 1]))
    return None


def version_in(names: Iterable[str], package: str) -> str | None:
    """Return the version in the name of a package's `.dist-info` directory, without a local part such as `+cu126`.

    `names` are the names in a site-packages directory. None if the package is not among them.
    """
    pattern = re.compile(rf"{package}-(\d[\d.]*)[^-]*\.dist-info")
    return next((match.group(1).rstrip(".") for name in names if (match := pattern.fullmatch(name))), None)


def satisfies(version: str | None, comparisons: str) -> bool:
    """True if a version meets comparisons such as `>=2.13,<2.17`.

    Without comparisons, every version meets them. An unknown version (None) meets no comparison.
    """
    if not comparisons:
        return True
    return version is not None and all(_compare(version, comparison.strip()) for comparison in comparisons.split(","))


def _compare(version: str, comparison: str) -> bool:
    for sign, compare in _COMPARISONS.items():
        if comparison.startswith(sign):
            return bool(compare(_numbers(version), _numbers(comparison.removeprefix(sign))))
    raise ValueError(f"{comparison!r} is not a version comparison")


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(part) for part in version.split(".") if part.isdecimal()]
    return tuple(numbers + [0] * (4 - len(numbers)))


def matching(job: JobEnvironment) -> list[Rule]:
    """Return the rules that match the environment of a job."""
    return [
        rule
        for rule in rules()
        if all(job.variables.get(name, "") == value for name, value in rule.variables.items())
        and satisfies(job.nccl, rule.nccl)
        and satisfies(job.torch, rule.torch)
        and (job.multi_node or not rule.multi_node)
    ]


METRICS = (
    Metrics[Sample, JobEnvironment](
        Metric(
            "environment_known_hang",
            "1 for each known cause of hangs in the environment of the job",
            lambda job: dict.fromkeys((rule.name for rule in matching(job)), 1),
            by=("rule",),
        ),
        subjects=lambda sample: sample.jobs,
        labels=contract.JOB,
    ),
)


def judge(window: Sequence[Sample], settings: Settings) -> CheckVerdict:
    """Return one warning for all rules that match a job, with their sources; OK if none does."""
    sample = window[-1]
    findings = [
        warning(
            "KnownToHang",
            f"job {job.job}: {rule.message.format(nccl=job.nccl, torch=job.torch)}",
            f"{rule.remedy} (see {rule.sources[0]})",
        )
        for job in sample.jobs
        for rule in matching(job)
        if rule.name not in settings.ignored_rules
    ]
    versions = contract.join_first(
        [
            f"job {job.job} uses {f'NCCL {job.nccl}, ' if job.nccl else ''}PyTorch {job.torch or 'unknown'}"
            for job in sample.jobs
        ]
    )
    return worst(findings, ok("NothingKnown", f"none of {len(rules())} known causes of hangs is present; {versions}"))


def table(sample: Sample) -> contract.Rows:
    """Return one row per job."""
    yield "job", "NCCL", "PyTorch", "variables"
    for job in sample.jobs:
        variables = " ".join(f"{name}={value}" for name, value in sorted(job.variables.items()))
        yield job.job, job.nccl or "unknown", job.torch or "unknown", variables


CHECK = Check(observe, METRICS, judge, table, Settings, every_seconds=300, absent="no training job runs on this node")
