# SPDX-License-Identifier: Apache-2.0
import pytest
from huggingface_hub import ModelCard

from omnitrl.errors import InputError
from omnitrl.report import RunSummary, model_card


BASE = "stabilityai/stable-diffusion-3.5-medium"
PAPER = {"title": "Flow-GRPO", "id": "2505.05470", "citation": "@article{liu2025flow,\n  title = {Flow-GRPO},\n}"}


def test_metadata_of_an_adapter(run):
    data = model_card(run, BASE, adapter=True, tags=["ocr", "lora"]).data
    assert data.base_model == BASE
    assert data.library_name == "diffusers"
    assert data.pipeline_tag == "text-to-image"
    assert data.tags == ["omnitrl", "flow-grpo", "lora", "text-to-image", "diffusers", "ocr"]
    assert data.to_dict()["base_model_relation"] == "adapter"
    assert data.license is None


def test_a_card_survives_the_disk(run, tmp_path):
    card = model_card(run, BASE, adapter=False, paper=PAPER)
    card.save(tmp_path / "README.md")
    back = ModelCard.load(tmp_path / "README.md")
    assert back.data.to_dict() == card.data.to_dict()
    assert back.data.to_dict()["base_model_relation"] == "finetune"
    assert "lora" not in back.data.tags
    assert back.text.strip() == card.text.strip()


def test_a_folder_is_no_base_model_for_the_hub(run, tmp_path):
    (tmp_path / "acme").mkdir()
    card = model_card(run, str(tmp_path / "acme"), adapter=True)
    assert "base_model" not in card.data.to_dict()
    assert f"`{tmp_path / 'acme'}`" in card.text


def test_text(run):
    card = model_card(run, BASE, True, PAPER, images={"Reward over the steps": "images/reward curve.png"})
    lines = card.text.splitlines()
    assert "| held-out | `reward` | 0.500 | 0.812 |" in lines
    assert "| unseen | `reward` | 0.400 | 0.300 |" in lines
    assert "![Reward over the steps](<images/reward curve.png>)" in lines
    assert "| `num_generations` | 8 |" in lines
    assert "- torch: 2.13.0" in lines
    assert 'pipe.load_lora_weights("out")' in lines
    assert "FlowGRPO was introduced in [Flow-GRPO](https://huggingface.co/papers/2505.05470)." in lines
    assert PAPER["citation"] in card.text
    assert "@software{omnitrl," in lines
    assert "  author = {{The omnitrl contributors}}," in lines
    assert "hf_secret" not in str(card)
    assert "ema_decay" not in card.text  # it was not set


def test_text_of_the_run_stays_text(run):
    card = model_card(run, BASE, adapter=True)
    assert "<script>" not in str(card)
    assert "- Words &amp; &lt;b&gt;letters&lt;/b&gt;." in card.text.splitlines()
    run.config["sde_type"] = "a|b\nc"
    assert "| `sde_type` | a\\|b c |" in model_card(run, BASE, adapter=True).text.splitlines()


def test_without_a_snippet_the_card_has_the_usual_one():
    run = RunSummary("t", "DiffusionNFT", "m")
    text = model_card(run, BASE, adapter=True, repo_id="me/lora").text
    assert f'pipe = DiffusionPipeline.from_pretrained("{BASE}")\npipe.load_lora_weights("me/lora")' in text
    assert 'DiffusionPipeline.from_pretrained("me/model")' in model_card(run, BASE, False, repo_id="me/model").text
    assert "diffusion-nft" in model_card(run, BASE, False).data.tags
    assert "## Results" not in text


@pytest.mark.parametrize("path", ["/tmp/curve.png", "../curve.png", "C:\\curve.png"])
def test_pictures_must_lie_beside_the_card(run, path):
    with pytest.raises(InputError, match="must lie beside the card"):
        model_card(run, BASE, adapter=True, images={"curve": path})
