"""The configuration: one TOML file, decoded to frozen `Settings`.

The structs are the documentation: `hangwatch config --sample` prints their keys with description, default and limits.
An unknown key, a wrong type or a value out of range is an error that names file, line and key.
"""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta

from hangwatch.errors import UserError
from hangwatch.formats import bounded_read, toml_file

MOST_BYTES = 1 << 20

T = TypeVar("T")


class ConfigError(UserError):
    """Invalid configuration. The message names the file, the section, the key and the allowed values.

    `problems` has one message for each error. `sections` has the names of the sections with errors.
    `valid_settings` is the configuration without the wrong keys, or None if the file cannot be parsed.
    """

    def __init__(self, *problems: str, valid_settings: Any = None, sections: frozenset[str] = frozenset()) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems
        self.valid_settings = valid_settings
        self.sections = sections


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every section: immutable, and an unknown key is an error."""


def describe(text: str, lowest: float | None = None, highest: float | None = None) -> Meta:
    """Return the description and the limits of a setting."""
    return Meta(description=text, ge=lowest, le=highest)


class Gpu(Section, frozen=True):
    """GPU sampling."""

    sample_seconds: Annotated[float, describe("time between two power samples", 0.2, 60.0)] = 1.0
    deadline_seconds: Annotated[
        float, describe("a driver that does not respond for this long is abandoned", 1.0, 600.0)
    ] = 15.0


class Jobs(Section, frozen=True):
    """Discovery of jobs, and limits on what is monitored."""

    discover_seconds: Annotated[float, describe("time between two scans of /proc", 0.5, 600.0)] = 10.0
    scan_budget_seconds: Annotated[
        float, describe("time limit of one scan; the next scan continues where it stopped", 0.1, 60.0)
    ] = 2.0
    max_processes_per_owner: Annotated[
        int, describe("read the environment of at most this many processes per owner", 16, 65536)
    ] = 4096
    max_jobs: Annotated[int, describe("maximum number of monitored jobs, divided fairly between owners", 1, 4096)] = 256
    max_jobs_per_owner: Annotated[
        int, describe("maximum number of jobs per owner; jobs with GPUs first, then the oldest", 1, 4096)
    ] = 64
    max_ranks_per_owner: Annotated[
        int, describe("maximum number of ranks of one owner, over all its jobs", 1, 65536)
    ] = 1024
    max_ranks_per_job: Annotated[
        int, describe("maximum number of ranks of one job on this node; ranks with GPUs first", 1, 1024)
    ] = 256


class Detector(Section, frozen=True):
    """Detection of suspected jobs. docs/tuning.md explains how to choose the values."""

    hold_seconds: Annotated[
        float, describe("a job that is quiet for this long is suspected: stacks are taken", 1.0, 86400.0)
    ] = 120.0
    startup_hold_seconds: Annotated[
        float, describe("a job that was never busy for this long is suspected", 1.0, 86400.0)
    ] = 900.0
    stalled_hold_seconds: Annotated[
        float, describe("page for a job that is stalled (some ranks progress) for this long", 1.0, 86400.0)
    ] = 900.0
    startup_no_ranks_hold_seconds: Annotated[
        float,
        describe(
            "page for a launcher without ranks, or ranks in a rendezvous with other nodes, after this time",
            1.0,
            86400.0,
        ),
    ] = 540.0
    startup_stalled_hold_seconds: Annotated[
        float, describe("page for a stalled job that was never busy after this time", 1.0, 172800.0)
    ] = 7200.0
    idle_ratio_of_limit: Annotated[
        float, describe("idle power as a ratio of the limit, until an idle level is measured", 0.0, 0.5)
    ] = 0.10
    busy_ratio_of_limit: Annotated[
        float, describe("a job is training once a GPU draws this ratio of its power limit", 0.05, 0.95)
    ] = 0.30
    quiet_fraction: Annotated[
        float, describe("a GPU is quiet at or below floor + this fraction of (busy - floor)", 0.0, 0.9)
    ] = 0.35
    low_power_ratio_of_limit: Annotated[
        float, describe("a GPU is also quiet at or below this ratio of its power limit; 0: off", 0.0, 0.5)
    ] = 0.0
    quorum: Annotated[float, Meta(gt=0.0, le=1.0, description="ratio of the job's GPUs that must be quiet")] = 0.5
    busy_window_seconds: Annotated[
        float, describe("time window of the busy level, a high quantile of the power while the job works", 10.0, 7200.0)
    ] = 600.0
    confirming_captures: Annotated[
        int, describe("page for a hung job after this many captures in a row in which no rank progresses", 1, 10)
    ] = 1
    recover_seconds: Annotated[
        float, describe("a job has recovered when its GPUs were not quiet for this long", 0.0, 3600.0)
    ] = 10.0
    cooldown_seconds: Annotated[float, describe("minimum time between two captures of one job", 0.0, 86400.0)] = 20.0
    recapture_seconds: Annotated[
        float, describe("first pause between captures of a stalled job; each next one is twice as long", 1.0, 86400.0)
    ] = 30.0
    recapture_max_seconds: Annotated[
        float, describe("longest pause between captures of a stalled or hung job", 1.0, 86400.0)
    ] = 900.0


class Progress(Section, frozen=True):
    """Progress counters: the collectives of each rank, counted in PyTorch's flight recorder."""

    read: Annotated[
        bool, describe("count the collectives of every rank with each power sample, without pausing it")
    ] = True
    shortest_gap_seconds: Annotated[
        float, describe("a job without a new collective is suspected at this age or later", 5.0, 86400.0)
    ] = 10.0
    captures_per_hour: Annotated[
        int, describe("maximum number of first captures of one job before the hold", 0, 60)
    ] = 6
    arrival_seconds: Annotated[
        float, describe("time between two readings of the times at which ranks enqueued collectives", 1.0, 3600.0)
    ] = 60.0
    straggler_seconds: Annotated[
        float, describe("a rank is named as late after this time, by at least 300 collectives", 1.0, 86400.0)
    ] = 300.0


