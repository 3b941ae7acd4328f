# SPDX-License-Identifier: Apache-2.0
"""
Every algorithm on every model family, with and without guidance, with adapters and with all weights.

`make test` runs so many that any two values occur together; `make test-matrix` runs all and writes the table of the
documentation.
"""

import pytest
import torch
from transformers import TrainerCallback

from omnitrl.trainer import RolloutTrainer
from tests.tiny_models import SD3, by_pipeline, tiny_of
from tests.trainer import matrix
from tests.trainer.helpers import LORA, WITH_REPLAY, family_run, same, trainable


class First(TrainerCallback):
    """Keeps what a run did first: its rollout, and its loss and gradient before the first update."""

    def __init__(self):
        self.rollout = None
        self.loss = None
        self.gradient = {}

    def watch(self, run):
        run.add_callback(self)
        self._run, training_step = run, run.training_step
        if isinstance(run, RolloutTrainer):
            make_rollout = run.make_rollout

            def make_and_keep(rollout):
                buffer = make_rollout(rollout)
                if self.rollout is None:
                    self.rollout = buffer.state_dict()
                return buffer

            run.make_rollout = make_and_keep

        def step_and_keep(*args):
            loss = training_step(*args)
            if self.loss is None:
                self.loss = float(loss)
            return loss

        run.training_step = step_and_keep
        return run

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if not self.gradient:
            named = self._run.flow_model.networks.named_parameters()
            self.gradient = {name: p.grad.clone() for name, p in named if p.grad is not None}


def joined(tensors):
    return torch.cat([tensor.flatten() for tensor in tensors.values()])


def difference(a, b):
    """Norm of the difference of two sets of tensors, relative to the first."""
    assert a.keys() == b.keys()
    return float((joined(a) - joined(b)).norm() / joined(a).norm())


def ratio_of(run, saved):
    """The largest |ratio - 1| of a rollout that another object made."""
    buffer, worst = run._restore_rollout(saved), 0.0
    for position in range(run.args.micro_steps_per_rollout):
        samples = buffer.samples_of(position, run.args.per_device_train_batch_size)
        for batch in run.cut(buffer, samples):
            with torch.no_grad():
                log_probs = run.replay(run.model, batch, buffer).log_probs
            worst = max(worst, float((torch.exp(log_probs - batch.old_log_probs) - 1).abs().max()))
    return worst


COVER = matrix.covering(matrix.CASES)
WITH_OLD_VERSIONS = matrix.few(COVER)


def marks_of(case):
    """Where a case runs: all with `make test-matrix`, some with `make test`, few in the other environment."""
    if case not in COVER:
        return [pytest.mark.matrix]
    marks = [pytest.mark.compat] if case in WITH_OLD_VERSIONS else []
    return marks if case[1] == SD3 else [*marks, pytest.mark.slow]


@pytest.mark.parametrize(
    ("algorithm", "family", "weights", "guidance"),
    [pytest.param(*case, marks=marks_of(case)) for case in matrix.CASES],
)
def test_two_updates_and_a_replay_by_a_new_object(tmp_path, record_property, algorithm, family, weights, guidance):
    def make(max_steps):
        torch.manual_seed(0)
        return family_run(
            tmp_path,
            algorithm,
            family,
            peft_config=LORA if weights == "lora" else None,
            guidance_scale=matrix.GUIDANCE[guidance],
            guidance_scale_train=matrix.GUIDANCE[guidance],
            max_steps=max_steps,
        )

    first = First()
    run = first.watch(make(max_steps=2))
    before = trainable(run)
    run.train()
    after = trainable(run)
    assert run.state.global_step == 2
    moved = tiny_of(family).moved_share
    assert joined(after).isfinite().all()
    assert 1e-5 < (joined(after) - joined(before)).abs().max() < 0.1
    assert sum(not torch.equal(before[name], after[name]) for name in before) > moved * len(before)

    again, repeated = make(max_steps=1), First()
    assert same(before, trainable(again))
    if first.rollout is not None:
        torch.save(first.rollout, tmp_path / "rollout.pt")
        saved = torch.load(tmp_path / "rollout.pt", weights_only=True)
        again.make_rollout = lambda rollout: again._restore_rollout(saved)
    if algorithm in WITH_REPLAY:
        again.get_train_dataloader()
        worst = ratio_of(again, saved)
        assert worst <= 1e-6
    repeated.watch(again).train()
    assert repeated.loss == pytest.approx(first.loss, rel=1e-6, abs=1e-7)
    assert difference(first.gradient, repeated.gradient) <= 1e-6
    record_property("case", (algorithm, family, weights, guidance))
    record_property("figure", worst if algorithm in WITH_REPLAY else difference(first.gradient, repeated.gradient))


def test_the_smaller_run_has_any_two_values_together():
    some = matrix.covering(matrix.CASES)
    assert set(some) <= set(matrix.CASES)
    for i, first in enumerate(matrix.AXES):
        for j, second in enumerate(matrix.AXES[:i]):
            for value in first:
                for other in second:
                    assert any(case[i] == value and case[j] == other for case in some), (value, other)
    assert len(some) <= 1.1 * len(matrix.AXES[0]) * len(matrix.AXES[1])
    few = matrix.few(some)
    assert {case[0] for case in few} == set(matrix.AXES[0])
    assert {case[1] for case in few} == set(matrix.AXES[1])
    assert len(few) < len(matrix.AXES[0]) + len(matrix.AXES[1])


def test_pairs_of_a_large_matrix_are_covered_by_a_small_part_of_it():
    """11 × 10 pairs need 110 cases of 440; the other axes come with them."""
    axes = range(11), range(10), range(2), range(2)
    cases = [(a, b, c, d) for a in axes[0] for b in axes[1] for c in axes[2] for d in axes[3]]
    some = matrix.covering(cases)
    assert set().union(*map(matrix.pairs, some)) == set().union(*map(matrix.pairs, cases))
    assert len(some) <= 115


def test_every_family_has_a_tiny_pipeline():
    assert set(by_pipeline()) == set(matrix.AXES[1])


def test_the_table_in_the_documentation_has_every_combination():
    _, table, _ = matrix.parts_of(matrix.PAGE.read_text("utf-8"))
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    header, *body = matrix.rows(dict.fromkeys(matrix.CASES, 0.0))
    assert cells[0] == header
    assert [row[0] for row in cells[2:]] == [row[0] for row in body]
    assert all(len(row) == len(header) for row in cells)
    assert all(float(figure) <= 1e-6 for row in cells[2:] for figure in row[1:])


def test_the_table_is_written_in_its_place(tmp_path):
    page = tmp_path / "matrix.md"
    page.write_text("# Title\n\n<!-- table -->\n\n| old |\n\n<!-- end of the table -->\n\nMore.\n", "utf-8")
    matrix.write_table(dict.fromkeys(matrix.CASES, 0.0) | {matrix.CASES[0]: 1.23e-7}, page)
    text = page.read_text("utf-8")
    assert text.startswith("# Title\n\n<!-- table -->\n\n| pipeline | FlowGRPO | DiffusionNFT |")
    assert text.endswith("|\n\n<!-- end of the table -->\n\nMore.\n")
    assert f"| `{matrix.CASES[0][1]}` | 1e-07 | 0 | 0 |" in text
    assert text.count("e-07") == 1
    assert "old" not in text
    matrix.write_table(dict.fromkeys(matrix.CASES, 0.0), page)
    assert text.count("\n") == page.read_text("utf-8").count("\n")
