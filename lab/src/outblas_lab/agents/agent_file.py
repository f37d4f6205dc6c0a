"""An agent that a user's Python file defines. Every mistake of the file is one line, and its answers are checked."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from outblas.core.clean_text import clean_text
from outblas.core.config import KernelConfig
from outblas.core.errors import UsageError
from outblas.core.evaluation import Evaluation
from outblas.core.plain_files import read_plain_file
from outblas.core.problem import Problem
from outblas.core.roofline import Gpu
from outblas.tune.agents.base import Agent
from outblas_lab.recordings.recording import Recording

#: Ending of the name of an agent file.
SUFFIX = ".py"
#: Module name of a loaded agent file.
_MODULE = "outblas_agent_file"
#: Characters of an error of the file that are shown.
MOST_WORDS = 300
#: Rounds of a measurement at most.
MOST_ROUNDS = 1000
_BASE = f"{Agent.__module__}.{Agent.__name__}"
_T = TypeVar("_T")


def is_agent_file(name: str) -> bool:
    """Return True if a name of an agent is the path of a Python file."""
    return name.endswith(SUFFIX)


def check_agent_file(path: Path) -> str:
    """Return the SHA-256 of an agent file, 64 hex digits. The file is compiled and not run.

    Raises:
        UsageError: the file cannot be read or is no Python.
    """
    try:
        text = read_plain_file(path)
        compile(text, str(path), "exec")
    except OSError as error:
        wrong = f"agent file {path} cannot be read ({error.strerror or error})"
        raise UsageError(wrong, "a readable Python file", "correct the path") from error
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UsageError(f"agent file {path}{line}: {error}", "valid Python", "fix the file") from error
    return hashlib.sha256(text).hexdigest()


class FileAgent(Agent):
    """The agent of a file: the one public class in it that derives from :class:`outblas.tune.agents.base.Agent`.

    The file is run at the first call of a method, so that another process can be chosen for it. It is given copies of
    all lists. It prints to stderr. It is offered the recorded candidates, whatever its ``every_legal`` says.
    """

    learns = True

    def __init__(self, path: Path, seed: int, gpu: Gpu) -> None:
        super().__init__(seed, gpu)
        self.name = str(path)
        self._path = path
        self._agent: Agent | None = None

    def prepare(self, recording: Recording, problems: Sequence[Problem]) -> None:
        self._ask("prepare", lambda agent: agent.prepare(recording, tuple(problems)))

    def propose(
        self, problem: Problem, candidates: Sequence[KernelConfig], history: Sequence[Evaluation], n: int
    ) -> list[KernelConfig]:
        """Return the proposals of the file's agent.

        Raises:
            UsageError: the file or its agent fails, or returns something else than a list of kernels.
        """
        offered, known = tuple(candidates), list(history)
        found: Any = self._ask("propose", lambda agent: agent.propose(problem, offered, known, n))
        if not isinstance(found, list | tuple) or not all(isinstance(config, KernelConfig) for config in found):
            raise self._wrong(f"propose returned a {type(found).__name__} {str(found)[:60]!r}", "a list of candidates")
        return list(found)

    @property
    def next_rounds(self) -> Callable[[Problem, KernelConfig, Sequence[Evaluation]], int] | None:
        """Return the method of the file's agent that chooses the rounds of a measurement; None if it has none."""
        if not self._ask("the agent", lambda agent: hasattr(agent, "next_rounds")):
            return None

        def rounds(problem: Problem, config: KernelConfig, history: Sequence[Evaluation]) -> int:
            found = self._ask("next_rounds", lambda agent: cast(Any, agent).next_rounds(problem, config, history))
            if not isinstance(found, int) or not 1 <= found <= MOST_ROUNDS:
                raise self._wrong(f"next_rounds returned {str(found)[:60]!r}", f"an integer from 1 to {MOST_ROUNDS}")
            return found

        return rounds

    def observe(self, evaluations: Sequence[Evaluation]) -> None:
        self._ask("observe", lambda agent: agent.observe(list(evaluations)))

    def __deepcopy__(self, memo: dict[int, Any]) -> FileAgent:
        copied = FileAgent(self._path, self.seed, self.gpu)
        copied._agent = self._ask("a copy of the agent", lambda agent: copy.deepcopy(agent, memo))
        return copied

    def _ask(self, what: str, ask: Callable[[Agent], _T]) -> _T:
        """Return the answer of the file's agent; ``what`` names the question in the error."""
        if self._agent is None:
            self._agent = self._guarded("the file", self._load)
        agent = self._agent
        return self._guarded(what, lambda: ask(agent))

    def _guarded(self, what: str, ask: Callable[[], _T]) -> _T:
        """Return ``ask()``; whatever the user's code raises becomes a UsageError with its line."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                return ask()
        except _Unfit:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            here = str(self._path.absolute())
            lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == here]
            where = f", line {lines[-1]}" if lines else ""
            said = " ".join(clean_text(f"{type(error).__name__}: {error}", MOST_WORDS).split()).rstrip(":")
            raise self._wrong(f"{what} raised {said}{where}", "an agent that raises no errors") from error

    def _wrong(self, wrong: str, expected: str) -> UsageError:
        do = "correct the file; finished scores are kept"
        return _Unfit(f"agent file {self._path}: {wrong}", expected, do)

    def _load(self) -> Agent:
        spec = importlib.util.spec_from_file_location(_MODULE, self._path.absolute())
        assert spec is not None and spec.loader is not None  # of a path that ends with .py
        module = importlib.util.module_from_spec(spec)
        sys.modules[_MODULE] = module  # dataclasses and pickle look it up
        spec.loader.exec_module(module)
        found = [
            value
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Agent) and value.__module__ == _MODULE
            if not name.startswith("_")
        ]
        if len(found) != 1:
            raise self._wrong(
                f"it defines {len(found)} public agent classes", f"one public class that derives from {_BASE}"
            )
        return found[0](self.seed, self.gpu)


class _Unfit(UsageError):
    """The agent of a file breaks its contract, in words that need no more."""