class Capture(Section, frozen=True):
    """Captures: stack dumps and counters of all ranks of a job."""

    rounds: Annotated[int, describe("number of dumps of each rank in a capture", 1, 10)] = 3
    pause_seconds: Annotated[float, describe("time between two rounds", 0.1, 300.0)] = 5.0
    dump_deadline_seconds: Annotated[float, describe("time limit of one dump of one process", 0.5, 60.0)] = 5.0
    round_deadline_seconds: Annotated[float, describe("time limit of one round over all processes", 1.0, 600.0)] = 30.0
    parallel: Annotated[int, describe("number of dumps at the same time", 1, 64)] = 8
    pystack: Annotated[
        bool, describe("if py-spy cannot read a process, try pystack (if installed), without pausing the process")
    ] = True
    logs: Annotated[bool, describe("use the last lines of each rank's standard output and error files as evidence")] = (
        True
    )
    environment: Annotated[
        bool, describe("compare a fixed list of environment variables, without secrets, between ranks")
    ] = True
    details: Annotated[
        bool, describe("record open files, connections, children and memory of ranks that are named or to check first")
    ] = True
    kernel_log: Annotated[bool, describe("use kernel log lines about ranks, their mounts and devices as evidence")] = (
        True
    )
    max_workers_per_rank: Annotated[
        int, describe("maximum number of data-loader workers dumped per rank; others are only counted", 0, 1024)
    ] = 16
    counters: Annotated[
        bool, describe("read counters of GPUs and InfiniBand ports in a capture: NVLink, PCIe, GPM, errors")
    ] = True
    motion_cpu_ratio: Annotated[
        float, describe("a rank that is not waiting and uses more CPU than this progresses", 0.0, 1.0)
    ] = 0.02
    motion_io_bytes_per_second: Annotated[
        float, describe("a rank that reads and writes more than this between rounds progresses", 0.0)
    ] = 65536.0

    @property
    def usual_seconds(self) -> float:
        """Duration of a capture in seconds if every process responds at once."""
        return self.rounds * self.pause_seconds


