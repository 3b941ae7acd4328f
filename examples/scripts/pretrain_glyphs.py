# SPDX-License-Identifier: Apache-2.0
# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "omnitrl[ocr]",
#     "matplotlib",
# ]
# ///
"""
Pre-train the quickstart model from nothing: a `StableDiffusion3Pipeline` that draws three-letter words.

    python examples/scripts/pretrain_glyphs.py --output_dir glyphs

Four stages on one CPU core, each counted in optimizer steps so that a run can be repeated:

1. `vae`: a 165 k parameter autoencoder learns drawn words.
2. `coarse`: the transformer and its two text encoders learn by flow matching (https://arxiv.org/abs/2210.02747).
3. `sharp`: the same with less shaken pictures, until nearly every word is spelt right.
4. `noisy`: each letter of a caption is replaced by a random one with probability 0.3 while the picture stays. The
   model still draws letters, but no longer trusts what it is told: spelling is what reinforcement learning is left to
   put right. A base that spells perfectly could not show anything, nor could one that never hits a word.

The folder then holds the pipeline in bfloat16 and `pretrain_report.json`: seconds of each stage, OCR on the three word
splits and the SHA-256 of each file.
"""

import hashlib
import json
import math
import platform
import random
import string
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import diffusers
import numpy as np
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, HfArgumentParser

from omnitrl.quickstart.words import HEIGHT, WIDTH, WORDS, render_word
from omnitrl.rewards import ocr_exact_reward, ocr_reward


MAX_TOKENS = 8  # start, three letters, end and padding
TEXT_WIDTHS, TEXT_LAYERS = (64, 32), (3, 2)
EVAL_STEPS = 6
POOL = 8192  # pictures that a stage draws from
STOCK_PADDING = 256  # zeros in place of the third text encoder: the pipeline's default `max_sequence_length`


@dataclass
class PretrainArguments:
    """Options of the script; the defaults are those that the shipped weights were trained with."""

    output_dir: str = field(default="glyphs", metadata={"help": "Folder for the pipeline and its report."})
    seed: int = field(default=0, metadata={"help": "Seed of everything that is drawn."})
    threads: int = field(default=1, metadata={"help": "Threads of torch. Other counts may round differently."})
    scale: float = field(default=1.0, metadata={"help": "Factor on all step counts; 0.002 for a smoke test."})
    eval_seeds: int = field(default=4, metadata={"help": "Pictures of each word that the quality is measured on."})
    keep_stages: str | None = field(
        default=None,
        metadata={"help": "Folder in which each stage leaves its weights, and takes them from if they are there."},
    )

    def __post_init__(self):
        if not 0 < self.scale <= 100:
            raise ValueError(f"scale={self.scale} must be above 0 and at most 100: use 1.0 for the full run.")
        if self.eval_seeds < 1:
            raise ValueError(f"eval_seeds={self.eval_seeds} must be at least 1: use 4, as for the shipped report.")


@dataclass(frozen=True)
class Stage:
    """One stage of training."""

    name: str
    steps: int
    batch_size: int
    learning_rate: float
    jitter: int
    caption_noise: float = 0.0
    word_share: float = 0.5  # share of dictionary words among the strings drawn


STAGES = (
    Stage("vae", 1500, 32, 3e-3, jitter=2, word_share=0.3),
    Stage("coarse", 1000, 64, 1.5e-3, jitter=2),
    Stage("sharp", 2200, 32, 1.2e-3, jitter=1),
    Stage("noisy", 800, 32, 1e-3, jitter=1, caption_noise=0.3),
)


# ---- strings -------------------------------------------------------------------------------------------------------

UNSEEN = frozenset(WORDS["unseen"])
SEEN = WORDS["train"] + WORDS["heldout"]


def draw_letters(rng: random.Random) -> str:
    return "".join(rng.choice(string.ascii_uppercase) for _ in range(3))


def draw_string(rng: random.Random, word_share: float, draw=draw_letters) -> str:
    """A word of the train or heldout split, or else random letters; never a word of the unseen split."""
    text = rng.choice(SEEN) if rng.random() < word_share else draw(rng)
    while text.upper() in UNSEEN:
        text = draw(rng)
    return text


