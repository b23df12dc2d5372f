"""One job on all its nodes: states, activity of every rank, named ranks, and power of each rank."""

from grafana_foundation_sdk.builders import dashboard as builders

from grafana.source.panels import (
    BAD_IF_ANY,
    MOTIONS,
    NO_GPU_OF_JOB,
    NO_INCIDENT,
    NO_JOB,
    STATES,
    STATUS_WORDS,
    WARN_IF_ANY,
    big_number,
    gpus_of_jobs,
    job_variable,
    lines,
    page,
    rows,
    timeline,
)

OF = 'job_key="$job_key"'
TO_NODE = "/d/hangwatch-node?var-node=${__value.raw}&${__url_time_range}"
RANKS = f"hangwatch_job_gpu_info{{{OF}}} * on (job, instance, uuid) group_left ()"
GPUS = f"{gpus_of_jobs(OF)} * on (job, instance, uuid) group_left ()"
RANK = "rank {{rank}}, GPU {{gpu}}, {{instance}}"


def dashboard() -> builders.Dashboard:
    """Build the job dashboard."""
    built = page(
        "hangwatch-job",
        "hangwatch / Job",
        "All ranks of one job on all its nodes: states, activity of each rank, named ranks, power.",
        [job_variable()],
        OF,
    )
    _at_a_glance(built)
    _ranks(built)
    _progress(built)
    _power(built)
    return built


def _at_a_glance(built: builders.Dashboard) -> None:
    for panel in (
        big_number(
            "State",
            f"max(hangwatch:job_state:code{{{OF}}})",
            "The worst state over its nodes.",
            steps=((None, "green"), (5, "yellow"), (7, "orange"), (8, "red")),
            values=STATES,
        ),
        big_number(
            "Low power for", f"max(hangwatch_job_quiet_seconds{{{OF}}})", "The longest time over its nodes.", unit="s"
        ),
        big_number("Nodes", f"count(count by (instance) (hangwatch_job_info{{{OF}}}))", "Nodes that report the job."),
        big_number("Ranks", f"sum(hangwatch_job_ranks{{{OF}}})", "Running ranks, on the nodes that respond."),
        big_number(
            "Ranks absent",
            f"sum(hangwatch_job_absent_ranks{{{OF}}})",
            "Ranks that should run on one of its nodes and do not run.",
            steps=BAD_IF_ANY,
        ),
        big_number(
            "Waiting ranks",
            f"hangwatch:waiting_ranks:count{{{OF}}} or vector(0)",
            "Ranks that wait in a collective or for their GPU, in an open incident.",
        ),
        big_number(
            "Odd ranks",
            f"count(hangwatch:odd_rank:held{{{OF}}}) or vector(0)",
            "Ranks that do not wait while at least half of the ranks of the job do.",
            steps=WARN_IF_ANY,
        ),
        big_number(
            "Owner",
            f"max by (owner) (hangwatch_job_info{{{OF}}})",
            "The owner as the kernel reports it: the Slurm job, else the user id.",
            name_of="owner",
        ),
    ):
        built.with_panel(panel)


def _ranks(built: builders.Dashboard) -> None:  # long: the panels in their order on the page
    built.with_row(builders.Row("Ranks and what they wait for"))
    where = {"rank": "Rank", "instance": "Node", "activity": "Activity", "motion": "Motion", "frame": "Innermost frame"}
    for panel in (
        rows(
            "Odd ranks",
            f"hangwatch:odd_rank:held{{{OF}}}",
            where,
            "Over all nodes, by a recording rule: by sequence numbers if these give a conclusion, else by activity. "
            "Empty: no rank can be named.",
            width=12,
            empty="no rank stands out",
            colours={"Motion": MOTIONS},
            links={"Node": TO_NODE},
            widths={"Rank": 70, "Motion": 90},
        ),
        rows(
            "Verdict of each node",
            f"hangwatch:incident:held{{{OF}}}",
            {
                "instance": "Node",
                "verdict": "Verdict",
                "confidence": "Confidence",
                "named": "Named",
                "summary": "Why",
                "incident": "Incident",
            },
            "Each node judges its own ranks only. `hangwatch report INCIDENT` on the node shows the evidence.",
            width=12,
            empty=NO_INCIDENT,
            links={"Node": TO_NODE},
        ),
        rows(
            "Ranks that have not joined",
            f"hangwatch:missing_rank:number{{{OF}}}",
            {
                "rank": "Rank",
                "instance": "Node",
                "group": "Group",
                "Value": "Has reached",
                "stance": "By its stack",
                "has_open": "Has an open operation",
            },
            "By sequence numbers, over all nodes. Named is a rank outside a wait without an open operation.",
            width=12,
            empty="no rank is known to be behind",
            links={"Node": TO_NODE},
            widths={"Rank": 70, "Has reached": 110},
        ),
        rows(
            "Collectives with waiting ranks",
            f'sum by (operation, number, description) (hangwatch_job_collective_ranks{{{OF},waits="yes"}})',
            {"Value": "Ranks", "operation": "Operation", "number": "Number", "description": "Group"},
            "Collectives that were open in the first and last round of the capture, by PyTorch's flight recorder.",
            width=12,
            empty="no rank waits in a collective",
            widths={"Ranks": 70, "Number": 100},
        ),
        timeline(
            "State on each node",
            f"hangwatch:job_state:code{{{OF}}}",
            "{{instance}}",
            STATES,
            "The state that each node reports.",
            empty=NO_JOB,
        ),
        rows(
            "Groups",
            f"sum by (activity, motion, frame, stack) (hangwatch:job_activity_ranks:held{{{OF}}})",
            {
                "Value": "Ranks",
                "activity": "Activity",
                "motion": "Motion",
                "frame": "Innermost frame",
                "stack": "Stack",
            },
            "Ranks with the same stack. Two large groups that both wait are in different collectives: a mismatch.",
            width=10,
            height=9,
            empty=NO_INCIDENT,
            colours={"Motion": MOTIONS},
            widths={"Ranks": 70, "Motion": 90},
        ),
        rows(
            "All ranks",
            f"hangwatch_rank_activity{{{OF}}} or hangwatch:rank_activity:kept{{{OF}}}",
            {**where, "stack": "Stack"},
            "The activity of every rank when its stack was taken.",
            width=14,
            height=9,
            empty=NO_INCIDENT,
            colours={"Motion": MOTIONS},
            links={"Node": TO_NODE},
            widths={"Rank": 70, "Motion": 90},
        ),
        rows(
            "Checks on its nodes",
            f'hangwatch_check_info{{status!="OK"}} and on (job, instance) hangwatch_job_info{{{OF}}}',
            {"instance": "Node", "check": "Check", "status": "Status", "reason": "Reason", "message": "Message"},
            "Checks of its nodes that are not OK.",
            height=6,
            empty="no check reports anything but OK",
            colours={"Status": STATUS_WORDS},
            links={"Node": TO_NODE},
            widths={"Status": 100},
        ),
    ):
        built.with_panel(panel)


