"""Run a Python program unchanged, with ``outblas.enable()`` from the moment at which it imports torch.

``python -m outblas.adapt.run_enabled --counts FILE -- SCRIPT | -m MODULE | -c CODE ...``

The program runs in this process and keeps its standard streams, exit status and signals. At the end FILE gets one JSON
object: ``ours`` and ``torchs``, the numbers of products, and ``reason``, why nothing was switched on. Processes that
the program starts are not switched on, but forked ones keep the switch.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

from outblas.core.files import write_json
from outblas.core.main_program import end_on_wrong_arguments, run_as_main, split_arguments, wrong_arguments

_USAGE = "--counts FILE -- SCRIPT | -m MODULE | -c CODE, with its arguments"
#: The reason of a program that never imported torch.
NO_TORCH = "the program did not import torch"


class AfterImport(MetaPathFinder):
    """Calls a function once a module has been imported for the first time.

    Args:
        action: function without arguments; called in the thread that imports, after the module's last line.
    """

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self._module, self._action = module, action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's spec with a loader that calls the action; None for every other module.

        A program may ask for the spec, and import the module later or never.
        """
        if name != self._module:
            return None
        others = (finder for finder in list(sys.meta_path) if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((one for one in specs if one is not None), None)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def execute_and_act(module: Any) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self._action()

        loader.exec_module = execute_and_act
        return spec


def switch_on() -> str:
    """Switch the replacement of torch's products on, with learning if ``OUTBLAS_LEARN=1``; return why not, or empty."""
    from outblas.adapt.learning import learning_switch
    from outblas.dispatch import enable

    reason = enable.why_not()
    if not reason:
        learning_switch.enable()
    return reason


def main(argv: Sequence[str]) -> None:
    """Run the program that ``argv`` names; raise its errors.

    Raises:
        UsageError: an argument is wrong.
    """
    file, program = _arguments(argv)
    found = {"reason": NO_TORCH}

    def act() -> None:
        found["reason"] = switch_on()

    atexit.register(partial(_write, Path(file).absolute(), os.getpid(), found))
    sys.meta_path.insert(0, AfterImport("torch", act))
    run_as_main(program)


def _arguments(argv: Sequence[str]) -> tuple[str, list[str]]:
    options, program = split_arguments(argv, _USAGE, "try")
    if len(options) != 2 or options[0] != "--counts":
        raise wrong_arguments(argv, _USAGE, "try")
    return options[1], program


def _write(file: Path, pid: int, found: dict[str, str]) -> None:
    """Write the counts, but not in a forked child."""
    if os.getpid() != pid:
        return
    counts: dict[str, Any] = {"ours": 0, "torchs": 0}
    if not found["reason"]:
        from outblas.dispatch import enable

        state = enable.status()["torch"]
        counts = {name: state[name] for name in counts}
    write_json(file, {**counts, **found})


if __name__ == "__main__":
    end_on_wrong_arguments(_arguments)
    main(sys.argv[1:])
