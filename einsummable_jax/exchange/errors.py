"""The error of this stage."""

from __future__ import annotations


class ExchangeError(ValueError):
    """A demand that cannot be met, or an exchange program that does not meet its demand."""
