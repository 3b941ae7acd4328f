# SPDX-License-Identifier: Apache-2.0
"""Rewards for text rendered in an image, read by PP-OCRv4 (the ONNX files inside the `rapidocr-onnxruntime` wheel)."""

import hashlib
import importlib.util
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from omnitrl.errors import InputError

from .frames import check_frames, frame_indices, reduced
from .kinds import media_kind
from .media import pictures, to_pil, video_frames
from .text import plain_text, text_score, wanted_text
from .traits import RewardTraits, reward_traits


logger = logging.getLogger(__name__)

_PACKAGE = "rapidocr_onnxruntime"
_RECOGNITION_MODEL = "ch_PP-OCRv4_rec_infer.onnx"
_LINE_HEIGHT = 48  # what the recognition network was trained on
_MIN_WIDTH = 16
_MAX_ONE_LINE_HEIGHT = 96  # twice the network's own height: above it, an image is taken for a page


class _Reader:
    """
    Reads images, each content once.

    Several rewards read the same rollout (a graded one and an exact one, say), each in its own thread: the lock makes
    the second wait, and the cache makes it find what the first has read.
    """

    def __init__(self, read_new: Callable[[list[Image.Image]], list[str]], cache_size: int):
        self._read_new = read_new
        self._cache_size = cache_size
        self._texts: OrderedDict[bytes, str] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, images: Sequence[Any]) -> list[str]:
        pictures = [to_pil(image) for image in images]
        keys = [_content_key(picture) for picture in pictures]
        with self._lock:
            new = {key: picture for key, picture in zip(keys, pictures, strict=True) if key not in self._texts}
            texts = dict(zip(new, self._read_new(list(new.values())), strict=True)) if new else {}
            texts |= {key: self._texts[key] for key in keys if key not in new}
            for key, text in texts.items():
                self._texts[key] = text
                self._texts.move_to_end(key)
            while len(self._texts) > self._cache_size:
                self._texts.popitem(last=False)
        return [texts[key] for key in keys]


def _content_key(picture: Image.Image) -> bytes:
    return hashlib.blake2b(picture.tobytes(), digest_size=16, salt=b"%d" % picture.width).digest()


