"""One node: its GPUs and their limits, its jobs, its ranks in an incident, its checks, and hangwatch itself."""

from grafana_foundation_sdk.builders import dashboard as builders

from grafana.source.panels import (
    INCIDENTS,
    MOTIONS,
    NAME,
    NO_GPU,
    NO_INCIDENT,
    NO_JOB,
    OWNER,
    STATES,
    STATUS_WORDS,
    STATUSES,
    TO_JOB,
    YES_NO,
    big_number,
    job_variable,
    lines,
    page,
    rows,
    timeline,
    variable,
)

ON = 'instance="$node"'
# Metrics that every exporter has; other exporters on the node may have the same instance.
OWN = f'{ON},job=~"(.+/)?hangwatch"'
OF = f'{ON},job_key=~"$job_key"'
GPU = f'{ON},gpu=~"$gpu"'


def dashboard() -> builders.Dashboard:
    """Build the node dashboard."""
    built = page(
        "hangwatch-node",
        "hangwatch / Node",
        "One node: power of each GPU with limit, busy level and low-power threshold; jobs, incidents, checks.",
        [
            variable("node", "Node", "label_values(hangwatch_build_info, instance)"),
            job_variable(ON, many=True),
            variable("gpu", "GPU", 'label_values(hangwatch_gpu_power_watts{instance="$node"}, gpu)', many=True),
        ],
        OF,
    )
    _at_a_glance(built)
    built.with_row(builders.Row("Power"))
    built.with_panel(
        lines(
            "GPU $gpu",
            "watt",
            [
                (f"hangwatch_gpu_power_watts{{{GPU}}}", "power of GPU {{gpu}}"),
                (f"max(hangwatch_gpu_power_limit_watts{{{GPU}}})", "limit"),
                (f"max(hangwatch_gpu_busy_power_watts{{{GPU}}})", "busy level"),
                (f"max(hangwatch_gpu_low_power_threshold_watts{{{GPU}}})", "low-power threshold"),
            ],
            "Quiet: at or below the low-power threshold. Busy level: the power in the last 10 minutes of work.",
            width=6,
            height=7,
            dashed={"limit": "red", "busy level": "green", "low-power threshold": "orange"},
            repeat="gpu",
            empty=NO_GPU,
        )
    )
    _jobs(built)
    _gpus(built)
    _checks(built)
    _own_health(built)
    return built


def _at_a_glance(built: builders.Dashboard) -> None:
    for panel in (
        big_number(
            "Worst job",
            f"max(hangwatch:job_state:code{{{OF}}})",
            "The worst state of the jobs on this node.",
            width=4,
            steps=((None, "green"), (5, "yellow"), (7, "orange"), (8, "red")),
            values=STATES,
        ),
        big_number(
            "Worst check",
            f"max(hangwatch_check_status{{{ON}}})",
            "The worst status of the checks.",
            width=4,
            steps=((None, "green"), (1, "#8e8e99"), (2, "orange"), (3, "red")),
            values=STATUSES,
        ),
        big_number("GPUs", f"count(hangwatch_gpu_power_watts{{{ON}}})", "GPUs that report their power.", width=4),
        big_number("Power", f"sum(hangwatch_gpu_power_watts{{{ON}}})", "Power of all GPUs.", unit="watt", width=4),
        big_number(
            "Sampler responds",
            f"hangwatch_gpu_sampler_up{{{ON}}}",
            "The process that reads the GPUs responds. Without it no hang is detected.",
            width=4,
            steps=((None, "red"), (1, "green")),
            values=YES_NO,
        ),
        big_number(
            "hangwatch",
            f"hangwatch_build_info{{{ON}}}",
            "The version of hangwatch on this node.",
            width=4,
            name_of="version",
        ),
    ):
        built.with_panel(panel)


