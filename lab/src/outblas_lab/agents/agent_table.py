"""Search agents of outblas-lab by name: one file and one line in ``AGENTS`` each."""

from __future__ import annotations

_PACKAGE = __name__.rpartition(".")[0]
#: name -> "module:class"; imported on request, since some agents need heavy packages.
AGENTS: dict[str, str] = {
    "recorded": f"{_PACKAGE}.recorded_agent:RecordedAgent",
    "heuristic": f"{_PACKAGE}.fitted_heuristic:FittedHeuristic",
    "evolution": f"{_PACKAGE}.evolution:EvolutionAgent",
    "regressor": f"{_PACKAGE}.ppo:RegressorAgent",
    "ppo": f"{_PACKAGE}.ppo:Ppo",
    "greedy": f"{_PACKAGE}.greedy:Greedy",
    "tpe": f"{_PACKAGE}.tpe:Tpe",
    "surrogate": f"{_PACKAGE}.surrogate:Surrogate",
    "nvmmh": f"{_PACKAGE}.nvmmh:HeuristicsAgent",
    "nearest": f"{_PACKAGE}.nearest_shape:NearestShape",
    "llm": f"{_PACKAGE}.llm:LanguageModel",
    "kt-genetic": f"{_PACKAGE}.kernel_tuner:Genetic",
    "kt-annealing": f"{_PACKAGE}.kernel_tuner:Annealing",
    "kt-diffevo": f"{_PACKAGE}.kernel_tuner:DifferentialEvolution",
    "kt-bayes": f"{_PACKAGE}.kernel_tuner:BayesianOptimization",
}
#: Extras that agents need; the others need none.
EXTRAS = {"tpe": "rl", "nvmmh": "gpu", "llm": "llm"} | dict.fromkeys(
    (name for name in AGENTS if name.startswith("kt-")), "kernel-tuner"
)
#: Seconds that an agent prepared itself on one split of the recording h200, on one core (results/h200/compare.parquet).
#: Where the regressor takes part, 45 s are added for its 16 further epochs (journal entry 0093). ``llm`` fits the model
#: of ``heuristic``. The other agents do not learn before they search.
PREPARATION_S = {"ppo": 175, "regressor": 110, "heuristic": 65, "llm": 65, "surrogate": 110}
