"""4×4 sudoku, the smallest task on which the order of filling matters: rows of digits with and without blanks.

There are 288 grids. A puzzle keeps six or more digits and has exactly one solution. Everything follows from the seed.
The tokenizer knows PAD, MASK and the digits 1 to 4. O(grids · cells) for all of them.

Shapes: 16 cells, row-major.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SUDOKU = "builtin:sudoku"
SIDE, CELLS = 4, 16
PAD, MASK = 0, 1
Grid = tuple[int, ...]


@dataclass(frozen=True)
class Puzzle:
    """A grid with blanks (0) and its only solution, digits 1 to 4."""

    blanks: Grid
    solution: Grid


@cache
def all_grids() -> tuple[Grid, ...]:
    """All 288 valid grids in lexical order."""
    return tuple(_complete((0,) * CELLS))


def split_grids(held_out: int = 64, seed: int = 0) -> tuple[list[Grid], list[Grid]]:
    """Grids for training and for measuring, disjoint."""
    order = torch.randperm(len(all_grids()), generator=torch.Generator().manual_seed(seed)).tolist()
    grids = [all_grids()[place] for place in order]
    return grids[held_out:], grids[:held_out]


def make_puzzles(grids: Sequence[Grid], count: int, blanks: int = 10, seed: int = 0) -> list[Puzzle]:
    """``count`` puzzles with that many blanks, each with one solution, going round ``grids``.

    >>> puzzle = make_puzzles(all_grids(), 1)[0]
    >>> puzzle.blanks.count(0), len(puzzle.solution)
    (10, 16)
    """
    if not 0 <= blanks <= CELLS - SIDE:
        raise ValueError(
            f"{blanks} blanks were asked of a grid of {CELLS} cells; expected 0 to {CELLS - SIDE}, since fewer than "
            f"{SIDE} digits never fix a grid. The number was probably meant as digits kept. Fix: pass 10."
        )
    generator = torch.Generator().manual_seed(seed)
    puzzles: list[Puzzle] = []
    while len(puzzles) < count:
        grid = grids[len(puzzles) % len(grids)]
        hidden = set(torch.randperm(CELLS, generator=generator)[:blanks].tolist())
        kept = tuple(0 if cell in hidden else digit for cell, digit in enumerate(grid))
        if len(_complete(kept, limit=2)) == 1:
            puzzles.append(Puzzle(kept, grid))
    return puzzles


def sudoku_puzzles(count: int) -> list[Puzzle]:
    """What ``builtin:sudoku:eval`` means: puzzles with 10 blanks on the held-out grids."""
    return make_puzzles(split_grids()[1], count)


def puzzle_rows(puzzles: Sequence[Puzzle]) -> list[dict[str, Any]]:
    """Rows with ``prompt_ids`` (MASK where blank) and ``input_ids`` (the solution)."""
    return [
        {
            "prompt_ids": [MASK if digit == 0 else digit + 1 for digit in puzzle.blanks],
            "input_ids": [digit + 1 for digit in puzzle.solution],
            "idx": index,
        }
        for index, puzzle in enumerate(puzzles)
    ]


def sudoku_tokenizer() -> PreTrainedTokenizerFast:
    """Digits 1 to 4 as ids 2 to 5, PAD 0, MASK 1; no BOS or EOS."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": PAD, "<mask>": MASK} | {str(digit): digit + 1 for digit in range(1, SIDE + 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<mask>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", mask_token="<mask>")


def _complete(grid: Grid, limit: int = 10**9) -> list[Grid]:
    """The completions of a partial grid, at most ``limit``, row by row over the permutations that fit."""
    found: list[Grid] = []

    def extend(done: Grid) -> None:
        if len(found) >= limit:
            return
        if len(done) == CELLS:
            found.append(done)
            return
        begin = len(done)
        for line in permutations(range(1, SIDE + 1)):
            if _fits(grid[begin : begin + SIDE], line) and _allowed(done, line):
                extend(done + line)

    extend(())
    return found


def _fits(given: Grid, line: Grid) -> bool:
    return all(want in (0, digit) for want, digit in zip(given, line, strict=True))


def _allowed(done: Grid, line: Grid) -> bool:
    """No digit of ``line`` stands above in its column, nor, in the lower row of a box, in the box."""
    if any(line[cell % SIDE] == digit for cell, digit in enumerate(done)):
        return False
    if len(done) // SIDE % 2 == 0:
        return True
    above = done[-SIDE:]
    return not (set(above[:2]) & set(line[:2]) or set(above[2:]) & set(line[2:]))
