"""Files this package keeps for later processes."""

from __future__ import annotations

import os
import pathlib
import tempfile


def cache_dir() -> pathlib.Path:
    """Where measured rates and plans are kept.

    ``$EINSUMMABLE_JAX_CACHE_DIR`` if it is set, else ``einsummable_jax`` in the user's cache directory.
    """
    configured = os.environ.get("EINSUMMABLE_JAX_CACHE_DIR")
    if configured:
        return pathlib.Path(configured)
    base = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(base) if base else pathlib.Path.home() / ".cache") / "einsummable_jax"


def write_atomically(path: pathlib.Path, data: bytes) -> None:
    """Write a file that other processes see whole or not at all; makes its directory.

    Raises:
      OSError: If it cannot be written. Nothing is left behind.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("wb", dir=path.parent, suffix=".tmp", delete=False) as file:
        try:
            file.write(data)
            file.close()
            os.replace(file.name, path)
        except OSError:
            pathlib.Path(file.name).unlink(missing_ok=True)
            raise
