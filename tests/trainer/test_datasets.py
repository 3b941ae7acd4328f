# SPDX-License-Identifier: Apache-2.0
"""Rows of several sizes, prompts from a stream, and condition images, through whole trainers."""

import io
import re
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.models import MediaSize
from tests.marks import first_fast
from tests.tiny import CHECKPOINTS
from tests.tiny.checkpoint import picture
from tests.trainer.helpers import (
    PROMPTS,
    all_rows,
    brightness,
    fresh_rollout,
    logged,
    pairs,
    same,
    trainable,
    trainer,
)
from tests.trainer.test_laws import StopAt


SQUARE, WIDE = MediaSize(64, 64), MediaSize(32, 96)
# Three rows of the one and two of the other, so that of every five rollouts two are wide.
TWO_SIZES = [
    {"prompt": prompt, "height": size.height, "width": size.width}
    for prompt, size in zip(PROMPTS, (SQUARE, WIDE, SQUARE, SQUARE, WIDE), strict=True)
]


def dynamic():
    """A model whose noise levels depend on the media size."""
    return CHECKPOINTS["sd3-dynamic"].model()


def stream_of(rows):
    return datasets.Dataset.from_list(rows).to_iterable_dataset()


def refused(make, message):
    with pytest.raises(InputError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# Sizes


@pytest.mark.compat
@pytest.mark.parametrize("source", [list, stream_of])
def test_rollouts_of_two_sizes_have_their_own_latents_and_noise_levels(tmp_path, source):
    """And the ratio of each is 1."""
    seen = []

    def reward(prompts, completions, height, width, **kwargs):
        seen.extend((image.size, (w, h)) for image, h, w in zip(completions, height, width, strict=True))
        return brightness(prompts, completions)

    run = trainer(tmp_path, model=dynamic(), rewards=reward, data=source(TWO_SIZES), max_steps=8)
    found = {}
    for rollout in range(5):
        size = run.size_of(rollout)
        buffer = fresh_rollout(run, rollout)
        prompts = {trajectory.request.row["prompt"] for trajectory in buffer.trajectories}
        assert prompts <= {row["prompt"] for row in TWO_SIZES if row["height"] == size.height}
        assert buffer.latent_shape == (4, size.height // 4, size.width // 4)
        assert torch.equal(buffer.table.sigmas, run.flow_model.sigmas(4, size).sigmas)
        with torch.no_grad():
            replayed = run.replay(run.model, batch := all_rows(buffer), buffer)
        assert ((replayed.log_probs - batch.old_log_probs).exp() - 1).abs().max() <= 1e-6
        found[size] = buffer.table.sigmas
    assert set(found) == {SQUARE, WIDE}
    assert (found[SQUARE] - found[WIDE]).abs().max() > 3e-4
    assert all(actual == asked for actual, asked in seen)


@pytest.mark.compat
@pytest.mark.parametrize(
    "algorithm", first_fast(["flow_grpo", "diffusion_nft", "grpo_guard", "srpo", "diffusion_opd"], 2)
)
def test_algorithms_train_on_two_sizes(tmp_path, algorithm):
    options = {"max_steps": 10, "gradient_accumulation_steps": 1}
    run = trainer(tmp_path, algorithm, model=dynamic(), data=TWO_SIZES, **options)
    before, shapes = trainable(run), []
    cut = run.cut
    run.cut = lambda buffer, samples: shapes.append(buffer.latent_shape[1:]) or cut(buffer, samples)
    run.train()
    assert set(shapes) == {(16, 16), (8, 24)}
    assert not same(before, trainable(run))
    assert all(np.isfinite(logged(run, "loss")))
    if algorithm in ("flow_grpo", "grpo_guard", "diffusion_opd"):
        assert logged(run, "rollout/logp_abs_diff_max") == [0.0] * 5
    assert "each rollout of one of 2 media sizes" in run.describe_run()


@pytest.mark.parametrize(
    ("name", "column", "values"), [("wan", "num_frames", (1, 5)), ("stable-audio-3", "audio_length", (1.3, 0.7))]
)
def test_frames_and_seconds_of_rows(tmp_path, name, column, values):
    rows = [{"prompt": prompt, column: values[i % 2]} for i, prompt in enumerate(PROMPTS)]
    tiny = CHECKPOINTS[name]
    sizes = {key: value for key, value in vars(tiny.size).items() if value is not None}
    lengths = []

    def reward(completions, **kwargs):
        lengths.append({len(media) if column == "num_frames" else round(media.duration, 2) for media in completions})
        return [float(i) for i in range(len(completions))]

    run = trainer(tmp_path, model=tiny.model(), rewards=reward, data=rows, **{**sizes, column: None})
    for rollout in (0, next(r for r in range(5) if run.size_of(r) != run.size_of(0))):
        fresh_rollout(run, rollout)
    assert {length for part in lengths for length in part} == set(values)
    assert all(len(part) == 1 for part in lengths)


@pytest.mark.slow
def test_a_column_says_what_an_option_says(tmp_path):
    """Bit for bit, and the column wins."""
    by_option = trainer(tmp_path / "a", data=PROMPTS, height=32, width=96)
    by_column = trainer(
        tmp_path / "b", data=[{"prompt": p, "height": 32.0, "width": 96} for p in PROMPTS], height=64, width=64
    )
    by_both = trainer(tmp_path / "c", data=[{"prompt": p, "width": 96} for p in PROMPTS], height=32)
    runs = (by_option, by_column, by_both)
    for run in runs:
        run.train()
        assert run.sizes == [WIDE]
    assert same(trainable(by_option), trainable(by_column))
    assert same(trainable(by_option), trainable(by_both))


@pytest.mark.parametrize("source", first_fast([list, stream_of]))
@pytest.mark.parametrize("stop", first_fast([1, 4]))
def test_a_run_of_two_sizes_is_resumed_exactly(tmp_path, source, stop):
    """In the midst of a rollout and at its end."""
    common = {"data": source(TWO_SIZES), "max_steps": 6, "save_strategy": "steps", "save_steps": stop}
    straight = trainer(tmp_path / "a", **common)
    straight.train()
    trainer(tmp_path / "b", callbacks=[StopAt(stop)], **common).train()
    again = trainer(tmp_path / "b", **common)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    assert {straight.size_of(rollout) for rollout in range(3)} == {SQUARE, WIDE}
    assert same(trainable(straight), trainable(again))
    assert logged(straight, "reward") == logged(again, "reward")


def test_evaluation_makes_each_row_in_its_size(tmp_path):
    """What each size makes alone, in the order of the rows."""
    media = {}

    def reward(prompts, completions, **kwargs):
        media.update({(p, completions[i].tobytes()): completions[i].size for i, p in enumerate(prompts)})
        return brightness(prompts, completions)

    run = trainer(tmp_path, rewards=reward, num_generations_eval=2, save_report=True)
    together = run.evaluate(TWO_SIZES)
    assert {size for (prompt, _), size in media.items() if prompt in ("two dogs", "a map")} == {(96, 32)}
    assert {size for (prompt, _), size in media.items() if prompt in ("a cat", "the red sun")} == {(64, 64)}
    assert len(media) == 10
    records = []
    run.report.record_evaluation = records.append
    run.evaluate(TWO_SIZES)
    run.evaluate([{**row, "height": 64, "width": 64} for row in TWO_SIZES])
    mixed, square = (record.samples for record in records)
    assert [sample.prompt for sample in mixed] == PROMPTS * 2
    for ours, theirs in zip(mixed, square, strict=True):
        wide = ours.prompt in ("two dogs", "a map")
        assert ours.image.size == ((96, 32) if wide else (64, 64))
        assert wide or (ours.image.tobytes() == theirs.image.tobytes() and ours.reward == theirs.reward)
        assert ours.reward == pytest.approx(brightness(None, [ours.image])[0])
    assert together["eval_reward"] == pytest.approx(np.mean([sample.reward for sample in mixed]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"height": 60}, "Row 3 of train_dataset: height=60 does not fit this checkpoint: .* height=64"),
        ({"width": 64.5}, r"Row 3 of train_dataset: width=64\.5 must be a whole number: use width=64\."),
        ({"height": -8}, "Row 3 of train_dataset: height=-8.* must be a number above 0"),
    ],
)
@pytest.mark.parametrize("part", ["train_dataset", "eval_dataset", "eval_dataset held"])
def test_a_size_that_cannot_be_made_names_its_row(tmp_path, changes, message, part):
    rows = [{"prompt": p, "height": 64, "width": None} for p in PROMPTS]
    rows[3] |= changes
    data = {"data": rows} if part == "train_dataset" else {"eval_dataset": rows}
    if part == "eval_dataset held":
        data = {"eval_dataset": {"held": rows}}
    refused(lambda: trainer(tmp_path, **data), message.replace("train_dataset", part))


