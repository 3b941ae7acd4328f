# SPDX-License-Identifier: Apache-2.0
"""What two processes do, started by `test_ddp.py`; the tests run the same functions in one process to compare."""

import os
import time

import datasets
import torch.distributed as dist
from transformers import TrainerCallback

from omnitrl import OverOptimizationCallback
from omnitrl.errors import InputError
from omnitrl.rewards import groupwise
from tests.distributed.launch import main
from tests.tiny import CHECKPOINTS
from tests.trainer.helpers import PROMPTS, brightness, logged, trainable, trainer


RANK = int(os.environ.get("RANK", 0))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))

# 8 samples a rollout whatever the number of processes, two prompts with groups of four, one update each. With two
# processes and micro-batches of 2, the first process has one group and the second the other.
WHOLE_GROUPS = {"generation_batch_size": 8, "num_generations": 4}
# Groups of four over two processes that have two samples each: every group lies on both.
SPLIT_GROUPS = {"generation_batch_size": 4, "num_generations": 4}


def share(options):
    """Options that make one update of each rollout with micro-batches of 2, however many processes there are."""
    accumulation = options["generation_batch_size"] // (2 * WORLD_SIZE)
    return {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation, **options}


def make(place, **options):
    return trainer(place, **share({**WHOLE_GROUPS, **options}))


def recording(run):
    """Lets `run` keep what it samples: seed, prompt and last kept latents."""
    seen, make_rollout = [], run.make_rollout

    def make_and_keep(rollout):
        buffer = make_rollout(rollout)
        seen.extend((t.request.seed, t.request.row["prompt"], t.next_latents[-1].clone()) for t in buffer.trajectories)
        return buffer

    run.make_rollout = make_and_keep
    return seen


def four_updates(place, **options):
    """A run of four updates with KL and EMA, and everything that must not depend on the number of processes."""
    run = make(place, **{"beta": 0.5, "kl_form": "exact", "ema_decay": 0.9, **options})
    seen = recording(run)
    run.train()
    return {
        "wrapper": type(run.model_wrapped).__name__,
        "world": dist.get_world_size() if dist.is_initialized() else 1,
        "weights": trainable(run),
        "ema": [p.clone() for p in run.ema.shadow_params],
        "samples": seen,
        "logs": [row for row in run.state.log_history if "reward" in row],
    }


def whole_groups(place):
    return four_updates(place, **WHOLE_GROUPS)


def split_groups(place):
    return four_updates(place, **SPLIT_GROUPS)


def full_fine_tuning(place):
    return four_updates(place, peft_config=None, learning_rate=1e-4)


def two_networks(place):
    """Each has steps of its own: the last backward of a micro-batch, which exchanges, goes to one of them."""
    model = CHECKPOINTS["wan-a14b"].model()
    return four_updates(place, model=model, height=32, width=64, num_frames=5, guidance_scale=3.0)


def best_and_worst(place):
    """Each process chooses among its own groups; two of four are trained, in one update of each rollout."""
    chosen = {"algorithm": "dance_grpo", "best_of_n": 2, "same_init_noise": False}
    return four_updates(place, gradient_accumulation_steps=2 // WORLD_SIZE, **chosen)


TWO_SIZES = [
    {"prompt": prompt, "height": height, "width": width}
    for prompt, (height, width) in zip(PROMPTS, ((64, 64), (32, 96), (64, 64), (64, 64), (32, 96)), strict=True)
]


def two_sizes(place):
    """Rollouts of one size and another; a process cannot tell from its own share which comes next."""
    return four_updates(place, data=TWO_SIZES)


def streamed(place):
    """Every process reads the whole stream."""
    return four_updates(place, data=datasets.Dataset.from_list(TWO_SIZES).to_iterable_dataset())


def many_backwards(place):
    """Gradients are exchanged once a micro-batch of three network calls, and accumulated over two."""
    run = trainer(
        place,
        max_steps=1,
        per_device_train_batch_size=4 // WORLD_SIZE,
        gradient_accumulation_steps=2,
        max_grad_norm=0.0,
    )
    gradients = {}

    def keep(*_):
        named = run.flow_model.networks.named_parameters()
        gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})

    run.create_optimizer()
    run.optimizer.register_step_pre_hook(keep)
    run.train()
    return gradients


