"""Self-contained HTML reports and the published summary, from recorded result files alone."""

from __future__ import annotations

from outblas.report.page import write_report
from outblas.report.publish import check_published, publish

__all__ = ["check_published", "publish", "write_report"]
