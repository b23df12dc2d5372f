"""The table of all metric families of the daemon, in the order of a scrape. Checks declare their own metrics."""

from typing import NamedTuple

from hangwatch.model import JobName


class Family(NamedTuple):
    """The text, the labels and the kind of a metric: gauge, counter or histogram."""

    text: str
    labels: tuple[str, ...] = ()
    kind: str = "gauge"


_JOB = JobName.__struct_fields__  # the labels of every series of a job
_RANK = (*_JOB, "rank", "local_rank")
_GPU = ("gpu", "uuid")
_PLACE = ("activity", "waits_for", "motion", "frame", "stack")
_VERDICT = ("verdict", "confidence", "named", "check_first", "summary")
_CRASH = ("incident", "confidence", "named", "summary", "url")
_IDENTITY = ("launcher", "user", "owner", "world_size", "name", "program", "title")
_GROUP = (*_JOB, "rank", "group")
_STANCE = ("stance", "has_open")
_NUMBER = ("generation", "waited_here", "more_ranks")

FAMILIES = {
    "time_seconds": Family("Wall clock of this node in Unix time"),
    "build_info": Family("Version of hangwatch and of its Python", ("python", "version")),
    # --- GPUs
    "gpu_sampler_up": Family("1 while the GPU sampler responds"),
    "gpu_sampler_restarts": Family("GPU sampler processes that were replaced", kind="counter"),
    "gpu_sampler_abandoned": Family("GPU sampler processes that could not be killed", kind="counter"),
    "gpu_sample_age_seconds": Family("Age of the newest GPU sample"),
    "gpu_up": Family("1 while the driver returns readings of this GPU", ("gpu",)),
    "gpu_power_watts": Family("Power draw, averaged by NVML over one second", _GPU),
    "gpu_power_limit_watts": Family("Enforced power limit", _GPU),
    "gpu_utilization_ratio": Family("Ratio of the last sample period in which a kernel ran; also 1 in a hang", _GPU),
    "gpu_memory_used_bytes": Family("GPU memory in use", _GPU),
    "gpu_memory_total_bytes": Family("GPU memory", _GPU),
    "gpu_sm_clock_hertz": Family("Clock of the streaming multiprocessors", _GPU),
    "gpu_temperature_celsius": Family("Temperature of the GPU die", _GPU),
    "gpu_energy_joules": Family("Energy used since the driver was loaded", _GPU, "counter"),
    "gpu_faults": Family("Readings that failed in the newest sample, by reason", ("gpu", "reason")),
    "gpu_busy_power_watts": Family("Busy level: power of this GPU while its job works", _GPU),
    "gpu_low_power_threshold_watts": Family("Power at or below which the GPU is quiet", _GPU),
    # --- jobs
    "job_info": Family("Jobs on this node; `title` is the name of the job in a page", (*_JOB, *_IDENTITY)),
    "job_state": Family("1 for the current state of the job, and no other series", (*_JOB, "state")),
    "job_ranks": Family("Ranks of the job that run on this node", _JOB),
    "job_absent_ranks": Family("Ranks of the job that should run on this node but do not", _JOB),
    "job_quiet_seconds": Family("Time since the job became quiet", _JOB),
    "job_page": Family("1 while the on-call should be paged for this job, by its state", (*_JOB, "state")),
    "job_gpu_info": Family("The GPUs that each rank uses", (*_JOB, *_GPU, "rank", "local_rank")),
    "job_idle_worker_seconds": Family(
        "Time since the GPU of this rank stopped working, while all other GPUs of the job work", (*_JOB, "rank")
    ),
    "job_silence_end_timestamp_seconds": Family(
        "Jobs that do not page until this time, because `hangwatch silence` asked for it", (*_JOB, "reason")
    ),
    "rank_collectives": Family(
        "Collectives that the rank has enqueued since hangwatch follows it, by PyTorch's flight recorder",
        _RANK,
        "counter",
    ),
    "job_progress_gap_seconds": Family("Time since the ranks of the job enqueued a collective", _JOB),
    "job_usual_gap_seconds": Family("Length that 99 % of the job's gaps between collectives do not exceed", _JOB),
    "job_suspected_info": Family("The verdict on a job that is suspected and does not page yet", (*_JOB, *_VERDICT)),
    "rank_lateness_seconds": Family(
        "Median time by which the rank enqueues a collective behind the median of the other ranks of the node", _RANK
    ),
    "job_straggler_lateness_ratio": Family(
        "Lateness of the named rank as a ratio of the step; only while a rank is named", _RANK
    ),
    "job_step_seconds": Family("Median time between two collectives at the place where ranks are compared", _JOB),
    # --- incidents and crashes
    "incident_info": Family(
        "Open incidents: the verdict as a sentence, the named ranks, the ranks to check first, and what to do",
        (*_JOB, "incident", *_VERDICT, "url", "stuck_on", "next_step", "action", "fingerprint"),
    ),
    "incident_opened_timestamp_seconds": Family("Time of the first capture of the incident", (*_JOB, "incident")),
    "incident_timeout_timestamp_seconds": Family(
        "Time at which the collective timeout ends the job, if it is known; `source` says how",
        (*_JOB, "incident", "source"),
    ),
    "rank_activity": Family("Activity of each rank of a job with an open incident", (*_RANK, *_PLACE, "does")),
    "job_activity_ranks": Family(
        "Ranks on this node with this activity, of a job with an open incident", (*_JOB, *_PLACE)
    ),
    "job_crash_info": Family(
        "Jobs with ranks that crashed in the last 15 minutes: the rank that died first, and the cause",
        (*_JOB, *_CRASH),
    ),
    "job_crashes": Family("Crashes of jobs on this node; each crash of a restarted job counts", kind="counter"),
    "job_remains_unread": Family(
        "Crashes with unread artifacts, because too many crashes of the same owner were waiting", kind="counter"
    ),
    # --- sequence numbers
    "rank_collective_number": Family(
        "Number of the newest collective in the default group, of a rank that does not wait in a collective", _GROUP
    ),
    "rank_collective_waited_number": Family("Number of the collective in which the rank waits", _GROUP),
    "job_collective_waited_number": Family(
        "Number of the collective in which `rank` waits, and up to seven `more_ranks` on this node",
        (*_GROUP, "more_ranks"),
    ),
    "rank_collective_unseen_since_timestamp_seconds": Family(
        "For a rank without a record in the default group: start of its complete records, 0 if no record was lost",
        (*_GROUP, *_STANCE),
    ),
    "job_collective_number": Family(
        "Number of the newest collective of `rank`, and of up to seven `more_ranks` on this node with the same labels; "
        '`waited_here` is "no" if no rank on this node waits in the group, which is not the default group',
        (*_GROUP, *_STANCE, *_NUMBER),
    ),
    "job_collective_ranks": Family(
        "Ranks on this node that wait in this collective, or have it as their newest collective",
        (*_JOB, "group", "description", "number", "operation", "waits"),
    ),
    "job_collective_used_ranks": Family("Ranks on this node that have used the default group", (*_JOB, "group")),
    "job_collective_waiting_ranks": Family("Ranks on this node that wait in a collective of any group", _JOB),
    "job_collective_waited_since_timestamp_seconds": Family(
        "Time at which the first waiting rank on this node enqueued its collective, by group", (*_JOB, "group")
    ),
    "job_collective_left_out": Family("Pairs of rank and group without series because of a limit", _JOB),
    # --- hangwatch itself
    "captures": Family("Captures, by result", ("result",), "counter"),
    "dump_failures": Family("Dumps without a stack, by reason", ("reason",), "counter"),
    "dumpers_stuck": Family("py-spy processes that are blocked in the kernel and cannot be killed"),
    "dump_seconds": Family("Duration of one dump of one process", kind="histogram"),
    "hook_runs": Family(
        "Hooks by outcome; not_called: a limit was reached, or the hook needs an incident that was not written",
        ("event", "outcome"),
        "counter",
    ),
    "scan_seconds": Family("Duration of the newest scan of /proc"),
    "running_seconds": Family("Time since the current scan or capture began; 0 if none is running", ("beat",)),
    "late_tasks": Family("Tasks that were due while their last run continued", ("task",), "counter"),
    "left_out": Family("Jobs, ranks and processes not monitored: exceeds a limit in [jobs]", ("owner", "what")),
    "unseen_ranks": Family(
        "Ranks with a source that hangwatch cannot read, and why", (*_JOB, "source", "reason", "detail")
    ),
    "store_up": Family("1 while incidents can be written to disk; jobs are monitored in any case"),
    "check_status": Family("Status of the check: 0 OK, 1 UNKNOWN, 2 WARNING, 3 CRITICAL", ("check",)),
    "check_info": Family("Status, reason and message of the check", ("check", "status", "reason", "message")),
    "check_success": Family("1 if the check ran without an internal error", ("check",)),
    "check_duration_seconds": Family("Duration of the last run", ("check",)),
    "check_last_run_timestamp_seconds": Family("Time of the last run", ("check",)),
    "check_faults": Family("Readings that the check needed but could not get", ("check",)),
    "export_errors": Family("Scrapes that are incomplete because of an error inside hangwatch", kind="counter"),
}
