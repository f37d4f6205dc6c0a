"""Successive halving for ``outblas compare`` and ``outblas recording score``: one round for many kernels, more for few.

Asynchronous successive halving (Li et al., A System for Massively Parallel Hyperparameter Tuning, 2020), since an agent
does not know its budget. A kernel begins with one round. The best quarter of those get four more, one after the other.
On a recording the first round is drawn around the recorded median, with the recorded spread. Run it with

    outblas compare --agents random,examples/successive_halving.py --unit gpu-ms --budgets 1,3,10,30,100
"""

from outblas.tune.agents.base import Agent, unexplored

#: Rounds of a kernel in the first and in the second rung; one of this many goes on to the second.
FIRST, MORE, KEPT = 1, 4, 4


class SuccessiveHalving(Agent):
    """Draws kernels, gives each one round, and gives the best quarter of them four more."""

    def propose(self, problem, candidates, history, n):
        chosen = []
        while len(chosen) < n:
            config = self._next(problem, candidates, history, chosen)
            if config is None:
                break
            chosen.append(config)
        return chosen

    def next_rounds(self, problem, config, history):
        """Return the rounds of the next measurement of a kernel."""
        return MORE if any(evaluation.config == config for evaluation in history) else FIRST

    def _next(self, problem, candidates, history, chosen):
        first = {e.config: e.timing.samples_us[0] for e in history if e.timing is not None}
        tried = [e.config for e in history]
        for config in sorted(first, key=first.get)[: len(first) // KEPT]:
            if tried.count(config) == 1 and config not in chosen:
                return config
        left = [config for config in unexplored(candidates, history) if config not in chosen]
        return self.rng(problem, [*history, *chosen]).choice(left) if left else None
