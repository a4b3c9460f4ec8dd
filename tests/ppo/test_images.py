"""Runs whose prompts have images, with a critic: data, rollout, update, policy and report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_vision
import torch
from safetensors.torch import load_file

from fastppo.models.images import NoImages
from fastppo.models.multimodal import frozen_parameters
from fastppo.models.trunk import trunk_of
from fastppo.models.value import CriticValue
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rollout.vllm import as_prompt
from fastppo.run.log import read_jsonl
from fastppo.run.report.report import write_report

OPTIONS: dict[str, Any] = {
    "rollout_batch_size": 6,
    "samples_per_prompt": 2,
    "microbatch_size": 3,
    "kl_coef": 0.1,
    "value_model": "critic",
}


def _trainer(architecture: str, tmp_path: Path, **more: Any) -> PPOTrainer:
    directory = tiny_vision.saved_model(tmp_path / "model", architecture)
    options = tiny.options(tmp_path, model=directory, **OPTIONS | more)
    return PPOTrainer(
        PPOConfig(**options),
        tokenizer=tiny_vision.tokenizer(chat=True),
        prompts=tiny_vision.rows(architecture),
        rewards=[tiny.every_other],
    )


@pytest.mark.parametrize("architecture", ["idefics3", "qwen3_vl"])
def test_a_run_reads_each_image_once_per_iteration(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = _trainer(architecture, tmp_path)
    calls: list[str] = []
    encode = trainer.parts.images.encode
    monkeypatch.setattr(
        trainer.parts.images, "encode", lambda ids: calls.append(ids.text) or encode(ids)
    )
    metrics = trainer.train()
    # All three prompts in the self-check and in each of two iterations, of two epochs each.
    assert len(calls) == 3 * 3
    assert metrics["approx_kl"] > 0
    before = load_file(tmp_path / "model" / "model.safetensors")
    after = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed
    assert not [name for name in changed if "vision" in name or "visual" in name]
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    counts = {len(sample.get("images", [])) for sample in samples}
    assert counts == {0, 1, 2}
    write_report(tmp_path / "run")
    report = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert any(image in report for sample in samples for image in sample.get("images", []))


@pytest.mark.parametrize("architecture", ["smolvlm", "qwen2_5_vl"])
def test_the_first_update_is_on_policy(architecture: str, tmp_path: Path) -> None:
    trainer = _trainer(architecture, tmp_path, ppo_epochs=1, minibatches=1, iterations=1)
    metrics = trainer.train()
    assert metrics["ratio_max"] == pytest.approx(1, abs=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0, abs=1e-4)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"rollout": "generate"}, "rollout"),
        ({"rollout": "server", "engine_options": {"urls": ["http://127.0.0.1:1"]}}, "rollout"),
        ({"environment": "environments:Exact"}, "environment"),
        ({"async_steps": 1}, "async_steps"),
        ({"critic_model": "a model of text"}, "critic"),
    ],
    ids=["generate", "server", "environment", "async", "critic"],
)
def test_what_takes_no_images_is_refused(more: dict[str, Any], named: str, tmp_path: Path) -> None:
    if "critic_model" in more:
        more = {"critic_model": tiny.saved_reward_model(tmp_path / "critic")}
        # Its vocabulary is the policy's, without the tokens of images.
        words = tiny_vision.tokenizer(chat=True)
        words.save_pretrained(tmp_path / "critic")
    with pytest.raises(ValueError, match=named):
        _trainer("idefics3", tmp_path, **more)


def _changed(model: Any, directory: Path, part: str) -> str:
    """Save a model after a change of its parameters with `part` in their names."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part in name:
                parameter.add_(0.1)
    model.save_pretrained(directory)
    tiny_vision.tokenizer(chat=True).save_pretrained(directory)
    return str(directory)


@pytest.mark.parametrize("part", ["visual.blocks", "visual.merger"])
@pytest.mark.parametrize("who", ["reference_model", "critic_model"])
def test_another_vision_tower_is_refused(who: str, part: str, tmp_path: Path) -> None:
    other = _changed(tiny_vision.model("qwen2_5_vl"), tmp_path / "other", part)
    with pytest.raises(ValueError, match=who.removesuffix("_model")):
        _trainer("qwen2_5_vl", tmp_path, **{who: other})


