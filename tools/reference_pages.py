"""Write or check the reference pages that come from the code of the command line and of the tool server.

``python tools/reference_pages.py --write`` writes docs/reference/cli.md, docs/reference/json.md and the tools in
docs/llm/mcp.md. Without the option it checks them, and exits with 1 if one is stale.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import typer
from pages.blocks import with_block

from outblas.cli.command_table import parts
from outblas.cli.documents import DOCUMENTS, Document, ResultDocument
from outblas.cli.main import app
from outblas_lab.cli.lab_documents import DOCUMENTS as LAB_DOCUMENTS
from outblas_lab.mcp.guide_resources import RESOURCES
from outblas_lab.mcp.kernel_tools import TOOLS

DOCS = Path(__file__).resolve().parents[1] / "docs"
#: Command -> the names in its :class:`outblas.cli.documents.ResultDocument`, in words.
RESULTS = {
    "explain": "facts: `library`, `step_speedups` (rows of a step -> predicted speed-up), `tune` (command that tunes "
    "what is in no library; null: nothing is missing). A row is a product at an M: `product`, `weight`, `times`, "
    "`lacking` (sizes in no library), `m`, `by`, `speedup`, `gate_speedup` (null: no kernel has its gate)",
    "export": "files: `written`. facts: `kernels`, `gpu`",
    "contribute": "files: `contribution`. facts: `problems`, `kernels`, `faults`",
    "report": "files: `report`",
    "compare": "files: `result`. facts: `best` (agent with the least `mean_regret` over all splits), `level_with` "
    "(agents that are not significantly worse). A row is an agent at a budget of a split: `split`, `agent`, `budget`, "
    "`quality`, `low`, `high`, `found`, `regret`, `over_seeds` (half of the interval over seeds; null for one seed)",
    "train": "files: `policy`. facts: `steps` (of the best policy), `problems`",
    "recipe": "files: `result`, `trainings`. facts: `problems`. A row is a reward, as in the result's `rows`",
    "recording export": "files: `folder`, `card`, `sheet`. facts: `problems`, `candidates`, `megabytes`",
    "evolve": "files: `best` (null: nothing was proven), `transcript`, `report`, `store`. facts: `ended` (why), "
    "`spent`, `best` (problem -> its best kernel)",
    "train-llm": "files: `model`, `log`; but for supervised training also `answers`, `kernels`. facts: `stage`, "
    "`steps`, `taken` (steps of this call), `best_speedup` (null: nothing was timed)",
    "export-t4": "files: `results`. facts: `problem`, `configs`",
    "import-t4": "files: `evaluations` (null without --to). facts: `problem`, `configs`, `failed`, `best`, `best_us`; "
    "with --device also `equal`, `recorded`, `recorded_best_us`",
    "bench": "files: `result`. A row is as in `outblas-results`",
    "record": "files: `recording`. facts: `problems`, `gpu`",
    "profile": "files: `store`. facts: `new`, `held`. A row is a kernel: `problem`, `candidate`, and each counter",
    "build-library": "files: `library`, `benches`. facts: `jobs`. With --check: files: `contribution`. facts: "
    "`problems`, `faults`",
    "fit catalogue": "files: `catalogue`. facts: `kernels`, `candidates`",
    "fit model": "files: `model`. facts: `gpu`, `checks`",
    "fit any-shape": "files: `written`. facts: `step`, and what it found: `counts` (words), `figures` or `passed`",
}


def cli_page() -> str:
    """Return the page of all commands: usage, text and options of each, in the order of the help."""
    group: Any = typer.main.get_command(app)
    lines = [
        "# Command line",
        "",
        "This page is generated from the code. `outblas COMMAND --help` prints the same texts.",
        "",
        'Exit status: 0 for success; 1 if `outblas try` says "do not keep"; 2 for an error, reported in one line on '
        "stderr; 130 for Ctrl-C.",
        "",
        "## Global options",
        "",
        *_options(group),
    ]
    for part in parts():
        lines += ["", f"## {part.title}"]
        for name in part.commands:
            lines += _command(group.commands[name], f"outblas {name}")
    return "\n".join(lines) + "\n"


def _command(command: Any, path: str) -> list[str]:
    if hasattr(command, "commands"):
        parts = [_command(one, f"{path} {name}") for name, one in sorted(command.commands.items())]
        return [line for part in parts for line in part]
    text = " ".join((command.help or "").split())
    arguments = [f"`{one.name.upper()}`: {one.help}" for one in command.params if one.param_type_name == "argument"]
    return ["", f"### {path}", "", text, *([""] if arguments else []), *arguments, "", *_options(command)]


def _options(command: Any) -> list[str]:
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for one in command.params:
        if one.param_type_name != "option" or one.hidden:
            continue
        names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
        default = "" if one.default in (None, False, (), []) or callable(one.default) else f"`{one.default}`"
        if one.required:
            default = "required"
        meaning = " ".join((one.help or "").split()).replace("|", "\\|")
        lines.append(f"| {names} | {default} | {meaning} |")
    return lines


def json_page() -> str:
    """Return the page of all JSON documents, with each field and its meaning."""
    lines = [
        "# JSON output",
        "",
        "Every command takes `--json`, except the server `mcp`. Stdout then has one JSON document and nothing else.",
        "Progress, warnings, errors and the output of other programs go to stderr.",
        "An error prints no document: its one line is on stderr, and the exit status is 2.",
        "",
        "`schema` names the document and `version` its version.",
        "The version grows when a field goes or changes its meaning. New fields may come at any time.",
    ]
    for document in (*DOCUMENTS, *LAB_DOCUMENTS):
        seen: list[type[Any]] = []
        lines += ["", f"## {document.model_fields['schema_'].default}", "", _text(document), ""]
        lines += _fields(document, seen)
        for inner in seen:
            lines += ["", f"### {inner.__name__}", "", _text(inner), "", *_fields(inner, [])]
        if document is ResultDocument:
            lines += ["", "| command | names |", "| --- | --- |"]
            lines += [f"| `outblas {name}` | {words} |" for name, words in RESULTS.items()]
    return "\n".join(lines) + "\n"


def _text(model: type[Any]) -> str:
    return " ".join((model.__doc__ or "").split()).replace("``", "`")


def _fields(model: type[Document], seen: list[type[Any]]) -> list[str]:
    lines = ["| field | type | meaning |", "| --- | --- | --- |"]
    for name, field in model.model_fields.items():
        shown = field.serialization_alias or name
        lines.append(f"| `{shown}` | {_type(field.annotation, seen)} | {field.description} |")
    return lines


def _type(annotation: Any, seen: list[type[Any]]) -> str:
    """Return a type in JSON's words; records that it names are added to ``seen``."""
    arguments = getattr(annotation, "__args__", ())
    origin = getattr(annotation, "__origin__", None)
    if hasattr(annotation, "model_fields"):
        if annotation not in seen:
            seen.append(annotation)
        return annotation.__name__
    if origin is list:
        return f"array of {_type(arguments[0], seen)}"
    if origin is dict:
        return "object"
    if arguments and all(isinstance(one, str) for one in arguments):
        return " or ".join(f'"{one}"' for one in arguments)
    if arguments:
        return " or ".join(_type(one, seen) for one in arguments)
    return {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}.get(annotation, "any")


