# SPDX-License-Identifier: Apache-2.0
"""
What two processes do with weights that FSDP2 shards, started by `test_fsdp.py`.

Accelerate makes DDP of FSDP on a CPU without a word, for its list of FSDP's devices leaves the CPU out. Here the state
object is put right just after it is made; everything from there on, the sharding itself included, is the real one.
"""

import os

import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.distributed.ddp import StopAt, make, recording
from tests.distributed.launch import main
from tests.tiny import CHECKPOINTS
from tests.tiny_models import tiny_model
from tests.trainer.helpers import logged


WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))
SHARDED = {"fsdp": True, "fsdp_config": {"version": 2}} if WORLD_SIZE > 1 else {}
# How Accelerate's own launch configurations have the optimizer's state saved.
IN_PARTS = {"fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}} if WORLD_SIZE > 1 else {}
FULL = {"peft_config": None, "learning_rate": 1e-4}
# Two network calls accumulate before the gradients of a micro-batch are exchanged, with a reference and an average.
COMMON = {"beta": 0.5, "kl_form": "exact", "ema_decay": 0.9, **SHARDED}


def shard_on_cpus():
    """Lets Accelerate shard on CPUs when it is asked to."""
    original = AcceleratorState.__init__

    def initialise(self, *args, fsdp_plugin=None, **kwargs):
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            if self._mixed_precision != "no":
                fsdp_plugin.set_mixed_precision(self._mixed_precision)
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin

    AcceleratorState.__init__ = initialise


if WORLD_SIZE > 1:
    shard_on_cpus()


def whole(tensor):
    """All of a tensor that each process has a part of."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weights(run):
    """The trained weights, whole, by name; every process calls this."""
    run._reshard()
    named = run.flow_model.networks.named_parameters()
    return {name: whole(p.detach()).clone() for name, p in named if p.requires_grad}


def average(run):
    return [whole(p).clone() for p in run.ema.shadow_params]


def kinds(run):
    """Types of the parameters, after a forward has left some of them whole: shards, if the weights are sharded."""
    run._reshard()
    parameters = list(run.flow_model.networks.parameters())
    return {
        "parameters": {type(p.data).__name__ for p in parameters},
        "share": sum(p.to_local().numel() if isinstance(p, DTensor) else p.numel() for p in parameters)
        / sum(p.numel() for p in parameters),
        "wrapped": isinstance(run.model_wrapped, FSDPModule),
        "units": sum(isinstance(module, FSDPModule) for module in run.model.modules()),
    }


def two_updates(place, **options):
    run = make(place, **{**COMMON, "max_steps": 2, "eval_dataset": ["a cat", "a dog", "a bird"], **options})
    seen = recording(run)
    run.train()
    evaluated = run.evaluate()
    run.save_model()
    return {
        **kinds(run),
        "weights": weights(run),
        "ema": average(run),
        "samples": seen,
        "reward": logged(run, "reward"),
        "kl": logged(run, "kl"),
        "grad_norm": logged(run, "grad_norm"),
        "mismatch": logged(run, "rollout/logp_abs_diff_max"),
        "eval_reward": evaluated["eval_reward"],
    }


def lora(place):
    return two_updates(place)


def full_fine_tuning(place):
    return two_updates(place, **FULL)


def bfloat16(place):
    """A network in bfloat16 with adapters in float32, as large models are trained."""
    model = tiny_model()
    model.pipeline.to(torch.bfloat16)
    dtypes, timesteps, predict = set(), set(), model.predict

    def look(module, args, kwargs):
        dtypes.update((name, kwargs[name].dtype) for name in ("hidden_states", "timestep"))
        timesteps.update(kwargs["timestep"].tolist())

    def predict_and_look(*args):
        velocity = predict(*args)
        dtypes.add(("v", velocity.dtype))
        return velocity

    model.transformer.register_forward_pre_hook(look, with_kwargs=True)
    model.predict = predict_and_look
    return {**two_updates(place, model=model, bf16=True), "dtypes": dtypes, "timesteps": timesteps}


def two_networks(place):
    """Each network has steps of its own: the last backward of a micro-batch, which exchanges, goes to one of them."""
    model = CHECKPOINTS["wan-a14b"].model()
    return two_updates(place, model=model, height=32, width=64, num_frames=5, guidance_scale=3.0)


def resumed(place):
    """In the midst of a rollout, where the first network call is the reference's, and at its end; in both formats."""
    result = {}
    for name, options in {"lora": {}, "full": {**FULL, **IN_PARTS}}.items():
        for stop in (1, 2):
            common = {
                **COMMON,
                "gradient_accumulation_steps": 1,
                "save_strategy": "steps",
                "save_steps": stop,
                **options,
            }
            straight = make(place / f"{name}{stop}a", **common)
            straight.train()
            make(place / f"{name}{stop}b", callbacks=[StopAt(stop)], **common).train()
            again = make(place / f"{name}{stop}b", **common)
            again.train(resume_from_checkpoint=True)
            result[name, stop] = {
                "straight": (weights(straight), average(straight), logged(straight, "loss")),
                "again": (weights(again), average(again), logged(again, "loss")),
                "steps": again.state.global_step,
            }
    return result


def saving(place):
    """The best of three checkpoints comes back."""
    peaks = iter([0.1, 0.9, 0.3])
    run = make(
        place,
        **COMMON,
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=1,
        eval_steps=1,
        save_total_limit=1,
        load_best_model_at_end=True,
        metric_for_best_model="peak",
        greater_is_better=True,
        eval_dataset=["a cat"],
        max_steps=3,
    )
    evaluate, kept = run.evaluate, {}

    def evaluate_with_peak(*args, **kwargs):
        kept[run.state.global_step] = (weights(run), average(run))
        return evaluate(*args, **kwargs) | {"eval_peak": next(peaks)}

    run.evaluate = evaluate_with_peak
    run.train()
    return {"kept": kept, "final": (weights(run), average(run))}


def second_weights(place):
    """Rollouts and losses of an average that changes places with shards, all weights trained."""
    result = {}
    for algorithm in ("diffusion_nft", "awm"):
        run = make(
            place / algorithm,
            algorithm=algorithm,
            max_steps=3,
            timesteps_per_sample=2,
            **{name: value for name, value in COMMON.items() if name != "kl_form"},
            **{**FULL, "learning_rate": 1e-3},
        )
        run.train()
        result[algorithm] = {"weights": weights(run), "reward": logged(run, "reward"), "kl": logged(run, "kl")}
    return result


SCENARIOS = {f.__name__: f for f in (lora, full_fine_tuning, bfloat16, two_networks, resumed, saving, second_weights)}

if __name__ == "__main__":
    main(SCENARIOS)
