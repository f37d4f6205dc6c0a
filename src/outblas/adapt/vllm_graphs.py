"""A pass of this package among those that vLLM runs over the graphs that it compiles.

vLLM puts a pass manager of its own under the key by which :mod:`outblas.dispatch.inductor_pass` enters the graphs of
other programs. Its configuration has a place for one more pass of that key, in
``CompilationConfig.inductor_compile_config``: the manager runs it after vLLM's own fusions. The ``uuid`` of that pass
is part of the hash by which vLLM names a folder of compiled code. So code with and without OutBLAS never meet, nor code
of two libraries.

The interface was read in vLLM 0.26.0: ``VllmBackend.configure_post_pass``, ``PostGradPassManager.add`` and
``normalize_value`` of ``vllm.config.utils``.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from outblas.dispatch.inductor_pass import ProductPass

#: The key of Inductor's settings, and of vLLM's.
KEY = "post_grad_custom_post_pass"
#: Modules of vLLM that have had the class ``InductorPass``, the newest first.
_MODULES = ("vllm.compilation.passes.inductor_pass", "vllm.compilation.inductor_pass")


def enter_graphs(installed: Callable[[], ProductPass | None]) -> str:
    """Add a pass to the configuration of the engine that is being started in this thread.

    Call it while vLLM has its configuration current, as it has while a worker sets its device. Graphs that are compiled
    from then on have the pass.

    Args:
        installed: returns the pass that acts and counts; None: none does, and graphs stay as they are.

    Returns:
        In one line, why compiled graphs stay as they are; empty if they will hold this package's products.
    """
    config, base = _current_config(), _pass_class()
    if base is None:
        return f"this vLLM has no {' or '.join(_MODULES)}"
    if config is None:
        return "CUDA was in use before vLLM's worker began"
    settings = config.compilation_config.inductor_compile_config
    earlier = settings.get(KEY)
    settings[KEY] = _class_of_pass(base)(installed, getattr(earlier, "earlier", earlier))
    return ""


def _current_config() -> Any:
    try:
        return importlib.import_module("vllm.config").get_current_vllm_config_or_none()
    except (ImportError, AttributeError):
        return None


def _pass_class() -> Any:
    for module in _MODULES:
        try:
            return importlib.import_module(module).InductorPass
        except (ImportError, AttributeError):
            continue
    return None


@functools.cache
def _class_of_pass(base: Any) -> Any:
    """Return a class of vLLM's passes that runs this package's; the manager takes its own base class alone."""

    class OutblasPass(base):  # type: ignore[misc]
        """Replaces products of a graph, after the user's own pass of the same key."""

        def __init__(self, installed: Callable[[], ProductPass | None], earlier: Any) -> None:
            self._installed, self.earlier, self._runs_earlier = installed, earlier, earlier is not None

        def is_applicable_for_range(self, compile_range: Any) -> bool:
            if self.earlier is not None:
                self._runs_earlier = self.earlier.is_applicable_for_range(compile_range)
            return True

        def __call__(self, graph: Any) -> None:
            if self._runs_earlier:
                self.earlier(graph)
            made = self._installed()
            if made is not None:
                made.after(None)(graph)

        def uuid(self) -> Any:
            """Return lists and numbers alone: vLLM makes JSON of them."""
            made = self._installed()
            return [
                None if made is None else list(made.after(None).uuid()),
                None if self.earlier is None else self.earlier.uuid(),
            ]

        def __deepcopy__(self, memo: Any) -> Any:
            """Itself: vLLM copies its settings, and the pass counts for the process."""
            return self

        def __reduce__(self) -> Any:
            """Configurations are sent to other processes."""
            return _unpickled, (self._installed, self.earlier)

    return OutblasPass


def _unpickled(installed: Callable[[], ProductPass | None], earlier: Any) -> Any:
    return _class_of_pass(_pass_class())(installed, earlier)
