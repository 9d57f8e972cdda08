"""A node leader: hears its node and its children in the tree, passes on what is complete, and spreads the log.

The leader of node 0 is the *root*: it turns what is complete everywhere into the log.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable

from hvdlite.config import Config
from hvdlite.coordinator.control_page import ControlPage
from hvdlite.coordinator.follower import FULL_STREAM_S
from hvdlite.coordinator.messages import (
    Claim,
    Decoder,
    Encoder,
    EndOfBatch,
    Message,
    Notice,
    PlanMessage,
    Response,
    Verb,
    Written,
)
from hvdlite.coordinator.negotiation import LOOK_S, Negotiation
from hvdlite.coordinator.order_watch import OrderWatch
from hvdlite.coordinator.plan_leader import PlanLeader
from hvdlite.coordinator.plan_member import Wish
from hvdlite.coordinator.readiness import Readiness
from hvdlite.coordinator.stall import StallWatch
from hvdlite.coordinator.tree import Tree
from hvdlite.counters import Traffic
from hvdlite.topology import Topology


class Leader:
    """The leader of this rank's node; a `Follower` has the same methods.

    Args:
        tree: links to the leaders of other nodes.
        clock: in seconds.
        readiness: knows which plans run free.
        rhythm: of this rank, see `hvdlite.coordinator.plan_member.PlanMember.rhythm`.
    """

    def __init__(
        self,
        topology: Topology,
        page: ControlPage,
        tree: Tree,
        config: Config,
        clock: Callable[[], float],
        readiness: Readiness,
        rhythm: Callable[[int, int], int],
    ) -> None:
        self.claims_heard = 0
        self._rank = topology.rank
        self._local_ranks = topology.local_ranks
        self._page = page
        self._tree = tree
        self._clock = clock
        self._is_root = tree.parent is None
        self._is_alone = self._is_root and not tree.children
        self._has_claims = False  # that are not answered
        self._is_due = False  # another turn: what was obeyed since the last one may let this rank say more
        below = topology.subtree_ranks(topology.node_index, config.tree_fanout)
        self._negotiation = Negotiation(below, config.stall_patience_s)
        self._mailboxes = {i: Decoder() for i in range(1, topology.local_size)}
        self._children = {child: Decoder() for child in tree.children}
        self._speaks_for = {child: topology.subtree_ranks(child, config.tree_fanout) for child in tree.children}
        self._pen = Encoder(config.cache_capacity)  # to the parent; of the root, to all: the log
        self._stall = StallWatch(config, topology.ranks) if self._is_root else None
        self._plan = PlanLeader(
            [*((rank,) for rank in topology.local_ranks), *self._speaks_for.values()],
            self._speaks_for.values(),
            OrderWatch(config.cache_capacity, rhythm if self._is_alone else None) if self._is_root else None,
            own=[(rank,) for rank in topology.local_ranks],
            bursts=readiness.bursts if config.prepared_operations else None,
        )
        self._to_place: list[Message] = []  # of the root: notices that wait for the end of a plan that runs free
        self._spread: deque[bytes] = deque()  # of the log, what this node may not have yet
        self._node_outbox = bytearray()  # of the log, what the page has no room for yet
        self._published = 0  # bytes of the log that this node's other ranks can read, and this rank may act upon
        # The log as this rank reads it: the root knows its own words, and where each ends; others decode theirs.
        self._own_words: deque[tuple[int, Message]] = deque()
        self._flushed = 0  # bytes of the log that the root's pen has written before its outbox
        self._decoder = Decoder()
        self._readable = b""

    # What every rank of a node does.

    def say(self, message: Message) -> None:
        """Tell the leader, which is this rank."""
        self._hear(message, (self._rank,), self._clock())

    def turn(self, now_s: float) -> tuple[bool, Iterable[Message]]:
        """Hear the node and the children, pass on what is complete, and spread the log.

        Returns:
            Whether more may follow soon, and what of the log has come down since the last call, which must be exhausted
            before the next.
        """
        self._is_due = False
        busy = self._hear_node(now_s)
        if not self._is_alone:
            busy |= self._hear_nodes(now_s)
        if self._plan.is_open:
            self._pass_on(self._plan.ready(self._page.ready(self._plan.number)))
        if self._has_claims:
            self._negotiate(now_s)
        if self._to_place:
            self._place()
        self._flush()
        log = self._log()
        return busy or bool(log), log

    def _negotiate(self, now_s: float) -> None:
        if self._stall is not None:
            self._judge(self._stall, now_s)
        else:
            for claim in self._negotiation.upward(now_s):
                self._pen.send(claim)
        self._has_claims = not self._negotiation.is_idle or (self._stall is not None and self._stall.is_asking)

    def _flush(self) -> None:
        """Send what was written, as far as links take it."""
        if self._pen.outbox:
            data = bytes(self._pen.outbox)
            self._pen.outbox.clear()
            if self._is_root:
                self._flushed += len(data)
                self._spread_log(data)
            else:
                assert self._tree.parent is not None
                self._tree.send(self._tree.parent, data)
        if self._spread:
            # While a leader executes it sends nothing: whoever else shall execute must have been told before.
            unsent = max(map(self._tree.unsent, self._tree.children), default=0)
            while len(self._spread) > unsent:
                self._node_outbox += self._spread.popleft()
        if self._node_outbox:
            data = b"" if self._is_root else bytes(self._node_outbox)
            before = len(self._node_outbox)
            self._page.publish(self._node_outbox)
            taken = before - len(self._node_outbox)
            self._published += taken
            self._readable += data[:taken]

    def _log(self) -> list[Message]:
        """What of the log this rank may act upon now."""
        messages: list[Message] = []
        if self._readable:
            messages += self._decoder.feed(self._readable)
            self._readable = b""
        while self._own_words and self._own_words[0][0] <= self._published:
            messages.append(self._own_words.popleft()[1])
        return messages

    def obeyed(self, message: PlanMessage) -> None:
        """This rank does what ``message`` of the log says, which is no GO."""
        self._plan.obey(message)
        self._is_due = True

    def changed(self, wish: Wish, done: int, period: int) -> None:
        """See `PlanLeader.changed`."""
        self._plan.changed(wish, done, period)

    def all_are_back(self) -> None:
        """The ranks that were absent take part again."""
        if not self._is_root:  # which was told by its negotiation
            self._negotiation.end_join()

    @property
    def patience_s(self) -> float:
        """How long to sleep if nobody rings."""
        if self._is_due:  # who has done the thread's work may leave now
            return 0.0
        if self._node_outbox or self._spread:
            return FULL_STREAM_S
        return LOOK_S if self._has_claims and self._negotiation.is_waiting else math.inf

    @property
    def written(self) -> Written:
        return self._pen.written

    @property
    def traffic(self) -> Traffic:
        """With other nodes."""
        return self._tree.traffic

    # A leader's own work.

    def _hear_node(self, now_s: float) -> bool:
        busy = False
        for local_rank, decoder in self._mailboxes.items():
            data = self._page.receive(local_rank)
            if data:
                busy = True
                for message in decoder.feed(data):
                    self._hear(message, (self._local_ranks[local_rank],), now_s)
        return busy

    def _hear_nodes(self, now_s: float) -> bool:
        busy = False
        for node_index, data in self._tree.receive():
            busy = True
            if node_index == self._tree.parent:
                self._spread_log(data)
            else:
                for message in self._children[node_index].feed(data):
                    self._hear(message, self._speaks_for[node_index], now_s)
        return busy

    def _hear(self, message: Message, sender_ranks: tuple[int, ...], now_s: float) -> None:
        """Take a message from below."""
        if isinstance(message, Claim):
            self.claims_heard += 1
            self._has_claims = True
            self._negotiation.add(message, sender_ranks, now_s)
        elif isinstance(message, PlanMessage):
            claimed = self._negotiation.claimed if self._is_alone and not self._to_place else tuple
            said = self._plan.hear(message, sender_ranks, self._negotiation.is_idle, claimed)
            if said is not None and said.verb is Verb.REOPEN:
                self._negotiation.take_back()
            self._pass_on(said)
        elif self._stall is None:
            self._pen.send(message)
        else:
            assert isinstance(message, Notice), message
            if message.has_a_place:
                self._to_place.append(message)
            elif not self._stall.take_answer(message.content):
                self._decree(message)

    def _pass_on(self, message: PlanMessage | None) -> None:
        """A word about the frozen plan: the root's goes into the log, others' to the parent."""
        if message is None:
            return
        if self._is_root:
            self._decree(message)
        else:
            self._pen.send(message)

    def _judge(self, stall: StallWatch, now_s: float) -> None:
        """The root turns what is complete into the log."""
        if self._plan.runs_free:
            self._pass_on(self._plan.make_room())
            verdicts = []
        else:
            verdicts = self._negotiation.verdicts()
        alone = sum(isinstance(verdict, Response) for verdict in verdicts) == 1
        for verdict in verdicts:
            self._decree(verdict)
            if isinstance(verdict, Response):
                self._plan.saw(verdict, alone=alone)
        if verdicts:
            self._decree(EndOfBatch())
            if not self._to_place:
                self._pass_on(self._plan.propose(self._negotiation.is_idle))
        query = stall.look(self._negotiation.waiting, now_s)
        if query is not None:
            self._decree(query)

    def _place(self) -> None:
        """The root says what has to come between the same two operations everywhere: the end, or that ranks meet.

        Of a plan that runs free some ranks may be at what others would not begin before it, and wait for them there.
        """
        if self._plan.runs_free:
            self._pass_on(self._plan.make_room())
        elif self._plan.is_in_log:
            for message in self._to_place:
                self._decree(message)
            self._to_place.clear()

    def _decree(self, message: Message) -> None:
        """The root appends to the log."""
        self._pen.send(message)
        self._own_words.append((self._flushed + len(self._pen.outbox), message))

    def _spread_log(self, data: bytes) -> None:
        """Append to the children's logs, and, once they have it, to this node's."""
        self._spread.append(data)
        for child in self._tree.children:
            self._tree.send(child, data)
