"""Where the engines' shared libraries are."""

from __future__ import annotations

from pathlib import Path

_BUILD_COMMANDS = "`pip install -e .` or, in a checkout, `cmake -S . -B build && cmake --build build`"


def find(library: str, what: str, hint: str = "") -> Path:
    """The file of an engine.

    Args:
      library: Its name, ``lib….so``.
      what: What messages call the engine.
      hint: What else has to be there for it to be built, for the message.

    Raises:
      ImportError: If it has not been built.
    """
    import einsummable_jax.custom_calls as package

    # An editable install has two places: the checkout, and site-packages with what pip built.
    places = [Path(place) / "lib" / library for place in package.__path__]
    built = [place for place in places if place.exists()]
    if built:
        return max(built, key=lambda place: place.stat().st_mtime)
    raise ImportError(
        f"{what} {library} is not built: looked for {', '.join(map(str, places))}. "
        f"{hint}Build it with {_BUILD_COMMANDS}"
    )
