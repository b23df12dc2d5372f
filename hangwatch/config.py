"""One TOML file -> frozen `Settings`. An unknown key, a wrong type or a value out of range names file, section and key.

The structs below are the documentation: `hangwatch config --sample` prints them with their defaults and limits.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from hangwatch.errors import UserError
from hangwatch.formats import bounded_read, toml_file

MOST_BYTES = 1 << 20  # of a configuration

T = TypeVar("T")


class ConfigError(UserError):
    """A configuration that cannot be used; the message names the file, the section and the key, and what is allowed.

    `problems` are all that were found, each told whole, in `sections`; `rest` is what the file says without them.
    """

    def __init__(self, *problems: str, rest: Any = None, sections: frozenset[str] = frozenset()) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
        self.rest = rest
        self.sections = sections


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: immutable, and an unknown key is an error."""


Ratio = Annotated[float, Meta(ge=0.0, le=1.0)]


class Gpu(Section, frozen=True):
    """How GPUs are sampled."""

    sample_seconds: Annotated[float, Meta(ge=0.2, le=60.0, description="time between two power samples")] = 1.0
    deadline_seconds: Annotated[
        float, Meta(ge=1.0, le=600.0, description="a driver that does not answer for this long is given up")
    ] = 15.0


class Jobs(Section, frozen=True):
    """How jobs are found."""

    discover_seconds: Annotated[float, Meta(ge=0.5, le=600.0, description="time between two scans of /proc")] = 10.0
    scan_budget_seconds: Annotated[
        float, Meta(ge=0.1, le=60.0, description="a scan reads new processes for so long; the next goes on")
    ] = 2.0
    max_processes_per_owner: Annotated[
        int, Meta(ge=16, le=65536, description="processes of one owner whose environment is read")
    ] = 4096
    max_jobs: Annotated[int, Meta(ge=1, le=4096, description="jobs watched on this node, the owners in turn")] = 256
    max_jobs_per_owner: Annotated[
        int, Meta(ge=1, le=4096, description="jobs of one owner; those that hold GPUs first, then the oldest")
    ] = 64
    max_ranks_per_owner: Annotated[int, Meta(ge=1, le=65536, description="ranks of one owner over all jobs")] = 1024
    max_ranks_per_job: Annotated[
        int, Meta(ge=1, le=1024, description="ranks of one job on this node; those that hold GPUs first")
    ] = 256


class Detector(Section, frozen=True):
    """When a job is suspected; docs/tuning.md says how to pick the values."""

    hold_seconds: Annotated[
        float, Meta(ge=1.0, le=86400.0, description="quiet for this long: suspected, stacks are taken")
    ] = 120.0
    startup_hold_seconds: Annotated[
        float, Meta(ge=1.0, le=86400.0, description="never busy for this long since the start: suspected")
    ] = 900.0
    stalled_hold_seconds: Annotated[
        float, Meta(ge=1.0, le=86400.0, description="quiet with some rank moving for this long: page")
    ] = 900.0
    startup_stalled_hold_seconds: Annotated[
        float, Meta(ge=1.0, le=172800.0, description="the same for a job that was never busy")
    ] = 7200.0
    idle_ratio_of_limit: Annotated[
        float, Meta(ge=0.0, le=0.5, description="idle power as a share of the limit, until an idle level was seen")
    ] = 0.10
    busy_ratio_of_limit: Annotated[
        float, Meta(ge=0.05, le=0.95, description="a job counts as training once a GPU draws this share of its limit")
    ] = 0.30
    quiet_fraction: Annotated[
        float, Meta(ge=0.0, le=0.9, description="quiet is under floor + this share of the way from floor to busy")
    ] = 0.35
    quiet_watts_ratio_of_limit: Annotated[
        float, Meta(ge=0.0, le=0.5, description="quiet at or under this share of the limit, too; 0: no such line")
    ] = 0.0
    quorum: Annotated[float, Meta(gt=0.0, le=1.0, description="share of the job's GPUs that must be quiet")] = 0.5
    busy_window_seconds: Annotated[
        float, Meta(ge=10.0, le=7200.0, description="the busy level is a high quantile over this much work")
    ] = 600.0
    recover_seconds: Annotated[
        float, Meta(ge=0.0, le=3600.0, description="power must be back for this long before a job counts as recovered")
    ] = 10.0
    cooldown_seconds: Annotated[
        float, Meta(ge=0.0, le=86400.0, description="least time between two captures of one job")
    ] = 20.0
    recapture_seconds: Annotated[
        float, Meta(ge=1.0, le=86400.0, description="first pause between captures of a stalled job; it doubles")
    ] = 30.0
    recapture_max_seconds: Annotated[
        float, Meta(ge=1.0, le=86400.0, description="longest pause between captures of a stalled or hung job")
    ] = 900.0


