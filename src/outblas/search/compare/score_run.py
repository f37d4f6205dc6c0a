"""The score of an agent file on a split of a recording, beside baselines: two comparisons, kept in a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from outblas.core.errors import UsageError
from outblas.core.version import __version__
from outblas.records.provenance import source_commit
from outblas.records.recording import Recording, recording_sha
from outblas.search.agents.agent_file import SUFFIX, check_agent_file, is_agent_file
from outblas.search.compare.compare_result import Comparison, read_comparison
from outblas.search.compare.compare_run import CompareRequest, Progress, run_compare
from outblas.search.compare.held_out import Plan, check_agents
from outblas.search.compare.public_split import PUBLIC_SEED, PUBLIC_SHARE, PUBLIC_SPLIT

#: Numbers of measurements after which a score is noted.
SCORED_AFTER = (0, 1, 2, 4, 8)
#: Agents beside which a file is scored: without knowledge, with that of near shapes, and with a learned model.
BASELINES = ("random", "nearest", "regressor")


@dataclass(frozen=True)
class ScoreRequest:
    """Arguments of :func:`score_agent`.

    Attributes:
        agent: the agent file.
        recording: name or path of the recording.
        baselines: names of agents; none are allowed.
        split_seed: seed of the split and of its sample.
        sample: number of held-out problems to search, stratified by regime; None: all.
        seeds: seeds of every agent that draws.
        folder: folder of the results.
        command: the command line, for provenance.
        jobs: processes that search side by side.
        resume: False searches anew even if a score is there.
    """

    agent: Path
    recording: str
    command: str
    baselines: Sequence[str] = BASELINES
    split_seed: int = PUBLIC_SEED
    sample: int | None = None
    seeds: int = 3
    folder: Path = Path("runs/score")
    jobs: int = 1
    resume: bool = True


@dataclass(frozen=True)
class Score:
    """An agent file's comparison, and that of the baselines on the same problems; None without baselines.

    Attributes:
        agent: results of the file's agent alone.
        baselines: results of the baselines.
        agent_sha: SHA-256 of the file.
    """

    agent: Comparison
    baselines: Comparison | None
    agent_sha: str


def score_agent(
    request: ScoreRequest, progress: Progress | None = None, say: Callable[[str], None] | None = None
) -> Score:
    """Score an agent file on the held-out problems of a split, and then the baselines.

    The agent prepares itself on the other problems, and learns of a held-out one only by its own measurements. It runs
    in a process of its own. A score with the same file, settings and source code is read and not made again. So
    baselines run once for all files. A killed run resumes.

    Args:
        request: settings of the score.
        progress: called with (tasks done, all tasks, ``"SPLIT AGENT"``).
        say: called with a line on preparations and on silence.

    Raises:
        UsageError: the file or its agent fails or breaks its contract, or a setting is out of range.
        RecordError: the recording or a result cannot be read, or the disk refuses.
        DeviceError: the agent ended its process.
        Interrupted: Ctrl-C.
    """
    if not is_agent_file(str(request.agent)):
        raise UsageError(f"agent file {request.agent}", f"a Python file, its name ends with {SUFFIX}", "rename it")
    agent_sha = check_agent_file(request.agent)
    if request.baselines:
        check_agents(request.baselines)
    measured = recording_sha(Recording.load(request.recording))
    scored = _compared(request, [str(request.agent)], f"{request.agent.stem}", [measured, agent_sha], progress, say)
    beside = None
    if request.baselines:
        beside = _compared(request, list(request.baselines), "baselines", [measured], progress, say)
    return Score(scored, beside, agent_sha)


def _compared(
    request: ScoreRequest, agents: list[str], stem: str, hashes: list[str], progress: Progress | None,
    say: Callable[[str], None] | None,
) -> Comparison:  # fmt: skip
    """Return the comparison of some agents, from its file if it is there. The file's name has the settings' hash."""
    plan = Plan(request.recording, SCORED_AFTER, PUBLIC_SHARE, request.split_seed, request.sample)
    about = [agents, hashes, plan.budgets, plan.share, plan.split_seed, plan.sample, request.seeds]
    text = json.dumps([*about, __version__, source_commit()])
    path = request.folder / f"{stem}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.parquet"
    if not (request.resume and path.exists()):
        run_compare(
            CompareRequest(
                plan, (PUBLIC_SPLIT,), agents, request.seeds, path, request.command, request.jobs, request.resume
            ),
            progress,
            say,
        )
    elif say is not None:
        say(f"{', '.join(agents)}: read from {path}")
    return read_comparison(path)
