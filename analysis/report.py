"""Everything of a set of records: all figures, and one self-contained HTML page with tables, figures, definitions."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from matplotlib.figure import Figure

from analysis.accuracy import compare_accuracy
from analysis.comparison import compare, group_by_task
from analysis.drift import VERDICT_TITLE, answers
from analysis.drift_plots import (
    plot_cosine_layers,
    plot_distance,
    plot_effects,
    plot_energy,
    plot_rank_and_text,
    plot_reuse,
)
from analysis.plots import (
    plot_accuracy,
    plot_accuracy_layers,
    plot_against_bytes,
    plot_against_density,
    plot_against_layer_bytes,
    plot_layer_density,
    plot_layer_quality,
    plot_speed,
)
from analysis.results import Record
from analysis.studies import studied_models
from analysis.tables import all_tables, environment_lines, section_title
from sparse_predictor.methods.registry import all_methods

DEFINITIONS = {
    "Unit": "an MLP neuron or an attention head (with grouped-query attention a key-value group).",
    "Density": "density is the share of units that are active; 1.0 is the dense model. Achieved is what was computed.",
    "Methods": "dense computes everything. "
    + " ".join(f"{name}: {method.summary}" for name, method in all_methods().items())
    + " Where attention's inputs are thinned out, head density is a share of these.",
    "Ratio to dense": "ours over dense: above 1 is worse for perplexity and better for speed.",
    "Recall": "the share of the truly active units that were predicted, pooled over tokens.",
    "Precision": "the share of the predicted units that were truly active, pooled over tokens. Neither means much "
    "without the density beside it, since predicting everything active has recall 1.",
    "MLP bytes read": "a share of dense; what the predictor itself reads is included.",
    "Accuracy": "acc_norm where a task reports it, else acc or exact match. A task whose dense accuracy is less than "
    "two standard errors above guessing is marked and left out of the mean.",
    "Phase": "which tokens ran sparsely: decode (the prompt stays dense) or all (every scored token selects for "
    "itself, as it would when decoded).",
    "Look-ahead": "how many layers back a predictor reads. What it loses to it is measured with the same predictor on "
    "the same tokens.",
    "Gain": "a predictor's recall without look-ahead minus that of the same units for every token. Distance explains a "
    "loss (yes) where it takes more than half of the gain by the whole interval, and does not (no) where it takes less "
    "than a twentieth, or where no loss was found and none of half is left open.",
    "Ceiling": "the fastest that this card was seen to read memory, or to multiply matrices.",
    "Calls": "processes that measured the same thing: numbers are medians over them, beside the lowest and highest.",
    "Intervals": "95 %: of a perplexity's ratio and of one model's drift a bootstrap over windows of text, with the "
    "same draws for both sides, wider where windows are few; of the ablation Student's t over seeds, after the "
    "differences between models that differ in one factor only were averaged over the other factors.",
}

PAGE = """{% macro show(table, section="") %}
{% set numeric = table.numeric_columns() %}
{% if table.title != section %}<h3>{{ table.title }}</h3>{% endif %}

