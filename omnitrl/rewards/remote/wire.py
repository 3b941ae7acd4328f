# SPDX-License-Identifier: Apache-2.0
"""
What goes between a trainer and a reward server.

| route | body | answer |
|---|---|---|
| `GET /health` | | JSON `{"status": "ok", "requests": 3}`, the number of those that are being served or wait |
| `GET /info` | | JSON, the fields of [`ServerInfo`] |
| `POST /score` | a message of [`pack_request`] | a message of [`pack_answer`] |

A *message* is a safetensors file whose metadata has one entry, `head`, with JSON. What JSON cannot hold is an object
with the key `"$"` in it, which names its kind, and its bytes are a tensor of the file. Nothing is pickled, so that
reading a message never runs code. An answer that is not 200 is JSON with `error`, a sentence.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from omnitrl.errors import InputError
from omnitrl.media import Audio, Video
from omnitrl.messages import pack, unpack
from omnitrl.rewards.results import Answer
from omnitrl.rewards.traits import RewardTraits


PROTOCOL = 1
"""Raised whenever a message changes in a way that an older side would misread."""

FULL_HEADER = "X-Reward-Server-Full"
"""Tells a server that is full, and will have room when it has worked, from one that cannot work."""

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA")
_PLAIN = (str, int, bool, type(None))
# Those of numpy that a number in JSON gives back bit for bit.
_SCALARS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "str"),
)


@dataclasses.dataclass(frozen=True)
class ServerInfo:
    """
    What a reward server says of itself.

    Args:
        protocol (`int`):
            [`PROTOCOL`] of its omnitrl.
        version (`str`):
            Of its omnitrl.
        name (`str`):
            Of the reward.
        traits (`dict`):
            Fields of the reward's [`RewardTraits`] that count on the side of the trainer.
        accepts (`list[str]`, *optional*):
            Keywords that the reward takes; `None` for any.
        requires (`list[str]`):
            Those among them that have no default.
        max_body_bytes (`int`):
            Largest request.
    """

    protocol: int
    version: str
    name: str
    traits: dict[str, Any]
    accepts: list[str] | None
    requires: list[str]
    max_body_bytes: int

    @classmethod
    def from_json(cls, answer: Any) -> ServerInfo:
        """
        Reads the answer of `/info`; fields that a newer server has beside these are left out.

        Raises:
            `ValueError`: it is none, or of another protocol.
        """
        if not isinstance(answer, dict) or "protocol" not in answer:
            raise InputError("it has no field 'protocol'")
        _check_protocol(answer, "server")
        try:
            return cls(**{field.name: answer[field.name] for field in dataclasses.fields(cls)})
        except KeyError as error:
            raise InputError(f"it has no field {error}") from error

    def reward_traits(self) -> RewardTraits:
        """The traits as the trainer's runner sees them."""
        known = {field.name for field in dataclasses.fields(RewardTraits)}
        fields = {key: value for key, value in self.traits.items() if key in known}
        return RewardTraits(**fields | {"media": tuple(fields.get("media", ()))})


def checked_token(token: str) -> str:
    """
    A token, which goes into a header.

    Raises:
        `ValueError`: it has characters that a header cannot have.
    """
    if not (token.isascii() and token.isprintable() and token.split() == [token]):
        raise InputError("a token of a reward server is a word of ASCII characters, such as 'b7c41f'.")
    return token


def traits_to_send(traits: RewardTraits) -> dict[str, Any]:
    """Those that count on the side of the trainer: processes and devices are the server's own business."""
    return {
        "media": list(traits.media),
        "groupwise": traits.groupwise,
        "deterministic": traits.deterministic,
        "batch_size": traits.batch_size,
    }


@dataclasses.dataclass
class Request:
    """
    Rows to score.

    Args:
        arguments (`dict[str, list]`):
            `prompts`, `completions` and columns of the dataset, lists of one length.
        trainer_state (`Any`):
            Numbers of the trainer's state as attributes, or `None`.
    """

    arguments: dict[str, list[Any]]
    trainer_state: Any = None

    @property
    def rows(self) -> int:
        """How many there are."""
        return max((len(values) for values in self.arguments.values()), default=0)


def pack_request(request: Request, png: bool = False) -> bytes:
    """
    A request as a message.

    Args:
        request ([`Request`]):
            The rows; of a `trainer_state` its numbers and words are sent, and not its history.
        png (`bool`, defaults to `False`):
            Whether pictures are compressed, without loss; otherwise their pixels are sent as they are.

    Raises:
        `ValueError`: a value cannot be sent; the sentence names the argument and the row.
    """
    state = None
    if request.trainer_state is not None:
        fields = vars(request.trainer_state)
        state = {key: value for key, value in fields.items() if isinstance(value, (*_PLAIN, float))}
    packer = _Packer(png)
    arguments = {name: packer.column(name, values) for name, values in request.arguments.items()}
    return packer.message({"arguments": arguments, "trainer_state": packer.value(state)})