def tools_text() -> str:
    """Return the text on the tools and resources of ``outblas mcp``, with each argument and its meaning."""
    lines = [
        "",
        "An answer is JSON. It has the keys of the tool, and `budget_left`.",
        "An argument that does not fit its schema gives an error that names it.",
        "Any other mistake gives three lines: the mistake, the expected input and the remedy.",
    ]
    for name, tool in TOOLS.items():
        lines += ["", f"### {name}", "", tool.description(), "", "| argument | default | meaning |"]
        lines += ["| --- | --- | --- |", *_arguments(tool.model_json_schema())]
    lines += ["", "### Resources", "", "| address | type | meaning |", "| --- | --- | --- |"]
    lines += [f"| `{one.uri}` | {one.mime_type} | {one.description} |" for one in RESOURCES]
    return "\n".join(lines) + "\n"


def _arguments(schema: dict[str, Any]) -> list[str]:
    """Return one row per argument of a tool."""
    rows = []
    for name, field in schema["properties"].items():
        known = field.get("default")
        default = "required" if name in schema["required"] else "" if known is None else f"`{known}`"
        values = "".join(f" `{value}`" for value in field.get("enum", ()))
        meaning = field["description"] + (f" One of{values}." if values else "")
        rows.append(f"| `{name}` | {default} | {meaning} |")
    return rows


def mcp_page() -> str:
    """Return docs/llm/mcp.md with the text on the tools between its markers."""
    return with_block((DOCS / "llm/mcp.md").read_text(encoding="utf-8"), "tools", tools_text(), "docs/llm/mcp.md")


PAGES = {"reference/cli.md": cli_page, "reference/json.md": json_page, "llm/mcp.md": mcp_page}


def main() -> int:
    """Write the pages, or say which are stale; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    write = parser.parse_args().write
    stale = [name for name, page in PAGES.items() if not _is_current(DOCS / name, page())]
    for name in stale:
        if write:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
        print(f"{'written' if write else 'stale'}: docs/{name}")
    return 0 if write or not stale else 1


def _is_current(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main())
