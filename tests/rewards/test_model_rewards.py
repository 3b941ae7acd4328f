# SPDX-License-Identifier: Apache-2.0
"""Rewards whose value a network gives: on tiny networks, against the authors' packages and against plain formulas."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.rewards import (
    AestheticReward,
    CLIPReward,
    DifferentiableRewards,
    HPSv2Reward,
    HPSv3Reward,
    ImageRewardModel,
    PickScoreReward,
    RewardError,
    RewardRunner,
    get_reward,
)
from omnitrl.rewards.learned.preprocessing import CLIP_MEAN, CLIP_STD, Preprocessing
from tests.golden_cases import load_case
from tests.rewards.tiny_scorers import (
    PROMPTS,
    bert_tokenizer,
    clip_folder,
    clip_tokenizer,
    head_weights,
    hpsv3_weights,
    image_reward_weights,
    open_clip_weights,
    pictures,
    qwen_folder,
)


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    return clip_folder(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Checkpoints as the authors publish them, under the names of their files."""
    folder = tmp_path_factory.mktemp("checkpoints")
    torch.save({"state_dict": open_clip_weights(), "epoch": 5}, folder / "HPS_v2.1_compressed.pt")
    torch.save({"state_dict": open_clip_weights(seed=99)}, folder / "HPS_v2_compressed.pt")
    torch.save(head_weights(), folder / "aesthetic-model.pth")
    torch.save(image_reward_weights(), folder / "ImageReward.pt")
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return qwen_folder(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def golden():
    return load_case("08c_reward_models")[1]


def cosines(clip):
    """Cosines of pictures and prompts by transformers' own processor and model."""
    from transformers import CLIPModel
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    model = CLIPModel.from_pretrained(clip).eval()
    tokens = clip_tokenizer()(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model(**tokens, **processor(pictures(), return_tensors="pt")).logits_per_image
    return (logits.diagonal() / model.logit_scale.exp()).tolist()


# Preprocessing


def test_pictures_are_prepared_as_by_transformers():
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    images = [*pictures(), Image.effect_noise((32, 32), 60).convert("RGB"), pictures()[0].resize((20, 27))]
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    expected = processor(images, return_tensors="pt")["pixel_values"]
    assert torch.allclose(Preprocessing(32).pictures(images), expected, atol=1e-6)


def test_pictures_are_prepared_as_by_the_authors(golden):
    images = pictures()
    hps, reward = Preprocessing(32, fit="pad"), Preprocessing(32, rounds_half=True)
    assert torch.allclose(hps.pictures(images), golden["hpsv2_pixels"], atol=1e-5)
    assert torch.allclose(reward.pictures(images), golden["imagereward_pixels"], atol=1e-6)


def test_what_is_padded_is_black_and_what_is_cut_is_centred():
    white = Image.new("RGB", (64, 32), "white")
    padded = Preprocessing(32, fit="pad").pictures([white])[0, 0] * CLIP_STD[0] + CLIP_MEAN[0]
    assert padded[:8].abs().max() == pytest.approx(0, abs=1e-6)
    assert padded[9:23].min() == pytest.approx(1, abs=1e-6)
    ramp = Image.fromarray(np.repeat(np.arange(64, dtype=np.uint8)[None, :, None], 32, axis=0).repeat(3, axis=2))
    cut = Preprocessing(32).pictures([ramp])[0, 0] * CLIP_STD[0] + CLIP_MEAN[0]
    assert (cut[0] * 255).round().tolist() == list(range(16, 48))


@pytest.mark.parametrize("options", [{}, {"rounds_half": True}, {"fit": "pad"}])
def test_pixels_are_prepared_as_pictures(options):
    preparation = Preprocessing(32, **options)
    bound = 1e-5 if options.get("fit") == "pad" else 1.1 / 255 / min(CLIP_STD)  # Pillow rounds twice
    for image in pictures():
        pixels = torch.from_numpy(np.array(image)).movedim(-1, 0)[None].float() / 255
        difference = preparation.pixels(pixels) - preparation.pictures([image])
        assert difference.abs().max() <= bound


# Values


def test_clip_score_is_a_hundred_times_the_cosine_and_at_least_0(clip):
    expected = cosines(clip)
    assert min(expected) < 0 < max(expected), expected
    assert CLIPReward(clip, batch_size=2)(PROMPTS, pictures()) == pytest.approx(
        [max(100 * cosine, 0) for cosine in expected], abs=1e-4
    )
    plain = CLIPReward(clip, clamp=False, scale=1.0)
    assert plain(PROMPTS, pictures()) == pytest.approx(expected, abs=1e-6)


def test_pickscore_has_the_logit_scale_of_its_checkpoint(clip):
    scale = float(torch.tensor(2.5).exp())
    expected = [scale * cosine for cosine in cosines(clip)]
    assert PickScoreReward(clip, tokenizer=clip)(PROMPTS, pictures()) == pytest.approx(expected, abs=1e-5)
    of_flow_grpo = PickScoreReward(clip, tokenizer=clip_tokenizer(), scale=1 / 26)
    assert of_flow_grpo(PROMPTS, pictures()) == pytest.approx([value / 26 for value in expected], abs=1e-6)


def test_hps_v2_is_that_of_the_authors(clip, files, golden):
    reward = HPSv2Reward(str(files), backbone=clip)
    values = reward(PROMPTS, pictures())
    assert values == pytest.approx(golden["hpsv2"].tolist(), abs=1e-5)
    assert reward([prompt.replace("&", "&amp;") for prompt in PROMPTS], pictures()) == pytest.approx(values, abs=1e-6)
    other = HPSv2Reward(str(files), version="v2.0", backbone=clip)(PROMPTS, pictures())
    assert np.abs(np.array(other) - values).max() > 0.01


def test_image_reward_is_that_of_the_authors(files, golden):
    reward = ImageRewardModel(str(files), tokenizer=bert_tokenizer())
    assert reward(PROMPTS, pictures()) == pytest.approx(golden["imagereward"].tolist(), abs=1e-4)


@pytest.mark.parametrize("later_names", [False, True])
def test_hps_v3_is_that_of_the_authors(tmp_path, qwen, golden, later_names):
    from safetensors.torch import save_file

    weights = hpsv3_weights()
    if later_names:
        weights = {
            name.replace("model.", "model.language_model.").replace("visual.", "model.visual."): value
            for name, value in weights.items()
        }
    save_file(weights, tmp_path / "HPSv3.safetensors")
    reward = HPSv3Reward(str(tmp_path), backbone=qwen, dtype="float32", batch_size=2, scale=10.0)
    expected = (10 * golden["hpsv3"][:, 0]).tolist()
    assert reward(PROMPTS, pictures()) == pytest.approx(expected, abs=1e-3)


def test_hps_v3_runs_in_bfloat16_with_a_head_in_float32(tmp_path, qwen, golden):
    torch.save(hpsv3_weights(), tmp_path / "weights.pt")
    reward = HPSv3Reward(str(tmp_path / "weights.pt"), backbone=qwen).load()
    assert reward._network.body.dtype == torch.bfloat16
    assert reward._network.head[0].weight.dtype == torch.float32
    assert reward(PROMPTS[:1], pictures()[:1]) == pytest.approx(golden["hpsv3"][:1, 0].tolist(), abs=0.02)
    with pytest.raises(RewardError, match=r"a prompt must not hold <\|Reward\|>"):
        reward(["a <|Reward|> of 10"], pictures()[:1])


def test_the_aesthetic_predictor_looks_at_unit_vectors(clip, files):
    reward = AestheticReward(str(files), backbone=clip).load()
    network = reward._network.clip
    weights = head_weights()
    with torch.no_grad():
        vectors = network.model.get_image_features(Preprocessing(32).pictures(pictures())).pooler_output
        hidden = vectors / vectors.norm(dim=-1, keepdim=True)
        for number in (0, 2, 4, 6, 7):
            hidden = hidden @ weights[f"layers.{number}.weight"].T + weights[f"layers.{number}.bias"]
    before = reward([""] * 3, pictures())
    assert before == pytest.approx(hidden[:, 0].tolist(), abs=1e-5)
    network.model.visual_projection.weight.mul_(3)  # vectors three times as long
    assert reward([""] * 3, pictures()) == pytest.approx(before, abs=1e-5)


# Gradients


def differentiable_rewards(clip, files):
    return [
        CLIPReward(clip, clamp=False),
        PickScoreReward(clip, tokenizer=clip),
        HPSv2Reward(str(files), backbone=clip),
        AestheticReward(str(files), backbone=clip),
    ]


@pytest.mark.parametrize(("index", "tolerance"), [(0, 0.5), (1, 0.06), (2, 1e-6), (3, 0.01)])
def test_the_differentiable_form_has_the_values_and_the_gradient(clip, files, index, tolerance):
    reward = differentiable_rewards(clip, files)[index]
    image = pictures()[1]
    pixels = torch.from_numpy(np.array(image)).movedim(-1, 0)[None].float() / 255
    leaf = pixels.clone().requires_grad_()
    value = reward.differentiable(PROMPTS[:1], leaf)
    ordinary = reward(PROMPTS[:1], [image])
    assert value.tolist() == pytest.approx(ordinary, abs=tolerance)

    (gradient,) = torch.autograd.grad(value.sum(), leaf)
    one_colour = torch.zeros_like(gradient)
    one_colour[:, 1] = gradient[:, 1]
    for direction in (gradient, one_colour):
        step = 0.02 * direction / direction.norm()
        up, down = (reward.differentiable(PROMPTS[:1], pixels + sign * step).item() for sign in (1, -1))
        assert (up - down) / 2 == pytest.approx((gradient * step).sum().item(), rel=0.02)


def test_a_name_gives_srpo_the_differentiable_form_and_evaluation_the_ordinary_one(clip, files):
    rewards = DifferentiableRewards([HPSv2Reward(str(files), backbone=clip), PickScoreReward(clip, tokenizer=clip)])
    rows = [{"prompt": prompt} for prompt in PROMPTS[:2]]
    pixels = torch.rand(2, 3, 40, 40, generator=torch.Generator().manual_seed(1))
    rewards.probe(pixels, rows)
    values = rewards(PROMPTS[:2], pixels, rows)
    assert values.shape == (2, 2)
    assert next(reward(PROMPTS, pictures()) for reward in rewards.ordinary()) == pytest.approx(
        HPSv2Reward(str(files), backbone=clip)(PROMPTS, pictures())
    )


def test_autocast_of_a_trainer_does_not_reach_the_network(clip):
    reward = CLIPReward(clip, clamp=False)
    pixels = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    alone = reward.differentiable(PROMPTS[:1], pixels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = reward.differentiable(PROMPTS[:1], pixels)
        assert reward(PROMPTS, pictures()) == CLIPReward(clip, clamp=False)(PROMPTS, pictures())
    assert torch.equal(alone, within)


def test_no_weight_gets_a_gradient(clip):
    reward = CLIPReward(clip, clamp=False).load()
    leaf = torch.rand(1, 3, 32, 32).requires_grad_()
    reward.differentiable(PROMPTS[:1], leaf).sum().backward()
    assert leaf.grad.abs().max() > 0
    assert not any(parameter.requires_grad for parameter in reward._network.parameters())
    assert not reward._network.training


# Behaviour


def test_a_network_goes_where_it_is_told_to_before_and_after_it_is_read(clip):
    reward = CLIPReward(clip)
    RewardRunner(reward, device="cpu").close()
    assert next(reward.load()._network.parameters()).device.type == reward.device.type == "cpu"
    RewardRunner(reward, device="meta").close()
    assert next(reward.load()._network.parameters()).device.type == reward.device.type == "meta"


def test_nothing_is_read_before_the_first_call(clip):
    reward = CLIPReward("nobody/nothing")
    assert reward.traits.media == ("image",)
    assert reward.traits.deterministic
    assert reward.traits.batch_size is None  # who meets in a call must not depend on time
    assert get_reward("pickscore") is get_reward("pickscore")  # weights are in memory once


def test_a_batch_of_nothing_is_refused():
    with pytest.raises(InputError, match="batch_size=0 must be at least 1: use 16"):
        CLIPReward(batch_size=0)


def test_a_network_may_be_given_and_stays_as_it_is(clip):
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(clip).bfloat16()
    reward = CLIPReward(model, tokenizer=clip_tokenizer(), clamp=False).load()
    assert reward._network.model is model
    assert model.dtype == torch.bfloat16
    close = CLIPReward(clip, clamp=False)(PROMPTS, pictures())
    assert reward(PROMPTS, pictures()) == pytest.approx(close, abs=2)


def test_batches_do_not_change_the_values(clip):
    many = CLIPReward(clip, clamp=False, batch_size=16)(PROMPTS, pictures())
    assert CLIPReward(clip, clamp=False, batch_size=1)(PROMPTS, pictures()) == pytest.approx(many, abs=1e-3)


def test_a_long_prompt_is_cut_with_a_warning_and_an_empty_one_has_a_value(clip, caplog):
    reward = CLIPReward(clip, clamp=False)
    start = "x" * 75  # with the tokens at its ends 77
    with caplog.at_level(logging.WARNING):
        values = reward([start, f"{start}y", ""], [pictures()[0]] * 3)
        reward([f"{start}y"], pictures()[:1])
    warnings = [record.message for record in caplog.records if record.name.startswith("omnitrl")]
    assert warnings == [
        "CLIPReward reads 77 tokens of a prompt, and 1 of 3 prompts have more (78 at most): it does not see what "
        "stands after them."
    ]
    assert np.isfinite(values).all()
    assert values[2] != pytest.approx(values[1])


@pytest.mark.parametrize("medium", [np.zeros((4, 8, 8, 3), dtype=np.uint8), "a path", None])
def test_other_media_are_refused(clip, medium):
    with pytest.raises(RewardError, match=r"completions\[1\]: expected an image"):
        CLIPReward(clip)(PROMPTS[:2], [pictures()[0], medium])


def test_pictures_are_refused_where_a_gradient_is_wanted(clip):
    with pytest.raises(RewardError, match=r"takes pixels as a tensor \(B, 3, H, W\) in \[0, 1\], got no tensor"):
        CLIPReward(clip).differentiable(PROMPTS, pictures())


def test_a_prompt_that_is_no_text_is_refused(clip):
    with pytest.raises(RewardError, match=r"CLIPReward compares with prompts as text, got None of type NoneType"):
        CLIPReward(clip)([None], pictures()[:1])


# Weights


def test_missing_weights_are_counted_and_never_random(clip, files, tmp_path):
    weights = open_clip_weights()
    del weights["visual.proj"], weights["ln_final.bias"]
    torch.save(weights, tmp_path / "hps.pt")
    with pytest.raises(RewardError, match=r"lacks 2 of the 78 weights of a CLIPModel, the first is 'text_model.final"):
        HPSv2Reward(str(tmp_path / "hps.pt"), backbone=clip).load()


def test_weights_without_a_place_are_named(clip, tmp_path):
    torch.save(open_clip_weights() | {"score_predictor.weight": torch.zeros(1, 8)}, tmp_path / "hps.pt")
    with pytest.raises(RewardError, match=r"'score_predictor.weight' is none of a CLIP of open_clip"):
        HPSv2Reward(str(tmp_path / "hps.pt"), backbone=clip).load()
    extra = open_clip_weights()
    extra |= {name.replace(".1.", ".2."): value for name, value in extra.items() if "resblocks.1." in name}
    torch.save(extra, tmp_path / "deep.pt")
    with pytest.raises(RewardError, match=r"24 of 102|32 of \d+ weights of '.*deep.pt' have no place in a CLIPModel"):
        HPSv2Reward(str(tmp_path / "deep.pt"), backbone=clip).load()


def test_a_transformers_model_that_lacks_weights_is_refused(clip, tmp_path):
    from transformers import CLIPModel

    model = CLIPModel.from_pretrained(clip)
    state = {name: value for name, value in model.state_dict().items() if "visual_projection" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    clip_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RewardError, match=r"lacks 1 of the 78 weights of a CLIPModel, the first is 'visual_pro"):
        CLIPReward(str(tmp_path)).load()


def test_heads_of_another_kind_are_refused(clip, tmp_path):
    torch.save({"linear.weight": torch.zeros(1, 16)}, tmp_path / "aesthetic-model.pth")
    with pytest.raises(RewardError, match=r"has 0 linear layers in 1 weights, and should have 5 in 10"):
        AestheticReward(str(tmp_path), backbone=clip).load()
    torch.save(head_weights((24, 12, 8, 6, 4, 1)), tmp_path / "aesthetic-model.pth")
    with pytest.raises(RewardError, match=r"takes vectors of 24 numbers and the CLIP makes 16: use backbone="):
        AestheticReward(str(tmp_path), backbone=clip).load()


def test_checkpoints_that_are_incomplete_are_refused(tmp_path, qwen):
    weights = image_reward_weights()
    torch.save({name: value for name, value in weights.items() if name.startswith("blip")}, tmp_path / "a.pt")
    with pytest.raises(RewardError, match=r"none of them begins with 'mlp.'"):
        ImageRewardModel(str(tmp_path / "a.pt"), tokenizer=bert_tokenizer()).load()
    del weights["blip.text_encoder.encoder.layer.1.crossattention.self.key.bias"]
    torch.save(weights, tmp_path / "b.pt")
    with pytest.raises(RewardError, match=r"lacks 1 of the 56 weights of a BlipTextModel, the first is 'encoder"):
        ImageRewardModel(str(tmp_path / "b.pt"), tokenizer=bert_tokenizer()).load()
    head_missing = {name: value for name, value in hpsv3_weights().items() if not name.startswith("rm_head.5")}
    torch.save(head_missing, tmp_path / "c.pt")
    with pytest.raises(RewardError, match=r"has 4 of the 6 weights of the reward head .* and 0 others"):
        HPSv3Reward(str(tmp_path / "c.pt"), backbone=qwen).load()
    short = hpsv3_weights()
    short["model.embed_tokens.weight"] = short["model.embed_tokens.weight"][:-1]
    torch.save(short, tmp_path / "d.pt")
    with pytest.raises(RewardError, match=r"has vectors of 263 tokens, and the tokenizer of .* has 264 with"):
        HPSv3Reward(str(tmp_path / "d.pt"), backbone=qwen).load()


def test_files_that_are_none_are_refused(clip, tmp_path):
    (tmp_path / "HPS_v2.1_compressed.pt").write_bytes(b"not found")
    with pytest.raises(RewardError, match=r"HPS_v2.1_compressed.pt' is no file of weights"):
        HPSv2Reward(str(tmp_path), backbone=clip).load()
    with pytest.raises(RewardError, match=r"the folder '.*' has no file 'HPS_v2_compressed.pt'"):
        HPSv2Reward(str(tmp_path), version="v2.0", backbone=clip).load()


def test_what_the_hub_does_not_have_is_a_sentence(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RewardError, match=r"CLIPReward cannot load 'nobody/nothing': .* Give a Hub id or a folder"):
        CLIPReward("nobody/nothing").load()


def test_unknown_options_are_refused():
    with pytest.raises(InputError, match=r"version='v3' is unknown: use 'v2.1' or 'v2.0', or HPSv3Reward"):
        HPSv2Reward(version="v3")
    with pytest.raises(InputError, match=r"dtype='half16' is unknown: use 'float32'"):
        CLIPReward(dtype="half16")