class Capture(Section, frozen=True):
    """How stacks are taken."""

    rounds: Annotated[int, Meta(ge=1, le=10, description="dumps of every rank per capture")] = 3
    pause_seconds: Annotated[float, Meta(ge=0.1, le=300.0, description="time between two rounds")] = 5.0
    dump_deadline_seconds: Annotated[float, Meta(ge=0.5, le=60.0, description="one dump of one process")] = 5.0
    round_deadline_seconds: Annotated[float, Meta(ge=1.0, le=600.0, description="one round over all processes")] = 30.0
    parallel: Annotated[int, Meta(ge=1, le=64, description="dumps at the same time")] = 8
    pystack: Annotated[
        bool, Meta(description="what py-spy cannot read is read by pystack, without a pause, where that is installed")
    ] = True
    logs: Annotated[
        bool, Meta(description="the ends of the files to which ranks write (standard output and error) are evidence")
    ] = True
    environment: Annotated[
        bool, Meta(description="variables of a list, none of them secret, are compared between ranks")
    ] = True
    details: Annotated[
        bool,
        Meta(description="open files, connections, children, memory of ranks that are named or to be looked at first"),
    ] = True
    kernel_log: Annotated[
        bool, Meta(description="lines of the kernel's log about ranks, their mounts and devices are evidence")
    ] = True
    max_workers_per_rank: Annotated[
        int, Meta(ge=0, le=1024, description="loader workers dumped per rank; the rest is counted only")
    ] = 16
    counters: Annotated[
        bool, Meta(description="in a look, read what GPUs and InfiniBand ports count: NVLink, PCIe, GPM, errors")
    ] = True
    motion_cpu_ratio: Annotated[
        float, Meta(ge=0.0, le=1.0, description="a rank outside a wait that used more CPU than this moves")
    ] = 0.02
    motion_io_bytes_per_second: Annotated[
        float, Meta(ge=0.0, description="a rank that read and wrote more than this between rounds moves")
    ] = 65536.0
    nccl_ras: Annotated[
        bool,
        Meta(description="ask NCCL itself how far its ranks are, where no flight recorder tells: NCCL 2.29.2 or later"),
    ] = False
    nccl_ras_answers: Annotated[int, Meta(ge=2, le=10, description="how often; a count that changes tells nothing")] = 3
    nccl_ras_pause_seconds: Annotated[float, Meta(ge=0.1, le=300.0, description="from one question to the next")] = 10.0
    nccl_ras_deadline_seconds: Annotated[
        float, Meta(ge=1.0, le=600.0, description="all answers; a capture waits no longer for them")
    ] = 30.0
    nccl_ras_min_age_seconds: Annotated[
        float, Meta(ge=0.0, le=86400.0, description="ranks younger than this are not asked: NCCL may crash early on")
    ] = 900.0

    @property
    def usual_seconds(self) -> float:
        """How long a capture takes where every process answers."""
        return self.rounds * self.pause_seconds


class Crashes(Section, frozen=True):
    """What ranks leave that die."""

    read: Annotated[
        bool, Meta(description="error files, cores and the kernel's log: a crash is an incident and a warning")
    ] = True
    cores: Annotated[
        bool, Meta(description="with gdb, where that is installed, the native stack in a core, as the job's owner")
    ] = True


class Store(Section, frozen=True):
    """Where incidents are kept, and how many."""

    directory: Annotated[str, Meta(min_length=1, description="state directory; incidents/ is made in it")] = (
        "/var/lib/hangwatch"
    )
    max_incidents: Annotated[int, Meta(ge=1, le=100000, description="older incidents are removed")] = 200
    max_bytes: Annotated[int, Meta(ge=1 << 20, description="total size of all incidents")] = 1 << 30
    group: Annotated[
        str, Meta(description="group, by name or number, that may read every incident; a job's owner may read its own")
    ] = ""
    max_age_days: Annotated[float, Meta(gt=0, le=3650, description="age at which an incident is removed")] = 30.0


