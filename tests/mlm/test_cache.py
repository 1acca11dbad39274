"""The cache against a whole run: with nothing changed, a part of a row has the logits it had."""

from __future__ import annotations

import pytest
import torch

from spanwise.mlm.cache import KeyValueCache
from spanwise.mlm.model import count_positions
from tests.mlm.helpers import ragged_batch, small_model


@pytest.mark.parametrize("lengths", [[8, 8, 8], [8, 3, 6]])
@pytest.mark.parametrize("columns", [[[1, 2, 4], [0, 2, 1], [5, 3, 0]], [[7, 6, 5], [2, 1, 0], [1, 2, 3]]])
def test_a_part_of_a_row_has_the_logits_it_had(lengths, columns):
    model = small_model()
    ids, mask = ragged_batch(lengths, 8)
    positions, rows = count_positions(mask), torch.arange(3)
    cache = KeyValueCache(mask)
    with torch.no_grad():
        whole = model(ids, mask)
        refreshed = model.refresh(ids, positions, mask, cache, rows)
        torch.testing.assert_close(refreshed, whole[mask])
        part = torch.tensor(columns)
        for chosen in (rows, torch.tensor([2, 0])):
            taken = part[chosen]
            again = model.continue_block(
                ids[chosen].gather(1, taken),
                positions[chosen].gather(1, taken),
                taken,
                torch.ones_like(taken, dtype=torch.bool),
                cache,
                chosen,
            )
            expected = whole[chosen[:, None], taken].flatten(0, 1)
            real = mask[chosen[:, None], taken].flatten()
            torch.testing.assert_close(again[real], expected[real])


def test_every_column_run_again_equals_a_whole_run_of_the_changed_row():
    model = small_model()
    ids, mask = ragged_batch([6, 4], 6)
    cache, rows = KeyValueCache(mask), torch.arange(2)
    columns = torch.arange(6).expand(2, 6)
    with torch.no_grad():
        model.refresh(ids, count_positions(mask), mask, cache, rows)
        changed = ids.clone()
        changed[:, 1] = 9
        again = model.continue_block(changed, count_positions(mask), columns, mask, cache, rows)
        torch.testing.assert_close(again, model(changed, mask)[mask])
