"""Agent files: their contract, and the words for their mistakes."""

from __future__ import annotations

import copy
from pathlib import Path
from textwrap import dedent

import pytest

from outblas.core.errors import UsageError
from outblas.tune.agents.base import Agent
from outblas_lab.agents.agent_file import FileAgent, check_agent_file, is_agent_file
from support.gpus.known import H200
from support.helpers import synthetic_recording

RECORDING = synthetic_recording()
PROBLEM = RECORDING.problems[0]


def agent_of(tmp_path: Path, body: str, before: str = "") -> FileAgent:
    """Return the agent of a file with one class, whose methods are ``body``."""
    path = tmp_path / "mine.py"
    head = "from outblas.tune.agents.base import Agent, unexplored\n"
    path.write_text(f"{head}{before}\nclass Mine(Agent):\n" + dedent(body).replace("\n", "\n    "))
    check_agent_file(path)
    return FileAgent(path, 3, H200)


def proposal(agent: Agent) -> object:
    return agent.propose(PROBLEM, RECORDING.catalogue, [], 1)


def test_a_file_is_an_agent_with_its_seed_and_gpu(tmp_path: Path) -> None:
    agent = agent_of(
        tmp_path,
        """
        def prepare(self, recording, problems):
            self.seen = len(problems)
        def propose(self, problem, candidates, history, n):
            assert (self.seed, self.gpu.name, self.seen) == (3, "h200", 2)
            return unexplored(candidates, history)[:n]
        """,
    )
    agent.prepare(RECORDING, RECORDING.problems[:2])
    assert proposal(agent) == [RECORDING.catalogue[0]]
    assert is_agent_file(agent.name) and not is_agent_file("random")


def test_the_file_is_run_at_the_first_question_and_not_before(tmp_path: Path) -> None:
    mark = tmp_path / "was_run"
    agent = agent_of(tmp_path, "\npass\n", before=f"open({str(mark)!r}, 'w').close()")
    assert not mark.exists()
    with pytest.raises(UsageError, match="NotImplementedError"):
        proposal(agent)
    assert mark.exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("\ndef propose(self, *given):\n    raise ValueError('boom')\n", "propose raised ValueError: boom, line 6"),
        ("\ndef propose(self, *given):\n    raise ValueError('two\\nlines')\n", "ValueError: two lines, line 6"),
        ("\ndef propose(self, *given):\n    raise SystemExit(3)\n", "propose raised SystemExit: 3"),
        ("\ndef propose(self, *given):\n    return None\n", "propose returned a NoneType"),
        ("\ndef propose(self, *given):\n    return ['a']\n", "propose returned a list"),
        ("\ndef __init__(self):\n    pass\n", "the file raised TypeError"),
        ("\ndef propose(self, *given):\n    return given[1] + (1,)\n", "propose returned a tuple"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_file(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        proposal(agent_of(tmp_path, body))
    assert said in str(caught.value) and "mine.py" in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_has_exactly_one_public_agent(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="defines 2 public agent classes"):
        proposal(agent_of(tmp_path, "\npass\n", before="class Other(Agent):\n    pass\n"))
    body = "\ndef propose(self, problem, candidates, history, n):\n    return list(candidates[:1])\n"
    assert proposal(agent_of(tmp_path, body, before="class _Helper(Agent):\n    pass\n"))
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(UsageError, match="defines 0 public agent classes"):
        proposal(FileAgent(tmp_path / "none.py", 0, H200))


def test_no_python_and_no_file_are_refused_without_running_anything(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def broken(:\n")
    with pytest.raises(UsageError, match="line 1.*valid Python"):
        check_agent_file(path)
    path.write_bytes(b"x = '\x00'\n")
    with pytest.raises(UsageError, match="valid Python"):
        check_agent_file(path)
    with pytest.raises(UsageError, match="cannot be read"):
        check_agent_file(tmp_path / "absent.py")


def test_an_agent_gets_copies_and_prints_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = agent_of(
        tmp_path,
        """
        def propose(self, problem, candidates, history, n):
            history.clear()
            print("a word")
            return [candidates[0]]
        """,
    )
    history = [object()]
    agent.propose(PROBLEM, RECORDING.catalogue, history, 1)  # type: ignore[arg-type]
    assert len(history) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err == "a word\n"


def test_a_copy_is_independent_and_one_that_fails_is_told(tmp_path: Path) -> None:
    counts = """
        def __init__(self, seed, gpu):
            super().__init__(seed, gpu)
            self.asked = 0
        def propose(self, problem, candidates, history, n):
            self.asked += 1
            return [candidates[self.asked]]
        """
    agent = agent_of(tmp_path, counts)
    proposal(agent)
    copied = copy.deepcopy(agent)
    assert proposal(copied) == proposal(agent) == [RECORDING.catalogue[2]]
    held = agent_of(tmp_path, counts.replace("self.asked = 0", "self.asked = (i for i in range(3))"))
    with pytest.raises(UsageError, match="a copy of the agent raised TypeError"):
        copy.deepcopy(held)