def _progress(built: builders.Dashboard) -> None:
    built.with_row(builders.Row("Progress"))
    for panel in (
        lines(
            "Collectives of each rank",
            "none",
            [(f"rate(hangwatch_rank_collectives_total{{{OF}}}[1m])", "rank {{rank}}, {{instance}}")],
            "Collectives that it enqueues per second, by PyTorch's flight recorder.",
            height=9,
            empty="no rank has a flight recorder",
        ),
        lines(
            "Time since the last collective",
            "s",
            [
                (f"max(hangwatch_job_progress_gap_seconds{{{OF}}})", "now"),
                (f"max(hangwatch_job_usual_gap_seconds{{{OF}}})", "99 % of its gaps"),
            ],
            "The longest time over its nodes.",
            height=9,
            empty="no rank has a flight recorder",
        ),
        lines(
            "Lateness of each rank",
            "s",
            [(f"hangwatch_rank_lateness_seconds{{{OF}}}", "rank {{rank}}, {{instance}}")],
            "Median time by which it enqueues a collective behind the other ranks of its node.",
            height=9,
            empty="fewer than 300 steps have been compared",
        ),
        lines(
            "Clock of each GPU",
            "percentunit",
            [(f"hangwatch_gpu_clock_ratio{{{OF}}}", "GPU {{gpu}}, rank {{rank}}, {{instance}}")],
            "SM clock as a ratio of the median over the GPUs of its node, while all are busy.",
            height=9,
            empty="no node has several busy GPUs",
        ),
        rows(
            "Suspected",
            f"hangwatch_job_suspected_info{{{OF}}}",
            {"instance": "Node", "verdict": "Verdict", "confidence": "Confidence", "named": "Named", "summary": "Why"},
            "The verdict of each node on a job without new collectives. It does not page yet.",
            width=24,
            empty="the job is not suspected",
            links={"Node": TO_NODE},
        ),
    ):
        built.with_panel(panel)


def _power(built: builders.Dashboard) -> None:
    built.with_row(builders.Row("Power"))
    for panel in (
        lines(
            "Power of each rank",
            "watt",
            [(f"{RANKS} hangwatch_gpu_power_watts", RANK)],
            "The odd rank often draws less, or more, than the others. Ranks that share a GPU each show its full power.",
            height=9,
            empty=NO_GPU_OF_JOB,
        ),
        lines(
            "Utilisation of each rank",
            "percentunit",
            [(f"{RANKS} hangwatch_gpu_utilization_ratio", RANK)],
            "Ranks that wait in NCCL show 100 %, the rank that they wait for often 0 %.",
            height=9,
            maximum=1,
            empty=NO_GPU_OF_JOB,
        ),
        lines(
            "Power of the job",
            "watt",
            [
                (f"sum({GPUS} hangwatch_gpu_power_watts)", "power"),
                (f"sum({GPUS} hangwatch_gpu_busy_power_watts)", "busy level"),
                (f"sum({GPUS} hangwatch_gpu_low_power_threshold_watts)", "low-power threshold"),
            ],
            "Sum over its GPUs.",
            empty=NO_GPU_OF_JOB,
            dashed={"busy level": "green", "low-power threshold": "orange"},
        ),
        lines(
            "GPUs with low power",
            "percentunit",
            [
                (
                    f"avg by (instance) ({GPUS} "
                    "(hangwatch_gpu_power_watts <= bool hangwatch_gpu_low_power_threshold_watts))",
                    "{{instance}}",
                )
            ],
            "Share of the GPUs at or below the threshold. A node suspects the job from [detector] quorum (0.5) on.",
            maximum=1,
            empty=NO_GPU_OF_JOB,
        ),
    ):
        built.with_panel(panel)
