"""The compiled kernels that come with the package, and why they are not used if they are not."""

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

#: Place of the pack in a wheel; a source tree has none until ``python -m outblas_lab.build.cubin_build`` has run.
PACK = Path(str(resources.files("outblas"))) / "data" / "cubins" / "kernels.pack"
#: CUDA major version -> first Linux driver family that loads its cubins, as every later family does. Source: NVIDIA,
#: CUDA Compatibility, minor version compatibility.
DRIVER_FAMILIES = {12: "R525", 13: "R580"}


class PackagedCubins:
    """A pack of cubins, opened at first use. :data:`PACKAGED` is that of this package.

    :meth:`get` returns a cubin or None, and :meth:`why_not` says why the pack is not used. ``OUTBLAS_CUBINS=0``
    switches it off. The pack never causes a failure. If it is absent, damaged or made from other kernel sources,
    kernels are compiled. All but absence costs one warning (RuntimeWarning). Packed cubins have passed
    :func:`outblas.runtime.sass.check_static`.

    Args:
        quiet: give no warning of an unusable pack; :meth:`why_not` still reports it.
    """

    def __init__(self, path: Path = PACK, quiet: bool = False) -> None:
        self.path, self._quiet = path, quiet
        self._lock = threading.RLock()  # reentrant: a signal handler may multiply meanwhile
        self._pack: CubinPack | None = None
        #: Why the pack is not used; empty: it is used; None: not opened yet.
        self._trouble: str | None = None
        self._cuda_major, self._refused = 0, False

    def get(self, source: Source, arch: str) -> Cubin | None:
        """Return the packed cubin of exactly this source; None if the pack lacks it or is not used.

        Example: ``PACKAGED.get(make_source(problem, config), "sm_90a")``. It never compiles and raises no RecordError.
        """
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
        """Return the pack; None if it is not used (see :meth:`why_not`)."""
        if is_off("OUTBLAS_CUBINS"):
            return None
        if self._trouble is None:
            with self._lock:
                if self._trouble is None:
                    self._open()
        return self._pack

    def why_not(self) -> str:
        """Return why the pack is not used, with the remedy; an empty string if it is used.

        Example: ``switched off by OUTBLAS_CUBINS; unset it to use them``. The first call opens the pack.
        """
        if is_off("OUTBLAS_CUBINS"):
            return "switched off by OUTBLAS_CUBINS; unset it to use them"
        self.pack()
        return self._trouble or ""

    @property
    def damaged(self) -> bool:
        """Return whether a pack exists but cannot be used. False before the first use."""
        return bool(self._trouble) and self.path.is_file()

    @property
    def cuda_major(self) -> int:
        """Return the CUDA major version of the NVRTC that made the cubins, e.g. 13; 0 before the first use or without a
        pack.
        """
        return self._cuda_major

    def driver_needed(self) -> str:
        """Return the drivers that load the pack's cubins, e.g. ``CUDA 13.0 or later (Linux: R580 or later)``.

        The call opens the pack. Without a usable one the text is ``any CUDA``.
        """
        self.pack()
        if not self._cuda_major:
            return "any CUDA"
        family = DRIVER_FAMILIES.get(self._cuda_major)
        return f"CUDA {self._cuda_major}.0 or later" + (f" (Linux: {family} or later)" if family else "")

    def warn_refused(self, reason: str) -> None:
        """Warn once (RuntimeWarning) that the driver refused a packed cubin and that kernels are compiled instead.

        It warns even if ``quiet`` is set. ``reason`` stands in the warning. The pack stays in use.
        """
        with self._lock:
            said, self._refused = self._refused, True
        if not said:
            warnings.warn(
                f"outblas compiles its kernels here: the driver rejects a packaged cubin ({reason}); expected a driver "
                f"for {self.driver_needed()}; update it, or set OUTBLAS_CUBINS=0",
                RuntimeWarning,
                stacklevel=2,
            )

    def _open(self) -> None:
        """Open the pack and check its origin. The caller holds the lock."""
        if not self.path.is_file():
            self._trouble = "none in this installation; kernels are compiled at first use; make build packs them"
            return
        try:
            pack = CubinPack(self.path)
        except RecordError as error:
            self._give_up(str(error))
            return
        if pack.about.get("kernels") != kernels_sha():
            self._give_up(
                f"cubins {self.path} belong to other kernels; expected those of this package; run {BUILD_COMMAND}"
            )
            return
        try:
            self._cuda_major = int(pack.about["nvrtc"].split(".")[0])
        except (KeyError, AttributeError, ValueError):
            self._give_up(f"cubins {self.path} lack the NVRTC version; expected it in the file; run {BUILD_COMMAND}")
            return
        self._pack, self._trouble = pack, ""

    def _give_up(self, trouble: str) -> None:
        """Stop using the pack; the first time with a warning. The caller holds the lock."""
        known, self._pack, self._trouble = self._trouble, None, self._trouble or trouble
        if not known and not self._quiet:
            warnings.warn(f"outblas compiles its kernels here: {trouble}", RuntimeWarning, stacklevel=2)


#: The pack of this package.
PACKAGED = PackagedCubins()
