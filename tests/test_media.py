# SPDX-License-Identifier: Apache-2.0
"""Videos and sounds as values: what they hold, and what of them a person sees and hears."""

import io
import wave

import numpy as np
import pytest
from PIL import Image, ImageSequence

from omnitrl.media import Audio, Video, still
from omnitrl.report import EvaluationRecord, RunSummary, Sample, write_report


def video(frames=5, height=8, width=12, audio=None):
    """Each frame of one grey, brighter from frame to frame."""
    grey = np.arange(frames, dtype=np.uint8)[:, None, None, None] * 40
    return Video(np.broadcast_to(grey, (frames, height, width, 3)).copy(), 8.0, audio)


def tone(seconds=1.0, rate=48000, channels=2):
    time = np.arange(round(seconds * rate)) / rate
    return Audio(np.stack([0.5 * np.sin(2 * np.pi * 440 * time)] * channels).astype(np.float32), rate)


def test_a_video_is_a_sequence_of_pictures():
    five = video()
    assert len(five) == 5
    assert [frame.getpixel((0, 0))[0] for frame in five] == [0, 40, 80, 120, 160]
    assert five[-1].size == (12, 8)
    assert len(five[1:3]) == 2
    assert np.asarray(five).shape == (5, 8, 12, 3)
    assert np.asarray(five, dtype=float).mean() == 80
    with pytest.raises(IndexError):
        five[5]


@pytest.mark.parametrize("frames", [np.zeros((5, 8, 12), np.uint8), np.zeros((5, 8, 12, 3), np.float32)])
def test_a_video_of_another_form_is_refused(frames):
    with pytest.raises(ValueError, match=r"frames of shape \(F, H, W, 3\) in uint8"):
        Video(frames, 8.0)


def test_a_sound_of_another_form_is_refused():
    with pytest.raises(ValueError, match=r"samples of shape \(channels, S\), got \(4,\)"):
        Audio(np.zeros(4, np.float32), 16000)


@pytest.mark.parametrize("suffix", [".webp", ".gif"])
def test_a_saved_video_has_its_frames_its_time_and_its_sound(tmp_path, suffix):
    video(audio=tone(0.25)).save(tmp_path / f"clip{suffix}")
    with Image.open(tmp_path / f"clip{suffix}") as clip:
        greys = [frame.convert("RGB").getpixel((4, 4))[0] for frame in ImageSequence.Iterator(clip)]
        assert clip.info.get("duration", 125) in (120, 125)  # GIF counts in hundredths of a second
    assert greys == pytest.approx([0, 40, 80, 120, 160], abs=4)
    with wave.open(str(tmp_path / "clip.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 48000, 12000)


def test_a_saved_sound_is_the_sound(tmp_path):
    sound = tone(0.1)
    sound.save(tmp_path / "tone.wav")
    with wave.open(str(tmp_path / "tone.wav")) as file:
        read = np.frombuffer(file.readframes(4800), "<i2").reshape(-1, 2).T / 32767
    assert np.abs(read - sound.samples).max() < 1e-4
    assert sound.duration == pytest.approx(0.1)


def test_a_preview_is_short_and_low():
    preview = tone(20.0).preview()
    assert preview.samples.shape == (1, 160000)
    assert preview.sampling_rate == 16000
    assert preview.samples.max() == pytest.approx(0.5, abs=0.01)
    assert len(preview.wav_bytes()) < 330_000


def test_a_storyboard_shows_first_middle_and_last():
    board = np.asarray(video().storyboard())
    assert board.shape == (8, 3 * 12 + 2 * 2, 3)
    assert board[0, [0, 12, 14, 26, 28], 0].tolist() == [0, 255, 80, 255, 160]
    assert video(frames=1).storyboard().size == (12, 8)


def test_a_waveform_is_as_high_as_the_sound_is_loud():
    drawn = np.asarray(tone().waveform(width=64, height=101))[:, :, 0] < 255
    assert drawn.sum(axis=0).tolist() == pytest.approx([51] * 64, abs=2)
    silence = Audio(np.zeros((1, 10), np.float32), 16000)
    assert (np.asarray(silence.waveform(height=101))[:, :, 0] < 255).sum(axis=0).tolist() == [1] * 256


def test_a_picture_of_any_medium():
    picture = Image.new("RGB", (4, 4))
    assert still(picture) is picture
    assert still(video()).size == (40, 8)
    assert still(tone()).size == (256, 64)
    assert still(np.zeros(2)) is None
    assert still(None) is None


def test_a_page_plays_videos_and_sounds(tmp_path):
    """From the record on disk, as after a resume."""
    samples = [Sample.of("a cat", video(audio=tone()), 0.5), Sample.of("a bell", tone(), 0.1)]
    record = EvaluationRecord.from_dict(EvaluationRecord(0, "eval", {"eval_reward": 0.3}, samples).to_dict())
    clip = Image.open(io.BytesIO(record.samples[0].clip))
    assert (clip.n_frames, clip.size) == (5, (12, 8))
    write_report(tmp_path / "report.html", RunSummary("run", "flow_grpo", "model", evaluations=[record]))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("data:image/webp;base64,") == 1
    assert page.count("<audio controls") == 2
    assert page.count("data:image/png;base64,") == 1  # the waveform


def test_the_small_pictures_of_a_timeline_do_not_play(tmp_path):
    """A clip for each evaluation in it would make the page large: it has those of before and after."""
    records = [EvaluationRecord(step, "eval", {}, [Sample.of("a cat", video(audio=tone(0.1)))]) for step in range(4)]
    write_report(tmp_path / "report.html", RunSummary("run", "flow_grpo", "model", evaluations=records))
    page = (tmp_path / "report.html").read_text("utf-8")
    assert page.count("data:image/webp;base64,") == page.count("<audio controls") == 2
    assert page.count("data:image/png;base64,") == 4
