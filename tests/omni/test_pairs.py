# SPDX-License-Identifier: Apache-2.0
"""Rows of preferences: what is read of them, what bad ones are told, and the batch that they make."""

import pytest
import torch
from PIL import Image

from omnitrl.errors import InputError
from omnitrl.omni import OmniProcessor, PairCollator, PairProcessor, read_pair, read_row
from omnitrl.omni.rows import ROW_COLUMN
from tests.omni import chats, tiny


USER = [{"role": "user", "content": "What is this?"}]
RED = Image.new("RGB", (16, 16), "red")


MIXED = {**chats.ROWS["mixed"][2], "chosen": "all", "rejected": "none"}
IMAGE = {**chats.ROWS["image"][0], "chosen": "red", "rejected": "blue"}


def text(chosen="yes, it is", rejected="no", question="What?", **columns):
    prompt = [{"role": "user", "content": question}]
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **columns}


def said(content):
    return [{"role": "assistant", "content": content}]


@pytest.fixture(scope="module")
def processor():
    return PairProcessor(tiny.processor())


# Reading


def test_answers_are_messages_or_texts():
    for chosen in ("A cat.", said("A cat."), said([{"type": "text", "text": "A cat.", "image": None}])):
        pair = read_pair({"prompt": USER, "chosen": chosen, "rejected": said("A dog."), "images": [RED]})
        assert (pair.chosen, pair.rejected) == (said("A cat."), said("A dog."))
        assert pair.prompt.media["image"] == [RED]


def test_a_text_has_texts_as_answers():
    pair = read_pair({"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5"})
    assert (pair.prompt.messages, pair.chosen, pair.rejected) == ("2 + 2 = ", "4", "5")


def test_a_prompt_may_be_what_both_conversations_begin_with():
    content = [{"type": "image"}, {"type": "text", "text": "What is this?"}]
    prompt = [{"role": "user", "content": content}]
    pair = read_pair({"chosen": prompt + said("A cat."), "rejected": prompt + said("A dog."), "images": ["cat.png"]})
    assert (pair.prompt.messages, pair.prompt.media["image"]) == (prompt, ["cat.png"])
    assert (pair.chosen, pair.rejected) == (said("A cat."), said("A dog."))
    texts = read_pair({"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert (texts.prompt.messages, texts.chosen, texts.rejected) == ("The sky is", " blue.", " green.")


def test_tools_and_template_options_of_a_row():
    row = {"prompt": USER, "chosen": "a", "rejected": "b", "tools": '[{"name": "zoom"}]'}
    pair = read_pair({**row, "chat_template_kwargs": {"enable_thinking": False}})
    assert pair.template_options == {"tools": [{"name": "zoom"}], "enable_thinking": False}


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"prompt": USER, "rejected": "b"}, r"Row 3 has no chosen but None: give a text such as 'A cat\.', or messag"),
        ({"prompt": USER, "chosen": "a", "rejected": ""}, r"Row 3 has no rejected but ''"),
        (
            {"prompt": USER, "chosen": said([{"type": "image"}]), "rejected": "b"},
            r"Row 3 has a place for image in chosen, but answers are text: move what the question shows to the prompt",
        ),
        (
            {"prompt": USER, "chosen": "a", "rejected": said([{"type": "audio", "audio": "a.wav"}])},
            r"Row 3 has a place for audio in rejected",
        ),
        ({"prompt": "2 + 2 = ", "chosen": said("4"), "rejected": "5"}, r"Row 3 has a prompt that is a text and mess"),
        (
            {"prompt": USER, "chosen": USER + said("a"), "rejected": USER + said("b")},
            r"Row 3 has a chosen that begins with the role 'user', as a prompt does: give the answer alone, or whole",
        ),
        ({"chosen": said("a"), "rejected": said("b")}, r"Row 3 has no prompt, and its chosen and rejected do not beg"),
        ({"prompt": USER, "chosen": [{"role": "assistant"}], "rejected": "b"}, r"Chosen of row 3 has the message"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}], "chosen": "a", "rejected": "b"},
            r"Row 3 has 1 place\(s\) for image in its messages and 0 in the column 'images'",
        ),
    ],
)
def test_rows_that_cannot_be_used(row, sentence):
    with pytest.raises(InputError, match=sentence):
        read_pair(row, "row 3")


# Tokens


def test_answers_end_as_the_template_ends_them(processor):
    inputs = processor(read_pair({"prompt": USER, "chosen": "A cat.", "rejected": "A dog."}))
    decode = processor.tokenizer.decode
    assert decode(inputs.prompt.input_ids) == "<|im_start|>user\nWhat is this?<|im_end|>\n<|im_start|>assistant\n"
    assert [decode(inputs.chosen_ids), decode(inputs.rejected_ids)] == ["A cat.<|im_end|>\n", "A dog.<|im_end|>\n"]


def test_texts_end_with_the_end_of_a_sequence_once(processor):
    inputs = processor(read_pair({"prompt": "2 + 2 = ", "chosen": "4", "rejected": "5<|im_end|>"}))
    ids = [inputs.prompt.input_ids, inputs.chosen_ids, inputs.rejected_ids]
    assert [processor.tokenizer.decode(part) for part in ids] == ["2 + 2 = ", "4<|im_end|>", "5<|im_end|>"]


def test_the_prompt_of_a_pair_is_what_a_rollout_is_given(processor):
    inputs, alone = processor(read_pair(MIXED)).prompt, OmniProcessor(tiny.processor())(read_row(MIXED))
    assert inputs.input_ids == alone.input_ids
    assert inputs.media.keys() == alone.media.keys() >= {"pixel_values", "pixel_values_videos", "input_features"}
    assert all(torch.equal(value, alone.media[name]) for name, value in inputs.media.items())


