# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
import torch
from PIL import Image

from omnitrl import SRPOConfig
from omnitrl.algorithms import direct_align_levels, noised
from omnitrl.errors import InputError, RunError
from omnitrl.rollout import SampleNoise
from tests.marks import first_fast
from tests.tiny_models import tiny_model
from tests.trainer.helpers import PROMPTS, fresh_rollout, lightness, logged, same, trainable, trainer
from tests.trainer.test_laws import StopAt


NO_WORDS = {"positive_words": None, "negative_words": None, "branches": ["denoise"]}


def worded(prompts, completions, **kwargs):
    """A reward that depends on the prompt: the red of the pixels, the more the longer the prompt."""
    lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=completions.dtype)
    return lengths / 100 * completions[:, 0].mean(dim=(1, 2)) - 0.1 * completions[:, 2].mean(dim=(1, 2))


def srpo(tmp_path, **options):
    options = {"num_generations": 1, "generation_batch_size": 4, "per_device_train_batch_size": 2, **options}
    return trainer(tmp_path, "srpo", **options)


def batches_of(run, rollout=0):
    buffer = fresh_rollout(run, rollout)
    return buffer, run.cut(buffer, list(range(len(buffer.trajectories))))


@pytest.mark.parametrize("branch", ["denoise", "inversion"])
def test_the_exact_velocity_gives_the_sample_back(tmp_path, branch):
    run = srpo(tmp_path, branches=[branch])
    buffer, batches = batches_of(run)
    batch = batches[0]
    clean = torch.stack([t.clean_latents for t in buffer.trajectories])
    seen = []
    run.pixels_of = lambda latents, size: seen.append(latents) or torch.zeros(4, 3, 8, 8)
    run.compute_row_losses(lambda *_: batch.noise - clean, batch, buffer)
    assert (seen[0] - clean).abs().max() < 1e-5


def test_the_noise_is_that_of_the_rollout(tmp_path):
    run = srpo(tmp_path)
    _, batches = batches_of(run)
    plan_requests = run._plan.requests(0)
    for i, request in enumerate(plan_requests):
        expected = SampleNoise(request.seed, request.start_seed).start(run.latent_shape)
        assert torch.equal(batches[0].noise[i], expected)
        start = torch.randn(run.latent_shape, generator=torch.Generator().manual_seed(request.seed))
        assert torch.equal(expected, start)  # what the sampler starts from


def test_the_first_gradient_is_that_of_an_independent_computation_in_float64(tmp_path):
    """Both branches of a real rollout, written out again from the paper's formulas."""
    model = tiny_model()
    model.pipeline.to(torch.float64)
    run = srpo(tmp_path, model=model, rewards=worded, relative_margin=0.3)
    run.flow_model.networks.double()
    buffer, batches = batches_of(run)
    total = 0.0
    sigmas = run.flow_model.sigmas(50).sigmas
    points = torch.linspace(float(sigmas[5]), float(sigmas[25]), 1000)
    for branch, sign in (("denoise", 1), ("inversion", -1)):
        for trajectory, sample in zip(buffer.trajectories, batches.samples, strict=True):
            k = sample.index
            if branch == "denoise":
                low, high = k, min(k + min(100, k, 1000 - k), 1000)
            else:
                gap = min(100, k, 1000 - k)
                low = max(k - gap, 1)
                high = min(low + gap, 1000)
            cleaner, noisier = float(points[1000 - low]), float(points[1000 - high])
            start, end = (noisier, cleaner) if sign == 1 else (cleaner, noisier)
            clean, noise = trajectory.clean_latents.double()[None], sample.noise.double()[None]
            noisy = ((1 - start) * clean + start * noise).float().double()
            conditions = run.flow_model.encode([trajectory.request.row])
            timestep = torch.tensor([1000 * start], dtype=torch.float32)
            velocity = run.flow_model.velocity(noisy, timestep, conditions)
            latents = (noisy + (end - start) * velocity - end * noise) / (1 - end)
            vae = run.flow_model.pipeline.vae
            pixels = vae.decode(latents / vae.config.scaling_factor + vae.config.shift_factor).sample
            pixels = (pixels.float() / 2 + 0.5).clamp(0, 1)
            prompt = trajectory.request.row["prompt"]
            praised = worded([f"Realistic photo. {prompt}"], pixels)
            blamed = worded([f"CG Render. {prompt}"], pixels)
            place = k / 999
            if sign == 1:
                preference = (1 + 0.1 + 0.15 * place) * praised - blamed
            else:
                preference = (1 + 0.3 - 0.29 * place) * blamed - praised
            total = total + (0.3 - preference).clamp(min=0).sum() / 8
    expected = torch.autograd.grad(total, run.trainable_parameters())
    ours = sum(run.compute_row_losses(run.model, batches[i], buffer).sum() for i in range(2)) / 8
    assert ours.item() == pytest.approx(total.item(), rel=1e-5)
    gradient = torch.autograd.grad(ours, run.trainable_parameters())
    gap = sum((a - b).square().sum() for a, b in zip(gradient, expected, strict=True)).sqrt()
    size = sum(b.square().sum() for b in expected).sqrt()
    assert size > 1e-6
    assert gap < 1e-4 * size


