"""What the parts count about themselves, without MPI."""

from __future__ import annotations

from hvdlite.coordinator.messages import Claim, Encoder, EndOfBatch, Notice, Response, Written
from hvdlite.coordinator.request import NAMED
from hvdlite.counters import Traffic
from hvdlite.operations.barrier import Barrier


def claim(name: str) -> Claim:
    return Claim(Barrier(name), NAMED)


def test_traffic_is_named_after_its_link() -> None:
    traffic = Traffic()
    traffic.sent(17)
    traffic.sent(0)
    traffic.received(34)
    assert traffic.named("tree") == {
        "tree_messages_sent": 2,
        "tree_bytes_sent": 17,
        "tree_messages_received": 1,
        "tree_bytes_received": 34,
    }


def test_an_encoder_tells_what_its_codebook_saved() -> None:
    encoder = Encoder(2)
    for name in ["a", "a", "b", "a", "c", "b"]:  # c takes the place of b, and b that of a
        encoder.send(claim(name))
    assert encoder.written == Written(claims=6, cached=2, spelled_out=4)
    encoder.send(Response(Barrier("c"), NAMED))
    encoder.send(EndOfBatch())
    encoder.send(Notice({"kind": "shutdown"}))
    assert encoder.written == Written(claims=6, cached=3, spelled_out=4)


def test_without_a_codebook_everything_is_spelled_out() -> None:
    encoder = Encoder(0)
    encoder.send(claim("a"))
    encoder.send(claim("a"))
    assert encoder.written == Written(claims=2, cached=0, spelled_out=2)
