# SPDX-License-Identifier: Apache-2.0
"""Uploads to the Hub whose failure costs nothing but the upload."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from transformers import Trainer
from transformers.trainer_utils import HubStrategy
from transformers.utils import PushInProgress

from omnitrl.errors import InputError, RunError
from omnitrl.models import FlowModel
from omnitrl.report import ReportCallback, model_card
from omnitrl.trainer.adapters import has_adapters
from omnitrl.trainer.checkpoints import copy_weights


logger = logging.getLogger(__name__)

_NOT_UPLOADED = ["_*", "checkpoint-*"]
_PICTURES = {"Before and after": "before_after.png", "Reward": "reward_curve.png", "Over time": "timeline.png"}


class HubTrainer(Trainer):
    """The part of a trainer that writes the model card and uploads `output_dir`."""

    flow_model: FlowModel
    report: ReportCallback
    _paper: ClassVar[dict[str, str]]
    _tag_names: ClassVar[tuple[str, ...]]

    def create_model_card(self, model_name: str | None = None, **kwargs: Any) -> None:  # type: ignore[override]
        """Writes `README.md` with recipe, results, curve and pictures; see [`omnitrl.report.model_card`]."""
        if not self.is_world_process_zero():
            return
        folder = Path(str(self.args.output_dir))
        card = model_card(
            self.report.summary,
            base_model=self.flow_model.name,
            adapter=has_adapters(self.flow_model),
            paper=self._paper,
            tags=list(dict.fromkeys([*self._tag_names, *_as_list(kwargs.get("tags"))])),
            images={label: name for label, name in _PICTURES.items() if (folder / name).is_file()},
        )
        card.save(folder / "README.md")

    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        """Makes the repository if it is not there; with `push_to_hub=True` that is before training."""
        if not self.args.push_to_hub:
            return super().init_hf_repo(token, private)
        with _reaching_the_hub() as failure:
            return super().init_hf_repo(token, private)
        raise InputError(
            f"push_to_hub=True, but the repository {self._repo!r} cannot be made ({failure[0]}): log in with "
            f"`hf auth login`, or train without push_to_hub and run `{self._upload_command}` afterwards."
        )

    def push_to_hub(self, commit_message: str | None = "End of training", **kwargs: Any) -> Any:  # type: ignore[override]
        """Uploads `output_dir`; the files stay there whatever happens to the upload."""
        if not self.args.push_to_hub:  # the repository may not be there yet, and the files come first
            self.save_model(_internal_call=True)
            self.create_model_card(tags=kwargs.get("tags"))
        with _reaching_the_hub() as failure:
            return super().push_to_hub(commit_message, **kwargs)
        raise RunError(
            f"The upload to the Hub failed ({failure[0]}), but everything is saved in {self.args.output_dir}: log in "
            f"with `hf auth login` and run `{self._upload_command}` when the Hub can be reached."
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """
        Uploads the weights of a checkpoint, and the checkpoint itself if `hub_strategy` says so, beside training.

        The Trainer's own method knows neither our files nor that the arguments it writes hold the token.
        """
        args = self.args
        busy = self.push_in_progress is not None and not self.push_in_progress.is_done()
        if self._writing_checkpoint or not self.is_world_process_zero() or args.hub_strategy == HubStrategy.END:
            return
        if busy and not args.hub_always_push:
            return
        self._finish_current_push()
        self.callback_handler.on_push_begin(args, self.state, self.control)
        copy_weights(checkpoint_folder, str(args.output_dir))
        self.create_model_card()
        message = f"Training in progress, step {self.state.global_step}"
        jobs: Any = [self._upload(str(args.output_dir), message, ignore_patterns=_NOT_UPLOADED)]
        if args.hub_strategy == HubStrategy.CHECKPOINT:
            jobs.append(self._upload(checkpoint_folder, f"{message}, checkpoint", path_in_repo="last-checkpoint"))
        if args.hub_strategy == HubStrategy.ALL_CHECKPOINTS:
            name = Path(checkpoint_folder).name
            jobs.append(self._upload(checkpoint_folder, f"{message}, checkpoint", path_in_repo=name))
        self.push_in_progress = PushInProgress(jobs)

    def _upload(self, folder: str, message: str, **kwargs: Any) -> Any:
        from huggingface_hub import HfApi

        return HfApi().upload_folder(
            repo_id=str(self.hub_model_id),
            folder_path=folder,
            commit_message=message,
            token=self.args.hub_token,
            revision=self.args.hub_revision,
            run_as_future=True,
            **kwargs,
        )

    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        upload: Any = self.push_in_progress
        self.push_in_progress = None
        for job in [] if upload is None else upload.jobs:
            error = job.exception()
            if error is not None:
                logger.warning(
                    "An upload to the Hub failed (%s); everything is in %s, and `%s` uploads it.",
                    _first_line(error),
                    self.args.output_dir,
                    self._upload_command,
                )

    push_in_progress: Any = None  # a `PushInProgress`
    _writing_checkpoint = False  # while a checkpoint is under another name

    @property
    def _repo(self) -> str:
        return self.hub_model_id or self.args.hub_model_id or Path(str(self.args.output_dir)).absolute().name

    @property
    def _upload_command(self) -> str:
        return f"hf upload {self._repo} {self.args.output_dir}"


@contextmanager
def _reaching_the_hub() -> Iterator[list[str]]:
    """Catches what the Hub's client raises; the list then holds the reason."""
    from huggingface_hub.errors import HfHubHTTPError

    # The base of the client that is in use, httpx or httpx2: "unreachable" is not an HfHubHTTPError.
    client_error: Any = HfHubHTTPError.__bases__[0]
    failure: list[str] = []
    try:
        yield failure
    except (client_error, OSError) as error:
        failure.append(_first_line(error))


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _as_list(value: str | Sequence[str] | None) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)
