"""Prometheus metrics, made from a snapshot of the board."""

from hangwatch.metrics.collector import BoardCollector, fill, registry
from hangwatch.metrics.series import Series
