"""The readable names of jobs, from the scheduler or from the operator of the job's pods. Names may be hostile."""

import html
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from hangwatch import words
from hangwatch.jobs import discovery, process_role
from hangwatch.model import Job
from hangwatch.probes.process.process_scan import ProcessScan
from hangwatch.tables import launchers as launcher_table
from tests.proc_tree import FOLDER, jobs_in, lay_out

HOSTILE = "<!channel> `id` *x* [a](http://b) {{ .Labels }} \"} or up{a='b' $(reboot) </script>\x1b[31m\u202e"


SLURM = Job(
    job_id="2180718",
    job_name="llama-70b",
    user="mira",
    owner="Slurm job 2180718",
    program="train.py",
    launcher="torchrun",
    launcher_id=None,
    ranks=(),
)


def named(variables: dict[str, str], *, in_pod: bool = True) -> str:
    return process_role.job_name(variables, in_pod=in_pod, node="gpu-07.cluster")


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({"SLURM_JOB_NAME": "llama-70b"}, "llama-70b"),
        ({"PET_MASTER_ADDR": "llama-master-0", "MASTER_ADDR": "10.0.0.7"}, "llama"),
        ({"PET_RDZV_ENDPOINT": "llama-worker-0:29500"}, "llama"),
        ({"PET_MASTER_ADDR": "run-node-0-0.run"}, "run"),
        ({"MASTER_ADDR": "my-run-trainer-0-0.my-run.team.svc.cluster.local"}, "my-run"),
        ({"MASTER_ADDR": "gpu-01-0-0.other"}, ""),
        ({"HOSTNAME": "llama-worker-3"}, "llama"),
        ({"HOSTNAME": "my-run-trainer-0-3"}, "my-run-trainer"),
        ({"HOSTNAME": "sweep-7"}, "sweep"),
        ({"HOSTNAME": "finetune-x7k2p"}, "finetune"),
        ({"HOSTNAME": "debug"}, "debug"),
        ({"HOSTNAME": "gpu-07"}, ""),
        ({"MASTER_ADDR": "10.0.0.7"}, ""),
        ({"JOBSET_NAME": "night", "HOSTNAME": "night-workers-0-1"}, "night"),
    ],
)
def test_the_name_of_a_job(variables: dict[str, str], name: str) -> None:
    assert named(variables) == name
    if "SLURM_JOB_NAME" not in variables:
        assert named(variables, in_pod=False) == "", "outside of a pod a host is not a job"


def test_a_pytorchjob_in_pods_is_called_by_its_name(tmp_path: Path) -> None:
    (job,) = jobs_in("pytorchjob_pods", tmp_path)
    assert (job.job_id, job.job_name, job.program) == ("llama-master-0-23456", "llama", "train.py")
    assert words.describe_job(job) == "llama (llama-master-0-23456, uid 0, train.py)"


def test_ranks_that_hold_only_an_address_are_called_as_their_launcher_was_told(tmp_path: Path) -> None:
    pod = "  @ uid=0 /kubepods/pod8c1f0a52-6d1e-4f0e-9f57-0d2c6a1b7e11/aa\n"
    text = re.sub(r"(?m)^(  \+ .*\n)", rf"\1{pod}", (FOLDER / "kubeflow.proc").read_text())
    (job,) = discovery.find_jobs(ProcessScan(lay_out(text, tmp_path)).processes()).jobs
    assert (job.job_id, job.job_name) == ("10.1.2.3-29400", "job")


def test_a_slurm_job_in_one_line() -> None:
    job = SLURM
    assert words.describe_job(job) == "llama-70b of user mira (Slurm job 2180718, train.py)"
    assert (
        words.describe_job(replace(job, job_id="2180718.2")) == "llama-70b of user mira (Slurm job 2180718.2, train.py)"
    )
    assert words.describe_job(replace(job, job_name="")) == "2180718 of user mira (Slurm job 2180718, train.py)"
    nameless = replace(job, user="uid 1004", uid=1004)
    assert words.describe_job(nameless) == "llama-70b of uid 1004 (Slurm job 2180718, train.py)"
    assert "of user uid_1004" in words.describe_job(replace(nameless, uid=0)), "what its user wrote, and not the kernel"
    own = replace(job, owner="uid 1004", user="uid 1004", job_id="run-7", job_name="")
    assert words.describe_job(own) == "run-7 (uid 1004, train.py)"


def test_a_name_is_read_of_real_environments_and_cleaned(tmp_path: Path) -> None:
    text = (
        (FOLDER / "slurm.proc").read_text().replace("SLURM_JOB_ID=1 ", "SLURM_JOB_ID=1 SLURM_JOB_NAME='llama 70b <!>' ")
    )
    step, elastic = discovery.find_jobs(ProcessScan(lay_out(text, tmp_path)).processes()).jobs
    assert (step.job_id, step.job_name) == ("1", "llama_70b")
    assert (elastic.job_id, elastic.job_name) == ("1.2", "llama_70b"), "as all steps of it"


def test_a_pod_is_called_by_its_own_name_but_never_by_its_nodes(tmp_path: Path) -> None:
    text = (
        (FOLDER / "torchrun_pods.proc")
        .read_text()
        .replace("MASTER_ADDR=llama-worker-0", "MASTER_ADDR=10.0.0.6 HOSTNAME=n-7")
    )
    found = ProcessScan(lay_out(text, tmp_path)).processes()
    assert {job.job_name for job in discovery.find_jobs(found, node="elsewhere").jobs} == {"n"}
    assert {job.job_name for job in discovery.find_jobs(found, node="n-7.cluster.local").jobs} == {""}


@settings(max_examples=40, deadline=None)
@example(text=HOSTILE)
@given(text=st.text())
def test_a_hostile_name_is_one_plain_word(text: str) -> None:
    """Remove what Slack, Markdown, HTML, a shell, a Go template or PromQL interprets."""
    job = replace(SLURM, job_name=text, program=text, user=text)
    for shown in (named({"SLURM_JOB_NAME": text}), words.plain_word(text)):
        assert re.fullmatch(r"[A-Za-z0-9._-]{0,48}", shown)
    line = words.describe_job(job)
    assert len(line) < 48 * 3 + 48 + 40
    assert html.escape(line) == line
    assert re.fullmatch(r"[A-Za-z0-9._-]*( of user [A-Za-z0-9._-]+)? \(Slurm job 2180718(, [A-Za-z0-9._-]+)?\)", line)


@pytest.mark.parametrize("row", launcher_table.TABLE.names, ids=lambda row: str(row.variable))
def test_a_long_value_costs_no_time(row: launcher_table.NameVariable) -> None:
    # Any user chooses the value. The number of steps is at most the square of the length of a host name.
    for text in ("1-" * 5000, "a-0-" * 3000, "-" * 9000, "a-1" * 4000 + ".a", "a" * 20000):
        assert len(named({row.variable: text})) <= 48
