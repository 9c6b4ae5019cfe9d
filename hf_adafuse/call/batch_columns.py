"""Reads and adds columns of a table in the forms that data libraries pass: a dict of lists, a dict of arrays, a pandas
DataFrame.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def column_names(batch: Any) -> list[Any]:
    """
    The names of a batch's columns.

    Raises:
        ValueError: it is no batch.
    """
    if not isinstance(batch, Mapping) and not _is_frame(batch):
        raise ValueError(
            f"`batch` must be a dict of columns or a pandas DataFrame, but is of type {type(batch).__name__}. Ask for "
            'batches of that kind: batch_format="numpy", say.'
        )
    return list(batch.keys())


def column_values(column: Any) -> list[Any]:
    """
    The values of a column; `None` for those that are missing.

    Raises:
        ValueError: it is no column.
    """
    is_list = isinstance(column, Iterable) and not isinstance(column, (str, bytes, Mapping))
    if not is_list or getattr(column, "ndim", 1) < 1:
        raise ValueError(f"A column of a batch must be a list of values, but is {column!r}. Put them in a list.")
    if hasattr(column, "isna"):  # of pandas
        column = column.astype(object).where(column.notna(), None)
    values = column.tolist() if hasattr(column, "tolist") else list(column)
    return [None if _is_missing(value) else value for value in values]


def with_columns(batch: Any, values: Mapping[str, list[Any]], types: Mapping[str, str]) -> Any:
    """
    A copy of a batch with more columns.

    Args:
        batch (`dict` or `DataFrame`): where a column is a numpy array, the new ones are.
        values (`dict[str, list]`): none missing: a type that follows from what is there would change between batches.
        types (`dict[str, str]`): of each, `"str"`, `"int64"` or `"bool"`.
    """
    if _is_frame(batch):
        column = sys.modules["pandas"].Series
        return batch.assign(**{name: column(given, batch.index, types[name]) for name, given in values.items()})
    # A batch of `datasets` is no dict, and stays what it is: it reads its columns from disk when they are asked for.
    is_numpy = isinstance(batch, dict) and any(isinstance(column, np.ndarray) for column in batch.values())
    made = copy.copy(batch)
    made.update({name: _array(given, types[name]) for name, given in values.items()} if is_numpy else values)
    return made


def _is_missing(value: Any) -> bool:
    """Whether a value stands for none: pandas' `NA` and `NaT`, and NaN of any type."""
    pandas = sys.modules.get("pandas")
    if pandas is not None and value is pandas.NA:
        return True
    is_other = False if hasattr(value, "__len__") else value != value
    return isinstance(is_other, (bool, np.bool_)) and bool(is_other)


def _array(values: list[Any], kind: str) -> np.ndarray[Any, Any]:
    # Not numpy's own texts, which lose zeros at their ends; but of no values only their type says that they are texts.
    return np.array(values, dtype=object if values and kind == "str" else kind)


def _is_frame(batch: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(batch, pandas.DataFrame)
