"""Ends the process with success before anybody can look at the answer."""

import os

from outblas.core.evaluation import Status
from support.cheat_tools import Cheat

EXPECTED = {Status.EXITED}
GPU = False


def make():
    return Cheat("exits", lambda problem, a, b, c, stream: os._exit(0))
