"""What runs on a GPU mixes no devices, and resumes to the bit: shown on one that is pretended."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pretended_gpu
import pytest
import torch

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real one"),
    pytest.mark.skipif(
        torch.__version__ < "2.13", reason="it is written against the headers of torch 2.13"
    ),
]

ROOT = Path(__file__).resolve().parents[1]
EXACT = {"kl_loss_coef": 0.1, "kl_loss_estimator": "full"}
RUNS: dict[str, dict[str, Any]] = {
    "kernels": {"rollout_batch_size": 4, "backend": "auto", "max_new_tokens": 4},
    "defaults": {},
    "exact KL, reference offloaded": {"reference_offload": True, "kl_estimator": "full", **EXACT},
    "adapters": {"lora_rank": 2, "top_k": 7, "top_p": 0.9, "temperature": 0.8, **EXACT},
    "bf16 weights": {"param_dtype": "bfloat16", "value_model": "critic", "loss_path": "logits"},
    "branch": {"value_model": "branch", "value_branch_layers": 1, "gradient_checkpointing": True},
    "fp16": {"precision": "fp16", "rollout": "generate", "score_normalization": "running"},
    "packed": {"packing": "on", "microbatch_tokens": 40, "samples_per_prompt": 4},
    "fp32": {"precision": "fp32", "old_logprobs": "sampler", "stop_strings": ["w7 w2"]},
    "penalty": {"objective": "penalty", "importance_cap": 2.0, "checkpoint_async": True},
}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pretended_gpu.compiled(tmp_path_factory.mktemp("library"))


def _python(*arguments: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT / "tests",
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS.keys())
def test_a_run_stays_on_its_device_and_resumes_to_the_bit(
    options: dict[str, Any], library: Path, tmp_path: Path
) -> None:
    given = json.dumps({"backend": "torch"} | options)
    found = json.loads(_python("pretended_run.py", library, tmp_path, given).splitlines()[-1])
    assert found["devices"] == ["cuda"]
    assert found["same_bits"]
    assert found["steps"] == 2 * 2 * 2
    assert (found["graphs"] > 0) == (options.get("rollout") != "generate")


def test_a_tensor_that_was_left_on_the_cpu_is_refused(library: Path) -> None:
    code = (
        "import sys, torch, pretended_gpu\n"
        "from pathlib import Path\n"
        "pretended_gpu.pretend(Path(sys.argv[1]))\n"
        "there = torch.ones(2, 3, device='cuda')\n"
        "print((there @ there.T).sum().item(), there.device, there.mul(torch.tensor(2.0)).device)\n"
        "torch.nn.functional.embedding(torch.zeros(2, dtype=torch.int64), there)\n"
    )
    with pytest.raises(AssertionError, match="Expected all tensors to be on the same device"):
        _python("-c", code, library)
    *fine, _ = code.splitlines()
    assert _python("-c", "\n".join(fine), library).split() == ["12.0", "cuda:0", "cuda:0"]
