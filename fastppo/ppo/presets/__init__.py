"""Presets: options under the name that a method has, each a YAML file beside this one.

A preset holds what makes the method, with its source; models, data, sizes and what the source does
not say are left to the config and its defaults. `fastppo train --preset NAME` reads it below the
config file and the flags, which win.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import yaml

from fastppo.functional import scalars

PRESETS = ("sao",)


def preset_options(name: str) -> dict[str, Any]:
    """The options of a preset, for `PPOConfig(**preset_options(name), …)`.

    Raises:
        ValueError: there is no preset of that name.
    """
    scalars.choice("preset", name, PRESETS)
    return yaml.safe_load(files(__name__).joinpath(f"{name}.yaml").read_text("utf-8"))
