"""Table of the main figures beside those of the source of the run-length cache (`/` stands for no figure).

The source measures Llama 2 7B, Mistral 7B and CodeLlama 7B after quantisation to half precision, and WikiText-103.
"""

import itertools
from collections.abc import Sequence

SAVED = {("chat", 0.01): 0.62, ("documentation", 0.01): 0.48, ("code", 0.01): 0.38, ("chat", 0.001): 0.54}
PERPLEXITY = {0.001: 0.0, 0.01: 0.0008, 0.05: 0.016}  # relative increase, whatever the text
OVERHEAD = "the source: runs cost 2.8 % of a forward pass, 2 us per appended token; here: preset overhead"
_SETTINGS = {"absolute": "abs", "relative": "rel", "steps": "steps"}


def print_table(rows: list[dict], edges: Sequence[int]) -> None:
    """Prints a line per case: all cases of the longest context, of shorter ones the source's tolerance; then the
    lengths of runs."""
    print(f"{'text':>14}{'codec':>18}{'tokens':>7}{'within':>10}{'runs/token':>11}{'KiB':>7}{'saved %':>8}"
          f"{'of KV %':>8}{'source %':>9}{'ΔNLL %':>9}{'±':>7}{'source: perplexity %':>22}")
    longest, costs = max(row["context"] for row in rows), _costs(rows)
    for row in rows:
        task, _, kind = row["task"].partition("/")
        if task in ("runs", "learned", "dictionary") and _shown(row, longest):
            cost = costs.get(_key(row), {}) if row["context"] == longest else {}
            print(line(kind, row, cost))
    print_histograms([row for row in rows if row["task"].startswith("runs/") and row["context"] == longest], edges)
    for row in rows:
        if row["method"] == "dictionary_key" and row["layer"] == 0 and row["context"] == longest:
            print(f"{row['task'].partition('/')[2]:>14}: repeated segments save "
                  f"{row['segments_saved_of_index']:.1%} of the index of layer 0's dictionary")
    print(OVERHEAD)


def print_histograms(rows: list[dict], edges: Sequence[int]) -> None:
    """Prints the number of runs by their length in tokens, over all layers and heads."""
    spans = [f"{first}" if first + 1 == after else f"{first}-{after - 1}" for first, after in itertools.pairwise(edges)]
    print(f"{'text':>14}{'runs of':>18}{'within':>10}" + "".join(f"{span:>9}" for span in [*spans, f"{edges[-1]}-"]))
    for row in rows:
        print(f"{row['task'].partition('/')[2]:>14}{row['method']:>18}{_within(row):>10}"
              + "".join(f"{count:>9,}" for count in row["histogram"]))


def line(kind: str, row: dict, cost: dict) -> str:
    """Returns one line of the table."""
    value = row.get("absolute") if row["method"] in ("rle_after", "rle_before") else None
    saved, perplexity = SAVED.get((kind, value)), PERPLEXITY.get(value)
    cells = [
        _cell(row.get("runs_per_token", row.get("different_per_token")), 11, 3, 1),
        _cell(row.get("key_bytes_coded", row.get("bytes_coded")), 7, 0, 1 / 1024), _cell(row["saved"], 8, 1),
        _cell(row.get("kv_saved"), 8, 1), _cell(saved, 9, 0), _cell(cost.get("relative_delta_nll"), 9, 3),
        _cell(cost.get("relative_error"), 7, 3), _cell(perplexity, 22, 2),
    ]
    return f"{kind:>14}{row['method']:>18}{row['context']:>7,}{_within(row):>10}" + "".join(cells)


def _within(row: dict) -> str:
    return next((f"{row[name]:g} {unit}" for name, unit in _SETTINGS.items() if row.get(name) is not None), "/")


def _cell(value: float | None, width: int, digits: int, times: float = 100) -> str:
    return f"{'/':>{width}}" if value is None else f"{times * value:{width}.{digits}f}"


def _shown(row: dict, longest: int) -> bool:
    if row["method"].startswith("dictionary"):  # deeper layers have hardly any equal keys
        return row["layer"] == 0 and row["context"] == longest
    if row["context"] < longest:
        return row["method"] in ("rle_after", "rle_before") and row.get("absolute") == 0.01
    return True


def _costs(rows: list[dict]) -> dict[tuple, dict]:
    """Returns the likelihood row of each codec, by kind of text and setting."""
    return {_key(row): row for row in rows if row["task"].startswith("likelihood/")}


def _key(row: dict) -> tuple:
    return row["task"].partition("/")[2], row["method"], *(row.get(name) for name in _SETTINGS)
