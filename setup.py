# SPDX-License-Identifier: Apache-2.0
"""Package metadata. The version lives in `omnitrl/version.py`, the settings of the tools in `pyproject.toml`."""

import re
from pathlib import Path

from setuptools import find_packages, setup


ROOT = Path(__file__).parent


def read_version() -> str:
    """The version string, read as text: importing the package here would need its dependencies."""
    match = re.search(r'^__version__ = "([^"]+)"$', (ROOT / "omnitrl" / "version.py").read_text("utf-8"), re.MULTILINE)
    if match is None:
        raise RuntimeError('omnitrl/version.py must hold a line like __version__ = "0.1.0".')
    return match.group(1)


def read_long_description() -> str:
    """The README, or nothing in a tree that does not have it."""
    readme = ROOT / "README.md"
    return readme.read_text("utf-8") if readme.is_file() else ""


# The lower bounds are what `make test-compat` runs with, so that vLLM-Omni's pins can share the environment.
INSTALL_REQUIRES = [
    "torch>=2.6",
    "accelerate>=1.12",
    "datasets>=4.7",
    "diffusers>=0.40",
    "ftfy>=6.1",  # `WanImageToVideoPipeline` cleans prompts with it and does not ask whether it is there
    "httpx>=0.27",
    "huggingface_hub>=1.23",
    "jinja2>=3.1",
    "matplotlib>=3.8",
    "numpy>=1.26",
    "packaging>=23.0",
    "peft>=0.19",
    "pillow>=10.0",
    "psutil>=5.9.4",
    "pyarrow>=21.0",
    "pyyaml>=6.0.1",
    "rich>=13.0",
    "safetensors>=0.8",
    "sentencepiece>=0.2",  # the T5 tokenizer of SD3 and Flux
    "transformers>=5.13,<6",
    "trl>=1.16,<2",
]

EXTRAS = {
    "audio": ["soxr>=0.5"],
    "deepspeed": ["deepspeed>=0.17"],
    "judge": ["openai>=1.60"],
    "math": ["math-verify>=0.8"],
    "ocr": ["rapidocr-onnxruntime>=1.4,<2"],
    # torchvision: the video processors of Transformers need it
    "omni": ["av>=12", "soundfile>=0.12", "soxr>=0.5", "torchvision>=0.21"],
    "serve": ["starlette>=0.47", "uvicorn>=0.34"],
    "trackers": ["tensorboard", "trackio", "wandb"],
    "vllm": ["vllm==0.30.*", "vllm-omni==0.30.*"],  # the server's hooks know the insides of this version
    "docs": ["mkdocs>=1.6,<2"],
    "quality": ["mypy>=1.15", "pre-commit", "ruff>=0.9"],
    "test": ["pytest>=8.3", "pytest-timeout>=2.3", "pytest-xdist>=3.6"],
}
EXTRAS["dev"] = EXTRAS["test"] + EXTRAS["quality"] + EXTRAS["docs"]
EXTRAS["all"] = [
    package
    for extra in ("dev", "audio", "deepspeed", "judge", "math", "ocr", "omni", "serve", "trackers", "vllm")
    for package in EXTRAS[extra]
]

setup(
    name="omnitrl",
    version=read_version(),
    description="RL post-training of diffusion, unified and omni-modality models, the way TRL does language models",
    long_description=read_long_description(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    keywords="reinforcement learning, diffusion, flow matching, GRPO, RLHF, text-to-image, LoRA",
    packages=find_packages(include=["omnitrl", "omnitrl.*"]),
    package_data={
        "omnitrl": [
            "py.typed",
            "accelerate_configs/*.yaml",
            "templates/*",
            "quickstart/glyphs/*",
            "quickstart/glyphs/**/*",
        ]
    },
    python_requires=">=3.11",
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["omnitrl=omnitrl.cli.main:main"]},
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    zip_safe=False,
)
