# SPDX-License-Identifier: Apache-2.0
"""Options, metrics and trainers are documented: each that exists, and none that does not."""

import ast
import dataclasses
import json
import math
import re
from functools import partial
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from transformers import TrainingArguments
from trl import DPOConfig, GRPOConfig

from omnitrl.trainer import ALL_TRAINERS, TRAINERS, PolicyGradientTrainer, RolloutTrainer, get_trainer
from omnitrl.trainer.base_config import BaseConfig
from omnitrl.trainer.matching_config import MatchingConfig
from omnitrl.trainer.replay_config import ClippedPolicyConfig, PolicyGradientConfig, ReplayConfig
from omnitrl.trainer.rollout_config import RolloutConfig
from tests.tiny_models import tiny_model
from tests.trainer import helpers


ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "source"
PAGES = sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md"))

# The shared config classes, each with the section of the shared page that has its options.
SECTION_OF = {
    BaseConfig: "Every trainer",
    RolloutConfig: "Rollouts",
    ReplayConfig: "Stochastic steps",
    PolicyGradientConfig: "The policy gradient",
    ClippedPolicyConfig: "The clip of the ratio",
    MatchingConfig: "Noise levels",
}
SHARED = [*SECTION_OF, GRPOConfig, DPOConfig, TrainingArguments]
CONFIGS = {name: get_trainer(name).config_class for name in TRAINERS}
ALL_CONFIGS = [*SECTION_OF, *CONFIGS.values()]


def page(name):
    return (DOCS / f"{name}.md").read_text("utf-8")