def corrupt(rng: random.Random, text: str, noise: float) -> str:
    """Replace each letter with probability `noise` by a random one; never by chance into an unseen word."""
    while True:
        letters = [rng.choice(string.ascii_uppercase) if rng.random() < noise else letter for letter in text]
        caption = "".join(letters)
        if caption.upper() not in UNSEEN:
            return caption


# ---- models --------------------------------------------------------------------------------------------------------


def make_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer with one token a character: its merge table is empty."""
    characters = string.ascii_lowercase + string.digits + " .,!?'\"-"
    tokens = [*characters, *(f"{character}</w>" for character in characters if character != " ")]
    tokens += ["<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=MAX_TOKENS)


def make_text_encoder(tokenizer: CLIPTokenizer, width: int, layers: int) -> CLIPTextModelWithProjection:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModelWithProjection(config)


def make_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 16, 32),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=HEIGHT,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


def make_transformer() -> SD3Transformer2DModel:
    return SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=4,
        num_attention_heads=4,
        attention_head_dim=32,
        caption_projection_dim=128,
        joint_attention_dim=sum(TEXT_WIDTHS),
        pooled_projection_dim=sum(TEXT_WIDTHS),
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    """
    The stock grid runs from 1 to 0.001 and then to 0: at six steps one step of six would do nothing. Stretching it to
    end at 1/6 gives 1, 5/6, 4/6, 3/6, 2/6, 1/6, 0.
    """
    return FlowMatchEulerDiscreteScheduler(shift=1.0, shift_terminal=1 / EVAL_STEPS)


def make_pipeline() -> StableDiffusion3Pipeline:
    tokenizer = make_tokenizer()
    encoders = [make_text_encoder(tokenizer, *size) for size in zip(TEXT_WIDTHS, TEXT_LAYERS, strict=True)]
    return StableDiffusion3Pipeline(
        transformer=make_transformer(),
        scheduler=make_scheduler(),
        vae=make_vae(),
        text_encoder=encoders[0],
        tokenizer=tokenizer,
        text_encoder_2=encoders[1],
        tokenizer_2=make_tokenizer(),
        text_encoder_3=None,
        tokenizer_3=None,
    )


# ---- training ------------------------------------------------------------------------------------------------------


def to_tensor(images: list[Image.Image]) -> torch.Tensor:
    """RGB pictures to a tensor `(B, 3, H, W)` in [-1, 1]."""
    pixels = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


def print_progress(stage: Stage, step: int, steps: int, losses: list[float], start: float) -> None:
    if step % 100 == 0 or step == steps:
        mean = sum(losses[-100:]) / len(losses[-100:])
        print(f"{stage.name} {step}/{steps} loss {mean:.4f} {time.time() - start:.0f} s", flush=True)


def train_vae(pipe: StableDiffusion3Pipeline, stage: Stage, steps: int, rng: random.Random) -> None:
    """L1 + L2 reconstruction with a light pull of the latents towards a unit Gaussian; cosine learning rate."""
    vae, start, losses = pipe.vae.train(), time.time(), []
    optimizer = torch.optim.AdamW(vae.parameters(), betas=(0.9, 0.99), weight_decay=0.0)
    for step in range(steps):
        decay = 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.01
        set_learning_rate(optimizer, stage.learning_rate * min(1, step / 50) * decay)
        images = to_tensor(draw_images(stage, stage.batch_size, rng)[1])
        posterior = vae.encode(images).latent_dist
        latents = posterior.sample()
        error = vae.decode(latents).sample - images
        loss = error.abs().mean() + error.square().mean() + 1e-3 * posterior.kl().mean() / latents[0].numel()
        optimizer_step(optimizer, loss, list(vae.parameters()))
        losses.append(loss.item())
        print_progress(stage, step + 1, steps, losses, start)
    with torch.no_grad():  # the flow model wants latents of zero mean and unit variance
        latents = vae.encode(to_tensor(draw_images(stage, 256, rng)[1])).latent_dist.sample()
    vae.register_to_config(scaling_factor=1 / latents.std().item(), shift_factor=latents.mean().item())


def train_flow(pipe: StableDiffusion3Pipeline, stage: Stage, steps: int, rng: random.Random) -> None:
    """Flow matching: predict `noise - latent` at a random point of the straight line between the two."""
    modules = [pipe.transformer.train(), pipe.text_encoder.train(), pipe.text_encoder_2.train()]
    parameters = [parameter for module in modules for parameter in module.parameters()]
    average = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.01)
    strings, means, stds = encode_pool(pipe, stage, min(POOL, stage.batch_size * steps), rng)
    start, losses = time.time(), []
    for step in range(steps):
        decay = 1 - 0.95 * max(0, (step / steps - 0.6) / 0.4)
        set_learning_rate(optimizer, stage.learning_rate * min(1, (step + 1) / 100) * decay)
        batch_size, padding = draw_padding(stage.batch_size, rng)
        chosen = torch.randint(len(strings), (batch_size,))
        latents = means[chosen] + stds[chosen] * torch.randn_like(means[chosen])
        latents = (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
        captions = [draw_caption(strings[index], stage, rng) for index in chosen.tolist()]
        loss = flow_loss(pipe, latents, captions, padding)
        optimizer_step(optimizer, loss, parameters)
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - min(0.995, (step + 1) / (step + 11)))
        losses.append(loss.item())
        print_progress(stage, step + 1, steps, losses, start)
    with torch.no_grad():
        for parameter, value in zip(parameters, average, strict=True):
            parameter.copy_(value)


def flow_loss(pipe: StableDiffusion3Pipeline, latents: torch.Tensor, captions: list[str], padding: int):
    embeds, pooled = encode_captions(pipe, captions, padding)
    sigma = torch.sigmoid(torch.randn(len(latents)) + 0.2)
    noise = torch.randn_like(latents)
    weight = sigma.view(-1, 1, 1, 1)
    velocity = pipe.transformer(
        hidden_states=(1 - weight) * latents + weight * noise,
        timestep=sigma * pipe.scheduler.config.num_train_timesteps,
        encoder_hidden_states=embeds,
        pooled_projections=pooled,
        return_dict=False,
    )[0]
    return (velocity - (noise - latents)).square().mean()


def encode_captions(pipe: StableDiffusion3Pipeline, captions: list[str], padding: int):
    """What `pipe.encode_prompt` does without a third encoder and with `max_sequence_length=padding`, in one pass."""
    ids = pipe.tokenizer(
        captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids
    outputs = [encoder(ids, output_hidden_states=True) for encoder in (pipe.text_encoder, pipe.text_encoder_2)]
    embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    embeds = torch.nn.functional.pad(embeds, (0, 0, 0, padding))
    return embeds, torch.cat([output.text_embeds for output in outputs], dim=-1)


def draw_padding(batch_size: int, rng: random.Random) -> tuple[int, int]:
    """
    Batch size and count of zero rows for one step. The stock pipeline appends 256 rows by default, and a model that
    has only met one of them is blinded by the others; a long batch is cut so that it costs no more than a short one.
    """
    draw = rng.random()
    if draw < 0.1:
        return max(1, batch_size // 8), STOCK_PADDING
    return batch_size, 1 if draw < 0.8 else 16


def draw_caption(text: str, stage: Stage, rng: random.Random) -> str:
    """The caption of a picture: empty for one in ten, so that guidance works too, and with noise where asked for."""
    return "" if rng.random() < 0.1 else corrupt(rng, text, stage.caption_noise)


def draw_images(stage: Stage, count: int, rng: random.Random) -> tuple[list[str], list[Image.Image]]:
    strings = [draw_string(rng, stage.word_share) for _ in range(count)]
    assert UNSEEN.isdisjoint(strings), "an unseen word was about to be drawn for pre-training"
    return strings, [render_word(text, rng, stage.jitter) for text in strings]


@torch.no_grad()
def encode_pool(pipe: StableDiffusion3Pipeline, stage: Stage, count: int, rng: random.Random):
    """Strings, and means and standard deviations of their pictures' latents, so that the encoder runs only once."""
    strings, images = draw_images(stage, count, rng)
    chunks = [images[start : start + 128] for start in range(0, count, 128)]
    posteriors = [pipe.vae.encode(to_tensor(chunk)).latent_dist for chunk in chunks]
    return strings, torch.cat([p.mean for p in posteriors]), torch.cat([p.std for p in posteriors])


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = value