class Crashes(Section, frozen=True):
    """Crash artifacts of ranks that died."""

    read: Annotated[
        bool, describe("read error files, cores and the kernel log; a crash is an incident and a warning")
    ] = True
    cores: Annotated[bool, describe("read pid and signal of a core; false: open no core")] = True


class Store(Section, frozen=True):
    """Storage of incidents, and its limits."""

    directory: Annotated[str, Meta(min_length=1, description="state directory; incidents are in its incidents/")] = (
        "/var/lib/hangwatch"
    )
    max_incidents: Annotated[int, describe("maximum number of incidents; the oldest are removed first", 1, 100000)] = (
        200
    )
    max_bytes: Annotated[int, describe("maximum size of all incidents together", 1 << 20)] = 1 << 30
    group: Annotated[
        str,
        describe(
            "group (name or gid) that may read and judge every incident; owners may read the incidents of their jobs"
        ),
    ] = ""
    max_age_days: Annotated[float, Meta(gt=0, le=3650, description="age at which an incident is removed")] = 30.0


class Http(Section, frozen=True):
    """The HTTP port that serves metrics."""

    listen: Annotated[str, Meta(min_length=1, description="address to listen on; ::: all, of IPv4 and IPv6")] = "::"
    port: Annotated[int, describe("TCP port; 0: any free port", 0, 65535)] = 9836
    health_port: Annotated[
        int, describe("port for liveness probes: only /healthz, never with TLS; 0: port + 1", 0, 65535)
    ] = 0
    max_connections: Annotated[
        int, describe("maximum number of connections; a further connection replaces the oldest idle one", 16, 1024)
    ] = 256
    incidents_token_file: Annotated[
        str, describe("file with a bearer token; requests with this token may read incidents, with their stacks")
    ] = ""
    web_config_file: Annotated[
        str, describe("YAML of Prometheus exporters: TLS, client certificates, users; these users may read incidents")
    ] = ""
    external_url: Annotated[
        str,
        Meta(
            pattern=r"^(https?://[^\s\"'<>`\\]{1,200})?$",
            title="beginning with http:// or https://, without spaces or quotes, at most 200 characters",
            examples=["http://{node}:9836"],
            description="URL of this port for browsers, with {node} for the node's name; pages link to it if users may"
            " read incidents",
        ),
    ] = ""


class Socket(Section, frozen=True):
    """The user socket: users ask the daemon about their own jobs, see docs/install-systemd.md."""

    path: Annotated[
        str, describe('unix socket; its folder must exist and only the daemon may write to it; "": no socket')
    ] = "/run/hangwatch/socket"
    per_minute: Annotated[int, describe("maximum number of dumps per minute", 1, 600)] = 30
    per_minute_of_owner: Annotated[int, describe("maximum number of dumps per minute of one user", 1, 600)] = 6


class Hooks(Section, frozen=True):
    """Programs that run when a job's state changes. Each is a list of path and arguments; see docs/hooks.md."""

    on_hung: Annotated[tuple[str, ...], describe("runs when a job on this node hangs; []: nothing runs")] = ()
    on_stalled: Annotated[tuple[str, ...], describe("runs when a job stalls")] = ()
    on_recovered: Annotated[tuple[str, ...], describe("runs when a hung or stalled job works again")] = ()
    on_ended: Annotated[tuple[str, ...], describe("runs when a hung or stalled job has ended")] = ()
    on_crashed: Annotated[tuple[str, ...], describe("runs when ranks of a job have died")] = ()
    deadline_seconds: Annotated[
        float, describe("a hook that takes longer is killed, with all its children", 1.0, 3600.0)
    ] = 60.0
    per_minute: Annotated[int, describe("maximum number of hooks per minute; further hooks are not called", 1, 600)] = (
        30
    )
    per_minute_of_owner: Annotated[
        int, describe("maximum number of hooks per minute for the jobs of one owner", 1, 600)
    ] = 6


class ActivityRule(Section, frozen=True):
    """A row to add to the activity table. A frame that matches `function` and `file` is doing `activity`."""

    activity: str
    function: Annotated[str, Meta(min_length=1, description="shell pattern of the function's plain name")]
    file: Annotated[str, Meta(min_length=1, description="shell pattern of the end of the file's path")] = "*"
    operation: str = ""


