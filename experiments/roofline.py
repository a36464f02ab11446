"""Modelled time of a compiled program on a machine: a roofline per kernel, then its collectives."""

from __future__ import annotations

import dataclasses

from einsummable_jax.topology import Topology
from experiments import hlo
from experiments.hlo_kernels import kernels


@dataclasses.dataclass(frozen=True)
class ModelledTime:
    """Modelled seconds of one program on one device.

    Attributes:
      kernel_s: Arithmetic and memory traffic, with the fixed cost of each kernel.
      communication_s: Collectives or exchanges.
    """

    kernel_s: float
    communication_s: float

    @property
    def total_s(self) -> float:
        """Both, one after the other."""
        return self.kernel_s + self.communication_s


def halved_elements(topology: Topology) -> Topology:
    """The machine on which a float32 program takes as long as the same in bfloat16 on ``topology``.

    XLA's CPU backend widens bfloat16 products and collectives to float32, so a bfloat16 program
    compiled there does not show what a GPU would do. Instead float32 programs are modelled with
    bfloat16's arithmetic rate and with all bandwidths doubled, as if each element had two bytes.
    """
    return dataclasses.replace(
        topology,
        name=f"{topology.name} (2-byte elements)",
        egress=2 * topology.egress,
        ingress=2 * topology.ingress,
        memory_bandwidth=2 * topology.memory_bandwidth,
        memory_bytes=2 * topology.memory_bytes,
        flops={"default": topology.flop_rate("bfloat16")},
        links={pair: 2 * bandwidth for pair, bandwidth in topology.links.items()},
        cuts=tuple(dataclasses.replace(cut, bandwidth=2 * cut.bandwidth) for cut in topology.cuts),
    )


def kernel_seconds(module: hlo.Module, topology: Topology, without_scope: str | None = None) -> float:
    """Time of all kernels: for each the larger of arithmetic and memory traffic, plus a fixed cost.

    Those of the scope ``without_scope`` are left out.
    """
    names = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
    total = 0.0
    for kernel in kernels(module, without_scope):
        arithmetic_s = sum(
            n / topology.flop_rate(names.get(dtype, dtype)) for dtype, n in kernel.flops.items()
        )
        memory_s = kernel.memory_bytes / topology.memory_bandwidth
        total += kernel.times * (max(arithmetic_s, memory_s) + kernel.launches * topology.kernel_s)
    return total


def collective_seconds(
    collective: hlo.Collective, topology: Topology, *, scatters_sum: bool = False
) -> float:
    """Time of a collective by the better of the direct schedules on a switch.

    A sum takes one round in which everyone reads everything, or two (reduce-scatter, all-gather); all
    others take one round. This is no slower than what a vendor's library does.

    Args:
      collective: Which.
      topology: Where; devices join at port speed.
      scatters_sum: Take an all-reduce for the reduce-scatter that a GPU compiler would make of it.
    """
    bandwidth, latency_s = min(topology.ingress, topology.egress), topology.latency_s
    received_s = collective.received_bytes_per_device / bandwidth
    if collective.kind != "all-reduce":
        once_s = latency_s + received_s
    elif scatters_sum:
        once_s = latency_s + received_s / 2
    else:
        one_shot_s = latency_s + collective.operand_bytes * (collective.group_size - 1) / bandwidth
        once_s = min(one_shot_s, 2 * latency_s + received_s)
    return once_s * collective.times


def modelled_time(module: hlo.Module, topology: Topology, *, scatters_sums: bool = False) -> ModelledTime:
    """Modelled time of a compiled program whose communication is XLA's collectives."""
    communication_s = sum(
        collective_seconds(c, topology, scatters_sum=scatters_sums) for c in hlo.collectives(module)
    )
    return ModelledTime(kernel_seconds(module, topology), communication_s)