def _jobs(built: builders.Dashboard) -> None:  # long: the panels in their order on the page
    built.with_row(builders.Row("Jobs and incidents"))
    for panel in (
        timeline(
            "Job states",
            f"hangwatch:job_state:code{{{OF}}} {OWNER}",
            NAME,
            STATES,
            "The states that this node reports.",
            width=12,
            empty=NO_JOB,
        ),
        lines(
            "Quiet for",
            "s",
            [(f"hangwatch_job_quiet_seconds{{{OF}}} {OWNER}", NAME)],
            "After [detector] hold_seconds (120 by default) stacks are taken.",
            height=7,
            empty=NO_JOB,
        ),
        rows(
            "Verdict",
            f"{{{INCIDENTS},{OF}}}",
            {
                "job_id": "Job",
                "job_key": "Key",
                "named": "Named",
                "stuck_on": "Stuck on",
                "next_step": "Do first",
                "verdict": "Verdict",
                "confidence": "Confidence",
                "incident": "Incident",
            },
            "`hangwatch report INCIDENT` on the node shows the sentence and the evidence.",
            empty=NO_INCIDENT,
            links={"Job": TO_JOB},
            widths={"Key": 150, "Named": 110, "Verdict": 150, "Confidence": 100},
        ),
        rows(
            "Ranks in an incident",
            f"hangwatch_rank_activity{{{OF}}} or hangwatch:rank_activity:kept{{{OF}}}",
            {
                "job_id": "Job",
                "job_key": "Key",
                "rank": "Rank",
                "local_rank": "Local rank",
                "activity": "Activity",
                "motion": "Motion",
                "frame": "Innermost frame",
                "stack": "Stack",
            },
            "The activity of each rank when its stack was taken. Ranks with the same stack form a group.",
            height=9,
            empty=NO_INCIDENT,
            colours={"Motion": MOTIONS},
            links={"Job": TO_JOB},
            widths={"Key": 150, "Rank": 70, "Local rank": 90, "Activity": 120, "Motion": 90, "Stack": 115},
        ),
        lines(
            "Ranks by activity",
            "none",
            [(f"sum by (activity, motion) (hangwatch_job_activity_ranks{{{OF}}})", "{{activity}}, {{motion}}")],
            "During the incident, from capture to capture.",
            stacked=True,
            empty="no incident was open in this time",
        ),
        rows(
            "Ranks and GPUs",
            f"hangwatch_job_gpu_info{{{OF}}}",
            {
                "job_id": "Job",
                "job_key": "Key",
                "rank": "Rank",
                "local_rank": "Local rank",
                "gpu": "GPU",
                "uuid": "UUID",
            },
            "The GPUs of each rank.",
            width=12,
            height=8,
            empty="no job on this node has a GPU",
            links={"Job": TO_JOB},
            widths={"Key": 150, "Rank": 60, "Local rank": 90, "GPU": 60},
        ),
    ):
        built.with_panel(panel)


def _gpus(built: builders.Dashboard) -> None:
    built.with_row(builders.Row("GPUs"))
    for title, unit, expr, about, top in (
        (
            "Utilisation",
            "percentunit",
            "hangwatch_gpu_utilization_ratio",
            "Share of time with a kernel on the GPU. Ranks that wait in NCCL show 100 %: not a sign of progress.",
            1,
        ),
        (
            "Memory",
            "percentunit",
            f"hangwatch_gpu_memory_used_bytes{{{GPU}}} / hangwatch_gpu_memory_total_bytes",
            "Share of the GPU's memory in use.",
            1,
        ),
        ("SM clock", "hertz", "hangwatch_gpu_sm_clock_hertz", "At its maximum in a hang that spins.", None),
        ("Temperature", "celsius", "hangwatch_gpu_temperature_celsius", "Temperature of the GPU die.", None),
    ):
        built.with_panel(
            lines(
                title,
                unit,
                [(expr if "/" in expr else f"{expr}{{{GPU}}}", "GPU {{gpu}}")],
                about,
                width=6,
                height=7,
                maximum=top,
                empty=NO_GPU,
            )
        )


def _checks(built: builders.Dashboard) -> None:
    built.with_row(builders.Row("Checks"))
    built.with_panel(
        rows(
            "Checks",
            f"hangwatch_check_info{{{ON}}}",
            {"check": "Check", "status": "Status", "reason": "Reason", "message": "Message"},
            "Every check gives a reason, also when it is OK.",
            width=14,
            height=12,
            colours={"Status": STATUS_WORDS},
            widths={"Check": 150, "Status": 100, "Reason": 160},
        )
    )
    built.with_panel(
        timeline(
            "Checks over time",
            f"hangwatch_check_status{{{ON}}}",
            "{{check}}",
            STATUSES,
            "UNKNOWN: the check could not determine the state.",
            width=10,
            height=12,
        )
    )


