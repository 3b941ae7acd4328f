# SPDX-License-Identifier: Apache-2.0
import asyncio
import inspect
import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from omnitrl.errors import InputError
from omnitrl.media import Audio, Video
from omnitrl.rewards import RewardError, RewardRunner, framewise, groupwise, reward_traits
from omnitrl.rewards.frames import frame_indices
from omnitrl.rewards.traits import traits_of


def video(*levels):
    """A video of grey frames."""
    return Video(np.stack([np.full((4, 6, 3), level, dtype=np.uint8) for level in levels]), 8.0)


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        ("all", [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        ("first", [0]),
        ("last", [8]),
        ("first_last", [0, 8]),
        (1, [4]),
        (2, [0, 8]),
        (3, [0, 4, 8]),
        (4, [0, 3, 5, 8]),
        (9, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (100, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (slice(None, None, 4), [0, 4, 8]),
        (slice(-2, None), [7, 8]),
    ],
)
def test_which_frames_are_chosen(frames, expected):
    assert frame_indices(frames, 9) == expected


@pytest.mark.parametrize("frames", ["all", "first", "last", "first_last", 1, 2, 5, slice(None, None, 4)])
def test_of_a_single_frame_it_is_chosen_once(frames):
    assert frame_indices(frames, 1) == [0]


@pytest.mark.parametrize(
    ("reduce", "expected"),
    [("mean", 0.3), ("median", 0.2), ("min", 0.0), ("max", 0.8), ("mean_above_zero", 0.4)],
)
def test_the_values_of_the_frames_become_one(reduce, expected):
    reward = framewise("brightness", reduce=reduce)
    values = reward(prompts=["", ""], completions=[video(0, 51, 51, 204)[:], video(0, 0)])
    assert values == [pytest.approx(expected), 0.0]


def test_all_frames_are_one_batch_with_the_prompts_and_columns_of_their_videos():
    calls = []

    def reward(prompts, completions, wanted, trainer_state):
        calls.append((prompts, [image.getpixel((0, 0))[0] for image in completions], wanted, trainer_state))
        assert all(image.size == (6, 4) for image in completions)
        return [wanted[i] * image.getpixel((0, 0))[0] for i, image in enumerate(completions)]

    values = framewise(reward, frames="first_last")(
        prompts=["a", "b"],
        completions=[video(1, 2, 3), video(10, 20)],
        wanted=[1, 2],
        trainer_state="state",
        other=[0, 0],
    )
    assert calls == [(["a", "a", "b", "b"], [1, 3, 10, 20], [1, 1, 2, 2], "state")]
    assert values == [2.0, 30.0]


FORMS = {
    "video": lambda frames: Video(frames, 8.0),
    "array": lambda frames: frames,
    "floats": lambda frames: frames / 255,
    "tensor": lambda frames: torch.from_numpy(frames).movedim(-1, 1),
    "list": lambda frames: [Image.fromarray(frame) for frame in frames],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_video_may_have_any_form(form):
    frames = np.random.default_rng(0).integers(0, 256, (3, 4, 6, 3), dtype=np.uint8)
    expected = np.mean([np.asarray(Image.fromarray(frame).convert("L")).mean() for frame in frames]) / 255
    assert framewise("brightness")(completions=[FORMS[form](frames)]) == [pytest.approx(expected, abs=1e-12)]


def red_level(completions, **kwargs):
    return [image.getpixel((0, 0))[0] for image in completions]


async def red_level_later(completions, **kwargs):
    await asyncio.sleep(0)
    return red_level(completions)


class RedLevel(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, completions, **kwargs):
        assert not self.training
        return torch.tensor([float(level) for level in red_level(completions)]) * self.scale


class AsyncRed:
    async def __call__(self, completions, **kwargs):
        return red_level(completions)


@pytest.mark.parametrize("reward", [red_level, red_level_later, RedLevel(), AsyncRed()], ids=lambda r: str(type(r)))
def test_any_reward_runs_in_the_runner(reward):
    with RewardRunner([framewise(reward, reduce="max"), framewise("brightness")]) as runner:
        runner.submit([{"prompt": "a"}, {"prompt": "b"}], [video(1, 9, 5), video(255, 255)])
        scored = runner.collect()
        assert runner.names[0] == f"{getattr(reward, '__name__', type(reward).__name__)}_frames"
    assert scored.rewards.tolist() == [[9.0, pytest.approx(5 / 255)], [255.0, 1.0]]


def test_a_model_is_moved_as_without_the_wrapper():
    model = RedLevel()
    framewise(model).to(torch.float64)
    assert model.scale.dtype == torch.float64


def test_none_is_left_out_and_a_failed_frame_fails_the_video():
    table = {1: None, 2: 4.0, 3: math.nan, 4: 8.0}

    def reward(completions, **kwargs):
        return [table[image.getpixel((0, 0))[0]] for image in completions]

    values = framewise(reward)(completions=[video(1, 2, 4), video(1, 1), video(2, 3)])
    assert values[:2] == [6.0, None]
    assert math.isnan(values[2])


def test_what_is_logged_of_frames_becomes_a_list_for_each_video():
    seen = {}

    def reward(completions, log_extra, log_metric, **kwargs):
        log_extra("level", red_level(completions))
        log_metric("count", len(completions))
        return red_level(completions)

    logged = []
    framewise(reward)(
        completions=[video(1, 2), video(3)],
        log_extra=seen.__setitem__,
        log_metric=lambda *what: logged.append(what),
    )
    assert seen == {"level": [[1, 2], [3]]}
    assert logged == [("count", 3)]


def test_traits_that_bound_a_call_hold_for_frames():
    sizes = []

    @reward_traits(media=("image", "video"), deterministic=True, batch_size=2)
    def reward(completions, log_extra, **kwargs):
        sizes.append(len(completions))
        log_extra("level", red_level(completions))
        return red_level(completions)

    seen = {}
    wrapped = framewise(reward)
    assert wrapped(completions=[video(1, 2, 3), video(4, 8)], log_extra=seen.__setitem__) == [2.0, 6.0]
    assert sizes == [2, 2, 1]
    assert seen == {"level": [[1, 2, 3], [4, 8]]}
    traits = traits_of(wrapped)
    assert (traits.media, traits.deterministic, traits.batch_size) == (("video",), True, None)


def test_a_groupwise_reward_compares_the_same_frame_of_all_members():
    @groupwise
    def brightest(completions, **kwargs):
        levels = red_level(completions)
        return [float(level == max(levels)) for level in levels]

    wrapped = framewise(brightest)
    assert traits_of(wrapped).groupwise
    assert wrapped(completions=[video(1, 9, 9), video(2, 3, 9)]) == [pytest.approx(2 / 3)] * 2
    with pytest.raises(RewardError, match=r"whose videos have 1 to 2 of them: choose as many.*frames=4"):
        wrapped(completions=[video(1, 9), video(2)])


def test_columns_that_the_reward_requires_are_required_of_the_dataset():
    def reward(completions, style):
        return [0.0 for _ in completions]

    wrapped = framewise(reward)
    assert list(inspect.signature(wrapped).parameters) == ["completions", "style", "columns"]
    with RewardRunner(wrapped) as runner, pytest.raises(RewardError, match="requires the argument 'style'"):
        runner.submit([{"prompt": "a"}], [video(1)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frames": "some"}, r"frames='some' must be 'all', 'first'.*a number of frames such as 4, or a slice"),
        ({"frames": 0}, "frames=0 must be"),
        ({"frames": True}, "frames=True must be"),
        ({"reduce": "sum"}, "reduce='sum' must be one of 'mean', 'median', 'min'"),
        ({"reward": "motion"}, "takes a reward of images, but 'motion_reward' scores video: give it to the trainer"),
    ],
)
def test_what_cannot_be_made(options, message):
    with pytest.raises(InputError, match=message):
        framewise(**{"reward": "brightness", **options})


def test_a_slice_without_a_frame_is_refused():
    with pytest.raises(InputError, match="chooses none of 2 frames"):
        framewise("brightness", frames=slice(5, None))(completions=[video(1, 2)])


@pytest.mark.parametrize(
    ("completion", "message"),
    [
        (
            Image.new("RGB", (6, 4)),
            r"completions\[1\]: expected a video .*, got an image of 4×6: this reward scores videos",
        ),
        (Audio(np.zeros((1, 8), np.float32), 8), r"completions\[1\]: expected a video .*, got a sound"),
        (np.zeros((4, 6, 3), np.uint8), r"got ndarray of shape \(4, 6, 3\)"),
        (np.zeros((0, 4, 6, 3), np.uint8), "got one without a frame"),
        ("clip.mp4", "got str"),
    ],
)
def test_what_is_no_video(completion, message):
    with pytest.raises(RewardError, match=message):
        framewise("brightness")(completions=[video(1), completion])


def test_frames_that_are_not_finite_are_never_scored():
    frames = torch.zeros(2, 3, 4, 6)
    frames[1, 0, 0, 0] = math.nan
    with pytest.raises(ValueError, match=r"completions\[0\]: the image has NaN"):
        framewise("brightness")(completions=[frames])
