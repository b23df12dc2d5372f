"""Hooks: programs of the site that run when a job's state changes.

A hook runs as the daemon's user without its capabilities (`hook_process`). It has its own thread and process, so
captures and pages do not wait for it. Text that a job's owner wrote is passed in safe characters only, except in the
event on its standard input, which is JSON.
"""

import logging
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from hangwatch import words
from hangwatch.config import ConfigError
from hangwatch.config import Hooks as Settings
from hangwatch.hook_process import CANNOT_RUN, SIGNALLED, TIMED_OUT
from hangwatch.model import CRASHED, Incident, JobState
from hangwatch.report.event import render_event
from hangwatch.schedule.owner_limits import FairQueue, RateLimit

MOST_WAITING_OF_OWNER = 8
_CHILD = Path(__file__).with_name("hook_process.py")
# After a hook's deadline, for hook_process to kill the hook and its children
_GRACE_SECONDS = 10.0
_KEYS = ("on_hung", "on_stalled", "on_recovered", "on_ended", "on_crashed")
_KEY_OF = {
    JobState.HUNG: "on_hung",
    JobState.STALLED: "on_stalled",
    JobState.RECOVERED: "on_recovered",
    JobState.TRAINING: "on_recovered",
    JobState.ENDED: "on_ended",
}
_PLACEHOLDER = re.compile(r"\{\w*\}")
_NAMES = (
    *("incident", "name", "job", "job_name", "job_key", "state", "owner", "owner_uid", "slurm_job", "pods", "node"),
    *("kind", "message", "action", "exclude_nodes", "fingerprint"),
)
_KUBERNETES = ("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "NODE_NAME")  # for kubectl in the daemon's pod
_MOST_MESSAGE_CHARACTERS = 500
_ENVIRON = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/"}

Outcome: TypeAlias = Literal["ok", "failed", "killed", "timed_out", "not_run", "not_called"]

log = logging.getLogger(__name__)


class HookCall(NamedTuple):
    """A hook to run: its key, command and environment, and the incident with its folder, None if not written."""

    key: str
    command: tuple[str, ...]
    environ: dict[str, str]
    incident: Incident
    folder: Path | None

    @property
    def event(self) -> str:
        """The configuration key without "on_": `hung` for on_hung. The hook receives it as the job's state."""
        return self.key.removeprefix("on_")


class HookResult(NamedTuple):
    """The result of a hook. `output` is the beginning of its output; None if the hook did not run."""

    call: HookCall
    message: str
    outcome: Outcome
    output: bytes | None = None


def zero_counts(settings: Settings) -> dict[tuple[str, str], int]:
    """Return a count of 0 for each configured hook and each outcome, because a Prometheus counter must begin at 0."""
    events = [key.removeprefix("on_") for key in _KEYS if getattr(settings, key)]
    return {(event, outcome): 0 for event in events for outcome in get_args(Outcome)}


def refuse_unusable(settings: Settings, source: str) -> None:
    """Raise ConfigError if a hook has a bad placeholder, if its program is missing, or if other users can change it."""
    problems: list[str] = []
    for key in _KEYS:
        command: tuple[str, ...] = getattr(settings, key)
        if not command:
            continue
        for number, argument in enumerate(command):
            allowed = [f"{{{name}}}" for name in _NAMES]
            if _PLACEHOLDER.search(argument) and (number == 0 or argument not in allowed):
                problems.append(
                    f"{source}: [hooks]: {key}[{number}]: {argument!r}: a placeholder must be a whole argument\n"
                    f"  allowed after the program: {', '.join(allowed)}"
                )
        if problem := _program_problem(command[0]):
            problems.append(f"{source}: [hooks]: {key}[0]: {command[0]!r}: {problem}")
    if problems:
        raise ConfigError(*problems)


def _program_problem(program: str) -> str | None:
    """Return the reason why a hook's program must not run; None if it may run.

    A user who can change the program could run anything as the daemon's user.
    """
    path = Path(program)
    if not path.is_absolute():
        return "must be an absolute path\n  neither a shell nor PATH is used"
    try:
        real = path.resolve(strict=True)
        if real != path:
            return f"contains a symbolic link, which others may change\n  give the path without links: {str(real)!r}"
        if not path.is_file():
            return "is not a file"
        for place in (path, *path.parents):
            status = place.stat()
            if status.st_uid not in (0, os.geteuid()):
                return f"{place} belongs to user {status.st_uid}, who could change the program\n  chown root {place}"
            is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
            if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
                return f"{place} is writable by other users, who could change the program\n  chmod go-w {place}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None if os.access(path, os.X_OK) else f"the daemon's user may not execute it\n  chmod 755 {path}"


def due_hook(settings: Settings, incident: Incident, moved_to: JobState | None, folder: Path | None) -> HookCall | None:
    """Return the hook for the new state `moved_to` of the incident's job; None if no hook is configured for it."""
    key = "on_crashed" if incident.verdict.kind == CRASHED else _KEY_OF.get(moved_to) if moved_to else None
    command: tuple[str, ...] = getattr(settings, key) if key and moved_to else ()
    if not command or key is None:
        return None
    values = _values(incident, key.removeprefix("on_"), folder)
    arguments = tuple(values.get(argument[1:-1], argument) if argument[:1] == "{" else argument for argument in command)
    kubernetes = {name: os.environ[name] for name in _KUBERNETES if name in os.environ}
    environ = _ENVIRON | kubernetes | {f"HANGWATCH_{name.upper()}": value for name, value in values.items() if value}
    return HookCall(key, arguments, environ, incident, folder)


def _values(incident: Incident, state: str, folder: Path | None) -> dict[str, str]:
    """Return the value of each placeholder of a hook's command, by name."""
    job, verdict = incident.job, incident.verdict
    slurm = re.fullmatch(r"Slurm job (?:(\d+)|s[0-9A-Z]{13})", job.owner)
    slurm_job = "" if slurm is None else slurm[1] or job.environ.get("SLURM_JOB_ID", "")
    return {
        "incident": "" if folder is None else str(folder),
        "name": incident.incident_id if folder is None else folder.name,
        "job": _plain(job.job_id),
        "job_name": _plain(job.job_name),
        "job_key": job.key if job.job_key else "",
        "state": state,
        "owner": job.owner,
        "owner_uid": "" if job.uid is None else str(job.uid),
        "slurm_job": slurm_job if slurm_job.isascii() and slurm_job.isdecimal() else "",
        "pods": ",".join(_pods(incident)),
        "node": incident.node,
        "kind": verdict.kind,
        "message": re.sub(r"[^A-Za-z0-9 .,:;()/#+-]", "_", verdict.message[:_MOST_MESSAGE_CHARACTERS]),
        "action": verdict.action.kind,
        "exclude_nodes": ",".join(map(_plain, verdict.action.exclude_nodes)),
        "fingerprint": verdict.fingerprint,
    }


def _pods(incident: Incident) -> Sequence[str]:
    """Return the uids of the pods of the named ranks on this node; if none is known, those of all its ranks."""
    named = {rank.pid for rank in incident.verdict.named if rank.node == incident.node}
    pods = {rank.id.pid: rank.pod for rank in incident.job.ranks if rank.pod}
    return sorted({pods[pid] for pid in pods.keys() & named} or set(pods.values()))


def _plain(text: str) -> str:
    """Replace characters that a shell or a program could interpret by "_", because a job's owner wrote this text."""
    return re.sub(r"^[-.]|[^A-Za-z0-9._-]", "_", text[:64])


def run(call: HookCall, deadline_seconds: float) -> HookResult:
    """Run a hook until it ends or is killed at its deadline. Its input is the event of the incident.

    Processes that cannot be killed are abandoned.
    """
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_CHILD), str(deadline_seconds), *call.command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=call.environ,
        cwd="/",
    )
    try:
        output, _ = child.communicate(render_event(call.incident).encode(), deadline_seconds + _GRACE_SECONDS)
        code = child.returncode
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1.0)
        output, code = b"", TIMED_OUT
    outcome, description = _outcome(code, deadline_seconds)
    message = f"{_name(call)} {description} after {words.duration(time.monotonic() - began)}"
    return HookResult(call, message, outcome, output)


