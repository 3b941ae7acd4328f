# SPDX-License-Identifier: Apache-2.0
"""What GSPO makes of rewards that fail or are many, and of data, options and models that do not go together."""

import datasets
import pytest
import torch
import transformers
import trl.rewards
from packaging import version
from peft import LoraConfig
from PIL import Image
from transformers import PreTrainedTokenizerBase, Qwen3ForSequenceClassification
from trl import GRPOConfig

from omnitrl.errors import InputError
from omnitrl.omni.thinker import load_thinker
from omnitrl.rewards import RewardError, groupwise
from omnitrl.trainer.gspo_config import GSPOConfig
from tests.omni import chats, tiny


def rollout(trained):
    """What TRL makes of one batch of prompts."""
    trained.model.train()
    batch = next(iter(trained.get_train_dataloader()))
    return batch, trained._generate_and_score_completions(batch)


def text_trainer(folder, reward, rows=None, **changed):
    rows = rows or [{"prompt": f"{i} + 1 =", "answer": str(i + 1)} for i in range(2)]
    changed = {"model": tiny.language_model(), "processing_class": tiny.tokenizer(), **changed}
    return chats.trainer(folder, datasets.Dataset.from_list(rows), reward=reward, **changed)


# Rewards


def test_rewards_are_given_all_columns(tmp_path):
    seen = {}

    def reward(prompts, completions, completion_ids, images, audios, videos, kind, trainer_state, **kwargs):
        seen.update(locals())
        return [0.0] * len(prompts)

    rows = datasets.Dataset.from_list([row | {"kind": str(i)} for i, row in enumerate(chats.ROWS["mixed"])])
    trained = chats.trainer(tmp_path, rows, reward=reward)
    rollout(trained)
    assert seen["kwargs"].keys() == {"log_extra", "log_metric"}
    assert seen["trainer_state"] is trained.state
    for i, kind in enumerate(seen["kind"]):
        given = chats.ROWS["mixed"][int(kind)]
        assert seen["images"][i] == given["images"]
        assert seen["audios"][i] == given["audios"]
        assert seen["prompts"][i][0]["content"][-1] == {"type": "text", "text": given["prompt"][0]["content"]}
        assert seen["completions"][i][0]["role"] == "assistant"
        assert (
            tiny.tokenizer().decode(seen["completion_ids"][i], skip_special_tokens=True)
            == (seen["completions"][i][0]["content"])
        )


def test_a_failed_reward_is_missing_and_counted(tmp_path):
    """It does not count as 0 beside another that has a value, and has no advantage."""

    def fails(prompts, completions, **kwargs):
        if "0" in prompts[0]:
            raise RuntimeError("away")
        return [1.0, 3.0]

    def works(prompts, **kwargs):
        return [100.0] * len(prompts)

    trained = text_trainer(tmp_path, [fails, works], shuffle_dataset=False, reward_max_retries=0)
    calls = []
    trained._rewards._runner, submit = trained._rewards._runner, trained._rewards._runner.submit

    def one_by_one(rows, completions, state, groups):
        calls.append(len(rows))
        for i in (0, 2):
            submit(rows[i : i + 2], completions[i : i + 2], state, groups=groups[i : i + 2])

    trained._rewards._runner.submit = one_by_one
    _, output = rollout(trained)
    assert calls == [4]
    assert output["advantages"].tolist() == pytest.approx([0, 0, -0.7071, 0.7071], abs=1e-3)
    metrics = trained._metrics["train"]
    assert metrics["rewards/fails/failed"] == [2]
    assert metrics["reward"] == [102.0]


def test_a_reward_that_keeps_failing_ends_the_run(tmp_path):
    def fails(prompts, **kwargs):
        raise RuntimeError("away")

    trained = text_trainer(tmp_path, fails, reward_max_retries=0)
    with pytest.raises(RewardError, match="fails"):
        rollout(trained)


def test_asynchronous_rewards_and_what_rewards_log(tmp_path):
    async def slow(prompts, log_metric, log_extra, **kwargs):
        log_metric("length", 7.0)
        log_extra("note", [f"of {prompt}" for prompt in prompts])
        return [float(i) for i in range(len(prompts))]

    trained = text_trainer(tmp_path, slow)
    batch, _ = rollout(trained)
    assert trained._metrics["train"]["length"] == [7.0]
    assert list(trained._logs["extra"]["note"]) == [f"of {row['prompt']}" for row in batch]


def test_text_rewards_of_trl(tmp_path):
    reward = trl.rewards.get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)
    trained = text_trainer(tmp_path, reward)
    _, output = rollout(trained)
    lengths = output["completion_mask"].sum(1).float()
    expected = torch.where(lengths <= 2, 0.0, (2 - lengths) / 2)
    assert trained._metrics["train"]["reward"] == [pytest.approx(expected.mean().item())]


