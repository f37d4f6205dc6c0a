"""Documents of ``--json``: run a command, and check its stdout against the documented names."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from outblas.cli.documents import DOCUMENTS
from outblas.cli.main import app
from outblas_lab.cli.lab_documents import DOCUMENTS as LAB_DOCUMENTS

SCHEMAS = {model.model_fields["schema_"].default: model for model in (*DOCUMENTS, *LAB_DOCUMENTS)}


def _results() -> dict[str, str]:
    path = Path(__file__).resolve().parents[2] / "tools" / "reference_pages.py"
    spec = importlib.util.spec_from_file_location("reference_pages_of_json", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return dict(module.RESULTS)


#: Command -> the names in its document of files and figures, as the reference says them.
RESULTS = _results()


def document(*arguments: str, code: int = 0) -> dict[str, Any]:
    """Run a command, check that its document is all of stdout and as documented, and return it."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.stderr, result.exception)
    (line,) = result.stdout.splitlines()
    found = json.loads(line)
    assert_schema(found)
    return found  # type: ignore[no-any-return]


def assert_schema(found: dict[str, Any]) -> None:
    """Assert that a document has the fields of its schema and, of files and figures, no name without a meaning."""
    model = SCHEMAS[found["schema"]]
    names = {field.serialization_alias or name for name, field in model.model_fields.items()}
    assert set(found) == names and found["version"] == 1
    model.model_validate({("schema_" if key == "schema" else key): value for key, value in found.items()})
    if found["schema"] == "outblas-result":
        words = RESULTS[found["command"]]
        said = set(re.findall(r"`(\w+)`", words))
        assert {*found["files"], *found["facts"]} <= said, words
        if found["rows"] and "A row is" in words and "`outblas-results`" not in words and "`rows`" not in words:
            unsaid = {*found["rows"][0]} - said
            assert not unsaid or "each counter" in words, unsaid
