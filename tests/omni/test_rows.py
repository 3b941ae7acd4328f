# SPDX-License-Identifier: Apache-2.0
"""Which file belongs to which place in the messages, and what bad rows are told."""

import io

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.media import Audio
from omnitrl.omni import VideoLimits, read_row
from omnitrl.omni.rows import ROW_COLUMN, numbered, undecoded


RED = Image.new("RGB", (8, 8), "red")
IMAGE, AUDIO, VIDEO = ({"type": kind} for kind in ("image", "audio", "video"))


def user(*content):
    return [{"role": "user", "content": list(content)}]


def text(words):
    return {"type": "text", "text": words}


def row(content, **columns):
    return read_row({"prompt": user(*content), **columns}, "row 7 of train_dataset")


def test_files_fill_the_places_in_order():
    found = row([IMAGE, text("a"), AUDIO, IMAGE], images=["0.png", "1.png"], audios=["0.wav"])
    assert found.media == {"image": ["0.png", "1.png"], "audio": ["0.wav"], "video": []}
    assert found.messages == user(IMAGE, text("a"), AUDIO, IMAGE)
    assert found.kinds == ("image", "audio")


def test_media_without_a_place_go_before_the_text_of_the_first_user_message():
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    found = read_row({"prompt": prompt, "audio": "a.wav", "images": ["0.png", "1.png"], "videos": ["v.mp4"]})
    assert found.messages == [
        {"role": "system", "content": [text("Be brief.")]},
        {"role": "user", "content": [IMAGE, IMAGE, VIDEO, AUDIO, text("What?")]},
    ]


def test_a_part_may_have_its_own_file_and_keys_that_datasets_filled_are_left_out():
    parts = [{"type": "image", "image": "own.png", "text": None}, {"type": "image", "image": None, "text": None}]
    found = row([*parts, {"type": "text", "text": "x", "image": None}], images=["column.png"])
    assert found.media["image"] == ["own.png", "column.png"]
    assert found.messages == user(IMAGE, IMAGE, text("x"))


def test_a_text_is_a_prompt_without_media():
    found = read_row({"prompt": "2 + 2 =", "images": []})
    assert (found.messages, found.kinds) == ("2 + 2 =", ())


@pytest.mark.parametrize(
    ("content", "columns", "sentence"),
    [
        (
            [IMAGE],
            {},
            r"Row 7 of train_dataset has 1 place\(s\) for image in its messages and 0 in the column 'images'",
        ),
        ([IMAGE], {"images": ["a", "b"]}, r"1 place\(s\) for image .* and 2 .*: give as many \{'type': 'image'\}"),
        ([AUDIO, AUDIO], {"audio": "a.wav"}, r"2 place\(s\) for audio in its messages and 1 in the column 'audios'"),
        ([text("x")], {"images": "a.png"}, r"has a str as images, which is a list of them: give \[image\], or name"),
        ([text("x")], {"images": ["a"], "image": "a"}, r"has both image and images: keep one of the two columns"),
        (
            [{"type": "picture"}],
            {},
            r"has the part \{'type': 'picture'\} in a message: parts are .* image, video, audio",
        ),
    ],
)
def test_places_and_files_that_do_not_match(content, columns, sentence):
    with pytest.raises(InputError, match=sentence):
        row(content, **columns)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ("What?", r"Row 0 has audios but a prompt that is a text, which has no place for them: give messages"),
        (None, r"Row 0 has no messages but None: its column prompt is a text or a list of messages"),
        ([], r"Row 0 has no messages but \[\]"),
        ([{"role": "user"}], r"Row 0 has the message \{'role': 'user'\}, but a message has role and content"),
    ],
)
def test_prompts_that_are_none(prompt, sentence):
    with pytest.raises(InputError, match=sentence):
        read_row({"prompt": prompt, "audio": "a.wav"}, "row 0")


# Decoding


def decoded(**media):
    found = row([], **media)
    return found.decoded(16000, VideoLimits(fps=2.0, max_frames=8))


