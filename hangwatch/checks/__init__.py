"""Health checks of a node. Each module in this folder is one check. `framework.registry` discovers the modules."""

from hangwatch.checks.framework.registry import ContractError, UnknownCheckError, checks, select, settings_for
from hangwatch.checks.framework.result_table import (
    exit_code,
    json_schema,
    report_table,
    to_json,
    verbose_tables,
    worst_status,
)
