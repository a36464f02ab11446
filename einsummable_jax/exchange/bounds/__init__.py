"""Lower bounds on the time of any exchange program that meets a demand."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from einsummable_jax.exchange.bounds.cuts import worst_cuts
from einsummable_jax.exchange.bounds.flow import flow_bound_s
from einsummable_jax.exchange.bounds.ports import egress_bound as egress_bound
from einsummable_jax.exchange.bounds.ports import ingress_bound as ingress_bound
from einsummable_jax.exchange.bounds.ports import lower_bound_s as lower_bound_s
from einsummable_jax.exchange.bounds.ports import port_bound_s, reduction_bound_s
from einsummable_jax.exchange.bounds.ports import total_bound as total_bound
from einsummable_jax.exchange.commodities import Commodity, flow_of
from einsummable_jax.exchange.network import Network, network_of
from einsummable_jax.exchange.pieces import TileIndex
from einsummable_jax.layout import Demand
from einsummable_jax.topology import Topology

_SEEDED_CUTS = 4
"""So many of the worst cuts the linear program starts with."""


@dataclasses.dataclass(frozen=True, slots=True)
class LowerBounds:
    """Seconds that an exchange takes at least, by five arguments; each holds by itself.

    Attributes:
      ports_s: What the busiest device must send, receive, read and write.
      cuts_s: What must cross from some devices to the others.
      flow_s: What all connections must carry together, whatever the routes: the linear program.
      latency_s: The longest chain of hops that some data must take.
      reduction_s: What all devices together must receive when contributions are aggregated.
    """

    ports_s: float
    cuts_s: float
    flow_s: float
    latency_s: float
    reduction_s: float

    @property
    def best_s(self) -> float:
        """The largest of them."""
        return max(self.ports_s, self.cuts_s, self.flow_s, self.latency_s, self.reduction_s)


def lower_bounds(demand: Demand, topology: Topology, index: TileIndex | None = None) -> LowerBounds:
    """The lower bounds of ``demand``.

    No connection carries anything during the least latency, before the first bytes arrive or after the last
    ones are sent, so the bounds on what connections carry grow by that, that of a cut by the latencies of the
    ways to it and from it (`bounds.cuts`). The linear program holds the worst cuts, so but for latencies it
    is the largest of the bounds on what connections carry. Where devices share one memory, that is their one
    connection, and what it carries is the bound by all arguments but the latency.
    """
    index = index or TileIndex(demand.source)
    if topology.shared:
        carried_s = lower_bound_s(demand, index, topology)
        latency_s = topology.latency_s * bool(carried_s)
        total_s = carried_s + latency_s
        return LowerBounds(total_s, total_s, total_s, latency_s, total_s)
    commodities, network = flow_of(demand, index).commodities, network_of(topology)
    once_s = float(network.latencies_s.min()) if commodities else 0.0
    ports_s = port_bound_s(demand, index, topology)
    cuts = worst_cuts(topology, network, commodities, _SEEDED_CUTS)
    return LowerBounds(
        ports_s + (once_s or topology.kernel_s * bool(ports_s)),
        max((seconds for seconds, _ in cuts), default=0.0),
        flow_bound_s(network, commodities, sides=[side for _, side in cuts]) + once_s,
        _longest_way_s(network, commodities),
        reduction_bound_s(demand, index, topology) + once_s,
    )


def _longest_way_s(network: Network, commodities: Sequence[Commodity]) -> float:
    """Latency of the way that some data must take from the nearest device that has it."""
    ways = [
        min(network.distances_s[holder, needer] for holder in group)
        for commodity in commodities
        for group in commodity.groups
        for needer in commodity.needers
    ]
    return float(max(ways, default=0.0))
