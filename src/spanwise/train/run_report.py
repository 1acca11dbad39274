"""The page that every run ends with: curves, the last measures, what was left out, the recipe and the environment."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch
import yaml

from spanwise.report.chart import line_chart
from spanwise.report.page import escape, section, shown, table, write_page
from spanwise.train.recipe import Recipe, public_content
from spanwise.train.run_log import RunLog


def write_run_report(
    path: Path,
    recipe: Recipe,
    log: RunLog,
    task: Any,
    measured: dict[str, float],
    left_out: dict[str, int],
    seconds: float,
) -> Path:
    """Write ``report.html`` of a finished run."""
    body = [
        section("Held-out measures", _measures(log, measured)),
        section("Curves", "\n".join(_curves(log, task))),
        *(section(part.heading, part.html) for part in task.report_sections()),
        section("Left out of training", table(["reason", "rows"], sorted(left_out.items()) or [("nothing", 0)])),
        section("Recipe", f"<pre>{escape(yaml.safe_dump(public_content(recipe), sort_keys=False))}</pre>"),
        section("Environment", table(["what", "value"], _environment(seconds))),
    ]
    return write_page(
        path,
        title=f"Run report: {Path(recipe.output).name}",
        subtitle=f"Task {recipe.task}, seed {recipe.seed}, {len(log.curve('loss'))} steps.",
        body="\n".join(body),
    )


def _measures(log: RunLog, measured: dict[str, float]) -> str:
    if not measured:
        return '<p class="soft">No held-out data was given (data.eval), so nothing was measured.</p>'
    first = next((entry for entry in log.entries if entry["kind"] == "evaluation"), {})
    rows = [(name, first.get(name), value) for name, value in measured.items()]
    return table(["measure", "first evaluation", "at the end"], rows)


def _curves(log: RunLog, task: Any) -> list[str]:
    terms = [name for name, weight in task.weights.items() if weight]
    metric = task.best_metric[0]
    charts = [
        line_chart({"loss": log.curve("loss")}, title="Training loss (weighted total)", x_label="step"),
        line_chart({term: log.curve(term) for term in terms}, title="Terms, apart", x_label="step"),
        line_chart({metric: log.curve(metric, "evaluation")}, title=f"Held-out {metric}", x_label="step"),
        *_curves_of_alignment(log, terms),
        line_chart({"learning rate": log.curve("learning_rate")}, title="Learning rate", x_label="step"),
        line_chart({"gradient norm": log.curve("grad_norm")}, title="Gradient norm", x_label="step"),
        line_chart({"tokens/s": log.curve("tokens_per_second")}, title="Speed", x_label="step"),
        line_chart({"MB": log.curve("memory_mb")}, title="Peak memory", x_label="step"),
    ]
    if log.curve("dynamic_ratio"):
        charts.append(line_chart({"ratio": log.curve("dynamic_ratio")}, title="Dynamic scaling", x_label="step"))
    return charts


def _curves_of_alignment(log: RunLog, terms: list[str]) -> list[str]:
    """What the batches of a distillation run were: how much text the student needed, how much each teacher covered."""
    bits = log.curve("train_bits_per_byte")
    coverage = {term: curve for term in terms if (curve := log.curve(f"{term}/coverage"))}
    charts = []
    if bits:
        charts.append(line_chart({"bits per byte": bits}, title="Training bits per byte", x_label="step"))
    if coverage:
        title = "Coverage: trained tokens in a chunk that covers the same bytes on both sides"
        charts.append(line_chart(coverage, title=title, x_label="step"))
    return charts


def _environment(seconds: float) -> list[tuple[str, object]]:
    import transformers

    import spanwise

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return [
        ("seconds", shown(seconds)),
        ("device", device),
        ("machine", platform.machine()),
        ("python", platform.python_version()),
        ("torch", torch.__version__),
        ("transformers", transformers.__version__),
        ("spanwise", spanwise.__version__),
    ]
