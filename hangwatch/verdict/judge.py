"""From groups of ranks to a verdict: find the ranks that block the job, then write the text. Pure."""

from hangwatch.model import Grouping, Verdict
from hangwatch.verdict import recorder_dumps
from hangwatch.verdict.culprit_search import find
from hangwatch.verdict.recommendation import with_action
from hangwatch.verdict.scene import build_scene
from hangwatch.verdict.wording.evidence import gather
from hangwatch.verdict.wording.render import render


def judge(
    grouping: Grouping, ranks_here: int | None = None, dumped_records: recorder_dumps.Records | None = None
) -> Verdict:
    """Name the ranks that block a job, with the evidence, or explain why no rank can be named.

    `ranks_here` is the number of the job's ranks on the captured node; None if the whole job was captured.
    `dumped_records` are flight recorders that torch dumped by itself.
    """
    scene = build_scene(grouping, ranks_here)
    finding = find(scene)
    if dumped_records:
        finding = recorder_dumps.qualify(finding, dumped_records)
    return with_action(render(finding, gather(finding, scene)), grouping)
