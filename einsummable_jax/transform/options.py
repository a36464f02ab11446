"""The options of `distribute`, checked: errors name the option, what was found and what to give instead."""

from __future__ import annotations

import collections
import numbers
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

OBJECTIVES = ("time", "bytes")

_DEVICES = "give a sequence of jax.Device, such as jax.devices()[:4], an array of them, or a Mesh"


def checked_devices(devices: Any) -> tuple[jax.Device, ...]:
    """The device of each rank.

    Args:
      devices: None: all of the default backend; one device; several in any nesting, such as an array of
        them; or a mesh, which stands for its devices in their order.

    Raises:
      TypeError: If these are no devices.
      ValueError: If there are none, one comes twice, or they are of several platforms.
    """
    if devices is None:
        return tuple(jax.devices())
    chosen = _flat(devices.devices if isinstance(devices, Mesh) else devices)
    if chosen is None or not all(isinstance(device, jax.Device) for device in chosen):
        raise TypeError(f"distribute: devices is {devices!r}, expected devices of JAX. Remedy: {_DEVICES}")
    if not chosen:
        raise ValueError(
            f"distribute: devices is {devices!r}, expected at least one device. Remedy: {_DEVICES}"
        )
    twice = [device for device, count in collections.Counter(chosen).items() if count > 1]
    if twice:
        raise ValueError(
            f"distribute: devices has {', '.join(map(str, twice))} more than once, expected distinct ones. "
            "Remedy: give each device once"
        )
    platforms = sorted({device.platform for device in chosen})
    if len(platforms) > 1:
        raise ValueError(
            f"distribute: devices has some of the platforms {', '.join(platforms)}, expected one platform. "
            f"Remedy: give those of one, such as jax.devices({platforms[0]!r})"
        )
    return tuple(chosen)


def _flat(devices: Any) -> list[Any] | None:
    """What an array or any nesting of sequences holds; None if it is neither."""
    if isinstance(devices, np.ndarray):
        return list(devices.flat)
    if isinstance(devices, jax.Device):
        return [devices]
    if isinstance(devices, (str, bytes, dict)) or not isinstance(devices, Iterable):
        return None
    found = []
    for each in devices:
        found += _flat(each) or [each] if isinstance(each, (list, tuple, np.ndarray)) else [each]
    return found


def checked_memory_limit(limit: Any) -> float | None:
    """The limit in bytes, as a number of Python's.

    Raises:
      TypeError: If it is no number.
      ValueError: If it is not positive.
    """
    if limit is None:
        return None
    remedy = "Remedy: give bytes, such as 16e9, or None: what the devices have"
    if isinstance(limit, np.ndarray) and limit.ndim == 0:
        limit = limit[()]
    if isinstance(limit, (bool, np.bool_)) or not isinstance(limit, numbers.Real):
        raise TypeError(
            f"distribute: memory_limit_bytes is {limit!r}, expected a number of bytes per device. {remedy}"
        )
    found = int(limit) if isinstance(limit, numbers.Integral) else float(limit)
    if not found > 0:
        raise ValueError(f"distribute: memory_limit_bytes is {limit}, expected a positive number. {remedy}")
    return found


def checked_objective(cost: Any) -> str:
    """What to minimise.

    Raises:
      ValueError: If it is none of `OBJECTIVES`.
    """
    if not isinstance(cost, str) or cost not in OBJECTIVES:
        raise ValueError(f"distribute: cost is {cost!r}, expected one of {OBJECTIVES}")
    return cost


def checked_flag(option: str, value: Any) -> bool:
    """A switch.

    Raises:
      TypeError: If it is no boolean.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"distribute: {option} is {value!r}, expected True or False")
    return bool(value)
