"""The collectives of FSDP units, whose failures are named in a plain `loss.backward()` too.

Autograd calls them from hooks of `fully_shard`, and nothing of autopar is between these and the caller.
"""

from autopar._torch import FSDPParamGroup
from autopar.runtime.ranks.failures import naming_collectives

_GATHERING = "gathering the parameters of an FSDP unit"
_REDUCING = "reducing the gradients of an FSDP unit"


class NamedParamGroup(FSDPParamGroup):
    """torch's parameters of one FSDP unit; raises RankFailedError where it cannot gather or reduce them.

    A unit gets it in place of its own class (`fsdp.name_failures`): `fully_shard` has no argument for that. The names
    of the methods are those of torch 2.11 to 2.13.
    """

    @naming_collectives(_GATHERING)
    def unshard(self, async_op: bool = False) -> None:
        """Start gathering the parameters."""
        super().unshard(async_op)

    @naming_collectives(_GATHERING)
    def wait_for_unshard(self) -> None:
        """Wait until they are gathered."""
        super().wait_for_unshard()

    @naming_collectives(_REDUCING)
    def post_backward(self, *args: object) -> None:
        """Reduce the gradients: on the axes that split the parameters, then on those that repeat them."""
        super().post_backward(*args)

    @naming_collectives(_REDUCING)
    def finalize_backward(self) -> None:
        """Wait for reductions."""
        super().finalize_backward()  # type: ignore[no-untyped-call]