def unpack_request(message: bytes) -> Request:
    """
    The request in a message.

    Raises:
        `ValueError`: it is none, or of another protocol.
    """
    head, unpacker = _opened(message, "trainer")
    with _malformed():
        arguments = unpacker.value(head["arguments"])
        state = unpacker.value(head["trainer_state"])
        lengths = {name: len(values) for name, values in arguments.items() if isinstance(values, list)}
        if lengths.keys() != arguments.keys() or len(set(lengths.values())) > 1:
            raise InputError(f"the arguments of a request are lists of one length, got {lengths}.")
        return Request(arguments, None if state is None else SimpleNamespace(**state))


def pack_answer(answer: Answer) -> bytes:
    """
    An answer as a message.

    Raises:
        `ValueError`: a value of `extras` cannot be sent.
    """
    packer = _Packer(png=True)
    extras = {name: packer.column(name, values) for name, values in answer.extras.items()}
    return packer.message(
        {"values": packer.value(answer.values), "metrics": packer.value(answer.metrics), "extras": extras}
    )


def unpack_answer(message: bytes) -> Answer:
    """
    The answer in a message.

    Raises:
        `ValueError`: it is none, or of another protocol.
    """
    head, unpacker = _opened(message, "server")
    with _malformed():
        return Answer(*(unpacker.value(head[name]) for name in ("values", "metrics", "extras")))


class _Packer:
    """Turns values into what JSON holds, and collects the tensors that hold the rest."""

    def __init__(self, png: bool):
        self._png = png
        self._tensors: dict[str, Tensor] = {}
        # What stands in several rows, as the picture to edit of a group does, is sent once. The value is kept beside
        # its node, since the id of one that is gone may be another's.
        self._sent: dict[int, tuple[Any, Any]] = {}

    def message(self, head: dict[str, Any]) -> bytes:
        head = {"protocol": PROTOCOL, **head}
        return pack(head, self._tensors)

    def column(self, name: str, values: list[Any]) -> list[Any]:
        nodes = []
        for row, value in enumerate(values):
            try:
                nodes.append(self.value(value))
            except InputError as error:
                raise InputError(f"{name!r} of row {row} {error}") from error
        return nodes

    def value(self, value: Any) -> Any:
        if type(value) in _PLAIN:
            return value
        if id(value) in self._sent:
            return self._sent[id(value)][1]
        for kind, pack_one in self._KINDS.items():
            if isinstance(value, kind):
                node = pack_one(self, value)
                break
        else:
            raise InputError(
                f"is of type {type(value).__name__}, which cannot be sent to a reward server: numbers, text, bytes, "
                "pictures, videos, sounds, arrays, tensors, and lists and dictionaries of them can."
            )
        if isinstance(node, dict) and node.get("$") in _SENT_ONCE:
            self._sent[id(value)] = (value, node)
        return node

    def _scalar(self, value: np.generic) -> Any:
        kind = "str" if isinstance(value, np.str_) else value.dtype.name
        if kind not in _SCALARS:
            raise InputError(f"is a numpy {kind}, which cannot be sent to a reward server: make it a number or text.")
        return {"$": "scalar", "dtype": kind, "value": self.value(value.item())}

    def _float(self, value: float) -> Any:
        return float(value) if math.isfinite(value) else {"$": "float", "value": str(float(value))}

    def _list(self, values: list[Any]) -> Any:
        return [self.value(value) for value in values]

    def _tuple(self, values: tuple[Any, ...]) -> Any:
        return {"$": "tuple", "items": [self.value(value) for value in values]}

    def _dict(self, values: dict[Any, Any]) -> Any:
        wrong = [key for key in values if not isinstance(key, str)]
        if wrong:
            raise InputError(
                f"has a dictionary with the key {wrong[0]!r}, but keys of JSON are text: use '{wrong[0]}'."
            )
        nodes = {str(key): self.value(value) for key, value in values.items()}
        return {"$": "dict", "items": nodes} if "$" in nodes else nodes

    def _image(self, image: Image.Image) -> Any:
        if image.mode == "P" or (self._png and image.mode in _PNG_MODES):
            buffer = io.BytesIO()
            image.save(buffer, format="PNG", compress_level=1)
            return {"$": "png", "tensor": self._bytes_tensor(buffer.getvalue())}
        pixels = self._bytes_tensor(image.tobytes())
        return {"$": "image", "mode": image.mode, "size": list(image.size), "tensor": pixels}

    def _video(self, video: Video) -> Any:
        sound = None if video.audio is None else self.value(video.audio)
        frames = self._tensor_name(_as_tensor(video.frames))
        return {"$": "video", "frame_rate": self.value(video.frame_rate), "audio": sound, "tensor": frames}

    def _audio(self, sound: Audio) -> Any:
        samples = self._tensor_name(_as_tensor(sound.samples))
        return {"$": "audio", "sampling_rate": self.value(sound.sampling_rate), "tensor": samples}

    def _array(self, array: np.ndarray) -> Any:
        try:
            tensor = _as_tensor(array)
        except TypeError as error:  # of text or objects
            raise InputError(
                f"is an array of {array.dtype}, which cannot be sent to a reward server: make it a list."
            ) from error
        return {"$": "array", "tensor": self._tensor_name(tensor)}

    def _torch(self, tensor: Tensor) -> Any:
        return {"$": "tensor", "tensor": self._tensor_name(tensor.detach().cpu().contiguous().clone())}

    def _bytes(self, data: bytes) -> Any:
        return {"$": "bytes", "tensor": self._bytes_tensor(data)}

    def _bytes_tensor(self, data: bytes) -> str:
        return self._tensor_name(torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()))

    def _tensor_name(self, tensor: Tensor) -> str:
        """Adds a tensor that shares its memory with no other."""
        name = str(len(self._tensors))
        self._tensors[name] = tensor
        return name

    # In this order: a float of numpy is one of Python too.
    _KINDS: dict[type, Callable[[_Packer, Any], Any]] = {
        np.generic: _scalar,
        float: _float,
        list: _list,
        tuple: _tuple,
        dict: _dict,
        Image.Image: _image,
        Video: _video,
        Audio: _audio,
        np.ndarray: _array,
        Tensor: _torch,
        bytes: _bytes,
    }


