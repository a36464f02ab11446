"""Steps that take over a second say so: on a terminal while they run, and through `logging` when they end."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

logger = logging.getLogger("einsummable_jax")

_PATIENCE_S = 1.0


def _show(what: str, terminal: TextIO, done: threading.Event) -> None:
    """Keep one line of the terminal up to date until ``done``."""
    began = time.perf_counter()
    while not done.wait(_PATIENCE_S):
        terminal.write(f"\r{what} ... {time.perf_counter() - began:.0f} s")
        terminal.flush()


@contextlib.contextmanager
def step(what: str) -> Iterator[None]:
    """Report the enclosed work as ``what`` if it takes more than a second."""
    began, done, watcher, terminal = time.perf_counter(), threading.Event(), None, sys.stderr
    if terminal is not None and terminal.isatty():
        watcher = threading.Thread(target=_show, args=(what, terminal, done), daemon=True)
        watcher.start()
    try:
        yield
    finally:
        done.set()
        if watcher is not None:
            watcher.join()
        elapsed_s = time.perf_counter() - began
        if elapsed_s > _PATIENCE_S:
            if watcher is not None and terminal is not None:
                terminal.write(f"\r{what}: {elapsed_s:.1f} s\n")
            logger.info("%s: %.1f s", what, elapsed_s)