class Activities(Section, frozen=True):
    """Additions to the built-in table of activities."""

    rules: tuple[ActivityRule, ...] = ()


class Log(Section, frozen=True):
    """The log on standard error."""

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


class Settings(Section, frozen=True):
    """The whole configuration. `checks` has an undecoded table for each check, which the check decodes itself."""

    gpu: Gpu = Gpu()
    jobs: Jobs = Jobs()
    detector: Detector = Detector()
    progress: Progress = Progress()
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
        """Longest duration of a capture in seconds: every round takes until its deadline."""
        capture = self.capture
        return capture.rounds * capture.round_deadline_seconds + (capture.rounds - 1) * capture.pause_seconds

    @property
    def dump_after_seconds(self) -> float:
        """Seconds from the moment when a job becomes quiet to the end of its first capture."""
        return self.detector.hold_seconds + self.capture.usual_seconds


def load(path: Path) -> Settings:
    """Read the settings from a TOML file. Raises ConfigError."""
    return parse(read(path), str(path))


def read(path: Path) -> str:
    """Return the text of a configuration file. Raises ConfigError."""
    try:
        flags = 0 if bounded_read.is_inherited_stream(path) else os.O_NONBLOCK
        return bounded_read.read(path, MOST_BYTES, flags=flags).decode("utf-8")
    except bounded_read.FileError as error:
        raise ConfigError(
            f"{error}\n"
            "  without --config, hangwatch reads /etc/hangwatch/hangwatch.toml if it exists, else its defaults apply;\n"
            "  `hangwatch config --sample` prints a file to start from"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start}); TOML files must be UTF-8") from None


def parse(text: str, source: str) -> Settings:
    """Decode TOML text. `source` is the file name for error messages. Raises ConfigError."""
    try:
        table = toml_file.parse(text, source)
    except toml_file.TomlError as error:
        raise ConfigError(str(error)) from None
    return decode(table, Settings, source, (), text)


def decode(table: object, section: type[T], source: str, path: tuple[str, ...], text: str = "") -> T:
    """Convert a decoded TOML table to a value of the struct `section`. Raises ConfigError.

    `path` is the list of keys from the top of the file to the table. With `text`, the text of the file, errors name
    the line.
    """
    value, problems = toml_file.decode(table, section, source, path, text)
    if problems or value is None:
        sections = frozenset(problem.keys[0] for problem in problems if problem.keys)
        raise ConfigError(*(problem.message for problem in problems), valid_settings=value, sections=sections)
    return value


def sample(sections: dict[str, type[Any]] | None = None) -> str:
    """Return a commented configuration file with all defaults. `sections` are the Settings of checks by name."""
    lines = ["# hangwatch configuration. Every key is optional; the values shown are the defaults.", ""]
    for name, hint in get_type_hints(Settings).items():
        if isinstance(hint, type) and issubclass(hint, Section) and name != "activities":
            lines += _sample_section(name, hint)
    lines += [
        "# Further rows of the table of activities (what a stack is doing):",
        "# [[activities.rules]]",
        '# activity = "data_loading"',
        '# function = "read_shard"',
        '# file = "*/our_loader.py"',
        "",
    ]
    for name, section in sorted((sections or {}).items()):
        lines += _sample_section(f"checks.{name}", section)
    return "\n".join(lines)


def _sample_section(title: str, section: type[Any]) -> list[str]:
    lines = [f"# {(section.__doc__ or '').strip().splitlines()[0]}", f"[{title}]"]
    defaults = section()
    for name, hint in get_type_hints(section, include_extras=True).items():
        metas = [meta for meta in get_args(hint)[1:] if isinstance(meta, Meta)]
        description = next((f"{meta.description}; " for meta in metas if meta.description), "")
        encoded = msgspec.json.encode(getattr(defaults, name)).decode()  # a JSON scalar or list is TOML, too
        lines.append(f"{name} = {encoded}  # {description}{toml_file.describe_allowed(hint)}")
    return [*lines, ""]
