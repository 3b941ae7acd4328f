# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire to a reward server arrives as it is, and nothing of it is ever run."""

import json
import math
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save

from omnitrl.errors import InputError
from omnitrl.media import Audio, Video
from omnitrl.rewards.remote.wire import (
    Request,
    ServerInfo,
    pack_answer,
    pack_request,
    traits_to_send,
    unpack_answer,
    unpack_request,
)
from omnitrl.rewards.results import Answer
from omnitrl.rewards.traits import RewardTraits


def noise(*shape, seed=0):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def picture(mode="RGB"):
    return Image.fromarray(noise(7, 5, 3)).convert(mode)


def sound():
    return Audio(np.random.default_rng(1).standard_normal((2, 11)).astype(np.float32), 44100)


VALUES = [
    *(None, True, 3, -(2**70), 0.1, math.inf, -math.inf, math.nan, "", "„Grüße“", b"", b"\x00\xff"),
    *([], [1, [2.5, None]], (1, ("a",)), {}, {"a": {"b": [1]}}, {"$": "image", "b": 1}),
    *(np.float32(0.1), np.float64(math.pi), np.float32(math.nan), np.int64(-3), np.uint64(2**63), np.bool_(True)),
    *(np.str_("text"), noise(2, 3), np.array(1.5), np.zeros((0, 4)), np.arange(6.0).reshape(2, 3).T),
    *(torch.randn(2, 3), torch.randn(3, 2).bfloat16().T, torch.tensor(5), torch.randn(2, requires_grad=True)),
    *(picture(mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "F", "I")),
    *(sound(), Video(noise(3, 8, 6, 3), 24.0), Video(noise(1, 4, 4, 3), 16, sound())),
    {"conversation": [{"role": "user", "image": picture()}, (noise(2, 2), "x")]},
]


def same(a, b):
    """Whether two values are of one kind and equal, bit for bit."""
    if isinstance(a, Image.Image):
        equal = (a.mode, a.size, a.tobytes()) == (b.mode, b.size, b.tobytes())
        return equal and a.getpalette() == b.getpalette()
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Video):
        return a.frame_rate == b.frame_rate and same(a.frames, b.frames) and same(a.audio, b.audio)
    if isinstance(a, Audio):
        return a.sampling_rate == b.sampling_rate and same(a.samples, b.samples)
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b or (a != a and b != b)


@pytest.mark.parametrize("png", [False, True])
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_every_value_arrives_as_it_is(value, png):
    arrived = unpack_request(pack_request(Request({"column": [value, 1]}), png))
    assert same(arrived.arguments, {"column": [value, 1]})
    assert same(unpack_answer(pack_answer(Answer([0.5], {}, {"column": [value]}))).extras, {"column": [value]})


def test_media_that_are_views_arrive():
    """Such as frames whose channels were turned round, BGR to RGB."""
    frames, samples = noise(2, 3, 4, 3), sound().samples
    for given, wanted in (
        (Video(frames[..., ::-1], 8.0), Video(frames[..., ::-1].copy(), 8.0)),
        (Audio(samples[:, ::-1], 8), Audio(samples[:, ::-1].copy(), 8)),
    ):
        arrived = unpack_request(pack_request(Request({"column": [given]})))
        assert same(arrived.arguments, {"column": [wanted]})


def test_arrays_of_the_other_byte_order_arrive():
    arrived = unpack_request(pack_request(Request({"column": [np.arange(3, dtype=">f4")]})))
    assert same(arrived.arguments, {"column": [np.arange(3, dtype="<f4")]})


def test_the_comparison_of_these_tests_sees_differences():
    other = [2, 0.1 + 1e-16, np.float64(0.1), noise(2, 3, seed=1), picture("RGB").rotate(180), sound().preview()]
    for one, two in [(1, True), (1, 1.0), ([1], (1,)), *zip(VALUES[2:], other, strict=False)]:
        assert not same(one, two)


def test_an_answer_keeps_none_and_nan_apart():
    answer = Answer([0.1, None, math.nan, math.inf], {"sharpness": [1.5, math.nan]}, {"read": ["a", None, "", "b"]})
    assert same(vars(unpack_answer(pack_answer(answer))), vars(answer))


def test_rows_that_share_a_value_share_it_there():
    """As the members of a group share the picture that they edit."""
    shared = picture()
    one = pack_request(Request({"image": [shared]}))
    many = pack_request(Request({"image": [shared] * 8}))
    assert len(many) - len(one) < 8 * 80
    images = unpack_request(many).arguments["image"]
    assert all(image is images[0] for image in images)


def test_slices_of_one_tensor_are_sent_alone():
    batch = torch.randn(4, 1000)
    message = pack_request(Request({"completions": [batch[1]]}))
    assert len(message) < 4000 + 500
    rows = unpack_request(pack_request(Request({"completions": list(batch)}))).arguments["completions"]
    assert torch.equal(torch.stack(rows), batch)


def test_what_arrives_can_be_written_to():
    rows = unpack_request(pack_request(Request({"a": [noise(2, 2)], "b": [torch.zeros(2)]}))).arguments
    rows["a"][0][:] = 7
    rows["b"][0][:] = 7
    assert (rows["a"][0] == 7).all()
    assert (rows["b"][0] == 7).all()


