# SPDX-License-Identifier: Apache-2.0
"""How a reward is called is how it asks to be: kinds of media, latents, groups, batches, processes, device."""

import asyncio
import functools
import multiprocessing
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from omnitrl.errors import InputError
from omnitrl.media import Audio, Video
from omnitrl.rewards import RewardError, RewardRunner, RewardTraits, framewise, groupwise, reward_traits
from tests.rewards.process_rewards import lengths
from tests.rewards.runner_helpers import NAN, length, rows, score


IMAGE = Image.new("RGB", (4, 4), (255, 0, 0))
FRAMES = np.zeros((2, 4, 4, 3), dtype=np.uint8)
SOUND = Audio(np.zeros((1, 8), dtype=np.float32), 8)


def taking(*media):
    @reward_traits(media=media)
    def reward(completions):
        seen.extend(completions)
        return [1.0] * len(completions)

    seen = reward.seen = []
    return reward


# --- kinds of media -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("media", "medium"),
    [
        (("image",), IMAGE),
        (("image",), FRAMES[0]),
        (("image",), torch.zeros(3, 4, 4)),
        (("video",), FRAMES),
        (("video",), torch.zeros(2, 4, 4, 3, dtype=torch.uint8)),
        (("video",), Video(FRAMES, 8.0)),
        (("video",), [IMAGE, IMAGE]),
        (("audio",), SOUND),
        (("image", "video"), FRAMES),
        ((), object()),
    ],
)
def test_media_of_a_stated_kind_are_handed_over(media, medium):
    reward = taking(*media)
    with RewardRunner(reward) as runner:
        assert score(runner, "a", completions=[medium]).rewards.tolist() == [[1.0]]
    assert reward.seen[0] is medium


@pytest.mark.parametrize(
    ("media", "medium", "message"),
    [
        (("image",), Video(FRAMES, 8.0), r"'reward' takes images, and was given videos: use framewise\(reward\)"),
        (("image",), FRAMES, r"takes images, and was given videos: use framewise"),
        (
            ("video",),
            IMAGE,
            "takes videos, and was given images: use a reward for images, or a model that makes videos",
        ),
        (("audio",), IMAGE, "takes sounds, and was given images"),
        (("audio",), Video(FRAMES, 8.0), "takes sounds, and was given videos: these have no sound"),
        (("image", "video"), SOUND, "takes images or videos, and was given sounds"),
        (("image",), "a.png", "takes images, and was given texts: use a reward for texts"),
        (("image",), 7, "takes images, and was given a int: media are PIL images"),
    ],
)
def test_other_media_end_the_run_at_the_first_chunk(media, medium, message):
    with RewardRunner([length, taking(*media)]) as runner:
        with pytest.raises(RewardError, match=message):
            runner.submit(rows("a"), [medium])
        assert runner.collect().rewards.shape == (0, 2)


def test_a_reward_of_sounds_gets_those_of_videos():
    reward = taking("audio")
    with RewardRunner(reward) as runner:
        score(runner, "a", completions=[Video(FRAMES, 8.0, SOUND)])
    assert reward.seen == [SOUND]


def test_a_sound_that_is_not_finite_is_not_scored():
    broken = Audio(np.full((1, 8), np.nan, dtype=np.float32), 8)
    with RewardRunner(taking("audio")) as runner:
        batch = score(runner, "a", "b", completions=[broken, SOUND])
    assert batch.rewards[:, 0].isnan().tolist() == [True, False]
    assert batch.failures == {"reward": 1}


# --- latents --------------------------------------------------------------------------------------------------------


@reward_traits(media="latents")
def energy(completions, prompts):
    return [float(latents.square().mean()) for latents in completions]


def test_rewards_of_latents_are_shown_them_and_others_the_media():
    latents = [torch.full((2, 2), 3.0), torch.full((2, 2), NAN), torch.full((2, 2), 1.0)]
    with RewardRunner([energy, lambda completions: [len(c) for c in completions]]) as runner:
        assert (runner.needs_latents, runner.needs_media) == (True, True)
        runner.submit(rows("a", "b", "c"), ["one", "four!", None], latents=latents)
        batch = runner.collect()
    assert batch.rewards[[0, 2], 0].tolist() == [9.0, 1.0]  # the broken picture of c does not matter to it
    assert batch.rewards[[0, 1], 1].tolist() == [3.0, 5.0]
    assert batch.failures == {"energy": 1, "lambda": 1}