class TextRecognizer:
    """
    Reads images that hold one line of text each, in batches and at their own aspect ratio.

    Recognition only: without the search for text in the image, which takes most of the time of a full OCR and misreads
    small images. The network knows Latin and Chinese characters. Texts are cached by the images' content.

    Args:
        threads (`int`, *optional*, defaults to `1`):
            Threads of the network. They do not spin while they wait, and the interpreter lock is free meanwhile.
        batch_size (`int`, *optional*, defaults to `8`):
            Images in one call of the network. What is read does not depend on it; more is slower on a CPU, whose
            caches then overflow.
        cache_size (`int`, *optional*, defaults to `4096`):
            How many images' texts are remembered.

    Raises:
        `ImportError`: if `rapidocr-onnxruntime` is not installed.

    Example:

    ```python
    >>> from PIL import Image
    >>> from omnitrl.rewards import TextRecognizer

    >>> TextRecognizer().read([Image.new("RGB", (64, 32), "white")])
    ['']
    ```
    """

    def __init__(self, threads: int = 1, batch_size: int = 8, cache_size: int = 4096):
        root = _package_root()
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(
            str(root / "models" / _RECOGNITION_MODEL), options, providers=["CPUExecutionProvider"]
        )
        # Class 0 is the blank of CTC, the last one the space, which the list in the file leaves out.
        listed = self._session.get_modelmeta().custom_metadata_map["character"].splitlines()
        self._characters = ["", *listed, " "]
        self._input = self._session.get_inputs()[0].name
        self._batch_size = batch_size
        self._reader = _Reader(self._read_new, cache_size)

    def read(self, images: Sequence[Any]) -> list[str]:
        """
        Reads one line of text from each image.

        Args:
            images (`list`):
                PIL images, or whatever [`to_pil`] takes.

        Returns:
            `list[str]`: the texts, `""` where nothing was recognised.
        """
        return self._reader.read(images)

    def _read_new(self, pictures: list[Image.Image]) -> list[str]:
        by_width: dict[int, list[int]] = {}
        for index, picture in enumerate(pictures):
            width = max(_MIN_WIDTH, round(_LINE_HEIGHT * picture.width / picture.height))
            by_width.setdefault(width, []).append(index)
        texts = [""] * len(pictures)
        for width, members in by_width.items():
            for start in range(0, len(members), self._batch_size):
                batch = members[start : start + self._batch_size]
                for index, text in zip(batch, self._read_batch([pictures[i] for i in batch], width), strict=True):
                    texts[index] = text
        return texts

    def _read_batch(self, pictures: list[Image.Image], width: int) -> list[str]:
        scaled = [np.asarray(p.resize((width, _LINE_HEIGHT), Image.Resampling.BILINEAR)) for p in pictures]
        pixels = np.stack(scaled)[..., ::-1].transpose(0, 3, 1, 2)  # (B, H, W, RGB) to (B, BGR, H, W)
        network_input = np.ascontiguousarray(pixels, dtype=np.float32) / 127.5 - 1
        (probabilities,) = self._session.run(None, {self._input: network_input})  # (B, W / 8, characters)
        return [self._decode(classes) for classes in probabilities.argmax(axis=-1)]

    def _decode(self, classes: np.ndarray) -> str:
        """Greedy CTC: a run of one class is one character, blanks are none."""
        first_of_run = np.diff(classes, prepend=-1) != 0
        return "".join(self._characters[k] for k in classes[first_of_run]).strip()


class _PageReader:
    """Finds the text in an image and reads it, line by line from the top, through the wheel's own pipeline."""

    def __init__(self, threads: int = 1, cache_size: int = 4096):
        _package_root()
        from rapidocr_onnxruntime import RapidOCR

        self._engine = RapidOCR(intra_op_num_threads=threads, inter_op_num_threads=1)
        self._reader = _Reader(self._read_new, cache_size)

    def read(self, images: Sequence[Any]) -> list[str]:
        return self._reader.read(images)

    def _read_new(self, pictures: list[Image.Image]) -> list[str]:
        return [self._read_one(np.ascontiguousarray(np.asarray(picture)[..., ::-1])) for picture in pictures]

    def _read_one(self, pixels: np.ndarray) -> str:
        lines, _ = self._engine(pixels)  # each a box, a text and a confidence
        return " ".join(text for _, text, _ in lines or [])


def _package_root() -> Path:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise ImportError('OCR rewards need the package rapidocr-onnxruntime: pip install "omnitrl[ocr]"')
    return Path(spec.origin).parent


_loading = threading.Lock()


def _shared_reader(page: bool, threads: int) -> "TextRecognizer | _PageReader":
    # `cache` alone would let two rewards load the network at the same time.
    with _loading:
        return _load_reader(page, threads)


@cache
def _load_reader(page: bool, threads: int) -> "TextRecognizer | _PageReader":
    return _PageReader(threads) if page else TextRecognizer(threads)


