# SPDX-License-Identifier: Apache-2.0
"""What the id or folder of a model means as a reward."""

import json

import pytest

from omnitrl.errors import InputError
from omnitrl.rewards import CLAPReward, CLIPReward, get_reward, reward_from_hub
from tests.rewards.tiny_scorers import PROMPTS, clip_folder, pictures


KNOWN = {
    "yuvalkirstain/PickScore_v1": "pickscore",
    "xswu/HPSv2": "hpsv2",
    "MizzenAI/HPSv3": "hpsv3",
    "THUDM/ImageReward": "imagereward",
    "zai-org/ImageReward": "imagereward",
    "trl-lib/ddpo-aesthetic-predictor": "aesthetic",
}


@pytest.mark.parametrize("model_id", KNOWN)
def test_repositories_of_built_in_rewards_are_known(model_id):
    assert reward_from_hub(model_id) is get_reward(KNOWN[model_id])


@pytest.mark.parametrize("name", [*dict.fromkeys(KNOWN.values()), "clip", "clap"])
def test_each_has_a_name_and_says_what_it_scores(name):
    reward = get_reward(name)
    assert reward.traits.media == (("audio",) if name == "clap" else ("image",))
    assert reward._network is None


def test_a_folder_is_what_its_configuration_says(tmp_path):
    folder = clip_folder(tmp_path / "clip")
    reward = reward_from_hub(folder)
    assert isinstance(reward, CLIPReward)
    assert reward(PROMPTS, pictures()) == CLIPReward(folder)(PROMPTS, pictures())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "clap"}))
    assert isinstance(reward_from_hub(str(tmp_path)), CLAPReward)


def test_other_models_are_refused_with_what_works(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(InputError, match=r"of type 'llama', which does not make a reward by itself. .* clip, clap do"):
        reward_from_hub(str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=r"reward 'nobody/nothing': there is no config.json of such a model to read"):
        reward_from_hub("nobody/nothing")
