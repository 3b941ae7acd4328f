# SPDX-License-Identifier: Apache-2.0
"""`omnitrl quickstart`: teaches the model that ships with the package to spell, on a CPU, in minutes."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from omnitrl.errors import InputError, did_you_mean


# What is evaluated before and after: name of the set -> prefix of its metrics.
SETS = {"heldout": "eval", "train": "eval_train", "unseen": "eval_unseen"}
WHAT = {"heldout": "held-out words", "train": "training words", "unseen": "words never seen"}

# Settings by algorithm: what it takes to learn on this model, as measured (docs/source/quickstart.md). Everything
# else is the trainer's default.
SHARED: dict[str, Any] = {
    "height": 32,
    "width": 64,
    "max_sequence_length": 1,
    "num_inference_steps": 6,
    "num_inference_steps_eval": 6,
    "num_generations_eval": 4,
    "guidance_scale": 1.0,
    "adam_beta2": 0.99,
    "reward_weights": [1.0, 0.0],  # the rate of words that are right is watched, not rewarded
    "logging_steps": 4,
    "eval_steps": 60,
    "save_steps": 60,
    "save_total_limit": 1,
    "report_to": [],
}
# Eight words with 16 pictures each, four updates on them.
ROLLOUTS: dict[str, Any] = {
    "learning_rate": 7e-4,
    "max_steps": 240,
    "num_generations": 16,
    "generation_batch_size": 128,
    "per_device_train_batch_size": 32,
    "rollout_batch_size": 64,
    "timesteps_per_forward": 2,
}
RECIPES: dict[str, dict[str, Any]] = {
    "flow_grpo": {
        **ROLLOUTS,
        "sde_window_strategy": "first",
        "sde_window_size": 2,
        "epsilon": 5e-3,
        "beta": 0.0,
    },
    "mix_grpo": {
        **ROLLOUTS,
        "sde_window_size": 2,
        "sde_window_range": [0, 4],
        "sde_window_interval": 20,
        "shared_prefix": True,
        "epsilon": 5e-3,
    },
    "diffusion_dpo": {
        "learning_rate": 3e-4,
        "max_steps": 60,
        "per_device_train_batch_size": 16,
        "rollout_batch_size": 64,
        "timesteps_per_sample": 2,
        "timesteps_per_forward": 2,
        "eval_steps": 20,
        "save_steps": 20,
    },
    "diffusion_nft": {
        **ROLLOUTS,
        "timesteps_per_sample": 2,
        "mix_beta": 0.1,
        "beta": 0.0,
    },
    "awm": {
        **ROLLOUTS,
        "timesteps_per_sample": 2,
        "timestep_range": [0.2, 0.9],
        "beta": 0.0,
    },
    "online_diffusion_dpo": {
        "learning_rate": 3e-4,
        "max_steps": 120,
        "num_generations": 8,
        "generation_batch_size": 64,
        "per_device_train_batch_size": 8,
        "rollout_batch_size": 64,
        "timesteps_per_sample": 2,
        "timesteps_per_forward": 2,
    },
    "srpo": {
        "learning_rate": 1e-3,
        "max_steps": 60,
        "generation_batch_size": 64,
        "per_device_train_batch_size": 32,
        "rollout_batch_size": 64,
        "branches": ["denoise"],
        "positive_words": None,
        "negative_words": None,
        "align_range": [5, 45],
        "relative_margin": 1.0,
        "reward_weights": None,
        "eval_reward_weights": [1.0, 0.0],
        "eval_steps": 20,
        "save_steps": 20,
    },
    "diffusion_opd": {
        "learning_rate": 1e-3,
        "max_steps": 60,
        "generation_batch_size": 64,
        "per_device_train_batch_size": 32,
        "rollout_batch_size": 64,
        "timesteps_per_forward": 5,
        "eval_steps": 20,
        "save_steps": 20,
    },
    "grpo_guard": {
        **ROLLOUTS,
        "sde_window_strategy": "first",
        "sde_window_size": 2,
        "epsilon": 5e-4,
    },
    "flow_dppo": {
        **ROLLOUTS,
        "sde_window_strategy": "first",
        "sde_window_size": 2,
        "kl_threshold": 3e-4,
    },
    "dance_grpo": {
        **ROLLOUTS,
        "learning_rate": 5e-4,
        "noise_level": 0.7,
        "sde_window_strategy": "first",
        "sde_window_size": 2,
        "timestep_fraction": 1.0,
        "epsilon": 5e-3,
    },
}
FULL_LEARNING_RATE = 2e-4
LORA_RANK, LORA_ALPHA = 16, 32


def main(argv: Sequence[str]) -> int:
    """Runs the quickstart; see `omnitrl quickstart --help`."""
    options = _parser().parse_args(argv)
    if options.algo not in RECIPES:
        raise InputError(
            f"--algo {options.algo} has no quickstart; there is {', '.join(RECIPES)}."
            f"{did_you_mean(options.algo, RECIPES)}"
        )
    if (options.teacher is None) == (options.algo == "diffusion_opd"):
        raise InputError(
            "diffusion_opd, and no other algorithm, learns from a --teacher: give the folder that a quickstart of "
            "another algorithm has written, such as --algo diffusion_opd --teacher quickstart-output."
        )
    return _run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="omnitrl quickstart",
        description="Trains a text-to-image model of 2.3 M weights, which ships with the package, to spell "
        "three-letter words: the reward is how well an OCR network reads its pictures. Takes minutes on two cores.",
    )
    parser.add_argument("--algo", default="flow_grpo", help=f"algorithm: {', '.join(RECIPES)}")
    parser.add_argument("--output-dir", default="quickstart-output", help="where everything is written")
    parser.add_argument("--steps", type=int, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=42, help="seed of adapters, noise and order")
    parser.add_argument("--full", action="store_true", help="train all weights instead of a LoRA adapter")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run")
    parser.add_argument("--device", default="cpu", help="'cpu', or 'auto' for the accelerator if there is one")
    parser.add_argument("--teacher", help="folder of the adapter that diffusion_opd learns from")
    parser.add_argument(
        "--control", action="store_true", help="shuffle the advantages: a run that must not learn, for comparison"
    )
    return parser


def _run(options: argparse.Namespace) -> int:
    started = time.perf_counter()
    print("Loading libraries and the model …", flush=True)
    trainer = build_trainer(options)
    evaluations = _other_sets()
    if not options.resume:
        for name, rows in evaluations.items():
            trainer.evaluate(rows, metric_key_prefix=SETS[name])
    began = time.perf_counter()
    trainer.train(resume_from_checkpoint=options.resume)
    train_seconds = time.perf_counter() - began
    for name, rows in evaluations.items():
        trainer.evaluate(rows, metric_key_prefix=SETS[name])
    trainer.save_model()
    results = summarize(trainer.report.summary.evaluations)
    results |= {"train_seconds": round(train_seconds, 1), "wall_seconds": round(time.perf_counter() - started, 1)}
    trainer.report.write_metrics(results, step=trainer.state.global_step)
    trainer.create_model_card()
    _show(trainer, results)
    return 0


def build_trainer(options: argparse.Namespace) -> Any:
    """The trainer of a quickstart run."""
    settings: dict[str, Any] = {"seed": options.seed, "use_cpu": options.device == "cpu"}
    if options.full:
        settings["learning_rate"] = FULL_LEARNING_RATE
    if options.steps is not None:
        settings["max_steps"] = options.steps
    settings |= {"eval_strategy": "steps", "eval_on_start": not options.resume, "output_dir": options.output_dir}
    teacher = {} if options.teacher is None else {"teacher_adapter": options.teacher}
    return make_trainer(options.algo, settings, full=options.full, control=options.control, **teacher)


def make_trainer(algo: str, settings: dict[str, Any], full: bool = False, control: bool = False, **given: Any) -> Any:
    """
    The trainer of an algorithm on the model that ships with omnitrl, as a user would write it.

    Args:
        algo (`str`):
            A key of `RECIPES`.
        settings (`dict`):
            Options of the config, which win over those of the recipe.
        full (`bool`):
            Whether all weights are trained instead of an adapter.
        control (`bool`):
            Whether it is the control experiment.
        given:
            Further arguments of the trainer.
    """
    _quieten_libraries()
    import torch
    from peft import LoraConfig

    from omnitrl.models import load_flow_model
    from omnitrl.quickstart import GLYPHS, rows
    from omnitrl.trainer import get_trainer

    algorithm = get_trainer(algo)
    known = algorithm.config_class.__dataclass_fields__
    shared = {name: value for name, value in SHARED.items() if name in known}
    args = algorithm.config_class(
        **{**shared, **RECIPES[algo], **({algorithm.control_option: True} if control else {}), **settings}
    )
    model = load_flow_model(GLYPHS, max_sequence_length=args.max_sequence_length, dtype=torch.float32)
    targets = [*model.default_lora_targets, "ff.net.0.proj", "ff.net.2"]
    lora = LoraConfig(r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets, init_lora_weights="gaussian")
    arguments = {
        "train_dataset": DATA.get(algo, lambda: rows("train"))(),
        "eval_dataset": rows("heldout"),
        "peft_config": None if full else lora,
        **REWARDS.get(algo, _ordinary_rewards)(),
        **given,
    }
    return algorithm(model, args=args, **arguments)


def _pairs() -> list[dict[str, Any]]:
    from omnitrl.quickstart import preference_pairs

    return preference_pairs("train")


# What algorithms learn from that cannot learn from words alone.
DATA: dict[str, Callable[[], Any]] = {"diffusion_dpo": _pairs}


def _ordinary_rewards() -> dict[str, Any]:
    return {"reward_funcs": ["ocr", "ocr_exact"]}


def _reader_rewards() -> dict[str, Any]:
    """A reward with a gradient, trained here; what it does to the reading of an OCR network is what is shown."""
    from omnitrl.quickstart.reader import train_reader

    return {"reward_funcs": train_reader(), "eval_reward_funcs": ["ocr", "ocr_exact"]}


# The rewards of algorithms that cannot take ordinary ones.
REWARDS: dict[str, Callable[[], dict[str, Any]]] = {"srpo": _reader_rewards}


def _quieten_libraries() -> None:
    """Leaves the terminal to the run; errors are still shown."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    for library in (transformers_logging, diffusers_logging):
        library.set_verbosity_error()
        library.disable_progress_bar()