@pytest.mark.parametrize("media", ["latents", ["latents"], ("latents",)])
def test_kinds_of_media_are_given_as_one_or_several(media):
    assert RewardTraits(media=media) == RewardTraits(media=("latents",))


def test_nothing_needs_to_be_decoded_for_rewards_of_latents_alone():
    with RewardRunner(energy) as runner:
        assert (runner.needs_latents, runner.needs_media) == (True, False)
        runner.submit(rows("a"), None, latents=[torch.full((2,), 2.0)])
        assert runner.collect().rewards.tolist() == [[4.0]]


@pytest.mark.parametrize(
    ("reward", "given", "message"),
    [
        (energy, {"completions": ["x"]}, "'energy' looks at clean latents, but there are none: .*latents="),
        (length, {"completions": None, "latents": [1]}, "'length' looks at decoded media, but nothing was decoded"),
    ],
)
def test_what_a_reward_looks_at_must_be_there(reward, given, message):
    with RewardRunner(reward) as runner, pytest.raises(RewardError, match=message):
        runner.submit(rows("a"), **given)


# --- groups ---------------------------------------------------------------------------------------------------------


@groupwise
def ranks(prompts, completions, log_extra):
    """The place of each in its group, and how many there are."""
    log_extra("members", [len(completions)] * len(completions))
    return [sorted(completions).index(c) for c in completions]


async def ranks_async(prompts, completions, log_extra):
    await asyncio.sleep(0.001)
    return ranks(prompts, completions, log_extra)


ranks_async = groupwise(ranks_async)


@pytest.mark.parametrize("reward", [ranks, ranks_async])
def test_a_groupwise_reward_is_called_once_for_each_group_across_chunks(reward):
    with RewardRunner([reward, length]) as runner:
        runner.submit(rows("a", "a"), [3, 1], groups=["A", "A"], group_size=4)
        runner.submit(rows("a", "bb", "a"), [4, 8, 2], groups=["A", "B", "A"], group_size=4)
        runner.submit(rows("bb", "bb", "bb"), [7, 9, 6], groups=["B", "B", "B"], group_size=4)
        batch = runner.collect()
    assert batch.rewards[:, 0].tolist() == [2, 0, 3, 2, 1, 1, 3, 0]
    assert batch.rewards[:, 1].tolist() == [1, 1, 1, 2, 1, 2, 2, 2]
    assert batch.extras["members"] == [4] * 8


def test_a_group_is_scored_as_soon_as_it_is_complete():
    called = threading.Event()

    @groupwise
    def reward(completions):
        called.set()
        return completions

    with RewardRunner(reward) as runner:
        runner.submit(rows("a"), [1.0], groups=[0], group_size=2)
        assert not called.wait(0.1)
        runner.submit(rows("a"), [2.0], groups=[0], group_size=2)
        assert called.wait(2)
        assert runner.collect().rewards[:, 0].tolist() == [1.0, 2.0]


def test_members_that_could_not_be_decoded_are_left_out_of_their_group():
    with RewardRunner(ranks) as runner:
        runner.submit(rows("a", "a", "b", "b"), [2, None, None, None], groups=[0, 0, 1, 1], group_size=2)
        runner.submit(rows("c", "c"), [2, 1], groups=[2, 2], group_size=2)
        batch = runner.collect() if runner.max_failed_fraction >= 0.5 else None
    assert batch.rewards[[0, 4, 5], 0].tolist() == [0, 1, 0]
    assert batch.failed[:, 0].tolist() == [False, True, True, True, False, False]
    assert batch.extras["members"] == [1, None, None, None, 2, 2]


def test_without_a_size_groups_are_complete_at_collect():
    with RewardRunner(ranks) as runner:
        runner.submit(rows("a", "b"), [2, 1], groups=[0, 1])
        runner.submit(rows("a", "a"), [1, 3], groups=[0, 0])
        batch = runner.collect()
    assert batch.rewards[:, 0].tolist() == [1, 0, 0, 2]
    assert batch.extras["members"] == [3, 1, 3, 3]


