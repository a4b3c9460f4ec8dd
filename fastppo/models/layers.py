"""A trunk's layers, and two libraries that may run them: torch.compile and Liger-Kernel.

Layers are compiled one by one: they share their code, so the first one's graph serves all. Shapes
are symbolic from the start, and a new graph is made only for what differs in kind: with and without
gradients, a single row or several. Decoding stays as it is; its calls have a cache.
"""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from fastppo.models.trunk import context_length, hidden_states

COMPILED = "_fastppo_compiled"
"""The attribute of a trunk whose layers are compiled."""
MOST_GRAPHS = 32
"""Of one piece of code, before dynamo gives up and runs it as it is: policy, reference and critic
have their layers' code in common, and some models two kinds of layers."""
LIGER = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")
"""What of a trunk Liger has kernels for, by the keywords of its functions; the loss is ours."""


def layers_of(trunk: Any) -> tuple[nn.Module, nn.ModuleList]:
    """(the module that holds the list of layers, that list).

    Raises:
        ValueError: the trunk is not built that way.
    """
    total = trunk.config.get_text_config().num_hidden_layers
    found = [
        (module, child)
        for module in trunk.modules()
        for child in module.children()
        if isinstance(child, nn.ModuleList) and len(child) == total
    ]
    if len(found) != 1:
        raise ValueError(f"{type(trunk).__name__} is not one list of {total} layers")
    return found[0]


def compile_layers(trunk: Any, backend: Any = "inductor") -> None:
    """Compiles a trunk's layers in place, at their first use.

    Args:
        backend: of `torch.compile`.

    Raises:
        ValueError: the trunk is not one list of layers.
    """
    try:
        _, layers = layers_of(trunk)
    except ValueError as error:
        raise ValueError(f"compile=true: {error}; use compile=false") from error
    import torch._dynamo as dynamo

    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, MOST_GRAPHS)
    for layer in layers:
        layer.compile(backend=backend, dynamic=True)
    setattr(trunk, COMPILED, True)


def uncompiled(trunk: Any) -> AbstractContextManager:
    """Within it compiled layers run as they are."""
    if not getattr(trunk, COMPILED, False):
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


@torch.no_grad()
def use_liger(causal_lm: Any) -> None:
    """Replaces a model's norms, gated MLPs and rotary embeddings by Liger's kernels. The rotary
    embeddings are replaced for all models of its architecture, in this process.

    Raises:
        ImportError: Liger-Kernel is not installed.
        ValueError: it has no kernels for this architecture, or its hidden states are others.
    """
    try:
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as error:
        raise ImportError("liger=true needs Liger-Kernel: pip install liger-kernel") from error
    trunk, kind = causal_lm.base_model, causal_lm.config.model_type
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        raise ValueError(f"liger=true: Liger-Kernel has nothing for {kind} models; use liger=false")
    length = min(8, context_length(trunk) or 8)
    ids = torch.arange(2 * length, device=trunk.device).view(2, length)
    ids %= trunk.get_input_embeddings().weight.shape[0]
    wanted = hidden_states(trunk, ids)
    known = inspect.signature(apply).parameters
    losses = dict.fromkeys(("cross_entropy", "fused_linear_cross_entropy"), False)
    options = losses | dict.fromkeys(LIGER, True)
    apply(model=causal_lm, **{name: on for name, on in options.items() if name in known})
    found = hidden_states(trunk, ids)
    tolerance = 1e-3 if wanted.dtype == torch.float32 else 5e-2
    off = ((found - wanted).float().norm() / wanted.float().norm()).item()
    if not off <= tolerance:
        raise ValueError(
            f"liger=true: with Liger's kernels the hidden states of {type(trunk).__name__} differ "
            f"by {off:.2g} of their size (tolerance {tolerance:g}); use liger=false"
        )