def second_weights(place):
    """Three updates of trainers that keep a second set of weights, which is another one from the second on."""
    result = {}
    for algorithm in ("diffusion_nft", "awm"):
        run = make(place / algorithm, algorithm=algorithm, beta=0.1, max_steps=3, timesteps_per_sample=2)
        run.train()
        result[algorithm] = {"weights": trainable(run), "average": [w.clone() for w in run.average._weights]}
    return result


def scored_by_number(prompts, **_):
    return [float(prompt) for prompt in prompts]


NUMBERS = [str(number) for number in range(10)]


def evaluation(place):
    """Means over shares that are even, odd, and smaller than the number of processes."""
    run = make(place, rewards=scored_by_number, data=NUMBERS)
    sets = {"ten": NUMBERS, "seven": NUMBERS[:7], "one": NUMBERS[3:4]}
    sets["sizes"] = [{"prompt": number, "width": 32 if number in "046" else 64} for number in NUMBERS[:7]]
    result = run.evaluate(sets)
    result |= {f"twice_{key}": value for key, value in evaluate_twice_each(run).items()}
    return result


def evaluate_twice_each(run):
    run.args.num_generations_eval = 2
    return run.evaluate(NUMBERS[:3])


class StopAt(TrainerCallback):
    """Ends a run after a step, as a time limit would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def resumed(place):
    """1 + 3 updates, in the midst of a rollout, and 2 + 2 against 4."""
    result = {}
    for stop in (1, 2):
        common = {
            "ema_decay": 0.9,
            "lr_scheduler_type": "linear",
            "save_strategy": "steps",
            "gradient_accumulation_steps": 1,
            "save_steps": stop,
        }
        straight = make(place / f"{stop}a", **common)
        straight.train()
        make(place / f"{stop}b", callbacks=[StopAt(stop)], **common).train()
        again = make(place / f"{stop}b", **common)
        again.train(resume_from_checkpoint=True)
        result[stop] = {
            "straight": (trainable(straight), straight.ema.shadow_params, logged(straight, "loss")),
            "again": (trainable(again), again.ema.shadow_params, logged(again, "loss")),
            "steps": again.state.global_step,
        }
    return result


def message_of(run):
    """The error that a run or an evaluation ends with."""
    try:
        run()
    except RuntimeError as error:
        return type(error).__name__, str(error)
    return None


def broken_on_one(prompts, completions, **_):
    if RANK == 1:
        raise ValueError("the scorer is away")
    return [0.5 + 0.1 * i for i in range(len(prompts))]


def wrong_count_on_one(prompts, completions, **_):
    return [0.5] * (len(prompts) - RANK)


def failing_rewards(place):
    """A reward that fails on the second process only, in a rollout and in an evaluation; both then go on."""
    result = {}
    for name, reward in {"raises": broken_on_one, "count": wrong_count_on_one}.items():
        run = make(place / name, rewards=reward, reward_max_retries=0, reward_max_failed_fraction=0.0)
        result[name] = message_of(run.train)
        result[f"eval_{name}"] = message_of(lambda run=run: run.evaluate(NUMBERS))
        run.rewards.close()
    lenient = make(place / "lenient", rewards=broken_on_one, reward_max_retries=0, reward_max_failed_fraction=1.0)
    lenient.train()
    result["lenient"] = lenient.state.log_history[0]
    return result


def slow_on_one(prompts, completions, **_):
    time.sleep(2.0 * RANK)
    return [0.1 * i for i in range(len(prompts))]


def slow_reward(place):
    run = make(place, rewards=slow_on_one, max_steps=1)
    run.train()
    return run.state.global_step


def saving(place):
    """Keeps the best of four checkpoints and the last, by a figure that peaks in the second evaluation."""
    peaks = iter([0.1, 0.9, 0.3, 0.2])
    options = {
        "save_strategy": "steps",
        "eval_strategy": "steps",
        "save_steps": 1,
        "eval_steps": 1,
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "peak",
        "greater_is_better": True,
        "eval_dataset": ["a cat"],
    }
    run = make(place, **options)
    evaluate, kept = run.evaluate, {}

    def evaluate_with_peak(*args, **kwargs):
        kept[run.state.global_step] = trainable(run)
        return evaluate(*args, **kwargs) | {"eval_peak": next(peaks)}

    run.evaluate = evaluate_with_peak
    run.train()
    return {"kept": kept, "final": trainable(run), "best": run.state.best_model_checkpoint}


def watched(place):
    """Groups of which each process has half; the reward of the fourth rollout is a loss by more than half."""

    def reward(completions, trainer_state, **_):
        return [(1, 2, 3, 1)[trainer_state.global_step] + 0.005 * (-1) ** i for i in range(len(completions))]

    watch = OverOptimizationCallback("keep_best", baseline=2)
    options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "output_dir": str(place / "out")}
    run = make(place, rewards=reward, callbacks=[watch], **SPLIT_GROUPS, **options)
    kept, save = {}, run._save_checkpoint

    def keep_and_save(*args):
        kept[run.state.global_step] = trainable(run)
        save(*args)

    run._save_checkpoint = keep_and_save
    run.train()
    seen = watch.state_dict(run.state.global_step)
    best = (run.state.best_global_step, run.state.best_model_checkpoint)
    return {**seen, "best": best, "kept": kept, "final": trainable(run)}


def compared(place):
    """A reward that compares the members of a group; each process has whole groups, in evaluation too."""
    calls = []

    @groupwise
    def places(prompts, completions):
        calls.append(list(prompts))
        values = brightness(prompts, completions)
        return [float(sorted(values).index(value)) for value in values]

    run = make(place, rewards=[places, brightness], num_generations_eval=2, **WHOLE_GROUPS)
    metrics = run.evaluate(PROMPTS[:3])
    evaluated = calls[:]
    run.train()
    calls = [calls, evaluated]
    return {"weights": trainable(run), "metrics": metrics, "calls": calls, "rewards": logged(run, "reward")}


def split_compared(place):
    """The same of groups that lie on both processes, which is refused before anything is made."""
    try:
        make(place, rewards=groupwise(brightness_again), **SPLIT_GROUPS)
    except InputError as error:
        return str(error)
    return "nothing"


def brightness_again(prompts, completions):
    return brightness(prompts, completions)


def nan_on_one(place):
    """A loss that is not finite on one process ends the run on it, and the launcher ends the other."""
    run = make(place)
    good = run.compute_row_losses
    run.compute_row_losses = lambda *a: good(*a) * (float("nan") if RANK else 1.0)
    run.train()


def endless(place):
    """Runs until it is interrupted, and says when it has begun."""
    run = make(place, max_steps=10_000, save_strategy="steps", save_steps=2, save_total_limit=1)

    run.add_callback(Says(place / f"begun.{RANK}", step=3))
    run.train()


class Says(TrainerCallback):
    """Makes a file when a step is done."""

    def __init__(self, path, step):
        self.path, self.step = path, step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.path.touch()


def other_number_of_processes(place):
    """Goes on with a checkpoint that one process wrote."""
    run = make(place)
    return message_of(lambda: run.train(resume_from_checkpoint=os.environ["CHECKPOINT"]))


SCENARIOS = {
    function.__name__: function
    for function in (
        whole_groups,
        split_groups,
        full_fine_tuning,
        best_and_worst,
        two_sizes,
        streamed,
        two_networks,
        many_backwards,
        second_weights,
        evaluation,
        resumed,
        failing_rewards,
        slow_reward,
        saving,
        watched,
        compared,
        split_compared,
        nan_on_one,
        endless,
        other_number_of_processes,
    )
}

if __name__ == "__main__":
    main(SCENARIOS)
