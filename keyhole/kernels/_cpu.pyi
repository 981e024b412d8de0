"""The C++ extension: addresses and sizes in, nothing out (csrc/module.cpp)."""

from collections.abc import Sequence

_Strides = Sequence[int]

def paths() -> list[str]: ...
def use(name: str) -> None: ...
def workspace_bytes() -> int: ...
def attend(
    dtype: int,
    sizes: Sequence[int],
    query: int,
    keys: int,
    key_strides: _Strides,
    values: int,
    value_strides: _Strides,
    table: int,
    table_stride: int,
    num_pages: int,
    lengths: int,
    indices: int,
    counts: int,
    selection: Sequence[int],
    window: int,
    scale: float,
    softcap: float,
    sinks: int,
    requests: Sequence[tuple[bool, int, int]],
    weights: int,
    out: int,
) -> None: ...
def prefill(
    dtype: int,
    sizes: Sequence[int],
    query: int,
    keys: int,
    key_strides: _Strides,
    values: int,
    value_strides: _Strides,
    table: tuple[int, int],
    start: int,
    window: int,
    chosen: tuple[int, int, int],
    scale: float,
    softcap: float,
    sinks: int,
    out: int,
) -> None: ...
def append(
    itemsize: int,
    num_tokens: int,
    num_kv_heads: int,
    dim: int,
    page_size: int,
    pages: int,
    strides: _Strides,
    rows: int,
    row_stride: int,
    row_head_stride: int,
    slots: int,
) -> None: ...
def exchange(
    itemsize: int,
    sizes: Sequence[int],
    entries: int,
    keys: int,
    key_strides: _Strides,
    values: int,
    value_strides: _Strides,
    from_keys: int,
    from_key_strides: _Strides,
    from_values: int,
    from_value_strides: _Strides,
    table: int,
    table_stride: int,
    num_pages: int,
    lengths: int,
    rows: int,
    indices: int,
    selection: Sequence[int],
    used: int,
    counts: int,
    moved: int,
) -> None: ...
def page_bounds(
    dtype: int,
    num_pages: int,
    num_kv_heads: int,
    dim: int,
    keys: int,
    strides: _Strides,
    low: int,
    high: int,
    pages: int,
    filled: int,
) -> None: ...
def bound_scores(
    dtype: int,
    sizes: Sequence[int],
    query: int,
    low: int,
    high: int,
    table: int,
    table_stride: int,
    out: int,
) -> None: ...
def linear(
    dtype: int,
    num_tokens: int,
    num_inputs: int,
    num_outputs: int,
    x: int,
    x_stride: int,
    weight: int,
    bias: int,
    out: int,
) -> None: ...
def top_indices(
    sizes: Sequence[int],
    k: int,
    first: int,
    last: int,
    scores: int,
    valid: int,
    indices: int,
    counts: int,
) -> None: ...