def test_a_size_of_a_stream_that_cannot_be_made_names_its_row(tmp_path):
    rows = [{"prompt": p, "height": 64} for p in PROMPTS]
    refused(lambda: trainer(tmp_path, data=stream_of([{**rows[0], "height": 60}])), "Row 0 of the stream: height=60")
    rows[3]["height"] = 60
    run = trainer(tmp_path, data=stream_of(rows), shuffle_dataset=False)
    refused(run.train, "Row 3 of the stream: height=60 does not fit")


def test_pairs_have_one_size(tmp_path):
    rows = [{**row, "height": 32, "width": 96} for row in pairs()]
    assert trainer(tmp_path, "diffusion_dpo", data=rows).latent_shape == (4, 8, 24)
    rows[2]["width"] = 64
    refused(
        lambda: trainer(tmp_path, "diffusion_dpo", data=rows),
        "one size, height=32, width=96, but row 2 of the dataset asks for height=32, width=64: leave the columns",
    )


def test_a_control_of_other_prompts_stays_within_a_size(tmp_path):
    run = trainer(tmp_path, "srpo", data=TWO_SIZES, shuffle_prompts=True)
    for rollout in range(5):
        size = run.size_of(rollout)
        for group in range(2):
            own, other = run._plan.feed.row(rollout, group), run._plan.other_row(rollout, group)
            assert own["prompt"] != other["prompt"]
            assert other["height"] == size.height
    refused(
        lambda: trainer(tmp_path, "srpo", data=TWO_SIZES[:2], shuffle_prompts=True),
        r"other prompts, but train_dataset has 1 row\(s\) of one of its sizes: give it 2",
    )


