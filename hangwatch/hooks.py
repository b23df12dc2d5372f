"""Programs of the site that are called as a job's state changes: which, with what arguments, and how they ended.

A hook runs as the daemon's user without its capabilities (`hook_process`), in threads and processes of its own: no
capture and no page waits for it. What a job's owner wrote reaches it in safe characters only.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias, get_args

from hangwatch import words
from hangwatch.config import ConfigError
from hangwatch.config import Hooks as Settings
from hangwatch.hook_process import CANNOT_RUN, SIGNALLED, TIMED_OUT
from hangwatch.model import CRASHED, Incident, JobState
from hangwatch.schedule import Pace, Turns

MOST_WAITING_OF_OWNER = 8
_CHILD = Path(__file__).with_name("hook_process.py")
_GRACE_SECONDS = 10.0  # from a hook's deadline to the end of its child, which ends what the hook has left
_KEYS = ("on_hung", "on_stalled", "on_recovered", "on_ended", "on_crashed")
_KEY_OF = {
    JobState.HUNG: "on_hung",
    JobState.STALLED: "on_stalled",
    JobState.RECOVERED: "on_recovered",
    JobState.TRAINING: "on_recovered",
    JobState.ENDED: "on_ended",
}
_PLACEHOLDER = re.compile(r"\{\w*\}")
_NAMES = ("incident", "name", "job", "job_name", "job_key", "state", "owner", "owner_uid", "slurm_job", "node")
_ENVIRON = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/"}

Outcome: TypeAlias = Literal["ok", "failed", "killed", "timed_out", "not_run", "not_called"]

log = logging.getLogger(__name__)


class Call(NamedTuple):
    """One hook that is to be called: the key that names it, what is told to it, and the incident and its folder."""

    key: str
    command: tuple[str, ...]
    environ: dict[str, str]
    incident: Incident
    folder: Path | None

    @property
    def event(self) -> str:
        """`hung` of on_hung: what it is told as the job's state."""
        return self.key.removeprefix("on_")


class Ended(NamedTuple):
    """How a hook ended; `output` is the beginning of what it printed, None where it was not run."""

    call: Call
    message: str
    outcome: Outcome
    output: bytes | None = None

    @property
    def is_ok(self) -> bool:
        """Whether it ended with status 0."""
        return self.outcome == "ok"


def none_yet(settings: Settings) -> dict[tuple[str, str], int]:
    """How often each hook that is set has run, by event and outcome, before any has: a counter begins at 0."""
    events = [key.removeprefix("on_") for key in _KEYS if getattr(settings, key)]
    return {(event, outcome): 0 for event in events for outcome in get_args(Outcome)}


def refuse_unusable(settings: Settings, source: str) -> None:
    """Raise ConfigError where a hook is no whole path, has unknown placeholders, or others could write its program."""
    problems: list[str] = []
    for key in _KEYS:
        command: tuple[str, ...] = getattr(settings, key)
        if not command:
            continue
        for number, argument in enumerate(command):
            named = _PLACEHOLDER.findall(argument)
            if named and (number == 0 or argument not in {f"{{{name}}}" for name in _NAMES}):
                known = ", ".join(f"{{{name}}}" for name in _NAMES)
                problems.append(
                    f"{source}: [hooks]: {key}[{number}]: {argument!r}: a placeholder is an argument of its own\n"
                    f"  allowed, after the program: {known}"
                )
        if problem := _problem(command[0]):
            problems.append(f"{source}: [hooks]: {key}[0]: {command[0]!r}: {problem}")
    if problems:
        raise ConfigError(*problems)


def _problem(program: str) -> str | None:
    """Why a program is not to be called: whoever can change it would act with the name of hangwatch."""
    path = Path(program)
    if not path.is_absolute():
        return "is no whole path\n  no shell and no PATH is asked: name it from / on"
    try:
        real = path.resolve(strict=True)
        if real != path:
            return f"leads over a link, which others may change\n  name it as {str(real)!r}"
        if not path.is_file():
            return "is no file"
        for place in (path, *path.parents):
            found = place.stat()
            if found.st_uid not in (0, os.geteuid()):
                return f"{place} belongs to user {found.st_uid}, who could change what is run\n  chown root {place}"
            is_shared = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
            if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_shared:
                return f"{place}: others can write there, and change what is run\n  chmod go-w {place}"
    except OSError as error:
        return f"cannot be looked at: {error.strerror}"
    return None if os.access(path, os.X_OK) else "may not be executed by the daemon's user\n  chmod 755"


