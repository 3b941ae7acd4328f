# SPDX-License-Identifier: Apache-2.0
"""A frozen teacher: another model, or another adapter on the student's base."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from omnitrl.errors import InputError
from omnitrl.models import FlowModel, MediaSize
from omnitrl.trainer.adapters import Velocity, has_adapters


_ADAPTER = "teacher"


class Teacher:
    """
    A frozen model that is asked for its velocity.

    Args:
        model ([`FlowModel`]):
            Encodes prompts for the teacher.
        networks (`list[PeftModel]`):
            The student's networks, where the teacher is a second adapter on them; empty where it has its own.
    """

    def __init__(self, model: FlowModel, networks: list[Any] | None = None) -> None:
        self.model = model
        self._networks = networks or []

    @classmethod
    def of_model(cls, teacher: FlowModel, student: FlowModel, sizes: Sequence[MediaSize]) -> Teacher:
        """
        A teacher with weights of its own.

        Args:
            teacher, student ([`FlowModel`]):
                The two.
            sizes (`Sequence[MediaSize]`):
                Of the media.

        Raises:
            [`~omnitrl.errors.InputError`]: they share weights, are of two families, or differ in their latents.
        """
        if type(teacher) is not type(student):
            raise InputError(
                f"teacher_model is a {type(teacher).__name__}, but the student is a {type(student).__name__}, whose "
                "latents mean something else: use a teacher of the student's family."
            )
        for size in sizes:
            shape, own_shape = teacher.latent_shape(size), student.latent_shape(size)
            if shape != own_shape:
                raise InputError(
                    f"teacher_model has latents of shape {shape}, the student of {own_shape}: use a teacher with the "
                    "student's VAE, and set height and width if the checkpoints' own sizes differ."
                )
        own = {id(p) for p in student.networks.parameters()}
        if any(id(p) in own for p in teacher.networks.parameters()):
            raise InputError(
                "teacher_model is the very model that is trained, so the teacher would change with the student: load "
                "it a second time, or pass its id or folder."
            )
        teacher.networks.requires_grad_(False).eval()
        return cls(teacher.to(student.device))

    @classmethod
    def of_adapter(cls, source: str, student: FlowModel) -> Teacher:
        """
        A teacher that is the student's base with a saved adapter.

        With adapters on the student too, the base is there once. With full fine-tuning, a copy of it is made.

        Args:
            source (`str`):
                Folder or Hub id of the adapter; of a model with several networks, with a sub-folder for each.
            student ([`FlowModel`]):
                The student, before its training.

        Raises:
            [`~omnitrl.errors.InputError`]: no adapter can be loaded from there.
        """
        several = len(student.networks) > 1
        folders: dict[str, dict[str, Any]] = {
            name: {"subfolder": name} if several else {} for name in student.networks
        }
        network: Any
        if has_adapters(student):
            for name, network in student.trained_networks.items():
                with _explained(source):
                    device = str(student.device)
                    network.load_adapter(source, adapter_name=_ADAPTER, torch_device=device, **folders[name])
            return cls(student, list(student.trained_networks.values()))
        teacher = copy.copy(student)
        teacher.networks = copy.deepcopy(student.networks).requires_grad_(False)
        for name, network in list(teacher.networks.items()):
            with _explained(source):
                teacher.networks[name] = PeftModel.from_pretrained(network, source, **folders[name]).eval()
        return cls(teacher)

    @contextmanager
    def velocity(self, policy: nn.Module) -> Iterator[Velocity]:
        """Gives the teacher's velocity function, without gradient; `policy` is the (wrapped) student."""
        with torch.no_grad():
            if not self._networks:
                yield self.model.velocity
                return
            before = [network.active_adapter for network in self._networks]
            try:
                for network in self._networks:
                    network.set_adapter(_ADAPTER)
                yield policy
            finally:
                for network, name in zip(self._networks, before, strict=True):
                    network.set_adapter(name)  # freezes the teacher's adapter again


@contextmanager
def _explained(source: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise InputError(
            f"No adapter can be loaded from teacher_adapter={source!r} ({first_line}): pass a folder or Hub id with "
            "adapter_config.json and adapter_model.safetensors of the student's base, or a `teacher_model`."
        ) from error
