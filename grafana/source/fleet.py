"""All nodes and jobs: hung jobs, the verdict of each node, the worst checks."""

from grafana_foundation_sdk.builders import dashboard as builders

from grafana.source.panels import (
    BAD_IF_ANY,
    INCIDENTS,
    MOTIONS,
    NAME,
    NO_GPU,
    NO_GPU_OF_JOB,
    NO_INCIDENT,
    NO_JOB,
    ODD_RANKS,
    OWNER,
    STATES,
    STATUS_WORDS,
    STATUSES,
    TO_JOB,
    WARN_IF_ANY,
    YES_NO,
    big_number,
    gpus_of_jobs,
    job_variable,
    lines,
    odd_ranks,
    page,
    rows,
    timeline,
    variable,
)

ON = 'instance=~"$node"'
OF = f'{ON},job_key=~"$job_key"'
TO_NODE = "/d/hangwatch-node?var-node=${__value.raw}&${__url_time_range}"


def dashboard() -> builders.Dashboard:  # long: the panels in their order on the page
    """Build the fleet dashboard."""
    built = page(
        "hangwatch-fleet",
        "hangwatch / Fleet",
        "All nodes and jobs: hung jobs, the verdict of each node, the worst checks.",
        [
            variable("node", "Node", "label_values(hangwatch_build_info, instance)", many=True),
            job_variable(ON, many=True),
        ],
        OF,
    )
    for panel in (
        big_number(
            "Hung jobs",
            f"""count(count by (job_key) (
              (hangwatch_job_state{{{OF},state="hung"}} == 1)
              or (hangwatch:job_page:held{{{OF}}} and on (job_id, job_key) hangwatch:job_hung:since)
            )) or vector(0)""",
            "Jobs that a node reports as hung, or with a page out. Includes jobs in which each node waits for the "
            "others, and jobs reported by a node that no longer responds.",
            steps=BAD_IF_ANY,
        ),
        big_number(
            "Stalled jobs",
            f"""count(count by (job_key) (
              (hangwatch_job_state{{{OF},state=~"stalled|waits_elsewhere"}} == 1)
              unless on (job_id, job_key) hangwatch:job_hung:since
            )) or vector(0)""",
            "Low power while a rank still moves (checkpoint, evaluation, compilation, slow loader), or while the node "
            "waits for other nodes.",
            steps=WARN_IF_ANY,
        ),
        big_number(
            "Jobs",
            f"count(count by (job_key) (hangwatch_job_info{{{OF}}})) or vector(0)",
            "Training jobs on all nodes.",
        ),
        big_number("Nodes", f"count(hangwatch_build_info{{{ON}}}) or vector(0)", "Nodes on which hangwatch responds."),
        big_number(
            "Nodes not monitored",
            f'count(up{{{ON},job=~"(.+/)?hangwatch"}} == 0) or vector(0)',
            "Nodes on which hangwatch does not respond to Prometheus.",
            steps=BAD_IF_ANY,
        ),
        big_number(
            "Critical checks",
            f"count(hangwatch_check_status{{{ON}}} == 3) or vector(0)",
            "Checks that report their node as not fit to train.",
            steps=BAD_IF_ANY,
        ),
        big_number("GPUs", f"count(hangwatch_gpu_power_watts{{{ON}}}) or vector(0)", "GPUs that report their power."),
        big_number("Power", f"sum(hangwatch_gpu_power_watts{{{ON}}})", "Power of all GPUs.", unit="watt"),
    ):
        built.with_panel(panel)

    built.with_row(builders.Row("Hung jobs and their ranks"))
    built.with_panel(
        rows(
            "Odd ranks",
            odd_ranks(OF),
            {
                "job_id": "Job",
                "job_key": "Key",
                "rank": "Rank",
                "instance": "Node",
                "activity": "Activity",
                "motion": "Motion",
                "frame": "Innermost frame",
            },
            ODD_RANKS,
            height=5,
            empty="no rank stands out",
            colours={"Motion": MOTIONS},
            links={"Job": TO_JOB, "Node": TO_NODE},
            widths={"Rank": 70, "Motion": 90, "Activity": 120, "Node": 90, "Key": 150},
        )
    )
    built.with_panel(
        rows(
            "Open incidents",
            f"{{{INCIDENTS},{OF}}}",
            {
                "job_id": "Job",
                "job_key": "Key",
                "instance": "Node",
                "verdict": "Verdict",
                "confidence": "Confidence",
                "named": "Named",
                "summary": "Verdict sentence",
            },
            "The verdict of each node about its own ranks. For a node that no longer responds, the last one.",
            height=6,
            empty=NO_INCIDENT,
            links={"Job": TO_JOB, "Node": TO_NODE},
            widths={"Key": 150, "Node": 90, "Verdict": 150, "Confidence": 100, "Named": 110},
        )
    )
    built.with_panel(
        timeline(
            "Jobs",
            f"max by (job_id, job_key) (hangwatch:job_state:code{{{OF}}}) {OWNER}",
            NAME,
            STATES,
            "The worst state of the job over its nodes.",
            width=12,
            height=8,
            empty=NO_JOB,
        )
    )
    built.with_panel(
        lines(
            "GPUs with low power, by job",
            "percentunit",
            [
                (
                    f"""avg by (job_id, job_key) (
                      {gpus_of_jobs(OF)} * on (job, instance, uuid) group_left ()
                      (hangwatch_gpu_power_watts <= bool hangwatch_gpu_low_power_threshold_watts)
                    ) {OWNER}""",
                    NAME,
                )
            ],
            "Share of the GPUs at or below their threshold. A node suspects a job from [detector] quorum (0.5) on.",
            maximum=1,
            empty=NO_GPU_OF_JOB,
        )
    )

    built.with_row(builders.Row("Nodes"))
    built.with_panel(
        rows(
            "Nodes",
            [
                f"count by (instance) (hangwatch_gpu_power_watts{{{ON}}})",
                f"sum by (instance) (hangwatch_gpu_power_watts{{{ON}}})",
                f"count by (instance) (hangwatch_job_info{{{ON}}})",
                f"max by (instance) (hangwatch_check_status{{{ON}}})",
                f"min by (instance) (hangwatch_gpu_sampler_up{{{ON}}})",
                f"max by (instance, version) (hangwatch_build_info{{{ON}}})",
            ],
            {
                "instance": "Node",
                "Value #A": "GPUs",
                "Value #B": "Power",
                "Value #C": "Jobs",
                "Value #D": "Worst check",
                "Value #E": "Sampler up",
                "version": "hangwatch",
            },
            "One row per node that responds.",
            width=12,
            height=9,
            colours={"Worst check": STATUSES, "Sampler up": YES_NO},
            links={"Node": TO_NODE},
            units={"Power": "watt"},
            widths={"GPUs": 55, "Power": 80, "Jobs": 55, "Worst check": 105, "Sampler up": 105, "hangwatch": 90},
        )
    )
    built.with_panel(
        rows(
            "Checks that are not OK",
            f'hangwatch_check_info{{{ON},status!="OK"}}',
            {"instance": "Node", "check": "Check", "status": "Status", "reason": "Reason", "message": "Message"},
            "UNKNOWN: the check could not determine the state.",
            width=12,
            height=9,
            empty="no check reports anything but OK",
            colours={"Status": STATUS_WORDS},
            links={"Node": TO_NODE},
            widths={"Node": 90, "Check": 120, "Status": 95, "Reason": 160},
        )
    )
    built.with_panel(
        timeline(
            "Worst check of each node",
            f"max by (instance) (hangwatch_check_status{{{ON}}})",
            "{{instance}}",
            STATUSES,
            "The worst status over all checks of a node.",
            width=12,
            height=8,
        )
    )
    built.with_panel(
        lines(
            "Clock offset of each node from the median",
            "s",
            [(f"hangwatch:clock_offset:seconds{{{ON}}}", "{{instance}}")],
            "Positive: ahead. Corrected for the scrape duration. A second or more for five minutes is a warning.",
            minimum=None,
        )
    )
    return built.with_panel(
        lines(
            "Power of each node",
            "watt",
            [(f"sum by (instance) (hangwatch_gpu_power_watts{{{ON}}})", "{{instance}}")],
            "Sum over the GPUs of each node.",
            empty=NO_GPU,
        )
    )