def test_a_group_that_lacks_a_member_is_reported():
    with RewardRunner(ranks) as runner:
        runner.submit(rows("a", "a"), [2, 1], groups=[7, 7], group_size=3)
        with pytest.raises(RewardError, match="of group 7 there came 2 of 3"):
            runner.collect()
        runner.submit(rows("a", "a"), [2, 1], groups=[7, 7], group_size=2)  # nothing is left of it
        assert runner.collect().rewards[:, 0].tolist() == [1, 0]
        with pytest.raises(InputError, match=r"got groups \[\[7\]\]: name each by a number or a text"):
            runner.submit(rows("a"), [1], groups=[[7]])
        with pytest.raises(InputError, match="got 1 rows and 2 groups: give one group per row"):
            runner.submit(rows("a"), [1], groups=[7, 7])
        with pytest.raises(RewardError, match=r"nobody said which rows belong together: .*groups=\[0, 0, 1, 1\]"):
            runner.submit(rows("a"), [1])


def test_what_is_discarded_leaves_no_half_of_a_group():
    with RewardRunner(ranks) as runner:
        runner.submit(rows("a"), [5], groups=[0], group_size=2)
        runner.discard()
        runner.submit(rows("a", "a"), [2, 1], groups=[0, 0], group_size=2)
        assert runner.collect().rewards[:, 0].tolist() == [1, 0]


class Ranks:
    @groupwise
    def __call__(self, completions, **kwargs):
        return ranks(completions)


class RanksModule(nn.Module):
    @groupwise
    def forward(self, completions):
        return ranks(completions)


@pytest.mark.parametrize(
    "reward", [groupwise(functools.partial(length)), functools.partial(ranks), Ranks(), RanksModule()]
)
def test_a_decorator_counts_wherever_it_stands(reward):
    with RewardRunner(reward) as runner:
        assert len(runner.groupwise) == 1


def test_what_is_discarded_before_it_has_begun_keeps_no_place():
    """Calls that are given up in the moment in which they are made."""
    with RewardRunner(length) as runner:
        for _ in range(30):
            runner.submit(rows("a"), [1])
            runner.discard()
        runner.submit(rows("a"), [1])
        found = []
        waiting = threading.Thread(target=lambda: found.append(runner.collect()), daemon=True)
        waiting.start()
        waiting.join(5)
    assert [batch.rewards.tolist() for batch in found] == [[[1]]]


# --- batches --------------------------------------------------------------------------------------------------------


def test_chunks_are_cut_and_those_that_wait_are_joined():
    started, release, calls = threading.Event(), threading.Event(), []

    @reward_traits(batch_size=3)
    def reward(prompts, completions, number, log_extra, log_metric, late=()):
        started.set()
        release.wait(5)
        calls.append((list(prompts), list(late)))
        log_extra("seen", [f"saw {c}" for c in completions])
        log_metric("rows", len(prompts))
        return [n * 10 for n in number]

    with RewardRunner(reward) as runner:
        runner.submit(rows("a", number=[1]), ["A"])
        assert started.wait(5)
        runner.submit(rows("b", "c", number=[2, 3]), ["B", "C"])
        runner.submit(rows("d", "e", "f", "g", number=[4, 5, 6, 7], late=[1, 2, 3, 4]), ["D", None, "F", "G"])
        release.set()
        batch = runner.collect()
    assert calls == [(["a"], []), (["b", "c", "d"], [None, None, 1]), (["f", "g"], [3, 4])]
    assert batch.rewards[[0, 1, 2, 3, 5, 6], 0].tolist() == [10, 20, 30, 40, 60, 70]
    assert batch.failures == {"reward": 1}
    assert batch.extras["seen"] == ["saw A", "saw B", "saw C", "saw D", None, "saw F", "saw G"]
    assert batch.metrics["rows"] == 2.0  # of three calls: 1, 3 and 2


def test_a_joined_call_that_fails_is_missing_for_its_rows_alone():
    release = threading.Event()

    @reward_traits(batch_size=2)
    def reward(prompts):
        release.wait(5)
        if "c" in prompts:
            raise ValueError("no")
        return [1.0] * len(prompts)

    with RewardRunner(reward, max_retries=0) as runner:
        for prompt in "abcde":
            runner.submit(rows(prompt), ["image"])
        release.set()
        batch = runner.collect()
    assert batch.rewards[:, 0].isnan().tolist() == [False, True, True, False, False]  # a, then b with c, d with e


def test_calls_of_an_async_reward_are_cut():
    sizes = []

    class Judge:
        traits = RewardTraits(batch_size=2)

        async def __call__(self, prompts):
            sizes.append(len(prompts))
            await asyncio.sleep(0.001)
            return [float(prompt) for prompt in prompts]

    with RewardRunner(Judge()) as runner:
        assert score(runner, *"01234").rewards[:, 0].tolist() == [0, 1, 2, 3, 4]
    assert sizes == [2, 2, 1]