# Streams


def test_an_ordered_stream_trains_what_the_ordered_dataset_trains(tmp_path):
    options = {"shuffle_dataset": False, "max_steps": 6}
    stored = trainer(tmp_path / "a", **options)
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    streamed = trainer(tmp_path / "b", data=stream_of(rows), **options)
    for run in (stored, streamed):
        run.train()
    assert same(trainable(stored), trainable(streamed))
    assert streamed.state.epoch == 1.0
    assert "prompts from a stream in its order" in streamed.describe_run()


def test_a_stream_is_shuffled_by_the_seed(tmp_path):
    rows = [{"prompt": str(number)} for number in range(40)]
    options = {"data": stream_of(rows), "max_steps": 6}
    runs = [trainer(tmp_path / str(seed), seed=seed, **options) for seed in (1, 1, 2)]
    drawn = [[run._plan.feed.row(r, g)["prompt"] for r in range(20) for g in range(2)] for run in runs]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sorted(drawn[0], key=int) == [row["prompt"] for row in rows]
    assert "shuffled among 1000 rows" in runs[0].describe_run()


def test_what_a_stream_cannot_do(tmp_path):
    rows = stream_of([{"prompt": prompt} for prompt in PROMPTS])
    refused(lambda: trainer(tmp_path, data=rows, max_steps=-1), "num_train_epochs=3 says nothing: set max_steps")
    for given in (rows, {"held": rows}):
        refused(lambda given=given: trainer(tmp_path, eval_dataset=given), "eval_dataset is a stream, but every eval")
    refused(lambda: trainer(tmp_path, "diffusion_dpo", eval_dataset=rows), "eval_dataset is a stream")


@pytest.mark.slow
def test_previews_of_a_stream(tmp_path):
    run = trainer(tmp_path, data=stream_of([{"prompt": prompt} for prompt in PROMPTS]), save_report=True, max_steps=2)
    records = []
    run.report.record_evaluation = records.append
    run.train()
    assert [[sample.prompt for sample in record.samples] for record in records] == [PROMPTS] * 2


