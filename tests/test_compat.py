"""What the package needs of JAX."""

import runpy

import jax
import pytest

from einsummable_jax import _compat


@pytest.mark.parametrize("version", [(0, 9, 2), (0, 11, 0), (1, 0, 0)])
def test_another_jax_is_named_with_the_remedy(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
    found = ".".join(map(str, version))
    with pytest.raises(ImportError, match=rf"JAX {found} is installed. .*pip install 'jax>=0.10,<0.11'"):
        runpy.run_path(_compat.__file__)