def test_a_model_as_reward_beside_a_function(tmp_path):
    torch.manual_seed(0)
    config = tiny.language_model().config
    config.num_labels = 1
    judge = Qwen3ForSequenceClassification(config)
    judge.config._name_or_path = "judge"
    rewards = [judge, chats.vowels]
    classes = [tiny.tokenizer(), None]
    trained = text_trainer(tmp_path, rewards, reward_weights=[1.0, 0.5], reward_processing_classes=classes)
    rollout(trained)
    assert trained.reward_func_names == ["judge", "vowels"]
    metrics = trained._metrics["train"]
    both = metrics["rewards/judge/mean"][0] + 0.5 * metrics["rewards/vowels/mean"][0]
    assert metrics["reward"] == [pytest.approx(both, abs=1e-5)]
    assert rewards == [judge, chats.vowels]  # the list of the caller


@pytest.mark.parametrize(
    ("model", "processing_class"), [(tiny.language_model, tiny.tokenizer), (tiny.thinker, tiny.processor)]
)
def test_models_that_read_texts_are_given_texts_in_the_place_of_parts(model, processing_class, tmp_path):
    """Chat templates such as that of Qwen3 leave out a content that is no text."""
    reading, writing = tiny.tokenizer(), processing_class()
    reading.chat_template = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
    if model is tiny.language_model:
        writing.chat_template = reading.chat_template
    judge, read = Qwen3ForSequenceClassification(tiny.language_model().config), []
    judge.register_forward_pre_hook(lambda module, args, inputs: read.extend(inputs["input_ids"]), with_kwargs=True)
    parts = [{"type": "text", "text": "Why "}, {"type": "text", "text": "so?"}]
    classes = {"processing_class": writing, "reward_processing_classes": [reading]}
    rows = [{"prompt": [{"role": "user", "content": parts}]}] * 2
    _, output = rollout(text_trainer(tmp_path, [judge], rows, model=model(), **classes))
    assert all(reading.decode(ids).startswith("Why so?") for ids in read)
    assert all("Why so?" in reading.decode(ids) for ids in output["prompt_ids"])


def test_a_watched_function_beside_a_model(tmp_path):
    judge = Qwen3ForSequenceClassification(tiny.language_model().config)
    given = {"reward_weights": [1.0, 0.0], "reward_processing_classes": [tiny.tokenizer(), None]}
    trained = text_trainer(tmp_path, [judge, chats.vowels], **given)
    assert trained._rewards._runner.watched == [True]
    with pytest.raises(InputError, match="at least one of them not 0"):
        text_trainer(tmp_path, [judge, chats.vowels], **given | {"reward_weights": [0.0, 0.0]})


def test_groups_that_are_compared_are_whole_on_each_process(tmp_path, monkeypatch):
    compared = groupwise(lambda completions, **kwargs: [0.0] * len(completions))
    trained = text_trainer(
        tmp_path, compared, per_device_train_batch_size=2, steps_per_generation=2, num_generations=4
    )
    trained.model.eval()
    trained.num_generations_eval, trained._given = 3, [{}] * 2
    with pytest.raises(
        InputError, match=r"2 answers a process are no whole groups of 3: use a multiple of 3 as per_dev"
    ):
        trained._calculate_rewards([{"prompt": ""}] * 2, [""] * 2, [""] * 2, [[0]] * 2)
    monkeypatch.setattr(GSPOConfig, "world_size", 2)
    with pytest.raises(
        InputError, match=r"reward 'lambda' .* no whole groups of 4: use generation_batch_size=8 in the"
    ):
        text_trainer(tmp_path, compared, per_device_train_batch_size=2, steps_per_generation=1, num_generations=4)


def test_rewards_by_path_and_by_name(tmp_path):
    trained = text_trainer(tmp_path, ["tests.omni.chats:vowels"])
    assert trained.reward_func_names == ["vowels"]
    with pytest.raises(InputError, match=r"unknown reward 'brightnes': did you mean 'brightness'"):
        text_trainer(tmp_path, "brightnes")
    with pytest.raises(InputError, match="a reward looks at latents, which texts have not"):
        text_trainer(tmp_path, "latent_scale")


def test_the_control_gives_advantages_to_other_answers(tmp_path):
    outputs = []
    for shuffled in (False, True):
        trained = text_trainer(
            tmp_path, chats.vowels, shuffle_advantages=shuffled, num_generations=4, steps_per_generation=4
        )
        torch.manual_seed(3)
        outputs.append(rollout(trained)[1]["advantages"])
    plain, shuffled = outputs
    assert sorted(plain.tolist()) == sorted(shuffled.tolist())
    assert plain.tolist() != shuffled.tolist()


