"""Answer a call of a tool, from raw arguments to a text. No argument makes it raise."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from outblas.core.errors import OutblasError, UsageError, unknown_name
from outblas_lab.mcp.kernel_tools import TOOLS
from outblas_lab.mcp.tool_arguments import argument_faults
from outblas_lab.mcp.tool_replies import error_text
from outblas_lab.mcp.tool_session import ToolSession

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ToolAnswer:
    """The answer to a call.

    Attributes:
        text: JSON of ``data``, or the text of the error.
        data: JSON values; None after an error.
    """

    text: str
    data: dict[str, Any] | None = None

    @property
    def failed(self) -> bool:
        """Return True if the call ended in an error."""
        return self.data is None


def answer_call(session: ToolSession, name: str, arguments: dict[str, Any] | None) -> ToolAnswer:
    """Return the answer to a call of a tool. Each answer has ``budget_left`` beside the tool's own keys.

    A mistake of the caller gives three lines: the mistake, the expected input and the remedy. A mistake of this program
    is logged with its traceback and gives an answer that says so.

    Args:
        name: name of the tool.
        arguments: JSON values by name.
    """
    try:
        data = {**_run(session, name, arguments or {}), "budget_left": session.budget.left()}
        return ToolAnswer(json.dumps(data, indent=1), data)
    except OutblasError as error:
        return ToolAnswer(error_text(error))
    except ModuleNotFoundError as error:
        missing = UsageError(f"{error.name} is not installed", "it beside the server", "ask the user to install it")
        return ToolAnswer(error_text(missing))
    except OSError as error:
        logger.exception("tool %s", name)
        disk = UsageError(f"the system refused: {error.strerror}", "free space and permission", "ask the user")
        return ToolAnswer(error_text(disk))
    except Exception:  # the session goes on: one bad call must not end it
        logger.exception("tool %s", name)
        ours = UsageError("the server failed", "an answer", "report the traceback on its stderr; try another call")
        return ToolAnswer(error_text(ours))


def _run(session: ToolSession, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    tool = TOOLS.get(name)
    if tool is None:
        raise unknown_name("tool", name[:100], TOOLS, "call one of them")
    try:
        checked = tool.arguments.model_validate(arguments)
    except ValidationError as error:
        names = ", ".join(tool.arguments.model_fields)
        raise UsageError(
            f"arguments of {name}: {argument_faults(error)}", f"values of its schema ({names})", "correct them"
        ) from error
    return tool.run(session, checked)
