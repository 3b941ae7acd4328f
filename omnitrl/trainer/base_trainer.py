# SPDX-License-Identifier: Apache-2.0
"""What every omnitrl trainer adds to `transformers.Trainer`: diffusers networks, atomic checkpoints, EMA, reports."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import DistributedType, DynamoBackend, save_fsdp_optimizer
from diffusers import DiffusionPipeline
from diffusers.training_utils import EMAModel
from peft import PeftConfig
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import (
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer_utils import rotate_checkpoints

from omnitrl.errors import InputError, RunError
from omnitrl.models import FlowModel, Policy, load_flow_model
from omnitrl.report import Progress, ReportCallback, RunSummary
from omnitrl.trainer.adapters import attach_adapters, has_adapters
from omnitrl.trainer.averages import PolicyAverage, local
from omnitrl.trainer.base_config import BaseConfig
from omnitrl.trainer.checkpoints import (
    STAGING,
    checkpoint_name,
    explained,
    last_checkpoint,
    load_tensors,
    publish,
    save_tensors,
    tidy_up,
)
from omnitrl.trainer.hub import HubTrainer
from omnitrl.trainer.interrupts import Interrupts
from omnitrl.trainer.metrics import MetricStore
from omnitrl.trainer.networks import check_networks, set_second_guidance
from omnitrl.trainer.saving import (
    DIFFUSERS_LORA_EMA,
    load_networks,
    load_snippet,
    save_networks,
    trained_weights,
    whole_weights,
)


logger = logging.getLogger(__name__)

ModelLike = str | Path | DiffusionPipeline | FlowModel

_EMA_FOLDER = "ema"


class BaseTrainer(HubTrainer):
    """
    A `transformers.Trainer` for the networks of a [`FlowModel`].

    It keeps the Trainer's loop, callbacks, schedules, logging, Accelerate, FSDP and DeepSpeed, and replaces what
    assumes a language model: how weights are saved and loaded, the model card, and the progress bar. Checkpoints
    appear under their name only when they are complete. Ctrl-C and errors leave a checkpoint of the last optimizer
    step behind.

    Args:
        model:
            Hub id, folder, loaded pipeline or [`FlowModel`].
        args ([`BaseConfig`]):
            Options.
        peft_config (`PeftConfig` or `str`, *optional*):
            New adapters, or a folder or Hub id of saved ones to go on with; `None` trains all weights.
        train_dataset, eval_dataset:
            Rows with a `prompt`.
        callbacks, optimizers:
            As in `transformers.Trainer`.
    """

    args: BaseConfig
    config_class: ClassVar[type[BaseConfig]] = BaseConfig
    draws_noise_levels: ClassVar[bool] = False
    """Whether samples of one micro-batch are trained at noise levels of their own."""
    _name: ClassVar[str]
    _paper: ClassVar[dict[str, str]]
    _tag_names: ClassVar[tuple[str, ...]] = ("omnitrl",)

    # The loss is a mean over rows; the division by the accumulation steps is in `training_step`.
    model_accepts_loss_kwargs = False

    def __init__(
        self,
        model: ModelLike,
        args: BaseConfig,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        callbacks: Sequence[TrainerCallback] | None = None,
        optimizers: tuple[torch.optim.Optimizer | None, Any] = (None, None),
        peft_config: PeftConfig | str | None = None,
    ) -> None:
        set_seed(args.seed)  # before the adapters draw their start values
        _check_output_dir(args)
        self.flow_model = self._load_model(model, args)
        attach_adapters(self.flow_model, peft_config, args.trainable_networks)
        set_second_guidance(self.flow_model, args.guidance_scale_2)
        self.metrics = MetricStore()
        self.ema: EMAModel | None = None
        self.progress = Progress()
        self.report = ReportCallback(
            str(args.output_dir),
            progress=self.progress,
            max_samples=args.num_samples_to_save,
            summary=self._summary(args),
            pictures=args.save_report,
        )
        super().__init__(
            model=Policy(self.flow_model),
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=[self.report, _Hooks(self), *(callbacks or [])],
            optimizers=optimizers,
        )
        self.model_accepts_loss_kwargs = False
        self.remove_callback(PrinterCallback)
        self.remove_callback(ProgressCallback)
        self.interrupts = Interrupts(self.progress.message if self.is_world_process_zero() else _say_nothing)
        self._check_sharding()
        self._compile()
        self.flow_model.networks.eval()
        for module in self.flow_model.frozen_modules:
            module.to(self.args.device)

    # Set-up

    def _load_model(self, model: ModelLike, args: BaseConfig) -> FlowModel:
        if isinstance(model, str | Path):
            kwargs = {"dtype": _load_dtype(args), **_as_dict(args.model_init_kwargs)}
            return load_flow_model(model, args.max_sequence_length, **kwargs)
        if args.model_init_kwargs:
            raise InputError(
                f"model_init_kwargs={args.model_init_kwargs} apply when a checkpoint is loaded, but model is a "
                f"{type(model).__name__}: leave them out, or pass a Hub id or folder."
            )
        return load_flow_model(model, args.max_sequence_length)

    def _compile(self) -> None:
        """
        Compiles the networks' blocks in place of Accelerate, which would compile a copy of the whole model.

        Rollouts and evaluation call the same modules as training, so they are faster too, and a replay is compiled as
        its rollout was.
        """
        if self.args.torch_compile:
            policy: Any = self.model
            policy.compile_blocks(self.args.torch_compile_backend, self.args.torch_compile_mode)
            self.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO

    def _summary(self, args: BaseConfig) -> RunSummary:
        adapter = has_adapters(self.flow_model)
        where = args.hub_model_id or args.output_dir
        return RunSummary(
            title=f"{self._name}: {Path(str(args.output_dir)).name}",
            algorithm=self._name,
            model_name=self.flow_model.name or type(self.flow_model.pipeline).__name__,
            load_snippet=load_snippet(self.flow_model, adapter, str(where)),
        )

    def _check_sharding(self) -> None:
        fsdp = self.accelerator.state.fsdp_plugin if self.is_fsdp_enabled else None
        if fsdp is not None and fsdp.fsdp_version == 1:
            raise InputError("FSDP is supported in its second version only: set fsdp_version: 2, or use DeepSpeed.")
        if fsdp is not None and fsdp.mixed_precision_policy is not None:
            # Accelerate's policy also casts what goes into the policy and comes out of it: a timestep of 857.7 would
            # be 856 in bf16. Autocast is active in the network, and only there.
            fsdp.mixed_precision_policy = replace(
                fsdp.mixed_precision_policy, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
            )
        check_networks(self.flow_model, self._name, self.draws_noise_levels, self.is_sharded)
        if self.args.ema_decay is not None:
            self.check_averages(f"ema_decay={self.args.ema_decay}", ", or ema_decay=None")

    def check_averages(self, option: str, alternative: str = "") -> None:
        """Raises where a second set of the trained weights, which `option` asks for, is not to be had."""
        plugin = self.accelerator.state.deepspeed_plugin
        if plugin is not None and plugin.zero_stage == 3:
            raise InputError(
                f"{option} cannot be used with DeepSpeed ZeRO-3, which leaves parameters empty between steps: use "
                f"ZeRO-2 or FSDP2{alternative}."
            )

    @property
    def is_sharded(self) -> bool:
        """Whether each process holds only a part of the weights (FSDP, DeepSpeed)."""
        return self.is_fsdp_enabled or self.is_deepspeed_enabled

    def trainable_parameters(self) -> list[nn.Parameter]:
        """
        The parameters that the optimizer has.

        FSDP2 leaves the root's weights whole after a forward; who reads or writes weights must see the shards.
        """
        self._reshard()
        return [p for p in self.flow_model.networks.parameters() if p.requires_grad]

    def _reshard(self) -> None:
        modules = self.model.modules() if self.is_sharded and self.model is not None else ()
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """
        Trains; see [`~transformers.Trainer.train`].

        Args:
            resume_from_checkpoint (`str` or `bool`, *optional*):
                A checkpoint folder, or `True` for the last one in `output_dir`. The run goes on exactly as if it had
                not been interrupted, in the midst of a rollout too.
        """
        self._begun, self._saved_step = False, None
        if self.is_world_process_zero():
            tidy_up(str(self.args.output_dir))
        self.accelerator.wait_for_everyone()
        self._resumed_from = self._find_checkpoint(resume_from_checkpoint)
        self._resumed_state = self._read_state()
        try:
            with self.interrupts:
                return super().train(resume_from_checkpoint=self._resumed_from, **kwargs)
        except KeyboardInterrupt:
            self._rescue("Interrupted")
            raise
        except Exception as error:
            self._rescue(f"Stopped by {type(error).__name__}")
            raise
        finally:
            self.report.close()

    def _find_checkpoint(self, resume: str | bool | None) -> str | None:
        folder = Path(str(self.args.output_dir))
        last = last_checkpoint(folder)
        if not resume:
            if last is not None:
                logger.warning(
                    "%s has checkpoints of an earlier run, up to %s, and this run starts anew: choose another "
                    "output_dir to keep them apart, or go on with resume_from_checkpoint=True.",
                    folder,
                    last.name,
                )
            return None
        if isinstance(resume, str | Path):
            if not (Path(resume) / "trainer_state.json").is_file():
                raise InputError(
                    f"resume_from_checkpoint={str(resume)!r} is no checkpoint folder of a trainer: pass one like "
                    f"{str(folder / checkpoint_name(100))!r}, or True for the last one in output_dir."
                )
            return str(resume)
        if last is None:
            raise InputError(f"{folder} has no checkpoint to resume from: start without resume_from_checkpoint.")
        return str(last)

    def _read_state(self) -> dict[str, Any]:
        """The state to be resumed from, refused before anything is touched if it is another run's."""
        if self._resumed_from is None:
            return {}
        path = Path(self._resumed_from) / self._state_file
        if not path.is_file():
            raise RunError(
                f"{self._resumed_from} has no {path.name}: it was written by another trainer or another number of "
                f"processes than {self.args.world_size}, and cannot be continued exactly."
            )
        state = load_tensors(path)
        self._check_state(state)
        return state

    def _check_state(self, state: dict[str, Any]) -> None:
        """Raises if a run of this configuration cannot go on with `state`; subclasses add to it."""
        if self.args.ema_decay is not None and "ema" not in state:
            raise RunError(f"{self._resumed_from} has no averaged weights: resume with ema_decay=None.")

    def _rescue(self, reason: str) -> None:
        """Saves the state after the last optimizer step, where it is whole and this process alone can do so."""
        if not self._begun:
            return  # an error of the set-up; whatever the optimizer step is, it was not made here
        step, folder = self.state.global_step, Path(str(self.args.output_dir))
        say = self.progress.message
        alone = self.args.world_size == 1 and not self.is_sharded  # a checkpoint needs every process
        if self._saved_step != step and step and alone and not (self._updating or self.interrupts.forced):
            try:
                self._save_checkpoint(self.model_wrapped, trial=None)
            except Exception as error:  # the first error is the one to be raised
                say(f"The state after step {step} could not be saved: {error}")
        last = last_checkpoint(folder)
        if not step:
            say(f"{reason} before the first optimizer step: there is nothing to save.")
        elif self._saved_step is None or last is None:
            say(f"{reason} at step {step}, before any checkpoint was written: save_steps says how often one is.")
        else:
            say(f"{reason} at step {step}: go on from {last} with `trainer.train(resume_from_checkpoint=True)`.")

    _resumed_from: str | None = None
    _resumed_state: dict[str, Any] = {}
    _begun = False
    _updating = False  # between the beginning of an optimizer step and its end, when weights may be half new
    _saved_step: int | None = None

    def _begin(self) -> None:
        """Called when everything is prepared and, on a resume, loaded."""
        self._drained_step = self.state.global_step
        if self.args.ema_decay is not None:
            self.ema = EMAModel(self.trainable_parameters(), decay=self.args.ema_decay)
        if self._resumed_from is not None:
            state, self._resumed_state = self._resumed_state, {}
            self._load_state(state)
            if Path(self._resumed_from) == Path(str(self.args.output_dir)) / checkpoint_name(self.state.global_step):
                self._saved_step = self.state.global_step
        self._begun = True

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> Any:
        """See `transformers.Trainer`, which would train a finished run that is resumed for one step more."""
        if self.state.global_step >= self.state.max_steps:
            return [], None
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def _before_optimizer_step(self) -> None:
        self._updating = True

    def _after_optimizer_step(self) -> None:
        if self.ema is not None:
            self.ema.step(self.trainable_parameters())
        self._updating = False

    @contextmanager
    def ema_weights(self) -> Iterator[None]:
        """Puts the averaged weights in place of the trained ones; the trained ones come back at the end."""
        if self.ema is None:
            yield
            return
        parameters = self.trainable_parameters()
        self.ema.store(parameters)
        try:
            self.ema.copy_to(parameters)
            yield
        finally:
            self._reshard()  # what FSDP2 has gathered is the average
            self.ema.restore(parameters)

    def new_average(self, option: str) -> PolicyAverage:
        """A second set of the trained weights, which `option` asks for; to be made in `_begin`, where they lie."""
        self.check_averages(option)
        return PolicyAverage(self.trainable_parameters())

    @contextmanager
    def average_weights(self, average: PolicyAverage) -> Iterator[None]:
        """Puts `average` in place of the trained weights; the trained ones come back at the end."""
        with average.applied(self.trainable_parameters()):
            try:
                yield
            finally:
                self._reshard()  # what FSDP2 has gathered is the average

    @contextmanager
    def gradient_sync(self, model: nn.Module, last: bool) -> Iterator[None]:
        """Lets only the last backward of a micro-batch exchange gradients between ranks."""
        if last:
            yield
            return
        state = self.accelerator.gradient_state
        before = state.sync_gradients
        state._set_sync_gradients(False)
        try:
            with self.accelerator.no_sync(model):
                yield
        finally:
            state._set_sync_gradients(before)

    def backward(self, loss: Tensor) -> None:
        """Backward of a loss that is already divided by the accumulation steps."""
        # DeepSpeed would divide again: https://github.com/huggingface/transformers/pull/35808
        deepspeed = self.accelerator.distributed_type == DistributedType.DEEPSPEED
        self.accelerator.backward(loss, **({"scale_wrt_gas": False} if deepspeed else {}))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the metrics collected since the last log, averaged over all ranks; times are seconds per step."""
        if self.state.global_step and "loss" in logs:
            collected = self.metrics.drain()
            steps = max(self.state.global_step - self._drained_step, 1)
            self._drained_step = self.state.global_step
            per_step = {name: value / steps for name, value in collected.items() if name.startswith("time/")}
            logs = {**logs, **collected, **per_step}
        super().log(logs, start_time)

    # Saving and loading

    @property
    def _state_file(self) -> str:
        return f"omnitrl_state_{self.args.process_index}_of_{self.args.world_size}.pt"

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds beyond the Trainer's own state; subclasses add to it."""
        if self.ema is None:
            return {}
        shadow = [local(p) for p in self.ema.shadow_params]
        return {"ema": {"shadow_params": shadow, "optimization_step": self.ema.optimization_step}}

    def _load_state(self, state: dict[str, Any]) -> None:
        """The inverse of `_state`."""
        self._load_ema(state)

    def _load_ema(self, state: dict[str, Any]) -> None:
        if self.ema is not None:
            for p, saved in zip(self.ema.shadow_params, state["ema"]["shadow_params"], strict=True):
                local(p).copy_(saved)
            self.ema.optimization_step = state["ema"]["optimization_step"]

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """
        Writes the trained weights, and the averaged ones to `ema/`; see [`omnitrl.trainer.saving`].

        Args:
            output_dir (`str`, *optional*):
                `args.output_dir` by default.
        """
        folder = Path(output_dir or str(self.args.output_dir))
        self._save_weights(folder)
        if self.ema is not None:
            with self.ema_weights():
                self._save_weights(folder / _EMA_FOLDER, lora_name=DIFFUSERS_LORA_EMA)
        if self.args.should_save:
            save_tensors(folder / "training_args.bin", self.args.to_dict())
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def gather_weights(self, keep: bool) -> dict[str, dict[str, Tensor]]:
        """
        The trained weights as a whole, network → name → tensor; every process calls it.

        Args:
            keep (`bool`):
                Whether this process wants them; others get empty dicts. Those of DeepSpeed's third stage are the main
                process's only.
        """
        # Collective under FSDP and ZeRO-3, so every process comes here.
        engine = self.is_deepspeed_enabled and self.model_wrapped is not self.model  # that is, prepared
        self._reshard()
        state_dict = self.accelerator.get_state_dict(self.model_wrapped) if engine else None
        if engine and state_dict is None:
            return {}
        return whole_weights(trained_weights(self.flow_model, state_dict), keep=keep)

    def _save_weights(self, folder: Path, **kwargs: Any) -> None:
        weights = self.gather_weights(keep=self.args.should_save)
        if self.args.should_save:
            save_networks(self.flow_model, folder, weights, **kwargs)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not self.is_fsdp_enabled:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        # Without the weights, which the Trainer would write here a second time, frozen ones included.
        plugin, scheduler = self.accelerator.state.fsdp_plugin, self.lr_scheduler
        save_fsdp_optimizer(plugin, self.accelerator, self.optimizer, self.model, output_dir)
        if self.args.should_save and scheduler is not None:
            torch.save(scheduler.state_dict(), os.path.join(output_dir, "scheduler.pt"))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self.is_deepspeed_enabled:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._reshard()
            load_networks(self.flow_model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        best = str(self.state.best_model_checkpoint)
        if self.is_deepspeed_enabled:
            super()._load_best_model()
        else:
            self._load_from_checkpoint(best)
        if self.ema is not None:
            self._load_ema(load_tensors(Path(best) / self._state_file))

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self._writing_checkpoint else folder

    _drained_step = 0

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Writes the checkpoint under another name and gives it its own once it is complete on all processes."""
        final = Path(super()._get_output_dir(trial))
        target = final / checkpoint_name(self.state.global_step)
        staged = final / STAGING / target.name
        with self.metrics.timed("save"), explained(target):
            staged.mkdir(parents=True, exist_ok=True)
            save_tensors(staged / self._state_file, self._state())
            self._writing_checkpoint = True
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self._writing_checkpoint = False
            self._name_best(target)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self.state.save_to_json(str(staged / "trainer_state.json"))
                self._publish_checkpoint(staged, target)
            self.accelerator.wait_for_everyone()
        self._saved_step = self.state.global_step
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(target))

    def _name_best(self, target: Path) -> None:
        """The Trainer looks for the best checkpoint where `target` is staged."""
        if self.state.best_global_step:
            best = target.with_name(checkpoint_name(self.state.best_global_step))
            self.state.best_model_checkpoint = str(best) if best == target or best.is_dir() else None

    def _publish_checkpoint(self, staged: Path, target: Path) -> None:
        publish(staged, target)
        rotate_checkpoints(
            output_dir=str(target.parent),
            save_total_limit=self.args.save_total_limit,
            best_model_checkpoint=self.state.best_model_checkpoint,
            use_mtime=True,
        )


class _Hooks(TrainerCallback):
    """Tells the trainer when the loop has begun, and when an optimizer step begins and is done."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._begin()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._trainer._before_optimizer_step()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._trainer._after_optimizer_step()


def _say_nothing(text: str) -> None:
    """For the processes whose words would be the main one's again."""


def _as_dict(value: dict | str | None) -> dict[str, Any]:
    """`TrainingArguments` has turned a JSON string into a dict by now."""
    return dict(value) if isinstance(value, dict) else {}


def _load_dtype(args: BaseConfig) -> torch.dtype:
    """Weights are loaded in the precision that the network runs in; trained ones are float32 in any case."""
    if args.bf16:
        return torch.bfloat16
    return torch.float16 if args.fp16 else torch.float32


def _check_output_dir(args: BaseConfig) -> None:
    folder = Path(str(args.output_dir))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-test-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InputError(
            f"output_dir={str(folder)!r} cannot be written to ({error.strerror}): choose a folder of your own."
        ) from error
