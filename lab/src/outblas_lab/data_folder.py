"""The data of outblas-lab: recordings and policies."""

from __future__ import annotations

from importlib import resources

#: Folder with a folder for each kind of data.
DATA = resources.files("outblas_lab") / "data"
