"""The block of the page on the published recipe, from the result file of ``outblas recipe`` alone."""

from __future__ import annotations

from pathlib import Path

from outblas.search.recipe_table import read_recipe, recipe_notes, recipe_rows

#: The result file, beside the bench files.
RECIPE = "recipe.json"
#: Columns of the table that hold words.
_WORDS = 2


def recipe_block(path: Path) -> str:
    """Return the table in Markdown with its notes and source; one line with the command if the file is missing.

    Args:
        path: result file of ``outblas recipe``.

    Raises:
        RecordError: the file is there and cannot be used.
    """
    if not path.exists():
        return f"To be made: `outblas recipe --faulty 0.05 --out {path}`, then `outblas results --write`."
    result = read_recipe(path)
    head, *rows = recipe_rows(result)
    rule = "| " + " | ".join(["---"] * _WORDS + ["---:"] * (len(head) - _WORDS)) + " |"
    lines = ["| " + " | ".join(head) + " |", rule, *("| " + " | ".join(row) + " |" for row in rows)]
    made, recording = result["provenance"], result["recording"]
    source = f"Recording of {made['gpu']} (SHA-256 {recording['sha256'][:16]}); {made['date'][:10]}, commit "
    cpu = sum(curve["train_s"] for curve in result["curves"]) / 60
    source += f"{made['commit']}. The trainings took {cpu:.0f} minutes of one core: `{made['command']}`."
    return "\n".join([*lines, "", *(f"- {note}" for note in recipe_notes(result)), "", source])
