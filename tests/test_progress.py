"""Long steps are reported, short ones are not."""

import io
import logging
import sys
import time

from einsummable_jax.transform import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_long_steps_are_shown_and_logged(monkeypatch, caplog):
    monkeypatch.setattr(progress, "_PATIENCE_S", 0.02)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with caplog.at_level(logging.INFO, "einsummable_jax"):
        with progress.step("counting sheep"):
            time.sleep(0.1)
    assert "counting sheep ... 0 s" in terminal.getvalue()
    assert terminal.getvalue().endswith(" s\n")
    assert "counting sheep: 0.1 s" in caplog.text


def test_short_steps_are_silent(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    with caplog.at_level(logging.INFO, "einsummable_jax"), progress.step("a blink"):
        pass
    assert terminal.getvalue() == caplog.text == ""