def test_levels_are_a_function_of_names_and_spread_over_the_range(tmp_path):
    run = srpo(tmp_path, generation_batch_size=16, data=[f"number {i}" for i in range(16)])
    first = [sample.index for sample in batches_of(run)[1].samples]
    again = [sample.index for sample in batches_of(srpo(tmp_path, generation_batch_size=16))[1].samples]
    assert first == again  # not of the prompts
    assert len(set(first)) == 16
    assert min(first) < 250
    assert max(first) > 750
    other = [sample.index for sample in batches_of(run, rollout=1)[1].samples]
    assert other != first


def test_a_batch_is_what_its_levels_say(tmp_path):
    run = srpo(tmp_path, align_range=[10, 40], align_num_inference_steps=40, groundtruth_ratio=0.8)
    buffer, batches = batches_of(run)
    sigmas = run.flow_model.sigmas(40).sigmas
    for position, branch in enumerate(("denoise", "inversion")):
        batch = batches[position]
        for i, trajectory in enumerate(buffer.trajectories):
            levels = direct_align_levels(sigmas, batch.samples[i].index, branch, (10, 40), gap=200)
            assert float(batch.sigma_from[i]) == pytest.approx(levels.sigma_from)
            assert float(batch.sigma_to[i]) == pytest.approx(levels.sigma_to)
            assert float(batch.timesteps[i]) == pytest.approx(1000 * levels.sigma_from)
            expected = noised(trajectory.clean_latents[None], batch.noise[i : i + 1], levels.sigma_from)[0]
            assert torch.allclose(batch.latents[i], expected, atol=1e-6)


def test_control_words_take_turns_and_change_places(tmp_path):
    seen = []

    def reward(prompts, completions, **kwargs):
        seen.append(list(prompts))
        return lightness(prompts, completions)

    options = {
        "positive_words": ["a", "b"],
        "negative_words": ["x", "y", "z"],
        "control_word_format": "{prompt}/{word}",
    }
    run = srpo(tmp_path, rewards=reward, data=["p"], shuffle_dataset=False, **options)
    buffer, batches = batches_of(run)
    seen.clear()
    run.compute_row_losses(run.model, batches[0], buffer)
    assert seen == [["p/a", "p/b", "p/a", "p/b"], ["p/x", "p/y", "p/z", "p/x"]]
    buffer, batches = batches_of(run, rollout=1)  # goes on with the fifth sample
    assert [sample.blamed for sample in batches.samples] == ["p/y", "p/z", "p/x", "p/y"]


def test_without_control_words_the_reward_itself_is_trained(tmp_path):
    run = srpo(tmp_path, relative_margin=2.0, **NO_WORDS)
    buffer, batches = batches_of(run)
    losses = run.compute_row_losses(run.model, batches[0], buffer)
    rewards = torch.tensor(run._last_rewards)
    assert losses.tolist() == pytest.approx((2.0 - rewards).tolist(), abs=1e-6)
    assert len(batches) == 1


def test_above_the_margin_nothing_is_learnt(tmp_path):
    run = srpo(tmp_path, relative_margin=-1.0, max_steps=2, weight_decay=0.0)
    before = trainable(run)
    run.train()
    assert same(before, trainable(run))
    assert logged(run, "srpo/below_margin") == [0, 0]


def test_several_rewards_are_added_up_by_weight(tmp_path):
    def dark(prompts, completions, **kwargs):
        return 1 - completions.mean(dim=(1, 2, 3))

    options = {"rewards": [lightness, dark], "reward_weights": [3.0, 0.5], "relative_margin": 9.0, **NO_WORDS}
    run = srpo(tmp_path, max_steps=1, **options)
    run.train()
    (light,), (shade,) = logged(run, "rewards/lightness/mean"), logged(run, "rewards/dark/mean")
    assert light + shade == pytest.approx(1)
    assert logged(run, "reward") == pytest.approx([3 * light + 0.5 * shade])
    assert logged(run, "loss") == pytest.approx([9 - 3 * light - 0.5 * shade], rel=1e-4)


