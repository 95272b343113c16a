"""Models of `transformers` with the selective state spaces of Mamba (Gu and Dao 2023): Mamba, Falcon Mamba, Jamba and
Zamba. Without its kernels `transformers` computes one place after the other; here they are one op."""

from torch import Tensor
from torch.nn.functional import silu, softplus

from passes.scans.selective import selective_scan


def mamba_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The results, and the last state where it is asked for, as `mamba_selective_scan` of `transformers` has them.

    hidden_states, dt, the gate z, and the results: [batch, channels, length]; A: [channels, width]; B, C: [batch,
    width, length]; D, delta_bias: [channels]; a state: [batch, channels, width].
    """
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    found, last = selective_scan(hidden_states, softplus(dt) if delta_softplus else dt, A, B, C)
    if D is not None:
        found = found + hidden_states * D[None, :, None]
    if z is not None:
        found = found * silu(z)
    return (found, last) if return_last_state else found