def _own_health(built: builders.Dashboard) -> None:  # long: the panels in their order on the page
    row = builders.Row("hangwatch itself")  # collapsed, because it contains panels
    for panel in (
        lines(
            "CPU of the daemon",
            "percentunit",
            [(f"rate(process_cpu_seconds_total{{{OWN}}}[$__rate_interval])", "cores")],
            "1 is one core.",
            width=6,
            height=7,
        ),
        lines(
            "Memory of the daemon",
            "bytes",
            [(f"process_resident_memory_bytes{{{OWN}}}", "resident")],
            "Resident memory.",
            width=6,
            height=7,
        ),
        lines(
            "Age of the newest GPU sample",
            "s",
            [(f"hangwatch_gpu_sample_age_seconds{{{ON}}}", "age")],
            "Grows while the driver does not respond.",
            empty=NO_GPU,
            width=6,
            height=7,
        ),
        lines(
            "Duration of a dump",
            "s",
            [
                (
                    f"""histogram_quantile(
                      0.95, sum by (le) (increase(hangwatch_dump_seconds_bucket{{{ON}}}[$__range]))
                    )""",
                    "95 % are faster than",
                ),
                (
                    f"""sum(increase(hangwatch_dump_seconds_sum{{{ON}}}[$__range]))
                    / sum(increase(hangwatch_dump_seconds_count{{{ON}}}[$__range]))""",
                    "mean",
                ),
            ],
            "Duration of one stack dump of one process, over the selected time.",
            width=6,
            height=7,
        ),
        lines(
            "Captures",
            "none",
            [
                (f"sum by (result) (hangwatch_captures_total{{{ON}}})", "{{result}}"),
                (
                    f"sum(hangwatch_dump_failures_total{{{ON}}}) or 0 * hangwatch_gpu_sampler_up{{{ON}}}",
                    "dumps without a stack",
                ),
            ],
            "Captures by result, and dumps without a stack, since the daemon started.",
            width=6,
            height=7,
        ),
        lines(
            "Sampler",
            "none",
            [
                (f"hangwatch_gpu_sampler_restarts_total{{{ON}}}", "replaced"),
                (f"hangwatch_gpu_sampler_abandoned_total{{{ON}}}", "could not be killed"),
                (f"sum(hangwatch_gpu_faults{{{ON}}}) or 0 * hangwatch_gpu_sampler_up{{{ON}}}", "readings missing now"),
                (f"hangwatch_export_errors_total{{{ON}}}", "scrapes with an error"),
            ],
            "Restarts of the process that reads the GPUs, and readings that are missing.",
            width=6,
            height=7,
        ),
        lines(
            "Duration of the checks",
            "s",
            [(f"hangwatch_check_duration_seconds{{{ON}}}", "{{check}}")],
            "Duration of the last run.",
            width=6,
            height=7,
        ),
        lines(
            "Scrape",
            "s",
            [(f"scrape_duration_seconds{{{OWN}}}", "duration")],
            "Time in which /metrics is served. A scrape never touches the machine.",
            width=6,
            height=7,
        ),
        rows(
            "Runs of the checks",
            [
                f"hangwatch_check_success{{{ON}}}",
                f"hangwatch_check_faults{{{ON}}}",
                f"time() - hangwatch_check_last_run_timestamp_seconds{{{ON}}}",
                f"hangwatch_check_duration_seconds{{{ON}}}",
            ],
            {
                "check": "Check",
                "Value #A": "Ran",
                "Value #B": "Subjects that did not respond",
                "Value #C": "Last run, ago",
                "Value #D": "Took",
            },
            "Result of each run: did it finish, and how many of its subjects did not respond?",
            height=10,
            colours={"Ran": YES_NO},
            units={"Last run, ago": "s", "Took": "s"},
        ),
    ):
        row.with_panel(panel)
    built.with_row(row)