def optimizer_step(optimizer: torch.optim.Optimizer, loss: torch.Tensor, parameters: list[torch.nn.Parameter]) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()


def run_stages(pipe: StableDiffusion3Pipeline, arguments: PretrainArguments) -> list[dict]:
    """Train stage after stage. Each seeds itself, so that one taken from `keep_stages` changes nothing after it."""
    report = []
    for number, stage in enumerate(STAGES):
        steps, start = max(1, round(stage.steps * arguments.scale)), time.time()
        kept = Path(arguments.keep_stages) / stage.name if arguments.keep_stages else None
        taken = kept is not None and kept.exists()
        if taken:
            load_weights(pipe, kept)
        else:
            torch.manual_seed(1000 * arguments.seed + number)
            rng = random.Random(1000 * arguments.seed + number)
            train = train_vae if stage.name == "vae" else train_flow
            train(pipe, stage, steps, rng)
        for module in (pipe.vae, pipe.transformer, pipe.text_encoder, pipe.text_encoder_2):
            module.eval()
        if kept is not None and not taken:
            pipe.save_pretrained(kept)
        seconds = round(time.time() - start, 1)
        report.append({**asdict(stage), "steps": steps, "seconds": seconds, "taken_from_keep_stages": taken})
    return report


def load_weights(pipe: StableDiffusion3Pipeline, folder: Path) -> None:
    source = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    for name in ("vae", "transformer", "text_encoder", "text_encoder_2"):
        pipe.components[name].load_state_dict(source.components[name].state_dict())
    config = source.vae.config
    pipe.vae.register_to_config(scaling_factor=config.scaling_factor, shift_factor=config.shift_factor)


