"""Several workers behind one evaluator: processes of this machine, or actors of a Ray cluster, one per GPU.

``PoolEvaluator`` (gpu_pool.py) hands units of work (units.py) to its workers. Between them is a ``Transport``
(transport.py; worker_plan.py has both). In each worker lives a ``WorkerHost`` (worker_host.py) with its own evaluator.
``worker_plan.py`` makes a pool from what the command line says. Only the driver writes the store.
"""
