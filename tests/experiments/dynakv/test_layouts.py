"""What the layouts experiment computes instead of measuring: moves in a packed layout, against lists of tokens."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

from experiments.dynakv.layouts import Updates

LANES, BLOCKS, ROWS, TOKENS = 2, 8, 4, 30


class Lists:
    """Each stream as lists of tokens by block, and the order of its blocks in the packed layout."""

    def __init__(self):
        self.rows = [{block: [] for block in range(BLOCKS)} for _ in range(LANES)]
        self.order = [[] for _ in range(LANES)]

    def table(self) -> np.ndarray:
        pos = np.full((LANES, BLOCKS, ROWS), -1, np.int32)
        for stream, rows in enumerate(self.rows):
            for block, tokens in rows.items():
                pos[stream, block, :len(tokens)] = tokens
        return pos

    def append(self, stream, block, token):
        if not self.rows[stream][block]:
            self.order[stream].append(block)
        self.rows[stream][block].append(token)

    def split(self, stream, block, free, stay):
        tokens = self.rows[stream][block]
        self.rows[stream][block] = [t for i, t in enumerate(tokens) if stay >> i & 1]
        self.rows[stream][free] = [t for i, t in enumerate(tokens) if not stay >> i & 1]
        self.order[stream].insert(self.order[stream].index(block) + 1, free)

    def merge(self, stream, block, into):
        self.rows[stream][into] += self.rows[stream][block]
        self.rows[stream][block] = []
        self.order[stream].remove(block)

    def places(self):
        """(block and row, offset in the stream, offset in the file) of every token."""
        found, file = {}, 0
        for stream, order in enumerate(self.order):
            packed = [(block, row) for block in order for row in range(len(self.rows[stream][block]))]
            for offset, (block, row) in enumerate(packed):
                found[stream, self.rows[stream][block][row]] = ((block, row), offset, file + offset)
            file += len(packed)
        return found


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=40)
def test_updates_count_what_changes_place(data):
    lists = Lists()
    for token in range(6):
        lists.append(token % LANES, data.draw(st.integers(0, 2)), token)
    for stream in range(LANES):
        lists.order[stream].sort()  # a prompt's blocks are packed in the order of their numbers
    updates, expected = Updates(lists.table(), TOKENS), np.zeros(4, int)
    for token in range(6, TOKENS):
        before = lists.places()
        for stream in range(LANES):
            large = [b for b, rows in lists.rows[stream].items() if len(rows) >= 2]
            free = [b for b, rows in lists.rows[stream].items() if not rows]
            if large and free and data.draw(st.booleans()):
                block = data.draw(st.sampled_from(large))
                lists.split(stream, block, free[0], data.draw(st.integers(1, 2 ** len(lists.rows[stream][block]) - 2)))
            some = [b for b, rows in lists.rows[stream].items() if rows]
            block, into = data.draw(st.sampled_from(some)), data.draw(st.sampled_from(some))
            if block != into and sum(len(lists.rows[stream][b]) for b in (block, into)) <= ROWS:
                lists.merge(stream, block, into)
            roomy = [b for b, rows in lists.rows[stream].items() if rows and len(rows) < ROWS]
            if roomy and data.draw(st.booleans()):
                lists.append(stream, data.draw(st.sampled_from(roomy)), token)
        updates.see(lists.table())
        after = lists.places()
        expected[0] += len(after.keys() - before.keys())
        for key, places in before.items():
            expected[1:] += [old != new for old, new in zip(places, after[key], strict=True)]
    found = [updates.inserted, updates.moved, updates.packed_stream, updates.packed_file]
    assert found == expected.tolist()
