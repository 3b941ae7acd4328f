# SPDX-License-Identifier: Apache-2.0
"""Rollouts of an engine whose log-probs are not the trainer's own."""

import logging

import pytest
import torch

from omnitrl.algorithms import IMPORTANCE_MODES, importance_weights
from omnitrl.errors import InputError
from omnitrl.rollout import ENGINES, LocalEngine
from omnitrl.trainer import TRAINERS, get_trainer
from omnitrl.trainer.replay_trainer import PolicyGradientTrainer
from omnitrl.trainer.rollouts import IMPORTANCE_WEIGHTS
from tests.marks import first_fast
from tests.trainer.helpers import all_rows, fresh_rollout, logged, same, trainable, trainer


WITH_POLICY_GRADIENT = [name for name in TRAINERS if issubclass(get_trainer(name), PolicyGradientTrainer)]


class DriftedEngine(LocalEngine):
    """Samples with one weight matrix a little off, as another kernel's products would be."""

    def generate(self, requests, params):
        matrix = next(p for name, p in self.model.networks.named_parameters() if name.endswith("proj_out.weight"))
        own, batches = matrix.data.clone(), super().generate(requests, params)
        drift = 1e-2 * torch.randn(matrix.shape, generator=torch.Generator().manual_seed(0))
        while True:
            matrix.data.copy_(own + drift)
            batch = next(batches, None)
            matrix.data.copy_(own)
            if batch is None:
                return
            yield batch


@pytest.fixture(autouse=True)
def drifted(monkeypatch):
    monkeypatch.setitem(ENGINES, "drifted", (__name__, DriftedEngine.__name__))


def drifted_run(tmp_path, algorithm="flow_grpo", **options):
    return trainer(tmp_path, algorithm, rollout_engine="drifted", **{"max_steps": 2, **options})


def log_probs_of(buffer):
    """(N, K) old log-probs of a rollout."""
    return torch.stack([trajectory.log_probs for trajectory in buffer.trajectories])


@pytest.mark.parametrize("old", ["auto", "engine"])
def test_the_difference_is_logged_whoevers_log_probs_are_taken(tmp_path, old):
    run = drifted_run(tmp_path, old_log_probs=old)
    run.train()
    (mean,), (largest,) = logged(run, "rollout/logp_abs_diff_mean"), logged(run, "rollout/logp_abs_diff_max")
    assert 1e-4 < mean < largest < 1


def test_old_log_probs_are_recomputed_by_the_trainer(tmp_path):
    theirs = log_probs_of(fresh_rollout(drifted_run(tmp_path, old_log_probs="engine")))
    run = drifted_run(tmp_path)
    buffer = fresh_rollout(run)
    assert run._forwards == 8 * 4 + 8 * 3  # four sampler steps, and three trained ones once more
    with torch.no_grad():
        again = run.replay(run.model, all_rows(buffer), buffer).log_probs.view(3, 8).T
    assert (log_probs_of(buffer) - again).abs().max() <= 1e-5  # batches of other sizes
    assert (log_probs_of(buffer) - theirs).abs().mean() > 1e-4


def test_the_ratio_of_the_first_update_is_one_nevertheless(tmp_path):
    run = drifted_run(tmp_path, steps_per_generation=2, gradient_accumulation_steps=2, max_steps=1)
    run.train()
    assert logged(run, "ratio/mean") == pytest.approx([1.0], abs=1e-6)
    assert logged(run, "ratio/approx_kl") == pytest.approx([0.0], abs=1e-10)


@pytest.mark.parametrize(("bound", "warned"), [(1e-5, True), (10.0, False)])
def test_a_difference_beyond_the_bound_warns_with_advice(tmp_path, caplog, bound, warned):
    run = drifted_run(tmp_path, logp_diff_bound=bound)
    with caplog.at_level(logging.WARNING):
        run.train()
    assert ("its samples come from another policy than the one that is trained. Look at" in caplog.text) is warned


@pytest.mark.parametrize("mode", IMPORTANCE_MODES)
def test_the_loss_of_a_step_is_weighted_by_its_importance(tmp_path, mode):
    options = {"logp_diff_bound": 10.0, "advantage_clip": None}
    theirs = log_probs_of(fresh_rollout(drifted_run(tmp_path, old_log_probs="engine")))
    plain = drifted_run(tmp_path, **options)
    mine = log_probs_of(buffer := fresh_rollout(plain))
    bound = float((mine - theirs).exp().flatten().sort().values[-4])  # some ratios are above it
    settings = {"vllm_importance_sampling_mode": mode, "vllm_importance_sampling_clip_max": bound}
    run = drifted_run(tmp_path, vllm_importance_sampling_correction=True, **settings, **options)
    corrected = fresh_rollout(run)
    wanted = importance_weights(mine, theirs, mode, bound).weights
    assert torch.allclose(corrected.extras[IMPORTANCE_WEIGHTS], wanted, atol=1e-5)
    plain._buffer, run._buffer = buffer, corrected
    with torch.no_grad():
        losses = plain.compute_row_losses(plain.model, all_rows(buffer), buffer)
        weighted = run.compute_row_losses(run.model, all_rows(corrected), corrected)
    assert torch.allclose(weighted, losses * wanted.T.flatten(), atol=1e-5)
    assert (weighted - losses).abs().max() > 1e-4


@pytest.mark.parametrize("algorithm", first_fast(WITH_POLICY_GRADIENT))
def test_every_policy_gradient_can_be_corrected_and_resumed(tmp_path, algorithm):
    run = drifted_run(tmp_path, algorithm, vllm_importance_sampling_correction=True, logp_diff_bound=10.0)
    run.train()
    assert logged(run, "rollout/importance_weight_mean") == pytest.approx([1.0], abs=0.1)
    assert logged(run, "rollout/importance_bounded") == [0.0]


def test_a_run_that_is_resumed_in_a_rollout_has_its_weights(tmp_path):
    options = {"vllm_importance_sampling_correction": True, "logp_diff_bound": 10.0, "max_steps": 2}
    whole = drifted_run(tmp_path / "whole", **options)
    whole.train()
    drifted_run(tmp_path / "part", save_strategy="steps", save_steps=1, **options).train()
    rest = drifted_run(tmp_path / "part", **options)
    rest.train(resume_from_checkpoint=str(tmp_path / "part" / "out" / "checkpoint-1"))
    assert same(trainable(rest), trainable(whole))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"old_log_probs": "engine", "vllm_importance_sampling_correction": True},
            "use old_log_probs='recompute'",
        ),
        ({"old_log_probs": "server"}, "old_log_probs='server' is unknown: use one of 'auto', 'recompute', 'engine'"),
        ({"vllm_importance_sampling_mode": "token_mask"}, "use one of 'step_truncate'"),
        ({"vllm_importance_sampling_clip_max": 0.5}, "vllm_importance_sampling_clip_max=0.5 must be above 1"),
        ({"logp_diff_bound": 0.0}, "logp_diff_bound=0.0 must be above 0"),
        (
            {"guidance_scale": 4.0, "guidance_scale_train": 1.0, "vllm_importance_sampling_correction": True},
            "leave guidance_scale_train out",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, options, words):
    with pytest.raises(InputError, match=words):
        drifted_run(tmp_path, **options)
