"""Trials of a tuned table: its finalists, timed in several starts."""

from __future__ import annotations

from typing import Any

import pytest

from outblas.core.config import config_name, launch_of
from outblas.core.errors import UsageError
from outblas.core.rivals import RIVALS
from outblas.search.build_library import trials
from outblas.search.build_library.finalists import PER_LAUNCH, finalists
from support.build_library_fixture import run, script_fixture, work_fixture  # noqa: F401


def test_finalists_are_the_fastest_of_each_launch_option(script: Any, work: Any) -> None:
    run(script, work, "tune")
    table = script.TABLES[0]
    found, tried = finalists(work, table), script.search.earlier_searches(work, table, but="")
    for problem, configs in found.items():
        assert configs and len(configs) == len(set(configs))
        speed = {e.config: e.speedup.ratio for e in tried[problem]}
        for config in configs:
            same = [c for c in speed if launch_of(c) == launch_of(config)]
            better = [c for c in same if speed[c] > speed[config]]
            assert len(better) < PER_LAUNCH and speed[config] >= 0.97 * max(speed[c] for c in same)


def test_a_trial_keeps_every_round_and_is_not_repeated(script: Any, work: Any, capsys: Any) -> None:
    run(script, work, "tune")
    table = script.TABLES[0]
    trials.run_trial(work, table, "1")
    found, chosen = trials.read_trial(work, table, "1"), finalists(work, table)
    assert list(found) == list(chosen)
    for problem, entry in found.items():
        assert set(entry.timings) == {*RIVALS, *map(config_name, chosen[problem])}
        assert {len(t.samples_us) for t in entry.timings.values()} == {trials.TRIAL_ROUNDS}
    asked = len(script.trial.asked)
    trials.run_trial(work, table, "1")
    assert 0 < len(script.trial.asked) == asked and "done before" in capsys.readouterr().out


def test_a_killed_trial_goes_on_within_its_start_and_begins_anew_in_another(
    script: Any, work: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    run(script, work, "tune")
    table = script.TABLES[0]
    trials.run_trial(work, table, "2")
    path = trials.trial_path(work, table, "2")
    lines = path.read_text().splitlines(keepends=True)
    for machine, left in ((trials.start_of_machine(), len(lines) - 3), ("another", len(lines) - 2)):
        path.write_text("".join(lines[:2]))
        assert trials.finished_trial(work, table, "2") == []
        with pytest.raises(UsageError, match="--steps trial --starts 2"):
            trials.read_trial(work, table, "2")
        monkeypatch.setattr(trials, "start_of_machine", lambda machine=machine: machine)
        script.trial.asked.clear()
        trials.run_trial(work, table, "2")
        assert len({p for _, p, _ in script.trial.asked}) == left
    assert "begins anew" in capsys.readouterr().out
