"""Dependencies of outblas-lab: the outblas of the same version, with what reads recordings."""

from __future__ import annotations

from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class SameVersion(MetadataHookInterface):
    """Add the one dependency that ``pyproject.toml`` cannot state: its version is in one place for both packages."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add ``dependencies``.

        Args:
            metadata: table ``project`` of ``pyproject.toml``, with the version.
        """
        metadata["dependencies"] = [f"outblas[tune]=={metadata['version']}"]
