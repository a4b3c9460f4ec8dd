"""Render an HTML page with charts into one self-contained file.

The file includes the numbers, the plotting library (uPlot, MIT license) and page/plots.js.
"""

from __future__ import annotations

import itertools
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastppo.data.files import write_whole
from fastppo.run.report.charts import Chart, Groups, is_finite


def write_page(path: Path, template: str, groups: Groups, **fields: Any) -> Path:
    """Write a page and return its path.

    Args:
        template: a file of `page/`.
        groups: the charts by heading. The template gets them with their numbers.
        fields: other variables of the template.
    """
    import jinja2

    page = files("fastppo.run.report").joinpath("page")
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("fastppo.run.report", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    numbers = itertools.count()
    numbered = [
        (heading, [(next(numbers), chart) for chart in charts]) for heading, charts in groups
    ]
    data = [_as_json(chart) for _, charts in groups for chart in charts]
    html = environment.get_template(template).render(
        groups=numbered,
        # "</script>" in a name would end the block.
        data=json.dumps(data, ensure_ascii=False, allow_nan=False).replace("<", "\\u003c"),
        uplot=page.joinpath("uplot.min.js").read_text("utf-8"),
        uplot_css=page.joinpath("uplot.min.css").read_text("utf-8"),
        plots=page.joinpath("plots.js").read_text("utf-8"),
        **fields,
    )
    write_whole(path, html)
    return path


def _as_json(chart: Chart) -> dict[str, Any]:
    """Return the fields of a chart that are set. NaN and infinities become gaps for JSON."""
    fields = {name: value for name, value in chart._asdict().items() if value is not None}
    fields["series"] = [
        curve | {"values": [y if is_finite(y) else None for y in curve["values"]]}
        for curve in chart.series
    ]
    return fields
