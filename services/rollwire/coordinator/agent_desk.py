"""Which episodes agents may play: the groups that are offered, and who gets which place. Pure: no clock, no I/O.

    offer → unnamed ── first session ──► named ── every episode has a trajectory ──► complete
                                           └── an episode failed too often ──► hopeless

Sessions with one task name form groups: a group takes the name of its first session, and further sessions of that name
join it while it has places. An agent that gives no name joins the oldest group that was begun without one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollwire.coordinator.groups import GroupProgress
from rollwire.v1 import weights_pb2


@dataclass(eq=False)
class Offer:
    """A group of which agents play the episodes.

    Attributes:
        progress: How far it is.
        required_version: Version that must play it; None for whatever is served.
        task_name: Name that its sessions share; empty before the first one.
        named_by_agent: True if an agent chose the name.
        active: False once the group is over.
        quiet_since_s: When its last session ended, or it was offered.
    """

    progress: GroupProgress
    required_version: weights_pb2.WeightVersion | None
    quiet_since_s: float
    task_name: str = ""
    named_by_agent: bool = False
    active: bool = True

    @property
    def free(self) -> list[int]:
        """Episodes that nobody plays, ascending."""
        return self.progress.unrequested

    @property
    def hopeless(self) -> bool:
        """True if an episode has failed as often as it may."""
        return any(not self.progress.has_attempts_left(index) for index in self.free)

    @property
    def over(self) -> bool:
        """True if nothing is left to be played."""
        return self.progress.complete or self.hopeless


@dataclass(frozen=True)
class Place:
    """One episode given to an agent."""

    offer: Offer
    episode_index: int
    attempt: int


@dataclass
class AgentDesk:
    """The groups that are offered to agents, oldest first.

    Attributes:
        offers: Groups by identifier.
    """

    offers: dict[str, Offer] = field(default_factory=dict)

    def add(self, offer: Offer) -> None:
        """Offers a group."""
        self.offers[offer.progress.plan.group_id] = offer

    def remove(self, offer: Offer) -> None:
        """Ends an offer."""
        offer.active = False
        self.offers.pop(offer.progress.plan.group_id, None)

    def take(self, tag: str, task_name: str) -> Place | None:
        """Gives a place away, whose episode counts as requested; None when there is none now.

        Args:
            tag: Environment tag.
            task_name: Name that the agent chose; empty for none.
        """
        offer = self._choose(tag, task_name)
        if offer is None:
            return None
        if not offer.task_name:
            offer.task_name = task_name or offer.progress.plan.group_id
            offer.named_by_agent = bool(task_name)
        index = offer.free[0]
        return Place(offer, index, offer.progress.begin_episode(index))

    def waits(self, tag: str) -> bool:
        """Tells whether episodes of a tag are offered and none is being played."""
        offers = [offer for offer in self.offers.values() if offer.progress.plan.environment_tag == tag]
        return any(offer.free and not offer.over for offer in offers) and not any(
            offer.progress.in_attempt for offer in offers
        )

    def give_back(self, place: Place) -> None:
        """Takes a place back at which nothing was played."""
        if place.offer.active:
            place.offer.progress.withdraw_episode(place.episode_index)

    def _choose(self, tag: str, task_name: str) -> Offer | None:
        usable = [
            offer
            for offer in self.offers.values()
            if offer.progress.plan.environment_tag == tag and offer.free and not offer.over
        ]
        for offer in usable:
            begun = bool(offer.task_name)
            if begun and (offer.task_name == task_name or (not task_name and not offer.named_by_agent)):
                return offer
        return next((offer for offer in usable if not offer.task_name), None)
