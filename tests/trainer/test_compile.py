# SPDX-License-Identifier: Apache-2.0
"""`torch_compile=True`: the blocks of the network are compiled, in rollouts as in training."""

import pytest
import torch

from tests.trainer.helpers import all_rows, fresh_rollout, logged, trainable, trainer


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_a_compiled_run_is_the_run(tmp_path):
    """The default backend: the same rewards, weights that move as without it, and files that name no wrapper."""
    options = {"max_steps": 2, "guidance_scale": 3.0, "beta": 0.04}
    plain = trainer(tmp_path / "plain", **options)
    before = trainable(plain)
    plain.train()
    compiled = trainer(tmp_path / "compiled", torch_compile=True, **options)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled.train()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs
    assert compiled.accelerator.unwrap_model(compiled.model) is compiled.model
    assert logged(compiled, "reward") == pytest.approx(logged(plain, "reward"), abs=1e-3)
    assert logged(compiled, "grad_norm") == pytest.approx(logged(plain, "grad_norm"), rel=1e-3)
    for name, tensor in trainable(compiled).items():
        moved = (tensor - before[name]).abs().max()
        assert 0 < moved < 0.1
    assert not [name for name in compiled.flow_model.networks.state_dict() if "_orig_mod" in name]


@pytest.mark.slow
def test_the_ratio_of_a_compiled_rollout_is_one(tmp_path):
    run = trainer(tmp_path, torch_compile=True, torch_compile_backend="aot_eager")
    buffer = fresh_rollout(run)
    rows = all_rows(buffer)  # another batch size than the rollout's
    with torch.no_grad():
        log_probs = run.replay(run.model, rows, buffer).log_probs
    assert ((log_probs - rows.old_log_probs).exp() - 1).abs().max() <= 1e-6