def call_of(settings: Settings, incident: Incident, moved_to: JobState | None, folder: Path | None) -> Call | None:
    """The hook that is due as an incident has moved to this state, with its arguments; None where there is none."""
    key = "on_crashed" if incident.verdict.kind == CRASHED else _KEY_OF.get(moved_to) if moved_to else None
    command: tuple[str, ...] = getattr(settings, key) if key and moved_to else ()
    if not command or key is None:
        return None
    values = _values(incident, key.removeprefix("on_"), folder)
    arguments = tuple(values.get(argument[1:-1], argument) if argument[:1] == "{" else argument for argument in command)
    environ = {**_ENVIRON, **{f"HANGWATCH_{name.upper()}": value for name, value in values.items() if value}}
    return Call(key, arguments, environ, incident, folder)


def _values(incident: Incident, state: str, folder: Path | None) -> dict[str, str]:
    """What stands for each placeholder. Of what a job's owner wrote only characters that no program takes amiss."""
    job = incident.job
    slurm = re.fullmatch(r"Slurm job (\d+)", job.owner)
    return {
        "incident": "" if folder is None else str(folder),
        "name": incident.incident_id if folder is None else folder.name,
        "job": _plain(job.job_id),
        "job_name": _plain(job.job_name),
        "job_key": job.key if job.job_key else "",
        "state": state,
        "owner": job.owner,
        "owner_uid": "" if job.uid is None else str(job.uid),
        "slurm_job": slurm[1] if slurm else "",
        "node": incident.node,
    }


def _plain(text: str) -> str:
    """What a job's owner wrote, in characters that neither a shell nor a program takes for anything else."""
    return re.sub(r"^[-.]|[^A-Za-z0-9._-]", "_", text[:64])


def run(call: Call, deadline_seconds: float) -> Ended:
    """Run a hook to its end, or to its deadline; what its child cannot end is left to the kernel."""
    began = time.monotonic()
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_CHILD), str(deadline_seconds), *call.command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=call.environ,
        cwd="/",
    )
    try:
        output, _ = child.communicate(timeout=deadline_seconds + _GRACE_SECONDS)
        code = child.returncode
    except subprocess.TimeoutExpired:
        child.kill()
        with suppress(subprocess.TimeoutExpired):
            child.communicate(timeout=1.0)
        output, code = b"", TIMED_OUT
    outcome, how = _how(code, deadline_seconds)
    message = f"{_name(call)} {how} after {words.duration(time.monotonic() - began)}"
    return Ended(call, message, outcome, output)


def _how(code: int, deadline_seconds: float) -> tuple[Outcome, str]:
    if code == TIMED_OUT:
        return "timed_out", f"was ended at its deadline of {deadline_seconds:g} s"
    if code == CANNOT_RUN:
        return "not_run", "could not be run"
    if code < 0 or code > SIGNALLED:
        return "killed", "was killed"
    return "failed" if code else "ok", f"ended with status {code}"


def _name(call: Call) -> str:
    return f"hook {call.key} ({Path(call.command[0]).name})"


class Hooks:
    """Calls hooks, the owners of jobs in turn and of each one at a time.

    `begin` makes a thread call a function, `ended` is told what came of each.
    """

    def __init__(
        self,
        settings: Settings,
        begin: Callable[[Callable[[], None]], None],
        ended: Callable[[Ended], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._begin, self._ended = settings, begin, ended
        self._pace = Pace(settings.per_minute, settings.per_minute_of_owner, clock)
        self._turns: Turns[Call] = Turns(1)

    def call(self, incident: Incident, moved_to: JobState | None, folder: Path | None) -> None:
        """Have the hook called that is due, if any; returns at once."""
        call = call_of(self._settings, incident, moved_to, folder)
        if call is None:
            return
        owner = incident.job.share
        if folder is None and "{incident}" in getattr(self._settings, call.key):
            refused = "the incident could not be kept, and it wants its folder"
        else:
            too_many = self._pace.begin(owner)
            refused = f"more than [hooks] {too_many} allows" if too_many else ""
        if not refused and not self._turns.add(owner, call, MOST_WAITING_OF_OWNER):
            refused = f"{MOST_WAITING_OF_OWNER} of the same owner wait already"
        if refused:
            self._ended(Ended(call, f"{_name(call)} was not called: {refused}", "not_called"))
        else:
            self._begin(self._next)

    def _next(self) -> None:
        turn = self._turns.take()
        if turn is None:
            return
        try:
            self._ended(run(turn.wanted, self._settings.deadline_seconds))
        except OSError as error:  # no process, no memory
            self._ended(Ended(turn.wanted, f"{_name(turn.wanted)} could not be run: {error.strerror}", "not_run"))
        finally:
            if self._turns.end(turn):
                self._begin(self._next)
