"""The decoder of ``examples/llama.py``. An example is in no package, so this loads it by its path, once."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

#: Name under which torch.compile finds the module.
NAME = "llama"
PATH = Path(__file__).resolve().parents[2] / "examples" / "llama.py"


def example() -> ModuleType:
    """The example as a module, the same one every time."""
    if NAME in sys.modules:
        return sys.modules[NAME]
    spec = importlib.util.spec_from_file_location(NAME, PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module  # before it runs: its classes look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[NAME]
        raise
    return module


llama = example()