class Http(Section, frozen=True):
    """Where metrics are served."""

    listen: Annotated[str, Meta(min_length=1, description="address to listen on")] = "0.0.0.0"  # noqa: S104 - an exporter is scraped from elsewhere
    port: Annotated[int, Meta(ge=0, le=65535, description="0 takes any free port")] = 9836
    health_port: Annotated[
        int, Meta(ge=0, le=65535, description="/healthz alone, never with TLS, for liveness probes; 0 is port + 1")
    ] = 0
    max_connections: Annotated[
        int, Meta(ge=16, le=1024, description="at the same time; the next one takes the place of the oldest idle one")
    ] = 256
    tls_certificate: Annotated[str, Meta(description="PEM file; with tls_key, serves HTTPS")] = ""
    tls_key: Annotated[str, Meta(description="PEM file")] = ""
    incidents_token_file: Annotated[
        str, Meta(description="file with a bearer token, for whose holder incidents (stacks!) are served")
    ] = ""
    web_config_file: Annotated[
        str,
        Meta(description="YAML of Prometheus' exporters: TLS, client certificates, users, who then see incidents"),
    ] = ""
    external_url: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^\s\"'<>`\\]{1,200})?$",
            title="beginning with http:// or https://, without blanks and quotes, of 200 characters at most",
            examples=["http://{node}:9836"],
            description="where browsers reach this port, {node} stands for its node: pages link to incidents there"
            " where somebody may see them",
        ),
    ] = ""
    incidents_on_loopback: Annotated[
        bool,
        Meta(description="where listen is 127.0.0.1 or ::1: incidents for every user and pod that reaches it"),
    ] = False


class Socket(Section, frozen=True):
    """Where a user asks the daemon about his own jobs, see docs/install-systemd.md."""

    path: Annotated[str, Meta(description='unix socket, in a folder that is there and ours alone; "": none')] = (
        "/run/hangwatch/socket"
    )
    per_minute: Annotated[int, Meta(ge=1, le=600, description="dumps begun in a minute")] = 30
    per_minute_of_owner: Annotated[int, Meta(ge=1, le=600, description="the same for one user")] = 6


class Hooks(Section, frozen=True):
    """Programs that are called as a job's state changes, see docs/hooks.md: the path and its arguments."""

    on_hung: Annotated[tuple[str, ...], Meta(description="a job of this node has hung; [] calls nothing")] = ()
    on_stalled: Annotated[tuple[str, ...], Meta(description="it is stalled")] = ()
    on_recovered: Annotated[tuple[str, ...], Meta(description="it had hung or stalled, and works again")] = ()
    on_ended: Annotated[tuple[str, ...], Meta(description="it had hung or stalled, and has ended")] = ()
    on_crashed: Annotated[tuple[str, ...], Meta(description="ranks of a job have died")] = ()
    deadline_seconds: Annotated[
        float, Meta(ge=1.0, le=3600.0, description="a hook that takes longer is ended, with all that it has started")
    ] = 60.0
    per_minute: Annotated[int, Meta(ge=1, le=600, description="hooks begun in a minute; the others are not called")] = (
        30
    )
    per_minute_of_owner: Annotated[int, Meta(ge=1, le=600, description="the same for the jobs of one owner")] = 6


class ActivityRule(Section, frozen=True):
    """One more row of the activity table: frames whose function and file match are doing `activity`."""

    activity: str
    function: Annotated[str, Meta(min_length=1, description="shell pattern of the function's plain name")]
    file: Annotated[str, Meta(min_length=1, description="shell pattern of the end of the file's path")] = "*"
    operation: str = ""


class Activities(Section, frozen=True):
    """Additions to the built-in table of activities."""

    rules: tuple[ActivityRule, ...] = ()


