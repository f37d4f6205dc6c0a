"""A network of stable-baselines3 whose scores are added to the prior's logits at the end of an observation."""

from __future__ import annotations

from typing import Any

import torch
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from torch import nn

from outblas.learn.knob_designs.knob_design import MAX_LOGIT


class PriorPolicy(MaskableActorCriticPolicy):
    """sb3-contrib's maskable policy, whose logits are the network's scores and those of the prior.

    The last layer of the network begins with 0, so an untrained policy is the prior alone.
    """

    def _build_mlp_extractor(self) -> None:
        super()._build_mlp_extractor()
        hidden: Any = self.mlp_extractor  # type: ignore[has-type]
        self.mlp_extractor = _PassedOn(hidden, int(self.action_space.n))  # type: ignore[assignment, attr-defined]

    def _build(self, lr_schedule: Any) -> None:
        super()._build(lr_schedule)
        actions = int(self.action_space.n)  # type: ignore[attr-defined]
        self.action_net = _Added(self.mlp_extractor.latent_dim_pi - actions, actions)
        self.optimizer = self.optimizer_class(self.parameters(), lr=lr_schedule(1), **self.optimizer_kwargs)


class _PassedOn(nn.Module):
    """Hidden layers; the prior goes past those of the policy."""

    def __init__(self, hidden: Any, actions: int) -> None:
        super().__init__()
        self.hidden, self.actions = hidden, actions
        self.latent_dim_pi, self.latent_dim_vf = hidden.latent_dim_pi + actions, hidden.latent_dim_vf

    @property
    def policy_net(self) -> Any:
        """The hidden layers of the policy."""
        return self.hidden.policy_net

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.forward_actor(seen), self.forward_critic(seen)

    def forward_actor(self, seen: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.hidden.forward_actor(seen), seen[:, -self.actions :]], dim=1)

    def forward_critic(self, seen: torch.Tensor) -> torch.Tensor:
        return self.hidden.forward_critic(seen)  # type: ignore[no-any-return]


class _Added(nn.Linear):
    """The last layer, of 0 at first, and the prior's logits."""

    def __init__(self, width: int, actions: int) -> None:
        super().__init__(width, actions)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, latent: torch.Tensor) -> torch.Tensor:
        return super().forward(latent[:, : self.in_features]) + MAX_LOGIT * latent[:, self.in_features :]
