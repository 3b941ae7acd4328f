# SPDX-License-Identifier: Apache-2.0
"""What trainers share that look at samples: an engine, rewards, evaluation, and the backward of a micro-batch."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from peft import PeftConfig
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from omnitrl.data import StreamedPrompts, load_prompts, naming
from omnitrl.errors import InputError, RunError
from omnitrl.models import Conditions, MediaSize
from omnitrl.rewards import RewardRunner
from omnitrl.rollout import EngineContext, RolloutEngine, make_engine
from omnitrl.trainer.base_config import BaseConfig
from omnitrl.trainer.base_trainer import BaseTrainer, ModelLike
from omnitrl.trainer.evaluation import evaluate_prompts
from omnitrl.trainer.metrics import gather_list
from omnitrl.trainer.over_optimization import OverOptimizationCallback, find_watch
from omnitrl.trainer.prompt_rows import check_equal_pictures, check_pictures, finite, numbered, size_of_row, sizes_of
from omnitrl.trainer.scoring import Scoring, make_runner


# Training prompts that are pictured before and after where there is no evaluation set.
PREVIEW_PROMPTS = 8

RewardLike = str | Callable | nn.Module


class NetworkRows(Protocol):
    """Rows for one network call."""

    latents: Tensor
    """(R, ...)"""
    timesteps: Tensor
    """(R,) what the network is told of the noise level."""
    conditions: Conditions
    """R rows."""

    def __len__(self) -> int: ...


class MicroBatch(Protocol):
    """The network calls of one micro-batch, each stacked when it is asked for."""

    @property
    def num_rows(self) -> int:
        """Rows of all calls together."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class SamplingTrainer(BaseTrainer):
    """
    A trainer that makes samples, in training or in evaluation alone; a subclass states `compute_row_losses`.

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        reward_funcs:
            One reward or several; see [`omnitrl.rewards`]. `None` where the algorithm needs none.
        args ([`BaseConfig`], *optional*):
            Options; `output_dir` is named after the trainer by default.
        train_dataset:
            Prompts in any form that [`~omnitrl.data.load_prompts`] takes.
        eval_dataset:
            The same but no stream, or a dict of named sets; evaluated with ODE sampling and fixed seeds.
        callbacks, optimizers:
            As in `transformers.Trainer`.
        peft_config (`PeftConfig` or `str`, *optional*):
            New adapters, or a folder or Hub id of saved ones to go on with; `None` trains all weights.
    """

    args: BaseConfig
    needs_rewards: ClassVar[bool] = True
    trains_guided: ClassVar[bool] = True
    """Whether network calls that are trained are guided as the samples are, unless `guidance_scale_train` is given."""
    makes_rollouts: ClassVar[bool] = False
    """Whether samples are made in training, rather than in evaluation alone."""
    scores_rollouts: bool = False
    """Whether they are decoded and scored."""
    control_option: ClassVar[str] = "shuffle_advantages"
    """The option that makes a control experiment of a run: one from which nothing can be learnt."""

    def __init__(
        self,
        model: ModelLike,
        reward_funcs: RewardLike | Sequence[RewardLike] | None = None,
        args: BaseConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        peft_config: PeftConfig | str | None = None,
    ) -> None:
        args = args or self.config_class(output_dir=f"{self._name}")
        self._check_args(args, eval_dataset)
        self.rewards = self._load_rewards(reward_funcs, args)
        super().__init__(
            model,
            args,
            train_dataset=self._load_train(train_dataset, args),
            eval_dataset=self._load_eval(eval_dataset),
            callbacks=callbacks,
            optimizers=optimizers,
            peft_config=peft_config,
        )
        self.engine = self._build_engine()
        self._synced_version: int | None = None
        self._micro_step = 0
        self._forwards = 0
        self.row_sizes = self._look_at_rows()
        self.sizes = list(dict.fromkeys(self.row_sizes))
        self.size = self.sizes[0]
        self.latent_shape = self.flow_model.latent_shape(self.size)
        self._check_model()
        self._set_up_algorithm()

    # Set-up

    def _check_model(self) -> None:
        """Raises where the model cannot do what the options ask for."""

    def _set_up_algorithm(self) -> None:
        """What a subclass makes of the untrained model, such as a reference policy."""

    def _check_args(self, args: BaseConfig, eval_dataset: Any) -> None:
        if not isinstance(args, self.config_class):
            raise InputError(f"{type(self).__name__} takes a {self.config_class.__name__}, got {type(args).__name__}.")
        if eval_dataset is None and (args.eval_strategy != "no" or args.eval_on_start):
            raise InputError(
                f"eval_strategy={args.eval_strategy!s} and eval_on_start={args.eval_on_start} ask for evaluation, but "
                "there is no eval_dataset: pass one, or use eval_strategy='no'."
            )

    def _load_rewards(self, reward_funcs: Any, args: BaseConfig) -> RewardRunner | None:
        if reward_funcs is None and not self.needs_rewards:
            return None
        return make_runner(reward_funcs, args, args.reward_weights)

    def load_rows(self, dataset: Any) -> Any:
        """A dataset as rows, from whatever the user gave."""
        return load_prompts(dataset)

    def _load_train(self, dataset: Any, args: BaseConfig) -> Any:
        rows = None if dataset is None else self.load_rows(dataset)
        if isinstance(rows, StreamedPrompts) and args.max_steps < 1:
            raise InputError(
                f"train_dataset is a stream, of which nobody knows how long an epoch is, so num_train_epochs="
                f"{args.num_train_epochs:g} says nothing: set max_steps, for example max_steps=1000."
            )
        return rows

    def _load_eval(self, dataset: Any) -> Any:
        if isinstance(dataset, dict):
            return {name: self._load_eval(part) for name, part in dataset.items()}
        return None if dataset is None else finite(self.load_rows(dataset))

    def _look_at_rows(self) -> list[MediaSize]:
        """
        Size of the media of each training row, of one at least.

        Raises:
            [`~omnitrl.errors.InputError`]: a row of any dataset cannot be made, or its images cannot be read.
        """
        size, model = self.args.media_size, self.flow_model
        if self.is_sharded and self.train_dataset is not None:
            check_equal_pictures(model, self.train_dataset, "train_dataset")
        evals = self.eval_dataset if isinstance(self.eval_dataset, dict) else {"": self.eval_dataset}
        for name, dataset in evals.items():
            if dataset is not None:
                if self.is_sharded:
                    check_equal_pictures(model, dataset, f"eval_dataset {name}".strip())
                rows = numbered(dataset, f"eval_dataset {name}".strip())
                check_pictures(model, rows)
                sizes_of(model, rows, size)
        if self.train_dataset is None:
            return [model.size_of({}, size)]
        if isinstance(self.train_dataset, StreamedPrompts):
            (first,) = self.train_dataset.head(1)
            with naming(f"row 0 of {self.train_dataset.name}"):
                model.images(first)
                return [size_of_row(model, first, size)]
        rows = numbered(self.train_dataset, "train_dataset")
        check_pictures(model, rows)
        return sizes_of(model, rows, size)

    def _build_engine(self) -> RolloutEngine:
        args = self.args
        context = EngineContext(
            self.flow_model,
            args,
            policy=self.current_policy,
            batch_size=args.rollout_batch_size or args.per_device_train_batch_size,
            autocast=self.accelerator.autocast,
            half=self.accelerator.mixed_precision != "no" or self.flow_model.dtype.itemsize < 4,
            on_step=self.interrupts.check,
            weights=lambda: self.gather_weights(keep=args.process_index == 0 or args.vllm_mode == "colocate"),
            gather=gather_list,
            rank=args.process_index,
            world_size=args.world_size,
        )
        return make_engine(args.rollout_engine, context)

    def current_policy(self) -> nn.Module:
        """The policy's module; Accelerate may replace it when training begins."""
        assert self.model is not None
        return self.model

    @property
    def guidance_scale(self) -> float:
        """Guidance of rollouts and evaluation."""
        given = self.args.guidance_scale
        return self.flow_model.default_guidance_scale if given is None else given

    @property
    def guidance_scale_train(self) -> float:
        """Guidance of the network calls that are trained."""
        given = self.args.guidance_scale_train
        default = self.guidance_scale if self.trains_guided else 1.0
        return default if given is None else given

    @property
    def train_rows(self) -> Any:
        """The training set."""
        if self.train_dataset is None:
            raise InputError("Training needs a train_dataset with a column 'prompt'.")
        return self.train_dataset

    # Training

    @abstractmethod
    def micro_steps_per_epoch(self) -> int:
        """Micro-batches that go once through the dataset, a multiple of the accumulation steps."""

    def get_train_dataloader(self) -> DataLoader:
        """
        Ticks: one item per micro-batch of an epoch.

        Which samples a micro-batch holds follows from its number alone, so there is nothing for workers to load,
        nothing to shard, and a resumed run is at the right place.
        """
        ticks: Any = range(self.micro_steps_per_epoch())
        return DataLoader(ticks, collate_fn=_tick)

    def num_examples(self, dataloader: DataLoader) -> int:
        """Rows of an epoch; of a stream, what `transformers` counts for those without a length."""
        args = self.args
        if isinstance(self.train_rows, StreamedPrompts):
            return args.max_steps * args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        return len(self.train_rows)

    def first_rows(self, number: int) -> list[dict[str, Any]]:
        """The first training rows, fewer where there are fewer."""
        if isinstance(self.train_rows, StreamedPrompts):
            return self.train_rows.head(number)
        rows = numbered(self.train_rows, "train_dataset")
        return [rows[index] for index in range(min(len(rows), number))]

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """See [`BaseTrainer.train`]; without an `eval_dataset`, some training prompts show before and after."""
        output = super().train(resume_from_checkpoint, **kwargs)
        self._put_back_best()
        self._preview()
        return output

    def _put_back_best(self) -> None:
        """Loads the checkpoint that the watch has kept, where it has sounded an alarm."""
        best = self.state.best_model_checkpoint
        if self.watch is not None and self.watch.wants_best and best is not None:
            self._load_best_model()
            if self.is_world_process_zero():
                self.progress.message(f"The weights are those of {best}, the best checkpoint before the alarm.")

    def _preview(self) -> None:
        if self.eval_dataset is None and self.args.save_report:
            self.evaluate(self.first_rows(PREVIEW_PROMPTS), metric_key_prefix="eval_preview")

    def _begin(self) -> None:
        self._synced_version = None  # a run that was before has had other weights at the same steps
        self._micro_step = self.state.global_step * self.args.gradient_accumulation_steps
        self._logged_at, self._logged_step = time.perf_counter(), self.state.global_step
        self.watch = find_watch(self.callback_handler.callbacks)
        if self.watch is not None:
            names = [] if self.rewards is None else self.rewards.names
            self.watch.begin(self.args, self.state, names, self.makes_rollouts, self.scores_rollouts)
        super()._begin()
        if self.is_world_process_zero():
            trained = sum(p.numel() for p in self.trainable_parameters())
            self.progress.message(
                f"{self._name}: {self.describe_run()}; {trained:,} trainable weights, "
                f"{self.args.world_size} process(es) on {self.args.device}."
            )
        if self.state.global_step == 0:
            self._preview()

    @abstractmethod
    def describe_run(self) -> str:
        """What is trained on what, in a phrase for the terminal."""

    def sync_engine(self) -> None:
        """Gives the engine the weights of this optimizer step."""
        version = self.state.global_step
        if version != self._synced_version:
            with self.metrics.timed("weight_sync"):
                self.engine.update_weights(version).check()
            self._synced_version = version

    def note_engine(self) -> None:
        """Records what the engine has counted."""
        for name, value in self.engine.take_metrics().items():
            self.metrics.add(name, value)

    def new_scoring(self, group_size: int) -> Scoring:
        """A round of scoring of groups of this size; a round that was broken off is forgotten."""
        return Scoring(self.rewards, self.interrupts, self.args.world_size, self.state, group_size)

    def call_policy(self, velocity: Callable[..., Tensor], rows: NetworkRows, guidance: float | None = None) -> Tensor:
        """
        One network call of training, in the rollout's precision, counted in `forwards_per_sample`.

        Args:
            velocity (`Callable`):
                The policy's module, or the velocity function of another model.
            rows ([`NetworkRows`]):
                What goes in.
            guidance (`float`, *optional*):
                `guidance_scale_train` by default.
        """
        guidance = self.guidance_scale_train if guidance is None else guidance
        self.count_forwards(len(rows) * self.flow_model.evaluations(guidance))
        with self.accelerator.autocast():
            return velocity(rows.latents, rows.timesteps, rows.conditions, guidance)

    def count_forwards(self, rows: int) -> None:
        """Counts network evaluations, in samples."""
        self._forwards += rows
        self.num_forwards += rows

    num_forwards = 0
    """Network evaluations of this process in training so far, rollouts included and evaluations not, in samples."""

    @abstractmethod
    def next_micro_batch(self) -> tuple[Any, MicroBatch]:
        """What the micro-batch is taken from, and its network calls."""

    @abstractmethod
    def compute_row_losses(self, model: nn.Module, batch: Any, source: Any) -> Tensor:
        """The loss (R,) of each row; the trainer takes the mean over rows, micro-batches and ranks."""

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Backward of one micro-batch, in as many network calls as were asked for."""
        source, batches = self.next_micro_batch()
        self.progress.phase("train")
        started = time.perf_counter()
        total = torch.zeros((), device=self.args.device)
        for i in range(len(batches)):
            self.interrupts.check()  # gradients of a part of an update are no loss
            batch = batches[i]
            with self.gradient_sync(model, last=i == len(batches) - 1):
                losses = self.compute_row_losses(model, batch, source)
                loss = losses.sum() / batches.num_rows / self.current_gradient_accumulation_steps
                self.backward(loss)
                total += loss.detach()
        if not torch.isfinite(total):
            raise RunError(self.describe_failure(float(total), source, batches))
        self.metrics.add("time/train", time.perf_counter() - started)
        self._micro_step += 1
        self.after_micro_batch(source)
        return total

    def after_micro_batch(self, source: Any) -> None:
        """What is logged once a micro-batch is done."""

    def describe_failure(self, loss: float, source: Any, batches: MicroBatch) -> str:
        """What a loss that is not finite is told with."""
        return (
            f"The loss is {loss} at optimizer step {self.state.global_step}: the weights of the last step are kept. "
            "Lower learning_rate, or use bf16 instead of fp16."
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the seconds per optimizer step."""
        if "loss" in logs:
            now = time.perf_counter()
            steps = self.state.global_step - self._logged_step
            self.metrics.add("step_time", (now - self._logged_at) / max(steps, 1))
            self._logged_at, self._logged_step = now, self.state.global_step
        super().log(logs, start_time)

    _logged_at = 0.0
    _logged_step = 0
    watch: OverOptimizationCallback | None = None
    """What is among the callbacks to watch the samples, once training has begun."""

    # Checkpoints

    def _state(self) -> dict[str, Any]:
        watch = {} if self.watch is None else {"watch": self.watch.state_dict(self.state.global_step)}
        return {**super()._state(), "num_forwards": self.num_forwards, **watch}

    def _load_state(self, state: dict[str, Any]) -> None:
        super()._load_state(state)
        self.num_forwards = state["num_forwards"]
        if self.watch is not None and "watch" in state:
            self.watch.load_state_dict(state["watch"])

    # Evaluation

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: list[str] | None = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """
        Samples the evaluation prompts with the ODE, fixed seeds and the averaged weights, and scores them.

        Args:
            eval_dataset (*optional*):
                Prompts, or a dict of named sets; those of the trainer by default.
            metric_key_prefix (`str`, defaults to `"eval"`):
                Prefix of the metrics.

        Returns:
            `dict[str, float]`: `eval_reward`, `eval_reward_std`, `eval_rewards/<name>/mean`, `eval_runtime`.
        """
        dataset = self.eval_dataset if eval_dataset is None else self._load_eval(eval_dataset)
        if isinstance(dataset, dict):
            metrics: dict[str, float] = {}
            for name, part in dataset.items():
                metrics |= self.evaluate(part, ignore_keys, f"{metric_key_prefix}_{name}")
            return metrics
        if dataset is None:
            raise InputError("Evaluation needs an eval_dataset with a column 'prompt'.")
        self.flow_model.networks.eval()
        self.progress.phase(metric_key_prefix)
        self._synced_version = None  # an engine of its own must not keep the averaged weights
        with self.metrics.timed("eval"), self.ema_weights():
            self.engine.wake()
            self.engine.update_weights(self.state.global_step).check()
            metrics = self.evaluate_rows(dataset, metric_key_prefix)
            self.engine.sleep()
        self.log(dict(metrics))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def evaluate_rows(self, dataset: Any, prefix: str) -> dict[str, float]:
        """The metrics of one evaluation set, with the weights that are to be evaluated in place."""
        return evaluate_prompts(self, dataset, prefix)


def _tick(items: list[int]) -> dict[str, int]:
    return {"micro_step": items[0]}
