"""The ranks of one node that are not there: what they say is hvdlite's own, when they say it is the caller's.

What decides and what speaks is the code that real ranks run: a `PlanMember` for every rank, for every leader a
`Negotiation`, a `PlanLeader`, an `Encoder` to its parent and a `Decoder` for each child, for the root an `OrderWatch`.

Two things are done once for many, since they are the same bytes by construction. Ranks that lead no node submit the
same requests in the same order, so one encoder writes what each of them writes. And the log passes down the tree as it
is, so only the root decodes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hvdlite.config import Config
from hvdlite.coordinator.burst import Burst
from hvdlite.coordinator.messages import Claim, Decoder, Encoder, EndOfBatch, Message, PlanMessage, Response, Written
from hvdlite.coordinator.negotiation import Negotiation
from hvdlite.coordinator.order_watch import OrderWatch
from hvdlite.coordinator.plan_leader import PlanLeader, Sender
from hvdlite.coordinator.plan_member import PlanMember
from hvdlite.coordinator.submission import Submission
from hvdlite.counters import Traffic
from hvdlite.topology import Topology


@dataclass(frozen=True, slots=True)
class Letter:
    """What a rank writes to the leader of its node."""

    data: bytes
    message: Message
    spells_out: bool


class Letters:
    """Writes for all ranks that lead no node."""

    def __init__(self, capacity: int) -> None:
        self._pen = Encoder(capacity)
        self._decoder = Decoder()
        self._claims: dict[str, Letter] = {}

    def new_step(self) -> None:
        """From here on every rank claims each request once more, if at all."""
        self._claims.clear()

    def of(self, message: Message) -> Letter:
        """``message`` as each rank writes it that says it in this step."""
        if not isinstance(message, Claim):
            return self._write(message)
        name = message.request.name
        if name not in self._claims:
            self._claims[name] = self._write(message)
        return self._claims[name]

    def _write(self, message: Message) -> Letter:
        before = self._pen.written.spelled_out
        self._pen.send(message)
        data = bytes(self._pen.outbox)
        self._pen.outbox.clear()
        (said,) = self._decoder.feed(data)
        return Letter(data, said, self._pen.written.spelled_out > before)


@dataclass(slots=True)
class Rank:
    """One of the node's ranks, and what it has written; of the leader, its pen knows."""

    member: PlanMember
    word: tuple[int, int] = (0, 0)  # in the control page: number of the plan, and how much of it the rank is ready for
    written: Written = field(default_factory=Written)
    nbytes: int = 0


