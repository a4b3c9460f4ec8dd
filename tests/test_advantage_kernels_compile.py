"""The advantage kernels compile for sm_80, sm_90 and sm_100 without spilling a register.

No device is needed: the launchers run on CPU tensors with the launch itself replaced by a record,
so what is compiled is what they launch, with their sizes and dtypes. Triton compiles nothing in a
process under its interpreter, hence the subprocess. Run as a script, this file prints one line of
JSON per compiled kernel.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

CAPABILITIES = (80, 90, 100)
ROOT = Path(__file__).resolve().parents[1]


def recorded_launches() -> dict[str, tuple[Any, dict[str, Any], dict[str, Any]]]:
    """name → (kernel, its arguments by name, options) of every distinct launch for 3 sequences."""
    import torch
    from fastppo_kernels import advantages
    from triton.runtime.jit import JITFunction

    launches: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {}
    case = ""

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        arguments = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        options = {name: arguments.pop(name) for name in kwargs if name not in kernel.arg_names}
        launches[f"{kernel.fn.__name__.strip('_')}[{case}]"] = (kernel, arguments, options)

    JITFunction.run = record  # type: ignore[method-assign]
    chunk = advantages.BLOCK * advantages.CHUNK_BLOCKS
    for dtype in (torch.float32, torch.bfloat16):
        for layout in ("one-chunk", "split", "packed"):
            tokens = 3 * (chunk if layout == "one-chunk" else chunk + 1)
            shape = (tokens,) if layout == "packed" else (3, tokens // 3)
            x = torch.zeros(shape, dtype=dtype)
            mask = torch.zeros(shape, dtype=torch.bool)
            per_sequence = torch.zeros(3)
            cu_seqlens = torch.zeros(4, dtype=torch.int32) if layout == "packed" else None
            name = f"{layout}-{str(dtype).removeprefix('torch.')}"
            case = f"gae-{name}"
            advantages.gae(x, x, mask, cu_seqlens=cu_seqlens, bootstrap=per_sequence)
            if dtype == torch.float32:
                case = f"gae-bare-{name}"
                advantages.gae(x, x, cu_seqlens=cu_seqlens)
                case = f"gae-discounts-{name}"
                advantages.gae(
                    x, x, mask, cu_seqlens=cu_seqlens, gamma=per_sequence, lam=per_sequence
                )
            for estimator in ("k1", "k2", "k3"):
                case = f"{estimator}-{name}"
                advantages.shaped_advantages(
                    per_sequence,
                    x,
                    x,
                    x,
                    mask,
                    cu_seqlens=cu_seqlens,
                    kl_estimator=estimator,
                    token_rewards=x,
                )
        for shift_mean in (True, False):
            case = f"shift_mean={shift_mean}-{str(dtype).removeprefix('torch.')}"
            advantages.whiten(x, mask, shift_mean=shift_mean)
    return launches


def compiled(
    kernel: Any, arguments: dict[str, Any], options: dict[str, Any], capability: int
) -> Any:
    """The kernel for a `capability`; pointers 16-byte aligned, as torch allocates them."""
    import triton
    from torch import Tensor
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import mangle_type

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, Tensor):
            signature[parameter.name] = mangle_type(value)
            attributes[(index,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type or mangle_type(value)
    return triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack and local memory per thread, as cuobjdump reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    assert set(found) == {"REG", "STACK", "LOCAL"}, text
    return found


def scan_layouts(module: Any) -> list[str]:
    """The layout of every scan: where it differs, so does the order of the sums."""
    text = module.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", text, re.MULTILINE))
    names = re.findall(r"tt\.scan\.return.*?\}\) : \(tensor<\d+xf\d+, (#\w+)>", text, re.DOTALL)
    return [layouts[name] for name in names]


def main() -> None:
    for name, (kernel, arguments, options) in recorded_launches().items():
        for capability in CAPABILITIES:
            module = compiled(kernel, arguments, options, capability)
            line = {"name": name, "sm": capability, **resource_usage(module.asm["cubin"])}
            line |= {"shared": module.metadata.shared, "scans": scan_layouts(module)}
            print(json.dumps(line), flush=True)


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    pytest.importorskip("triton", reason="Triton is a Linux package")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_no_kernel_spills(lines: list[dict[str, Any]]) -> None:
    assert {line["sm"] for line in lines} == set(CAPABILITIES)
    assert len(lines) > 3 * 40
    spilled = [line for line in lines if line["STACK"] or line["LOCAL"]]
    assert not spilled


def test_padded_and_packed_scan_in_the_same_order(lines: list[dict[str, Any]]) -> None:
    """Equal bits on a device follow from equal layouts; the interpreter cannot show this."""
    scans = {line["name"]: line["scans"] for line in lines if line["sm"] == 90}
    compared = 0
    for name, packed in scans.items():
        if packed and "packed" in name:
            for layout in ("one-chunk", "split"):
                padded = scans.get(name.replace("packed", layout))
                if padded is not None:
                    assert padded == packed, name
                    compared += 1
    assert compared >= 20


if __name__ == "__main__":
    main()
