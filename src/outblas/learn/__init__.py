"""Learning across shapes: the regressor, the policy and how both are trained (torch, stable-baselines3).

Nothing here is needed to use a trained policy: ``outblas.learn.policy`` and ``outblas.learn.posterior`` run it with
numpy alone.
"""
