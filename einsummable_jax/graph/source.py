"""Where the user's code asks for an operation."""

from __future__ import annotations

import os

from jax.extend.core import JaxprEqn

from einsummable_jax import _compat


def source_line(eqn: JaxprEqn) -> str:
    """``file.py:line (function)`` of the user's code; empty if that is not known."""
    frame = _compat.source_info_util.user_frame(eqn.source_info.traceback)
    if frame is None:
        return ""
    return f"{os.path.basename(frame.file_name)}:{frame.start_line} ({frame.function_name})"