def test_reference_and_critic_of_other_files_share_the_tower(tmp_path: Path) -> None:
    other = _changed(tiny_vision.model("qwen2_5_vl"), tmp_path / "other", "language_model.layers")
    trainer = _trainer("qwen2_5_vl", tmp_path, reference_model=other, critic_model=other)
    reference = trainer.parts.reference
    assert reference is not None
    assert reference.frozen is not None
    policy = trainer.parts.model
    assert isinstance(policy.value_function, CriticValue)
    trunk = trunk_of(policy.causal_lm)
    frozen = {id(p) for p in frozen_parameters(trunk)}
    for other_trunk in (trunk_of(reference.frozen.causal_lm), policy.value_function.trunk):
        shared = {id(p) for p in other_trunk.parameters()} & {id(p) for p in trunk.parameters()}
        assert shared == frozen
    trainer.train()


def test_a_processor_that_was_passed_in_is_saved_with_the_policy(tmp_path: Path) -> None:
    config = PPOConfig(**tiny.options(tmp_path, **OPTIONS))
    trainer = PPOTrainer(
        config,
        model=tiny_vision.model("idefics3"),
        tokenizer=tiny_vision.processor("idefics3"),
        prompts=tiny_vision.rows("idefics3"),
        rewards=[tiny.every_other],
    )
    trainer.save_policy(tmp_path / "policy")
    assert (tmp_path / "policy" / "processor_config.json").is_file()
    assert (tmp_path / "policy" / "tokenizer.json").is_file()


@pytest.mark.parametrize("owner", ["tokenizer", "processor"])
def test_variables_of_the_chat_template_reach_a_processor_that_was_passed_in(
    owner: str, tmp_path: Path
) -> None:
    template = (
        "{% for m in messages %}{% for part in m['content'] %}"
        "{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}"
        "{% endfor %}{% endfor %}{{ word }}"
    )
    processor = tiny_vision.processor("idefics3")
    processor.tokenizer.chat_template = template if owner == "tokenizer" else None
    processor.chat_template = template
    trainer = PPOTrainer(
        PPOConfig(**tiny.options(tmp_path, chat_template_kwargs={"word": "w9"}, **OPTIONS)),
        model=tiny_vision.model("idefics3"),
        tokenizer=processor,
        prompts=[{"prompt": [{"role": "user", "content": "w1"}], "image": tiny_vision.image(9, 7)}],
        rewards=[tiny.every_other],
    )
    assert trainer.parts.prompts is not None
    (w9,) = tiny.tokenizer()("w9")["input_ids"]
    assert trainer.parts.prompts.token_ids[0][-1] == w9
    trainer.save_policy(tmp_path / "policy")
    assert "w9" in (tmp_path / "policy" / "chat_template.jinja").read_text()


def test_a_text_model_passes_images_on_to_the_rewards(tmp_path: Path) -> None:
    rows = [{**row, "image": "photo.png"} for row in tiny.PROMPTS]
    config = PPOConfig(**tiny.options(tmp_path))
    trainer = PPOTrainer(
        config,
        model=tiny.model(),
        tokenizer=tiny.tokenizer(),
        prompts=rows,
        rewards=[tiny.every_other],
    )
    assert type(trainer.parts.images) is NoImages
    assert trainer.parts.prompts is not None
    assert set(trainer.parts.prompts.columns["image"]) == {"photo.png"}


def test_vllm_gets_the_images_and_unexpanded_prompts() -> None:
    _, prompts = tiny_vision.encoder("idefics3")
    one, _, text = (as_prompt(ids) for ids in prompts.token_ids)
    token = tiny_vision.IDS["<image>"]
    assert one["prompt_token_ids"].count(token) == 1
    assert prompts.token_ids[0].count(token) == 4
    (image,) = one["multi_modal_data"]["image"]
    assert image.size == (24, 40)
    assert text == {"prompt_token_ids": list(prompts.token_ids[2])}
    assert as_prompt([4, 5]) == {"prompt_token_ids": [4, 5]}