def with_template(template):
    made = tiny.processor()
    made.chat_template = made.tokenizer.chat_template = template
    return PairProcessor(made)


START = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
END = "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
OF_PARTS = START + "{% for c in m['content'] %}{{ c['text'] }}{% endfor %}" + END
OF_TEXTS = START + "{% if m['content'] is string or m['role'] == 'user' %}{{ m['content'] }}{% endif %}" + END
OF_USERS = START + "{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}" + END


@pytest.mark.parametrize("template", [OF_PARTS, OF_TEXTS])
def test_templates_that_know_one_form_of_content_are_given_it(template):
    processor = with_template(template)
    inputs = processor(read_pair({"prompt": USER, "chosen": "A cat.", "rejected": "A dog."}))
    assert processor.tokenizer.decode(inputs.chosen_ids) == "A cat.<|im_end|>\n"


def test_a_template_that_leaves_answers_out():
    with pytest.raises(
        InputError, match=r"Row 3 has an answer that the chat template of TinyOmniProcessor leaves out"
    ):
        with_template(OF_USERS)(read_pair({"prompt": USER, "chosen": "A cat.", "rejected": "A dog."}, "row 3"))


def test_a_template_that_ends_prompts_otherwise_than_it_goes_on(caplog):
    thinks = with_template(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'user' %}{{ m['content'][0]['text'] }}"
        "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    )
    inputs = thinks(read_pair({"prompt": USER, "chosen": "A cat.", "rejected": "A dog."}))
    assert thinks.tokenizer.decode(inputs.prompt.input_ids).endswith("<|im_start|>assistant\n")
    assert thinks.tokenizer.decode(inputs.chosen_ids) == "A cat.<|im_end|>\n"
    assert "The chat template ends a prompt with '<think>'" in caplog.text


# Batches


def test_a_batch_has_the_chosen_answers_and_then_the_rejected_ones(processor):
    rows = [text("abc", "d"), text(rejected="efgh", question="Why?")]
    batch = PairCollator(processor)(rows)
    texts = [
        processor.tokenizer.decode(ids[mask.bool()])
        for ids, mask in zip(batch["input_ids"], batch["completion_mask"], strict=True)
    ]
    assert texts == ["abc<|im_end|>\n", "yes, it is<|im_end|>\n", "d<|im_end|>\n", "efgh<|im_end|>\n"]
    whole = processor.tokenizer.decode(batch["input_ids"][3][batch["attention_mask"][3].bool()])
    assert whole == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\nefgh<|im_end|>\n"
    lengths = batch["attention_mask"].sum(1)
    assert batch["input_ids"].shape[1] == max(lengths)
    assert [row.tolist() for row in batch["attention_mask"]] == [
        [1] * n + [0] * (int(max(lengths)) - n) for n in lengths.tolist()
    ]


def test_the_media_of_prompts_are_in_a_batch_twice(processor):
    rows = [IMAGE, text(), MIXED]
    batch = PairCollator(processor)(rows)
    grids = [processor(read_pair(row)).prompt.media.get("image_grid_thw") for row in (rows[0], rows[2])]
    assert batch["image_grid_thw"].tolist() == torch.cat([*grids, *grids]).tolist()
    half = batch["pixel_values"].shape[0] // 2
    assert torch.equal(batch["pixel_values"][:half], batch["pixel_values"][half:])
    assert len(batch["video_second_per_grid"]) == len(batch["input_features"]) == 2


def test_only_answers_are_cut(processor):
    row = {**text("abcdef", "g"), ROW_COLUMN: 7}
    prompt = len(processor(read_pair(row)).prompt.input_ids)
    batch = PairCollator(processor, max_length=prompt + 4)([row])
    assert batch["completion_mask"].sum(1).tolist() == [4, 3]  # 'abcd', and 'g' with what ends it
    with pytest.raises(
        InputError, match=rf"Row 7 has a prompt of {prompt} tokens, which leaves none of max_length=20"
    ):
        PairCollator(processor, max_length=20)([row])


def test_lengths_are_multiples(processor):
    batch = PairCollator(processor, pad_to_multiple_of=32)([text()])
    assert batch["input_ids"].shape[1] % 32 == 0
    assert (batch["input_ids"][batch["attention_mask"] == 0] == processor.tokenizer.pad_token_id).all()


def test_numbers_of_tokens_go_on_over_answers(processor):
    """Those of vision-language models, which say which tokens are of media."""
    fields = {"mm_token_type_ids": [0, 1, 0]}

    class WithTypes(PairProcessor):
        def __call__(self, pair):
            inputs = super().__call__(pair)
            numbers = (fields["mm_token_type_ids"] * len(inputs.prompt.input_ids))[: len(inputs.prompt.input_ids)]
            inputs.prompt.token_fields["mm_token_type_ids"] = numbers
            return inputs

    batch = PairCollator(WithTypes(tiny.processor()))([text("ab", "c")])
    prompt = batch["completion_mask"][0].argmax().item()
    expected = (fields["mm_token_type_ids"] * prompt)[:prompt]
    assert batch["mm_token_type_ids"].shape == batch["input_ids"].shape
    assert batch["mm_token_type_ids"][:, :prompt].tolist() == [expected, expected]
    assert batch["mm_token_type_ids"][:, prompt:].sum() == 0


def test_files_that_cannot_be_read_name_their_row(processor):
    collator = PairCollator(processor)
    bad = {**text(images=["no.png"]), ROW_COLUMN: 4}
    with pytest.raises(InputError, match=r"Image 0 of row 4 is the file no.png, which does not exist"):
        collator([bad])
    with pytest.raises(InputError, match=r"Audio 0 of row 4 is no (WAV file|sound that can be read)"):
        collator([{**text(audios=[b"RIFF"]), ROW_COLUMN: 4}])
