"""The operations in plain PyTorch: the definition that every other backend is tested against.

They run on any device and in any float dtype; scores and softmax are float32. `attend` gathers only
the selected tokens. Pages may hold anything (NaN too) where no token was written. They may also be
on another device than the operands (an offloaded layer); the tokens are then gathered there block
by block and copied.
"""

from keyhole.kernels.reference.attention import (
    attend,
    attend_and_score,
    attend_block,
    attend_weights,
    block_sparse_prefill,
    head_scores,
    over_heads,
    prefill,
    sparse_prefill,
    weights_over,
)
from keyhole.kernels.reference.layers import (
    apply_rope,
    apply_rope_and_append,
    linear,
    linear_add,
    norm_linears,
    norm_swiglu,
    rms_norm,
    shift_rope,
)
from keyhole.kernels.reference.packed import (
    BlockWeight,
    PackedWeight,
    join_codes,
    pack,
    packed_linear,
    unpack,
)
from keyhole.kernels.reference.page_selection import (
    bound_scores,
    page_bounds,
    recent_indices,
    spread_scores,
    summary_scores,
    top_k,
    top_p,
)
from keyhole.kernels.reference.pages import (
    append,
    gather_rows,
    gather_tokens,
    gathered,
    load_missing,
    members,
)
from keyhole.kernels.reference.quantised import dequantised, is_quantised, quantise, row_dim
