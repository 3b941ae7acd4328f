# SPDX-License-Identifier: Apache-2.0
"""Whatever a user can get wrong when a trainer is made raises then: one sentence that names a value that works."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from transformers import TrainingArguments

from omnitrl.errors import InputError
from omnitrl.models import load_flow_model
from omnitrl.trainer import TRAINERS, FlowGRPOTrainer, get_trainer
from tests.tiny_models import tiny_model, tiny_sd3
from tests.trainer.helpers import LORA, WITH_REPLAY, WITH_ROLLOUTS, brightness, config, trainer


ROOT = Path(__file__).parents[2]


def refused(make, message):
    """That `make` raises one line, of a kind that the command line prints without a traceback."""
    with pytest.raises(InputError, match=message) as error:
        make()
    assert "\n" not in str(error.value)
    assert str(error.value).endswith((".", "?"))


# Models


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    tiny_sd3().save_pretrained(folder)
    return folder


@pytest.fixture
def copy_of(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "copy")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/folder", "There is no folder '/no/such/folder': check the path, or pass a Hub id"),
        ("./no/such/folder", "There is no folder './no/such/folder'"),
        (
            "nobody/nothing",
            "'nobody/nothing' is not in the local cache and the Hub cannot be reached: connect once and",
        ),
        ("no id at all!", "'no id at all!' is neither a folder here nor a repository on the Hub"),
        (5, "model is of type int: pass a Hub id, a folder, a loaded diffusers pipeline or a `FlowModel`"),
        (torch.nn.Linear(1, 1), "model is of type Linear: pass a Hub id"),
    ],
)
def test_a_model_that_is_not_there(tmp_path, model, message):
    refused(lambda: trainer(tmp_path, model=model), message)


def test_a_folder_that_is_no_pipeline(tmp_path):
    refused(
        lambda: trainer(tmp_path, model=str(tmp_path)), "is a folder without model_index.json, so it is no diffusers"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"_class_name": "KandinskyPipeline"}',
            "'KandinskyPipeline', a family .* not know. Known are: .*Diffusion3Pipeline",
        ),
        ("{", r"model_index.json is no JSON \(.*\): download the checkpoint again"),
        ("{}", r"names no pipeline class \(_class_name\)"),
    ],
)
def test_an_index_that_helps_nobody(tmp_path, text, message):
    (tmp_path / "model_index.json").write_text(text)
    refused(lambda: trainer(tmp_path, model=str(tmp_path)), message)


@pytest.mark.compat
@pytest.mark.parametrize(
    "missing",
    ["transformer/diffusion_pytorch_model.safetensors", "transformer", "scheduler", "text_encoder/model.safetensors"],
)
def test_a_folder_without_a_part_of_the_pipeline(copy_of, missing):
    path = copy_of / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    refused(
        lambda: load_flow_model(copy_of), "The weights of '.*' cannot be loaded .*check that the folder holds each"
    )


def test_a_download_that_was_cut_off(copy_of):
    weights = copy_of / "transformer" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused(lambda: load_flow_model(copy_of), "cannot be loaded .*or download the checkpoint again")


def test_arguments_of_loading_for_what_is_loaded(tmp_path):
    refused(
        lambda: trainer(tmp_path, model_init_kwargs={"revision": "main"}),
        r"model_init_kwargs=\{'revision': 'main'\} apply when a checkpoint is loaded, but model is a SD3Model",
    )


@pytest.mark.slow
def test_a_hub_id_without_a_network():
    code = (
        "from omnitrl.models import load_flow_model\n"
        "try: load_flow_model('nobody/nothing')\n"
        "except ValueError as error: print(error)"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert re.fullmatch(
        "'nobody/nothing' is not in the local cache and the Hub cannot be reached: connect once and run `hf download "
        "nobody/nothing`, or pass a local folder.",
        done.stdout.strip(),
    ), done.stderr


# Adapters


@pytest.mark.compat
@pytest.mark.parametrize("peft_config", [LORA, None])
def test_a_pipeline_with_lora_weights(tmp_path, peft_config):
    pipeline = tiny_sd3()
    pipeline.transformer.add_adapter(LoraConfig(target_modules=["to_q"]))
    refused(
        lambda: trainer(tmp_path, model=pipeline, peft_config=peft_config),
        r"transformer has LoRA weights loaded: merge them first with `pipeline.fuse_lora\(\)`",
    )


@pytest.mark.compat
def test_what_the_message_about_lora_weights_says_works(tmp_path):
    pipeline = tiny_sd3()
    before = pipeline.transformer.transformer_blocks[0].attn.to_q.weight.clone()
    pipeline.transformer.add_adapter(LoraConfig(target_modules=["to_q"], init_lora_weights=False))
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    run = trainer(tmp_path, model=pipeline, max_steps=1)
    run.train()
    after = run.flow_model.transformer.base_model.model.transformer_blocks[0].attn.to_q.base_layer.weight
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("peft_config", "message"),
    [
        (
            LoraConfig(target_modules=["q_proj"]),
            r"names \['q_proj'\], which SD3Transformer2DModel does not have: .*attn.to_q",
        ),
        (LoraConfig(target_modules=["to_q", "to_x"]), r"names \['to_x'\]"),
        (LoraConfig(target_modules=".*nothing"), r"names \['.\*nothing'\]"),
        (
            LoraConfig(lora_dropout=0.1),
            "lora_dropout=0.1 makes a replay differ from its rollout.*use lora_dropout=0.0",
        ),
        (
            LoraConfig(init_lora_weights="pissa"),
            "init_lora_weights='pissa' changes the weights below.* Use .*gaussian",
        ),
        (LoraConfig(task_type="CAUSAL_LM"), "task_type=CAUSAL_LM is for language models: leave it None"),
        (LoraConfig(inference_mode=True), "No weight is trainable: check `target_modules` and `inference_mode`"),
        ({"r": 4}, "peft_config is a dict: pass a `LoraConfig`, a folder or Hub id"),
        ("nobody/nothing", "No adapter can be loaded from peft_config='nobody/nothing'.*or a `LoraConfig`"),
    ],
)
def test_adapters_that_cannot_be(tmp_path, peft_config, message):
    refused(lambda: trainer(tmp_path, peft_config=peft_config), message)


def test_targets_by_expression_and_by_name_are_taken(tmp_path):
    named = trainer(tmp_path, peft_config=LoraConfig(r=2, target_modules=["attn.to_q"]))
    by_expression = trainer(tmp_path, peft_config=LoraConfig(r=2, target_modules=r".*\.attn\.to_q"))
    assert [p.shape for p in named.trainable_parameters()] == [p.shape for p in by_expression.trainable_parameters()]
    assert len(named.trainable_parameters()) == 4


def test_a_second_adapter(tmp_path):
    model = tiny_model()
    trainer(tmp_path, model=model)
    refused(lambda: trainer(tmp_path, model=model), "transformer is a PeftModel already: leave peft_config out")
    assert len(trainer(tmp_path, model=model, peft_config=None).trainable_parameters()) == 30


# Sizes of groups and batches


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_generations": 1},
            "num_generations=1 must be at least 2 .a group of one has no baseline .*: use num_gen",
        ),
        (
            {"num_generations": 3, "generation_batch_size": 16},
            "^num_generations=3 needs a rollout batch that is a multiple of 3, got 16 .*: use 15 or 18, or .*=2",
        ),
        (
            {"generation_batch_size": 12, "per_device_train_batch_size": 8},
            "generation_batch_size=12 must be a multiple of per_device_train_batch_size × devices = 8 × 1 = 8: use 16",
        ),
        (
            {"generation_batch_size": 8, "steps_per_generation": 4},
            "steps_per_generation=4 and generation_batch_size=8 disagree .the latter means 2.: give one of them",
        ),
        (
            {"gradient_accumulation_steps": 3, "generation_batch_size": 16},
            "gradient_accumulation_steps=3 must divide, or be a multiple of, steps_per_generation × .* = 4.*: use 1",
        ),
        ({"generation_batch_size": 0}, "generation_batch_size=0 must be at least 1"),
        ({"generation_batch_size": None, "steps_per_generation": 0}, "steps_per_generation=0 must be at least 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be at least 1"),
        ({"per_device_train_batch_size": 0}, "per_device_train_batch_size=0 must be at least 1"),
        ({"rollout_batch_size": 0}, "rollout_batch_size=0 must be at least 1"),
        ({"num_generations_eval": 0}, "num_generations_eval=0 must be at least 1"),
        ({"num_iterations": 0}, "num_iterations=0 must be at least 1"),
        ({"timesteps_per_forward": 0}, "timesteps_per_forward=0 must be at least 1"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size would change the groups"),
    ],
)
def test_sizes_that_do_not_fit(tmp_path, options, message):
    refused(lambda: config(tmp_path, **options), message)


@pytest.mark.parametrize("field", ["generation_batch_size", "num_generations"])
def test_the_sizes_that_the_message_names_work(tmp_path, field):
    options = {"num_generations": 3, "generation_batch_size": 16, "per_device_train_batch_size": 1}
    with pytest.raises(InputError) as error:
        config(tmp_path, **options)
    numbers = {"generation_batch_size": r"use (\d+) or (\d+)", "num_generations": r"or num_generations=(\d+)"}[field]
    for number in re.search(numbers, str(error.value)).groups():
        args = config(tmp_path, **{**options, field: int(number)})
        assert args.generation_batch_size % args.num_generations == 0


# Sampling


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sde_window_strategy": "first", "sde_window_size": 7},
            r"sde_window_size=7 does not fit steps 0\.\.2.*use 1 to 3",
        ),
        ({"sde_window_range": [5, 9]}, r"sde_window_range=\(5, 9\) holds none of the steps 0\.\.2 .*use \(0, 3\)"),
        (
            {"sde_window_range": [2, 9]},
            r"sde_window_range=\[2, 9\] goes beyond the 4 sampler steps: use \[2, 3\], as the last",
        ),
        ({"sde_window_range": [-1, 3]}, r"sde_window_range=\(-1, 3\) holds none of the steps 0\.\.2 .*use \(0, 3\)"),
        ({"sde_window_range": [5]}, r"sde_window_range=\[5\] must be a start and an end: use 0 5"),
        ({"sde_window_strategy": "random"}, "'random' needs the size of the window: set sde_window_size=2"),
        ({"sde_window_size": 2}, "sde_window_size=2 has no meaning for sde_window_strategy='all'"),
        ({"num_inference_steps": 1}, "num_inference_steps=1 must be at least 2"),
        ({"timestep_fraction": 0.0}, r"timestep_fraction=0.0 must be in \(0, 1\]: use 1.0"),
        ({"noise_level": 0.0}, "noise_level=0.0 makes rollouts deterministic.*such as 0.7"),
        ({"guidance_scale": -1.0}, "guidance_scale=-1.0 must be at least 0"),
        ({"max_sequence_length": 0}, "max_sequence_length=0 must be at least 1"),
    ],
)
def test_windows_and_steps_that_cannot_be(tmp_path, options, message):
    refused(lambda: config(tmp_path, **options), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 65}, "height=65 does not fit this checkpoint: it takes multiples of 8 up to 128, .* height=64"),
        ({"height": 1000}, "height=1000 .* height=128"),
        ({"width": -8}, "width=-8 .* width=8"),
        ({"width": 69}, "width=69 .* width=72"),
    ],
)
def test_a_size_that_the_decoder_cannot_make(tmp_path, options, message):
    refused(lambda: trainer(tmp_path, **options), message)


def test_a_size_that_is_not_square_is_made(tmp_path):
    run = trainer(tmp_path, height=64, width=96, data=["a cat"], eval_dataset=["a cat"])
    sizes = []
    decode = run.flow_model.decode
    run.flow_model.decode = lambda *args: [sizes.append(image.size) or image for image in decode(*args)]
    run.evaluate()
    assert sizes == [(96, 64)]


# Names


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"sde_type": "flow_sd"},
            "sde_type='flow_sd' is unknown: use one of 'flow_sde', 'dance_sde', 'cps'. Did you mean 'flow_sde'",
        ),
        ({"sde_type": "ode"}, "sde_type='ode' is unknown: use one of 'flow_sde', 'dance_sde', 'cps'"),
        ({"sde_window_strategy": "rand"}, "Did you mean 'random'"),
        ({"kl_form": "exac"}, "kl_form='exac' is unknown: use one of .*Did you mean 'exact'"),
        ({"scale_rewards": "groups"}, "Did you mean 'group'"),
        ({"multi_objective_aggregation": "sum"}, "use one of 'sum_then_normalize', 'normalize_then_sum'"),
        ({"log_prob_form": "gauss"}, "Did you mean 'gaussian'"),
        ({"log_prob_reduction": "man"}, "Did you mean 'mean'"),
        ({"rollout_engine": "locl"}, "Did you mean 'local'"),
    ],
)
def test_unknown_names_list_the_known_ones(tmp_path, options, message):
    refused(lambda: config(tmp_path, **options), message)


# Every algorithm

# Texts that are no names.
FREE = {"control_word_format"}


def names_of(algorithm):
    """Options of an algorithm, beyond those of the Trainer, whose value is one of some names."""
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    ours = [field for field in dataclasses.fields(get_trainer(algorithm).config_class) if field.name not in inherited]
    return [field.name for field in ours if field.type == "str" and field.name not in FREE]


@pytest.mark.parametrize(("algorithm", "option"), [(a, option) for a in TRAINERS for option in names_of(a)])
def test_every_name_that_is_unknown_lists_those_that_are_known(tmp_path, algorithm, option):
    with pytest.raises(InputError, match=rf"^{option}='xyzzy' is unknown: use one of '.+'\.$") as error:
        config(tmp_path, algorithm, **{option: "xyzzy"})
    listed = re.findall("'([^']+)'", str(error.value).split("use one of ")[1])
    assert getattr(config(tmp_path, algorithm), option) in listed


def test_losses_transitions_and_divergences_are_among_the_names():
    found = {option for algorithm in TRAINERS for option in names_of(algorithm)}
    assert {"sde_type", "kl_form", "loss_type", "distillation_form", "sde_window_strategy", "ode_solver"} <= found


@pytest.mark.parametrize("algorithm", WITH_REPLAY)
@pytest.mark.parametrize("bounds", [[3, 5], [4, 9], [-1, 3], [2, 2]])
def test_windows_outside_the_schedule_are_refused_with_bounds_that_work(tmp_path, algorithm, bounds):
    options = {"sde_window_strategy": "first", "sde_window_size": 1}
    with pytest.raises(InputError, match=r"^sde_window_range=") as error:
        config(tmp_path, algorithm, sde_window_range=bounds, **options)
    works = [int(bound) for bound in re.search(r"use [(\[](\d), (\d)", str(error.value)).groups()]
    assert config(tmp_path, algorithm, sde_window_range=works, **options).window(0)[0] == works[0]


COMPARING = [name for name in WITH_ROLLOUTS if get_trainer(name).config_class._at_least["num_generations"] > 1]


def test_all_but_those_that_compare_nothing_need_groups():
    assert set(WITH_ROLLOUTS) - set(COMPARING) == {"srpo", "diffusion_opd"} & set(WITH_ROLLOUTS)


@pytest.mark.parametrize("algorithm", COMPARING)
def test_a_group_of_one_is_refused(tmp_path, algorithm):
    refused(
        lambda: config(tmp_path, algorithm, num_generations=1, generation_batch_size=8),
        "num_generations=1 must be at least 2 .a group of one has no baseline to compare with.: use num_generations=2",
    )


@pytest.mark.parametrize("algorithm", WITH_ROLLOUTS)
def test_a_group_size_that_does_not_divide_the_rollout_is_refused_with_sizes_that_work(tmp_path, algorithm):
    options = {"num_generations": 5, "per_device_train_batch_size": 1}
    with pytest.raises(
        InputError, match="num_generations=5 needs a rollout batch that is a multiple of 5, got 8"
    ) as e:
        config(tmp_path, algorithm, generation_batch_size=8, **options)
    for size in re.search(r"use (\d+) or (\d+)", str(e.value)).groups():
        assert config(tmp_path, algorithm, generation_batch_size=int(size), **options).generation_batch_size % 5 == 0


@pytest.mark.parametrize("algorithm", WITH_REPLAY)
@pytest.mark.parametrize("form", ["exact", "flow_grpo"])
def test_cps_has_no_density_at_noise_level_0(tmp_path, algorithm, form):
    """Where the last step is asked for by name; without a KL, or with that of velocities, it is left out."""
    fields = {field.name for field in dataclasses.fields(get_trainer(algorithm).config_class)}
    (option,) = {"kl_form", "distillation_form"} & fields
    weight = {"beta": 0.1} if option == "kl_form" else {}
    common = {"sde_type": "cps", "noise_level": 0.5, **weight}
    asked = {"sde_window_strategy": "first", "sde_window_size": 2, "sde_window_range": [1, 4]}
    refused(
        lambda: config(tmp_path, algorithm, **common, **asked, **{option: form}),
        rf"^{option}='{form}' needs the density of each step that sde_window_range=\[1, 4\] names, which the last "
        rf"step of sde_type='cps' does not have at noise level 0: use \[1, 3\], or {option}='velocity'",
    )
    works = config(tmp_path, algorithm, **common, **{**asked, "sde_window_range": [1, 3]}, **{option: form})
    assert works.window(0) == (1, 2)
    assert config(tmp_path, algorithm, **common, **asked, **{option: "velocity"}).window(0) == (1, 2)
    if weight:
        assert config(tmp_path, algorithm, **{**common, "beta": 0.0}, **asked, **{option: form}).window(0) == (1, 2)


# Optimisation


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"max_steps": 0},
            "max_steps=0 with num_train_epochs=3.0 says of no length how long to train: use max_steps=100",
        ),
        ({"max_steps": -2}, "max_steps=-2 with"),
        ({"max_steps": -1, "num_train_epochs": 0}, "max_steps=-1 with num_train_epochs=0"),
        ({"beta": -1.0}, "beta=-1.0 must not be negative: use 0"),
        ({"epsilon": 0.0}, "epsilon=0.0 must be above 0: use 1e-4"),
        ({"epsilon_high": 0.0}, "epsilon_high=0.0 must be above 0"),
        ({"ema_decay": 1.0}, r"ema_decay=1.0 must be in \[0, 1\): use 0.9"),
        ({"advantage_ddof": 4}, "advantage_ddof=4 must be 0 .population. or 1 .sample.: use 0"),
        ({"advantage_eps": -1.0}, "advantage_eps=-1.0 must be at least 0"),
        ({"advantage_clip": 0.0}, "advantage_clip=0.0 must be above 0: use 5.0"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"num_samples_to_save": -1}, "num_samples_to_save=-1 must be at least 0"),
    ],
)
def test_numbers_out_of_range(tmp_path, options, message):
    refused(lambda: config(tmp_path, **options), message)


def test_arguments_of_another_trainer(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    refused(
        lambda: FlowGRPOTrainer(tiny_model(), brightness, args), "FlowGRPOTrainer takes a FlowGRPOConfig, got Training"
    )


# Data and rewards


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            [{"caption": "a cat"}],
            r"no column 'prompt', it has \['caption'\]: .*rename_column\(\"caption\", \"prompt\"\)",
        ),
        ([], "has no rows: give at least one prompt"),
        (["a cat", " "], r"blank prompt in row 1 \(counted from 0\)"),
        (
            "a cat on a mat",
            r"neither a file nor the id of a dataset on the Hub: .*load_prompts\(\['a cat on a mat'\]\)",
        ),
        (5, "Prompts can be a datasets.Dataset, a list of strings"),
    ],
)
@pytest.mark.parametrize("split", ["data", "eval_dataset"])
def test_prompts_that_cannot_be_used(tmp_path, split, data, message):
    refused(lambda: trainer(tmp_path, **{split: data}), message)


def test_a_named_set_that_cannot_be_used(tmp_path):
    refused(lambda: trainer(tmp_path, eval_dataset={"good": ["a cat"], "bad": []}), "has no rows")


def test_no_prompts_at_all(tmp_path):
    run = FlowGRPOTrainer(tiny_model(), brightness, config(tmp_path))
    refused(run.train, "Training needs a train_dataset with a column 'prompt'")
    refused(run.evaluate, "Evaluation needs an eval_dataset with a column 'prompt'")


@pytest.mark.parametrize("options", [{"eval_strategy": "steps", "eval_steps": 1}, {"eval_on_start": True}])
def test_evaluation_of_nothing(tmp_path, options):
    refused(lambda: trainer(tmp_path, **options), "ask for evaluation, but there is no eval_dataset: pass one, or use")


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        (
            brightness,
            {"reward_weights": [1.0, 2.0]},
            r"got 2 reward weights for 1 reward functions \(brightness\).*\[1.0\]",
        ),
        (brightness, {"reward_weights": [0.0]}, "at least one of them not 0"),
        ([], {}, "reward_funcs is empty: give at least one reward"),
        ("ocrr", {}, "unknown reward 'ocrr': did you mean 'ocr'"),
        ("no.such:thing", {}, "there is no module 'no' to import"),
        (brightness, {"reward_timeout": -1.0}, "timeout=-1.0 must be more than 0 seconds"),
        (brightness, {"reward_max_retries": -1}, "max_retries=-1 must be at least 0"),
        (brightness, {"reward_max_failed_fraction": 2.0}, "max_failed_fraction=2.0 must be between 0 and 1"),
    ],
)
def test_rewards_that_cannot_be_called(tmp_path, rewards, options, message):
    with pytest.raises(InputError, match=message):
        trainer(tmp_path, rewards=rewards, **options)


def test_a_reward_that_is_no_reward(tmp_path):
    with pytest.raises(TypeError, match="a reward must be callable or a string, got 3 of type int"):
        trainer(tmp_path, rewards=3)


def test_a_column_with_the_name_of_an_argument(tmp_path):
    data = [{"prompt": "a cat", "completions": "x"}] * 2
    refused(trainer(tmp_path, data=data).train, "'completions' has the name of an argument.*'completions_column'")