def section(text, title):
    """The text below a heading, up to the next one of its level or above."""
    found = re.search(rf"^(#+) {re.escape(title)}$", text, re.MULTILINE)
    assert found, f"there is no section {title!r}"
    rest = text[found.end() :]
    end = re.search(rf"^#{{1,{len(found[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def table_rows(text):
    """Cells of the rows that begin with code."""
    for line in text.splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def documented_options(text):
    """Name → default, of the tables with the head `option | default | meaning`."""
    tables = re.split(r"^(?=\| option \|)", text, flags=re.MULTILINE)
    found = {}
    for table in tables:
        if table.startswith("| option | default | meaning |\n"):
            rows = "\n".join(line for line in table.split("\n\n")[0].splitlines())
            for option, default, *_ in table_rows(rows):
                assert option.strip("`") not in found, f"{option} stands twice"
                found[option.strip("`")] = ast.literal_eval(default.strip("`"))
    return found


def defaults(config_class):
    return {
        field.name: field.default_factory() if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(config_class)
        if (field.default, field.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
    }


def added_or_changed(config_class):
    """Options that a config adds to the nearest shared class, or whose default it changes."""
    nearest = next(parent for parent in config_class.__mro__[1:] if parent in SHARED)
    before = defaults(nearest)
    return {
        name: value for name, value in defaults(config_class).items() if name not in before or before[name] != value
    }


# Options


@pytest.mark.parametrize("config_class", ALL_CONFIGS)
def test_every_option_has_help_in_a_sentence(config_class):
    inherited = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    for field in dataclasses.fields(config_class):
        text = field.metadata["help"]
        if field.name not in inherited or text != inherited[field.name].metadata["help"]:
            assert len(text) > 10, field.name
            assert text.endswith("."), field.name
            assert not text[0].islower(), field.name


@pytest.mark.parametrize("config_class", ALL_CONFIGS)
def test_options_that_take_json_are_listed(config_class):
    """HfArgumentParser hands a dict on the command line over as a string, and only listed fields are parsed."""
    inherited = {field.name for field in dataclasses.fields(TrainingArguments)}
    hints = get_type_hints(config_class)  # the types of the fields themselves are changed by every parser
    ours = {name for name, hint in hints.items() if "dict" in str(hint) and "ClassVar" not in str(hint)} - inherited
    assert "model_init_kwargs" in ours
    assert ours <= set(config_class._VALID_DICT_FIELDS)


def test_an_option_that_takes_json_is_parsed():
    args = CONFIGS["flow_grpo"](output_dir="out", model_init_kwargs='{"revision": "main", "text_encoder_3": null}')
    assert args.model_init_kwargs == {"revision": "main", "text_encoder_3": None}


@pytest.mark.parametrize("config_class", SECTION_OF)
def test_the_shared_page_has_the_options_of_every_shared_class(config_class):
    documented = documented_options(section(page("shared_options"), SECTION_OF[config_class]))
    assert documented == added_or_changed(config_class)


def test_the_shared_page_says_which_trainers_have_a_class():
    lines = page("shared_options").split("\n## ")[0].splitlines()
    for config_class in SECTION_OF:
        (row,) = (line for line in lines if line.startswith(f"| [`{config_class.__name__}`]"))
        cell = row.strip("|").split("|")[2].strip()
        listed = set(re.findall(r"\((\w+)_trainer\.md\)", cell))
        have = {name for name in TRAINERS if issubclass(CONFIGS[name], config_class)}
        assert (set(TRAINERS) - listed if cell.startswith("all") else listed) == have, config_class.__name__


@pytest.mark.parametrize("name", ALL_TRAINERS)
def test_the_page_of_a_trainer_has_the_options_that_it_adds_or_changes(name):
    config_class = get_trainer(name).config_class
    assert documented_options(section(page(f"{name}_trainer"), "Options")) == added_or_changed(config_class)


# Metrics


def log_sharpness(prompts, completions, log_metric, **kwargs):
    log_metric("sharpness", 1.0)
    scores = helpers.brightness(prompts, completions)
    return [math.nan if prompt == "a sky" else score for prompt, score in zip(prompts, scores, strict=True)]


# Options with which all of a policy gradient is logged.
CORRECTED = {"old_log_probs": "recompute", "vllm_importance_sampling_correction": True}


def run(name, folder):
    """Names of all metrics of a short run with every part that logs something, as the pages write them."""
    model = tiny_model()
    needed = helpers.ARGUMENTS[name](model) if name in helpers.ARGUMENTS else {}
    rewards = needed.get("reward_funcs", log_sharpness)
    held_out = {"heldout": ["a sun", "a sky"]}
    if "train_dataset" in needed:
        held_out["rows"] = needed["train_dataset"]  # which may be evaluated otherwise than prompts
    trained = helpers.trainer(
        folder,
        name,
        model,
        rewards,
        max_steps=2,
        ema_decay=0.9,
        save_strategy="steps",
        save_steps=1,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=held_out,
        **({"beta": 0.01} if "beta" in defaults(CONFIGS[name]) else {}),
        **(CORRECTED if issubclass(get_trainer(name), PolicyGradientTrainer) else {}),
    )
    trained.train()
    rows = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
    names = [] if trained.rewards is None else trained.rewards.names
    return {
        re.sub(r"^eval_(heldout_|rows_)?", "eval_", re.sub("|".join(names) or "$^", "{name}", metric))
        for row in rows
        for metric in row
    }


@pytest.fixture(scope="module", params=TRAINERS)
def logged(request, tmp_path_factory):
    return request.param, run(request.param, tmp_path_factory.mktemp(request.param))


def first_cells(text):
    """Metrics that the tables of a text are about; those that a reward records have any name."""
    cells = [row[0] for row in table_rows(text) if "log_metric" not in row[0]]
    return {metric for cell in cells for metric in re.findall(r"`([^`]+)`", cell)}


def sections_that_apply(name):
    """Sections of the shared page whose metrics a trainer logs, all of them."""
    trainer_class = get_trainer(name)
    applies = {
        "Metrics of every trainer": True,
        "Metrics of rollouts": issubclass(trainer_class, RolloutTrainer),
        "Metrics of rewards": issubclass(trainer_class, RolloutTrainer) and trainer_class.scores_rollouts,
        "Metrics of replays": issubclass(trainer_class, PolicyGradientTrainer),
        "Metrics of the clip": issubclass(CONFIGS[name], ClippedPolicyConfig),
        "Metrics of evaluation": trainer_class.needs_rewards,
    }
    return [title for title, does in applies.items() if does]


# Which depend on the reward that a test is run with.
OF_A_REWARD = {"sharpness", "eval_rewards/missing", "eval_rewards/{name}/failed"}


@pytest.mark.slow
def test_every_logged_metric_is_documented(logged):
    name, metrics = logged
    shared = set(re.findall(r"`([^`]+)`", section(page("shared_options"), "Metrics")))
    own = set(re.findall(r"`([^`]+)`", section(page(f"{name}_trainer"), "Logged metrics")))
    assert sorted(metrics - shared - own - OF_A_REWARD) == []


@pytest.mark.slow
def test_every_documented_metric_is_logged(logged):
    name, metrics = logged
    shared = [section(page("shared_options"), title) for title in sections_that_apply(name)]
    own = section(page(f"{name}_trainer"), "Logged metrics")
    documented = set().union(*(first_cells(text) for text in [*shared, own]))
    assert {"loss", "time/save"} <= documented
    assert sorted(documented - metrics - OF_A_REWARD) == []


@pytest.mark.slow
def test_what_depends_on_a_reward_is_logged(tmp_path):
    assert run("flow_grpo", tmp_path) >= OF_A_REWARD


# Network calls

DEFAULTS = ("num_inference_steps", "timesteps_per_sample", "timestep_fraction", "sde_window_size", "beta")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_the_table_of_trainers_counts_network_calls(name, tmp_path):
    """At the options that decide about them, with one update for each rollout."""
    given = defaults(CONFIGS[name])
    group = given.get("num_generations", 1)
    options = {option: given[option] for option in DEFAULTS if option in given}
    batch = {"num_generations": group, "generation_batch_size": group} if "num_generations" in given else {}
    units = 1 if name.endswith("diffusion_dpo") else group
    trained = helpers.trainer(tmp_path, name, max_steps=2, per_device_train_batch_size=units, **batch, **options)
    trained.train()
    row = next(
        line for line in page("index").splitlines() if line.startswith(f"| [{trained._name}]({name}_trainer.md)")
    )
    low, _, high = row.split("|")[5].strip().partition(" to ")
    assert int(low) <= helpers.logged(trained, "forwards_per_sample")[-1] <= int(high or low)


# Pages


@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_still_to_be_filled_in(name):
    assert re.findall(r"^[A-Z_]{5,}$", page(name), re.MULTILINE) == []


# Every trainer has


def locals_of(entries):
    for entry in entries:
        yield from locals_of(entry["sections"]) if "sections" in entry else [entry["local"]]


@pytest.mark.parametrize("name", ALL_TRAINERS)
def test_a_trainer_has_a_page_that_leads_to_what_is_shared(name):
    assert f"{name}_trainer" in set(locals_of(yaml.safe_load((DOCS / "_toctree.yml").read_text("utf-8"))))
    text = page(f"{name}_trainer")
    assert ("(shared_options.md" if name in TRAINERS else "(omni_data.md") in text
    assert f"https://huggingface.co/papers/{get_trainer(name)._paper['id']}" in text
    for documented in (ALL_TRAINERS[name], get_trainer(name).config_class.__name__):
        assert f"[[autodoc]] {documented}\n" in text


@pytest.mark.parametrize("name", ALL_TRAINERS)
def test_a_trainer_is_where_people_look(name):
    link = f"[`{ALL_TRAINERS[name]}`](docs/source/{name}_trainer.md)"
    assert link in (ROOT / "README.md").read_text("utf-8")
    assert f"({name}_trainer.md)" in page("index")
    assert f"`{ALL_TRAINERS[name]}`" in (ROOT / "CHANGELOG.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINERS)
def test_the_quick_start_of_a_trainer_runs(name, tmp_path, monkeypatch):
    """For a step, where the page has more."""
    monkeypatch.chdir(tmp_path)
    code = re.search(r"```python\n(.*?)```", section(page(f"{name}_trainer"), "Quick start"), re.DOTALL)[1]
    shorter, count = re.subn(r"max_steps=\d+", "max_steps=1", code)
    assert count == 1
    made = {}
    exec(compile(shorter, f"{name}_trainer.md", "exec"), made)
    assert type(made["trainer"]) is get_trainer(name)
    assert made["trainer"].state.global_step == 1
    (log,) = [row["grad_norm"] for row in made["trainer"].state.log_history if "grad_norm" in row]
    assert log > 0


def entries_of_the_paper_index():
    """Title → text."""
    return dict(part.split("\n", 1) for part in page("paper_index").split("\n## ")[1:])


@pytest.mark.parametrize("name", ALL_TRAINERS)
def test_the_paper_of_a_trainer_is_in_the_index_with_its_settings(name):
    paper = get_trainer(name)._paper
    entry = entries_of_the_paper_index()[paper["title"]]
    assert f"https://huggingface.co/papers/{paper['id']}" in entry
    assert f"{get_trainer(name).config_class.__name__}(" in entry
    assert f"[`{ALL_TRAINERS[name]}`]" in entry


@pytest.mark.parametrize("title", entries_of_the_paper_index())
def test_the_settings_of_a_paper_make_a_config(title, monkeypatch):
    """They are for eight devices, and are made here on a CPU."""
    classes = {get_trainer(name).config_class.__name__: get_trainer(name).config_class for name in ALL_TRAINERS}
    for config_class in classes.values():
        monkeypatch.setattr(config_class, "world_size", 8)
    on_cpu = {name: partial(config_class, use_cpu=True) for name, config_class in classes.items()}
    made = []
    for block in re.findall(r"^```python\n(.*?)^```$", entries_of_the_paper_index()[title], re.MULTILINE | re.DOTALL):
        code = re.sub(r"^from omnitrl import .*$", "", block, flags=re.MULTILINE)
        names = {}
        exec(compile(code, title, "exec"), dict(on_cpu), names)
        made += [value for value in names.values() if isinstance(value, TrainingArguments)]
    assert made
