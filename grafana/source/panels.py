"""Panels, states with their colours, variables and annotations for all three dashboards."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

Panel: TypeAlias = Builder[dashboard.Panel]
Colours: TypeAlias = Mapping[str, tuple[str, str]]  # value -> (text, colour)

TO_JOB = "/d/hangwatch-job?var-job_key=${__data.fields.Key}&${__url_time_range}"
"""A link to the job dashboard, for a table with the column "Key"."""

OWNER = "* on (job_id, job_key) group_left (owner) max by (job_id, job_key, owner) (hangwatch_job_info)"
"""PromQL that adds the owner to a number about a job. Jobs of several users may have the same name."""

NAME = "{{job_id}}, {{owner}}"

INCIDENTS = '__name__=~"hangwatch_incident_info|hangwatch:incident:kept"'
"""A matcher for the incidents of nodes, also of those that no longer respond."""

NO_JOB = "no job in this time"
NO_GPU = "no GPU reading in this time: the node has no GPU, or the driver does not respond"
NO_GPU_OF_JOB = "no GPU reading of the job in this time"
NO_INCIDENT = "no open incident"


def gpus_of_jobs(matchers: str) -> str:
    """Return a query for the GPUs of jobs. Ranks may share a GPU: each GPU of a job is counted once."""
    return f"max by (job, instance, uuid, job_id, job_key) (hangwatch_job_gpu_info{{{matchers}}})"


def activities_of(matchers: str) -> str:
    """Return a query for the activities of ranks, also of those whose node no longer responds."""
    return f"(hangwatch_rank_activity{{{matchers}}} or hangwatch:rank_activity:kept{{{matchers}}})"


def odd_ranks(matchers: str) -> str:
    """Return a query for the ranks that a page names. In a job without one: the ranks that have not joined."""
    missing = f"and on (instance, job_key, rank) hangwatch:missing_rank:number{{{matchers}}}"
    return f"(hangwatch:odd_rank:held{{{matchers}}} or on (job_key) ({activities_of(matchers)} {missing}))"


ODD_RANKS = (
    "Over all nodes, by sequence numbers if these give a conclusion, else by activity. If no rank is named: the ranks "
    "that have not joined."
)
SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH = 24

NARROWEST_COLUMN = 130
"""Pixels of a column without a width. Grafana's default, 150, lets tables of half a page scroll sideways at 1280."""

STATES: Colours = {
    "0": ("unknown", "#8e8e99"),
    "1": ("ended", "#6e7078"),
    "2": ("starting", "light-blue"),
    "3": ("training", "green"),
    "4": ("recovered", "light-green"),
    "5": ("quiet", "light-yellow"),
    "6": ("suspected", "yellow"),
    "7": ("over", "blue"),
    "8": ("suspended", "purple"),
    "9": ("waits elsewhere", "light-orange"),
    "10": ("stalled", "orange"),
    "11": ("hung", "red"),
}
STATUSES: Colours = {
    "0": ("OK", "green"),
    "1": ("UNKNOWN", "#8e8e99"),
    "2": ("WARNING", "orange"),
    "3": ("CRITICAL", "red"),
}
STATUS_WORDS: Colours = {text: (text, colour) for text, colour in STATUSES.values()}
MOTIONS: Colours = {"frozen": ("frozen", "red"), "moving": ("moving", "green"), "unknown": ("unknown", "#8e8e99")}
YES_NO: Colours = {"0": ("no", "red"), "1": ("yes", "green")}

BAD_IF_ANY = ((None, "green"), (1.0, "red"))
WARN_IF_ANY = ((None, "green"), (1.0, "orange"))
NEUTRAL = ((None, "blue"),)


def query(expr: str, legend: str, *, as_table: bool = False, ref: str = "A") -> prometheus.Dataquery:
    """Return one PromQL target. `as_table` requests only the current value, with labels as columns."""
    target = prometheus.Dataquery().expr(" ".join(expr.split())).legend_format(legend).ref_id(ref).datasource(SOURCE)
    return target.format(PromQueryFormat.TABLE).instant() if as_table else target.range()


def big_number(  # noqa: PLR0913 - one parameter for each difference between panels, each with a default
    title: str,
    expr: str,
    about: str,
    *,
    width: int = 3,
    height: int = 4,
    unit: str = "none",
    steps: Sequence[tuple[float | None, str]] = NEUTRAL,
    values: Colours | None = None,
    name_of: str = "",
) -> Panel:
    """Return a panel with one number, coloured by thresholds. With `name_of` it shows that label's value instead."""
    return (
        stat.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .height(height)
        .span(width)
        .unit(unit)
        .no_value("none")
        .mappings(_mappings(values))
        .thresholds(_thresholds(steps))
        .color_scheme(builders.FieldColor().mode(dashboard.FieldColorModeId.THRESHOLDS))
        .color_mode(common.BigValueColorMode.BACKGROUND_SOLID if steps != NEUTRAL else common.BigValueColorMode.VALUE)
        .graph_mode(common.BigValueGraphMode.NONE)
        .text_mode(common.BigValueTextMode.NAME if name_of else common.BigValueTextMode.AUTO)
        .reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
        .with_target(query(expr, f"{{{{{name_of}}}}}" if name_of else title).instant())
    )