def _outcome(code: int, deadline_seconds: float) -> tuple[Outcome, str]:
    if code == TIMED_OUT:
        return "timed_out", f"was killed at its deadline of {deadline_seconds:g} s"
    if code == CANNOT_RUN:
        return "not_run", "could not be run"
    if code < 0 or code > SIGNALLED:
        return "killed", "was killed"
    return "failed" if code else "ok", f"ended with status {code}"


def _name(call: HookCall) -> str:
    return f"hook {call.key} ({Path(call.command[0]).name})"


class Hooks:
    """Runner of hooks. For each job owner it runs at most one hook at the same time.

    `begin` calls a function in another thread. `ended` is called with the result of each hook.
    """

    def __init__(
        self,
        settings: Settings,
        begin: Callable[[Callable[[], None]], None],
        ended: Callable[[HookResult], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._ended = settings, ended
        self._pace = RateLimit(settings.per_minute, settings.per_minute_of_owner, clock)
        self._turns: FairQueue[HookCall] = FairQueue(1, self._run, begin)

    def call(self, incident: Incident, moved_to: JobState | None, folder: Path | None) -> None:
        """Queue the hook for the new state `moved_to`, if one is configured. Return without waiting for the hook."""
        call = due_hook(self._settings, incident, moved_to, folder)
        if call is None:
            return
        owner = incident.job.share
        if folder is None and "{incident}" in getattr(self._settings, call.key):
            refused = "it needs {incident}, but the incident could not be written"
        else:
            exceeded = self._pace.begin(owner)
            refused = f"the limit [hooks] {exceeded} is reached" if exceeded else ""
        if not refused and not self._turns.add(owner, call, MOST_WAITING_OF_OWNER):
            refused = f"{MOST_WAITING_OF_OWNER} hooks for the same owner are waiting"
        if refused:
            self._ended(HookResult(call, f"{_name(call)} was not called: {refused}", "not_called"))

    def _run(self, call: HookCall) -> None:
        try:
            self._ended(run(call, self._settings.deadline_seconds))
        except OSError as error:  # no free process or memory
            self._ended(HookResult(call, f"{_name(call)} could not be run: {error.strerror}", "not_run"))
