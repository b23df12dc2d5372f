"""One job on all its nodes: states, activity of every rank, named ranks, and power of each rank."""

from functools import partial

from grafana_foundation_sdk.builders import dashboard as builders

from grafana.source.panels import (
    BAD_IF_ANY,
    INCIDENTS,
    MOTIONS,
    NO_GPU_OF_JOB,
    NO_INCIDENT,
    NO_JOB,
    ODD_RANKS,
    STATES,
    STATUS_WORDS,
    WARN_IF_ANY,
    activities_of,
    big_number,
    gpus_of_jobs,
    job_variable,
    lines,
    odd_ranks,
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
    sixth = partial(big_number, width=4)
    for panel in (
        sixth(
            "State",
            f"max(hangwatch:job_state:code{{{OF}}})",
            "The worst state over its nodes.",
            steps=((None, "green"), (5, "yellow"), (7, "orange"), (8, "red")),
            values=STATES,
            height=6,
        ),
        rows(
            "What it is stuck on",
            f"{{{INCIDENTS},{OF}}}",
            {"instance": "Node", "stuck_on": "Stuck on", "next_step": "Do first"},
            "Each node judges its own ranks only.",
            width=20,
            height=6,
            empty=NO_INCIDENT,
            links={"Node": TO_NODE},
            widths={"Node": 90},
        ),
        sixth("Quiet for", f"max(hangwatch_job_quiet_seconds{{{OF}}})", "The longest time over its nodes.", unit="s"),
        sixth("Nodes", f"count(count by (instance) (hangwatch_job_info{{{OF}}}))", "Nodes that report the job."),
        sixth("Ranks", f"sum(hangwatch_job_ranks{{{OF}}})", "Running ranks, on the nodes that respond."),
        sixth(
            "Ranks absent",
            f"sum(hangwatch_job_absent_ranks{{{OF}}})",
            "Ranks that should run on one of its nodes and do not run.",
            steps=BAD_IF_ANY,
        ),
        sixth(
            "Waiting ranks",
            f"hangwatch:waiting_ranks:count{{{OF}}} or vector(0)",
            "Ranks that wait in a collective or for their GPU, in an open incident.",
        ),
        sixth(
            "Odd ranks",
            f"count({odd_ranks(OF)}) or vector(0)",
            "Ranks that do not wait while at least half of the ranks of the job do, or have not joined a collective.",
            steps=WARN_IF_ANY,
        ),
    ):
        built.with_panel(panel)


def _ranks(built: builders.Dashboard) -> None:  # long: the panels in their order on the page
    built.with_row(builders.Row("Ranks and what they wait for"))
    where = {"rank": "Rank", "frame": "Innermost frame", "motion": "Motion", "activity": "Activity", "instance": "Node"}
    for panel in (
        rows(
            "Verdict of each node",
            f"{{{INCIDENTS},{OF}}} or on (job, instance, job_key) hangwatch_job_suspected_info{{{OF}}}",
            {
                "instance": "Node",
                "verdict": "Verdict",
                "confidence": "Confidence",
                "named": "Named",
                "summary": "Why",
                "incident": "Incident",
            },
            "`hangwatch report INCIDENT` on the node shows the evidence. Without an incident: the verdict on a "
            "suspected job, which does not page yet.",
            height=6,
            empty=NO_INCIDENT,
            links={"Node": TO_NODE},
            widths={"Node": 90, "Verdict": 150, "Confidence": 100, "Named": 90, "Incident": 160},
        ),
        rows(
            "Odd ranks",
            odd_ranks(OF),
            where,
            ODD_RANKS,
            width=12,
            height=6,
            empty="no rank stands out",
            colours={"Motion": MOTIONS},
            links={"Node": TO_NODE},
            widths={"Rank": 70, "Motion": 90, "Activity": 120, "Node": 90},
        ),
        rows(
            "Ranks that have not joined",
            f"hangwatch:missing_rank:number{{{OF}}}",
            {
                "rank": "Rank",
                "Value": "Has reached",
                "group": "Group",
                "instance": "Node",
                "stance": "By its stack",
                "has_open": "Open operation",
            },
            "By sequence numbers, over all nodes. Named is a rank outside a wait without an open operation.",
            width=12,
            height=6,
            empty="no rank is known to be behind",
            links={"Node": TO_NODE},
            widths={"Rank": 70, "Node": 90, "Has reached": 110, "By its stack": 110, "Open operation": 115},
        ),
        rows(
            "Collectives with waiting ranks",
            f'sum by (operation, number, description) (hangwatch_job_collective_ranks{{{OF},waits="yes"}})',
            {"Value": "Ranks", "operation": "Operation", "number": "Number", "description": "Group"},
            "Collectives that were open in the first and last round of the capture, by PyTorch's flight recorder.",
            width=12,
            height=9,
            empty="no rank waits in a collective",
            widths={"Ranks": 70, "Number": 100},
        ),
        rows(
            "Groups",
            f"""sum by (activity, motion, frame, stack) (
              hangwatch_job_activity_ranks{{{OF}}} or hangwatch:job_activity_ranks:kept{{{OF}}}
            )""",
            {
                "Value": "Ranks",
                "frame": "Innermost frame",
                "motion": "Motion",
                "activity": "Activity",
                "stack": "Stack",
            },
            "Ranks with the same stack. Two large groups that both wait are in different collectives: a mismatch.",
            width=12,
            height=9,
            empty=NO_INCIDENT,
            colours={"Motion": MOTIONS},
            widths={"Ranks": 70, "Motion": 90, "Activity": 120, "Stack": 115},
        ),
        rows(
            "All ranks",
            activities_of(OF),
            {**where, "stack": "Stack"},
            "The activity of every rank when its stack was taken.",
            height=9,
            empty=NO_INCIDENT,
            colours={"Motion": MOTIONS},
            links={"Node": TO_NODE},
            widths={"Rank": 70, "Motion": 90, "Activity": 120, "Node": 90, "Stack": 115},
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
            "Checks on its nodes",
            f'hangwatch_check_info{{status!="OK"}} and on (job, instance) hangwatch_job_info{{{OF}}}',
            {"instance": "Node", "status": "Status", "message": "Message", "check": "Check", "reason": "Reason"},
            "Checks of its nodes that are not OK.",
            height=6,
            empty="no check reports anything but OK",
            colours={"Status": STATUS_WORDS},
            links={"Node": TO_NODE},
            widths={"Node": 90, "Status": 100, "Check": 140, "Reason": 170},
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
            empty="too few steps have been compared",
        ),
        lines(
            "Clock of each GPU",
            "percentunit",
            [(f"hangwatch_gpu_clock_ratio{{{OF}}}", "GPU {{gpu}}, rank {{rank}}, {{instance}}")],
            "SM clock as a ratio of the median over the GPUs of its node, while all are busy.",
            height=9,
            empty="no node has several busy GPUs",
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
