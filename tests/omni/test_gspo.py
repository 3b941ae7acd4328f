# SPDX-License-Identifier: Apache-2.0
"""GSPO on tiny models: the loss, the media of each row, and what a run can be told."""

import math

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import TrainerCallback

from omnitrl.omni import OmniProcessor, read_row
from omnitrl.omni.thinker import ATTENTION, EXPERTS, TOWERS, load_thinker, media_tokens
from omnitrl.trainer.gspo_trainer import GSPOTrainer
from tests.omni import chats, tiny


LORA = {"r": 4, "lora_alpha": 8, "target_modules": ATTENTION, "exclude_modules": TOWERS, "target_parameters": EXPERTS}


class Record(TrainerCallback):
    """Weights before, gradients of and the micro-batch of each update."""

    def __init__(self):
        self.trainer = None
        self.weights, self.gradients, self.batches = [], [], []

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        self.weights.append({name: value.detach().clone() for name, value in model.state_dict().items()})

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        named = model.named_parameters()
        self.gradients.append({name: weight.grad.clone() for name, weight in named if weight.grad is not None})
        index = (self.trainer._step - 1) % self.trainer.args.steps_per_generation
        self.batches.append(dict(self.trainer._buffered_inputs[index]))


def recorded(folder, *arguments, **changed):
    record = Record()
    record.trainer = chats.trainer(folder, *arguments, callbacks=[record], max_grad_norm=1e9, **changed)
    record.trainer.train()
    return record


def test_a_mixed_batch_is_trained(tmp_path):
    trained = chats.trainer(tmp_path)
    before = {name: weight.clone() for name, weight in trained.model.named_parameters()}
    trained.train()
    assert trained.state.global_step == 2
    assert all(math.isfinite(loss) for loss in chats.logged(trained, "loss"))
    moved = {name for name, weight in trained.model.named_parameters() if not torch.equal(weight, before[name])}
    gates = {f"model.language_model.layers.{i}.mlp.gate.weight" for i in range(2)}
    assert moved.isdisjoint(gates)
    assert {"lm_head.weight", "model.language_model.layers.0.mlp.experts.down_proj"} <= moved
    assert chats.logged(trained, "ratio/mean")[0] == pytest.approx(1, abs=1e-6)
    assert abs(chats.logged(trained, "ratio/mean")[1] - 1) > 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "image", "video", "audio"])
def test_rows_of_each_kind_are_trained(kind, tmp_path):
    trained = chats.trainer(tmp_path, kind)
    before = {name: weight.clone() for name, weight in trained.model.named_parameters()}
    trained.train()
    moved = {name for name, weight in trained.model.named_parameters() if not torch.equal(weight, before[name])}
    towers = {name for name in ("audio_tower", "visual") if any(name in moved_name for moved_name in moved)}
    assert towers == {"text": set(), "image": {"visual"}, "video": {"visual"}, "audio": {"audio_tower"}}[kind]


# The loss


def test_the_ratio_of_a_sequence_by_hand(tmp_path):
    trained = chats.trainer(tmp_path, "text")
    trained.model.train()
    # Two answers, of three and of two tokens. Ratios: exp((0.3 − 0.3 + 0.6) / 3) = e^0.2, and exp(−0.2 / 2) = e^−0.1.
    log_probs = torch.tensor([[-0.7, -1.3, -0.4], [-1.2, -1.0, 0.0]], requires_grad=True)
    old = torch.tensor([[-1.0, -1.0, -1.0], [-1.0, -1.0, 5.0]])
    trained._get_per_token_logps_and_entropies = lambda *a, **k: (log_probs, torch.zeros(2, 3), None)
    trained._log_probs = log_probs
    trained.epsilon_low, trained.epsilon_high = 0.3, 0.1
    trained.current_gradient_accumulation_steps = 1
    tokens = {"prompt_ids": torch.zeros(2, 1, dtype=torch.long), "prompt_mask": torch.ones(2, 1, dtype=torch.long)}
    tokens |= {"completion_ids": torch.zeros(2, 3, dtype=torch.long)}
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    loss = trained._compute_loss(
        trained.model,
        {**tokens, "completion_mask": mask, "advantages": torch.tensor([2.0, -1.0]), "old_per_token_logps": old},
    )
    # The first is above 1.1 and good: clipped. The second is within the range.
    assert loss.item() == pytest.approx((-2.0 * 1.1 + math.exp(-0.1)) / 2)
    loss.backward()
    torch.testing.assert_close(log_probs.grad[0], torch.zeros(3))
    torch.testing.assert_close(log_probs.grad[1], torch.tensor([1.0, 1.0, 0.0]) * math.exp(-0.1) / 2 / 2)
    metrics = trained._metrics["train"]
    assert metrics["ratio/max"] == [pytest.approx(math.exp(0.2))]
    assert metrics["ratio/min"] == [pytest.approx(math.exp(-0.1))]
    assert metrics["clip_ratio/region_mean"] == [0.5]


