# SPDX-License-Identifier: Apache-2.0
"""Chat rows about tiny media, and a GSPO trainer on a tiny model."""

import io

import datasets
import numpy as np
from PIL import Image

from omnitrl.media import Audio
from omnitrl.omni import read_row as read_row
from omnitrl.trainer.gspo_config import GSPOConfig
from omnitrl.trainer.gspo_trainer import GSPOTrainer
from tests.omni import tiny


KINDS = ("text", "image", "video", "audio", "mixed")
OF_THE_TRAINER = ("peft_config", "processing_class", "reward_processing_classes", "eval_dataset", "callbacks")


def png(colour, size=(24, 24)):
    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, "PNG")
    return buffer.getvalue()


def tone(hertz, seconds=0.5):
    t = np.arange(round(seconds * tiny.RATE)) / tiny.RATE
    return Audio(0.5 * np.sin(2 * np.pi * hertz * t)[None].astype(np.float32), tiny.RATE).wav_bytes()


def clip(*colours, fps=2.0):
    return {"frames": [png(colour, (16, 16)) for colour in colours], "fps": fps}


def chat(text, images=(), videos=(), audios=(), **columns):
    media = {"images": list(images), "videos": list(videos), "audios": list(audios)}
    return {"prompt": [{"role": "user", "content": text}], **media, **columns}


ROWS = {
    "text": [chat("What is it?"), chat("Why?")],
    "image": [chat("See", [png("red")]), chat("Compare", [png("blue"), png("lime", (40, 16))])],
    "video": [chat("Watch", videos=[clip("red", "blue", "red")]), chat("Look", videos=[clip("lime", "red", fps=4.0)])],
    "audio": [chat("Hear", audios=[tone(300)]), chat("Listen", audios=[tone(900, 0.2), tone(200, 1.1)])],
}
ROWS["mixed"] = [
    ROWS["text"][0],
    ROWS["image"][1],
    chat("All of it", [png("white")], [clip("black", "white")], [tone(500)]),
    ROWS["audio"][0],
]


def dataset(kind):
    return datasets.Dataset.from_list(ROWS[kind])


def vowels(completion_ids, **kwargs):
    """Some reward that differs between completions of any model."""
    return [float(sum(token % 7 for token in ids) % 5) for ids in completion_ids]


def options(folder, **changed):
    """Two prompts with two answers each a rollout, of which an update takes two."""
    return {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "max_steps": 2,
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "num_generations": 2,
        "steps_per_generation": 2,
        "max_completion_length": 4,
        "gradient_checkpointing": False,
        **changed,
    }


def trainer(folder, kind="mixed", model=None, reward=vowels, **changed):
    """A trainer on rows of a kind, or on a dataset; arguments that are no options go to the trainer."""
    given = {name: changed.pop(name) for name in OF_THE_TRAINER if name in changed}
    given.setdefault("processing_class", tiny.processor())
    return GSPOTrainer(
        model=tiny.thinker() if model is None else model,
        reward_funcs=reward,
        args=GSPOConfig(**options(folder, **changed)),
        train_dataset=dataset(kind) if isinstance(kind, str) else kind,
        **given,
    )


def logged(trained, name):
    """Values of a metric, one for each update that has it."""
    return [row[name] for row in trained.state.log_history if name in row]
