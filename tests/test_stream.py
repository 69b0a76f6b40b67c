"""Messages of one stream: what later ones need not bring, and what a decoder says that missed some."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from torchrec_prealloc.codec import CodecError
from torchrec_prealloc.stream import Decoder, Encoder, MissingError

KEYS = [f"feature_{index}" for index in range(500)]


def batch(step: int) -> dict[str, Any]:
    return {"step": step, "keys": list(KEYS), "stride": 32}


def test_a_late_decoder_names_what_is_missing() -> None:
    encoder = Encoder()
    encoder.dumps(batch(0))
    late = Decoder()
    message = encoder.dumps(batch(1))
    with pytest.raises(MissingError, match=r"refers to 1 objects of messages that were not decoded here") as caught:
        late.loads(message)
    assert late.loads(encoder.define(caught.value.names)) is None
    assert late.loads(message) == batch(1)
    assert pickle.loads(pickle.dumps(caught.value)).names == caught.value.names


def test_every_message_can_be_lost() -> None:
    shared = [{"id": index, "inner": [index]} for index in range(4)]
    messages, encoder = [], Encoder()
    for step in range(8):
        messages.append((encoder.dumps([batch(step), shared[step % 4], shared[: step % 3]]), step))
    for lost in range(8):
        decoder = Decoder(fetch=encoder.define)
        for message, step in messages[lost:]:
            assert decoder.loads(message) == [batch(step), shared[step % 4], shared[: step % 3]]


def test_fetch_is_asked_for_what_is_missing_alone() -> None:
    asked: list[Any] = []
    encoder = Encoder()

    def fetch(names: Any) -> bytes:
        asked.append(names)
        return encoder.define(names)

    decoder = Decoder(fetch=fetch)
    decoder.loads(encoder.dumps(batch(0)))
    assert asked == []
    encoder.dumps(["x" * 100])
    assert decoder.loads(encoder.dumps([batch(1), "x" * 100])) == [batch(1), "x" * 100]
    assert [len(names) for names in asked] == [1]


def test_a_fetch_that_brings_something_else() -> None:
    encoder = Encoder()
    encoder.dumps(batch(0))
    with pytest.raises(MissingError):
        Decoder(fetch=lambda names: Encoder().dumps(1)).loads(encoder.dumps(batch(1)))


def test_a_changed_object_is_another_one() -> None:
    encoder, decoder = Encoder(), Decoder()
    shared = {"rows": 1}
    first = decoder.loads(encoder.dumps([shared]))[0]
    assert decoder.loads(encoder.dumps([shared]))[0] is first
    shared["rows"] = 2
    changed = decoder.loads(encoder.dumps([shared]))[0]
    assert (first, changed) == ({"rows": 1}, {"rows": 2})


def test_a_change_deep_inside_is_seen() -> None:
    encoder, decoder = Encoder(), Decoder()
    inner: list[Any] = [1]
    outer = {"inner": inner}
    first = decoder.loads(encoder.dumps(outer))
    inner.append(2)
    assert decoder.loads(encoder.dumps(outer)) == {"inner": [1, 2]}
    assert first == {"inner": [1]}


def test_a_restarted_encoder_does_not_mix_with_its_predecessor() -> None:
    decoder = Decoder()
    first = decoder.loads(Encoder().dumps({"a": 1}))
    assert decoder.loads(Encoder().dumps({"a": 1})) is not first


def test_memory_is_bounded() -> None:
    encoder, decoder = Encoder(remembered=16), Decoder(remembered=16)
    for step in range(100):
        assert decoder.loads(encoder.dumps([{"step": step}, [step], "x" * 64])) == [{"step": step}, [step], "x" * 64]
    assert len(encoder._pieces) <= 16
    assert len(encoder._identities) <= 16
    assert len(decoder._objects) <= 16


def test_what_was_forgotten_is_written_again() -> None:
    encoder, decoder = Encoder(remembered=4), Decoder(remembered=4)
    message = encoder.dumps(batch(0))
    for step in range(10):
        decoder.loads(encoder.dumps([{"step": step}]))
    late = Decoder()
    assert late.loads(encoder.dumps(batch(1))) == batch(1)
    with pytest.raises(CodecError, match="has forgotten the object"):
        encoder.define([b"nothing"])
    assert late.loads(message) == batch(0)


def test_a_refused_message_changes_nothing() -> None:
    encoder, decoder = Encoder(), Decoder()
    with pytest.raises(CodecError, match="generator"):
        encoder.dumps([batch(0), (x for x in ())])
    assert decoder.loads(encoder.dumps(batch(1))) == batch(1)


def test_beside_a_cycle_objects_are_shared() -> None:
    encoder, decoder = Encoder(), Decoder()
    shared = {"rows": 1}
    arrived = []
    for step in range(2):
        cycle: list[Any] = [step, shared]
        cycle.append([cycle])
        arrived.append(decoder.loads(encoder.dumps({"cycle": cycle, "shared": shared})))
    assert arrived[0]["shared"] is arrived[0]["cycle"][1] is arrived[1]["shared"] is arrived[1]["cycle"][1]
    assert arrived[1]["cycle"][2][0] is arrived[1]["cycle"]
