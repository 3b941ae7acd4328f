# SPDX-License-Identifier: Apache-2.0
"""Rows to tensors and back to batches: padded and mixed ones are what each row is alone."""

import datasets
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers.processors import TemplateProcessing

from omnitrl.errors import InputError
from omnitrl.omni import OmniProcessor, VideoLimits, collate, pad_token_fields, read_row
from tests.omni import chats, tiny


EVERY_ROW = [row for kind in ("text", "image", "video", "audio", "mixed") for row in chats.ROWS[kind]]


@pytest.fixture(scope="module")
def processor():
    return OmniProcessor(tiny.processor())


@pytest.fixture(scope="module")
def inputs(processor):
    return [processor(read_row(row, f"row {i}")) for i, row in enumerate(EVERY_ROW)]


def batch(rows):
    """Rows padded on the left."""
    width = max(len(row.input_ids) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row.input_ids) :] = torch.tensor(row.input_ids)
        mask[i, width - len(row.input_ids) :] = 1
    return {"input_ids": ids, "attention_mask": mask, **collate([row.media for row in rows])}


def test_a_row_has_its_own_tensors_and_as_many_places(processor):
    row = chats.chat("x", [chats.png("red", (32, 16)), chats.png("red")], [chats.clip("red", "blue", "red")])
    inputs = processor(read_row(row | {"audios": [chats.tone(300)]}))
    patch, merged = 3 * 2 * tiny.PATCH**2, tiny.MERGE**2
    assert inputs.media["image_grid_thw"].tolist() == [[1, 2, 4], [1, 4, 4]]  # 24 is rounded to 32
    assert inputs.media["video_grid_thw"].tolist() == [[2, 2, 2]]
    assert inputs.media["pixel_values"].shape == (8 + 16, patch)
    assert inputs.media["feature_attention_mask"].sum() == 100  # silence to a second, in steps of 10 ms
    tokenizer = processor.processing_class.tokenizer
    counts = {name: inputs.input_ids.count(tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>"))
              for name in ("image", "video", "audio")}  # fmt: skip
    assert counts == {"image": 24 // merged, "video": 8 // merged, "audio": 13}


def test_a_text_has_none(inputs):
    assert inputs[0].media == {}
    assert tiny.tokenizer().decode(inputs[0].input_ids).endswith("What is it?<|im_end|>\n<|im_start|>assistant\n")


def test_each_video_has_the_rate_at_which_it_is_shown():
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue", "lime", "black")] * 4
    row = chats.chat("x", videos=[{"frames": frames, "fps": 8.0}, {"frames": frames[:4], "fps": 1.0}])
    inputs = OmniProcessor(tiny.processor(), VideoLimits(fps=4.0, max_frames=4))(read_row(row))
    assert inputs.media["video_grid_thw"][:, 0].tolist() == [2, 2]
    assert inputs.media["video_second_per_grid"].tolist() == [1.0, 2.0]  # two frames at 2 and at 1 per second


def test_pixels_are_those_of_the_picture(processor):
    patches = processor(read_row(chats.chat("x", [chats.png("red", (16, 16))]))).media["pixel_values"]
    images = processor.processing_class.image_processor
    wanted = (np.array([1.0, 0.0, 0.0]) - images.image_mean) / np.array(images.image_std)
    channels = patches.reshape(4, 3, -1)
    for channel in range(3):
        torch.testing.assert_close(channels[:, channel], torch.full_like(channels[:, channel], wanted[channel]))


def test_padded_and_mixed_batches_are_what_each_row_is_alone(inputs):
    model = tiny.thinker()
    with torch.no_grad():
        alone = [model(**batch([row])).logits[0].log_softmax(-1) for row in inputs]
        together = model(**batch(inputs)).logits.log_softmax(-1)
    for i, row in enumerate(inputs):
        difference = (together[i, -len(row.input_ids) :] - alone[i]).abs().max()
        assert difference <= 1e-5, EVERY_ROW[i]["prompt"]


def test_what_is_seen_and_heard_moves_the_answer(processor):
    """Otherwise the test above could not fail."""
    model = tiny.thinker()
    pairs = [
        (chats.chat("x", [chats.png("red")]), chats.chat("x", [chats.png("blue")])),
        (chats.chat("x", audios=[chats.tone(300)]), chats.chat("x", audios=[chats.tone(2000)])),
        (chats.chat("x", videos=[chats.clip("red", "red")]), chats.chat("x", videos=[chats.clip("blue", "red")])),
    ]
    for pair in pairs:
        with torch.no_grad():
            one, other = (model(**batch([processor(read_row(row))])).logits[0, -1].log_softmax(-1) for row in pair)
        assert (one - other).abs().max() > 0.01


def test_a_padded_batch_writes_what_each_row_writes_alone(inputs):
    model = tiny.thinker()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    rows = inputs[1::2]
    together = model.generate(**batch(rows), **options)[:, -5:]
    for i, row in enumerate(rows):
        assert model.generate(**batch([row]), **options)[0, -5:].tolist() == together[i].tolist()


def test_numbers_of_tokens_are_placed_at_the_end_of_the_prompt():
    rows = [{"mm_token_type_ids": [1, 2]}, {}, {"mm_token_type_ids": [3, 3, 3]}]
    padded = pad_token_fields(rows, prompt_width=3, width=5)["mm_token_type_ids"]
    assert padded.tolist() == [[0, 1, 2, 0, 0], [0, 0, 0, 0, 0], [3, 3, 3, 0, 0]]


def test_a_picture_that_the_processor_refuses(processor):
    row = read_row(chats.chat("x", [chats.png("red", (2000, 4))]), "row 3 of train_dataset")
    with pytest.raises(
        InputError, match=r"Row 3 of train_dataset: TinyOmniProcessor refuses its image \(.*aspect ratio"
    ):
        processor(row)


def test_a_sound_that_the_processor_cuts_off():
    sound = {"array": np.full(31 * tiny.RATE, 0.1), "sampling_rate": tiny.RATE}
    row = read_row(chats.chat("x", audios=[chats.tone(300), sound]), "row 3 of train_dataset")
    assert OmniProcessor(tiny.processor())(row).media["feature_attention_mask"].sum() == 3200
    with pytest.raises(
        InputError, match=r"Audio 1 of row 3 .* is 31 seconds long, of which TinyOmni25Processor takes 30: cut"
    ):
        OmniProcessor(tiny.processor(tiny.TinyOmni25Processor))(row)


def test_a_processor_that_takes_no_videos_does_not_leave_them_out():
    blind = tiny.vision_language_processor()
    blind.video_processor = None
    with pytest.raises(InputError, match=r"Row 1 has videos, but the model's processor takes none"):
        OmniProcessor(blind)(read_row(chats.chat("x", videos=[chats.clip("red", "blue")]), "row 1"))


def beginning(tokenizer):
    """The tokenizer, which begins a text with a token, with a chat template that does so as well."""
    begin = tokenizer.unk_token
    special = [(begin, tokenizer.unk_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    tokenizer.bos_token = begin
    tokenizer.chat_template = "{{ bos_token }}" + tiny.CHAT_TEMPLATE
    return tokenizer


def test_a_text_that_the_chat_template_has_begun_is_not_begun_again():
    tokenizer, processor = beginning(tiny.tokenizer()), tiny.vision_language_processor()
    processor.chat_template = beginning(processor.tokenizer).chat_template
    row, begin = read_row(chats.ROWS["text"][0]), tokenizer.bos_token_id
    for processing_class in (tokenizer, processor):
        assert OmniProcessor(processing_class)(row).input_ids.count(begin) == 1
    assert OmniProcessor(tokenizer)(read_row({"prompt": "2 + 2"})).input_ids[0] == begin
    tokenizer.chat_template = tiny.CHAT_TEMPLATE  # as Transformers does it, chats have what the template writes
    assert OmniProcessor(tokenizer)(row).input_ids.count(begin) == 0


def test_a_tokenizer_takes_text_alone():
    processor = OmniProcessor(tiny.tokenizer())
    assert processor(read_row({"prompt": "2 + 2"})).input_ids == tiny.tokenizer()("2 + 2").input_ids
    with pytest.raises(InputError, match=r"Row 1 has media \(audio\), but processing_class is a tokenizer"):
        processor(read_row(chats.chat("x", audios=["a.wav"]), "row 1"))


def test_rows_come_back_from_a_dataset_as_they_were(processor):
    stored = datasets.Dataset.from_list(EVERY_ROW)
    for row, given in zip(stored, EVERY_ROW, strict=True):
        one, other = processor(read_row(row)), processor(read_row(given))
        assert one.input_ids == other.input_ids
        assert all(torch.equal(one.media[name], other.media[name]) for name in one.media | other.media)