class Log(Section, frozen=True):
    """What goes to stderr."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


class Settings(Section, frozen=True):
    """The whole configuration. `checks` holds one table per check; each check decodes its own."""

    gpu: Gpu = Gpu()
    jobs: Jobs = Jobs()
    detector: Detector = Detector()
    capture: Capture = Capture()
    crashes: Crashes = Crashes()
    store: Store = Store()
    http: Http = Http()
    socket: Socket = Socket()
    hooks: Hooks = Hooks()
    activities: Activities = Activities()
    log: Log = Log()
    checks: dict[str, dict[str, Any]] = {}

    @property
    def capture_seconds(self) -> float:
        """The longest that one capture takes: rounds that end at their deadlines, and the pauses between them.

        NCCL is asked beside them, from the end of the first round on.
        """
        rounds, one = self.capture.rounds, self.capture.round_deadline_seconds
        beside = self.capture.nccl_ras_deadline_seconds if self.capture.nccl_ras else 0.0
        return one + max(beside, (rounds - 1) * (one + self.capture.pause_seconds))

    @property
    def dump_after_seconds(self) -> float:
        """How long after a job went quiet its stacks have been taken: the hold and one capture."""
        return self.detector.hold_seconds + self.capture.usual_seconds


def load(path: Path) -> Settings:
    """Read the settings of one TOML file.

    Raises ConfigError, whose text names the file, and of each key that is wrong its line, section and what is allowed.
    """
    return parse(read(path), str(path))


def read(path: Path) -> str:
    """The text of a configuration file. Raises ConfigError."""
    try:
        flags = 0 if bounded_read.is_handed_over(path) else os.O_NONBLOCK
        return bounded_read.read(path, MOST_BYTES, flags=flags).decode("utf-8")
    except bounded_read.FileError as error:
        raise ConfigError(
            f"{error}\n"
            "  hangwatch runs with its defaults when no --config is given;\n"
            "  `hangwatch config --sample` prints a file to start from"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); TOML files must be") from None


def parse(text: str, source: str) -> Settings:
    """Decode TOML text; `source` is the name shown in errors. Raises ConfigError."""
    try:
        table = toml_file.parse(text, source)
    except toml_file.TomlError as error:
        raise ConfigError(str(error)) from None
    for key, value in _texts(table, ""):
        if "\0" in value:
            raise ConfigError(f"{source}: {key}: {value!r} holds a NUL character, which no path and no name can")
    return decode(table, Settings, source, (), text)


def _texts(table: object, key: str) -> Iterator[tuple[str, str]]:
    """Every text of a decoded table, with where it stands."""
    if isinstance(table, str):
        yield key, table
    elif isinstance(table, list):
        for number, item in enumerate(table):
            yield from _texts(item, f"{key}[{number}]")
    elif isinstance(table, dict):
        for name, item in table.items():
            yield from _texts(item, f"{key}.{name}" if key else str(name))


def decode(table: object, section: type[T], source: str, path: tuple[str, ...], text: str = "") -> T:
    """Convert a decoded TOML table to `section`, a Section type; `path` is where the table stands in the file.

    `text` is that of the file, where it is known: it tells lines. Raises ConfigError.
    """
    value, problems = toml_file.decode(table, section, source, path, text)
    if problems or value is None:
        sections = frozenset(problem.keys[0] for problem in problems if problem.keys)
        raise ConfigError(*(problem.told for problem in problems), rest=value, sections=sections)
    return value


def sample(sections: dict[str, type[Any]] | None = None) -> str:
    """A commented configuration file with every key at its default; `sections` are the checks' Settings by name."""
    lines = ["# hangwatch configuration. Every key is optional; the values shown are the defaults.", ""]
    for name, hint in get_type_hints(Settings).items():
        if isinstance(hint, type) and issubclass(hint, Section) and name != "activities":
            lines += _sample_section(name, hint)
    lines += [
        "# More rows for the table of activities (what a stack is doing):",
        "# [[activities.rules]]",
        '# activity = "data_loading"',
        '# function = "read_shard"',
        '# file = "*/our_loader.py"',
        "",
    ]
    for name, section in sorted((sections or {}).items()):
        lines += _sample_section(f"checks.{name}", section)
    return "\n".join(lines)


def _sample_section(name: str, section: type[Any]) -> list[str]:
    lines = [f"# {(section.__doc__ or '').strip().splitlines()[0]}", f"[{name}]"]
    hints = get_type_hints(section, include_extras=True)
    for field in msgspec.structs.fields(section):
        metas = [m for m in get_args(hints[field.name])[1:] if isinstance(m, Meta)]
        words = next((m.description for m in metas if m.description), "")
        value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        allowed = toml_file.allowed(section, field.name)
        comment = f"  # {words + '; ' if words else ''}{allowed}"
        lines.append(f"{field.name} = {_toml(value)}{comment}")
    return [*lines, ""]


def _toml(value: object) -> str:
    return msgspec.json.encode(value).decode()
