# SPDX-License-Identifier: Apache-2.0
import pytest
from PIL import Image

from omnitrl.report import EvaluationRecord, RunSummary, Sample


NASTY = '<script>alert("x")</script> & <img src=http://evil.example/x.png>'
COLORS = ("red", "lime", "blue")


def evaluation(step, reward, color, name="eval"):
    samples = [
        Sample(NASTY, Image.new("RGB", (64, 32), color), reward),
        Sample("CAT", Image.new("RGB", (64, 32), color), None, caption="read as C4T"),
    ]
    metrics = {f"{name}_reward": reward, f"{name}_exact_match": reward / 2, f"{name}_runtime": 3.0}
    return EvaluationRecord(step, name, metrics, samples)


@pytest.fixture
def run():
    """A run of three steps with three evaluations of the held-out set and two of another."""
    history = [{"step": 0, "eval_reward": 0.5, "eval_unseen_reward": 0.4, "seconds": 0.0}]
    for step, reward in ((1, 0.55), (2, None), (3, 0.65)):
        row = {"step": step, "reward": reward, "reward_std": 0.1, "seconds": 10.0 * step, "kl": 0.01 * step}
        history.append(row | {"ratio/sum_log_std": 0.4, "step_time": 4.0, "time/rollout": 2.0, "time/train": 1.0})
    history.append({"step": 3, "eval_reward": 0.8125, "eval_unseen_reward": 0.3, "seconds": 31.0})
    evaluations = [
        evaluation(step, reward, color)
        for step, reward, color in zip((0, 1, 3), (0.5, 0.6, 0.8125), COLORS, strict=True)
    ]
    evaluations += [EvaluationRecord(step, "eval_unseen", {"reward": reward}) for step, reward in ((0, 0.4), (3, 0.3))]
    return RunSummary(
        title=f"FlowGRPO on {NASTY}",
        algorithm="FlowGRPO",
        model_name="acme/tiny-words",
        status="finished: 3 steps",
        config={"num_generations": 8, "beta": 0.0, "ema_decay": None, "hub_token": "hf_secret", "output_dir": "out"},
        environment={"torch": "2.13.0", "device": "one <fast> device"},
        history=history,
        evaluations=evaluations,
        load_snippet='pipe.load_lora_weights("out")',
        notes=["Words & <b>letters</b>."],
    )
