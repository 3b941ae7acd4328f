# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from omnitrl.models import Conditions


def masked(lengths, width=3, value=1.0):
    """Sequences of these lengths, each padded to the longest with what a tokenizer might leave there."""
    longest = max(lengths)
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    embeds = torch.full((len(lengths), longest, width), value)
    return {"embeds": embeds, "embeds_mask": mask}


def test_rows_are_picked_with_all_their_tensors():
    conditions = Conditions({"a": torch.arange(4.0), "b": torch.arange(8.0).view(4, 2)}, {"a": -torch.arange(4.0)})
    picked = conditions[[2, 0, 2]]
    assert len(picked) == 3
    assert picked.positive["a"].tolist() == [2, 0, 2]
    assert picked.positive["b"].tolist() == [[4, 5], [0, 1], [4, 5]]
    assert picked.negative["a"].tolist() == [-2, 0, -2]
    assert conditions[1].positive["a"].tolist() == [1]
    assert conditions[1:3].positive["a"].tolist() == [1, 2]
    assert conditions[torch.tensor([3])].positive["a"].tolist() == [3]


def test_joined_sequences_are_padded_to_the_longest_and_masked():
    joined = Conditions.cat([Conditions(masked([2])), Conditions(masked([3, 1], value=2.0))])
    assert joined.positive["embeds"].shape == (3, 3, 3)
    assert joined.positive["embeds_mask"].tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    assert joined.positive["embeds"][0, :, 0].tolist() == [1, 1, 0]
    assert joined.positive["embeds"][1, :, 0].tolist() == [2, 2, 2]


def test_padding_does_not_change_what_is_attended_to():
    """A13: a prompt alone and beside a longer one, through an attention that obeys the mask."""
    torch.manual_seed(0)
    short, long = torch.randn(1, 5, 8), torch.randn(1, 12, 8)
    alone = Conditions({"embeds": short, "embeds_mask": torch.ones(1, 5, dtype=torch.bool)})
    other = Conditions({"embeds": long, "embeds_mask": torch.ones(1, 12, dtype=torch.bool)})
    query = torch.randn(1, 4, 8)

    def attend(conditions):
        keys, mask = conditions.positive["embeds"][:1], conditions.positive["embeds_mask"][:1]
        return torch.nn.functional.scaled_dot_product_attention(query, keys, keys, attn_mask=mask[:, None])

    together = Conditions.cat([alone, other])
    assert together.positive["embeds"].shape == (2, 12, 8)
    assert torch.allclose(attend(alone), attend(together), atol=1e-5)


def test_lengths_that_differ_without_a_mask_are_refused():
    with pytest.raises(
        ValueError, match=r"'embeds' have the unequal shapes \[\(2, 4\), \(3, 4\)\] and no 'embeds_mask'"
    ):
        Conditions.cat([Conditions({"embeds": torch.zeros(1, 2, 4)}), Conditions({"embeds": torch.zeros(1, 3, 4)})])


def test_widths_that_differ_are_refused_with_a_mask_too():
    parts = [Conditions(masked([2], width=3)), Conditions(masked([3], width=4))]
    with pytest.raises((ValueError, RuntimeError)):
        Conditions.cat(parts)


def test_tensors_that_differ_are_refused():
    with pytest.raises(ValueError, match="Conditions to be joined have different tensors"):
        Conditions.cat([Conditions({"a": torch.zeros(1)}), Conditions({"b": torch.zeros(1)})])
    with pytest.raises(ValueError, match=r"need one batch size in all tensors, got \{'a': 2, 'b': 3\}"):
        Conditions({"a": torch.zeros(2), "b": torch.zeros(3)})
    with pytest.raises(ValueError, match="got no tensors"):
        Conditions({})


def test_guided_rows_are_negatives_first():
    conditions = Conditions({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([-1.0, -2.0])})
    assert conditions.guided()["a"].tolist() == [-1, -2, 1, 2]
    with pytest.raises(ValueError, match=r"Guidance needs negative conditions: call `encode\(rows, guidance=True\)`"):
        Conditions({"a": torch.zeros(1)}).guided()


def test_guided_rows_of_unequal_lengths_are_padded():
    conditions = Conditions(masked([4]), masked([2], value=-1.0))
    both = conditions.guided()
    assert both["embeds"][0, :, 0].tolist() == [-1, -1, 0, 0]
    assert both["embeds_mask"].tolist() == [[True, True, False, False], [True] * 4]


def test_moving_changes_the_precision_of_numbers_and_not_of_masks():
    moved = Conditions(masked([2, 1])).to("cpu", torch.bfloat16)
    assert moved.positive["embeds"].dtype == torch.bfloat16
    assert moved.positive["embeds_mask"].dtype == torch.bool
    assert Conditions({"a": torch.zeros(2, 3)}, {"a": torch.zeros(2, 1)}).num_bytes == 4 * (6 + 2)
