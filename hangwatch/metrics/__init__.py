"""Prometheus metrics, made from a snapshot of the board."""

from hangwatch.metrics.collector import BoardCollector, declare, fill, registry
from hangwatch.metrics.view import View
