"""The wire form: every message survives every way of cutting the stream, and the codebook stays in step."""

import random

import pytest

from coordinator_lab import OPERATIONS
from hvdlite.coordinator.messages import Claim, Decoder, Encoder, EndOfBatch, Fault, Notice, Response
from hvdlite.coordinator.request import NAMED, TensorSpec
from hvdlite.dtypes import DType, ReduceOp, Reduction
from hvdlite.operations.allocate import Allocate
from hvdlite.operations.allreduce import Allreduce


def request(name: str, *shape: int, **options: object) -> Allreduce:
    return Allreduce(name, (TensorSpec(name, DType.FLOAT32, shape),), **options)  # type: ignore[arg-type]


MESSAGES = [
    Claim(request("a", 3), NAMED),
    Claim(request("a", 3), 2**40),
    Claim(request("b", reduction=Reduction(ReduceOp.MAX, 0.5, -2.0), wire_dtype=DType.BFLOAT16), NAMED),
    Claim(request("c", 1, 2, 3, place=(4, 64)), 5, (0, 7)),
    Response(request("größe/ü", 0), NAMED),
    Response(Allocate("pool", nbytes=2**40), 1),
    Response(OPERATIONS["join"]("join"), 2, 0),
    Fault(("x", 3), "ranks 0 and 1 differ"),
    Notice({"kind": "shutdown", "rank": 1, "why": "it ended"}),
    EndOfBatch(),
]


@pytest.mark.parametrize("cut", [1, 2, 3, 16, 17, 18, 1000])
def test_messages_survive_any_cut(cut):
    encoder, decoder = Encoder(1024), Decoder()
    for message in MESSAGES * 2:
        encoder.send(message)
    data = bytes(encoder.outbox)
    received = [m for i in range(0, len(data), cut) for m in decoder.feed(data[i : i + cut])]
    assert received == MESSAGES * 2


def test_a_known_request_is_not_spelled_out_again():
    encoder = Encoder(1024)
    encoder.send(Claim(request("weight", 3), NAMED))
    first = len(encoder.outbox)
    encoder.send(Claim(request("weight", 3), NAMED))
    assert len(encoder.outbox) - first == 17  # one frame header


def test_what_was_sent_longest_ago_gives_up_its_slot():
    encoder = Encoder(2)
    for name in "abaca":
        encoder.send(Claim(request(name, 3), NAMED))
    assert (encoder.written.cached, encoder.written.spelled_out) == (2, 3)  # a twice; a, b and c


@pytest.mark.parametrize("kind", OPERATIONS)
def test_every_operation_is_cached(kind):
    """From the second time on a slot is sent: 17 bytes and no tensor names."""
    request = OPERATIONS[kind]("gradient", (TensorSpec("layer3.weight", DType.FLOAT32, (4, 5)),))
    encoder, decoder = Encoder(8), Decoder()
    lengths = []
    for _ in range(3):
        claim = Claim(request, NAMED)
        encoder.send(claim)
        lengths.append(len(encoder.outbox))
        assert list(decoder.feed(bytes(encoder.outbox))) == [claim]
        encoder.outbox.clear()
    assert lengths[1] == lengths[2] == 17
    assert lengths[0] > lengths[1] + len("layer3.weight")


@pytest.mark.parametrize("capacity", [0, 1, 2, 7])
def test_codebooks_stay_in_step_when_slots_are_reused(capacity):
    rng = random.Random(capacity)
    encoder, decoder = Encoder(capacity), Decoder()
    sent = [Claim(request(f"t{rng.randrange(10)}", rng.randrange(3)), NAMED) for _ in range(500)]
    received = []
    for message in sent:
        encoder.send(message)
        received += decoder.feed(bytes(encoder.outbox))
        encoder.outbox.clear()
    assert received == sent
    assert len(decoder._requests) == max(1, capacity)