# The page


PAGE = (Path(__file__).parents[2] / "docs" / "source" / "datasets.md").read_text("utf-8")


@pytest.mark.slow
def test_the_examples_of_the_page_run(tmp_path, monkeypatch):
    """One after the other, as a reader would."""
    monkeypatch.chdir(tmp_path)
    made, steps = {}, []
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "datasets.md", "exec"), made)
        steps.append(made["trainer"].state.global_step if "trainer" in made else 0)
        if steps[-1] and len(steps) == 2:
            assert len(made["trainer"].sizes) == 3
    assert steps == [0, 4, 4]


def test_the_errors_of_the_page_are_those_that_are_raised(tmp_path):
    quoted = " ".join(PAGE.split())
    rows = [{"prompt": p, "height": 60 if i == 3 else 64} for i, p in enumerate(PROMPTS)]
    with pytest.raises(InputError) as error:
        trainer(tmp_path, data=rows)
    assert str(error.value) in quoted
    rows = image_rows(tmp_path)
    rows[2] |= {"prompt": "make it snow", "image": str(tmp_path / "1.png")}
    (tmp_path / "1.png").write_text("no picture")
    rows[1]["image"] = rows[0]["image"]
    with pytest.raises(InputError) as error:
        editing(tmp_path / "out", rows)
    assert str(error.value).replace(str(tmp_path), "/data/pictures") in quoted


# Condition images


def image_rows(folder, count=4):
    for i in range(count):
        picture(i, (64, 64) if i % 2 else (96, 64)).save(folder / f"{i}.png")
    return [{"prompt": PROMPTS[i], "image": str(folder / f"{i}.png"), "number": i} for i in range(count)]


def editing(tmp_path, data, name="flux-kontext", **options):
    tiny = CHECKPOINTS[name]
    return trainer(tmp_path, model=tiny.model(), data=data, **{"height": 64, "width": 64, **options})


def test_images_of_paths_and_of_a_dataset_train_alike(tmp_path):
    rows = image_rows(tmp_path)
    pictures = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    seen = []

    def reward(prompts, completions, image, **kwargs):
        seen.append(type(image[0]))
        return brightness(prompts, completions)

    by_path, decoded = (editing(tmp_path / str(i), data, rewards=reward) for i, data in enumerate((rows, pictures)))
    kinds = []
    for run in (by_path, decoded):
        seen.clear()
        run.train()
        kinds.append(set(seen))
    assert same(trainable(by_path), trainable(decoded))
    assert kinds[0] == {str}
    assert [kind.__name__ for kind in kinds[1]] == ["PngImageFile"]


def test_with_sharded_weights_images_must_be_of_one_size(tmp_path, monkeypatch):
    """Or processes would make unequal numbers of network calls, each of which gathers shards of all."""
    rows = image_rows(tmp_path)
    monkeypatch.setattr("omnitrl.trainer.base_trainer.BaseTrainer.is_sharded", True)
    message = r"row 1 of train_dataset are of .* \[\(64, 64\)\], and those of row 0 of \[\(96, 64\)\].* or use DDP"
    with pytest.raises(InputError, match=message):
        editing(tmp_path / "a", rows)
    equal = [rows[0], rows[2]]
    with pytest.raises(InputError, match="row 1 of eval_dataset are of"):
        editing(tmp_path / "b", equal, eval_dataset=rows)
    with pytest.raises(InputError, match=r"train_dataset is a stream with condition images.*use DDP"):
        editing(tmp_path / "c", stream_of(equal), shuffle_dataset=False)
    assert len(editing(tmp_path / "d", equal).train_rows) == 2
    assert len(trainer(tmp_path / "e", data=rows).train_rows) == 4  # a model that takes no images


def test_a_size_that_follows_from_the_image_makes_buckets(tmp_path):
    rows = image_rows(tmp_path)
    run = editing(tmp_path / "out", rows, "qwen-image-edit", height=None, width=None)
    expected = [run.flow_model.size_of(row, MediaSize()) for row in rows]
    assert run.row_sizes == expected
    assert len(run.sizes) == 2
    for rollout in range(4):
        sizes = {expected[request.row["number"]] for request in run._plan.requests(rollout)}
        assert sizes == {run.size_of(rollout)}
    assert editing(tmp_path / "out", rows, "qwen-image-edit").sizes == [MediaSize(64, 64)]