# Data


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (
            {"images": ["missing.png"]},
            "Image 0 of row 1 of train_dataset is the file missing.png, which does not exist",
        ),
        ({"audios": [{"bytes": b"RIFF", "path": None}]}, "Audio 0 of row 1 of train_dataset is no"),
        ({"images": []}, r"Row 1 of train_dataset has 1 place\(s\) for image in its messages and 0 in the column"),
    ],
)
def test_bad_rows_are_named(broken, sentence, tmp_path):
    content = [{"type": "text", "text": "x"}] + ([{"type": "image"}] if broken == {"images": []} else [])
    good = {"prompt": [{"role": "user", "content": [{"type": "text", "text": "y"}]}]}
    rows = [good, {"prompt": [{"role": "user", "content": content}], **broken}]
    empty = {name: [] for row in rows for name in row if name != "prompt"}
    trained = chats.trainer(tmp_path, datasets.Dataset.from_list([empty | row for row in rows]))
    with pytest.raises(InputError, match=sentence):
        rollout(trained)


def test_media_for_a_language_model(tmp_path):
    rows = [chats.chat("x", [chats.png("red")])]
    with pytest.raises(
        InputError, match=r"Row 0 of train_dataset has media \(image\), but processing_class is a token"
    ):
        rollout(text_trainer(tmp_path, chats.vowels, rows * 2))


def test_sounds_for_a_model_that_hears_nothing(tmp_path):
    rows = datasets.Dataset.from_list([chats.chat("x", audios=[chats.tone(300)])] * 2)
    trained = chats.trainer(
        tmp_path, rows, tiny.vision_language_model(), processing_class=tiny.vision_language_processor()
    )
    with pytest.raises(InputError, match="Row 0 of train_dataset has sounds, but the model's processor takes none"):
        rollout(trained)


def test_streams_have_numbers_too(tmp_path):
    rows = datasets.Dataset.from_list(chats.ROWS["mixed"]).to_iterable_dataset()
    trained = chats.trainer(tmp_path, rows, shuffle_dataset=False)
    _, output = rollout(trained)
    assert [bool(media) for media in output["media"]] == [False, False, True, True]


@pytest.mark.slow
def test_rollouts_of_a_function_have_pictures_alone(tmp_path):
    """TRL takes pictures as datasets decodes them, and would leave out sounds and videos."""
    processor = tiny.vision_language_processor()

    def rollout_func(prompts, trainer):
        ids = processor.apply_chat_template(prompts, add_generation_prompt=True, tokenize=True, return_dict=True)
        answers = {"completion_ids": [[65, 66], [67]] * (len(prompts) // 2), "logprobs": [[-1.0, -1.0], [-1.0]] * 2}
        return {"prompt_ids": ids["input_ids"], **answers}

    given = {"model": tiny.vision_language_model(), "processing_class": processor, "rollout_func": rollout_func}
    given |= {"reward_funcs": chats.vowels, "args": GSPOConfig(**chats.options(tmp_path))}
    prompt = [{"role": "user", "content": "See"}]
    pictures = [{"prompt": prompt, "images": [Image.new("RGB", (24, 24), colour)]} for colour in ("red", "blue")]
    trained = chats.GSPOTrainer(train_dataset=datasets.Dataset.from_list(pictures), **given)
    trained.train()
    assert chats.logged(trained, "ratio/mean")[0] == pytest.approx(1, abs=1e-6)
    assert chats.logged(trained, "grad_norm")[0] > 0
    trained = chats.GSPOTrainer(train_dataset=chats.dataset("audio"), **given)
    with pytest.raises(InputError, match=r"Row \d of train_dataset has audios, but tools, .* takes pictures only"):
        trained.train()


def test_evaluation_with_other_rows(tmp_path):
    trained = chats.trainer(
        tmp_path, eval_dataset={"heard": chats.dataset("audio")}, per_device_eval_batch_size=2, max_steps=2,
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    trained.train()
    assert len(chats.logged(trained, "eval_reward")) == 2
    assert chats.logged(trained, "eval_ratio/mean") == [1.0, 1.0]


# Options and models


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"importance_sampling_level": "tokens"},
            r"importance_sampling_level='tokens' is unknown: use one of 'sequence'",
        ),
        ({"loss_type": "gspo"}, r"loss_type='gspo' is unknown: use one of 'grpo'"),
        ({"epsilon": 0.0}, r"epsilon=0.0 must be above 0: use 3e-4"),
        ({"router_aux_loss_coef": -0.1}, r"router_aux_loss_coef=-0.1 must be at least 0: use 0.001, or 0.0"),
    ],
)
def test_options_that_cannot_be(options, sentence, tmp_path):
    with pytest.raises(InputError, match=sentence):
        GSPOConfig(**chats.options(tmp_path, **options))