def test_everything_is_decoded(tmp_path):
    tone = Audio(np.sin(np.arange(800) / 5)[None].astype(np.float32), 16000)
    RED.save(tmp_path / "red.png")
    tone.save(tmp_path / "tone.wav")
    frames = np.arange(32, dtype=np.uint8)[:, None, None, None].repeat(8, 1).repeat(8, 2).repeat(3, 3)
    found = decoded(
        images=[RED, str(tmp_path / "red.png"), (tmp_path / "red.png").read_bytes(), np.asarray(RED)],
        audios=[tone, str(tmp_path / "tone.wav"), {"array": tone.samples[0], "sampling_rate": 16000}],
        videos=[{"frames": frames, "fps": 8.0}, [RED, RED], frames[:3]],
    )
    assert [np.asarray(image)[0, 0].tolist() for image in found.images] == [[255, 0, 0]] * 4
    for sound in found.audios:
        assert sound.dtype == np.float32
        np.testing.assert_allclose(sound, tone.samples[0], atol=1e-4)
    assert found.videos[0].frames[:, 0, 0, 0].tolist() == [0, 4, 8, 12, 16, 20, 24, 28]
    assert [(len(video), video.frame_rate) for video in found.videos] == [(8, 2.0), (2, 2.0), (3, 2.0)]


@pytest.mark.parametrize(("width", "tolerance"), [(1, 1 / 64), (2, 1e-4), (3, 1e-6), (4, 1e-6)])
def test_wav_files_of_all_widths(width, tolerance, tmp_path):
    import wave

    wanted = np.linspace(-1, 0.99, 50)
    scaled = np.round(wanted * (2 ** (8 * width - 1) - 1)).astype("<i8")
    raw = (scaled + (128 if width == 1 else 0)).view(np.uint8).reshape(-1, 8)[:, :width].tobytes()
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setparams((1, width, 16000, 50, "NONE", ""))
        file.writeframes(raw)
    np.testing.assert_allclose(decoded(audio=str(tmp_path / "a.wav")).audios[0], wanted, atol=tolerance)


def test_sounds_of_another_rate_are_resampled_to_one_channel():
    t = np.arange(8000) / 8000
    (sound,) = decoded(audio={"array": np.stack([np.sin(2 * np.pi * 440 * t)] * 2), "sampling_rate": 8000}).audios
    assert sound.shape == (16000,)
    spectrum = np.abs(np.fft.rfft(sound))
    assert spectrum.argmax() == 440  # one second, so bins are Hertz


LOUD = np.array([0.5, -0.5, 0.25, -1.0])


@pytest.mark.parametrize(
    "array",
    [
        np.stack([LOUD, LOUD]),
        np.stack([LOUD, LOUD], axis=1),  # as soundfile has it
        LOUD[:, None],
        (LOUD * 2**15).astype(np.int16),
        (LOUD * 2**15).astype(np.int16).tolist(),  # as datasets gives it
        (LOUD * 2**31).astype(np.int32),
        (LOUD * 2**31).astype(np.int32).tolist(),
        (LOUD * 2**7 + 2**7).astype(np.uint8),
    ],
)
def test_arrays_of_sounds_have_any_order_and_any_bits(array):
    (sound,) = decoded(audio={"array": array, "sampling_rate": 16000}).audios
    np.testing.assert_allclose(sound, LOUD)


def test_pictures_are_upright_and_of_eight_bits():
    held = Image.Exif()
    held[0x0112] = 6  # turned to the right
    lying = Image.new("RGB", (32, 16), "red")
    lying.paste("blue", (0, 0, 16, 16))
    buffer = io.BytesIO()
    lying.save(buffer, "JPEG", exif=held)
    sixteen = Image.fromarray(np.array([[0, 257 * 100, 65535]], dtype=np.uint16))
    tensor = torch.full((2, 3, 3), 200, dtype=torch.uint8)
    found = decoded(images=[buffer.getvalue(), Image.open(io.BytesIO(buffer.getvalue())), sixteen, tensor]).images
    for upright in found[:2]:
        assert upright.size == (16, 32)
        assert upright.getpixel((8, 4))[2] > 200 > 50 > upright.getpixel((8, 28))[2]
    assert np.asarray(found[2])[0, :, 0].tolist() == [0, 100, 255]
    assert found[3].getpixel((0, 0)) == (200, 200, 200)
    assert decoded(video=tensor[None]).videos[0].frames.max() == 200


