"""Write the model card of a policy: README.md with the run's reward, curves and options.

The Hugging Face Hub shows it as the page of an uploaded policy.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fastppo.data.files import write_whole
from fastppo.run.checkpoint import iteration_of
from fastppo.run.identity import versions
from fastppo.run.report.charts import number_of, with_initial_evaluation
from fastppo.run.report.report import read_run
from fastppo.run.report.summary import summarize

ROWS = 12
"""Maximum number of rows in the table of curves."""

COLUMNS = {
    "reward": "reward",
    "eval/reward": "held-out reward",
    "kl": "KL, nats",
    "entropy": "entropy, nats",
    "response_length": "response length, tokens",
}
"""Headings of the metrics in the table of curves."""

TEMPLATE = """---
{{ card_data }}
---

# {{ name }}

{{ model }}, trained with PPO by FastPPO {{ version }}.

- **Reward:** {{ rewards }}
- **Result:** {{ summary }}

## Curves

{{ curves }}

## Options

<details><summary>config.yaml</summary>

```yaml
{{ options }}
```

</details>
"""


def write_card(run_dir: Path, directory: Path, *, iterations: int | None = None) -> None:
    """Write README.md to the directory of a policy.

    Args:
        iterations: how many iterations the policy was trained for; None means the whole run.

    Raises:
        FileNotFoundError: the run has no metrics.jsonl.
    """
    from huggingface_hub import ModelCard, ModelCardData  # slow to import

    run = read_run(run_dir)
    records = [r for r in run.records if iterations is None or r["iteration"] < iterations]
    model = run.config.get("model")
    rewards = run.config.get("rewards") or [
        name.removeprefix("reward/") for name in records[-1] if name.startswith("reward/")
    ]
    card = ModelCard.from_template(
        ModelCardData(
            base_model=None if not model or Path(model).exists() else model,
            library_name="transformers",
            pipeline_tag="text-generation",
            tags=["fastppo", "ppo", "reinforcement-learning"],
        ),
        template_str=TEMPLATE,
        name=run_dir.resolve().name,
        model=f"`{_without_folder(model)}`" if model else "A model",
        version=versions().get("fastppo", ""),
        rewards=", ".join(f"`{_without_folder(reward)}`" for reward in rewards) or "from Python",
        summary=summarize(records),
        curves=_curves(records),
        options=yaml.safe_dump(_without_folder(run.config), sort_keys=False).strip(),
    )
    write_whole(directory / "README.md", card.content + "\n")


def write_card_of_checkpoint(path: Path, directory: Path) -> None:
    """Write README.md to the directory of a checkpoint's policy, if the run has records of it."""
    iterations = iteration_of(path)
    if iterations and (path.parent / "metrics.jsonl").exists():
        write_card(path.parent, directory, iterations=iterations)


def _without_folder(value: Any) -> Any:
    """Replace absolute paths by their last parts, which are safe to publish."""
    if isinstance(value, dict):
        return {key: _without_folder(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_folder(inner) for inner in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~"))
    return Path(value).name if is_path else value


def _curves(records: list[dict[str, Any]]) -> str:
    """Return a Markdown table of evenly spaced iterations, those with an evaluation if any has."""
    records = with_initial_evaluation(records)
    evaluated = [r for r in records if any(name.startswith("eval/") for name in r)]
    records = evaluated or records
    last = len(records) - 1
    places = sorted({round(i * last / (ROWS - 1)) for i in range(ROWS)})
    names = [name for name in COLUMNS if any(name in record for record in records)]
    rows = [
        ["iteration", *(COLUMNS[name] for name in names)],
        ["---:"] * (1 + len(names)),
    ]
    for record in (records[place] for place in places):
        cells = [f"{record[name]:.3g}" if name in record else "" for name in names]
        rows.append([str(number_of(record)), *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)
