"""A cheap model of the time an exchange program takes on a machine.

Each round takes the machine's latency, then as long as its busiest resource: what a device sends in all, what
it receives in all, a link, a cut, a memory. Where devices share one memory the exchange takes the
latency once, then all reads and writes of all devices over what it can send and receive in all, and each run
of consecutive elements its own time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from einsummable_jax.exchange.program import ExchangeProgram, Move
from einsummable_jax.topology import Topology


@dataclasses.dataclass(frozen=True, slots=True)
class RoundTraffic:
    """Bytes that one round moves.

    Attributes:
      sent: For each ordered pair of devices with traffic, the bytes that the second reads from the first.
      touched: For each device, the bytes of its memory read and written.
    """

    sent: dict[tuple[int, int], int]
    touched: list[int]


def round_traffic(moves: Iterable[Move], itemsize: int, num_devices: int) -> RoundTraffic:
    """The traffic of the ``moves`` of one round."""
    sent: dict[tuple[int, int], int] = {}
    touched = [0] * num_devices
    for move in moves:
        destination = move.destination.device
        moved_bytes = move.destination.box.volume * itemsize
        touched[destination] += moved_bytes
        for source in move.sources:
            touched[source.device] += moved_bytes
            if source.device != destination:
                pair = (source.device, destination)
                sent[pair] = sent.get(pair, 0) + moved_bytes
    return RoundTraffic(sent, touched)


def round_seconds(traffic: RoundTraffic, topology: Topology) -> float:
    """Modelled seconds of one round, on a machine whose devices have a memory each."""
    busiest_s = max(traffic.touched) / topology.memory_bandwidth
    if not traffic.sent:
        return topology.kernel_s + busiest_s
    sends, receives = [0] * topology.num_devices, [0] * topology.num_devices
    for (source, destination), sent_bytes in traffic.sent.items():
        sends[source] += sent_bytes
        receives[destination] += sent_bytes
        bandwidth = topology.links.get((source, destination))
        if bandwidth is not None:
            busiest_s = max(busiest_s, sent_bytes / bandwidth)
    for cut in topology.cuts:
        crossing = sum(sent for pair, sent in traffic.sent.items() if cut.carries(*pair))
        busiest_s = max(busiest_s, crossing / cut.bandwidth)
    return topology.latency_s + max(busiest_s, max(sends) / topology.egress, max(receives) / topology.ingress)


def simulate_seconds(program: ExchangeProgram, topology: Topology) -> float:
    """Modelled seconds of ``program`` on ``topology``; zero for a program that moves nothing."""
    traffics = [round_traffic(moves, program.dtype.itemsize, program.num_devices) for moves in program.rounds]
    if topology.shared:
        touched_bytes = sum(sum(traffic.touched) for traffic in traffics)
        runs_s = topology.run_s * program.runs if topology.run_s else 0.0
        return (
            topology.latency_of(len(traffics)) + touched_bytes / (topology.egress + topology.ingress) + runs_s
        )
    return sum(round_seconds(traffic, topology) for traffic in traffics)
