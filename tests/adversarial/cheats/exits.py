"""Ends the process with success before anybody can look at the answer."""

import os

from cheat_tools import Cheat
from outblas.evaluation import Status

EXPECTED = {Status.EXITED}
GPU = False


def make():
    return Cheat("exits", lambda problem, a, b, c, stream: os._exit(0))