class OCRReward:
    """
    Reads the text in each image and scores it against the wanted one with [`text_score`].

    Range [0, 1]. From [Flow-GRPO](https://huggingface.co/papers/2505.05470). The wanted text is the dataset's column
    `text`; where that is missing, the prompt's quoted text ([`quoted_text`]); and where nothing is quoted, the whole
    prompt. A row whose wanted text is empty has no reward (`None`). What was read is recorded in the column
    `ocr_text`. Of a video, frames are read and scored one by one, and their scores reduced to one.

    Args:
        exact (`bool`, *optional*, defaults to `False`):
            Score 1.0 for the very text and 0.0 for any other, instead of by distance.
        substring (`bool`, *optional*, defaults to `False`):
            Whether further text around the wanted one is free; see [`text_score`].
        strip (`str`, *optional*, defaults to `"whitespace"`):
            See [`text_score`].
        detect (`bool`, *optional*):
            `True` searches the image for text first, `False` takes the image for one line of text, which is ten times
            faster and more. The default searches images that are higher than 96 pixels or higher than wide.
        threads (`int`, *optional*, defaults to `1`):
            Threads of the networks.
        frames (`str`, `int` or `slice`, *optional*, defaults to `slice(None, None, 4)`):
            Which frames of a video are read, every fourth by default; see [`framewise`].
        reduce (`str`, *optional*, defaults to `"mean"`):
            How their scores become one: `"mean"`, `"median"`, `"min"`, `"max"` or `"mean_above_zero"`, which is what
            flow_grpo does.

    Raises:
        [`~omnitrl.errors.InputError`]: for an unknown option, and for options that exclude each other.

    Example:

    ```python
    >>> from omnitrl.rewards import OCRReward

    >>> lenient = OCRReward(substring=True)  # as flow_grpo
    ```
    """

    traits = RewardTraits(media=("image", "video"), deterministic=True)

    def __init__(
        self,
        exact: bool = False,
        substring: bool = False,
        strip: Literal["whitespace", "spaces"] = "whitespace",
        detect: bool | None = None,
        threads: int = 1,
        frames: "str | int | slice" = slice(None, None, 4),
        reduce: str = "mean",
    ):
        if strip not in ("whitespace", "spaces"):
            raise InputError(f"strip={strip!r} must be 'whitespace' or 'spaces'.")
        if exact and substring:
            raise InputError("exact=True and substring=True exclude each other: leave one of them out.")
        check_frames(frames, reduce)
        self.exact = exact
        self.substring = substring
        self.strip = strip
        self.detect = detect
        self.threads = threads
        self.frames = frames
        self.reduce = reduce

    def __call__(
        self,
        prompts: Sequence[str],
        completions: Sequence[Any],
        text: Sequence[str | None] | None = None,
        log_extra: Callable[[str, list[Any]], None] | None = None,
        **kwargs: Any,
    ) -> list[float | None]:
        """
        Scores images and videos.

        Args:
            prompts (`list[str]`):
                Prompts.
            completions (`list`):
                Images, or whatever [`to_pil`] takes, and videos.
            text (`list[str]`, *optional*):
                Wanted texts.
            log_extra (`Callable`, *optional*):
                Records the column `ocr_text`; the texts of a video's frames are parted by ` | `.

        Returns:
            `list[float | None]`: scores in [0, 1].
        """
        targets = [
            wanted_text(prompt, wanted) for prompt, wanted in zip(prompts, text or [None] * len(prompts), strict=True)
        ]
        recognised = self._read(completions)
        if log_extra is not None:
            log_extra("ocr_text", [" | ".join(texts) for texts in recognised])
        without = [row for row, target in enumerate(targets) if not plain_text(target, self.strip)]
        if without:
            logger.warning(
                "%d of %d rows have no OCR reward: their target text is empty (the first prompt: %r). Quote the "
                'wanted text in the prompt, as in: a sign "OPEN"; or give the rows a column `text`.',
                len(without),
                len(targets),
                prompts[without[0]],
            )
        return [
            None if row in without else reduced([self._score(read, target) for read in texts], self.reduce)
            for row, (texts, target) in enumerate(zip(recognised, targets, strict=True))
        ]

    def _score(self, recognised: str, target: str) -> float:
        if self.exact:
            return float(plain_text(recognised, self.strip) == plain_text(target, self.strip))
        return text_score(recognised, target, substring=self.substring, strip=self.strip)

    def _read(self, completions: Sequence[Any]) -> list[list[str]]:
        """The text of each image, those of the chosen frames of each video."""
        shown = [
            self._chosen(completion) if media_kind(completion) == "video" else [completion]
            for completion in completions
        ]
        texts = iter(read_text([image for images in shown for image in images], self.detect, self.threads))
        return [[next(texts) for _ in images] for images in shown]

    def _chosen(self, video: Any) -> list[np.ndarray]:
        frames = video_frames(video)
        return [frames[i] for i in frame_indices(self.frames, len(frames))]


