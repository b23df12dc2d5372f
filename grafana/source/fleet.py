"""All nodes and jobs at a glance: who is hung, what needs a look, which checks are worst."""

from grafana_foundation_sdk.builders import dashboard as builders

from grafana.source.panels import (
    BAD_IF_ANY,
    MOTIONS,
    NAME,
    NO_GPU,
    NO_GPU_OF_JOB,
    NO_INCIDENT,
    NO_JOB,
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
    page,
    rows,
    timeline,
    variable,
)

ON = 'instance=~"$node"'
OF = f'{ON},job_key=~"$job_key"'
TO_NODE = "/d/hangwatch-node?var-node=${__value.raw}&${__url_time_range}"


def dashboard() -> builders.Dashboard:  # long: the panels in their order on the page
    """The fleet dashboard."""
    built = page(
        "hangwatch-fleet",
        "hangwatch / Fleet",
        "Every node and job at a glance: who is hung, what each node says, the worst checks.",
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
            "Jobs that some node calls hung, or whose page is out: also where each node only waits for the others, or "
            "the node that said so does not answer any more.",
            steps=BAD_IF_ANY,
        ),
        big_number(
            "Stalled jobs",
            f"""count(count by (job_key) (
              (hangwatch_job_state{{{OF},state=~"stalled|waits_elsewhere"}} == 1)
              unless on (job_id, job_key) hangwatch:job_hung:since
            )) or vector(0)""",
            "Quiet, while some rank still moves (checkpoint, evaluation, compilation, slow loader) or other nodes "
            "are waited for.",
            steps=WARN_IF_ANY,
        ),
        big_number(
            "Jobs",
            f"count(count by (job_key) (hangwatch_job_info{{{OF}}})) or vector(0)",
            "Training jobs that the nodes see.",
        ),
        big_number("Nodes", f"count(hangwatch_build_info{{{ON}}}) or vector(0)", "Nodes on which hangwatch answers."),
        big_number(
            "Nodes not watched",
            f'count(up{{{ON},job=~"(.+/)?hangwatch"}} == 0) or vector(0)',
            "Nodes on which hangwatch should answer and does not.",
            steps=BAD_IF_ANY,
        ),
        big_number(
            "Critical checks",
            f"count(hangwatch_check_status{{{ON}}} == 3) or vector(0)",
            "Checks that call their node unfit to train.",
            steps=BAD_IF_ANY,
        ),
        big_number("GPUs", f"count(hangwatch_gpu_power_watts{{{ON}}}) or vector(0)", "GPUs that report their power."),
        big_number("Power", f"sum(hangwatch_gpu_power_watts{{{ON}}})", "Power of all GPUs.", unit="watt"),
    ):
        built.with_panel(panel)

    built.with_row(builders.Row("Who is hung"))
    built.with_panel(
        rows(
            "Odd ranks",
            f"hangwatch:odd_rank:held{{{OF}}}",
            {
                "job_id": "Job",
                "job_key": "Key",
                "rank": "Rank",
                "instance": "Node",
                "activity": "Activity",
                "motion": "Motion",
                "frame": "Innermost frame",
            },
            "Ranks that wait for nobody while at least half of their job's ranks do, over all nodes.",
            width=12,
            empty="no rank stands out",
            colours={"Motion": MOTIONS},
            links={"Job": TO_JOB, "Node": TO_NODE},
            widths={"Rank": 70, "Motion": 90, "Activity": 130, "Key": 90},
        )
    )
    built.with_panel(
        rows(
            "Open incidents",
            f"hangwatch:incident:held{{{OF}}}",
            {
                "job_id": "Job",
                "job_key": "Key",
                "instance": "Node",
                "verdict": "Verdict",
                "confidence": "Confidence",
                "named": "Named",
                "summary": "What the node says",
            },
            "The verdict of each node, on its own ranks only; of one that does not answer any more, the last.",
            width=12,
            empty=NO_INCIDENT,
            links={"Job": TO_JOB, "Node": TO_NODE},
            widths={"Confidence": 100, "Key": 90},
        )
    )
    built.with_panel(
        timeline(
            "Jobs",
            f"max by (job_id, job_key) (hangwatch:job_state:code{{{OF}}}) {OWNER}",
            NAME,
            STATES,
            "The worst state that any node sees the job in.",
            width=12,
            height=8,
            empty=NO_JOB,
        )
    )
    built.with_panel(
        lines(
            "Quiet share of each job's GPUs",
            "percentunit",
            [
                (
                    f"""avg by (job_id, job_key) (
                      {gpus_of_jobs(OF)} * on (job, instance, uuid) group_left ()
                      (hangwatch_gpu_power_watts <= bool hangwatch_gpu_quiet_line_watts)
                    ) {OWNER}""",
                    NAME,
                )
            ],
            "Share of the GPUs at or under their quiet line. A node suspects its part of a job from quorum (0.5) on.",
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
            "One line for each node that answers.",
            width=12,
            height=9,
            colours={"Worst check": STATUSES, "Sampler up": YES_NO},
            links={"Node": TO_NODE},
            units={"Power": "watt"},
        )
    )
    built.with_panel(
        rows(
            "Checks that need a look",
            f'hangwatch_check_info{{{ON},status!="OK"}}',
            {"instance": "Node", "check": "Check", "status": "Status", "reason": "Reason", "message": "What it says"},
            "Everything that is not OK. UNKNOWN is neither well nor sick: the check could not find out.",
            width=12,
            height=9,
            empty="no check is known that is not OK",
            colours={"Status": STATUS_WORDS},
            links={"Node": TO_NODE},
            widths={"Status": 100},
        )
    )
    built.with_panel(
        timeline(
            "Worst check of each node",
            f"max by (instance) (hangwatch_check_status{{{ON}}})",
            "{{instance}}",
            STATUSES,
            "Over all checks of a node.",
            width=12,
            height=8,
        )
    )
    built.with_panel(
        lines(
            "Clock of each node, against the median of all",
            "s",
            [(f"hangwatch:clock_offset:seconds{{{ON}}}", "{{instance}}")],
            "Above 0 it is ahead. Corrected by what a scrape took. A second or more for five minutes is a warning.",
            minimum=None,
        )
    )
    return built.with_panel(
        lines(
            "Power of each node",
            "watt",
            [(f"sum by (instance) (hangwatch_gpu_power_watts{{{ON}}})", "{{instance}}")],
            "Sum over the GPUs of a node.",
            empty=NO_GPU,
        )
    )