def _other_sets() -> dict[str, list[dict[str, str]]]:
    """The sets that are evaluated only before and after; the held-out one is watched during training too."""
    from omnitrl.quickstart import rows

    return {"train": rows("train"), "unseen": rows("unseen")}


def summarize(evaluations: Sequence[Any]) -> dict[str, float]:
    """`eval/reward_before`, `eval/reward_after`, `eval/exact_before`, … of the first and last evaluation of a set."""
    results: dict[str, float] = {}
    for prefix in SETS.values():
        records = sorted((record for record in evaluations if record.name == prefix), key=lambda record: record.step)
        for when, record in (("before", records[0]), ("after", records[-1])):
            results[f"{prefix}/reward_{when}"] = record.metrics[f"{prefix}_reward"]
            results[f"{prefix}/exact_{when}"] = record.metrics[f"{prefix}_rewards/ocr_exact_reward/mean"]
    return results


def _show(trainer: Any, results: dict[str, float]) -> None:
    folder = Path(trainer.args.output_dir)
    rows = [["", "OCR before", "after", "right before", "after"]]
    for name, prefix in SETS.items():
        keys = ("reward_before", "reward_after", "exact_before", "exact_after")
        rows.append([WHAT[name], *(f"{results[f'{prefix}/{key}']:.3f}" for key in keys)])
    trainer.progress.table("Reading of the pictures, 4 samples a word", rows)
    print(f"Trained for {results['train_seconds']:.0f} s, {results['wall_seconds']:.0f} s in all. Look at:")
    for name, what in (
        ("report.html", "the page with everything"),
        ("before_after.png", "the same words before and after"),
        ("reward_curve.png", "the curve"),
        ("metrics.jsonl", "all numbers"),
        ("pytorch_lora_weights.safetensors", "the adapter, for `pipeline.load_lora_weights`"),
    ):
        if (folder / name).exists():
            print(f"  {folder / name}  {what}")