def read_text(images: Sequence[Any], detect: bool | None = None, threads: int = 1) -> list[str]:
    """
    The text in each image; see [`OCRReward`] for how it is read.

    Args:
        images (`list`):
            PIL images, or whatever [`to_pil`] takes.
        detect (`bool`, *optional*):
            `True` for pages, `False` for single lines; the default looks at the size of each.
        threads (`int`, *optional*, defaults to `1`):
            Threads of the networks.

    Returns:
        `list[str]`: the texts, `""` where nothing was recognised.

    Raises:
        `ImportError`: if `rapidocr-onnxruntime` is not installed.
    """
    shown = pictures(images)
    texts = [""] * len(shown)
    for page in (False, True):
        members = [i for i, picture in enumerate(shown) if _is_page(picture, detect) == page]
        if members:
            read = _shared_reader(page, threads).read([shown[i] for i in members])
            for index, value in zip(members, read, strict=True):
                texts[index] = value
    return texts


def _is_page(picture: Image.Image, detect: bool | None) -> bool:
    if detect is not None:
        return detect
    return picture.height > min(_MAX_ONE_LINE_HEIGHT, picture.width)


_graded = OCRReward()
_exact = OCRReward(exact=True)


@reward_traits(media=("image", "video"), deterministic=True)
def ocr_reward(
    prompts: Sequence[str], completions: Sequence[Any], text: Sequence[str | None] | None = None, **kwargs: Any
) -> list[float | None]:
    """
    Rewards the wanted text in an image, by edit distance: [`OCRReward`] with its defaults.

    Range [0, 1]. From [Flow-GRPO](https://huggingface.co/papers/2505.05470), equation in [`text_score`]. Needs
    `pip install "omnitrl[ocr]"`.

    Args:
        prompts (`list[str]`):
            Prompts; the quoted text of each is the wanted one if there is no column `text`, and the whole prompt if
            there are no quotes.
        completions (`list`):
            Images, or whatever [`to_pil`] takes, and videos, of which every fourth frame is read and the mean taken.
        text (`list[str]`, *optional*):
            The dataset's column of wanted texts.
        **kwargs:
            `log_extra` records the column `ocr_text`; others are ignored.

    Returns:
        `list[float | None]`: scores, `None` for an empty target.

    Example:

    ```python
    >>> from PIL import Image
    >>> from omnitrl.rewards import ocr_reward

    >>> ocr_reward(prompts=['the word "CAT"'], completions=[Image.new("RGB", (64, 32), "white")])
    [0.0]
    ```
    """
    return _graded(prompts, completions, text, **kwargs)


@reward_traits(media=("image", "video"), deterministic=True)
def ocr_exact_reward(
    prompts: Sequence[str], completions: Sequence[Any], text: Sequence[str | None] | None = None, **kwargs: Any
) -> list[float | None]:
    """
    Rewards the very text and nothing else: 1.0 if what was read equals the wanted text, else 0.0.

    White space and case do not count. Arguments and wanted text as for [`ocr_reward`], which shares its readings: both
    in one run cost one. Useful with weight 0, as the rate of words that are right.

    Args:
        prompts (`list[str]`):
            Prompts.
        completions (`list`):
            Images.
        text (`list[str]`, *optional*):
            The dataset's column of wanted texts.
        **kwargs:
            As for [`ocr_reward`].

    Returns:
        `list[float | None]`: 0.0 or 1.0, `None` for an empty target.
    """
    return _exact(prompts, completions, text, **kwargs)