def cut_off(number):
    buffer = io.BytesIO()
    picture(number).save(buffer, "PNG")
    return buffer.getvalue()[:6000]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (None, r"Row 2 of train_dataset: .* has 0 condition image\(s\), but FluxKontextPipeline takes 1"),
        ("nowhere.png", "Row 2 of train_dataset: Image 0 .* is the file nowhere.png, which does not exist"),
        ("text.png", r"Row 2 of train_dataset: Image 0 .* is no picture that can be read \(the file .*text.png\)"),
        ("https://a.b/c.png", "Row 2 of train_dataset: Image 0 .* is the URL https://a.b/c.png"),
    ],
)
def test_an_image_that_cannot_be_used_names_its_row_and_file(tmp_path, image, message):
    (tmp_path / "text.png").write_text("no picture")
    rows = image_rows(tmp_path)
    rows[2]["image"] = str(tmp_path / image) if image == "text.png" else image
    refused(lambda: editing(tmp_path / "out", rows), message)
    refused(
        lambda: editing(tmp_path / "out", rows[:1], eval_dataset=rows),
        message.replace("train_dataset", "eval_dataset"),
    )


def test_too_many_images_and_other_channels(tmp_path):
    rows = image_rows(tmp_path)
    many = [{"prompt": row["prompt"], "images": [row["image"]]} for row in rows]
    many[1]["images"] *= 2
    refused(lambda: editing(tmp_path / "out", many), r"Row 1 of train_dataset: .* has 2 condition image\(s\)")
    arrays = [{"prompt": p, "image": np.zeros((8, 8, 3), dtype=np.uint8)} for p in PROMPTS]
    assert editing(tmp_path / "out", arrays).flow_model.images(arrays[0])[0].size == (8, 8)
    arrays = [{"prompt": p, "image": np.zeros((8, 8, 4), dtype=np.uint8)} for p in PROMPTS]
    refused(lambda: editing(tmp_path / "out", arrays), r"Row 0 of train_dataset: .* array of shape \(8, 8, 4\), but a")


@pytest.mark.parametrize("form", ["path", "bytes", "dataset", "stream"])
def test_an_image_that_breaks_off_is_named_when_it_is_read(tmp_path, form):
    """Its header is in order, so that only the rollout or evaluation that needs it finds out."""
    rows = image_rows(tmp_path)
    (tmp_path / "cut.png").write_bytes(cut_off(2))
    for row in rows:
        row["image"] = str(tmp_path / "cut.png")
    data, where = rows, "train_dataset"
    if form == "bytes":
        data = [{**row, "image": {"bytes": cut_off(2), "path": "cut.png"}} for row in rows]
    if form == "dataset":
        data = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    if form == "stream":
        refused(lambda: editing(tmp_path / "out", stream_of(rows)), "Row 0 of the stream: Image 0 .*cut.png")
        return
    run = editing(tmp_path / "out", data)
    refused(run.train, rf"Row \d of {where}.* (is no picture|has a picture) that can.* be read \(.*cut.png\)")
    refused(lambda: run.evaluate(data), r"Row 0 of eval_dataset.* picture that can.* be read \(.*cut.png\)")


def test_srpo_trains_on_pictures_of_a_file(tmp_path):
    for i in range(2):
        picture(i).save(tmp_path / f"{i}.png")  # of one colour, the encoder's norms would make rounding large
    (tmp_path / "p.csv").write_text("prompt,image\na cat,0.png\na dog,1.png\n")
    run = trainer(tmp_path / "out", "srpo", data=tmp_path / "p.csv", image_column="image", max_steps=1)
    run.train()
    assert np.isfinite(logged(run, "loss")).all()
    buffer = run.make_rollout(0)
    expected = run.flow_model.encode_images([Image.open(tmp_path / "0.png")], run.size)[0]
    cats = [t.clean_latents for t in buffer.trajectories if t.request.row["prompt"] == "a cat"]
    assert (cats[0] - expected).abs().max() <= 1e-5  # a batch and one alone