def independent_loss(model, batch, old, epsilon, epsilon_high, temperature, rows=chats.ROWS["mixed"]):
    """GSPO of a micro-batch: each answer alone and without padding, its prompt processed anew from the dataset."""
    processor = OmniProcessor(tiny.processor())
    rows = {tuple(processor(read_row(row)).input_ids): row for row in rows}
    losses = []
    for i in range(len(batch["advantages"])):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist()
        answer = batch["completion_ids"][i][batch["completion_mask"][i].bool()].tolist()
        media = processor(read_row(rows[tuple(prompt)])).media
        ids = torch.tensor([prompt + answer])
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **media).logits[0, :-1] / temperature
        log_probs = logits.log_softmax(-1)[torch.arange(len(logits)), ids[0, 1:]][-len(answer) :]
        ratio = torch.exp((log_probs - (log_probs.detach() if old is None else old[i])).mean())
        advantage = batch["advantages"][i]
        clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
        losses.append(-torch.minimum(ratio * advantage, clipped * advantage))
    return torch.stack(losses).mean(), log_probs


@pytest.mark.slow
def test_gradients_are_those_of_an_independent_implementation(tmp_path):
    record = recorded(
        tmp_path, "mixed", per_device_train_batch_size=4, epsilon=0.05, epsilon_high=0.05, temperature=0.8,
        learning_rate=3e-3, max_steps=4, steps_per_generation=2,
    )  # fmt: skip
    model = tiny.thinker()
    clipped = 0
    for step in range(4):
        batch = record.batches[step]
        old = [
            row[: mask.sum()] for row, mask in zip(batch["old_per_token_logps"], batch["completion_mask"], strict=True)
        ]
        model.load_state_dict(record.weights[step])
        model.zero_grad()
        loss, _ = independent_loss(model, batch, old, 0.05, 0.05, 0.8)
        loss.backward()
        wanted = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
        gradients = record.gradients[step]
        scale = max(gradient.abs().max() for gradient in wanted.values())
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, wanted[name], atol=2e-5 * scale, rtol=1e-3, msg=name)
        clipped += chats.logged(record.trainer, "clip_ratio/region_mean")[step] > 0
    assert clipped >= 1


@pytest.mark.slow
def test_checkpointing_of_activations_changes_nothing(tmp_path):
    plain, checkpointed = (
        recorded(tmp_path / str(on), "mixed", per_device_train_batch_size=4, gradient_checkpointing=on)
        for on in (False, True)
    )
    for one, other in zip(plain.gradients, checkpointed.gradients, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            torch.testing.assert_close(one[name], other[name], atol=1e-6, rtol=1e-5, msg=name)


@pytest.mark.slow
def test_accumulation_gives_the_gradient_of_the_whole_batch(tmp_path):
    whole = recorded(tmp_path / "a", "mixed", per_device_train_batch_size=8, steps_per_generation=1, max_steps=1)
    parts = recorded(
        tmp_path / "b", "mixed", per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=4,
        max_steps=1,
    )  # fmt: skip
    for name, gradient in whole.gradients[0].items():
        torch.testing.assert_close(parts.gradients[0][name], gradient, atol=2e-6, rtol=1e-3, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("coefficient", [0.0, 0.5])
def test_the_load_balancing_loss(coefficient, tmp_path):
    """At an advantage of 0 nothing else has a gradient."""
    record = recorded(
        tmp_path, "mixed", reward=lambda prompts, **kwargs: [1.0] * len(prompts), max_steps=1, freeze_router=False,
        router_aux_loss_coef=coefficient,
    )  # fmt: skip
    gates = [gradient for name, gradient in record.gradients[0].items() if name.endswith("mlp.gate.weight")]
    assert any(gradient.abs().max() > 0 for gradient in gates) == (coefficient > 0)
    losses = chats.logged(record.trainer, "aux_loss")
    if coefficient:
        assert chats.logged(record.trainer, "loss")[0] == pytest.approx(coefficient * losses[0], rel=1e-3)
    else:
        assert losses == []


# Runs


BATCHING = {"num_blocks": 64, "max_batch_tokens": 64}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("mixed", {"per_device_train_batch_size": 4, "max_completion_length": 8}),
        ("text", {"processing_class": tiny.tokenizer(), "max_completion_length": 8}),
        (
            "text",
            {
                "processing_class": tiny.tokenizer(), "max_completion_length": 8,
                "use_transformers_continuous_batching": True, "transformers_continuous_batching_config": BATCHING,
            },
        ),
    ],
    ids=["mixed", "tokenizer", "continuous batching"],
)  # fmt: skip
def test_no_completion_has_tokens_of_media(kind, given, tmp_path):
    """They are half of what the model would write."""
    model = tiny.thinker()
    tokens = media_tokens(model.config)
    with torch.no_grad():
        model.lm_head.weight[tokens] *= 30
    record = recorded(tmp_path, kind, model, **given)
    written = torch.cat([batch["completion_ids"].flatten() for batch in record.batches])
    assert len(written) > 20
    assert not torch.isin(written, torch.tensor(tokens)).any()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LORA], ids=["all weights", "adapter"])
