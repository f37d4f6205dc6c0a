"""Several workers behind one evaluator: processes of this machine, or actors of a Ray cluster, one per GPU.

``PoolEvaluator`` (pool.py) hands units of work (units.py) to workers through a ``Transport`` (transport.py; local.py,
ray_actors.py). In each worker lives a ``Host`` (host.py) with an evaluator of its own. ``plan.py`` makes a pool from
what the command line says. Only the driver writes the store.
"""
