"""The command line. Every verb calls a room; what a verb does is written there.

Standard output carries the result (with ``--json`` exactly one object), standard error everything else. Exit code 2
means the user's input, 1 that the run failed; where nobody foresaw that, the lines that led there come first.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from typing import Annotated, Any, Literal

import typer

from spanwise.report.terminal import print_json, show

app = typer.Typer(
    name="spanwise",
    help="Train language models on things that do not match: tokenizers, lengths, modalities.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
# What a mistake in the input raises; everything else is a run that failed.
INPUT_ERRORS = (ValueError, FileNotFoundError, FileExistsError, IsADirectoryError, PermissionError, ModuleNotFoundError)


def _version(wanted: bool) -> bool:
    if wanted:
        from spanwise import __version__

        sys.stdout.write(f"spanwise {__version__}\n")
        raise typer.Exit
    return wanted


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Train language models on things that do not match: tokenizers, lengths, modalities."""


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="A YAML recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=c overrides a value of the recipe.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the output folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train a student from one recipe."""
    from spanwise.train.recipe import load_recipe
    from spanwise.train.run import train as run

    show(run(load_recipe(recipe, overrides or []), resume=resume), as_json, hide=("loss_per_step",))


@app.command(name="eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="Hub name, folder or GGUF file.")],
    data: Annotated[str, typer.Option("--data", help="Held-out text.")],
    tokenizer: Annotated[str | None, typer.Option(help="Default: the model's.")] = None,
    teacher: Annotated[str | None, typer.Option(help="Also measure agreement with this model.")] = None,
    columns: Annotated[list[str] | None, typer.Option("--column", help="text=NAME_IN_THE_DATA")] = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Only the first N.")] = None,
    window_bytes: Annotated[int, typer.Option(min=16)] = 2_048,
    stride_bytes: Annotated[int, typer.Option(min=1)] = 1_024,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure a model on held-out text, in bits per byte."""
    from spanwise.train.evaluation import evaluate_model
    from spanwise.train.mlm_evaluation import evaluate_masked, is_masked_checkpoint

    if is_masked_checkpoint(model):
        if teacher is not None:
            raise ValueError(
                f"--teacher was given and '{model}' is a masked language model; expected a causal one, whose next "
                "tokens can be compared. Fix: leave --teacher out."
            )
        masked = evaluate_masked(
            model,
            data=data,
            columns=column_names(columns or []),
            tokenizer_source=tokenizer,
            documents=documents,
            batch_size=batch_size,
        )
        show(masked, as_json)
        return
    result = evaluate_model(
        model,
        data=data,
        columns=column_names(columns or []),
        tokenizer_source=tokenizer,
        teacher_source=teacher,
        window_bytes=window_bytes,
        stride_bytes=stride_bytes,
        batch_size=batch_size,
        documents=documents,
    )
    show(result, as_json)


@app.command(name="generate")
def generate_masked(
    checkpoint: Annotated[str, typer.Argument(help="A masked language model with its tokenizer.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; may be given several times.")] = None,
    infill: Annotated[list[str] | None, typer.Option(help="Text with mask tokens where words are missing.")] = None,
    unconditional: Annotated[bool, typer.Option("--unconditional", help="Begin from nothing.")] = False,
    count: Annotated[int, typer.Option(min=1, help="How many texts to begin from nothing.")] = 1,
    sampler: Annotated[
        str,
        typer.Option(help="top_prob, uniform, margin, entropy, threshold, factor, ddpm_cache or remasking."),
    ] = "top_prob",
    max_new_tokens: Annotated[int, typer.Option(min=0, help="Tokens to add to a prompt.")] = 32,
    steps: Annotated[int | None, typer.Option(min=1, help="Most forwards per text; default: one per token.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Default: 0 for --infill, else 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep that many tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to this sum.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Fill blocks of that many from left to right.")] = None,
    cache: Annotated[str | None, typer.Option(help="With --block-size: prefix or dual.")] = None,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    page: Annotated[str | None, typer.Option(help="Also write an HTML page that shows each step.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print {texts, steps, forwards}.")] = False,
) -> None:
    """Fill masks with a masked language model: continue prompts, close gaps, begin from nothing."""
    from spanwise.mlm import HistoryInMemory
    from spanwise.mlm.generate import generate

    history = HistoryInMemory() if page else None
    result = generate(
        checkpoint,
        prompts=prompt or (),
        infills=infill or (),
        unconditional=count if unconditional else 0,
        sampler=sampler,
        max_new_tokens=max_new_tokens,
        steps=steps,
        temperature=temperature,
        seed=seed,
        top_k=top_k,
        top_p=top_p,
        block_size=block_size,
        cache=cache,
        history=history,
    )
    if page and history is not None:
        from spanwise.loading import load_tokenizer
        from spanwise.report.unfold import write_unfolding

        write_unfolding(page, history.steps, history.probabilities, load_tokenizer(checkpoint))
    show(result, as_json)


@app.command()
def swap(
    model: Annotated[str, typer.Argument(help="Hub name, folder or GGUF file.")],
    tokenizer: Annotated[str, typer.Argument(help="The tokenizer to move it onto.")],
    output: Annotated[str, typer.Option("--output", "-o", help="A new folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Move a model onto another tokenizer (untrained; train it with recipes/swap.yaml)."""
    from spanwise.train.swap import swap_to_folder

    show(swap_to_folder(model, tokenizer, output), as_json)


@app.command(name="cache")
def cache_teachers(
    recipe: Annotated[str, typer.Argument(help="A distillation recipe.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=c overrides a value of the recipe.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Score the training text with the recipe's teachers once, so that training needs none. Goes on when killed."""
    from spanwise.train.cache_run import cache_teachers as run
    from spanwise.train.recipe import load_recipe

    show(run(load_recipe(recipe, overrides or [])), as_json, hide=("caches",))


@app.command(name="serve")
def serve_model(
    model: Annotated[str, typer.Argument(help="Hub name, folder or GGUF file.")],
    tokenizer: Annotated[str | None, typer.Option(help="Default: the model's.")] = None,
    host: Annotated[str, typer.Option(help="Anything but a loopback address needs --token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65_535, help="0 takes a free one.")] = 8_000,
    token: Annotated[str | None, typer.Option(help="What clients must send; default: $SPANWISE_TOKEN.")] = None,
    max_logprobs: Annotated[int, typer.Option(min=1, help="Log-probabilities per position.")] = 64,
    max_request_bytes: Annotated[int, typer.Option(min=1_024)] = 4 << 20,
    max_batch_tokens: Annotated[int, typer.Option(min=1, help="Padded tokens per forward.")] = 4_096,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print {url, model} once it listens.")] = False,
) -> None:
    """Serve a model's prompt log-probabilities over HTTP, so that it can teach from another machine."""
    from spanwise.teachers.serve import serve

    serve(
        model,
        tokenizer=tokenizer,
        host=host,
        port=port,
        token=token,
        max_logprobs=max_logprobs,
        max_request_bytes=max_request_bytes,
        max_batch_tokens=max_batch_tokens,
        dtype=dtype,
        ready=lambda where: show(where, as_json),
    )


project = typer.Typer(help="Projection matrices between two vocabularies.", no_args_is_help=True)
app.add_typer(project, name="project")


@project.command(name="build")
def project_build(
    student: Annotated[str, typer.Argument(help="The student's tokenizer: hub name, folder, tokenizer.json or GGUF.")],
    teacher: Annotated[str, typer.Argument(help="The teacher's tokenizer.")],
    output: Annotated[str, typer.Option("--output", "-o", help="A .safetensors file (or .pt).")],
    top_k: Annotated[int, typer.Option(min=1, help="Entries per student token.")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Build the projection from a student's tokens to a teacher's."""
    from spanwise.loading import load_tokenizer
    from spanwise.xtoken.projection_report import build_and_save

    show(build_and_save(load_tokenizer(student), load_tokenizer(teacher), output, top_k=top_k), as_json)


@project.command(name="show")
def project_show(
    file: Annotated[str, typer.Argument(help="A projection file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say what a projection file holds."""
    from spanwise.xtoken.projection import Projection
    from spanwise.xtoken.projection_report import describe

    show(describe(Projection.load(file), file), as_json)


@project.command(name="check")
def project_check(
    file: Annotated[str, typer.Argument(help="A projection file.")],
    student: Annotated[str, typer.Argument(help="The student's tokenizer.")],
    teacher: Annotated[str, typer.Argument(help="The teacher's tokenizer.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare a projection file with two tokenizers: coverage, exact share, worst rows."""
    from spanwise.loading import load_tokenizer
    from spanwise.xtoken.projection_report import check_projection

    show(check_projection(file, load_tokenizer(student), load_tokenizer(teacher)), as_json)


@app.command()
def demo(
    output: Annotated[str, typer.Option("--output", "-o", help="Folder of the report.")] = "outputs/demo",
    quick: Annotated[bool, typer.Option("--quick", help="At most a minute; proves nothing.")] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Of the small student; default 2.")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Share nothing with other runs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Use a real language model for what Spanwise is for, against fair controls, and report."""
    from pathlib import Path

    from spanwise.demo.run import run_demo
    from spanwise.demo.table import arms_table

    result = run_demo(Path(output), quick=quick, seeds=seeds, cache=not no_cache)
    if as_json:
        print_json(result)
    else:
        sys.stdout.write(arms_table(result))


@app.command()
def align(
    student: Annotated[str, typer.Argument(help="Tokenizer: hub name, folder, tokenizer.json or GGUF file.")],
    teacher: Annotated[str, typer.Argument(help="Likewise.")],
    text: Annotated[str | None, typer.Option(help="The text; default: a sample of everything.")] = None,
    file: Annotated[str | None, typer.Option(help="A UTF-8 file instead.")] = None,
    html: Annotated[str | None, typer.Option(help="Also write a page there.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print {chunks, coverage, quality}.")] = False,
) -> None:
    """Show which tokens of two tokenizers cover the same bytes."""
    from spanwise.report.align_page import align_and_report

    found = align_and_report(student, teacher, text=text, file=file, html=html, in_colour=not as_json)
    if as_json:
        print_json(found.as_json())


@app.command()
def inspect(
    recipe: Annotated[str, typer.Argument(help="A YAML recipe of any task.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="a.b=c overrides a value of the recipe.")] = None,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the data to collate.")] = 8,
    output: Annotated[str | None, typer.Option("--output", "-o", help="Default: OUTPUT.inspect.html.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print {rows, path}.")] = False,
) -> None:
    """Open the first batches of a recipe as a page: tokens, chunks, labels, masks, media."""
    from spanwise.train.inspect import inspect_recipe
    from spanwise.train.recipe import load_recipe

    show(inspect_recipe(load_recipe(recipe, overrides or []), rows=rows, output=output), as_json)


recipes = typer.Typer(help="The recipes that come with Spanwise.", no_args_is_help=True)
app.add_typer(recipes, name="recipes")


@recipes.command(name="list")
def recipes_list(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Name every recipe and say what it is for."""
    from spanwise.train.catalog import list_recipes

    show(dict(list_recipes()), as_json)


@recipes.command(name="show")
def recipes_show(name: Annotated[str, typer.Argument(help="A name from the list.")]) -> None:
    """Print a recipe, to be copied and edited."""
    from spanwise.train.catalog import recipe_text

    sys.stdout.write(recipe_text(name))


@recipes.command(name="schema")
def recipes_schema(task: Annotated[str, typer.Argument(help="distill, vlm or mlm.")] = "distill") -> None:
    """Print the JSON schema of a task's recipes, for editors."""
    from spanwise.train.recipe import recipe_class

    print_json(recipe_class(task).model_json_schema())


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Say what this machine can run and what is missing."""
    from spanwise.train.doctor import checks

    found = checks()
    if as_json:
        print_json({"checks": found})
    else:
        show({entry["name"]: ("ok  " if entry["ok"] else "–   ") + entry["detail"] for entry in found}, as_json)


def column_names(pairs: list[str]) -> dict[str, str]:
    """``--column text=content`` as {our name: the data's name}."""
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not (ours and equals and theirs):
            raise ValueError(
                f"--column was given '{pair}'; expected our name, =, and the column's name in the data. One of the two "
                f"was probably left out. Fix: --column text={theirs or ours}"
            )
    return dict(pair.split("=", 1) for pair in pairs)


def explain_usage(error: Any) -> str:
    """What click says about words that do not fit, and what to type instead."""
    said: str = error.format_message()
    context = getattr(error, "ctx", None)
    if not said or context is None:
        return said
    # Other trainers take --learning_rate=…; here every value of a recipe is an argument without dashes.
    takes_values = any(parameter.name == "overrides" for parameter in context.command.params)
    values = ", and values of the recipe are set as train.max_steps=100" if takes_values else ""
    ended = said if said.endswith((".", "?")) else f"{said}."
    return f"{ended} Fix: {context.command_path} --help shows what it takes{values}."


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with its code."""
    words = sys.argv[1:] if arguments is None else arguments
    as_json = "--json" in words
    try:
        # Under --json a library's stray print must not reach the one object on standard output.
        code = app(words, standalone_mode=False, prog_name="spanwise")
    except typer.Exit as leave:
        code = leave.exit_code
    except Exception as error:
        code = 2 if isinstance(error, INPUT_ERRORS) or hasattr(error, "exit_code") else 1
        message = explain_usage(error) if hasattr(error, "format_message") else str(error)
        named = f"{type(error).__name__}: {message}"
        if as_json:
            print_json({"error": named})
        if code == 1 and not type(error).__module__.startswith("spanwise."):  # nobody foresaw it: say where it was
            traceback.print_tb(error.__traceback__)
        if message:  # without any argument the help was printed, which says it all
            sys.stderr.write(f"{named}\n")
    except KeyboardInterrupt:
        code = 130
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.exit(code or 0)


if __name__ == "__main__":
    main()
