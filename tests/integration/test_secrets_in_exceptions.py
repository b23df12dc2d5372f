"""Ranks that die of exceptions with secrets, which no output of the daemon and no alert may contain."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.commands import rank_environ
from tests.conftest import wait_for
from tests.real_daemon import JOBS, RealDaemon
from tests.secret_texts import FORMS, Text
from tests.servers import RealPrometheus

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]

RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "hangwatch.rules.yaml"
AT_ONCE = 7  # ranks that die together; hangwatch shows at most 8 crashes of one owner
INSTANCE = "gpu-node-1"


class DyingRank:
    """A job of one rank, without a launcher. It dies of an exception with a text that the test gives."""

    def __init__(self, folder: Path, name: str) -> None:
        self.job_id, self._fifo = f"dying-{name.replace('_', '-')}", folder / name
        os.mkfifo(self._fifo)
        error_file = str(folder / f"{name}.json")
        environ = rank_environ(self.job_id, TORCHELASTIC_ERROR_FILE=error_file, OMP_NUM_THREADS="1")
        with (folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, str(JOBS / "raises_what_it_reads.py"), str(self._fifo)]
            self.process = subprocess.Popen(command, env={**os.environ, **environ}, stdout=log, stderr=log)

    def die_of(self, text: str) -> None:
        """Send the text of the exception when the rank reads it. Wait until the rank has died."""
        pipe = wait_for(self._opened, f"{self.job_id} to read", 200)
        with os.fdopen(pipe, "w") as file:
            file.write(text)
        assert self.process.wait(60) == 1

    def _opened(self) -> int | None:
        assert self.process.poll() is None
        with suppress(OSError):  # ENXIO: no reader yet
            return os.open(self._fifo, os.O_WRONLY | os.O_NONBLOCK)
        return None

    def end(self) -> None:
        """Kill the process if it still runs."""
        self.process.kill()
        self.process.wait()


def test_secrets_of_26_forms_are_in_no_metric_alert_or_log(tmp_path: Path) -> None:
    """Search all public data of the daemon. The incidents of the owner have the texts, without the secrets."""
    forms, told = iter(FORMS.items()), {}
    with (
        RealDaemon(tmp_path / "hw", {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}) as daemon,
        RealPrometheus(  # scrape_seconds is also the limit of a scrape
            tmp_path / "prom", {INSTANCE: daemon.address}, rules=[RULES], scrape_seconds=3.0
        ) as prometheus,
    ):
        while wave := dict(islice(forms, AT_ONCE)):
            told |= die_side_by_side(wave, tmp_path, daemon, prometheus)
        told["log"] = daemon.log
    found = {
        name: [place for place, text in told.items() if any(secret in text for secret in case.secrets)]
        for name, case in FORMS.items()
    }
    leaks = {name: places for name, places in found.items() if places}
    assert not leaks, f"{len(leaks)} forms: {leaks}"
    for name in FORMS:
        public = rf"dying-{name.replace('_', '-')} .*ShardError, in main \(raises_what_it_reads\.py:\d+\), according to its error"
        assert re.search(public, told["log"]), name
    kept = [path.read_text() for path in (daemon.state / "incidents").glob("*/incident.json")]
    assert any("ShardError: bad line: HF_TOKEN=***" in incident for incident in kept)
    assert not any(secret in incident for incident in kept for case in FORMS.values() for secret in case.secrets)


def die_side_by_side(
    wave: Mapping[str, Text], folder: Path, daemon: RealDaemon, prometheus: RealPrometheus
) -> dict[str, str]:
    """Let these ranks die together. Return all data about their crashes that any user can read, by source."""
    ranks = {name: DyingRank(folder, name) for name in wave}
    try:
        for rank in ranks.values():
            wait_for(lambda rank=rank: daemon.samples("hangwatch_job_ranks", job_id=rank.job_id), rank.job_id, 200)
        for name, rank in ranks.items():
            rank.die_of(wave[name].text)
    finally:
        for rank in ranks.values():
            rank.end()
    wanted = {rank.job_id for rank in ranks.values()}
    wait_for(
        lambda: wanted <= {row["job_id"] for row, _ in daemon.samples("hangwatch_job_crash_info")}, "the crashes", 120
    )
    alerts = wait_for(lambda: crash_alerts(prometheus, wanted), "an alert for each", 60)
    assert all("ShardError" in alert["annotations"]["summary"] for alert in alerts)
    told = {path: daemon.get(path) for path in ("/metrics", "/status", "/")}
    return {f"{path} of {min(wanted)}": text for path, text in {**told, "alerts": repr(alerts)}.items()}


def crash_alerts(prometheus: RealPrometheus, wanted: set[str]) -> list[dict[str, Any]]:
    """Wait until each job of `wanted` has an alert. Return these alerts."""
    found = [one for one in prometheus.alerts() if one["labels"]["alertname"] == "HangwatchTrainingCrashed"]
    found = [one for one in found if one["labels"]["job_id"] in wanted]
    return found if len(found) == len(wanted) else []
