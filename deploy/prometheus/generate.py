"""Generator of hangwatch.rules.yaml from hangwatch.rules.in and the tables below.

    python deploy/prometheus/generate.py

`make golden` writes it, too. In hangwatch.rules.in, `@{name}` is a text of TEXTS. A line `@name ARGUMENTS` is a row of
BLOCKS, with the indentation of that line.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from hangwatch.metrics.collective_progress import RANKS_OF_A_SERIES

FOLDER = Path(__file__).parent
RULES = FOLDER / "hangwatch.rules.yaml"
SOURCE = FOLDER / "hangwatch.rules.in"
STATES = (
    "unknown",
    "ended",
    "starting",
    "training",
    "recovered",
    "quiet",
    "suspected",
    "over",
    "suspended",
    "waits_elsewhere",
    "stalled",
    "hung",
)
"""The states of a job; the number of a state on dashboards is its place."""

TEXTS = {
    "title": (
        '{{ with printf "hangwatch:job_title:held{job_key=%q}" $labels.job_key | query | sortByLabel "instance" }}'
        '{{ . | first | label "title" | reReplaceAll "^(.{38}).{3,}(.{21})$" "$1…$2" }}'
        "{{ else }}Job {{ $labels.job_id }}{{ end }}"
    ),
    "each_incident": (
        '{{- range $i, $incident := printf "hangwatch:incident:held{job_key=%q}" $labels.job_key'
        ' | query | sortByLabel "instance" }}'
    ),
    "check_info": (
        '{{ with printf "hangwatch_check_info{check=%q,instance=%q}" $labels.check $labels.instance | query -}}'
    ),
    "frame": '{{ reReplaceAll "_" " " .Labels.activity }}{{ with .Labels.frame }} in {{ . }}{{ end }}',
}

_NAMESPACE = """\
{{- /* where it runs in pods: deploy/prometheus/hangwatch-site.rules.yaml */ -}}
{{- $namespace := "" }}{{ with "hangwatch:site:info{namespace!=''}" | query }}\
{{ $namespace = . | first | label "namespace" }}{{ end -}}
"""
_REPORT = """\
Report: {{ if $namespace }}`kubectl -n {{ $namespace }} exec $(kubectl -n {{ $namespace }} get pods \
-l app.kubernetes.io/name=hangwatch --field-selector spec.nodeName={{ .Labels.instance }} -o name) -c hangwatch -- \
hangwatch report --job {{ $labels.job_key }}`
{{- else }}`sudo hangwatch report --job {{ $labels.job_key }}` on {{ .Labels.instance }} \
(the job's owner: without sudo){{ end }}
"""
_DO_FIRST = """\
{{- range $i, $incident := printf "hangwatch:incident:held{job_key=%q,stuck_on!=''} or on (job_key) \
hangwatch:incident:held{job_key=%q,next_step!=''}" $labels.job_key $labels.job_key | query | sortByLabel "instance" }}\
{{ if eq $i 0 -}}
{{ with .Labels.stuck_on }}Stuck on: {{ . }}
{{ end }}Do first: {{ if $namespace }}{{ .Labels.next_step }}{{ else }}\
{{ reReplaceAll "`hangwatch " "`sudo hangwatch " .Labels.next_step }}{{ end }}
{{ end }}{{ end -}}
"""
_RUNBOOK = """\
runbook_url: >-
  {{ with "hangwatch:site:info{runbooks!=''}" | query }}{{ . | first | label "runbooks" }}/{{ end }}\
docs/runbooks/@PAGE
"""
_JOB_LINKS = """\
dashboard_url: >-
  {{ with "hangwatch:site:info{grafana!=''}" | query }}{{ . | first | label "grafana" }}\
/d/hangwatch-job?var-job_key={{ $labels.job_key }}{{ end }}
incident_url: >-
  {{ with printf "@SERIES{job_key=%q,url!='',named!=''}" $labels.job_key | query | sortByLabel "instance" }}\
{{ . | first | label "url" }}
  {{- else }}{{ with printf "@SERIES{job_key=%q,url!=''}" $labels.job_key | query | sortByLabel "instance" }}\
{{ . | first | label "url" }}{{ end }}{{ end }}
"""


def _each_rank(series: str) -> str:
    """Return the ranks in the label `more_ranks` of a series: the first, and those behind others."""
    form = 'or label_replace(@SERIES, "rank", "$@GROUP", "more_ranks", "([0-9]+@BEFORE).*")'
    patterns = [("1", "")] + [("2", f" ){{{place}}}([0-9]+") for place in range(1, RANKS_OF_A_SERIES - 1)]
    lines = (form.replace("@GROUP", group).replace("@BEFORE", before) for group, before in patterns)
    return "\n".join(lines).replace("@SERIES", series)


def _code_states(_: str) -> str:
    terms = (f'{place} * (hangwatch_job_current_state{{state="{state}"}} == 1)' for place, state in enumerate(STATES))
    return "\nor ".join(terms)


BLOCKS: Mapping[str, Callable[[str], str]] = {
    "namespace": lambda _: _NAMESPACE,
    "report": lambda _: _REPORT,
    "do_first": lambda _: _DO_FIRST,
    "runbook": lambda page: _RUNBOOK.replace("@PAGE", page),
    "job_links": lambda series: _JOB_LINKS.replace("@SERIES", series or "hangwatch:incident:held"),
    "each_rank": _each_rank,
    "state_codes": _code_states,
}


def _lines(source: str) -> Iterator[str]:
    alert = ""
    for line in source.splitlines():
        name = re.fullmatch(r" *- alert: (\w+)", line)
        alert = name[1] if name else alert
        mark = re.fullmatch(r"( *)@(\w+) ?(.*)", line)
        if mark is None:
            yield re.sub(r"@\{(\w+)\}", lambda text: TEXTS[text[1]], line)
            continue
        argument = f"{alert}.md{mark[3]}" if mark[2] == "runbook" else mark[3]
        for part in BLOCKS[mark[2]](argument).splitlines():
            yield f"{mark[1]}{part}"


def render() -> str:
    """Return hangwatch.rules.yaml."""
    return "".join(f"{line}\n" for line in _lines(SOURCE.read_text()))


if __name__ == "__main__":
    RULES.write_text(render())