def test_a_dataset_that_is_smaller_than_a_rollout(tmp_path):
    """TRL leaves out what fills none, and would end at once."""
    with pytest.raises(
        InputError, match=r"train_dataset has 2 rows and a rollout takes 4 of them.*: use generation_batch_size=4"
    ):
        text_trainer(tmp_path, chats.vowels, steps_per_generation=4)


def test_a_rollout_is_used_for_four_updates(tmp_path):
    plain = chats.options(tmp_path, gradient_accumulation_steps=3) | {"steps_per_generation": None}
    assert GSPOConfig(**plain).steps_per_generation == 12
    assert GSPOConfig(**plain | {"generation_batch_size": 8}).steps_per_generation == 4
    assert GSPOConfig(**plain | {"steps_per_generation": 5}).steps_per_generation == 5


def test_a_config_of_trl(tmp_path):
    with pytest.raises(InputError, match=r"args is a GRPOConfig: use GSPOConfig\(output_dir='out'\)"):
        chats.GSPOTrainer(tiny.thinker(), chats.vowels, GRPOConfig(str(tmp_path), use_cpu=True, bf16=False))


def test_the_limits_of_videos(tmp_path):
    with pytest.raises(InputError, match="video_max_frames=1 must be at least 2"):
        chats.trainer(tmp_path, video_max_frames=1)


@pytest.mark.slow
def test_a_reference_of_a_thinker_needs_an_adapter(tmp_path):
    tiny.save_full(tmp_path / "whole")
    for model in (str(tmp_path / "whole"), load_thinker(str(tmp_path / "whole")), tiny.thinker()):
        with pytest.raises(InputError, match=r"beta=0.1 compares with the model at the start, .* give a peft_config"):
            chats.trainer(tmp_path, model=model, beta=0.1)
    adapted = chats.trainer(
        tmp_path, model=str(tmp_path / "whole"), beta=0.1, peft_config=LoraConfig(r=2, target_modules=["q_proj"])
    )
    adapted.train()
    assert chats.logged(adapted, "kl")[0] == pytest.approx(0, abs=1e-6)
    assert chats.logged(adapted, "kl")[1] > 0


@pytest.mark.slow
def test_the_processor_is_of_the_revision_of_the_weights(tmp_path, monkeypatch):
    tiny.save_full(tmp_path / "whole")
    asked = []
    monkeypatch.setattr(
        transformers.AutoProcessor, "from_pretrained", lambda *_, **k: asked.append(k) or tiny.processor()
    )
    given = {"model_init_kwargs": {"revision": "v2"}, "processing_class": None}
    chats.trainer(tmp_path, model=str(tmp_path / "whole"), **given)
    assert [given["revision"] for given in asked] == ["v2"]


def test_the_engine_of_trl_is_given_pictures_alone(tmp_path):
    trained = chats.trainer(tmp_path)
    trained._batch_rows = [chats.read_row(row, f"row {i}") for i, row in enumerate(chats.ROWS["image"])]
    assert [[image.size for image in images] for images in trained._pictures()] == [[(24, 24)], [(24, 24), (40, 16)]]
    trained._batch_rows = [chats.read_row(row, f"row {i}") for i, row in enumerate(chats.ROWS["mixed"])]
    with pytest.raises(
        InputError, match=r"Row 2 has video, but use_vllm=True is TRL's engine, which is given pictures"
    ):
        trained._pictures()


def test_continuous_batching_is_for_text(tmp_path):
    with pytest.raises(InputError, match=r"give processing_class=processor\.tokenizer where all rows are text"):
        chats.trainer(tmp_path, use_transformers_continuous_batching=True)


@pytest.mark.compat
def test_old_versions_of_transformers_train_language_models_and_say_what_the_thinker_needs(tmp_path):
    parted = version.parse(transformers.__version__) >= version.parse("5.21")
    for model, processing_class in ((tiny.language_model(), tiny.tokenizer()), (tiny.thinker(), tiny.processor())):
        given = {"model": model, "processing_class": processing_class, "max_steps": 1}
        if parted or isinstance(processing_class, PreTrainedTokenizerBase):
            trained = chats.trainer(tmp_path, "text", **given)
            trained.train()
            assert chats.logged(trained, "ratio/mean") == [pytest.approx(1, abs=1e-6)]
        else:
            with pytest.raises(
                InputError, match=r"is not parted into a body and a head: pip install 'transformers>=5"
            ):
                chats.trainer(tmp_path, "text", **given)
