# SPDX-License-Identifier: Apache-2.0
"""The script for models that edit: its reward, its data, and runs on tiny checkpoints."""

import inspect
import json

import datasets
import numpy as np
import pytest
from PIL import Image

from omnitrl import FlowGRPOConfig
from omnitrl.cli.script import make_parser
from omnitrl.errors import InputError
from tests.examples.test_flow_grpo_script import RECIPES
from tests.examples.test_trainer_scripts import ROOT, SCRIPTS, commands_of, load, num_processes
from tests.marks import first_fast
from tests.tiny import CHECKPOINTS
from tests.tiny.checkpoint import picture
from tests.tiny.sd3 import tiny_sd3


NAME = "flow_grpo_edit"
SCRIPT = load(NAME)


def parse(*words):
    parser = make_parser(FlowGRPOConfig, SCRIPT.EditScriptArguments)
    return parser.parse_args_and_config([str(word) for word in words])


# The reward


def test_structural_similarity_of_blocks():
    generator = np.random.default_rng(0)
    noise, other = generator.random((2, 20, 33))  # sides that are no whole blocks
    assert SCRIPT.structural_similarity(noise, noise) == pytest.approx(1)
    assert abs(SCRIPT.structural_similarity(noise, other)) < 0.2
    assert SCRIPT.structural_similarity(noise, 1 - noise) < -0.9
    assert 0.5 < SCRIPT.structural_similarity(noise, 0.5 * noise + 0.5 * other) < 0.95
    dark, light = np.full((8, 8), 0.2), np.full((8, 8), 0.8)  # which have no structure: the luminance alone
    assert SCRIPT.structural_similarity(dark, light) == pytest.approx((0.32 + 1e-4) / (0.68 + 1e-4))


def test_what_is_kept_is_rewarded_whatever_the_size_and_form_of_the_image(tmp_path):
    before = picture(0, (48, 32)).resize((480, 320))
    before.save(tmp_path / "before.png")
    results = [before, before.resize((768, 512)), picture(1, (480, 320)), picture(1, (4, 4))]
    for given in (before, str(tmp_path / "before.png"), {"bytes": (tmp_path / "before.png").read_bytes()}):
        values = SCRIPT.preservation_reward(completions=results, image=[given] * 4, prompts=[])
        assert values[0] == pytest.approx(1)
        assert 0.95 < values[1] < 1
        assert abs(values[2]) < 0.2
        assert values[3] < 0.9  # 4 × 4 pixels are compared as one block
    first = SCRIPT.preservation_reward(completions=results[:2], images=[[before, results[2]], [results[2], before]])
    assert first[0] == pytest.approx(1)
    assert abs(first[1]) < 0.2
    with pytest.raises(InputError, match="no column 'image'"):
        SCRIPT.preservation_reward(completions=results)


# The data


