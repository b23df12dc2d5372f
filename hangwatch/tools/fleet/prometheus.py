"""The nodes of a job, from the time series on a Prometheus server."""

import json
from collections.abc import Callable
from typing import Generic, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from hangwatch.formats import decoding
from hangwatch.tools.fleet.incident_fetch import AddressError, Site, parse_url

MOST_BYTES = 64 << 20
LOOKS_BACK = "1h"  # a node still belongs to its job for this time after its series has ended


T = TypeVar("T")


class PrometheusError(Exception):
    """A failed query of Prometheus. The message gives the reason, and says what to do."""


class _Labels(msgspec.Struct):
    instance: str = ""
    job: str = ""
    job_id: str = ""
    job_key: str = ""


class _Series(msgspec.Struct):
    metric: _Labels


class _Vector(msgspec.Struct):
    result: tuple[_Series, ...]


class _Target(msgspec.Struct, rename={"scrape_url": "scrapeUrl"}):
    labels: _Labels
    scrape_url: str


class _Targets(msgspec.Struct, rename={"active_targets": "activeTargets"}):
    active_targets: tuple[_Target, ...]


class _Answer(msgspec.Struct, Generic[T]):
    data: T


def nodes_of(job: str, get: Callable[[str], bytes]) -> tuple[str, list[Site], list[str]]:
    """Return the key of a job, the sites of its nodes, and the names of its nodes without a known site.

    `job` is its id, key or name. `get` requests a path of Prometheus' HTTP API and returns the content. Raises
    PrometheusError.
    """
    text = json.dumps(job, ensure_ascii=False)
    info = "last_over_time(hangwatch_job_info{%s=%s}[%s])"
    either = " or ".join(info % (label, text, LOOKS_BACK) for label in ("job_id", "job_key", "name"))
    query = f"group by (instance, job, job_id, job_key) ({either})"
    all_series = _decoded(get(f"/api/v1/query?query={quote(query, safe='')}"), _Answer[_Vector]).data.result
    keys = {series.metric.job_key: series.metric.job_id for series in all_series}
    if not keys:
        raise PrometheusError(f"has no job {job!r} in the last {LOOKS_BACK}, by id, key or name")
    if len(keys) > 1 and job not in keys:
        raise PrometheusError(f"has several jobs {job!r}: choose one by its key: --job {' or '.join(sorted(keys))}")
    key = job if job in keys else next(iter(keys))
    wanted = {(series.metric.instance, series.metric.job) for series in all_series if series.metric.job_key == key}
    targets = _decoded(get("/api/v1/targets?state=active"), _Answer[_Targets]).data.active_targets
    urls = {(target.labels.instance, target.labels.job): target.scrape_url for target in targets}
    found_sites = {instance: _site(instance, urls.get((instance, job), "")) for instance, job in sorted(wanted)}
    sites = [site for site in found_sites.values() if site is not None]
    return key, sites, sorted(instance for instance, site in found_sites.items() if site is None)


def _site(instance: str, scrape_url: str) -> Site | None:
    """Return the daemon that serves the metrics at `scrape_url`; None if the URL is invalid or "" (no longer scraped).

    Its name is `instance`, the label of Prometheus.
    """
    try:
        parts = urlsplit(scrape_url)
        return parse_url(f"{parts.scheme}://{parts.netloc}{parts.path.rpartition('/')[0]}")._replace(node=instance)
    except (AddressError, ValueError):
        return None


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return decoding.decode_json(body, kind)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise PrometheusError(f"did not answer as Prometheus does: {error}") from None