class VirtualNode:
    """The ranks of node ``index``, the first of which leads it.

    Args:
        letters: shared by all nodes of the job.
        freezes: whether an order that repeats is frozen.
    """

    def __init__(
        self, index: int, nodes: tuple[tuple[int, ...], ...], config: Config, letters: Letters, freezes: bool
    ) -> None:
        self.topology = Topology(nodes[index][0], nodes)
        self.parent = self.topology.parent(config.tree_fanout)
        self.children = self.topology.children(config.tree_fanout)
        self.ranks = [Rank(PlanMember(config.cache_capacity, config.stall_patience_s)) for _ in nodes[index]]
        self.traffic = Traffic()
        below = self.topology.subtree_ranks(index, config.tree_fanout)
        self.negotiation = Negotiation(below, config.stall_patience_s)
        self._senders: list[Sender] = [(rank,) for rank in nodes[index]]
        self._speaks_for = {child: self.topology.subtree_ranks(child, config.tree_fanout) for child in self.children}
        self._links = {child: Decoder() for child in self.children}
        self._mailboxes = [Decoder() for _ in nodes[index]]
        self._pen = Encoder(config.cache_capacity)  # to the parent, or, of the root, the log
        self._letters = letters
        watch = OrderWatch(config.cache_capacity if freezes else 0) if self.parent is None else None
        self._plan_leader = PlanLeader([*self._senders, *self._speaks_for.values()], self._speaks_for.values(), watch)
        self._claims_heard = 0
        self._mail_bytes = 0

    # What its ranks do.

    def submit(self, local_rank: int, submission: Submission, now_s: float) -> Letter | None:
        """A rank is ready for an operation; what it writes to its leader, if anything."""
        rank = self.ranks[local_rank]
        if not rank.member.admit(submission, now_s):
            return self._send_up(local_rank, submission.claim(), now_s)
        plan = rank.member.plan
        if plan is not None and plan.ready > plan.told:
            plan.told = plan.ready
            rank.word = rank.member.number, plan.told
        return None

    def complain(self, now_s: float) -> list[tuple[int, Letter]]:
        """What ranks write for which the plan does not come true, with their local ranks."""
        complaints = [(local_rank, rank.member.complaint(now_s)) for local_rank, rank in enumerate(self.ranks)]
        return self._written([(local_rank, said) for local_rank, said in complaints if said is not None], now_s)

    def patience_s(self, now_s: float) -> float:
        """When to ask for complaints, in seconds from now."""
        return min(rank.member.patience_s(now_s) for rank in self.ranks)

    def obey(self, message: PlanMessage, now_s: float) -> tuple[list[Response], list[tuple[int, Letter]]]:
        """What all ranks do because of a message of the log, and what they write to their leader, by local rank."""
        self._plan_leader.obey(message)
        letters: list[tuple[int, Letter]] = []
        responses: list[Response] = []
        for local_rank, rank in enumerate(self.ranks):
            reaction = rank.member.obey(message, now_s)
            done = [response for batch in reaction.batches if not isinstance(batch, Burst) for response in batch]
            assert local_rank == 0 or len(done) == len(responses)
            responses = done
            answers = [(local_rank, reaction.answer)] if reaction.answer is not None else []
            letters += self._written(answers, now_s)
            for submission in reaction.again:
                assert isinstance(submission, Submission)
                letter = self.submit(local_rank, submission, now_s)
                letters += [(local_rank, letter)] if letter is not None else []
        return responses, letters

    def logged(self, batch: Sequence[Response]) -> None:
        """Its ranks have read these responses."""
        for rank in self.ranks:
            for response in batch:
                rank.member.logged(response, 0.0)

    @property
    def has_plan(self) -> bool:
        return self.ranks[0].member.plan is not None

    # What its leader does.

    def hear_rank(self, local_rank: int, letter: Letter, now_s: float) -> None:
        self._mail_bytes += len(letter.data)
        for message in self._mailboxes[local_rank].feed(letter.data) if self.parent is None else [letter.message]:
            self._hear(message, self._senders[local_rank], now_s)

    def hear_child(self, node_index: int, data: bytes, now_s: float) -> None:
        for message in self._links[node_index].feed(data):
            self._hear(message, self._speaks_for[node_index], now_s)

    def say(self, now_s: float) -> bytes:
        """What goes to the parent now, or, of the root, into the log: see `Leader.turn`."""
        if self.has_plan:
            plan = self.ranks[0].member.number
            self._pass_on(
                self._plan_leader.ready(min(n if of == plan else 0 for of, n in (r.word for r in self.ranks)))
            )
        if self.parent is None:
            self._judge()
        else:
            for claim in self.negotiation.upward(now_s):
                self._pen.send(claim)
        data = bytes(self._pen.outbox)
        self._pen.outbox.clear()
        return data

    def control(self, local_rank: int, log_bytes: int) -> dict[str, int]:
        """What `hvdlite.statistics` says of this rank's control messages.

        Args:
            log_bytes: of the whole log so far, which every rank but the leader has read from the page.
        """
        rank, leads = self.ranks[local_rank], local_rank == 0
        written = self._pen.written if leads else rank.written
        return {
            "claims_heard": self._claims_heard if leads else 0,
            "plans": rank.member.number,
            "claims_sent": written.claims,
            "messages_cached": written.cached,
            "messages_spelled_out": written.spelled_out,
            "page_bytes_written": log_bytes * (len(self.ranks) > 1) if leads else rank.nbytes,
            "page_bytes_read": self._mail_bytes if leads else log_bytes,
            **(self.traffic if leads else Traffic()).named("tree"),
        }

    def _hear(self, message: Message, sender: Sender, now_s: float) -> None:
        if isinstance(message, PlanMessage):
            self._pass_on(self._plan_leader.hear(message, sender, self.negotiation.is_idle))
            return
        assert isinstance(message, Claim)
        self._claims_heard += 1
        self.negotiation.add(message, sender, now_s)

    def _judge(self) -> None:
        verdicts = self.negotiation.verdicts()
        for verdict in verdicts:
            assert isinstance(verdict, Response)
            self._pen.send(verdict)
            self._plan_leader.saw(verdict)
        if verdicts:
            self._pen.send(EndOfBatch())
            self._pass_on(self._plan_leader.propose(self.negotiation.is_idle))

    def _pass_on(self, message: PlanMessage | None) -> None:
        if message is not None:
            self._pen.send(message)

    def _written(self, messages: Sequence[tuple[int, Message]], now_s: float) -> list[tuple[int, Letter]]:
        letters = [(local_rank, self._send_up(local_rank, message, now_s)) for local_rank, message in messages]
        return [(local_rank, letter) for local_rank, letter in letters if letter is not None]

    def _send_up(self, local_rank: int, message: Message, now_s: float) -> Letter | None:
        """The leader hears its own at once; what others write, it hears later."""
        if local_rank == 0:
            self._hear(message, self._senders[0], now_s)
            return None
        letter = self._letters.of(message)
        rank = self.ranks[local_rank]
        rank.nbytes += len(letter.data)
        if isinstance(message, Claim):
            rank.written.claims += 1
            rank.written.spelled_out += letter.spells_out
            rank.written.cached += not letter.spells_out
        return letter
