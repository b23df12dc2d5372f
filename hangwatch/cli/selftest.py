"""`hangwatch selftest`: can the GPUs of this node compute, and can ranks on them talk?"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import click
import msgspec

from hangwatch import words
from hangwatch.cli.node_options import nodes_options, reach_of
from hangwatch.cli.selftest_nodes import Nodes, Question
from hangwatch.cli.usage_errors import InputError
from hangwatch.model import GpuSample, Value
from hangwatch.probes.gpu.sampler import NvmlSampler
from hangwatch.probes.node import host
from hangwatch.selftest import halving, launch, outcome, parts

FIRST_SWEEP_SECONDS = 3.0
RANKS_WITHOUT_GPUS = 4
SLOWEST_SHOWN = 8

_Run = Callable[[Sequence[str], launch.Say], launch.Course]


class Answer(Value, frozen=True):
    """`hangwatch selftest --json`."""

    schema_version: int
    node: str
    devices: tuple[str, ...]
    backend: str
    passed: bool
    findings: tuple[outcome.Finding, ...]
    suspects: tuple[str, ...] = ()
    is_sure: bool = False
    tries: int = 1
    bandwidths: tuple[outcome.Bandwidth, ...] = ()


@click.command()
@click.option("--devices", metavar="LIST", help="These GPUs alone, such as 0-3,6; by default all of this node.")
@click.option(
    "--ranks", type=click.IntRange(1, 256), help=f"Without GPUs: so many ranks ({RANKS_WITHOUT_GPUS} by default)."
)
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", help="auto: nccl with GPUs.")
@click.option(
    "--timeout-seconds", type=click.FloatRange(1, 3600), default=30.0, show_default=True, help="For each single step."
)
@click.option(
    "--late-seconds",
    type=click.FloatRange(0.001, 600),
    default=0.2,
    show_default=True,
    help="A rank that keeps the others waiting so long, again and again, is late.",
)
@click.option("--python", metavar="PATH", help="The interpreter of the job: the one that has its torch.")
@click.option("--bisect", is_flag=True, help="Where it fails: try halves, until the one device is found.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as docs/json.md describes it.")
@click.option("--script", is_flag=True, help="Print the path of the script of a rank, for torchrun or srun, and end.")
@click.option("--offer", is_flag=True, hidden=True)
@click.option("--part", hidden=True)
@click.option("--node-name", default="", hidden=True)
@click.option("--port", type=click.IntRange(1, 65535), hidden=True)
@nodes_options
def selftest(*, script: bool, **given: Any) -> int:
    """Can the GPUs of this node compute, and can ranks on them talk? For before a job, or to find the bad one.

    Starts a rank on each GPU (without GPUs: on the CPU, over gloo), lets each compute, then lets pairs, groups and all
    add up numbers whose sums are known, each step with a time-out of its own. Names who does not come, comes late,
    computes slowly or wrongly. Exits 1 when something is wrong. It needs idle GPUs, and the torch of the job.

    With --nodes or --jobid over the devices of many nodes, each started by hangwatch there; --bisect halves the nodes,
    then the devices of one. A launcher may start the ranks, too:

    \b
    torchrun --nnodes 2 --nproc-per-node 8 ... $(hangwatch selftest --script)
    """
    if script:
        click.echo(launch.SCRIPT)
        return 0
    trial = _Trial(**{name: given.pop(name) for name in _Trial._fields})
    own = _OnThisNode(**{name: given.pop(name) for name in _OnThisNode._fields})
    question = Question(trial.backend, **{name: given.pop(name) for name in Question._fields[1:]})
    if (reach := reach_of(given)) is not None:
        nodes = Nodes(reach, question)
        python = question.python or "python3"
        return trial.conclude(nodes.units, _Test(lambda half, _: nodes.run(half), python, trial))
    gpus = () if question.ranks is not None else _gpus()
    plan = launch.Plan(
        python=_interpreter(question.python),
        backend=question.backend,
        timeout_seconds=question.timeout_seconds,
        sees_gpus=bool(gpus),
    )
    if own.part is not None:
        return _take_part(own.part, own.node_name, own.port or 0, gpus, plan)
    tested = _devices(question.devices, question.ranks, gpus)
    if own.offer:
        here = parts.Offer(devices=tested, port=launch.free_port(), printed_unix_seconds=time.time())
        click.echo(msgspec.json.encode(here))
        return 0
    return trial.conclude(tested, _Test(lambda half, say: launch.run(half, plan, say), plan.python, trial))


def _take_part(part: str, node: str, port: int, gpus: Sequence[GpuSample], plan: launch.Plan) -> int:
    """Run the ranks of this node in a test over several, and print what they said."""
    try:
        layout = parts.read(part)
        place = parts.place_of(layout, node, port)
    except ValueError as error:
        raise InputError(f"--part: {error}") from None
    devices = layout[node]
    if gpus:
        devices = _devices(words.fold(map(int, devices)), None, gpus)
    try:
        course = launch.run(devices, plan, lambda _: None, place)
    except OSError as error:
        raise _no_interpreter(plan.python, error) from None
    click.echo(msgspec.json.encode(parts.Part(course=course, printed_unix_seconds=time.time())))
    return 0


def _no_interpreter(python: str, error: OSError) -> InputError:
    return InputError(f"--python {python}: {error.strerror or error}")


class _OnThisNode(NamedTuple):
    """How a test over several nodes calls `hangwatch selftest` on each of them."""

    offer: bool
    part: str | None
    node_name: str
    port: int | None


class _Trial(NamedTuple):
    """What is asked of a test beside its devices."""

    backend: str
    late_seconds: float
    bisect: bool
    as_json: bool

    def conclude(self, tested: tuple[str, ...], test: _Test) -> int:
        """Test these devices, then halves of them where that is wanted and it fails; print what was found."""
        findings = test.findings(tested)
        events = test.events
        halved = None
        if findings and self.bisect and len(tested) > 1:
            halved = halving.halve(tested, lambda half: not test.findings(half))
        answer = Answer(
            schema_version=1,
            node=host.node_name(),
            devices=tested,
            backend=next((one.backend for one in events if one.backend), self.backend),
            passed=not findings,
            findings=findings,
            suspects=halved.suspects if halved else (),
            is_sure=halved is not None and halved.is_sure,
            tries=1 + (halved.tries if halved else 0),
            bandwidths=outcome.bandwidths(events),
        )
        if self.as_json:
            click.echo(msgspec.json.encode(answer))
        else:
            _print(answer)
        return 0 if answer.passed else 1


class _Test:
    """Tests devices, and keeps what the ranks of the last test said."""

    def __init__(self, run: _Run, python: str, trial: _Trial) -> None:
        self._run, self._python, self._late_seconds, self._quiet = run, python, trial.late_seconds, trial.as_json
        self.events: tuple[outcome.Event, ...] = ()

    def findings(self, devices: Sequence[str]) -> tuple[outcome.Finding, ...]:
        """What is wrong with these devices. Raises InputError where the interpreter cannot run a rank."""
        self._say(f"testing {words.count(len(devices), 'device')}: {','.join(devices)}")
        try:
            course = self._run(devices, self._say)
        except OSError as error:
            raise _no_interpreter(self._python, error) from None
        self.events = course.events
        found = outcome.judge(course.events, course.exits, len(devices), self._late_seconds, course.last_words)
        if any(one.kind == "no_torch" for one in found):
            raise InputError(
                f"{self._python} has no torch, which the ranks of the self-test need\n"
                "  give the interpreter of the job: hangwatch selftest --python /path/of/its/bin/python"
            )
        return found

    def _say(self, line: str) -> None:
        if line and not self._quiet:
            click.echo(line, err=True)


def _gpus() -> tuple[GpuSample, ...]:
    sampler = NvmlSampler(sample_seconds=1.0, deadline_seconds=FIRST_SWEEP_SECONDS)
    sampler.start()
    try:
        sweep = sampler.wait_for_sweep(FIRST_SWEEP_SECONDS)
    finally:
        sampler.stop()
    return sweep.gpus if sweep else ()


def _devices(wanted: str | None, ranks: int | None, gpus: Sequence[GpuSample]) -> tuple[str, ...]:
    """What is tested: GPUs by index, or numbers of ranks without any. Raises InputError, also for GPUs in use."""
    if ranks is not None and wanted is not None:
        raise click.UsageError("give either --devices or --ranks")
    if wanted is None and not gpus:
        return tuple(str(rank) for rank in range(ranks or RANKS_WITHOUT_GPUS))
    here = {gpu.index: gpu for gpu in gpus}
    chosen = tuple(here) if wanted is None else words.unfold(wanted)
    if chosen is None:
        raise InputError(f"--devices {wanted}: is no list of numbers such as 0-3,6")
    if missing := [index for index in chosen if index not in here]:
        raise InputError(
            f"--devices {wanted}: this node has no GPU {words.fold(missing)}\n"
            f"  it has: {words.fold(here) or 'none (--ranks 4 tests its CPU and its own network)'}"
        )
    if busy := [index for index in chosen if here[index].pids]:
        free = [index for index in here if not here[index].pids]
        raise InputError(
            f"GPU {words.fold(busy)}: in use by pid {words.fold(pid for index in busy for pid in here[index].pids)}; "
            "a self-test would take memory and time from that job\n"
            + (f"  the idle ones: hangwatch selftest --devices {words.fold(free)}" if free else "  none is idle")
        )
    return tuple(str(index) for index in chosen)


def _interpreter(wanted: str | None) -> str:
    """The one that is given, else ours where it has torch, else the python3 that a shell finds."""
    if wanted is not None:
        return wanted
    return sys.executable if importlib.util.find_spec("torch") else shutil.which("python3") or sys.executable


def _print(answer: Answer) -> None:
    shown = ", ".join(f"rank {one.rank} {one.bytes_per_second / 1e9:.3g}" for one in answer.bandwidths[:SLOWEST_SHOWN])
    if shown:
        click.echo(f"added up with a neighbour, GB/s of memory, the slowest first: {shown}")
    if answer.passed:
        click.echo(f"passed: {words.count(len(answer.devices))} computed, met and talked over {answer.backend}")
    for finding in answer.findings:
        devices = [answer.devices[rank] for rank in finding.ranks]
        click.echo(f"FAILED: {finding.message} (device {','.join(devices)})")
    if answer.suspects and answer.is_sure:
        click.echo(f"device {answer.suspects[0]}: fails beside a good one, found in {answer.tries} tests")
    elif answer.suspects:
        click.echo(f"no half fails by itself after {answer.tries} tests: only all of them together do, or now and then")


COMMANDS = (selftest,)
