"""The policy as stable-baselines3 trains it: one perceptron scores every candidate, another values the state.

``outblas_lab.train.policy`` runs the scorer with numpy; both must give the same scores, and a test holds them to it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

from outblas.predict.features import CANDIDATE_FEATURES, PROBLEM_FEATURES, Features
from outblas_lab.train.policy import BEHIND_COLUMN, POSTERIOR_INPUTS, SEARCH_INPUTS

#: Units of the scorer's two hidden layers, and of the value's.
WIDTH, VALUE_WIDTH = 64, 64
#: Where greed begins: a candidate believed 5% slower (one unit) is e^-GREED as likely. Learned as its logarithm.
INITIAL_GREED = 4.0
#: Column that the environment adds: whether the row is offered.
OFFERED_COLUMN = len(CANDIDATE_FEATURES) + len(POSTERIOR_INPUTS)
#: Candidates that the value looks at: the best by belief.
VALUED_CANDIDATES = 4


class Scorer(BaseFeaturesExtractor):
    """Features extractor: observation -> [batch, C scores + 64 units for the value].

    Rows that are not offered are not computed and score 0.

    Args:
        observation_space: that of :class:`outblas_lab.train.env.TuningEnv`.
        state: length of its entry ``state``.
    """

    def __init__(self, observation_space: Any, state: int) -> None:
        self.columns = observation_space["candidates"].shape[0]
        super().__init__(observation_space, self.columns + VALUE_WIDTH)
        inputs = OFFERED_COLUMN + len(PROBLEM_FEATURES) + len(SEARCH_INPUTS)
        self.layers = nn.ModuleList([nn.Linear(inputs, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)])
        self.greed = nn.Parameter(torch.tensor(math.log(INITIAL_GREED)))
        seen = len(PROBLEM_FEATURES) + len(SEARCH_INPUTS) + state + VALUED_CANDIDATES * 3
        self.value = nn.Sequential(
            nn.Linear(seen, VALUE_WIDTH), nn.SiLU(), nn.Linear(VALUE_WIDTH, VALUE_WIDTH), nn.SiLU()
        )

    def forward(self, observations: Mapping[str, torch.Tensor]) -> torch.Tensor:
        table = observations["candidates"]
        about = torch.cat([observations["problem"], observations["search"]], dim=1)
        batch, row = torch.nonzero(table[:, :, OFFERED_COLUMN] > 0.5, as_tuple=True)
        rows = table[batch, row]
        h = torch.cat([rows[:, :OFFERED_COLUMN], about[batch]], dim=1)
        for layer in self.layers[:-1]:
            h = nn.functional.silu(layer(h))
        score = self.layers[-1](h)[:, 0] - torch.exp(self.greed) * rows[:, BEHIND_COLUMN]
        scores = torch.zeros(table.shape[:2]).index_put((batch, row), score)
        # The last three of a candidate's belief, of the few that are believed best.
        untried = torch.where(table[:, :, OFFERED_COLUMN] > 0.5, -table[:, :, BEHIND_COLUMN], torch.full((), -1e3))
        front = untried.topk(VALUED_CANDIDATES, dim=1).indices
        posterior = torch.gather(table[:, :, BEHIND_COLUMN:OFFERED_COLUMN], 1, front[:, :, None].expand(-1, -1, 4))[
            :, :, :3
        ]
        seen = torch.cat([about, observations["state"], posterior.flatten(1)], dim=1)
        return torch.cat([scores, self.value(seen)], dim=1)

    def arrays(self) -> dict[str, Features]:
        """Return the scorer's parameters, float32, as ``outblas_lab.train.policy.Policy.scorer`` has them.

        Weights are [inputs, units]. The value's parameters are not among them.
        """
        found = {"greed": self.greed.detach().numpy().astype(np.float32)}
        for i, layer in enumerate(self.layers):
            found[f"w{i}"] = layer.weight.detach().numpy().T.astype(np.float32)  # type: ignore[union-attr, operator]
            found[f"b{i}"] = layer.bias.detach().numpy().astype(np.float32)  # type: ignore[union-attr, operator]
        return found


class _Split(nn.Module):
    """Scores go to the actor, the rest to the critic."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.latent_dim_pi, self.latent_dim_vf = columns, VALUE_WIDTH

    def forward(self, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.forward_actor(features), self.forward_critic(features)

    def forward_actor(self, features: torch.Tensor) -> torch.Tensor:
        return features[:, : self.latent_dim_pi]

    def forward_critic(self, features: torch.Tensor) -> torch.Tensor:
        return features[:, self.latent_dim_pi :]


class CandidatePolicy(MaskableActorCriticPolicy):
    """sb3-contrib's maskable policy whose logits are the scorer's scores themselves.

    It begins as the regressor's greedy order: the last layer of the scorer is 0.

    Args:
        action_space: ``Discrete``, one action per candidate.
        lr_schedule: remaining share of the training -> learning rate.
    """

    def __init__(self, observation_space: Any, action_space: Any, lr_schedule: Any, **more: Any) -> None:
        state = observation_space["state"].shape[0]
        more |= {"features_extractor_class": Scorer, "features_extractor_kwargs": {"state": state}, "ortho_init": False}
        super().__init__(observation_space, action_space, lr_schedule, **more)

    def _build_mlp_extractor(self) -> None:
        self.mlp_extractor = _Split(self.features_extractor.columns)  # type: ignore[assignment, union-attr]

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        self.action_net = nn.Identity()
        last = self.features_extractor.layers[-1]  # type: ignore[union-attr, index]
        nn.init.zeros_(last.weight)  # begins as the belief alone
        nn.init.zeros_(last.bias)
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)
