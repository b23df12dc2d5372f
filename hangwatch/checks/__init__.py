"""Health checks of a node: each module here is one check. The modules are discovered; no list names them."""

from hangwatch.checks.framework.registry import ContractError, UnknownCheckError, checks, select, settings_for
from hangwatch.checks.framework.result_table import (
    exit_code,
    json_schema,
    report_table,
    to_json,
    verbose_tables,
    worst_status,
)

__all__ = [
    "ContractError",
    "UnknownCheckError",
    "checks",
    "exit_code",
    "json_schema",
    "report_table",
    "select",
    "settings_for",
    "to_json",
    "verbose_tables",
    "worst_status",
]
