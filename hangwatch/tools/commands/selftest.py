"""`hangwatch selftest`: a test that the GPUs of this node compute, and that ranks on them can communicate."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import click
import msgspec

from hangwatch import words
from hangwatch.cli.usage_errors import InputError
from hangwatch.model import GpuSample, Value
from hangwatch.probes.gpu.sampler import run_sampler
from hangwatch.probes.node import host
from hangwatch.tools.selftest import halving, launch, outcome

FIRST_SWEEP_SECONDS = 3.0
RANKS_WITHOUT_GPUS = 4


class Answer(Value, frozen=True):
    """The output of `hangwatch selftest --json`.

    `suspects` are the devices that may be bad, found by --bisect. If `is_sure`, there is exactly one. `tries` is
    the number of tests.
    """

    schema_version: int
    node: str
    devices: tuple[str, ...]
    backend: str
    passed: bool
    findings: tuple[outcome.Finding, ...]
    suspects: tuple[str, ...] = ()
    is_sure: bool = False
    tries: int = 1


@click.command()
@click.option("--devices", metavar="LIST", help="Test only these GPUs, such as 0-3,6.  [default: all GPUs]")
@click.option(
    "--ranks", type=click.IntRange(1, 256), help=f"Number of ranks without GPUs.  [default: {RANKS_WITHOUT_GPUS}]"
)
@click.option(
    "--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", help="auto: nccl with GPUs, else gloo."
)
@click.option(
    "--timeout-seconds",
    type=click.FloatRange(1, 3600),
    default=30.0,
    show_default=True,
    help="Time limit of each step.",
)
@click.option(
    "--late-seconds",
    type=click.FloatRange(0.001, 600),
    default=0.2,
    show_default=True,
    help="A rank is late if it makes the others wait this long several times.",
)
@click.option("--python", metavar="PATH", help="Python interpreter of the job, with the torch to test.")
@click.option("--bisect", is_flag=True, help="If the test fails, test halves until one bad device is found.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, see docs/json.md.")
@click.option("--script", is_flag=True, help="Print the path of the rank's script, for torchrun or srun, and exit.")
def selftest(
    *,
    devices: str | None,
    ranks: int | None,
    late_seconds: float,
    python: str | None,
    bisect: bool,
    as_json: bool,
    script: bool,
    **steps: Any,
) -> int:
    """Test that GPUs compute and that their ranks can communicate.

    Starts a rank on each GPU, or on the CPU over gloo if there are no GPUs. Each rank computes. Then pairs, groups and
    all ranks run all_reduce with known results. Names ranks that do not join, are late, slow, or compute wrong results.
    Needs idle GPUs and the torch of the job. Exits 1 if the test fails.

    For several nodes, let a launcher start the ranks:

    \b
    torchrun --nnodes 2 --nproc-per-node 8 ... $(hangwatch selftest --script)
    """
    if script:
        click.echo(launch.SCRIPT)
        return 0
    gpus = () if ranks is not None else _gpus()
    plan = launch.Plan(python=_interpreter(python), sees_gpus=bool(gpus), **steps)
    tested = _devices(devices, ranks, gpus)
    answer = _test(tested, _Test(plan, late_seconds, is_quiet=as_json), do_bisect=bisect)
    if as_json:
        click.echo(msgspec.json.encode(answer))
    else:
        _print(answer)
    return 0 if answer.passed else 1


def _test(tested: tuple[str, ...], test: _Test, *, do_bisect: bool) -> Answer:
    """Test these devices. If the test fails, `do_bisect` searches the bad device."""
    findings = test.findings(tested)
    events = test.events
    halved = None
    if findings and do_bisect and len(tested) > 1:
        halved = halving.halve(tested, lambda half: not test.findings(half))
    return Answer(
        schema_version=1,
        node=host.node_name(),
        devices=tested,
        backend=next((event.backend for event in events if event.backend), test.plan.backend),
        passed=not findings,
        findings=findings,
        suspects=halved.suspects if halved else (),
        is_sure=halved is not None and halved.is_sure,
        tries=1 + (halved.tries if halved else 0),
    )


class _Test:
    """A test that can run on any set of devices. `events` are the results of the ranks in the last run."""

    def __init__(self, plan: launch.Plan, late_seconds: float, *, is_quiet: bool) -> None:
        self.plan, self._late_seconds, self._is_quiet = plan, late_seconds, is_quiet
        self.events: tuple[outcome.Event, ...] = ()

    def findings(self, devices: Sequence[str]) -> tuple[outcome.Finding, ...]:
        """Test these devices and return the findings. Raises InputError if the interpreter cannot run a rank."""
        self._say(f"testing {words.count(len(devices), 'device')}: {','.join(devices)}")
        try:
            course = launch.run(devices, self.plan, self._say)
        except OSError as error:
            raise InputError(f"--python {self.plan.python}: {error.strerror or error}") from None
        self.events = course.events
        findings = outcome.judge(course.events, course.exits, len(devices), self._late_seconds, course.last_words)
        if any(finding.kind == "no_torch" for finding in findings):
            raise InputError(
                f"{self.plan.python} has no torch, which the self-test needs\n"
                "  give the interpreter of the job: hangwatch selftest --python /path/to/venv/bin/python"
            )
        return findings

    def _say(self, line: str) -> None:
        if line and not self._is_quiet:
            click.echo(line, err=True)


def _gpus() -> tuple[GpuSample, ...]:
    with run_sampler(FIRST_SWEEP_SECONDS) as sampler:
        sweep = sampler.wait_for_sweep(FIRST_SWEEP_SECONDS)
    return sweep.gpus if sweep else ()


def _devices(wanted: str | None, ranks: int | None, gpus: Sequence[GpuSample]) -> tuple[str, ...]:
    """Return the names of the devices to test: GPU indexes, or rank numbers for a test on the CPU.

    Raises click.UsageError, and InputError, for example for a GPU in use.
    """
    if ranks is not None and wanted is not None:
        raise click.UsageError("give either --devices or --ranks")
    if wanted is None and not gpus:
        return tuple(str(rank) for rank in range(ranks or RANKS_WITHOUT_GPUS))
    by_index = {gpu.index: gpu for gpu in gpus}
    chosen = tuple(by_index) if wanted is None else words.unfold(wanted)
    if chosen is None:
        raise InputError(f"--devices {wanted}: must be a list of numbers such as 0-3,6")
    if missing := [index for index in chosen if index not in by_index]:
        raise InputError(
            f"--devices {wanted}: this node has no GPU {words.fold(missing)}\n"
            f"  it has: {words.fold(by_index) or 'none (--ranks 4 tests the CPU and the loopback network)'}"
        )
    if busy := [index for index in chosen if by_index[index].pids]:
        pids = words.fold(pid for index in busy for pid in by_index[index].pids)
        idle = words.fold(index for index in by_index if not by_index[index].pids)
        raise InputError(
            f"GPU {words.fold(busy)}: in use by pid {pids}; a self-test would slow that job and use its memory\n"
            + (f"  test the idle GPUs: hangwatch selftest --devices {idle}" if idle else "  no GPU is idle")
        )
    return tuple(str(index) for index in chosen)


def _interpreter(wanted: str | None) -> str:
    """Return the given interpreter, else the interpreter of hangwatch if it has torch, else python3 from PATH."""
    if wanted is not None:
        return wanted
    return sys.executable if importlib.util.find_spec("torch") else shutil.which("python3") or sys.executable


def _print(answer: Answer) -> None:
    if answer.passed:
        click.echo(f"passed: {words.count(len(answer.devices))} computed and communicated over {answer.backend}")
    for finding in answer.findings:
        devices = [answer.devices[rank] for rank in finding.ranks]
        click.echo(f"FAILED: {finding.message} (device {','.join(devices)})")
    if answer.suspects and answer.is_sure:
        click.echo(f"device {answer.suspects[0]}: fails together with a good device; found in {answer.tries} tests")
    elif answer.suspects:
        click.echo(f"no bad device found in {answer.tries} tests: each half passes, or the fault is intermittent")


COMMANDS = (selftest,)