def test_png_is_smaller_for_plain_pictures():
    plain = Request({"completions": [Image.new("RGB", (64, 64), "red")]})
    assert len(pack_request(plain, png=True)) < len(pack_request(plain)) / 10


def test_of_the_state_of_a_trainer_its_numbers_are_sent():
    state = SimpleNamespace(epoch=0.5, global_step=7, max_steps=100, log_history=[{"loss": 1.0}])
    arrived = unpack_request(pack_request(Request({"prompts": ["a"]}, state))).trainer_state
    assert vars(arrived) == {"epoch": 0.5, "global_step": 7, "max_steps": 100}
    assert unpack_request(pack_request(Request({"prompts": ["a"]}))).trainer_state is None


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (object(), "'date' of row 1 is of type object, which cannot be sent to a reward server"),
        ({3: "a"}, "'date' of row 1 has a dictionary with the key 3, but keys of JSON are text: use '3'"),
        (np.array(["a", "b"]), "'date' of row 1 is an array of <U1, which cannot be sent"),
        (np.datetime64("2026-01-01"), "'date' of row 1 is a numpy datetime64"),
        ([{"a": {1, 2}}], "'date' of row 1 is of type set"),
    ],
)
def test_what_cannot_be_sent_is_named(value, sentence):
    with pytest.raises(InputError, match=sentence.replace("(", r"\(")):
        pack_request(Request({"prompts": ["a", "b"], "date": [1, value]}))


class Trap:
    """Sets a flag when it is unpickled."""

    sprung = False

    def __reduce__(self):
        return setattr, (Trap, "sprung", True)


WHOLE = pack_request(Request({"prompts": ["a"], "completions": [picture()]}))


@pytest.mark.parametrize(
    "message",
    [b"", b"{}", b"<html>502</html>", b"\xff" * 64, WHOLE[:-1], WHOLE[:40], pickle.dumps({"images": [Trap()]})],
)
def test_what_is_no_message_is_refused_and_not_run(message):
    with pytest.raises(InputError, match=f"{len(message)} bytes are no message of the reward protocol"):
        unpack_request(message)
    with pytest.raises(InputError, match=f"{len(message)} bytes are no message of the reward protocol"):
        unpack_answer(message)
    assert not Trap.sprung


def test_the_trap_of_the_test_above_works():
    pickle.loads(pickle.dumps(Trap()))
    assert Trap.sprung
    Trap.sprung = False


def message(head, **tensors):
    return save(tensors, metadata={"head": json.dumps(head)})


@pytest.mark.parametrize(
    "column",
    [
        [{"$": "image", "mode": "RGB", "size": [4, 4], "tensor": "0"}],  # too few pixels
        [{"$": "image", "mode": "os.system", "size": [1, 1], "tensor": "0"}],
        [{"$": "png", "tensor": "0"}],
        [{"$": "array", "tensor": "1"}],  # which is not there
        [{"$": "video", "tensor": "0", "frame_rate": 16.0, "audio": None}],
        [{"$": "scalar", "dtype": "object", "value": 1}],
        [{"$": "pickle", "tensor": "0"}],
        [{"$": []}],
        "text",
    ],
)
def test_malformed_values_are_refused(column):
    head = {"protocol": 1, "arguments": {"completions": column}, "trainer_state": None}
    with pytest.raises(InputError, match=r"malformed|lists of one length"):
        unpack_request(message(head, **{"0": torch.zeros(3, dtype=torch.uint8)}))


def test_columns_of_several_lengths_are_refused():
    head = {"protocol": 1, "arguments": {"prompts": ["a"], "completions": []}, "trainer_state": None}
    with pytest.raises(InputError, match=r"lists of one length, got {'prompts': 1, 'completions': 0}"):
        unpack_request(message(head))


def test_another_protocol_is_refused():
    head = {"protocol": 2, "arguments": {}, "trainer_state": None}
    sentence = "speaks reward protocol 2, and this side 1: install the same version of omnitrl on both"
    with pytest.raises(InputError, match=f"the trainer {sentence}"):
        unpack_request(message(head))
    with pytest.raises(InputError, match=f"the server {sentence}"):
        unpack_answer(message(head))
    with pytest.raises(InputError, match=f"the server {sentence}"):
        ServerInfo.from_json(head)


def test_traits_arrive_but_for_those_of_the_server():
    traits = RewardTraits(media=("image", "video"), deterministic=True, batch_size=4, in_process=True)
    info = ServerInfo(1, "0", "x", traits_to_send(traits), None, [], 10)
    sent = json.loads(json.dumps(vars(info) | {"of_a_later_version": 1}))
    arrived = ServerInfo.from_json(sent)
    assert arrived == info
    assert arrived.reward_traits() == RewardTraits(media=("image", "video"), deterministic=True, batch_size=4)


def test_an_info_that_lacks_a_field_is_refused():
    with pytest.raises(InputError, match="no field 'name'"):
        ServerInfo.from_json({"protocol": 1, "version": "0"})
    with pytest.raises(InputError, match="no field 'protocol'"):
        ServerInfo.from_json(["a"])