# --- devices --------------------------------------------------------------------------------------------------------


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, prompts):
        return torch.full((len(prompts),), float(len(self.weight)))


class Lazy:
    device = None

    def __call__(self, prompts):
        return [0.0] * len(prompts)


class Movable:
    device = None

    def to(self, device):
        self.device = str(device)

    def __call__(self, prompts):
        return [0.0] * len(prompts)


def test_models_are_moved_if_asked_to():
    module, movable, lazy = Placed(), Movable(), Lazy()
    with RewardRunner([module, movable, length]) as runner:
        score(runner, "a")
        assert (module.weight.device.type, movable.device) == ("cpu", None)
    RewardRunner([module, movable, lazy, length], device="meta").close()
    assert (module.weight.device.type, movable.device, lazy.device) == ("meta", "meta", torch.device("meta"))
    within = Lazy(), Movable(), Lazy(), Movable()
    wrapped = [framewise(within[0]), framewise(within[1]), functools.partial(within[2]), functools.partial(within[3])]
    RewardRunner([*wrapped, framewise(length)], device="meta").close()
    assert [str(reward.device) for reward in within] == ["meta"] * 4
    with pytest.raises(InputError, match=r"'Placed' cannot be moved to device='cuda:99' .*use 'cpu'"):
        RewardRunner(Placed(), device="cuda:99")


# --- processes ------------------------------------------------------------------------------------------------------


def test_a_reward_in_a_process_of_its_own():
    with RewardRunner(lengths, timeout=30, max_retries=0, retry_wait=0.001) as runner:
        runner.submit(rows("a", "bc", level=[1, 2]), [IMAGE, Image.new("RGB", (7, 1))])
        first = runner.collect()
        assert first.rewards[:, 0].tolist() == [5.0, 9.0]
        assert first.extras["upper"] == ["A", "BC"]
        assert first.metrics["process"] != os.getpid()
        assert first.metrics["gradients"] == 0
        for prompt in ("ok", "odd", "away", "ok"):
            runner.submit(rows(prompt, level=[1]), [IMAGE])
        batch = runner.collect()
        assert batch.metrics["process"] == first.metrics["process"]  # started once
        with pytest.raises(RewardError, match="arguments cannot be sent there"):
            score(runner, "a", completions=[IMAGE], level=[threading.Lock()])
    assert batch.rewards[:, 0].isnan().tolist() == [False, True, True, False]


@pytest.mark.slow
def test_a_process_that_hangs_is_killed_and_one_that_dies_is_missed():
    with RewardRunner(lengths, timeout=2.0, max_retries=0, num_processes=2) as runner:
        for prompt in ("hang", "ok", "die", "ok", "ok"):
            runner.submit(rows(prompt, level=[1]), [IMAGE])
        began = time.perf_counter()
        batch = runner.collect()
        assert time.perf_counter() - began < 45  # of the 60 that it would hang
    assert batch.rewards[:, 0].isnan().tolist() == [True, False, True, False, False]
    deadline = time.perf_counter() + 20
    while [p for p in multiprocessing.active_children() if p.name == "reward-lengths"]:
        assert time.perf_counter() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_script_that_trains_again_when_it_is_imported_is_told_so(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        """
from PIL import Image
from omnitrl.rewards import RewardRunner
from tests.rewards.process_rewards import lengths

with RewardRunner(lengths) as runner:
    runner.submit([{"prompt": "a", "level": 1}], [Image.new("RGB", (1, 1))])
    runner.collect()
"""
    )
    path = os.pathsep.join(["."] + os.environ.get("PYTHONPATH", "").split(os.pathsep))
    ended = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert ended.returncode == 1
    assert "must begin with `if __name__ == '__main__':`" in ended.stderr


def test_a_reward_that_no_process_can_import_is_refused():
    with pytest.raises(InputError, match=r"'lambda' cannot go to a process of its own .*define it at the top"):
        RewardRunner(reward_traits(in_process=True)(lambda prompts: []))

    @reward_traits(in_process=True)
    async def judge(prompts):
        return []

    with pytest.raises(InputError, match="'judge' is asynchronous, which runs in this process: use in_process=False"):
        RewardRunner(judge)