def lines(  # noqa: PLR0913 - one parameter for each difference between panels, each with a default
    title: str,
    unit: str,
    targets: Sequence[tuple[str, str]],
    about: str,
    *,
    width: int = 12,
    height: int = 8,
    dashed: Mapping[str, str] | None = None,
    minimum: float | None = 0,
    maximum: float | None = None,
    stacked: bool = False,
    repeat: str | None = None,
    empty: str = "nothing in this time",
) -> Panel:
    """Return a panel with lines over time.

    `targets` are (PromQL, legend). `dashed` colours the lines that are limits, by legend. `empty` is the text of a
    panel without data: the possible reason.
    """
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .height(height)
        .span(width)
        .unit(unit)
        .no_value(empty)
        .line_width(1)
        .fill_opacity(40 if stacked else 0)
        .show_points(common.VisibilityMode.NEVER)
        .stacking(
            common_builders.StackingConfig().mode(common.StackingMode.NORMAL if stacked else common.StackingMode.NONE)
        )
        .tooltip(
            common_builders.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI).sort(common.SortOrder.DESCENDING)
        )
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .overrides([_dashed(legend, colour) for legend, colour in (dashed or {}).items()])
    )
    if minimum is not None:
        panel.min(minimum)
    if maximum is not None:
        panel.max(maximum)
    if repeat:
        panel.repeat(repeat).repeat_direction("h").max_per_row(WIDTH // width)
    for letter, (expr, legend) in zip("ABCDEFGH", targets, strict=False):
        panel.with_target(query(expr, legend, ref=letter))
    return panel


def timeline(
    title: str,
    expr: str,
    legend: str,
    values: Colours,
    about: str,
    *,
    width: int = WIDTH,
    height: int = 7,
    empty: str = "nothing in this time",
) -> Panel:
    """Return a panel with one bar per series, coloured by the meaning of its value."""
    return (
        statetimeline.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .height(height)
        .span(width)
        .no_value(empty)
        .mappings(_mappings(values))
        .color_scheme(builders.FieldColor().mode(dashboard.FieldColorModeId.FIXED).fixed_color("#6e7078"))
        .show_value(common.VisibilityMode.AUTO)
        .merge_values(True)
        .row_height(0.8)
        .fill_opacity(80)
        .legend(
            common_builders.VizLegendOptions()
            .display_mode(common.LegendDisplayMode.LIST)
            .placement(common.LegendPlacement.BOTTOM)
            .show_legend(True)
        )
        .with_target(query(expr, legend))
    )


def rows(  # noqa: PLR0913 - one parameter for each difference between tables, each with a default
    title: str,
    targets: str | Sequence[str],
    columns: Mapping[str, str],
    about: str,
    *,
    width: int = WIDTH,
    height: int = 7,
    empty: str = "none",
    colours: Mapping[str, Colours] | None = None,
    links: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    widths: Mapping[str, int] | None = None,
) -> Panel:
    """Return a table of current values. `columns` maps labels (or "Value", "Value #A") to headings, in order.

    The keys of `colours`, `links`, `units` and `widths` (pixels) are headings. Several targets are joined on their
    common labels.
    """
    exprs = [targets] if isinstance(targets, str) else list(targets)
    panel = (
        table.Panel()
        .title(title)
        .description(about)
        .datasource(SOURCE)
        .height(height)
        .span(width)
        .no_value(empty)
        .filterable(True)
        .min_width(NARROWEST_COLUMN)
        .cell_options(common.TableAutoCellOptions(wrap_text=True))
        .overrides(_column_overrides(colours or {}, links or {}, units or {}, widths or {}))
    )
    for letter, expr in zip("ABCDEFGH", exprs, strict=False):
        panel.with_target(query(expr, title, as_table=True, ref=letter))
    if len(exprs) > 1:
        panel.with_transformation(dashboard.DataTransformerConfig(id_val="merge", options={}))
    panel.with_transformation(
        dashboard.DataTransformerConfig(id_val="filterFieldsByName", options={"include": {"names": list(columns)}})
    )
    return panel.with_transformation(
        dashboard.DataTransformerConfig(
            id_val="organize",
            options={
                "indexByName": {name: index for index, name in enumerate(columns)},
                "renameByName": dict(columns),
            },
        )
    )


def variable(name: str, label: str, values: str, *, many: bool = False) -> builders.QueryVariable:
    """Return a variable that lists the values of a label.

    With `many` the user may select several values; at first all are selected.
    """
    built = (
        builders.QueryVariable(name)
        .label(label)
        .query({"query": values, "refId": name, "qryType": 1})
        .datasource(SOURCE)
        .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        .multi(many)
        .include_all(many)
    )
    if many:
        built.all_value(".*").current(dashboard.VariableOption(selected=True, text="All", value="$__all"))
    return built


def job_variable(where: str = "", *, many: bool = False) -> builders.QueryVariable:
    """Return a variable that shows the titles of jobs. Its value is the job's key.

    `where` are label matchers of PromQL.
    """
    # One title per job: nodes may give different titles while one of them has no rank yet.
    values = f"query_result(topk by (job_key) (1, max by (job_key, title) (hangwatch_job_info{{{where}}})))"
    return (
        variable("job_key", "Job", values, many=many)
        .query({"query": values, "refId": "job_key", "qryType": 3})
        .regex('/job_key="(?<value>[^"]+)|title="(?<text>[^"]+)/g')
    )


def page(
    uid: str, title: str, about: str, variables: Sequence[Builder[dashboard.VariableModel]], where: str
) -> builders.Dashboard:
    """Return a dashboard without panels, but with variables, annotations and links.

    `where` are label matchers of PromQL.
    """
    opened = f"max by (job_id, job_key) (hangwatch_incident_opened_timestamp_seconds{{{where}}}) * 1000"
    built = (
        builders.Dashboard(title)
        .uid(uid)
        .description(about)
        .tags(["hangwatch"])
        .editable()
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .link(
            builders.DashboardLink("hangwatch")
            .type(dashboard.DashboardLinkType.DASHBOARDS)
            .tags(["hangwatch"])
            .keep_time(True)
        )
        .annotation(_Event("Incidents", opened))
    )
    for one in variables:
        built.with_variable(one)
    return built


def as_json(built: builders.Dashboard) -> str:
    """Return the JSON that Grafana imports."""
    done = built.build()
    within = ((panel, *getattr(panel, "panels", ())) for panel in done.panels or ())
    for number, panel in enumerate(itertools.chain.from_iterable(within), start=1):
        panel.id_val = number
    return json.dumps(done, cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


class _Event(Builder[dashboard.AnnotationQuery], dashboard.AnnotationQuery):
    """An annotation that marks the time which a series has as its value, in milliseconds.

    The library's model lacks some fields of Prometheus annotations.
    """

    def __init__(self, name: str, expr: str) -> None:
        super().__init__(name=name, datasource=SOURCE, enable=True, icon_color="red", expr=expr)

    def build(self) -> dashboard.AnnotationQuery:
        return self

    def to_json(self) -> dict[str, object]:
        return {
            **super().to_json(),
            "titleFormat": "Incident of {{job_id}}",
            "textFormat": "hangwatch captured the stacks of every rank",
            "useValueForTime": True,
            "step": "15s",
        }


def _mappings(values: Colours | None) -> list[dashboard.ValueMapping]:
    if not values:
        return []
    return [
        dashboard.ValueMap(
            options={
                value: dashboard.ValueMappingResult(text=text, color=colour, index=index)
                for index, (value, (text, colour)) in enumerate(values.items())
            }
        )
    ]


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> builders.ThresholdsConfig:
    return (
        builders.ThresholdsConfig()
        .mode(dashboard.ThresholdsMode.ABSOLUTE)
        .steps([dashboard.Threshold(value=value, color=colour) for value, colour in steps])
    )


class _Override(Builder[dashboard.DashboardFieldConfigSourceOverrides]):
    """Display properties of the field `name`, in place of the panel's defaults."""

    def __init__(self, name: str, properties: Mapping[str, Any]) -> None:
        self._built = dashboard.DashboardFieldConfigSourceOverrides(
            matcher=dashboard.MatcherConfig(id_val="byName", options=name),
            properties=[dashboard.DynamicConfigValue(id_val=key, value=value) for key, value in properties.items()],
        )

    def build(self) -> dashboard.DashboardFieldConfigSourceOverrides:
        return self._built


def _dashed(legend: str, colour: str) -> _Override:
    return _Override(
        legend,
        {
            "custom.lineStyle": {"fill": "dash", "dash": [8, 6]},
            "color": {"mode": "fixed", "fixedColor": colour},
        },
    )


def _column_overrides(
    colours: Mapping[str, Colours], links: Mapping[str, str], units: Mapping[str, str], widths: Mapping[str, int]
) -> list[Builder[dashboard.DashboardFieldConfigSourceOverrides]]:
    found: dict[str, dict[str, Any]] = {}
    for heading, values in colours.items():
        found.setdefault(heading, {}).update(
            {"mappings": _mappings(values), "custom.cellOptions": {"type": "color-text", "wrapText": True}}
        )
    for heading, url in links.items():
        found.setdefault(heading, {})["links"] = [{"title": "Show", "url": url}]
    for heading, unit in units.items():
        found.setdefault(heading, {})["unit"] = unit
    for heading, pixels in widths.items():
        found.setdefault(heading, {})["custom.width"] = pixels
    return [_Override(heading, properties) for heading, properties in found.items()]
