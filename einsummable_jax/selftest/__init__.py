"""Checks of a machine that a user runs first: ``python -m einsummable_jax.selftest``."""