def test_rows_of_a_file_have_images_beside_it(tmp_path):
    (tmp_path / "photos").mkdir()
    picture(0).save(tmp_path / "photos" / "a.png")
    rows = [{"prompt": "make it blue", "image": "photos/a.png", "text": "OPEN"}]
    (tmp_path / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script_args, _ = parse("--model", "m", "--dataset", "d", "--output_dir", "o", "--use_cpu", "true")
    (row,) = SCRIPT.edits_of(str(tmp_path / "edits.jsonl"), "train", script_args)
    assert row == {"prompt": "make it blue", "image": str(tmp_path / "photos" / "a.png"), "text": "OPEN"}
    assert SCRIPT.edits_of(None, "train", script_args) is None


def test_columns_of_other_names_take_their_place(tmp_path):
    """Also where the names are those of other columns, as of captions beside instructions."""
    picture(0).save(tmp_path / "a.png")
    rows = [{"prompt": "a cat", "instruction": "make it blue", "source": "a.png"}]
    (tmp_path / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = datasets.Dataset.from_list([{"prompt": "a cat", "instruction": "make it blue", "source": picture(0)}])
    data.save_to_disk(tmp_path / "saved")
    words = ["--model", "m", "--dataset", "d", "--output_dir", "o", "--use_cpu", "true"]
    script_args, _ = parse(*words, "--prompt_column", "instruction", "--image_column", "source")
    (row,) = SCRIPT.edits_of(str(tmp_path / "edits.jsonl"), "train", script_args)
    assert row == {"prompt": "make it blue", "image": str(tmp_path / "a.png")}
    (row,) = SCRIPT.edits_of(str(tmp_path / "saved"), "train", script_args)
    assert (row["prompt"], row["image"].tobytes()) == ("make it blue", picture(0).tobytes())
    script_args.image_column = "target"
    with pytest.raises(InputError, match=r"has no column 'target', it has .*'source'.*: name another one"):
        SCRIPT.edits_of(str(tmp_path / "edits.jsonl"), "train", script_args)


# Runs


def run(tmp_path, checkpoint, rows, *words):
    pipeline = checkpoint.build() if isinstance(checkpoint, type(CHECKPOINTS["sd3"])) else checkpoint
    pipeline.save_pretrained(tmp_path / "model")
    (tmp_path / "edits.jsonl").write_text("\n".join(map(json.dumps, rows)))
    script_args, args = parse(
        *("--model", tmp_path / "model", "--dataset", tmp_path / "edits.jsonl", "--output_dir", tmp_path / "out"),
        *("--height", 64, "--width", 64, "--max_sequence_length", 16, "--num_inference_steps", 3, "--lora_r", 2),
        *("--num_generations", 2, "--generation_batch_size", 4, "--per_device_train_batch_size", 2),
        *("--max_steps", 2, "--use_cpu", "true", "--save_report", "false", *words),
    )
    SCRIPT.main(script_args, args)
    return [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]


def edits(tmp_path, count=3):
    rows = []
    for i in range(count):
        picture(i, (64, 64 + 16 * (i % 2))).save(tmp_path / f"{i}.png")
        rows.append({"prompt": f"make it brighter, {i}", "image": f"{i}.png"})
    return rows


@pytest.mark.parametrize(
    "name",
    first_fast([name for name, tiny in CHECKPOINTS.items() if tiny.num_images == 1 and tiny.size.num_frames is None]),
)
def test_it_trains_a_model_that_edits_and_saves_its_adapter(name, tmp_path):
    metrics = run(tmp_path, CHECKPOINTS[name], edits(tmp_path), "--rewards", "brightness", "--learning_rate", 1e-3)
    steps = [row for row in metrics if "grad_norm" in row]
    assert [row["step"] for row in steps] == [1, 2]
    rollout = steps[0]
    brightness, kept = (rollout[f"rewards/{reward}_reward/mean"] for reward in ("brightness", "preservation"))
    assert rollout["reward"] == pytest.approx(brightness + 0.5 * kept, abs=1e-6)
    assert -1 <= kept < 0.9
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_weights_are_those_of_the_given_rewards_and_of_what_is_kept(tmp_path):
    words = ["--rewards", "brightness", "jpeg_compressibility", "--reward_weights", 2.0, 0.0]
    metrics = run(tmp_path, CHECKPOINTS["flux-kontext"], edits(tmp_path), *words, "--preservation_weight", -1.0)
    rollout = next(row for row in metrics if "reward" in row)
    brightness, kept = (rollout[f"rewards/{reward}_reward/mean"] for reward in ("brightness", "preservation"))
    assert rollout["reward"] == pytest.approx(2 * brightness - kept, abs=1e-6)


def test_a_model_that_takes_no_images_is_refused(tmp_path):
    with pytest.raises(InputError, match="StableDiffusion3Pipeline takes no images: use a model that edits"):
        run(tmp_path, tiny_sd3(), edits(tmp_path), "--rewards", "brightness")


# What it says of itself


def test_its_commands_make_a_config(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = list(commands_of(NAME))
    assert len(commands) == 2
    for words in commands:
        monkeypatch.setattr(FlowGRPOConfig, "world_size", num_processes(words))
        script_args, args = parse(*words[words.index(f"examples/scripts/{NAME}.py") + 1 :], "--use_cpu", "true")
        assert script_args.model == "black-forest-labs/FLUX.1-Kontext-dev"
        assert (args.generation_batch_size, args.prompts_per_rollout, args.updates_per_rollout) == (1008, 48, 2)
        assert (args.guidance_scale, args.noise_level, args.beta) == (2.5, 0.9, 0.0)


def test_it_is_listed_and_says_what_it_needs():
    source = inspect.getsource(SCRIPT)
    assert source.startswith("# SPDX-License-Identifier: Apache-2.0\n# /// script\n")
    assert f"[`{NAME}.py`]({NAME}.py)" in (SCRIPTS / "README.md").read_text("utf-8")
    assert (RECIPES / "kontext_edit.yaml").is_file()


def test_images_of_its_reward_may_be_in_any_mode():
    grey = Image.linear_gradient("L")
    values = SCRIPT.preservation_reward(completions=[grey.convert("RGB")], image=[grey.convert("RGBA")])
    assert values[0] == pytest.approx(1)
