"""The error of this package."""

from __future__ import annotations


class TopologyError(ValueError):
    """A description of a machine that is malformed or contradicts itself."""