<div class="scroll"><table>
<thead><tr>
{% for column in table.columns %}
<th{% if numeric[loop.index0] %} class="number"{% endif %}>{{ column }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>
{% for cell in row %}
<td{% if numeric[loop.index0] %} class="number"{% endif %}>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody></table></div>
{% if table.caption %}<p class="caption">{{ table.caption }}</p>{% endif %}

{% endmacro %}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
  :root { color-scheme: light; }
  body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff;
         max-width: 90rem; margin: 0 auto; padding: 1rem; }
  p, ul, dl, figure { max-width: 62rem; }
  dt { font-weight: 600; } dd { margin: 0 0 .6rem 1.2rem; }
  h1 { font-size: 1.5rem; margin: .5rem 0; }
  h2 { font-size: 1.2rem; margin: 2rem 0 .5rem; border-bottom: 1px solid #ddd; }
  h3 { font-size: 1rem; margin: 1.2rem 0 .4rem; }
  .scroll { overflow-x: auto; max-width: 100%; padding-bottom: .4rem; }
  @media print { .scroll { overflow: visible; } table { font-size: .55rem; } th, td { padding: .1rem .25rem; } }
  table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
  th, td { padding: .25rem .6rem; border-bottom: 1px solid #e3e3e3; text-align: left; white-space: nowrap; }
  th { border-bottom: 2px solid #999; vertical-align: bottom; white-space: normal; }
  .number { text-align: right; }
  .caption, footer { color: #555; font-size: .85rem; }
  figure { margin: 1.2rem 0; }
  figcaption { font-weight: 600; font-size: .95rem; }
  img { max-width: 100%; height: auto; }
</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="caption">{{ num_records }} result records. {{ environments | join("; ") }}.</p>
{% if answers %}<h2>{{ verdict_title }}</h2>{% endif %}
{% for answer in answers %}
<p><strong>{{ answer.question }}</strong> {{ answer.text }}</p>
{% endfor %}
{% for answer in answers %}{% for table in answer.tables %}{{ show(table) }}{% endfor %}{% endfor %}
{% for name, tables in sections.items() %}
<h2>{{ section_title(name) }}</h2>
{% for table in tables %}{{ show(table, name) }}{% endfor %}
{% endfor %}
{% if images %}<h2>Plots</h2>{% endif %}
{% for caption, image in images.items() %}
<figure><figcaption>{{ caption }}</figcaption>
<img alt="{{ caption }}" src="data:image/png;base64,{{ image }}"></figure>
{% endfor %}
<h2>Definitions</h2>
<dl>
{% for term, meaning in definitions.items() %}
<dt>{{ term }}</dt><dd>{{ meaning }}</dd>
{% endfor %}
</dl>
<h2>Environment</h2>
<ul>{% for line in environments %}<li>{{ line }}</li>{% endfor %}</ul>
</body>
</html>
"""


def all_figures(records: Sequence[Record]) -> dict[str, Figure]:
    """Every figure that the records can fill, by title."""
    figures: dict[str, Figure | None] = {}
    for found in compare_accuracy(records):
        figures[f"{found.model}: accuracy against MLP density"] = plot_accuracy(found)
        figures[f"{found.model}, accuracy tasks: recall and precision per layer"] = plot_accuracy_layers(found)
    scored = [row for row in compare(records) if row.name == "perplexity"]
    for (model, task, metric), rows in group_by_task(scored).items():
        subject = f"{model}, {task}"
        figures[f"{subject}: {metric} against MLP density"] = plot_against_density(rows)
        figures[f"{subject}: {metric} against head density"] = plot_against_density(rows, block="attention")
        figures[f"{subject}: {metric} against MLP bytes read"] = plot_against_bytes(rows)
        figures[f"{subject}: {metric} against layer bytes read"] = plot_against_layer_bytes(rows)
        figures[f"{subject}: decoding speed"] = plot_speed(rows)
        figures[f"{subject}: recall and precision per layer"] = plot_layer_quality(rows)
        figures[f"{subject}: achieved density per layer"] = plot_layer_density(rows)
    figures |= drift_figures(records)
    return {title: figure for title, figure in figures.items() if figure is not None}


def drift_figures(records: Sequence[Record]) -> dict[str, Figure | None]:
    """The figures of the drift study by title; None where the records do not fill one."""
    figures: dict[str, Figure | None] = {}
    for model, found in studied_models(records).items():
        figures[f"{model}, drift: cosine between layers"] = plot_cosine_layers(found)
        figures[f"{model}, drift: what distance costs"] = plot_distance(found)
        figures[f"{model}, drift: recall against rank and text"] = plot_rank_and_text(found)
    figures["drift: energy in the largest neurons"] = plot_energy(records)
    figures["drift: active neurons shared by consecutive tokens"] = plot_reuse(records)
    figures["ablation: effects on prediction"] = plot_effects(records)
    return figures


def save_figures(figures: Iterable[tuple[str, Figure]], output_dir: str | os.PathLike[str]) -> dict[str, Path]:
    """Writes each (title, figure) as a PNG named after its title; returns the paths by title."""
    output_dir = Path(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    paths: dict[str, Path] = {}
    for title, figure in figures:
        stem = re.sub(r"[^a-z0-9]+", "_", title.lower()).strip("_")[:120]
        while output_dir / f"{stem}.png" in paths.values():
            stem += "_"
        paths[title] = output_dir / f"{stem}.png"
        figure.savefig(paths[title], dpi=130)
    return paths


def build_report(
    records: Sequence[Record],
    *,
    title: str = "dejavu-lab report",
    figures: Mapping[str, Path] | None = None,
) -> str:
    """Returns the page as HTML that refers to nothing outside itself; everything from records is escaped.

    figures: PNG files by caption, as `save_figures` writes them.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(PAGE).render(
        title=title,
        num_records=len(records),
        answers=answers(records),
        verdict_title=VERDICT_TITLE,
        sections=all_tables(records),
        section_title=section_title,
        environments=environment_lines(records),
        definitions=DEFINITIONS,
        images={
            caption: base64.b64encode(path.read_bytes()).decode("ascii") for caption, path in (figures or {}).items()
        },
    )