def test_it_follows_the_gradient_of_the_reward(tmp_path):
    """Pictures get lighter where light is asked for, and darker where the opposite is."""
    change = {}
    for sign in (1, -1):

        def reward(prompts, completions, sign=sign, **kwargs):
            return sign * completions.mean(dim=(1, 2, 3))

        run = srpo(
            tmp_path / str(sign), rewards=reward, max_steps=10, learning_rate=1e-2, relative_margin=9.0, **NO_WORDS
        )
        before = run.evaluate(PROMPTS)["eval_reward"]
        run.train()
        change[sign] = run.evaluate(PROMPTS)["eval_reward"] - before
    assert change[1] > 0.01
    assert change[-1] > 0.01


def test_a_built_in_reward_is_trained_in_its_differentiable_form_and_evaluated_in_the_other(tmp_path):
    run = srpo(
        tmp_path,
        rewards="brightness",
        max_steps=10,
        learning_rate=1e-2,
        relative_margin=9.0,
        num_samples_to_save=2,
        **NO_WORDS,
    )
    pictures = []
    run.report.record_evaluation = lambda record: pictures.extend(sample.image for sample in record.samples)
    before = run.evaluate(PROMPTS[:2])["eval_rewards/brightness_reward/mean"]
    expected = np.mean([np.asarray(picture.convert("L")) / 255 for picture in pictures])
    assert before == pytest.approx(expected, abs=1e-6)
    run.train()
    assert run.evaluate(PROMPTS[:2])["eval_rewards/brightness_reward/mean"] > before + 0.01


def test_the_control_shows_the_reward_other_prompts(tmp_path):
    run = srpo(tmp_path, shuffle_prompts=True, **NO_WORDS)
    buffer, batches = batches_of(run)
    own = [t.request.row["prompt"] for t in buffer.trajectories]
    shown = [sample.praised for sample in batches.samples]
    assert all(a != b for a, b in zip(own, shown, strict=True))
    assert set(shown) <= set(PROMPTS)
    assert torch.equal(
        batches[0].conditions.positive["prompt_embeds"],
        run.flow_model.encode([{"prompt": p} for p in own]).positive["prompt_embeds"],
    )  # the policy sees its own


def test_pictures_of_the_dataset_take_the_place_of_rollouts(tmp_path):
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9)]
    data = [{"prompt": str(i), "picture": Image.new("RGB", (100, 80), c)} for i, c in enumerate(colours)]
    run = srpo(tmp_path, data=data, image_column="picture", shuffle_dataset=False, max_steps=1)
    buffer, _ = batches_of(run)
    expected = run.flow_model.encode_images([row["picture"] for row in data])
    assert torch.equal(torch.stack([t.clean_latents for t in buffer.trajectories]), expected)
    assert run._forwards == 0
    run.train()
    assert logged(run, "forwards_per_sample") == []  # its rollout has two updates


def test_evaluation_uses_the_rewards_that_it_is_given(tmp_path):
    def size(completions, **kwargs):
        return [float(image.width) for image in completions]

    run = srpo(tmp_path, eval_reward_funcs=size, eval_reward_weights=[0.5])
    metrics = run.evaluate(PROMPTS[:2])
    assert metrics["eval_reward"] == 32
    assert metrics["eval_rewards/size/mean"] == 64


def test_evaluation_sees_the_same_reward_without_others(tmp_path):
    run = srpo(tmp_path, num_samples_to_save=2)
    pictures = []
    run.report.record_evaluation = lambda record: pictures.extend(sample.image for sample in record.samples)
    metrics = run.evaluate(PROMPTS[:2])
    expected = np.mean([np.asarray(picture) / 255 for picture in pictures])
    assert metrics["eval_rewards/lightness/mean"] == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("stop", first_fast([1, 2]))
def test_resumed_equals_uninterrupted(tmp_path, stop):
    """Step 1 lies in the midst of a rollout of two updates."""
    common = {"save_strategy": "steps", "save_steps": stop, "max_steps": 3}
    straight = srpo(tmp_path / "a", **common)
    straight.train()
    srpo(tmp_path / "b", callbacks=[StopAt(stop)], **common).train()
    resumed = srpo(tmp_path / "b", **common)
    resumed.train(resume_from_checkpoint=True)
    assert same(trainable(straight), trainable(resumed))
    assert logged(straight, "loss") == logged(resumed, "loss")


