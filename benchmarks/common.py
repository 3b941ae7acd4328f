# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: random pipelines, interleaved timing, tables, and the JSON files."""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import string
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is built here; looking for a network would cost time
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# The tokenizers, text encoders and VAEs of the tests' checkpoints serve here too.
sys.path.insert(0, str(Path(__file__).parent.parent))

RESULTS = Path(__file__).parent / "results"


# Command line and files


def parse_args(name: str, description: str, others: dict[str, str] | None = None) -> argparse.Namespace:
    """The options that all benchmarks have; `others` are those of one, with their help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="A small model, few runs: tests the script.")
    parser.add_argument("--output", type=Path, default=RESULTS / f"{name}.json", help="Where the JSON goes.")
    parser.add_argument("--threads", type=int, default=1, help="Threads of PyTorch (default: 1, the steadiest).")
    for option, text in (others or {}).items():
        parser.add_argument(option, help=text)
    return parser.parse_args()


def environment(threads: int) -> dict[str, Any]:
    """What the figures depend on."""
    names = ("torch", "diffusers", "transformers", "accelerate", "peft")
    return {"cpu": _cpu_name(), "threads": threads, **{name: version(name) for name in names}}


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes the results and says where."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints aligned columns, the first to the left and the others to the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        print("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]))
        if number == 0:
            print("  ".join("-" * width for width in widths))


# Timing


class Parts:
    """
    Adds up the CPU seconds spent inside named functions.

    What a named function spends inside another named one counts for the inner one only, so the parts never overlap
    and what is left of the total is the time outside all of them.

    Example:

    ```python
    >>> parts = Parts()
    >>> with parts.watch({"decode": (pipeline.vae, "decode")}):
    ...     pipeline("a cat")
    >>> parts.seconds["decode"]
    ```
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the block for `name`."""
        self._inner.append(0.0)
        start = time.process_time()
        try:
            yield
        finally:
            spent = time.process_time() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - self._inner.pop()
            if self._inner:
                self._inner[-1] += spent

    @contextmanager
    def watch(self, functions: dict[str, tuple[Any, str] | list[tuple[Any, str]]]) -> Iterator[None]:
        """Counts the calls of `owner.attribute` for each name, while the block runs."""
        with ExitStack() as stack:
            for name, places in functions.items():
                for owner, attribute in places if isinstance(places, list) else [places]:
                    wrapped = self._wrap(name, getattr(owner, attribute))
                    stack.enter_context(patch.object(owner, attribute, wrapped))
            yield

    def _wrap(self, name: str, function: Callable) -> Callable:
        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return function(*args, **kwargs)

        return counted


@dataclass
class Timing:
    """
    One run: CPU seconds of the process, wall time, and the CPU seconds of the run's parts.

    With one thread and nothing to wait for, the CPU time is the wall time of an idle machine, whatever else the
    machine is doing.
    """

    cpu: float
    wall: float
    parts: dict[str, float]


def print_parts(title: str, results: list[dict[str, Any]], key: str, label: str) -> None:
    """Prints where the time of each case goes, in milliseconds; `key` is what results differ by beside guidance."""
    names = list(dict.fromkeys(part for result in results for parts in result["parts"].values() for part in parts))
    names = [name for name in names if name != "rest"] + ["rest"]
    rows = [
        (name, result[key], result["guidance_scale"], *(f"{1e3 * parts.get(part, 0):.2f}" for part in names))
        for result in results
        for name, parts in result["parts"].items()
    ]
    print_table(title, ("", label, "guidance", *names), rows)


def measure(run: Callable[[], Any], watched: dict[str, Any] | None = None) -> Timing:
    """Times one call, the garbage collector being off."""
    parts = Parts()
    gc.collect()
    gc.disable()
    try:
        with parts.watch(watched or {}):
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    finally:
        gc.enable()
    return Timing(cpu, wall, {**parts.seconds, "rest": cpu - sum(parts.seconds.values())})


def interleave(
    cases: dict[str, tuple[Callable[[], Any], dict[str, Any]]],
    repeats: int,
    warmup: int = 1,
    before: Callable[[], Any] = lambda: None,
) -> dict[str, list[Timing]]:
    """
    Times the cases in turns, A B C, A B C, so that whatever slows the machine down for a while slows all of them.

    Args:
        cases: Name to (what to run, functions to watch, see [`Parts.watch`]).
        repeats (`int`): Turns that count.
        warmup (`int`, defaults to 1): Turns before those.
        before: Called before each run, outside its time.
    """
    timings: dict[str, list[Timing]] = {name: [] for name in cases}
    for turn in range(warmup + repeats):
        for name, (run, watched) in cases.items():
            before()
            timing = measure(run, watched)
            if turn >= warmup:
                timings[name].append(timing)
    return timings


def medians(timings: Sequence[Timing], without: Sequence[str] = ()) -> dict[str, float]:
    """
    Medians over the runs of CPU time, wall time, and CPU time outside the parts `without`.

    Each median is taken by itself, so parts need not add up to the total exactly.
    """
    return {
        "cpu": median(t.cpu for t in timings),
        "wall": median(t.wall for t in timings),
        "cpu_without_ends": median(t.cpu - sum(t.parts.get(name, 0.0) for name in without) for t in timings),
    }


def median_parts(timings: Sequence[Timing]) -> dict[str, float]:
    """Median CPU seconds of each part, `rest` last."""
    names = dict.fromkeys(name for timing in timings for name in timing.parts if name != "rest")
    return {name: median(t.parts.get(name, 0.0) for t in timings) for name in [*names, "rest"]}


# Models


@dataclass(frozen=True)
class Geometry:
    """
    Sizes of a random `StableDiffusion3Pipeline`.

    The defaults have 30 million parameters in the network and 256 image tokens: 32 x 32 latents in patches of 2.
    """

    layers: int = 6
    heads: int = 6
    head_dim: int = 64
    latent_channels: int = 16
    latent_size: int = 32
    patch_size: int = 2
    vae_channels: tuple[int, ...] = (16, 32, 32, 32)
    text_dim: int = 64
    text_length: int = 77
    t5_length: int = 16


TINY = Geometry(layers=2, heads=2, head_dim=16, latent_size=8, vae_channels=(8, 8), text_length=16)


def sd3_pipeline(geometry: Geometry = Geometry(), seed: int = 0) -> Any:
    """A `StableDiffusion3Pipeline` of random weights with three small text encoders and tokenizers of characters."""
    import torch
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )
    from transformers import CLIPTextModelWithProjection, T5Config, T5EncoderModel

    torch.manual_seed(seed)
    g, width = geometry, geometry.heads * geometry.head_dim
    clip, t5 = _clip_tokenizer(g.text_length), _t5_tokenizer()
    network = SD3Transformer2DModel(
        sample_size=g.latent_size,
        patch_size=g.patch_size,
        in_channels=g.latent_channels,
        out_channels=g.latent_channels,
        num_layers=g.layers,
        attention_head_dim=g.head_dim,
        num_attention_heads=g.heads,
        joint_attention_dim=2 * g.text_dim,
        caption_projection_dim=width,
        pooled_projection_dim=2 * g.text_dim,
        pos_embed_max_size=g.latent_size // g.patch_size,
        qk_norm="rms_norm",
    )
    levels = len(g.vae_channels)
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        block_out_channels=g.vae_channels,
        latent_channels=g.latent_channels,
        norm_num_groups=4,
        use_quant_conv=False,
        use_post_quant_conv=False,
        shift_factor=0.06,
        scaling_factor=1.5,
    )
    t5_config = T5Config(
        vocab_size=len(t5), d_model=2 * g.text_dim, d_kv=32, d_ff=2 * g.text_dim, num_layers=1, num_heads=2
    )
    pipeline = StableDiffusion3Pipeline(
        transformer=network,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=CLIPTextModelWithProjection(_clip_config(clip, g.text_dim)),
        tokenizer=clip,
        text_encoder_2=CLIPTextModelWithProjection(_clip_config(clip, g.text_dim)),
        tokenizer_2=clip,
        text_encoder_3=T5EncoderModel(t5_config),
        tokenizer_3=t5,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def sd3_model(geometry: Geometry = Geometry(), seed: int = 0) -> Any:
    """The [`~omnitrl.models.FlowModel`] of [`sd3_pipeline`]."""
    from omnitrl.models import load_flow_model

    return load_flow_model(sd3_pipeline(geometry, seed), max_sequence_length=geometry.t5_length)


@dataclass(frozen=True)
class Subject:
    """
    What a benchmark runs: a model, its media, and how the stock pipeline is called.

    Args:
        model ([`~omnitrl.models.FlowModel`]):
            Random weights, 20 to 40 million of them in the network.
        size ([`~omnitrl.models.MediaSize`]):
            Of 256 image tokens.
        guidance_argument (`str`):
            What the stock pipeline calls the guidance scale.
        arguments (`dict`):
            Further arguments of the stock pipeline.
    """

    model: Any
    size: Any
    guidance_argument: str
    arguments: dict[str, Any]

    def stock(self, prompts: list[str], steps: int, guidance_scale: float, seeds: Sequence[int]) -> Any:
        """What the stock pipeline makes."""
        import torch

        sizes = {name: value for name, value in vars(self.size).items() if value is not None}
        negative = self.model.default_negative_prompt
        return self.model.pipeline(
            prompt=prompts,
            negative_prompt=[negative] * len(prompts),
            num_inference_steps=steps,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            max_sequence_length=self.model.max_sequence_length,
            **{self.guidance_argument: guidance_scale},
            **sizes,
            **self.arguments,
        )


def _sd3(quick: bool) -> Subject:
    from omnitrl.models import MediaSize

    geometry = TINY if quick else Geometry()
    side = geometry.latent_size * 2 ** (len(geometry.vae_channels) - 1)
    return Subject(sd3_model(geometry), MediaSize(side, side), "guidance_scale", {})


def _qwen_image(quick: bool) -> Subject:
    from diffusers import QwenImageTransformer2DModel

    from omnitrl.models import MediaSize, load_flow_model
    from tests.tiny.parts import liven
    from tests.tiny.qwen_image import tiny_qwen_image

    pipeline = tiny_qwen_image()
    if not quick:
        network = QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=6,
            attention_head_dim=64,
            num_attention_heads=6,
            joint_attention_dim=32,
            axes_dims_rope=(8, 28, 28),
        )
        liven(network.proj_out)
        pipeline.register_modules(transformer=network)
    side = 64 if quick else 256
    return Subject(load_flow_model(pipeline, max_sequence_length=64), MediaSize(side, side), "true_cfg_scale", {})


def _wan(quick: bool) -> Subject:
    from diffusers import WanTransformer3DModel

    from omnitrl.models import MediaSize, load_flow_model
    from tests.tiny.wan import CHANNELS, WIDTH, tiny_wan

    pipeline = tiny_wan()
    if not quick:
        network = WanTransformer3DModel(
            num_attention_heads=6,
            attention_head_dim=64,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            text_dim=WIDTH,
            freq_dim=64,
            ffn_dim=1536,
            num_layers=10,
            rope_max_seq_len=64,
        )
        pipeline.register_modules(transformer=network)
    size = MediaSize(64, 64, 5) if quick else MediaSize(128, 128, 13)
    return Subject(load_flow_model(pipeline, max_sequence_length=64), size, "guidance_scale", {"output_type": "np"})


SUBJECTS: dict[str, Callable[[bool], Subject]] = {"sd3": _sd3, "qwen_image": _qwen_image, "wan": _wan}
"""Geometry of a family -> its model; `True` for the small one."""


def num_parameters(module: Any) -> int:
    """Number of weights of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def _clip_tokenizer(length: int) -> Any:
    from transformers import CLIPTokenizer

    characters = string.ascii_lowercase + string.digits + string.punctuation
    tokens = [*characters, *(f"{c}</w>" for c in characters), "<|startoftext|>", "<|endoftext|>"]
    return CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=length)


def _clip_config(tokenizer: Any, width: int) -> Any:
    from transformers import CLIPTextConfig

    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def _t5_tokenizer() -> Any:
    from transformers import T5Tokenizer

    characters = string.ascii_letters + string.digits + string.punctuation
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((c, -3.0) for c in characters)]
    return T5Tokenizer(vocab=vocab, extra_ids=0)