def test_resumed_is_uninterrupted(lora, tmp_path):
    """In the middle of a rollout, whose rest has pictures and sounds."""

    def new(seed):
        peft_config = None if lora is None else LoraConfig(**lora)
        return chats.trainer(tmp_path, model=tiny.thinker(0 if lora else seed), peft_config=peft_config, **changed)

    changed = {"max_steps": 5, "steps_per_generation": 4, "save_steps": 3, "save_strategy": "steps"}
    changed |= {"lr_scheduler_type": "constant"}
    whole, again = new(seed=0), new(seed=9)
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    for (name, one), other in zip(whole.model.named_parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert chats.logged(again, "loss") == chats.logged(whole, "loss")


def test_a_rollout_that_is_cut_into_other_batches_is_left_out(tmp_path, caplog):
    given = {"model": tiny.language_model(), "processing_class": tiny.tokenizer(), "max_steps": 3}
    chats.trainer(tmp_path, "text", **given, save_strategy="steps", save_steps=1).train()
    again = chats.trainer(tmp_path, "text", **given, steps_per_generation=4, num_generations=4)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    assert "is left out, since it is cut into other batches" in caplog.text
    assert chats.logged(again, "ratio/mean")[1] == pytest.approx(1, abs=1e-6)  # of a rollout that has just been made


@pytest.mark.slow
def test_a_saved_adapter_is_loaded_by_transformers_and_peft(tmp_path):
    tiny.save_full(tmp_path / "whole")
    trained = GSPOTrainer(
        model=str(tmp_path / "whole"),
        reward_funcs=chats.vowels,
        args=chats.GSPOConfig(**chats.options(tmp_path, learning_rate=1e-2)),
        train_dataset=chats.dataset("mixed"),
        processing_class=tiny.processor(),
        peft_config=LoraConfig(**LORA),
    )
    trained.train()
    trained.save_model(tmp_path / "adapter")
    inputs = OmniProcessor(tiny.processor())(read_row(chats.ROWS["mixed"][2]))
    given = {
        "input_ids": torch.tensor([inputs.input_ids]),
        "attention_mask": torch.ones(1, len(inputs.input_ids)).long(),
    }
    base = load_thinker(str(tmp_path / "whole"))
    with torch.no_grad():
        before = base(**given, **inputs.media).logits
        after = trained.model.eval()(**given, **inputs.media).logits
        loaded = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(**given, **inputs.media).logits
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(loaded, after, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", [tiny.language_model, tiny.thinker])
def test_continuous_batching_writes_what_generate_writes(model, tmp_path):
    """For texts, and so for a Thinker with its tokenizer alone; at each place the most probable token."""
    rows = [{"prompt": text} for text in ("1 + 1 =", "What is it that we see here?")]
    trained = chats.trainer(
        tmp_path, datasets.Dataset.from_list(rows), model(), processing_class=tiny.tokenizer(), shuffle_dataset=False,
        use_transformers_continuous_batching=True, max_completion_length=8, top_k=1, max_steps=2,
        transformers_continuous_batching_config=BATCHING,
    )  # fmt: skip
    record = Record()
    record.trainer = trained
    trained.add_callback(record)
    trained.train()
    plain = model()
    written = {}
    for batch in record.batches:
        for prompt, mask, answer in zip(
            batch["prompt_ids"], batch["prompt_mask"], batch["completion_ids"], strict=True
        ):
            written.setdefault(tiny.tokenizer().decode(prompt[mask.bool()]), []).append(answer.tolist())
    assert set(written) == {row["prompt"] for row in rows}
    for text, answers in written.items():
        ids = torch.tensor([tiny.tokenizer()(text).input_ids])
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
        assert answers == [plain.generate(ids, **options)[0, ids.shape[1] :].tolist()] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "processor", "kind"),
    [
        (tiny.thinker_25, lambda: tiny.processor(tiny.TinyOmni25Processor), "mixed"),
        (tiny.vision_language_model, tiny.vision_language_processor, "image"),
        (tiny.language_model, tiny.tokenizer, "text"),
    ],
)
def test_other_models(model, processor, kind, tmp_path):
    trained = chats.trainer(
        tmp_path, kind, model(), processing_class=processor(), router_aux_loss_coef=None, max_steps=3, beta=0.0
    )
    trained.train()
    assert chats.logged(trained, "ratio/mean")[0] == pytest.approx(1, abs=1e-6)
    assert all(norm > 0 for norm in chats.logged(trained, "grad_norm")[:1])