def test_the_decoder_is_recomputed_in_the_backward_if_asked(tmp_path):
    gradients = []
    for checkpoint in (False, True):
        run = srpo(tmp_path, checkpoint_decoder=checkpoint)
        buffer, batches = batches_of(run)
        calls: list = []
        middle = run.flow_model.pipeline.vae.decoder.mid_block
        hook = middle.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        run.compute_row_losses(run.model, batches[0], buffer).sum().backward()
        hook.remove()
        assert len(calls) == (2 if checkpoint else 1)
        gradients.append([p.grad.clone() for p in run.trainable_parameters()])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-9) for a, b in zip(*gradients, strict=True))


# Bad input


def list_reward(completions, **kwargs):
    return [0.5] * len(completions)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (list_reward, "reward 'list_reward' returned a value of type list, which has no gradient: pass a reward that"),
        ("entropy", "reward 'entropy_reward' returned a value of type list, which has no gradient"),
        (lambda completions, **_: completions.detach().mean(dim=(1, 2, 3)), "has no gradient with respect to"),
        (
            lambda completions, **_: completions.mean(),
            r"returned a tensor of shape \(\) for 2 rows: return one number",
        ),
        (lambda completions, **_: (completions * 0).sqrt().sum(dim=(1, 2, 3)), "has a gradient that is not finite"),
        (lambda completions, target, **_: completions.mean(dim=(1, 2, 3)), "requires the argument 'target'"),
        ([], "There is no reward"),
    ],
)
def test_a_reward_without_a_gradient_is_refused(tmp_path, reward, message):
    with pytest.raises(InputError, match=message) as error:
        srpo(tmp_path, rewards=reward)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branches": []}, r"branches=\[\] must name each branch once"),
        ({"branches": ["denoise", "denoise"]}, "must name each branch once"),
        ({"branches": ["up"]}, "branches='up' is unknown: use one of 'denoise', 'inversion'"),
        ({"align_range": [5, 60]}, r"must be two rising steps of align_num_inference_steps=50: use 5 25"),
        ({"align_range": [9, 9]}, "must be two rising steps"),
        ({"groundtruth_ratio": 1.0}, r"groundtruth_ratio=1.0 must be in \[0, 1\): use 0.9"),
        ({"positive_words": None}, "go together: give both, or None for both"),
        ({"positive_words": None, "negative_words": []}, r"branches has 'inversion', which without control words"),
        ({"control_word_format": "{word}"}, "must have {word} and {prompt}"),
        ({"control_word_format": "{word} {prompt} {x}"}, "must have {word} and {prompt}"),
        ({"shuffle_advantages": True}, "use shuffle_prompts=True"),
        ({"num_generations": 0}, "num_generations=0 must be at least 1"),
    ],
)
def test_bad_options(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        SRPOConfig(output_dir=str(tmp_path), use_cpu=True, **options)


def test_levels_near_noise_are_refused_with_the_first_step_that_works(tmp_path):
    with pytest.raises(InputError, match=r"begins at noise level 1\.0000 .*begin at step 2 of 50"):
        srpo(tmp_path, align_range=[0, 25])
    srpo(tmp_path, align_range=[2, 25])


def test_weights_of_rewards_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match=r"eval_reward_weights=.* which were not given: use reward_weights"):
        srpo(tmp_path, eval_reward_weights=[1.0])
    with pytest.raises(InputError, match="reward_weights has 2 values for 1 reward"):
        srpo(tmp_path, reward_weights=[1.0, 2.0])


def test_columns_that_are_not_there(tmp_path):
    with pytest.raises(InputError, match="image_column='photo' is no column of train_dataset, which has"):
        srpo(tmp_path, image_column="photo")
    with pytest.raises(InputError, match=r"shuffle_prompts=True needs other prompts, but train_dataset has 1 row"):
        srpo(tmp_path, shuffle_prompts=True, data=["a cat"])


def test_a_reward_that_breaks_later_stops_the_run_and_says_where(tmp_path):
    def reward(prompts, completions, trainer_state, **kwargs):
        broken = trainer_state is not None and trainer_state.global_step == 1
        return completions.mean(dim=(1, 2, 3)) * (float("nan") if broken else 1)

    run = srpo(tmp_path, rewards=reward, max_steps=2)
    with pytest.raises(RunError, match=r"loss is nan at optimizer step 1, noise levels \[0\.\d+, .*of the last"):
        run.train()