# ---- measuring -----------------------------------------------------------------------------------------------------


def load_pipeline(folder: str) -> StableDiffusion3Pipeline:
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None).to(torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: StableDiffusion3Pipeline, words: list[str], seed: int, padding: int) -> list[Image.Image]:
    return pipe(
        words,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=EVAL_STEPS,
        guidance_scale=1.0,
        max_sequence_length=padding,
        generator=torch.Generator().manual_seed(seed),
    ).images


def measure(folder: str, split: str, seeds: int, padding: int = 1) -> dict[str, float]:
    """Means of the OCR reward (one less edits per letter) and of the exact one (no edit at all) over one split."""
    pipe, words = load_pipeline(folder), list(WORDS[split])
    images = [image for seed in range(seeds) for image in generate(pipe, words, seed, padding)]
    scores = ocr_reward(prompts=words * seeds, completions=images)
    exact = ocr_exact_reward(prompts=words * seeds, completions=images)
    return {"ocr": round(float(np.mean(scores)), 4), "exact": round(float(np.mean(exact)), 4), "images": len(images)}


def describe(folder: str, arguments: PretrainArguments, stages: list[dict]) -> dict:
    """The report: how the folder came to be and how good it is."""
    files = sorted(path for path in Path(folder).rglob("*") if path.is_file() and path.name != "pretrain_report.json")
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(folder, subfolder="scheduler")
    scheduler.set_timesteps(EVAL_STEPS)
    names = ("seed", "threads", "scale", "eval_seeds")
    return {
        "arguments": {name: vars(arguments)[name] for name in names},
        "stages": stages,
        "seconds": round(sum(stage["seconds"] for stage in stages), 1),
        "num_inference_steps": EVAL_STEPS,
        "sigmas": [round(sigma, 6) for sigma in scheduler.sigmas.tolist()],
        "quality": {split: measure(folder, split, arguments.eval_seeds) for split in WORDS},
        "quality_stock_padding": {"heldout": measure(folder, "heldout", arguments.eval_seeds, STOCK_PADDING)},
        "bytes": sum(path.stat().st_size for path in files),
        "sha256": {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "diffusers": diffusers.__version__,
            "transformers": transformers.__version__,
        },
    }


def quiet_libraries() -> None:
    """Leave the screen to the progress lines: absent third encoders and casts, of which we know, warn at each load."""
    diffusers.logging.set_verbosity_error()
    diffusers.logging.disable_progress_bar()
    transformers.logging.disable_progress_bar()


def main(arguments: PretrainArguments) -> None:
    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    pipe = make_pipeline()
    stages = run_stages(pipe, arguments)
    pipe.to(torch.bfloat16).save_pretrained(arguments.output_dir)
    report = describe(arguments.output_dir, arguments, stages)
    text = json.dumps(report, indent=2)
    (Path(arguments.output_dir) / "pretrain_report.json").write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main(HfArgumentParser(PretrainArguments).parse_args_into_dataclasses()[0])