def _as_tensor(array: np.ndarray) -> Tensor:
    """A copy, in the one order of bytes and of strides that PyTorch knows."""
    return torch.tensor(np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("=")).reshape(array.shape))


_SENT_ONCE = ("png", "image", "video", "audio", "array", "tensor", "bytes")


class _Unpacker:
    """The way back."""

    def __init__(self, tensors: dict[str, Tensor]):
        self._tensors = tensors
        self._made: dict[str, Any] = {}

    def value(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.value(item) for item in node]
        if not isinstance(node, dict):
            return node
        if "$" not in node:
            return {key: self.value(item) for key, item in node.items()}
        if "tensor" not in node:
            return self._KINDS[node["$"]](self, node)
        # What was sent once is made once: rows share it, as they do without a server.
        if node["tensor"] not in self._made:
            self._made[node["tensor"]] = self._KINDS[node["$"]](self, node)
        return self._made[node["tensor"]]

    def _image(self, node: dict[str, Any]) -> Image.Image:
        width, height = node["size"]
        return Image.frombytes(node["mode"], (width, height), self._data(node))

    def _png(self, node: dict[str, Any]) -> Image.Image:
        image = Image.open(io.BytesIO(self._data(node)), formats=["PNG"])
        image.load()
        return image

    def _video(self, node: dict[str, Any]) -> Video:
        return Video(self._array(node), self.value(node["frame_rate"]), self.value(node["audio"]))

    def _audio(self, node: dict[str, Any]) -> Audio:
        return Audio(self._array(node), self.value(node["sampling_rate"]))

    def _array(self, node: dict[str, Any]) -> np.ndarray:
        return self._tensors[node["tensor"]].numpy()

    def _torch(self, node: dict[str, Any]) -> Tensor:
        return self._tensors[node["tensor"]]

    def _data(self, node: dict[str, Any]) -> bytes:
        return self._tensors[node["tensor"]].numpy().tobytes()

    def _scalar(self, node: dict[str, Any]) -> Any:
        if node["dtype"] not in _SCALARS:
            raise ValueError(f"there are no scalars of {node['dtype']!r}")
        return np.dtype(node["dtype"]).type(self.value(node["value"]))

    _KINDS: dict[str, Callable[[_Unpacker, dict[str, Any]], Any]] = {
        "scalar": _scalar,
        "float": lambda self, node: float(node["value"]),
        "tuple": lambda self, node: tuple(self.value(item) for item in node["items"]),
        "dict": lambda self, node: {key: self.value(item) for key, item in node["items"].items()},
        "image": _image,
        "png": _png,
        "video": _video,
        "audio": _audio,
        "array": _array,
        "tensor": _torch,
        "bytes": _data,
    }


def _opened(message: bytes, sender: str) -> tuple[dict[str, Any], _Unpacker]:
    """The head of a message, and what reads the values in it."""
    try:
        head, tensors = unpack(message, "reward")
    except ValueError as error:
        raise InputError(str(error)) from error
    _check_protocol(head, sender)
    return head, _Unpacker(tensors)


def _check_protocol(head: dict[str, Any], sender: str) -> None:
    if head.get("protocol") != PROTOCOL:
        raise InputError(
            f"the {sender} speaks reward protocol {head.get('protocol')!r}, and this side {PROTOCOL}: install the "
            "same version of omnitrl on both."
        )


@contextlib.contextmanager
def _malformed() -> Iterator[None]:
    """Turns what a message that is not as it should be leads to into one error."""
    try:
        yield
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, OSError, Image.DecompressionBombError) as error:
        raise InputError(f"a message of the reward protocol is malformed: {type(error).__name__}: {error}") from error