@pytest.mark.parametrize(
    ("media", "sentence"),
    [
        ({"image": "no.png"}, r"Image 0 of row 7 of train_dataset is the file no.png, which does not exist"),
        ({"images": [RED, b"nonsense"]}, r"Image 1 of row 7 of train_dataset is no picture that can be read"),
        ({"audio": "no.wav"}, r"Audio 0 of row 7 .* is the file no.wav, which does not exist; the working folder"),
        ({"audio": b"RIFF"}, r"Audio 0 of row 7 of train_dataset is no (WAV file|sound that can be read)"),
        ({"audio": "https://a/b.wav"}, r"Audio 0 .* is the URL https://a/b.wav, and nothing is downloaded"),
        ({"audio": {"array": [0.0, 0.1]}}, r"has no sampling_rate: give \{'array': …, 'sampling_rate': 16000\}"),
        ({"audio": {"array": [], "sampling_rate": 16000}}, r"has samples of shape \(0,\)"),
        ({"audio": {"array": np.zeros((2, 0)), "sampling_rate": 16000}}, r"has samples of shape \(2, 0\)"),
        ({"audio": {"array": [np.nan], "sampling_rate": 16000}}, r"has samples that are no numbers"),
        ({"audio": {"array": [0.1], "sampling_rate": 44100}}, r"has samples of shape \(1,\)"),
        ({"audio": 3}, r"Audio 0 .* is a int, but a sound is a path, the bytes of a file, or an array with its"),
        ({"video": {"frames": [RED]}}, r"Video 0 .* has frames without fps: give \{'frames': \[…\], 'fps': 2.0\}"),
        ({"video": {"frames": [RED], "fps": np.nan}}, r"Video 0 .* has frames without fps"),
        ({"video": np.zeros((4, 8, 8), np.uint8)}, r"has frames of shape \(4, 8, 8\), but they are \(frames, height"),
        ({"video": [RED, Image.new("RGB", (4, 4))]}, r"has frames of 2 sizes"),
        ({"video": "no.mp4"}, r"Video 0 of row 7 of train_dataset is the file no.mp4, which does not exist"),
    ],
)
def test_media_that_cannot_be_read(media, sentence):
    with pytest.raises(InputError, match=sentence):
        decoded(**media)


def test_sounds_for_a_model_that_hears_nothing():
    with pytest.raises(InputError, match="Row 7 of train_dataset has sounds, but the model's processor takes none"):
        row([], audio="a.wav").decoded(None, VideoLimits())


@pytest.mark.parametrize(
    ("limits", "count", "chosen"),
    [
        (VideoLimits(fps=None, max_frames=None), 5, [0, 1, 2, 3, 4]),
        (VideoLimits(fps=2.0, max_frames=None), 32, [0, 4, 8, 12, 16, 20, 24, 28]),
        (VideoLimits(fps=2.0, max_frames=4), 32, [0, 8, 16, 24]),
        (VideoLimits(fps=2.0), 3, [0, 1]),
        (VideoLimits(fps=50.0), 3, [0, 1, 2]),
    ],
)
def test_frames_are_chosen_within_limits(limits, count, chosen):
    assert limits.chosen(count, rate=8.0).tolist() == chosen


def test_limits_that_show_nothing():
    with pytest.raises(InputError, match=r"video_fps=0 must be above 0"):
        VideoLimits(fps=0)
    with pytest.raises(InputError, match=r"video_max_frames=1 must be at least 2"):
        VideoLimits(max_frames=1)


# Datasets


def test_features_are_decoded_when_they_are_needed(tmp_path):
    (tmp_path / "broken.png").write_bytes(b"nonsense")
    path = str(tmp_path / "broken.png")
    dataset = datasets.Dataset.from_dict({"prompt": ["x"], "images": [[path]], "audio": ["no.wav"]})
    dataset = dataset.cast_column("images", datasets.List(datasets.Image()))
    dataset = undecoded(dataset.cast_column("audio", datasets.Audio()))
    stored = {"images": [{"bytes": None, "path": path}], "audio": {"bytes": None, "path": "no.wav"}}
    assert dataset[0] == {"prompt": "x", **stored}


def test_rows_have_their_numbers():
    dataset = datasets.Dataset.from_dict({"prompt": ["a", "b", "c"]})
    assert numbered(dataset).select([2])[0] == {"prompt": "c", ROW_COLUMN: 2}
    twice = datasets.concatenate_datasets([numbered(dataset)] * 2)
    assert numbered(twice)[ROW_COLUMN][:] == [0, 1, 2, 3, 4, 5]
    streamed = dataset.to_iterable_dataset()
    assert [row[ROW_COLUMN] for row in numbered(streamed)] == [0, 1, 2]
    computed = dataset.with_transform(lambda batch: batch)
    assert numbered(computed) is computed
