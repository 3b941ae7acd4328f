# SPDX-License-Identifier: Apache-2.0
import inspect
import subprocess
import sys

import pytest

from omnitrl.rewards import BUILTIN_REWARDS, OCRReward, RewardRunner, brightness_reward, get_reward, ocr_reward
from omnitrl.rewards.contract import Reward


@pytest.mark.parametrize("name", sorted(BUILTIN_REWARDS))
def test_every_built_in_name_leads_to_a_reward(name):
    found = get_reward(name)
    reward = Reward.from_callable(found, name)
    assert not reward.requires - {"prompts", "completions"}  # no dataset needs a column for it
    if inspect.isfunction(found):
        assert found.__name__ == f"{name}_reward"


def test_paths_with_colon_and_with_dots():
    assert get_reward("omnitrl.rewards.image:brightness_reward") is brightness_reward
    assert get_reward("omnitrl.rewards.image.brightness_reward") is brightness_reward
    assert get_reward("omnitrl.rewards:ocr_reward") is ocr_reward
    assert get_reward(brightness_reward) is brightness_reward


def test_a_nested_attribute():
    assert get_reward("math:pi.is_integer")() is False


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "jpg_compressibility",
            "unknown reward 'jpg_compressibility': did you mean 'jpeg_compressibility'.*brightness, ",
        ),
        ("OCR", "did you mean 'ocr'"),
        (
            "zzzzzz",
            r"unknown reward 'zzzzzz': Built-in rewards are .*audio_answer, brightness, .*'package.module:function'",
        ),
        ("omnitrl.rewards.image:brightnes_reward", "has no 'brightnes_reward': did you mean 'brightness_reward'"),
        ("no_such_package_here.rewards:score", "no module 'no_such_package_here'"),
        ("omnitrl.no_such_module:score", "no module 'omnitrl.no_such_module'"),
        (":score", "not a path"),
        ("rewards/mine.py:score", "names a file, .* give 'mine:score', with the folder on PYTHONPATH"),
    ],
)
def test_names_that_lead_nowhere(spec, message):
    with pytest.raises(ValueError, match=message):
        get_reward(spec)


def test_a_module_that_misses_a_package_of_its_own_says_so(tmp_path, monkeypatch):
    (tmp_path / "half_a_reward.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_package_at_all"):
        get_reward("half_a_reward:score")


def test_a_module_in_the_current_folder_gets_a_hint(tmp_path, monkeypatch):
    (tmp_path / "my_local_reward.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    with pytest.raises(ValueError, match=r"PYTHONPATH=\."):
        get_reward("my_local_reward:score")


@pytest.mark.parametrize(
    ("spec", "message"),
    [(OCRReward, r"pass an instance of it, OCRReward\(\)"), (3, "got 3 of type int"), (None, "got None")],
)
def test_what_is_no_reward(spec, message):
    with pytest.raises(TypeError, match=message):
        get_reward(spec)


def test_the_runner_resolves_strings():
    assert RewardRunner("brightness").names == ["brightness_reward"]
    assert RewardRunner(["ocr", "ocr_exact"]).names == ["ocr_reward", "ocr_exact_reward"]


def test_importing_the_package_imports_no_reward_package():
    heavy = "torch", "onnxruntime", "rapidocr_onnxruntime", "cv2", "PIL", "numpy"
    code = f"import sys, omnitrl.rewards; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_names_that_do_not_exist_are_attribute_errors():
    import omnitrl.rewards

    assert set(omnitrl.rewards.__all__) <= set(dir(omnitrl.rewards))
    with pytest.raises(AttributeError, match="no attribute 'ocr_rewards'"):
        omnitrl.rewards.ocr_rewards  # noqa: B018
