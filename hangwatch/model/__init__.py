"""All values that pass between packages, in the order in which they flow. Read this module first.

All values are frozen. A field's name ends in its unit; ratios run from 0 to 1. Times named `*_unix_seconds` are
wall clock (for people and for other nodes), times named `*_monotonic_seconds` are CLOCK_MONOTONIC (for intervals).

Reading the machine has three outcomes. A value. `None`: the device does not have this value; this is not an error, and
nothing is exported. `Fault`: the device should have responded and did not. 0, -1 or "N/A" never replace a reading.

All packages import from here. The imports below are the table of contents; each module imports only modules above
it.
"""

from hangwatch.model.value import Value, Fault, list_by_key, median, sum_all
from hangwatch.model.gpus import (
    GpuLevels,
    GpuName,
    GpuSample,
    GpuSweep,
    GpuUse,
    GpuTraffic,
    PortCounters,
    PortTraffic,
    GpuReadings,
    TrafficSweep,
    SamplerStatus,
)
from hangwatch.model.jobs import (
    ProcessId,
    Process,
    Worker,
    Rank,
    INTERFACES_OF_ONE_NODE,
    PortUse,
    Waiting,
    JobName,
    Died,
    EndedProcess,
    Job,
    find_jobs,
    NotMonitored,
    FoundJobs,
    LONGEST_REASON,
    LONGEST_SILENCE_SECONDS,
    SHORTEST_SILENCE_SECONDS,
    PageSilence,
    SilenceAnswer,
)
from hangwatch.model.states import JobState, OPEN_STATES, RESTING_STATES, Motion, Signature
from hangwatch.model.waits import (
    ENDED_STATES,
    SIGNAL_STOPPED_STATE,
    STOPPED_STATES,
    BLOCKED_STATES,
    FUSE_WAITS,
    AsksRank,
    CallObject,
    Rests,
    SystemCall,
    Sleep,
    FileLock,
    CallTarget,
    KernelCall,
    WorkerCall,
    is_loopback,
    Store,
    Awaited,
    WaitEnd,
    Waits,
)
from hangwatch.model.dumps import Frame, Thread, Stack
from hangwatch.model.dumps import (
    ThreadCounters,
    AwaitedThread,
    MainThread,
    Traffic,
    ProcessDump,
    KernelLine,
    OutputEnd,
    LastLines,
    ProcessDetails,
    RankId,
    WorkerDump,
    RankDump,
    Setting,
    Difference,
    Environment,
    Capture,
)
from hangwatch.model.groups import (
    EnqueuedOperation,
    GroupRecords,
    RecorderState,
    CodeRegion,
    StackFacts,
    KernelFacts,
    Usage,
    CollectiveProgress,
    RecorderFacts,
    Member,
    Group,
    Grouping,
    gaps,
    spans,
)
from hangwatch.model.verdicts import Confidence, ActionKind, RecommendedAction
from hangwatch.model.verdicts import Evidence, CheckFirst, Supplement, Verdict
from hangwatch.model.incidents import (
    CRASHED,
    PAGED,
    INCIDENT_VERSION,
    LONGEST_CAUSE,
    ArrivalStatus,
    CollectiveSeries,
    RankLateness,
    PowerSeries,
    TimelineEntry,
    Feedback,
    PastHang,
    Incident,
)
from hangwatch.model.checks import CheckStatus, CheckVerdict, Point, CheckResult
