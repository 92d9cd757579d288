"""The router of Ray Serve that chooses a replica by its predicted seconds of work.

Alone in its module: Ray Serve sends that to other processes by value, where nothing that it defines would be equal to
what they import. What it decides by is in `ray_routing`.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from .ray_routing import Backlogs, Call


class QueueCostRouter(RequestRouter):
    """Sends a request where it will be done soonest: to the replica with the fewest predicted seconds of work."""

    def initialize_state(self, **_: Any) -> None:
        """Called by Ray Serve once."""
        self._backlogs = Backlogs()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All that may have it, the best one first; the next ones get it only where that one takes no more."""
        call = pending_request.args[0] if pending_request is not None and pending_request.args else None
        names = {name_of(replica): replica for replica in candidate_replicas}
        self._backlogs.keep(set(names))
        if not isinstance(call, Call):
            return [candidate_replicas]
        # All were tried: the caller sees that and stops.
        open_names = [name for name in names if name not in call.excluded] or list(names)
        seconds = {name: self._backlogs.seconds(name, names[name].routing_stats) for name in open_names}
        ranked = sorted(open_names, key=lambda name: (name != call.preferred, seconds[name]))
        if ranked:
            self._backlogs.send(ranked[0], call)
        return [[names[name]] for name in ranked]


def name_of(replica: RunningReplica) -> str:
    """As the replica calls itself."""
    return replica.replica_id.unique_id
