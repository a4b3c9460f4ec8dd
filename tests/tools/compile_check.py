"""Compile Triton kernels for GPUs that are not present, as their launchers would.

    python tests/tools/compile_check.py every|counted ARCHITECTURE

Launchers are called with CPU tensors while a stand-in driver names the target. Triton then takes
every decision of a real launch (types, divisibility by 16, absent operands, tiles) and compiles
instead of running. Prints one JSON object per kernel of `launches.py`, with the resources that
`cuobjdump` reports. ARCHITECTURE is a compute capability (90), or the name of an AMD GPU (gfx942).

`compiled` runs this script in a separate process, because TRITON_INTERPRET must be unset.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Compiled(NamedTuple):
    """Compiled kernel of a launch.

    registers: per thread. stack, local, shared: bytes of memory.
    sums: the layout of every scan and every reduction of floats. Equal layouts sum in equal order.
    code: path of the machine code. named_registers: the launch's `maxnreg`.
    """

    launch: str
    kernel: str
    constants: dict[str, Any]
    num_warps: int
    registers: int
    stack: int
    local: int
    shared: int
    sums: list[str]
    code: str
    named_registers: int | None


def compiled(launches: str, architecture: int | str, cache: Path) -> list[Compiled]:
    """Compile the launches of a function of `launches.py` for sm_`architecture` or an AMD GPU."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {
        "TRITON_CACHE_DIR": str(cache),
        # The inherited path may contain another version of Triton.
        "PYTHONPATH": os.pathsep.join(
            [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
        ),
    }
    done = subprocess.run(
        [sys.executable, __file__, launches, str(architecture)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr)
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


class _Driver:
    """Part of Triton's driver interface that compilation uses."""

    def __init__(self, architecture: str) -> None:
        from triton.backends.compiler import GPUTarget

        if architecture.startswith("gfx"):
            self.target = GPUTarget(
                "hip", architecture, 64 if architecture.startswith("gfx9") else 32
            )
        else:
            self.target = GPUTarget("cuda", int(architecture), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self.target


def _resources_of_code_object(assembly: str) -> dict[str, int]:
    """Read the metadata at the end of AMD's assembly. `local` counts spilled registers."""
    names = {
        "registers": "vgpr_count",
        "stack": "private_segment_fixed_size",
        "local": "vgpr_spill_count",
        "shared": "group_segment_fixed_size",
    }
    found = {ours: re.search(rf"\.{theirs}:\s*(\d+)", assembly) for ours, theirs in names.items()}
    return {name: int(count[1]) for name, count in found.items()}  # type: ignore[index]


def _resources(cubin: bytes) -> dict[str, int]:
    import triton

    program = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [program, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(re.search(rf"\b{name}:(\d+)", text)[1]) for name in _RESOURCES}  # type: ignore[index]
    return {_RESOURCES[name]: value for name, value in found.items()}


def _layouts_of_sums(ttgir: str) -> list[str]:
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\w+<.*>)$", ttgir, re.MULTILINE))
    found = re.findall(
        r"tt\.(scan|reduce)\.return[^\n]*\n\s*\}\) : \(tensor<[\dx]+xf\d+, (#[^>]*)>", ttgir
    )
    return [f"{kind} {layouts.get(name, name)}" for kind, name in found]


OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")
"""Keywords of a launch that are not arguments of the kernel."""

_RESOURCES = {"REG": "registers", "STACK": "stack", "LOCAL": "local", "SHARED": "shared"}


def main(name: str, architecture: str) -> None:
    import triton
    from triton.runtime.jit import JITFunction

    triton.runtime.driver.set_active(_Driver(architecture))
    current = ""
    resources: dict[str, dict[str, int]] = {}

    def compile_only(kernel: JITFunction, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            result = kernel.warmup(*args, grid=grid, **kwargs)
            kind = "hsaco" if "hsaco" in result.asm else "cubin"
            code = Path(os.environ["TRITON_CACHE_DIR"]) / f"{result.hash}.{kind}"
            if result.hash not in resources:
                if kind == "hsaco":
                    resources[result.hash] = _resources_of_code_object(result.asm["amdgcn"])
                else:
                    resources[result.hash] = _resources(result.asm["cubin"])
                code.write_bytes(result.asm[kind])
            options = {name: value for name, value in kwargs.items() if name not in OPTIONS}
            # The constants of a row's tiles come in a record, the others separately.
            options |= options.pop("cut")._asdict() if "cut" in options else {}
            constants = {
                name: getattr(value, "value", value)
                for name, value in options.items()
                if isinstance(value, int | triton.language.constexpr)
            }
            row = Compiled(
                launch=current,
                kernel=kernel.fn.__name__,
                constants=constants,
                num_warps=result.metadata.num_warps,
                # the cubin knows only static shared memory
                **resources[result.hash] | {"shared": result.metadata.shared},
                sums=_layouts_of_sums(result.asm["ttgir"]),
                code=str(code),
                named_registers=kwargs.get("maxnreg"),
            )
            print(json.dumps(row._asdict(), default=str), flush=True)

        return launch

    JITFunction.__getitem__ = compile_only
    import launches

    for launch_name, call in {"every": launches.every, "counted": launches.counted}[name]():
        current = launch_name
        call()


if __name__ == "__main__":
    main(*sys.argv[1:])
