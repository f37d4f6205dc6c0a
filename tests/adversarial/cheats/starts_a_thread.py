"""Keeps a thread that could work while nobody looks."""

import threading
import time

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat, honest

EXPECTED = {Status.RULE_BROKEN}
GPU = True


def make():
    class Threading(Cheat):
        def bind(self, problem, a, b, c):
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            return super().bind(problem, a, b, c)

    return Threading("starts_a_thread", honest)
