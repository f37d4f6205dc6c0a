"""The cubins that come with the package: which kernels need no compiler here, and why not, where they do."""

from __future__ import annotations

import threading
import warnings
from importlib import resources
from pathlib import Path

from outblas.core.errors import RecordError
from outblas.core.switches import is_off
from outblas.kernels.kernel_hash import kernels_sha
from outblas.kernels.source import Source
from outblas.runtime.cubin import Cubin
from outblas.runtime.cubin_pack import BUILD_COMMAND, CubinPack, pack_key

#: Where the pack of a wheel is; a source tree has none until ``python -m outblas.dispatch.cubin_build``.
PACK = Path(str(resources.files("outblas"))) / "data" / "cubins" / "kernels.pack"
#: First Linux driver family of a CUDA major version; it and every later one load cubins of all toolkits of that
#: version. Source: NVIDIA, CUDA Compatibility, minor version compatibility.
DRIVER_FAMILIES = {12: "R525", 13: "R580"}


class PackagedCubins:
    """A pack of cubins, opened when it is first asked.

    It is an accelerator only: a pack that is absent, damaged or of other kernel sources leaves its kernels to the
    compiler; all but absence costs one warning. What was packed has passed :func:`outblas.runtime.sass.check_static`
    then.

    Args:
        quiet: give no warning of a pack that cannot be used; :meth:`why_not` tells all the same.
    """

    def __init__(self, path: Path = PACK, quiet: bool = False) -> None:
        self.path, self._quiet = path, quiet
        self._lock = threading.RLock()  # a signal's handler may multiply meanwhile
        self._pack: CubinPack | None = None
        #: Why the pack is not used; None: not opened yet.
        self._trouble: str | None = None
        self._cuda_major, self._refused = 0, False

    def get(self, source: Source, arch: str) -> Cubin | None:
        """The shipped cubin of exactly this source; None where there is none, or the pack is not used."""
        pack = self.pack()
        if pack is None:
            return None
        try:
            return pack.get(pack_key(source, arch))
        except RecordError as error:
            with self._lock:
                self._give_up(str(error))
            return None

    def pack(self) -> CubinPack | None:
        """The pack, None where it is not used: :meth:`why_not` says why."""
        if is_off("OUTBLAS_CUBINS"):
            return None
        if self._trouble is None:
            with self._lock:
                if self._trouble is None:
                    self._open()
        return self._pack

    def why_not(self) -> str:
        """Why no shipped cubin is used, with what to do; empty where some are."""
        if is_off("OUTBLAS_CUBINS"):
            return "switched off by OUTBLAS_CUBINS; unset it to use them"
        self.pack()
        return self._trouble or ""

    @property
    def damaged(self) -> bool:
        """Whether there is a pack, and it cannot be used; known once it was asked."""
        return bool(self._trouble) and self.path.is_file()

    @property
    def cuda_major(self) -> int:
        """CUDA major version of the NVRTC that made the cubins; 0: no pack was used."""
        return self._cuda_major

    def driver_needed(self) -> str:
        """Which drivers are sure to load the cubins of a pack that was used, in words: ``CUDA 13.0 or later (Linux:
        R580 or later)``."""
        family = DRIVER_FAMILIES.get(self._cuda_major)
        return f"CUDA {self._cuda_major}.0 or later" + (f" (Linux: {family} or later)" if family else "")

    def warn_refused(self, reason: str) -> None:
        """Say once that the driver does not load a shipped cubin, and that kernels are compiled here instead."""
        with self._lock:
            said, self._refused = self._refused, True
        if not said:
            warnings.warn(
                f"outblas compiles its kernels here: the driver refuses a shipped cubin ({reason}); expected a driver "
                f"for {self.driver_needed()}; update it, or set OUTBLAS_CUBINS=0",
                RuntimeWarning,
                stacklevel=2,
            )

    def _open(self) -> None:
        """Whoever calls holds the lock."""
        if not self.path.is_file():
            self._trouble = f"none in this installation, kernels are compiled at their first use; run {BUILD_COMMAND}"
            return
        try:
            pack = CubinPack(self.path)
        except RecordError as error:
            self._give_up(str(error))
            return
        if pack.about.get("kernels") != kernels_sha():
            self._give_up(f"cubins {self.path} are of other kernels; expected this package's own; run {BUILD_COMMAND}")
            return
        try:
            self._cuda_major = int(pack.about["nvrtc"].split(".")[0])
        except (KeyError, AttributeError, ValueError):
            self._give_up(
                f"cubins {self.path} do not say which NVRTC made them; expected its version; run {BUILD_COMMAND}"
            )
            return
        self._pack, self._trouble = pack, ""

    def _give_up(self, trouble: str) -> None:
        """Use the pack no more; the first time with a warning. Whoever calls holds the lock."""
        known, self._pack, self._trouble = self._trouble, None, self._trouble or trouble
        if not known and not self._quiet:
            warnings.warn(f"outblas compiles its kernels here: {trouble}", RuntimeWarning, stacklevel=2)


#: The package's own.
PACKAGED = PackagedCubins()
